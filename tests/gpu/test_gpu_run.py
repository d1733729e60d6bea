"""What a CPU cannot show: the same code on a CUDA device. Skipped where there is none; run with `pytest -m gpu`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import MAX_LENGTH, VOCABULARY, make_group, tiny_module

from asyncrl import Runtime, load_config
from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import DataError
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.loading import load_policy
from asyncrl.models.policy import PolicyModel
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
def test_hidden_states_equal_the_cpu_ones(dtype: str, tolerance: float) -> None:
    config = ModelConfig(path=f"{ROOT / 'examples/quickstart_model.py'}:build", dtype=dtype)
    tokens = torch.arange(24) % 10 + 2
    logits = []
    for device in ("cpu", "cuda"):
        policy, _ = load_policy(config, torch.device(device), seed=0)
        plan = TreePlan([8, 4, 3, 3, 6], [-1, 0, 1, 1, 0])
        positions = torch.tensor([*range(15), *range(12, 15), *range(8, 14)])
        with torch.no_grad():
            hidden = policy.hidden(tokens.to(device), positions.to(device), plan)
            logits.append(policy.logits(hidden).log_softmax(-1).float().cpu())
    assert (logits[0] - logits[1]).abs().max() < tolerance


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_run_trains_on_the_device_and_sampler_and_trainer_agree(dtype: str, sharding: str) -> None:
    overrides = ["model.device=cuda", f"model.dtype={dtype}", "train.max_steps=5", "telemetry.live=off"]
    overrides.append(f"distributed.sharding={sharding}")
    config = load_config([ROOT / "examples/quickstart.yaml"], overrides)
    async with Runtime(config, write=False) as runtime:
        summary = await runtime.run()
    steps = [metrics for _, metrics in summary.history if "reward/mean" in metrics]
    assert summary.version == 5
    assert all(math.isfinite(metrics["loss"]) for metrics in steps)
    gaps = [metrics["mismatch/current_mean"] for metrics in steps if metrics.get("mismatch/current_tokens", 0)]
    assert gaps and np.mean(gaps) < (1e-3 if dtype == "float32" else 0.05)


async def test_the_range_of_the_cuda_profiler_is_open_for_the_named_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nsys profile -c cudaProfilerApi` would record it."""
    calls: list[tuple[str, int]] = []
    real = {name: getattr(torch.cuda.profiler, name) for name in ("start", "stop")}
    overrides = ["model.device=cuda", "train.max_steps=4", "telemetry.live=off", "telemetry.profile.from=2"]
    config = load_config([ROOT / "examples/quickstart.yaml"], overrides)
    runtime = Runtime(config, write=False)
    for name in real:

        def call(name: str = name) -> None:
            real[name]()
            calls.append((name, runtime.version))

        monkeypatch.setattr(torch.cuda.profiler, name, call)
    async with runtime:
        await runtime.run()
    assert calls == [("start", 1), ("stop", 2)]


@pytest.mark.parametrize("placement", ["shared", "worker"])
async def test_the_trace_has_the_devices_time_of_each_closure(tmp_path: Path, placement: str) -> None:
    overrides = ["model.device=cuda", "train.max_steps=4", "telemetry.live=off", f"run.dir={tmp_path}"]
    overrides.append(f"generation.placement={placement}")
    async with Runtime(load_config([ROOT / "examples/quickstart.yaml"], overrides)) as runtime:
        summary = await runtime.run()
        assert runtime.directory is not None
        trace = runtime.directory.trace
    events = json.loads(trace.read_text())["traceEvents"]
    timed = {event["name"] for event in events if "host_ms" in event.get("args", {})}
    assert {"train/microbatch", "train/finish"} <= timed
    for _, metrics in summary.history[1:]:
        shares = [
            share for name, share in metrics.items() if name.startswith(("busy/", "idle/")) and name.count("/") == 1
        ]
        assert sum(shares) == pytest.approx(1.0)
        assert metrics["lane/device_clock_ms"] < 1.0


@pytest.mark.parametrize(("place", "token"), [(-1, VOCABULARY), (0, 2**31 - 1), (-2, -1)])
def test_token_ids_that_the_model_lacks_are_no_assertion_of_the_device(place: int, token: int) -> None:
    """One would end the context, and with it the run."""
    policy = PolicyModel(tiny_module().to("cuda"), "float32")
    trainer = TorchTrainer(policy, TrainConfig(lr=0.1), max_completion_length=MAX_LENGTH)
    groups = [make_group(np.random.default_rng(4), group_id) for group_id in range(3)]
    [good] = pack_groups(groups, 10_000)
    max(groups[1][0].trajectories, key=lambda trajectory: trajectory.tokens.size).tokens[place] = token
    [spoiled] = pack_groups(groups, 10_000)
    for batch in (spoiled, good):
        trainer.begin_train_step(build_loss("grpo"))
        trainer.train_microbatch(batch)
        if batch is spoiled:
            with pytest.raises(DataError, match=f"the model has no token {token}") as raised:
                trainer.finish_train_step()
            assert raised.value.groups == (1,)
            trainer.abort_train_step()
    assert trainer.finish_train_step().version == 1
    torch.cuda.synchronize()


def test_decode_steps_that_are_replayed_are_the_eager_ones_under_each_version() -> None:
    config = ModelConfig(path=f"{ROOT / 'examples/quickstart_model.py'}:build", dtype="bfloat16")
    policy, _ = load_policy(config, torch.device("cuda", 0), seed=0)
    sampled, start = [], policy.flat.master.clone()
    for captured in (True, False):
        policy.flat.master.copy_(start)
        policy.advance()
        core = open_core(policy, max_sequences=5, max_context=40, kv_positions=200, prefill_tokens=64, recompute=True)
        assert isinstance(core, Core)
        if not captured:
            core.graphs = None
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        for seed in range(5):
            core.add(GenerationRequest(np.arange(2, 5 + 2 * seed, dtype=np.int32), sampling, seed=seed), ())
        for step in range(12):
            while core.needs_prefill:
                core.prefill()
            core.decode()
            if step == 5:
                policy.flat.master.mul_(1.05)
                policy.advance()
        assert core.graphs is None or (core.graphs._graphs and not core.graphs.failed)
        sampled.append((core.sequences.tokens.copy(), core.sequences.logprobs.copy()))
    assert np.array_equal(sampled[0][0], sampled[1][0])
    np.testing.assert_allclose(sampled[0][1], sampled[1][1], atol=0.02)
