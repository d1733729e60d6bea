"""Groups that pass the door and fail behind it: in the step of a real trainer, or in the run's own reward function. The first
is dropped by its producer's name, the second ends the run, and no later run of the ring meets either again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from runtime_helpers import REAL, REWARDS, config_of
from transport_records import drop

from asyncrl import Runtime
from asyncrl.client import AsyncClient, Scored
from asyncrl.errors import DivergenceError, RewardError
from asyncrl.runtime.door import DoorStatistics, ring_of, serve
from asyncrl.transport.rings.record_ring import RecordRing

EPOCH = 5
FED: dict[str, Any] = {
    **{key: value for key, value in REAL.items() if key not in ("reward", "data")},
    "data": {"max_prompt_tokens": 12},
    "rollout": {**REAL["rollout"], "groups_per_step": 2},
    "door": {"ring_mib": 2, "producer_mib": 1, "producer_records": 16},
}
KL = ("algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3")  # of a policy that is far from the reference it is infinite
PROMPT = [4] * 12  # so long that no two groups share a microbatch


@asynccontextmanager
async def a_run(
    folder: Path, name: str, *overrides: str, **tree: Any
) -> AsyncIterator[tuple[Runtime, RecordRing, Any]]:
    config, counts = config_of(folder, f"door.ring={name}", *overrides, base={**FED, **tree}), DoorStatistics()
    async with ring_of(config) as ring, Runtime(config, write=False) as runtime:
        runtime.start("door", serve, runtime, ring, counts)
        yield runtime, ring, counts


def far(reward: float) -> Scored:
    """At a temperature that makes a difference of logits a million times as large."""
    return Scored([*PROMPT, 5, 6, 5, 6, 5, 6, 5, 6], reward, prompt_length=12, temperature=1e-6)


def good() -> list[Scored]:
    return [Scored([*PROMPT, 5, 6, 5, 6, 5, 6, 5, 6 + i], float(i), prompt_length=12) for i in range(2)]


async def held(name: str) -> int:
    """Records that the next run of this ring would train; they are dropped."""
    async with RecordRing(name) as ring:
        left = ring.statistics().replayed
        drop(ring)
    return left


async def test_a_group_whose_loss_is_not_finite_is_dropped_by_name_and_the_run_ends_by_itself(
    tmp_path: Path, name: str
) -> None:
    async with a_run(tmp_path, name, "train.max_steps=2", *KL, "train.tokens_per_microbatch=20") as (runtime, ring, _):
        async with await AsyncClient.attach(name, epoch=EPOCH) as client:
            for group in (0, 1):  # the policy is the reference until the first step
                await client.push(group, good())
            await client.push(2, [far(0.0), far(1.0)])
            for group in (3, 4):
                await client.push(group, good())
            with anyio.fail_after(60):
                summary = await runtime.run()
        assert summary.version == 2 and summary.books.trained == 4
        [reason] = [reason for reason in summary.reasons if "failed in the step" in reason]
        assert f"(group 2 of epoch {EPOCH}) failed in the step (DivergenceError: the loss" in reason
        assert ring.statistics().outstanding == 0


async def test_the_second_one_ends_the_run_and_neither_is_met_by_the_next_one(tmp_path: Path, name: str) -> None:
    said = rf"\(group 3 of epoch {EPOCH}\) failed in the step .*before it group \d+ \(group 2 of epoch {EPOCH}\) failed"
    with pytest.raises(DivergenceError, match=said):
        async with a_run(tmp_path, name, "train.max_steps=9", *KL, "train.tokens_per_microbatch=20") as (runtime, *_):
            async with await AsyncClient.attach(name, epoch=EPOCH) as client:
                for group in (0, 1):
                    await client.push(group, good())
                await client.push(2, [far(0.0), far(1.0)])
                await client.push(4, good())
                await client.push(3, [far(0.0), far(1.0)])
                with anyio.fail_after(60):
                    await runtime.run()
    assert await held(name) == 1  # group 4


async def test_a_record_that_the_runs_reward_function_cannot_score(tmp_path: Path, name: str) -> None:
    """It asks for a column that the producer did not send: the first is refused by name, the second ends the run."""
    unscored = [Scored([4, 5, 6], None, [0, 1, 1], prompt_length=1)]
    with pytest.raises(
        RewardError, match=rf"group 2 of epoch {EPOCH}: .*'answer'.*before it, group 0 of epoch {EPOCH}"
    ):
        async with a_run(tmp_path, name, "train.max_steps=9", reward=f"{REWARDS}:share") as (runtime, ring, counts):
            async with await AsyncClient.attach(name, epoch=EPOCH) as client:
                await client.push(0, unscored)
                await client.push(1, unscored, metadata={"answer": "a"})
                with anyio.fail_after(60):
                    while counts.refused + counts.submitted < 2:
                        await anyio.lowlevel.checkpoint()
                    assert (counts.refused, counts.submitted, ring.statistics().outstanding) == (1, 1, 1)
                    assert f"group 0 of epoch {EPOCH}: " in counts.last_refusal and "'answer'" in counts.last_refusal
                    await client.push(2, unscored)
                    await runtime.run()
    assert await held(name) == 1
