"""Names of losses and advantage estimators, and how a named loss is bound to its numbers.

The configuration chooses by these names. An unknown one is a `ConfigError` that names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.types import Normaliser

from . import advantages, losses
from .base import Loss, LossFn, LossInputs, LossSums, MetricSum
from .entropy import entropy_bonus
from .entropy_control import EntropyControl
from .importance import IMPORTANCE_MODES, mismatch_metrics
from .kl import KL_ESTIMATORS, RewardPenalty
from .numbers import Numbers, check_numbers
from .ratios import centre_on_sampler, old_logp, on_policy


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A loss by name: the pure function (formula and paper in its docstring) and its declared normaliser."""

    fn: Callable[[LossInputs, Numbers], LossSums]
    normaliser: Normaliser


LOSSES: Mapping[str, LossEntry] = {
    "grpo": LossEntry(losses.grpo, Normaliser.SEQUENCES),
    "bnpo": LossEntry(losses.bnpo, Normaliser.MICROBATCHES),
    "dapo": LossEntry(losses.dapo, Normaliser.TOKENS),
    "dr_grpo": LossEntry(losses.dr_grpo, Normaliser.SEQUENCES_X_MAX_LENGTH),
    "gspo": LossEntry(losses.gspo, Normaliser.SEQUENCES),
    "cispo": LossEntry(losses.cispo, Normaliser.TOKENS),
    "sapo": LossEntry(losses.sapo, Normaliser.SEQUENCES),
    "luspo": LossEntry(losses.luspo, Normaliser.SEQUENCES),
    "vespo": LossEntry(losses.vespo, Normaliser.TOKENS),
    "reinforce": LossEntry(losses.reinforce, Normaliser.TOKENS),
    "ppo_clip": LossEntry(losses.ppo_clip, Normaliser.TOKENS),
    "one_sided": LossEntry(losses.one_sided, Normaliser.TOKENS),
}

_OF_GROUP = ["grpo", "grpo_verl", "grpo_async", "grpo_atropos", "grpo_nemo", "dr_grpo", "rloo", "none", "zero"]
_OF_STEP = ["grpo_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline"]
ADVANTAGES: Mapping[str, advantages.Estimator] = {
    **{name: advantages.Estimator(name, group=getattr(advantages, name)) for name in _OF_GROUP},
    **{name: advantages.Estimator(name, batch=getattr(advantages, name)) for name in _OF_STEP},
}


def build_loss(name: str, **numbers: Any) -> Loss:
    """The named loss with its `Numbers` bound, and with what every loss has: entropy bonus, entropy, mismatch metrics.

    `old_logprobs="sampler"`: the clip stands around the sampler's log-probs, taken from `sampler_logp_S` whatever
    `old_logp_S` holds, and no importance weight is applied: the two corrections are never applied together.
    `force_on_policy`: the `old` column is not read. `entropy_target`: the trainer binds the coefficient of each step (`at`).
    Errors: ConfigError for an unknown name or a number outside its range.
    """
    entry = LOSSES[_known(name, LOSSES, "loss")]
    n = Numbers(**numbers)
    check_numbers(n)
    _known(n.importance_mode, IMPORTANCE_MODES, "importance mode")
    _known(n.kl_estimator, KL_ESTIMATORS, "KL estimator")
    if n.old_logprobs == "sampler":
        n = replace(n, importance_cap=None, importance_floor=None, importance_veto=None)
    separate = n.has_bonus and (entry.normaliser is not Normaliser.TOKENS or n.top_entropy_quantile < 1)
    target = n.entropy_target
    control = None if target is None else EntropyControl(n.entropy_coef, target, n.entropy_coef_delta)

    def with_bonus(coefficient: float) -> LossFn:
        return partial(_evaluate, entry.fn, n, coefficient, separate)

    return Loss(
        name=name,
        fn=with_bonus(n.entropy_coef),
        normaliser=entry.normaliser,
        needs_reference=n.kl_coef > 0 and n.kl_in == "loss",
        needs_entropy_grad=n.has_bonus,
        needs_old=n.old_logprobs == "recompute" and not n.force_on_policy,
        extra_normaliser=Normaliser.TOKENS if separate else None,
        top_entropy_quantile=n.top_entropy_quantile,
        control=control,
        with_bonus=with_bonus,
    )


def build_reward_penalty(**numbers: Any) -> RewardPenalty | None:
    """The KL penalty on rewards (`kl_in: reward`), from the same numbers; None where there is none."""
    n = Numbers(**numbers)
    return RewardPenalty(n.kl_coef, n.kl_estimator, n.kl_clamp) if n.kl_coef > 0 and n.kl_in == "reward" else None


def build_advantage(name: str) -> advantages.Estimator:
    """The named advantage estimator. Errors: ConfigError for an unknown name."""
    return ADVANTAGES[_known(name, ADVANTAGES, "advantage estimator")]


def _evaluate(
    fn: Callable[[LossInputs, Numbers], LossSums], n: Numbers, coefficient: float, separate: bool, inputs: LossInputs
) -> LossSums:
    trainer_logp_S = inputs.logp_S.detach() if n.old_logprobs == "sampler" else old_logp(inputs)
    metrics = mismatch_metrics(trainer_logp_S, inputs.sampler_logp_S)
    if inputs.entropy_S is not None:
        metrics["entropy"] = MetricSum(inputs.entropy_S.detach().sum(), Normaliser.TOKENS)
    if n.old_logprobs == "sampler":
        inputs = centre_on_sampler(inputs)
    elif n.force_on_policy:
        inputs = on_policy(inputs)
    sums = fn(inputs, n)
    sums = replace(sums, metrics={**sums.metrics, **metrics})
    if not n.has_bonus:
        return sums
    bonus = entropy_bonus(inputs, coefficient)
    return replace(sums, extra=bonus) if separate else replace(sums, total=sums.total + bonus)


def _known(name: str, names: Iterable[str], what: str) -> str:
    known = sorted(names)
    if name in known:
        return name
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}")
