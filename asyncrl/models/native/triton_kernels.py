"""Triton kernels of the elementwise parts of a layer. Only `gpu.py` imports this module, since triton may be missing.

All kernels read each value once, compute in float32 and round once. Formulas are those of `kernels.py`.

Shape legend: N rows, X heads, D head size, F size of the MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    HEADS: tl.tensor,
    COS: tl.tensor,
    SIN: tl.tensor,
    sign: float,
    row_stride: int,
    head_stride: int,
    X: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Rotates HEADS [N, X, D] in place; `sign` -1 negates the angles. One program rotates a row. COS, SIN: [N, HALF = D / 2]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_X)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < X) & (column < HALF)
    cos = tl.load(COS + row * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(SIN + row * HALF + column, mask=column < HALF, other=0.0).to(tl.float32) * sign
    place = HEADS + row * row_stride + head * head_stride + column
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, a * cos - b * sin, mask=inside)
    tl.store(place + HALF, b * cos + a * sin, mask=inside)


@triton.jit
def swiglu_kernel(GATE_UP: tl.tensor, OUT: tl.tensor, F: tl.constexpr, BLOCK_F: tl.constexpr) -> None:
    """OUT [N, F] = silu(gate) * up. A row of GATE_UP [N, 2F] is a row of gate, then a row of up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < F
    gate = tl.load(GATE_UP + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * F + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def swiglu_backward_kernel(
    GATE_UP: tl.tensor, GRAD: tl.tensor, PRODUCT: tl.tensor, F: tl.constexpr, BLOCK_F: tl.constexpr
) -> None:
    """Overwrites GATE_UP [N, 2F] with its gradient, and PRODUCT [N, F] with `silu(gate) * up`. GRAD [N, F]: gradient of PRODUCT."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < F
    place = GATE_UP + row * 2 * F + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + F, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * F + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    active = gate * share
    tl.store(PRODUCT + row * F + column, active * up, mask=inside)
    tl.store(place, grad * up * share * (1.0 + gate * (1.0 - share)), mask=inside)
    tl.store(place + F, grad * active, mask=inside)
