"""The ledger of many ranks over the line, whose connections are cut again and again, with what is under way on them.

    python tools/chaos ledger                  # 32 ranks, some seconds
    python tools/chaos ledger --seconds 500    # by hand

All ranks live in this process, each with its ledger and its own connection to rank 0, through a wire that is cut at random. Every
rank admits groups, claims places, and commits with the others, as in a run without shares. Callers are cancelled at random, too.

One line of JSON is printed. Exit 1 where a group was trained twice or not at all, a step was not full, or the counts disagree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.types import ClaimState, Ticket

SECRET = "of the tool, and of nobody else"
GROUPS = 4  # of a rank in a step
AGE = 2


class Wire:
    """A TCP connection to a server that can be cut."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def cut(self) -> None:
        self.cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@dataclass
class Round:
    steps: int
    rng: random.Random
    trained: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)  # turn -> groups
    cancelled: int = 0


async def impatient(now: Round, call: Any) -> Any:
    """A caller that may give up: it is cancelled after a moment, and asks again."""
    while True:
        task = asyncio.ensure_future(call())
        if now.rng.random() > 0.1:
            return await task
        for _ in range(now.rng.randrange(20)):
            await asyncio.sleep(0)
        if task.cancel():
            now.cancelled += 1
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(done, asyncio.CancelledError):
            return done


async def rank_main(rank: int, ledger: LineLedger, now: Round, barrier: asyncio.Barrier) -> None:
    ready: list[Ticket] = []

    async def generate() -> None:
        for number in range(rank, now.steps * GROUPS * barrier.parties, barrier.parties):
            ticket = await impatient(now, lambda: ledger.admit(number))  # noqa: B023  # awaited in this iteration
            ready.append(ticket)
        await ledger.exhaust()

    generating = asyncio.ensure_future(generate())
    while not ledger.finished:
        seen = ledger.changes
        state, ticket = await impatient(now, lambda: ledger.claim(ready))
        if ticket is not None:
            ready.remove(ticket)
            now.trained[ticket.group_id] += 1
            now.sizes[ledger.turn] += 1
        elif state is ClaimState.FULL:
            await barrier.wait()  # in place of the collective of gradients
            turn = await ledger.commit()
            await ledger.release(turn - 1)
        else:
            await ledger.wait_changed(seen)
    await generating


async def stress(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    rng = random.Random(given.seed)
    rounds, cuts, cancelled, changes, right = 0, 0, 0, 0, True
    started = time.monotonic()
    while not rounds or time.monotonic() < started + given.seconds:
        rounds += 1
        now = Round(given.steps, random.Random(rng.random()))
        async with AsyncExitStack() as stack:
            server = LineServer(SECRET)
            bounds = GROUPS * given.ranks, AGE, "wait", 0, given.ranks
            ledgers, wires = [LineLedger(server, Reservation(*bounds), 0)], list[Wire]()
            await stack.enter_async_context(await server.open())
            for rank in range(1, given.ranks):
                wires.append(await stack.enter_async_context(Wire(server.address)))
                line = await stack.enter_async_context(LineClient(wires[-1].address, SECRET, f"rank {rank}"))
                ledgers.append(LineLedger(line, Reservation(*bounds), rank))
            for ledger in ledgers:
                await stack.enter_async_context(ledger)

            async def cut(wires: list[Wire] = wires) -> None:
                while True:
                    await asyncio.sleep(rng.random() * 2 * given.every / len(wires))
                    rng.choice(wires).cut()

            cutting = asyncio.ensure_future(cut())
            barrier = asyncio.Barrier(given.ranks)
            async with asyncio.timeout(given.limit), asyncio.TaskGroup() as group:
                for rank, ledger in enumerate(ledgers):
                    group.create_task(rank_main(rank, ledger, now, barrier))
            cutting.cancel()
            books = ledgers[0].statistics()
            all_groups = given.steps * GROUPS * given.ranks
            right &= now.trained == Counter(range(all_groups)) and set(now.sizes.values()) == {GROUPS * given.ranks}
            right &= (books.trained + books.held, books.live, books.claimed) == (all_groups, 0, 0)
            cuts, cancelled = cuts + sum(wire.cuts for wire in wires), cancelled + now.cancelled
            changes += ledgers[0].changes
    found = {"ranks": given.ranks, "rounds": rounds, "changes": changes, "cuts": cuts, "cancelled": cancelled}
    return found | {"seconds": round(time.monotonic() - started, 1), "right": right}, right


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--every", type=float, default=1.0, help="mean seconds between two cuts of one connection")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a round may take")
    parser.add_argument("--seed", type=int, default=1)


def main(given: argparse.Namespace) -> int:
    found, right = asyncio.run(stress(given))
    print(json.dumps(found))
    return int(not right)
