"""Low-rank adapters: `W = W0 + s B A` with s = alpha / rank. W0 is frozen, and only A and B are trained.

Hu et al., "LoRA" (arXiv:2106.09685), section 4.1, in peft's form: A [r, I] is random at the start and B [O, r] is zero, so
a run begins exactly at the base model. There is no dropout, because sampler and trainer must compute the same values.

The modules have the merged W. Each version of W is computed from W0, not from the version before, so rounding errors do not
accumulate. For a linear layer, backward computes the gradients of A and B from the layer's input x and the gradient g of its
output, without the gradient of W [O, I]:

    dB = s g' (x A')        dA = s (g B)' x        dx = g W

A weight outside of `nn.Linear`, such as a stack of experts [E, O, I] (or [E, I, O]), gets an A and a B for each expert, in peft's
form: A [E r, I], B [O, r E]. For such a weight autograd computes dW, and a hook computes dA and dB from dW:

    dB = s dW A'            dA = s B' dW

Shape legend: N rows, I input features, O output features, r rank, E experts (1 for a plain weight). A' is the transpose of A.
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

from asyncrl.builds import install_command
from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError

from .flat import FlatParameters, FlatWeights, add_product_
from .frozen import family, unreached_names
from .layout import Layout
from .merge import Merge, Place, as_stack, factors, sizes_of

ALL_LINEAR = "all-linear"  # peft's word for all linear layers except the head
_PREFIX = "base_model.model."  # of parameter names in peft's files


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of a linear layer. `a` and `b` have the dtype of the products. `grad_a`, `grad_b`: views of the flat gradient."""

    a: nn.Parameter  # [r, I]
    b: nn.Parameter  # [O, r]
    grad_a: Tensor
    grad_b: Tensor
    scale: float

    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """Adds the gradients of `a` and `b` to `grad_a` and `grad_b`, without an autograd graph."""
        add_product_(self.grad_a, (grad_NO @ self.b.detach()).mul_(self.scale).t(), x_NI)
        add_product_(self.grad_b, grad_NO.t(), (x_NI @ self.a.detach().t()).mul_(self.scale))


class AdaptedLinear(nn.Linear):
    """The class that an adapted `nn.Linear` gets. The module stays the same object, and `weight` is the merged weight."""

    adapter: Adapter

    def forward(self, input: Tensor) -> Tensor:
        """The product with the merged weight. Backward computes the gradients of A and B."""
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
    """A weight that gets an adapter. `name`: the adapter's name in peft's files, without prefix and `.lora_A.weight`."""

    name: str
    weight: Tensor  # [O, I]; experts: [E, O, I], or [E, I, O] if `transposed`
    layer: nn.Linear | None  # None: the weight of another module
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, O, I): experts, output features and input features."""
        return sizes_of(self.weight.shape, self.transposed)


class LoraParameters(FlatParameters):
    """The adapters of a module as flat parameters, named as in peft's files. `refresh` merges the adapters into the weights."""

    def __init__(self, module: PreTrainedModel, weights: FlatWeights, config: LoraConfig, seed: int) -> None:
        """`weights`: the frozen weights of the module. `seed`: for A. Errors: ConfigError of `find_targets`."""
        self.targets = targets = find_targets(module, config)
        self._has_stacks = any(parameter.ndim == 3 for parameter in module.parameters())
        self.config, self.scale = config, config.alpha / config.rank
        self.weights = weights
        index = {id(parameter): i for i, parameter in enumerate(weights.parameters)}
        adapters = list(_initial_values(targets, config.rank, seed))
        offsets = iter(Layout.of(adapters).offsets)
        places = [
            Place(
                tuple(t.weight.shape), t.transposed, weights.offsets[index[id(t.weight)]], next(offsets), next(offsets)
            )
            for t in targets
        ]
        self.merge = Merge(places, config.rank, self.scale, weights.working)
        super().__init__(adapters, weights.working.dtype)
        for number, target in enumerate(targets):
            a, b = 2 * number, 2 * number + 1
            if target.layer is None:
                target.weight.requires_grad_(True)
                target.weight.register_post_accumulate_grad_hook(partial(self._take_gradient, number))
                continue
            target.layer.__class__ = AdaptedLinear
            target.layer.adapter = Adapter(  # type: ignore[assignment]  # the layer has a new class
                self.parameters[a], self.parameters[b], self.view(self.grad, a), self.view(self.grad, b), self.scale
            )

    @torch.no_grad()
    def _take_gradient(self, number: int, weight: Tensor) -> None:
        """Hook of a weight without an `AdaptedLinear`: adds the gradients of A and B, and frees the gradient of the weight."""
        assert weight.grad is not None
        target, a, b = self.targets[number], 2 * number, 2 * number + 1
        grad_EOI = as_stack(weight.grad, target.transposed)
        a_ErI, b_EOr = factors(self.parameters[a], self.parameters[b], target.shape)
        grad_a, grad_b = factors(self.view(self.grad, a), self.view(self.grad, b), target.shape)
        grad_a.add_(b_EOr.transpose(1, 2) @ grad_EOI, alpha=self.scale)
        grad_b.add_(grad_EOI @ a_ErI.transpose(1, 2), alpha=self.scale)
        weight.grad = None

    def refresh(self) -> None:
        """See `FlatParameters.refresh`. Also computes every merged weight from its W0."""
        super().refresh()
        self.merge.merge(self.master, self.weights.working)

    def describe(self) -> dict[str, Any]:
        """What another process needs to merge `master`, in JSON types: see `Merge.of`."""
        return self.merge.describe() | {"elements": self.size}

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """See `FlatParameters.load_masters`. Errors: ConfigError for adapters of another LoRA rank."""
        for name, master in self.named_masters():
            if name in state and state[name].shape != master.shape:
                raise ConfigError(
                    f"model.lora: the saved adapter {name} has shape {tuple(state[name].shape)}, this run's has "
                    f"{tuple(master.shape)}; set model.lora.rank to the rank of the saved adapter"
                )
        super().load_masters(state)

    def host_state(self) -> dict[str, Tensor]:
        """The adapters as in peft's file, in the dtype of the masters. Call it on the lane, the device's thread."""
        return {name: master.detach().to("cpu", copy=True) for name, master in self.named_masters()}

    def write_adapter(self, directory: str | Path, state: dict[str, Tensor], base: str | None) -> None:
        """Writes `state`, a result of `host_state`, for `peft.PeftModel.from_pretrained(model, directory)`. May run on any thread.
        `base`: the name of the base model in the written configuration, or None for no name."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # For peft, all-linear includes stacks of experts. For asyncrl it does not, so the names of the layers are written.
        leaves = sorted({target.name.rpartition(".")[2] for target in self.targets if target.layer is not None})
        _peft_config(self.config, base, leaves if self._has_stacks else None).save_pretrained(str(directory))
        save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def find_targets(module: PreTrainedModel, config: LoraConfig) -> list[Target]:
    """The weights that `config` names by peft's rules. all-linear: all linear layers that text reaches, without the head.
    Errors: ConfigError for bad names."""
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
        matching = {name for name, _ in module.named_modules() if _matches(name, wanted)}
        wrong = sorted(matching - linear.keys())
        if not matching or wrong:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            problem = f"{wrong[0]}, which is no plain linear layer of the decoder" if wrong else "no module"
            raise ConfigError(
                f"model.lora.target_modules: {wanted!r} names {problem}; use {ALL_LINEAR}, or some of: {kinds}"
            )
        chosen |= matching
    return {name: part for name, part in linear.items() if name in chosen}


def _find_parameters(
    module: PreTrainedModel, names: Sequence[str], layers: Mapping[str, nn.Linear]
) -> Iterator[Target]:
    """Targets for the parameters `names`, outside of `layers`. peft wraps a module once for each parameter, the first innermost."""
    unreached, found = unreached_names(module), set[str]()
    for owner, part in module.named_modules():
        parameters: dict[str, nn.Parameter] = dict(part.named_parameters(recurse=False))
        chosen = [leaf for leaf in parameters if any(_matches(f"{owner}.{leaf}", wanted) for wanted in names)]
        for number, leaf in enumerate(chosen):
            weight, name = parameters[leaf], f"{owner}.{leaf}"
            found.update(wanted for wanted in names if _matches(name, wanted))
            if weight.ndim not in (2, 3) or owner in layers or name in unreached:
                reason = f"it has {weight.ndim} dimensions, and adapters need 2 or 3"
                if owner in layers:
                    reason = "it has adapters already, by model.lora.target_modules"
                elif name in unreached:
                    reason = "no text reaches it"
                raise ConfigError(
                    f"model.lora.target_parameters: {name} cannot have an adapter: {reason}; leave it out"
                )
            wrappers = ".base_layer" * (len(chosen) - 1 - number)
            transposed = weight.ndim == 3 and bool(getattr(part, "is_transposed", False))
            yield Target(owner + wrappers, weight, None, transposed)
    if missing := [wanted for wanted in names if wanted not in found]:
        weights = dict(module.named_parameters())
        stacks = sorted({family(name) for name in weights if weights[name].ndim == 3 and name not in unreached})
        raise ConfigError(
            f"model.lora.target_parameters: {missing[0]!r} names no parameter; stacks of experts here are: "
            f"{', '.join(stacks) or 'none'}"
        )


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def describe_adapted(module: PreTrainedModel, config: LoraConfig) -> list[str]:
    """A line for the log: which share of the weights that text reaches is adapted, and up to six families of the other weights."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    lookup = None if embedding is None or embedding.weight is head.weight else embedding.weight
    unreached = unreached_names(module)
    reached = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2 and parameter is not lookup and name not in unreached
    }
    adapted = {id(target.weight) for target in find_targets(module, config)}
    without = dict.fromkeys(family(name) for name, weight in reached.items() if id(weight) not in adapted)
    adapted_size = sum(weight.numel() for weight in reached.values() if id(weight) in adapted)
    share = adapted_size / sum(map(torch.numel, reached.values()))
    others = f"; without: {', '.join(list(without)[:6])}" if without else ""
    return [f"LoRA: adapters on {share:.0%} of the weights that text goes through{others}"]


def require_peft() -> None:
    """Errors: ConfigError if peft, which writes the adapters' files, is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"model.lora.rank is set, but peft is not installed; run `{install_command('lora')}`, or leave model.lora out"
        )


def _initial_values(targets: Sequence[Target], rank: int, seed: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, values) of each A and B. A is uniform in +-1 / sqrt(I), as in peft (`kaiming_uniform_(a=sqrt(5))`). B is zero."""
    generator = torch.Generator().manual_seed(seed)
    for target in targets:
        experts, outputs, inputs = target.shape
        bound = 1 / math.sqrt(inputs)
        a = torch.empty(experts * rank, inputs).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(outputs, rank * experts)
        for letter, values in (("A", a), ("B", b)):
            wide = torch.float64 if target.weight.dtype == torch.float64 else torch.float32
            yield f"{_PREFIX}{target.name}.lora_{letter}.weight", nn.Parameter(values.to(target.weight.device, wide))


def _peft_config(config: LoraConfig, base: str | None, leaves: Sequence[str] | None = None) -> Any:
    """`leaves`: the last parts of the names of the adapted layers, which replace all-linear. None: all-linear is written."""
    from peft import LoraConfig as PeftConfig  # optional, and takes seconds to import

    target_modules: Any = list(config.target_modules)
    if config.target_modules == (ALL_LINEAR,):
        target_modules = ALL_LINEAR if leaves is None else list(leaves)
    # peft's annotation says int, but a float works.
    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha
    return PeftConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=target_modules,
        target_parameters=list(config.target_parameters) or None,
        inference_mode=True,
    )
