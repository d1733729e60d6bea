"""`child.py ledger`: the ledger of many ranks over the line, for `asyncrl bench nodes`.

Rank 0 with the books runs in this process. All other ranks run in one spawned process, each with its own connection: it admits a
group and ends it, again and again, with one request under way.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.types import Ticket

from .job import LedgerJob, new_loop

SECRET = "of a benchmark"


def books(job: LedgerJob) -> Reservation:
    """Slots for a group of each rank, beside the groups that are live all the time."""
    return Reservation(job.ranks + job.live, 1, ranks=job.ranks + 1)


async def play(ledger: LineLedger, rank: int, job: LedgerJob, until: float, took: list[float]) -> None:
    number = rank
    while (began := time.perf_counter()) < until:
        ticket = await ledger.admit(number)
        assert isinstance(ticket, Ticket)
        await ledger.end(ticket, "dropped", "benchmark")
        took.append((time.perf_counter() - began) / 2)
        number += job.ranks + 1


def ranks_main(address: str, job: LedgerJob, pipe: Any) -> None:
    async def run() -> None:
        took = list[float]()
        async with AsyncExitStack() as stack:
            ledgers = list[LineLedger]()
            for rank in range(1, job.ranks + 1):
                line = await stack.enter_async_context(LineClient(address, SECRET, f"rank {rank}"))
                ledgers.append(await stack.enter_async_context(LineLedger(line, books(job), rank)))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            until = time.perf_counter() + job.seconds
            cpu = time.process_time()
            await asyncio.gather(*(play(ledger, rank, job, until, took) for rank, ledger in enumerate(ledgers, 1)))
            pipe.send((took, time.process_time() - cpu))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def measure(job: LedgerJob) -> dict[str, Any]:
    async with LineServer(SECRET) as server:
        ledger = LineLedger(server, books(job), 0)
        async with ledger:
            for number in range(job.live):
                await ledger.admit(1_000_000_000 + number)
            context = multiprocessing.get_context("spawn")
            pipe, other = context.Pipe()
            process = context.Process(target=ranks_main, args=(server.address, job, other))
            process.start()
            await asyncio.to_thread(pipe.recv)
            first, cpu, loop, began = ledger.changes, time.process_time(), time.thread_time(), time.perf_counter()
            pipe.send("go")
            took, cpu_others = await asyncio.to_thread(pipe.recv)
            seconds, changes, cpu = time.perf_counter() - began, ledger.changes - first, time.process_time() - cpu
            loop = time.thread_time() - loop
            await asyncio.to_thread(process.join)
    return {
        "per_s": changes / seconds,
        "cpu_us": 1e6 * cpu / changes,
        "loop_us": 1e6 * loop / changes,
        "ranks_cpu_us": 1e6 * cpu_others / changes,
        "latency_ms": percentiles(took),
    }


def percentiles(took: Sequence[float]) -> list[float]:
    """The median, and the value below which 99 % lie, in milliseconds."""
    ordered = sorted(took)
    return [1e3 * ordered[len(ordered) * share // 100] for share in (50, 99)]


def run_ledger(job: LedgerJob) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure(job))
