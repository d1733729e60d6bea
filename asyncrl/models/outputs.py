"""Log-probs of one short fixed row. Two processes compare these log-probs to check that they have the same weights.

Log-probs differ if weights did not arrive, a tensor was damaged in transport, a packed copy is old, a parameter is a view of the
wrong memory, or the two models have different code or sizes.
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
# Number of last tokens that an engine computes one by one, if its decode steps use other kernels than its prefill.
DECODED = 5
IN_A_ROW = 3  # consecutive distances above `Bound.usual`: an error


@dataclass(frozen=True, slots=True)
class Bound:
    """How far rounding moves log-probs, in nats. An error: a distance above `once`, or `IN_A_ROW` successive ones above `usual`.

    In a model with experts (`routed`) rounding may send a token to another expert if two experts have nearly equal scores. Such a
    token is far off, and tokens that attend to this token are a little off. So `distance` is a median if `routed`, else a mean.
    """

    usual: float
    once: float
    routed: bool = False

    def distance(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """The larger of two distances (nats): of the prefilled tokens, and of the decoded tokens. `ours`, `theirs`: log-probs
        [TOKENS - 1]. NaN if a log-prob is NaN."""
        differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(map(math.isnan, differences)):
            return math.nan
        typical = median if self.routed else fmean
        return max(typical(differences[:-DECODED]), typical(differences[-DECODED:]))


# For two processes that run the same kernels, perhaps with different numbers of threads.
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
# Measured with vLLM and small models with experts: in bfloat16 at most 0.2 (four models, 40 random sets of weights each), in
# float32 below 0.0001 (three models, 180 comparisons). Medians of faults: 1.0 for a cache of zeros, 0.3 for weights that moved
# by 3% of their spread.
ROUTED_ONCE = 0.3


def bound_of(usual: Mapping[torch.dtype, float], dtype: torch.dtype, routed: bool) -> Bound:
    """`usual`: the bound of a model without experts. In bfloat16 two experts may have equal scores over many versions, so a
    model with experts gets a larger `usual`. In float32 the next update makes the scores different."""
    if not routed:
        return Bound(usual[dtype], usual[dtype])
    return Bound(ROUTED_ONCE if dtype == torch.bfloat16 else usual[dtype], ROUTED_ONCE, True)


class Comparisons:
    """Compares the log-probs of one engine with the trainer's, version after version."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._above_usual = 0  # consecutive distances
        self._last: list[float] | None = None

    def judge(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str | None]:
        """Returns (distance in nats, error message or None). Weights that were compared last time do not count again."""
        bound, distance = self._bound, self._bound.distance(ours, theirs)
        if distance <= bound.usual:
            self._above_usual = 0
        elif list(theirs) != self._last:
            self._above_usual += 1
        self._last = list(theirs)
        text = f"log-probs of a fixed row that are {distance:.3g} nats off the trainer's"
        if not distance <= bound.once:  # also if it is NaN
            return distance, f"{text}; at most {bound.once:g} is rounding"
        if self._above_usual >= IN_A_ROW:
            return distance, f"{text}, the third in a row above {bound.usual:g}; rounding explains one such distance"
        return distance, None


def fixed_row(vocabulary: int) -> Tensor:
    """Token ids int64 [TOKENS] below `vocabulary`."""
    return (torch.arange(TOKENS) * 7919 + 17) % vocabulary


@torch.no_grad()
def fixed_logprobs(policy: PolicyModel) -> list[float]:
    """Log-probs (nats) [TOKENS - 1] of the tokens of `fixed_row` after the first. Call it on the lane."""
    if policy.module.training:
        policy.module.eval()
    policy.set_training(False)
    vocabulary = int(policy.config.get_text_config().vocab_size)
    positions = torch.arange(TOKENS, device=policy.device)
    tokens = fixed_row(vocabulary).to(policy.device)
    hidden_TE = policy.hidden(tokens, positions, TreePlan([TOKENS]))
    logp_TV = policy.logits(hidden_TE[:-1]).log_softmax(-1)
    logprobs: list[float] = logp_TV.gather(1, tokens[1:, None]).squeeze(1).double().tolist()
    return logprobs
