"""Whole runs with adapters, which learn, load and go on, and with experts, whose routes are trained as they were sampled."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from runtime_helpers import (
    DRY,
    FAST,
    MODEL,
    REAL,
    config_of,
    equal_weights,
    metrics_of,
    reports_of,
    scored,
    train,
    weights_of,
)
from runtime_model import build, make_tokenizer
from transformers import AutoModelForCausalLM

from asyncrl.client import AsyncClient
from asyncrl.config.resolve import resolve
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError
from asyncrl.ports import Generate
from asyncrl.runtime.door import DoorStatistics, serve
from asyncrl.runtime.runtime import Runtime
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from asyncrl.types import Prompt, SamplingParams, Trajectory

LORA: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": REAL["model"] | {"lora": {"rank": 4, "alpha": 8}},
    "train": REAL["train"] | {"max_steps": 6},
    "algorithm": {"kl": {"coef": 0.01}},
    "checkpoint": {"every": 3, "keep": 0},
    **FAST,
}
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


async def test_run_checkpoint_and_resume(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    await train(tmp_path / "whole", base=LORA)
    await train(tmp_path / "parts", "train.max_steps=3", base=LORA)
    await train(tmp_path / "parts", "resume=true", base=LORA)
    whole, parts = tmp_path / "whole/runs/run", tmp_path / "parts/runs/run"
    assert equal_weights(weights_of(whole, 6), weights_of(parts, 6))
    assert [line["reward/mean"] for line in metrics_of(whole)] == [line["reward/mean"] for line in metrics_of(parts)]
    # the sampler's log-probs, of merged weights, are the trainer's (largest difference, in nats)
    assert all(line["mismatch/current_max"] < 1e-4 for line in metrics_of(whole))

    step = whole / "checkpoints/step_6"
    base = build(0)[0]
    start = {name: p.clone() for name, p in base.named_parameters()}
    merged = AutoModelForCausalLM.from_pretrained(step)
    adapted = peft.PeftModel.from_pretrained(base, step / "adapter")
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=1e-4)
    for name, parameter in merged.named_parameters():  # what was not to be trained is as it was
        assert torch.equal(parameter, start[name]) == ("_proj" not in name), name


def test_mixed_targets_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.lora.target_modules=[all-linear,q_proj]", base=LORA)
    with pytest.raises(ConfigError, match="expected all-linear alone"):
        resolve(config)


MIXTURE: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": {"path": f"{MODEL}:build_experts", "dtype": "float32"},
    "algorithm": {"router_replay": True},
    **FAST,
}
WORKER = ("generation.placement=worker", "generation.threads=1", "preset=one_off")


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("placement", ((), WORKER), ids=("shared", "worker"))
async def test_routes_come_to_the_trainer_and_are_replayed(tmp_path: Path, placement: tuple[str, ...]) -> None:
    reports = await reports_of(config_of(tmp_path, *placement, "replay.size=4", base=MIXTURE))
    groups = [group for report in reports for group in report.groups]
    assert len(groups) == 12
    for t in (t for group in groups for t in group.trajectories):
        routes = t.routed_experts
        assert routes is not None and routes.dtype == np.int8 and routes.shape == (t.tokens.size, 2, 2)
        assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all()
    for line in metrics_of(tmp_path / "runs/run"):
        assert line["moe/balance_loss"] > 1.9  # k, where experts are used alike
        assert line["moe/unreplayed_tokens"] == 0
        if "mismatch/current_max" in line:
            assert line["mismatch/current_max"] < 1e-4


class Elsewhere(SingleTurn):
    """Says that tokens went to other experts than they did."""

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Generate) -> Trajectory:
        found = await super().run(prompt, member, group_size, generate)
        routes = found.routed_experts
        assert routes is not None
        return replace(found, routed_experts=np.where(routes < 0, routes, (routes + 2) % 4).astype(np.int8))


async def test_what_is_replayed_is_what_the_trajectory_says(tmp_path: Path) -> None:
    environment = Elsewhere(make_tokenizer(), SamplingParams(max_tokens=8), 0)
    await train(tmp_path, "train.max_steps=1", "algorithm.mismatch_gate=null", base=MIXTURE, environment=environment)
    (line,) = metrics_of(tmp_path / "runs/run")
    assert line["mismatch/current_mean"] > 0.005


async def test_groups_of_other_processes_need_their_routes(tmp_path: Path) -> None:
    name = f"experts-{os.getpid()}"
    tree = {k: v for k, v in MIXTURE.items() if k not in ("data", "reward")} | {"data": {"max_prompt_tokens": 12}}
    one = "rollout.groups_per_step=1", "algorithm.mismatch_gate=null", "train.max_steps=null"
    config = config_of(tmp_path, *one, base=tree)
    routes, counts = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[-1, -1], [-1, -1]]], np.int8), DoorStatistics()
    bad = {
        "member 0: routed_experts is missing, but this run replays": None,
        "member 0: routed_experts is int8 [3, 1, 2]; expected signed integers [3, 2, 2]": routes[:, :1],
        "member 0: routed_experts: token 0, layer 0: the choice [3, 3] names an expert twice": np.full_like(routes, 3),
    }
    async with (
        RecordRing(name, RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)) as ring,
        Runtime(config, write=False) as runtime,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve, runtime, ring, counts)
        reports = runtime.steps()
        async with await AsyncClient.attach(name) as client:
            with anyio.fail_after(60):
                for number, (text, given) in enumerate(bad.items()):
                    await client.push(number, [replace(scored(), routed_experts=given) for _ in range(2)])
                    while counts.refused == number:
                        await anyio.lowlevel.checkpoint()
                    assert text in counts.last_refusal
                await client.push(
                    9, [replace(scored(reward=float(m)), routed_experts=routes.astype("u1") % 4) for m in (0, 1)]
                )
                await client.push(10, [replace(scored(reward=float(m)), routed_experts=routes) for m in (0, 1)])
                while counts.refused == 3:  # an unsigned 255 is no -1
                    await anyio.lowlevel.checkpoint()
                (group,) = (await anext(reports)).groups
        tasks.cancel_scope.cancel()
    assert "names an expert twice" in counts.last_refusal
    np.testing.assert_array_equal(group.trajectories[1].routed_experts, routes)


async def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "algorithm.router_replay=true")
    with pytest.raises(ConfigError, match=r"algorithm\.router_replay is true, but Qwen3ForCausalLM has no experts"):
        async with Runtime(config):
            raise AssertionError("it was opened")
    with pytest.raises(ConfigError, match="dry_run, without experts"):
        resolve(config_of(tmp_path, "algorithm.router_replay=true", base=DRY))
