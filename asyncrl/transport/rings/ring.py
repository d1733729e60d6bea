"""One producer's ring in shared memory: descriptors in order, payload extents that are freed in any order.

A ring is one block of an arena, written by one producer and one consumer, without locks:

    0     magic, version, slots, payload offset, payload bytes, producer (16 bytes), CRC32 of these
    56    CRC32 of pid and start time + 2**32 (0: made by an earlier version)
    128   head       producer   positions given out; a record is accepted by the store that raises the head over it
    192   read       consumer   positions looked at (for people; a new owner does not rely on it)
    200   releases   consumer   XOR of `released`, stored before it;  1 (0: made by an earlier version)
    256   state      producer   1 attached, 2 closed in good order;  pid, start time;  position being written + 1
    320   sequences  producer   [slots] position + 1 of the record whose descriptor lies here
          released   consumer   [slots] the sequence that was given back
          offsets, sizes, checks  producer   [slots] extent in the payload; CRC32 of (sequence, offset, size)
          payload

A position belongs to slot `position mod slots`. A slot is live while its sequence is below the head's and not released.
Positions whose slot is still live are passed over, so a group that is trained late holds up nothing but its own bytes.
Positions are 64-bit and only grow; they do not wrap in the life of the universe.

The order of a put, each a store that may be the last before a kill: `writing`, payload, descriptor, sequence, head. Until
the head the slot is not live, so nothing half-written can be taken for a record; from the head on the record is whole.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...errors import RecordError, RecordTooLarge, TransportError
from ...records.read import Record, read
from ...records.write import Plan
from ..memory import words
from ..memory.extents import Extents
from ..memory.words import Words, fault

MAGIC = int.from_bytes(b"arlring\0", "little")
VERSION = 1
TAG = 0x52494E47  # of the arena's blocks that are rings
ATTACHED, CLOSED = 1, 2
_STATIC = struct.Struct("<QIIQQ16s")
_CRC_AT = _STATIC.size
_WHO_AT, _RELEASES_AT = 56, 200
_HEAD_AT, _READ_AT, _STATE_AT, _ARRAYS_AT = 128, 192, 256, 320
_CHECK = struct.Struct("<QQQ")
_FEW = 8  # slots that are looked at sooner one by one than all at once


def block_bytes(slots: int, payload: int) -> int:
    """Bytes of a block that holds a ring of `slots` descriptors and `payload` bytes."""
    return _payload_at(slots) + payload


def _payload_at(slots: int) -> int:
    return (_ARRAYS_AT + 5 * 8 * slots + 4095) & -4096


def format_ring(buffer: memoryview, slots: int, producer: bytes, pid: int, started: int) -> None:
    """Make `buffer` an empty ring for the producer process `pid`."""
    payload_at = _payload_at(slots)
    buffer[:payload_at] = bytes(payload_at)
    static = _STATIC.pack(MAGIC, VERSION, slots, payload_at, len(buffer) - payload_at, producer)
    buffer[: _CRC_AT + 4] = static + zlib.crc32(static).to_bytes(4, "little")
    struct.pack_into("<QQQ", buffer, _STATE_AT, ATTACHED, pid, started)
    struct.pack_into("<Q", buffer, _WHO_AT, _who(pid, started))
    struct.pack_into("<QQ", buffer, _RELEASES_AT, 0, 1)


def _who(pid: int, started: int) -> int:
    return zlib.crc32(struct.pack("<QQ", pid, started)) + (1 << 32)


def size_of(buffer: memoryview) -> int:
    """Bytes of the ring that begins here; 0 where none does."""
    if len(buffer) < _ARRAYS_AT or zlib.crc32(buffer[:_CRC_AT]) != int.from_bytes(
        buffer[_CRC_AT : _CRC_AT + 4], "little"
    ):
        return 0
    magic, _, _, payload_at, payload, _ = _STATIC.unpack_from(buffer)
    size: int = payload_at + payload
    return size if magic == MAGIC and size <= len(buffer) else 0


class RingMemory:
    """The words of a ring. Errors: TransportError for a block that is none."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _ARRAYS_AT:
            raise TransportError(f"a block of {len(buffer)} bytes is no ring")
        magic, version, slots, payload_at, payload, producer = _STATIC.unpack_from(buffer)
        crc = int.from_bytes(buffer[_CRC_AT : _CRC_AT + 4], "little")
        good = magic == MAGIC and version == VERSION and zlib.crc32(buffer[:_CRC_AT]) == crc
        if not good or payload_at != _payload_at(slots) or payload_at + payload != len(buffer):
            raise TransportError(f"a block of {len(buffer)} bytes is no ring of version {VERSION}, or damaged")
        self.who: int = int.from_bytes(buffer[_WHO_AT : _WHO_AT + 8], "little")
        self.slots: int = slots
        self.payload_at: int = payload_at
        self.producer: bytes = producer
        self.payload = buffer[payload_at:]
        self.head = Words(buffer, _HEAD_AT, 1, "ring.head")
        self.read = Words(buffer, _READ_AT, 1, "ring.read")
        self.releases = Words(buffer, _RELEASES_AT, 2, "ring.releases")
        self.state = Words(buffer, _STATE_AT, 4, "ring.state")
        at = _ARRAYS_AT
        self.sequences = Words(buffer, at, slots, "ring.sequence")
        self.released = Words(buffer, at + 8 * slots, slots, "ring.released")
        self.offsets = Words(buffer, at + 16 * slots, slots, "ring.offset")
        self.sizes = Words(buffer, at + 24 * slots, slots, "ring.size")
        self.checks = Words(buffer, at + 32 * slots, slots, "ring.check")

    def live(self) -> list[int]:
        """The slots of accepted records that were not released, oldest first."""
        head = self.head[0]
        sequences = self.sequences.view.tolist()
        released = self.released.view.tolist()
        found = [(s, slot) for slot, s in enumerate(sequences) if s != released[slot] and s <= head]
        return [slot for _, slot in sorted(found)]

    def unpublished(self) -> bool:
        """The producer began a record that was never accepted."""
        return self.state[3] > self.head[0]

    def release_views(self) -> None:
        """Let go of the memory, so that its mapping can close."""
        for name in ("head", "read", "releases", "state", "sequences", "released", "offsets", "sizes", "checks"):
            getattr(self, name).release()
        self.payload.release()


def who_matches(memory: RingMemory) -> bool:
    """The producer process in the ring is the one that it was made for, as far as can be told."""
    return not memory.who or memory.who == _who(memory.state[1], memory.state[2])


class RingWriter:
    """The producer's side. Not thread-safe: its owner locks."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self._extents = Extents(len(memory.payload))
        self._held: dict[int, tuple[int, int]] = {}  # slot -> extent
        self._latest = -1  # the slot that was filled last
        self._busy = bytearray(memory.slots)  # 1 where the slot is held
        self._all_busy = np.frombuffer(self._busy, bool)
        self._sequences = np.frombuffer(memory.sequences.view, np.uint64)
        self._released = np.frombuffer(memory.released.view, np.uint64)

    @property
    def capacity(self) -> int:
        """Bytes of payload."""
        return self._extents.size

    def used(self) -> tuple[int, int]:
        """(records, bytes) that are accepted and not released."""
        live = self._all_busy & (self._sequences != self._released)
        return int(live.sum()), sum(self._held.get(slot, (0, 0))[1] for slot in np.flatnonzero(live).tolist())

    def try_put(self, plan: Plan) -> bool:
        """Write and publish; False where there is no room now. Errors: RecordTooLarge where there never will be."""
        if plan.size > self._extents.size:
            raise RecordTooLarge(
                f"group {plan.draft.group}: a record of {plan.size:,} bytes; a ring holds {self._extents.size:,}. Make the "
                "owner's rings larger, or put the members of the group in several records"
            )
        try:
            return self._put(plan)
        except BaseException:  # Ctrl-C comes anywhere
            self._learn()
            raise

    def _put(self, plan: Plan) -> bool:
        memory, held = self.memory, self._held
        start = self._room(plan.size)
        if start is None:
            return False
        slots, position = memory.slots, memory.head.view[0]
        if position % slots in held:
            self._reclaim()
            while position % slots in held:
                position += 1
        slot, sequence = position % slots, position + 1
        self._publish(plan, slot, start, sequence)
        held[slot] = (start, plan.size)
        self._latest = slot
        self._busy[slot] = 1
        return True

    def _learn(self) -> None:
        """What is held, from the words in shared memory: they alone say what was accepted and not released."""
        memory = self.memory
        self._extents = Extents(len(memory.payload))
        self._held = {slot: (memory.offsets[slot], memory.sizes[slot]) for slot in memory.live()}
        for start, size in self._held.values():
            self._extents.reserve(start, size)
        self._busy[:] = bytes(slot in self._held for slot in range(memory.slots))

    def close(self) -> None:
        """Nothing will be put any more."""
        self.memory.state.store(0, CLOSED)
        self.release_views()

    def release_views(self) -> None:
        """Let go of the memory; nothing can be written afterwards."""
        del self._sequences, self._released
        self.memory.release_views()

    def _publish(self, plan: Plan, slot: int, start: int, sequence: int) -> None:
        memory, size, hook = self.memory, plan.size, words.FAULT
        memory.state.store(3, sequence)
        into = memory.payload[start : start + size]
        plan.write(into, sequence=sequence, fault=hook)
        memory.offsets.store(slot, start)
        memory.sizes.store(slot, size)
        memory.checks.store(slot, zlib.crc32(_CHECK.pack(sequence, start, size)))
        memory.sequences.store(slot, sequence)
        memory.head.store(0, sequence)  # accepted

    def _room(self, size: int) -> int | None:
        """Bytes that nobody uses: best those of the latest record, which are still in the cache."""
        held, latest, memory = self._held, self._latest, self.memory
        if latest in held and memory.sequences.view[latest] == memory.released.view[latest]:
            start, bytes_ = held.pop(latest)
            self._busy[latest] = 0
            if bytes_ == size:
                return start
            self._extents.free(start, bytes_)
        self._reclaim()
        return self._extents.allocate(size) if len(held) < memory.slots else None

    def _reclaim(self) -> None:
        held, free = self._held, self._extents.free
        slots: Iterable[int] = tuple(held)
        if len(held) > _FEW:
            slots = np.flatnonzero(self._all_busy & (self._sequences == self._released)).tolist()
        sequences, released = self.memory.sequences.view, self.memory.released.view
        for slot in slots:
            if sequences[slot] == released[slot]:
                free(*held.pop(slot))
                self._busy[slot] = 0


@dataclass(slots=True)
class RingCounts:
    """What the consumer of a ring found in it."""

    records: int = 0
    torn: int = 0  # by `take`
    lost: int = 0  # positions that hold no descriptor at all, and a head that went back
    passed_over: int = 0  # positions whose slot was still live


class RingReader:
    """The consumer's side. A new owner starts with `replay`, then `poll`."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.counts = RingCounts()
        self.outstanding = 0  # records found and not released
        self._next = 0

    def replay(self) -> list[tuple[int, int]]:
        """(slot, sequence) of every accepted record that no owner released, oldest first."""
        self._next = self.memory.head[0]
        live = [(slot, self.memory.sequences[slot]) for slot in self.memory.live()]
        # The head may have grown in between: `poll` will see those positions, so they are left to it.
        found = [(slot, sequence) for slot, sequence in live if sequence <= self._next]
        self.outstanding += len(found)
        return found

    def poll(self) -> list[tuple[int, int]]:
        """(slot, sequence) of what was accepted since the last look."""
        memory, head, first = self.memory, self.memory.head.view[0], self._next
        if head > first + memory.slots**2:  # each of the slots that a put may fill can have passed over all others
            self.counts.lost += head - first
            first = head
        if head < first:
            self.counts.lost += 1
            return []
        found = []
        for position in range(first, head):
            slot = position % memory.slots
            sequence = memory.sequences.view[slot]
            if sequence == position + 1:
                found.append((slot, sequence))
            elif sequence and (sequence - 1) % memory.slots == slot:
                # An earlier record was live here when this position was given out (it may be gone by now, and a later
                # one here). A record put at this very position would still be here: it leaves by our release only.
                self.counts.passed_over += 1
            else:
                self.counts.lost += 1
        self._next = head
        self.outstanding += len(found)
        if memory.read.view[0] != head:
            memory.read.store(0, head)
        return found

    def take(self, slot: int, sequence: int) -> Record:
        """The record, as views of the payload. Errors: RecordError, after which `release` is all that is left to do."""
        memory, payload = self.memory, self.memory.payload
        start, size = memory.offsets.view[slot], memory.sizes.view[slot]
        check = zlib.crc32(_CHECK.pack(sequence, start, size))
        if check != memory.checks.view[slot] or start + size > len(payload):
            self.counts.torn += 1
            raise RecordError(f"the descriptor of record {sequence} is damaged")
        try:
            record = read(payload[start : start + size], sequence=sequence)
        except RecordError:
            self.counts.torn += 1
            raise
        self.counts.records += 1
        return record

    def release(self, slot: int, sequence: int) -> None:
        """The producer may use slot and payload again."""
        fault("ring.release")
        memory = self.memory
        # First, so that a word of `released` that is ahead of it was never stored by an owner.
        memory.releases.store(0, memory.releases.view[0] ^ memory.released.view[slot] ^ sequence)
        memory.released.store(slot, sequence)
        self.outstanding -= 1
