"""The stash: whole groups once and in order, whatever arrives and however; nothing leaves it unseen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory

from asyncrl.data.stash import Ending, Stash, StashedGroup, StashRefused, Status
from asyncrl.errors import StallError
from asyncrl.types import Trajectory
from asyncrl_bench.virtual_time import run_virtual


def record(group: int, member: int, size: int = 3, *, version: int = 0, tokens: int = 4, salt: int = 0) -> Trajectory:
    ids = np.arange(tokens) + 100 * group + 10 * member + salt
    return trajectory(
        group, member, size, ids, prompt_length=1, logprob=-0.5 - member, sampled=-0.25 - member, version=version,
        reward=float(member),
    )  # fmt: skip


def new(max_groups: int = 100, **settings: Any) -> Stash[str]:
    return Stash(max_groups, **settings)


def members(group: StashedGroup[str] | None) -> list[int]:
    assert group is not None
    return [each.member for each in group.trajectories]


# -- whole groups --------------------------------------------------------------------------------------------------


def waiting(stash: Stash[str]) -> int:
    return len(stash._waiting)


def content(stash: Stash[str]) -> object:
    """Who waits, and which groups have ended."""
    return [(key, list(entry.members)) for key, entry in stash._waiting.items()], list(stash._ended)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_interleaving_yields_each_group_once_in_completion_order_with_its_own_members(data: st.DataObject) -> None:
    """Against a model: dictionaries of what arrived. Records come in any order, some again, some after the end."""
    sizes = {
        (epoch, group): data.draw(st.integers(1, 5), label="size")
        for epoch in range(2)
        for group in range(data.draw(st.integers(1, 4), label="groups"))
    }
    once = [(key, member) for key, size in sizes.items() for member in range(size)]
    again = data.draw(st.lists(st.sampled_from(once), max_size=10), label="again")
    order = data.draw(st.permutations(once + again), label="order")
    stash = new()
    seen: dict[tuple[int, int], set[int]] = {key: set() for key in sizes}
    complete: list[tuple[int, int]] = []
    yielded: list[StashedGroup[str]] = []
    for (epoch, group), member in order:
        key = (epoch, group)
        found = stash.add(record(group, member, sizes[key], salt=7 * epoch), f"{key}", lease=member, epoch=epoch)
        expected = Status.LATE if key in complete else Status.DUPLICATE if member in seen[key] else Status.WAITING
        seen[key].add(member)
        if expected is Status.WAITING and len(seen[key]) == sizes[key]:
            complete.append(key)
            assert isinstance(found, StashedGroup) and found.ending is Ending.WHOLE
            yielded.append(found)
        else:
            assert found is expected
    assert [tuple(group.key) for group in yielded] == complete and set(complete) == set(sizes)
    for group in yielded:
        key = tuple(group.key)
        assert members(group) == list(group.leases) == list(range(sizes[key])) and group.context == f"{key}"
        for member, each in enumerate(group.trajectories):
            assert each.tokens.tolist() == record(key[1], member, salt=7 * key[0]).tokens.tolist()
    assert waiting(stash) == 0


def test_a_copy_of_a_member_is_idempotent_bit_for_bit() -> None:
    stash = new()
    odd = replace(record(0, 0), logprobs=np.full(4, np.nan, np.float32), reward=float("nan"))
    stash.add(odd, "", lease="first")
    assert stash.add(replace(odd, tokens=odd.tokens.copy()), "", lease="second") is Status.DUPLICATE
    stash.add(record(0, 1), "")
    whole = stash.add(record(0, 2), "")
    assert isinstance(whole, StashedGroup) and whole.leases == ("first", None, None)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad, words",
    [
        (record(0, 3), "members are 0 to 2"),
        (record(0, -1), "member -1 of group 0"),
        (record(1, 0, 0), "the group has size 0"),
        (record(0, 2, 4), "the group began with size 3"),
        (record(0, 0, salt=1), "the first is kept"),
        (replace(record(0, 0), reward=9.0), "arrived twice"),
        (replace(record(0, 0), temperature=0.5), "arrived twice"),
        (replace(record(0, 0), versions=np.full(4, 3, np.int32)), "arrived twice"),
    ],
)
def test_what_contradicts_a_group_is_refused_with_a_reason_and_changes_nothing(bad: Trajectory, words: str) -> None:
    stash = new()
    stash.add(record(0, 0), "kept")
    before = content(stash)
    with pytest.raises(StashRefused, match=words):
        stash.add(bad, "bad")
    assert content(stash) == before
    stash.add(record(0, 1), "")
    whole = stash.add(record(0, 2), "")
    assert isinstance(whole, StashedGroup) and members(whole) == [0, 1, 2] and whole.context == "kept"
    assert whole.trajectories[0].tokens[0] == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 9)), max_size=60), st.integers(1, 4))
def test_the_cap_always_holds_and_whoever_entered_leaves_exactly_once(
    arrivals: list[tuple[int, int, int]], max_groups: int
) -> None:
    stash = new(max_groups)
    left: list[StashedGroup[str]] = []
    entered: set[tuple[int, int]] = set()
    for group, member, tokens in arrivals:
        try:
            found = stash.add(record(group, member, 4, tokens=tokens), "")
        except StashRefused as refused:
            if (0, group) not in stash._waiting:
                assert f"limit of {max_groups} waiting groups" in str(refused) and waiting(stash) == max_groups
            continue
        if found not in (Status.DUPLICATE, Status.LATE):
            entered.add((group, member))
        if isinstance(found, StashedGroup):
            left.append(found)
        assert waiting(stash) <= max_groups
    left += stash.end_epoch(0)
    assert len({group.key for group in left}) == len(left)
    assert sorted((t.group_id, t.member) for group in left for t in group.trajectories) == sorted(entered)
    assert waiting(stash) == 0


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_timeout_counts_from_the_first_arrival() -> None:
    now, expected = [0.0], 10.0
    stash = new(timeout_s=10.0, clock=lambda: now[0])
    stash.add(record(0, 0), "")
    now[0] = 4.0
    stash.add(record(0, 1), "")
    stash.add(record(0, 1), "")  # a duplicate is no sign of life of the missing one
    assert stash.next_deadline() == expected
    now[0] = expected - 0.001
    assert stash.expire() == []
    now[0] = expected
    [ended] = stash.expire()
    assert ended.ending is Ending.TIMEOUT and members(ended) == [0, 1] and not ended.trainable
    assert stash.next_deadline() is None and stash.add(record(0, 2), "") is Status.LATE


def test_partial_groups_are_yielded_where_there_are_enough_members() -> None:
    now = [0.0]
    stash = new(timeout_s=1.0, on_timeout="partial", clock=lambda: now[0])
    for group, member in ((0, 2), (1, 1), (0, 0)):
        stash.add(record(group, member), f"{group}")
    now[0] = 1.0
    two, one = stash.expire()
    assert two.ending is Ending.PARTIAL and two.trainable and members(two) == [0, 2] and two.size == 3
    assert one.ending is Ending.TIMEOUT and not one.trainable
    stash.add(record(2, 0), "")
    stash.add(record(2, 1), "")
    stash.add(record(3, 1), "")
    now[0] = 3.0
    assert [group.ending for group in stash.expire()] == [Ending.PARTIAL, Ending.TIMEOUT]
    assert waiting(stash) == 0 and stash.next_deadline() is None


def test_the_error_policy_names_the_group_and_the_missing_members() -> None:
    now = [0.0]
    stash = new(timeout_s=1.0, on_timeout="error", clock=lambda: now[0])
    stash.add(record(4, 1), "", epoch=9)
    now[0] = 2.0
    with pytest.raises(StallError, match=r"group 4 of epoch 9 waited 1.0 s for its members \[0, 2\] of 3"):
        stash.expire()
    assert waiting(stash) == 1


def test_wait_expired_sleeps_until_the_deadline_and_survives_cancellation() -> None:
    ended: list[tuple[float, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stash = new(timeout_s=5.0, clock=loop.time)

        async def watch() -> None:
            while True:
                ended.extend((loop.time(), group.key.group_id) for group in await stash.wait_expired())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.sleep(100.0)  # nothing waits: nothing to wake up for
            for group in range(3):
                stash.add(record(group, 0), "")
                await anyio.sleep(2.0)
            for member in (1, 2):
                stash.add(record(2, member), "")  # whole in time
            with anyio.move_on_after(0.5) as scope:
                await stash.wait_expired()
            assert scope.cancelled_caught and waiting(stash) == 1  # a cancelled wait took nothing
            await anyio.sleep(20.0)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    assert ended == [(105.0, 0), (107.0, 1)]


# -- age -----------------------------------------------------------------------------------------------------------


def test_groups_with_a_token_that_is_too_old_end_now_and_on_arrival() -> None:
    """The predicate of the staleness window: lag = version - oldest > max_staleness; future versions are never stale."""
    stash = new()
    for group, version in enumerate([3, 4, 5, 2, 6]):
        stash.add(record(group, 0, version=version), "")
    stash.add(record(1, 1, version=1), "")  # the oldest member counts
    stale = stash.evict_stale(5, 2)
    assert [group.key.group_id for group in stale] == [1, 3]
    assert all(group.ending is Ending.STALE and not group.trainable for group in stale)
    ended = stash.add(record(2, 1, version=2), "", lease="mine")
    assert isinstance(ended, StashedGroup) and ended.ending is Ending.STALE
    assert members(ended) == [0, 1] and ended.leases == (None, "mine")
    nothing_sampled = replace(record(0, 1), mask=np.zeros(4, np.bool_))
    assert stash.add(nothing_sampled, "") is Status.WAITING
    assert stash.evict_stale(5, 2) == [] and waiting(stash) == 2
    # A token of unknown version (-1) does not hide an older one.
    mixed = record(4, 1, version=2)
    mixed = replace(mixed, versions=np.where(np.arange(mixed.versions.size) % 2, 2, -1).astype(np.int32))
    ended = stash.add(mixed, "")
    assert isinstance(ended, StashedGroup) and ended.ending is Ending.STALE


# -- ends ----------------------------------------------------------------------------------------------------------


def test_ended_groups_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.data.stash.TOMBSTONES", 2)
    stash = new()
    for group in range(3):
        assert isinstance(stash.add(record(group, 0, 1), ""), StashedGroup)
    assert stash.add(record(2, 0, 1), "") is Status.LATE
    assert isinstance(stash.add(record(0, 0, 1), ""), StashedGroup)  # forgotten


def test_discard_ends_a_group_whether_it_waits_is_yielded_or_has_not_come() -> None:
    stash = new()
    stash.add(record(0, 0), "", lease="mine")
    waiting = stash.discard(0)
    assert waiting is not None and waiting.ending is Ending.DISCARDED and waiting.leases == ("mine",)
    stash.add(record(1, 0, 1), "")
    assert stash.discard(1) is None and stash.discard(2) is None
    stash.add(record(3, 0), "old", epoch=1)
    [ended] = stash.end_epoch(1)
    assert ended.ending is Ending.EPOCH and members(ended) == [0] and not ended.trainable
    assert stash.add(record(3, 1), "old", epoch=1) is Status.LATE
    assert [stash.add(record(group, 1), "") for group in range(3)] == [Status.LATE] * 3
