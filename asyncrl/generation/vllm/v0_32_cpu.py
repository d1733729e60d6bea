"""vLLM 0.32 and 0.33 on a CPU: layers that read their parameters without packing. Only a worker on a CPU imports this.

vLLM would pack the weights of linear layers and experts into copies, which `VllmCore.bind` does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.utils as dispatch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from asyncrl.errors import ConfigError


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Inside the context vLLM creates layers that use their parameters directly. vLLM's kernel for experts needs packed weights, so
    `_sum_of_experts` replaces it. In float32, linear layers are about two times slower without packing."""
    kernel: Any = CPUUnquantizedExperts
    originals = dispatch.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading

    def use_plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    def use_plain_experts(experts: Any, layer: nn.Module) -> None:
        experts.apply = partial(_sum_of_experts, experts)

    dispatch.dispatch_cpu_unquantized_gemm = use_plain_linear
    kernel.process_weights_after_loading = use_plain_experts
    try:
        yield
    finally:
        dispatch.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading = originals


def _sum_of_experts(experts: CPUUnquantizedExperts, *, output: Tensor, **arguments: Any) -> None:
    """Replaces `CPUUnquantizedExperts.apply`. Applies each token's experts [T, k], with w1 [E, 2I, H] (gate, up) and w2 [E, H, I],
    to the hidden states [T, H]. Multiplies the results by the router's weights [T, k], and writes their sum to `output` [T, H]."""
    hidden_TH, w1, w2 = arguments["hidden_states"], arguments["w1"], arguments["w2"]
    chosen_Tk, weights_Tk = arguments["topk_ids"], arguments["topk_weights"]
    total_TH = torch.zeros(output.shape, dtype=torch.float32)
    for expert in chosen_Tk.unique().tolist():
        tokens, choices = (chosen_Tk == expert).nonzero(as_tuple=True)
        bias_1, bias_2 = (None if bias is None else bias[expert] for bias in (experts.w1_bias, experts.w2_bias))
        gate_up = F.linear(hidden_TH[tokens], w1[expert], bias_1)
        active = apply_moe_activation(arguments["activation"], gate_up.new_empty(len(tokens), w2.shape[2]), gate_up)
        result = F.linear(active, w2[expert], bias_2).float()
        # With this option the hidden states are already multiplied by the router's weights.
        if not arguments["apply_router_weight_on_input"]:
            result *= weights_Tk[tokens, choices, None]
        total_TH.index_add_(0, tokens, result)
    output.copy_(total_TH)


@contextlib.contextmanager
def unbound_memory() -> Iterator[None]:
    """Inside the context vLLM does not bind this process's memory to a NUMA node. vLLM would choose the node of the first allowed
    core, which is the same node for all workers of a machine."""
    name, library = "init_cpu_memory_env", torch.ops._C
    original = getattr(library, name)
    setattr(library, name, lambda nodes: None)
    try:
        yield
    finally:
        setattr(library, name, original)


def is_replaced(method: Any) -> bool:
    """Whether `_sum_of_experts` computes the experts of a layer. `method`: the layer's `quant_method`."""
    return isinstance(getattr(method.moe_kernel, "fused_experts", None), CPUUnquantizedExperts)


def require_head_sizes(model: nn.Module) -> None:
    """Errors: ConfigError for heads of a size that vLLM's attention does not take."""
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for module in model.modules():
        if isinstance(module, Attention) and module.head_size not in sizes:
            raise ConfigError(
                f"generation.engine is vllm, and the model's heads have size {module.head_size}; vLLM's attention on CPUs takes "
                f"{', '.join(map(str, sizes))}; use generation.engine=embedded"
            )
