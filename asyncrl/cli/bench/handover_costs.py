"""What writing a group and reading it cost, each by itself, over sizes: `python -m asyncrl.cli.bench.handover_costs JOB.json`.

    write   one `put` into a ring that others read, against a copy of the same arrays into a warm buffer as large as the ring
            (both walk through it), alternating in the producer
    read    from the moment that the record is there: leased, decoded, 16 trajectories in the stash, whole. In the consumer's
            event loop, between two of its waits

Per size the medians; nothing is on the way while another is timed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asyncrl.data.stash import Stash
from asyncrl.records.trajectories import trajectories_of
from asyncrl.transport.producer import Producer
from asyncrl.transport.record_ring import Delivery, RecordRing

from .handover import end_record, new_loop, record, ring_settings, sections, spawn
from .job import HandoverJob
from .peers.handover_group import Notes, answer, footprint, turns

RECORDS = 3  # groups that fit into the ring
WARM_UP = 2 * RECORDS


def produce(name: str, job: HandoverJob, pipe: Any, credit: Any) -> None:
    """Tells the consumer of every record when it is there; at the end the medians: ns of a put, ns of a copy."""
    data = sections(job.tokens)
    flat = [array.view(np.uint8) for column in data.values() for array in column]
    ring = ring_settings(job.tokens, RECORDS)
    target = np.zeros(ring.ring_bytes, np.uint8)
    puts, copies, at = [], [], 0
    with Producer.attach(name) as producer:
        for group in turns({"groups": job.groups, "pace_s": 0, "seconds": job.seconds}, credit):
            if at + footprint(job.tokens) > len(target):
                at = 0
            begin = time.monotonic_ns()
            for array in flat:
                target[at : at + len(array)] = array
                at += len(array)
            middle = time.monotonic_ns()
            producer.put(record(group, data, middle))
            puts.append(time.monotonic_ns() - middle)
            copies.append(middle - begin)
            pipe.send("put")
        producer.put(end_record(job.groups))
        pipe.send("put")
        pipe.send([statistics.median(each[WARM_UP:] or each) for each in (puts, copies)])


async def now(ring: RecordRing) -> tuple[int, Delivery]:
    """The record that is known to be there, and when the look began that found it."""
    while True:
        begin = time.perf_counter_ns()
        try:
            return begin, ring.get_nowait()
        except anyio.WouldBlock:
            await asyncio.sleep(0)


async def consume(job: HandoverJob) -> dict[str, float]:
    name, context = f"bench-{os.getpid()}", multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    credit, notes, reads = context.Semaphore(1), Notes(ours), list[int]()
    waiting: Stash[int] = Stash(1024)
    async with RecordRing(name, ring_settings(job.tokens, RECORDS)) as ring:
        process = spawn(produce, name, job, theirs, credit)
        while True:
            await notes.next()
            begin, delivery = await now(ring)
            found = delivery.record
            if not found.lengths.any():
                delivery.release()
                break
            trajectories = trajectories_of(found, copy=False)
            whole = waiting.add_whole(trajectories, found.group, lease=delivery, epoch=found.epoch)
            reads.append(time.perf_counter_ns() - begin)
            assert whole is not None
            del found, trajectories, whole
            delivery.release()
            credit.release()
        put, copy = await notes.next()
        await asyncio.to_thread(process.join)
    bytes_ = footprint(job.tokens)
    return {
        "bytes": bytes_,
        "write_us": put / 1e3,
        "memcpy_us": copy / 1e3,
        "write_gb_s": bytes_ / put,
        "memcpy_gb_s": bytes_ / copy,
        "write_share_of_memcpy": copy / put,
        "read_us": statistics.median(reads[WARM_UP:] or reads) / 1e3,
    }


if __name__ == "__main__":
    asked = HandoverJob.read(Path(sys.argv[1]))
    with asyncio.Runner(loop_factory=new_loop(asked.loop)) as runner:
        answer([], runner.run(consume(asked)))  # type: ignore[arg-type]
