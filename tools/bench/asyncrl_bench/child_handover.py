"""`child.py handover`: asyncrl's own sides of `asyncrl bench transport`, and the two without any peer.

    ring        a record ring: the producer puts records with the columns that all sides hand over, the door of a run takes them
    client      the same with `asyncrl.client`, whose push checks each member and adds texts and metadata
    queue       multiprocessing.Queue, pickled arrays; read in the event loop when something lies in it
    line        the line between nodes: an encrypted record to a server at 127.0.0.1, which answers when the group is trained
    local       no transport: the group lies in the process whose microbatch it becomes. What all sides pay behind the hand-over
    memcpy      the same bytes copied into a warm buffer in one process: the limit of a hand-over, without a microbatch

Each runs in a fresh process with one spawned producer, which says when it put each group only after the last one. What a side does
with a group that was handed to it is in peers/way.py, the same for all.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from asyncrl.client import Client, Scored
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.records.layout import Section
from asyncrl.records.read import read
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings

from .job import RING, HandoverJob, new_loop
from .peers.handover_group import (
    COLUMNS,
    IN_FLIGHT,
    MEMBERS,
    REWARDS,
    Notes,
    arrays,
    footprint,
    prompt_of,
    readable,
    turns,
    versions_of,
)
from .peers.side import cpu_seconds
from .peers.way import Way

SECRET = "of a benchmark"


def ring_settings(tokens: int, records: int = IN_FLIGHT) -> RingSettings:
    ring = records * (footprint(tokens) + (1 << 13))
    return RingSettings(total_bytes=ring + (1 << 22), slots=64, payload_bytes=ring)


# -- producers, each in a process of its own --------------------------------------------------------------------------


def produce(job: HandoverJob, pipe: Any, credit: Any, put: Callable[[int, list[Any]], None]) -> None:
    """All groups, from the word of the consumer on; then when each was put, and the CPU time of this process meanwhile."""
    pipe.send("ready")
    pipe.recv()
    begun, puts = time.process_time(), []
    for group in turns(job.turns(), credit):
        versions = versions_of(group, job.tokens)
        puts.append(time.monotonic_ns())
        put(group, versions)
    pipe.send((puts, time.process_time() - begun))


def sections(tokens: int) -> dict[int, list[Any]]:
    columns: dict[int, list[Any]] = {Section[name.upper()]: column for name, column in arrays(tokens).items()}
    return columns | {Section.REWARDS: REWARDS, Section.PROMPT_LENGTHS: [prompt_of(tokens)] * MEMBERS}


def record(group: int, data: dict[int, list[Any]]) -> Plan:
    return plan(Draft(group, range(MEMBERS), MEMBERS, data))


def produce_ring(name: str, job: HandoverJob, pipe: Any, credit: Any) -> None:
    data = sections(job.tokens)
    with Producer.attach(name) as producer:
        produce(job, pipe, credit, lambda group, new: producer.put(record(group, data | {Section.VERSIONS: new})))


def produce_client(name: str, job: HandoverJob, pipe: Any, credit: Any) -> None:
    data, prompt = arrays(job.tokens), prompt_of(job.tokens)
    rows = [{key: column[member] for key, column in data.items()} for member in range(MEMBERS)]
    scored = [Scored(reward=reward, prompt_length=prompt, **row) for reward, row in zip(REWARDS, rows, strict=True)]
    with Client.attach(name) as client:

        def push(group: int, versions: list[Any]) -> None:
            for one, row in zip(scored, versions, strict=True):
                one.versions = row
            client.push(group, scored)

        produce(job, pipe, credit, push)


def produce_queue(queue: Any, job: HandoverJob, pipe: Any, credit: Any) -> None:
    data = arrays(job.tokens)
    produce(job, pipe, credit, lambda group, versions: queue.put((data | {"versions": versions}, REWARDS)))
    queue.put(None)


def produce_line(address: str, job: HandoverJob, pipe: Any, credit: Any) -> None:
    async def run() -> None:
        data, asks = sections(job.tokens), set[asyncio.Task[Any]]()
        async with LineClient(address, SECRET, "rank 1") as line:
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            begun, puts = time.process_time(), []
            for group in turns(job.turns()):
                # No thread: the answers come while it waits.
                while not credit.acquire(block=False):
                    await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
                    asks = {ask for ask in asks if not ask.done()}
                planned = record(group, data | {Section.VERSIONS: versions_of(group, job.tokens)})
                puts.append(time.monotonic_ns())
                buffer = bytearray(planned.size)
                planned.write(memoryview(buffer))
                asks.add(asyncio.create_task(line.ask("group", group, (buffer,))))
            await asyncio.gather(*asks)
            pipe.send((puts, time.process_time() - begun))

    asyncio.run(run())


# -- consumers --------------------------------------------------------------------------------------------------------


def spawn(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class StampedRing(RecordRing):
    """Says when the record of each group was leased, and when it was written."""

    def __init__(self, name: str, settings: RingSettings) -> None:
        super().__init__(name, settings)
        self.leased_ns: dict[int, int] = {}
        self.written_ns: dict[int, int] = {}

    def get_nowait(self) -> Delivery:
        delivery = super().get_nowait()
        group = delivery.record.group
        self.leased_ns[group], self.written_ns[group] = time.monotonic_ns(), delivery.record.written_ns
        return delivery


class Measured:
    """One producer and one way, from the first group to the last one's clear."""

    def __init__(self, job: HandoverJob) -> None:
        context = multiprocessing.get_context("spawn")
        self.job = job
        self.name = f"{RING}{os.getpid()}"
        # From put to clear, of every side alike. (At full speed the ring's own bytes would do: they hold as many.)
        self.credit = context.Semaphore(1 if job.pace_s else IN_FLIGHT)
        self.way = Way(MEMBERS, job.tokens, prompt_of(job.tokens), self.credit.release)
        self.found: dict[str, Any] = {}

    @asynccontextmanager
    async def producing(self, target: Callable[..., None], where: Any) -> AsyncIterator[None]:
        """Inside: the groups are on their way. At the end all are cleared."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process, notes = spawn(target, where, self.job, theirs, self.credit), Notes(ours)
        theirs.close()  # so that the end of a producer that failed is heard
        await notes.next()
        begun = _spent()
        ours.send("go")
        yield
        puts, producer_s = await notes.next()
        await self.way.wait_cleared(len(puts))
        spent = [end - start for start, end in zip(begun, _spent(), strict=True)]
        self.found |= dict(zip(("wall_s", "cpu_s", "consumer_s", "loop_s"), spent, strict=True))
        self.found |= {"producer_s": producer_s, **self.way.result(puts)}
        await asyncio.to_thread(process.join)


def _spent() -> tuple[float, ...]:
    return time.perf_counter(), cpu_seconds(), time.process_time(), time.thread_time()


async def consume_ring(job: HandoverJob, target: Callable[..., None] = produce_ring) -> dict[str, Any]:
    from asyncrl.runtime.door import serve  # it needs torch, which the other sides do without

    own, clocks = Measured(job), time.time_ns() - time.monotonic_ns()
    ring = StampedRing(own.name, ring_settings(job.tokens))
    async with ring, own.way:
        own.way.handed_ns = ring.leased_ns  # the run numbers groups as they come: as their one producer does
        own.way.serve(serve, ring)
        async with own.producing(target, own.name):
            pass  # the door takes them
        counts = ring.statistics()
    leases = {"taken": counts.records, "ended": counts.released, "outstanding": counts.outstanding}
    times = [(*row, ring.written_ns[group] - clocks) for group, row in enumerate(own.found["times"])]
    return own.found | {"leases": leases, "times": times}


async def consume_queue(job: HandoverJob) -> dict[str, Any]:
    own, group = Measured(job), 0
    queue: Any = multiprocessing.get_context("spawn").Queue(IN_FLIGHT)
    async with own.way, own.producing(produce_queue, queue):
        while True:
            await readable(queue._reader)  # else `get` would block the loop, or need a thread and one more hand-over
            found = queue.get()
            if found is None:
                break
            await own.way.handed(group, *found)
            group += 1
    return own.found


async def consume_line(job: HandoverJob) -> dict[str, Any]:
    own = Measured(job)

    async def take(peer: str, group: int, buffers: Any) -> None:
        members = trajectories_of(read(buffers[0]))
        columns = {key: [getattr(member, key) for member in members] for key in COLUMNS}
        await own.way.handed(group, columns, [member.reward for member in members])
        await own.way.wait_cleared(group + 1)

    async with own.way, LineServer(SECRET) as server:
        server.on("group", take)
        async with own.producing(produce_line, server.address):
            pass
    return own.found


async def no_transport(job: HandoverJob) -> dict[str, Any]:
    own, data = Measured(job), arrays(job.tokens)
    puts = []
    async with own.way:
        begun = _spent()
        for group in turns(job.turns()):
            given = data | {"versions": versions_of(group, job.tokens)}
            puts.append(time.monotonic_ns())
            await own.way.handed(group, given, REWARDS)
            await own.way.wait_cleared(group + 1)
        spent = [end - start for start, end in zip(begun, _spent(), strict=True)]
    return dict(zip(("wall_s", "cpu_s", "consumer_s", "loop_s"), spent, strict=True)) | own.way.result(puts)


def copy_only(job: HandoverJob) -> dict[str, Any]:
    data = arrays(job.tokens)
    targets: dict[str, Any] = {name: np.empty(MEMBERS * job.tokens, kind) for name, kind in COLUMNS.items()}
    times = []
    for _group in turns(job.turns()):
        begin = time.monotonic_ns()
        for name, column in data.items():
            np.concatenate(column, out=targets[name])
        times.append((begin, time.monotonic_ns()))
    return {"times": times}


IN_A_LOOP: dict[str, Callable[[HandoverJob], Coroutine[Any, Any, dict[str, Any]]]] = {
    "ring": consume_ring,
    "client": partial(consume_ring, target=produce_client),
    "queue": consume_queue,
    "line": consume_line,
    "local": no_transport,
}


def run_handover(job: HandoverJob) -> dict[str, Any]:
    """One run, in this process (it is a fresh one)."""
    if job.side == "memcpy":
        found = copy_only(job)
    else:
        with asyncio.Runner(loop_factory=partial(new_loop, job.loop or "uvloop")) as runner:
            found = runner.run(IN_A_LOOP[job.side](job))
    return found | {"versions": {"numpy": np.__version__}}
