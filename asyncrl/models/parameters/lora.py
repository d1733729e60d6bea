"""Low-rank adapters: `W = W0 + (alpha / rank) B A` with W0 frozen; A and B are all that is trained.

Hu et al., "LoRA" (arXiv:2106.09685), section 4.1, in peft's form: A [r, I] is random at the start and B [O, r] is zero, so
that a run begins at the base model exactly. No dropout: sampler and trainer must compute the same.

The modules hold the merged W, so sampling, log-probs and checkpoints work and cost as with a plain model. W is computed from W0
once per version and never updated in place, so rounding errors do not add up. Backward computes the gradients of A and B from a
layer's input x and the gradient g of its output; the gradient of W itself, [O, I], is never computed:

    dB = s g' (x A')        dA = s (g B)' x        dx = g W

A weight that no `nn.Linear` has, such as a stack of experts [E, O, I] (or [E, I, O]), gets an A and a B for each expert, in peft's
form: A [E r, I], B [O, r E]. There autograd computes the gradient of W, a layer at a time, and a hook computes both from it:

    dB = s dW A'            dA = s B' dW

The buffers of `LoraParameters` hold A and B alone: optimizer, clip, reduction and saved state are those of a plain run.

Shape legend: N rows, I input features, O output features, r rank, E experts (1 of a plain weight).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.builds import install
from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError

from .flat import FlatParameters, FlatWeights
from .frozen import family, unreached_names
from .packed import accumulate

ALL_LINEAR = "all-linear"  # peft's word for every linear layer except the head
_PREFIX = "base_model.model."  # of parameter names in peft's files


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of one linear layer. `a` and `b` have the dtype of the products; gradients add up in views of the flat buffer."""

    a: nn.Parameter  # [r, I]
    b: nn.Parameter  # [O, r]
    grad_a: Tensor
    grad_b: Tensor
    scale: float

    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """The gradients of `a` and `b`, without a graph."""
        accumulate(self.grad_a, (grad_NO @ self.b.detach()).mul_(self.scale), x_NI)
        accumulate(self.grad_b, grad_NO, (x_NI @ self.a.detach().t()).mul_(self.scale))


class AdaptedLinear(nn.Linear):
    """The class that an adapted `nn.Linear` gets; the module stays the same object. `weight` is the merged one."""

    adapter: Adapter

    def forward(self, input: Tensor) -> Tensor:
        """The product with the merged weight. If gradients are on, its backward computes those of A and B."""
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        adapter = self.adapter
        result: Tensor = _Adapted.apply(input, self.weight, self.bias, adapter.a, adapter.b, adapter.scale)
        return result


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        rows_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2)
        grad_a = (rows_NO @ b).mul_(ctx.scale).t() @ x_NI
        grad_b = rows_NO.t() @ (x_NI @ a.t()).mul_(ctx.scale)
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, grad_a, grad_b, None


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A weight that gets an adapter. `name`: the adapter's in peft's files, without `.lora_A.weight`."""

    name: str
    # [O, I]; of experts [E, O, I], or [E, I, O] if it is `transposed`.
    weight: Tensor
    layer: nn.Linear | None  # None: the weight of another module
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows out and rows in: (E, O, I)."""
        sizes = (1, *self.weight.shape)[-3:]
        return (sizes[0], sizes[2], sizes[1]) if self.transposed else (sizes[0], sizes[1], sizes[2])

    def stacked(self, weight: Tensor) -> Tensor:
        """A weight of this form, or its gradient, as [E, O, I]; a view."""
        whole = weight.view(-1, *weight.shape[-2:])
        return whole.transpose(1, 2) if self.transposed else whole

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A [E r, I] and B [O, r E] as [E, r, I] and [E, O, r]; views."""
        experts, outputs, inputs = self.shape
        return a.view(experts, -1, inputs), b.view(outputs, -1, experts).permute(2, 0, 1)


class LoraParameters(FlatParameters):
    """The adapters of a module as flat parameters, by the names of peft's files; `refresh` merges them."""

    def __init__(self, module: PreTrainedModel, weights: FlatWeights, config: LoraConfig, seed: int) -> None:
        """`weights`: the module's own, frozen. `seed`: of A. Errors: ConfigError if `config` names no layer or a wrong one."""
        self.targets = targets = find_targets(module, config)
        self._has_stacks = any(parameter.ndim == 3 for parameter in module.parameters())
        self.config = config
        self.scale = config.alpha / config.rank
        self.weights = weights
        place = {id(parameter): i for i, parameter in enumerate(weights.parameters)}
        self._places = [place[id(target.weight)] for target in targets]
        self._base = [weights.view(weights.working, i).clone() for i in self._places]
        super().__init__(list(_initial(targets, config.rank, seed)), weights.working.dtype)
        for number, target in enumerate(targets):
            a, b = 2 * number, 2 * number + 1
            if target.layer is None:
                target.weight.requires_grad_(True)
                target.weight.register_post_accumulate_grad_hook(partial(self._take_gradient, number))
                continue
            target.layer.__class__ = AdaptedLinear
            target.layer.adapter = Adapter(  # type: ignore[assignment]  # its class was changed in the line above
                self.parameters[a], self.parameters[b], self.view(self.grad, a), self.view(self.grad, b), self.scale
            )

    @torch.no_grad()
    def _take_gradient(self, number: int, weight: Tensor) -> None:
        """Hook of a weight without an `AdaptedLinear`: adds the gradients of A and B and frees the weight's own."""
        assert weight.grad is not None
        target, grad_EOI = self.targets[number], self.targets[number].stacked(weight.grad)
        a_ErI, b_EOr = target.factors(*(self.parameters[2 * number + i].detach() for i in (0, 1)))
        into_a, into_b = target.factors(*(self.view(self.grad, 2 * number + i) for i in (0, 1)))
        into_a.add_(b_EOr.transpose(1, 2) @ grad_EOI, alpha=self.scale)
        into_b.add_(grad_EOI @ a_ErI.transpose(1, 2), alpha=self.scale)
        weight.grad = None

    def refresh(self) -> None:
        """See `FlatParameters.refresh`; also merges every weight from its W0."""
        super().refresh()
        with torch.no_grad():
            for number, place in enumerate(self._places):
                self.weights.view(self.weights.working, place).copy_(self._merged(number))

    def _merged(self, number: int) -> Tensor:
        """W0 + s B A of a weight in the matmul dtype, from the masters, in its own form."""
        base, target = self._base[number], self.targets[number]
        a, b = (self.view(self.master, 2 * number + i) for i in (0, 1))
        if target.layer is not None:
            return torch.addmm(base.to(self.master_dtype), b, a, alpha=self.scale).to(base.dtype)
        a_ErI, b_EOr = target.factors(a, b)
        whole_EOI = torch.baddbmm(target.stacked(base).to(self.master_dtype), b_EOr, a_ErI, alpha=self.scale)
        return (whole_EOI.transpose(1, 2) if target.transposed else whole_EOI).reshape(base.shape).to(base.dtype)

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """See `FlatParameters.load_masters`. Errors: ConfigError for adapters of another rank."""
        for name, master in self.named_masters():
            if name in state and state[name].shape != master.shape:
                raise ConfigError(
                    f"model.lora: the saved adapter {name} has shape {tuple(state[name].shape)}, this run's has "
                    f"{tuple(master.shape)}; go on with the rank of the saved run"
                )
        super().load_masters(state)

    def host_state(self) -> dict[str, Tensor]:
        """The adapters in the form of peft's file, in the masters' dtype. Call it on the lane."""
        return {name: master.detach().to("cpu", copy=True) for name, master in self.named_masters()}

    def write_adapter(self, directory: str | Path, state: dict[str, Tensor], base: str | None) -> None:
        """Write `host_state()` for `peft.PeftModel.from_pretrained(base model, directory)`, on any thread."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # peft's all-linear includes stacks of experts, which have no adapters here. So a model with stacks gets the layers' names.
        leaves = sorted({target.name.rpartition(".")[2] for target in self.targets if target.layer is not None})
        _peft_config(self.config, base, leaves if self._has_stacks else None).save_pretrained(str(directory))
        save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def find_targets(module: PreTrainedModel, config: LoraConfig) -> list[Target]:
    """The weights that `config` names, by peft's rules, and only those that text passes through. Errors: ConfigError."""
    layers = _find_layers(module, config.target_modules)
    return [
        *(Target(name, layer.weight, layer) for name, layer in layers.items()),
        *_find_parameters(module, config.target_parameters, layers),
    ]


def _find_layers(module: PreTrainedModel, names: Sequence[str]) -> dict[str, nn.Linear]:
    head, unreached = module.get_output_embeddings(), unreached_names(module)
    linear = {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear and part is not head and f"{name}.weight" not in unreached
    }
    if names == (ALL_LINEAR,):
        return linear
    chosen: set[str] = set()
    for wanted in names:
        named = {n for n, _ in module.named_modules() if _matches(n, wanted)}
        wrong = sorted(named - linear.keys())
        if not named or wrong:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            what = f"{wrong[0]}, which is no plain linear layer of the decoder" if wrong else "no module"
            raise ConfigError(
                f"model.lora.target_modules: {wanted!r} names {what}; use {ALL_LINEAR}, or some of: {kinds}"
            )
        chosen |= named
    return {name: part for name, part in linear.items() if name in chosen}


def _find_parameters(
    module: PreTrainedModel, names: Sequence[str], layers: Mapping[str, nn.Linear]
) -> Iterator[Target]:
    """Parameters of other modules. If one module has several, peft nests its wrappers, the first parameter's innermost."""
    unreached, found = unreached_names(module), set[str]()
    for owner, part in module.named_modules():
        own: dict[str, nn.Parameter] = dict(part.named_parameters(recurse=False))
        chosen = [leaf for leaf in own if any(_matches(f"{owner}.{leaf}", wanted) for wanted in names)]
        for number, leaf in enumerate(chosen):
            weight, name = own[leaf], f"{owner}.{leaf}"
            found.update(wanted for wanted in names if _matches(name, wanted))
            if weight.ndim not in (2, 3) or owner in layers or name in unreached:
                why = (
                    "has adapters already, by model.lora.target_modules"
                    if owner in layers
                    else "no text reaches"
                    if name in unreached
                    else f"has {weight.ndim} dimensions, and adapters need 2 or 3"
                )
                raise ConfigError(f"model.lora.target_parameters: {name} is named, which {why}; leave it out")
            nested = ".base_layer" * (len(chosen) - 1 - number)
            stack = weight.ndim == 3 and bool(getattr(part, "is_transposed", False))
            yield Target(owner + nested, weight, None, stack)
    if missing := [wanted for wanted in names if wanted not in found]:
        others = sorted(
            {family(name) for name, p in module.named_parameters() if p.ndim == 3 and name not in unreached}
        )
        raise ConfigError(
            f"model.lora.target_parameters: {missing[0]!r} names no parameter; stacks of experts here are: "
            f"{', '.join(others) or 'none'}"
        )


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def describe_adapted(module: PreTrainedModel, config: LoraConfig) -> list[str]:
    """A line for the log: the share of weights with adapters among those that text goes through, and the names of the others."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    looked_up = None if embedding is None or embedding.weight is head.weight else embedding.weight
    unreached = unreached_names(module)
    through = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2 and parameter is not looked_up and name not in unreached
    }
    adapted = {id(target.weight) for target in find_targets(module, config)}
    without = dict.fromkeys(family(name) for name, each in through.items() if id(each) not in adapted)
    share = sum(each.numel() for each in through.values() if id(each) in adapted) / sum(
        map(torch.numel, through.values())
    )
    rest = f"; without: {', '.join(list(without)[:6])}" if without else ""
    return [f"LoRA: adapters on {share:.0%} of the weights that text goes through{rest}"]


def require_peft() -> None:
    """Errors: ConfigError if peft, which writes the adapters' files, is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"model.lora.rank is set, but peft is not installed; run `{install('lora')}`, or leave model.lora out"
        )


def _initial(targets: Sequence[Target], rank: int, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, values) of each A and B. A is uniform within 1 / sqrt(I), peft's `kaiming_uniform_(a=sqrt(5))`; B is zero."""
    generator = torch.Generator().manual_seed(seed)
    for target in targets:
        experts, outputs, inputs = target.shape
        bound = 1 / math.sqrt(inputs)
        a = torch.empty(experts * rank, inputs).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(outputs, rank * experts)
        for letter, values in (("A", a), ("B", b)):
            wide = torch.float64 if target.weight.dtype == torch.float64 else torch.float32
            values = values.to(target.weight.device, wide)
            yield f"{_PREFIX}{target.name}.lora_{letter}.weight", nn.Parameter(values)


def _peft_config(config: LoraConfig, base: str | None, leaves: Sequence[str] | None = None) -> Any:
    """`leaves`: last parts of the adapted layers' names, which replace all-linear."""
    from peft import LoraConfig as PeftConfig  # an extra: seconds to import, and only checkpoints need it

    every = config.target_modules == (ALL_LINEAR,)
    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha  # peft computes with either
    return PeftConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=(ALL_LINEAR if leaves is None else list(leaves)) if every else list(config.target_modules),
        target_parameters=list(config.target_parameters) or None,
        inference_mode=True,
    )
