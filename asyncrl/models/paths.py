"""The three ways in which a model is run. Which one a model takes is not guessed: the gate (runtime/gate.py) compares.

| path   | what computes a layer                                   | for                                                      |
|--------|---------------------------------------------------------|----------------------------------------------------------|
| fused  | our decoder layer, forward and backward written out     | the Llama, Qwen, Mistral, Gemma and Granite families     |
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
    """`attention` and `padded` are of the plain path: transformers' implementation, and whether rows of different lengths share
    a forward (padded on the right)."""

    name: Literal["fused", "packed", "plain"]
    attention: Literal["sdpa", "eager"] = "eager"
    padded: bool = False

    def __str__(self) -> str:
        if self.name != "plain":
            return self.name
        return f"plain ({self.attention} attention, {'padded rows' if self.padded else 'rows of one length at a time'})"


FUSED = ModelPath("fused")
PACKED = ModelPath("packed")
PLAIN = (ModelPath("plain", "sdpa", True), ModelPath("plain", "eager", True), ModelPath("plain", "eager", False))
PATHS = (FUSED, PACKED, *PLAIN)  # the faster ones first
