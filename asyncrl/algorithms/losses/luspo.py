"""The loss `luspo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from .clip import SequenceClipped

if TYPE_CHECKING:
    from torch import Tensor


class Luspo(SequenceClipped):
    """Length-unbiased sequence policy optimization: gspo whose sequences weigh by their length.

    Paper: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261), as TRL has it.
    Formula: `sum_b sum_t l_t` with the sequence ratio of gspo. In TRL: loss `luspo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """

    name: ClassVar[str] = "luspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over all tokens, where the normaliser would ask for means of sequences: so a sequence weighs by its
        length."""
        return loss_S.sum()
