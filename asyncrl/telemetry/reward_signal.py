"""Do the rewards of a run teach anything? Steps in which no reward differs are counted, and said with a likely reason.

`reward/steps_without_signal` is how many steps in a row, the present one included, had no completion with a reward at
all, one reward for all of their completions, or, where advantages are taken within a group, no group with two different
rewards. The reason is told from the metrics of the step alone, so that the report finds the same one later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

COUNT = "reward/steps_without_signal"
_MOST = 100
FIRST = 3  # steps in a row that are worth a warning; then at twice as many, and so on
# Rewards of groups without a difference still count with these: raw ones, those of the whole step, those of components.
_ACROSS_GROUPS = ("none", "reinforce_pp", "gdpo")

Metrics = Mapping[str, float]


class SignalWatch:
    """Hears of every step, in order. `advantage` and `group_size` are the run's."""

    def __init__(self, advantage: str, group_size: int) -> None:
        self._within_groups = group_size > 1 and advantage not in _ACROSS_GROUPS
        self._count = 0

    def step(self, metrics: Metrics) -> dict[str, float]:
        """The count after this step; nothing where no completion was trained in it."""
        if "reward/applicable" not in metrics:
            return {}
        flat = metrics["reward/applicable"] == 0 or metrics["reward/min"] == metrics["reward/max"]
        if self._within_groups and not flat:
            flat = metrics["frac_reward_zero_std"] == 1
        self._count = self._count + 1 if flat else 0
        return {COUNT: float(self._count)}


def warning(metrics: Metrics) -> str | None:
    """The line for people at the FIRST step of a row and at every doubling; None at all others."""
    count = int(metrics.get(COUNT, 0.0))
    times = count // FIRST
    if count == 0 or count % FIRST or times & (times - 1):
        return None
    return f"warning: {describe(metrics)}"


def describe(metrics: Metrics) -> str:
    """What the rewards of a step without a signal were, for how long, and why that is likely so."""
    count = int(metrics[COUNT])
    steps = f"for {count} steps in a row" if count > 1 else "in this step"
    applicable = metrics["reward/applicable"]
    if applicable == 0:
        what = f"no completion had a reward {steps} (every reward function returned None)"
    elif metrics["reward/min"] == metrics["reward/max"]:
        what = f"every reward was {metrics['reward/max']:g} {steps}"
    else:
        what = f"no group had two different rewards {steps}"
    return f"{what}, so nothing is learned from them; likely reason: {_reason(metrics)}"


def _reason(metrics: Metrics) -> str:
    failed = {name: n for name, n in metrics.items() if name.startswith("reward/") and name.endswith("/errors") and n}
    if failed:
        names = ", ".join(name.removeprefix("reward/").removesuffix("/errors") for name in failed)
        return f"calls of {names} failed and were not counted as rewards (reward.on_error); the log has the errors"
    if metrics.get("completions/max_length", 2.0) <= 1:
        return (
            "every completion ends with its first token; see with `asyncrl prompts` whether the prompts end where an answer "
            "begins"
        )
    if metrics.get("completions/clipped_ratio") == 1:
        return "every completion was cut at rollout.max_tokens before it could end with an answer; raise it"
    see = "; compare completions in rollouts/ with what the function looks for"
    if metrics["reward/applicable"] == 0:
        return f"the functions find nothing that they apply to (a column, or a form of the answer){see}"
    if metrics["reward/min"] != metrics["reward/max"]:
        return (
            "all completions of a prompt are alike (a temperature or top_p that is too low, a model that collapsed), or the "
            "prompts are each far too easy or too hard (rollout.filter.dynamic_sampling replaces such groups)"
        )
    if metrics["reward/max"] > 0:
        return f"the prompts are solved already, or the function gives the same for whatever is written{see}"
    return f"the prompts are too hard, or the function expects another form of the answer{see}"


class Warnings:
    """For the report: each run of steps whose rewards taught nothing, as it was at its last step. The last `_MOST` of them."""

    def __init__(self) -> None:
        self._found: deque[str] = deque(maxlen=_MOST)
        self._last: Metrics | None = None  # the line before that has a count

    def add(self, row: Metrics) -> None:
        """The lines in order."""
        count = row.get(COUNT)
        if count is None:
            return
        if self._last is not None and count <= self._last[COUNT]:
            self._end(self._last)
        self._last = row

    def ended(self) -> list[str]:
        """One sentence each; no line will follow."""
        if self._last is not None:
            self._end(self._last)
            self._last = None
        return list(self._found)

    def _end(self, row: Metrics) -> None:
        if row[COUNT] >= FIRST:
            self._found.append(f"Until step {row['step']}: {describe(row)}.")
