"""Length shaping, filters of scored groups, and re-roll of prompts whose completions all failed.

Length shaping comes first. Then the filters drop groups. A dropped group gives its slot back at once, so the next prompt is
admitted for the same step (DAPO's dynamic sampling). On each rank the filters drop at most
`rollout.filter.max_refills x rollout.groups_per_step` groups for a step, and keep the step's further groups. Without this limit the
steps of a solved or hopeless task would never end. (verl's `max_num_gen_batches` ends the run in this case.)

Re-roll plays a prompt again if all its completions failed. It starts after the fraction `reroll.start_fraction` of the run:

    a group ends (trained or dropped by the filters) --rewards, none above `reroll.reward_at_most`--> its prompt waits in the cursor
    a step is committed, after `start_fraction` --at most `reroll.groups_per_step` of the waiting prompts, oldest first-->
        next prompts of the cursor, before fresh prompts

Failures are collected from the first step on: a later policy may learn from prompts that were too hard at the start. A prompt is
played again at most `reroll.attempts` times, each time with a new group id and new random numbers. A checkpoint saves the waiting
prompts. If `max_epochs` ends the run, prompts that fail after the cursor's end are not played again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from asyncrl.algorithms.advantages import soft_overlong
from asyncrl.config.schema_rollouts import FilterConfig, OverlongConfig
from asyncrl.data.prompts import MAX_FAILED, PromptSource, attempt_of
from asyncrl.types import Group, Trajectory

from .building import RewardReader
from .pipeline import Ports

# The component that shaping adds.
OVERLONG = "overlong"
NO_SIGNAL, TOO_HARD, TOO_EASY = "no signal", "too hard", "too easy"


def shape_reward(trajectory: Trajectory, overlong: OverlongConfig) -> Trajectory:
    """If `reward.overlong.cache` is set: add DAPO's soft overlong punishment, -1 to 0, to the components, and add the product of
    punishment and `overlong.weight` to the reward. A trajectory without a reward gets None as the component."""
    if overlong.cache is None:
        return trajectory
    assert overlong.max_length is not None  # `resolve` has set it
    value = soft_overlong(trajectory.sampled_length, overlong.max_length, overlong.cache)
    if trajectory.reward is None:
        return replace(trajectory, components={**trajectory.components, OVERLONG: None})
    return replace(
        trajectory,
        reward=trajectory.reward + overlong.weight * value,
        components={**trajectory.components, OVERLONG: value},
    )


def unshape_group(group: Group, overlong: OverlongConfig) -> Group:
    """The group without the punishment of `shape_reward`. Rewards are rounded to nine decimals, because the addition and
    subtraction of the punishment can make equal rewards differ in the last bits."""
    if overlong.cache is None:
        return group
    trajectories = []
    for t in group.trajectories:
        punishment = overlong.weight * (t.components.get(OVERLONG) or 0.0)
        components = {name: value for name, value in t.components.items() if name != OVERLONG}
        reward = None if t.reward is None else round(t.reward - punishment, 9)
        trajectories.append(replace(t, reward=reward, components=components))
    return replace(group, trajectories=tuple(trajectories))


def refusal(group: Group, filters: FilterConfig, overlong: OverlongConfig, reader: RewardReader) -> str | None:
    """The reason why the filters refuse the group; None if they keep the group. The filters use rewards without the overlong
    punishment, unless `filter.by` is the component of the punishment."""
    if filters.by != OVERLONG:
        group = unshape_group(group, overlong)
    by_reward = filters.by == "reward"
    values = [t.reward if by_reward else t.components.get(filters.by) for t in group.trajectories]
    known = [value for value in values if value is not None]
    if filters.dynamic_sampling:
        has_signal = reader.has_signal(group) if by_reward else len(set(known)) > 1
        if not has_signal:
            return NO_SIGNAL
    if not known:
        return None
    mean = sum(known) / len(known)
    if filters.min_mean_reward is not None and mean < filters.min_mean_reward:
        return TOO_HARD
    if filters.max_mean_reward is not None and mean > filters.max_mean_reward:
        return TOO_EASY
    return None


class Screen:
    """Applies the filters to scored groups of every source, on the thread of the event loop."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._reader = RewardReader.of(ports)
        self._turn = ports.ledger.turn
        self._dropped = 0  # groups that the filters dropped in this turn

    def reason_to_drop(self, group: Group) -> str | None:
        """The reason to drop the group; None to keep it. After the maximum of dropped groups in a turn, every group is kept."""
        ports, config = self._ports, self._ports.config
        reason = refusal(group, config.rollout.filter, config.reward.overlong, self._reader)
        if reason is None:
            return None
        if ports.ledger.turn != self._turn:
            self._turn, self._dropped = ports.ledger.turn, 0
        if self._dropped >= config.rollout.filter.max_refills * config.rollout.groups_per_step:
            ports.recorder.count("filter/kept")
            return None
        self._dropped += 1
        return reason


class Reroll:
    """Decides when failed prompts are played again; the prompt cursor has the queue of failed prompts. Does nothing without prompts
    of the run's data, or if `start_fraction` is 1."""

    def __init__(self, ports: Ports, prompts: PromptSource | None) -> None:
        self._ports = ports
        self._config = config = ports.config.reroll
        self._prompts = prompts if config.start_fraction < 1 else None
        self._start = 0  # the first turn at which prompts are played again
        if self._prompts is not None:
            train = ports.config.train
            # Steps of the whole run. With re-roll the checks require max_steps or max_epochs; the smaller limit ends the run.
            steps_per_epoch = len(self._prompts) / ports.config.rollout.groups_per_step
            steps = min(train.max_steps or math.inf, (train.max_epochs or math.inf) * steps_per_epoch)
            self._start = max(1, int(config.start_fraction * steps))

    def on_group_end(self, group: Group) -> None:
        """A scored group was trained or dropped: queue its prompt if all its completions failed."""
        if self._prompts is None:
            return
        played = unshape_group(group, self._ports.config.reward.overlong)
        rewards = [t.reward for t in played.trajectories if t.reward is not None]
        failed = bool(rewards) and max(rewards) <= self._config.reward_at_most
        full = self._prompts.failed_count == MAX_FAILED
        if failed and self._prompts.add_failed(group.group_id, self._config.attempts) and full:
            self._ports.recorder.count("reroll/evicted")

    def on_step_commit(self, groups: Iterable[Group]) -> None:
        """A step of these groups was committed: some waiting prompts become the next prompts of the cursor. Does not block."""
        for group in groups:
            self.on_group_end(group)
        if self._prompts is not None and self._ports.ledger.turn >= self._start:
            self._prompts.reroll(self._config.groups_per_step)

    def sums(self, groups: Iterable[Group]) -> dict[str, float]:
        """This rank's parts of two metrics, which the caller sums over ranks. `reroll/groups`: groups of the step that played a
        prompt again. `reroll/waiting`: failed prompts that wait to be played again."""
        if self._prompts is None:
            return {}
        again = sum(attempt_of(group.group_id) > 0 for group in groups)
        return {"reroll/groups": float(again), "reroll/waiting": float(self._prompts.failed_count)}
