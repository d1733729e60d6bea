"""The loss `gspo`."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.types import Normaliser

from .clip import SequenceClipped


class Gspo(SequenceClipped):
    """Group sequence policy optimization: one ratio per sequence, the geometric mean of its token ratios.

    Paper: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7 (the paper uses epsilon 3e-4,
    epsilon_high 4e-4: a sequence ratio moves far less than a token ratio).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t` with `r_t = s_b = exp((1 / max(len_b, 1)) sum_t (logp_t - old_t))`
    for every token of sequence b; the gradient flows through the whole ratio. In TRL: loss `grpo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences, not tokens.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """

    name: ClassVar[str] = "gspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES
