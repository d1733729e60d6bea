"""The entropy bonus: a term of its own with a normaliser of its own.

Shape legend: S scored tokens of a microbatch.
"""

from __future__ import annotations

from torch import Tensor

from .base import LossInputs


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Tensor:
    """`-coefficient x sum_t H_t`, differentiable; H_t is the entropy of the policy at token t, in nats, at the sampling
    temperature.

    Mnih et al. (arXiv:1602.01783), section 4. Normaliser: TOKENS, whatever that of the loss (as in TRL), so that the
    coefficient means the same with every loss; with a top-entropy mask, the tokens that it keeps. TRL takes the mean
    over each microbatch, so there its value depends on the split; here it is the mean over the step.
    """
    if inputs.entropy_S is None:
        raise ValueError(f"entropy_coef is {coefficient}, but the microbatch has no entropies (`entropy_S`)")
    entropy_S = inputs.entropy_S
    if inputs.keep_S is not None:
        entropy_S = entropy_S.masked_fill(~inputs.keep_S, 0.0)
    return -coefficient * entropy_S.sum()
