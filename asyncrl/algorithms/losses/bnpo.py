"""The loss `bnpo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from ..method import Conflict
from .clip import Clipped

if TYPE_CHECKING:
    from torch import Tensor


class Bnpo(Clipped):
    """Clipped surrogate, mean over the tokens of each microbatch, mean of those means: TRL's `bnpo`.

    Paper: Xiao et al., "BNPO" (arXiv:2506.02864); only its aggregation, as in TRL.
    Formula: `(1 / max(tokens of the microbatch, 1)) sum_t l_t`.
    Normaliser: MICROBATCHES. Does not stream: the denominator is local, so the gradient depends on which sequences share
    a microbatch (`train.tokens_per_microbatch`, the order of arrival). `dapo` is what it turns into with one denominator.
    """

    name: ClassVar[str] = "bnpo"
    normaliser: ClassVar[Normaliser] = Normaliser.MICROBATCHES
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "rollout.streaming",
            "which divides by the tokens of each microbatch, so the gradient would depend on which groups happened to arrive "
            "together; use loss=dapo (one denominator for the whole step), or rollout.streaming=false",
            when=lambda around: around.streaming,
        ),
        Conflict(
            "train.skip_zero_advantage",
            "which divides by the tokens of each microbatch: those without an advantage matter; leave it out",
            when=lambda around: bool(around.at("train.skip_zero_advantage")),
        ),
    )

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """A mean, not a sum: over the tokens of this microbatch."""
        return loss_S.sum() / max(loss_S.numel(), 1)
