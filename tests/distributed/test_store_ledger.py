"""The ledger over a store: two ranks on one set of books, cancellation, closing, a store that goes away."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch.distributed as dist
import warm
from ports import reserved_port

from asyncrl.distributed.sealed import SealedStore
from asyncrl.distributed.store_ledger import StoreLedger
from asyncrl.errors import LedgerError, LifecycleError
from asyncrl.types import ClaimState, Ticket

ROOT = Path(__file__).resolve().parents[2]
FULL, WAIT, GRANTED = ClaimState.FULL, ClaimState.WAIT, ClaimState.GRANTED


@asynccontextmanager
async def two_ranks(*numbers: int, by_rank: bool = False) -> AsyncIterator[tuple[StoreLedger, StoreLedger]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                StoreLedger.over(SealedStore(store.clone()), *numbers, rank=rank, ranks=2, by_rank=by_rank)  # type: ignore[misc]
            )
            for rank in range(2)
        ]
        yield a, b


async def fresh(ledger: StoreLedger, group_id: int) -> Ticket:
    ticket = await ledger.admit(group_id)
    assert ticket is not None
    return ticket


async def waits(ledger: StoreLedger, group_id: int) -> bool:
    """Whether the group gets no slot. It is asked for once more behind a change of the other rank, if there is one."""
    with anyio.move_on_after(0.05) as scope:
        await ledger.admit(group_id)
    return scope.cancelled_caught


async def test_where_ranks_have_shares_each_is_admitted_its_own_ordinals_of_the_step() -> None:
    """Five a step: 0, 2, 4 and 1, 3; then 6, 8 and 5, 7, 9. Whoever is first gets no slot of the other's."""
    async with two_ranks(5, 0, by_rank=True) as (a, b):
        mine = [await fresh(a, group) for group in (0, 2, 4)]
        assert a.due() == 0 and await waits(a, 6)
        await a.end(mine.pop(), "dropped", "no signal")
        assert await waits(b, 10**6) is False, "a share that is not used up is the rank's, whatever prompt is next"
        mine.append(await fresh(a, 6))
        theirs = [Ticket(10**6, 0, 0), await fresh(b, 3)]
        assert (a.due(), b.due()) == (0, 0) and await waits(b, 5)
        for ledger, tickets in ((a, mine), (b, theirs)):
            for ticket in tickets:
                assert await ledger.claim([ticket]) == (GRANTED, ticket)
        for ledger in (a, b):
            await ledger.commit()
        assert await waits(a, 8)  # no weights of the step are published yet
        for ledger in (a, b):
            await ledger.release(0)
        for ledger, groups in ((b, (5, 7, 9)), (a, (8, 10))):
            for group in groups:
                await fresh(ledger, group)
            assert ledger.due() == 0
        assert await waits(a, 12)


async def test_the_share_of_a_rank_without_prompts_is_anybodys() -> None:
    async with two_ranks(4, 0, by_rank=True) as (a, b):
        await fresh(a, 0)
        await a.exhaust()
        for group in (1, 3, 5):
            await fresh(b, group)
        assert b.due() == 0 and await waits(b, 7)


async def test_places_and_slots_are_counted_over_both_ranks() -> None:
    async with two_ranks(2, 0) as (a, b):
        x, y = await fresh(a, 0), await fresh(b, 1)
        assert await waits(a, 2)  # both slots are taken, one by the other rank
        assert await a.claim([x]) == (GRANTED, x)
        assert await a.claim([]) == (WAIT, None)
        assert await b.claim([y]) == (GRANTED, y)
        assert await a.claim([]) == (FULL, None) == await b.claim([])
        assert await a.commit() == 1
        assert (a.turn, b.turn) == (1, 0)
        assert await b.claim([]) == (FULL, None)  # it has to finish the step that the other one has left
        assert await b.commit() == 1
        await a.release(0)
        assert await waits(a, 3)  # the other rank's engines still sample with the old weights
        await b.release(0)
        assert (await fresh(a, 3)).deadline == 1
        s = a.statistics()
        assert (s.trained, s.admitted, s.live) == (2, 3, 1)


async def test_a_rank_says_whose_group_the_open_step_waits_for() -> None:
    async with two_ranks(1, 3) as (a, b):
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
    async with two_ranks(2, 0) as (a, b):
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


async def unannounced(ledger: StoreLedger) -> None:
    """Group 0 is admitted, and no rank hears of it."""
    announce, ledger._shared._announce = ledger._shared._announce, lambda *states: None  # type: ignore[method-assign]
    await fresh(ledger, 0)
    ledger._shared._announce = announce  # type: ignore[method-assign]


async def test_closing_waits_for_no_announcement_of_a_rank_that_died_before_it() -> None:
    """Between the writing of the books and that: the watching threads of the others wait for a key that nobody sets."""
    async with two_ranks(2, 0) as (a, b):
        await unannounced(b)
        assert a._watch is not None
        await a.aclose()
        assert not a._watch._thread.is_alive()  # closing goes on without one that does not end in time
    async with two_ranks(2, 0) as (a, b):
        await unannounced(b)
        await fresh(b, 1)  # the next change says so too
        with anyio.fail_after(30):
            while a.statistics().live < 2:
                await a.wait_changed(a.changes)


async def test_rollback_and_live_groups_concern_the_own_rank() -> None:
    async with two_ranks(2, 0) as (a, b):
        x, y = await fresh(a, 0), await fresh(b, 1)
        await a.claim([x])
        await b.claim([y])
        assert await a.rollback() == [x]
        with anyio.fail_after(30):
            while b.statistics().claimed != 1:
                await b.wait_changed(b.changes)
        assert a.live_groups() == [x]


async def test_the_last_partial_step_needs_every_rank_to_be_exhausted() -> None:
    async with two_ranks(4, 0) as (a, b):
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
    store = dist.HashStore()
    async with StoreLedger.over(SealedStore(store), 2, 1, rank=0, ranks=2):
        with pytest.raises(LedgerError, match="max_staleness"):
            await StoreLedger.over(SealedStore(store), 2, 2, rank=1, ranks=2).__aenter__()


@pytest.mark.parametrize("what", ["admit", "claim"])
async def test_a_grant_that_its_caller_did_not_live_to_see_is_undone(what: str) -> None:
    async with two_ranks(4, 3) as (a, b):
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

    async def hears(ledger: StoreLedger) -> None:
        with pytest.raises(LifecycleError):
            await ledger.admit(1)
        heard.append("admit")

    ledger = StoreLedger.over(SealedStore(dist.HashStore()), 1, 0)
    with pytest.raises(LifecycleError, match="not open"):
        await ledger.admit(0)
    async with anyio.create_task_group() as group:
        async with ledger:
            await fresh(ledger, 0)
            group.start_soon(hears, ledger)
            await anyio.sleep(0.05)
        await ledger.aclose()
    assert heard == ["admit"]
    assert set(threading.enumerate()) <= before
    with pytest.raises(LifecycleError, match="closed"):
        await ledger.claim([])
    with pytest.raises(LifecycleError):
        await ledger.__aenter__()


async def test_many_ranks_race_for_the_same_places() -> None:
    """Four ranks, each with a connection of its own, all at once: every place is given once and the counts agree."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, k, steps = 4, 3, 5
    trained: Counter[int] = Counter()

    async def rank_main(rank: int, barrier: asyncio.Barrier, ledger: StoreLedger) -> None:
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
                    assert ledger.turn - ticket.admitted <= 1
                elif state is FULL:
                    await barrier.wait()  # stands for the collective: nobody commits before everybody has arrived
                    turn = ledger.turn
                    await ledger.commit()
                    await ledger.release(turn)
                else:
                    await ledger.wait_changed(seen)

    async with AsyncExitStack() as stack:
        ledgers = [
            await stack.enter_async_context(StoreLedger.over(SealedStore(store.clone()), k, 1, rank=rank, ranks=ranks))  # type: ignore[attr-defined]
            for rank in range(ranks)
        ]
        barrier = asyncio.Barrier(ranks)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for rank in range(ranks):
                    group.start_soon(rank_main, rank, barrier, ledgers[rank])
            while (s := ledgers[0].statistics()).held:  # the last release may have been another rank's
                await ledgers[0].wait_changed(ledgers[0].changes)
    assert trained == Counter(range(steps * k))
    assert (s.trained, s.live, s.claimed, s.held) == (steps * k, 0, 0, 0)


STORE_DIES = """
import asyncio, sys
import torch.distributed as dist
from asyncrl.distributed.sealed import SealedStore
from asyncrl.distributed.store_ledger import StoreLedger
from asyncrl.errors import RankLost

async def main():
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    async with StoreLedger.over(SealedStore(store), 1, 0, rank=0, ranks=2) as ledger:
        await ledger.admit(0)
        print("waiting", flush=True)
        try:
            await ledger.admit(1)
        except RankLost as error:
            print("heard:", error, flush=True)

asyncio.run(main())
"""

HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("up", flush=True)
sys.stdin.read()
"""


def start(program: str, *args: object) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_store_that_goes_away_is_heard_by_those_who_wait() -> None:
    with reserved_port() as port:
        host = start(HOST, port)
        assert host.stdout is not None and host.stdout.readline() == "up\n"
        rank = start(STORE_DIES, port)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waiting\n", rank.communicate()
        host.kill()
        host.communicate()
        out, err = rank.communicate(timeout=60)
        assert "heard: rank 0 lost the shared ledger" in out, err
        assert rank.returncode == 0, err


async def test_what_another_rank_has_committed_is_not_trained_here_before_this_one_commits() -> None:
    """A rank that is stopped during the optimizer step may never commit it: its checkpoint is of the version before."""
    async with two_ranks(2, 1) as (a, b):
        mine, theirs, waiting = await fresh(b, 1), await fresh(a, 0), await fresh(b, 3)
        assert (await b.claim([mine]))[1] == mine and (await a.claim([theirs]))[1] == theirs
        assert b.committed_elsewhere() == []
        await a.commit()
        while b.statistics().turn == 0:
            await b.wait_changed(b.changes)
        assert b.turn == 0 and b.live_groups() == [mine, waiting] and b.committed_elsewhere() == [mine]
        assert a.live_groups() == [] and a.committed_elsewhere() == []
        await b.commit()
        assert b.live_groups() == [waiting] and b.committed_elsewhere() == []
        again = (await b.claim([waiting]))[1]
        assert again == waiting and b.live_groups() == [waiting] == await b.rollback()
        assert b.live_groups() == [waiting]


async def test_whose_groups_were_in_the_last_step_is_known_to_all_whoever_committed_it_first() -> None:
    async with two_ranks(2, 3) as (a, b):
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
                assert each.last_step(0) == [ids[a]] and each.last_step(1) == [ids[b]]
            await second.commit()
            assert a.last_step(1) == [ids[b]]
            for each in (a, b):
                await each.release(turn)
