"""The loss `one_sided`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs
from ..ratios import token_ratio
from .clip import Bounded
from .loss import Surrogate


class OneSided(Bounded):
    """Asymmetric one-sided clip: each token is bounded only where its advantage pushes it.

    Source: torchtitan's GRPO loss. Equal to `ppo_clip` in value and gradient, without `delta` and `dual_clip`.
    Formula: `sum_t -A_t min(r_t, 1 + epsilon_high)` for A > 0, `-A_t max(r_t, 1 - epsilon)` else.
    Normaliser: TOKENS. Streams.
    """

    name: ClassVar[str] = "one_sided"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] one bound a token: the upper one for a good token, the lower one for a bad one."""
        ratio_S, good_S = token_ratio(inputs), inputs.advantage_S > 0
        bounded_S = ratio_S.clamp(max=1 + self.high).where(good_S, ratio_S.clamp(min=1 - self.epsilon))
        return Surrogate(-bounded_S * inputs.advantage_S, ratio_S, self.clip_metrics(inputs, ratio_S))
