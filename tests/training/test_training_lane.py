"""The trainer port over a real lane: order, cancellation, errors; and the memory prediction."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from support.device import FakeDevice
from torch.utils._python_dispatch import TorchDispatchMode
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
    with pytest.raises(TrainStepError, match="no train step is open"):
        await trainer.finish_train_step()
    with pytest.raises(TrainStepError, match="no train step is open"):
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


class HostReads(TorchDispatchMode):
    """Counts the operators with which a host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.found.append(name)
        return function(*arguments, **(named or {}))


async def read_in_a_step(recorder: Recorder, device: FakeDevice | None) -> tuple[list[str], Any]:
    """The host reads of the lane's thread in a step with log-probs, and the result. Each closure takes the device 10 ms."""
    reads = HostReads()

    def on_start() -> None:
        reads.__enter__()
        if device is not None:
            recorder.register_device("cpu", device.new_event)

    async with ThreadLane("cpu", recorder, on_start) as lane:
        core = make_trainer()
        port = LaneTrainer(core, lane, recorder)
        for name in ("begin_train_step", "train_microbatch", "compute_logprobs", "finish_train_step"):
            method = getattr(core, name)

            def closure(*arguments: Any, method: Any = method) -> Any:
                if device is not None:
                    device.launch(0.01)
                return method(*arguments)

            setattr(core, name, closure)
        await port.begin_train_step(LOSS)
        for batch in microbatches():
            await port.compute_logprobs(batch)
            await port.train_microbatch(batch)
        result = await port.finish_train_step()
        await lane.run(lambda: reads.__exit__(None, None, None), name="stop")
    return reads.found, result


async def test_device_time_adds_no_wait_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    device, recorder = FakeDevice(time.perf_counter), Recorder(nvtx=False)
    expected = await read_in_a_step(Recorder(nvtx=False), None)
    assert await read_in_a_step(recorder, device) == expected and expected[0]
    await asyncio.to_thread(recorder.finish_devices)
    timed = [event for event in recorder.events() if event.args and "host_ms" in event.args]
    assert {event.name for event in timed} >= {"train/begin", "train/logprobs", "train/microbatch", "train/finish"}
    assert sum(event.duration for event in timed) >= 0.01 * (2 + 2 * len(microbatches()))
