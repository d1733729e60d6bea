"""The metrics of one committed step, over the groups of all ranks.

    groups of a rank --group_rows--> StepPart --gather--> the parts of all ranks --step_metrics--> one dictionary

A part holds rows, a few numbers for each trajectory, and not sums: the formulas then see what they would see on a single
rank with all these groups, and the result is the same to the last bit however the groups lie on the ranks. One rank takes
the same way with one part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import GroupRewards
from asyncrl.algorithms.base import kind
from asyncrl.types import FinishReason, Group, StepResult, Trajectory

# Counts of the recorder that are summed over ranks.
COUNTED = ("reward/", "groups/", "filter/", "reroll/", "train/", "ledger/", "text/", "own/")


class Row(NamedTuple):
    """One trajectory, as a tuple: it is sent to the other ranks in some 50 bytes and the components."""

    reward: float | None
    # And the numbers among what reward functions logged.
    components: dict[str, float | None]
    # Sampled tokens, and those of them that may be trained.
    length: int
    tokens: int
    # By the limit on its length.
    clipped: bool
    # More than one version sampled it.
    spans: bool


class GroupRows(NamedTuple):
    """One group, as a tuple: see `Row`."""

    group_id: int
    oldest_version: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one rank knows of a step: small, and of plain values, so that it can be sent to the others."""

    groups: tuple[GroupRows, ...]
    # By name; the step's number is the sum over ranks.
    sums: Mapping[str, float] = field(default_factory=dict)
    # In versions, of the replayed groups that took the place of one of `groups`.
    replayed_ages: tuple[int, ...] = ()
    # Sum over the tokens, where the KL is taken off the rewards.
    kl: float | None = None


# What ranks send each other in the course of a step: its metrics, the rewards of their groups by group id (for advantages that
# compare the whole step), or the ids of their groups (for minibatches).
Part: TypeAlias = StepPart | list[tuple[int, GroupRewards]] | list[int]


def packed(part: Part) -> bytes:
    """As JSON, of which nothing is ever executed: the same on the other side to the last bit, NaN and infinities included."""
    return json.dumps(part, default=_plain).encode()


def unpacked(data: bytes) -> Part:
    """The inverse of `packed`."""
    plain: Any = json.loads(data)
    if isinstance(plain, dict):
        groups = [
            GroupRows(number, oldest, tuple(Row(*row) for row in rows)) for number, oldest, rows in plain["groups"]
        ]
        return StepPart(tuple(groups), plain["sums"], tuple(plain["replayed_ages"]), plain["kl"])
    if plain and isinstance(plain[0], int):
        return list(plain)
    return [(group_id, GroupRewards(**rewards)) for group_id, rewards in plain]


def _plain(value: Any) -> Any:
    """Of a dataclass its fields, of a mapping a dict, of numpy's numbers and arrays those of Python."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def group_rows(groups: Sequence[Group]) -> tuple[GroupRows, ...]:
    """The rows of these groups, in their order."""
    return tuple(GroupRows(g.group_id, g.oldest_version, tuple(_row(t) for t in g.trajectories)) for g in groups)


def logged(trajectory: Trajectory) -> dict[str, float]:
    """The numbers among what reward functions logged of it."""
    return {name: float(value) for name, value in trajectory.extras.items() if isinstance(value, (bool, int, float))}


def _row(trajectory: Trajectory) -> Row:
    components = {name: None if value is None else float(value) for name, value in trajectory.components.items()}
    components.update(logged(trajectory))
    return Row(
        None if trajectory.reward is None else float(trajectory.reward),
        components,
        trajectory.sampled_length,
        int(trajectory.mask.sum()),
        trajectory.finish_reason is FinishReason.LENGTH,
        trajectory.newest_version > trajectory.oldest_version,
    )


def step_metrics(parts: Sequence[StepPart], version: int, result: StepResult, seconds: float) -> dict[str, float]:
    """`parts`: one for each rank. `version`: the policy version at which the groups were trained, before the step.
    `seconds`: duration of the step on this rank."""
    # In the order of ids, which is the same wherever they lie: the rounding of the sums depends on it.
    groups = sorted((group for part in parts for group in part.groups), key=lambda group: group.group_id)
    rows = [row for group in groups for row in group.rows]
    ages = [age for part in parts for age in part.replayed_ages]
    tokens = sum(row.tokens for row in rows)
    metrics = dict(result.metrics)
    metrics.update({"loss": result.loss, "optim/grad_norm": result.grad_norm, "optim/lr": result.lr})
    metrics.update({"train/tokens": result.tokens, "train/sequences": result.sequences})
    metrics["train/groups"] = len(groups) - len(ages)
    for name in sorted({name for part in parts for name in part.sums}):
        metrics[name] = math.fsum(part.sums.get(name, 0.0) for part in parts)
    metrics = logged_means(metrics)
    if rows:
        metrics.update(_reward_metrics(groups, rows))
        metrics.update(_length_metrics(rows))
        metrics.update(_staleness_metrics(groups, rows, version))
    # Tokens of N: what overlong filtering masks is not among them, what a term of the loss weighs with 0 is.
    if result.sequences:
        metrics["completions/trained_mean_length"] = result.tokens / result.sequences
    if ages:
        metrics.update({"replay/age_mean": float(np.mean(ages)), "replay/age_max": float(max(ages))})
    if known := [part.kl for part in parts if part.kl is not None]:
        metrics["kl"] = math.fsum(known) / max(tokens, 1)
    metrics["time/step"] = seconds
    metrics["perf/tokens_per_s"] = result.tokens / seconds if seconds > 0 else math.nan
    return metrics


def logged_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Means in the place of the sums and counts of `Recorder.log`."""
    return {name: value / metrics.get(f"{name}#", 1) for name, value in metrics.items() if not name.endswith("#")}


def _reward_metrics(groups: Sequence[GroupRows], rows: Sequence[Row]) -> dict[str, float]:
    rewards = [[row.reward for row in group.rows if row.reward is not None] for group in groups]
    flat = np.array([reward for group in rewards for reward in group], dtype=np.float64)
    metrics = {"reward/applicable": flat.size / len(rows)}
    if flat.size:
        metrics["reward/min"], metrics["reward/max"] = float(flat.min()), float(flat.max())
        metrics["reward/mean"] = float(flat.mean())
        metrics["reward/std"] = _std(flat)
        metrics["frac_reward_zero_std"] = float(np.mean([np.ptp(group) == 0 for group in rewards if group]))
    for name in sorted({name for row in rows for name in row.components}):
        values = [value for row in rows if (value := row.components.get(name)) is not None]
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean(values))
            metrics[f"reward/{name}/std"] = _std(values)
            metrics[f"reward/{name}/applicable"] = len(values) / len(rows)
    return metrics


def _std(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Over the completions of the step, with Bessel's correction, as TRL 1.16 logs `reward_std` and `rewards/NAME/std`. Of a
    single one 0, where TRL has NaN: a line of JSON cannot."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _length_metrics(rows: Sequence[Row]) -> dict[str, float]:
    lengths = np.array([row.length for row in rows])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([row.clipped for row in rows])),
    }


def _staleness_metrics(groups: Sequence[GroupRows], rows: Sequence[Row], version: int) -> dict[str, float]:
    ages = np.array([version - group.oldest_version for group in groups])
    spanning = sum(row.tokens for row in rows if row.spans)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/spanning_token_share": float(spanning / max(sum(row.tokens for row in rows), 1)),
    }


def over_parts(results: Sequence[StepResult]) -> StepResult:
    """What is reported of a pass over a batch: counts are sums over its optimizer steps, everything else means, smallest and
    largest values of them; version and learning rate are those of the last."""
    if len(results) == 1:
        return results[0]
    metrics: dict[str, float] = {}
    for name in {name: None for result in results for name in result.metrics}:
        values = [result.metrics[name] for result in results if name in result.metrics]
        if kind(name) != "sum":
            metrics[name] = min(values) if kind(name) == "min" else max(values)
        else:
            metrics[name] = math.fsum(values) / (1 if name.endswith("_tokens") else len(values))
    last = results[-1]
    metrics["optim/lr"] = last.lr
    return replace(
        last,
        loss=math.fsum(result.loss for result in results) / len(results),
        grad_norm=math.fsum(result.grad_norm for result in results) / len(results),
        tokens=sum(result.tokens for result in results),
        sequences=sum(result.sequences for result in results),
        microbatches=sum(result.microbatches for result in results),
        metrics=metrics,
    )
