"""The invariants of the books after any order of events, and of the local ledger under storms of cancellations.

`pumps/test_flow_properties.py` plays whole schedules on the ledger: ages, drops, failures and slow publishes.
"""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.errors import LedgerError
from asyncrl.types import Ticket
from asyncrl_bench.virtual_time import run_virtual


def invariant(books: Reservation) -> None:
    live = [e.ticket.deadline for e in books.entries.values() if not e.claimed]
    for j in range(books.max_staleness + 2):
        room = books.groups_per_step * (j + 1) - books.claimed
        assert sum(d <= books.turn + j for d in live) <= room
    assert all(d >= books.turn for d in live)
    s = books.statistics()
    assert s.admitted == s.live + s.claimed + s.held + s.trained + s.dropped + s.failed
    assert books.slots_held <= s.slots


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    k=st.integers(1, 3),
    m=st.integers(0, 3),
    ranks=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from("aaaacccccoxrrbelj"), st.integers(0, 7)), max_size=80),
)
def test_the_invariant_holds_after_any_events(k: int, m: int, ranks: int, events: list[tuple[str, int]]) -> None:
    books = Reservation(k, m, ranks=ranks)
    for number, (event, draw) in enumerate(events):
        live = [e.ticket for e in books.entries.values() if not e.claimed]
        rank = draw % len(books.acknowledged)
        if event in "ao":
            oldest = max(0, books.turn - draw) if event == "o" else None
            if books.has_engine(rank):
                _, ticket = books.admit(number, oldest, rank)
                # The weights that some engine still has may sample its tokens.
                first = min(books.turn, *books.acknowledged) if oldest is None else oldest
                assert ticket is None or ticket.deadline <= first + m
            else:
                with pytest.raises(LedgerError, match=f"has given up rank {rank}"):
                    books.admit(number, oldest, rank)
        elif event == "c" and live:
            ticket = live[draw % len(live)]
            books.claim([ticket])
        elif event == "x" and books.claimed == k:
            books.commit()
        elif event == "r":
            if books.acknowledged[rank] < books.turn:
                books.release(books.acknowledged[rank] + draw % (books.turn - books.acknowledged[rank]), rank)
        elif event == "l":
            theirs = [e.ticket.group_id for e in books.entries.values() if e.rank == rank and not e.claimed]
            assert books.lose_generator(rank) == theirs and books.lose_generator(rank) == []
            others = [other for other in range(len(books.acknowledged)) if books.has_engine(other)]
            # No slot waits for the lost rank, and a step is not complete while nobody can play its groups again.
            assert all(
                turn >= min((books.acknowledged[other] for other in others), default=books.turn) for turn in books.held
            )
            assert others or not all(books.exhausted)
        elif event == "j":
            # Numbers are given when ranks ask, so a rank with a lower number may begin later, or never.
            rank, turn = len(books.acknowledged) + draw % 2, max(0, books.turn - draw // 2)
            assert books.begin(turn, rank) is (turn + m >= books.turn) is books.has_engine(rank)
            assert not books.has_engine(rank) or not books.finished()
        elif event == "b" and draw == 0:
            books.rollback()
        elif event == "e" and live:
            books.end(live[draw % len(live)], "dropped" if draw % 2 else "failed")
        invariant(books)
        assert books.open_turn() == min(books.turn, *books.acknowledged)
        # No dead end: somebody live may always claim, unless the step is full.
        live = [e.ticket for e in books.entries.values() if not e.claimed]
        if live and books.claimed < k:
            assert deepcopy(books).claim(live) is not None


def test_cancellation_storms_leave_the_books_balanced() -> None:
    """Random admissions and claims are cancelled at every possible moment; nothing leaks."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        ledger = LocalLedger(2, 1)
        held: list[Ticket] = []

        async def admit(group_id: int) -> None:
            async with asyncio.timeout(rng.choice([0.0, 1.0, 2.0, 30.0])):
                ticket = await ledger.admit(group_id)
                assert ticket is not None
                held.append(ticket)

        async def one(group_id: int) -> None:
            try:
                await admit(group_id)
            except TimeoutError:
                return
            await asyncio.sleep(rng.choice([0.0, 1.0, 1.0]))
            ticket = next(t for t in held if t.group_id == group_id)
            held.remove(ticket)
            await ledger.end(ticket, "dropped", "test")

        async with asyncio.TaskGroup() as group:
            for group_id in range(25):
                group.create_task(one(group_id))
        s = ledger.statistics()
        assert s.live == 0 and s.admitted == s.dropped and ledger.live_groups() == []

    for seed in range(200):
        run_virtual(lambda seed=seed: main(seed))
