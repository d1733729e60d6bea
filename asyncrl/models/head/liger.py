"""Log-probs and gradients from the head's logits by Triton kernels of Liger. The kernels need `liger-kernel` and logits on a GPU.

The two kernels of Liger's GRPO loss over full logits (liger_kernel.ops.grpo_loss) are launched with settings under which the loss
equals the log-prob: loss type VESPO, sequence weight 1, advantage -1, no KL, no correction. The backward kernel multiplies by the
gradient of the caller's loss with respect to the log-prob, so the caller can use any loss of log-probs.

    forward     one read of the logits: log-prob and log-sum-exp (lse) of each token
    backward    one read and one write, in place: the gradient of the logits

Liger has no kernel for the entropy, so `triton_kernels.py` has two: the entropy (one read), and the gradient of a loss with an
entropy bonus (one read, one write). All kernels compute in float32. Logits are float32 or bfloat16.

The temperature is a constant in Liger's compiled code, so each new temperature takes a compilation of about a second. After
`MAX_TEMPERATURES` temperatures, torch computes the batches with other temperatures.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from asyncrl.builds import install_command
from asyncrl.errors import ConfigError

from .logprobs import Columns, HeadKernel, HeadPasses, TorchPasses
from .output import NO_TRANSFORM, HeadTransform

MAX_TEMPERATURES = 8
_MAX_ROWS = 65_535  # CUDA's limit for the second axis of a grid
# The old default of Triton. Newer versions of Triton warn if the option is not given.
_FUSION = {"enable_fp_fusion": True}
# Liger launches its forward and its backward with the options of the first two lines.
_FORWARD_OPTIONS = {"BLOCK_N": 2048, "num_stages": 2, "num_warps": 1, **_FUSION}
_BACKWARD_OPTIONS = {"BLOCK_N": 4096, "num_stages": 1, "num_warps": 16, **_FUSION}
_ENTROPY_OPTIONS = {"BLOCK_N": 4096, "num_warps": 8, **_FUSION}

logger = logging.getLogger("asyncrl.models")


def choose_head_kernel(
    kind: str, device: torch.device, dtype: torch.dtype, vocabulary: int, transform: HeadTransform = NO_TRANSFORM
) -> HeadKernel | None:
    """The kernel for `kind`, the setting `model.head_kernel` (auto, liger or torch). None: use `logprobs.default_passes`.
    `transform`: Liger computes no soft cap. Callers of the kernel fold a scale into the temperatures; logits contain the bias.
    Errors: ConfigError if `kind` is liger and Liger cannot be used."""
    reason = _missing_requirement(device, dtype)
    if reason is None and transform.softcap is not None:
        reason = f"the model soft-caps its logits (at {transform.softcap:g}), and Liger's kernels compute no soft cap"
    if kind == "torch" or (kind == "auto" and reason is not None):
        return None
    if reason is None:
        try:
            kernel = LigerHead()
            reason = disagreement(kernel, device, dtype, vocabulary)
        except Exception as error:
            # Versions of Liger, Triton, compiler and driver that do not fit each other may raise any exception.
            reason = f"Liger's kernels do not run here ({type(error).__name__}: {error})"
        if reason is None:
            return kernel
    if kind == "liger":
        raise ConfigError(f"model.head_kernel is liger, but {reason}; use auto or torch")
    logger.warning("liger-kernel is installed, but %s; the head's logits go through torch", reason)
    return None


def require_head_kernel(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Errors: ConfigError if `kind` is liger and the package, the device or the dtype does not fit. Needs no loaded model."""
    reason = _missing_requirement(device, dtype)
    if kind == "liger" and reason is not None:
        raise ConfigError(f"model.head_kernel is liger, but {reason}; use auto or torch")


def _missing_requirement(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says which requirement of Liger's kernels this machine or run does not meet. None: all are met."""
    if device.type != "cuda":
        return f"the model is on {device}, and Liger's kernels need a GPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"Liger's kernels compute in float32, which is not precise enough for {dtype}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({install_command('liger')})"
    return None


def disagreement(kernel: HeadKernel, device: torch.device, dtype: torch.dtype, vocabulary: int) -> str | None:
    """Says which result of `kernel` differs from torch's. None: all agree. Any version of Liger may change its private kernels."""
    rows = 4
    angles = torch.arange(rows * vocabulary, dtype=torch.float32, device=device).mul_(0.7)
    logits = angles.sin_().mul_(6).view(rows, vocabulary).to(dtype)
    target = torch.tensor([0, vocabulary - 1, vocabulary // 2, vocabulary // 3], device=device)
    grad_logp, grad_entropy = (torch.linspace(start, 2.0, rows, device=device) for start in (-1.0, 0.5))
    passes = kernel.passes(torch.ones(rows))
    assert passes is not None
    results: list[list[Tensor]] = []
    for head_passes in (TorchPasses(logits, vocabulary, rows), passes):
        logp, lse, entropy = (torch.zeros(rows, device=device) for _ in range(3))
        columns = Columns(target, torch.ones(rows, device=device), lse, entropy)
        head_passes.statistics(logits, 0, columns, logp)
        gradient, gradient_with_bonus = logits.clone(), logits.clone()
        head_passes.gradient_(gradient, 0, columns, grad_logp, None)
        head_passes.gradient_(gradient_with_bonus, 0, columns, grad_logp, grad_entropy)
        results.append([logp, lse, entropy, gradient, gradient_with_bonus])
    # Gradients are rounded to the dtype of the logits.
    gradient_tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-4
    names = ("log-probs", "log-sum-exps", "entropies", "gradients", "gradients with an entropy bonus")
    for name, expected, actual in zip(names, *results, strict=True):
        if not torch.allclose(expected, actual, rtol=gradient_tolerance if "gradients" in name else 1e-5, atol=1e-4):
            return f"the kernels' {name} differ from torch's"
    return None


class LigerHead:
    """The kernels of Liger and of triton_kernels.py. Errors: ImportError, AttributeError or KeyError without a fitting Liger."""

    def __init__(self) -> None:
        # Both imports take seconds.
        from liger_kernel.ops import grpo_loss

        from . import triton_kernels

        self.forward: Any = grpo_loss._grpo_loss_fwd_kernel
        self.backward: Any = grpo_loss._grpo_loss_bwd_kernel
        self.entropy: Any = triton_kernels.entropy_kernel
        self.backward_with_entropy: Any = triton_kernels.gradient_kernel
        self._loss_type: int = grpo_loss._str_to_loss_type["vespo"]
        self._temperatures: set[float] = set()
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def passes(self, temperature_S: Tensor) -> HeadPasses | None:
        """None if this process would exceed `MAX_TEMPERATURES`. Adjacent rows with equal temperatures share a launch."""
        values, counts = torch.unique_consecutive(temperature_S, return_counts=True)
        temperatures = [float(value) for value in values]
        all_temperatures = self._temperatures.union(temperatures)
        if len(all_temperatures) > MAX_TEMPERATURES:
            return None
        self._temperatures = all_temperatures
        starts = accumulate(counts.tolist(), initial=0)
        return _LigerPasses(self, [(*rows, value) for rows, value in zip(pairwise(starts), temperatures, strict=True)])

    def arguments(self, logits: Tensor, target: Tensor, temperature: float) -> dict[str, Any]:
        """Arguments of both Liger kernels. All tokens are in sequence number 0. The kernels multiply the sequence length L by this
        number, so L has no effect."""
        assert logits.is_contiguous() and len(target) <= _MAX_ROWS
        if logits.device not in self._constants:
            one = torch.ones(1, device=logits.device)
            self._constants[logits.device] = (one, -one)
        one, minus_one = self._constants[logits.device]
        return {
            "LOGITS": logits, "INPUT_IDS": target, "ADVANTAGES": minus_one, "PHI_SEQ": one, "OLD_LOGP": None, "REF_LOGP": None,
            "COMPLETION_MASK": None, "VLLM_IS_RATIO": None, "VLLM_IS_RATIO_STRIDE": 1, "TEMPERATURE": temperature,
            "BETA": 0.0, "EPS_LOW": 0.0, "EPS_HIGH": 0.0, "LOSS_TYPE": self._loss_type, "SAPO_TEMP_POS": 1.0,
            "SAPO_TEMP_NEG": 1.0, "DELTA": 0.0, "USE_BIAS_CORRECTION_KL": False, "L": 1, "N": logits.shape[1],
        }  # fmt: skip


class _LigerPasses:
    """`HeadPasses` over spans (first row, row after the last, temperature), which cover all scored tokens in order."""

    def __init__(self, kernels: LigerHead, spans: list[tuple[int, int, float]]) -> None:
        self._kernels = kernels
        self._spans = spans

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        logits = logits.contiguous()
        rows = slice(first, first + len(logits))
        with torch.cuda.device_of(logits):
            for part, span, temperature in self._spans_in(first, len(logits)):
                arguments = self._kernels.arguments(logits[part], columns.target[span], temperature)
                arguments |= {"LOSS": logp[span], "LSE": columns.lse[span], "KL": None}
                # The kernel also writes which tokens are clipped (none are). Below, the entropies overwrite these values.
                arguments["IS_CLIPPED"] = columns.entropy[span]
                self._kernels.forward[(1, len(logits[part]))](**arguments, **_FORWARD_OPTIONS)
            inputs = logits, columns.inverse[rows], columns.lse[rows], columns.entropy[rows]
            self._kernels.entropy[(len(logits),)](*inputs, N=logits.shape[1], **_ENTROPY_OPTIONS)

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        rows = slice(first, first + len(logits))
        with torch.cuda.device_of(logits):
            if grad_entropy is None:
                for part, span, temperature in self._spans_in(first, len(logits)):
                    arguments = self._kernels.arguments(logits[part], columns.target[span], temperature)
                    arguments |= {"loss_stride0": 0, "loss_stride1": grad_logp.stride(0), "DLOSS": grad_logp[span]}
                    arguments |= {"DLOGITS": logits[part], "LSE": columns.lse[span]}
                    self._kernels.backward[(1, len(logits[part]))](**arguments, **_BACKWARD_OPTIONS)
                return
            inverse = columns.inverse[rows]
            self._kernels.backward_with_entropy[(len(logits),)](
                logits, columns.target[rows], inverse, columns.lse[rows], columns.entropy[rows], grad_logp[rows] * inverse,
                grad_entropy[rows] * inverse, N=logits.shape[1], **_ENTROPY_OPTIONS,
            )  # fmt: skip

    def _spans_in(self, first: int, count: int) -> Iterator[tuple[slice, slice, float]]:
        """Spans of the chunk of `count` rows from `first` on: (rows of the chunk, rows of all tokens, temperature)."""
        for start, end, temperature in self._spans:
            low, high = max(start, first), min(end, first + count)
            if low < high:
                yield slice(low - first, high - first), slice(low, high), temperature
