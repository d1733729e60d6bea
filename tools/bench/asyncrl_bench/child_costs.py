"""`child.py costs`: what writing a group and reading it cost, each by itself, over sizes.

    write   one `put` into a ring that others read, against a copy of the same arrays into warm memory of the same kind (shared, in
            small pages) and as large as the ring (both walk through it), alternating in the producer
    read    from the moment that the record is there: leased, decoded, 16 trajectories in the stash, whole. In the consumer's
            event loop, between two of its waits, right behind three small ones that are read in the same way: the wait for a
            large one is longer, and a process that waited longer finds less of itself in the caches. Sizes are compared by
            what a read costs to the small one right before it: between two sizes the machine may have become slower

Per size the medians; nothing is on the way while another is timed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import multiprocessing
import os
import statistics
import time
from functools import partial
from typing import Any

import anyio
import numpy as np

from asyncrl.data.stash import Stash, StashedGroup
from asyncrl.records.trajectories import trajectories_of
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

from .child_handover import record, ring_settings, sections, spawn
from .job import RING, HandoverJob, new_loop
from .peers.handover_group import Notes, arrays, footprint, turns

RECORDS = 3  # groups that fit into the ring
SMALL, BEFORE = 64, 3  # tokens of each trajectory of the small records; how many of them lie before each timed one
WARM_UP = 2 * RECORDS


def room(tokens: int) -> RingSettings:
    settings = ring_settings(tokens, RECORDS)
    small = ring_settings(SMALL, 2 * BEFORE).payload_bytes
    return dataclasses.replace(
        settings, total_bytes=settings.total_bytes + small, payload_bytes=settings.payload_bytes + small
    )


def produce(name: str, job: HandoverJob, pipe: Any, credit: Any) -> None:
    """Tells the consumer of every record when it is there; at the end the medians: ns of a put, ns of a copy."""
    data, small = sections(job.tokens), sections(SMALL)
    flat = [array.view(np.uint8) for column in arrays(job.tokens).values() for array in column]
    target = np.frombuffer(mmap.mmap(-1, ring_settings(job.tokens, RECORDS).payload_bytes), np.uint8)
    target[:] = 0
    puts, copies, at = [], [], 0
    with Producer.attach(name) as producer:
        for group in turns({"groups": job.groups, "pace_s": 0, "seconds": job.seconds}, credit):
            if at + footprint(job.tokens) > len(target):
                at = 0
            for before in range(1, 1 + BEFORE):
                producer.put(record(job.groups * before + group, small))
            begin = time.monotonic_ns()
            for array in flat:
                target[at : at + len(array)] = array
                at += len(array)
            middle = time.monotonic_ns()
            producer.put(record(group, data))
            puts.append(time.monotonic_ns() - middle)
            copies.append(middle - begin)
            pipe.send("put")
        pipe.send([statistics.median(each[WARM_UP:] or each) for each in (puts, copies)])


async def read(ring: RecordRing, stash: Stash[int]) -> int:
    """Take the record that is known to be there, as a door does: ns from the look that found it until the group is whole."""
    while True:
        begin = time.perf_counter_ns()
        try:
            delivery = ring.get_nowait()
            break
        except anyio.WouldBlock:
            await asyncio.sleep(0)
    record = delivery.record
    for member in trajectories_of(record):
        found = stash.add(member, record.group, lease=delivery, epoch=record.epoch)
    if not isinstance(found, StashedGroup):
        raise AssertionError(f"group {record.group} is not whole")
    taken = time.perf_counter_ns() - begin
    delivery.release()
    return taken


async def consume(job: HandoverJob) -> dict[str, float]:
    name, context = f"{RING}{os.getpid()}", multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    credit, notes, reads, smalls = context.Semaphore(1), Notes(ours), list[int](), list[int]()
    stash: Stash[int] = Stash(1024)
    async with RecordRing(name, room(job.tokens)) as ring:
        process = spawn(produce, name, job, theirs, credit)
        theirs.close()  # so that the end of a producer that failed is heard
        while (note := await notes.next()) == "put":
            taken = [await read(ring, stash) for _ in range(1 + BEFORE)]  # the small ones lie before it
            smalls.append(taken[-2])
            reads.append(taken[-1])
            credit.release()
        put, copy = note
        await asyncio.to_thread(process.join)
    bytes_ = footprint(job.tokens)
    shares = [own / small for own, small in zip(reads, smalls, strict=True)]
    return {
        "bytes": bytes_,
        "write_us": put / 1e3,
        "memcpy_us": copy / 1e3,
        "write_gb_s": bytes_ / put,
        "memcpy_gb_s": bytes_ / copy,
        "write_share_of_memcpy": copy / put,
        "read_us": statistics.median(reads[WARM_UP:] or reads) / 1e3,
        "read_to_small": statistics.median(shares[WARM_UP:] or shares),
    }


def run_costs(job: HandoverJob) -> dict[str, float]:
    with asyncio.Runner(loop_factory=partial(new_loop, job.loop)) as runner:
        return runner.run(consume(job))
