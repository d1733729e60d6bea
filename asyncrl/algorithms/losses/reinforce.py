"""The loss `reinforce`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from ..ratios import token_ratio
from .loss import LossMethod, Surrogate


class Reinforce(LossMethod):
    """The policy gradient itself, corrected by the importance weight alone.

    Paper: Williams (1992), https://doi.org/10.1007/BF00992696. NeMo: `disable_ppo_ratio`.
    Formula: `sum_t -A_t logp_t`. With `updates_per_batch` above 1 nothing holds the later updates back.
    Normaliser: TOKENS. Streams.
    """

    name: ClassVar[str] = "reinforce"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The ratio is reported, for a KL, and multiplies nothing."""
        return Surrogate(-inputs.advantage_S * inputs.logp_S, token_ratio(inputs))
