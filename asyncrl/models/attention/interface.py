"""Registers asyncrl's attention and its mask with transformers, so that the attention layers of a model call `AttentionPlan`s.

A forward of the model carries an `AttentionPlan` in its keyword arguments. Every attention layer passes rotated queries, rotated
keys, and values to `plan.attend(...)`. Only the plan knows the layout of the tokens: packed trees, or a decode batch over a cache.

A layer may compute more than `softmax(q k' scaling) v`. The additions arrive as `AttentionTerms`. The window comes from the mask
that the model requests: asyncrl's mask function returns a `SeenTokens`, not a tensor. The other terms are keyword arguments. The
argument `sliding_window` is ignored: OLMoE passes a window that its mask does not have, and eager attention, the reference, uses
the mask. An argument that is neither used nor listed in `_WITHOUT_EFFECT` is an error: a model must not lose a term silently.

Shape legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from asyncrl.errors import ConfigError

from ..routes import Routes

IMPLEMENTATION = "asyncrl"
PLAN_ARGUMENT = "attention_plan"

# Keyword arguments of transformers' attention calls that are safe to ignore. Some repeat the mask, and some are read by other
# attention implementations only.
_WITHOUT_EFFECT = {
    "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "sliding_window", "num_items_in_batch", "cache_position", "layer_idx", "output_router_logits", "is_causal",
    "logits_to_keep", "labels",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Additions of one layer to `softmax(q k' scaling) v` under a causal mask.

    window: a query sees itself and the `window - 1` tokens before it. None: a query sees itself and all tokens before it.
    softcap: scores s become `softcap * tanh(s / softcap)` before mask and softmax (Gemma 2, arXiv:2408.00118, section 2).
    sinks: [H], differentiable. A sink is one more score in the softmax of its head, without a key and a value (gpt-oss).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no addition."""
        return self.window is None and self.softcap is None and self.sinks is None

    def simplified_for(self, longest: int) -> AttentionTerms:
        """Equal terms for sequences of at most `longest` tokens: a window that covers `longest` tokens is dropped."""
        if self.window is None or self.window < longest:
            return self
        return AttentionTerms(None, self.softcap, self.sinks)


NO_TERMS = AttentionTerms()


class AttentionPlan:
    """The layout of the tokens of one forward: which tokens each query sees. A caller sets `routes` to record or replay the tokens'
    experts."""

    routes: Routes | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] (rotary applied) -> [T, H, D]. Training plans are differentiable."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Replaces the mask tensor: a causal mask, with `window` tokens (None: all). Errors: ConfigError for other attributes."""

    window: int | None

    def __getattr__(self, name: str) -> Any:
        # Python and libraries look up special methods of any object. This does not mean that the model reads the mask.
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(f"the model reads `{name}` of its attention mask; it may only pass the mask on")


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
    owner = type(module).__name__
    plan: AttentionPlan = kwargs.pop(PLAN_ARGUMENT)
    if not isinstance(attention_mask, SeenTokens):
        raise ConfigError(f"{owner} makes its own attention mask; only masks of transformers' mask interface work")
    if dropout or not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ConfigError(f"{owner} has dropout or is not causal; only causal attention without dropout works")
    unknown = sorted(name for name, value in kwargs.items() if name not in _WITHOUT_EFFECT and value is not None)
    if unknown:
        raise ConfigError(f"{owner} passes {', '.join(unknown)} to its attention, which asyncrl does not support")
    if value.shape[-1] != query.shape[-1] or query.shape[0] != 1:
        raise ConfigError(
            f"{owner} has queries {tuple(query.shape)} and values {tuple(value.shape)}; expected batch 1 and equal head sizes"
        )
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ConfigError(f"{owner} has `sinks` but does not pass them to its attention; such a model is not supported")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ConfigError(
            f"{owner} has sinks {tuple(s_aux.shape)} for {query.shape[1]} heads; it needs a sink for each head"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attend(
        module.layer_idx,  # type: ignore[arg-type]  # declared as Tensor or Module
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        AttentionTerms(attention_mask.window, softcap, s_aux),
    )
    return out.unsqueeze(0), None  # [1, T, H, D]


def _mask(*args: Any, **kwargs: Any) -> SeenTokens:
    """Returns only the window: the plan applies the causal mask itself."""
    if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
        raise ConfigError("the model changes the causal mask or requests a bidirectional mask; only causal masks work")
    window = kwargs.get("local_size")
    if window is not None and window != getattr(kwargs.get("config"), "sliding_window", None):
        raise ConfigError(f"the model attends in chunks of {window} tokens; only sliding windows work")
    return SeenTokens(window)


def register() -> None:
    """Registers asyncrl's attention and mask with transformers, and turns cuDNN's attention off. Idempotent.

    torch prefers cuDNN's attention on Hopper cards. Its masked backward gives NaN if the key length is 64 mod 128 and activations
    are large (pytorch#196678). cuDNN also builds a plan for each new shape (36 ms on an H200). Each decode step has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
