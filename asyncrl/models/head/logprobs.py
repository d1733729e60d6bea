"""Log-probs and entropies of scored tokens without the logits of all tokens at once.

Forward goes over chunks of rows and keeps three numbers a row; backward turns a chunk's logits, in place, into their
gradient. Up to `KEEP_LOGITS` of them wait for it; more are computed again, so memory is bounded by that or by one chunk of
[chunk, V], whatever S is.

    z = logits / T (of logits as head.py says),   logp = z[target] - lse(z),   p = softmax(z),   entropy = -sum p log p
    d logp / d z = onehot - p,   d entropy / d z = -p (log p + entropy)

Products are in the dtype of the weight; everything after them is float32 (float64 for float64 weights). On a CPU the
softmax runs over a few rows at a time: they stay in cache between its passes, which makes it two to three times faster; the
native kernels, where they were built, go over each row twice. A scale of the logits is a part of the temperature; soft-capped
ones are capped in scratch, a few rows at a time.

Where Liger's kernels may be used (liger_head.py) they take the place of `own_passes`: the same function, the same results.

Shape legend: S scored tokens, E hidden size, V vocabulary, C rows of a chunk, R rows of a block in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..native import library as native
from ..parameters.flat import add_wider_
from .output import PLAIN_HEAD, HeadTransform

# Of backward: fewer would add to the whole weight gradient more often.
CHUNK_ROWS = 512
# A usual microbatch. More of them cost an eighth of what full logits would, or less.
KEEP_LOGITS = 2048 * 49_152
# Of one forward product; measured: 64 cost a tenth more in float32.
_PRODUCT_ROWS = {torch.float32: 256}
# Of any other dtype: in bfloat16 256 save no time and hold four times the memory.
_FEW_ROWS = 64
_CPU_BLOCK_ROWS = 16
_CAPPED_ROWS = 128  # on a GPU: each takes four rows of wide scratch
_VOCABULARY_BLOCK = 4096


class Spare:
    """Memory for logits that wait, kept from one forward to the next: fresh pages cost more than what is written to them.

    A forward borrows it and its backward gives it back; who comes in between gets memory of its own.
    """

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """[rows, columns] of the dtype and device of `like`, uninitialised, contiguous."""
        size = rows * columns * like.element_size()
        spare, self._bytes = self._bytes, None
        if spare is None or spare.numel() < size or spare.device != like.device:
            spare = torch.empty(size, dtype=torch.uint8, device=like.device)
        return spare[:size].view(like.dtype).view(rows, columns)

    def give(self, tensor: Tensor) -> None:
        """What `take` gave; nobody may read it any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Columns:
    """Of all scored tokens, [S] each: target int64, the others float32 (float64 for float64 weights)."""

    target: Tensor
    inverse: Tensor  # 1 / temperature
    lse: Tensor
    entropy: Tensor


class HeadPasses(Protocol):
    """What happens to the logits [R, V] of the rows `first`, `first + 1`, ... between the products with the weight."""

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        """Writes logp, `columns.lse` and `columns.entropy` of these rows. Reads the logits only."""

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        """The logits become their gradient, in place. Gradients of the results are [S]; None: the entropy has none."""


class HeadKernel(Protocol):
    """A kernel package that may take the place of `own_passes`."""

    def passes(self, temperature_S: Tensor) -> HeadPasses | None:
        """For rows at these temperatures (on the host); None where torch's are to be used."""


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
    spare: Spare

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
    transform: HeadTransform = PLAIN_HEAD,
    grad_buffer: Tensor | None = None,
    bias_grad: Tensor | None = None,
    entropy_grad: bool = False,
    chunk: int = CHUNK_ROWS,
    keep_logits: int = KEEP_LOGITS,
    project: Callable[[Tensor], Tensor] | None = None,
    spare: Spare | None = None,
    kernel: HeadKernel | None = None,
) -> tuple[Tensor, Tensor]:
    """`log softmax(transform(hidden @ weight.T + bias) / temperature)[target]` [S] and the entropy of that distribution [S], in
    nats.

    hidden_SE, weight_VE and bias_V share a dtype; target_S is int64; temperature_S is float, > 0, on any device.
    Results are float32, or float64 for float64 inputs. The entropy carries gradient only with `entropy_grad`.
    grad_buffer: [V, E] in the accumulation dtype. Backward adds the gradient of the weight to it (float32 sums for a
    bfloat16 weight, and no temporary of that size for a float32 one) and reports none to autograd. bias_grad: [V], the same
    for the bias.
    keep_logits: most logits that wait for backward, in `spare`. project: `hidden @ weight.T + bias` of some rows, faster.
    kernel: what does the passes over the logits instead of torch, but for soft-capped ones. It asks for temperatures on the host:
    there they cost no wait.
    Targets are within the vocabulary (training/passes.py sees to it): native passes read and write there without looking.
    """
    target_S = target_S.to(torch.int64).contiguous()
    keep = torch.is_grad_enabled() and target_S.numel() * weight_VE.shape[0] <= keep_logits
    if transform.softcap is None and transform.scale != 1:
        temperature_S = temperature_S.double() / transform.scale
    passes = None if kernel is None or transform.softcap is not None else kernel.passes(temperature_S.cpu())
    options = _Options(passes, transform, grad_buffer, bias_grad, entropy_grad, chunk, keep, project, spare or Spare())
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
        passes = options.passes or own_passes(hidden, vocabulary, options.chunk, options.transform)
        columns = Columns(target, inverse, lse, entropy)
        for first, last in _ranges(rows, _product_rows(hidden, options.chunk)):
            chunk = options.logits(hidden[first:last], weight, bias)
            passes.statistics(chunk, first, columns, logp)
            if kept is not None:
                kept[first:last].copy_(chunk)
        # Becomes a gradient in place: one backward only, as everywhere else here.
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
        bend = grad_entropy if options.entropy_grad else None
        kept, ctx.kept = ctx.kept, None
        fresh = None
        if kept is None:
            fresh = options.spare.take(min(options.chunk, rows), vocabulary, weight)  # not beside what once waited
        passes = options.passes or own_passes(hidden, vocabulary, options.chunk, options.transform)
        columns = Columns(target, inverse, lse, entropy)
        for first, last in _ranges(rows, options.chunk):
            chunk = kept[first:last] if fresh is None else fresh[: last - first]
            if fresh is not None:
                for start, end in _ranges(last - first, _product_rows(hidden, options.chunk)):
                    chunk[start:end].copy_(options.logits(hidden[first + start : first + end], weight, bias))
            passes.gradient_(chunk, first, columns, grad_logp, bend)
            if grad_hidden is not None:
                torch.mm(chunk, weight, out=grad_hidden[first:last])
            if need_weight and buffer is not None:
                _accumulate(buffer, chunk, hidden[first:last])
            if need_bias and bias_total is not None:
                bias_total.add_(chunk.sum(0, dtype=bias_total.dtype))
        options.spare.give(kept if fresh is None else fresh)
        reports = (
            total.to(weight.dtype) if needed and theirs is None and total is not None else None
            for needed, theirs, total in (
                (need_weight, options.grad_buffer, buffer),
                (need_bias, options.bias_grad, bias_total),
            )
        )
        return grad_hidden, *reports, None, None, None


def own_passes(hidden: Tensor, vocabulary: int, chunk: int, transform: HeadTransform = PLAIN_HEAD) -> HeadPasses:
    """Those of no kernel package: native on a CPU where they were built, torch's elsewhere."""
    if transform.softcap is not None:
        return CappedPasses(hidden, vocabulary, chunk, transform)
    return NativePasses() if native.takes(hidden) else TorchPasses(hidden, vocabulary, chunk)


class NativePasses:
    """Two passes of a native kernel over each row. float32 or bfloat16 on a CPU."""

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        here = slice(first, first + logits.shape[0])
        out = logp[here], columns.lse[here], columns.entropy[here]
        native.head_statistics(logits, columns.inverse[here], columns.target[here], *out)

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        here = slice(first, first + logits.shape[0])
        inverse, lse = columns.inverse[here], columns.lse[here]
        bend = None if grad_entropy is None else (grad_entropy[here] * inverse, columns.entropy[here])
        native.head_gradient_(logits, inverse, columns.target[here], lse, grad_logp[here] * inverse, bend)


class TorchPasses:
    """Several passes of torch; on a CPU over a few rows at a time. Owns [2, R, V] of scratch, so it lives for one phase."""

    def __init__(self, hidden: Tensor, vocabulary: int, chunk: int) -> None:
        self._block = _block_rows(hidden, chunk)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows = min(self._block, hidden.shape[0])
        self._scratch = torch.empty(2, rows, vocabulary, dtype=wide, device=hidden.device)

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        for start, end in _ranges(logits.shape[0], self._block):
            here = slice(first + start, first + end)
            _statistics(
                logits[start:end], columns.inverse[here], columns.target[here], self._scratch[:, : end - start],
                logp[here], columns.lse[here], columns.entropy[here],
            )  # fmt: skip

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        for start, end in _ranges(logits.shape[0], self._block):
            here = slice(first + start, first + end)
            inverse = columns.inverse[here]
            bend = None if grad_entropy is None else (grad_entropy[here] * inverse, columns.entropy[here])
            _logits_gradient(
                logits[start:end], inverse, columns.target[here], columns.lse[here], grad_logp[here] * inverse, bend,
                self._scratch[:, : end - start],
            )  # fmt: skip


class CappedPasses:
    """The same over soft-capped logits, which exist a few rows at a time and in the columns' dtype. Owns [2, R, V] of them."""

    def __init__(self, hidden: Tensor, vocabulary: int, chunk: int, transform: HeadTransform) -> None:
        self._transform = transform
        self._block = _block_rows(hidden, min(chunk, _CAPPED_ROWS))
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._scratch = torch.empty(2, min(self._block, hidden.shape[0]), vocabulary, dtype=wide, device=hidden.device)
        self._inner = own_passes(self._scratch[0], vocabulary, self._block)

    def statistics(self, logits: Tensor, first: int, columns: Columns, logp: Tensor) -> None:
        """As `HeadPasses.statistics`; the logits are read uncapped and stay so."""
        for start, end in _ranges(logits.shape[0], self._block):
            capped = self._transform.apply_(self._scratch[0, : end - start].copy_(logits[start:end]))
            self._inner.statistics(capped, first + start, columns, logp)

    def gradient_(
        self, logits: Tensor, first: int, columns: Columns, grad_logp: Tensor, grad_entropy: Tensor | None
    ) -> None:
        """As `HeadPasses.gradient_`: of the uncapped logits."""
        for start, end in _ranges(logits.shape[0], self._block):
            capped = self._transform.apply_(self._scratch[0, : end - start].copy_(logits[start:end]))
            slope = self._transform.derivative_(self._scratch[1, : end - start].copy_(capped))
            self._inner.gradient_(capped, first + start, columns, grad_logp, grad_entropy)
            logits[start:end].copy_(capped.mul_(slope))


def _statistics(
    logits: Tensor, inverse: Tensor, target: Tensor, scratch: Tensor, logp: Tensor, lse: Tensor, entropy: Tensor
) -> None:
    """One block: logits [R, V] -> `logp`, `lse`, `entropy` [R], written in place. `scratch` is [2, R, V]."""
    shifted, weights = scratch[0], scratch[1]
    torch.mul(logits, inverse.unsqueeze(1), out=shifted)
    largest = shifted.amax(1, keepdim=True)
    shifted.sub_(largest)
    torch.exp(shifted, out=weights)
    total = weights.sum(1)
    log_total = total.log()
    picked = shifted.gather(1, target.unsqueeze(1)).squeeze(1)
    torch.sub(picked, log_total, out=logp)
    torch.add(log_total, largest.squeeze(1), out=lse)
    mean = torch.linalg.vecdot(weights, shifted) / total
    torch.sub(log_total, mean, out=entropy)


def _logits_gradient(
    logits: Tensor,
    inverse: Tensor,
    target: Tensor,
    lse: Tensor,
    slope: Tensor,
    bend: tuple[Tensor, Tensor] | None,
    scratch: Tensor,
) -> None:
    """One block: logits [R, V] become their gradient, in place. `slope` and `bend[0]` are divided by T already."""
    logp, work = scratch[0], scratch[1]
    torch.mul(logits, inverse.unsqueeze(1), out=logp)
    logp.sub_(lse.unsqueeze(1))
    torch.exp(logp, out=work)
    if bend is None:
        work.mul_(-slope.unsqueeze(1))
    else:
        outer, entropy = bend
        logp.add_(entropy.unsqueeze(1)).mul_(outer.unsqueeze(1)).add_(slope.unsqueeze(1))
        work.mul_(logp).neg_()
    work.scatter_add_(1, target.unsqueeze(1), slope.unsqueeze(1))
    logits.copy_(work)


def _accumulate(buffer: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """buffer [V, E] += grad_logits.T @ hidden, in blocks of the vocabulary where the sum is wider than the product."""
    if buffer.dtype == hidden.dtype:
        buffer.addmm_(grad_logits.t(), hidden)
        return
    product = torch.empty(
        min(_VOCABULARY_BLOCK, buffer.shape[0]), buffer.shape[1], dtype=hidden.dtype, device=hidden.device
    )
    for start, end in _ranges(buffer.shape[0], _VOCABULARY_BLOCK):
        part = product[: end - start]
        add_wider_(buffer[start:end], torch.mm(grad_logits[:, start:end].t(), hidden, out=part))


def _block_rows(hidden: Tensor, chunk: int) -> int:
    return min(_CPU_BLOCK_ROWS, chunk) if hidden.device.type == "cpu" else chunk


def _product_rows(hidden: Tensor, chunk: int) -> int:
    return min(_PRODUCT_ROWS.get(hidden.dtype, _FEW_ROWS), chunk) if hidden.device.type == "cpu" else chunk


def _ranges(total: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, size):
        yield start, min(start + size, total)
