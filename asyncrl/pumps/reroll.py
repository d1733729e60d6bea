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

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config.schema_rollouts import OverlongConfig, RerollConfig
from asyncrl.data.prompts import MAX_FAILED, PromptSource, attempt_of
from asyncrl.ports import Ledger
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group

from .screen import unshaped


@dataclass(frozen=True, slots=True)
class RerollRules:
    """What the re-roll works with."""

    settings: RerollConfig
    overlong: OverlongConfig
    steps: float | None  # of the whole run; `resolve` has seen to it that they are known where prompts are played again
    ledger: Ledger
    recorder: Recorder
    counters: Counter[str]


class Reroll:
    """The policy; the queue is the cursor's. Without prompts (embedding), or with fraction 1, it does nothing."""

    def __init__(self, rules: RerollRules, prompts: PromptSource | None) -> None:
        self._rules = rules
        self._config = rules.settings
        self._prompts = prompts if self._config.start_fraction < 1 else None
        self._start = 0
        if self._prompts is not None:
            assert rules.steps is not None
            self._start = max(1, int(self._config.start_fraction * rules.steps))

    def saw(self, group: Group) -> None:
        """A scored group has ended."""
        if self._prompts is None:
            return
        played = unshaped(group, self._rules.overlong)
        rewards = [t.reward for t in played.trajectories if t.reward is not None]
        failed = bool(rewards) and max(rewards) <= self._config.reward_at_most
        full = self._prompts.failing == MAX_FAILED
        if failed and self._prompts.failed(group.group_id, self._config.attempts):
            self._count("reroll/failed", 1)
            self._count("reroll/evicted", int(full))

    def step_over(self, groups: Iterable[Group]) -> None:
        """A step was committed: look at its groups, and let some of the failed prompts in. Never waits."""
        for group in groups:
            self.saw(group)
        if self._prompts is not None and self._rules.ledger.turn >= self._start:
            self._count("reroll/admitted", len(self._prompts.reroll(self._config.groups_per_step)))

    def _count(self, name: str, number: int) -> None:
        if number:
            self._rules.counters[name] += number
            self._rules.recorder.count(name, number)

    def sums(self, groups: Iterable[Group]) -> dict[str, float]:
        """`reroll/groups`: groups of the step whose prompt was played before; `reroll/waiting`: failed prompts that wait to
        be played again. Of this rank, to be added up."""
        if self._prompts is None:
            return {}
        again = sum(attempt_of(group.group_id) > 0 for group in groups)
        return {"reroll/groups": float(again), "reroll/waiting": float(self._prompts.failing)}
