"""What a run tells of its speed: its share of what the device could do, and a profile of a few steps as a tool receives it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from runtime_helpers import DRY, MODEL, REAL, ROOT, complete, config_of, train

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.models.policy import PolicyModel
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.performance import DeviceRates, StepProfiler, measure_rates, needed_flop, stated_peak
from asyncrl.types import FinishReason, Group, Prompt, StepResult, Ticket, Trajectory

EVALUATED: dict[str, Any] = {
    **REAL,
    "data": {**REAL["data"], "eval": f"{MODEL}:rows"},
    "evaluate": {"every": 100},
    "telemetry": {"live": "plain"},
}


def documented_ranges() -> set[str]:
    """The names in the table of ranges."""
    section = (ROOT / "docs" / "watching.md").read_text().partition("## Profiling")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_tool_that_listens_to_nvtx_hears_every_stage_by_its_documented_name(tmp_path: Path) -> None:
    listener, log = tmp_path / "listener.so", tmp_path / "ranges.txt"
    source = Path(__file__).with_name("nvtx_listener.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Werror", "-o", str(listener), str(source)], check=True)
    complete(tmp_path, EVALUATED, NVTX_INJECTION64_PATH=str(listener), NVTX_LISTENER_LOG=str(log))
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    assert ["domain", "asyncrl"] in lines
    opened = {line[1]: line[2] for line in lines if line[0] == "start" and line[2].startswith("asyncrl/")}
    ended = {line[1] for line in lines if line[0] == "end"}
    assert set(opened) <= ended  # every range was closed
    names = {name.removeprefix("asyncrl/") for name in opened.values()}
    expected = {name.replace("NAME", "share") for name in documented_ranges()}
    assert len(expected) > 10 and expected <= names, expected - names
    counts = {name: list(opened.values()).count(f"asyncrl/{name}") for name in ("rollout", "publish")}
    assert counts["publish"] == 3 and counts["rollout"] >= 3 * 4 * 4  # three steps of four groups of four


# sync: else a step may be trained before the profile of it begins, which is where the version before is published.
PROFILED = ("preset=sync", "telemetry.live=plain", "telemetry.profile.from=2")


def optimizer_steps(profile: Path) -> int:
    events = json.loads(profile.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return sum(event.get("name", "").startswith("Optimizer.step#") and event.get("ph") == "X" for event in events)


async def test_the_operators_of_the_named_steps_lie_in_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await train(tmp_path, *PROFILED, "train.max_steps=4", "telemetry.profile.steps=2")
    assert optimizer_steps(tmp_path / "runs/run/profile/rank_0.json") == 2
    assert "steps 2 to 3, until version 3, to" in capsys.readouterr().out


async def test_a_run_that_ends_inside_of_the_steps_keeps_what_was_recorded(tmp_path: Path) -> None:
    await train(tmp_path, *PROFILED, "train.max_steps=2", "telemetry.profile.steps=100")
    assert optimizer_steps(tmp_path / "runs/run/profile/rank_0.json") == 1


async def test_steps_that_the_run_does_not_have_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await train(tmp_path, *PROFILED, "train.max_steps=1", "telemetry.profile.from=9")
    assert "nothing was profiled: the run ended at version 1 and had none of steps 9 to 9" in capsys.readouterr().out
    await train(tmp_path, *PROFILED, "train.max_steps=2", "telemetry.profile.from=1", "resume=true")
    assert "ended at version 2 and had none of steps 1 to 1" in capsys.readouterr().out
    assert not (tmp_path / "runs/run/profile").exists()


@pytest.mark.parametrize(("ends_at", "said"), [(9, "version 3"), (2, "version 2")])
async def test_on_a_gpu_the_range_of_the_profiler_api_is_opened_and_closed_on_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: int, said: str
) -> None:
    """As `nsys profile -c cudaProfilerApi` takes it: what the steps launched has ended before the range does. No card is needed
    to see who is called when."""
    called: list[str] = []
    lanes: set[str] = set()

    def heard(name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            called.append(name)
            lanes.add(threading.current_thread().name)

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", heard("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", heard("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", heard("stop"))
    notes: list[str] = []
    config = config_of(tmp_path, *PROFILED, "telemetry.profile.steps=2")
    async with ThreadLane("gpu") as lane:  # write=False is fine there: nothing is written
        profiler = StepProfiler(config, lane, torch.device("cuda", 0), None, 0, notes.append)
        for version in range(ends_at):
            called.append(str(version))
            await profiler.at(version)
        await profiler.close(ends_at)
    versions = [str(version) for version in range(ends_at)]
    stopped = ["synchronize", "stop"]
    assert called == [*versions[:2], "start", *versions[2:4], *stopped, *versions[4:]]
    assert lanes and threading.current_thread().name not in lanes
    assert notes == [f"telemetry.profile: the range of the CUDA profiler API is closed at {said}"]


async def test_where_there_is_nothing_to_profile_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a dry run has no device"):
        await train(tmp_path, *PROFILED, base=DRY, prompts=[{"prompt": "a"}], write=False)
    with pytest.raises(ConfigError, match="write=False has none"):
        await train(tmp_path, *PROFILED, write=False)


BODY, HEAD, PROMPT = 1000, 300, 5
POLICY = cast(
    PolicyModel, SimpleNamespace(matmul_parameters=BODY + HEAD, head=SimpleNamespace(weight=torch.zeros(30, 10)))
)


def trajectory(member: int, completion: int, unscored: int = 0) -> Trajectory:
    length = PROMPT + completion
    mask = np.zeros(length, bool)
    mask[PROMPT + unscored :] = True
    zeros = np.zeros(length, np.float32)
    return Trajectory(
        group_id=0, member=member, group_size=2, prompt_length=PROMPT, tokens=np.zeros(length, np.int32), mask=mask,
        logprobs=zeros, sampled_logprobs=zeros, versions=np.zeros(length, np.int32), temperature=1.0,
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip


def report(*trajectories: Trajectory) -> StepReport:
    group = Group(Ticket(0, 0, 2), Prompt(0, np.zeros(PROMPT, np.int32), ""), trajectories)
    result = StepResult(1, 0.0, 0.0, 0.0, 0, 0, 0, {})
    return StepReport(1, result, {}, (group,), {})


def needed(*overrides: str, steps: StepReport) -> float:
    return needed_flop(steps, POLICY, load_config([], list(overrides)))


def test_a_prompt_is_needed_once_per_group_and_without_the_head() -> None:
    steps = report(trajectory(0, 4), trajectory(1, 7))
    assert needed(steps=steps) == 8 * (BODY * (PROMPT + 4 + 7) + HEAD * (4 + 7))


def test_what_a_tool_wrote_runs_forward_but_is_not_scored() -> None:
    assert needed(steps=report(trajectory(0, 9, unscored=2))) == 8 * (BODY * (PROMPT + 9) + HEAD * 7)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algorithm.kl.coef=0.01"], 2 + 6 + 2),  # the reference model's forward
        (["algorithm.updates_per_batch=3"], 2 + 3 * 6),
    ],
)
def test_more_passes_where_the_algorithm_asks_for_them(overrides: list[str], passes: int) -> None:
    steps = report(trajectory(0, 4))
    assert needed(*overrides, steps=steps) == passes * (BODY * (PROMPT + 4) + HEAD * 4)


def test_shares_of_what_was_reached_and_of_what_the_maker_states() -> None:
    assert DeviceRates(gemm=4e9, peak=8e9).shares(2e9, 1.0) == {"perf/limit_share": 0.5, "perf/mfu": 0.25}


def test_a_cpu_is_measured() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.gemm < 1e15 and rates.peak == rates.gemm


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
    ],
)
def test_cards_by_the_name_that_torch_gives(name: str, tflops: float) -> None:
    assert stated_peak(name, torch.bfloat16) == tflops * 1e12
    assert stated_peak(name, torch.float32) is None


@pytest.mark.parametrize("name", ["", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA RTX A1000"])
def test_no_peak_is_stated_for_another_card(name: str) -> None:
    assert stated_peak(name, torch.bfloat16) is None
