"""The yardsticks of `perf/mfu` and `perf/limit_share`: what a step needed, by hand, and what the device could do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.models.policy import PolicyModel
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.rates import Rates, measure_rates, needed_flop, stated_peak
from asyncrl.types import FinishReason, Group, Prompt, StepResult, Ticket, Trajectory

BODY, HEAD, PROMPT = 1000, 300, 5
POLICY = cast(
    PolicyModel,
    SimpleNamespace(matmul_parameters=BODY + HEAD, head=SimpleNamespace(weight=torch.zeros(30, 10))),
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
        (["algorithm.kl_coef=0.01"], 2 + 6 + 2),  # the reference model's forward
        (["algorithm.updates_per_batch=3"], 2 + 3 * 6),
    ],
)
def test_more_passes_where_the_algorithm_asks_for_them(overrides: list[str], passes: int) -> None:
    steps = report(trajectory(0, 4))
    assert needed(*overrides, steps=steps) == passes * (BODY * (PROMPT + 4) + HEAD * 4)


def test_a_dry_run_has_no_flop() -> None:
    assert math.isnan(needed_flop(report(trajectory(0, 4)), None, load_config([], [])))


def test_shares_of_what_was_reached_and_of_what_the_maker_states() -> None:
    assert Rates(gemm=4e9, peak=8e9).metrics(2e9, 1.0) == {"perf/limit_share": 0.5, "perf/mfu": 0.25}
    assert math.isnan(Rates(1.0, 1.0).metrics(1.0, 0.0)["perf/mfu"])


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
