"""Records and replays which experts a model's routers choose (R3: Ma et al., arXiv:2510.11370).

A router takes the top k of its scores with one call of `torch.topk`. In a replay, this call returns the recorded indices, and the
current scores at these indices, `scores.gather(indices)`. The model's own code does everything else: it normalises the weights of
the experts, and gradients flow through the scores of the chosen experts. A replay of the router's own indices gives the result of
`topk`, bit for bit.

To find the routers, every module that may be a router is run once on a few rows (`_replayable_size`).

Shape legend: T tokens of a forward, L layers with experts, k experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.records.check import narrowest

from .attention.interface import PLAN_ARGUMENT
from .head.output import decoder_of
from .routes import Routes

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys of configurations


@dataclass(frozen=True, slots=True)
class RoutesShape:
    """`layers`: number of layers with experts. `k`: experts that each token takes in a layer. `experts`: all experts of a layer."""

    layers: int
    k: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest signed integers that hold an expert's index."""
        return narrowest(self.experts)


class _TopkOverride(TorchFunctionMode):
    """While entered, replaces the result of `torch.topk`. `choose`: the indices of topk -> the indices to return instead."""

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._choose = choose
        self.scores: list[Tensor] = []  # input of each `topk`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        self.scores.append(scores)
        index = self._choose(result.indices)
        return torch.return_types.topk((scores.gather(-1, index), index))


class _Router:
    """Replaces the forward of one router."""

    def __init__(self, router: nn.Module, layer: int, owner: Routing) -> None:
        self._original = router.forward
        self._layer = layer
        self._owner = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routes, self._owner.current = self._owner.current, None
        if routes is None:
            return self._original(*args, **kwargs)
        with _TopkOverride(lambda choice: routes.choose(self._layer, choice)):
            output = self._original(*args, **kwargs)
        routes.keep(self._layer, output[0])
        return output


class Routing:
    """The routers of one model instance, whose forwards record or replay `Routes`."""

    def __init__(self, module: PreTrainedModel, routers: list[tuple[nn.Module, nn.Module]], shape: RoutesShape) -> None:
        """`routers`: (layer, its router), in order; `Routing.of` finds them."""
        self.shape = shape
        self.current: Routes | None = None  # set by the attention of a layer, taken by its router
        for number, (layer, router) in enumerate(routers):
            # A hook on attention sets `current`. A hook on the layer would not run when backward recomputes the layer. Fused
            # layers do not call this attention: they call `run`, which sets `current`.
            for child in layer.children():
                if hasattr(child, "layer_idx"):
                    child.register_forward_pre_hook(self._enter, with_kwargs=True)
            router.forward = _Router(router, number, self).forward
        decoder = decoder_of(module)
        decoder.register_forward_pre_hook(self._clear)
        decoder.register_forward_hook(self._clear, always_call=True)

    @classmethod
    def of(cls, module: PreTrainedModel) -> Routing | None:
        """Replaces the forwards of the routers of `module`. None if `find_routers` finds none."""
        found = find_routers(module)
        return None if found is None else cls(module, *found)

    def _enter(self, child: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # Only attention gets the plan. Another child may run between attention and the router, and must not clear `current`.
        if PLAN_ARGUMENT in kwargs:
            self.current = kwargs[PLAN_ARGUMENT].routes

    def _clear(self, *_: Any) -> None:
        self.current = None

    def run(self, experts: nn.Module, x: Tensor, routes: Routes | None) -> Any:
        """`experts(x)` with `routes` for the router. For fused layers, which call no attention of transformers."""
        self.current = routes
        try:
            return experts(x)
        finally:
            self.current = None

    def record(self, *, keep_logits: bool = False) -> Routes:
        """Empty routes for one forward. The routers choose by themselves, and `Routes` records their choices."""
        return Routes(self.shape.layers, keep_logits=keep_logits)

    def replay(self, routes_TLk: npt.NDArray[Any], *, keep_logits: bool = False) -> Routes:
        """Routes for one forward that make the routers choose the given experts. `records/check.py` checks the indices of the
        experts: a check here would hold up the device's thread. Errors: ValueError for routes of another model."""
        if routes_TLk.shape[1:] != (self.shape.layers, self.shape.k):
            raise ValueError(
                f"routes of {list(routes_TLk.shape[1:])} layers and experts a token were given; this model has "
                f"[{self.shape.layers}, {self.shape.k}]"
            )
        return Routes(self.shape.layers, torch.from_numpy(routes_TLk), self.shape.experts, keep_logits=keep_logits)


def has_experts(module: PreTrainedModel) -> bool:
    """Whether the configuration has a number of experts, or the name of a module ends with `experts`."""
    config = module.config.get_text_config()
    numbers = [getattr(config, name, None) for name in EXPERTS]
    return any(isinstance(number, int) and number > 0 for number in numbers) or any(
        name.endswith("experts") for name, _ in module.named_modules()
    )


def require_routing(routing: Routing | None, module: PreTrainedModel, setting: str) -> Routing:
    """Returns `routing`. Errors: ConfigError if it is None. `setting`: first words of the error; they say what needs the routes."""
    if routing is not None:
        return routing
    reason = "has no experts"
    if has_experts(module):
        reason = "chooses its experts in a way that asyncrl cannot repeat, or runs on the plain path"
    raise ConfigError(f"{setting}, but {type(module).__name__} {reason}; switch this setting off")


def describe_routes(module: PreTrainedModel) -> RoutesShape | None:
    """The shape of the routes, read from the shapes of the routers, so the model may be on the meta device. None if there are no
    routers, or routers of different sizes. Only `find_routers` shows whether the routers can replay."""
    blocks = getattr(decoder_of(module), "layers", None)
    mixtures = [layer for layer in blocks if _holds_experts(layer)] if isinstance(blocks, nn.ModuleList) else []
    sizes = [{size for part in layer.modules() if (size := _router_size(part))} for layer in mixtures]
    if not sizes or any(other != sizes[0] for other in sizes) or len(sizes[0]) != 1:
        return None
    ((k, experts),) = sizes[0]
    return RoutesShape(len(mixtures), k, experts)


def _holds_experts(layer: nn.Module) -> bool:
    return any("expert" in name for name, _ in layer.named_modules())


def _router_size(part: nn.Module) -> tuple[int, int] | None:
    """(k, E) of a possible router: a module with a matrix `weight` and an integer `top_k`. None for other modules."""
    weight, k = dict(part.named_parameters(recurse=False)).get("weight"), getattr(part, "top_k", None)
    return (k, weight.shape[0]) if isinstance(k, int) and weight is not None and weight.ndim == 2 else None


def find_routers(module: PreTrainedModel) -> tuple[list[tuple[nn.Module, nn.Module]], RoutesShape] | None:
    """(layer, router) of every layer with experts, and the shape of the routes. None in these cases: no layer has experts; a layer
    with experts has no attention; a layer with experts does not have exactly one router that can replay; another layer has such a
    router; routers differ in shape. Runs every module that may be a router once."""
    if not has_experts(module):
        return None
    layers = getattr(decoder_of(module), "layers", None)
    found: list[tuple[nn.Module, nn.Module]] = []
    shapes: set[tuple[int, int]] = set()
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        holds_experts = _holds_experts(layer)
        if holds_experts and not any(hasattr(child, "layer_idx") for child in layer.children()):
            return None  # no attention that gets the routes
        routers = [(part, shape) for part in layer.modules() if (shape := _replayable_size(part)) is not None]
        if len(routers) != (1 if holds_experts else 0):
            return None
        found += [(layer, part) for part, _ in routers]
        shapes |= {shape for _, shape in routers}
    if len(shapes) != 1:
        return None
    ((k, experts),) = shapes
    return found, RoutesShape(len(found), k, experts)


@torch.no_grad()
def _replayable_size(part: nn.Module) -> tuple[int, int] | None:
    """(k, E) of a router that can replay: [T, hidden] -> (logits [T, E], weights [T, k], indices [T, k]), with the indices of one
    `topk` over its scores. None for any other module."""
    size = _router_size(part)
    if size is None:
        return None
    weight, (k, experts) = part.get_parameter("weight"), size
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    # Experts that the router would hardly choose by itself.
    requested = torch.arange(experts, device=weight.device).flip(0)[:k].expand(3, k)
    override = _TopkOverride(lambda choice: requested)
    try:
        with override:
            output = part.forward(rows)
    except torch.OutOfMemoryError:
        raise  # says nothing about the module
    except Exception:  # the module takes other arguments
        return None
    replays = (
        isinstance(output, tuple)
        and len(output) == 3
        and [scores.shape for scores in override.scores] == [(3, experts)]
        and output[0].shape == (3, experts)
        and output[1].shape == (3, k)
        and torch.equal(output[2], requested)
    )
    return size if replays else None
