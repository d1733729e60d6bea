"""One producer's ring in shared memory: the consumer gets records in order, and may free them in any order.

A ring is the data of one segment. The producer and the consumer (the owner) write without locks, each its own words:

    at    words      writer     meaning
    0                (creation) magic, version, slots, payload offset, payload bytes, producer's id, pid and start, CRC32 of these
    128   head       producer   number of positions used up by puts; raising it above a position accepts the record at the position
    192   owner      consumer   XOR of all words `released` (a check, see `find_damage`);  policy version + 1 (0: none)
    256   state      producer   1 attached, 2 closed by the producer;  position + 1 of the last put that began
    320   sequences  producer   [slots] position + 1 of the slot's record (0: none)
          released   consumer   [slots] sequence of the slot's last released record (0: none)
          offsets, sizes, checks  producer   [slots] start and bytes in the payload; CRC32 of (sequence, offset, size)
          payload

Each put takes the next position whose slot, `position mod slots`, is not in use. A slot is in use while its sequence is at most the
head and not equal to `released`. Puts skip slots in use, so a group that is trained late blocks only its own slot and bytes.
Positions have 64 bits and only grow, so they never wrap.

A put stores in this order: begun position, payload, descriptor, sequence, head. A kill may follow any of these stores.
Before the store of the head the slot is not in use, so no reader can take an unfinished record.
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
    """The size in bytes of a ring with `slots` descriptors and `payload` bytes of payload."""
    return _payload_offset(slots) + payload


def _payload_offset(slots: int) -> int:
    return (_ARRAYS_AT + 5 * 8 * slots + 4095) & -4096


def format_ring(buffer: memoryview, slots: int, producer: bytes, pid: int, started: int) -> None:
    """Make an empty ring in `buffer`, which holds zeros, for the producer process `pid` that started at clock tick `started`."""
    payload_at = _payload_offset(slots)
    static = _STATIC.pack(MAGIC, VERSION, slots, payload_at, len(buffer) - payload_at, producer, pid, started)
    static += zlib.crc32(static).to_bytes(4, "little")
    buffer[: len(static)] = static
    struct.pack_into("<Q", buffer, _STATE_AT, ATTACHED)


class RingMemory:
    """Views of a ring's words and payload. Errors: TransportError for bytes that are no ring."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < _ARRAYS_AT:
            raise TransportError(f"{len(buffer)} bytes are too few for a ring, which has at least {_ARRAYS_AT}")
        static, crc = buffer[: _STATIC.size], buffer[_STATIC.size : _STATIC.size + 4]
        magic, version, slots, payload_at, payload, producer, pid, started = _STATIC.unpack(static)
        valid = magic == MAGIC and version == VERSION and zlib.crc32(static) == int.from_bytes(crc, "little")
        if not valid or payload_at != _payload_offset(slots) or payload_at + payload > len(buffer):
            raise TransportError(f"these {len(buffer)} bytes are a damaged ring, or no ring of version {VERSION}")
        self.slots: int = slots
        self.producer: bytes = producer
        self.pid: int = pid
        self.started: int = started
        self.payload = buffer[payload_at : payload_at + payload]
        self.head = Words(buffer, _HEAD_AT, 1, "ring.head")
        self.owner = Words(buffer, _OWNER_AT, 2, "ring.owner")
        self.state = Words(buffer, _STATE_AT, 2, "ring.state")
        start = _ARRAYS_AT
        self.sequences = Words(buffer, start, slots, "ring.sequence")
        self.released = Words(buffer, start + 8 * slots, slots, "ring.released")
        self.offsets = Words(buffer, start + 16 * slots, slots, "ring.offset")
        self.sizes = Words(buffer, start + 24 * slots, slots, "ring.size")
        self.checks = Words(buffer, start + 32 * slots, slots, "ring.check")

    def live_slots(self) -> list[int]:
        """The slots with an accepted record that was not released, oldest record first."""
        head = self.head[0]
        sequences = self.sequences.view.tolist()
        released = self.released.view.tolist()
        accepted = [(sequence, slot) for slot, sequence in enumerate(sequences) if sequence <= head]
        return [slot for sequence, slot in sorted(accepted) if sequence != released[slot]]

    def has_unfinished_put(self) -> bool:
        """Whether the last put that began has not been accepted: it is running, or was interrupted."""
        return self.state[1] > self.head[0]

    def find_damage(self) -> str:
        """A clause about the first impossible value of the words; "" if there is none. The owner must not release meanwhile."""
        head = self.head[0]
        sequences = np.array(self.sequences.view)
        latest, begun = int(sequences.max()), self.state[1]
        released = np.array(self.released.view)
        slots = np.arange(self.slots, dtype=np.uint64)
        # A put stores its sequence ("number" in messages) in `state` first, in the record's slot next, and in the head last.
        if not head <= latest <= begun:
            return f"its head has number {head}, its latest record {latest}, and the latest put that began {begun}"
        for numbers in (sequences, released):
            if bool(((numbers != 0) & ((numbers - np.uint64(1)) % np.uint64(self.slots) != slots)).any()):
                return "a record is in a slot that does not match its number"
        if bool((released > sequences).any()):
            return "a slot has released a record that was never put"
        lost_numbers = (sequences == 0) & (np.array(self.sizes.view) != 0)
        if self.has_unfinished_put():
            lost_numbers[(self.state[1] - 1) % self.slots] = False  # the put may be unfinished
        if bool(lost_numbers.any()):
            return "a record has lost its number"
        # Zero in an undamaged ring, or `released ^ sequence` of one slot if the last owner was killed within a release.
        unfinished = int(np.bitwise_xor.reduce(released)) ^ self.owner[0]
        if unfinished and not bool((released ^ sequences == np.uint64(unfinished)).any()):
            return "records are marked as released that no owner released"
        return "" if self.state[0] in (ATTACHED, CLOSED) else f"its state is {self.state[0]}"

    def undo_unfinished_release(self) -> None:
        """For a new owner: undo the first store of a release if the last owner was killed before the second store."""
        released = int(np.bitwise_xor.reduce(np.array(self.released.view)))
        if self.owner[0] != released:
            self.owner.store(0, released)

    def release_views(self) -> None:
        """Release all views, so that the mapping can be closed."""
        for name in ("head", "owner", "state", "sequences", "released", "offsets", "sizes", "checks"):
            getattr(self, name).release()
        self.payload.release()


class RingWriter:
    """The producer's side. Not thread-safe: the producer holds a lock."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.capacity = len(memory.payload)
        # Slot -> (sequence, start, size) of each accepted, unreleased record. Private to this process, so that damage to the ring's
        # words cannot make a put overwrite a record.
        self._unreleased: dict[int, tuple[int, int, int]] = {}
        self._reread_words()

    def used(self) -> tuple[int, int]:
        """(records, bytes) that were accepted and not released."""
        released = self.memory.released.view
        records = tuple(self._unreleased.items())
        sizes = [size for slot, (sequence, _start, size) in records if released[slot] != sequence]
        return len(sizes), sum(sizes)

    def try_put(self, plan: Plan) -> bool:
        """Write and publish a record. Returns False if the ring has no room now. Errors: RecordTooLarge if it never has room."""
        if plan.size > self.capacity:
            raise RecordTooLarge(
                f"group {plan.draft.group}: its record has {plan.size:,} bytes, but a ring holds {self.capacity:,}. Make the "
                "owner's rings larger, or put the members of the group in several records"
            )
        memory, released = self.memory, self.memory.released.view
        self._unreleased = unreleased = {
            slot: record for slot, record in self._unreleased.items() if released[slot] != record[0]
        }
        start = first_gap([(start, size) for _, start, size in unreleased.values()], plan.size, self.capacity)
        if start is None or len(unreleased) == memory.slots:
            return False
        position = memory.head[0]
        while position % memory.slots in unreleased:
            position += 1
        try:
            self._publish(plan, position % memory.slots, start, position + 1)
        except BaseException:
            # Ctrl-C may interrupt anywhere, so read from the words whether the record was accepted.
            self._withdraw(position % memory.slots)
            self._reread_words()
            raise
        return True

    def _withdraw(self, slot: int) -> None:
        """If the put was not accepted, restore the slot's old sequence, so that the next put's head does not accept the record."""
        memory = self.memory
        if memory.sequences[slot] > memory.head[0]:
            if not memory.released[slot]:
                memory.sizes.store(slot, 0)
            memory.sequences.store(slot, memory.released[slot])

    def _reread_words(self) -> None:
        memory = self.memory
        self._unreleased = {
            slot: (memory.sequences[slot], memory.offsets[slot], memory.sizes[slot]) for slot in memory.live_slots()
        }

    def mark_closed(self) -> None:
        """Mark the ring as closed by its producer."""
        self.memory.state.store(0, CLOSED)

    def _publish(self, plan: Plan, slot: int, start: int, sequence: int) -> None:
        memory, size = self.memory, plan.size
        memory.state.store(1, sequence)
        plan.write(memory.payload[start : start + size], sequence=sequence, fault=words.FAULT)
        memory.offsets.store(slot, start)
        memory.sizes.store(slot, size)
        memory.checks.store(slot, zlib.crc32(_CHECK.pack(sequence, start, size)))
        memory.sequences.store(slot, sequence)
        memory.head.store(0, sequence)  # accepts the record
        self._unreleased[slot] = sequence, start, size


class RingReader:
    """The consumer's side. An owner that adopts a ring calls `replay` before its first `poll`."""

    def __init__(self, memory: RingMemory) -> None:
        self.memory = memory
        self.outstanding = 0  # records found and not released
        self.lost = 0  # invalid descriptors, and impossible moves of the head
        self.skipped_slots = 0  # slots in use that a put skipped
        self._next = 0  # the first position that was not polled

    def replay(self) -> list[tuple[int, int]]:
        """(slot, sequence) of every accepted, unreleased record, oldest first."""
        self._next = self.memory.head[0]
        live_slots = [(slot, self.memory.sequences[slot]) for slot in self.memory.live_slots()]
        # Leave out the records that were put after the read of the head: `poll` returns them.
        records = [(slot, sequence) for slot, sequence in live_slots if sequence <= self._next]
        self.outstanding += len(records)
        return records

    def poll(self) -> list[tuple[int, int]]:
        """(slot, sequence) of every record that was accepted since the last `poll` or `replay`."""
        memory, head, first = self.memory, self.memory.head.view[0], self._next
        # The head cannot have moved further: at most `slots` puts fit, and each skips fewer than `slots` positions.
        if head > first + memory.slots**2:
            self.lost += head - first
            first = head
        if head < first:
            self.lost += 1
            return []
        records = []
        for position in range(first, head):
            slot = position % memory.slots
            sequence = memory.sequences.view[slot]
            if sequence == position + 1:
                records.append((slot, sequence))
            elif sequence and (sequence - 1) % memory.slots == slot:
                # A put skipped this position, because its slot was in use. A record put at this position would
                # still be here, because only this process frees slots.
                self.skipped_slots += 1
            else:
                self.lost += 1
        self._next = head
        self.outstanding += len(records)
        return records

    def take(self, slot: int, sequence: int) -> Record:
        """The record, as views of the payload. Errors: RecordError for a damaged record, which the caller must `release`."""
        memory, payload = self.memory, self.memory.payload
        start, size = memory.offsets.view[slot], memory.sizes.view[slot]
        check = zlib.crc32(_CHECK.pack(sequence, start, size))
        if check != memory.checks.view[slot] or start + size > len(payload):
            raise RecordError(f"the descriptor of record {sequence} is damaged; skip the record")
        return read(payload[start : start + size], sequence=sequence)

    def release(self, slot: int, sequence: int) -> None:
        """Free the slot and the payload of a record for the producer."""
        fault("ring.release")
        memory = self.memory
        # Store the XOR first: then a word `released` that contradicts the XOR was not stored by an owner.
        memory.owner.store(0, memory.owner.view[0] ^ memory.released.view[slot] ^ sequence)
        memory.released.store(slot, sequence)
        self.outstanding -= 1
