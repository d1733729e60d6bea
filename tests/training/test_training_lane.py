"""The trainer port over a real lane: order, cancellation, errors; and the memory prediction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import MAX_LENGTH, make_group, tiny_policy
from transformers import LlamaConfig

from asyncrl.algorithms.base import Loss, LossInputs, LossSums
from asyncrl.algorithms.registry import build_loss
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import TrainStepError
from asyncrl.ports import Trainer
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.lane_trainer import LaneTrainer
from asyncrl.training.memory import predict_memory
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Microbatch

LOSS = build_loss("grpo")


def microbatches() -> list[Microbatch]:
    rng = np.random.default_rng(0)
    return [m for i in range(3) for m in pack_groups([make_group(rng, i)], 1000)]


def core() -> TorchTrainer:
    return TorchTrainer(tiny_policy(), TrainConfig(lr=0.01), max_completion_length=MAX_LENGTH)


@pytest.fixture
async def trainer() -> AsyncIterator[LaneTrainer]:
    recorder = Recorder(nvtx=False)
    async with ThreadLane("cpu", recorder) as lane:
        yield LaneTrainer(core(), lane, recorder)


async def test_a_step_over_the_lane_equals_a_direct_one(trainer: LaneTrainer) -> None:
    port: Trainer = trainer
    await port.begin_train_step(LOSS)
    for batch in microbatches():
        await port.train_microbatch(batch)
        assert (await port.compute_logprobs(batch)).shape == (batch.scored,)
    result = await port.finish_train_step()
    direct = core()
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
    assert not trainer.core.step_open and not trainer.core.policy.flat.grad.any()
    assert torch.equal(trainer.core.policy.flat.master, before)
    await trainer.begin_train_step(LOSS)  # the next step is clean
    await trainer.train_microbatch(microbatches()[0])
    assert (await trainer.finish_train_step()).version == 1


def test_memory_prediction(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    parameters = 1000 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
    model, train = ModelConfig(path=str(tmp_path)), TrainConfig(tokens_per_microbatch=100)
    sizes = predict_memory(model, train, max_sequences=3, max_context=10)
    assert sizes["masters"] == sizes["gradients"] == sizes["optimizer"] / 2 == parameters * 4
    assert sizes["kv_cache"] == 3 * 10 * 2 * 2 * 2 * 16 * 4 and sizes["logits"] == 100 * 1000 * 4
    assert sizes["working_copy"] == sizes["reference"] == 0
    narrow = predict_memory(
        ModelConfig(path=str(tmp_path), dtype="bfloat16"), train, max_sequences=3, max_context=10, needs_reference=True
    )
    assert narrow["working_copy"] == narrow["reference"] == parameters * 2 and narrow["masters"] == parameters * 4
    lean = predict_memory(
        model, TrainConfig(tokens_per_microbatch=100, gradient_checkpointing=True), max_sequences=3, max_context=10
    )
    assert lean["activations"] < sizes["activations"]


def test_predicted_activations_are_what_autograd_keeps(tmp_path: Path) -> None:
    """Counted with saved-tensor hooks on a real forward: within a quarter."""
    policy = tiny_policy("float32")
    policy.config.save_pretrained(tmp_path)
    (batch,) = pack_groups([make_group(np.random.default_rng(0), i) for i in range(6)], 10_000)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.ndim > 1 and tensor.shape[-1] != 41 and storage.data_ptr() != policy.flat.master.data_ptr():
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp, _ = TorchTrainer(policy, TrainConfig(), max_completion_length=1).forward(batch)
    assert logp.requires_grad
    predicted = predict_memory(
        ModelConfig(path=str(tmp_path)),
        TrainConfig(tokens_per_microbatch=batch.tokens.size),
        max_sequences=1,
        max_context=1,
    )["activations"]
    assert predicted == pytest.approx(sum(held.values()), rel=0.25)
