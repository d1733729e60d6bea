"""The decoder of a Llama-like model as few large operations, with forward and backward written by hand.

    x -> (norm) -> [q k v] -> (q/k norm) -> rotary -> attention plan -> o -> (norm) -> add x = middle
    middle -> (norm) -> [gate up] -> silu or gelu of gate, times up -> down -> (norm) -> add middle

Brackets: weights that are used as one matrix. Parentheses: norms that only some models have. Some layers have experts instead of
the MLP ([gate up] to down). A layer is one autograd node; transformers' forward records about thirty. The node saves the inputs of
the attention half and of the MLP half, q/k/v, the output of attention and gate/up; with checkpointing it saves only its input. Its
backward computes cheap values again, and adds weight gradients directly to the flat buffer. In a layer with experts the node ends
with the norm before the experts, and autograd records the experts. Sampling and training run the same code.

`FusedDecoder.try_build` accepts a model only if layers.py knows all parts of its layers, and if each fused layer reproduces a
recorded call of the model's own layer (tracing.py). Modules, weights and parameter names are not changed.

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


class _Saved(NamedTuple):
    """Tensors that the backward of a layer needs besides the input. Backward overwrites `gate_up`, so it can run only once."""

    qkv: Tensor  # [T, (H + 2K) D], rotated
    attended: Tensor  # [T, H, D], output of attention
    attention_saved: Tensor  # second result of `TreePlan.forward`
    middle: Tensor  # [T, E], residual stream after the attention half
    raw_query: Tensor | None  # [T * H, D] or [T, H D], q before its norm
    raw_key: Tensor | None
    attention_branch: Tensor | None  # [T, E], output of `Layer.out`, before its norm
    gate_up: Tensor | None = None  # [T, 2F]; None: only the attention half was computed
    mlp_branch: Tensor | None = None  # [T, E], output of the MLP before its norm


class FusedDecoder:
    """Owns the fused layers and their scratch buffers. Not thread-safe: only the thread that owns the device may call it."""

    def __init__(self, layers: list[Layer], final_norm: nn.Module, rotary: nn.Module, multiplier: float) -> None:
        """The embedded tokens are multiplied by `multiplier`."""
        self.layers, self.final_norm, self.rotary, self.multiplier = layers, final_norm, rotary, multiplier
        self.rotations = list(dict.fromkeys(layer.rotation for layer in layers))
        self.scratch = Scratch()
        self.checkpointing = False
        # `PolicyModel` sets this. None: no router of the model can replay recorded choices.
        self.routing: Routing | None = None

    @classmethod
    def try_build(cls, module: PreTrainedModel, flat: FlatWeights) -> FusedDecoder | None:
        """None if the decoder is not supported. Runs the model's own decoder once, and each fused layer once or twice."""
        decoder: Any = decoder_of(module)
        blocks, rotary, norm = (getattr(decoder, name, None) for name in ("layers", "rotary_emb", "norm"))
        if not isinstance(blocks, nn.ModuleList) or rotary is None or not isinstance(norm, FusedRMSNorm):
            return None
        calls = trace(module)
        if calls is None:
            return None
        index = {id(parameter): i for i, parameter in enumerate(flat.parameters)}
        pack = packing_works(flat.working.dtype, flat.working.device)
        # `trial` has no layers of its own. It computes the single layers that are compared below.
        trial = cls([], norm, rotary, 1.0)
        layers = []
        for number, (block, call) in enumerate(zip(blocks, calls.layers, strict=True)):
            layer = read_layer(number, block, call, flat, index, pack)
            if layer is None:
                return None
            # Some layers ignore the rotary tables that they get (SmolLM3), so a second try runs without rotary.
            for rotation in dict.fromkeys((layer.rotation, layer.rotation._replace(rotary=None))):
                if matches(layer, call, trial._rotation(rotation, call.x[0], calls.positions_T), trial.compute):
                    layers.append(replace(layer, rotation=rotation))
                    break
            else:
                return None  # neither rotation reproduces the recorded call
        return cls(layers, norm, rotary, calls.multiplier)

    def products(self) -> list[JoinedLinear]:
        """The matrix products of all layers, in the order of the layers, without those of experts."""
        return [product for layer in self.layers for product in layer.products]

    def hidden(self, rows_TE: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Embedded tokens [T, E] and positions int [T] -> hidden states [T, E] after the final norm. Differentiable."""
        rotations = {kind: self._rotation(kind, rows_TE, positions_T) for kind in self.rotations}
        x = rows_TE if self.multiplier == 1 else rows_TE * self.multiplier
        for layer in self.layers:
            rotation = rotations[layer.rotation]
            if not torch.is_grad_enabled():
                x = self.compute(layer, x, plan, rotation)
            elif isinstance(layer.mlp, Mlp):
                x = _FusedLayer.apply(x, self, layer, plan, rotation)
            elif self.checkpointing:
                arguments = layer, cast(TreePlan, plan), rotation
                x = checkpoint(self._expert_layer, x, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._expert_layer(x, layer, cast(TreePlan, plan), rotation)
        result: Tensor = self.final_norm(x)
        return result

    def _rotation(self, kind: RotationKind, rows_TE: Tensor, positions_T: Tensor) -> Rotation:
        tables, call = None, kind.rotary
        # The model's own rotary module computes the tables, with the arguments of the recorded call.
        if call is not None:
            tables = self.rotary(rows_TE.unsqueeze(0), positions_T.unsqueeze(0), *call.arguments, **dict(call.named))
        return make_rotation(kind, tables, positions_T, rows_TE)

    def compute(self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation) -> Tensor:
        """One layer without an autograd graph: [T, E] -> [T, E]."""
        if isinstance(layer.mlp, Mlp):
            return self.forward(layer, x, plan, rotation, keep=False)[0]
        middle, _ = self.attend(layer, x, plan, rotation, keep=False)
        return self._add_experts(layer, middle, self._normed(layer.mlp_input_norm, middle)[0], plan)

    def _expert_layer(self, x: Tensor, layer: Layer, plan: TreePlan, rotation: Rotation) -> Tensor:
        middle, normed = _FusedAttention.apply(x, self, layer, plan, rotation)
        return self._add_experts(layer, middle, normed, plan)

    def _add_experts(self, layer: Layer, middle: Tensor, normed: Tensor, plan: AttentionPlan) -> Tensor:
        """`middle` [T, E] plus the experts' output for `normed` [T, E]. Not in place, because experts may return their input."""
        experts = cast(nn.Module, layer.mlp)
        if self.routing is None:
            output = experts(normed.unsqueeze(0))
        else:
            output = self.routing.run(experts, normed.unsqueeze(0), plan.routes)
        # Some experts also return the logits of the router.
        branch: Tensor = (output[0] if isinstance(output, tuple) else output).squeeze(0)
        norm = layer.mlp_output_norm
        if norm is not None:
            branch = rms_norm(branch, norm.weight, norm.eps, norm.offset)
        return torch.add(middle, branch, alpha=layer.multiplier)

    def forward(
        self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation, keep: bool
    ) -> tuple[Tensor, _Saved | None]:
        """One layer with an MLP: [T, E] -> [T, E]. With `keep` also the tensors for its backward."""
        mlp = layer.mlp
        assert isinstance(mlp, Mlp)
        middle, saved = self.attend(layer, x, plan, rotation, keep)
        gate_up = mlp.gate_up(self._normed(layer.mlp_input_norm, middle)[0])
        active = self.scratch.take("active", x.shape[0], gate_up.shape[1] // 2, x)
        kernels.gated(gate_up, active, mlp.activation)
        out, branch = _add_branch(layer, layer.mlp_output_norm, mlp.down(active), middle)
        return out, None if saved is None else saved._replace(gate_up=gate_up, mlp_branch=branch)

    def attend(
        self, layer: Layer, x: Tensor, plan: AttentionPlan, rotation: Rotation, keep: bool
    ) -> tuple[Tensor, _Saved | None]:
        """The attention half of a layer: [T, E] -> [T, E]. With `keep` also the tensors for its backward."""
        qkv = layer.qkv(self._normed(layer.attention_input_norm, x)[0])
        raw = self._rotate(layer, qkv, rotation)
        q, k, v = _split(layer, qkv)
        if keep:
            attended, attention_saved = cast(TreePlan, plan).forward(q, k, v, layer.scaling, layer.terms)
        else:
            attended = plan.attend(layer.number, q, k, v, layer.scaling, layer.terms)
        middle, branch = _add_branch(layer, layer.attention_output_norm, layer.out(attended.reshape(x.shape[0], -1)), x)
        return middle, _Saved(qkv, attended, attention_saved, middle, *raw, branch) if keep else None

    def _normed(self, norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return (x, None) if norm is None else norm(x, self.scratch.take("hidden", x.shape[0], x.shape[1], x))

    def _rotate(self, layer: Layer, qkv: Tensor, rotation: Rotation) -> tuple[Tensor | None, Tensor | None]:
        """Normalises and rotates queries and keys in place. Returns copies of both before their norms, or None without norms."""
        raw: list[Tensor | None] = [None, None]
        queries = layer.heads * layer.head_size
        qk = qkv[:, : queries + layer.kv_heads * layer.head_size]
        if layer.query_norm is not None and layer.key_norm is not None:
            parts = (qk[:, :queries], layer.query_norm), (qk[:, queries:], layer.key_norm)
            for number, (part, norm) in enumerate(parts):
                # Without `clone`, a reshape could be a view of `part`, which the result overwrites.
                rows = part.clone(memory_format=torch.contiguous_format).view(-1, norm.weight.shape[0])
                normed, _ = norm(rows, self.scratch.take("heads", rows.shape[0], rows.shape[1], rows))
                part.copy_(normed.view(part.shape))
                raw[number] = rows
        self._rotate_qk_(layer, qk, rotation)
        return raw[0], raw[1]

    def _rotate_qk_(self, layer: Layer, qk: Tensor, rotation: Rotation, inverse: bool = False) -> None:
        """Rotates `qk` [T, (H + K) D] and scales its queries, in place. `inverse` applies the transposed map, for gradients."""
        heads = qk.view(qk.shape[0], -1, layer.head_size)
        if rotation.cos is not None and rotation.sin is not None:
            # Some models rotate only the first part of each head.
            rotated_size = 2 * rotation.cos.shape[1]
            rotated = heads if rotated_size == layer.head_size else heads[..., :rotated_size]
            kernels.rotate_(rotated, rotation.cos, rotation.sin, inverse)
        if rotation.query_scale is not None:
            heads[:, : layer.heads].mul_(rotation.query_scale[:, None, None])

    def backward(
        self, layer: Layer, x: Tensor, saved: _Saved, grad: Tensor, plan: TreePlan, rotation: Rotation
    ) -> Tensor:
        """Gradient [T, E] of the layer's output -> gradient of its input, in a new tensor. Adds the weight gradients."""
        scratch, mlp, gate_up = self.scratch, cast(Mlp, layer.mlp), cast(Tensor, saved.gate_up)
        tokens, size = x.shape[0], gate_up.shape[1] // 2
        active = scratch.take("active", tokens, size, x)
        grad_active = scratch.take("grad_active", tokens, size, x)
        grad_branch = self._branch_gradient(layer, layer.mlp_output_norm, grad, saved.mlp_branch)
        torch.mm(grad_branch, mlp.down.weight(), out=grad_active)
        # Overwrites `gate_up` with its gradient, and fills `active` with activation(gate) * up.
        kernels.gated_backward_(gate_up, grad_active, active, scratch, mlp.activation)
        mlp.down.add_gradient(grad_branch, active)
        grad_normed = scratch.take("grad_normed", tokens, x.shape[1], x)
        normed, scale = self._normed(layer.mlp_input_norm, saved.middle)
        mlp.gate_up.backward(gate_up, normed, grad_normed)
        grad_middle = grad.clone()
        _add_norm_gradient(layer.mlp_input_norm, grad_normed, saved.middle, grad_middle, scale)
        return self.attend_backward(layer, x, saved, grad_middle, plan, rotation)

    def attend_backward(
        self, layer: Layer, x: Tensor, saved: _Saved, grad_middle: Tensor, plan: TreePlan, rotation: Rotation
    ) -> Tensor:
        """Backward of `attend`. Overwrites contiguous `grad_middle` with the gradient of `x`, and returns `grad_middle`."""
        scratch, tokens = self.scratch, x.shape[0]
        grad_branch = self._branch_gradient(layer, layer.attention_output_norm, grad_middle, saved.attention_branch)
        flat = saved.attended.view(tokens, -1)
        grad_attended = scratch.take("attended", tokens, flat.shape[1], x)
        layer.out.backward(grad_branch, flat, grad_attended)
        grad_qkv = scratch.take("qkv", tokens, saved.qkv.shape[1], x)
        inputs = (*_split(layer, saved.qkv), saved.attended, saved.attention_saved)
        grad, gradients = grad_attended.view(saved.attended.shape), _split(layer, grad_qkv)
        plan.backward(grad, inputs, layer.scaling, gradients, layer.terms, layer.sinks_gradient)
        self._rotate_backward(layer, grad_qkv, saved, rotation)
        grad_normed = scratch.take("grad_normed", tokens, x.shape[1], x)
        normed, scale = self._normed(layer.attention_input_norm, x)
        layer.qkv.backward(grad_qkv, normed, grad_normed)
        _add_norm_gradient(layer.attention_input_norm, grad_normed, x, grad_middle, scale)
        return grad_middle

    def _branch_gradient(self, layer: Layer, norm: Norm | None, grad: Tensor, branch: Tensor | None) -> Tensor:
        """Backward of `_add_branch`: gradient of the sum [T, E] -> gradient of the branch before norm and multiplier."""
        if norm is None and layer.multiplier == 1:
            return grad
        scaled = self.scratch.take("branch", grad.shape[0], grad.shape[1], grad)
        torch.mul(grad, layer.multiplier, out=scaled)
        if norm is None or branch is None:
            return scaled
        before_norm = self.scratch.take("before norm", grad.shape[0], grad.shape[1], grad).zero_()
        norm.backward(scaled, branch, before_norm)
        return before_norm

    def _rotate_backward(self, layer: Layer, grad_qkv: Tensor, saved: _Saved, rotation: Rotation) -> None:
        queries = layer.heads * layer.head_size
        grad_qk = grad_qkv[:, : queries + layer.kv_heads * layer.head_size]
        self._rotate_qk_(layer, grad_qk, rotation, inverse=True)
        parts = (
            (slice(0, queries), layer.query_norm, saved.raw_query),
            (slice(queries, None), layer.key_norm, saved.raw_key),
        )
        for columns, norm, raw in parts:
            if norm is not None and raw is not None:
                part = grad_qk[:, columns]
                part.copy_(norm.backward(part.reshape(raw.shape), raw).view(part.shape))


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, decoder: FusedDecoder, layer: Layer, plan: TreePlan, rotation: Rotation) -> Tensor:
        out, saved = decoder.forward(layer, x, plan, rotation, keep=not decoder.checkpointing)
        ctx.save_for_backward(x, *(saved or ()))
        ctx.arguments = decoder, layer, plan, rotation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        decoder, layer, plan, rotation = ctx.arguments
        saved = _Saved(*tensors) if tensors else decoder.forward(layer, x, plan, rotation, keep=True)[1]
        return decoder.backward(layer, x, saved, grad.contiguous(), plan, rotation), None, None, None, None


class _FusedAttention(torch.autograd.Function):
    """The attention half and the norm before the experts: [T, E] -> (residual stream [T, E], normalised stream [T, E])."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, decoder: FusedDecoder, layer: Layer, plan: TreePlan, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        middle, saved = decoder.attend(layer, x, plan, rotation, keep=True)
        norm = layer.mlp_input_norm
        normed = middle.clone() if norm is None else norm(middle, torch.empty_like(middle))[0]
        ctx.save_for_backward(x, *(saved or ()))
        ctx.arguments = decoder, layer, plan, rotation
        return middle, normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        decoder, layer, plan, rotation = ctx.arguments
        saved, grad_middle = _Saved(*tensors), grad.clone(memory_format=torch.contiguous_format)
        _add_norm_gradient(layer.mlp_input_norm, grad_normed.contiguous(), saved.middle, grad_middle)
        return decoder.attend_backward(layer, x, saved, grad_middle, plan, rotation), None, None, None, None


def _add_branch(layer: Layer, norm: Norm | None, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(`x` + multiplier * norm(branch), `branch`). Without a norm the sum overwrites `branch`, and the second result is None."""
    if norm is None:
        return (branch if layer.multiplier == 1 else branch.mul_(layer.multiplier)).add_(x), None
    normed, _ = norm(branch, torch.empty_like(branch))
    return (normed if layer.multiplier == 1 else normed.mul_(layer.multiplier)).add_(x), branch


def _add_norm_gradient(
    norm: Norm | None, grad_normed: Tensor, x: Tensor, grad_x: Tensor, scale: Tensor | None = None
) -> None:
    """Adds to `grad_x` the gradient of `x` through `norm`. `grad_normed`: gradient of the norm's output. `scale`: see `Norm`."""
    if norm is None:
        grad_x.add_(grad_normed)
    else:
        norm.backward(grad_normed, x, grad_x, scale)


def _split(layer: Layer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + 2K) D] -> views [T, H, D], [T, K, D], [T, K, D]."""
    heads = qkv.view(qkv.shape[0], -1, layer.head_size)
    end = layer.heads + layer.kv_heads
    return heads[:, : layer.heads], heads[:, layer.heads : end], heads[:, end:]
