"""One forward and one backward of a few layers of a model: how many bytes each layer keeps, and how many its backward takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.fused.decoder import FusedDecoder
from asyncrl.models.native.kernels import Scratch
from asyncrl.models.policy import PolicyModel

from .live import LiveBytes

HEAD = -1  # in the place of a layer: what is kept outside of them
_TOKENS = 32


class Passes(NamedTuple):
    """Bytes by layer, as in `Footprint`."""

    kept: dict[int, int]
    beside: dict[int, int]
    making: dict[int, int]
    attending: dict[int, int]


def run_passes(policy: PolicyModel, length: int) -> Passes:
    """Forward and backward of one row of `length` tokens, the backward down to the embeddings and experts."""
    weights = [*policy.module.parameters(), *policy.module.buffers()]
    if policy.lora is not None:
        weights += [policy.lora.working, policy.lora.master]
    if policy.fused is not None:
        policy.fused.scratch = Scratch()  # as large as this row needs
    tokens = torch.arange(length, device=policy.device) % _TOKENS
    positions = torch.arange(length, device=policy.device)
    experts: list[Tensor] = [
        weight for name, weight in policy.module.named_parameters() if "expert" in name and weight.requires_grad
    ]
    live = LiveBytes([*weights, tokens, positions], [weight for weight in experts if weight.ndim > 2])
    plan = _QuietPlan(length, live)
    sizes: dict[int, tuple[int, int]] = {}  # storage -> (owner, bytes)
    with live, _owners(policy) as owner:

        def pack(tensor: Tensor) -> tuple[int, Tensor]:
            storage, number = tensor.untyped_storage(), live.number(tensor)
            by = HEAD if storage.data_ptr() in owner.shared else owner.now
            if number is not None:
                sizes.setdefault(number, (by, storage.nbytes()))
            return by, tensor

        def unpack(packed: tuple[int, Tensor]) -> Tensor:  # whose backward it is, is seen by what it asks for
            if packed[0] != HEAD:
                live.account = packed[0]
            return packed[1]

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            hidden = policy.hidden(tokens, positions, plan)
        assert hidden.requires_grad
        kept = {number: sum(size for by, size in sizes.values() if by == number) for number, _ in sizes.values()}
        _backward(policy, hidden, experts)

    def less(peaks: dict[int, int]) -> dict[int, int]:  # what is kept then, of this layer and of those before it
        outside = kept.get(HEAD, 0) + 2 * hidden.nbytes  # the result and its gradient are counted with the head
        return {
            number: peak - outside - sum(size for before, size in kept.items() if HEAD < before <= number)
            for number, peak in peaks.items()
        }

    return Passes(kept, less(live.peaks), less(live.peaks | live.with_apart), less(plan.attending))


class _QuietPlan(TreePlan):
    """What its backward takes for bins of rows is on nobody's account: as much for any number of tokens. `attending`: what is alive
    then, with the sums of the gradients of keys and values."""

    def __init__(self, length: int, live: LiveBytes) -> None:
        super().__init__([0], [length])
        self.attending: dict[int, int] = {}
        self._live = live

    def backward(self, grad: Tensor, saved: Any, *args: Any, **kwargs: Any) -> None:
        account, self._live.account = self._live.account, None
        if account is not None:
            key = saved[1]
            sums = 2 * key.numel() * max(key.element_size(), 4)
            self.attending[account] = max(self._live.total + sums, self.attending.get(account, 0))
        super().backward(grad, saved, *args, **kwargs)
        self._live.account = account


def _backward(policy: PolicyModel, hidden: Tensor, experts: list[Tensor]) -> None:
    """Down to the tokens' embeddings and to experts, whose gradients are let go; of adapters, to themselves."""
    embedding = policy.module.get_input_embeddings().get_parameter("weight")
    wanted = [embedding, *experts] if embedding.requires_grad else None

    def drop(weight: Tensor) -> None:
        weight.grad = None

    handles = [weight.register_post_accumulate_grad_hook(drop) for weight in wanted or ()]
    hidden.backward(torch.ones_like(hidden), inputs=wanted)
    for handle in handles:
        handle.remove()


class _Owner:
    """Which layer computes now, and the storages that were handed to it beside its hidden states (masks, rotary tables)."""

    def __init__(self, fused: FusedDecoder | None) -> None:
        self._fused = fused
        self.entered = HEAD  # of transformers' own layers
        self.shared: set[int] = set()

    @property
    def now(self) -> int:
        """Its number; `HEAD` outside of them."""
        if self._fused is None:
            return self.entered
        return HEAD if self._fused.running is None else self._fused.running


@contextmanager
def _owners(policy: PolicyModel) -> Iterator[_Owner]:
    owner = _Owner(policy.fused)
    handles = []

    def enter(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            owner.entered = number
            owner.shared |= {each.untyped_storage().data_ptr() for each in tensors((args[1:], kwargs))}
            owner.shared -= {each.untyped_storage().data_ptr() for each in tensors(kwargs.get("hidden_states"))}

        return hook

    def leave(*_: Any) -> None:
        owner.entered = HEAD

    if policy.fused is None:
        total = int(policy.config.get_text_config().num_hidden_layers)
        for stack in policy.decoder.modules():
            if isinstance(stack, nn.ModuleList) and len(stack) == total:
                for number, block in enumerate(stack):
                    handles.append(block.register_forward_pre_hook(enter(number), with_kwargs=True))
                    handles.append(block.register_forward_hook(leave))
    try:
        yield owner
    finally:
        for handle in handles:
            handle.remove()


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
