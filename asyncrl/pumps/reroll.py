"""Re-roll: prompts of which every completion failed are played again, from a given fraction of the run on.

    a group ends (trained, or dropped by the filters) --all its rewards at most `reward_at_most`--> waits in the cursor
    a step is committed, from `start_fraction` on --at most `groups_per_step` of those that wait, oldest first-->
        next prompts of the cursor, before fresh ones

Failures are remembered from the first step on: what was too hard at the start is what a later policy may learn from.
A prompt that is played again has a group id, and so random numbers, of its own; at most `attempts` times. What waits is
part of the prompt cursor's state: a resumed run goes on with it. Where `max_epochs` ends the run, prompts that fail after
the cursor has come to its end are not played again.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.data.prompts import MAX_FAILED, PromptSource, attempt_of
from asyncrl.types import Group

from .pipeline import Rooms


class Reroll:
    """The policy; the queue is the cursor's. Without prompts (embedding), or with fraction 1, it does nothing."""

    def __init__(self, rooms: Rooms, prompts: PromptSource | None) -> None:
        self._rooms = rooms
        self._config = rooms.config.reroll
        self._prompts = prompts if self._config.start_fraction < 1 else None
        self._start = 0
        if self._prompts is not None:
            self._start = max(1, int(self._config.start_fraction * self._steps(self._prompts)))

    def _steps(self, prompts: PromptSource) -> float:
        """Steps of the whole run; `resolve` has seen to it that one of the two limits is set."""
        train = self._rooms.config.train
        if train.max_steps is not None:
            return train.max_steps
        assert train.max_epochs is not None
        return train.max_epochs * len(prompts) / self._rooms.config.rollout.groups_per_step

    def saw(self, group: Group) -> None:
        """A scored group has ended."""
        if self._prompts is None:
            return
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        failed = bool(rewards) and max(rewards) <= self._config.reward_at_most
        full = self._prompts.failing == MAX_FAILED
        if failed and self._prompts.failed(group.group_id, self._config.attempts):
            self._count("reroll/failed", 1)
            self._count("reroll/evicted", int(full))

    def step_over(self, groups: Iterable[Group]) -> None:
        """A step was committed: look at its groups, and let some of the failed prompts in. Never waits."""
        for group in groups:
            self.saw(group)
        if self._prompts is not None and self._rooms.ledger.turn >= self._start:
            self._count("reroll/admitted", len(self._prompts.reroll(self._config.groups_per_step)))

    def _count(self, name: str, number: int) -> None:
        if number:
            self._rooms.counters[name] += number
            self._rooms.recorder.count(name, number)

    def sums(self, groups: Iterable[Group]) -> dict[str, float]:
        """`reroll/groups`: groups of the step whose prompt was played before; `reroll/waiting`: failed prompts that wait to
        be played again. Of this rank, to be added up."""
        if self._prompts is None:
            return {}
        again = sum(attempt_of(group.group_id) > 0 for group in groups)
        return {"reroll/groups": float(again), "reroll/waiting": float(self._prompts.failing)}
