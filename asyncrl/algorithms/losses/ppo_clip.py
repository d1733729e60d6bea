"""The loss `ppo_clip`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from .clip import Clipped


class PpoClip(Clipped):
    """Proximal policy optimization's clipped objective, with its optional dual clip.

    Paper: Schulman et al. (arXiv:1707.06347), eq. 7; `dual_clip`: Ye et al. (arXiv:1912.09729), eq. 5.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio. The same function as `dapo`.
    Normaliser: TOKENS. Streams.
    """

    name: ClassVar[str] = "ppo_clip"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
