"""`child.py handover`: asyncrl's own sides of `asyncrl bench transport`, and the two without any peer.

    ring        a leased record in the event loop, asyncio or uvloop
    stash       the same, as 16 trajectories (views) in the stash, whole
    tensor      the tensor queue: an item of four arrays, in the event loop
    queue       multiprocessing.Queue, pickled arrays; a blocking get, which is its fastest form
    memcpy      the same bytes copied into a warm buffer in one process: the limit

Each runs in a fresh process with one spawned producer. The stamp travels with the group; a stamp of 0 is the end. The stash
also says when the record was written (its header tells), leased, and cut into trajectories.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from asyncrl.records.layout import Section
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.transport.queues.tensor_queue import attach_queue, share_queue
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

from .arrival import Arrival
from .job import HandoverJob, new_loop
from .peers.handover_group import COLUMNS, IN_FLIGHT, MEMBERS, arrays, footprint, turns

END = 0  # the stamp behind the last group
Times = list[tuple[int, ...]]


def sections(tokens: int) -> dict[int, list[Any]]:
    return {Section[name.upper()]: column for name, column in arrays(tokens).items()}


def record(group: int, data: dict[int, list[Any]], stamp: int) -> Plan:
    """One group as it is put. Its stamp travels as its epoch, so that nothing is added to what is handed over."""
    return plan(Draft(group, range(MEMBERS), MEMBERS, data, stamp))


def end_record(group: int) -> Plan:
    return record(group, {Section.TOKENS: [np.empty(0, np.int32)] * MEMBERS}, END)


def ring_settings(tokens: int, records: int = IN_FLIGHT) -> RingSettings:
    ring = records * (footprint(tokens) + (1 << 13))
    return RingSettings(size=ring + (1 << 22), slots=64, ring_bytes=ring)


# -- producers, each in a process of its own --------------------------------------------------------------------------


def produce_ring(name: str, job: HandoverJob, credit: Any) -> None:
    data = sections(job.tokens)
    with Producer.attach(name) as producer:
        for group in turns(vars_of(job), credit):
            producer.put(record(group, data, time.monotonic_ns()))
        producer.put(end_record(job.groups))


def produce_tensors(name: str, job: HandoverJob, credit: Any) -> None:
    async def produce() -> None:
        data = arrays(job.tokens)
        async with share_queue(name, IN_FLIGHT, (IN_FLIGHT + 1) * (footprint(job.tokens) + (1 << 12))) as sender:
            for _ in turns(vars_of(job)):
                if credit is not None:
                    await asyncio.to_thread(credit.acquire)  # the loop has the receiver to let in
                stamp = np.array([time.monotonic_ns()])
                await sender.put({"stamp": stamp, **{name: np.stack(column) for name, column in data.items()}})

    asyncio.run(produce())


def produce_queue(queue: Any, job: HandoverJob, credit: Any) -> None:
    data = arrays(job.tokens)
    for _ in turns(vars_of(job), credit):
        queue.put((time.monotonic_ns(), data))
    queue.put((0, {}))


def vars_of(job: HandoverJob) -> dict[str, Any]:
    return {"groups": job.groups, "pace_s": job.pace_s, "seconds": job.seconds}


# -- consumers --------------------------------------------------------------------------------------------------------


def spawn(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def new_credit(job: HandoverJob) -> Any:
    """One group on the way where the pace is given; at full speed the side's own backpressure is what bounds it."""
    return multiprocessing.get_context("spawn").Semaphore(1) if job.pace_s else None


async def consume_ring(job: HandoverJob, *, stash: bool) -> Times:
    """(put, usable) in monotonic ns of every group; of the stash (put, usable, written, leased, cut)."""
    name, credit = f"bench-{os.getpid()}", new_credit(job)
    times: Times = []
    clocks = time.time_ns() - time.monotonic_ns()
    async with RecordRing(name, ring_settings(job.tokens)) as ring:
        process = spawn(produce_ring, name, job, credit)
        arrival = Arrival()
        async for delivery in ring:
            leased, found = time.monotonic_ns(), delivery.record
            parts: tuple[int, ...] = ()
            stamp = found.epoch
            if stamp == END:
                delivery.release()
                break
            if stash:
                parts = (found.written_ns - clocks, leased, arrival.take(delivery))
            times.append((stamp, time.monotonic_ns(), *parts))
            delivery.release()
            if credit is not None:
                credit.release()
        await asyncio.to_thread(process.join)
    return times


async def consume_tensors(job: HandoverJob) -> Times:
    name, credit = f"bench-{os.getpid()}", new_credit(job)
    times: Times = []
    process = spawn(produce_tensors, name, job, credit)
    async with await attach_queue(name) as receiver:
        async for item in receiver:
            with item:
                held = [item[column] for column in COLUMNS]
                times.append((int(item["stamp"][0]), time.monotonic_ns()))
                if held[0].shape != (MEMBERS, job.tokens):
                    raise AssertionError(f"the tokens are {held[0].shape}")
                del held
            if credit is not None:
                credit.release()
    await asyncio.to_thread(process.join)
    return times


def consume_queue(job: HandoverJob) -> Times:
    queue, credit = multiprocessing.get_context("spawn").Queue(IN_FLIGHT), new_credit(job)
    times: Times = []
    process = spawn(produce_queue, queue, job, credit)
    while True:
        put, _held = queue.get()
        if not put:
            break
        times.append((put, time.monotonic_ns()))
        if credit is not None:
            credit.release()
    process.join()
    return times


def copy_only(job: HandoverJob) -> Times:
    data = arrays(job.tokens)
    targets: dict[str, Any] = {name: np.empty(MEMBERS * job.tokens, kind) for name, kind in COLUMNS.items()}
    times: Times = []
    for _group in turns(vars_of(job)):
        begin = time.monotonic_ns()
        for name, column in data.items():
            np.concatenate(column, out=targets[name])
        times.append((begin, time.monotonic_ns()))
    return times


def measure(job: HandoverJob) -> Times:
    """One run, in this process (it is a fresh one)."""
    if job.side == "queue":
        return consume_queue(job)
    if job.side == "memcpy":
        return copy_only(job)
    with asyncio.Runner(loop_factory=partial(new_loop, job.loop)) as runner:
        if job.side == "tensor":
            return runner.run(consume_tensors(job))
        return runner.run(consume_ring(job, stash=job.side == "stash"))


def run_handover(job: HandoverJob) -> dict[str, Any]:
    return {"times": measure(job), "versions": {"numpy": np.__version__}}
