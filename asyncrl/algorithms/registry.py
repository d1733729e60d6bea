"""Finds losses and advantage estimators by name, and binds them to the numbers of their settings.

The configuration chooses by these names. An unknown name is a `ConfigError` that shows the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.types import Normaliser

from . import advantages, losses
from .advantages import Estimator
from .base import Loss, LossFn, LossInputs, LossSums, MetricSum, centre_on_sampler, old_logp, on_policy
from .importance import Importance, mismatch_metrics
from .kl import RewardPenalty
from .losses import LossMethod
from .method import Method, Setting
from .terms import TERMS, Terms, entropy_bonus, loss_sums

LOSSES: dict[str, type[LossMethod]] = {loss.name: loss for loss in losses.ALL}
ADVANTAGES: dict[str, Estimator] = {each.name: each for each in advantages.ALL}
# The user's methods: ("loss" or "advantage", address in the configuration) -> class or estimator (`config/methods.py`)
OWN: dict[tuple[str, str], Any] = {}
_CENTRE_NAMES = ("old_logprobs", "force_on_policy")  # settings that belong to no method


def loss_named(name: str) -> type[LossMethod]:
    """The loss of this name, or the user's of this address, which must be loaded. Errors: ConfigError for an unknown name."""
    return OWN.get(("loss", name)) or LOSSES[_known(name, LOSSES, "loss")]


def advantage_named(name: str) -> Estimator:
    """As `loss_named`, for an advantage estimator."""
    return OWN.get(("advantage", name)) or ADVANTAGES[_known(name, ADVANTAGES, "advantage estimator")]


def methods() -> Iterator[type[Method]]:
    """Every class that has settings: losses, advantages, terms."""
    yield from LOSSES.values()
    yield from (each.settings for each in ADVANTAGES.values() if each.settings is not None)
    yield from TERMS


def settings() -> Mapping[str, Setting]:
    """Every setting of every method by its flat name; those that methods share (`algorithm.clip`) once.

    Errors: TypeError where two methods give one name to different settings.
    """
    found: dict[str, Setting] = {}
    for method in methods():
        for each in method.settings():
            if found.setdefault(each.flat, each) != each:
                raise TypeError(f"{method.__name__}.{each.name}: another setting is named {each.flat} already")
    return found


def readers() -> Mapping[str, tuple[str, ...]]:
    """Flat name of each setting that belongs to losses -> the losses that read it."""
    found: dict[str, tuple[str, ...]] = {}
    for name, loss in LOSSES.items():
        for each in loss.settings():
            found[each.flat] = (*found.get(each.flat, ()), name)
    return found


def make_terms(**numbers: Any) -> Terms:
    """The terms, with settings from `numbers` by their flat names."""
    return Terms(*(term.made(numbers) for term in TERMS))


def make_loss(name: str, **numbers: Any) -> LossMethod:
    """The named loss with its own settings. Errors: ConfigError for an unknown name."""
    made: LossMethod = loss_named(name).made(numbers)
    return made


def build_loss(name: str, **numbers: Any) -> Loss:
    """The named loss bound to its numbers, and with what every loss has: entropy bonus, entropy, mismatch metrics.

    `numbers`: settings by their flat names (`epsilon`, `sapo_temperature_pos`, `kl_coef`); those of other losses are not read.
    `old_logprobs="sampler"`: the clip is centred on the sampler's log-probs, `sampler_logp_S`, whatever `old_logp_S` holds. No
    importance weight is applied then: the two corrections are never applied together.
    `force_on_policy`: the `old` column is not read. `entropy_target`: the trainer binds the coefficient of each step (`at`).
    Errors: ConfigError for an unknown name; TypeError for a number that no method has.
    """
    method = make_loss(name, **numbers)
    _require_known(numbers)
    terms, centre = make_terms(**numbers), numbers.get("old_logprobs", "recompute")
    forced = bool(numbers.get("force_on_policy", False))
    if centre == "sampler":
        terms = replace(terms, importance=Importance(cap=None))
    entropy, top = terms.entropy, terms.top_entropy.quantile
    separate = entropy.apart(method) or (entropy.on and top < 1)

    def with_bonus(coefficient: float) -> LossFn:
        bonus = coefficient if entropy.on else None
        return partial(_evaluate, method, terms, centre, forced, bonus, separate)

    return Loss(
        name=name,
        fn=with_bonus(entropy.coef),
        normaliser=method.normaliser,
        needs_reference=terms.kl.in_loss or method.needs_reference,
        needs_entropy_grad=entropy.on or method.needs_entropy,
        needs_old=method.needs_old and centre == "recompute" and not forced,
        extra_normaliser=Normaliser.TOKENS if separate else None,
        top_entropy_quantile=top,
        control=entropy.control,
        with_bonus=with_bonus,
    )


def build_reward_penalty(**numbers: Any) -> RewardPenalty | None:
    """The KL penalty on rewards, from the same numbers; None unless `kl.place` is reward and the penalty is on."""
    kl = make_terms(**numbers).kl
    return RewardPenalty(kl.coef, kl.estimator, kl.clamp) if kl.on and kl.place == "reward" else None


def build_advantage(name: str, **numbers: Any) -> Estimator:
    """The named advantage estimator. Errors: ConfigError for an unknown name."""
    return advantage_named(name).bound(numbers)


def _evaluate(
    method: LossMethod,
    terms: Terms,
    centre: str,
    forced: bool,
    coefficient: float | None,
    separate: bool,
    inputs: LossInputs,
) -> LossSums:
    trainer_logp_S = inputs.logp_S.detach() if centre == "sampler" else old_logp(inputs)
    metrics = mismatch_metrics(trainer_logp_S, inputs.sampler_logp_S)
    if inputs.entropy_S is not None:
        metrics["entropy"] = MetricSum(inputs.entropy_S.detach().sum(), Normaliser.TOKENS)
    if centre == "sampler":
        inputs = centre_on_sampler(inputs)
    elif forced:
        inputs = on_policy(inputs)
    sums = loss_sums(method, inputs, terms)
    sums = replace(sums, metrics={**sums.metrics, **metrics})
    if coefficient is None:
        return sums
    bonus = entropy_bonus(inputs, coefficient)
    return replace(sums, extra=bonus) if separate else replace(sums, total=sums.total + bonus)


def _require_known(numbers: Iterable[str]) -> None:
    own = [found.settings if isinstance(found, Estimator) else found for found in OWN.values()]
    known = {*settings(), *_CENTRE_NAMES, *(each.flat for method in own if method for each in method.settings())}
    for name in numbers:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(f"no method has a setting {name!r}; did you mean {nearest!r}?")


def _known(name: str, names: Iterable[str], what: str) -> str:
    known = sorted(names)
    spelled = name.lower().replace("-", "_")
    if spelled in known:
        return spelled
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}")
