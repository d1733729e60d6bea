"""The native way into a slot and out of it, against the Python of `RingWriter` and `RingReader`."""

from __future__ import annotations

import gc
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_records import planned, whole

from asyncrl.errors import RecordError
from asyncrl.records import read as reading
from asyncrl.records import write
from asyncrl.records.layout import CRC_OFFSET
from asyncrl.records.native import records
from asyncrl.records.write import Plan
from asyncrl.transport.memory import words
from asyncrl.transport.rings import ring
from asyncrl.transport.rings.ring import RingMemory, RingReader, RingWriter, block_bytes, format_ring

pytestmark = pytest.mark.skipif(records is None, reason="the native code of the records was not built here")
SLOTS = 4


class Stop(Exception):
    """In the place of a kill."""


def new_ring() -> memoryview:
    block = memoryview(bytearray(block_bytes(SLOTS, 1 << 14)))
    format_ring(block, SLOTS, b"p" * 16, 1, 1)
    return block


def fill(writer: RingWriter) -> None:
    """All slots, and most of the bytes."""
    for group in range(SLOTS):
        assert writer.try_put(planned(20 + group, length=400))
    assert not writer.try_put(planned(30))
    assert writer.used()[0] == SLOTS


def natively(patch: pytest.MonkeyPatch, wanted: bool) -> None:
    for module in (ring, reading, write):
        patch.setattr(module, "records", records if wanted else None)


def steps_of(patch: pytest.MonkeyPatch, block: memoryview, work: Plan, stop: int | None = None) -> list[str]:
    """The places that a put passes; with `stop` it ends at that one."""
    passed: list[str] = []

    def fault(label: str) -> None:
        passed.append(label)
        if len(passed) - 1 == stop:
            raise Stop(label)

    patch.setattr(words, "FAULT", fault)
    writer = RingWriter(RingMemory(block))
    try:
        assert writer.try_put(work)
    except Stop:
        assert writer.used() == (0, 0) and writer._extents.used == 0
        patch.setattr(words, "FAULT", None)
        fill(writer)  # nothing of it is left
    finally:
        patch.setattr(words, "FAULT", None)
    return passed


def steady(block: memoryview) -> bytes:
    """All bytes but the time of writing and the checksum that covers it."""
    memory = RingMemory(block)
    raw = bytearray(block)
    at = memory.payload_at + memory.offsets[0]
    for place, size in ((CRC_OFFSET, 4), (104, 8)):
        raw[at + place : at + place + size] = bytes(size)
    return bytes(raw)


def test_both_store_the_same_bytes_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    work, found = planned(7, members=(0, 2)), []
    for wanted in (True, False):
        natively(monkeypatch, wanted)
        block = new_ring()
        found.append((steps_of(monkeypatch, block, work), steady(block)))
    assert found[0] == found[1]
    labels = [label for label in found[0][0] if ":" in label]
    order = ("state", "offset", "size", "check", "sequence", "head")
    assert labels == [f"ring.{word}:{when}" for word in order for when in ("before", "after")]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_put_that_stops_anywhere_before_the_head_did_not_happen(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    natively(monkeypatch, wanted)
    passed = steps_of(monkeypatch, new_ring(), planned(7))
    for stop in range(passed.index("ring.head:before") + 1):
        block = new_ring()
        assert steps_of(monkeypatch, block, planned(7), stop) == passed[: stop + 1]
        reader = RingReader(RingMemory(block))
        taken = [reader.take(slot, sequence) for slot, sequence in reader.replay()]
        assert [record.group for record in taken] == [20, 21, 22, 23] and all(map(whole, taken))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_put_that_is_interrupted_behind_the_head_did_happen(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    natively(monkeypatch, wanted)

    def fault(label: str) -> None:
        if label == "ring.head:after":
            raise Stop

    writer = RingWriter(RingMemory(new_ring()))
    monkeypatch.setattr(words, "FAULT", fault)
    with pytest.raises(Stop):
        writer.try_put(planned(7))
    monkeypatch.setattr(words, "FAULT", None)
    assert writer.used()[0] == 1
    assert writer.try_put(planned(8)) and writer.used()[0] == 2


def answer(compute: Callable[[], Any]) -> Any:
    try:
        record = compute()
        return record.group, record.sequence, whole(record)
    except RecordError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(
    word=st.sampled_from(["offsets", "sizes", "checks"]),
    value=st.one_of(st.integers(0, 1 << 15), st.integers(0, 2**64 - 1)),
    honest=st.booleans(),
)
def test_a_damaged_descriptor_is_refused_by_both_alike(word: str, value: int, honest: bool) -> None:
    """`honest`: with a checksum that agrees with the damage, as a foreign producer may write it."""
    block = new_ring()
    memory = RingMemory(block)
    assert RingWriter(memory).try_put(planned(7))
    getattr(memory, word).store(0, value)
    if honest and word != "checks":
        check = struct.pack("<QQQ", 1, memory.offsets[0], memory.sizes[0])
        memory.checks.store(0, zlib.crc32(check))
    found = []
    for wanted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            natively(patch, wanted)
            found.append(answer(lambda: RingReader(RingMemory(block)).take(0, 1)))
    assert found[0] == found[1]


def test_what_lies_outside_of_the_ring_is_left_to_python() -> None:
    native: Any = records  # wrong arguments are what this is about
    memory, work = RingMemory(new_ring()), planned(7)
    at, slots, block = memory.payload_at, memory.slots, memory.block
    before = bytes(block)
    room = len(memory.payload)
    for slot, start, count, payload in (
        (slots, 0, slots, at),
        (-1, 0, slots, at),
        (0, room + 64, slots, at),
        (0, -64, slots, at),
        (0, 0, 1 << 30, at),
        (0, 0, slots, at - 4096),
        (0, 0, slots, len(block) + 64),
    ):
        assert native.publish(work, block, count, payload, slot, start, work.size, 1, None) is None
        assert native.take(block, count, payload, slot, 1) is None
    assert bytes(block) == before
    assert native.publish(work, block, slots, at, 0, room - work.size + 64, work.size, 1, None) is None
    assert native.publish(work, block, slots, at, 0, 0, work.size - 64, 1, None) is None  # larger than its place
    with pytest.raises(TypeError, match="9 arguments"):
        native.publish(work)
    with pytest.raises(TypeError, match="5 arguments"):
        native.take(block)
    assert native.publish("a plan", block, slots, at, 0, 0, work.size, 1, None) is None
    assert native.take(bytes(block), slots, at, 0, 1) is None  # no memoryview
    memory.block.release()
    with pytest.raises(ValueError, match="released"):
        native.publish(work, memory.block, slots, at, 0, 0, work.size, 1, None)


def test_a_record_outlives_the_views_of_its_ring() -> None:
    block = new_ring()
    assert RingWriter(RingMemory(block)).try_put(planned(7))
    memory = RingMemory(block)
    record = RingReader(memory).take(0, 1)
    memory.release_views()
    assert whole(record) and not record.arrays[3].flags.writeable


def test_an_unusual_plan_takes_the_way_through_python() -> None:
    class Other(Plan):
        __slots__ = ()

    work = planned(7)
    other = Other(work.draft, work.tokens, work.parts)
    memory = RingMemory(new_ring())
    assert records is not None
    assert records.publish(other, memory.block, SLOTS, memory.payload_at, 0, 0, work.size, 1, None) is None
    assert RingWriter(memory).try_put(other)
    assert whole(RingReader(memory).take(0, 1))


def test_nothing_is_leaked() -> None:
    block, work = new_ring(), planned(7)
    memory = RingMemory(block)
    writer, reader = RingWriter(memory), RingReader(memory)
    reader.replay()

    def turn() -> None:
        for _ in range(300):
            assert writer.try_put(work)
            ((slot, sequence),) = reader.poll()
            assert reader.take(slot, sequence).group == 7
            with pytest.raises(RecordError):
                reader.take(slot, sequence + 1)
            reader.release(slot, sequence)

    turn()
    gc.collect()
    before = sys.getallocatedblocks()
    turn()
    gc.collect()
    assert sys.getallocatedblocks() - before < 100  # one object a turn would be 300
