"""The decoder of a Llama-like model as few large operations, forward and backward written out.

    x -> norm -> [q k v] -> (q/k norm) -> rotary -> attention plan -> o -> (norm) + x
      -> norm -> [gate up] -> silu or gelu of gate * up -> down -> (norm) +
                 experts: the model's own module, through autograd

transformers' own forward makes three products where one does, a fresh buffer for every elementwise result, and a graph of
some thirty nodes a layer. Here a layer is one autograd node: it keeps the inputs of both halves, q/k/v, the attention's
output and gate/up, computes again what is cheap, and adds weight gradients straight into the flat buffer. Sampling and
training run the same code. Of a layer with experts the node ends with the norm before them.

`FusedDecoder.of` takes a model only if its layers consist of known parts alone (layers.py) *and* each repeats a recorded
call of the model's own layer (tracing.py); every other architecture goes on through transformers, correct if
slower. The modules stay what they are: weights, names and files are untouched.

Shape legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head size, F size of the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..attention.interface import AttentionPlan
from ..attention.tree import TreePlan
from ..head.output import decoder_of
from ..native import kernels
from ..native.kernels import Scratch
from ..native.norms import FusedRMSNorm, rms_norm
from ..parameters.flat import FlatWeights
from ..parameters.packed import JoinedLinear, packing_works
from ..routing import Routing
from .layers import Layer, Mlp, Norm, Rotation, RotationKind, make_rotation, read_layer
from .tracing import matches, trace


class _Kept(NamedTuple):
    """What the backward of a layer needs besides its input. Used up by it: `gate_up` becomes a gradient in place."""

    qkv: Tensor  # [T, (H + 2K) D], rotated
    attended: Tensor  # [T, H, D]
    # [T, H]; the weights of short rows where the plan goes by products: what `TreePlan.forward` gave.
    lse: Tensor
    middle: Tensor  # [T, E], after the attention half
    raw: Tensor | None  # [T, (H + K) D] before the norms of queries and keys
    added: Tensor | None  # [T, E] what attention adds, before its norm
    gate_up: Tensor | None = None  # [T, 2F]; None: of the attention half alone
    added_last: Tensor | None = None  # [T, E] what the MLP adds, before its norm


class FusedDecoder:
    """Owns the packed weights and the buffers. Only the lane may call it."""

    def __init__(self, layers: list[Layer], final_norm: nn.Module, rotary: nn.Module, multiplier: float) -> None:
        """`multiplier`: of the embedded tokens."""
        self.layers = layers
        self.final_norm = final_norm
        self.rotary = rotary
        self.multiplier = multiplier
        self.rotations = list(dict.fromkeys(layer.rotation for layer in layers))
        self.scratch = Scratch()
        self.checkpointing = False
        self.routing: Routing | None = None  # whose routers are told what to choose

    @classmethod
    def of(cls, module: PreTrainedModel, flat: FlatWeights) -> FusedDecoder | None:
        """None where the architecture is another. Runs the model's own decoder once, and each layer once more."""
        decoder: Any = decoder_of(module)
        blocks, rotary, norm = (getattr(decoder, name, None) for name in ("layers", "rotary_emb", "norm"))
        if not isinstance(blocks, nn.ModuleList) or rotary is None or not isinstance(norm, FusedRMSNorm):
            return None
        calls = trace(module)
        if calls is None:
            return None
        index = {id(parameter): i for i, parameter in enumerate(flat.parameters)}
        pack = packing_works(flat.working.dtype, flat.working.device)
        trial = cls([], norm, rotary, 1.0)
        layers = []
        for number, (block, call) in enumerate(zip(blocks, calls.layers, strict=True)):
            layer = read_layer(number, block, call, flat, index, pack)
            if layer is None:
                return None
            # A decoder may compute rotary tables for all layers, and some layers leave theirs unread (SmolLM3).
            for rotation in dict.fromkeys((layer.rotation, layer.rotation._replace(rotary=None))):
                if matches(layer, call, trial._rotation(rotation, call.x[0], calls.positions_T), trial.compute):
                    layers.append(replace(layer, rotation=rotation))
                    break
            else:
                return None
        return cls(layers, norm, rotary, calls.multiplier)

    def products(self) -> list[JoinedLinear]:
        """The matrix products of all layers."""
        return [product for layer in self.layers for product in layer.products]

    def hidden(self, rows_TE: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Embedded tokens [T, E] at their positions -> final-normed hidden states [T, E]. Differentiable."""
        rotations = {kind: self._rotation(kind, rows_TE, positions_T) for kind in self.rotations}
        x = rows_TE if self.multiplier == 1 else rows_TE * self.multiplier
        for layer in self.layers:
            rotation = rotations[layer.rotation]
            if not torch.is_grad_enabled():
                x = self.compute(layer, x, plan, rotation)
            elif isinstance(layer.mlp, Mlp):
                x = _FusedLayer.apply(x, self, layer, plan, rotation)
            elif self.checkpointing:
                given = layer, cast(TreePlan, plan), rotation
                x = checkpoint(self._before_experts, x, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._before_experts(x, layer, cast(TreePlan, plan), rotation)
        result: Tensor = self.final_norm(x)
        return result

    def _rotation(self, kind: RotationKind, rows_TE: Tensor, positions_T: Tensor) -> Rotation:
        rotary = None
        if kind.rotary is not None:
            call = kind.rotary
            rotary = self.rotary(rows_TE.unsqueeze(0), positions_T.unsqueeze(0), *call.arguments, **dict(call.named))
        return make_rotation(kind, rotary, positions_T, rows_TE)

    def compute(self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation) -> Tensor:
        """One layer without a graph: [T, E] -> [T, E]."""
        if isinstance(layer.mlp, Mlp):
            return self.forward(layer, x, plan, rotation, keep=False)[0]
        middle, _ = self.attend(layer, x, plan, rotation, keep=False)
        return self._add_experts(layer, middle, self._normed(layer.mlp_norm, middle), plan)

    def _before_experts(self, x: Tensor, layer: Layer, plan: TreePlan, rotation: Rotation) -> Tensor:
        middle, normed = _FusedAttention.apply(x, self, layer, plan, rotation)
        return self._add_experts(layer, middle, normed, plan)

    def _add_experts(self, layer: Layer, middle: Tensor, normed: Tensor, plan: AttentionPlan) -> Tensor:
        """`middle` and what the model's own module makes of `normed`, [T, E] each, in a tensor of its own: what a module gives may
        be what it was given."""
        experts = cast(nn.Module, layer.mlp)
        if self.routing is None:
            found = experts(normed.unsqueeze(0))
        else:
            found = self.routing.run(experts, normed.unsqueeze(0), plan.routes)
        branch: Tensor = (found[0] if isinstance(found, tuple) else found).squeeze(0)
        norm = layer.output_norm
        if norm is not None:
            branch = rms_norm(branch, norm.weight, norm.eps, norm.offset)
        return torch.add(middle, branch, alpha=layer.multiplier)

    def forward(
        self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation, keep: bool
    ) -> tuple[Tensor, _Kept | None]:
        """One layer: [T, E] -> [T, E], and what its backward needs."""
        mlp = layer.mlp
        assert isinstance(mlp, Mlp)
        middle, kept = self.attend(layer, x, plan, rotation, keep)
        gate_up = mlp.gate_up(self._normed(layer.mlp_norm, middle))
        active = self.scratch.take("active", x.shape[0], gate_up.shape[1] // 2, x)
        kernels.gated(gate_up, active, mlp.activation)
        out, added_last = _add(layer, layer.output_norm, mlp.down(active), middle)
        return out, None if kept is None else kept._replace(gate_up=gate_up, added_last=added_last)

    def attend(
        self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation, keep: bool
    ) -> tuple[Tensor, _Kept | None]:
        """The half before the MLP: [T, E] -> [T, E], and what its backward needs."""
        qkv = layer.qkv(self._normed(layer.input_norm, x))
        raw = self._rotate(layer, qkv, rotation, keep)
        q, k, v = _split(layer, qkv)
        if keep:
            attended, lse = cast(TreePlan, plan).forward(q, k, v, layer.scaling, layer.terms)
        else:
            attended = plan.attend(layer.number, q, k, v, layer.scaling, layer.terms)
        middle, added = _add(layer, layer.attention_norm, layer.out(attended.reshape(x.shape[0], -1)), x)
        return middle, _Kept(qkv, attended, lse, middle, raw, added) if keep else None

    def _normed(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else norm(x, self.scratch.take("hidden", x.shape[0], x.shape[1], x))

    def _rotate(self, layer: Layer, qkv: Tensor, rotation: Rotation, keep: bool) -> Tensor | None:
        """Norms of queries and keys, where there are any, and rotary, in place. Returns q and k as they were before."""
        raw = None
        queries = layer.heads * layer.head_size
        both = qkv[:, : queries + layer.kv_heads * layer.head_size]
        if layer.query_norm is not None and layer.key_norm is not None:
            raw = both.clone() if keep else None
            for part, norm in ((both[:, :queries], layer.query_norm), (both[:, queries:], layer.key_norm)):
                rows = part.reshape(-1, norm.weight.shape[0])
                normed = self.scratch.take("heads", rows.shape[0], rows.shape[1], rows)
                part.copy_(norm(rows, normed).view(part.shape))
        self._rotate_both_(layer, both, rotation)
        return raw

    def _rotate_both_(self, layer: Layer, both: Tensor, rotation: Rotation, inverse: bool = False) -> None:
        """Rotary of queries and keys [T, (H + K) D] and scaling of queries, in place; with `inverse` their transposes."""
        heads = both.view(both.shape[0], -1, layer.head_size)
        if rotation.cos is not None and rotation.sin is not None:
            turned = 2 * rotation.cos.shape[1]
            own = heads if turned == layer.head_size else heads[..., :turned]
            kernels.rotate_(own, rotation.cos, rotation.sin, self.scratch, inverse)
        if rotation.query_scale is not None:
            heads[:, : layer.heads].mul_(rotation.query_scale[:, None, None])

    def backward(
        self, layer: Layer, x: Tensor, kept: _Kept, grad: Tensor, plan: TreePlan, rotation: Rotation
    ) -> Tensor:
        """Gradient of the layer's output [T, E] -> that of its input, fresh; weight gradients are added where they belong."""
        scratch, mlp, gate_up = self.scratch, cast(Mlp, layer.mlp), cast(Tensor, kept.gate_up)
        tokens, size = x.shape[0], gate_up.shape[1] // 2
        active = scratch.take("active", tokens, size, x)
        inner = scratch.take("inner", tokens, size, x)
        own = self._into_branch(layer, layer.output_norm, grad, kept.added_last)
        torch.mm(own, mlp.down.weight(), out=inner)
        kernels.gated_backward_(gate_up, inner, active, scratch, mlp.activation)
        mlp.down.add_gradient(own, active)
        below = scratch.take("below", tokens, x.shape[1], x)
        mlp.gate_up.backward(gate_up, self._normed(layer.mlp_norm, kept.middle), below)
        through = grad.clone()
        _through_norm(layer.mlp_norm, below, kept.middle, through)
        return self.attend_backward(layer, x, kept, through, plan, rotation)

    def attend_backward(
        self, layer: Layer, x: Tensor, kept: _Kept, through: Tensor, plan: TreePlan, rotation: Rotation
    ) -> Tensor:
        """The same of `attend`. `through`: the gradient of what it gave, contiguous, which becomes that of its input."""
        scratch, tokens = self.scratch, x.shape[0]
        own = self._into_branch(layer, layer.attention_norm, through, kept.added)
        flat = kept.attended.view(tokens, -1)
        grad_attended = scratch.take("attended", tokens, flat.shape[1], x)
        layer.out.backward(own, flat, grad_attended)
        grad_qkv = scratch.take("qkv", tokens, kept.qkv.shape[1], x)
        saved, targets = (*_split(layer, kept.qkv), kept.attended, kept.lse), _split(layer, grad_qkv)
        grad = grad_attended.view(kept.attended.shape)
        plan.backward(grad, saved, layer.scaling, targets, layer.terms, layer.sinks_gradient)
        self._rotate_back(layer, grad_qkv, kept.raw, rotation)
        below = scratch.take("below", tokens, x.shape[1], x)
        layer.qkv.backward(grad_qkv, self._normed(layer.input_norm, x), below)
        _through_norm(layer.input_norm, below, x, through)
        return through

    def _into_branch(self, layer: Layer, norm: Norm | None, grad: Tensor, added: Tensor | None) -> Tensor:
        """The inverse of `_add`: gradient of the sum [T, E] -> that of the branch, before its norm and multiplier."""
        if norm is None and layer.multiplier == 1:
            return grad
        own = self.scratch.take("branch", grad.shape[0], grad.shape[1], grad)
        torch.mul(grad, layer.multiplier, out=own)
        if norm is None or added is None:
            return own
        before = self.scratch.take("before norm", grad.shape[0], grad.shape[1], grad).zero_()
        norm.backward(own, added, before)
        return before

    def _rotate_back(self, layer: Layer, grad_qkv: Tensor, raw: Tensor | None, rotation: Rotation) -> None:
        queries = layer.heads * layer.head_size
        both = grad_qkv[:, : queries + layer.kv_heads * layer.head_size]
        self._rotate_both_(layer, both, rotation, inverse=True)
        if raw is None or layer.query_norm is None or layer.key_norm is None:
            return
        for own, norm in ((slice(0, queries), layer.query_norm), (slice(queries, None), layer.key_norm)):
            part, width = both[:, own], norm.weight.shape[0]
            into = torch.zeros(part.numel() // width, width, dtype=part.dtype, device=part.device)
            norm.backward(part.reshape(-1, width), raw[:, own].reshape(-1, width), into)
            part.copy_(into.view(part.shape))


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, decoder: FusedDecoder, layer: Layer, plan: TreePlan, rotation: Rotation) -> Tensor:
        out, kept = decoder.forward(layer, x, plan, rotation, keep=not decoder.checkpointing)
        ctx.save_for_backward(x, *(kept or ()))
        ctx.rest = decoder, layer, plan, rotation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd refuses a second backward, which would find them overwritten.
        x, *saved = ctx.saved_tensors
        decoder, layer, plan, rotation = ctx.rest
        kept = _Kept(*saved) if saved else decoder.forward(layer, x, plan, rotation, keep=True)[1]
        return decoder.backward(layer, x, kept, grad.contiguous(), plan, rotation), None, None, None, None


class _FusedAttention(torch.autograd.Function):
    """What comes before experts: [T, E] -> the residual stream [T, E], and the same normed [T, E]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, decoder: FusedDecoder, layer: Layer, plan: TreePlan, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        middle, kept = decoder.attend(layer, x, plan, rotation, keep=True)
        norm = layer.mlp_norm
        normed = middle.clone() if norm is None else norm(middle, torch.empty_like(middle))
        ctx.save_for_backward(x, *(kept or ()))
        ctx.rest = decoder, layer, plan, rotation
        return middle, normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, below: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        decoder, layer, plan, rotation = ctx.rest
        kept, through = _Kept(*saved), grad.clone(memory_format=torch.contiguous_format)
        _through_norm(layer.mlp_norm, below.contiguous(), kept.middle, through)
        return decoder.attend_backward(layer, x, kept, through, plan, rotation), None, None, None, None


def _add(layer: Layer, norm: Norm | None, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`x` + multiplier * norm(branch), fresh or in place of the branch; and the branch, where there is a norm."""
    if norm is None:
        return (branch if layer.multiplier == 1 else branch.mul_(layer.multiplier)).add_(x), None
    normed = norm(branch, torch.empty_like(branch))
    return (normed if layer.multiplier == 1 else normed.mul_(layer.multiplier)).add_(x), branch


def _through_norm(norm: Norm | None, below: Tensor, x: Tensor, through: Tensor) -> None:
    """`through` += the gradient of `x` by way of its norm, that of the norm's result being `below`."""
    if norm is None:
        through.add_(below)
    else:
        norm.backward(below, x, through)


def _split(layer: Layer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + 2K) D] -> views [T, H, D], [T, K, D], [T, K, D]."""
    heads = qkv.view(qkv.shape[0], -1, layer.head_size)
    end = layer.heads + layer.kv_heads
    return heads[:, : layer.heads], heads[:, layer.heads : end], heads[:, end:]
