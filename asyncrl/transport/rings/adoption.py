"""What a new owner finds in a segment: the rings that are whole, and what of the rest is damaged.

Nothing is removed here. A ring whose words contradict each other is set aside: its block stays, under another tag, and with it
the segment, until somebody runs `asyncrl shm clear NAME --drop-records`. The other rings are not touched by that. Rings say
themselves what they are, so where the block table was written over they are looked for in the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from ...errors import TransportError
from ..memory.arena import Arena, Block
from .link import Link
from .ring import ATTACHED, CLOSED, MAGIC, TAG, RingMemory, size_of, who_matches

ASIDE = TAG ^ 0xFFFFFFFF  # the tag of a ring that was set aside


def contradiction(memory: RingMemory) -> str:
    """What in the words of a ring cannot be, or nothing. Its producer may put meanwhile; no owner may release."""
    head = memory.head[0]
    sequences = np.array(memory.sequences.view)
    later, latest = memory.head[0], int(sequences.max())
    released = np.array(memory.released.view)
    slots, one = np.arange(memory.slots, dtype=np.uint64), np.uint64(1)
    if not head <= latest <= later + 1:
        return f"its head says {head} records, its latest has number {latest}"
    for words in (sequences, released):
        if bool(((words != 0) & ((words - one) % np.uint64(memory.slots) != slots)).any()):
            return "a record lies where its number does not belong"
    if bool((released > sequences).any()):
        return "a record is released that was never put"
    unwritten = (sequences == 0) & (np.array(memory.sizes.view) != 0)
    if memory.unpublished():  # its producer died in a put
        unwritten[(memory.state[3] - 1) % memory.slots] = False
    if bool(unwritten.any()):
        return "a record has lost its number"
    begun = int(np.bitwise_xor.reduce(released)) ^ memory.releases[0]
    if memory.releases[1] and begun and not bool((released ^ sequences == np.uint64(begun)).any()):
        return "records are marked as released that were not"
    if memory.state[0] not in (ATTACHED, CLOSED):
        return f"its state is {memory.state[0]}"
    return "" if who_matches(memory) else "the process in its header is not the one that it was made for"


def adopted(arena: Arena, say: Callable[[str], None]) -> list[Link]:
    """The rings that are whole. `say` hears of everything else."""
    links: list[Link] = []
    doubtful: list[tuple[Block, str]] = []
    table = arena.table
    if table.unplaced:
        say(f"{arena.segment.path}: {len(table.unplaced)} entries of its block table were written over")
    for block in arena.blocks():
        if block.tag == ASIDE:
            say(_line(arena, block, "it was set aside by an earlier owner"))
            continue
        try:
            link = whole(arena, block)
        except TransportError as error:
            doubtful.append((block, str(error)))
            continue
        if block.tag != TAG:
            say(f"{arena.segment.path}: the tag of block {block.index} was written over; it is a ring, and goes on")
            link.block = table.retag(block, TAG)
        links.append(link)
    if doubtful or table.unplaced or any(_holds_records(arena, block) for block in table.freed()):
        links += _found(arena, links, doubtful, say)
    for block, reason in doubtful:
        set_aside(arena, block, reason, say)
    table.retire()
    return links


def whole(arena: Arena, block: Block) -> Link:
    """The ring in this block. Errors: TransportError where it is damaged."""
    link = Link.adopt(arena, block)
    reason = contradiction(link.memory)
    if reason:
        link.memory.release_views()
        raise TransportError(reason)
    released = int(np.bitwise_xor.reduce(np.array(link.memory.released.view)))
    if link.memory.releases[0] != released:  # the last owner was killed in a release, which never was
        link.memory.releases.store(0, released)
    return link


def set_aside(arena: Arena, block: Block, reason: str, say: Callable[[str], None]) -> None:
    """Keep a damaged ring where it lies, for people to look at."""
    say(_line(arena, arena.table.retag(block, ASIDE), reason))


def _line(arena: Arena, block: Block, reason: str) -> str:
    producer = bytes(arena.bytes_of(block)[32:48]).hex()
    return (
        f"{arena.segment.path}: the ring of producer {producer} (block {block.index}, {block.size:,} bytes at {block.offset:,}) is "
        f"damaged and set aside: {reason}. The other rings go on; this one is kept until "
        f"`asyncrl shm clear {arena.segment.name} --drop-records`"
    )


def _found(
    arena: Arena, links: list[Link], doubtful: list[tuple[Block, str]], say: Callable[[str], None]
) -> list[Link]:
    """Rings with records that no entry of the table leads to. Entries that overlap one are dropped from `doubtful`."""
    geometry, table = arena.segment.geometry, arena.table
    end = geometry.data + (geometry.total - geometry.data) // 64 * 64
    starts = np.frombuffer(arena.segment.buffer[geometry.data : end], np.uint64)[::8]
    found: list[Link] = []
    for place in np.flatnonzero(starts == np.uint64(MAGIC)).tolist():
        at = geometry.data + 64 * place
        size = size_of(arena.segment.buffer[at:])
        known = [link.block for link in links + found]
        if not size or any(_overlap(at, size, block) for block in known):
            continue
        if not _holds_records(arena, Block(0, 0, at, size, TAG)):
            continue
        for pair in [pair for pair in doubtful if _overlap(at, size, pair[0])]:
            doubtful.remove(pair)
            table.unplace(pair[0])
        block = table.claim(at, size, TAG)
        if block is not None:
            say(
                f"{arena.segment.path}: no entry of its block table led to the ring at {at:,}; it was found, and goes on"
            )
            found.append(whole(arena, block))
    return found


def _overlap(at: int, size: int, block: Block) -> bool:
    return at < block.offset + block.size and block.offset < at + size


def _holds_records(arena: Arena, block: Block) -> bool:
    try:
        memory = RingMemory(arena.bytes_of(block))
    except (TransportError, struct.error):
        return False
    records = not contradiction(memory) and bool(memory.live())
    memory.release_views()
    return records
