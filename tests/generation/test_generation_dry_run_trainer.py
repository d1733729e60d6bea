"""The dry-run trainer: the state table, versions, costs, and the record of what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.errors import TrainStepError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.dry_run import DryRunTrainer
from asyncrl.types import Microbatch
from asyncrl_bench.virtual_time import run_virtual


def microbatch(prefix: int = 4, suffixes: tuple[int, ...] = (3, 5), group: int = 0, version: int = 0) -> Microbatch:
    """One tree; every suffix token is scored."""
    scored = sum(suffixes)
    return Microbatch(
        tokens=np.arange(prefix + scored),
        positions=np.arange(prefix + scored),
        node_length=np.array([prefix, *suffixes]),
        node_parent=np.array([-1] + [0] * len(suffixes)),
        member_sequence=np.repeat(np.arange(len(suffixes)), 2),
        member_node=np.array([node for i in range(len(suffixes)) for node in (0, i + 1)]),
        source=np.arange(scored),
        target=np.arange(scored),
        sequence=np.repeat(np.arange(len(suffixes)), suffixes),
        sampler_logprobs=np.linspace(-1, 0, scored, dtype=np.float32),
        temperature=np.ones(scored, dtype=np.float32),
        advantages=np.ones(scored, dtype=np.float32),
        versions=np.full(scored, version, dtype=np.int32),
        group_ids=np.full(len(suffixes), group),
        members=np.arange(len(suffixes)),
    )


def virtually(body: Callable[[DryRunTrainer], Awaitable[None]]) -> float:
    """Run `body` with a trainer at version 5; the virtual seconds it took."""

    async def main() -> float:
        recorder = Recorder(clock=asyncio.get_running_loop().time, nvtx=False)
        async with SimulatedLane("virtual", recorder) as lane:
            await body(DryRunTrainer(lane, recorder, train_token_s=0.5, finish_s=10.0, version=5))
            return anyio.current_time()

    return run_virtual(main)


def test_a_step_counts_what_it_was_given_and_ticks_at_its_end() -> None:
    async def body(trainer: DryRunTrainer) -> None:
        await trainer.begin_train_step(None)
        await trainer.train_microbatch(microbatch(group=1, version=5))
        await trainer.train_microbatch(microbatch(4, (2,), group=2, version=3))
        assert trainer.version == 5
        result = await trainer.finish_train_step()
        assert trainer.version == result.version == 6
        assert (result.tokens, result.sequences, result.microbatches) == (10, 3, 2)
        assert result.metrics["dry_run/packed_tokens"] == 18
        assert result.metrics["dry_run/groups"] == 2
        assert result.metrics["dry_run/max_age"] == 2

    assert virtually(body) == 18 * 0.5 + 10.0


def test_each_state_refuses_what_it_has_no_answer_to_and_stays_as_it_is() -> None:
    async def body(trainer: DryRunTrainer) -> None:
        batch = microbatch()
        for _ in range(2):
            for call in (trainer.train_microbatch(batch), trainer.finish_train_step()):
                with pytest.raises(TrainStepError, match="no train step is open"):
                    await call
            await trainer.abort_train_step()  # nothing to abort is fine
        await trainer.begin_train_step(None)
        await trainer.train_microbatch(batch)
        await trainer.abort_train_step()  # what was trained is forgotten, and the version stays
        assert trainer.version == 5
        await trainer.begin_train_step(None)
        for model in ("policy", "reference"):  # log-probs are the sampler's, and no part of the step
            column = await trainer.compute_logprobs(batch, model)  # type: ignore[arg-type]
            assert column.tolist() == batch.sampler_logprobs.tolist()
            assert not np.shares_memory(column, batch.sampler_logprobs)
        await trainer.train_microbatch(batch)
        with pytest.raises(TrainStepError, match="already open"):
            await trainer.begin_train_step(None)
        result = await trainer.finish_train_step()
        assert (result.version, result.tokens, result.microbatches) == (6, 8, 1)

    virtually(body)


def test_a_cancelled_caller_does_not_cancel_the_work() -> None:
    """What was on the lane is done; the abort queues behind it."""

    async def body(trainer: DryRunTrainer) -> None:
        await trainer.begin_train_step(None)
        with anyio.move_on_after(1.0) as scope:
            await trainer.finish_train_step()  # takes 10 s
        assert scope.cancelled_caught
        assert trainer.version == 6
        await trainer.abort_train_step()
        assert trainer.version == 6

    assert virtually(body) == 10.0
