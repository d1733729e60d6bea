"""What Liger has no Triton kernel for: the entropy of a token, and the gradient of logits where an entropy bonus sends one.

Importing this needs triton; only liger_head.py does. One program per row, logits read in blocks, everything in float32.

Shape legend: R rows, N vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entropy_kernel(
    LOGITS: tl.tensor, INVERSE: tl.tensor, LSE: tl.tensor, ENTROPY: tl.tensor, N: tl.constexpr, BLOCK_N: tl.constexpr
) -> None:
    """ENTROPY [R] = -sum p log p, with p ~ w = exp(l), l = LOGITS [R, N] * INVERSE [R] - LSE [R].

    w sums to one but for the rounding of LSE, which large logits make large: so log sum w - (sum w l) / sum w.
    """
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
    SLOPE: tl.tensor,
    BEND: tl.tensor,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """LOGITS [R, N] = SLOPE (onehot - p) - BEND p (log p + ENTROPY), in place. SLOPE and BEND [R]: gradient / temperature."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row)
    inverse = tl.load(INVERSE + row)
    lse = tl.load(LSE + row)
    entropy = tl.load(ENTROPY + row)
    slope = tl.load(SLOPE + row)
    bend = tl.load(BEND + row)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < N
        logits = tl.load(LOGITS + row * N + columns, mask=inside, other=0.0).to(tl.float32)
        logp = logits * inverse - lse
        gradient = tl.where(columns == target, slope, 0.0) - tl.exp(logp) * (slope + bend * (logp + entropy))
        tl.store(LOGITS + row * N + columns, gradient, mask=inside)
