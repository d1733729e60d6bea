"""The loss `grpo`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from .clip import Clipped


class Grpo(Clipped):
    """Group relative policy optimization: token ratio, every sequence weighs the same.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, l the clipped surrogate.
    Normaliser: SEQUENCES. Streams.
    """

    name: ClassVar[str] = "grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES
