"""The metrics of one committed step, from its groups and the trainer's result. Names: the README's table of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.config.schema import Config
from asyncrl.types import FinishReason, Group, StepResult, Trajectory


def step_metrics(
    groups: Sequence[Group],
    advantages: Mapping[int, npt.NDArray[np.float64]],
    version: int,
    result: StepResult,
    seconds: float,
    config: Config,
) -> dict[str, float]:
    """`version`: the policy version at which the groups were trained, before the step. `seconds`: duration of the step."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = dict(result.metrics)
    metrics.update({"loss": result.loss, "optim/grad_norm": result.grad_norm, "optim/lr": result.lr})
    metrics.update({"train/tokens": result.tokens, "train/sequences": result.sequences, "train/groups": len(groups)})
    if trajectories:
        metrics.update(_reward_metrics(groups, trajectories))
        metrics.update(_length_metrics(trajectories))
        metrics.update(_staleness_metrics(groups, trajectories, version))
    sampled = sum(int(t.mask.sum()) for t in trajectories)
    metrics["time/step"] = seconds
    metrics["perf/tokens_per_s"] = sampled / seconds if seconds > 0 else math.nan
    return metrics


def _reward_metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [[t.reward for t in group.trajectories if t.reward is not None] for group in groups]
    flat = np.array([reward for group in rewards for reward in group], dtype=np.float64)
    metrics: dict[str, float] = {}
    if flat.size:
        metrics["reward/mean"] = float(flat.mean())
        metrics["reward/std"] = float(np.mean([np.std(group) for group in rewards if group]))
        metrics["frac_reward_zero_std"] = float(np.mean([np.ptp(group) == 0 for group in rewards if group]))
    for name in sorted({name for t in trajectories for name in t.components}):
        values = [value for t in trajectories if (value := t.components.get(name)) is not None]
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean(values))
            metrics[f"reward/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            metrics[f"reward/{name}/applicable"] = len(values) / len(trajectories)
    return metrics


def _length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = np.array([t.completion_length for t in trajectories])
    trained = np.array([int(t.mask.sum()) for t in trajectories])
    clipped = np.array([t.finish_reason is FinishReason.LENGTH for t in trajectories])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/trained_mean_length": float(trained.mean()),
        "completions/clipped_ratio": float(clipped.mean()),
    }


def _staleness_metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    ages = np.array([version - group.oldest_version for group in groups])
    tokens = np.array([int(t.mask.sum()) for t in trajectories])
    spans = np.array([t.newest_version > t.oldest_version for t in trajectories])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/spanning_token_share": float(tokens[spans].sum() / max(tokens.sum(), 1)),
    }
