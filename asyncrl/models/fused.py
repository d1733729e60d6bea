"""The decoder of a Llama- or Qwen-like model as few large operations, forward and backward written out.

    x -> norm -> [q k v] -> (q/k norm) -> rotary -> attention plan -> o -> + x -> norm -> [gate up] -> silu * -> down -> +

transformers' own forward makes three products where one does, a fresh buffer for every elementwise result, and a graph of
some thirty nodes a layer. Here a layer is one autograd node: it keeps the inputs of both halves, q/k/v, the attention's
output and gate/up, computes again what is cheap, and adds weight gradients straight into the flat buffer. Sampling and
training run the same code.

`FusedDecoder.of` takes a model only if its layers consist of exactly these parts *and* its own forward gives the same
numbers; every other architecture goes on through transformers, correct if slower. The modules stay what they are: weights,
names and files are untouched.

Shape legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head size, F size of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import kernels
from .attention import AttentionPlan
from .flat import FlatWeights
from .kernels import Scratch
from .lora import AdaptedLinear
from .norms import FusedRMSNorm
from .packed import JoinedLinear, packing_works
from .tree_attention import TreePlan


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: nn.Parameter
    eps: float
    gradient: Tensor | None  # [E], a view of the flat gradient; None: frozen


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    input_norm: _Norm
    qkv: JoinedLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: JoinedLinear
    mlp_norm: _Norm
    gate_up: JoinedLinear
    down: JoinedLinear
    heads: int
    kv_heads: int
    head_size: int
    scaling: float


class _Kept(NamedTuple):
    """What the backward of a layer needs besides its input. Used up by it: `gate_up` becomes a gradient in place."""

    qkv: Tensor  # [T, (H + 2K) D], rotated
    raw: Tensor | None  # [T, (H + K) D] before the norms of queries and keys
    attended: Tensor  # [T, H, D]
    lse: Tensor  # [T, H]; the weights of short rows where the plan goes by products: what `TreePlan.forward` gave
    middle: Tensor  # [T, E], after the attention half
    gate_up: Tensor  # [T, 2F]


class FusedDecoder:
    """Owns the packed weights and the buffers. Only the lane may call it."""

    def __init__(self, module: nn.Module, layers: list[_Layer], final_norm: nn.Module, rotary: nn.Module) -> None:
        self.embedding = cast(nn.Module, module.get_input_embeddings())  # type: ignore[operator]
        self.layers = layers
        self.final_norm = final_norm
        self.rotary = rotary
        self.scratch = Scratch()
        self.checkpointing = False

    @classmethod
    def of(cls, module: nn.Module, flat: FlatWeights) -> FusedDecoder | None:
        """None where the architecture is another, by its parts; whether the numbers agree is asked by `PolicyModel`."""
        decoder: Any = module.get_decoder()  # type: ignore[operator]
        blocks, rotary, norm = (getattr(decoder, name, None) for name in ("layers", "rotary_emb", "norm"))
        if not isinstance(blocks, nn.ModuleList) or rotary is None or not isinstance(norm, FusedRMSNorm):
            return None
        if _has_terms(module, blocks):
            return None
        index = {id(parameter): i for i, parameter in enumerate(flat.parameters)}
        pack = packing_works(flat.working.dtype, flat.working.device)
        layers = []
        for number, block in enumerate(blocks):
            layer = _read_layer(number, block, flat, index, pack)
            if layer is None:
                return None
            layers.append(layer)
        return cls(module, layers, norm, rotary)

    def hidden(self, rows_TE: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Embedded tokens [T, E] at their positions -> final-normed hidden states [T, E]. Differentiable."""
        cos, sin = self.rotary(rows_TE, positions_T.unsqueeze(0))
        half = cos.shape[-1] // 2  # both halves hold the same
        turn = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        x = rows_TE
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = _FusedLayer.apply(x, self, layer, plan, turn)  # type: ignore[no-untyped-call]
            else:
                x, _ = self.forward(layer, x, plan, turn, keep=False)
        result: Tensor = self.final_norm(x)
        return result

    def forward(
        self, layer: _Layer, x: Tensor, plan: AttentionPlan, turn: tuple[Tensor, Tensor], keep: bool
    ) -> tuple[Tensor, _Kept | None]:
        """One layer: [T, E] -> [T, E], and what its backward needs."""
        scratch, tokens = self.scratch, x.shape[0]
        normed = scratch.take("hidden", tokens, x.shape[1], x)
        qkv = layer.qkv(kernels.rms_norm(x, layer.input_norm.weight, layer.input_norm.eps, normed))
        raw = self._rotate(layer, qkv, turn, keep)
        q, k, v = _split(layer, qkv)
        if keep:
            attended, lse = cast(TreePlan, plan).forward(q, k, v, layer.scaling)
        else:
            attended = plan.attend(layer.number, q, k, v, layer.scaling)
        middle = layer.out(attended.reshape(tokens, -1)).add_(x)
        normed = scratch.take("hidden", tokens, x.shape[1], x)
        gate_up = layer.gate_up(kernels.rms_norm(middle, layer.mlp_norm.weight, layer.mlp_norm.eps, normed))
        active = scratch.take("active", tokens, gate_up.shape[1] // 2, x)
        out = layer.down(kernels.swiglu(gate_up, active)).add_(middle)
        return out, _Kept(qkv, raw, attended, lse, middle, gate_up) if keep else None

    def _rotate(self, layer: _Layer, qkv: Tensor, turn: tuple[Tensor, Tensor], keep: bool) -> Tensor | None:
        """Norms of queries and keys, where there are any, and rotary, in place. Returns q and k as they were before."""
        raw, size = None, layer.head_size
        both = qkv[:, : (layer.heads + layer.kv_heads) * size]
        if layer.query_norm is not None and layer.key_norm is not None:
            raw = both.clone() if keep else None
            queries = layer.heads * size
            for part, norm in ((both[:, :queries], layer.query_norm), (both[:, queries:], layer.key_norm)):
                rows = part.reshape(-1, size)
                normed = self.scratch.take("heads", rows.shape[0], size, rows)
                part.copy_(kernels.rms_norm(rows, norm.weight, norm.eps, normed).view(part.shape))
        kernels.rotate_(both.unflatten(1, (-1, size)), *turn, self.scratch)
        return raw

    def backward(
        self, layer: _Layer, x: Tensor, kept: _Kept, grad: Tensor, plan: TreePlan, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Gradient of the layer's output [T, E] -> that of its input, fresh; weight gradients are added where they belong."""
        scratch, (tokens, width) = self.scratch, x.shape
        size = kept.gate_up.shape[1] // 2
        active = scratch.take("active", tokens, size, x)
        inner = scratch.take("inner", tokens, size, x)
        torch.mm(grad, layer.down.weight(), out=inner)
        kernels.swiglu_backward_(kept.gate_up, inner, active, scratch)
        layer.down.add_gradient(grad, active)
        normed, below = scratch.take("hidden", tokens, width, x), scratch.take("below", tokens, width, x)
        norm = layer.mlp_norm
        kernels.rms_norm(kept.middle, norm.weight, norm.eps, normed)
        layer.gate_up.backward(kept.gate_up, normed, below)
        through = grad.clone()
        kernels.rms_norm_backward(below, kept.middle, norm.weight, norm.eps, norm.gradient, through)

        flat = kept.attended.view(tokens, -1)
        grad_attended = scratch.take("attended", tokens, flat.shape[1], x)
        layer.out.backward(through, flat, grad_attended)
        grad_qkv = scratch.take("qkv", tokens, kept.qkv.shape[1], x)
        saved = (*_split(layer, kept.qkv), kept.attended, kept.lse)
        plan.backward(grad_attended.view(kept.attended.shape), saved, layer.scaling, _split(layer, grad_qkv))
        self._rotate_back(layer, grad_qkv, kept.raw, turn)
        norm = layer.input_norm
        kernels.rms_norm(x, norm.weight, norm.eps, normed)
        layer.qkv.backward(grad_qkv, normed, below)
        kernels.rms_norm_backward(below, x, norm.weight, norm.eps, norm.gradient, through)
        return through

    def _rotate_back(self, layer: _Layer, grad_qkv: Tensor, raw: Tensor | None, turn: tuple[Tensor, Tensor]) -> None:
        size, queries = layer.head_size, layer.heads * layer.head_size
        both = grad_qkv[:, : queries + layer.kv_heads * size]
        kernels.rotate_(both.unflatten(1, (-1, size)), *turn, self.scratch, inverse=True)
        if raw is None or layer.query_norm is None or layer.key_norm is None:
            return
        for own, norm in ((slice(0, queries), layer.query_norm), (slice(queries, None), layer.key_norm)):
            part = both[:, own]
            into = torch.zeros(part.numel() // size, size, dtype=part.dtype, device=part.device)
            rows, before = part.reshape(-1, size), raw[:, own].reshape(-1, size)
            kernels.rms_norm_backward(rows, before, norm.weight, norm.eps, norm.gradient, into)
            part.copy_(into.view(part.shape))


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, decoder: FusedDecoder, layer: _Layer, plan: TreePlan, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        out, kept = decoder.forward(layer, x, plan, turn, keep=not decoder.checkpointing)
        ctx.save_for_backward(x, *(kept or ()))
        ctx.rest = decoder, layer, plan, turn
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors  # autograd refuses a second backward, which would find them overwritten
        decoder, layer, plan, turn = ctx.rest
        kept = _Kept(*saved) if saved else decoder.forward(layer, x, plan, turn, keep=True)[1]
        return decoder.backward(layer, x, kept, grad.contiguous(), plan, turn), None, None, None, None


def _split(layer: _Layer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + 2K) D] -> views [T, H, D], [T, K, D], [T, K, D]."""
    heads = qkv.unflatten(1, (-1, layer.head_size))
    end = layer.heads + layer.kv_heads
    return heads[:, : layer.heads], heads[:, layer.heads : end], heads[:, end:]


def _has_terms(module: Any, blocks: nn.ModuleList) -> bool:
    """Whether a layer may attend with a window, capped scores or sinks, which are not handed on here."""
    config = module.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) is not None if kinds is None else {*kinds} != {"full_attention"}
    own = ("sliding_window", "sinks", "attn_logit_softcapping")
    attentions = [getattr(block, "self_attn", None) for block in blocks]
    return windowed or any(getattr(part, name, None) is not None for part in attentions for name in own)


def _read_layer(number: int, block: nn.Module, flat: FlatWeights, index: dict[int, int], pack: bool) -> _Layer | None:
    """The parts of a decoder layer by the names that this family of models uses; None where anything is missing or over."""
    attention: Any = getattr(block, "self_attn", None)
    mlp: Any = getattr(block, "mlp", None)
    names = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    linears: list[Any] = [
        getattr(room, name, None) for room, own in zip((attention, mlp), names, strict=True) for name in own
    ]
    norms: list[Any] = [getattr(block, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    head_norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if not all(type(part) in (nn.Linear, AdaptedLinear) for part in linears) or not all(
        isinstance(n, FusedRMSNorm) for n in norms
    ):
        return None
    biased = {part.bias is not None for part in linears[:3]}, {part.bias is not None for part in linears[4:6]}
    present = [norm for norm in head_norms if norm is not None]
    parts = [*linears, *norms, *present]
    own = {id(p) for part in parts for p in part.parameters(recurse=False)}  # type: ignore[union-attr]
    sizes = {tuple(norm.weight.shape) for norm in present}
    if (
        len(biased[0]) + len(biased[1]) != 2
        or {id(p) for p in block.parameters()} != own
        or not own <= index.keys()
        or "silu" not in type(getattr(mlp, "act_fn", None)).__name__.lower()
        or len(present) not in (0, 2)
        or not all(isinstance(norm, FusedRMSNorm) for norm in present)
        or not isinstance(getattr(attention, "head_dim", None), int)
        or (present and sizes != {(attention.head_dim,)})
    ):
        return None

    def norm(part: Any) -> _Norm:
        gradient = None if flat.grad is None else flat.view(flat.grad, index[id(part.weight)])
        return _Norm(part.weight, part.eps, gradient)

    def joined(*members: Any) -> JoinedLinear:
        return JoinedLinear(flat, list(members), index, pack)

    q, k, v, o, gate, up, down = linears
    size = attention.head_dim
    query_norm, key_norm = (norm(part) for part in present) if present else (None, None)
    return _Layer(
        number=number,
        input_norm=norm(norms[0]),
        qkv=joined(q, k, v),
        query_norm=query_norm,
        key_norm=key_norm,
        out=joined(o),
        mlp_norm=norm(norms[1]),
        gate_up=joined(gate, up),
        down=joined(down),
        heads=q.out_features // size,
        kv_heads=k.out_features // size,
        head_size=size,
        scaling=float(getattr(attention, "scaling", size**-0.5)),
    )
