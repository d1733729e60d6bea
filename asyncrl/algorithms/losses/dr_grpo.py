"""The loss `dr_grpo`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from .clip import Clipped


class DrGrpo(Clipped):
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: SEQUENCES_X_MAX_LENGTH. Streams. Its advantages are those of the estimator `dr_grpo` (no division by
    std).
    """

    name: ClassVar[str] = "dr_grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES_X_MAX_LENGTH
