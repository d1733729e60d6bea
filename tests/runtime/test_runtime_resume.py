"""Bit-identical reruns, and runs that were killed, stopped or ended and go on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from runtime_helpers import (
    FAST,
    MODEL,
    REAL,
    complete,
    config_of,
    equal_weights,
    lines_at_least,
    metrics_of,
    rollouts_of,
    start,
    train,
    unclocked,
    weights_of,
)
from runtime_model import rows

from asyncrl.config.resolve import last_version
from asyncrl.config.schema import Config
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.runtime.runtime import Runtime
from asyncrl.types import LedgerStatistics, StepResult

SYNC: dict[str, Any] = REAL | {
    "preset": "sync",
    "train": REAL["train"] | {"max_steps": 30, "schedule": "linear", "warmup_steps": 2},
    "checkpoint": {"every": 1, "keep": 0},
}


async def test_a_killed_sync_run_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Compared to the last bit with a run of 30 steps that nobody disturbed, in a process of its own. What is resumed goes on in
    this process, and on another loop (asyncio's here, uvloop there)."""
    complete(tmp_path / "whole", SYNC)
    killed = start(tmp_path, SYNC)
    whole, place = tmp_path / "whole/runs/run", tmp_path / "runs/run"
    killed.wait_until(lines_at_least(place, 5), "fifth step")
    killed.kill()
    assert metrics_of(place)[-1]["step"] < 30
    assert (await train(tmp_path, "resume=true", base=SYNC)).version == 30
    lines = metrics_of(whole)
    assert len(lines) == 30 and unclocked(metrics_of(place)) == unclocked(lines)
    assert rollouts_of(place) == rollouts_of(whole)
    assert equal_weights(weights_of(place, 30), weights_of(whole, 30))
    # This is no comparison of two runs that do nothing.
    assert (
        not equal_weights(weights_of(place, 30), weights_of(place, 1))
        and len({row["reward"] for row in rollouts_of(place)}) > 2
    )


EPOCHS = 6


async def test_an_async_run_that_is_stopped_skips_and_repeats_no_prompt(tmp_path: Path) -> None:
    """Stopped twice in the middle, by a cancellation and by a kill; every prompt is trained exactly once per epoch."""
    tree = REAL | {"checkpoint": {"every": 1}} | FAST
    tree["train"] = tree["train"] | {"max_steps": 200, "max_epochs": EPOCHS, "schedule": "linear", "lr": 1e-3}
    place = tmp_path / "runs/run"
    books = await _cancelled_at(5, config_of(tmp_path, base=tree))
    assert books.dropped > 0  # groups were under way: their prompts are trained after the resume
    killed = start(tmp_path, tree, "resume=true")
    killed.wait_until(lines_at_least(place, 12), "twelfth step")
    killed.kill()
    steps = EPOCHS * 24 // 4
    assert (await train(tmp_path, "resume=true", base=tree)).version == steps
    lines = metrics_of(place)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:  # the schedule goes on where it was: linear from 1e-3, over the steps of all epochs
        assert line["optim/lr"] == pytest.approx(1e-3 * (1 - (line["step"] - 1) / steps))
    trained = Counter(row["group_id"] for row in rollouts_of(place))
    assert trained == dict.fromkeys(range(24 * EPOCHS), 4)
    for epoch in range(EPOCHS):
        prompts = Counter(row["prompt"] for row in rollouts_of(place) if row["epoch"] == epoch and row["member"] == 0)
        assert prompts == Counter(row["prompt"] for row in rows())


async def _cancelled_at(version: int, config: Config) -> LedgerStatistics:
    """Cancel a run from outside when it has committed this version. Returns its books."""
    with anyio.CancelScope() as scope:
        async with Runtime(config) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                async for report in runtime.steps():
                    if report.version == version:
                        scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
    assert scope.cancelled_caught
    return runtime.summary().books


async def test_a_changed_configuration_is_shown_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = SYNC | {"telemetry": {"live": "plain"}}
    await train(tmp_path, "train.max_steps=4", base=tree)
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 4 -> 8") as refused:
        await train(tmp_path, "resume=true", "rollout.group_size=8", "data.shuffle=false", base=tree)
    assert "data.shuffle: true -> false" in str(refused.value)
    saved = yaml.safe_load((tmp_path / "runs/run/config.yaml").read_text())
    assert saved["rollout"]["group_size"] == 4  # a refusal changes nothing
    summary = await train(tmp_path, "resume=true", "train.max_steps=5", "train.lr=0.003", base=tree)
    assert summary.version == 5
    output = capsys.readouterr().out
    assert "resume: train.lr: 0.01 -> 0.003" in output
    assert "resume: train.max_steps: 4 -> 5" in output


async def test_resume_without_anything_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        await train(tmp_path, "resume=true", base=SYNC)
    await train(tmp_path, "train.max_steps=4", "checkpoint.save_final=false", "checkpoint.every=100", base=SYNC)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await train(tmp_path, "resume=true", base=SYNC)
    with pytest.raises(ConfigError, match="write=False"):
        async with Runtime(config_of(tmp_path, "resume=true", base=SYNC), write=False):
            pass


async def test_reference_model_and_embedding_ids_survive_a_resume(tmp_path: Path) -> None:
    """KL is measured against the weights at the very start, not at the resume; `rt.generate` repeats no randomness."""
    tree = SYNC | {"algorithm": {"kl": {"coef": 0.1}}}
    await train(tmp_path, "train.max_steps=8", base=tree)
    await train(tmp_path, "train.max_steps=10", "resume=true", base=tree)
    lines = metrics_of(tmp_path / "runs/run")
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0.2 * lines[7]["kl"] > 0

    embedded = {k: v for k, v in tree.items() if k not in ("data", "reward")} | {"data": {"max_prompt_tokens": 12}}
    embedded["run"] = {"name": "embedded"}
    ids = []
    for overrides in (["resume=false"], ["resume=true"]):
        async with Runtime(config_of(tmp_path, *overrides, base=embedded)) as runtime:
            for _ in range(4):
                group = await runtime.generate("a3=", n=4)
                ids.append(group[0].group_id)
                await runtime.submit(group, [0.0, 1.0, 0.0, 1.0])
    assert len(set(ids)) == 8


async def test_a_resume_does_not_change_the_rotary_frequencies(tmp_path: Path) -> None:
    """The model's original context is 8, and rows of the first run stay within it. What was refused once is refused again."""
    base = REAL | {"model": REAL["model"] | {"path": f"{MODEL}:build_stretched"}} | FAST
    base |= {"data": REAL["data"] | {"max_prompt_tokens": 4}, "checkpoint": {"every": 1}}
    await train(tmp_path, "rollout.max_tokens=4", "train.max_steps=1", base=base)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"the longest row had \d+ tokens and has \d+ .* restore both, or start a new run"
        ):
            await train(tmp_path, "rollout.max_tokens=5", "train.max_steps=2", "resume=true", base=base)
    summary = await train(tmp_path, "rollout.max_tokens=3", "train.max_steps=2", "resume=true", base=base)
    assert summary.version == 2


async def test_a_resume_within_a_batch_counts_ages_and_the_last_version_from_the_checkpoint(tmp_path: Path) -> None:
    async def train_a_step(runtime: Runtime) -> None:
        for _ in range(4):
            assert await runtime.submit(await runtime.generate([4], n=4), [0.0, 1.0, 2.0, 3.0])
        await runtime.finish()

    base = REAL | {"data": {"max_prompt_tokens": 12}}
    settings = "train.max_steps=2", "preset=async", "rollout.max_staleness=0", "algorithm.updates_per_batch=2"
    settings = *settings, "train.schedule=linear", "train.lr=0.003"
    with pytest.raises(ValueError, match="the second update"):
        async with Runtime(config_of(tmp_path, *settings, base=base)) as runtime:
            trainer, finish = runtime.built.ports.trainer, runtime.built.ports.trainer.finish_train_step

            async def finish_once() -> StepResult:
                if trainer.version:
                    raise ValueError("the second update")
                return await finish()

            trainer.finish_train_step = finish_once  # type: ignore[method-assign]
            await train_a_step(runtime)
    async with Runtime(config_of(tmp_path, *settings, "resume=true", base=base)) as runtime:
        assert runtime.version == 1
        await train_a_step(runtime)
    assert runtime.version == 3 == last_version(runtime.config, runtime.built.base)
    # Three optimizer steps: the rate falls to 0 in thirds.
    assert metrics_of(tmp_path / "runs/run")[-1]["optim/lr"] == pytest.approx(0.001)
    assert {row["step"]: row["trained_version"] for row in rollouts_of(tmp_path / "runs/run")} == {1: 0, 3: 1}
