"""The Triton kernels of a layer against the same formulas by torch in float64. On a GPU (`pytest -m gpu`), or on a CPU by Triton's
interpreter: `pip install triton`, then `TRITON_INTERPRET=1 pytest tests/models/test_models_gpu_kernels.py`.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module

import pytest
import torch
from torch import Tensor

from asyncrl.models.native import gpu, kernels
from asyncrl.models.native.kernels import Scratch
from asyncrl.models.parameters.flat import add_product_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_A_CARD = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device"))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="a CPU needs TRITON_INTERPRET=1")),
        pytest.param("cuda", marks=ON_A_CARD),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The kernels take what they would take on a GPU. The native kernels would be asked first."""
    if request.param == "cpu":
        monkeypatch.setattr(gpu, "PRESENT", True)
        monkeypatch.setattr(gpu, "takes", lambda *tensors: True)
        monkeypatch.setattr(gpu, "_kernels", lambda device: import_module("asyncrl.models.native.triton_kernels"))
        monkeypatch.setattr("asyncrl.models.native.library.takes", lambda *tensors, **sizes: False)
    return torch.device(request.param)


def values(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def rounding(dtype: torch.dtype) -> float:
    """Of a value that is stored, relative to it. Triton's interpreter cuts the digits off."""
    if dtype == torch.float32:
        return 1e-6
    return 2**-7 if INTERPRETED else 2**-8


def close(found: Tensor, expected: Tensor) -> None:
    """One rounding of each value to the dtype, and of its terms to float32."""
    step = rounding(found.dtype)
    assert ((found.double() - expected).abs() <= step * expected.abs() + 2e-6).all()


@DTYPES
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("count", "size", "rotated"), [(6, 32, 32), (5, 64, 32), (3, 96, 96)])
def test_rotary(device: torch.device, dtype: torch.dtype, count: int, size: int, rotated: int, inverse: bool) -> None:
    """Of three projections beside each other the first `count` heads are rotated, or the first part of each."""
    rows = values(device, dtype, 7, (count + 2) * size)
    angles = values(device, torch.float64, 7, rotated // 2, seed=1)
    cos, sin = angles.cos().to(dtype), torch.stack((-angles.sin(), angles.sin())).to(dtype)
    before, expected = rows.clone(), rows.double()
    heads, wide = (each[:, : count * size].unflatten(1, (count, size))[..., :rotated] for each in (rows, expected))
    # The two halves of a head are the real and the imaginary parts of numbers that are turned.
    turn = torch.complex(cos.double(), sin[0 if inverse else 1].double()).unsqueeze(1)
    turned = torch.complex(wide[..., : rotated // 2], wide[..., rotated // 2 :]) * turn
    wide.copy_(torch.cat([turned.real, turned.imag], -1))
    kernels.rotate_(heads, cos, sin, inverse)
    # A sum of two products is small where the products cancel, so the rounding of the terms is compared with their size.
    assert (rows.double() - expected).abs().max() < rounding(dtype) * before.abs().max()
    assert torch.equal(rows[:, count * size :], before[:, count * size :])
    rest = rows[:, : count * size].unflatten(1, (count, size))[..., rotated:]
    assert torch.equal(rest, before[:, : count * size].unflatten(1, (count, size))[..., rotated:])


@DTYPES
@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_swiglu_and_its_gradient(device: torch.device, dtype: torch.dtype, size: int) -> None:
    gate_up, grad = values(device, dtype, 5, 2 * size), values(device, dtype, 5, size, seed=1)
    wide = gate_up.double().requires_grad_()
    expected = torch.nn.functional.silu(wide[:, :size]) * wide[:, size:]
    (slope,) = torch.autograd.grad(expected, wide, grad.double())
    close(kernels.gated(gate_up, torch.empty_like(grad), "silu"), expected.detach())
    product = torch.empty_like(grad)
    kernels.gated_backward_(gate_up, grad, product, Scratch(), "silu")
    close(product, expected.detach())
    close(gate_up, slope)


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=ON_A_CARD)])
def test_a_gradient_is_added_without_rounding_it_first(device: torch.device) -> None:
    """The sums of a product of bfloat16 factors reach the float32 gradient as they are. With a rounding to bfloat16 the largest
    error would be some 2^-9 of a sum."""
    grad, x = (values(device, torch.bfloat16, 500, size, seed=size) for size in (96, 64))
    target = values(device, torch.float32, 96, 64, seed=2)
    expected = target.double() + grad.t().double() @ x.double()
    add_product_(target, grad.t(), x)
    assert (target.double() - expected).abs().max() < 1e-6 * expected.abs().max()
