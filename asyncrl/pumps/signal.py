"""From scored groups to advantages: what the train pump asks about rewards.

    rewards, components --(x length, `reward.scale_adv_by_len`)--> estimator --> members that are to count 0 --> advantages

The order is Atropos's: lengths before the group is compared, `set_advantage_to_zero` after.

A statistic of the whole step is one of all ranks: each tells the others its numbers (a few floats a completion, never texts),
all put them in the order of the group ids, and each takes the advantages of its own groups out of the same result. So they
are the same to the last bit however the groups lie on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator, GroupRewards
from asyncrl.records.check import SILENT
from asyncrl.types import Group, Microbatch

from .metrics import Gather

Advantages = dict[int, npt.NDArray[np.float64]]  # by group id, [G]


def group_rewards(group: Group, weights: Mapping[str, float], scale_by_length: bool) -> GroupRewards:
    """The numbers of a group as estimators take them. `weights`: of the components, by name."""
    lengths = [int(t.mask.sum()) for t in group.trajectories]
    factors = lengths if scale_by_length else [1] * len(lengths)

    def scaled(values: Sequence[float | None]) -> list[float | None]:
        return [None if v is None else v * factor for v, factor in zip(values, factors, strict=True)]

    names = dict.fromkeys(name for t in group.trajectories for name in t.components)
    components = {name: scaled([t.components.get(name) for t in group.trajectories]) for name in names}
    return GroupRewards(scaled([t.reward for t in group.trajectories]), components, weights, lengths)


def counted_only(groups: Sequence[Group]) -> Microbatch:
    """A microbatch without a token that brings nothing but the counts of `groups`, which need not run."""
    none, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    trajectories = [t for group in groups for t in group.trajectories]
    return Microbatch(
        tokens=none,
        positions=none,
        prefix_start=none,
        prefix_length=none,
        suffix_start=none,
        suffix_length=none,
        suffix_tree=none,
        source=none,
        target=none,
        sequence=none,
        sampler_logprobs=floats,
        temperature=floats,
        advantages=floats,
        versions=np.zeros(0, np.int32),
        group_ids=none,
        members=none,
        skipped_tokens=sum(int(t.mask.sum()) for t in trajectories),
        skipped_sequences=len(trajectories),
    )


@dataclass(frozen=True, slots=True)
class RewardReader:
    """How this run reads rewards."""

    estimator: Estimator
    weights: Mapping[str, float]  # of the components, by name
    scale_by_length: bool  # `reward.scale_adv_by_len`

    def _numbers(self, group: Group) -> GroupRewards:
        return group_rewards(group, self.weights, self.scale_by_length)

    def has_signal(self, group: Group) -> bool:
        """As `Estimator.has_signal`."""
        return self.estimator.has_signal(self._numbers(group))

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Of `groups`: all groups of the step where the estimator needs the whole step, else any of them.

        A member whose metadata says `set_advantage_to_zero` (`SILENT`) gets 0; the others keep what the comparison with it gave
        them.
        """
        return _by_group(groups, self.estimator.of_step([self._numbers(group) for group in groups]))

    async def advantages_over_ranks(self, groups: Sequence[Group], gather: Gather, rank: int) -> Advantages:
        """The same, where the estimator needs the whole step and `groups` are those of this rank, perhaps none. A
        collective. Errors: whatever it raises when a rank is gone."""
        mine = [(group.group_id, self._numbers(group)) for group in groups]
        return _by_group(groups, of_rank(self.estimator, await gather(mine), rank))


def of_rank(
    estimator: Estimator, parts: Sequence[Sequence[tuple[int, GroupRewards]]], rank: int
) -> list[npt.NDArray[np.float64]]:
    """[G] of every group of `parts[rank]`, with the statistics of all parts. `parts`: by rank, (group id, its rewards)."""
    places = [(group_id, r, i) for r, part in enumerate(parts) for i, (group_id, _) in enumerate(part)]
    places.sort()  # as one rank sorts them: the rounding of the sums depends on the order
    values = estimator.of_step([parts[r][i][1] for _, r, i in places])
    found = {i: value for (_, r, i), value in zip(places, values, strict=True) if r == rank}
    return [found[i] for i in range(len(parts[rank]))]


def _by_group(groups: Sequence[Group], values: Sequence[npt.NDArray[np.float64]]) -> Advantages:
    result: Advantages = {}
    for group, advantage_G in zip(groups, values, strict=True):
        silent_G = np.array([bool(t.metadata.get(SILENT)) for t in group.trajectories])
        result[group.group_id] = np.where(silent_G, 0.0, advantage_G)
    return result
