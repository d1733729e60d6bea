"""The trainer port over a real lane: order, cancellation, errors; and the memory prediction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from training_helpers import LOSS, make_trainer, microbatches

from asyncrl.algorithms.base import Loss, LossInputs, LossSums
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.errors import TrainStepError
from asyncrl.ports import Trainer
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.lane_trainer import LaneTrainer


@pytest.fixture
async def trainer() -> AsyncIterator[LaneTrainer]:
    recorder = Recorder(nvtx=False)
    async with ThreadLane("cpu", recorder) as lane:
        yield LaneTrainer(make_trainer(), lane, recorder)


async def test_a_step_over_the_lane_equals_a_direct_one(trainer: LaneTrainer) -> None:
    port: Trainer = trainer
    await port.begin_train_step(LOSS)
    for batch in microbatches():
        await port.train_microbatch(batch)
        assert (await port.compute_logprobs(batch)).shape == (batch.scored,)
    result = await port.finish_train_step()
    direct = make_trainer()
    direct.begin_train_step(LOSS)
    for batch in microbatches():
        direct.train_microbatch(batch)
    assert result == direct.finish_train_step() and port.version == 1
    names = {event.name for event in trainer._recorder.events() if event.track == "lane:cpu"}
    assert {"train/begin", "train/microbatch", "train/finish", "train/logprobs"} <= names
    drained = trainer._recorder.drain()
    assert drained["time/train"] > 0 and drained["time/logprobs"] > 0


async def test_calls_in_the_wrong_state_raise_in_the_caller(trainer: LaneTrainer) -> None:
    with pytest.raises(TrainStepError, match="no train step open"):
        await trainer.finish_train_step()
    with pytest.raises(TrainStepError, match="no train step open"):
        await trainer.train_microbatch(microbatches()[0])
    await trainer.abort_train_step()
    await trainer.begin_train_step(LOSS)
    with pytest.raises(TrainStepError, match="already open"):
        await trainer.begin_train_step(LOSS)


async def test_cancelled_caller_waits_for_its_microbatch_and_abort_comes_after(trainer: LaneTrainer) -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(inputs: LossInputs) -> LossSums:
        if inputs.sequences:
            started.set()
            assert go_on.wait(30)
            ended.set()
        return LOSS(inputs)

    await trainer.begin_train_step(Loss("slow", slow, LOSS.normaliser))
    before = trainer.core.policy.flat.master.clone()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(trainer.train_microbatch(microbatches()[0]))
        await asyncio.get_running_loop().run_in_executor(None, started.wait, 30)
        call.cancel()
        abort = tasks.create_task(trainer.abort_train_step())
        await asyncio.get_running_loop().run_in_executor(None, go_on.set)
    assert call.cancelled() and ended.is_set() and abort.done()
    assert trainer.core._step is None and not trainer.core.policy.flat.grad.any()
    assert torch.equal(trainer.core.policy.flat.master, before)
    await trainer.begin_train_step(LOSS)  # the next step is clean
    await trainer.train_microbatch(microbatches()[0])
    assert (await trainer.finish_train_step()).version == 1
