"""The loss `cispo`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from ..method import Around, setting
from ..ratios import token_ratio
from .loss import LossMethod, Surrogate, shares


@dataclass(frozen=True)
class Cispo(LossMethod):
    """Clipped importance weights instead of clipped updates: no token loses its gradient.

    Paper: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Formula: `sum_t -sg(clip(r_t, low, high)) A_t logp_t`. The bounds are absolute: `high` is TRL's
    `epsilon_high` for this loss and NeMo's `1 + ratio_clip_max`; `low` 0 is no lower bound, as in TRL.
    Normaliser: TOKENS. Streams. Clip metrics: tokens whose weight was bounded against their advantage.
    """

    name: ClassVar[str] = "cispo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    on_policy_is: ClassVar[str] = "reinforce"
    instead: ClassVar[Mapping[str, str]] = {
        "algorithm.clip.epsilon_high": "the bound of its ratio is algorithm.cispo.high (5.0 in the paper's reproductions)",
    }
    low: float = setting(0.0, "Absolute lower bound of the detached ratio; 0 is none.", ge=0)
    high: float = setting(5.0, "Absolute upper bound of the detached ratio (TRL's epsilon_high there).", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gradient is in the log-prob; the bounded ratio is a detached weight."""
        ratio_S, advantage_S = token_ratio(inputs), inputs.advantage_S
        detached_S = ratio_S.detach()
        weight_S = detached_S.clamp(self.low, self.high)
        metrics = shares((detached_S < self.low) & (advantage_S < 0), (detached_S > self.high) & (advantage_S > 0))
        return Surrogate(-weight_S * advantage_S * inputs.logp_S, ratio_S, metrics)

    def problems(self, around: Around) -> Iterator[str]:
        """Refused: a lower bound that is not below the upper one."""
        if self.low >= self.high:
            yield f"algorithm.cispo.low is {self.low}; expected less than algorithm.cispo.high = {self.high}"
