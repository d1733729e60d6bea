"""Log-probs and entropies of scored tokens without the logits of all tokens at once.

Forward computes the logits in chunks of rows, and then log-prob, log-sum-exp and entropy of each row. Backward overwrites the
logits of a chunk with their gradient. If the batch has at most `KEEP_LOGITS` logits, forward keeps all logits for backward.
For a larger batch backward computes them again, and memory holds the logits of one chunk [chunk, V], however large S is.

    z = logits / temperature,   logp = z[target] - lse(z),   p = softmax(z),   entropy = -sum p log p
    d logp / d z = onehot - p,   d entropy / d z = -p (log p + entropy)

Matrix products, and so the logits, have the dtype of the weight. All else is computed in float32 (float64 for float64 weights). If
logits have a scale and no soft cap, the temperature includes the scale. Liger's kernels (liger.py) may replace `default_passes`.

Shape legend: S scored tokens, E hidden size, V vocabulary, R rows of a chunk or block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..native import library as native
from ..parameters.flat import add_product_
from .output import NO_TRANSFORM, HeadTransform

# Rows of a chunk. Each chunk adds to the whole weight gradient, so small chunks are slow.
CHUNK_ROWS = 512
# The most logits that forward keeps for backward: 2,048 tokens of a microbatch times the vocabulary of a small model.
KEEP_LOGITS = 2048 * 49_152
# Rows of one forward product on a CPU. In float32, products of 64 rows took a tenth more time than products of 256 rows.
_CPU_PRODUCT_ROWS = 256
# The most rows of a block of `TorchPasses`: on a CPU, and for soft-capped logits. Each row needs two rows of scratch.
_CPU_BLOCK_ROWS = 16
_CAPPED_ROWS = 128


class SpareMemory:
    """Reuses the memory of logits from one forward to the next, because the first write to new pages is slow. A forward that keeps
    its logits takes the memory until its backward ends. Until then a second forward gets new memory. A backward without kept logits
    takes the memory for its chunks."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """[rows, columns] of the dtype and device of `like`, uninitialised, contiguous."""
        size = rows * columns * like.element_size()
        spare, self._bytes = self._bytes, None
        if spare is None or spare.numel() < size or spare.device != like.device:
            spare = torch.empty(size, dtype=torch.uint8, device=like.device)
        return spare[:size].view(like.dtype).view(rows, columns)

    def put_back(self, tensor: Tensor) -> None:
        """Makes the memory of `tensor`, a result of `take`, available again. The caller must not use `tensor` any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Columns:
    """Values of all scored tokens, [S] each: target int64, the others float32 (float64 for float64 weights)."""

    target: Tensor  # sampled token id
    inverse: Tensor  # 1 / temperature
    lse: Tensor  # log-sum-exp of logits / temperature
    entropy: Tensor


class HeadPasses(Protocol):
    """The two passes over logits [R, V]: log-probs, then gradients. Row i of `logits` belongs to scored token `first + i`."""

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        """Writes logp [S], `columns.lse` and `columns.entropy` of these rows. Does not change the logits."""

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        """Overwrites the logits with their gradient. `grad_logp` and `grad_entropy` are [S]; None stands for zeros."""


class HeadKernel(Protocol):
    """A kernel package that may replace `default_passes`."""

    def passes(self, temperature_S: Tensor) -> HeadPasses | None:
        """The passes for rows with these temperatures (a CPU tensor). None: the kernel does not support them."""


@dataclass(frozen=True, slots=True)
class _Options:
    passes: HeadPasses | None
    transform: HeadTransform
    grad_buffer: Tensor | None
    bias_grad: Tensor | None
    entropy_grad: bool
    chunk: int
    keep: bool
    project: Callable[[Tensor], Tensor] | None
    spare: SpareMemory

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.project is not None:
            return self.project(hidden)
        return hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())


def token_logprobs(
    hidden_SE: Tensor,
    weight_VE: Tensor,
    target_S: Tensor,
    temperature_S: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: HeadTransform = NO_TRANSFORM,
    grad_buffer: Tensor | None = None,
    bias_grad: Tensor | None = None,
    entropy_grad: bool = False,
    chunk: int = CHUNK_ROWS,
    keep_logits: int = KEEP_LOGITS,
    project: Callable[[Tensor], Tensor] | None = None,
    spare: SpareMemory | None = None,
    kernel: HeadKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob [S] of each target under `softmax(transform(hidden @ weight.T + bias) / temperature)`, and the entropy [S] in nats.

    hidden_SE, weight_VE and bias_V share a dtype. temperature_S is float, > 0, on any device.
    target_S: int64, must lie in [0, V). The native passes do not check this: an id outside corrupts memory.
    Results are float32, or float64 for float64 inputs. The entropy is differentiable only with `entropy_grad`.
    grad_buffer: [V, E]. Backward adds the weight gradient to this buffer, in its dtype, and autograd gets None.
    bias_grad: [V], the same for the gradient of the bias.
    keep_logits: if the batch has at most this number of logits, forward keeps them for backward, in memory of `spare`.
    project: a faster `hidden @ weight.T + bias`. chunk: the number of rows of a chunk.
    kernel: replaces `default_passes`, except for soft-capped logits. Needs temperature_S on the host: copying a GPU tensor blocks.
    """
    target_S = target_S.to(torch.int64).contiguous()
    keep = torch.is_grad_enabled() and target_S.numel() * weight_VE.shape[0] <= keep_logits
    if transform.softcap is None and transform.scale != 1:
        temperature_S = temperature_S.double() / transform.scale
    passes = None if kernel is None or transform.softcap is not None else kernel.passes(temperature_S.cpu())
    spare = spare or SpareMemory()
    options = _Options(passes, transform, grad_buffer, bias_grad, entropy_grad, chunk, keep, project, spare)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden_SE, weight_VE, bias_V, target_S, temperature_S, options)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        inverse = temperature.to(hidden.device, wide).reciprocal()
        logp, lse, entropy = (torch.empty(rows, dtype=wide, device=hidden.device) for _ in range(3))
        kept = options.spare.take(rows, vocabulary, weight) if options.keep else None
        passes = options.passes or default_passes(hidden, vocabulary, options.chunk, options.transform)
        columns = Columns(target, inverse, lse, entropy)
        for first, end in _ranges(rows, _product_rows(hidden, options.chunk)):
            chunk = options.logits(hidden[first:end], weight, bias)
            passes.statistics(chunk, first, columns, logp)
            if kept is not None:
                kept[first:end].copy_(chunk)
        # Backward overwrites and releases the kept logits. A second backward computes them again.
        ctx.kept = kept
        ctx.save_for_backward(hidden, weight, bias, target, inverse, lse, entropy)
        ctx.options = options
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, inverse, lse, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        buffer = options.grad_buffer
        if need_weight and buffer is None:
            buffer = torch.zeros_like(weight, dtype=lse.dtype)
        bias_total = options.bias_grad
        if need_bias and bias_total is None:
            bias_total = torch.zeros_like(bias, dtype=lse.dtype)
        entropy_slope = grad_entropy if options.entropy_grad else None
        kept, ctx.kept = ctx.kept, None
        scratch = None
        if kept is None:
            scratch = options.spare.take(min(options.chunk, rows), vocabulary, weight)
        passes = options.passes or default_passes(hidden, vocabulary, options.chunk, options.transform)
        columns = Columns(target, inverse, lse, entropy)
        for first, end in _ranges(rows, options.chunk):
            chunk = kept[first:end] if scratch is None else scratch[: end - first]
            if scratch is not None:
                for low, high in _ranges(end - first, _product_rows(hidden, options.chunk)):
                    chunk[low:high].copy_(options.logits(hidden[first + low : first + high], weight, bias))
            passes.gradient_(chunk, first, columns, grad_logp, entropy_slope)
            if grad_hidden is not None:
                torch.mm(chunk, weight, out=grad_hidden[first:end])
            if need_weight and buffer is not None:
                add_product_(buffer, chunk.t(), hidden[first:end])
            if need_bias and bias_total is not None:
                bias_total.add_(chunk.sum(0, dtype=bias_total.dtype))
        options.spare.put_back(kept if scratch is None else scratch)
        grad_weight = grad_bias = None
        # Sums in the caller's buffers are not returned: autograd would add them a second time.
        if need_weight and buffer is not None and options.grad_buffer is None:
            grad_weight = buffer.to(weight.dtype)
        if need_bias and bias_total is not None and options.bias_grad is None:
            grad_bias = bias_total.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def default_passes(hidden: Tensor, vocabulary: int, chunk: int, transform: HeadTransform = NO_TRANSFORM) -> HeadPasses:
    """Passes without a kernel package: native kernels if they are built and support `hidden` and `transform`, else torch."""
    if transform.softcap is None and native.takes(hidden):
        return NativePasses()
    return TorchPasses(hidden, vocabulary, chunk, transform)


class NativePasses:
    """The native kernel, which reads each row twice. float32 or bfloat16 on a CPU."""

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        rows = slice(first, first + logits.shape[0])
        out = logp[rows], columns.lse[rows], columns.entropy[rows]
        native.head_statistics(logits, columns.inverse[rows], columns.target[rows], *out)

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        rows = slice(first, first + logits.shape[0])
        inverse, lse = columns.inverse[rows], columns.lse[rows]
        entropy = None if grad_entropy is None else (grad_entropy[rows] * inverse, columns.entropy[rows])
        native.head_gradient_(logits, inverse, columns.target[rows], lse, grad_logp[rows] * inverse, entropy)


class TorchPasses:
    """Passes by torch. On a CPU, blocks of a few rows that stay in cache are two to three times faster than all rows at once. An
    instance holds scratch [2, R, V], so it should not outlive one forward or backward. A `transform` without a soft cap is ignored,
    because the caller merges its scale with the temperature."""

    def __init__(self, hidden: Tensor, vocabulary: int, chunk: int, transform: HeadTransform = NO_TRANSFORM) -> None:
        self._cap = None if transform.softcap is None else transform
        self._block = min(chunk, _CAPPED_ROWS) if self._cap is not None else chunk
        if hidden.device.type == "cpu":
            self._block = min(self._block, _CPU_BLOCK_ROWS)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows = min(self._block, hidden.shape[0])
        self._scratch = torch.empty(2, rows, vocabulary, dtype=wide, device=hidden.device)

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        for start, end in _ranges(logits.shape[0], self._block):
            rows = slice(first + start, first + end)
            shifted, weights = self._scratch[0, : end - start], self._scratch[1, : end - start]
            self._scale(logits[start:end], columns.inverse[rows], shifted)
            largest = shifted.amax(1, keepdim=True)
            shifted.sub_(largest)
            torch.exp(shifted, out=weights)
            total = weights.sum(1)
            log_total = total.log()
            picked = shifted.gather(1, columns.target[rows].unsqueeze(1)).squeeze(1)
            torch.sub(picked, log_total, out=logp[rows])
            torch.add(log_total, largest.squeeze(1), out=columns.lse[rows])
            torch.sub(log_total, torch.linalg.vecdot(weights, shifted) / total, out=columns.entropy[rows])

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        for start, end in _ranges(logits.shape[0], self._block):
            rows = slice(first + start, first + end)
            inverse = columns.inverse[rows]
            slope = (grad_logp[rows] * inverse).unsqueeze(1)
            logp, work = self._scratch[0, : end - start], self._scratch[1, : end - start]
            self._scale(logits[start:end], inverse, logp)
            logp.sub_(columns.lse[rows].unsqueeze(1))
            torch.exp(logp, out=work)
            if grad_entropy is None:
                work.mul_(-slope)
            else:
                entropy_slope = (grad_entropy[rows] * inverse).unsqueeze(1)
                logp.add_(columns.entropy[rows].unsqueeze(1)).mul_(entropy_slope).add_(slope)
                work.mul_(logp).neg_()
            work.scatter_add_(1, columns.target[rows].unsqueeze(1), slope)
            if self._cap is not None:
                work.mul_(self._cap.derivative_(self._cap.apply_(logp.copy_(logits[start:end]))))
            logits[start:end].copy_(work)

    def _scale(self, logits: Tensor, inverse: Tensor, out: Tensor) -> None:
        """Writes the logits, soft-capped and divided by the temperature, to `out`."""
        if self._cap is None:
            torch.mul(logits, inverse.unsqueeze(1), out=out)
        else:
            self._cap.apply_(out.copy_(logits)).mul_(inverse.unsqueeze(1))


def _product_rows(hidden: Tensor, chunk: int) -> int:
    return min(_CPU_PRODUCT_ROWS, chunk) if hidden.device.type == "cpu" else chunk


def _ranges(total: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, size):
        yield start, min(start + size, total)
