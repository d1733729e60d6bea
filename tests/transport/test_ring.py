"""Record ring: delivery, order, backpressure, oversize, damage, who is let in, which members came before."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_helpers import both_loops
from transport_records import SMALL, groups, pair, planned, whole

from asyncrl.errors import LifecycleError, RecordTooLarge, RingDetached, RingFull
from asyncrl.records.layout import HEADER
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.segment import new_part
from asyncrl.transport.rings.attachment import address as address_of
from asyncrl.transport.rings.link import Link
from asyncrl.transport.rings.producer import AsyncProducer, Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.ring import RingMemory, RingReader, RingWriter, format_ring, ring_bytes
from asyncrl.transport.rings.types import RingSettings, SeenMembers


@both_loops
async def test_records_arrive_whole_in_order_and_leave_when_released(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(5):
            await producer.put(planned(group, members=(0, 3), length=100 * group))
        taken = [await ring.get() for _ in range(5)]
        assert groups(taken) == [0, 1, 2, 3, 4] and all(whole(d.record) for d in taken)
        assert all(d.fresh == (0, 1) for d in taken)
        with pytest.raises(anyio.WouldBlock):
            ring.get_nowait()
        assert ring.statistics().outstanding == 5 and producer.statistics().records_held == 5
        for d in (taken[3], taken[0], taken[4], taken[1], taken[2], taken[2]):
            d.release()
        assert producer.statistics().bytes_held == 0
        s = ring.statistics()
        assert (s.records, s.released, s.outstanding, s.torn, s.duplicates, s.producers) == (5, 5, 0, 0, 0, 1)


@both_loops
async def test_a_wait_for_a_record_is_no_cause_of_idle_time(name: str) -> None:
    """A run that also generates would otherwise never show its own causes."""
    async with pair(name) as (ring, producer):
        ring.recorder = recorder = Recorder()
        taken = asyncio.ensure_future(ring.get())
        await asyncio.sleep(0)
        assert [wait.what for wait in recorder.active_waits()] == ["a record"] and not recorder.take_window().idle
        await producer.put(planned(0))
        (await taken).release()
        assert not recorder.take_window().idle


@both_loops
async def test_a_late_group_holds_up_nothing_but_its_own_bytes(name: str) -> None:
    async with pair(name) as (ring, producer):
        await producer.put(planned(0))
        first = await ring.get()
        for group in range(1, 100):
            await producer.put(planned(group, length=group))
            d = await ring.get()
            assert d.record.group == group and whole(d.record)
            d.release()
        assert whole(first.record)
        assert ring.statistics().skipped_slots >= 10
        first.release()


@both_loops
async def test_a_full_ring_is_backpressure_with_a_deadline(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(8):
            await producer.put(planned(group))
        with pytest.raises(RingFull, match=r"8 of 8 records.*Put this record again"):
            await producer.put(planned(8), timeout=0.05)
        taken = [ring.get_nowait() for _ in range(8)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.put, planned(9))
            await anyio.wait_all_tasks_blocked()
            assert not ring._ready
            taken[5].release()
        taken.append(await ring.get())
        assert taken[-1].record.group == 9
        assert producer.statistics().waits == 2  # puts, however often they woke
        with pytest.raises(RingFull, match=r"bytes wait"):  # bytes, not slots
            await producer.put(planned(10, length=7500), timeout=0.05)
        with pytest.raises(RecordTooLarge, match="a ring holds 65,536"):
            await producer.put(planned(11, length=10_000))
        for d in taken:
            d.release()
        await producer.put(planned(10, length=7500), timeout=30)


@both_loops
async def test_a_cancelled_put_did_not_put_and_a_cancelled_get_did_not_take(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(8):
            await producer.put(planned(group))
        with anyio.move_on_after(0.02) as scope:
            await producer.put(planned(99))
        assert scope.cancelled_caught
        taken = [await ring.get() for _ in range(8)]
        with anyio.move_on_after(0.02) as scope:
            await ring.get()
        assert scope.cancelled_caught
        taken[0].release()
        await producer.put(planned(8))
        assert (await ring.get()).record.group == 8


@both_loops
async def test_threads_put_through_one_synchronous_producer(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        producer = await asyncio.to_thread(Producer.attach, name)

        def puts(thread: int) -> None:
            for i in range(50):
                producer.put(planned(thread * 1000 + i))

        threads = [threading.Thread(target=puts, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        seen = []
        for _ in range(150):
            d = await ring.get()
            assert whole(d.record)
            seen.append(d.record.group)
            d.release()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert all([g for g in seen if g // 1000 == i] == list(range(i * 1000, i * 1000 + 50)) for i in range(3))
        producer.close()
        producer.close()
        with pytest.raises(LifecycleError, match="closed"):
            producer.put(planned(1))


@both_loops
async def test_torn_records_are_skipped_and_counted(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(4):
            await producer.put(planned(group))
        (link,) = ring._links.values()
        memory = link.memory
        payload = memory.payload
        payload[memory.offsets[0] + HEADER.size] ^= 1  # the table
        payload[memory.offsets[1] + 20] ^= 1  # the header
        memory.sizes.store(2, 64)  # the descriptor
        d = await ring.get()
        assert d.record.group == 3
        assert ring.statistics().torn == 3
        d.release()
        assert producer.statistics().records_held == 0  # the torn ones were given back


@both_loops
async def test_the_version_is_read_without_asking(name: str) -> None:
    async with pair(name) as (ring, producer):
        assert producer.policy_version == -1
        ring.publish_version(0)
        assert producer.policy_version == 0
        ring.publish_version(41)
        assert producer.policy_version == 41


def test_a_ring_is_read_whole_while_another_thread_replaces_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(name)
    links = [Link.create(new_part(name, "ring"), producer.identity, 0, 8, 4096) for _ in range(2)]
    asked: list[Callable[[], Any]] = [lambda: producer.policy_version, producer.statistics]
    asked.append(lambda: str(producer.timeout_error(planned(0), 0.0)))
    release_views, answers = RingMemory.release_views, list[Future[Any]]()
    with ThreadPoolExecutor(len(asked)) as pool:

        def release(memory: RingMemory) -> None:
            release_views(memory)
            answers.extend(map(pool.submit, asked))
            wait(answers, 0.2)

        for link in links:
            link.publish_version(7)
            producer._open_ring(link.segment.name)
            monkeypatch.setattr(RingMemory, "release_views", release)
            producer.try_put(planned(0), ownerless=True)
    monkeypatch.undo()
    producer.close()
    for link in links:
        link.segment.close(unlink=True)
    version, counts, error = (answer.result() for answer in answers)
    assert version == 7 and counts.records_held <= 1 and " of 8 records" in error


@both_loops
async def test_strangers_at_the_door_are_told_why(name: str) -> None:
    async with pair(name) as (ring, _):
        assert ring._segment is not None
        address = address_of(ring._segment)
        for message, words in (
            (b"garbage", "not of this protocol"),
            (b"[1]", "not of this protocol"),
            (json.dumps({"protocol": 99}).encode(), "protocol 99"),
            (json.dumps({"protocol": 2, "producer": "xyz"}).encode(), "16 bytes"),
            (b"x" * 5000, "longer than"),
            (b"[" * 4096, "not of this protocol"),
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(address)
                stranger.send(message)
                answer = json.loads(await asyncio.to_thread(stranger.recv, 4096))
                assert words in answer["error"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shy:
            shy.connect(address)
        assert ring.statistics().refused == 6 and ring.statistics().producers == 1


@both_loops
async def test_a_connection_that_is_called_readable_without_cause_stays(name: str) -> None:
    async with pair(name) as (ring, _):
        [link] = ring._links.values()
        ring._on_connection(link)
        assert link.connection is not None and ring.statistics().producers == 1


@both_loops
async def test_no_room_for_one_more_producer_is_said(name: str) -> None:
    async with pair(name, RingSettings(total_bytes=100_000, slots=8, payload_bytes=1 << 16)):
        with pytest.raises(RingDetached, match=r"no room for one more producer: 1 have a ring.*door.ring_mib"):
            await AsyncProducer.attach(name)


def test_positions_beyond_32_and_63_bits_are_nothing_special() -> None:
    for first in (2**32 - 20, 2**63 - 20):
        buffer = memoryview(bytearray(ring_bytes(4, 8192)))
        format_ring(buffer, 4, b"p" * 16, 1, 1)
        writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
        writer.memory.head.store(0, first)
        assert reader.replay() == []
        for group in range(60):
            assert writer.try_put(planned(group))
            ((slot, sequence),) = list(reader.poll())
            assert sequence == first + group + 1
            assert reader.take(slot, sequence).group == group
            reader.release(slot, sequence)
        assert reader.lost == 0


def test_a_reader_that_lags_takes_no_passed_over_position_for_a_torn_one() -> None:
    buffer = memoryview(bytearray(ring_bytes(2, 8192)))
    format_ring(buffer, 2, b"p" * 16, 1, 1)
    writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
    reader.replay()
    for group in (0, 1):
        assert writer.try_put(planned(group))
    first, second = list(reader.poll())
    reader.release(*second)
    assert writer.try_put(planned(2))  # passes over position 2, whose slot holds record 0
    reader.release(*first)
    assert writer.try_put(planned(3))  # position 4: the slot of position 2, which nobody has looked at yet
    assert [reader.take(*one).group for one in reader.poll()] == [2, 3]
    assert (reader.skipped_slots, reader.lost) == (1, 0)


def empty_ring(slots: int, payload: int) -> tuple[RingWriter, RingReader, RingMemory]:
    buffer = memoryview(bytearray(ring_bytes(slots, payload)))
    format_ring(buffer, slots, b"p" * 16, 1, 1)
    reader = RingReader(RingMemory(buffer))
    reader.replay()
    return RingWriter(RingMemory(buffer)), reader, RingMemory(buffer)


def test_slots_that_were_released_are_not_passed_over_for_ever() -> None:
    writer, reader, _ = empty_ring(16, 1 << 16)
    while writer.try_put(planned(0)):
        pass
    for slot, sequence in reader.poll():
        reader.release(slot, sequence)
    for group in range(200):
        assert writer.try_put(planned(group))
        ((slot, sequence),) = reader.poll()
        reader.release(slot, sequence)
    assert reader.skipped_slots <= 16


def test_a_head_that_goes_back_or_leaps_is_damage_and_no_more() -> None:
    writer, reader, foreign = empty_ring(4, 8192)
    for group in (0, 1):
        assert writer.try_put(planned(group))
    assert [sequence for _, sequence in reader.poll()] == [1, 2]
    for head in (1, 2, 0, 2):
        foreign.head.store(0, head)
        assert reader.poll() == []  # what is leased is not found a second time
    foreign.head.store(0, 2**63)
    assert reader.poll() == []  # at once
    assert reader.lost == 2 + 2**63 - 2 and reader.outstanding == 2


def test_a_put_that_is_interrupted_at_any_line_leaves_the_writer_right() -> None:
    """As by Ctrl-C: what was accepted is held, the rest of the ring is free."""

    class Interrupt(BaseException):
        pass

    def interrupted(writer: RingWriter, after: int) -> bool:
        left = iter(range(after))

        def trace(frame: Any, event: str, _: object) -> Any:
            if "transport" not in frame.f_code.co_filename or frame.f_code.co_name == "live":
                return None
            if event == "line" and next(left, None) is None:
                sys.settrace(None)
                raise Interrupt
            return trace

        sys.settrace(trace)
        try:
            assert writer.try_put(planned(3))
        except Interrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    for after in range(1, 1000):
        writer, reader, memory = empty_ring(4, 8192)
        for group in (0, 1, 2):
            assert writer.try_put(planned(group))
        found = reader.poll()
        reader.release(*found[0])
        reader.release(*found[2])  # the latest: its bytes are those that are used again
        went_on = not interrupted(writer, after)
        accepted = len(memory.live_slots())
        assert writer.used()[0] == accepted in (1, 2)
        more = 0
        while writer.try_put(planned(4 + more)):
            more += 1
        assert accepted + more == 4
        taken = [reader.take(*one) for one in reader.poll()]
        assert all(map(whole, taken))
        assert [record.group for record in taken] == [3] * (accepted - 1) + [4 + i for i in range(more)]
        if went_on:
            assert after > 20
            return
    raise AssertionError("it never came to its end")


@both_loops
async def test_a_producer_is_not_carried_over_a_fork(name: str) -> None:
    async with pair(name) as (_, producer):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                producer.check()
            except LifecycleError:
                code = 0
            finally:
                os._exit(code)
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0


async def test_settings_and_states(name: str) -> None:
    ring = RecordRing(name, SMALL)
    with pytest.raises(LifecycleError, match="not open"):
        ring.get_nowait()
    async with ring:
        pass
    with pytest.raises(LifecycleError, match="opened before"):
        await ring.__aenter__()
    assert [d async for d in ring] == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_the_memory_of_members_against_a_plain_model(steps: list[tuple[bool, int, int]]) -> None:
    memory, known = SeenMembers(1000), set[tuple[int, int]]()
    for arrives, group, first in steps:
        members = (first, first + 2)
        if arrives:
            expected = tuple(i for i, member in enumerate(members) if (group, member) not in known)
            assert memory.add((0, group), members) == expected
        else:
            memory.remove((0, group), members)
        known.update((group, member) for member in members)


def test_only_the_latest_groups_that_left_are_remembered() -> None:
    memory = SeenMembers(3)
    for group in (1, 2):
        assert memory.add((0, group), (0, 1)) == (0, 1)
        memory.remove((0, group), (0, 1))
    assert memory.add((0, 2), (0, 1, 2)) == (2,)
    assert memory.add((0, 1), (1,)) == (0,)
    memory.remove((0, 3), (5, 6, 7))  # as many as it keeps: the others are forgotten, those in the ring are not
    assert memory.add((0, 2), (0, 2)) == (0,)
    assert memory.add((0, 3), (5, 6, 7)) == () and (0, 3) not in memory._in_ring  # such a record is let go at once
