"""vLLM's own C++ kernels for CPUs in the place of its small operators: the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

with warnings.catch_warnings():  # of modules that vLLM's attention imports
    warnings.simplefilter("ignore")
    from asyncrl.generation.vllm.v0_32_kernels import use_kernels


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with warnings.catch_warnings():  # of modules that vLLM imports when it is configured
        warnings.simplefilter("ignore")
        config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(config):
        yield


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64, from the definition."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [16, 576, 1000])
def test_norms(dtype: torch.dtype, bound: float, size: int) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(size, 1e-5, dtype=dtype)
    norm.weight.data.uniform_(0.5, 2)
    use_kernels(torch.nn.Sequential(norm))
    for rows in (1, 7, 64):
        x, residual = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
        torch.testing.assert_close(norm(x.clone()).double(), exact(x, norm.weight), rtol=bound, atol=bound)
        summed = x.double() + residual.double()
        y, after = norm(x.clone(), residual.clone())
        torch.testing.assert_close(after.double(), summed, rtol=bound, atol=bound)
        torch.testing.assert_close(y.double(), exact(summed, norm.weight), rtol=bound, atol=2 * bound)
    norm.weight.data = torch.full((size,), 3.0, dtype=dtype)  # as a new version comes
    torch.testing.assert_close(norm(x.clone()).double(), exact(x, norm.weight), rtol=bound, atol=2 * bound)


def test_rows_that_lie_apart() -> None:
    """Heads out of a joined projection: the kernels would read what lies between them."""
    norm, act = RMSNorm(32, 1e-5), SiluAndMul()
    use_kernels(torch.nn.Sequential(norm, act))
    x = torch.randn(5, 96)[:, 16:48]
    torch.testing.assert_close(norm(x).double(), exact(x, norm.weight), rtol=2e-6, atol=2e-6)
    heads = torch.randn(5, 4, 64)[..., :32]
    torch.testing.assert_close(norm(heads).double(), exact(heads, norm.weight), rtol=2e-6, atol=2e-6)
    y, _ = norm(x, torch.zeros(5, 32))
    torch.testing.assert_close(y.double(), exact(x, norm.weight), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(act(x), torch.nn.functional.silu(x[:, :16]) * x[:, 16:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [16, 1536, 100])
def test_activations(dtype: torch.dtype, bound: float, size: int) -> None:
    act = SiluAndMul()
    use_kernels(torch.nn.Sequential(act))
    x = torch.randn(9, 2 * size).to(dtype)
    found = torch.nn.functional.silu(x[:, :size].double()) * x[:, size:].double()
    torch.testing.assert_close(act(x).double(), found, rtol=bound, atol=bound)


def test_others_stay() -> None:
    """What derives from them, or normalises a part, computes something else."""
    gemma, partial = GemmaRMSNorm(32), RMSNorm(32, 1e-5, var_hidden_size=16)
    before = gemma._forward_method, partial._forward_method
    use_kernels(torch.nn.Sequential(gemma, partial))
    assert (gemma._forward_method, partial._forward_method) == before
