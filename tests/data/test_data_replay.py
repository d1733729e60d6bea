"""The replay buffer: what it keeps, what it hands out, and that a saved one goes on as it was."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import trajectories

from asyncrl.data.replay import ReplayBuffer, encode, priority
from asyncrl.errors import DataError
from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory


def trajectory(group_id: int, member: int, version: int, tokens: int, routes: bool = False, **rest: Any) -> Trajectory:
    rng, length = np.random.default_rng([group_id, member]), 2 + tokens
    found = np.full((length, 2, 1), member - 1, np.int16) if routes else None
    return trajectories.trajectory(
        group_id, member, rest.pop("group_size", 2), rng.integers(1, 100, length), version=version,
        logprob=-rng.random(length), sampled=-rng.random(length), routed_experts=found,
        **{"temperature": 0.5, "finish_reason": FinishReason.LENGTH, "completion": "a text", "reward": float(member)} | rest,
    )  # fmt: skip


def group(group_id: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0), **rest: Any) -> Group:
    members = [
        trajectory(group_id, m, version, 3 + m, reward=r, group_size=len(rewards), **rest)
        for m, r in enumerate(rewards)
    ]
    prompt = Prompt(group_id, members[0].tokens[:2], "the prompt", {"answer": 4}, epoch=1)
    return Group(Ticket(group_id, version, version + 2), prompt, tuple(members))


SIGNAL = [-1.0, 1.0]


def test_priority_by_hand() -> None:
    """|A| sums to 2; components a: 0, 1 (std 1/sqrt 2), b: 3 and not applicable, c: 5, 9 (std 4/sqrt 2)."""
    one = trajectory(0, 0, 0, 2, components={"a": 0.0, "b": 3.0, "c": 5.0})
    two = trajectory(0, 1, 0, 2, components={"a": 1.0, "b": None, "c": 9.0})
    both = Group(Ticket(0, 0, 0), Prompt(0, one.tokens[:2], ""), (one, two))
    assert priority(both, SIGNAL) == pytest.approx(2 * (1 + 4) / math.sqrt(2), rel=1e-14)
    assert priority(group(0, rewards=(0.0, 3.0)), SIGNAL) == pytest.approx(2 * 3 / math.sqrt(2), rel=1e-14)
    assert priority(both, [0.0, 0.0]) == 0.0
    assert priority(group(0, rewards=(2.0, 2.0)), SIGNAL) == 0.0


def test_groups_without_a_signal_are_not_kept() -> None:
    buffer = ReplayBuffer(3, 10)
    assert not buffer.add(group(0, rewards=(1.0, 1.0)), [0.0, 0.0])
    silent = np.zeros(6, np.bool_)
    masked = [trajectory(1, m, 0, 4, mask=silent, reward=float(m)) for m in range(2)]
    assert not buffer.add(Group(Ticket(1, 0, 0), Prompt(1, masked[0].tokens[:2], ""), tuple(masked)), SIGNAL)
    assert len(buffer) == 0 and buffer.draw(0, (1,)) is None


def test_a_full_buffer_replaces_its_weakest_by_a_strictly_stronger_one() -> None:
    buffer = ReplayBuffer(2, 10)
    assert buffer.add(group(0, rewards=(0.0, 2.0)), SIGNAL)
    assert buffer.add(group(1, rewards=(0.0, 5.0)), SIGNAL)
    assert not buffer.add(group(2, rewards=(0.0, 2.0)), SIGNAL)  # as strong as the weakest
    assert buffer.add(group(3, rewards=(0.0, 3.0)), SIGNAL)
    assert {each.group.group_id for each in buffer.snapshot()} == {1, 3}
    assert buffer.add(group(3, rewards=(0.0, 1.0)), SIGNAL) and len(buffer) == 2  # a group replaces its older self


def test_draws_follow_the_priorities() -> None:
    buffer = ReplayBuffer(3, 10, seed=5)
    for group_id, spread in enumerate((1.0, 2.0, 5.0)):
        buffer.add(group(group_id, rewards=(0.0, spread)), SIGNAL)
    drawn = Counter(found.group_id for n in range(4000) if (found := buffer.draw(0, (n, 7))) is not None)
    expected = {0: 500, 1: 1000, 2: 2500}
    assert sum((drawn[g] - n) ** 2 / n for g, n in expected.items()) < 13.8  # chi-square, 2 degrees, p > 0.001
    first, again = buffer.draw(0, (1, 2)), buffer.draw(0, (1, 2))
    assert first is not None and again is not None and first.group_id == again.group_id


def test_a_step_gets_a_group_once() -> None:
    buffer = ReplayBuffer(3, 10)
    for group_id in range(3):
        buffer.add(group(group_id), SIGNAL)
    taken: list[int] = []
    for n in range(3):
        found = buffer.draw(0, (n,), taken)
        assert found is not None
        taken.append(found.group_id)
    assert sorted(taken) == [0, 1, 2] and buffer.draw(0, (9,), taken) is None


def test_nothing_older_than_the_bound_is_handed_out() -> None:
    buffer = ReplayBuffer(4, max_age=3)
    for group_id, version in enumerate((0, 2, 5)):
        buffer.add(group(group_id, version), SIGNAL)
    for version, allowed in ((3, {0, 1, 2}), (4, {1, 2}), (5, {1, 2}), (6, {2}), (9, set())):
        drawn = {found.group_id for n in range(50) if (found := buffer.draw(version, (n,))) is not None}
        assert drawn == allowed, version
    assert len(buffer) == 0 and buffer.evicted == 3


def test_the_oldest_token_decides() -> None:
    mixed = group(0, version=4)
    mixed.trajectories[1].versions[-1] = 1
    buffer = ReplayBuffer(2, max_age=2)
    buffer.add(mixed, SIGNAL)
    assert buffer.draw(4, (0,)) is None


def equal(a: Group, b: Group) -> None:
    assert a.ticket == b.ticket and a.prompt.epoch == b.prompt.epoch and a.prompt.ids.tolist() == b.prompt.ids.tolist()
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        for f in fields(Trajectory):
            one, two = getattr(x, f.name), getattr(y, f.name)
            if isinstance(one, np.ndarray):
                assert one.dtype == two.dtype
                np.testing.assert_array_equal(one, two)
            else:
                assert one == two, f.name


@settings(deadline=None)
@given(st.integers(0, 2**30), st.integers(1, 6))
def test_saved_and_loaded_it_draws_the_same(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(4, 5, seed=seed)
    for group_id in range(count):
        rewards = tuple(float(r) if r > 0.2 else None for r in rng.random(int(rng.integers(2, 5))))
        chosen = group(
            group_id,
            int(rng.integers(0, 9)),
            rewards,
            metadata={"set_advantage_to_zero": True, "x": object()},
            routes=group_id % 2,
        )
        buffer.add(chosen, rng.standard_normal(len(rewards)))
    state = orjson.loads(orjson.dumps(encode(buffer.snapshot())))
    other = ReplayBuffer(4, 5, seed=seed)
    other.load(state)
    assert [s.priority for s in other.snapshot()] == [s.priority for s in buffer.snapshot()]
    for a, b in zip(buffer.snapshot(), other.snapshot(), strict=True):
        equal(a.group, b.group)
    for version in (4, 8):
        one, two = buffer.draw(version, (version,)), other.draw(version, (version,))
        assert (one is None) == (two is None) and (one is None or two is None or one.group_id == two.group_id)


def test_a_smaller_buffer_loads_the_strongest() -> None:
    buffer = ReplayBuffer(5, 5)
    for group_id, spread in enumerate((3.0, 1.0, 4.0, 2.0)):
        buffer.add(group(group_id, rewards=(0.0, spread)), SIGNAL)
    small = ReplayBuffer(2, 5)
    small.load(encode(buffer.snapshot()))
    assert [s.group.group_id for s in small.snapshot()] == [0, 2]


def test_what_is_stored_shares_nothing_with_what_was_given() -> None:
    given_ = group(0)
    buffer = ReplayBuffer(1, 9)
    buffer.add(given_, SIGNAL)
    given_.trajectories[0].tokens[:] = 0
    kept = buffer.snapshot()[0].group
    assert kept.trajectories[0].tokens.all() and kept.trajectories[0].completion == "" and kept.prompt.columns == {}


def test_a_damaged_state_is_refused() -> None:
    buffer = ReplayBuffer(1, 9)
    buffer.add(group(0), SIGNAL)
    [text] = encode(buffer.snapshot())["groups"]
    for damage in (
        {},
        {"groups": [text[:-8]]},
        {"groups": [text[:40] + "AAAA" + text[44:]]},
        {"groups": [[0, 0, 2, 1, 1.4]]},
    ):
        with pytest.raises(DataError, match="saved replay buffer"):
            ReplayBuffer(1, 9).load(damage)
