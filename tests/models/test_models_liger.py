"""The head by Liger's Triton kernels: the same function as by torch. On a GPU (`pytest -m gpu`), or on a CPU by Triton's
interpreter: `pip install -e '.[liger]'`, then `TRITON_INTERPRET=1 pytest tests/models/test_models_liger.py`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from asyncrl.models.head.liger import MAX_TEMPERATURES, LigerHead, choose_head_kernel, disagreement
from asyncrl.models.head.logprobs import HeadKernel, token_logprobs

INSTALLED = importlib.util.find_spec("liger_kernel") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="liger-kernel is not installed (the extra `liger`)")]
S, E = 37, 6
RAGGED = ((0.7, 3), (1.3, 10), (0.7, 24))  # temperature and scored tokens of three sequences


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="a CPU needs TRITON_INTERPRET=1")),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def case(device: torch.device, dtype: torch.dtype, vocabulary: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(S, E, generator=generator)).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, E, generator=generator).to(device, dtype)
    target = torch.randint(0, vocabulary, (S,), generator=generator).to(device)
    temperature = torch.cat([torch.full((count,), value) for value, count in RAGGED])
    return hidden, weight, target, temperature


def run(
    inputs: tuple[Tensor, ...], kernel: HeadKernel | None, entropy_grad: bool, keep_logits: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logp, entropy, gradient of hidden, gradient of the weight), every third token masked out of the loss."""
    hidden, weight, target, temperature = inputs
    buffer = torch.zeros(weight.shape, device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight = weight.detach().requires_grad_()
    logp, entropy = token_logprobs(
        hidden, weight, target, temperature, grad_buffer=buffer, entropy_grad=entropy_grad, chunk=8,
        keep_logits=keep_logits, kernel=kernel,
    )  # fmt: skip
    upstream = torch.linspace(-2, 3, S, device=hidden.device, dtype=logp.dtype)
    upstream[::3] = 0
    loss = (upstream * logp).sum()
    if entropy_grad:
        loss = loss + (upstream.square() * entropy).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert not gradient[::3].any() and gradient[1::3].any(1).all()
    return logp.detach(), entropy.detach(), gradient, buffer


@pytest.mark.parametrize("keep_logits", [0, 1 << 30])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("vocabulary", [29, 5003])  # less and more than one block of the kernels
def test_values_and_gradients_are_those_of_float64_to_float32_rounding(
    device: torch.device, vocabulary: int, entropy_grad: bool, keep_logits: int
) -> None:
    inputs = case(device, torch.float32, vocabulary)
    wide = tuple(tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in inputs)
    wide[0].requires_grad_()
    exact = run(wide, None, entropy_grad)
    ours, by_torch = (run(inputs, kernel, entropy_grad, keep_logits) for kernel in (LigerHead(), None))
    for mine, theirs, truth, bound in zip(ours, by_torch, exact, (5e-7, 5e-7, 1e-5, 1e-5), strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert (mine - truth).abs().max() < bound * truth.abs().max()  # torch's own is as far away, some way or other
        assert (mine - theirs).abs().max() < bound * truth.abs().max()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_bfloat16_logits_with_a_float32_softmax(device: torch.device, entropy_grad: bool) -> None:
    """Both round the gradient of the logits once, to bfloat16 (the interpreter cuts off: a whole unit)."""
    inputs = case(device, torch.bfloat16, 5003)
    ours, by_torch = (run(inputs, kernel, entropy_grad) for kernel in (LigerHead(), None))
    for mine, theirs in zip(ours[:2], by_torch[:2], strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).abs().max() < 2e-5
    for mine, theirs in zip(ours[2:], by_torch[2:], strict=True):
        assert (mine - theirs).abs().max() < 2**-6 * theirs.abs().max()


def test_large_logits_stay_finite(device: torch.device) -> None:
    inputs = case(device, torch.float32, 29, scale=1e4)
    ours, by_torch = (run(inputs, kernel, True) for kernel in (LigerHead(), None))
    assert all(torch.isfinite(tensor).all() for tensor in ours)
    assert by_torch[0].abs().max() > 1e5
    torch.testing.assert_close(ours[0], by_torch[0], rtol=1e-6, atol=0.05)
    torch.testing.assert_close(ours[1], by_torch[1], rtol=0, atol=1e-5)


def test_no_rows_and_no_gradient(device: torch.device) -> None:
    hidden, weight, target, temperature = (tensor.detach() for tensor in case(device, torch.float32, 29))
    kernel = LigerHead()
    logp, entropy = token_logprobs(hidden[:0], weight, target[:0], temperature[:0], kernel=kernel)
    assert logp.shape == entropy.shape == (0,)
    both = [token_logprobs(hidden, weight, target, temperature, kernel=each) for each in (kernel, None)]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_temperatures_beyond_those_that_are_compiled_go_through_torch(device: torch.device) -> None:
    hidden, weight, target, _ = case(device, torch.float32, 29)
    kernel = LigerHead()
    assert kernel.passes(torch.full((S,), 0.5)) is not None
    many = torch.linspace(0.6, 1.4, MAX_TEMPERATURES).repeat_interleave(5)[:S]
    assert kernel.passes(many) is None and kernel.passes(many[:30]) is not None
    fresh = torch.linspace(1.5, 1.9, S)
    ours, by_torch = (run((hidden, weight, target, fresh), each, True) for each in (kernel, None))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, by_torch, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_load_passes(device: torch.device, dtype: torch.dtype) -> None:
    assert disagreement(LigerHead(), device, dtype, 5003) is None
    if device.type == "cuda":
        assert choose_head_kernel("liger", device, dtype, 5003) is not None
