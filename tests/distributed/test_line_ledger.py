"""The ledger over the line: ranks on one set of books, cancellation, closing, connections that break, rank 0 that dies."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import warm
from test_ledger import fresh, refused

from asyncrl.distributed import line_ledger
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.errors import LedgerError, LifecycleError, RankLost
from asyncrl.types import ClaimState, Ticket

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of the test"
FULL, WAIT, GRANTED = ClaimState.FULL, ClaimState.WAIT, ClaimState.GRANTED


@asynccontextmanager
async def many_ranks(
    ranks: int, *numbers: int, by_rank: bool = False, trainers: Sequence[int] = ()
) -> AsyncIterator[list[LineLedger]]:
    """The ledgers of all ranks, each with a line of its own to rank 0. `numbers`: groups per step, and the largest age."""

    def books() -> Reservation:
        return Reservation(*numbers, ranks=ranks, by_rank=by_rank, trainers=trainers)

    async with AsyncExitStack() as stack:
        server = LineServer(SECRET)
        ledgers = [LineLedger(server, books(), 0)]
        await stack.enter_async_context(await server.open())
        for rank in range(1, ranks):
            client = await stack.enter_async_context(LineClient(server.address, SECRET, f"rank {rank}"))
            ledgers.append(LineLedger(client, books(), rank))
        for ledger in ledgers:
            await stack.enter_async_context(ledger)
        yield ledgers


async def until_known(ledger: LineLedger, number: int) -> None:
    """Wait until the ledger knows this change."""
    with anyio.fail_after(30):
        while ledger.changes < number:
            await ledger.wait_changed(ledger.changes)


async def test_where_ranks_have_shares_each_is_admitted_its_own_ordinals_of_the_step() -> None:
    """Five a step: 0, 2, 4 and 1, 3; then 6, 8 and 5, 7, 9. Whoever is first gets no slot of the other's."""
    async with many_ranks(2, 5, 0, by_rank=True) as (a, b):
        mine = [await fresh(a, group) for group in (0, 2, 4)]
        assert a.due() == 0 and await refused(a, 6)
        await a.end(mine.pop(), "dropped", "no signal")
        # A share that is not used up is the rank's, whatever prompt is next.
        theirs = [await fresh(b, 10**6), await fresh(b, 3)]
        mine.append(await fresh(a, 6))
        assert (a.due(), b.due()) == (0, 0) and await refused(b, 5)
        for ledger, tickets in ((a, mine), (b, theirs)):
            for ticket in tickets:
                assert await ledger.claim([ticket]) == (GRANTED, ticket)
        for ledger in (a, b):
            await ledger.commit()
        assert await refused(a, 8)  # no weights of the step are published yet
        for ledger in (a, b):
            await ledger.release(0)
        for ledger, groups in ((b, (5, 7, 9)), (a, (8, 10))):
            for group in groups:
                await fresh(ledger, group)
            assert ledger.due() == 0
        assert await refused(a, 12)


async def test_a_group_moves_to_the_rank_that_is_assigned_and_is_claimed_and_ended_there_alone() -> None:
    async with many_ranks(3, 2, 1, trainers=(0, 1)) as (a, b, c):
        one, two = await fresh(c, 1), await fresh(c, 2)
        assert (await c.assign(one, 100), await c.assign(two, 50)) == (0, 1)
        assert c.live_groups() == []
        assert await a.arrive(one, 2) and await b.arrive(two, 2) and await b.arrive(two, 2)
        assert (a.live_groups(), b.live_groups()) == ([one], [two])
        assert not await a.arrive(two, 2), "the group is at rank 1"
        await c.end(one, "dropped", "the run ended first")
        assert (await c.admit(3), c.statistics().live) == (Ticket(3, 0, 1), 3), "rank 2 has no group 1 to end"
        assert await b.claim([two]) == (GRANTED, two)
        assert await a.claim([one]) == (GRANTED, one)
        assert (a.live_groups(), b.live_groups()) == ([one], [two])
        # The acknowledgement is late: rank 0, which may end the groups of all ranks, still has the group in its book.
        await a.end(two, "dropped", "the run ended first")
        assert a.statistics().claimed == 2


async def test_a_refused_rank_is_told_when_its_claim_succeeds_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No state comes for any other reason.
    monkeypatch.setattr(line_ledger, "_PAUSE_PER_RANK_S", 1000.0)
    async with many_ranks(4, 5, 1, trainers=(1, 2, 3)) as (first, a, b, c):
        tickets = [await fresh(first, group_id) for group_id in range(6)]
        for ticket, tokens, rank in zip(tickets, (30, 10, 20, 100, 100, 100), (a, b, c, b, c, a), strict=True):
            assert await first.assign(ticket, tokens) == rank._rank and await rank.arrive(ticket, 0)
        for rank, ticket in ((a, tickets[0]), (b, tickets[1]), (c, tickets[2])):
            assert await rank.claim([ticket]) == (GRANTED, ticket)
        # Rank b has the fewest tokens, then c.
        assert await a.claim([tickets[5]]) == (WAIT, None) == await c.claim([tickets[4]])
        a_waits, c_waits = (asyncio.ensure_future(each.wait_changed(each.changes)) for each in (a, c))
        with anyio.fail_after(30):
            await fresh(first, 6)
            assert await b.claim([tickets[3]]) == (GRANTED, tickets[3])
            await c_waits
            assert not a_waits.done()
            assert await c.claim([tickets[4]]) == (GRANTED, tickets[4])
            # The step is full.
            await a_waits
            assert await a.claim([tickets[5]]) == (FULL, None)


async def test_the_groups_and_slots_of_a_rank_that_is_lost_are_free() -> None:
    """Rank 0 trains, ranks 1 and 2 generate. Rank 2, which is lost, has all three slots, and one of its groups has arrived."""
    async with many_ranks(3, 3, 0, trainers=(0,)) as (a, b, c):
        a._server.ledger.books.set_generating([1, 2])  # type: ignore[union-attr]  # at rank 0
        one, two, _ = [await fresh(c, group) for group in (1, 2, 3)]
        assert await c.assign(one, 100) == 0 and await a.arrive(one, 2)
        assert await a.claim([one]) == (GRANTED, one)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fresh, b, 4)
            await anyio.wait_all_tasks_blocked()
            assert a.lose_generator(2) == [2, 3] and a.lose_generator(2) == []
        assert await fresh(b, 2) == two and a.statistics().dropped == 2
        # The late record of the lost rank is refused, also where the new ticket is equal.
        with pytest.raises(LedgerError, match="rank 0 has given up rank 2, and other ranks play its groups"):
            await a.arrive(two, 2)
        with pytest.raises(LedgerError, match="rank 0 has given up rank 2"):
            await c.admit(3)
        for ticket in b.live_groups():
            assert await b.assign(ticket, 10) == 0 and await a.arrive(ticket, 1)
            assert await a.claim([ticket]) == (GRANTED, ticket)
        await b.exhaust()
        await a.commit()
        await b.release(0)
        assert a.finished and a.statistics().trained == 3, "nothing waits for the lost rank"


async def test_the_share_of_a_rank_without_prompts_is_anybodys() -> None:
    async with many_ranks(2, 4, 0, by_rank=True) as (a, b):
        await fresh(a, 0)
        await a.exhaust()
        for group in (1, 3, 5):
            await fresh(b, group)
        assert b.due() == 0 and await refused(b, 7)


async def test_places_and_slots_are_counted_over_both_ranks() -> None:
    async with many_ranks(2, 2, 0) as (a, b):
        x, y = await fresh(a, 0), await fresh(b, 1)
        assert await refused(a, 2)  # both slots are taken, one by the other rank
        assert await a.claim([x]) == (GRANTED, x)
        assert await a.claim([]) == (WAIT, None)
        assert await b.claim([y]) == (GRANTED, y)
        assert await a.claim([]) == (FULL, None) == await b.claim([])
        assert await a.commit() == 1
        assert (a.turn, b.turn) == (1, 0)
        assert await b.claim([]) == (FULL, None)  # it has to finish the step that the other one has left
        assert await b.commit() == 1
        await a.release(0)
        assert await refused(a, 3)  # the other rank's engines still sample with the old weights
        await b.release(0)
        assert (await fresh(a, 3)).deadline == 1
        s = a.statistics()
        assert (s.trained, s.admitted, s.live) == (2, 3, 1)


async def test_a_rank_says_whose_group_the_open_step_waits_for() -> None:
    async with many_ranks(2, 1, 3) as (a, b):
        assert a.remote_cause() is None
        first = await fresh(b, 7)
        await a.wait_changed(0)
        said = "the open step waits for group 7 of rank 1; see the output of that rank"
        assert (a.remote_cause(), b.remote_cause()) == (said, None)
        assert await b.claim([first]) == (GRANTED, first)
        await a.wait_changed(1)
        assert a.remote_cause() is None


async def test_a_question_that_changes_nothing_wakes_nobody() -> None:
    """In every state of the books: else two ranks that wait for each other's next change never come to rest."""
    async with many_ranks(2, 2, 0) as (a, b):
        x, y = await fresh(a, 0), await fresh(b, 1)
        for ledger, ticket in ((a, x), (b, y)):
            await ledger.claim([ticket])
        await a.commit()
        await b.commit()  # now slots are held for a publish
        await a.release(0)
        with anyio.fail_after(30):
            while b.changes < a.changes:
                await b.wait_changed(b.changes)
        seen = a.changes
        assert (await a.claim([]))[0] is WAIT is (await b.claim([]))[0]
        with anyio.move_on_after(0.05):
            await a.admit(2)
        assert a.changes == b.changes == seen


async def test_rollback_and_live_groups_concern_the_own_rank() -> None:
    async with many_ranks(2, 2, 0) as (a, b):
        x, y = await fresh(a, 0), await fresh(b, 1)
        await a.claim([x])
        await b.claim([y])
        assert await a.rollback() == [x]
        with anyio.fail_after(30):
            while b.statistics().claimed != 1:
                await b.wait_changed(b.changes)
        assert a.live_groups() == [x]


async def test_the_last_partial_step_needs_every_rank_to_be_exhausted() -> None:
    async with many_ranks(2, 4, 0) as (a, b):
        x = await fresh(a, 0)
        await a.claim([x])
        await a.exhaust()
        assert await a.claim([]) == (WAIT, None)
        await b.exhaust()
        assert await a.claim([]) == (FULL, None) == await b.claim([])
        await a.commit()
        await b.commit()
        await a.release(0)
        await b.release(0)
        assert b.finished


async def test_ranks_that_disagree_are_told() -> None:
    async with await LineServer(SECRET).open() as server:
        LineLedger(server, Reservation(2, 1, ranks=2), 0)
        async with LineClient(server.address, SECRET, "rank 1") as client:
            with pytest.raises(LedgerError, match="rank 1: max_staleness is 2, but 1 on rank 0"):
                await LineLedger(client, Reservation(2, 2, ranks=2), 1).__aenter__()


@pytest.mark.parametrize("what", ["admit", "claim"])
async def test_a_grant_that_its_caller_did_not_live_to_see_is_undone(what: str) -> None:
    async with many_ranks(2, 4, 3) as (a, b):
        rng = random.Random(1)
        ticket = await fresh(a, 1000)
        for i in range(60):
            async with asyncio.TaskGroup() as group:
                task: asyncio.Task[object] = group.create_task(a.admit(i) if what == "admit" else a.claim([ticket]))
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
            if not task.cancelled():  # it was faster
                if what == "admit":
                    granted = task.result()
                    assert isinstance(granted, Ticket)
                    await a.end(granted, "dropped", "test")
                else:
                    await a.rollback()
            await b.exhaust()  # reads the newest books on its way
        with anyio.fail_after(30):
            while a.statistics().live != 1 or a.statistics().claimed:
                await a.wait_changed(a.changes)
        assert a.live_groups() == [ticket]


async def test_closing_wakes_waiters_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    heard: list[str] = []

    async def hears(ledger: LineLedger) -> None:
        with pytest.raises(LifecycleError):
            await ledger.admit(1)
        heard.append("admit")

    async with many_ranks(2, 1, 0) as (a, b):
        # Each of both: at rank 0, and over the line.
        await fresh(a, 0)
        async with anyio.create_task_group() as group:
            for ledger in (a, b):
                group.start_soon(hears, ledger)
            await anyio.sleep(0.05)
            for ledger in (a, b):
                ledger.close()
                ledger.close()
        for ledger in (a, b):
            with pytest.raises(LifecycleError, match="closed"):
                await ledger.claim([])
    assert heard == ["admit", "admit"]
    assert {*threading.enumerate()} <= before


async def test_many_ranks_race_for_the_same_places() -> None:
    """Four ranks, each with a connection of its own, all at once: every place is given once and the counts agree."""
    ranks, k, steps = 4, 3, 5
    trained: Counter[int] = Counter()

    async def rank_main(rank: int, barrier: asyncio.Barrier, ledger: LineLedger) -> None:
        async def rollout() -> None:
            for i in range(steps * k):
                if i % ranks == rank:
                    ready.append(await fresh(ledger, i))
                    assert ledger.changes >= 0
            await ledger.exhaust()

        ready: list[Ticket] = []
        async with anyio.create_task_group() as group:
            group.start_soon(rollout)
            while not ledger.finished:
                seen = ledger.changes
                state, ticket = await ledger.claim(ready)
                if ticket is not None:
                    ready.remove(ticket)
                    trained[ticket.group_id] += 1
                    assert ledger.turn - ticket.oldest <= 1
                elif state is FULL:
                    await barrier.wait()  # stands for the collective: nobody commits before everybody has arrived
                    turn = ledger.turn
                    await ledger.commit()
                    await ledger.release(turn)
                else:
                    await ledger.wait_changed(seen)

    async with many_ranks(ranks, k, 1) as ledgers:
        barrier = asyncio.Barrier(ranks)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for rank in range(ranks):
                    group.start_soon(rank_main, rank, barrier, ledgers[rank])
            while (s := ledgers[0].statistics()).held:  # the last release may have been another rank's
                await ledgers[0].wait_changed(ledgers[0].changes)
    assert trained == Counter(range(steps * k))
    assert (s.trained, s.live, s.claimed, s.held) == (steps * k, 0, 0, 0)


async def test_a_rank_that_is_lost_ends_all_waits_and_what_is_left_is_committed_and_ended() -> None:
    async with many_ranks(2, 1, 1) as (a, b):
        assert (await a.claim([await fresh(a, 0)]))[0] is ClaimState.GRANTED
        kept = await fresh(b, 5)
        await until_known(b, a.changes)
        for ledger in (a, b):
            waiting = [asyncio.ensure_future(each) for each in (ledger.admit(1), ledger.wait_changed(ledger.changes))]
            await asyncio.sleep(0.05)
            ledger.lose(RankLost("rank 7 has given no sign of life"))
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, RankLost) and "rank 7" in str(error)
            with pytest.raises(RankLost, match="rank 7"):
                await ledger.claim([])
        await b.end(kept, "dropped", "the run ended first")
        assert [await ledger.commit() for ledger in (a, b)] == [1, 1]
        assert a.live_groups(everywhere=True) == b.live_groups() == []


async def test_a_rank_that_cannot_read_the_state_of_the_books_does_not_wait_for_ever() -> None:
    async with many_ranks(2, 4, 0) as (a, b):

        async def unreadable(peer: str, request: Sequence[int], buffers: object) -> Any:
            return [a.changes + 1], ()

        a._line.on("watch", unreadable)
        with anyio.fail_after(30), pytest.raises(ValueError, match="not enough values"):
            # The first state was asked for before, and is good.
            for number in range(3):
                waiting = asyncio.ensure_future(b.wait_changed(b.changes))
                await fresh(a, number)
                await waiting
    assert b._watching is not None and b._watching.done()


async def test_a_rank_waits_for_each_next_change_whatever_it_did_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ledger, "_IDLE_WATCH_S", 1000.0)  # else the next state to every rank would help
    async with many_ranks(2, 200, 3) as (a, b):
        for number in range(0, 100, 2):
            first = asyncio.ensure_future(b.wait_changed(b.changes))
            await asyncio.sleep(0)
            await fresh(b, number)
            # The answer for `first` may still be under way.
            second = asyncio.ensure_future(b.wait_changed(b.changes))
            await asyncio.sleep(0)
            await fresh(a, number + 1)
            with anyio.fail_after(30):
                assert await first <= await second


async def test_a_rank_that_does_not_wait_gets_one_state_for_all_changes_of_a_second() -> None:
    async with many_ranks(2, 8, 3) as (a, b):
        assert a._server is not None
        asked, watch = list[int](), a._server._watch

        async def counted(peer: str, request: Sequence[int], buffers: object) -> Any:
            asked.append(request[1])
            return await watch(peer, request, buffers)

        a._line.on("watch", counted)
        began = asyncio.get_running_loop().time()
        for number in range(300):
            await a.end(await fresh(a, number), "dropped", "test")
        assert a.changes == 600
        with anyio.fail_after(30):
            while b.changes < a.changes:  # noqa: ASYNC110  # `wait_changed` would ask at once
                await asyncio.sleep(0.01)
        assert len(asked) <= 2 + asyncio.get_running_loop().time() - began


def test_connections_that_are_cut_and_callers_that_give_up_lose_no_place() -> None:
    """A short form of `tools/chaos ledger`."""
    command = [sys.executable, str(ROOT / "tools/chaos"), "ledger", "--ranks", "6", "--seconds", "2", "--every", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["right"] and found["cuts"] > 5 and found["cancelled"] > 5


RANK_0 = """
import asyncio, sys
from asyncrl.distributed.line import LineServer
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.distributed.reservation import Reservation

async def main():
    server = LineServer(sys.argv[1])
    async with LineLedger(server, Reservation(1, 0, ranks=2), 0) as ledger:
        await server.open()
        print(server.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_who_waits_for_rank_0_hears_that_it_died() -> None:
    process = warm.Popen(
        [sys.executable, "-c", RANK_0, SECRET],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with LineClient(address, SECRET, "rank 1") as client:
            async with LineLedger(client, Reservation(1, 0, ranks=2), 1) as ledger:
                client.on_end = ledger.lose
                await fresh(ledger, 0)
                waiting = [
                    asyncio.ensure_future(each) for each in (ledger.admit(1), ledger.wait_changed(ledger.changes))
                ]
                await asyncio.sleep(0.1)
                process.kill()
                with anyio.fail_after(30):
                    errors = await asyncio.gather(*waiting, return_exceptions=True)
                for error in errors:
                    assert isinstance(error, RankLost) and "rank 1 lost rank 0 at" in str(error)
                with pytest.raises(RankLost, match="rank 1 lost rank 0"):
                    await ledger.claim([])
    finally:
        process.kill()
        process.communicate()


async def test_what_another_rank_has_committed_is_not_trained_here_before_this_one_commits() -> None:
    """A rank that is stopped during the optimizer step may never commit it: its checkpoint is of the version before."""
    async with many_ranks(2, 2, 1) as (a, b):
        mine, theirs, waiting = await fresh(b, 1), await fresh(a, 0), await fresh(b, 3)
        assert (await b.claim([mine]))[1] == mine and (await a.claim([theirs]))[1] == theirs
        await a.commit()
        while b.statistics().turn == 0:
            await b.wait_changed(b.changes)
        assert b.turn == 0 and b.live_groups() == [mine, waiting]
        assert a.live_groups() == []
        await b.commit()
        assert b.live_groups() == [waiting]
        again = (await b.claim([waiting]))[1]
        assert again == waiting and b.live_groups() == [waiting] == await b.rollback()
        assert b.live_groups() == [waiting]


async def test_whose_groups_were_in_the_last_step_is_known_to_rank_0_whoever_committed_it_first() -> None:
    async with many_ranks(2, 2, 3) as (a, b):
        for first, second in ((a, b), (b, a)):
            turn = a.turn
            ids = {each: 10 * turn + rank for rank, each in enumerate((a, b))}
            for each, group_id in ids.items():
                ticket = await fresh(each, group_id)
                assert (await each.claim([ticket]))[1] == ticket
            await fresh(b, 10 * turn + 5)  # not in it
            await first.commit()
            for each in (a, b):
                while each.statistics().turn == turn:
                    await each.wait_changed(each.changes)
            assert a.last_step(0) == [ids[a]] and a.last_step(1) == [ids[b]]
            with pytest.raises(LifecycleError, match="only rank 0"):
                b.last_step(0)
            await second.commit()
            assert a.last_step(1) == [ids[b]]
            for each in (a, b):
                await each.release(turn)


async def test_another_thread_does_not_read_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's thread asks while the loop may be in the middle of a change."""
    async with many_ranks(2, 5, 0) as (a, _):
        server, readers = a._server, list[int]()
        assert server is not None
        read = server.state

        def state(rank: int) -> Any:
            readers.append(threading.get_ident())
            return read(rank)

        monkeypatch.setattr(server, "state", state)
        a._on_change()
        thread = threading.Thread(target=a.describe)
        thread.start()
        thread.join()
        assert readers == []
        a.describe()
        assert readers == [threading.get_ident()]
