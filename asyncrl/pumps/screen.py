"""What happens to a scored group before it may be trained: length shaping, then the filters that drop and refill.

A dropped group gives its slot back at once, so the next prompt is admitted for the same step: zero-signal groups are
taken out of N and replaced (DAPO's dynamic sampling). The reservation rule covers the newcomer as it covers any fresh
group: its deadline is never before the open step, so nothing waits for a place that cannot come, and no age grows.
Not for ever: a step drops at most `rollout.max_refills x groups_per_step` groups (per rank); what comes after that is
kept, so that a task that is solved, or hopeless, still ends its steps. (verl's `max_num_gen_batches` ends the run there.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.algorithms.advantages import soft_overlong
from asyncrl.config.schema import RewardConfig
from asyncrl.types import Group, Trajectory

from .pipeline import Rooms
from .signal import group_rewards

OVERLONG = "overlong"  # the component that shaping adds
NO_SIGNAL, TOO_HARD, TOO_EASY = "no signal", "too hard", "too easy"


def shaped(trajectory: Trajectory, reward: RewardConfig, max_tokens: int) -> Trajectory:
    """With the soft overlong punishment as a component, where `reward.overlong_cache` asks for it."""
    if reward.overlong_cache is None:
        return trajectory
    value = soft_overlong(trajectory.completion_length, max_tokens, reward.overlong_cache)
    return replace(
        trajectory,
        reward=(trajectory.reward or 0.0) + reward.overlong_weight * value,
        components={**trajectory.components, OVERLONG: value},
    )


class Screen:
    """Drops the scored groups of configured runs that are not worth a place. Used from the loop thread."""

    def __init__(self, rooms: Rooms, saw: Callable[[Group], None] = lambda group: None) -> None:
        """`saw` hears of every group that is dropped here (the re-roll wants to know of failed prompts)."""
        self._rooms = rooms
        self._saw = saw
        self._turn = rooms.ledger.turn
        self._dropped = 0  # in this turn

    async def passes(self, group: Group) -> bool:
        """False: the group was dropped and counted, its slot is free again."""
        reason = self.reason(group)
        if reason is None:
            return True
        rooms, rollout = self._rooms, self._rooms.config.rollout
        if rooms.ledger.turn != self._turn:
            self._turn, self._dropped = rooms.ledger.turn, 0
        if self._dropped >= rollout.max_refills * rollout.groups_per_step:
            rooms.counters["filter/kept"] += 1
            rooms.recorder.count("filter/kept")
            return True
        self._dropped += 1
        if await rooms.book.end(group.group_id, "dropped", reason):
            rooms.counters[f"filter/{reason}"] += 1
            self._saw(group)
        return False

    def reason(self, group: Group) -> str | None:
        """Why the filters refuse the group; None where they do not."""
        rollout = self._rooms.config.rollout
        if rollout.dynamic_sampling and not self._has_signal(group):
            return NO_SIGNAL
        whole = rollout.filter_by == "reward"
        values = [t.reward if whole else t.components.get(rollout.filter_by) for t in group.trajectories]
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = sum(known) / len(known)
        if rollout.min_mean_reward is not None and mean < rollout.min_mean_reward:
            return TOO_HARD
        if rollout.max_mean_reward is not None and mean > rollout.max_mean_reward:
            return TOO_EASY
        return None

    def _has_signal(self, group: Group) -> bool:
        rooms, name = self._rooms, self._rooms.config.rollout.filter_by
        if name == "reward":
            return rooms.advantage.has_signal(group_rewards(group, rooms.weights, rooms.config.reward.scale_adv_by_len))
        values = {t.components.get(name) for t in group.trajectories} - {None}
        return len(values) > 1
