"""Attention over packed trees whose tokens are spread over ranks (`distributed.context`; DeepSpeed Ulysses, arXiv:2309.14509).

n ranks, called siblings, share each microbatch: sibling r holds the tokens r, r + n, r + 2n, ... An attention head needs all
tokens. So an all-to-all gives each sibling all tokens of some heads, `TreePlan` attends, and another all-to-all reverses the first:

    q k v  [t, H or K, D]  ->  [T, h or k, D]  -> attention of r's heads    ->  [T, h, D]  ->  [t, H, D]

Backward exchanges the inputs again, because saving them in both layouts would double the saved memory.
Each sibling needs the key/value heads of its query heads. If n does not divide K, every key/value head is sent lcm(K, n)/K
times, so that each sibling gets k key/value heads.

Shape legend: n siblings, T tokens with padding, t = T/n, H query heads, h = H/n, K key/value heads, k = lcm(K, n)/n, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from asyncrl.distributed.collectives import Collectives
from asyncrl.errors import ConfigError
from asyncrl.types import Microbatch

from ..paths import ModelPath
from .interface import NO_TERMS, AttentionTerms
from .tree import TreePlan


def require_context(config: PretrainedConfig, path: ModelPath | None, siblings: int) -> None:
    """Errors: ConfigError if `siblings` ranks cannot share the microbatches of a model. `path`: None if it is not known yet."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if siblings > 1 and isinstance(heads, int):
        _require_heads(heads, siblings)
    if siblings > 1 and path is not None and path.name == "plain":
        raise ConfigError(
            f"distributed.context is {siblings}, but this model runs on the path {path}, where each rank computes whole rows; set "
            "distributed.context to 1"
        )


def _require_heads(heads: int, siblings: int) -> None:
    if heads % siblings:
        raise ConfigError(
            f"distributed.context is {siblings}, but the model has {heads} attention heads, which {siblings} ranks cannot share "
            f"equally; choose a divisor of {heads}"
        )


class ContextPlan(TreePlan):
    """The plan of one sibling. `attend`, `forward` and `backward` are collectives: all siblings call them in the same order."""

    def __init__(self, batch: Microbatch, siblings: Collectives) -> None:
        """Pads the tokens to a multiple of n. The padding is one more root, after all nodes of `batch`."""
        padding = -batch.tokens.size % siblings.world_size
        super().__init__(np.append(batch.node_length, padding), np.append(batch.node_parent, -1))
        self._siblings = siblings

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> tuple[Tensor, Tensor]:
        """See `TreePlan.forward`, for this rank's tokens. The second result has only this rank's heads."""
        repeats = self._repeats(query, key)
        q, k, v = self._exchange((query, _repeat(key, repeats), _repeat(value, repeats)), self.tokens)
        out, kept = super().forward(q, k, v, scaling, self._of_own_heads(terms))
        return self._exchange((out,), len(query))[0], kept

    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        scaling: float,
        gradients: tuple[Tensor, Tensor, Tensor],
        terms: AttentionTerms = NO_TERMS,
        sinks_gradient: Tensor | None = None,
    ) -> None:
        """See `TreePlan.backward`, for this rank's tokens. `sinks_gradient` gets the part of this rank's heads."""
        query, key, value, out, kept = saved
        repeats = self._repeats(query, key)
        inputs = query, _repeat(key, repeats), _repeat(value, repeats), out, grad
        q, k, v, out, grad = self._exchange(inputs, self.tokens)
        of_heads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        own_sinks = None if sinks_gradient is None else self._own(sinks_gradient)
        super().backward(grad, (q, k, v, out, kept), scaling, of_heads, self._of_own_heads(terms), own_sinks)
        del inputs, q, k, v, out, grad
        for target, part in zip(gradients, self._exchange(of_heads, len(query)), strict=True):
            target.copy_(part if part.shape == target.shape else part.view(*key.shape[:2], repeats, -1).sum(2))

    def _repeats(self, query: Tensor, key: Tensor) -> int:
        """How many times each key/value head is sent. Errors: ConfigError or ValueError for sizes that do not fit."""
        siblings = self._siblings.world_size
        _require_heads(query.shape[1], siblings)
        self._check_count(query, siblings)
        return siblings // math.gcd(key.shape[1], siblings)

    def _exchange(self, parts: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The all-to-all of each part: [t, n x, D] -> [T, x, D] if `rows` is T, and [T, x, D] -> [t, n x, D] if `rows` is t."""
        siblings = self._siblings.world_size
        share, size = self.tokens // siblings, parts[0].shape[2]
        # Token i belongs to sibling i % n. So in the view [t, n, x, D] of either layout, the second dimension is the receiver.
        by_rank = [part.reshape(share, siblings, -1, size).transpose(0, 1) for part in parts]
        received = self._siblings.all_to_all(torch.cat(by_rank, 2))
        widths = [part.shape[2] for part in by_rank]
        return [part.transpose(0, 1).contiguous().view(rows, -1, size) for part in received.split(widths, 2)]

    def _own(self, values_H: Tensor) -> Tensor:
        return values_H.view(self._siblings.world_size, -1)[self._siblings.rank]

    def _of_own_heads(self, terms: AttentionTerms) -> AttentionTerms:
        return terms if terms.sinks is None else AttentionTerms(terms.window, terms.softcap, self._own(terms.sinks))


def _repeat(heads: Tensor, repeats: int) -> Tensor:
    return heads if repeats == 1 else heads.repeat_interleave(repeats, 1)
