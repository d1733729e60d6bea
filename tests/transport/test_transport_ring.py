"""Record ring: delivery, order, backpressure, oversize, replay, duplicates, deaths, idleness; asyncio and uvloop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from transport_helpers import both_loops, child, finish, line, names, say
from transport_records import planned, whole

from asyncrl.errors import ArenaOwned, LifecycleError, RecordTooLarge, RingDetached, RingFull
from asyncrl.transport import producer as producer_module
from asyncrl.transport import rendezvous
from asyncrl.transport.producer import AsyncProducer, Producer
from asyncrl.transport.record_ring import Delivery, RecordRing
from asyncrl.transport.ring import RingMemory, RingReader, RingWriter, block_bytes, format_ring
from asyncrl.transport.ring_types import RingSettings

SMALL = RingSettings(size=1 << 20, slots=8, ring_bytes=1 << 16, checksum=True)


@asynccontextmanager
async def pair(name: str, settings: RingSettings = SMALL) -> AsyncIterator[tuple[RecordRing, AsyncProducer]]:
    async with RecordRing(name, settings) as ring, await AsyncProducer.attach(name) as producer:
        yield ring, producer
        ring.close(discard=True)


def groups(deliveries: list[Delivery]) -> list[int]:
    return [d.record.group for d in deliveries]


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
        assert ring.statistics().passed_over >= 10
        first.release()


@both_loops
async def test_a_full_ring_is_backpressure_with_a_deadline(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(8):
            await producer.put(planned(group))
        with pytest.raises(RingFull, match=r"8 of 8 records.*Nothing was put"):
            await producer.put(planned(8), timeout=0.05)
        taken = [ring.get_nowait() for _ in range(8)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.put, planned(9))
            await anyio.wait_all_tasks_blocked()
            assert not ring._ready
            taken[5].release()
        taken.append(await ring.get())
        assert taken[-1].record.group == 9
        assert producer.statistics().waits == 2
        with pytest.raises(RingFull, match=r"bytes wait"):  # bytes, not slots
            await producer.put(planned(10, length=7500), timeout=0.05)
        with pytest.raises(RecordTooLarge, match="a ring holds 65,536"):
            await producer.put(planned(11, length=10_000))
        for d in taken:
            d.release()
        await producer.put(planned(10, length=7500), timeout=1)


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
async def test_what_was_not_released_is_replayed_to_the_next_owner_and_duplicates_are_removed(name: str) -> None:
    ring = RecordRing(name, SMALL)
    await ring.__aenter__()
    producer = await AsyncProducer.attach(name)
    for group in range(6):
        await producer.put(planned(group, members=(0, 1)))
    taken = [await ring.get() for _ in range(4)]
    taken[1].release()
    with pytest.raises(ArenaOwned):
        async with RecordRing(name, SMALL):
            pass
    assert ring.close() is True
    taken[2].release()  # too late: it belongs to the next owner
    with pytest.raises(anyio.ClosedResourceError):
        await ring.get()
    # Group 0 was trained before the last checkpoint; of group 2 one member was.
    async with RecordRing(name, SMALL, trained=[(0, 0, 0), (0, 0, 1), (0, 2, 1)]) as ring:
        again = [await ring.get() for _ in range(4)]
        assert groups(again) == [2, 3, 4, 5]
        assert again[0].fresh == (0,) and again[1].fresh == (0, 1)
        assert (ring.statistics().replayed, ring.statistics().duplicates) == (5, 3)
        await producer.put(planned(3, members=(1, 2)))  # attaches by itself; member 1 is in the ring already
        more = await ring.get()
        assert more.record.group == 3 and more.fresh == (1,)
        again[1].release()
        more.release()
        await producer.put(planned(3, members=(2,)))  # already trained
        await producer.put(planned(3, epoch=1, members=(2,)))  # another epoch is another group
        last = await ring.get()
        assert last.record.epoch == 1
        assert ring.statistics().producers == 1
        for d in (*again, last):
            d.release()
        await producer.close()
        with anyio.fail_after(10):
            while ring.statistics().rings:
                await anyio.lowlevel.checkpoint()
        assert ring.statistics().reclaimed == 1 and ring.statistics().deaths == 0
    assert not names(name)


@both_loops
async def test_close_can_discard_and_a_producer_hears_that_the_owner_is_gone(name: str) -> None:
    async with pair(name) as (ring, producer):
        await producer.put(planned(0))
        assert ring.close(discard=True) is False
        assert not names(name)
        with pytest.raises(RingDetached, match=r"'.*' ended in good order.*kept for the next owner"):
            await producer.put(planned(1))
        with pytest.raises(RingDetached, match=r"no other came within 0.05 s"):
            await producer.put(planned(1), timeout=0.05)
        with pytest.raises(RingDetached, match="nobody owns a ring named"):
            await AsyncProducer.attach(name, timeout=0.05)
        async with RecordRing(name, SMALL) as other:
            await producer.put(planned(1))
            assert (await other.get()).record.group == 1
            assert producer.statistics().attachments == 2
            other.close(discard=True)


@both_loops
async def test_producers_that_wait_hear_of_the_end_while_what_they_put_is_still_trained(name: str) -> None:
    """One in a loop, one in a thread, each with a full ring of its own."""
    async with RecordRing(name, SMALL) as ring:
        held, heard = [], []
        both = await AsyncProducer.attach(name), await asyncio.to_thread(Producer.attach, name)

        async def waits_in_the_loop() -> None:
            with pytest.raises(RingDetached, match="ended in good order"):
                await both[0].put(planned(8), timeout=600)
            heard.append(0)

        def waits() -> None:
            with pytest.raises(RingDetached, match="ended in good order"):
                both[1].put(planned(108), timeout=600)
            heard.append(1)

        for group in range(8):
            await both[0].put(planned(group))
            await asyncio.to_thread(both[1].put, planned(100 + group))
            held += [await ring.get(), await ring.get()]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waits_in_the_loop)
                tasks.start_soon(anyio.to_thread.run_sync, waits)
                while not both[0].statistics().waits or not both[1].statistics().waits:
                    await anyio.lowlevel.checkpoint()
                ring.end_intake()
                ring.end_intake()
        assert sorted(heard) == [0, 1] and ring.statistics().producers == 0
        with pytest.raises(RingDetached, match="nobody owns a ring"):
            await AsyncProducer.attach(name, timeout=0.05)
        for delivery in held[1:]:  # a step that was under way is committed meanwhile
            delivery.release()
        assert ring.statistics().released == 15 and ring.statistics().rings == 2
        with pytest.raises(anyio.WouldBlock):
            ring.get_nowait()
        assert ring.close() is True
    async with RecordRing(name, SMALL) as other:
        await both[0].put(planned(8))
        again = [await other.get() for _ in range(2)]
        assert sorted(groups(again)) == [0, 8] and both[0].statistics().attachments == 2
        for delivery in again:
            delivery.release()
        await both[0].close()
        await asyncio.to_thread(both[1].close)


async def test_a_record_that_is_stored_while_the_intake_ends_is_left_to_the_next_owner(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer may have seen the seal, and puts it again: were it trained here, it would be trained twice."""
    async with RecordRing(name, SMALL) as ring:
        producer = await AsyncProducer.attach(name)
        (link,) = ring._links.values()
        await producer.put(planned(0))
        assert ring._arena is not None and producer._core._writer is not None
        segment, writer = ring._arena.segment, producer._core._writer
        seal = segment.seal

        def late() -> None:
            assert writer.try_put(planned(1), checksum=True)
            seal()

        monkeypatch.setattr(segment, "seal", late)
        ring.end_intake()
        first = ring.get_nowait()
        assert first.record.group == 0
        with pytest.raises(anyio.WouldBlock):
            ring.get_nowait()
        first.release()
        link.dead = True  # and were the producer dead by now, its ring would stay all the same
        ring._free_if_done(link)
        assert ring.close() is True
    async with RecordRing(name, SMALL) as other:
        delivery = await other.get()
        assert delivery.record.group == 1 and other.statistics().replayed == 1
        await producer.put(planned(1))
        await producer.put(planned(2))
        last = await other.get()
        assert last.record.group == 2 and other.statistics().duplicates == 1
        delivery.release()
        last.release()
        await producer.close()


@both_loops
async def test_torn_records_are_skipped_and_counted(name: str) -> None:
    async with pair(name) as (ring, producer):
        for group in range(4):
            await producer.put(planned(group))
        (link,) = ring._links.values()
        memory = link.memory
        payload = memory.payload
        payload[memory.offsets[0] + memory.sizes[0] - 100] ^= 1  # a flipped payload bit: the checksum is on
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


@both_loops
async def test_strangers_at_the_door_are_told_why(name: str) -> None:
    async with pair(name) as (ring, _):
        assert ring._arena is not None
        address = rendezvous.address(ring._arena.segment)
        for message, words in (
            (b"garbage", "not of this protocol"),
            (b"[]", "not of this protocol"),
            (json.dumps({"protocol": 99}).encode(), "protocol 99"),
            (json.dumps({"protocol": 1, "producer": "xyz"}).encode(), "16 bytes"),
            (b"x" * 5000, "longer than"),
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(address)
                stranger.send(message)
                answer = json.loads(await asyncio.to_thread(stranger.recv, 4096))
                assert words in answer["error"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shy:
            shy.connect(address)
        assert ring.statistics().refused == 5 and ring.statistics().producers == 1


@both_loops
async def test_no_room_for_one_more_producer_is_said(name: str) -> None:
    async with pair(name, RingSettings(size=100_000, slots=8, ring_bytes=1 << 16)):
        with pytest.raises(RingDetached, match=r"one more producer \(1 have a part; door.ring_mib.*largest free piece"):
            await AsyncProducer.attach(name)


def test_positions_beyond_32_and_63_bits_are_nothing_special() -> None:
    for first in (2**32 - 20, 2**63 - 20):
        buffer = memoryview(bytearray(block_bytes(4, 8192)))
        format_ring(buffer, 4, b"p" * 16, 1, 1, first=first)
        writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
        assert reader.replay() == []
        for group in range(60):
            assert writer.try_put(planned(group), checksum=True)
            ((slot, sequence),) = list(reader.poll())
            assert sequence == first + group + 1
            assert reader.take(slot, sequence, checksum=True).group == group
            reader.release(slot, sequence)
        assert reader.counts.torn == reader.counts.lost == 0


def test_a_reader_that_lags_takes_no_passed_over_position_for_a_torn_one() -> None:
    buffer = memoryview(bytearray(block_bytes(2, 8192)))
    format_ring(buffer, 2, b"p" * 16, 1, 1)
    writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
    reader.replay()
    for group in (0, 1):
        assert writer.try_put(planned(group), checksum=True)
    first, second = list(reader.poll())
    reader.release(*second)
    assert writer.try_put(planned(2), checksum=True)  # passes over position 2, whose slot holds record 0
    reader.release(*first)
    assert writer.try_put(
        planned(3), checksum=True
    )  # position 4: the slot of position 2, which nobody has looked at yet
    assert [reader.take(*one, checksum=True).group for one in reader.poll()] == [2, 3]
    assert (reader.counts.passed_over, reader.counts.lost, reader.counts.torn) == (1, 0, 0)


PRODUCER = """
import os, signal, sys
from transport_records import planned
from asyncrl.transport.producer import Producer
producer = Producer.attach(sys.argv[1])
for group in range(3):
    producer.put(planned(group))
print("put", flush=True)
sys.stdin.readline()
producer.put(planned(3))
print("put", flush=True)
sys.stdin.readline()
producer.close()
"""


@both_loops
async def test_a_killed_producer_leaves_its_records_and_its_ring_is_freed_after_them(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        process = child(PRODUCER, name)
        assert await asyncio.to_thread(line, process) == "put"
        process.kill()
        finish(process)
        taken = [await ring.get() for _ in range(3)]
        with anyio.fail_after(10):
            while not ring.statistics().deaths:
                await anyio.lowlevel.checkpoint()
        assert ring.statistics().rings == 1
        for d in taken:
            assert whole(d.record)
            d.release()
        s = ring.statistics()
        assert (s.rings, s.reclaimed, s.half_written, s.deaths) == (0, 1, 0, 1)


@both_loops
async def test_a_stopped_producer_keeps_its_ring_also_across_owners(name: str) -> None:
    process = child(PRODUCER, name)
    async with RecordRing(name, SMALL) as ring:
        assert await asyncio.to_thread(line, process) == "put"
        process.send_signal(signal.SIGSTOP)
        first = await ring.get()
        first.release()
        assert ring.close() is True
    async with RecordRing(name, SMALL) as ring:
        taken = [await ring.get() for _ in range(2)]
        for d in taken:
            d.release()
        s = ring.statistics()
        assert (s.rings, s.producers, s.deaths, s.replayed) == (1, 0, 0, 2)
        process.send_signal(signal.SIGCONT)
        say(process)
        d = await ring.get()
        assert d.record.group == 3 and ring.statistics().producers == 1
        d.release()
        say(process)
        assert await asyncio.to_thread(process.wait, 10) == 0
        finish(process)


OWNER = """
import asyncio, json, sys
from asyncrl.transport.record_ring import RecordRing
from asyncrl.transport.ring_types import RingSettings

async def own():
    async with RecordRing(sys.argv[1], RingSettings(size=1 << 20, slots=8, ring_bytes=1 << 16, checksum=True)):
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""


async def _after_a_killed_owner(name: str) -> AsyncProducer:
    process = child(OWNER, name)
    await asyncio.to_thread(line, process)
    producer = await AsyncProducer.attach(name)
    await producer.put(planned(0))
    process.kill()
    finish(process)
    return producer


@both_loops
async def test_records_are_accepted_while_nobody_owns_the_ring(name: str) -> None:
    producer = await _after_a_killed_owner(name)
    for group in range(1, 8):
        await producer.put(planned(group))
    assert not producer.statistics().attached
    with pytest.raises(RingFull, match=r"8 of 8 records.*owner: gone"):
        await producer.put(planned(8), timeout=0.1)
    async with RecordRing(name, SMALL) as ring:
        for group in range(8):
            delivery = await ring.get()
            assert delivery.record.group == group and whole(delivery.record)
            delivery.release()
        await producer.put(planned(8))
        (await ring.get()).release()
        await producer.close()


@both_loops
async def test_the_next_owner_hears_of_a_put_that_took_the_last_one_for_alive(name: str) -> None:
    producer = await _after_a_killed_owner(name)
    async with RecordRing(name, SMALL) as ring:
        (await ring.get()).release()
        await producer.put(planned(1))
        with anyio.fail_after(10):
            delivery = await ring.get()
        assert delivery.record.group == 1
        delivery.release()
        await producer.close()


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_owner_that_comes_between_the_look_for_one_and_the_put_gets_the_record(
    name: str, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = producer_module._attach_once, []

    def late(core: Any, deadline: float) -> Any:
        calls.append(core)
        return None if len(calls) == 1 else real(core, deadline)  # the first look came just too early

    async def main() -> None:
        producer = await _after_a_killed_owner(name)
        await producer.put(planned(9))  # it hears that the owner is gone
        async with RecordRing(name, SMALL) as ring:
            for _ in range(2):
                (await ring.get()).release()
            monkeypatch.setattr(producer_module, "_attach_once", late)
            if synchronous:
                await asyncio.to_thread(Producer(producer._core).put, planned(1))
            else:
                await producer.put(planned(1))
            with anyio.fail_after(10):
                delivery = await ring.get()
            assert delivery.record.group == 1 and len(calls) == 2
            delivery.release()
            await producer.close()

    asyncio.run(main())


IDLE = """
import asyncio, sys, threading, uvloop
from transport_records import planned
from asyncrl.transport.producer import AsyncProducer, Producer
from asyncrl.transport.record_ring import RecordRing
from asyncrl.transport.ring_types import RingSettings
from asyncrl.errors import RingFull

PRODUCERS = 2

async def consume():
    async with RecordRing(sys.argv[1], RingSettings(size=1 << 20, slots=8, ring_bytes=1 << 16)) as ring:
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.readline(), loop.call_soon_threadsafe(stop.set))).start()
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        taken = [await ring.get() for _ in range(8 * PRODUCERS)]
        print("idle", flush=True)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ring.get())
            await stop.wait()
            waiting.cancel()
        ring.close(discard=True)

def produce():
    producer = Producer.attach(sys.argv[1])
    for group in range(8):
        producer.put(planned(group))
    print("full", flush=True)
    try:
        producer.put(planned(8), timeout=30)
    except RingFull:
        pass

async def produce_in_the_loop():
    producer = await AsyncProducer.attach(sys.argv[1])
    for group in range(100, 108):
        await producer.put(planned(group))
    print("full", flush=True)
    await producer.put(planned(108), timeout=30)

if sys.argv[2] == "produce":
    produce()
else:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if sys.argv[2] == "uvloop" else None) as runner:
        runner.run(consume() if sys.argv[3] == "consume" else produce_in_the_loop())
"""


def switches(pid: int) -> dict[str, str]:
    """Voluntary context switches of every thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(row.split(":", 1) for row in (task / "status").read_text().splitlines())
        found[task.name] = status["voluntary_ctxt_switches"].strip()
    return found


def test_idle_consumers_and_blocked_producers_do_not_wake_for_5_seconds(name: str) -> None:
    """With asyncio and with uvloop, side by side: a consumer, a synchronous producer, a producer in an event loop."""
    consumers, producers = [], []
    for loop in ("asyncio", "uvloop"):
        consumer = child(IDLE, f"{name}-{loop}", loop, "consume")
        assert line(consumer) == "ready"
        both = [child(IDLE, f"{name}-{loop}", "produce"), child(IDLE, f"{name}-{loop}", loop, "produce")]
        assert [line(producer) for producer in both] == ["full", "full"] and line(consumer) == "idle"
        consumers.append(consumer)
        producers += both
    pids = [process.pid for process in (*consumers, *producers)]
    quiet = threading.Event()
    for pid in pids:  # until all are asleep
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            quiet.wait(0.01)
    quiet.wait(0.5)
    before = [switches(pid) for pid in pids]
    quiet.wait(5)
    assert [switches(pid) for pid in pids] == before
    for producer in producers:
        producer.kill()
        finish(producer)
    for consumer in consumers:
        say(consumer)
        assert finish(consumer) == 0


@both_loops
async def test_a_producer_is_not_carried_over_a_fork(name: str) -> None:
    async with pair(name) as (_, producer):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                producer._core.check()
            except LifecycleError:
                code = 0
            finally:
                os._exit(code)
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0


def test_settings_and_states(name: str) -> None:
    async def main() -> Any:
        ring = RecordRing(name, SMALL)
        with pytest.raises(LifecycleError, match="not open"):
            ring.get_nowait()
        async with ring:
            pass
        with pytest.raises(LifecycleError, match="opened before"):
            await ring.__aenter__()
        assert [d async for d in ring] == []

    asyncio.run(main())
