"""Ranks that send groups to each other in one process: real books, stores and pumps; a wire whose faults a test draws."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import numpy as np
from support.trajectories import trajectory

from asyncrl.data.store import Store
from asyncrl.distributed.ledger import Changes
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.book import GroupBook
from asyncrl.pumps.travel import Arrivals, Departures
from asyncrl.records.check import Limits
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Prompt, Ticket


def make_group(ticket: Ticket, lengths: Sequence[int], **fields: Any) -> Group:
    """A scored group. `lengths`: tokens of each member, of which the first two are the prompt."""
    members = tuple(
        trajectory(ticket.group_id, member, len(lengths), tokens, reward=float(member), version=ticket.oldest, **fields)
        for member, tokens in enumerate(lengths)
    )
    return Group(ticket, Prompt(ticket.group_id, np.array([1, 2], np.int32), "a question"), members)


class Books:
    """The books at rank 0."""

    def __init__(self, trainers: Sequence[int], groups_per_step: int = 4, max_staleness: int = 1) -> None:
        self.reservation = Reservation(groups_per_step, max_staleness, ranks=8, trainers=tuple(trainers))
        self.changes = Changes()
        self.ended: list[tuple[int, int]] = []  # (rank, group)

    def reclaim(self, rank: int) -> list[int]:
        """A generating rank is lost: the ids of its groups, which may be admitted again."""
        lost = self.reservation.lose_generator(rank)
        self.changed()
        return lost

    def commit(self) -> None:
        """Commit a step, whose weights all engines get at once."""
        self.reservation.commit()
        for rank in filter(self.reservation.has_engine, range(8)):
            self.reservation.release(self.reservation.turn - 1, rank)
        self.changed()

    def changed(self) -> None:
        self.changes.number += 1
        self.changes.wake()


class RankLedger:
    """The part of `ports.Ledger` that travelling needs, as rank `rank` asks for it over the line."""

    def __init__(self, books: Books, rank: int) -> None:
        self.books, self.rank = books, rank
        self.delay_s = 0.0

    async def _asked(self, change: Callable[[], Any]) -> Any:
        await anyio.sleep(self.delay_s)
        result = change()
        self.books.changed()
        await anyio.lowlevel.checkpoint()
        return result

    async def assign(self, ticket: Ticket, tokens: int) -> int:
        return await self._asked(lambda: self.books.reservation.assign(ticket, tokens))

    async def arrive(self, ticket: Ticket, sender: int) -> bool:
        return await self._asked(lambda: self.books.reservation.arrive(ticket, sender, self.rank))

    async def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"], reason: str) -> None:
        """Does nothing for a group that another rank has."""
        entry = self.books.reservation.entries.get(ticket.group_id)
        if entry is not None and (entry.ticket, entry.rank) == (ticket, self.rank):
            self.books.ended.append((self.rank, ticket.group_id))
            await self._asked(lambda: self.books.reservation.end(ticket, outcome))


class Rank:
    """One rank: its store, its book, and both pumps."""

    def __init__(self, books: Books, rank: int, *, trains: bool = False, ledger: Any = None) -> None:
        """A rank that trains, or one that generates. `ledger`: to the books in another process."""
        self.rank, self.books = rank, books
        self.ledger: Any = ledger or RankLedger(books, rank)
        self.store = Store()
        self.book = GroupBook(self.ledger, self.store)
        self.book.on_ready = books.changed
        self.recorder = Recorder(max_events=0, nvtx=False)
        self.ports: Any = SimpleNamespace(
            rank=rank, ledger=self.ledger, store=self.store, book=self.book, recorder=self.recorder, limits=Limits()
        )
        self.connect: Callable[[int], Any] = _nowhere
        if trains:
            self.arrivals = Arrivals(self.ports, 0)
        else:
            self.departures = Departures(self.ports, lambda to: self.connect(to), 0)
        self.scope, self.ended = anyio.CancelScope(), anyio.Event()

    def admit(self, group_id: int) -> Ticket | None:
        _, ticket = self.books.reservation.admit(group_id, None, self.rank)
        if ticket is not None:
            self.book.add(ticket)
        return ticket

    def score(self, ticket: Ticket, lengths: Sequence[int], **fields: Any) -> Group:
        """The intake has scored a group: it departs."""
        group = self.store.put(make_group(ticket, lengths, **fields))
        self.departures.put(group)
        return group

    def train_ready(self) -> list[int]:
        """Claim what may be claimed, as the train pump does."""
        claimed = []
        while (ticket := self.books.reservation.claim(self.store.ready(), self.rank)) is not None:
            self.book.claim(ticket)
            claimed.append(ticket.group_id)
        return claimed


async def _nowhere(rank: int) -> Any:
    raise AssertionError(f"no way to rank {rank}")


class Wire:
    """The line to one training rank. A request may be sent again, before or after its answer, as after a lost acknowledgement."""

    def __init__(self, trainer: Rank, rng: random.Random) -> None:
        self.trainer, self.rng = trainer, rng
        self.asks = self.most = self.open = 0
        self.handlers: set[asyncio.Task[Any]] = set()

    async def ask(self, kind: str, header: Any, buffers: Sequence[Any]) -> tuple[Any, Any]:
        self.asks += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while True:
                await anyio.sleep(self.rng.random())
                handlers = [self._handle(header, buffers) for _ in range(self.rng.choice([1, 1, 2, 3]))]
                answer = await handlers[0]
                await anyio.sleep(self.rng.random())
                if self.rng.random() < 0.6:
                    return answer
        finally:
            self.open -= 1

    def _handle(self, header: Any, buffers: Sequence[Any]) -> asyncio.Task[Any]:
        handler = asyncio.get_running_loop().create_task(self.trainer.arrivals.take("a rank", header, buffers))
        self.handlers.add(handler)
        handler.add_done_callback(self.handlers.discard)
        return handler

    def lose_sender(self) -> None:
        """The sender is dead: the line cancels the handlers of its requests."""
        for handler in self.handlers:
            handler.cancel()
