"""Our attention, registered through transformers' own interfaces for attention and for masks.

A forward of the model carries an `AttentionPlan` in its keyword arguments; every attention layer hands its rotated
queries, keys and values to `plan.attend(...)`. The plan knows the layout (a packed prefix tree, a decode batch over a
cache); the model code knows none of it. So any architecture that uses transformers' attention interface is served.

What a layer does beyond `softmax(q k' scaling) v` arrives as `AttentionTerms`: the window by way of the mask that the model
asks transformers for, which here is a note of what may be seen instead of a tensor; the rest as keyword arguments. (Layers
pass `sliding_window` as well, for flash attention, and some (OLMoE's) one that their mask does not have: the mask counts, as
in eager attention, which is what a model is compared with.) Whatever is neither acted on nor known to be without effect is
refused: a model must not lose a term in silence.

Shape legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from asyncrl.errors import ConfigError, PlatformError

from ..routes import Routes

IMPLEMENTATION = "asyncrl"
PLAN_ARGUMENT = "attention_plan"

# Keyword arguments of transformers' attention calls that change nothing here: bookkeeping, what the mask says as well, and
# what only other implementations read.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
        "sliding_window", "num_items_in_batch", "cache_position", "layer_idx", "output_router_logits", "is_causal",
        "logits_to_keep", "labels",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """What one layer's attention does beyond `softmax(q k' scaling) v` under a causal mask.

    window: a query sees itself and the `window - 1` tokens of its sequence before it; None: all of them.
    softcap: scores s become `softcap * tanh(s / softcap)` before mask and softmax (Gemma 2, arXiv:2408.00118, section 2).
    sinks: [H] one more score a head, which takes its share of the softmax and has no value (gpt-oss; differentiable).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing beyond that."""
        return self.window is None and self.softcap is None and self.sinks is None

    def within(self, longest: int) -> AttentionTerms:
        """The same for sequences of at most `longest` tokens: a window that none of them leaves is none."""
        if self.window is None or self.window < longest:
            return self
        return AttentionTerms(None, self.softcap, self.sinks)


PLAIN = AttentionTerms()


class Routed:
    """A plan that can carry the routes of its forward."""

    routes: Routes | None = None


class AttentionPlan(Protocol):
    """The layout of the tokens of one forward: who sees whom; and which experts they go to, where somebody asks."""

    routes: Routes | None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = PLAIN
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] (rotary applied) -> [T, H, D]. Differentiable where asked."""
        ...


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """What our mask interface answers in the place of a tensor: causal, within `window`. Errors: ConfigError for a model that
    reads its mask as the tensor it is not."""

    window: int | None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that are asked for, not read
            raise AttributeError(name)
        raise ConfigError(f"the model reads the mask of its attention ({name}), instead of handing it on")


def _attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,
    attention_mask: SeenTokens | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    plan: AttentionPlan = kwargs.pop(PLAN_ARGUMENT)
    if not isinstance(attention_mask, SeenTokens):
        raise ConfigError(f"{type(module).__name__} makes a mask of its own")
    if dropout or not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ConfigError(f"{type(module).__name__} is not causal, or drops out")
    unknown = {name: given for name, given in kwargs.items() if name not in _WITHOUT_EFFECT and given is not None}
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which ours does not act on"
        )
    if value.shape[-1] != query.shape[-1] or query.shape[0] != 1:
        raise ConfigError(
            f"{type(module).__name__} attends with queries {tuple(query.shape)} and values {tuple(value.shape)}"
        )
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ConfigError(f"{type(module).__name__} has sinks, which it does not hand to its attention")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ConfigError(f"{type(module).__name__} has sinks {tuple(s_aux.shape)}, not one for each of its heads")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attend(
        module.layer_idx,  # type: ignore[arg-type]  # an attribute of Module: Tensor or Module
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        AttentionTerms(attention_mask.window, softcap, s_aux),
    )
    return out.unsqueeze(0), None  # [1, T, H, D]


def _mask(*args: Any, **kwargs: Any) -> SeenTokens:
    """The plan masks by itself; what it has to know of the mask is the window."""
    if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
        raise ConfigError("the model lays a mask of its own over the causal one, or asks for one that is not causal")
    window = kwargs.get("local_size")
    if window is not None and window != getattr(kwargs.get("config"), "sliding_window", None):
        raise ConfigError(f"the model attends in chunks of {window} tokens")
    return SeenTokens(window)


def register() -> None:
    """Idempotent; called when a policy model is loaded. Errors: PlatformError where torch keeps cuDNN's attention.

    torch takes that by itself on Hopper cards. Its backward under a mask gives NaN where the length of the keys is 64 mod 128 and
    activations are large (pytorch#196678). It makes a plan for each new shape, which took 36 ms on an H200 where a known one took
    0.15 ms, and keeps memory for it outside of torch's allocator; a decode step has a new shape each time.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.backends.cuda.cudnn_sdp_enabled():
        raise PlatformError(
            f"torch {torch.__version__} keeps cuDNN's attention after enable_cudnn_sdp(False), whose gradients are not right"
        )
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
