"""Checks that the chosen loss, advantage and terms fit each other and the rest of the configuration.

Every message names the value, the reason and a remedy. A rule about a single method is declared by that method, in `algorithms/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.losses import LossMethod
from asyncrl.algorithms.method import CheckContext, Conflict
from asyncrl.algorithms.terms import Terms

from .fields import get
from .methods import flat_values
from .schema import AlgorithmConfig, Config
from .text import one_line


def chosen_loss(algorithm: AlgorithmConfig) -> LossMethod:
    """The loss that the configuration names, with its settings."""
    return registry.make_loss(algorithm.loss, **flat_values(algorithm))


def chosen_terms(algorithm: AlgorithmConfig) -> Terms:
    """All terms of the loss (KL, entropy, masks, corrections), with their settings."""
    return registry.make_terms(**flat_values(algorithm))


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether a term or the loss reads log-probs of the reference model, which has the weights that the run started with."""
    return chosen_terms(algorithm).kl.on or chosen_loss(algorithm).needs_reference


def check_losses(config: Config, streaming: bool) -> Iterator[str]:
    """Yields an error message for each contradiction. `streaming`: whether groups are trained before their step is complete."""
    algorithm = config.algorithm
    context, terms = _check_context(config, streaming), chosen_terms(algorithm)
    yield from _check_sampler(config)
    yield from _check_on_policy(algorithm, context.loss)
    for method in (context.loss, *terms):
        yield from method.problems(context)
    yield from _conflicts(context.loss.conflicts, f"algorithm.loss is {algorithm.loss}", context)
    yield from _conflicts(context.advantage.conflicts, f"algorithm.advantage is {algorithm.advantage}", context)
    if streaming and context.advantage.needs_whole_step:
        yield (
            f"algorithm.advantage is {algorithm.advantage}, whose statistics span the whole step, but rollout.streaming trains "
            "each group before the rest of the step is known; set rollout.streaming=false (preset one_off or sync), or use "
            "an estimator of the group: grpo, dr_grpo, rloo"
        )


def warn_algorithm(config: Config, staleness_bound: int) -> list[str]:
    """Sentences about settings that are allowed but probably not intended. Takes a resolved configuration."""
    algorithm = config.algorithm
    context, terms = _check_context(config, streaming=False), chosen_terms(algorithm)
    warnings = [text for method in (context.loss, *terms) for text in method.warnings(context)]
    if not terms.importance.on and algorithm.old_logprobs != "sampler" and staleness_bound > 0:
        warnings.append(
            f"algorithm.importance.cap=null with tokens up to {staleness_bound} versions old: nothing corrects the "
            "difference between sampler and trainer; set importance.cap=2.0 or old_logprobs=sampler"
        )
    return warnings


def _check_context(config: Config, streaming: bool) -> CheckContext:
    return CheckContext(
        loss=chosen_loss(config.algorithm),
        advantage=registry.advantage_named(config.algorithm.advantage),
        at=lambda name: get(config, name),
        streaming=streaming,
    )


def _conflicts(conflicts: tuple[Conflict, ...], method: str, context: CheckContext) -> Iterator[str]:
    yield from (conflict.message(method, context) for conflict in conflicts if conflict.when(context))


def _check_on_policy(algorithm: AlgorithmConfig, loss: LossMethod) -> Iterator[str]:
    if not algorithm.force_on_policy:
        return
    if loss.on_policy_is:
        yield (
            f"algorithm.force_on_policy is true but loss is {algorithm.loss}, which bounds the ratio, and the ratio is always 1; "
            f"use loss={loss.on_policy_is}, which has the same gradient at ratio 1, or leave force_on_policy out"
        )
    elif loss.section == "clip":
        # A value counts as not chosen by the user if it equals the default or the value that is derived from the defaults.
        derived = type(loss)().derived()
        for setting in loss.settings():
            if (value := getattr(loss, setting.name)) not in (setting.default, derived.get(setting.name)):
                yield (
                    f"{setting.dotted} is {one_line(value)} but algorithm.force_on_policy is true: the ratio is always 1, and "
                    f"the bound would do nothing; leave {setting.dotted} or force_on_policy out"
                )
    if algorithm.old_logprobs == "sampler":
        yield (
            "algorithm.force_on_policy is true but old_logprobs is sampler: force_on_policy centres the clip on the training "
            "forward, old_logprobs=sampler on the sampler; leave one of the two out"
        )


def _check_sampler(config: Config) -> Iterator[str]:
    if config.algorithm.old_logprobs != "sampler":
        return
    section: Any = config.algorithm.importance
    for name in ("cap", "floor", "veto"):
        if name in section.model_fields_set and (value := getattr(section, name)) is not None:
            yield (
                f"algorithm.importance.{name} is {value} but old_logprobs is sampler: both correct for the sampler, and only one "
                f"correction may be applied; set importance.{name}=null or old_logprobs=recompute"
            )
