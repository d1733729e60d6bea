"""Whole runs that evaluate beside their steps: what they report is what a run reports that waits, in the same lines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from runtime_helpers import MODEL, REAL, config_of, metrics_of, rollouts_of

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import LifecycleError
from asyncrl.generation.worker.pin import Pin
from asyncrl.pumps.evaluate import EvaluatePump
from asyncrl.runtime.runtime import RunSummary, Runtime
from asyncrl.types import Generation, GenerationRequest

pytestmark = pytest.mark.usefixtures("warm_workers")
SYNC: dict[str, Any] = REAL | {
    "preset": "sync",
    "data": REAL["data"] | {"eval": f"{MODEL}:rows"},
    "evaluate": {"every": 1, "samples": 2, "limit": 6},
    "train": REAL["train"] | {"max_steps": 4},
    "telemetry": {"live": "off", "report": False, "rollouts_per_step": 64},
}
TWO: dict[str, Any] = SYNC | {"generation": {"placement": "worker", "workers": 2, "threads": 1}}


class Beside:
    """Pinned requests are asked only once the run has come to a later version: an evaluation for which steps wait would wait for
    ever. `reach(v)`: that version, for an evaluation of `v`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reach: Callable[[int], int]) -> None:
        self.version, self.moved = 0, anyio.Event()
        self.asked: list[int] = []  # versions of evaluations, a request each
        generate = Pin.generate

        async def later(pin: Pin, request: GenerationRequest) -> Generation:
            version = pin.weights.version
            with anyio.fail_after(60):
                while self.version < reach(version):
                    await self.moved.wait()
            self.asked.append(version)
            return await generate(pin, request)

        monkeypatch.setattr(Pin, "generate", later)

    async def watch(self, runtime: Runtime) -> None:
        async for report in runtime.steps():
            self.version = report.version
            self.moved.set()
            self.moved = anyio.Event()


async def run(folder: Path, *overrides: str, base: dict[str, Any] = TWO, beside: Beside | None = None) -> RunSummary:
    async with Runtime(config_of(folder, *overrides, base=base)) as runtime, anyio.create_task_group() as tasks:
        if beside is not None:
            tasks.start_soon(beside.watch, runtime)
        await runtime.run()
        tasks.cancel_scope.cancel()
    return runtime.summary()


def evaluated(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The lines of a run: version, and what was evaluated there."""
    lines = metrics_of(folder / "runs/run")
    return [(line["step"], {name: line[name] for name in sorted(line) if name.startswith("eval/")}) for line in lines]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_an_evaluation_beside_steps_reports_what_one_that_is_waited_for_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In float32 two steps are committed before the evaluation asks for its first token; in bfloat16, where the step itself writes
    into a half, one."""
    ahead = 2 if dtype == "float32" else 1
    given = (f"model.dtype={dtype}", "train.max_steps=6", "evaluate.every=2")
    beside = Beside(monkeypatch, lambda version: version + ahead)
    summary = await run(tmp_path / "beside", *given, beside=beside)
    assert summary.version == 6 and summary.books.trained == 24
    assert beside.asked == [2] * 12 + [4] * 12  # before the first step and after the last one steps wait
    ours = evaluated(tmp_path / "beside")
    assert [(version, bool(metrics)) for version, metrics in ours] == [(each, each % 2 == 0) for each in range(7)]
    assert [version for version, _ in summary.history] == list(range(7))

    await run(tmp_path / "shared", *given, base=SYNC)
    assert ours == evaluated(tmp_path / "shared")
    numbers = {tuple(metrics.values()) for _, metrics in ours if metrics}
    assert len(numbers) == 4, "versions evaluate alike: this shows nothing"
    tokens = [
        [(row["group_id"], row["member"], row["completion"]) for row in rollouts_of(tmp_path / name / "runs/run")]
        for name in ("beside", "shared")
    ]
    assert len(tokens[0]) == 6 * 16 and tokens[0] == tokens[1]


class Stop(LifecycleError):
    """An error of the engine, not of an episode."""


async def test_no_checkpoint_is_written_before_the_evaluations_of_the_versions_up_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that who goes on from it has missed none, however the run was killed."""
    more = ("checkpoint.every=1", "checkpoint.save_final=false", "checkpoint.keep=0")
    store = CheckpointStore(tmp_path / "cut/runs/run/checkpoints")
    found: list[int | None] = []
    beside = Beside(monkeypatch, lambda version: version + 1)
    waits = Pin.generate

    async def look(pin: Pin, request: GenerationRequest) -> Generation:
        generation = await waits(pin, request)
        if pin.weights.version == 2:
            found.append(await anyio.to_thread.run_sync(store.latest_version))
            raise Stop
        return generation

    with monkeypatch.context() as patched:
        patched.setattr(Pin, "generate", look)
        with pytest.raises(Stop):
            await run(tmp_path / "cut", *more, beside=beside)
    assert beside.version == 3 and found[0] == 1  # version 3 was committed, and there is a copy of 2
    assert "version 2 was not evaluated: the run ended first" in caplog.text
    for version in (2, 3):  # as if the run had been killed, and so had written none at its end
        await anyio.to_thread.run_sync(partial(shutil.rmtree, store.path(version), ignore_errors=True))
    await run(tmp_path / "cut", *more, "resume=true", beside=beside)
    await run(tmp_path / "whole", base=SYNC)
    assert evaluated(tmp_path / "cut") == evaluated(tmp_path / "whole")
    assert await anyio.to_thread.run_sync(store.latest_version) == 4


async def own_loop(folder: Path, steps: int, *overrides: str) -> RunSummary:
    """A program that samples and submits groups, a step at a time, and evaluates as a run does."""
    tree = SYNC | {"data": {"eval": SYNC["data"]["eval"], "max_prompt_tokens": 12}}
    async with Runtime(config_of(folder, *overrides, base=tree)) as runtime:
        while runtime.version < steps:
            done = runtime.steps()
            for letter in "abcd":
                group = await runtime.generate(f"{letter}3=", n=4)
                await runtime.submit(group, [float(t.completion.count(letter)) for t in group])
            await anext(done)
        await runtime.finish()
    return runtime.summary()


async def test_the_evaluation_at_which_a_loop_was_stopped_is_made_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each: before the first step, at the version at which it was stopped, and after the last step, whichever that was."""
    every = "evaluate.every=2"
    summary = await own_loop(tmp_path / "whole", 3, every)
    whole = evaluated(tmp_path / "whole")
    assert [(version, bool(found)) for version, found in whole] == [(0, True), (1, False), (2, True), (3, True)]
    assert [version for version, _ in summary.history] == [0, 1, 2, 3]
    assert {"loss", *whole[3][1]} <= summary.history[-1][1].keys()
    evaluate = EvaluatePump.run

    async def stopped(pump: EvaluatePump, version: int, pin: Any = None) -> dict[str, float]:
        if version == 2:
            raise Stop
        return await evaluate(pump, version, pin)

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(EvaluatePump, "run", stopped)
        await own_loop(tmp_path / "cut", 3, every)
    assert [(version, bool(found)) for version, found in evaluated(tmp_path / "cut")][-1] == (2, False)
    await own_loop(tmp_path / "cut", 3, every, "resume=true")
    assert evaluated(tmp_path / "cut")[:3] == whole[:3] and len(evaluated(tmp_path / "cut")) == 4
    numbers = metrics_of(tmp_path / "cut/runs/run")
    assert numbers[2]["loss"] == pytest.approx(metrics_of(tmp_path / "whole/runs/run")[2]["loss"])
