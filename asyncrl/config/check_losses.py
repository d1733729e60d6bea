"""What the chosen loss, advantage and terms say against each other and against the rest of the configuration.

Every complaint names the value, the reason and the way out. The reasons are the methods' own (`algorithms/`); nothing about a
single method stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.algorithms import registry
from asyncrl.algorithms.losses import LossMethod
from asyncrl.algorithms.method import CheckContext, Conflict
from asyncrl.algorithms.terms import Terms
from asyncrl.types import Normaliser

from .fields import get
from .methods import numbers
from .schema import AlgorithmConfig, Config


def chosen_loss(algorithm: AlgorithmConfig) -> LossMethod:
    """The loss with its settings."""
    return registry.make_loss(algorithm.loss, **numbers(algorithm))


def chosen_terms(algorithm: AlgorithmConfig) -> Terms:
    """The terms with their settings."""
    return registry.make_terms(**numbers(algorithm))


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether log-probs under the weights at the start are read by anything."""
    return chosen_terms(algorithm).kl.on or chosen_loss(algorithm).needs_reference


def needs_second_buffer(algorithm: AlgorithmConfig) -> bool:
    """Whether the trainer allocates one: asked for, and there is a term that goes into it."""
    terms = chosen_terms(algorithm)
    asked = terms.entropy.second_gradient_buffer and terms.top_entropy.quantile == 1
    return asked and terms.entropy.apart(chosen_loss(algorithm))


def check_losses(config: Config, streaming: bool) -> Iterator[str]:
    """`streaming`: groups are trained as they arrive, before the step's number of tokens and sequences is known."""
    algorithm = config.algorithm
    around, terms = _around(config, streaming), chosen_terms(algorithm)
    yield from _check_sampler(config)
    yield from _check_centre(algorithm, around.loss)
    for method in (around.loss, *terms):
        yield from method.problems(around)
    yield from _conflicts(around.loss.conflicts, f"algorithm.loss is {algorithm.loss}", around)
    yield from _conflicts(around.advantage.conflicts, f"algorithm.advantage is {algorithm.advantage}", around)
    if streaming and around.advantage.needs_whole_step:
        # Never quietly over whatever part of the step is there.
        yield (
            f"algorithm.advantage is {algorithm.advantage}, whose statistics span the whole step, but rollout.streaming trains "
            "each group as it arrives, before the others are known; set rollout.streaming=false (preset one_off or sync), or use "
            "an estimator of the group: grpo, dr_grpo, rloo"
        )


def warn_algorithm(config: Config, staleness_bound: int) -> list[str]:
    """What is allowed but seldom meant. Takes a resolved configuration."""
    algorithm = config.algorithm
    around, terms = _around(config, streaming=False), chosen_terms(algorithm)
    found = [text for method in (around.loss, *terms) for text in method.warnings(around)]
    if not terms.importance.on and algorithm.old_logprobs != "sampler" and staleness_bound > 0:
        found.append(
            f"algorithm.importance.cap=null with tokens up to {staleness_bound} versions old: nothing corrects the "
            "difference between sampler and trainer; set importance.cap=2.0 or old_logprobs=sampler"
        )
    return found


def _around(config: Config, streaming: bool) -> CheckContext:
    by_tokens = (name for name, loss in registry.LOSSES.items() if loss.normaliser is Normaliser.TOKENS)
    return CheckContext(
        loss=chosen_loss(config.algorithm),
        advantage=registry.advantage_named(config.algorithm.advantage),
        at=lambda name: get(config, name),
        streaming=streaming,
        by_tokens=tuple(by_tokens),
    )


def _conflicts(conflicts: tuple[Conflict, ...], method: str, around: CheckContext) -> Iterator[str]:
    yield from (each.message(method, around) for each in conflicts if each.when(around))


def _check_centre(algorithm: AlgorithmConfig, loss: LossMethod) -> Iterator[str]:
    if not algorithm.force_on_policy:
        return
    if loss.on_policy_is:
        yield (
            f"algorithm.force_on_policy is true but loss is {algorithm.loss}, which bounds a ratio that is then always 1: use "
            f"loss={loss.on_policy_is}, which is what is left of it, or leave force_on_policy out"
        )
    elif loss.section == "clip":
        # What the defaults come to is written into a resolved configuration.
        derived = type(loss)().derived()
        for each in loss.settings():
            if (value := getattr(loss, each.name)) not in (each.default, derived.get(each.name)):
                yield (
                    f"{each.dotted} is {shown_value(value)} but algorithm.force_on_policy is true: the ratio is always 1, and the "
                    "bound would do nothing; leave one of them out"
                )
    if algorithm.old_logprobs == "sampler":
        yield (
            "algorithm.force_on_policy is true but old_logprobs is sampler: one centres the clip on the training "
            "forward, the other on the sampler; choose one"
        )


def _check_sampler(config: Config) -> Iterator[str]:
    if config.algorithm.old_logprobs != "sampler":
        return
    section: Any = config.algorithm.importance
    for name in ("cap", "floor", "veto"):
        if name in section.model_fields_set and (value := getattr(section, name)) is not None:
            yield (
                f"algorithm.importance.{name} is {value} but old_logprobs is sampler: the two corrections are never applied "
                f"together; set importance.{name}=null or old_logprobs=recompute"
            )


def shown_value(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
