"""Names of losses and advantage estimators, and how a named loss is bound to its numbers.

The configuration chooses by these names. An unknown one is a `ConfigError` that names the nearest.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from asyncrl.errors import ConfigError
from asyncrl.types import Normaliser

from . import advantages, losses
from .base import Loss, LossInputs, LossSums, MetricSum
from .importance import centre_on_sampler, mismatch_metrics, old_logp


class _ClippedLoss(Protocol):
    def __call__(
        self,
        inputs: LossInputs,
        *,
        epsilon: float,
        epsilon_high: float | None,
        importance_cap: float | None,
        kl_coef: float,
    ) -> LossSums: ...


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A loss by name: the pure function (formula and paper in its docstring) and its declared normaliser."""

    fn: _ClippedLoss
    normaliser: Normaliser


LOSSES: Mapping[str, LossEntry] = {
    "grpo": LossEntry(losses.grpo, Normaliser.SEQUENCES),
    "dapo": LossEntry(losses.dapo, Normaliser.TOKENS),
    "dr_grpo": LossEntry(losses.dr_grpo, Normaliser.SEQUENCES_X_MAX_LENGTH),
    "gspo": LossEntry(losses.gspo, Normaliser.SEQUENCES),
}

_OF_GROUP = ["grpo", "grpo_verl", "grpo_async", "grpo_atropos", "grpo_nemo", "dr_grpo", "rloo", "none", "zero"]
_OF_STEP = ["grpo_batch", "gdpo", "reinforce_pp", "reinforce_pp_baseline"]
ADVANTAGES: Mapping[str, advantages.Estimator] = {
    **{name: advantages.Estimator(name, group=getattr(advantages, name)) for name in _OF_GROUP},
    **{name: advantages.Estimator(name, batch=getattr(advantages, name)) for name in _OF_STEP},
}


def build_loss(
    name: str,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float | None = 2.0,
    kl_coef: float = 0.0,
    old_logprobs: Literal["recompute", "sampler"] = "recompute",
) -> Loss:
    """The named loss with its numbers bound, and with the metrics that every loss has (entropy, mismatch).

    `old_logprobs="sampler"`: the clip stands around the sampler's log-probs, taken from `sampler_logp_S` whatever
    `old_logp_S` holds, and `importance_cap` is ignored: the two corrections are never applied together.
    Errors: ConfigError for an unknown name or a number outside its range.
    """
    entry = LOSSES[_known(name, LOSSES, "loss")]
    _check_positive(epsilon=epsilon, epsilon_high=epsilon_high, importance_cap=importance_cap)
    if not (math.isfinite(kl_coef) and kl_coef >= 0):
        raise ConfigError(f"kl_coef is {kl_coef}; it must be a finite number >= 0")
    if old_logprobs not in ("recompute", "sampler"):
        raise ConfigError(f"old_logprobs is {old_logprobs!r}; it must be 'recompute' or 'sampler'")
    sampler_centred = old_logprobs == "sampler"
    numbers = partial(
        entry.fn,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        importance_cap=None if sampler_centred else importance_cap,
        kl_coef=kl_coef,
    )
    return Loss(
        name=name,
        fn=partial(_evaluate, numbers, sampler_centred),
        normaliser=entry.normaliser,
        needs_reference=kl_coef > 0,
    )


def build_advantage(name: str) -> advantages.Estimator:
    """The named advantage estimator. Errors: ConfigError for an unknown name."""
    return ADVANTAGES[_known(name, ADVANTAGES, "advantage estimator")]


def _evaluate(loss: partial[LossSums], sampler_centred: bool, inputs: LossInputs) -> LossSums:
    trainer_logp_S = inputs.logp_S.detach() if sampler_centred else old_logp(inputs)
    metrics: dict[str, MetricSum] = mismatch_metrics(trainer_logp_S, inputs.sampler_logp_S)
    if inputs.entropy_S is not None:
        metrics["entropy"] = MetricSum(inputs.entropy_S.detach().sum(), Normaliser.TOKENS)
    sums = loss(centre_on_sampler(inputs) if sampler_centred else inputs)
    return replace(sums, metrics={**sums.metrics, **metrics})


def _known(name: str, names: Iterable[str], what: str) -> str:
    known = sorted(names)
    if name in known:
        return name
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}")


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name} is {number}; it must be above 0" + (", or null" if name != "epsilon" else ""))
