"""Record ring: owners and producers come, go, stop and die; replay, duplicates, idleness; asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from transport_helpers import both_loops, child, finish, line, living, names, say
from transport_records import OWNER, SMALL, drop, groups, pair, planned, whole

from asyncrl.errors import ArenaOwned, RingDetached, RingFull, TransportError
from asyncrl.transport.memory.segment import Segment
from asyncrl.transport.rings import producer as producer_module
from asyncrl.transport.rings.attachment import address, listen
from asyncrl.transport.rings.producer import AsyncProducer, Producer
from asyncrl.transport.rings.record_ring import RecordRing


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
    async with RecordRing(name, SMALL) as ring:
        again = [await ring.get() for _ in range(5)]
        assert groups(again) == [0, 2, 3, 4, 5] and all(d.fresh == (0, 1) for d in again)
        assert (ring.statistics().replayed, ring.statistics().duplicates) == (5, 0)
        await producer.put(planned(3, members=(1, 2)))  # attaches by itself; member 1 is in the ring already
        more = await ring.get()
        assert more.record.group == 3 and more.fresh == (1,)
        again[2].release()
        more.release()
        await producer.put(planned(3, members=(2,)))  # already trained
        await producer.put(planned(3, epoch=1, members=(2,)))  # another epoch is another group
        last = await ring.get()
        assert last.record.epoch == 1 and ring.statistics().duplicates == 2
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
async def test_a_producer_hears_that_the_owner_is_gone_and_its_records_were_cleared(name: str) -> None:
    async with pair(name) as (ring, producer):
        await producer.put(planned(0))
        drop(ring)
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
            drop(other)


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
        writer, seal = producer._writer, link.segment.seal
        assert writer is not None

        def late() -> None:
            assert writer.try_put(planned(1))
            seal()

        monkeypatch.setattr(link.segment, "seal", late)
        ring.end_intake()
        first = ring.get_nowait()
        assert first.record.group == 0
        with pytest.raises(anyio.WouldBlock):
            ring.get_nowait()
        first.release()
        link.dead = True  # and were the producer dead by now, its ring would stay all the same
        ring._free_if_ended(link)
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


PRODUCER = """
import os, signal, sys
from transport_records import drop, planned
from asyncrl.transport.rings.producer import Producer
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
async def test_an_error_inside_the_owner_is_heard_by_both_sides(name: str) -> None:
    """In a callback of the loop nobody waits for it: it ends who takes records, and no producer waits for its answer."""

    def broken(*_: object) -> None:
        raise ValueError("of the test")

    with anyio.fail_after(20):
        async with RecordRing(name, SMALL) as ring:
            ring._admit = broken  # type: ignore[method-assign, assignment]
            attaching = asyncio.create_task(AsyncProducer.attach(name, timeout=0.3))
            with pytest.raises(TransportError, match=r"failed: ValueError\('of the test'\)"):
                await ring.get()
            with pytest.raises(RingDetached):
                await attaching


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
async def test_an_owner_that_comes_between_the_look_for_one_and_the_put_gets_the_record(
    name: str, synchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = producer_module.ProducerCore.try_attach, []

    def late(core: Any, deadline: float) -> Any:
        calls.append(core)
        return None if len(calls) == 1 else real(core, deadline)  # the first look came just too early

    producer = await _after_a_killed_owner(name)
    await producer.put(planned(9))  # it hears that the owner is gone
    async with RecordRing(name, SMALL) as ring:
        for _ in range(2):
            (await ring.get()).release()
        monkeypatch.setattr(producer_module.ProducerCore, "try_attach", late)
        if synchronous:
            blocking = Producer(name)
            vars(blocking).update({**vars(producer), "_lock": blocking._lock})
            await asyncio.to_thread(blocking.put, planned(1))
            vars(producer).update({**vars(blocking), "_lock": producer._lock})
        else:
            await producer.put(planned(1))
        with anyio.fail_after(10):
            delivery = await ring.get()
        assert delivery.record.group == 1 and len(calls) == 2
        delivery.release()
        await producer.close()


def state_of(pid: int) -> str:
    """Of the main thread: "S" where it sleeps."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_interrupted_put_did_not_put_and_the_producer_goes_on(name: str) -> None:
    """Ctrl-C while the main thread waits for room."""
    process = child(OWNER, name)
    line(process)
    producer = Producer.attach(name)
    for group in range(8):
        producer.put(planned(group))

    def interrupt() -> None:
        while not producer.statistics().waits or state_of(os.getpid()) != "S":
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            producer.put(planned(99), timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)
    process.kill()
    finish(process)

    async def main() -> None:
        async with RecordRing(name, SMALL) as ring:
            taken = [await ring.get() for _ in range(8)]
            taken[3].release()
            await asyncio.to_thread(producer.put, planned(8))
            taken.append(await ring.get())
            assert groups(taken) == list(range(9))
            producer.close()
            for delivery in taken:
                delivery.release()

    asyncio.run(main())


IDLE = """
import asyncio, sys, threading, uvloop
from transport_records import drop, planned
from asyncrl.transport.rings.producer import AsyncProducer, Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from asyncrl.errors import RingFull

PRODUCERS = 2

async def consume():
    async with RecordRing(sys.argv[1], RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)) as ring:
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.readline(), loop.call_soon_threadsafe(stop.set))).start()
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        taken = [await ring.get() for _ in range(8 * PRODUCERS)]
        print("idle", flush=True)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ring.get())
            await stop.wait()
            waiting.cancel()
        drop(ring)

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
        while state_of(pid) != "S":
            quiet.wait(0.01)
    # On a busy machine a thread may get its last turn late. What wakes of itself does so in each window.
    for _ in range(4):
        quiet.wait(0.5)
        before = [switches(pid) for pid in pids]
        quiet.wait(5)
        if (after := [switches(pid) for pid in pids]) == before:
            break
    assert after == before
    for producer in producers:
        producer.kill()
        finish(producer)
    for consumer in consumers:
        say(consumer)
        assert finish(consumer) == 0


FULL = """
import asyncio, os, resource, sys, time, uvloop
from transport_records import SMALL
from asyncrl.transport.rings.record_ring import RecordRing

async def own():
    async with RecordRing(sys.argv[1], SMALL) as ring:
        held = [os.dup(0)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            print("full", flush=True)
        while not ring.statistics().pauses:
            await asyncio.sleep(0.01)
        begun, before = time.monotonic(), ring.statistics().pauses
        while ring.statistics().pauses < before + 3:
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - begun
        for fd in held:
            os.close(fd)
        delivery = await ring.get()
        print(delivery.record.group, seconds >= 0.2, flush=True)
        delivery.release()
        await asyncio.to_thread(sys.stdin.readline)

with asyncio.Runner(loop_factory=uvloop.new_event_loop if sys.argv[2] == "uvloop" else None) as runner:
    runner.run(own())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_owner_without_a_free_descriptor_lets_producers_in_later_and_does_not_spin(name: str, loop: str) -> None:
    with living(FULL, name, loop) as process:
        assert line(process) == "full"
        with Producer.attach(name) as producer:
            producer.put(planned(7))
            assert line(process) == "7 True"
        assert finish(process) == 0


def test_a_producer_waits_for_an_owner_that_accepts_no_more_connections(name: str) -> None:
    owner = Segment.create(name, 0)
    with contextlib.ExitStack() as stack:
        stack.callback(owner.close, unlink=True)
        stack.enter_context(listen(owner))
        for _ in range(129):
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(address(owner))
        began = time.monotonic()
        with pytest.raises(RingDetached, match="does not answer; its event loop is blocked"):
            Producer.attach(name, timeout=0.2)
        assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("need", list(producer_module.Need)[1:], ids=lambda need: need.value)
def test_time_in_which_a_job_was_suspended_is_not_time_of_a_put(
    need: producer_module.Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits of 0.2 s each; one of them takes 100 s, because nobody ran."""
    now, waits = 1000.0, 0
    monkeypatch.setattr("time.monotonic", lambda: now)
    core = SimpleNamespace(
        waits=0,
        space_descriptors=list,
        clear_space_event=lambda: None,
        raise_at_owner_end=lambda: None,
        try_attach=lambda deadline: None,
        try_put=lambda plan, ownerless: need,
        timeout_error=lambda plan, timeout: RingFull("late"),
    )

    class Waits(producer_module.ThreadWaits):
        @staticmethod
        async def readable(fds: Sequence[int], seconds: float) -> None:
            nonlocal now, waits
            waits += 1
            now += 100.0 if waits == 3 else 0.2

    with pytest.raises(RingFull):
        producer_module._run_blocking(producer_module._complete_put(core, Waits, None, need, now + 5.0, 5.0))  # type: ignore[arg-type]
    assert 24 <= waits <= 26
