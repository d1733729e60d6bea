"""The contract of `ports.Ledger`, on the local ledger, at rank 0 and over a line; then waiting, cancellation, closing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import anyio
import pytest
from support.virtual import virtual

from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Late, Reservation, ReservedGroup
from asyncrl.errors import LedgerError, LifecycleError
from asyncrl.ports import Ledger
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import ClaimState, Ticket

AnyLedger: TypeAlias = LocalLedger | LineLedger
Make: TypeAlias = Callable[..., Awaitable[AnyLedger]]
FULL, WAIT, GRANTED = ClaimState.FULL, ClaimState.WAIT, ClaimState.GRANTED


@pytest.fixture(params=["local", "rank 0", "line"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Opens a ledger, with the arguments of `Reservation`."""
    async with AsyncExitStack() as stack:

        async def open_one(*args: int, late: Late = "wait", turn: int = 0, warmup: int = 0) -> AnyLedger:
            books = Reservation(*args, late, turn, warmup=warmup)  # type: ignore[misc]  # two numbers
            if request.param == "local":
                return await stack.enter_async_context(LocalLedger(books))
            server = await LineServer("a secret of the test").open()
            stack.push_async_callback(server.aclose)
            ledger = LineLedger(server, books, 0)
            if request.param == "line":
                client = await stack.enter_async_context(LineClient(server.address, "a secret of the test", "rank 1"))
                ledger = LineLedger(client, books, 0)
            return await stack.enter_async_context(ledger)

        yield open_one


async def fresh(ledger: Ledger, group_id: int) -> Ticket:
    ticket = await ledger.admit(group_id)
    assert ticket is not None
    return ticket


def conserved(ledger: AnyLedger) -> None:
    s = ledger.statistics()
    assert s.admitted == s.live + s.claimed + s.held + s.trained + s.dropped + s.failed
    assert s.live + s.claimed + s.held <= s.slots


async def test_the_life_of_a_group(make: Make) -> None:
    ledger = await make(2, 1)
    a, b = await fresh(ledger, 0), await fresh(ledger, 1)
    assert (a.oldest, a.deadline) == (0, 1)
    assert ledger.statistics().slots == 4
    assert await ledger.claim([]) == (WAIT, None)
    assert await ledger.claim([b, a]) == (GRANTED, b)
    assert await ledger.claim([a]) == (GRANTED, a)
    assert await ledger.claim([]) == (FULL, None)
    assert await ledger.commit() == 1 == ledger.turn
    s = ledger.statistics()
    assert (s.live, s.claimed, s.held, s.trained) == (0, 0, 2, 0)
    await ledger.release(0)
    s = ledger.statistics()
    assert (s.held, s.trained, s.admitted) == (0, 2, 2)
    conserved(ledger)


async def test_the_reservation_keeps_a_place_for_the_slow_group(make: Make) -> None:
    ledger = await make(1, 1)
    slow, fast = await fresh(ledger, 0), await fresh(ledger, 1)
    # Both are due at turn 1: only one place is left after this turn, so one of them may go now.
    assert await ledger.claim([fast]) == (GRANTED, fast)
    await ledger.commit()
    await ledger.release(0)
    late = await fresh(ledger, 2)
    assert late.deadline == 2
    # Turn 1 is the slow group's last: the newer one must wait although it is ready and the place is free.
    assert await ledger.claim([late]) == (WAIT, None)
    assert await ledger.claim([late, slow]) == (GRANTED, slow)
    await ledger.commit()
    assert await ledger.claim([late]) == (GRANTED, late)


async def test_with_late_drop_the_newer_one_goes_and_the_slow_one_expires(make: Make) -> None:
    ledger = await make(1, 1, late="drop")
    slow, fast = await fresh(ledger, 0), await fresh(ledger, 1)
    await ledger.claim([fast])
    await ledger.commit()
    await ledger.release(0)
    late = await fresh(ledger, 2)
    assert await ledger.claim([late]) == (GRANTED, late)
    assert ledger.expired() == []
    await ledger.commit()
    assert ledger.expired() == [slow]
    assert await ledger.claim([slow]) == (WAIT, None)  # never trained too old
    await ledger.end(slow, "dropped", "late")
    assert ledger.expired() == [] and ledger.statistics().dropped == 1
    conserved(ledger)


async def test_a_group_admitted_between_commit_and_publish_counts_from_the_weights_that_sample_it(make: Make) -> None:
    ledger = await make(2, 1)
    tickets = [await fresh(ledger, i) for i in range(3)]
    await ledger.claim(tickets)
    await ledger.claim(tickets[1:])
    await ledger.commit()
    between = await fresh(ledger, 3)  # the fourth slot was free all the time; the engines still have version 0
    assert (between.oldest, between.deadline) == (0, 1)
    await ledger.release(0)
    after = await fresh(ledger, 4)
    assert (after.oldest, after.deadline) == (1, 2)


async def refused(ledger: Ledger, group_id: int) -> bool:
    """Nobody gives this group a slot now, nor, over a line, behind a change of another rank."""
    with anyio.move_on_after(0.05) as scope:
        await ledger.admit(group_id)
    return scope.cancelled_caught


async def test_the_warm_up_gives_out_the_slots_of_one_step(make: Make) -> None:
    """Two steps of warm-up with max_staleness 2: 2 slots, then 2 again after the release, then all 6."""
    ledger = await make(2, 2, warmup=2)
    for turn in range(2):
        tickets = [await fresh(ledger, 10 * turn + i) for i in range(2)]
        assert await refused(ledger, 99)
        for ticket in tickets:
            assert (await ledger.claim([ticket]))[0] is GRANTED
        await ledger.commit()
        assert await refused(ledger, 99)  # the engines do not have the new weights yet
        await ledger.release(turn)
        conserved(ledger)
    for i in range(6):
        await fresh(ledger, 50 + i)
    assert await refused(ledger, 99)


@pytest.mark.parametrize("outcome", ["dropped", "failed"])
async def test_in_the_warm_up_a_slot_that_comes_back_is_given_out_again(make: Make, outcome: Any) -> None:
    ledger = await make(1, 3, warmup=5)
    for i in range(2):
        ticket = await fresh(ledger, i)
        assert await refused(ledger, 99)
        await ledger.end(ticket, outcome, "test")
    await fresh(ledger, 9)
    s = ledger.statistics()
    assert (s.dropped, s.failed) == ((2, 0) if outcome == "dropped" else (0, 2))
    behind = await make(1, 1, turn=4, warmup=4)  # a run that is resumed after its warm-up has none
    assert [(await fresh(behind, i)).group_id for i in range(2)] == [0, 1]


async def test_a_release_covers_the_steps_before_it(make: Make) -> None:
    """Engines that take weights every third step: slots and ages of three steps come back together."""
    ledger = await make(1, 2)
    for turn in range(3):
        ticket = await fresh(ledger, turn)
        assert (ticket.oldest, ticket.deadline) == (0, 2)
        await ledger.claim([ticket])
        await ledger.commit()
    assert await refused(ledger, 9) and ledger.statistics().held == 3
    await ledger.release(2)
    assert ledger.statistics().held == 0 and ledger.statistics().trained == 3
    assert (await fresh(ledger, 9)).oldest == 3


async def test_giving_back_twice_or_what_was_never_given_raises_and_changes_nothing(make: Make) -> None:
    ledger = await make(2, 1)
    a, b = await fresh(ledger, 0), await fresh(ledger, 1)
    await ledger.end(a, "dropped", "test")
    await ledger.claim([b])
    before = ledger.statistics()
    for wrong in (
        lambda: ledger.end(a, "dropped", "again"),
        lambda: ledger.end(b, "failed", "it is claimed"),
        lambda: ledger.end(Ticket(77, 0, 1), "failed", "unknown"),
        lambda: ledger.end(Ticket(1, 5, 6), "failed", "another ticket under the same id"),
        lambda: ledger.claim([a]),
        lambda: ledger.claim([b]),
        lambda: ledger.claim([Ticket(77, 0, 1)]),
        lambda: ledger.release(0),
        lambda: ledger.admit(1),
        lambda: ledger.admit(5, oldest=1),
    ):
        with pytest.raises(LedgerError):
            await wrong()
        assert ledger.statistics() == before
    await ledger.commit()
    await ledger.release(0)
    with pytest.raises(LedgerError, match="released once"):
        await ledger.release(0)
    with pytest.raises(LedgerError, match="empty step"):
        await ledger.commit()


async def test_rollback_makes_the_claimed_live_again_with_their_deadlines(make: Make) -> None:
    ledger = await make(2, 0)
    a, b = await fresh(ledger, 0), await fresh(ledger, 1)
    await ledger.claim([a])
    await ledger.claim([b])
    assert await ledger.rollback() == [a, b]
    assert await ledger.rollback() == []
    assert ledger.statistics().live == 2 and ledger.turn == 0
    assert await ledger.claim([a]) == (GRANTED, a)
    await ledger.end(b, "failed", "broke the step")
    conserved(ledger)


async def test_partial_steps_only_where_nobody_becomes_too_old(make: Make) -> None:
    ledger = await make(2, 0)
    a, b = await fresh(ledger, 0), await fresh(ledger, 1)
    await ledger.claim([a])
    with pytest.raises(LedgerError, match="group 1"):
        await ledger.commit()
    await ledger.end(b, "failed", "test")
    assert await ledger.claim([]) == (WAIT, None)
    await ledger.exhaust()
    assert await ledger.claim([]) == (FULL, None)
    assert not ledger.finished
    assert await ledger.commit() == 1
    await ledger.release(0)
    assert ledger.finished
    assert ledger.statistics().trained == 1


async def test_a_group_sampled_elsewhere_gets_the_deadline_of_its_oldest_token_or_is_refused(make: Make) -> None:
    ledger = await make(1, 2, turn=5)
    assert await ledger.admit(0, oldest=2) is None  # due at 4
    due_now = await ledger.admit(1, oldest=3)
    assert due_now is not None and (due_now.oldest, due_now.deadline) == (3, 5)
    assert await ledger.admit(2, oldest=3) is None  # the only place of turn 5 is reserved
    other = await ledger.admit(3, oldest=4)
    assert other is not None and other.deadline == 6
    assert await ledger.claim([other]) == (WAIT, None)
    assert await ledger.claim([other, due_now]) == (GRANTED, due_now)
    conserved(ledger)


class CountedRanks(list[int]):
    """A list that counts how often somebody looks at all its items."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        CountedRanks.looks += 1
        return super().__iter__()


async def test_with_many_ranks_few_transitions_look_at_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the last rank that releases a step changes the books."""
    ranks, steps = 500, 4
    books = Reservation(ranks, 1, ranks=ranks)
    books.acknowledged = CountedRanks(books.acknowledged)
    monkeypatch.setattr(CountedRanks, "looks", 0)
    ledger, order = LocalLedger(books), random.Random(0)
    for turn in range(steps):
        first = turn * ranks
        tickets = [await ledger.admit(number, rank=number % ranks) for number in range(first, first + ranks)]
        for _ in tickets:
            assert (await ledger.claim([t for t in tickets if t and not books.entries[t.group_id].claimed]))[1]
        await ledger.commit()
        seen = ledger.changes
        for count, rank in enumerate(order.sample(range(ranks), ranks)):
            assert ledger.changes == seen, f"{count} of {ranks} ranks released the step, which frees no slot"
            await ledger.release(turn, rank)
        assert ledger.changes > seen and not books.slots_taken
    assert CountedRanks.looks < steps * 40


def test_a_claim_asks_about_one_ready_group_of_each_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = [Ticket(number, number // 100, number // 100 + 2) for number in range(300)]
    entries = {ticket.group_id: ReservedGroup(ticket) for ticket in tickets}
    books, asked = Reservation(100, 2, entries=entries), list[int]()
    monkeypatch.setattr(Reservation, "_may_claim", lambda self, deadline: asked.append(deadline))
    assert books.claim(tickets) is None and asked == [2, 3, 4]


@virtual
async def test_waiting_admissions_are_served_in_order() -> None:
    ledger = LocalLedger(Reservation(2, 0))
    first = [await fresh(ledger, i) for i in (0, 1)]
    order: list[int] = []

    async def admit(group_id: int) -> None:
        await fresh(ledger, group_id)
        order.append(group_id)

    async with anyio.create_task_group() as group:
        for i in (10, 11, 12):
            group.start_soon(admit, i)
        await anyio.wait_all_tasks_blocked()
        await ledger.end(first[0], "dropped", "test")
        # A newcomer may not overtake those that wait, although a slot is free at this moment for none of them.
        group.start_soon(admit, 13)
        await anyio.wait_all_tasks_blocked()
        assert order == [10]
        await ledger.end(first[1], "dropped", "test")
        await anyio.wait_all_tasks_blocked()
        assert order == [10, 11]
        for i in (10, 11):
            await ledger.end(Ticket(i, 0, 0), "failed", "test")
    assert order == [10, 11, 12, 13]


@virtual
async def test_a_release_without_a_slot_admits_a_group_that_waits_for_newer_weights() -> None:
    """A rank that joined with the weights of turn 4 holds up the others' admissions until it has the weights of turn 5."""
    ledger = LocalLedger(Reservation(1, 1, turn=5))
    ticket = await fresh(ledger, 0)
    assert await ledger.begin(4, rank=1)
    await ledger.claim([ticket])
    await ledger.commit()
    await ledger.release(5)
    waiting = asyncio.ensure_future(ledger.admit(1, rank=1))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    await ledger.release(4, rank=1)
    async with asyncio.timeout(60):
        assert await waiting == Ticket(1, 5, 6)


@virtual
async def test_a_slot_handed_to_a_cancelled_caller_goes_to_the_next() -> None:
    ledger = LocalLedger(Reservation(1, 0))
    holder = await fresh(ledger, 0)
    got: list[Ticket] = []

    async def patient() -> None:
        got.append(await fresh(ledger, 2))

    async with asyncio.TaskGroup() as group:
        impatient = group.create_task(ledger.admit(1))
        await anyio.wait_all_tasks_blocked()
        group.create_task(patient())
        await anyio.wait_all_tasks_blocked()
        await ledger.end(holder, "dropped", "test")  # hands the slot to the first one ...
        impatient.cancel()  # ... which is cancelled before it runs again
    assert impatient.cancelled()
    assert [t.group_id for t in got] == [2]
    assert ledger.statistics().admitted == 2
    conserved(ledger)


@virtual
async def test_wait_changed_never_misses_a_change() -> None:
    ledger = LocalLedger(Reservation(1, 1))
    seen = ledger.changes
    ticket = await fresh(ledger, 0)
    assert await ledger.wait_changed(seen) == ledger.changes > seen  # it happened before the wait
    woken: list[str] = []

    async def watch(label: str) -> None:
        await ledger.wait_changed(ledger.changes)
        woken.append(label)

    for change in (
        lambda: ledger.claim([ticket]),
        lambda: ledger.rollback(),
        lambda: ledger.claim([ticket]),
        lambda: ledger.commit(),
        lambda: ledger.release(0),
        lambda: ledger.admit(1),
        lambda: ledger.end(Ticket(1, 1, 2), "dropped", "test"),
        lambda: ledger.exhaust(),
    ):
        woken.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(watch, "a")
            group.start_soon(watch, "b")
            await anyio.wait_all_tasks_blocked()
            assert woken == []
            await change()
        assert sorted(woken) == ["a", "b"]


@virtual
async def test_closing_wakes_every_waiter_with_an_error() -> None:
    heard: list[str] = []

    async def hears(what: Callable[[], Awaitable[object]], label: str) -> None:
        with pytest.raises(LifecycleError):
            await what()
        heard.append(label)

    async with anyio.create_task_group() as group:
        async with LocalLedger(Reservation(1, 0)) as ledger:
            ticket = await fresh(ledger, 0)
            group.start_soon(hears, lambda: ledger.admit(1), "admit")
            group.start_soon(hears, lambda: ledger.wait_changed(ledger.changes), "wait_changed")
            await anyio.wait_all_tasks_blocked()
        ledger.close()
    assert sorted(heard) == ["admit", "wait_changed"]
    await ledger.end(ticket, "dropped", "shutdown")  # teardown is still counted
    conserved(ledger)


async def test_live_groups_are_what_a_checkpoint_needs(make: Make) -> None:
    ledger = await make(2, 1)
    tickets = [await fresh(ledger, i) for i in (3, 1, 2, 0)]
    await ledger.claim([tickets[0]])
    assert [t.group_id for t in ledger.live_groups()] == [0, 1, 2, 3]
    await ledger.claim([tickets[1]])
    await ledger.commit()
    assert [t.group_id for t in ledger.live_groups()] == [0, 2]
    resumed = await make(2, 1, turn=ledger.turn)
    again = [await fresh(resumed, t.group_id) for t in ledger.live_groups()]
    assert [t.deadline for t in again] == [2, 2]


@virtual
async def test_waiting_for_a_slot_is_a_recorded_wait() -> None:
    recorder = Recorder(clock=asyncio.get_running_loop().time, nvtx=False)
    ledger = LocalLedger(Reservation(1, 0), recorder)
    await fresh(ledger, 0)
    async with anyio.create_task_group() as group:
        group.start_soon(ledger.admit, 1, name="rollout pump")
        await anyio.sleep(3)
        (wait,) = recorder.active_waits()
        assert wait.describe(3.0) == "rollout pump waits for a slot from publish pump for 3.0 s"
        group.cancel_scope.cancel()
    assert recorder.active_waits() == []
