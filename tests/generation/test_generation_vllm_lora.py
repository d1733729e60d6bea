"""Adapters: what a worker samples after an update in place is what a fresh vLLM samples that reads the run's checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from generation_cores import Workers, board_of, needs_vllm, opened_core, small_model
from generation_models import generate_all, request
from support.trajectories import trajectory
from test_generation_vllm_engine import SAME, greedy

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import LoraConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.training.snapshot import Snapshot, take_snapshot
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Generation, GenerationRequest, Group, Microbatch, Prompt, Ticket
from asyncrl.weights.sync import WeightPublisher, WeightReader

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def trainer_and_plain(request: pytest.FixtureRequest) -> tuple[TorchTrainer, Any]:
    """Tied, not tied, and with experts, whose adapters are those of attention and of the dense layer."""
    module = small_model(request.param)
    plain = copy.deepcopy(module)
    policy = PolicyModel(module, "float32", lora=LoraConfig(rank=4, alpha=8), seed=5)
    return TorchTrainer(policy, TrainConfig(lr=0.2, grad_clip=None), max_completion_length=24), plain


def batch_of(asked: list[GenerationRequest], answers: list[Generation]) -> Microbatch:
    """One group of all answers, which have one prompt, with random advantages."""
    members = []
    for member, (each, answer) in enumerate(zip(asked, answers, strict=True)):
        before = each.prompt_ids.size
        tokens = np.concatenate([each.prompt_ids, answer.token_ids])
        logprobs, versions = (np.concatenate([np.zeros(before), part]) for part in (answer.logprobs, answer.versions))
        given = {"prompt_length": before, "logprob": logprobs, "version": versions}
        members.append(trajectory(0, member, len(asked), tokens, **given, finish_reason=answer.finish_reason))
    group = Group(Ticket(0, 0, 1), Prompt(0, asked[0].prompt_ids, ""), tuple(members))
    (batch,) = pack_groups([(group, np.random.default_rng(0).standard_normal(len(asked)))], 1000)
    return batch


def train(core: TorchTrainer, batch: Microbatch) -> None:
    """Twice: in the first step A has no gradient, because B is zero."""
    for _ in range(2):
        core.begin_train_step(build_loss("grpo"))
        core.train_microbatch(batch)
        core.finish_train_step()


def fresh_of(saved: Snapshot, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What vLLM makes of a checkpoint by its own loader."""
    saved.write_pretrained(folder, None)
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    return greedy(str(folder), prompts)


async def test_after_an_update_with_adapters_it_samples_what_a_fresh_vllm_samples(
    tmp_path: Path, trainer_and_plain: tuple[TorchTrainer, Any]
) -> None:
    """Trained on its own tokens, published on a board, moved to by a worker; the fresh one reads the merged model."""
    core, plain = trainer_and_plain
    policy, sent = core.policy, list[Any]()
    sampled = [request(9, seed, prefix_key="shared", max_tokens=24, temperature=1.0) for seed in range(4)]
    asked = [request(8 + index, index, max_tokens=24, temperature=0.0) for index in range(6)]
    async with opened_core("vllm", policy, plain) as made, board_of(policy) as (owner, board):
        reader = WeightReader(board, made.engine, made.lane, sent.append)
        publisher = WeightPublisher(policy, owner, Workers(reader), made.lane)
        await reader.move(*await publisher.post_first())
        before = await generate_all(made.engine, asked)
        batch = batch_of(sampled, await generate_all(made.engine, sampled))
        await made.lane.run(lambda: train(core, batch), name="train")
        assert policy.version == 2
        await publisher.update_weights(2)
        after = await generate_all(made.engine, asked)
        assert made.engine.output_bound.distance(await made.engine.outputs(), fixed_logprobs(policy)) < SAME
        saved = await made.lane.run(lambda: take_snapshot(core), name="checkpoint")
    assert sent == [{"bound": 0}, {"bound": 2}]
    prompts = [each.prompt_ids.tolist() for each in asked]
    fresh = await anyio.to_thread.run_sync(fresh_of, saved, tmp_path, prompts)
    assert [each.token_ids.tolist() for each in after] == fresh
    assert all(mine.token_ids.tolist() != now for mine, now in zip(before, fresh, strict=True))
    assert all((each.versions == 2).all() for each in after)
