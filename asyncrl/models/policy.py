"""The policy: a Hugging Face causal language model whose weights the trainer and the embedded engine share.

Only the lane that owns the device may call anything here. Train/eval and gradient mode are set by each caller inside its
closure; `no_grad`, never `inference_mode`, because the modules are shared with training.

Shape legend: T packed tokens, N rows of hidden states, E hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.config.schema import LoraConfig
from asyncrl.errors import ConfigError

from .attention.interface import IMPLEMENTATION, PLAN_ARGUMENT, AttentionPlan, register
from .attention.tree import TreePlan
from .embedding import embed, is_plain
from .fused.decoder import FusedDecoder
from .head.liger import choose_head_kernel
from .head.output import HeadTransform, decoder_of, head_transform, linear_head
from .native.norms import replace_norms
from .parameters.flat import FlatParameters, FlatWeights, ServedParameters
from .parameters.frozen import frozen_names, require_trained
from .parameters.lora import LoraParameters
from .parameters.packed import JoinedLinear, packing_works
from .paths import FUSED, PACKED, ModelPath
from .plain import PlainForward
from .routing import Routing, has_experts

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# By a top-k over scores of which many are exactly 0 (DeepSeek-V3.2's indexer and what came of it).
CHOOSING_LAYERS = {"indexed_attention", "compressed_sparse_attention"}
KNOWN_ROTARY = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class PolicyModel:
    """Weights, their version, and the two calls that everything is made of: `hidden` and `logits`.

    `flat` is what is trained, `weights` what the modules read: one object, except with adapters.

    `version` names the weights in the modules at every moment: the optimizer step, the refresh of the working copy and the
    new number are one closure on the lane (invariant 5b), which is `advance()` at its end.
    """

    weights: FlatWeights
    flat: FlatParameters
    lora: LoraParameters | None = None
    products: list[JoinedLinear]  # all that read packed weights

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
    ) -> None:
        """`path`: how the model is run, as the gate has found (runtime/gate.py). None: fused where its parts allow it, else
        packed, unproved; for models that somebody else has compared. `lora` with a rank freezes the weights and trains
        adapters, whose start is keyed by `seed` (lora.py). `served`: the modules only read; the masters lie elsewhere, cut
        over the ranks. `transform`: what the model does around its head, where that is known; None: it is asked.
        Errors: ConfigError for a model that is not supported, and for a `head_kernel` that cannot be had (liger_head.py)."""
        refuse_unsupported(module)
        self.transform = transform or head_transform(module)  # asked before anything is replaced
        adapted = lora is not None and bool(lora.rank)
        frozen = require_trained(module, frozen_names(module)) if not (served or adapted) else frozenset[str]()
        prepare(module, path or PACKED, DTYPES[dtype])
        self.module = module
        self.dtype = DTYPES[dtype]
        self.version = 0
        if lora is not None and adapted:
            self.weights = FlatWeights(module, self.dtype)
            self.flat = self.lora = LoraParameters(module, self.weights, lora, seed)
        else:
            whole = ServedParameters(module, self.dtype) if served else FlatParameters(module, self.dtype, frozen)
            self.weights = self.flat = whole
        self.decoder = decoder_of(module)
        self.head = linear_head(module)
        embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # a Module, to its annotation
        self._embedding = embedding
        index = {id(parameter): i for i, parameter in enumerate(self.weights.parameters)}
        self._head_index = index[id(self.head.weight)]
        self._bias_index = None if self.head.bias is None else index[id(self.head.bias)]
        self._embedding_index = index[id(embedding.weight)] if is_plain(embedding) else None
        pack = packing_works(self.dtype, self.weights.working.device)
        self._head_product = JoinedLinear(self.weights, [self.head], index, pack)
        self.head_kernel = choose_head_kernel(
            head_kernel, self.device, self.dtype, self.head.weight.shape[0], self.transform
        )
        self._checkpointed: list[nn.Module] = []
        self._training = False
        self.fused = FusedDecoder.of(module, self.weights) if path in (None, FUSED) else None
        if path == FUSED and self.fused is None:
            raise ConfigError(f"model.path: {type(module).__name__} has layers that the fused decoder does not know")
        self.path = path or (PACKED if self.fused is None else FUSED)
        self.products = [self._head_product] + (self.fused.products() if self.fused else [])
        self._plain = PlainForward(self.decoder, padded=self.path.padded) if self.path.name == "plain" else None
        # Of experts; on the plain path nobody asks routers.
        self.routing = Routing.of(module) if self.path in (FUSED, PACKED) else None
        if self.fused is not None:
            self.fused.routing = self.routing
        # Multiply-adds of one token's forward, attention's own left out: an embedding that is only looked up has none.
        looked_up = None if embedding.weight is self.head.weight else embedding.weight
        self.matmul_parameters = sum(p.numel() for p in self.weights.parameters if p.ndim >= 2 and p is not looked_up)

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the model of transformers."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.flat.master.device

    @property
    def head_gradient(self) -> Tensor | None:
        """The head's part of the flat gradient: [V, E], float32 or wider (also the embedding's where they are tied).
        None where it is frozen."""
        return None if self.weights.grad is None else self.weights.view(self.weights.grad, self._head_index)

    @property
    def head_bias_gradient(self) -> Tensor | None:
        """The same of its bias, [V]; None where it has none."""
        if self.weights.grad is None or self._bias_index is None:
            return None
        return self.weights.view(self.weights.grad, self._bias_index)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Final-normed hidden states [T, E] of packed tokens (int64 [T]) at their positions (int64 [T])."""
        if self._plain is not None:
            assert isinstance(plan, TreePlan), "the plain path samples through caches of its own (generation/embedded)"
            return self._plain.hidden(tokens_T, plan).to(self.head.weight.dtype)  # some add up residuals in float32
        gradient = self.weights.grad
        if torch.is_grad_enabled() and self._embedding_index is not None and gradient is not None:
            buffer_VE = self.weights.view(gradient, self._embedding_index)
            rows_TE: Tensor | None = embed(self._embedding, tokens_T, buffer_VE)
        else:
            rows_TE = self._embedding(tokens_T) if self.fused is not None else None
            if rows_TE is not None and gradient is None and torch.is_grad_enabled():
                # A layer's gradients are its own business: without this none would be asked for.
                rows_TE.requires_grad_()
        if self.fused is not None and rows_TE is not None:
            return self.fused.hidden(rows_TE, positions_T, plan)
        return self._transformers_hidden(tokens_T, rows_TE, positions_T, plan)

    def plain_hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """`hidden` by the model's own forward, product for product what a sharded training forward computes."""
        return decode(self.decoder, tokens_T, positions_T, plan)

    def _transformers_hidden(
        self, tokens_T: Tensor, rows_TE: Tensor | None, positions_T: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """The same through the model's own forward: any architecture."""
        return decode(self.decoder, tokens_T if rows_TE is None else rows_TE, positions_T, plan)

    def enable_checkpointing(self) -> None:
        """Keep a layer's input alone and compute the rest again in backward. Errors: ConfigError where the model cannot."""
        if self.fused is not None:
            self.fused.checkpointing = True
        else:
            self._checkpointed = enable_checkpointing(self.module)

    def set_training(self, training: bool) -> None:
        """For a forward with gradients: whether layers are checkpointed, which transformers does where a layer says that it
        trains. Nothing inside a layer is told: routers add noise in train mode, and the sampler has to compute the same."""
        if self._training != training:
            for layer in self._checkpointed:
                layer.training = training
            self._training = training

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """[N, E] -> [N, V] in float32 (float64 for a float64 model), without a graph: products in the matmul dtype, the rest
        wider. What the model does to its logits is in them."""
        logits = self.project(hidden_NE)
        return self.transform.apply_(logits if logits.dtype == torch.float64 else logits.float())

    def project(self, hidden_NE: Tensor) -> Tensor:
        """[N, E] -> [N, V] in the matmul dtype, without a graph: the head's product with its bias, alone."""
        return self._head_product(hidden_NE.to(self.head.weight.dtype))

    def advance(self) -> int:
        """After the optimizer changed the masters: refresh the working copy and tick the version. Returns it."""
        self.flat.refresh()
        self.version += 1
        return self.version

    def host_state(self) -> dict[str, Tensor]:
        """Named tensors of the Hugging Face files, copied to the host, in the matmul dtype. On the lane.

        Compact copies: parameters are slices of one buffer, and safetensors refuses tensors that share storage. Tied ones
        stay one tensor, which transformers then writes once.
        """
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.detach().to("cpu", copy=True)
            state[name] = copies[tensor.data_ptr()]
        return state

    def write_pretrained(self, directory: str | Path, state: dict[str, Tensor]) -> None:
        """Write `host_state()` in Hugging Face format; loads with `from_pretrained` as it is. Any thread."""
        config = self.module.config
        previous = getattr(config, "dtype", None)
        try:
            config.dtype = self.dtype
            self.module.save_pretrained(directory, state_dict=state)
        finally:
            config.dtype = previous

    def save_pretrained(self, directory: str | Path) -> None:
        """Both at once. On the lane."""
        self.write_pretrained(directory, self.host_state())


def decode(decoder: nn.Module, inputs: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
    """Final-normed hidden states [T, E] by the model's own forward. `inputs`: token ids [T], or their embeddings [T, E]."""
    name = "input_ids" if inputs.ndim == 1 else "inputs_embeds"
    output = decoder(
        **{name: inputs.unsqueeze(0)}, position_ids=positions_T.unsqueeze(0), use_cache=False, **{PLAN_ARGUMENT: plan}
    )
    hidden_TE: Tensor = output.last_hidden_state[0]
    return hidden_TE


def prepare(module: PreTrainedModel, path: ModelPath = PACKED, dtype: torch.dtype = torch.float32) -> None:
    """A model whose weights are float32 or wider, trainable; with our attention and norms, except on the plain path, where
    nothing is replaced. `dtype`: of the matrix products. Errors: ConfigError."""
    refuse_unsupported(module)
    if dtype == torch.float64 and has_experts(module):
        module.set_experts_implementation("eager")  # torch's grouped products know no float64
    module.eval()
    module.requires_grad_(True)
    for buffer in module.buffers():  # rotary tables stay float32: they were computed so
        assert not buffer.requires_grad
    register()
    if path.name == "plain":
        set_attention(module, path.attention)
        return
    set_attention(module, IMPLEMENTATION)
    refuse_unknown_layers(module)
    replace_norms(module)


def set_attention(module: PreTrainedModel, implementation: str) -> None:
    """Errors: ConfigError where the model does not take it: transformers then only logs a warning, and goes on as before."""
    try:
        module.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path: {type(module).__name__} does not take {implementation} attention: {str(error).partition('. ')[0]}"
        ) from error
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != implementation:
            raise ConfigError(
                f"model.path: {type(part).__name__} keeps its own attention ({part.config._attn_implementation}): it is outside of "
                "transformers' attention interface"
            )


def enable_checkpointing(module: PreTrainedModel) -> list[nn.Module]:
    """Every layer, without reentrant autograd. Returns the layers, which recompute while their `training` is set.
    transformers renames this call within 5.x, and warns about the old one. Errors: ConfigError where the model has none."""
    options = {"use_reentrant": False}
    layers: list[nn.Module] = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers or not module.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.gradient_checkpointing: {type(module).__name__} has no layers that can be checkpointed; set it to false"
        )
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return layers


def refuse_unknown_layers(module: PreTrainedModel) -> None:
    """Packed rows need layers that see tokens through attention alone. Errors: ConfigError."""
    config = module.config.get_text_config()
    strange = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if strange:
        raise ConfigError(
            f"model.path: {type(module).__name__} has layers of type {', '.join(sorted(map(str, strange)))}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {
        str(part["rope_type"]) for part in (rope, *rope.values()) if isinstance(part, dict) and "rope_type" in part
    }
    if kinds - KNOWN_ROTARY:
        raise ConfigError(
            f"model.path: {type(module).__name__} has rotary scaling of type {', '.join(kinds - KNOWN_ROTARY)}"
        )


def refuse_unsupported(module: PreTrainedModel) -> None:
    """ConfigError for what no path computes: dropout, encoder-decoders. What is asked of the head: head.py."""
    config = module.config
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "encoder_layers"):
        raise ConfigError(
            f"model.path: {type(module).__name__} is an encoder-decoder, or a half of one; asyncrl trains decoder-only models"
        )
    kinds = set(map(str, getattr(config.get_text_config(), "layer_types", None) or ()))
    if found := sorted(kinds & CHOOSING_LAYERS):
        raise ConfigError(
            f"model.path: {type(module).__name__} has layers of type {', '.join(found)}, which choose the keys that a query sees: "
            "among equal scores the choice depends on how long the row is, so sampler and trainer would differ"
        )
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
        if getattr(config, key, 0):
            raise ConfigError(
                f"model.path: {key} is {getattr(config, key)}; dropout in an RL policy is refused, set it to 0"
            )
