"""The policy: a Hugging Face causal language model whose weights the trainer and the embedded engine share.

Only the lane, the thread that owns the device, may call functions here, except `write_pretrained`. Callers set train/eval mode and
gradient mode themselves. `inference_mode` is forbidden, since training shares the modules and cannot use inference tensors.

Shape legend: T packed tokens, N rows of hidden states, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError

from .attention.interface import IMPLEMENTATION, PLAN_ARGUMENT, AttentionPlan, register
from .attention.tree import TreePlan
from .fused.decoder import FusedDecoder
from .head.liger import choose_head_kernel
from .head.output import HeadTransform, decoder_of, head_transform, linear_head
from .native.norms import replace_norms
from .parameters.flat import FlatParameters, FlatWeights, ServedParameters
from .parameters.frozen import frozen_names, require_trained, unreached_names
from .parameters.lora import LoraParameters
from .parameters.packed import JoinedLinear, packing_works
from .paths import FUSED, PACKED, ModelPath
from .plain import PlainForward
from .rotary import rope_parts
from .routing import Routing, describe_routes, has_experts

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Attention that selects keys by a top-k over scores, many of which are exactly 0 (the indexer of DeepSeek-V3.2).
KEY_SELECTING_LAYERS = {"indexed_attention", "compressed_sparse_attention"}
KNOWN_ROTARY = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class PolicyModel:
    """A model, its weights and their version. `hidden` and `logits` compute its forward.

    The trainer changes `flat`, and the modules read `weights`. Both are the same object unless LoRA adapters are trained.
    `version` is always that of the weights that the modules read: the optimizer step and `advance` run in one function call on the
    lane, so no other work can run between them.
    """

    weights: FlatWeights
    flat: FlatParameters
    lora: LoraParameters | None = None
    products: list[JoinedLinear]  # may keep packed copies of weights (packed.py)

    def __init__(
        self,
        module: PreTrainedModel,
        dtype: str = "float32",
        *,
        lora: LoraConfig | None = None,
        seed: int = 0,
        head_kernel: str = "auto",
        served: bool = False,
        path: ModelPath | None = None,
        transform: HeadTransform | None = None,
        device: torch.device | None = None,
    ) -> None:
        """path: how to compute the forward, chosen by runtime/gate.py. None: the fused path if possible, else the packed path.
        lora: if its rank is above 0, the weights are frozen and adapters are trained, with random initial values from `seed`.
        served: the modules only read the weights. Another object or process has the masters, which the optimizer updates.
        transform: the scale and cap of the logits. None: `head_transform` finds them by a forward of the model.
        device: the weights move to this device one by one. None: the device of the loaded weights.
        Errors: ConfigError if the model is not supported or `head_kernel` is not available."""
        refuse_unsupported(module)
        move_buffers(module, device)
        # `head_transform` runs the model's own modules, so it must come before `prepare` replaces some of them.
        self.transform = transform or head_transform(module, device)
        adapted = lora is not None and bool(lora.rank)
        frozen = require_trained(module, frozen_names(module)) if not (served or adapted) else frozenset[str]()
        prepare(module, path or PACKED, DTYPES[dtype])
        self.module = module
        self.dtype = DTYPES[dtype]
        self.version = 0
        if lora is not None and adapted:
            self.weights = FlatWeights(module, self.dtype, device)
            self.flat = self.lora = LoraParameters(module, self.weights, lora, seed)
        elif served:
            self.flat = self.weights = ServedParameters(module, self.dtype, device)
        else:
            self.flat = self.weights = FlatParameters(module, self.dtype, frozen, device)
        self.decoder = decoder_of(module)
        self.head = linear_head(module)
        self._embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # declared as Module
        index = {id(parameter): i for i, parameter in enumerate(self.weights.parameters)}
        self._head_index = index[id(self.head.weight)]
        self._bias_index = None if self.head.bias is None else index[id(self.head.bias)]
        self._embedding_index = index[id(self._embedding.weight)] if is_lookup(self._embedding) else None
        pack = packing_works(self.dtype, self.weights.working.device)
        self._head_product = JoinedLinear(self.weights, [self.head], index, pack)
        self.head_kernel = choose_head_kernel(
            head_kernel, self.device, self.dtype, self.head.weight.shape[0], self.transform
        )
        self._checkpointed: list[nn.Module] = []
        self._training = False
        self.fused = FusedDecoder.try_build(module, self.weights) if path in (None, FUSED) else None
        if path == FUSED and self.fused is None:
            raise ConfigError(f"model.path: {type(module).__name__} has layers that the fused decoder does not support")
        self.path = path or (PACKED if self.fused is None else FUSED)
        self.products = [self._head_product] + (self.fused.products() if self.fused else [])
        self._plain = PlainForward(self.decoder, padded=self.path.padded) if self.path.name == "plain" else None
        # Records and replays the choices of routers, which the plain path does not support.
        self.routing = Routing.of(module) if self.path in (FUSED, PACKED) else None
        if self.fused is not None:
            self.fused.routing = self.routing

    @cached_property
    def matmul_parameters(self) -> int:
        """Multiply-adds of one token's forward without attention. Of a layer's experts only k count, if `describe_routes` finds k.
        Weights that no text reaches do not count. The embedding counts only if the head uses the same weight."""
        lookup = None if self._embedding.weight is self.head.weight else self._embedding.weight
        routes, unreached = describe_routes(self.module), unreached_names(self.module)
        total = 0
        for name, weight in zip(self.weights.names, self.weights.parameters, strict=True):
            # The biases of all experts are one parameter with two dimensions.
            if weight.ndim < 2 or name.endswith("bias") or weight is lookup or name in unreached:
                continue
            total += weight.numel() * routes.k // routes.experts if routes and ".experts." in name else weight.numel()
        return total

    @property
    def config(self) -> PretrainedConfig:
        return self.module.config

    @property
    def device(self) -> torch.device:
        return self.flat.master.device

    @property
    def head_gradient(self) -> Tensor | None:
        """View [V, E] of the gradient of the head (and a tied embedding), float32 or wider. None without a gradient buffer."""
        return None if self.weights.grad is None else self.weights.view(self.weights.grad, self._head_index)

    @property
    def head_bias_gradient(self) -> Tensor | None:
        """View [V] of the gradient of the head's bias. None without a bias or without a gradient buffer."""
        if self.weights.grad is None or self._bias_index is None:
            return None
        return self.weights.view(self.weights.grad, self._bias_index)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [T, E] after the final norm, for packed tokens (int64 [T]) and their positions (int64 [T])."""
        if self._plain is not None:
            assert isinstance(plan, TreePlan), "the plain path runs no decode plans (see generation/embedded)"
            # Some models keep the residual stream in float32.
            return self._plain.hidden(tokens_T, plan).to(self.head.weight.dtype)
        gradient = self.weights.grad
        if torch.is_grad_enabled() and self._embedding_index is not None and gradient is not None:
            buffer_VE = self.weights.view(gradient, self._embedding_index)
            rows_TE: Tensor | None = embed(self._embedding, tokens_T, buffer_VE)
        else:
            rows_TE = self._embedding(tokens_T) if self.fused is not None else None
            if rows_TE is not None and gradient is None and torch.is_grad_enabled():
                # The fused layers add adapter gradients in their backward, which autograd runs only if the input needs a gradient.
                rows_TE.requires_grad_()
        if self.fused is not None and rows_TE is not None:
            return self.fused.hidden(rows_TE, positions_T, plan)
        return decoder_hidden(self.decoder, tokens_T if rows_TE is None else rows_TE, positions_T, plan)

    def enable_checkpointing(self) -> None:
        """Turns activation checkpointing on: training forwards save only layer inputs. Errors: ConfigError if not supported."""
        if self.fused is not None:
            self.fused.checkpointing = True
        else:
            self._checkpointed = enable_checkpointing(self.module)

    def set_training(self, training: bool) -> None:
        """Switches the checkpointing of transformers' layers on or off: layers whose `training` is true are checkpointed. Modules
        inside a layer stay in eval mode. In train mode routers would add noise, so trainer and sampler would differ."""
        if self._training != training:
            for layer in self._checkpointed:
                layer.training = training
            self._training = training

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """[N, E] -> logits [N, V] in float32 (float64 for a float64 model), scaled and capped as by the model. No autograd."""
        logits = self.project(hidden_NE)
        return self.transform.apply_(logits if logits.dtype == torch.float64 else logits.float())

    def project(self, hidden_NE: Tensor) -> Tensor:
        """[N, E] -> [N, V] in the matmul dtype: the head and its bias, before scale and cap. No autograd."""
        return self._head_product(hidden_NE.to(self.head.weight.dtype))

    def loaded_tensors(self) -> Iterator[Tensor]:
        """All tensors that were loaded or drawn at random, for a caller that overwrites them and then calls `flat.refresh`."""
        yield self.flat.master
        if self.lora is not None:
            yield from (self.weights.working, *self.lora.merge.base)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        yield from (value for name, value in self.module.state_dict().items() if name not in parameters)

    def advance(self) -> int:
        """Call this after an optimizer step: refreshes the weights that the modules read. Returns the incremented version."""
        self.flat.refresh()
        self.version += 1
        return self.version

    def host_state(self) -> dict[str, Tensor]:
        """The state dict of the model, copied to the CPU in the matmul dtype. Must run on the lane. Each tensor gets its own
        storage, which safetensors requires. Tied parameters share one copy, which transformers writes once."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            # A buffer may be a part of another buffer that begins at the same address.
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            if key not in copies:
                copies[key] = tensor.detach().to("cpu", copy=True)
            state[name] = copies[key]
        return state

    def write_pretrained(self, directory: str | Path, state: dict[str, Tensor]) -> None:
        """Writes the result of `host_state` in Hugging Face format, for `from_pretrained`. May run on any thread."""
        config = self.module.config
        previous = getattr(config, "dtype", None)
        try:
            config.dtype = self.dtype
            self.module.save_pretrained(directory, state_dict=state)
        finally:
            config.dtype = previous

    def save_pretrained(self, directory: str | Path) -> None:
        """`host_state` and `write_pretrained`. Must run on the lane."""
        self.write_pretrained(directory, self.host_state())


def decoder_hidden(decoder: nn.Module, inputs: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
    """Hidden states [T, E] after the final norm, by the model's own forward. `inputs`: token ids [T] or embeddings [T, E]."""
    name = "input_ids" if inputs.ndim == 1 else "inputs_embeds"
    output = decoder(
        **{name: inputs.unsqueeze(0)}, position_ids=positions_T.unsqueeze(0), use_cache=False, **{PLAN_ARGUMENT: plan}
    )
    hidden_TE: Tensor = output.last_hidden_state[0]
    return hidden_TE


def move_buffers(module: nn.Module, device: torch.device | None) -> None:
    """Moves the buffers to `device`, but no weights. None: does nothing."""
    for part in module.modules() if device is not None else ():
        part._buffers.update({name: None if b is None else b.to(device) for name, b in part._buffers.items()})


def prepare(module: PreTrainedModel, path: ModelPath = PACKED, dtype: torch.dtype = torch.float32) -> None:
    """Sets eval mode and makes all parameters trainable. If `path` is not plain, installs asyncrl's attention and norms. `dtype`:
    of matrix products. Errors: ConfigError if the model is not supported."""
    refuse_unsupported(module)
    if dtype == torch.float64 and has_experts(module):
        # torch's grouped products do not support float64.
        module.set_experts_implementation("eager")
    module.eval()
    module.requires_grad_(True)
    register()
    if path.name == "plain":
        set_attention(module, path.attention)
        return
    set_attention(module, IMPLEMENTATION)
    refuse_unknown_layers(module)
    replace_norms(module)


def set_attention(module: PreTrainedModel, implementation: str) -> None:
    """Sets the attention of all modules. Errors: ConfigError if a module keeps another attention, which transformers only logs."""
    try:
        module.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path: {type(module).__name__} does not take {implementation} attention: {str(error).partition('. ')[0]}"
        ) from error
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != implementation:
            raise ConfigError(
                f"model.path: {type(part).__name__} keeps its own attention ({part.config._attn_implementation}), which does "
                "not use transformers' attention interface; asyncrl needs this interface"
            )


def enable_checkpointing(module: PreTrainedModel) -> list[nn.Module]:
    """Turns non-reentrant checkpointing on. Returns the layers. A layer is checkpointed while its `training` is true.
    Errors: ConfigError if the model does not support checkpointing."""
    options = {"use_reentrant": False}
    layers: list[nn.Module] = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers or not module.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.gradient_checkpointing: {type(module).__name__} has no layers that can be checkpointed; set it to false"
        )
    # transformers renamed this method during 5.x. The old name then logs a warning.
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return layers


def refuse_unknown_layers(module: PreTrainedModel) -> None:
    """Packing is correct only if nothing but attention mixes tokens. Errors: ConfigError for unknown layers or rotary scaling."""
    config, name = module.config.get_text_config(), type(module).__name__
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise ConfigError(f"model.path: {name} has layers of type {', '.join(sorted(map(str, unknown)))}")
    unknown = {str(part["rope_type"]) for part in rope_parts(config)} - KNOWN_ROTARY
    if unknown:
        raise ConfigError(f"model.path: {name} has rotary scaling of type {', '.join(sorted(unknown))}")


def refuse_unsupported(module: PreTrainedModel) -> None:
    """Errors: ConfigError for models that no path supports, such as encoder-decoders and models with dropout."""
    config = module.config
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "encoder_layers"):
        raise ConfigError(
            f"model.path: {type(module).__name__} is an encoder-decoder, or a half of one; asyncrl trains decoder-only models"
        )
    kinds = set(map(str, getattr(config.get_text_config(), "layer_types", None) or ()))
    if found := sorted(kinds & KEY_SELECTING_LAYERS):
        raise ConfigError(
            f"model.path: {type(module).__name__} has layers of type {', '.join(found)}, which choose the keys that a query sees: "
            "among equal scores the choice depends on how long the row is, so sampler and trainer would differ"
        )
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
        if getattr(config, key, 0):
            raise ConfigError(
                f"model.path: {key} is {getattr(config, key)}; an RL policy must not have dropout, so set it to 0"
            )


@torch.no_grad()
def is_lookup(module: nn.Module) -> bool:
    """Whether `embed` can replace the module: a plain lookup, or a lookup whose rows are scaled by `embed_scale` as in Gemma."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module) is nn.Embedding:
        return True
    tokens = torch.arange(min(module.num_embeddings, 8), device=module.weight.device)
    return isinstance(getattr(module, "embed_scale", None), Tensor) and torch.equal(
        module(tokens), _scale(module, F.embedding(tokens, module.weight))
    )


def embed(module: nn.Embedding, tokens_T: Tensor, grad_buffer_VE: Tensor) -> Tensor:
    """[T] -> [T, E]. Backward adds the gradient rows to `grad_buffer_VE`, in the buffer's dtype, and nothing to `weight.grad`. As
    in `nn.Embedding`, the row of token `padding_idx` gets no gradient.

    The backward of `nn.Embedding` makes a dense [V, E] tensor for every microbatch. For a small model with tied embeddings this
    costs more memory traffic than a layer. In bfloat16 that backward also sums the rows of repeated tokens in bfloat16.
    """
    rows: Tensor = _Embed.apply(module.weight, tokens_T, grad_buffer_VE, module.padding_idx)
    return rows if type(module) is nn.Embedding else _scale(module, rows)


def _scale(module: nn.Module, rows: Tensor) -> Tensor:
    """`rows` times `embed_scale`, which is rounded to the dtype of the rows as in transformers."""
    result: Tensor = rows * module.embed_scale.to(rows.dtype)  # type: ignore[operator]  # declared as Tensor or Module
    return result


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, buffer: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.buffer, ctx.padding = buffer, padding
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        rows = grad.to(ctx.buffer.dtype)
        if ctx.padding is not None:
            rows = rows * (tokens != ctx.padding).unsqueeze(1)
        ctx.buffer.index_add_(0, tokens, rows)
        return None, None, None, None
