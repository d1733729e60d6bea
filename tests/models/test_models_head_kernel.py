"""`model.head_kernel`: which passes the head takes, and what is said where Liger's cannot be had. Needs no Liger."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.models.head import liger as liger_head
from asyncrl.models.head.liger import choose_head_kernel, disagreement
from asyncrl.models.head.logprobs import Columns, HeadPasses, default_passes, token_logprobs
from asyncrl.models.head.output import HeadTransform
from asyncrl.models.loading import load_policy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
V = 31


class Kernel:
    """Torch's passes as a kernel; `spoil` may change what they wrote."""

    def __init__(self, spoil: Callable[[Columns, Tensor | None], None] = lambda columns, gradient: None) -> None:
        self.spoil = spoil
        self.asked: list[Tensor] = []

    def passes(self, temperature_S: Tensor) -> HeadPasses:
        self.asked.append(temperature_S)
        torch_passes = default_passes(torch.zeros(len(temperature_S), 1), V, 8)
        spoil = self.spoil

        class Passes:
            def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
                torch_passes.statistics(logits, first, columns, logp)
                spoil(columns, None)

            def gradient_(
                self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
            ) -> None:
                torch_passes.gradient_(logits, first, columns, grad_logp, grad_entropy)
                spoil(columns, logits if grad_entropy is not None else None)

        return Passes()


def test_auto_is_torch_without_a_gpu_and_for_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger_head.importlib.util, "find_spec", lambda name: object())
    for kind in ("auto", "torch"):
        assert choose_head_kernel(kind, CPU, torch.float32, V) is None
        assert choose_head_kernel(kind, GPU, torch.float64, V) is None


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "said"),
    [
        (CPU, torch.float32, True, "the model is on cpu, and Liger's kernels need a GPU; use auto or torch"),
        (GPU, torch.float64, True, "Liger's kernels compute in float32, which is not precise enough for torch.float64"),
        (GPU, torch.bfloat16, False, r"liger-kernel is not installed \(pip install -e '.*\[liger\]'\); use auto"),
    ],
)
def test_liger_without_what_it_needs_is_refused(
    device: torch.device, dtype: torch.dtype, installed: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger_head.importlib.util, "find_spec", lambda name: object() if installed else None)
    with pytest.raises(ConfigError, match=f"model.head_kernel is liger, but {said}"):
        choose_head_kernel("liger", device, dtype, V)


def test_a_model_is_not_loaded_for_nothing() -> None:
    with pytest.raises(ConfigError, match=r"model\.head_kernel is liger, but the model is on cpu"):
        load_policy(ModelConfig(path="/no/such/model", dtype="float32", head_kernel="liger"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_compared_with_torch_before_it_is_used(dtype: torch.dtype) -> None:
    def wrong_entropy(columns: Columns, gradient: Tensor | None) -> None:
        columns.entropy[1].mul_(1.01)

    def wrong_gradient(columns: Columns, gradient: Tensor | None) -> None:
        if gradient is not None:
            gradient[2].mul_(1.1)

    assert disagreement(Kernel(), CPU, dtype, V) is None
    assert disagreement(Kernel(wrong_entropy), CPU, dtype, V) == "the kernels' entropies differ from torch's"
    expected = "the kernels' gradients with an entropy bonus differ from torch's"
    assert disagreement(Kernel(wrong_gradient), CPU, dtype, V) == expected


def test_kernels_that_fail_or_disagree_leave_auto_with_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    def half(columns: Columns, gradient: Tensor | None) -> None:
        columns.lse.mul_(0.5)

    monkeypatch.setattr(liger_head, "_missing_requirement", lambda device, dtype: None)
    for found, said in (
        (fails, r"Liger's kernels do not run here \(RuntimeError: no compiler\)"),
        (lambda: Kernel(half), "the kernels' log-sum-exps differ from torch's"),
    ):
        monkeypatch.setattr(liger_head, "LigerHead", found)
        with pytest.raises(ConfigError, match=said):
            choose_head_kernel("liger", CPU, torch.float32, V)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="asyncrl.models"):
            assert choose_head_kernel("auto", CPU, torch.float32, V) is None
        assert len(caplog.records) == 1 and "go through torch" in caplog.text
    monkeypatch.setattr(liger_head, "LigerHead", Kernel)
    assert isinstance(choose_head_kernel("auto", CPU, torch.float32, V), Kernel)
    assert choose_head_kernel("torch", CPU, torch.float32, V) is None


def test_the_head_takes_its_passes_from_the_kernel() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, 4, generator=generator).requires_grad_()
    weight, target = torch.randn(V, 4, generator=generator), torch.arange(20)
    temperature = torch.full((20,), 0.8)
    kernel = Kernel()
    results = []
    for each in (kernel, None):
        logp, entropy = token_logprobs(hidden, weight, target, temperature, entropy_grad=True, chunk=8, kernel=each)
        (gradient,) = torch.autograd.grad((logp + entropy).sum(), hidden)
        results.append((logp, entropy, gradient))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    assert len(kernel.asked) == 1 and torch.equal(kernel.asked[0], temperature)


def test_a_kernel_is_told_of_a_scale_as_a_temperature_and_not_asked_about_soft_caps() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(20, 4, generator=generator).requires_grad_(), torch.randn(V, 4, generator=generator)
    target, temperature = torch.arange(20), torch.full((20,), 0.8)
    bias = torch.randn(V, generator=generator)
    kernel = Kernel()
    for transform in (HeadTransform(0.25), HeadTransform(0.25, 2.0)):
        results = []
        for each in (kernel, None):
            logp, _ = token_logprobs(
                hidden, weight, target, temperature, bias_V=bias, transform=transform, chunk=8, kernel=each
            )
            results.append((logp, *torch.autograd.grad(logp.sum(), hidden)))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    (asked,) = kernel.asked
    torch.testing.assert_close(asked.float(), temperature / 0.25)


def test_liger_for_a_model_with_a_soft_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger_head, "_missing_requirement", lambda device, dtype: None)
    monkeypatch.setattr(liger_head, "LigerHead", Kernel)
    capped = HeadTransform(1.0, 30.0)
    assert choose_head_kernel("auto", CPU, torch.float32, V, capped) is None
    assert isinstance(choose_head_kernel("auto", CPU, torch.float32, V, HeadTransform(0.5)), Kernel)
    with pytest.raises(ConfigError, match=r"model\.head_kernel is liger, but the model soft-caps its logits \(at 30\)"):
        choose_head_kernel("liger", CPU, torch.float32, V, capped)
