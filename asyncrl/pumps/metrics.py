"""The metrics of one committed step, over the groups of all ranks.

    groups of a rank --group_rows--> StepPart --gather--> the parts of all ranks --step_metrics--> one dictionary

For rewards, lengths and ages, a part holds numbers of each trajectory or group instead of sums. So these metrics have the same
bits for every distribution of the groups over ranks. A run with one rank uses the same functions with one part.
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
from asyncrl.algorithms.base import reduction_of
from asyncrl.types import FinishReason, Group, StepResult, Trajectory

# Prefixes of the recorder's counts that are summed over ranks.
COUNTED = (
    "engine/",
    "rollout/",
    "endpoint/",
    "door/",
    "loop/blocked",
    "time/reward",
    "reward/",
    "groups/",
    "filter/",
    "reroll/",
    "train/",
    "text/",
    "travel/",
    "own/",
    "tools/",
    "staleness/dropped",
)


class Row(NamedTuple):
    """The numbers of one trajectory. A tuple, because its JSON is short: about 50 bytes without the components."""

    reward: float | None
    # The reward components (None: does not apply), and the result of `logged_numbers`.
    components: dict[str, float | None]
    # The number of sampled tokens. Only sampled tokens are trained.
    tokens: int
    # Whether the completion was cut off at its length limit.
    clipped: bool
    # Whether several versions of the weights sampled the trajectory.
    spans: bool


class GroupRows(NamedTuple):
    """The rows of one group, as a tuple like `Row`. `oldest_version`: -1 if the group has no trained token."""

    group_id: int
    oldest_version: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepPart:
    """One rank's part of the metrics of a step, as plain values that are sent to the other ranks."""

    groups: tuple[GroupRows, ...]
    # Metrics that are summed over ranks, by name.
    sums: Mapping[str, float] = field(default_factory=dict)
    # The age, in versions, of each replayed group. A replayed group was trained in place of one of `groups`.
    replayed_ages: tuple[int, ...] = ()
    # The sum of the KL to the reference over all tokens, if the KL is subtracted from the rewards.
    kl: float | None = None


# Ranks gather three kinds of parts: metrics of a step; (group id, rewards) of groups, for advantages over the whole step; and ids
# of groups, for the division into minibatches.
Part: TypeAlias = StepPart | list[tuple[int, GroupRewards]] | list[int]


def encode_part(part: Part) -> bytes:
    """Encode a part as JSON, which executes no code when decoded. Floats keep their values, also NaN and infinities."""
    return json.dumps(part, default=_plain).encode()


def decode_part(data: bytes) -> Part:
    """The inverse of `encode_part`."""
    plain: Any = json.loads(data)
    if isinstance(plain, dict):
        groups = [
            GroupRows(group_id, oldest, tuple(Row(*row) for row in rows)) for group_id, oldest, rows in plain["groups"]
        ]
        return StepPart(tuple(groups), plain["sums"], tuple(plain["replayed_ages"]), plain["kl"])
    if plain and isinstance(plain[0], int):
        return list(plain)
    return [(group_id, GroupRewards(**rewards)) for group_id, rewards in plain]


def _plain(value: Any) -> Any:
    """For `json.dumps`: turns dataclasses and mappings into dictionaries, and numpy values into Python numbers and lists."""
    if is_dataclass(value):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def group_rows(groups: Sequence[Group]) -> tuple[GroupRows, ...]:
    """The rows of these groups, in the same order."""
    return tuple(GroupRows(g.group_id, g.oldest_version, tuple(_row(t) for t in g.trajectories)) for g in groups)


def logged_numbers(trajectory: Trajectory) -> dict[str, float]:
    """The numbers in `trajectory.extras`: `FUNCTION/NAME` from reward functions, `own/NAME` from environments and programs."""
    return {name: float(value) for name, value in trajectory.extras.items() if isinstance(value, (bool, int, float))}


def _row(trajectory: Trajectory) -> Row:
    components = {name: None if value is None else float(value) for name, value in trajectory.components.items()}
    components.update(logged_numbers(trajectory))
    return Row(
        None if trajectory.reward is None else float(trajectory.reward),
        components,
        trajectory.sampled_length,
        trajectory.finish_reason is FinishReason.LENGTH,
        trajectory.newest_version > trajectory.oldest_version,
    )


def step_metrics(parts: Sequence[StepPart], version: int, result: StepResult, seconds: float) -> dict[str, float]:
    """The metrics of a step, by name. `parts`: the parts of all ranks. `version`: version of the weights before the step.
    `seconds`: duration of the step on this rank."""
    # Sorted by id, because the rounding of the sums depends on the order.
    groups = sorted((group for part in parts for group in part.groups), key=lambda group: group.group_id)
    rows = [row for group in groups for row in group.rows]
    replayed_ages = [age for part in parts for age in part.replayed_ages]
    tokens = sum(row.tokens for row in rows)
    metrics = dict(result.metrics)
    metrics.update({"loss": result.loss, "optim/grad_norm": result.grad_norm, "optim/lr": result.lr})
    metrics.update({"train/tokens": result.tokens, "train/sequences": result.sequences})
    metrics["train/groups"] = len(groups) - len(replayed_ages)
    if len(parts) > 1 and tokens:
        largest = max(sum(row.tokens for group in part.groups for row in group.rows) for part in parts)
        metrics["train/balance"] = largest * len(parts) / tokens
    for name in sorted({name for part in parts for name in part.sums}):
        metrics[name] = math.fsum(part.sums.get(name, 0.0) for part in parts)
    metrics = logged_means(metrics)
    if rows:
        metrics.update(_reward_metrics(groups, rows))
        metrics.update(_length_metrics(rows))
        metrics.update(_staleness_metrics(groups, rows, version))
    # `result.tokens` leaves out tokens masked by overlong filtering, and includes tokens that a term of the loss weighs with 0.
    if result.sequences:
        metrics["completions/trained_mean_length"] = result.tokens / result.sequences
    if replayed_ages:
        metrics["replay/age_mean"], metrics["replay/age_max"] = float(np.mean(replayed_ages)), float(max(replayed_ages))
    if kl_sums := [part.kl for part in parts if part.kl is not None]:
        metrics["kl"] = math.fsum(kl_sums) / max(tokens, 1)
    metrics["time/step"] = seconds
    metrics["perf/tokens_per_s"] = result.tokens / seconds if seconds > 0 else math.nan
    return metrics


def logged_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` with the sums of `Recorder.log` divided by their counts. A count has the name of its sum with `#` appended."""
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
        if values and name.startswith("own/"):
            metrics[name] = float(np.mean(values))
            continue
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean(values))
            metrics[f"reward/{name}/std"] = _std(values)
        # Also written without values: a judge that gave no score must show as 0.
        metrics[f"reward/{name}/applicable"] = len(values) / len(rows)
    return metrics


def _std(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """The standard deviation with Bessel's correction, as TRL 1.16 logs `reward_std` and `rewards/NAME/std`. 0 for a single
    value: TRL has NaN, which JSON cannot hold."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _length_metrics(rows: Sequence[Row]) -> dict[str, float]:
    lengths = np.array([row.tokens for row in rows])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([row.clipped for row in rows])),
    }


def _staleness_metrics(groups: Sequence[GroupRows], rows: Sequence[Row], version: int) -> dict[str, float]:
    # A group without a trained token has no age.
    ages = np.array([version - group.oldest_version for group in groups if group.oldest_version >= 0] or [0])
    spanning = sum(row.tokens for row in rows if row.spans)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/spanning_token_share": float(spanning / max(sum(row.tokens for row in rows), 1)),
    }


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """One result for a pass over a batch. Counts are summed over the optimizer steps of the pass. Every other metric is a mean,
    minimum or maximum over these steps (`reduction_of`). Version and learning rate are those of the last step."""
    if len(results) == 1:
        return results[0]
    metrics: dict[str, float] = {}
    for name in {name: None for result in results for name in result.metrics}:
        values = [result.metrics[name] for result in results if name in result.metrics]
        reduction = reduction_of(name)
        if reduction == "sum":
            # `*_tokens` are counts. Other metrics with this reduction were divided in each step, so their mean is taken.
            metrics[name] = math.fsum(values) / (1 if name.endswith("_tokens") else len(values))
        else:
            metrics[name] = min(values) if reduction == "min" else max(values)
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
