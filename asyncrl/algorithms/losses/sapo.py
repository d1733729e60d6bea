"""The loss `sapo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from ..method import setting
from ..ratios import token_ratio
from .loss import LossMethod, Surrogate


@dataclass(frozen=True)
class Sapo(LossMethod):
    """Soft adaptive policy optimization: a sigmoid gate in place of the clip, colder for bad tokens.

    Paper: Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t -A_t sigmoid(tau (r_t - 1)) 4 / tau`, tau by the sign of A.
    Normaliser: SEQUENCES. Streams.
    Gradient A at r = 1, as that of the plain ratio; it fades smoothly on both sides instead of ending at a clip.
    """

    name: ClassVar[str] = "sapo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES
    on_policy_is: ClassVar[str] = "grpo"
    temperature_pos: float = setting(1.0, "Temperature of the gate where the advantage is positive.", gt=0)
    temperature_neg: float = setting(1.05, "Temperature of the gate elsewhere.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] the gated ratio; `temperature_pos` above advantage 0, `temperature_neg` at and below it."""
        ratio_S, positive_S = token_ratio(inputs), inputs.advantage_S > 0
        tau_S = ratio_S.new_tensor(self.temperature_pos).where(positive_S, ratio_S.new_tensor(self.temperature_neg))
        return Surrogate(-(tau_S * (ratio_S - 1)).sigmoid() * 4 / tau_S * inputs.advantage_S, ratio_S)
