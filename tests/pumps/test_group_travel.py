"""Groups that travel from the rank that scored them to a training rank: each is trained once, whoever dies and whatever is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory
from support.virtual import virtual
from travel_ranks import Books, Rank, Wire, make_group

from asyncrl.data.stash import same_trajectory
from asyncrl.distributed.reservation import Reservation
from asyncrl.errors import DataError, LedgerError, RecordError
from asyncrl.pumps import travel
from asyncrl.pumps.travel import UNACKNOWLEDGED, decode_group, encode_group, tokens_of
from asyncrl.types import FinishReason, Group, Prompt, Ticket
from asyncrl_bench.virtual_time import run_virtual

TICKET = Ticket(7, 1, 3)


# -- the record ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_group_arrives_as_it_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    routed = bool(rng.integers(2))

    def member(number: int) -> Any:
        tokens = int(rng.integers(3, 40))
        return trajectory(
            7, number, size, rng.integers(0, 1000, tokens), prompt_length=2, mask=np.arange(tokens) >= 2 + rng.integers(2),
            logprob=-float(rng.random()), sampled=-float(rng.random()), version=int(rng.integers(0, 9)), temperature=0.5,
            finish_reason=rng.choice(list(FinishReason)), reward=None if rng.random() < 0.2 else float(rng.normal()),
            components={"a": float(rng.normal()), "b": None} if rng.random() < 0.7 else {},
            completion=[{"role": "assistant", "content": "ä\n"}] if rng.random() < 0.5 else "text",
            metadata={"turns": 3, "nested": {"x": [1, None]}}, extras={"f/length": 1.5, "f/name": "x"},
            routed_experts=rng.integers(-1, 60, (tokens, 2, 3)).astype(np.int16) if routed else None,
        )  # fmt: skip

    members = tuple(member(number) for number in range(size))
    ids = members[0].tokens[:2].copy() if rng.random() < 0.5 else np.array([5, 6, 7], np.int32)
    sent = Group(TICKET, Prompt(7, ids, [{"role": "user", "content": "?"}], {"answer": 4}, 2), members)
    found = decode_group(encode_group(sent, 3), TICKET, 3)
    assert found.ticket == TICKET and (found.prompt.prompt, found.prompt.columns) == (sent.prompt.prompt, {"answer": 4})
    assert found.prompt.epoch == 2 and found.prompt.ids.tolist() == ids.tolist() and found.prompt.ids.dtype == np.int32
    for a, b in zip(sent.trajectories, found.trajectories, strict=True):
        assert same_trajectory(a, b) and (a.group_id, a.member, a.group_size) == (b.group_id, b.member, b.group_size)
        for name in ("components", "completion", "metadata", "extras", "finish_reason"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.tokens.dtype == b.tokens.dtype and a.mask.dtype == b.mask.dtype


def test_what_json_cannot_hold_stays_behind_in_columns_and_is_an_error_in_metadata() -> None:
    group = make_group(TICKET, [5], extras={"f/set": {1}, "f/x": 1})
    columns = {"image": b"png", "answer": 4}
    group = Group(TICKET, Prompt(7, group.prompt.ids, "?", columns), group.trajectories)
    found = decode_group(encode_group(group, 0), TICKET, 0)
    assert found.prompt.columns == {"answer": 4} and found.trajectories[0].extras == {"f/x": 1}
    with pytest.raises(RecordError, match="metadata must be JSON values"):
        encode_group(make_group(TICKET, [5], metadata={"x": {1}}), 0)


def test_a_record_of_another_attempt_or_group_is_refused() -> None:
    record = encode_group(make_group(TICKET, [5, 6]), 1)
    with pytest.raises(DataError, match=r"group 7 of epoch 2, found members .* of group 7 of epoch 1"):
        decode_group(record, TICKET, 2)
    with pytest.raises(DataError, match="group 8 of epoch 1"):
        decode_group(record, Ticket(8, 1, 3), 1)


# -- exactly once --------------------------------------------------------------------------------------------------


class Run:
    """Two training ranks, and up to three generating ones of which all but one may die. Acknowledgements are lost and repeated."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.k, self.prompts = rng.choice([2, 4]), rng.randrange(4, 20)
        self.books = Books([0, 1], self.k, rng.choice([0, 1, 3]))
        self.fresh = iter(range(self.prompts))
        self.again: list[int] = []
        self.trained: list[int] = []

    async def main(self) -> None:
        rng = self.rng
        self.trainers = [Rank(self.books, rank, trains=True) for rank in (0, 1)]
        generators = [Rank(self.books, rank) for rank in range(2, 2 + rng.choice([1, 2, 3]))]
        async with anyio.create_task_group() as tasks:
            for trainer in self.trainers:
                tasks.start_soon(trainer.arrivals.run)
            for rank in generators:
                wires = [Wire(trainer, rng) for trainer in self.trainers]
                tasks.start_soon(self.generate, rank, wires)
                if rank is not generators[0] and rng.random() < 0.7:
                    tasks.start_soon(self.kill, rank, wires)
            await self.train()
            tasks.cancel_scope.cancel()
        for rank in (*self.trainers, *generators):
            await rank.book.end_all("the run ended first")
            assert rank.store.statistics().rows == 0, "rows left behind"

    async def generate(self, rank: Rank, wires: Sequence[Wire]) -> None:
        async def connect(to: int) -> Wire:
            await anyio.sleep(self.rng.random())
            return wires[to]

        rank.connect = connect
        with rank.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rank.departures.run)
                while True:
                    seen = self.books.changes.number
                    if (ticket := self.admit(rank)) is None:
                        await self.books.changes.wait(seen)
                    else:
                        await anyio.sleep(self.rng.random())
                        rank.score(ticket, [self.rng.randrange(3, 30) for _ in range(2)])

    def admit(self, rank: Rank) -> Ticket | None:
        group_id = self.again.pop() if self.again else next(self.fresh, None)
        ticket = None if group_id is None else rank.admit(group_id)
        if group_id is not None and ticket is None:
            self.again.append(group_id)
        return ticket

    async def kill(self, rank: Rank, wires: Sequence[Wire]) -> None:
        await anyio.sleep(self.rng.random() * self.prompts)
        rank.scope.cancel()
        for wire in wires:
            wire.lose_sender()
        # The books learn of the death sooner or later.
        await anyio.sleep(self.rng.random())
        self.again += self.books.reclaim(rank.rank)
        self.books.changed()

    async def train(self) -> None:
        step: list[int] = []
        while len(self.trained) < self.prompts:
            seen = self.books.changes.number
            for trainer in self.trainers:
                step += trainer.train_ready()
            if len(step) < self.k and len(self.trained) + len(step) < self.prompts:
                await self.books.changes.wait(seen)
                continue
            self.books.commit()
            for trainer in self.trainers:
                trainer.book.clear(step)
            self.trained += step
            step = []


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_every_prompt_is_trained_once_whatever_is_repeated_lost_or_killed(seed: int) -> None:
    run = Run(seed)
    run_virtual(run.main)
    assert Counter(run.trained) == Counter(range(run.prompts))


class Straight:
    """A line without faults, whose handlers can be cancelled."""

    def __init__(self, trainer: Rank) -> None:
        self.trainer = trainer
        self.handlers: list[asyncio.Task[Any]] = []
        self.asked: list[tuple[Any, Any]] = []
        self.answered = 0

    async def ask(self, kind: str, header: Any, buffers: Sequence[Any]) -> tuple[Any, Any]:
        await anyio.lowlevel.checkpoint()
        self.asked.append((header, buffers))
        handler = asyncio.get_running_loop().create_task(self.trainer.arrivals.take("rank 1", header, buffers))
        self.handlers.append(handler)
        await asyncio.wait([handler])
        if handler.cancelled():
            await anyio.sleep_forever()
        self.answered += 1
        return handler.result()

    @property
    def unacknowledged(self) -> int:
        return len(self.asked) - self.answered


@asynccontextmanager
async def two_ranks(lines: Callable[[Rank], Straight] = Straight) -> AsyncIterator[tuple[Books, Rank, Rank, Straight]]:
    """Rank 0 trains and rank 1 generates. Both pumps run; each in the scope of its rank."""
    books = Books([0], 64)
    trainer, sender = Rank(books, 0, trains=True), Rank(books, 1)
    line = lines(trainer)

    async def connect(_: int) -> Straight:
        await anyio.lowlevel.checkpoint()
        return line

    async def run(rank: Rank, pump: Any) -> None:
        with rank.scope:
            await pump.run()
        rank.ended.set()

    sender.connect = connect
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, trainer, trainer.arrivals)
        tasks.start_soon(run, sender, sender.departures)
        yield books, trainer, sender, line
        trainer.scope.cancel()
        sender.scope.cancel()


def depart(sender: Rank, group_id: int, lengths: Sequence[int] = (4, 9), **fields: Any) -> Group:
    ticket = sender.admit(group_id)
    assert ticket is not None
    return sender.score(ticket, lengths, **fields)


async def _pass(ticks: int) -> None:
    for _ in range(ticks):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("dies", ["sender", "sender, noticed late", "handler", "arrivals"])
def test_a_group_is_in_one_place_whatever_is_cut_off_at_any_await(dies: str, caplog: pytest.LogCaptureFixture) -> None:
    async def exchange(ticks: int) -> bool:
        """Cut off after so many iterations of the loop. Returns whether the exchange was complete."""
        async with two_ranks() as (books, trainer, sender, line):
            depart(sender, 7)
            await _pass(ticks)
            complete = not sender.store.statistics().rows
            for handler in line.handlers if dies != "arrivals" else ():
                handler.cancel()
            if dies.startswith("sender"):
                sender.scope.cancel()
            if dies == "sender":
                books.reclaim(1)
            if dies == "arrivals":
                trainer.scope.cancel()
            await _pass(60)
            books.reclaim(1) if dies.startswith("sender") else None
            for header, buffers in line.asked if dies == "handler" else ():
                answer, _ = await trainer.arrivals.take("rank 1", header, buffers)
                assert answer == {"refusal": "", "ended": False}
            await _pass(60)
            if dies == "arrivals":
                # Rank 0 may save the prompt of a group that came too late.
                assert 7 in books.reservation.entries and not books.ended and not caplog.records
            await sender.book.end_all("the run ended first")
            entry = books.reservation.entries.get(7)
            here = [ticket.group_id for ticket in trainer.store.ready()] == [7]
            assert here == (entry is not None), (here, entry)
            assert entry is None or entry.rank == 0
            assert here == (7 in trainer.book)
            if dies == "handler":
                assert here and trainer.train_ready() == [7]
            else:
                assert not sender.store.statistics().rows
            return complete

    ticks = 0
    while not run_virtual(partial(exchange, ticks)):
        ticks += 1
    assert ticks > 5


@virtual
async def test_a_slow_training_rank_has_at_most_its_window_and_nothing_is_lost() -> None:
    async with two_ranks() as (_, trainer, sender, line):
        trainer.ledger.delay_s = 10.0
        for group_id in range(30):
            depart(sender, group_id)
        seen = []
        while sender.store.statistics().rows:
            await anyio.sleep(1.0)
            seen.append(line.unacknowledged)
        assert max(seen) == UNACKNOWLEDGED
        assert sorted(trainer.train_ready()) == list(range(30))
        counts = trainer.recorder.take_counts(("travel/",))
        assert counts["travel/groups"] == counts["travel/rank_1/groups"] == 30
        assert counts["travel/bytes"] == sum(len(buffers[0]) for _, buffers in line.asked)
        assert counts["travel/credit_wait_s"] > 100


def test_a_group_that_cannot_travel_is_dropped_by_name_and_the_next_one_travels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(travel, "MAX_BYTES", 4000)

    async def main() -> None:
        async with two_ranks() as (books, trainer, sender, _):
            depart(sender, 1, [600])
            depart(sender, 2, [5], metadata={"a": {1}})
            depart(sender, 3, [5], temperature=1e7)
            depart(sender, 4)
            await _pass(100)
            assert trainer.train_ready() == [4] and sorted(books.ended) == [(1, 1), (1, 2), (1, 3)]
            assert not sender.store.statistics().rows and sender.book.reasons == {"dropped: did not travel": 3}

    run_virtual(main)
    assert "group 1 does not travel and is dropped: group 1 has " in caplog.text and "at most 4,000" in caplog.text
    assert "JSON values" in caplog.text and "temperature is" in caplog.text


@virtual
async def test_a_rank_that_does_both_keeps_what_is_assigned_to_it() -> None:
    books = Books([0])
    rank = Rank(books, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank.departures.run)
        depart(rank, 1)
        await _pass(20)
        assert rank.train_ready() == [1]
        rank.departures.close()


@virtual
async def test_close_ends_the_departures_after_the_last_acknowledgement() -> None:
    async with two_ranks() as (_, trainer, sender, line):
        trainer.ledger.delay_s = 5.0
        for group_id in range(3):
            depart(sender, group_id)
        sender.departures.close()
        await sender.ended.wait()
        assert line.answered == 3 and sorted(trainer.train_ready()) == [0, 1, 2]


# -- balance -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_ranks_differ_in_a_step_by_at_most_the_tokens_of_one_group(seed: int) -> None:
    """Ragged groups, any number of ranks, groups that wait from earlier steps: as long as a rank has groups that it may claim."""
    rng = random.Random(seed)
    ranks, k = rng.randrange(1, 5), rng.randrange(1, 12)
    books = Reservation(k, rng.randrange(3), trainers=range(ranks))
    next_id, trained = 0, 0
    while trained < 8 * k:
        ticket = books.admit(next_id, None)[1]
        if ticket is not None:
            next_id += 1
        # Scored in any order; claimed by whichever rank asks first.
        unassigned = [e for e in books.entries.values() if e.trainer < 0]
        for entry in rng.sample(unassigned, rng.randrange(len(unassigned) + 1)):
            rank = books.assign(entry.ticket, round(rng.lognormvariate(6, 1)) + 1)
            assert books.arrive(entry.ticket, entry.rank, rank)
        claimed = True
        while claimed:
            claimed = False
            for rank in rng.sample(range(ranks), ranks):
                loads = Counter(dict.fromkeys(range(ranks), 0))
                for e in books.entries.values():
                    loads[e.trainer] += e.tokens if e.claimed else 0
                at_ranks = [e for e in books.entries.values() if e.rank == e.trainer and not e.claimed]
                could = {e.rank for e in at_ranks if books.fits(e.ticket.deadline, claim=True)}
                claimants = books.claimants()
                ticket = books.claim([e.ticket for e in at_ranks if e.rank == rank], rank)
                assert books.claimed == k or (ticket is not None) == (rank in claimants)
                if ticket is not None:
                    claimed = True
                    assert loads[rank] <= min(loads[other] for other in could)
                else:
                    # No rank waits for another that cannot claim either.
                    assert books.claimed == k or rank not in could or loads[rank] > min(loads[other] for other in could)
        if books.claimed == k:
            trained += k
            books.commit()
            books.release(books.turn - 1)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_the_tokens_of_a_step_are_spread_evenly_over_ranks(seed: int) -> None:
    """The bound of list scheduling: the fullest rank is above the mean by less than the longest group."""
    rng = random.Random(seed)
    ranks, per_rank = rng.choice([2, 4]), rng.choice([8, 16])
    books = Reservation(ranks * per_rank, 0, trainers=range(ranks))
    tickets = [books.admit(group_id, None)[1] for group_id in range(ranks * per_rank)]
    loads, longest = Counter[int](), 0
    for ticket in tickets:
        assert ticket is not None
        tokens = min(round(rng.lognormvariate(6, 1)) + 1, 4000)
        rank = books.assign(ticket, tokens)
        assert books.assign(ticket, tokens) == rank
        loads[rank] += tokens
        longest = max(longest, tokens)
    mean = loads.total() / ranks
    assert max(loads.values()) - mean <= (1 - 1 / ranks) * longest


def test_a_prompt_of_its_own_counts_for_each_member_that_has_one() -> None:
    prompts = [range(9), range(9), range(50, 90)]
    members = [trajectory(7, n, 3, [*ids, 1, 2], prompt_length=len(ids)) for n, ids in enumerate(prompts)]
    for order in (members, members[::-1]):
        group = Group(TICKET, Prompt(7, np.zeros(0, np.int32), ""), tuple(order))
        assert tokens_of(group) == 9 + 40 + 3 * 2


def test_eight_ragged_groups_a_rank_differ_by_a_tenth() -> None:
    """Groups of 8 completions of log-normal length (sigma 1), on 8 ranks. Dealt out in turns they differ by a quarter."""
    ratios = []
    for seed in range(50):
        rng, books = random.Random(seed), Reservation(64, 0, trainers=range(8))
        loads = Counter[int]()
        for group_id in range(64):
            ticket = books.admit(group_id, None)[1]
            assert ticket is not None
            tokens = round(sum(rng.lognormvariate(6, 1) for _ in range(8)))
            loads[books.assign(ticket, tokens)] += tokens
        ratios.append(max(loads.values()) / (loads.total() / 8))
    assert sum(ratios) / 50 < 1.12 and max(ratios) < 1.35


def test_a_record_of_a_lost_sender_is_not_kept_where_its_prompt_is_played_again() -> None:
    books = Reservation(2, 0, ranks=3, trainers=[0])
    books.set_generating([1, 2])
    _, ticket = books.admit(7, None, 1)
    assert ticket is not None and books.lose_generator(1) == [7]
    for again in (False, True):
        if again:
            assert books.admit(7, None, 2) == (True, ticket)
        with pytest.raises(LedgerError, match="rank 0 has given up rank 1"):
            books.arrive(ticket, 1, 0)
    assert books.arrive(ticket, 2, 0) and books.arrive(ticket, 2, 0) and books.claim([ticket]) == ticket
