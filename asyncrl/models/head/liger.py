"""The head's passes over logits by Triton kernels of Liger, where `liger-kernel` is installed and the logits are on a GPU.

Liger's are the two halves of its GRPO loss over full logits (liger_kernel.ops.grpo_loss). Launched as VESPO, whose weight of
a sequence is a constant that we set to 1, at advantage -1, without KL or correction, the loss of a token is its log-prob,
and what is handed in as that loss's gradient is multiplied in: any loss stays outside.

    forward     one read of the logits: log-prob and lse of each token
    backward    one read and one write, in place: the gradient of the logits

Ours (head_triton.py), because Liger's Triton kernels have nothing for it: the entropy, one more read; and, where the loss has
an entropy bonus, the gradient, again one read and one write. Everything is computed in float32 from logits in their own dtype.

Liger's other candidates do not fit. `fused_linear_scaled_cross_entropy` returns entropies, but its kernel wants a Hopper GPU,
bfloat16 and the CuTe DSL, gives entropies in bfloat16 at one temperature, and the weight's gradient as a bfloat16 tensor of
its own; elsewhere it is torch as ours. `liger_cross_entropy_kernel` writes the gradient before the loss's derivative is known,
so that this needs one more pass over what was rounded already, and it has no temperature. `chunked_loss.grpo_loss` is torch.

The temperature is a constant of Liger's compiled code: the first `MOST_TEMPERATURES` that a process sees are served, each after
a compilation of a second or so; batches with others go through torch.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from asyncrl.builds import install
from asyncrl.errors import ConfigError

from .logprobs import Columns, HeadKernel, HeadPasses, TorchPasses
from .output import PLAIN_HEAD, HeadTransform

MOST_TEMPERATURES = 8
_MOST_ROWS = 65_535  # of one launch: rows are the second axis of Liger's grid
_CHECKED_ROWS = 4
# What Triton did unasked before it began to warn that it will not.
_FUSION = {"enable_fp_fusion": True}
_FORWARD = {"BLOCK_N": 2048, "num_stages": 2, "num_warps": 1, **_FUSION}  # as Liger launches them
_BACKWARD = {"BLOCK_N": 4096, "num_stages": 1, "num_warps": 16, **_FUSION}
_OUR_OWN = {"BLOCK_N": 4096, "num_warps": 8, **_FUSION}

logger = logging.getLogger("asyncrl.models")


def choose_head_kernel(
    kind: str, device: torch.device, dtype: torch.dtype, vocabulary: int, transform: HeadTransform = PLAIN_HEAD
) -> HeadKernel | None:
    """`model.head_kernel` on this machine; None: torch's passes. Errors: ConfigError where `liger` cannot be had.

    A scale of the logits and a bias are nothing to the kernels: the one is a temperature to them, the other in the logits
    that they read. A soft cap is not in their formulas."""
    require_head_kernel(kind, device, dtype)
    if transform.softcap is not None:
        if kind == "liger":
            raise ConfigError(
                f"model.head_kernel is liger, but the model soft-caps its logits (at {transform.softcap:g}), which its kernels "
                "do not compute; use auto or torch"
            )
        return None
    if kind == "torch" or _absent(device, dtype) is not None:
        return None
    try:
        kernel = LigerHead()
        reason = disagreement(kernel, device, dtype, vocabulary)
    except Exception as error:
        # What a Liger, a Triton, a compiler and a driver that do not fit each other may raise.
        reason = f"they do not run here ({type(error).__name__}: {error})"
    if reason is None:
        return kernel
    if kind == "liger":
        raise ConfigError(f"model.head_kernel is liger, but {reason}; use auto or torch")
    logger.warning("Liger's kernels are installed, but %s; the head's logits go through torch", reason)
    return None


def require_head_kernel(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Errors: ConfigError where `liger` is asked for and package, GPU or dtype is missing. Before anything is loaded."""
    reason = _absent(device, dtype)
    if kind == "liger" and reason is not None:
        raise ConfigError(f"model.head_kernel is liger, but {reason}; use auto or torch")


def _absent(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why there is nothing to try."""
    if device.type != "cuda":
        return f"the model is on {device}, and its kernels need a GPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32, which is not enough for {dtype}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({install('liger')})"
    return None


def disagreement(kernel: HeadKernel, device: torch.device, dtype: torch.dtype, vocabulary: int) -> str | None:
    """What `kernel` computes otherwise than torch, on a few rows of this vocabulary: its interface is not a public one."""
    rows = _CHECKED_ROWS
    shape = (rows, vocabulary)
    logits = (
        torch.arange(rows * vocabulary, dtype=torch.float32, device=device)
        .mul_(0.7)
        .sin_()
        .mul_(6)
        .view(shape)
        .to(dtype)
    )
    target = torch.tensor([0, vocabulary - 1, vocabulary // 2, vocabulary // 3], device=device)
    grad_logp, grad_entropy = (torch.linspace(start, 2.0, rows, device=device) for start in (-1.0, 0.5))
    passes = kernel.passes(torch.ones(rows))
    assert passes is not None
    found: list[list[Tensor]] = []
    for each in (TorchPasses(logits, vocabulary, rows), passes):
        logp, lse, entropy = (torch.zeros(rows, device=device) for _ in range(3))
        columns = Columns(target, torch.ones(rows, device=device), lse, entropy)
        each.statistics(logits, 0, columns, logp)
        gradients = [logits.clone() for _ in range(2)]
        for gradient, bend in zip(gradients, (None, grad_entropy), strict=True):
            each.gradient_(gradient, 0, columns, grad_logp, bend)
        found.append([logp, lse, entropy, *gradients])
    near = 2**-7 if dtype == torch.bfloat16 else 1e-4  # of what is rounded to the logits' dtype
    names = ("log-probs", "normalisers", "entropies", "gradients", "gradients with an entropy bonus")
    for name, theirs, ours in zip(names, *found, strict=True):
        if not torch.allclose(theirs, ours, rtol=near if "gradients" in name else 1e-5, atol=1e-4):
            return f"their {name} are not those of torch"
    return None


class LigerHead:
    """Errors: ImportError and AttributeError where Liger or Triton is missing or has other kernels."""

    def __init__(self) -> None:
        from liger_kernel.ops import grpo_loss  # seconds to import, and only where it is used

        from . import triton_kernels as head_triton

        self._forward: Any = grpo_loss._grpo_loss_fwd_kernel
        self._backward: Any = grpo_loss._grpo_loss_bwd_kernel
        self._loss_type: int = grpo_loss._str_to_loss_type["vespo"]
        self._own: Any = head_triton
        self._temperatures: set[float] = set()
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def passes(self, temperature_S: Tensor) -> HeadPasses | None:
        """None where a temperature is one too many. Rows of one sequence lie together: a launch each, or fewer."""
        values, counts = torch.unique_consecutive(temperature_S, return_counts=True)
        temperatures = [float(value) for value in values]
        seen = self._temperatures.union(temperatures)
        if len(seen) > MOST_TEMPERATURES:
            return None
        self._temperatures = seen
        starts = accumulate(counts.tolist(), initial=0)
        return _LigerPasses(self, [(*span, t) for span, t in zip(pairwise(starts), temperatures, strict=True)])

    def forward(
        self, logits: Tensor, target: Tensor, temperature: float, logp: Tensor, lse: Tensor, spoilt: Tensor
    ) -> None:
        """logits [R, V] -> logp and lse [R]. `spoilt` [R] takes a column that means nothing here: which tokens are clipped."""
        arguments = self._arguments(logits, target, temperature)
        self._forward[(1, len(target))](**arguments, LOSS=logp, LSE=lse, KL=None, IS_CLIPPED=spoilt, **_FORWARD)

    def backward_(self, logits: Tensor, target: Tensor, temperature: float, lse: Tensor, grad_logp: Tensor) -> None:
        """logits [R, V] become grad_logp (onehot - p) / temperature."""
        arguments = self._arguments(logits, target, temperature)
        strides = {"loss_stride0": 0, "loss_stride1": grad_logp.stride(0)}
        self._backward[(1, len(target))](**arguments, DLOSS=grad_logp, DLOGITS=logits, LSE=lse, **strides, **_BACKWARD)

    def entropy(self, logits: Tensor, inverse: Tensor, lse: Tensor, entropy: Tensor) -> None:
        """Our kernel: `entropy` [rows] of these logits, whose normalisers are `lse`."""
        self._own.entropy_kernel[(len(lse),)](logits, inverse, lse, entropy, N=logits.shape[1], **_OUR_OWN)

    def backward_with_entropy_(
        self, logits: Tensor, target: Tensor, inverse: Tensor, lse: Tensor, entropy: Tensor, slope: Tensor, bend: Tensor
    ) -> None:
        """Our kernel: the logits become their gradient, in place; `slope` and `bend` [rows] are the gradients of log-prob and
        entropy, over the temperature."""
        self._own.gradient_kernel[(len(lse),)](
            logits, target, inverse, lse, entropy, slope, bend, N=logits.shape[1], **_OUR_OWN
        )

    def _arguments(self, logits: Tensor, target: Tensor, temperature: float) -> dict[str, Any]:
        """What both of Liger's kernels take. One sequence of R tokens: so neither its length nor L enters an address."""
        assert logits.is_contiguous() and len(target) <= _MOST_ROWS
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
        rows = slice(first, first + logits.shape[0])
        lse, entropy = columns.lse[rows], columns.entropy[rows]
        with torch.cuda.device_of(logits):
            for part, here, temperature in self._within(first, logits.shape[0]):
                target, spoilt = columns.target[here], columns.entropy[here]
                self._kernels.forward(logits[part], target, temperature, logp[here], columns.lse[here], spoilt)
            self._kernels.entropy(logits, columns.inverse[rows], lse, entropy)

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        rows = slice(first, first + logits.shape[0])
        with torch.cuda.device_of(logits):
            if grad_entropy is None:
                for part, here, temperature in self._within(first, logits.shape[0]):
                    target, lse = columns.target[here], columns.lse[here]
                    self._kernels.backward_(logits[part], target, temperature, lse, grad_logp[here])
                return
            inverse = columns.inverse[rows]
            slope, bend = grad_logp[rows] * inverse, grad_entropy[rows] * inverse
            self._kernels.backward_with_entropy_(
                logits, columns.target[rows], inverse, columns.lse[rows], columns.entropy[rows], slope, bend
            )

    def _within(self, first: int, count: int) -> Iterator[tuple[slice, slice, float]]:
        """(rows of the chunk, rows of all, their temperature) of the `count` rows from `first` on."""
        for start, end, temperature in self._spans:
            low, high = max(start, first), min(end, first + count)
            if low < high:
                yield slice(low - first, high - first), slice(low, high), temperature
