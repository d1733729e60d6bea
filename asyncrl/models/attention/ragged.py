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

from .rows import Row

logger = logging.getLogger("asyncrl.models")

_WITHIN = 0.02  # of the largest entry: bfloat16 rounds to 0.004, and gradients of keys are rounded twice
_WIDEST = 256  # head size


class Ends(NamedTuple):
    """Where rows end in packed tokens: int32 [N + 1] on the device, beginning with 0; and the length of the longest one."""

    ends: Tensor
    longest: int


class Kernel(Protocol):
    """See the module. `causal` aligns the last query of a row with its last key. `window`: a query sees itself and the `window - 1`
    keys before it; only with `causal`."""

    def forward(
        self, qkv: Sequence[Tensor], queries: Ends, keys: Ends, scaling: float, causal: bool, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp float32)."""
        ...

    def cached(
        self, qkv: Sequence[Tensor], queries: Ends, keys: Ends, used_N: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Causal, over the first `used_N` keys (int32) of each row, which begin at `keys.ends`. The output, without a graph."""
        ...

    def backward(
        self,
        grad: Tensor,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        queries: Ends,
        keys: Ends,
        scaling: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values. `out`, `lse`: of all keys that a query sees, these and others."""
        ...


class FlashKernel:
    """torch's own."""

    def forward(
        self, qkv: Sequence[Tensor], queries: Ends, keys: Ends, scaling: float, causal: bool, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`."""
        found = torch.ops.aten._flash_attention_forward(
            *qkv, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, causal, False,
            scale=scaling, window_size_left=_left(window),
        )  # fmt: skip
        return found[0], found[1]

    def cached(
        self, qkv: Sequence[Tensor], queries: Ends, keys: Ends, used_N: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """As `Kernel.cached`."""
        found: Tensor = torch.ops.aten._flash_attention_forward(
            *qkv, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, True, False,
            scale=scaling, window_size_left=_left(window), seqused_k=used_N,
        )[0]  # fmt: skip
        return found

    def backward(
        self,
        grad: Tensor,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        queries: Ends,
        keys: Ends,
        scaling: float,
        causal: bool,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Kernel.backward`."""
        nothing = torch.empty(2, dtype=torch.uint64, device=grad.device)  # the state of a dropout that there is not
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *qkv, out, lse, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, causal, nothing, nothing,
            scale=scaling, window_size_left=_left(window),
        )  # fmt: skip
        return found


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
    for causal, window in ((False, None), (True, None), (True, 40)):
        out, lse = kernel.forward(qkv, queries, keys, scaling, causal, window)
        found = [out, *kernel.backward(grad, qkv, out, lse, queries, keys, scaling, causal, window)]
        wide = [part.double().requires_grad_() for part in qkv]
        with torch.enable_grad():
            q, k, v = wide
            rows = zip(_slices(lengths_q), _slices(lengths_k), strict=True)
            exact = torch.cat([_products(q[own], k[seen], v[seen], scaling, causal, window) for own, seen in rows])
        right = [exact.detach(), *torch.autograd.grad(exact, wide, grad.double())]
        for mine, theirs in zip(found, right, strict=True):
            worst = max(worst, float((mine.double() - theirs).abs().max() / theirs.abs().max()))
        if causal:
            used = torch.tensor(lengths_k, dtype=torch.int32, device=device)
            same = kernel.cached(qkv, queries, keys, used, scaling, window)
            worst = max(worst, float((same - out).abs().max()))
    return worst


def _slices(lengths: list[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(np.cumsum([0, *lengths]).tolist())]


def _products(q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool, window: int | None) -> Tensor:
    """[Q, H, D] of one row, by the definition."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scaling
    if causal:
        ahead = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
        hidden = ahead < 0 if window is None else (ahead < 0) | (ahead >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))


def ends_of(lengths: Sequence[int] | Int64Array, device: torch.device) -> Ends:
    """Of rows of these lengths, one after the other."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Ends(torch.from_numpy(ends).to(device, non_blocking=True), int(np.max(lengths, initial=0)))


class RaggedTree:
    """A training tree without a window. `rows`: every packed token once as an own token, see `Row`."""

    def __init__(self, kernel: Kernel, rows: list[Row], device: torch.device) -> None:
        rows = sorted(rows, key=lambda row: row[2])
        self.kernel = kernel
        self.own = ends_of([length for *_, length in rows], device)
        # Suffixes of one tree are adjacent: they attend to their prefix as one row.
        behind: dict[tuple[int, int], list[int]] = {}
        for prefix_start, prefix, start, length in rows:
            if prefix:
                behind.setdefault((prefix_start, prefix), []).extend((start, start + length))
        self.queries = ends_of([max(places) - min(places) for places in behind.values()], device)
        self.keys = ends_of([prefix for _, prefix in behind], device)
        self.suffixes = _index([(min(places), max(places)) for places in behind.values()], device)
        self.prefixes = _index([(start, start + length) for start, length in behind], device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """[T, H, D], [T, K, D] twice -> the output [T, H, D] and its log-sum-exp [H, T]."""
        out, lse = self.kernel.forward((query, key, value), self.own, self.own, scaling, True)
        if not self.suffixes.numel():
            return out, lse
        part, part_lse = self.kernel.forward(self._across(query, key, value), self.queries, self.keys, scaling, False)
        own_lse = lse.index_select(1, self.suffixes)
        joint = torch.logaddexp(own_lse, part_lse)
        own = out.index_select(0, self.suffixes).to(joint.dtype).mul_((own_lse - joint).exp_().t().unsqueeze(-1))
        own.addcmul_(part.to(joint.dtype), (part_lse - joint).exp_().t().unsqueeze(-1))
        out.index_copy_(0, self.suffixes, own.to(out.dtype))
        lse.index_copy_(1, self.suffixes, joint)
        return out, lse

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """`gradients` become those of query, key and value. `saved`: these three and what `forward` gave."""
        query, key, value, out, lse = saved
        found = self.kernel.backward(grad, (query, key, value), out, lse, self.own, self.own, scaling, True)
        if self.suffixes.numel():
            parts = self.kernel.backward(
                grad.index_select(0, self.suffixes), self._across(query, key, value), out.index_select(0, self.suffixes),
                lse.index_select(1, self.suffixes), self.queries, self.keys, scaling, False,
            )  # fmt: skip
            wide = torch.promote_types(query.dtype, torch.float32)
            for target, part, own in zip(found, parts, (self.suffixes, self.prefixes, self.prefixes), strict=True):
                total = target.index_select(0, own).to(wide).add_(part)
                target.index_copy_(0, own, total.to(target.dtype))
        for target, part in zip(gradients, found, strict=True):
            target.copy_(part)

    def _across(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (part.index_select(0, self.prefixes) for part in (key, value))
        return query.index_select(0, self.suffixes), keys, values


class RaggedWindow:
    """The same of a layer whose queries see `window` tokens."""

    def __init__(self, kernel: Kernel, rows: list[Row], window: int, device: torch.device) -> None:
        rows = sorted(rows, key=lambda row: row[2])
        self.kernel, self.window = kernel, window
        tails = [min(prefix, window - 1) for _, prefix, _, _ in rows]
        self.queries = ends_of([length for *_, length in rows], device)
        self.keys = ends_of([tail + row[3] for tail, row in zip(tails, rows, strict=True)], device)
        spans = []
        for tail, (prefix_start, prefix, start, length) in zip(tails, rows, strict=True):
            spans += [(prefix_start + prefix - tail, prefix_start + prefix), (start, start + length)]
        self.seen = _index(spans, device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """As `RaggedTree.forward`."""
        return self.kernel.forward(
            self._with_keys(query, key, value), self.queries, self.keys, scaling, True, self.window
        )

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scaling: float, gradients: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """As `RaggedTree.backward`."""
        query, key, value, out, lse = saved
        found = self.kernel.backward(
            grad, self._with_keys(query, key, value), out, lse, self.queries, self.keys, scaling, True, self.window
        )
        gradients[0].copy_(found[0])
        for target, part in zip(gradients[1:], found[1:], strict=True):
            total = torch.zeros(target.shape, dtype=torch.promote_types(part.dtype, torch.float32), device=part.device)
            target.copy_(total.index_add_(0, self.seen, part.to(total.dtype)))

    def _with_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key.index_select(0, self.seen), value.index_select(0, self.seen)


def _index(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """The packed tokens [first, end) of each span, int64."""
    found = [np.arange(*span) for span in spans]
    return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, np.int64)).to(device)
