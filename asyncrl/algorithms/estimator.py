"""What an advantage estimator is, and how a function becomes one: under `of_group` or `of_step`. numpy only.

Shape legend: G members of a group, in member order; float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .method import Conflict, Method

Float64Array: TypeAlias = npt.NDArray[np.float64]
Rewards: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating]
AdvantageFn: TypeAlias = Callable[..., Float64Array]  # (rewards), or (rewards, own) where it has settings


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an estimator may look at. `lengths`: scored tokens; a component without a weight has weight 1."""

    rewards: Sequence[float | None]  # [G] the weighted sums
    components: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # name -> [G]
    weights: Mapping[str, float] = field(default_factory=dict)
    lengths: Sequence[int] = ()  # [G]


BatchAdvantageFn: TypeAlias = Callable[..., list[Float64Array]]  # (groups), or (groups, own)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator by name: a function of one group, or of all groups of a step."""

    name: str
    group: AdvantageFn | None = None
    batch: BatchAdvantageFn | None = None
    alone: bool = False  # a group of one may have an advantage
    conflicts: tuple[Conflict, ...] = ()
    settings: type[Method] | None = None  # of its own; the function takes them as its second argument

    @property
    def doc(self) -> str:
        """The docstring of its function: formula and paper."""
        return (self.batch if self.group is None else self.group).__doc__ or ""

    def bound(self, numbers: Mapping[str, Any]) -> Estimator:
        """With its own settings out of `numbers`, by their flat names. Errors: ConfigError for a value out of bounds."""
        if self.settings is None:
            return self
        own = self.settings.made(numbers)
        if self.group is not None:
            return replace(self, group=partial(self.group, own=own))
        assert self.batch is not None
        return replace(self, batch=partial(self.batch, own=own))

    @property
    def needs_whole_step(self) -> bool:
        """Its statistics span the step: every group of it has to be there before the first is trained."""
        return self.group is None

    def __call__(self, rewards_G: Rewards) -> Float64Array:
        """[G] -> [G] of one group. TypeError for an estimator that needs the whole step."""
        if self.group is None:
            raise TypeError(f"advantage {self.name!r} is a statistic of the whole step; call `of_step`")
        return self.group(rewards_G)

    def of_step(self, groups: Sequence[GroupRewards]) -> list[Float64Array]:
        """[G] of every group: all groups of the step, or any of them where `needs_whole_step` is False."""
        if self.batch is not None:
            return self.batch(groups)
        return [self(group.rewards) for group in groups]

    def has_signal(self, group: GroupRewards) -> bool:
        """Whether the group can move the policy: an advantage differs from 0, or will once the step is known."""
        if self.group is not None:
            return bool(self.group(group.rewards).any())
        return any(differ(values) for values in (group.rewards, *group.components.values()))


def of_group(
    *, alone: bool = False, conflicts: tuple[Conflict, ...] = (), settings: type[Method] | None = None
) -> Callable[[AdvantageFn], Estimator]:
    """Makes an estimator, under its own name, of a function of one group's rewards."""

    def make(function: AdvantageFn) -> Estimator:
        return Estimator(function.__name__, group=function, alone=alone, conflicts=conflicts, settings=settings)

    return make


def of_step(
    *, alone: bool = False, conflicts: tuple[Conflict, ...] = (), settings: type[Method] | None = None
) -> Callable[[BatchAdvantageFn], Estimator]:
    """The same of a function of all groups of a step: its statistics span the step."""

    def make(function: BatchAdvantageFn) -> Estimator:
        return Estimator(function.__name__, batch=function, alone=alone, conflicts=conflicts, settings=settings)

    return make


def as_rewards(rewards_G: Rewards) -> Float64Array:
    """[G] float64 with NaN for unscorable members."""
    values_G = np.asarray([math.nan if r is None else r for r in rewards_G], dtype=np.float64)
    if np.isinf(values_G).any():
        raise ValueError(f"rewards of a group must be finite, None or NaN; found {values_G.tolist()}")
    return values_G


def differ(values: Rewards) -> bool:
    """Two scorable values are there that are not equal."""
    scored = as_rewards(values)
    scored = scored[~np.isnan(scored)]
    return scored.size >= 2 and not bool((scored == scored[0]).all())
