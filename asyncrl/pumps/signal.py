"""From scored groups to advantages: what the train pump asks about rewards.

    rewards, components --(x length, `reward.scale_adv_by_len`)--> estimator --> members that are to count 0 --> advantages

The order is Atropos's: lengths before the group is compared, `set_advantage_to_zero` after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.advantages import Estimator, GroupRewards
from asyncrl.types import Group, Microbatch

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


def step_advantages(
    estimator: Estimator, groups: Sequence[Group], weights: Mapping[str, float], scale_by_length: bool = False
) -> Advantages:
    """Advantages of `groups`: all groups of the step where the estimator needs the whole step, else any of them.

    A member whose metadata says `set_advantage_to_zero` gets 0; the others keep what the comparison with it gave them.
    """
    values = estimator.of_step([group_rewards(group, weights, scale_by_length) for group in groups])
    result: Advantages = {}
    for group, advantage_G in zip(groups, values, strict=True):
        silent_G = np.array([bool(t.metadata.get("set_advantage_to_zero")) for t in group.trajectories])
        result[group.group_id] = np.where(silent_G, 0.0, advantage_G)
    return result
