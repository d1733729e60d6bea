"""What a model computes for one short fixed row: two processes that hold the same weights must say the same.

Weights that did not arrive, a tensor that was damaged on the way, an old packed copy, a parameter that was bound to something else
and a model of another form have other outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from .attention.tree import TreePlan
from .policy import PolicyModel

TOKENS = 16
# The last of them: an engine whose decode steps are other kernels than its prefill's computes them one by one.
DECODED = 5
IN_A_ROW = 3  # comparisons of different weights


@dataclass(frozen=True, slots=True)
class Bound:
    """What is rounding, in nats: no comparison is off by more than `once`, nor `IN_A_ROW` of them by more than `usual`.

    Where tokens choose experts (`routed`), rounding tips some of them over to others, if two are nearly as good. Such a token is
    far off, and those that attend to it are a little. So the usual token counts there, the median; else the average.
    """

    usual: float
    once: float
    routed: bool = False

    def distance(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """Of log-probs (nats) [TOKENS - 1]: of those in the prompt, or of those after it, whichever are further off. NaN where
        either has one."""
        differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(map(math.isnan, differences)):
            return math.nan
        typical = median if self.routed else fmean
        return max(typical(differences[:-DECODED]), typical(differences[-DECODED:]))


# Both compute the same products in the same order, but perhaps with another number of threads.
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
# Measured with vLLM in bfloat16, four small models with experts, 40 random weights of each: 0.2 at most; in float32 none of 180 was
# off at all. A cache of zeros is 1.0 off, every weight moved by 3% of its spread 0.3 (medians).
ROUTED_ONCE = 0.3


def bound_of(usual: Mapping[torch.dtype, float], dtype: torch.dtype, routed: bool) -> Bound:
    """`usual`: what rounding makes of a model without experts. In bfloat16 ties stay ties from version to version; in float32 they
    are gone with the next weights, and who is off again has others."""
    if not routed:
        return Bound(usual[dtype], usual[dtype])
    return Bound(ROUTED_ONCE if dtype == torch.bfloat16 else usual[dtype], ROUTED_ONCE, True)


class Comparisons:
    """Of one engine's outputs with the trainer's, version after version."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._beyond = 0  # in a row, of different weights
        self._last: list[float] | None = None

    def judge(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str | None]:
        """(nats that `ours` are off, what is wrong with them in words)."""
        bound, found = self._bound, self._bound.distance(ours, theirs)
        if found <= bound.usual:
            self._beyond = 0
        elif list(theirs) != self._last:
            self._beyond += 1
        self._last = list(theirs)
        text = f"log-probs of a fixed row that are {found:.3g} nats off the trainer's"
        if not found <= bound.once:
            return found, f"{text}; at most {bound.once:g} is rounding"
        if self._beyond >= IN_A_ROW:
            return (
                found,
                f"{text}, the third in a row that is more than {bound.usual:g} off; rounding makes one of them so",
            )
        return found, None


def fixed_row(vocabulary: int) -> Tensor:
    """Token ids int64 [TOKENS], for a model of that many."""
    return (torch.arange(TOKENS) * 7919 + 17) % vocabulary


@torch.no_grad()
def fixed_logprobs(policy: PolicyModel) -> list[float]:
    """Log-probs (nats) [TOKENS - 1] that the model gives to each next token of the row. On the lane."""
    if policy.module.training:
        policy.module.eval()
    policy.set_training(False)
    vocabulary = int(policy.config.get_text_config().vocab_size)
    row = torch.arange(TOKENS, device=policy.device)
    tokens = fixed_row(vocabulary).to(policy.device)
    hidden_TE = policy.hidden(tokens, row, TreePlan([0], [TOKENS]))
    logp_TV = policy.logits(hidden_TE[:-1]).log_softmax(-1)
    found: list[float] = logp_TV.gather(1, tokens[1:, None]).squeeze(1).double().tolist()
    return found
