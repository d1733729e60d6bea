"""The loss `dapo`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from .clip import Clipped


class Dapo(Clipped):
    """Decoupled clip with token-level aggregation: every token of the step weighs the same.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: TOKENS, of the whole step (not of the microbatch: that would be bnpo). Streams.
    The name stands for clip and aggregation; dynamic sampling and overlong shaping act on groups and rewards.
    """

    name: ClassVar[str] = "dapo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
