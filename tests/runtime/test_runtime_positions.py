"""What rank 0 knows of where the others are in their prompts, on a real store: said, said late, said before, never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio
import pytest

from asyncrl.data.prompts import FIRST_OUTSIDE_GROUP, REROLLS
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import CheckpointError, RankLost
from asyncrl.runtime.positions import GATHER_TIMEOUT_S, EarlyEnd, Positions, after_step
from asyncrl.runtime.saving import SavedRun

T = TypeVar("T")


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Positions, Positions]]:
    server = LineServer("a secret of the test")
    first = Positions(server, 0, (0, 3))
    async with await server.open(), LineClient(server.address, "a secret of the test", "rank 3") as client:
        yield first, Positions(client, 1, (0, 3))


async def later(delay_s: float, call: Coroutine[Any, Any, T]) -> T:
    await asyncio.sleep(delay_s)
    return await call


def at(position: int, **more: Any) -> dict[str, Any]:
    return {"turn": 0, "prompts": {"position": position}, "untrained": [position], "next_group": 1} | more


def whole(position: int, replay: Any = None) -> dict[str, Any]:
    return at(position, replay=replay)


async def test_what_was_said_at_the_version_needs_nobody_at_the_end() -> None:
    async with two() as (first, other):
        for version in range(1, 6):
            await other.announce(version, at(10 * version + 1))
            await first.announce(version, at(10 * version))
        everybody, missing = await first.gather(5, whole(52), sharded=False)
        assert everybody == [whole(52), whole(51)] and missing == []
    async with two() as (first, other):
        await other.announce(1, at(11))
        assert await other.gather(1, whole(13), sharded=False) == ([], [])
        assert (await first.gather(1, whole(12), sharded=False))[0] == [whole(12), whole(13)]


async def test_a_rank_that_did_not_say_stands_where_it_was_a_version_before() -> None:
    async with two() as (first, other):
        for version in (1, 2):
            await other.announce(version, at(10 * version + 1))
            await first.announce(version, at(10 * version))
        await first.announce(3, at(30))  # hears what was said at 2
        assert await first.gather(3, whole(30), sharded=False, wait_s=0.05) == ([whole(30), whole(21)], [1])
    async with two() as (first, other):  # rank 0 had not come to say the newest version either
        for version in (1, 2):
            await other.announce(version, at(10 * version + 1))
            await first.announce(version, at(10 * version))
        assert await first.gather(3, whole(30), sharded=False, wait_s=0.05) == ([whole(30), whole(21)], [1])


async def test_of_a_rank_that_was_never_heard_of_there_is_no_checkpoint_but_after_a_resume() -> None:
    async with two() as (first, _):
        words = r"version 1 was not written: .*waited for \[3\]: nothing came for 0.\d s"
        with pytest.raises(CheckpointError, match=words):
            await first.gather(1, whole(10), sharded=False, wait_s=0.05)
        first.resumed = {0: at(4), 1: at(5)}
        with anyio.fail_after(GATHER_TIMEOUT_S / 2):  # 0 is no wait, and not the usual one
            assert await first.gather(1, whole(10), sharded=False, wait_s=0.0) == ([whole(10), whole(5)], [1])


@pytest.mark.parametrize("before", [True, False])
async def test_a_part_that_never_comes_is_not_waited_for_by_a_run_that_is_being_stopped(before: bool) -> None:
    """Whether the stop comes before, or while it is waited for: a rank that was killed says nothing, and there are minutes else."""
    async with two() as (first, other):
        await other.announce(1, at(11))
        if before:
            first.limit_waits(0.05)
        else:
            asyncio.get_running_loop().call_later(0.2, first.limit_waits, 0.05)
        words = r"waited for \[3\]: nothing came for \d.\d s, and this run is being stopped"
        with pytest.raises(CheckpointError, match=words):
            await first.gather(1, whole(10), sharded=True)


async def test_a_run_that_is_being_stopped_waits_for_the_parts_that_come() -> None:
    async with two() as (first, other):
        first.limit_waits(60.0)
        late = asyncio.ensure_future(later(0.2, other.gather(1, whole(11), sharded=True)))
        assert await first.gather(1, whole(10), sharded=True) == ([whole(10), whole(11)], [])
        await late


async def test_parts_and_replay_buffers_are_waited_for() -> None:
    async with two() as (first, other):
        await other.announce(1, at(11))
        with pytest.raises(CheckpointError, match=r"not every rank announced .*waited for \[3\]"):
            await first.gather(1, whole(10), sharded=True, wait_s=0.05)
        # A replay buffer that does not come is no reason to lose the weights.
        replay = whole(10, {"a": 1})
        assert await first.gather(1, replay, sharded=False, wait_s=0.05) == ([replay, whole(11)], [])
        late = asyncio.ensure_future(later(0.05, other.gather(1, whole(11, {"b": 2}), sharded=True)))
        everybody, missing = await first.gather(1, whole(10, {"a": 1}), sharded=True)
        await late
        assert everybody == [whole(10, {"a": 1}), whole(11, {"b": 2})] and missing == []


async def test_what_rank_0_keeps_does_not_grow() -> None:
    async with two() as (first, other):
        for version in range(1, 50):
            for rank in (other, first):
                await rank.announce(version, at(version), save_next=True)
                await rank.gather(version, whole(version), sharded=False)
        assert [len(states) for states in first._states] == [3, 3] and len(first._save_after) <= 4


async def test_all_ranks_save_the_version_after_the_one_at_which_the_first_says_so() -> None:
    async with two() as (first, other):
        answers = []
        for version in range(2, 20, 2):  # two updates per batch
            mine = await first.announce(version, at(version), save_next=version in (4, 6, 14))
            assert mine == await other.announce(version, at(version), save_next=True)
            answers.append((version, mine))
        assert [version for version, said in answers if said] == [6, 8, 16]


async def test_ranks_that_leave_together_hear_each_other_and_one_alone_does_not_wait_for_ever() -> None:
    async with two() as (first, other):
        late = asyncio.ensure_future(later(0.05, other.leave(7, "SIGINT")))
        assert await first.leave(7, None, wait_s=20.0) == ({1: EarlyEnd(7, "SIGINT")}, [])
        assert await late == ({0: EarlyEnd(7, None)}, [])
    async with two() as (alone, _):
        assert await alone.leave(3, "SIGTERM", wait_s=0.05) == ({}, [1])


async def test_a_rank_without_a_connection_is_named_and_a_slow_rank_is_not() -> None:
    server, ended = LineServer("a secret of the test"), asyncio.Event()
    server.on_end = lambda peer, lost: ended.set()
    first = Positions(server, 0, (0, 3, 5, 7))
    async with await server.open(), AsyncExitStack() as stack:
        clients = [LineClient(server.address, "a secret of the test", f"rank {rank}") for rank in (3, 5, 7)]
        for client in clients:
            await stack.enter_async_context(client)
        other = Positions(clients[0], 1, (0, 3, 5, 7))
        await clients[1].aclose()
        await ended.wait()
        for rank in (other, first):
            assert (await rank.leave(3, None, wait_s=0.05))[1] == [2]


async def test_a_rank_that_leaves_after_rank_0_hears_nothing_and_does_not_wait() -> None:
    async with two() as (first, other):
        assert isinstance(first._line, LineServer)
        await first._line.aclose()
        assert await other.leave(3, None, wait_s=20.0) == ({}, [0])
        assert await other.gather(4, whole(4), sharded=True) == ([], [])
        with pytest.raises(RankLost):
            await other.announce(5, at(5))


async def test_a_position_that_is_cancelled_on_its_way_arrives() -> None:
    async with two() as (first, other):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await other.announce(1, at(11))
        assert (await first.gather(1, whole(12), sharded=False, wait_s=0.05))[1] == []


async def test_parts_of_two_versions_are_no_checkpoint_and_nobody_waits_for_them() -> None:
    async with two() as (first, other):
        await other.announce(11, at(11))
        await other.leave(12, "SIGINT", wait_s=0.01)
        words = r"version 11 was not written: .*ranks \[3\] ended at another version"
        with pytest.raises(CheckpointError, match=words):
            await first.gather(11, whole(10), sharded=True)  # its patience is minutes


async def test_a_rank_that_ended_at_another_version_is_not_waited_for() -> None:
    async with two() as (first, other):
        for version in (11, 12):
            if version == 11:
                await other.announce(version, at(111))
            await first.announce(version, at(10 * version))
        await other.leave(11, "SIGTERM", wait_s=0.01)
        # Its state of version 11 is that before the step, whose groups are in the ledger.
        with anyio.fail_after(60):
            assert await first.gather(12, whole(120), sharded=False, wait_s=3600.0) == ([whole(120), whole(111)], [1])


def test_where_a_rank_stands_after_a_step_that_it_did_not_tell_of() -> None:
    """Rank 1 of 2. 3 and 5 were in hand; in the step it had 5, 9, one that was to be played again, and one from outside."""
    again, late, outside = 1, REROLLS + 1, FIRST_OUTSIDE_GROUP + 11
    cursor = {"position": 7, "again": [again, 3], "failed": [late, REROLLS + 3], "world_size": 2, "rows": 24}
    said = {"turn": 4, "prompts": cursor, "untrained": [3, 5], "next_group": FIRST_OUTSIDE_GROUP + 3}
    after = after_step(said, [9, 5, again, late, outside], 2)
    assert after == {
        "turn": 5,
        "prompts": cursor | {"position": 11, "again": [3], "failed": [REROLLS + 3]},
        "untrained": [3, 7],
        "next_group": outside + 2,
    }
    assert after_step(said, [], 2) == said | {"turn": 5}
    assert after_step(said | {"prompts": None, "untrained": []}, [outside], 2)["prompts"] is None


async def test_a_rank_that_does_not_come_makes_no_noise(capfd: pytest.CaptureFixture[str]) -> None:
    async with two() as (first, other):
        for version in (1, 2):
            await other.announce(1, at(11))
            await first.announce(version, at(10))
        assert await first.leave(2, None, wait_s=0.05) == ({}, [1])
        assert (await first.gather(2, whole(20), sharded=False, wait_s=0.05))[1] == [1]
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prompts", "one", "error"),
    [
        ({"0": {}, "1": None}, True, None),
        ({"0": {}, "1": {}}, False, None),
        ({"0": {}}, True, None),
        ({"0": {}}, False, None),
        ({"0": None, "1": None}, False, None),
        ({"0": {}, "1": None}, False, "has one prompt cursor for all ranks.* resume it with distributed.roles"),
        ({"0": {}, "1": {}}, True, "has one prompt cursor for each rank.* resume it without distributed.roles"),
    ],
)
def test_a_resume_with_other_cursors_is_refused_by_name(prompts: Any, one: bool, error: str | None) -> None:
    saved = SavedRun(SimpleNamespace(run={"prompts": prompts}), -1)  # type: ignore[arg-type]  # what it uses of it
    with pytest.raises(CheckpointError, match=error) if error else nullcontext():
        saved.require_cursor(one)
