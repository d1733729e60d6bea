"""The routes of one forward: those that routers have to take, and those that they chose. They travel with the plan of attention.

A layer that is computed again in backward (activation checkpointing) is handed the same plan, finds here what it chose the
first time, and chooses it again. So nothing about a forward stays in the model.

Shape legend: T tokens of a forward, k experts a token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.records.routes import MISSING
from asyncrl.types import Int64Array


class Routes:
    """Of one forward. Layers are counted from 0, those with experts alone."""

    def __init__(
        self, layers: int, given_TLk: Tensor | None = None, experts: int = 0, *, keep_logits: bool = False
    ) -> None:
        """`layers`: with experts, of the model. `given_TLk`: signed integers, what to choose of `experts`; in rows of -1 the
        router chooses.
        `keep_logits`: for the balance of the experts, with their graph."""
        self._layers = layers
        self._given_TLk = given_TLk
        self._experts = experts
        # Whether something was given that is no expert: another ran instead.
        self.outside = torch.tensor(False)
        self._keep_logits = keep_logits
        self.chosen: dict[int, Tensor] = {}  # [T, k] int64, by layer, in the router's order
        self.logits: dict[int, Tensor] = {}  # [T, E], by layer, where they are kept

    def choose(self, layer: int, own_Tk: Tensor) -> Tensor:
        """What the layer takes where it would choose `own_Tk`."""
        if layer in self.chosen:  # computed again
            return self.chosen[layer]
        found = own_Tk
        if self._given_TLk is not None:
            if self._given_TLk.device != own_Tk.device:  # once, and as narrow as it is
                self._given_TLk = self._given_TLk.to(own_Tk.device)
            given_Tk = self._given_TLk[:, layer].to(own_Tk.dtype)
            if given_Tk.shape != own_Tk.shape:
                raise ValueError(
                    f"layer {layer} chooses {list(own_Tk.shape)} experts, but the routes given are {list(given_Tk.shape)}"
                )
            asked_Tk = torch.where(given_Tk[:, :1] == MISSING, own_Tk, given_Tk)
            found = asked_Tk.clamp(0, self._experts - 1)
            self.outside = (found != asked_Tk).any() | self.outside.to(found.device)
        self.chosen[layer] = found.detach()
        return found

    def keep(self, layer: int, logits_TE: Tensor) -> None:
        """The router's logits, where they are asked for; those of the first time."""
        if self._keep_logits:
            self.logits.setdefault(layer, logits_TE)

    def require_all(self) -> None:
        """After the forward. Errors: RuntimeError where a router was not told: it chose by itself, and nobody knows what."""
        untold = sorted(set(range(self._layers)) - set(self.chosen))
        if untold:
            raise RuntimeError(
                f"of {self._layers} layers with experts, {untold} ran without their routers being told: the attention of such a "
                "layer was not handed this forward's plan; run this model without algorithm.router_replay, and with "
                "output_router_logits false in its config.json"
            )

    def numpy(self) -> Int64Array:
        """What was chosen, on the host: [T, layers, k]. Errors: as `require_all`."""
        self.require_all()
        found: Int64Array = torch.stack([self.chosen[layer] for layer in range(self._layers)], 1).cpu().numpy()
        return found
