"""The routes of one forward: the experts that a replay prescribes, and the experts that the routers chose.

The routes are an attribute of the attention plan. A layer that runs again in backward (activation checkpointing) gets the same plan
and must choose the same experts again, so `Routes` remembers the first choice of each layer.

Shape legend: T tokens of a forward, L layers with experts, k experts a token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.records.check import MISSING
from asyncrl.types import Int64Array


class Routes:
    """The routes of one forward. Layers with experts are numbered from 0. Other layers do not count."""

    def __init__(
        self, layers: int, replayed_TLk: Tensor | None = None, experts: int = 0, *, keep_logits: bool = False
    ) -> None:
        """layers: number of layers with experts. experts: number of experts of a layer, for a replay.
        replayed_TLk: experts to take, below `experts`; -1 in all k places: the router chooses. None: all routers choose.
        keep_logits: whether to keep the logits of the routers with their graph, for the load-balancing loss."""
        self._layers = layers
        self._replayed_TLk = replayed_TLk
        self._experts = experts
        # 0-d bool: whether a replayed index was outside of [0, experts). Such indices are clamped.
        self.outside = torch.tensor(False)
        self._keep_logits = keep_logits
        self.chosen: dict[int, Tensor] = {}  # layer -> [T, k] int64, not sorted
        self.logits: dict[int, Tensor] = {}  # layer -> [T, E]

    def choose(self, layer: int, router_Tk: Tensor) -> Tensor:
        """Returns and records the experts [T, k] that the layer must take. `router_Tk` is the choice of its router."""
        if layer in self.chosen:
            return self.chosen[layer]
        experts_Tk = router_Tk
        if self._replayed_TLk is not None:
            if self._replayed_TLk.device != router_Tk.device:  # once, for all layers
                self._replayed_TLk = self._replayed_TLk.to(router_Tk.device)
            replayed_Tk = self._replayed_TLk[:, layer].to(router_Tk.dtype)
            if replayed_Tk.shape != router_Tk.shape:
                shapes = f"{list(router_Tk.shape)} experts, but the replayed routes are {list(replayed_Tk.shape)}"
                raise ValueError(f"layer {layer} chooses {shapes}; replay only routes of this model")
            requested_Tk = torch.where(replayed_Tk[:, :1] == MISSING, router_Tk, replayed_Tk)
            # An index outside of the experts would make the CUDA context unusable.
            experts_Tk = requested_Tk.clamp(0, self._experts - 1)
            self.outside = (experts_Tk != requested_Tk).any() | self.outside.to(experts_Tk.device)
        self.chosen[layer] = experts_Tk.detach()
        return experts_Tk

    def keep(self, layer: int, logits_TE: Tensor) -> None:
        """Keeps the router's logits of the first run of the layer, if the constructor got `keep_logits`."""
        if self._keep_logits:
            self.logits.setdefault(layer, logits_TE)

    def require_all(self) -> None:
        """Call this after the forward. Errors: RuntimeError if a layer with experts did not call `choose`."""
        missing = sorted(set(range(self._layers)) - set(self.chosen))
        if missing:
            raise RuntimeError(
                f"of {self._layers} layers with experts, numbers {missing} (from 0) ran without this forward's routes: their "
                "attention did not get the plan of the forward; run this model without algorithm.router_replay, and with "
                "output_router_logits false in its config.json"
            )

    def numpy(self) -> Int64Array:
        """The chosen experts on the host: [T, L, k]. Errors: RuntimeError of `require_all`."""
        self.require_all()
        experts: Int64Array = torch.stack([self.chosen[layer] for layer in range(self._layers)], 1).cpu().numpy()
        return experts
