"""Advantages from rewards, by named estimator, and the weighted sum that makes a reward out of components.

Pure functions of numbers, numpy only (no torch): they run where rewards arrive, on a handful of floats per group.

All but `gdpo` take the weighted sum of the components first (TRL's `multi_objective_aggregation="sum_then_normalize"`);
`gdpo` is `normalize_then_sum`. Those whose statistics span the *step* are refused where groups are trained as they
arrive: the numbers of a group would depend on which others happened to be there.

A reward of None or NaN is *unscorable* (every reward function said "not applicable"): its advantage is 0, and it is
left out of all statistics. A group with fewer than two scorable members has no baseline to compare with: all its
advantages are 0 (but those of an estimator that is `alone`), so it teaches nothing, though its tokens and sequences
still count in N. Rewards that are all equal give exactly 0, not the rounding error of their mean, so that "no signal"
can be tested for with `== 0`.

An estimator is a function under `of_group` or `of_step`, which say what it cannot be combined with, and a line in `ALL`.

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

STD_EPSILON = 1e-4

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
        """With its own settings out of `numbers`, by their flat names."""
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


def of_group(**declared: Any) -> Callable[[AdvantageFn], Estimator]:
    """Makes an estimator, under its own name, of a function of one group's rewards. `declared`: `alone`, `conflicts` and
    `settings` of `Estimator`."""
    return lambda function: Estimator(function.__name__, group=function, **declared)


def of_step(**declared: Any) -> Callable[[BatchAdvantageFn], Estimator]:
    """The same of a function of all groups of a step: its statistics span the step."""
    return lambda function: Estimator(function.__name__, batch=function, **declared)


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


# -- of one group ------------------------------------------------------------------------------------------------------


@of_group()
def grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: centred and divided by the group's standard deviation, `(r - mean) / (std + 1e-4)`.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2. The std is the unbiased one (divisor n - 1)
    and the epsilon is TRL's (`scale_rewards="group"`); other code bases differ, see the other `grpo_*`.
    """
    return _scaled(rewards_G, epsilon=STD_EPSILON)


@of_group(alone=True)
def grpo_verl(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / (std + 1e-6)`, unbiased std; a group of one has mean 0 and std 1, as in verl."""
    return _scaled(rewards_G, epsilon=1e-6, std_alone=1.0)


@of_group()
def grpo_async(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / (std + 1e-8)` with the population std (divisor n): TRL's async_grpo, torchtitan."""
    return _scaled(rewards_G, epsilon=1e-8, ddof=0)


@of_group(alone=True)
def grpo_atropos(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / max(std, 1e-8)`, population std; the member of a group of one keeps its raw score."""
    return _scaled(rewards_G, least=1e-8, ddof=0, std_alone=1.0)


@of_group()
def grpo_nemo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: baseline and std over the *other* members, `(r - mean_others) / (std_others + 1e-6)`.

    The std is unbiased over the n - 1 others; where it is 0 or unknown (two members) the difference is not divided.
    NeMo-RL's default (leave-one-out baseline, normalised rewards), with groups by id instead of by prompt text.
    """
    advantage_G = rloo(rewards_G)
    values_G = as_rewards(rewards_G)
    for i in np.flatnonzero(~np.isnan(values_G)):
        others = np.delete(values_G, i)
        others = others[~np.isnan(others)]
        if others.size >= 2 and differ(others):
            advantage_G[i] /= float(others.std(ddof=1)) + 1e-6
    return advantage_G


@of_group()
def dr_grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: centred only, `r - mean`. Easy and hard prompts are not weighed up (TRL: `scale_rewards="none"`).

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    """
    return _centred(rewards_G)[0]


@of_group()
def rloo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: leave-one-out, `r_i - mean(r_j, j != i)`, which is `n / (n - 1)` times `dr_grpo`.

    Paper: Ahmadian et al., "Back to Basics" (arXiv:2402.14740), section 2.2; Kool et al. (2019). As TRL's RLOOTrainer
    with `normalize_advantages=False`.
    """
    centred_G, _ = _centred(rewards_G)
    scorable = int((~np.isnan(as_rewards(rewards_G))).sum())
    return centred_G * (scorable / (scorable - 1)) if scorable > 1 else centred_G


@of_group(alone=True)
def none(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: the rewards themselves, without a baseline (Williams 1992, REINFORCE); unscorable ones 0."""
    return np.nan_to_num(as_rewards(rewards_G))


@of_group(
    alone=True,
    conflicts=(
        Conflict(
            "rollout.filter.dynamic_sampling",
            "which makes all advantages 0, and groups without one are what is dropped; choose one",
            when=lambda around: (
                around.at("rollout.filter.dynamic_sampling") and around.at("rollout.filter.by") == "reward"
            ),
        ),
    ),
)
def zero(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: all 0. The control experiment: with it a reward curve has to stay flat."""
    return np.zeros_like(as_rewards(rewards_G))


# -- of all groups of a step -------------------------------------------------------------------------------------------


@of_step()
def grpo_batch(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """Centred by group, divided by `std + 1e-4` of all rewards of the step (unbiased): TRL's `scale_rewards="batch"`.

    Paper: Liu et al., "Part I: Tricks or Traps?" (arXiv:2508.08221), which finds this one the most robust.
    """
    rewards = np.concatenate([as_rewards(group.rewards) for group in groups]) if groups else np.zeros(0)
    std = _std(rewards[~np.isnan(rewards)])
    return [_centred(group.rewards)[0] / (std + STD_EPSILON) for group in groups]


@of_step(
    conflicts=(
        Conflict(
            "algorithm.kl.place",
            "which reads the components and not their sum: the KL would be lost; set kl.place=loss or another advantage",
            when=lambda around: around.at("algorithm.kl.coef") > 0 and around.at("algorithm.kl.place") == "reward",
        ),
    )
)
def gdpo(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """Every component is normalised on its own, then summed by weight, then normalised over the step.

        z_k,i = (c_k,i - mean_k) / (std_k + 1e-4) in the group      s_i = sum_k w_k z_k,i
        A_i = (s_i - mean(s)) / (std(s) + 1e-4) over the step

    So a component with a large spread does not drown the others. Paper: "GDPO: Group reward-Decoupled Normalization
    Policy Optimization" (arXiv:2601.05242); TRL's `multi_objective_aggregation="normalize_then_sum"`. A group without
    components counts its reward as the only one.
    """
    sums = [_normalised_sum(group) for group in groups]
    scored = np.concatenate([s[~np.isnan(s)] for s in sums]) if sums else np.zeros(0)
    if not differ(scored):
        return [np.zeros_like(s) for s in sums]
    return [np.nan_to_num((s - scored.mean()) / (_std(scored) + STD_EPSILON)) for s in sums]


@of_step(alone=True)
def reinforce_pp(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """Whitened over all scored tokens of the step: `(r - mean) / sqrt(var + 1e-8)`; long completions weigh more.

    Paper: Hu, "REINFORCE++" (arXiv:2501.03262). Statistics as in verl (`masked_whiten`, gamma 1): each token carries
    its completion's reward, the variance is unbiased over tokens. A step with fewer than two scored tokens gives 0.
    """
    return _whitened([as_rewards(group.rewards) for group in groups], groups)


@of_step()
def reinforce_pp_baseline(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`reinforce_pp` of `r - mean(group)`: the variant for several completions a prompt (same paper, section 3.2).

    verl leaves the reward of a group of one as it is; here, as everywhere, a group without a comparison gives 0.
    """
    values = []
    for group in groups:
        centred_G = _centred(group.rewards)[0]
        centred_G[np.isnan(as_rewards(group.rewards))] = np.nan
        values.append(centred_G)
    return _whitened(values, groups)


ALL: tuple[Estimator, ...] = (
    grpo,
    grpo_verl,
    grpo_async,
    grpo_atropos,
    grpo_nemo,
    dr_grpo,
    rloo,
    none,
    zero,
    grpo_batch,
    gdpo,
    reinforce_pp,
    reinforce_pp_baseline,
)


# -- rewards -----------------------------------------------------------------------------------------------------------


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


def soft_overlong(length: int, longest: int, cache: int) -> float:
    """The length penalty of DAPO (Yu et al., arXiv:2503.14476, eq. 13), in [-1, 0]; lengths in tokens.

    0 up to `longest - cache`, then linearly down to -1 at `longest`, -1 beyond: completions that end shortly before
    the limit are told so, instead of being punished alike only once they are cut.
    """
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def _scaled(
    rewards_G: Rewards, *, epsilon: float = 0.0, least: float = 0.0, ddof: int = 1, std_alone: float | None = None
) -> Float64Array:
    """`(reward - mean) / max(std + epsilon, least)` [G]. `std_alone`: of a group of one, whose mean then is 0."""
    values_G = as_rewards(rewards_G)
    if std_alone is not None and values_G.size == 1:
        return np.nan_to_num(values_G) / (std_alone + epsilon)
    centred_G, std = _centred(values_G, ddof)
    divided_G: Float64Array = centred_G / max(std + epsilon, least)
    return divided_G


def _centred(rewards_G: Rewards, ddof: int = 1) -> tuple[Float64Array, float]:
    """`(reward - mean [G], std with divisor n - ddof)` over the scorable members; zeros where nothing compares."""
    values_G = as_rewards(rewards_G)
    scorable_G = ~np.isnan(values_G)
    scored = values_G[scorable_G]
    centred_G = np.zeros_like(values_G)
    if not differ(scored):
        return centred_G, 0.0
    centred_G[scorable_G] = scored - scored.mean()
    return centred_G, float(scored.std(ddof=ddof))


def _std(scored: Float64Array) -> float:
    return float(scored.std(ddof=1)) if scored.size >= 2 else 0.0


def _normalised_sum(group: GroupRewards) -> Float64Array:
    """[G]: the weighted sum of the normalised components; NaN where no component applies."""
    components = group.components or {"reward": group.rewards}
    total = np.zeros(len(group.rewards))
    unscorable = np.ones(len(group.rewards), dtype=np.bool_)
    for name, values in components.items():
        total += group.weights.get(name, 1.0) * grpo(values)
        unscorable &= np.isnan(as_rewards(values))
    total[unscorable] = np.nan
    return total


def _whitened(values: Sequence[Float64Array], groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`(value - mean) / sqrt(var + 1e-8)`, both over tokens: every value stands once per scored token."""
    lengths = [np.where(np.isnan(v), 0, np.asarray(g.lengths, np.float64)) for v, g in zip(values, groups, strict=True)]
    flat = np.nan_to_num(np.concatenate(values)) if values else np.zeros(0)
    tokens = np.concatenate(lengths) if lengths else np.zeros(0)
    count = float(tokens.sum())
    if count < 2 or not differ(flat[tokens > 0]):
        return [np.zeros_like(v) for v in values]
    mean = float((flat * tokens).sum()) / count
    variance = float(((flat - mean) ** 2 * tokens).sum()) / (count - 1)
    return [np.nan_to_num((v - mean) / math.sqrt(variance + 1e-8)) for v in values]
