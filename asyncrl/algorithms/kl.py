"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With `d = ref - logp`:

    k1 = -d                unbiased, high variance, may be negative
    k2 = d^2 / 2           biased, low variance, >= 0
    k3 = exp(d) - d - 1    unbiased, low variance, >= 0

Unbiased says something about the *value*. As a loss term its gradient is another matter: the gradient of k1 has mean 0
(it is the bare score function), that of k2 is the gradient of the KL, that of k3 is the gradient of KL(reference ||
policy) where the tokens are on-policy.

Shape legend: S scored tokens. Both arguments `[S]`, one floating dtype, in nats; the result `[S]`, differentiable in
both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KLFn = Callable[[Tensor, Tensor], Tensor]


def k1(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`logp - ref`."""
    return logp_S - reference_logp_S


def k2(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`(logp - ref)^2 / 2`."""
    return (logp_S - reference_logp_S).square() / 2


def k3(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`: the KL term of GRPO (DeepSeekMath, arXiv:2402.03300, eq. 4), and TRL's.

    `expm1` instead of `exp(.) - 1`: the two log-probs are nearly equal most of the time, and float32 `exp(d) - d - 1`
    is then mostly rounding error, and often negative.
    """
    d_S = reference_logp_S - logp_S
    return torch.expm1(d_S) - d_S
