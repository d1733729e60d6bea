"""The three ways in which a model is run. Which one a model takes is not guessed: the gate (runtime/gate.py) compares.

| path   | what computes a layer                                   | for                                                      |
|--------|---------------------------------------------------------|----------------------------------------------------------|
| fused  | our decoder layer, forward and backward written out;    | the Llama, Qwen, Mistral, Gemma and Granite families;    |
|        | of one with experts our half before the model's own     | gpt-oss, Qwen3-MoE, Mixtral, OLMoE                       |
| packed | transformers' own modules around our attention          | whatever attends through transformers' interface         |
| plain  | transformers' own forward and cache, row by row         | the rest: layers with a state, latent attention, ALiBi   |

`fused` and `packed` share a prompt among the members of its group, in training and in the cache. `plain` shares nothing and
rebuilds its caches after each update of the weights: slow, and right for every model that generates with a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelPath:
    """The rest is of the plain path: transformers' implementation of `attention`; whether rows share a forward (`padded` on the
    right); whether sampling is by transformers' cache, or by a forward over all of a row for each of its tokens."""

    name: Literal["fused", "packed", "plain"]
    attention: Literal["sdpa", "eager"] = "eager"
    padded: bool = False
    cached: bool = True

    def __str__(self) -> str:
        if self.name != "plain":
            return self.name
        rows = "padded rows" if self.padded else "one row at a time"
        return f"plain ({self.attention} attention, {rows}{'' if self.cached else ', sampled without a cache'})"


FUSED = ModelPath("fused")
PACKED = ModelPath("packed")
PLAIN = (
    ModelPath("plain", "sdpa", padded=True),
    ModelPath("plain", "eager", padded=True),
    ModelPath("plain", "eager"),
    ModelPath("plain", "eager", padded=True, cached=False),
    ModelPath("plain", "eager", cached=False),
)
PATHS = (FUSED, PACKED, *PLAIN)  # the faster ones first
