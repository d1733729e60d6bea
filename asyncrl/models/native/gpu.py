"""Calls the Triton kernels of `triton_kernels.py`. Each kernel replaces two to five of torch's, and passes once over the memory.

Ask `takes(...)` before a call, and compute in torch if it returns False. Triton comes with torch for CUDA, but needs a C compiler
on the machine of the run. Without a compiler, torch computes, and a warning is logged.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import first_line

# Whether this torch supports CUDA. Callers read `PRESENT` first, because calls of `takes` in each layer cost time on a CPU.
PRESENT = torch.version.cuda is not None
_BLOCK_F = 1024

logger = logging.getLogger("asyncrl.models")


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels run here and fit these tensors: the first is on a GPU; all have one dtype, float32 or bfloat16, and are
    contiguous in the last dimension. The caller must ensure that all tensors are on one device."""
    first = tensors[0]
    if first.device.type != "cuda" or first.dtype not in (torch.float32, torch.bfloat16):
        return False
    if any(each.dtype != first.dtype or each.stride(-1) != 1 for each in tensors):
        return False
    return _kernels(first.device) is not None


@cache
def _kernels(device: torch.device) -> Any | None:
    """The module of the kernels. None if a trial of one kernel on `device` fails."""
    try:
        from . import triton_kernels as kernels

        out = torch.empty(1, 1, device=device)
        with torch.cuda.device(device):
            kernels.swiglu_kernel[1, 1](torch.ones(1, 2, device=device), out, F=1, BLOCK_F=_BLOCK_F)
        if abs(out.item() - 0.731059) > 1e-5:
            raise RuntimeError(f"silu(1) is {out.item():.6f} by Triton")
    except Exception as error:
        # Triton, the driver and the compiler raise exceptions of their own.
        logger.warning("Triton's kernels do not run here, so torch computes instead: %s", first_line(error))
        return None
    return kernels


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """Rotates heads [N, X, D] in place; `sign` -1 negates the angles. cos and sin [N, D / 2] are contiguous."""
    kernels: Any = _kernels(heads.device)
    count, half = heads.shape[1], cos.shape[1]
    with torch.cuda.device_of(heads):
        kernels.rotate_kernel[(heads.shape[0],)](
            heads, cos, sin, sign, heads.stride(0), heads.stride(1), X=count, HALF=half, BLOCK_X=_power_of_two(count),
            BLOCK_HALF=_power_of_two(half), num_warps=8,
        )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [N, 2F] -> out [N, F] = silu(gate) * up. Both are contiguous."""
    kernels: Any = _kernels(out.device)
    with torch.cuda.device_of(out):
        kernels.swiglu_kernel[_grid(out)](gate_up, out, F=out.shape[1], BLOCK_F=_BLOCK_F)


def swiglu_backward_(gate_up: Tensor, grad: Tensor, product: Tensor) -> None:
    """Overwrites `gate_up` [N, 2F] with its gradient, and `product` [N, F] with the output of `swiglu`. `grad` is [N, F]. All are
    contiguous."""
    kernels: Any = _kernels(grad.device)
    with torch.cuda.device_of(grad):
        kernels.swiglu_backward_kernel[_grid(grad)](gate_up, grad, product, F=grad.shape[1], BLOCK_F=_BLOCK_F)


def _grid(rows: Tensor) -> tuple[int, int]:
    return rows.shape[0], -(-rows.shape[1] // _BLOCK_F)


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()
