"""Log-probs under the reference, computed while rewards are scored: earlier, not different, and once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pumps_house import live
from pumps_plan import Plan, make_prompt, make_trajectory

from asyncrl.data.packing import pack_groups
from asyncrl.data.store import REFERENCE
from asyncrl.pumps.building import logprob_columns
from asyncrl.types import Float32Array, Group, Microbatch, Ticket


def plan(**rest: Any) -> Plan:
    settings: dict[str, Any] = {
        "algorithm": {"kl": {"coef": 0.1}},
        "score_groups": True,
        "preset": "sync",
        "groups_per_step": 1,
        "prompts": 2,
        "reward_s": lambda group, member: 5.0,
        "rollout_s": lambda group, member: 1.0,
    }
    return Plan(**(settings | rest))


def test_the_lane_works_while_the_reward_workers_do() -> None:
    """Rollout 1 s, two rewards of 5 s each: the reference is done at 1 s, and not again when the step comes."""
    house = live(plan())
    assert house.error is None and len(house.reports) == 2
    calls = house.events("logprobs")
    assert [call.groups for call in calls] == [(0,), (1,)]
    begins = [event.at for event in house.events("begin")]
    for call, begin in zip(calls, begins, strict=True):
        assert call.at == pytest.approx(begin - 10.0, abs=0.05)
    assert all(batch.reference_logprobs is not None for _, batch in house.tokens_trained)


@pytest.mark.parametrize(
    "rest", [{"algorithm": {"kl": {"coef": 0.1, "reference_ahead": False}}}, {"score_groups": False}]
)
def test_otherwise_it_is_done_in_the_step(rest: dict[str, Any]) -> None:
    house = live(plan(**rest))
    for call, begin in zip(house.events("logprobs"), house.events("begin"), strict=True):
        assert call.at == pytest.approx(begin.at, abs=0.05)


def test_not_where_nothing_needs_it() -> None:
    assert live(plan(algorithm={})).events("logprobs") == []


def test_groups_that_are_dropped_leave_nothing_behind() -> None:
    """Every second group has no signal: its columns are forgotten with the next step."""
    house = live(
        plan(
            prompts=None,
            max_steps=3,
            rollout={"filter": {"dynamic_sampling": True}},
            reward=lambda group, member: float(member * (group % 2)),
        )
    )
    assert house.error is None and house.ports.counters["filter/no signal"] >= 3
    assert house.store.statistics().bytes == 0


class Hashing:
    """A reference whose log-prob of a token is a function of its sequence and of the token alone."""

    def __init__(self) -> None:
        self.calls = 0

    async def compute_logprobs(self, batch: Microbatch, model: str = "policy") -> Float32Array:
        assert model == "reference"
        self.calls += 1
        place = np.arange(batch.scored) - np.searchsorted(batch.sequence, batch.sequence)
        row = batch.group_ids[batch.sequence] * 100 + batch.members[batch.sequence]
        return (row + place / 64 + batch.target / 4096).astype(np.float32)


async def test_whatever_the_packing_every_token_gets_its_own() -> None:
    trainer: Any = Hashing()
    groups = []
    for group_id in range(3):
        members = [make_trajectory(group_id, m, 3, [0] * (1 + (group_id + m) % 3), reward=0.0) for m in range(3)]
        if group_id == 1:
            members[2] = replace(members[2], mask=np.zeros_like(members[2].mask))
        groups.append(Group(Ticket(group_id, 0, 2), make_prompt(group_id), tuple(members)))
    columns = [{REFERENCE: column} for column in await logprob_columns(trainer, groups, 8, "reference")]
    assert trainer.calls > 1
    weighed = [(group, np.zeros(3)) for group in groups]
    for budget in (4, 9, 1000):
        for batch in pack_groups(weighed[::-1], budget, columns[::-1]):
            if batch.scored:
                assert batch.reference_logprobs is not None and batch.old_logprobs is None
                expected = await trainer.compute_logprobs(batch, "reference")
                np.testing.assert_array_equal(batch.reference_logprobs, expected)
    [batch] = pack_groups(weighed, 1000, [columns[0], {}, columns[2]])
    assert batch.reference_logprobs is None, "a column that a group lacks is no column of the microbatch"
