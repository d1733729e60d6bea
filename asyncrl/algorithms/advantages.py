"""Advantage estimators, and the weighted sum of reward components. Uses numpy only.

All estimators but `gdpo` use the weighted sum of the reward components (TRL's
`multi_objective_aggregation="sum_then_normalize"`). `gdpo` normalises each component first (`normalize_then_sum`). Estimators with
statistics of the whole *step* are refused if groups are trained as they arrive, because the advantages of a group would depend
on the order of arrival.

A member with a reward of None or NaN is *unscorable*: no reward function applied to the completion. The member has advantage 0, and
no statistic includes its reward. A group with fewer than two scorable members has no baseline. With `alone=False` an estimator of
one group gives all members of such a group advantages of 0. Their tokens and sequences count in the divisor of the loss.
If an estimator of one group subtracts the group's mean, equal rewards give advantages of exactly 0, without a rounding error. So
code can test with `== 0` whether a group has a signal.

To add an estimator, write a function under `of_group` or `of_step`, and add it to `ALL`.

Shape legend: G members of a group, in member order. All arrays are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .method import Conflict, Method

STD_EPSILON = 1e-4

Float64Array: TypeAlias = npt.NDArray[np.float64]
Rewards: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating]
# (rewards) -> advantages, or (rewards, settings) for an estimator with `Estimator.settings`.
AdvantageFn: TypeAlias = Callable[..., Float64Array]


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """One group, for `Estimator.of_step` and `has_signal`. A component without a weight has weight 1."""

    rewards: Sequence[float | None]  # [G] weighted sums of the components
    components: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # name -> [G]
    weights: Mapping[str, float] = field(default_factory=dict)
    lengths: Sequence[int] = ()  # [G] trained tokens: sampled and not masked


BatchAdvantageFn: TypeAlias = Callable[..., list[Float64Array]]  # (groups) -> advantages, or (groups, settings)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator: a function of one group (`group`), or a function of all groups of a step (`batch`)."""

    name: str
    group: AdvantageFn | None = None
    batch: BatchAdvantageFn | None = None
    alone: bool = False  # whether the estimator has advantages for a group of one
    conflicts: tuple[Conflict, ...] = ()
    settings: type[Method] | None = None  # an instance is the function's second argument

    @property
    def doc(self) -> str:
        """The docstring of the function: formula and paper."""
        return (self.batch if self.group is None else self.group).__doc__ or ""

    def with_settings(self, values: Mapping[str, Any]) -> Estimator:
        """The estimator with its settings from `values`: flat name -> value. Other values are ignored."""
        if self.settings is None:
            return self
        settings, group, batch = self.settings.from_values(values), self.group, self.batch
        if group is not None:
            return replace(self, group=lambda rewards: group(rewards, settings))
        assert batch is not None
        return replace(self, batch=lambda groups: batch(groups, settings))

    @property
    def needs_whole_step(self) -> bool:
        """Whether all groups of a step must be complete before the first group is trained."""
        return self.group is None

    def __call__(self, rewards_G: Rewards) -> Float64Array:
        """Rewards of one group [G] -> advantages [G]. Only for an estimator with `group`."""
        assert self.group is not None, f"{self.name} needs all groups of the step: call `of_step`"
        return self.group(rewards_G)

    def of_step(self, groups: Sequence[GroupRewards]) -> list[Float64Array]:
        """The advantages [G] of each group. If `needs_whole_step`, `groups` must be all groups of the step."""
        if self.batch is not None:
            return self.batch(groups)
        return [self(group.rewards) for group in groups]

    def has_signal(self, group: GroupRewards) -> bool:
        """Whether an advantage of the group differs from 0. For an estimator with `batch`: whether members differ in the reward or
        in a component."""
        if self.group is not None:
            return bool(self.group(group.rewards).any())
        return any(has_different_values(values) for values in (group.rewards, *group.components.values()))


def of_group(**options: Any) -> Callable[[AdvantageFn], Estimator]:
    """A decorator that makes an estimator from a function of one group's rewards. The function's name is the name of the estimator.
    `options`: `alone`, `conflicts` and `settings` of `Estimator`."""
    return lambda function: Estimator(function.__name__, group=function, **options)


def of_step(**options: Any) -> Callable[[BatchAdvantageFn], Estimator]:
    """A decorator like `of_group`, for a function of all groups of a step. `Estimator.of_step` calls the function."""
    return lambda function: Estimator(function.__name__, batch=function, **options)


def as_rewards(rewards_G: Rewards) -> Float64Array:
    """[G] float64 with NaN for unscorable members. Errors: ValueError for an infinite reward."""
    values_G = np.asarray([math.nan if r is None else r for r in rewards_G], dtype=np.float64)
    if np.isinf(values_G).any():
        raise ValueError(f"rewards of a group must be finite, None or NaN; found {values_G.tolist()}")
    return values_G


def has_different_values(values: Rewards) -> bool:
    """Whether two scorable values differ."""
    scored = as_rewards(values)
    scored = scored[~np.isnan(scored)]
    return scored.size >= 2 and not bool((scored == scored[0]).all())


# -- estimators of one group -------------------------------------------------------------------------------------------


@of_group()
def grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: centred and divided by the group's standard deviation, `(r - mean) / (std + 1e-4)`.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2. The std is unbiased (divisor n - 1), and the epsilon is
    TRL's (`scale_rewards="group"`). The other `grpo_*` estimators have another mean, std or epsilon.
    """
    return _scale(rewards_G, epsilon=STD_EPSILON)


@of_group(alone=True)
def grpo_verl(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / (std + 1e-6)` with the unbiased std. A group of one has mean 0 and std 1, as in verl."""
    return _scale(rewards_G, epsilon=1e-6, std_alone=1.0)


@of_group()
def grpo_async(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / (std + 1e-8)` with the population std (divisor n), as in TRL's async_grpo and torchtitan."""
    return _scale(rewards_G, epsilon=1e-8, ddof=0)


@of_group(alone=True)
def grpo_atropos(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `(r - mean) / max(std, 1e-8)` with the population std. In a group of one the advantage is the reward."""
    return _scale(rewards_G, min_divisor=1e-8, ddof=0, std_alone=1.0)


@of_group()
def grpo_nemo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: mean and std of the *other* members, `(r - mean_others) / (std_others + 1e-6)`.

    The std is unbiased. If the std is 0, or there is only one other member, the difference is not divided.
    NeMo-RL's default (leave-one-out baseline, normalised rewards), with groups by id instead of by prompt text.
    """
    advantage_G = rloo(rewards_G)
    values_G = as_rewards(rewards_G)
    for i in np.flatnonzero(~np.isnan(values_G)):
        others = np.delete(values_G, i)
        others = others[~np.isnan(others)]
        if others.size >= 2 and has_different_values(others):
            advantage_G[i] /= float(others.std(ddof=1)) + 1e-6
    return advantage_G


@of_group()
def dr_grpo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `r - mean`. A division by the std would raise the weight of easy and of hard prompts.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2. TRL: `scale_rewards="none"`.
    """
    return _centre(rewards_G)[0]


@of_group()
def rloo(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: `r_i - mean(r_j, j != i)`, the leave-one-out baseline. With n scorable members: `n / (n - 1)` times `dr_grpo`.

    Papers: Ahmadian et al., "Back to Basics" (arXiv:2402.14740), section 2.2; Kool et al. (2019). TRL: RLOOTrainer with
    `normalize_advantages=False`.
    """
    centred_G, _ = _centre(rewards_G)
    scorable = int((~np.isnan(as_rewards(rewards_G))).sum())
    return centred_G * (scorable / (scorable - 1)) if scorable > 1 else centred_G


@of_group(alone=True)
def none(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: the rewards, without a baseline (REINFORCE, Williams 1992). An unscorable member has advantage 0."""
    return np.nan_to_num(as_rewards(rewards_G))


@of_group(
    alone=True,
    conflicts=(
        Conflict(
            "rollout.filter.dynamic_sampling",
            "which makes all advantages 0, so dynamic sampling would drop every group; choose one of the two",
            when=lambda context: (
                context.at("rollout.filter.dynamic_sampling") and context.at("rollout.filter.by") == "reward"
            ),
        ),
    ),
)
def zero(rewards_G: Rewards) -> Float64Array:
    """[G] -> [G]: all 0. For a control experiment, in which the reward curve must stay flat."""
    return np.zeros_like(as_rewards(rewards_G))


# -- estimators of all groups of a step --------------------------------------------------------------------------------


@of_step()
def grpo_batch(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`(r - mean(group)) / (std(step) + 1e-4)` with the unbiased std: TRL's `scale_rewards="batch"`.

    Paper: Liu et al., "Part I: Tricks or Traps?" (arXiv:2508.08221), which finds this estimator the most robust.
    """
    rewards = np.concatenate([as_rewards(group.rewards) for group in groups]) if groups else np.zeros(0)
    std = _std(rewards[~np.isnan(rewards)])
    return [_centre(group.rewards)[0] / (std + STD_EPSILON) for group in groups]


@of_step(
    conflicts=(
        Conflict(
            "algorithm.kl.place",
            "which reads the components and not their sum, so the KL would be lost; set kl.place=loss or another advantage",
            when=lambda context: context.at("algorithm.kl.coef") > 0 and context.at("algorithm.kl.place") == "reward",
        ),
    )
)
def gdpo(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """Each component is normalised in its group. The weighted sum of the components is normalised over the step.

        z_k,i = (c_k,i - mean_k) / (std_k + 1e-4) in the group      s_i = sum_k w_k z_k,i
        A_i = (s_i - mean(s)) / (std(s) + 1e-4) over the step

    So a component with a large spread does not outweigh the other components. In a group without components, the reward is the only
    component. Paper: "GDPO: Group reward-Decoupled Normalization Policy Optimization" (arXiv:2601.05242). TRL:
    `multi_objective_aggregation="normalize_then_sum"`.
    """
    sums = [_normalised_sum(group) for group in groups]
    scored = np.concatenate([s[~np.isnan(s)] for s in sums]) if sums else np.zeros(0)
    if not has_different_values(scored):
        return [np.zeros_like(s) for s in sums]
    return [np.nan_to_num((s - scored.mean()) / (_std(scored) + STD_EPSILON)) for s in sums]


@of_step(alone=True)
def reinforce_pp(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`(r - mean) / sqrt(var + 1e-8)`, with mean and variance over all trained tokens of the step.

    Paper: Hu, "REINFORCE++" (arXiv:2501.03262). As in verl (`masked_whiten`, gamma 1), the value of a token is the reward of its
    completion, so long completions have more weight. The variance is unbiased. A step with fewer than two trained tokens has
    advantages of 0.
    """
    return _whiten([as_rewards(group.rewards) for group in groups], groups)


@of_step()
def reinforce_pp_baseline(groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`reinforce_pp` of `r - mean(group)`, for several completions of a prompt (Hu, "REINFORCE++", section 3.2).

    `r - mean(group)` of a group of one is 0 (in verl it is the reward). As in verl, the step's mean is then subtracted, so a group
    with equal rewards may have advantages other than 0.
    """
    values = []
    for group in groups:
        centred_G = _centre(group.rewards)[0]
        centred_G[np.isnan(as_rewards(group.rewards))] = np.nan
        values.append(centred_G)
    return _whiten(values, groups)


ALL: tuple[Estimator, ...] = (
    grpo, grpo_verl, grpo_async, grpo_atropos, grpo_nemo, dr_grpo, rloo, none, zero, grpo_batch, gdpo, reinforce_pp,
    reinforce_pp_baseline,
)  # fmt: skip


# -- rewards -----------------------------------------------------------------------------------------------------------


def combine_components(components: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The reward of one completion: the sum of `weight x component`, leaving out components that are None or NaN (TRL's nansum).

    None (unscorable) if all components are None or NaN. Errors: ValueError for a component that has no weight or is infinite.
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
    """The length penalty of DAPO (Yu et al., arXiv:2503.14476, eq. 13), in [-1, 0]. All lengths are in tokens.

    The penalty is 0 up to a length of `longest - cache`, falls linearly to -1 at `longest`, and stays -1 for longer completions.
    """
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def _scale(
    rewards_G: Rewards, *, epsilon: float = 0.0, min_divisor: float = 0.0, ddof: int = 1, std_alone: float | None = None
) -> Float64Array:
    """`(reward - mean) / max(std + epsilon, min_divisor)` [G]. If `std_alone` is given, a group of one has mean 0 and this std."""
    values_G = as_rewards(rewards_G)
    if std_alone is not None and values_G.size == 1:
        return np.nan_to_num(values_G) / (std_alone + epsilon)
    centred_G, std = _centre(values_G, ddof)
    divided_G: Float64Array = centred_G / max(std + epsilon, min_divisor)
    return divided_G


def _centre(rewards_G: Rewards, ddof: int = 1) -> tuple[Float64Array, float]:
    """(reward - mean [G], std with divisor n - ddof) of the scorable members. Zeros and 0 if no two of their rewards differ."""
    values_G = as_rewards(rewards_G)
    scorable_G = ~np.isnan(values_G)
    scored = values_G[scorable_G]
    centred_G = np.zeros_like(values_G)
    if not has_different_values(scored):
        return centred_G, 0.0
    centred_G[scorable_G] = scored - scored.mean()
    return centred_G, float(scored.std(ddof=ddof))


def _std(scored: Float64Array) -> float:
    return float(scored.std(ddof=1)) if scored.size >= 2 else 0.0


def _normalised_sum(group: GroupRewards) -> Float64Array:
    """[G]: the weighted sum of the normalised components. NaN for an unscorable member."""
    components = group.components or {"reward": group.rewards}
    total = np.zeros(len(group.rewards))
    unscorable = np.ones(len(group.rewards), dtype=np.bool_)
    for name, values in components.items():
        total += group.weights.get(name, 1.0) * grpo(values)
        unscorable &= np.isnan(as_rewards(values))
    total[unscorable] = np.nan
    return total


def _whiten(values: Sequence[Float64Array], groups: Sequence[GroupRewards]) -> list[Float64Array]:
    """`(value - mean) / sqrt(var + 1e-8)`, where mean and variance count each value once per trained token."""
    # A NaN value gets the weight 0, so mean and variance leave it out.
    pairs = zip(values, groups, strict=True)
    lengths = [np.where(np.isnan(value_G), 0, np.asarray(group.lengths, np.float64)) for value_G, group in pairs]
    flat = np.nan_to_num(np.concatenate(values)) if values else np.zeros(0)
    tokens = np.concatenate(lengths) if lengths else np.zeros(0)
    count = float(tokens.sum())
    if count < 2 or not has_different_values(flat[tokens > 0]):
        return [np.zeros_like(value_G) for value_G in values]
    mean = float((flat * tokens).sum()) / count
    variance = float(((flat - mean) ** 2 * tokens).sum()) / (count - 1)
    return [np.nan_to_num((value_G - mean) / math.sqrt(variance + 1e-8)) for value_G in values]
