"""Attention over rows of any lengths, without padding, by torch's FlashAttention.

A kernel reads packed queries [Q, H, D], packed keys and values [C, K, D], and the end of each row. It returns the output
[Q, H, D] and the log-sum-exp [H, Q]. `FlashKernel` is for bfloat16 and float16 on a GPU: training, prefill and decode. Each process
compares this kernel with products in float64, because the comparison of whole models (runtime/gate.py) runs in float32, without the
kernel. `CpuKernel` is for training and prefill on a CPU.

A layer without a window takes several calls. First each token attends to its own node of the packed tree (tree.py). Then each level
of inner nodes (on a CPU each inner node) takes one call: the descendants of each node of the level attend to that node. Descendants
of a node are adjacent. Nodes of a level share no descendant. The log-sum-exps weigh the outputs of the calls. Backward gives all
calls the final output and log-sum-exp. So all gradients are exact, as in ring attention (Liu et al., arXiv:2310.01889).

A layer with a window takes one call. The keys of a row are its own tokens and the last `window - 1` tokens of its context.
Gradients of keys that several rows share are summed in float32.

Shape legend: T packed tokens, Q queries, C keys, H query heads, K key/value heads, D head size, N rows.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import first_line
from asyncrl.types import Int64Array

from ..copying import to_device
from .rows import NodeRow

logger = logging.getLogger("asyncrl.models")

# Accepted error of a kernel, as a share of the largest entry. Rounding to bfloat16 has a relative error of up to 0.004.
# Gradients of keys are rounded twice.
_TOLERANCE = 0.02
_MAX_HEAD_SIZE = 256
_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ends(NamedTuple):
    """Cumulative lengths of packed rows from 0 on. For the keys of `FlashKernel.cached`: the index of each row's first key."""

    ends: Tensor  # int32 [N + 1], on the device
    longest: int  # the largest length of a row


class RaggedRows(NamedTuple):
    """The rows of one kernel call. If `causal`, the last query of a row is at the position of its last key, and a query sees the
    last `window` keys (None: all) up to its own position. If not `causal`, a query sees all keys of its row."""

    queries: Ends
    keys: Ends
    causal: bool
    window: int | None = None


class FlashKernel:
    """torch's variable-length FlashAttention, of version 2, 3 or 4 (torch chooses). `qkv`: packed queries, keys and values."""

    def forward(self, qkv: Sequence[Tensor], rows: RaggedRows, scaling: float) -> tuple[Tensor, Tensor]:
        """(output [Q, H, D], log-sum-exp [H, Q] in float32 or wider). Autograd does not record this call."""
        results = torch.ops.aten._flash_attention_forward(
            *qkv, *_sizes(rows), 0.0, rows.causal, False, scale=scaling, window_size_left=_keys_before(rows.window)
        )
        return results[0], results[1]

    def cached(self, qkv: Sequence[Tensor], rows: RaggedRows, used_N: Tensor, scaling: float) -> Tensor:
        """The output [Q, H, D] over keys in a cache: `rows.keys.ends[n]` is the index of row n's first key, and `used_N[n]` (int32)
        the number of row n's keys."""
        output: Tensor = torch.ops.aten._flash_attention_forward(
            *qkv, *_sizes(rows), 0.0, rows.causal, False,
            scale=scaling, window_size_left=_keys_before(rows.window), seqused_k=used_N,
        )[0]  # fmt: skip
        return output

    def backward(
        self, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, rows: RaggedRows, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values. `out` and `lse` must cover all keys of a query, also keys of other calls."""
        # The operator requires the random state of dropout, and does not read this tensor at a dropout rate of 0.
        unused = torch.empty(2, dtype=torch.uint64, device=grad.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *qkv, out, lse, *_sizes(rows), 0.0, rows.causal, unused, unused,
            scale=scaling, window_size_left=_keys_before(rows.window),
        )  # fmt: skip
        return gradients


def _sizes(rows: RaggedRows) -> tuple[Tensor, Tensor, int, int]:
    return rows.queries.ends, rows.keys.ends, rows.queries.longest, rows.keys.longest


def _keys_before(window: int | None) -> int | None:
    return None if window is None else window - 1


class CpuKernel:
    """torch's FlashAttention for CPUs, called once for each row. See `FlashKernel`. Has no windows. 16-bit types are computed in
    float32, and results stay float32: backward takes five times as long in bfloat16 as in float32."""

    def forward(self, qkv: Sequence[Tensor], rows: RaggedRows, scaling: float) -> tuple[Tensor, Tensor]:
        query, key, value = map(_wide, qkv)
        out = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[1], query.shape[0], dtype=query.dtype)
        for own, seen in _pairs(rows):
            inputs = map(_heads_first, (query[own], key[seen], value[seen]))
            part, part_lse = _cpu_forward(*inputs, 0.0, rows.causal, scale=scaling)
            out[own], lse[:, own] = part[0].transpose(0, 1), part_lse[0]
        return out, lse

    def backward(
        self, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, rows: RaggedRows, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, grad, out = map(_wide, (*qkv, grad, out))
        gradients = tuple(torch.empty(part.shape, dtype=part.dtype) for part in (query, key, value))
        for own, seen in _pairs(rows):
            inputs = map(_heads_first, (grad[own], query[own], key[seen], value[seen], out[own]))
            parts = _cpu_backward(*inputs, lse[None, :, own].contiguous(), 0.0, rows.causal, scale=scaling)
            for target, index, part in zip(gradients, (own, seen, seen), parts, strict=True):
                target[index] = part[0].transpose(0, 1)
        return gradients[0], gradients[1], gradients[2]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _heads_first(packed: Tensor) -> Tensor:
    """View [1, X, L, D] of one row [L, X, D]."""
    return packed.transpose(0, 1).unsqueeze(0)


def _pairs(rows: RaggedRows) -> Iterator[tuple[slice, slice]]:
    """The packed queries and the packed keys of each row."""
    pairs = (itertools.pairwise(part.ends.tolist()) for part in (rows.queries, rows.keys))
    for own, seen in zip(*pairs, strict=True):
        yield slice(*own), slice(*seen)


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype, size: int) -> FlashKernel | None:
    """The kernel for heads of `size` values, or None. Warns if a kernel exists, but fails or is too far from float64."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.bfloat16, torch.float16):
        return None
    if size % 8 or size > _MAX_HEAD_SIZE or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    kernel = FlashKernel()
    try:
        error_share = largest_error(kernel, device, dtype, size)
    except (RuntimeError, TypeError) as error:
        reason = f"the kernel fails ({first_line(error)})"
    else:
        if error_share < _TOLERANCE:
            return kernel
        reason = f"the kernel's error against float64 is {error_share:.2g} of the largest entry"
    logger.warning(
        "torch's flash attention is not used for heads of size %d in %s, because %s; attention on padded rows is used instead, "
        "and is slower", size, dtype, reason,
    )  # fmt: skip
    return None


def largest_error(kernel: FlashKernel, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The largest error of outputs and gradients against float64, relative to the largest entry of the tensor. Or the largest
    difference between `cached` and `forward`, if that is larger. NaN if one of these numbers is NaN."""
    lengths_q, lengths_k, heads, kv_heads = [5, 70, 1, 130], [64, 70, 33, 200], 4, 2
    generator = torch.Generator().manual_seed(0)
    queries, keys = ends_of(lengths_q, device), ends_of(lengths_k, device)
    shapes = (sum(lengths_q), heads), (sum(lengths_k), kv_heads), (sum(lengths_k), kv_heads), (sum(lengths_q), heads)
    *qkv, grad = (torch.randn(*shape, size, generator=generator).to(device, dtype) for shape in shapes)
    errors, scaling = list[Tensor](), size**-0.5
    for causal, window in ((False, None), (True, None), (True, 40)):
        rows = RaggedRows(queries, keys, causal, window)
        out, lse = kernel.forward(qkv, rows, scaling)
        tested = [out, *kernel.backward(grad, qkv, out, lse, rows, scaling)]
        wide = [part.double().requires_grad_() for part in qkv]
        with torch.enable_grad():
            q, k, v = wide
            exact = torch.cat([_products(q[own], k[seen], v[seen], rows, scaling) for own, seen in _pairs(rows)])
        references = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
        for tensor, reference in zip(tested, references, strict=True):
            errors.append((tensor.double() - reference).abs().max() / reference.abs().max())
        if causal:
            used = torch.tensor(lengths_k, dtype=torch.int32, device=device)
            errors.append((kernel.cached(qkv, rows, used, scaling) - out).abs().max().double())
    return float(torch.stack(errors).max())


def _products(q: Tensor, k: Tensor, v: Tensor, rows: RaggedRows, scaling: float) -> Tensor:
    """The output [Q, H, D] of one row: all scores, a mask and a softmax."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scaling
    if rows.causal:
        positions = torch.arange(len(q), device=q.device) + len(k) - len(q)
        distance = positions[:, None] - torch.arange(len(k), device=q.device)
        hidden = (distance < 0) | (distance >= (rows.window or len(k)))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))


def ends_of(lengths: Sequence[int] | Int64Array, device: torch.device) -> Ends:
    """`Ends` of rows of these lengths that are packed one after the other."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Ends(to_device(ends, device), int(np.max(lengths, initial=0)))


class _Level(NamedTuple):
    """One kernel call: the descendants of each inner node of one level attend to the node."""

    rows: RaggedRows
    descendants: slice | Tensor  # packed indices of the descendants
    own_tokens: slice | Tensor  # packed indices of the nodes' own tokens


class RaggedTree:
    """Attention over all packed trees of a plan, without a window. `rows` and `levels`: those of `TreePlan`."""

    def __init__(
        self,
        kernel: FlashKernel | CpuKernel,
        rows: list[NodeRow],
        levels: Sequence[Sequence[tuple[slice, slice]]],
        device: torch.device,
    ) -> None:
        self.kernel = kernel
        own = ends_of([row.length for row in rows], device)
        self.own_rows = RaggedRows(own, own, causal=True)
        self.levels = []
        for level in levels:
            columns = list(zip(*level, strict=True))  # the descendants, the nodes
            queries, keys = (ends_of([part.stop - part.start for part in parts], device) for parts in columns)
            self.levels.append(_Level(RaggedRows(queries, keys, False), *(_index(parts, device) for parts in columns)))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> the output [T, H, D] and its log-sum-exp [H, T]."""
        out, lse = self.kernel.forward((query, key, value), self.own_rows, scaling)
        # With one level, a sum in 16 bits costs only one more rounding. Sums of several levels are float32, and rounded once.
        total = out if len(self.levels) < 2 else out.to(lse.dtype)
        for rows, descendants, own_tokens in self.levels:
            qkv, lse_before = (query[descendants], key[own_tokens], value[own_tokens]), lse[:, descendants]
            part, part_lse = self.kernel.forward(qkv, rows, scaling)
            share = (part_lse - lse_before).sigmoid_().t().unsqueeze(-1)  # the node's part of the joint softmax
            total[descendants] = (total[descendants] * (1 - share)).addcmul_(part, share).to(total.dtype)
            lse[:, descendants] = torch.logaddexp(lse_before, part_lse)
        return total.to(query.dtype), lse

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Writes the gradients of query, key and value into `gradients`. `saved` is (query, key, value, output, log-sum-exp)."""
        query, key, value, out, lse = saved
        sums = list(self.kernel.backward(grad, (query, key, value), out, lse, self.own_rows, scaling))
        # A key gets gradients from its own node and at most one level. A query gets them from its own node and each level above.
        if len(self.levels) > 1:
            sums[0] = sums[0].to(lse.dtype)
        for rows, descendants, own_tokens in self.levels:
            qkv, part_lse = (query[descendants], key[own_tokens], value[own_tokens]), lse[:, descendants].contiguous()
            parts = self.kernel.backward(grad[descendants], qkv, out[descendants], part_lse, rows, scaling)
            for total, part, index in zip(sums, parts, (descendants, own_tokens, own_tokens), strict=True):
                # For 16-bit tensors torch adds in float32 and rounds once. No index occurs twice, so the order has no effect.
                if isinstance(index, slice):
                    total[index].add_(part)
                else:
                    total.index_add_(0, index, part.to(total.dtype))
        for target, total in zip(gradients, sums, strict=True):
            target.copy_(total)


class RaggedWindow:
    """Attention over packed trees in which a query sees itself and up to `window - 1` earlier tokens. `rows`: of a `TreePlan`."""

    def __init__(self, kernel: FlashKernel, rows: list[NodeRow], window: int, device: torch.device) -> None:
        self.kernel = kernel
        tails = [row.context[max(0, row.context.size + 1 - window) :] for row in rows]
        queries = ends_of([row.length for row in rows], device)
        keys = ends_of([tail.size + row.length for tail, row in zip(tails, rows, strict=True)], device)
        self.rows = RaggedRows(queries, keys, True, window)
        parts = [part for tail, row in zip(tails, rows, strict=True) for part in (tail, np.r_[row.own])]
        self.key_index = to_device(np.concatenate(parts), device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(self._with_keys(query, key, value), self.rows, scaling)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        query, key, value, out, lse = saved
        parts = self.kernel.backward(grad, self._with_keys(query, key, value), out, lse, self.rows, scaling)
        gradients[0].copy_(parts[0])
        for target, part in zip(gradients[1:], parts[1:], strict=True):
            total = torch.zeros(target.shape, dtype=torch.promote_types(part.dtype, torch.float32), device=part.device)
            target.copy_(total.index_add_(0, self.key_index, part.to(total.dtype)))

    def _with_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key[self.key_index], value[self.key_index]


def _index(parts: Sequence[slice], device: torch.device) -> slice | Tensor:
    """The packed indices of all parts: int64, or for a single part a slice, which costs no launch."""
    return parts[0] if len(parts) == 1 else to_device(np.r_[tuple(parts)], device)
