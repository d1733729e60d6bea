"""The knock before a copy, and the consumer that stays awake for it; what an owner remembers of its members."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_helpers import both_loops
from transport_records import planned, whole

from asyncrl.transport import words
from asyncrl.transport.producer import AsyncProducer
from asyncrl.transport.record_ring import RecordRing
from asyncrl.transport.ring import RingMemory, RingReader, RingWriter, block_bytes, format_ring
from asyncrl.transport.ring_types import Memory, RingSettings
from asyncrl.transport.ring_watch import KNOCK, PATIENCE_S, Watch

SETTINGS = RingSettings(size=8 << 20, slots=8, ring_bytes=3 << 20, checksum=True)


def test_a_writer_knocks_before_the_copy_and_only_where_the_consumer_has_read_all() -> None:
    buffer = memoryview(bytearray(block_bytes(8, 1 << 16)))
    format_ring(buffer, 8, b"p" * 16, 1, 1)
    writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
    reader.replay()
    heard: list[tuple[int, bool]] = []

    def knock() -> None:
        heard.append((writer.memory.head[0], reader.memory.unpublished()))

    for group in range(3):
        assert writer.try_put(planned(group), checksum=True, knock=knock)
    assert heard == [(0, True)]  # the second and the third found the first unread
    assert len(list(reader.poll())) == 3
    assert writer.try_put(planned(3), checksum=True, knock=knock)
    assert heard == [(0, True), (3, True)] and not reader.memory.unpublished()
    assert len(list(reader.poll())) == 1
    full = planned(4, length=8_000)
    assert not writer.try_put(full, checksum=True, knock=knock)  # no room: nobody is called for nothing
    assert len(heard) == 2


@both_loops
async def test_a_record_of_some_size_is_announced_a_small_or_a_huge_one_is_not(name: str) -> None:
    async with RecordRing(name, SETTINGS) as ring, await AsyncProducer.attach(name) as producer:
        places: list[str] = []
        for length in (50, 10_000, 300_000):
            plan = planned(length, length=length)
            words.FAULT = places.append
            try:
                await producer.put(plan)
            finally:
                words.FAULT = None
            assert places.count("producer.knock") == (plan.size in KNOCK) == (length == 10_000)
            assert places.index("ring.state:after") < places.index("section")
            places.clear()
            delivery = await ring.get()
            assert whole(delivery.record)
            delivery.release()


@both_loops
async def test_a_record_that_was_announced_and_never_came_is_not_waited_for_awake(name: str) -> None:
    async with RecordRing(name, SETTINGS) as ring, await AsyncProducer.attach(name) as producer:

        def fail(label: str) -> None:
            if label == "section":
                raise InterruptedError

        looks = 0
        look = ring._look

        def counted() -> bool:
            nonlocal looks
            looks += 1
            return look()

        ring._look = ring._watch_closely._look = counted  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            taken: list[int] = []

            async def consume() -> None:
                delivery = await ring.get()
                taken.append(delivery.record.group)
                delivery.release()

            tasks.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            words.FAULT = fail
            try:
                with pytest.raises(InterruptedError):
                    await producer.put(planned(1, length=10_000))
            finally:
                words.FAULT = None
            with anyio.fail_after(20):
                while not looks or ring._watch_closely._until:  # its patience ends
                    await anyio.lowlevel.checkpoint()
            before = looks
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert looks == before and not taken
            await producer.put(planned(2, length=10_000))
        assert taken == [2]
        ring.close(discard=True)


def test_a_watch_looks_in_every_turn_until_it_is_over_or_its_patience_ends() -> None:
    class Loop:
        """Time and turns by hand."""

        def __init__(self) -> None:
            self.now, self.soon = 5.0, list[Any]()

        def time(self) -> float:
            return self.now

        def call_soon(self, call: Any) -> None:
            self.soon.append(call)

        def turn(self) -> None:
            due, self.soon = self.soon, []
            for call in due:
                call()

    loop, coming, looks = Loop(), True, list[float]()

    def look() -> bool:
        looks.append(loop.now)
        return coming

    watch = Watch(loop, look)  # type: ignore[arg-type]
    watch.begin()
    watch.begin()  # the bell rings again meanwhile: one look a turn all the same
    assert len(loop.soon) == 1
    for _ in range(3):
        loop.turn()
    loop.now += PATIENCE_S
    loop.turn()
    assert len(looks) == 4 and not loop.soon
    watch.begin()
    coming = False
    loop.turn()
    assert len(looks) == 5 and not loop.soon


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_the_memory_of_members_against_a_plain_model(steps: list[tuple[bool, int, int]]) -> None:
    memory, known = Memory(1000), set[tuple[int, int]]()
    for arrives, group, first in steps:
        members = [first, first + 2]
        if arrives:
            expected = tuple(i for i, member in enumerate(members) if (group, member) not in known)
            assert memory.fresh((0, group), members) == expected
        else:
            memory.leave((0, group), members)
        known.update((group, member) for member in members)


def test_only_the_latest_members_that_left_are_remembered() -> None:
    memory = Memory(3)
    for group in (1, 2):
        assert memory.fresh((0, group), [0, 1]) == (0, 1)
        memory.leave((0, group), [0, 1])
    assert memory.fresh((0, 2), [0, 1, 2]) == (2,)
    assert memory.fresh((0, 1), [1]) == ()
    assert memory.fresh((0, 1), [0]) == (0,)
    memory.leave((0, 3), [5, 6, 7])  # as many as it keeps: the others are forgotten, those in the ring are not
    assert memory.fresh((0, 2), [0, 2]) == (0,)
    assert memory.fresh((0, 3), [5, 6, 7]) == ()
