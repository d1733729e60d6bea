"""Finds losses and advantage estimators by the names that the configuration uses, and binds them to the values of their settings.

An unknown name raises a `ConfigError` that shows the nearest name.
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
from .base import Loss, LossFn, LossInputs, LossSums, MetricSum, old_logp
from .importance import Importance, mismatch_metrics
from .kl import Kl
from .losses import LossMethod
from .method import Method, Setting
from .terms import TERMS, Terms, entropy_bonus, loss_sums

LOSSES: dict[str, type[LossMethod]] = {loss.name: loss for loss in losses.ALL}
ADVANTAGES: dict[str, Estimator] = {estimator.name: estimator for estimator in advantages.ALL}
# Methods of the user, loaded by config/methods.py: ("loss" or "advantage", address like "file.py:name") -> class or estimator.
OWN: dict[tuple[str, str], Any] = {}
# Arguments of `build_loss` that are settings of `algorithm` itself. They choose the old log-probs, on which the clip is centred.
CLIP_CENTRE_SETTINGS = ("old_logprobs", "force_on_policy")


def loss_named(name: str) -> type[LossMethod]:
    """The loss with this name, or the user's loss with this address, if it was loaded. Errors: ConfigError for an unknown name."""
    return OWN.get(("loss", name)) or LOSSES[_require_name(name, LOSSES, "loss")]


def advantage_named(name: str) -> Estimator:
    """The advantage estimator with this name or address, like `loss_named`."""
    return OWN.get(("advantage", name)) or ADVANTAGES[_require_name(name, ADVANTAGES, "advantage estimator")]


def methods() -> Iterator[type[Method]]:
    """All built-in losses, the settings of all built-in advantages, and all terms."""
    yield from LOSSES.values()
    yield from (estimator.settings for estimator in ADVANTAGES.values() if estimator.settings is not None)
    yield from TERMS


def settings() -> Mapping[str, Setting]:
    """Flat name -> setting, for all built-in methods. A setting that several methods share (`algorithm.clip`) appears once."""
    return {setting.flat: setting for method in methods() for setting in method.settings()}


def readers() -> Mapping[str, tuple[str, ...]]:
    """Flat name of a setting -> names of the built-in losses that read the setting."""
    losses_by_setting: dict[str, tuple[str, ...]] = {}
    for name, loss in LOSSES.items():
        for setting in loss.settings():
            losses_by_setting[setting.flat] = (*losses_by_setting.get(setting.flat, ()), name)
    return losses_by_setting


def make_terms(**values: Any) -> Terms:
    """The terms with the settings in `values` (flat name -> value), and defaults for other settings."""
    return Terms(*(term.from_values(values) for term in TERMS))


def make_loss(name: str, **values: Any) -> LossMethod:
    """The loss with this name, with its settings from `values`. Errors: ConfigError for an unknown name."""
    loss: LossMethod = loss_named(name).from_values(values)
    return loss


def build_loss(name: str, **values: Any) -> Loss:
    """The loss with this name for the trainer, with all terms, the entropy bonus, and the metrics of entropy and mismatch.

    `values`: flat name of a setting (`epsilon`, `sapo_temperature_pos`, `kl_coef`) -> value. Settings of other losses are ignored.
    With `old_logprobs="sampler"` the clip is centred on the sampler's log-probs. Importance weights would correct the same
    difference again, and are off. With `force_on_policy` the loss reads no old log-probs, and every ratio is 1. With
    `entropy_target` the trainer must bind the coefficient of each step (`Loss.with_control`).
    Errors: ConfigError for an unknown name; TypeError for a setting that no method has.
    """
    method = make_loss(name, **values)
    _require_known_settings(values)
    terms, centre = make_terms(**values), values.get("old_logprobs", "recompute")
    force_on_policy = bool(values.get("force_on_policy", False))
    if centre == "sampler":
        terms = replace(terms, importance=Importance(cap=None))  # off: no cap, floor or veto
    entropy, quantile = terms.entropy, terms.top_entropy.quantile

    def with_bonus(coefficient: float) -> LossFn:
        return partial(_evaluate, method, terms, centre, force_on_policy, coefficient if entropy.on else None)

    return Loss(
        name=name,
        fn=with_bonus(entropy.coef),
        normaliser=method.normaliser,
        needs_reference=terms.kl.in_loss or method.needs_reference,
        needs_entropy_grad=entropy.on or method.needs_entropy,
        needs_old=centre == "recompute" and not force_on_policy,
        top_entropy_quantile=quantile,
        bonus=entropy.coef,
        bonus_needs_scale=entropy.has_other_normaliser(method) or (entropy.on and quantile < 1),
        control=entropy.control,
        with_bonus=with_bonus,
    )


def build_reward_penalty(**values: Any) -> Kl | None:
    """The KL for `place: reward`, with the settings in `values` (see `build_loss`). None if the run has no KL in the reward."""
    kl = make_terms(**values).kl
    return kl if kl.on and kl.place == "reward" else None


def build_advantage(name: str, **values: Any) -> Estimator:
    """The advantage estimator with this name, with its settings from `values`. Errors: ConfigError for an unknown name."""
    return advantage_named(name).with_settings(values)


def _evaluate(
    method: LossMethod, terms: Terms, centre: str, force_on_policy: bool, bonus: float | None, inputs: LossInputs
) -> LossSums:
    trainer_logp_S = inputs.logp_S.detach() if centre == "sampler" else old_logp(inputs)
    metrics = mismatch_metrics(trainer_logp_S, inputs.sampler_logp_S)
    if inputs.entropy_S is not None:
        metrics["entropy"] = MetricSum(inputs.entropy_S.detach().sum(), Normaliser.TOKENS)
    if centre == "sampler":
        # A token without a sampler log-prob (NaN) gets a ratio of 1.
        sampler_S = inputs.sampler_logp_S
        inputs = replace(inputs, old_logp_S=inputs.logp_S.detach().where(sampler_S.isnan(), sampler_S))
    elif force_on_policy:
        inputs = replace(inputs, old_logp_S=None)  # so every ratio is 1
    sums = loss_sums(method, inputs, terms)
    total = sums.total if bonus is None else sums.total + entropy_bonus(inputs, bonus)
    return LossSums(total, {**sums.metrics, **metrics})


def _require_known_settings(names: Iterable[str]) -> None:
    known = {*settings(), *CLIP_CENTRE_SETTINGS}
    for method in OWN.values():
        with_settings = method.settings if isinstance(method, Estimator) else method
        known |= {setting.flat for setting in with_settings.settings()} if with_settings else set()
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(f"no method has a setting {name!r}; did you mean {nearest!r}?")


def _require_name(name: str, names: Iterable[str], kind: str) -> str:
    known = sorted(names)
    normalised = name.lower().replace("-", "_")
    if normalised in known:
        return normalised
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {kind} {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}")
