"""Decode steps as CUDA graphs: one launch in the place of some eight hundred, whose host time was two thirds of a step on an H200.

A graph is captured for a bucket of rows, the first time that so many run, and replayed with other tokens and positions in the same
memory. It holds addresses, not values: it reads the weights and the cache where they are, and so computes with a new version that
was written in place. Each graph belongs to one buffer of weights; where its rows lie in the cache is among its inputs. What is
copied from the weights (joined biases) is renewed in place before a replay. Buffers of the decoder that are replaced by larger ones
later stay with their graph.

A bucket may have more rows than run. These write to the first position of rows of the cache that are free, and nobody reads what
they give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

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

_STEP = 16  # rows from one bucket to the next; below it, powers of two
# Steps before a capture: the first calls of libraries allocate.
_WARM_UP = 2


class Capture(Protocol):
    """Runs a computation once and can run it again, on the same memory."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """What `compute` gave, and a function that does the same again and writes it there."""
        ...


class CudaCapture:
    """CUDA's own. All graphs share one pool of memory: they never run beside each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        beside, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UP):
                compute()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate meanwhile: only this one's calls have to be of a kind that can be captured.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = compute()
        return out, graph.replay


class _Graph:
    def __init__(self, inputs: Tensor, out: Tensor, replay: Callable[[], None], held: list[Tensor]) -> None:
        self.inputs, self.out, self.replay, self._held = inputs, out, replay, held


class DecodeGraphs:
    """`hidden` is that of the policy for one token of each running row. Lives on the lane."""

    def __init__(self, policy: PolicyModel, cache: KVCache, longest: int, capture: Capture) -> None:
        """`longest`: positions that a row may ever have."""
        self.policy, self.cache, self._longest = policy, cache, longest
        self._capture = capture
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._copying = [product for product in policy.products if len(product.biases) > 1]
        self.failed = False

    @classmethod
    def of(cls, policy: Any, cache: KVCache, longest: int) -> DecodeGraphs | None:
        """None where a step cannot be captured: without CUDA or a kernel for ragged rows, off the fused path, with experts, whose
        products depend on the routes, or with layers that the kernel does not compute."""
        if cache.kernel is None or cache.device.type != "cuda" or not can_be_captured(policy):
            return None
        return cls(policy, cache, longest, CudaCapture(cache.device))

    def hidden(self, tokens_n: Int64Array, position_n: Int64Array) -> Tensor | None:
        """[n], [n] on the host -> [n, E], good until the next call. None: a capture failed, and none is tried again."""
        if self.failed:
            return None
        count = tokens_n.size
        rows = min(bucket(count), self.cache.shape.rows)
        key = rows, self.policy.weights.bound.data_ptr()
        host = self._inputs(tokens_n, position_n, rows)
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._graphs[key] = self._make(host, rows)
            except RuntimeError as error:
                self.failed = True
                logger.warning(
                    "decode steps are not captured as CUDA graphs (%s): each launches its kernels", first_line(error)
                )
                return None
        for product in self._copying:
            product.renew()
        graph.inputs.copy_(to_device(host, self.cache.device), non_blocking=True)
        graph.replay()
        return graph.out[:count]

    def _inputs(self, tokens_n: Int64Array, position_n: Int64Array, rows: int) -> Int64Array:
        more = np.zeros(rows - tokens_n.size, np.int64)
        tokens, position = np.concatenate([tokens_n, more]), np.concatenate([position_n, more])
        return np.concatenate([tokens, position, DecodePlan.layout(self.cache, position)])

    def _make(self, host: Int64Array, rows: int) -> _Graph:
        inputs = to_device(host, self.cache.device).clone()
        tokens, position, layout = inputs.split([rows, rows, host.size - 2 * rows])
        longest = np.full(rows, self._longest - 1)  # the kernel is launched for any length

        def compute() -> Tensor:
            return self.policy.hidden(tokens, position, DecodePlan(self.cache, longest, [rows], layout))

        out, replay = self._capture(compute)
        assert self.policy.fused is not None
        return _Graph(inputs, out, replay, self.policy.fused.scratch.buffers())


def can_be_captured(policy: Any) -> bool:
    """Whether a decode step of the policy is one sequence of kernels, whatever its tokens are."""
    fused = getattr(policy, "fused", None)
    return fused is not None and all(
        isinstance(layer.mlp, Mlp) and layer.terms.softcap is None and layer.terms.sinks is None
        for layer in fused.layers
    )


def bucket(rows: int) -> int:
    """The rows that a graph for so many is captured with."""
    return 1 << (rows - 1).bit_length() if rows < _STEP else -(-rows // _STEP) * _STEP
