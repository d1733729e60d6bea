"""The fused decoder's description of a layer (`Layer`), and how it is read from transformers' modules.

`read_layer` finds the parts by their names. It returns None if a module, parameter or setting outside of experts is unknown.
The names prove nothing, so `tracing.matches` compares the fused layer with a recorded call of the model's layer, and the gate
(runtime/gate.py) compares the whole model.

    parts              families of models
    two norms          before attention and before the MLP: Llama, Qwen, Mistral, Granite, SmolLM3, Phi-3, Gemma;
                       after attention and after the MLP: OLMo-2
    four norms         before and after both: Gemma-2, Gemma-3
    q_norm, k_norm     of each head: Qwen3, Gemma-3; of all heads together: OLMo-2
    one matrix         for q, k and v, and for gate and up: Phi-3
    sinks              one more score for each head: gpt-oss
    experts            instead of the MLP, run by the model's own code: gpt-oss, Qwen2-MoE and Qwen3-MoE, Mixtral, OLMoE

Shape legend: E hidden size, H query heads, K key/value heads, D head size, F size of the MLP, N rows, T packed
tokens, R entries of a head that the rotary embedding changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.interface import NO_TERMS, AttentionTerms
from ..native import kernels
from ..native.norms import FusedRMSNorm
from ..parameters.flat import FlatWeights
from ..parameters.lora import AdaptedLinear
from ..parameters.packed import JoinedLinear

# Settings that the modules of a layer may have. Each setting is read below, or has no effect of its own (a size, a name), or is an
# argument of attention, which a recorded call shows. A layer with an unknown setting may compute another function.
_KNOWN_SETTINGS = {
    "block": {"config", "hidden_size", "layer_idx", "residual_multiplier", "gradient_checkpointing"},
    "attention": {
        "config", "layer_idx", "layer_type", "attention_type", "head_dim", "hidden_size", "num_heads", "num_attention_heads",
        "num_key_value_heads", "num_key_value_groups", "scaling", "is_causal", "sliding_window",
        "sliding_window_pattern", "is_sliding", "attn_logit_softcapping", "use_rope",
    },
    "mlp": {"config", "hidden_size", "intermediate_size"},
}  # fmt: skip
_ATTRIBUTES_OF_ALL_MODULES = frozenset(vars(nn.Module()))
# Names of the norms of a layer: before attention, after attention, before the MLP, after the MLP.
_NORM_NAMES = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)


@dataclass(frozen=True, slots=True)
class Norm:
    """One RMS norm: `(offset + weight) * x / sqrt(mean(x^2) + eps)`."""

    weight: nn.Parameter
    eps: float
    offset: float
    gradient: Tensor | None  # view of the flat gradient; None: no gradient buffer

    def __call__(self, x_NE: Tensor, out_NE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (result, scale). The result is in `out_NE` or in a new tensor. `scale`, for `backward`, may be None."""
        return kernels.rms_norm(x_NE, self.weight, self.eps, out_NE, self.offset)

    def backward(
        self, grad_NE: Tensor, x_NE: Tensor, out_NE: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """See `kernels.rms_norm_backward`. Adds the gradient of the weight to `gradient`."""
        return kernels.rms_norm_backward(
            grad_NE, x_NE, self.weight, self.eps, self.gradient, out_NE, self.offset, scale=scale
        )


class RotaryCall(NamedTuple):
    """Arguments of a model's rotary embedding besides hidden states and positions (Gemma-3 passes the type of the layer).

    doubled: whether the tables of cos and sin contain each angle twice (gpt-oss: once).
    """

    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    doubled: bool = True


class RotationKind(NamedTuple):
    """How a layer changes queries and keys by their positions.

    rotary: None in a layer without rotary embedding (some layers of SmolLM3).
    query_scaling: beta and length L; the query at position p is scaled by `1 + beta log(1 + floor(p / L))` (Llama 4,
    Ministral 3). None: queries are not scaled.
    """

    rotary: RotaryCall | None
    query_scaling: tuple[float, float] | None


class Rotation(NamedTuple):
    """The values of a `RotationKind` for the positions of T tokens."""

    cos: Tensor | None  # [T, R / 2], for the first R entries of each head
    sin: Tensor | None  # [2, T, R / 2]: -sin, then sin
    query_scale: Tensor | None  # [T]


def make_rotation(
    kind: RotationKind, rotary: tuple[Tensor, Tensor] | None, positions_T: Tensor, like: Tensor
) -> Rotation:
    """`rotary`: cos and sin [1, T, R], or [1, T, R / 2] if not `doubled`. The query scale has the dtype of `like`."""
    cos = sin = scale = None
    if rotary is not None and kind.rotary is not None:
        angles = rotary[0].shape[-1] // (2 if kind.rotary.doubled else 1)
        cos, sin = (part[0, :, :angles].contiguous() for part in rotary)
        sin = torch.stack((-sin, sin))
    if kind.query_scaling is not None:
        beta, length = kind.query_scaling
        scale = (1 + beta * torch.log(1 + torch.floor(positions_T / length))).to(like.dtype)
    return Rotation(cos, sin, scale)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward layer: `down(activation(gate) * up)`."""

    gate_up: JoinedLinear
    activation: str
    down: JoinedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one decoder layer. A part that the layer does not have is None."""

    number: int  # index of the layer
    attention_input_norm: Norm | None
    qkv: JoinedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    out: JoinedLinear  # the output projection of attention
    attention_output_norm: Norm | None  # of the output of attention
    mlp_input_norm: Norm | None
    mlp: Mlp | nn.Module  # a module: the model's own experts
    mlp_output_norm: Norm | None  # of the output of the MLP
    multiplier: float  # of attention and MLP outputs, before the residual sums
    heads: int
    kv_heads: int
    head_size: int
    scaling: float
    terms: AttentionTerms
    sinks_gradient: Tensor | None
    rotation: RotationKind

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        """The matrix products that the fused decoder computes. The products of experts are not among them."""
        return (self.qkv, self.out, *((self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, Mlp) else ()))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A recorded call of one layer of the model (tracing.py): its input and output, and the arguments of its attention."""

    x: Tensor  # [1, T, E]
    out: Tensor  # [1, T, E]
    rotary: RotaryCall | None
    query: Tensor  # [T, H, D]
    key: Tensor  # [T, K, D]
    scaling: float
    terms: AttentionTerms


class _MlpParts(NamedTuple):
    gate_up: list[Any]
    down: Any
    activation: str


class _Parts(NamedTuple):
    qkv: list[Any]
    out: Any
    mlp: _MlpParts | nn.Module
    norms: list[Any]  # in the order of _NORM_NAMES, None if absent
    head_norms: list[Any]  # empty, or the norms of queries and of keys
    containers: list[nn.Module]  # modules whose own parameters, if any, are sinks

    def with_parameters(self) -> list[Any]:
        """All modules that may have parameters, except experts."""
        norms = [norm for norm in (*self.norms, *self.head_norms) if norm is not None]
        mlp = [*self.mlp.gate_up, self.mlp.down] if isinstance(self.mlp, _MlpParts) else []
        return [*self.qkv, self.out, *mlp, *norms]


def read_layer(
    number: int, block: nn.Module, call: LayerCall, flat: FlatWeights, index: dict[int, int], pack: bool
) -> Layer | None:
    """The fused layer of `block`, or None if a part is missing or unknown. `call`: the recorded call of `block`. `index`: id of a
    parameter -> its index in `flat`. `pack`: see packed.py."""
    parts = _find_parts(block)
    sinks = call.terms.sinks
    if parts is None or not _knows_settings(block) or not _accounts_for(block, parts, sinks, index):
        return None
    mlp = parts.mlp
    attention: Any = block.self_attn
    sizes = _head_sizes(attention, parts)
    if sizes is None:
        return None

    def norm(part: Any) -> Norm | None:
        return None if part is None else Norm(part.weight, part.eps, part.offset, gradient(part.weight))

    def gradient(weight: Tensor) -> Tensor | None:
        return None if flat.grad is None else flat.view(flat.grad, index[id(weight)])

    def joined(*members: Any) -> JoinedLinear:
        return JoinedLinear(flat, list(members), index, pack)

    before_attention, after_attention, before_mlp, after_mlp = parts.norms
    query_norm, key_norm = parts.head_norms or (None, None)
    heads, kv_heads, size = sizes
    return Layer(
        number=number,
        attention_input_norm=norm(before_attention),
        qkv=joined(*parts.qkv),
        query_norm=norm(query_norm),
        key_norm=norm(key_norm),
        out=joined(parts.out),
        attention_output_norm=norm(after_attention),
        mlp_input_norm=norm(before_mlp),
        mlp=Mlp(joined(*mlp.gate_up), mlp.activation, joined(mlp.down)) if isinstance(mlp, _MlpParts) else mlp,
        mlp_output_norm=norm(after_mlp),
        multiplier=float(getattr(block, "residual_multiplier", 1.0)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        scaling=call.scaling,
        # A decode step tests `terms is NO_TERMS`, which is faster than `terms.empty`.
        terms=NO_TERMS if call.terms.empty else call.terms,
        sinks_gradient=None if sinks is None else gradient(sinks),
        rotation=RotationKind(call.rotary, _query_scaling(attention)),
    )


def _find_parts(block: nn.Module) -> _Parts | None:
    attention, mlp = getattr(block, "self_attn", None), _mlp_of(block)
    if not isinstance(attention, nn.Module) or mlp is None:
        return None
    qkv, out = _present(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"), _present(attention, "o_proj")
    norms = next((norms for names in _NORM_NAMES if (norms := _find_norms(block, names)) is not None), None)
    head_norms = _present(attention, "q_norm", "k_norm")
    experts = experts_of(block)
    mlp_parts = _find_mlp(mlp) if experts is None else experts
    if norms is None or mlp_parts is None or len(qkv) not in (1, 3) or len(out) != 1 or len(head_norms) not in (0, 2):
        return None
    if not _are_linear(qkv, out) or not all(isinstance(norm, FusedRMSNorm) for norm in head_norms):
        return None
    containers = [block, attention]
    if experts is None:
        containers += [mlp, *_activations(mlp)[0].modules()]
    return _Parts(qkv, out[0], mlp_parts, norms, head_norms, containers)


def _mlp_of(block: nn.Module) -> nn.Module | None:
    modules = _present(block, "mlp", "block_sparse_moe")
    return modules[0] if len(modules) == 1 and isinstance(modules[0], nn.Module) else None


def experts_of(block: nn.Module) -> nn.Module | None:
    """The module with the layer's experts. None if the layer has no experts."""
    mlp = _mlp_of(block)
    return mlp if mlp is not None and any("expert" in name for name, _ in mlp.named_modules()) else None


def _find_mlp(mlp: nn.Module) -> _MlpParts | None:
    gate_up, down = _present(mlp, "gate_up_proj", "gate_proj", "up_proj"), _present(mlp, "down_proj")
    functions = _activations(mlp)
    if len(gate_up) not in (1, 2) or len(down) != 1 or len(functions) != 1 or not _are_linear(gate_up, down):
        return None
    activation = _activation(functions[0])
    return None if activation is None else _MlpParts(gate_up, down[0], activation)


def _activations(mlp: nn.Module) -> list[Any]:
    return _present(mlp, "act_fn", "activation_fn")


def _are_linear(*products: list[Any]) -> bool:
    """Whether all modules are linear layers, perhaps with adapters, and in each product either all modules or none have a bias."""
    linear = all(type(part) in (nn.Linear, AdaptedLinear) for joined in products for part in joined)
    return linear and all(len({part.bias is None for part in joined}) == 1 for joined in products)


def _knows_settings(block: nn.Module) -> bool:
    """Whether a layer's modules have only `_KNOWN_SETTINGS`, and no dropout. Experts may have any setting: their own code runs."""
    modules = {"block": block, "attention": block.self_attn} | (
        {"mlp": _mlp_of(block)} if experts_of(block) is None else {}
    )
    return all(
        not value if name.endswith("dropout") else name in _KNOWN_SETTINGS[kind]
        for kind, part in modules.items()
        for name, value in vars(part).items()
        if name not in _ATTRIBUTES_OF_ALL_MODULES and not name.startswith("_")
    )


def _present(module: nn.Module, *names: str) -> list[Any]:
    return [part for name in names if (part := getattr(module, name, None)) is not None]


def _find_norms(block: nn.Module, names: tuple[str | None, ...]) -> list[Any] | None:
    """The norms with these names. None if a norm is missing, or if the layer has more norms."""
    norms = [None if name is None else getattr(block, name, None) for name in names]
    present = {id(part) for part in block.children() if isinstance(part, FusedRMSNorm)}
    complete = len(present) == 4 - names.count(None) and present == {id(norm) for norm in norms if norm is not None}
    return norms if complete else None


def _accounts_for(block: nn.Module, parts: _Parts, sinks: Tensor | None, index: dict[int, int]) -> bool:
    """Whether `parts` and `sinks` cover each parameter, and each module with an effect, and whether only experts have buffers."""
    experts = parts.mlp if isinstance(parts.mlp, nn.Module) else nn.Module()
    known = (*parts.containers, *parts.with_parameters(), *experts.modules(), *filter(_has_no_effect, block.modules()))
    parameters = {id(parameter) for part in (*parts.with_parameters(), experts) for parameter in part.parameters()}
    if sinks is not None:
        parameters.add(id(sinks))
    return (
        {id(part) for part in block.modules()} <= {id(part) for part in known}
        and {id(parameter) for parameter in block.parameters()} == parameters
        and parameters <= index.keys()
        and {id(buffer) for buffer in block.buffers()} == {id(buffer) for buffer in experts.buffers()}
    )


def _has_no_effect(part: nn.Module) -> bool:
    return isinstance(part, nn.Identity) or (isinstance(part, nn.Dropout) and part.p == 0)


def _head_sizes(attention: Any, parts: _Parts) -> tuple[int, int, int] | None:
    """H, K and D. None without a `head_dim`, or if the sizes of the products or of the norms contradict each other."""
    size = getattr(attention, "head_dim", None)
    queries = parts.out.in_features
    if not isinstance(size, int) or queries % size:
        return None
    outputs = [part.out_features for part in parts.qkv]
    keys, remainder = divmod(sum(outputs) - queries, 2)
    if remainder or keys <= 0 or keys % size or (len(outputs) == 3 and outputs != [queries, keys, keys]):
        return None
    widths = [tuple(norm.weight.shape) for norm in parts.head_norms]
    if widths not in ([], [(size,), (size,)], [(queries,), (keys,)]):
        return None
    return queries // size, keys // size, size


@torch.no_grad()
def _activation(module: Any) -> str | None:
    """The name in `kernels.ACTIVATIONS` of the function that the module computes. None for another function."""
    if not isinstance(module, nn.Module) or any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    x = torch.linspace(-8.0, 8.0, 257, dtype=torch.float64)
    candidates = {"silu": F.silu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    y = module(x)
    return next((name for name, values in candidates.items() if torch.allclose(y, values, rtol=0, atol=1e-6)), None)


def _query_scaling(attention: Any) -> tuple[float, float] | None:
    rope = getattr(getattr(attention, "config", None), "rope_parameters", None) or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return None if not beta or not length else (float(beta), float(length))
