"""What happens to a scored group before it may be trained: length shaping, then the filters that drop and refill.

A dropped group gives its slot back at once, so the next prompt is admitted for the same step: zero-signal groups are
taken out of N and replaced (DAPO's dynamic sampling). The reservation rule covers the newcomer as it covers any fresh
group: its deadline is never before the open step, so nothing waits for a place that cannot come, and no age grows.
Not for ever: a step drops at most `rollout.filter.max_refills x groups_per_step` groups (per rank); what comes after that is
kept, so that a task that is solved, or hopeless, still ends its steps. (verl's `max_num_gen_batches` ends the run there.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from asyncrl.algorithms.advantages import soft_overlong
from asyncrl.config.schema_rollouts import OverlongConfig, RolloutConfig
from asyncrl.ports import Ledger
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Trajectory

from .signal import RewardReader

OVERLONG = "overlong"  # the component that shaping adds
NO_SIGNAL, TOO_HARD, TOO_EASY = "no signal", "too hard", "too easy"


def shaped(trajectory: Trajectory, overlong: OverlongConfig) -> Trajectory:
    """With the soft overlong punishment as a component, where `reward.overlong.cache` asks for it. A trajectory without a reward
    has no punishment either: it stays out of every statistic."""
    if overlong.cache is None:
        return trajectory
    assert overlong.max_length is not None  # `resolve` has put a number there
    value = soft_overlong(trajectory.sampled_length, overlong.max_length, overlong.cache)
    if trajectory.reward is None:
        return replace(trajectory, components={**trajectory.components, OVERLONG: None})
    return replace(
        trajectory,
        reward=trajectory.reward + overlong.weight * value,
        components={**trajectory.components, OVERLONG: value},
    )


def unshaped(group: Group, overlong: OverlongConfig) -> Group:
    """The group as it was before `shaped`: a punishment for length is no signal of its own. Rewards are rounded to nine digits
    behind the point, because a difference of two floats would make equal rewards differ."""
    if overlong.cache is None:
        return group
    trajectories = []
    for t in group.trajectories:
        taken = overlong.weight * (t.components.get(OVERLONG) or 0.0)
        components = {name: value for name, value in t.components.items() if name != OVERLONG}
        reward = None if t.reward is None else round(t.reward - taken, 9)
        trajectories.append(replace(t, reward=reward, components=components))
    return replace(group, trajectories=tuple(trajectories))


class Screen:
    """Says which scored groups of any source are not worth a place. Used from the loop thread."""

    def __init__(
        self,
        rollout: RolloutConfig,
        overlong: OverlongConfig,
        ledger: Ledger,
        reader: RewardReader,
        counters: Counter[str],
        recorder: Recorder,
    ) -> None:
        self._rollout = rollout
        self._overlong = overlong
        self._ledger = ledger
        self._reader = reader
        self._counters = counters
        self._recorder = recorder
        self._turn = ledger.turn
        self._dropped = 0  # in this turn

    def refuses(self, group: Group) -> str | None:
        """Why the group is to be dropped; None where it is kept, which may be because the step dropped enough of them."""
        reason = self.reason(group)
        if reason is None:
            return None
        if self._ledger.turn != self._turn:
            self._turn, self._dropped = self._ledger.turn, 0
        if self._dropped >= self._rollout.filter.max_refills * self._rollout.groups_per_step:
            self._counters["filter/kept"] += 1
            self._recorder.count("filter/kept")
            return None
        self._dropped += 1
        return reason

    def dropped(self, reason: str) -> None:
        """The group was dropped for it."""
        self._counters[f"filter/{reason}"] += 1

    def reason(self, group: Group) -> str | None:
        """Why the filters refuse the group; None where they do not. They look at rewards before the shaping, unless `filter.by`
        names its component."""
        filters = self._rollout.filter
        if filters.by != OVERLONG:
            group = unshaped(group, self._overlong)
        if filters.dynamic_sampling and not self._has_signal(group):
            return NO_SIGNAL
        whole = filters.by == "reward"
        values = [t.reward if whole else t.components.get(filters.by) for t in group.trajectories]
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = sum(known) / len(known)
        if filters.min_mean_reward is not None and mean < filters.min_mean_reward:
            return TOO_HARD
        if filters.max_mean_reward is not None and mean > filters.max_mean_reward:
            return TOO_EASY
        return None

    def _has_signal(self, group: Group) -> bool:
        name = self._rollout.filter.by
        if name == "reward":
            return self._reader.has_signal(group)
        values = {t.components.get(name) for t in group.trajectories} - {None}
        return len(values) > 1
