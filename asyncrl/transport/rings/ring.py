"""One producer's ring in shared memory: descriptors in order, payload that is freed in any order.

A ring is the data of one segment, written by one producer and one consumer, without locks:

    0     magic, version, slots, payload offset, payload bytes, producer (16 bytes), its pid and start time, CRC32 of these
    128   head       producer   positions given out; a record is accepted by the store that raises the head over it
    192   releases   consumer   XOR of `released`, stored before it;  policy version + 1 (0: not known)
    256   state      producer   1 attached, 2 closed in good order;  position being written + 1
    320   sequences  producer   [slots] position + 1 of the record whose descriptor lies here
          released   consumer   [slots] the sequence that was given back
          offsets, sizes, checks  producer   [slots] place in the payload; CRC32 of (sequence, offset, size)
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

import numpy as np

from ...errors import RecordError, RecordTooLarge, TransportError
from ...records.read import Record, read
from ...records.write import Plan
from ..memory import words
from ..memory.segment import first_gap
from ..memory.words import Words, fault

MAGIC = int.from_bytes(b"arlring\0", "little")
VERSION = 2
ATTACHED, CLOSED = 1, 2
_STATIC = struct.Struct("<QIIQQ16sQQ")
_HEAD_AT, _OWNER_AT, _STATE_AT, _ARRAYS_AT = 128, 192, 256, 320
_CHECK = struct.Struct("<QQQ")


def ring_bytes(slots: int, payload: int) -> int:
    """Bytes of a ring of `slots` descriptors and `payload` bytes."""
    return _payload_at(slots) + payload


def _payload_at(slots: int) -> int:
    return (_ARRAYS_AT + 5 * 8 * slots + 4095) & -4096


def format_ring(buffer: memoryview, slots: int, producer: bytes, pid: int, started: int) -> None:
    """Make `buffer`, which holds zeros, an empty ring for the producer process `pid`, which began at clock tick `started`."""
    payload_at = _payload_at(slots)
    static = _STATIC.pack(MAGIC, VERSION, slots, payload_at, len(buffer) - payload_at, producer, pid, started)
    static += zlib.crc32(static).to_bytes(4, "little")
    buffer[: len(static)] = static
    struct.pack_into("<Q", buffer, _STATE_AT, ATTACHED)


class RingMemory:
    """The words of a ring. Errors: TransportError for bytes that are none."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _ARRAYS_AT:
            raise TransportError(f"{len(buffer)} bytes are no ring")
        static, crc = buffer[: _STATIC.size], buffer[_STATIC.size : _STATIC.size + 4]
        magic, version, slots, payload_at, payload, producer, pid, started = _STATIC.unpack(static)
        good = magic == MAGIC and version == VERSION and zlib.crc32(static) == int.from_bytes(crc, "little")
        if not good or payload_at != _payload_at(slots) or payload_at + payload > len(buffer):
            raise TransportError(f"these {len(buffer)} bytes are no ring of version {VERSION}, or damaged")
        self.slots: int = slots
        self.producer: bytes = producer
        self.pid: int = pid
        self.started: int = started
        self.payload = buffer[payload_at : payload_at + payload]
        self.head = Words(buffer, _HEAD_AT, 1, "ring.head")
        self.owner = Words(buffer, _OWNER_AT, 2, "ring.owner")
        self.state = Words(buffer, _STATE_AT, 2, "ring.state")
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
        return self.state[1] > self.head[0]

    def contradiction(self) -> str:
        """What in the words of this ring cannot be, or "". Its producer may put meanwhile; no owner may release."""
        head = self.head[0]
        sequences = np.array(self.sequences.view)
        later, latest = self.head[0], int(sequences.max())
        released = np.array(self.released.view)
        slots, one = np.arange(self.slots, dtype=np.uint64), np.uint64(1)
        if not head <= latest <= later + 1:
            return f"its head says {head} records, its latest has number {latest}"
        for numbers in (sequences, released):
            if bool(((numbers != 0) & ((numbers - one) % np.uint64(self.slots) != slots)).any()):
                return "a record lies where its number does not belong"
        if bool((released > sequences).any()):
            return "a record is released that was never put"
        unwritten = (sequences == 0) & (np.array(self.sizes.view) != 0)
        if self.unpublished():
            unwritten[(self.state[1] - 1) % self.slots] = False  # its producer died in this put
        if bool(unwritten.any()):
            return "a record has lost its number"
        begun = int(np.bitwise_xor.reduce(released)) ^ self.owner[0]
        if begun and not bool((released ^ sequences == np.uint64(begun)).any()):
            return "records are marked as released that were not"
        return "" if self.state[0] in (ATTACHED, CLOSED) else f"its state is {self.state[0]}"

    def forget_begun_release(self) -> None:
        """For a new owner: the last one was killed between the two stores of a release, which never was."""
        released = int(np.bitwise_xor.reduce(np.array(self.released.view)))
        if self.owner[0] != released:
            self.owner.store(0, released)

    def release_views(self) -> None:
        """Let go of the memory, so that its mapping can close."""
        for name in ("head", "owner", "state", "sequences", "released", "offsets", "sizes", "checks"):
            getattr(self, name).release()
        self.payload.release()


class RingWriter:
    """The producer's side. Not thread-safe: its owner locks."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.capacity = len(memory.payload)
        # Slot -> (sequence, start, size) of each record that was accepted and not released. Kept here and not read from the ring at
        # each put, so that whoever writes over the words of the ring does not make this writer write over a record.
        self._held: dict[int, tuple[int, int, int]] = {}
        self._read_held()

    def used(self) -> tuple[int, int]:
        """(records, bytes) that are accepted and not released."""
        released = self.memory.released.view
        sizes = [size for slot, (sequence, _, size) in tuple(self._held.items()) if released[slot] != sequence]
        return len(sizes), sum(sizes)

    def try_put(self, plan: Plan) -> bool:
        """Write and publish; False where there is no room now. Errors: RecordTooLarge where there never will be."""
        if plan.size > self.capacity:
            raise RecordTooLarge(
                f"group {plan.draft.group}: a record of {plan.size:,} bytes; a ring holds {self.capacity:,}. Make the "
                "owner's rings larger, or put the members of the group in several records"
            )
        memory, released = self.memory, self.memory.released.view
        self._held = held = {slot: each for slot, each in self._held.items() if released[slot] != each[0]}
        start = first_gap([(start, size) for _, start, size in held.values()], plan.size, self.capacity)
        if start is None or len(held) == memory.slots:
            return False
        position = memory.head[0]
        while position % memory.slots in held:
            position += 1
        try:
            self._publish(plan, position % memory.slots, start, position + 1)
        except BaseException:
            # Ctrl-C comes anywhere: only the words say whether the record was accepted.
            self._read_held()
            raise
        return True

    def _read_held(self) -> None:
        memory = self.memory
        self._held = {
            slot: (memory.sequences[slot], memory.offsets[slot], memory.sizes[slot]) for slot in memory.live()
        }

    def close(self) -> None:
        """Nothing will be put any more."""
        self.memory.state.store(0, CLOSED)
        self.memory.release_views()

    def _publish(self, plan: Plan, slot: int, start: int, sequence: int) -> None:
        memory, size = self.memory, plan.size
        memory.state.store(1, sequence)
        plan.write(memory.payload[start : start + size], sequence=sequence, fault=words.FAULT)
        memory.offsets.store(slot, start)
        memory.sizes.store(slot, size)
        memory.checks.store(slot, zlib.crc32(_CHECK.pack(sequence, start, size)))
        memory.sequences.store(slot, sequence)
        # From this store on the record is accepted.
        memory.head.store(0, sequence)
        self._held[slot] = sequence, start, size


class RingReader:
    """The consumer's side. A new owner starts with `replay`, then `poll`."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.outstanding = 0  # records found and not released
        # Positions that hold no descriptor at all, and heads that went back.
        self.lost = 0
        self.passed_over = 0  # positions whose slot was still live
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
        # A put that fills one slot can have passed over all others.
        if head > first + memory.slots**2:
            self.lost += head - first
            first = head
        if head < first:
            self.lost += 1
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
                self.passed_over += 1
            else:
                self.lost += 1
        self._next = head
        self.outstanding += len(found)
        return found

    def take(self, slot: int, sequence: int) -> Record:
        """The record, as views of the payload. Errors: RecordError, after which `release` is all that is left to do."""
        memory, payload = self.memory, self.memory.payload
        start, size = memory.offsets.view[slot], memory.sizes.view[slot]
        check = zlib.crc32(_CHECK.pack(sequence, start, size))
        if check != memory.checks.view[slot] or start + size > len(payload):
            raise RecordError(f"the descriptor of record {sequence} is damaged")
        return read(payload[start : start + size], sequence=sequence)

    def release(self, slot: int, sequence: int) -> None:
        """The producer may use slot and payload again."""
        fault("ring.release")
        memory = self.memory
        # First, so that a word of `released` that is ahead of it was never stored by an owner.
        memory.owner.store(0, memory.owner.view[0] ^ memory.released.view[slot] ^ sequence)
        memory.released.store(slot, sequence)
        self.outstanding -= 1
