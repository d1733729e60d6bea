"""What a loss is: a class that holds its maths, its settings, what it is divided by, what it needs and what it refuses.

Shape legend: S scored tokens of a microbatch (packed, no padding), B its sequences. A fully masked sequence owns no token but
counts in B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs, Metrics, MetricSum
from ..method import Conflict, Method

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The policy loss per token before correction and aggregation. `A` is the advantage of the token's sequence.

    A surrogate that carries its gradient in the log-prob (`-c A logp`) has a detached coefficient c.
    """

    loss_S: Tensor
    ratio_S: Tensor  # unclipped, with gradient: the weight of a bias-corrected KL
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class LossMethod(Method):
    """Base of the losses. A subclass has at least `name`, `normaliser`, `surrogate`, and a docstring with formula and paper.

    Fields made by `setting` are its own settings, `algorithm.NAME.*`; a subclass with fields is a frozen dataclass.
    """

    name: ClassVar[str] = ""
    normaliser: ClassVar[Normaliser]
    # The loss that it is where the ratio is always 1: its settings are bounds or gates of it.
    on_policy_is: ClassVar[str] = ""
    needs_old: ClassVar[bool] = True  # the trainer's log-probs before the first update, where a batch has several
    needs_reference: ClassVar[bool] = False  # log-probs under the weights at the start
    needs_entropy: ClassVar[bool] = False  # entropies with their gradient; without it they are detached
    takes_weights: ClassVar[bool] = False  # reads `importance_S` itself; otherwise its surrogate is multiplied by them
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    instead: ClassVar[Mapping[str, str]] = {}  # a setting that it does not read, dotted -> what does the same here

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.section = cls.section or cls.name

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] policy loss per token; the terms that every loss may have are added by `terms.per_token`."""
        raise NotImplementedError

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over the microbatch that the whole step's `normaliser` divides: by default that of the means of the
        sequences where it counts sequences, else that of all tokens."""
        if self.normaliser is Normaliser.SEQUENCES:
            return inputs.sequence_mean(loss_S).sum()
        return loss_S.sum()


def shares(low: Tensor, high: Tensor, normaliser: Normaliser = Normaliser.TOKENS) -> Metrics:
    """Clipped below (A < 0) and above (A > 0), where the gradient is 0 (cispo: where the weight is bounded)."""
    below, above = low.sum(), high.sum()
    return {
        "clip_ratio/low_mean": MetricSum(below, normaliser),
        "clip_ratio/high_mean": MetricSum(above, normaliser),
        "clip_ratio/region_mean": MetricSum(below + above, normaliser),
    }
