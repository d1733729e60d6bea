"""Advantages from the rewards of one group, and the weighted sum that makes a reward out of components.

Pure functions of numbers, numpy only (no torch): they run where rewards arrive, on a handful of floats per group.

    advantage_i = reward_i - mean(group)                        dr_grpo
    advantage_i = (reward_i - mean(group)) / (std(group) + 1e-4)    grpo

A reward of None or NaN is *unscorable* (every reward function said "not applicable"): its advantage is 0, and it is
left out of mean and std. A group with fewer than two scorable members (a group of one included) has no baseline to
compare with: all its advantages are 0, so it teaches nothing, though its tokens and sequences still count in N.
Rewards that are all equal give exactly 0, not the rounding error of their mean, so that "no signal" can be tested for
with `== 0`.

Shape legend: G members of a group, in member order; float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Float64Array: TypeAlias = npt.NDArray[np.float64]
Rewards: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating]
AdvantageFn: TypeAlias = Callable[[Rewards], Float64Array]

STD_EPSILON = 1e-4


def grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: centred and divided by the group's standard deviation, `(r - mean) / (std + 1e-4)`.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2. The std is the unbiased one (divisor n - 1)
    and the epsilon is TRL's (`scale_rewards="group"`); other code bases divide by n, or add 1e-6 or 1e-8.
    """
    centred_G, std = _centred(rewards_G)
    return centred_G / (std + STD_EPSILON)


def dr_grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: centred only, `r - mean`. Easy and hard prompts are not weighed up (TRL: `scale_rewards="none"`).

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    """
    return _centred(rewards_G)[0]


def zero(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: all 0. The control experiment: with it a reward curve has to stay flat."""
    return np.zeros_like(_as_rewards(rewards_G))


def combine_components(components: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The reward of one completion: `sum of weight x component` over the components that apply.

    None and NaN are "not applicable" and skipped (TRL's nansum); None comes back where nothing applies: unscorable.
    Errors: ValueError for a component without a weight, or one that is infinite.
    """
    total, applicable = 0.0, False
    for name, value in components.items():
        if name not in weights:
            raise ValueError(
                f"reward component {name!r} has no weight; weights exist for: {', '.join(sorted(weights))}"
            )
        if value is None or math.isnan(value):
            continue
        if math.isinf(value):
            raise ValueError(f"reward component {name!r} is {value}; a reward must be a finite number, or None")
        total += weights[name] * value
        applicable = True
    return total if applicable else None


def _as_rewards(rewards_G: Rewards) -> Float64Array:
    """[G] float64 with NaN for unscorable members."""
    values_G = np.asarray([math.nan if r is None else r for r in rewards_G], dtype=np.float64)
    if np.isinf(values_G).any():
        raise ValueError(f"rewards of a group must be finite, None or NaN; found {values_G.tolist()}")
    return values_G


def _centred(rewards_G: Rewards) -> tuple[Float64Array, float]:
    """`(reward - mean [G], unbiased std)` over the scorable members; zeros where there is nothing to compare."""
    values_G = _as_rewards(rewards_G)
    scorable_G = ~np.isnan(values_G)
    scored = values_G[scorable_G]
    centred_G = np.zeros_like(values_G)
    if scored.size < 2 or (scored == scored[0]).all():
        return centred_G, 0.0
    centred_G[scorable_G] = scored - scored.mean()
    return centred_G, float(scored.std(ddof=1))
