"""One rank of a run in a process of its own: `python travel_process.py RANK TRAINERS ADDRESS_FILE PROMPTS DIE_AT`.

Rank 0 has the books and trains. Further ranks below TRAINERS train, too; the others generate. Every rank counts the messages that
it asks, handles and gets answers of, and kills itself with SIGKILL at message DIE_AT (-1: never). Rank 0 prints what was trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `support`
from travel_ranks import Books, Rank

from asyncrl.distributed.connections import Connections
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import RankLost
from asyncrl.pumps.travel import KIND
from asyncrl.types import Ticket

SECRET, SILENCE_S, K = "of a test", 1.0, 4


class Counted:
    """Counts the messages of this process, and ends it at one of them."""

    def __init__(self, die_at: int) -> None:
        self._left = die_at

    def message(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    async def ask(self, line: Any, kind: str, header: Any = None, buffers: Any = ()) -> tuple[Any, Any]:
        self.message()
        asking = asyncio.ensure_future(line.ask(kind, header, buffers))
        await anyio.sleep(0.01)  # the message is on its way
        self.message()
        answer = await asking
        self.message()
        return answer


class LineBooks:
    """The part of `ports.Ledger` that travelling needs, asked over the line."""

    def __init__(self, line: Any, counted: Counted, rank: int) -> None:
        self._line, self._counted, self._rank = line, counted, rank

    async def assign(self, ticket: Ticket, tokens: int) -> int:
        return (await self._counted.ask(self._line, "assign", [_plain(ticket), tokens]))[0]

    async def arrive(self, ticket: Ticket, sender: int) -> bool:
        return (await self._counted.ask(self._line, "arrive", [_plain(ticket), sender, self._rank]))[0]

    async def end(self, ticket: Ticket, outcome: str, reason: str) -> None:
        raise AssertionError(f"{ticket} ended: {reason}")


class CountedLine:
    """A line to a training rank."""

    def __init__(self, line: Any, counted: Counted) -> None:
        self._line, self._counted = line, counted

    async def ask(self, kind: str, header: Any, buffers: Any) -> Any:
        return await self._counted.ask(self._line, kind, header, buffers)


def _plain(ticket: Ticket) -> list[int]:
    return [ticket.group_id, ticket.oldest, ticket.deadline]


class FirstRank:
    """Rank 0: the books, the prompts, and a training rank."""

    def __init__(self, trainers: int, prompts: int) -> None:
        self.trainers, self.prompts = trainers, prompts
        self.books = Books(range(trainers), K, 1)
        self.fresh = iter(range(prompts))
        self.again: list[int] = []
        self.lost: list[str] = []
        self.trained: list[int] = []

    async def run(self, file: Path) -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(LineServer(SECRET, silence_s=SILENCE_S, on_end=self.on_end))
            await stack.enter_async_context(Connections(server, 0, SECRET))
            own = Rank(self.books, 0, trains=True)
            for handler in (self.next, self.assign, self.arrive, self.claim, self.ready):
                server.on(handler.__name__, handler)
            server.on(KIND, own.arrivals.take)
            file.with_suffix(".new").write_text(server.address)
            file.with_suffix(".new").rename(file)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(own.arrivals.run)
                await self.train(own, server)
                tasks.cancel_scope.cancel()
            print(json.dumps({"trained": self.trained, "lost": self.lost}), flush=True)

    async def train(self, own: Rank, server: LineServer) -> None:
        books, trained = self.books, self.trained
        while len(trained) < self.prompts and not self.lost:
            seen = books.changes.number
            own.train_ready()
            step = [group_id for group_id, entry in books.reservation.entries.items() if entry.claimed]
            if len(step) < K and (not step or len(trained) + len(step) < self.prompts):
                await books.changes.wait(seen)
                continue
            books.commit()
            own.book.clear(step)
            trained += step
            await server.tell_all("committed", step)

    def on_end(self, peer: str, error: RankLost | None) -> None:
        rank = int(peer.removeprefix("rank "))
        if error is not None and rank < self.trainers:
            self.lost.append(peer)
            self.books.changed()
        elif rank >= self.trainers:
            self.again.extend(self.books.reclaim(rank))

    async def next(self, peer: str, rank: int, buffers: Any) -> Any:
        while True:
            seen = self.books.changes.number
            group_id = self.again.pop() if self.again else next(self.fresh, None)
            if group_id is not None:
                _, ticket = self.books.reservation.admit(group_id, None, rank)
                if ticket is not None:
                    return _plain(ticket), ()
                self.again.append(group_id)
            await self.books.changes.wait(seen)

    async def assign(self, peer: str, header: Any, buffers: Any) -> Any:
        return self.books.reservation.assign(Ticket(*header[0]), header[1]), ()

    async def arrive(self, peer: str, header: Any, buffers: Any) -> Any:
        moved = self.books.reservation.arrive(Ticket(*header[0]), header[1], header[2])
        self.books.changed()
        return moved, ()

    async def claim(self, peer: str, header: Any, buffers: Any) -> Any:
        """The group that has a place now. None after a change: by then the rank may have another group, so it must ask anew."""
        books, seen = self.books.reservation, self.books.changes.number
        if (ticket := books.claim([Ticket(*each) for each in header[1]], header[0])) is None:
            await self.books.changes.wait(seen)
            return None, ()
        self.books.changed()
        return ticket.group_id, ()

    async def ready(self, peer: str, header: Any, buffers: Any) -> None:
        """A training rank has one more group that it may claim."""
        self.books.changed()


async def other_rank(rank: int, trains: bool, file: Path, counted: Counted) -> None:
    async with AsyncExitStack() as stack:
        while not file.exists():  # noqa: ASYNC110, ASYNC240
            await anyio.sleep(0.01)
        address = file.read_text()  # noqa: ASYNC240
        name = f"rank {rank}"
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client = LineClient(
            address, SECRET, name, silence_s=SILENCE_S, on_end=lambda lost: gone.done() or gone.set_exception(lost)
        )
        line = await stack.enter_async_context(client)
        lines = await stack.enter_async_context(Connections(line, rank, SECRET))
        own = Rank(Books([0]), rank, trains=trains, ledger=LineBooks(line, counted, rank))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asyncio.wait_for, gone, None)
            if trains:
                await train(own, line, lines, counted, tasks)
            else:

                async def connect(to: int) -> CountedLine:
                    return CountedLine(await lines.to(to), counted)

                async def committed(peer: str, header: Any, buffers: Any) -> None:
                    """Only training ranks have something to clear."""

                line.on("committed", committed)
                own.connect = connect
                tasks.start_soon(own.departures.run)
                while True:
                    ticket = Ticket(*(await counted.ask(line, "next", rank))[0])
                    own.book.add(ticket)
                    own.score(ticket, [5 + ticket.group_id % 7, 9, 30])


async def train(own: Rank, line: LineClient, lines: Connections, counted: Counted, tasks: Any) -> None:
    async def take(peer: str, header: Any, buffers: Any) -> Any:
        counted.message()
        answer = await own.arrivals.take(peer, header, buffers)
        counted.message()
        return answer

    async def committed(peer: str, header: Any, buffers: Any) -> None:
        own.book.clear([each for each in header if each in own.store])

    server = await lines.serve()
    server.on(KIND, take)
    line.on("committed", committed)

    def on_ready() -> None:
        own.books.changed()
        line.post("ready")

    own.book.on_ready = on_ready
    await lines.announce(server)
    tasks.start_soon(own.arrivals.run)
    while True:
        seen = own.books.changes.number
        if ready := own.store.ready():
            group_id = (await line.ask("claim", [own.rank, [_plain(ticket) for ticket in ready]]))[0]
            if group_id is not None:
                own.book.claim(next(ticket for ticket in ready if ticket.group_id == group_id))
        else:
            await own.books.changes.wait(seen)


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def main() -> None:
    rank, trainers, prompts, die_at = (int(sys.argv[i]) for i in (1, 2, 4, 5))
    file = Path(sys.argv[3])
    try:
        if rank == 0:
            asyncio.run(FirstRank(trainers, prompts).run(file))
        else:
            asyncio.run(other_rank(rank, rank < trainers, file, Counted(die_at)))
    except* RankLost as lost:
        print(*leaves(lost), sep="\n", flush=True)
        sys.exit(12)


if __name__ == "__main__":
    main()
