"""The invariants of the ledger over thousands of random schedules in virtual time.

A simulated run: groups with heavy-tailed latencies, drops, failures, slow and coalesced publishes, aborted steps, prompts
that run out. In `wait` mode: no group is ever older than max_staleness, measured at its training against the oldest weights
that may have sampled it; the ledger drops none; nothing blocks for ever (a deadlock is an error of the virtual loop);
the books balance at every point.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Late, Reservation
from asyncrl.errors import LedgerError
from asyncrl.types import ClaimState, Ticket
from asyncrl_bench.virtual_time import run_virtual


@dataclass
class Run:
    """One simulated run; its numbers are drawn from `seed`, which also is the name to repeat it by."""

    seed: int
    late: Late = "wait"
    ages: Counter[int] = field(default_factory=Counter)
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    acknowledged: int = 0  # version that the engines have

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.k = rng.choice([1, 1, 2, 3, 5])
        self.m = rng.choice([0, 1, 1, 2, 3])
        self.prompts = rng.randrange(1, 8 * self.k)
        self.tail = rng.choice([0.5, 1.0, 2.0])  # Pareto exponent: below 1 even the mean is infinite
        self.p_fail = rng.choice([0.0, 0.0, 0.1])
        self.p_drop = rng.choice([0.0, 0.0, 0.2])
        self.p_abort = rng.choice([0.0, 0.1])
        self.publish_s = rng.choice([0.0, 1.0, 20.0])
        self.ledger = LocalLedger(Reservation(self.k, self.m, late=self.late))
        self.ready: list[Ticket] = []
        self.oldest: dict[int, int] = {}  # group -> version of the weights that sampled its first token

    def check(self) -> None:
        s = self.ledger.statistics()
        assert s.admitted == s.live + s.claimed + s.held + s.trained + s.dropped + s.failed
        assert s.live + s.claimed + s.held <= s.slots and s.claimed <= self.k
        assert (s.dropped, s.failed) == (len(self.dropped), len(self.failed))

    async def rollout(self, tasks: anyio.abc.TaskGroup) -> None:
        for group_id in range(self.prompts):
            ticket = await self.ledger.admit(group_id)
            assert ticket is not None
            self.check()
            tasks.start_soon(self.play, ticket)
        await self.ledger.exhaust()

    async def play(self, ticket: Ticket) -> None:
        await anyio.sleep(self.rng.choice([0.0, 0.1]))
        self.oldest[ticket.group_id] = self.acknowledged  # sampled by what the engines have now
        await anyio.sleep(self.rng.paretovariate(self.tail))
        fate = self.rng.random()
        if fate < self.p_fail:
            await self.ledger.end(ticket, "failed", "test")
            self.failed.append(ticket.group_id)
        elif fate < self.p_fail + self.p_drop:
            await self.ledger.end(ticket, "dropped", "test")
            self.dropped.append(ticket.group_id)
        else:
            self.ready.insert(self.rng.randrange(len(self.ready) + 1), ticket)
            self.wake()
        self.check()

    def wake(self) -> None:
        self.arrived.set()
        self.arrived = anyio.Event()

    async def train(self, publishes: anyio.abc.ObjectSendStream[int]) -> None:
        ledger = self.ledger
        claimed: list[Ticket] = []
        async with publishes:
            while not ledger.finished:
                seen, arrived = ledger.changes, self.arrived
                await self.drop_expired()
                state, ticket = await ledger.claim(self.ready)
                self.check()
                if ticket is not None:
                    self.ready.remove(ticket)
                    claimed.append(ticket)
                    await anyio.sleep(self.rng.choice([0.0, 0.3]))
                elif state is ClaimState.FULL:
                    if self.rng.random() < self.p_abort:
                        assert {t.group_id for t in await ledger.rollback()} == {t.group_id for t in claimed}
                        self.ready.extend(claimed)
                    else:
                        await self.step(claimed, publishes)
                    claimed = []
                else:
                    await self.either(seen, arrived)

    async def step(self, claimed: list[Ticket], publishes: anyio.abc.ObjectSendStream[int]) -> None:
        turn = self.ledger.turn
        for ticket in claimed:
            self.ages[turn - self.oldest[ticket.group_id]] += 1
            self.trained.append(ticket.group_id)
        self.steps.append(len(claimed))
        await self.ledger.commit()
        self.check()
        await publishes.send(turn)

    async def drop_expired(self) -> None:
        for ticket in self.ledger.expired():
            if ticket in self.ready:
                self.ready.remove(ticket)
                await self.ledger.end(ticket, "dropped", "late")
                self.dropped.append(ticket.group_id)

    async def either(self, seen: int, arrived: anyio.Event) -> None:
        """Until the ledger changed or a group became ready."""
        async with anyio.create_task_group() as group:

            async def changed() -> None:
                await self.ledger.wait_changed(seen)
                group.cancel_scope.cancel()

            group.start_soon(changed)
            await arrived.wait()
            group.cancel_scope.cancel()

    async def publish(self, commits: anyio.abc.ObjectReceiveStream[int]) -> None:
        async with commits:
            async for turn in commits:
                newest = turn
                while commits.statistics().current_buffer_used:  # a slow publish skips versions
                    newest = commits.receive_nowait()
                await anyio.sleep(self.publish_s * self.rng.random())
                self.acknowledged = newest + 1
                await self.ledger.release(newest)
                self.check()

    async def main(self) -> None:
        self.arrived = anyio.Event()
        send, receive = anyio.create_memory_object_stream[int](self.rng.choice([0, 1, 4]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.publish, receive)
            tasks.start_soon(self.train, send)
            await self.rollout(tasks)

    def execute(self) -> Run:
        run_virtual(self.main)
        s = self.ledger.statistics()
        assert (s.live, s.claimed, s.held) == (0, 0, 0)
        assert sorted(self.trained + self.dropped + self.failed) == list(range(self.prompts)), "each group ends once"
        assert s.trained == len(self.trained)
        assert all(0 <= age <= self.m for age in self.ages), f"seed {self.seed}: ages {self.ages}, bound {self.m}"
        assert all(size == self.k for size in self.steps[:-1]), "only the last step may be partial"
        return self


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(250, 1500), marks=pytest.mark.slow)], ids=str)
def test_wait_mode_bounds_the_age_and_drops_nobody(seeds: range) -> None:
    reached: Counter[tuple[int, int]] = Counter()
    for seed in seeds:
        run = Run(seed).execute()
        if run.p_drop == 0.0:
            assert run.dropped == []
        for age in run.ages:
            reached[run.m, age] += 1
    for m in (0, 1, 2, 3):
        assert reached[m, m] > 0, f"the bound {m} was never reached: the schedules test nothing"


def test_drop_mode_bounds_the_age_too_and_ends_every_group() -> None:
    late = 0
    for seed in range(500):
        run = Run(seed, late="drop").execute()
        late += len(run.dropped) if run.p_drop == 0.0 else 0
    assert late > 0, "no group was ever late: the schedules test nothing"


# -- the books alone, by hypothesis: every order of events, shrunk to the shortest that fails ---------------------------


def invariant(books: Reservation) -> None:
    live = [e.ticket.deadline for e in books.entries.values() if not e.claimed]
    for j in range(books.max_staleness + 2):
        room = books.groups_per_step * (j + 1) - books.claimed
        assert sum(d <= books.turn + j for d in live) <= room
    assert all(d >= books.turn for d in live)
    s = books.statistics()
    assert s.admitted == s.live + s.claimed + s.held + s.trained + s.dropped + s.failed
    assert books.slots_taken == s.live + s.claimed + s.held <= s.slots


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
        assert books.acknowledged_turn() == min(books.turn, *books.acknowledged)
        # No dead end: somebody live may always claim, unless the step is full.
        live = [e.ticket for e in books.entries.values() if not e.claimed]
        if live and books.claimed < k:
            assert deepcopy(books).claim(live) is not None


class FirstCome(Reservation):
    """Slots without the reservation: whoever is ready first is trained first, however old."""

    def claim(self, ready: Iterable[Ticket], rank: int | None = None) -> Ticket | None:
        for ticket in ready:
            if self.claimed < self.groups_per_step:
                self.entries[ticket.group_id].claimed = True
                self.claimed += 1
                return ticket
        return None

    def expired(self, rank: int | None = None) -> list[Ticket]:
        return []


def test_slots_alone_do_not_bound_the_age() -> None:
    """The control: without the rule the same schedules pass the bound, so the tests above can fail."""
    passed = 0
    for seed in range(150):
        run = Run(seed)
        run.ledger.books = FirstCome(run.k, run.m, "drop")
        run_virtual(run.main)
        passed += any(age > run.m for age in run.ages)
    assert passed > 0


def test_cancellation_storms_leave_the_books_balanced() -> None:
    """Random admissions and claims are cancelled at every possible moment; nothing leaks."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        ledger = LocalLedger(Reservation(2, 1))
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
