"""Rows of any lengths through one kernel without padding: training trees, prefill and decode on a GPU.

A kernel takes packed queries [Q, H, D], keys and values [C, K, D], and where each row ends; it gives the output [Q, H, D] and the
log-sum-exp [H, Q]. `FlashKernel` is torch's FlashAttention (versions 2, 3 and 4 stand behind the same two operators). It takes
bfloat16 and float16. What it computes is compared with products in float64 once a process, in the dtype of the run: the gate
compares models in float32 and would not see it.

A training tree takes two calls: every span is causal on itself, and the suffix tokens of each tree attend to their prefix. The two
results of a suffix token are merged by their log-sum-exp; backward gives the merged output and log-sum-exp to both calls, which
makes both gradients exact (Liu et al., arXiv:2310.01889). A layer with a window takes one call: each row's keys are the last
`window - 1` of its prefix and its own. Gradients of keys that several rows share are summed in float32.

Shape legend: T packed tokens, Q queries, C keys, H query heads, K key/value heads, D head size, N rows.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import first_line
from asyncrl.types import Int64Array

from ..copying import to_device
from .rows import Row

logger = logging.getLogger("asyncrl.models")

# Of the largest entry: bfloat16 rounds to 0.004, and gradients of keys are rounded twice.
_WITHIN = 0.02
_WIDEST = 256  # head size


class Ends(NamedTuple):
    """Where rows end in packed tokens: int32 [N + 1] on the device, beginning with 0; and the length of the longest one."""

    ends: Tensor
    longest: int


class RaggedRows(NamedTuple):
    """Which keys the queries of each row see: all; or, `causal`, those up to the query, where the last query stands at the last
    key; and of these the last `window`."""

    queries: Ends
    keys: Ends
    causal: bool
    window: int | None = None


class Kernel(Protocol):
    """See the module. `qkv`: packed queries, keys and values."""

    def forward(self, qkv: Sequence[Tensor], rows: RaggedRows, scaling: float) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp float32 or wider). Without a graph."""
        ...

    def cached(self, qkv: Sequence[Tensor], rows: RaggedRows, used_N: Tensor, scaling: float) -> Tensor:
        """The output over the first `used_N` keys (int32) of each row, which begin at `rows.keys.ends`, in any order."""
        ...

    def backward(
        self, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, rows: RaggedRows, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values. `out`, `lse`: of all keys that a query sees, these and others."""
        ...


class FlashKernel:
    """The kernel of torch: its variable-length FlashAttention."""

    def forward(self, qkv: Sequence[Tensor], rows: RaggedRows, scaling: float) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward(
            *qkv, *_sizes(rows), 0.0, rows.causal, False, scale=scaling, window_size_left=_left(rows.window)
        )
        return found[0], found[1]

    def cached(self, qkv: Sequence[Tensor], rows: RaggedRows, used_N: Tensor, scaling: float) -> Tensor:
        found: Tensor = torch.ops.aten._flash_attention_forward(
            *qkv, *_sizes(rows), 0.0, rows.causal, False,
            scale=scaling, window_size_left=_left(rows.window), seqused_k=used_N,
        )[0]  # fmt: skip
        return found

    def backward(
        self, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, rows: RaggedRows, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.empty(2, dtype=torch.uint64, device=grad.device)  # the state of a dropout that there is not
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *qkv, out, lse, *_sizes(rows), 0.0, rows.causal, nothing, nothing,
            scale=scaling, window_size_left=_left(rows.window),
        )  # fmt: skip
        return found


def _sizes(rows: RaggedRows) -> tuple[Tensor, Tensor, int, int]:
    return rows.queries.ends, rows.keys.ends, rows.queries.longest, rows.keys.longest


def _left(window: int | None) -> int | None:
    return None if window is None else window - 1


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype, size: int) -> Kernel | None:
    """The kernel for heads of this size; None where there is none, or where it computes something else."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.bfloat16, torch.float16):
        return None
    if size % 8 or size > _WIDEST or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    kernel = FlashKernel()
    try:
        found = distance(kernel, device, dtype, size)
    except (RuntimeError, TypeError) as error:
        reason = f"it fails ({first_line(error)})"
    else:
        if found < _WITHIN:
            return kernel
        reason = f"it is {found:.2g} from float64"
    logger.warning(
        "torch's flash attention is not used for heads of %d in %s: %s; padded rows are slower", size, dtype, reason
    )
    return None


def distance(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """How far the kernel is from products in float64: the largest error of an output or gradient, over its largest entry."""
    lengths_q, lengths_k, heads, kv_heads = [5, 70, 1, 130], [64, 70, 33, 200], 4, 2
    draw = torch.Generator().manual_seed(0)
    queries, keys = ends_of(lengths_q, device), ends_of(lengths_k, device)
    shapes = (sum(lengths_q), heads), (sum(lengths_k), kv_heads), (sum(lengths_k), kv_heads), (sum(lengths_q), heads)
    *qkv, grad = (torch.randn(*shape, size, generator=draw).to(device, dtype) for shape in shapes)
    worst, scaling = 0.0, size**-0.5
    for rows in (
        RaggedRows(queries, keys, False),
        RaggedRows(queries, keys, True),
        RaggedRows(queries, keys, True, 40),
    ):
        out, lse = kernel.forward(qkv, rows, scaling)
        found = [out, *kernel.backward(grad, qkv, out, lse, rows, scaling)]
        wide = [part.double().requires_grad_() for part in qkv]
        with torch.enable_grad():
            q, k, v = wide
            slices = zip(_slices(lengths_q), _slices(lengths_k), strict=True)
            exact = torch.cat([_products(q[own], k[seen], v[seen], rows, scaling) for own, seen in slices])
        right = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
        for mine, theirs in zip(found, right, strict=True):
            worst = max(worst, float((mine.double() - theirs).abs().max() / theirs.abs().max()))
        if rows.causal:
            used = torch.tensor(lengths_k, dtype=torch.int32, device=device)
            worst = max(worst, float((kernel.cached(qkv, rows, used, scaling) - out).abs().max()))
    return worst


def _slices(lengths: list[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(np.cumsum([0, *lengths]).tolist())]


def _products(q: Tensor, k: Tensor, v: Tensor, rows: RaggedRows, scaling: float) -> Tensor:
    """[Q, H, D] of one row, by the definition."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scaling
    if rows.causal:
        ahead = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
        hidden = (ahead < 0) | (ahead >= (rows.window or len(k)))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))


def ends_of(lengths: Sequence[int] | Int64Array, device: torch.device) -> Ends:
    """Of rows of these lengths, one after the other."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Ends(to_device(ends, device), int(np.max(lengths, initial=0)))


class RaggedTree:
    """A training tree without a window. `rows`: every packed token once as an own token, see `Row`."""

    def __init__(self, kernel: Kernel, rows: list[Row], device: torch.device) -> None:
        rows = sorted(rows, key=lambda row: row[2])
        self.kernel = kernel
        own = ends_of([length for *_, length in rows], device)
        self.own = RaggedRows(own, own, causal=True)
        # Suffixes of one tree are adjacent: they attend to their prefix as one row.
        behind: dict[tuple[int, int], list[int]] = {}
        for prefix_start, prefix, start, length in rows:
            if prefix:
                behind.setdefault((prefix_start, prefix), []).extend((start, start + length))
        queries = ends_of([max(places) - min(places) for places in behind.values()], device)
        self.across = RaggedRows(queries, ends_of([prefix for _, prefix in behind], device), causal=False)
        self.suffixes = _index([(min(places), max(places)) for places in behind.values()], device)
        self.prefixes = _index([(start, start + length) for start, length in behind], device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """[T, H, D], [T, K, D] twice -> the output [T, H, D] and its log-sum-exp [H, T]."""
        out, lse = self.kernel.forward((query, key, value), self.own, scaling)
        if not self.across.queries.longest:
            return out, lse
        own, seen = self.suffixes, self.prefixes
        part, part_lse = self.kernel.forward((query[own], key[seen], value[seen]), self.across, scaling)
        own_lse = lse[:, own]
        joint = torch.logaddexp(own_lse, part_lse)
        merged = out[own] * (own_lse - joint).exp_().t().unsqueeze(-1)
        out[own] = merged.addcmul_(part, (part_lse - joint).exp_().t().unsqueeze(-1)).to(out.dtype)
        lse[:, own] = joint
        return out, lse

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """`gradients` become those of query, key and value. `saved`: these three and what `forward` gave."""
        query, key, value, out, lse = saved
        found = self.kernel.backward(grad, (query, key, value), out, lse, self.own, scaling)
        for target, part in zip(gradients, found, strict=True):
            target.copy_(part)
        if not self.across.queries.longest:
            return
        own, seen = self.suffixes, self.prefixes
        parts = self.kernel.backward(
            grad[own], (query[own], key[seen], value[seen]), out[own], lse[:, own].contiguous(), self.across, scaling
        )
        for target, part, rows in zip(gradients, parts, (own, seen, seen), strict=True):
            # torch adds in float32 and rounds once
            if isinstance(rows, slice):
                target[rows].add_(part)
            else:
                target[rows] = target[rows] + part


class RaggedWindow:
    """The same of a layer whose queries see `window` tokens."""

    def __init__(self, kernel: Kernel, rows: list[Row], window: int, device: torch.device) -> None:
        rows = sorted(rows, key=lambda row: row[2])
        self.kernel = kernel
        tails = [min(prefix, window - 1) for _, prefix, _, _ in rows]
        queries = ends_of([length for *_, length in rows], device)
        keys = ends_of([tail + row[3] for tail, row in zip(tails, rows, strict=True)], device)
        self.rows = RaggedRows(queries, keys, True, window)
        spans = []
        for tail, (prefix_start, prefix, start, length) in zip(tails, rows, strict=True):
            spans += [(prefix_start + prefix - tail, prefix_start + prefix), (start, start + length)]
        self.seen = to_device(np.concatenate([np.arange(*span) for span in spans]), device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(self._with_keys(query, key, value), self.rows, scaling)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        query, key, value, out, lse = saved
        found = self.kernel.backward(grad, self._with_keys(query, key, value), out, lse, self.rows, scaling)
        gradients[0].copy_(found[0])
        for target, part in zip(gradients[1:], found[1:], strict=True):
            total = torch.zeros(target.shape, dtype=torch.promote_types(part.dtype, torch.float32), device=part.device)
            target.copy_(total.index_add_(0, self.seen, part.to(total.dtype)))

    def _with_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key[self.seen], value[self.seen]


def _index(spans: list[tuple[int, int]], device: torch.device) -> slice | Tensor:
    """The packed tokens [first, end) of each span: a slice where they are one, which costs no launch, else int64."""
    if len(spans) < 2:
        return slice(*spans[0]) if spans else slice(0, 0)
    return to_device(np.concatenate([np.arange(*span) for span in spans]), device)
