"""vLLM 0.32 and 0.33: records which experts each token was sent to, in the same blocks and slots as the token's keys and values.

Each router of vLLM reports its choice to a callback; after the forward the choices are written to the slots of the tokens. So a
cached prompt has the routes with which its keys and values were computed, by whichever request. A reused block is written before
it is read. (vLLM's own recording needs a model runner that these adapters do not use.)

Shape legend: T tokens of a forward, k experts a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from asyncrl.errors import ConfigError
from asyncrl.models.routing import RoutesShape
from asyncrl.records.routes import MISSING
from asyncrl.types import Int32Array, RoutesArray

_USE_OTHER = "switch it off, or use generation.engine=embedded"


class CachedRoutes:
    """The routes of every token in the cache. Between two steps `of` serves the requests of the last step."""

    def __init__(self, runner: Any, shape: RoutesShape, cache: Any) -> None:
        """Registers a callback with each router of the runner's model. `shape`: the trainer's routers; `cache`: configuration of
        vLLM's cache. Errors: ConfigError for other routers, or where a block may be reused before its sequence has ended."""
        model: nn.Module = runner.model
        layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        found = {(layer.router.top_k, layer.router.global_num_experts) for layer in layers if _has_callback(layer)}
        if len(layers) != shape.layers or found != {(shape.k, shape.experts)} or not all(map(_has_callback, layers)):
            raise ConfigError(
                f"algorithm.router_replay is true, and the trainer's model has {shape.layers} layers that choose {shape.k} of "
                f"{shape.experts} experts; vLLM has {len(layers)}, whose routers say that they choose {sorted(found)}; {_USE_OTHER}"
            )
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            raise ConfigError(
                f"algorithm.router_replay is true, and vLLM keeps the layers of this model in {len(specs)} group(s) of "
                f"{type(specs[0]).__name__}; routes are kept beside a cache of one group that attends to everything; {_USE_OTHER}"
            )
        self._block: int = specs[0].block_size
        self._runner = runner
        self._routes = np.full((cache.num_blocks * self._block, shape.layers, shape.k), MISSING, shape.dtype)
        self._chosen: list[Tensor | None] = [None] * shape.layers  # [T, k], of the forward that runs
        self._tables: dict[str, Int32Array] = {}  # blocks of each request of the last forward
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._on_choice, number))
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._store)

    def of(self, name: str, start: int, stop: int) -> RoutesArray:
        """The routes of these positions of a request; the request must have been in the last step."""
        position = np.arange(start, stop)
        block = self._tables[name][position // self._block]
        routes: RoutesArray = self._routes[block * self._block + position % self._block]
        return routes

    def _begin(self, *_: Any) -> None:
        self._chosen = [None] * len(self._chosen)
        self._tables = {}

    def _on_choice(self, layer: int, chosen_Tk: Tensor) -> None:
        if self._chosen[layer] is not None:
            raise RuntimeError(f"the router of layer {layer} with experts chose twice in one forward of vLLM")
        self._chosen[layer] = chosen_Tk

    def _store(self, *_: Any) -> None:
        """Store the choices of a forward. Errors: RuntimeError if some are missing, because the slots would keep old routes."""
        by_layer = get_forward_context().attn_metadata
        assert isinstance(by_layer, dict)
        metadata: Any = next(iter(by_layer.values()))  # all layers are in one group and share it
        chosen = [experts_Tk for experts_Tk in self._chosen if experts_Tk is not None]
        sizes = {int(experts_Tk.shape[0]) for experts_Tk in chosen}
        slots = metadata.slot_mapping.numpy()
        if len(chosen) != len(self._chosen) or sizes != {slots.size} or slots.min() < 0:
            raise RuntimeError(
                f"vLLM computed {slots.size} tokens, and {len(chosen)} of {len(self._chosen)} routers chose, for {sorted(sizes)}"
            )
        self._routes[slots] = torch.stack(chosen, 1).numpy()
        names = self._runner.input_batch.req_ids
        self._tables = dict(zip(names, metadata.block_table.numpy()[: len(names)].copy(), strict=True))
        self._chosen = [None] * len(self._chosen)


def _has_callback(layer: MoERunner) -> bool:
    """Whether the layer's router calls the callback. The router is not called if a kernel does its work."""
    return isinstance(layer.router, BaseRouter) and not layer.is_monolithic
