"""vLLM 0.32, the layers of a model: which can read packed copies of their weights, and which cannot be handed new ones.

On a CPU vLLM packs every linear layer for oneDNN and drops the plain weight, and lays out the experts of a layer anew, over the
stacked ones (w13: gate and up of all experts; w2: down). What is written into the weights later would change nothing, or be taken
for packed: new versions come another way (v0_32_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from asyncrl.errors import ConfigError

from .recording import Recorded

_PRODUCTS = (ColumnParallelLinear.forward, ReplicatedLinear.forward, RowParallelLinear.forward)
_COUNTS = {3: "three", 4: "four", 5: "five"}
# Where vLLM's loader knows the names of the checkpoints on the hub alone, which transformers has others for: (ours, vLLM's).
_NAMES = {
    "MixtralForCausalLM": (
        (".mlp.", ".block_sparse_moe."),
        (".experts.gate_up_proj", ".experts.w13"),
        (".experts.down_proj", ".experts.w2"),
    )
}


def names_for(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights under names that the model's own loader knows."""
    changes = _NAMES.get(type(model).__name__, ())
    for name, weight in weights:
        for ours, theirs in changes:
            name = name.replace(ours, theirs)
        yield name, weight


def linear_layers(model: nn.Module) -> dict[nn.Module, bool]:
    """Layers whose weights can be packed; whether it is a linear one, which nobody then reads as it is. An embedding is one too if
    it is the head by itself; any other only looks rows up, and a packed copy would be memory that nobody reads."""
    found: dict[nn.Module, bool] = {}
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if not hasattr(module, "cpu_linear"):
            continue
        if isinstance(module, LinearBase) or module is head:
            found[module] = isinstance(module, LinearBase)
        else:
            module.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # an attribute of Module: Tensor or Module
    return found


def is_product(module: nn.Module) -> bool:
    """Whether all that it computes is the product with its weight, and its bias beside."""
    return (
        type(module).forward in _PRODUCTS
        and type(module.quant_method) is UnquantizedLinearMethod
        and getattr(module, "tp_size", 1) == 1
        and not module.skip_bias_add
    )


def kernel_of(experts: RoutedExperts) -> Any:
    """What packs and computes them, where that is the one of unquantized experts on a CPU; else None."""
    method = experts.quant_method
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return kernel if type(method) is UnquantizedFusedMoEMethod and isinstance(kernel, CPUUnquantizedExperts) else None


def refuse(model: nn.Module, recorded: Mapping[str, Recorded]) -> None:
    """Errors: ConfigError for what vLLM builds, and would compute wrongly or not at all."""
    experts = tuple(name for name, module in model.named_modules() if isinstance(module, RoutedExperts))
    for name, each in recorded.items():
        if len(each.shape) > 2 and name.rpartition(".")[0] not in experts:
            raise ConfigError(
                f"generation.engine is vllm, and the model has weights of {_COUNTS.get(len(each.shape), 'many')} dimensions "
                f"({name}, {tuple(each.shape)}), which vLLM packs in ways of their own that new versions do not reach; use "
                "generation.engine=embedded"
            )
    safe = Attention.process_weights_after_loading  # scales of a quantized cache, which is never asked for
    for name, module in model.named_modules():
        own = getattr(type(module), "process_weights_after_loading", None)
        if type(module) is UnquantizedFusedMoEMethod:  # of experts, which are looked at themselves
            continue
        alien = isinstance(module, RoutedExperts) and kernel_of(module) is None
        derived = (
            isinstance(module, MoERunner) and module._fse_fuse_gate
        )  # its gates as one weight, made at its first step
        if alien or derived or (own is not None and own is not safe):
            raise ConfigError(
                f"generation.engine is vllm, whose {type(module).__name__} ({name or 'the model'}) computes something of its own "
                "from the first weights, which new versions do not reach; use generation.engine=embedded"
            )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for module in model.modules():
        if isinstance(module, Attention) and module.head_size not in sizes:
            raise ConfigError(
                f"generation.engine is vllm, and the model's heads have size {module.head_size}; vLLM's attention on CPUs takes "
                f"{', '.join(map(str, sizes))}; use generation.engine=embedded"
            )
