"""The terms that every loss may have, in the order of TRL (`GRPOTrainer._compute_loss`):

    surrogate -> x scale of its sign -> x OPSM -> x top-entropy mask -> x importance weight -> + KL
    -> the loss's own sum (-> entropy bonus, in `registry.py`: it has a normaliser of its own)

The KL term is multiplied by no weight, and by the ratio only if asked (`kl.py`).

Shape legend: S scored tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar

from .base import LossInputs, LossSums, Metrics, MetricSum
from .entropy import Entropy
from .importance import Importance, importance_weights
from .kl import Kl
from .masks import OffPolicyMask, Overlong, TopEntropy, off_policy_keep
from .method import Method, setting

if TYPE_CHECKING:
    from torch import Tensor

    from .losses.loss import LossMethod


@dataclass(frozen=True)
class Scale(Method):
    """Positive and negative scalers (torchtitan): the policy loss of a token is multiplied by one of them, by the sign of its
    advantage."""

    section: ClassVar[str] = "scale"
    switches: ClassVar[tuple[str, ...]] = ("positive", "negative")
    positive: float = setting(
        1.0, "Factor of the policy loss of tokens with positive advantage.", flat="positive_scale", ge=0
    )
    negative: float = setting(
        1.0, "Factor of the policy loss of tokens with negative advantage.", flat="negative_scale", ge=0
    )

    @property
    def on(self) -> bool:
        """Whether one of the factors differs from 1."""
        return (self.positive, self.negative) != (1.0, 1.0)


@dataclass(frozen=True)
class Terms:
    """The terms of one run, each under the name of its section. A new one is its class, a field here and a line below."""

    importance: Importance = field(default_factory=Importance)
    kl: Kl = field(default_factory=Kl)
    entropy: Entropy = field(default_factory=Entropy)
    scale: Scale = field(default_factory=Scale)
    off_policy_mask: OffPolicyMask = field(default_factory=OffPolicyMask)
    top_entropy: TopEntropy = field(default_factory=TopEntropy)
    mask: Overlong = field(default_factory=Overlong)

    def __iter__(self) -> Iterator[Method]:
        return (getattr(self, each.name) for each in fields(self))


TERMS: tuple[type[Method], ...] = tuple(type(term) for term in Terms())


def loss_sums(method: LossMethod, inputs: LossInputs, terms: Terms) -> LossSums:
    """The loss over one microbatch: the sum to differentiate, and its metrics."""
    weight_S, metrics = importance_weights(inputs, terms.importance) if terms.importance.on else (None, {})
    if method.takes_weights:
        inputs, weight_S = replace(inputs, importance_S=weight_S), None
    loss_S = _per_token(method, inputs, weight_S, terms, metrics)
    total = method.total(inputs, loss_S)
    return LossSums(total, {"loss": MetricSum(total.detach(), method.normaliser), **metrics})


def _per_token(
    method: LossMethod, inputs: LossInputs, weight_S: Tensor | None, terms: Terms, metrics: Metrics
) -> Tensor:
    surrogate = method.surrogate(inputs)
    metrics.update(surrogate.metrics)
    loss_S, scale, share = surrogate.loss_S, terms.scale, terms.top_entropy.quantile
    if scale.on:
        good_S, bad_S = inputs.advantage_S > 0, inputs.advantage_S < 0
        ones_S = loss_S.new_ones(loss_S.shape)
        loss_S = loss_S * ones_S.masked_fill(good_S, scale.positive).masked_fill(bad_S, scale.negative)
    if terms.off_policy_mask.threshold is not None:
        keep_S, found = off_policy_keep(inputs, terms.off_policy_mask.threshold)
        metrics.update(found)
        loss_S = loss_S * keep_S
    if share < 1:
        if inputs.keep_S is None:
            raise ValueError(f"top_entropy_quantile is {share}, but nobody chose the tokens (`keep_S`)")
        loss_S = loss_S * inputs.keep_S
    if weight_S is not None:
        loss_S = loss_S * weight_S
    if terms.kl.in_loss:
        loss_S = loss_S + terms.kl.term(inputs, surrogate.ratio_S, metrics)
    return loss_S
