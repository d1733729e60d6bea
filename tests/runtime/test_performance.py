"""What a run tells of its speed: its share of what the device could do, and a profile of a few steps as a tool receives it."""

from __future__ import annotations

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
from asyncrl.runtime.performance import StepProfiler, needed_flop, stated_peak
from asyncrl.runtime.runtime import Runtime
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


PROFILED = ("preset=sync", "telemetry.live=plain", "telemetry.profile.from=2")


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
    async with ThreadLane("gpu") as lane:
        profiler = StepProfiler(config, lane, torch.device("cuda", 0), notes.append)
        for version in range(ends_at):
            called.append(str(version))
            await profiler.at(version)
        await profiler.close(ends_at)
    versions = [str(version) for version in range(ends_at)]
    stopped = ["synchronize", "stop"]
    assert called == [*versions[:2], "start", *versions[2:4], *stopped, *versions[4:]]
    assert lanes and threading.current_thread().name not in lanes
    assert notes == [f"telemetry.profile: the range of the CUDA profiler API is closed at {said}"]


async def test_where_there_is_nothing_to_profile_it_is_said(tmp_path: Path) -> None:
    for base, prompts in ((DRY, [{"prompt": "a"}]), (REAL, None)):
        with pytest.raises(ConfigError, match="this run computes on no GPU"):
            await train(tmp_path, *PROFILED, base=base, prompts=prompts, write=False)
    notes: list[str] = []
    async with ThreadLane("gpu") as lane:
        profiler = StepProfiler(config_of(tmp_path, *PROFILED), lane, torch.device("cuda", 0), notes.append)
        await profiler.at(0)
        await profiler.close(0)
    assert notes == ["telemetry.profile: nothing was profiled: the run ended at version 0 and had none of steps 2 to 2"]


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


async def test_a_step_tells_its_share_of_the_peak(tmp_path: Path) -> None:
    async with Runtime(config_of(tmp_path, "train.max_steps=1"), write=False) as runtime:
        runtime.built.peak_flops = 1e20
        reports = runtime.steps()
        await runtime.run()
        assert 0 < (await anext(reports)).metrics["perf/mfu"] < 1e-6


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
