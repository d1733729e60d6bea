"""Which blocks of a memory exist: a first-fit allocator with its table in shared memory, for arenas and for slabs.

The memory may be the segment's own data (an arena) or lie elsewhere, on a device (a slab): the table only counts in
bytes from `base` on. Each block has a generation number that grows by one at every allocation and every return; odd
means taken. Whoever has the segment mapped can tell a stale handle from a good one without asking the owner.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Self

from ...errors import LifecycleError, OutOfMemory, StaleHandle
from .extents import Extents
from .handles import Handle, dtype_name
from .segment import Segment
from .words import Words

SLAB = b"slab1\0\0\0"  # where the data of a segment begins with it, its blocks lie on a device


@dataclass(frozen=True, slots=True)
class Block:
    """An allocated block: `offset` in bytes (arena: from the start of the segment; slab: of the memory)."""

    index: int
    generation: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """How full an arena, or a slab, is. Sizes in bytes."""

    size: int  # bytes for data
    used: int
    blocks: int
    allocations: int
    refused: int  # allocations that found no room
    leases: int
    leaked: int  # leases that were collected without release
    tenure: int


class BlockTable:
    """The blocks of `size` bytes that begin at `base`; `what` ("arena", "slab") is what messages call it."""

    def __init__(self, segment: Segment, base: int, size: int, what: str) -> None:
        self.segment, self.base, self.size = segment, base, size
        self.what = f"{what} {segment.name!r}"
        g = segment.geometry
        buffer = segment.buffer
        self._generations = Words(buffer, g.table, g.blocks, "arena.generation")
        self._offsets = Words(buffer, g.table + 8 * g.blocks, g.blocks, "arena.offset")
        self._sizes = Words(buffer, g.table + 16 * g.blocks, g.blocks, "arena.size")
        self._extents = Extents(size)
        self._lock = threading.Lock()
        self.forgotten: deque[Block] = deque()  # filled by the garbage collector, emptied under the lock
        self._blocks: dict[int, Block] = {}  # the owner's: those that exist
        self._free = list(range(g.blocks - 1, -1, -1))
        self.leases = 0
        self._allocations = self._refused = self._leaked = 0

    def allocate(self, size: int) -> Block:
        """A block that stays until `free`. Errors: OutOfMemory with figures, LifecycleError."""
        self.check_open(owner=True)
        with self._lock:
            self._collect()
            start = self._extents.allocate(size) if self._free else None
            if start is None:
                self._refused += 1
                s = self._extents
                raise OutOfMemory(
                    f"{self.what}: {size:,} bytes asked; {s.used:,} of {s.size:,} are in use, the largest "
                    f"free piece has {s.largest:,}, {len(self._free)} of {len(self._generations)} block entries are free"
                )
            index = self._free.pop()
            block = Block(index, self._generations[index] + 1, self.base + start, size)
            self._publish(block)
            self._allocations += 1
            return block

    def free(self, block: Block) -> None:
        """Give a block back. Errors: StaleHandle where that was done already."""
        self.check_open(owner=True)
        with self._lock:
            self._give_back(block)

    def existing(self) -> list[Block]:
        """The blocks that the owner has allocated."""
        return [block for _, block in sorted(self._blocks.items())]

    def checked(self, handle: Handle) -> Block:
        """The block that a handle names. Errors: StaleHandle."""
        g = self.segment.geometry
        if handle.run != g.run:
            raise StaleHandle(f"the handle belongs to another life of an arena than {self.what}, which was made anew")
        if (
            handle.block >= g.blocks
            or self._generations[handle.block] != handle.generation
            or not handle.generation & 1
        ):
            raise StaleHandle(f"{self.what}: block {handle.block} of generation {handle.generation} was given back")
        block = self._block(handle.block)
        inside = handle.offset >= 0 and handle.offset + handle.nbytes <= block.size
        if not inside or block.offset < self.base or block.offset + block.size > self.base + self.size:
            raise StaleHandle(f"{self.what}: the handle leaves its block of {block.size} bytes")
        return block

    def statistics(self) -> ArenaStatistics:
        """A snapshot; the owner first takes back what leases that were forgotten held."""
        with self._lock:
            if self.segment.owner and not self.segment.closed:
                self._collect()
            s = self._extents
            return ArenaStatistics(
                size=s.size,
                used=s.used,
                blocks=len(self._generations) - len(self._free) if self.segment.owner else 0,
                allocations=self._allocations,
                refused=self._refused,
                leases=self.leases,
                leaked=self._leaked,
                tenure=0 if self.segment.closed else self.segment.tenure,
            )

    def check_open(self, *, owner: bool = False) -> None:
        """Errors: LifecycleError after `close`, or where only the owner may."""
        if self.segment.closed:
            raise LifecycleError(f"{self.what} is closed")
        if owner and not self.segment.owner:
            raise LifecycleError(f"{self.what}: only its owner allocates and frees; this process attached")

    def close(self) -> None:
        """Let go of the views of the segment."""
        for words in (self._generations, self._offsets, self._sizes):
            words.release()

    # -- inside

    def _block(self, index: int) -> Block:
        return Block(index, self._generations[index], self._offsets[index], self._sizes[index])

    def _publish(self, block: Block) -> None:
        index = block.index
        self._offsets.store(index, block.offset)
        self._sizes.store(index, block.size)
        self._generations.store(index, block.generation)  # from here on the block exists
        self._blocks[index] = block

    def _give_back(self, block: Block) -> None:
        if self._blocks.get(block.index) != block:
            raise StaleHandle(f"{self.what}: block {block.index} was already given back")
        del self._blocks[block.index]
        self._generations.store(block.index, block.generation + 1)
        self._extents.free(block.offset - self.base, block.size)
        self._free.append(block.index)

    def _collect(self) -> None:
        while self.forgotten:
            self._give_back(self.forgotten.popleft())
            self._leaked += 1
            self.leases -= 1


class BlockLease:
    """The right to write a block until `release`, the end of the `with`, or `detach`."""

    def __init__(self, table: BlockTable, block: Block) -> None:
        self.block = block
        self._table = table
        self._finalizer = weakref.finalize(self, table.forgotten.append, block)
        self._finalizer.atexit = False
        table.leases += 1

    def handle(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> Handle:
        """What names an array of this dtype and shape at `offset` bytes into the block, for whoever is to look at it. Errors:
        ValueError where it does not lie in the block; LifecycleError after the release."""
        self._check()
        run = self._table.segment.geometry.run
        handle = Handle(run, self.block.index, self.block.generation, offset, dtype_name(dtype), tuple(shape))
        if offset < 0 or offset + handle.nbytes > self.block.size:
            raise ValueError(f"{dtype} {list(shape)} at {offset} does not lie in a block of {self.block.size} bytes")
        return handle

    def detach(self) -> Block:
        """Leave the block where it is; whoever takes it over calls `free(block)`."""
        self._check()
        self._finalizer.detach()
        self._table.leases -= 1
        return self.block

    def release(self) -> None:
        """Give the block back. Twice is fine."""
        if self._finalizer.detach() is not None:
            self._table.leases -= 1
            if not self._table.segment.closed:
                self._table.free(self.block)

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise LifecycleError(f"the lease on block {self.block.index} was given back")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
