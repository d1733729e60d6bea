"""The three paths: the ways to run a model. The gate (runtime/gate.py) compares paths with transformers and chooses a path.

| path   | code that computes a layer                              | models, for example (more: docs/models.md)               |
|--------|---------------------------------------------------------|----------------------------------------------------------|
| fused  | asyncrl's decoder layer, backward written by hand       | the Llama, Qwen, Mistral, Gemma and Granite families;    |
|        | (experts run by the model's own code)                   | gpt-oss, Qwen3-MoE, Mixtral, OLMoE                       |
| packed | transformers' modules with asyncrl's attention          | others that use transformers' attention interface        |
| plain  | transformers' own forward and cache, a sequence per row | all others: recurrent layers, latent attention, ALiBi    |

On `fused` and `packed` the completions of a prompt (a group) share the prompt's computation, in training and in the cache. On
`plain` nothing is shared, and caches are computed again after each update of the weights: `plain` is slow, but runs most models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A path. The fields after `name` are for variants of `plain`. `attention`: transformers' implementation. `padded`: rows
    share a forward, padded on the right. `cached`: sampling uses a cache; False: a forward over the row for each sampled token."""

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
PATHS = (FUSED, PACKED, *PLAIN)  # from fast to slow
