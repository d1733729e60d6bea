"""Decode steps as CUDA graphs. One launch replaces some 800 launches, whose host time was two thirds of a step on an H200.

A graph is captured when its bucket, a number of rows, is first needed. Later steps copy their tokens and positions into the graph's
input tensor and replay the graph. A graph stores addresses, not values:

* If a new version is written into the same buffer, the graph computes with the new version. Another buffer needs another graph.
* The fused model holds copies of some biases, joined into one tensor. These copies are renewed before each replay.
* The cache indices of the rows are among a graph's inputs, so rows may move.
* A graph keeps the decoder's scratch buffers alive, because a larger batch may replace them later.

A bucket may have more rows than are running. The surplus rows write to a free position of the cache: position 0 of an empty row, or
the position behind the tokens of a row that is kept for a session. Their results are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import first_line
from asyncrl.models.copying import to_device
from asyncrl.models.fused.layers import Mlp
from asyncrl.models.policy import PolicyModel
from asyncrl.types import Int64Array

from .cache import KVCache
from .plans import DecodePlan

logger = logging.getLogger("asyncrl.generation")

# Buckets are the powers of two below this number of rows, and from there on the multiples of this number.
_BUCKET_ROWS = 16
# How often a step runs before its capture. In the first runs libraries allocate memory, which a capture does not allow.
_WARM_UP = 2
# Calls a computation at least once, to record it. Returns the output tensor and a function. The function runs the computation again
# into the output tensor, which has no valid result before the first call of the function.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class CudaCapture:
    """Captures CUDA graphs. They can share one memory pool, because no two graphs run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        side, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may allocate memory meanwhile without breaking the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = compute()
        return out, graph.replay


class _Graph(NamedTuple):
    inputs: Tensor
    out: Tensor
    replay: Callable[[], None]
    scratch: list[Tensor]  # is kept alive


class DecodeGraphs:
    """Computes the policy's hidden states of one token for each running row. Only for the lane, the device's thread."""

    def __init__(self, policy: PolicyModel, cache: KVCache, longest: int, capture: Capture) -> None:
        """`longest`: limit of the positions of a row."""
        self.policy, self.cache, self._longest = policy, cache, longest
        self._capture = capture
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._linears_with_joined_biases = [linear for linear in policy.products if len(linear.bias_indices) > 1]
        self.failed = False

    @classmethod
    def of(cls, policy: Any, cache: KVCache, longest: int) -> DecodeGraphs | None:
        """None without CUDA. Also None, with a reason in the log, if decode steps cannot be captured."""
        if cache.device.type != "cuda":
            return None
        reason = why_not_captured(policy, cache)
        if reason is not None:
            logger.info("decode steps are not captured as CUDA graphs: %s", reason)
            return None
        return cls(policy, cache, longest, CudaCapture(cache.device))

    def hidden(self, tokens_n: Int64Array, position_n: Int64Array, kept_k: Int64Array) -> Tensor | None:
        """Tokens and positions [n] on the host -> hidden states [n, E], which the next call overwrites. None: this or an earlier
        capture failed. `kept_k` [k]: number of cached tokens of each kept row. Kept rows are behind the n running rows."""
        if self.failed:
            return None
        count = tokens_n.size
        rows = min(bucket(count), self.cache.shape.rows)
        key = rows, self.policy.weights.bound.data_ptr()  # the address of the weights
        host = self._inputs(tokens_n, np.concatenate([position_n, kept_k])[:rows], rows)
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._graphs[key] = self._make(host, rows)
            except RuntimeError as error:
                self.failed = True  # no capture is tried again
                logger.warning(
                    "decode steps are not captured as CUDA graphs (%s): each step launches all kernels",
                    first_line(error),
                )
                return None
        for linear in self._linears_with_joined_biases:
            linear.renew()
        graph.inputs.copy_(to_device(host, self.cache.device), non_blocking=True)
        graph.replay()
        return graph.out[:count]

    def _inputs(self, tokens_n: Int64Array, position_n: Int64Array, rows: int) -> Int64Array:
        tokens, position = (np.pad(array, (0, rows - array.size)) for array in (tokens_n, position_n))
        return np.concatenate([tokens, position, DecodePlan.layout(self.cache, position)])

    def _make(self, host: Int64Array, rows: int) -> _Graph:
        inputs = to_device(host, self.cache.device).clone()
        tokens, position, layout = inputs.split([rows, rows, host.size - 2 * rows])
        # The launch parameters must suit rows of any length.
        longest = np.full(rows, self._longest - 1)

        def compute() -> Tensor:
            return self.policy.hidden(tokens, position, DecodePlan(self.cache, longest, layout))

        out, replay = self._capture(compute)
        assert self.policy.fused is not None
        return _Graph(inputs, out, replay, self.policy.fused.scratch.buffers())


def why_not_captured(policy: Any, cache: KVCache) -> str | None:
    """Why decode steps cannot be captured. None: they can, because steps with equal numbers of rows launch the same kernels."""
    fused = getattr(policy, "fused", None)
    if cache.ragged_kernel is None:
        return f"there is no kernel for ragged rows of {cache.data.dtype} with heads of size {cache.data.shape[-1]}"
    if fused is None:
        return "the model's own code computes the layers"
    if not all(isinstance(layer.mlp, Mlp) for layer in fused.layers):
        return "the kernels of experts depend on the routes of the tokens"
    if any(layer.terms.softcap is not None or layer.terms.sinks is not None for layer in fused.layers):
        return "the kernel for ragged rows has no capped scores and no sinks"
    return None


def bucket(rows: int) -> int:
    """Number of rows of the smallest bucket that has at least `rows`."""
    return 1 << (rows - 1).bit_length() if rows < _BUCKET_ROWS else -(-rows // _BUCKET_ROWS) * _BUCKET_ROWS
