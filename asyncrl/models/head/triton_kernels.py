"""Triton kernels that Liger lacks: the entropy of a token, and the gradient of logits if the loss has an entropy bonus.

Only liger.py imports this module, since triton may be missing. One program computes one row, in blocks and in float32.

Shape legend: R rows, N vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entropy_kernel(
    LOGITS: tl.tensor, INVERSE: tl.tensor, LSE: tl.tensor, ENTROPY: tl.tensor, N: tl.constexpr, BLOCK_N: tl.constexpr
) -> None:
    """ENTROPY [R] = -sum p log p, with p = softmax(LOGITS [R, N] * INVERSE [R]). INVERSE is 1 / temperature.

    With l = LOGITS * INVERSE - LSE and w = exp(l), the entropy is log(sum w) - (sum w l) / sum w. For large logits LSE has a large
    rounding error, so sum w may differ from 1. The formula holds for every sum w."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(INVERSE + row)
    lse = tl.load(LSE + row)
    total = 0.0
    weighted = 0.0
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < N
        logits = tl.load(LOGITS + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        logp = logits * inverse - lse
        weights = tl.where(inside, tl.exp(logp), 0.0)
        total += tl.sum(weights)
        weighted += tl.sum(weights * logp)
    tl.store(ENTROPY + row, tl.log(total) - weighted / total)


@triton.jit
def gradient_kernel(
    LOGITS: tl.tensor,
    TARGET: tl.tensor,
    INVERSE: tl.tensor,
    LSE: tl.tensor,
    ENTROPY: tl.tensor,
    LOGP_SLOPE: tl.tensor,
    ENTROPY_SLOPE: tl.tensor,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """LOGITS [R, N] = LOGP_SLOPE (onehot - p) - ENTROPY_SLOPE p (log p + ENTROPY), in place. The slopes [R] are the derivatives of
    the loss by log-prob and entropy, divided by the temperature."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    inverse = tl.load(INVERSE + row)
    lse = tl.load(LSE + row)
    entropy = tl.load(ENTROPY + row)
    logp_slope = tl.load(LOGP_SLOPE + row)
    entropy_slope = tl.load(ENTROPY_SLOPE + row)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < N
        logits = tl.load(LOGITS + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        logp = logits * inverse - lse
        weight = logp_slope + entropy_slope * (logp + entropy)
        gradient = tl.where(columns == target, logp_slope, 0.0) - tl.exp(logp) * weight
        tl.store(LOGITS + row * N + columns, gradient, mask=inside)
