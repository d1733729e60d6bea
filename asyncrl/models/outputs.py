"""Log-probs of one short fixed row. Two processes compare these log-probs to check that they have the same weights.

Log-probs differ if weights did not arrive, a tensor was damaged in transport, a packed copy (parameters/packed.py) is old, a
parameter is a view of the wrong memory, or the two models have different code or sizes.
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

TOKENS = 16  # of the fixed row
# If the decode steps of an engine use other kernels than its prefill, decode steps compute the last `DECODED` tokens of the row.
DECODED = 5
CONSECUTIVE = 3  # distances in succession above `soft_limit`: an error


@dataclass(frozen=True, slots=True)
class Bound:
    """Limits of `distance`. An error: one distance above `hard_limit`, or `CONSECUTIVE` distances above `soft_limit`.

    In a model with experts (`routed`) rounding may send a token to another expert if two experts have nearly equal scores. Such a
    token is far off, and tokens that attend to this token are a little off. So `distance` takes a median if `routed`, else a mean.
    """

    soft_limit: float  # nats
    hard_limit: float  # nats
    routed: bool = False  # whether the model has experts

    def distance(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """The distance (nats) of log-probs `ours` and `theirs` [TOKENS - 1]: the larger of two values, one for the prefilled tokens
        and one for the last `DECODED` tokens. NaN if a log-prob is NaN."""
        differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(map(math.isnan, differences)):
            return math.nan
        typical = median if self.routed else fmean
        return max(typical(differences[:-DECODED]), typical(differences[-DECODED:]))


# Limits in nats for two processes that run the same kernels, perhaps with different numbers of threads.
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
# Distances that were measured with vLLM and small models with experts: in bfloat16 at most 0.2 (four models, 40 random sets of
# weights each), in float32 below 0.0001 (three models, 180 comparisons). Distances with a fault: 1.0 with a cache of zeros, 0.3
# if all weights were off by 3% of their spread.
ROUTED_LIMIT = 0.3


def bound_of(limits: Mapping[torch.dtype, float], dtype: torch.dtype, routed: bool) -> Bound:
    """The bound for `dtype`. `limits`: nats for models without experts. In bfloat16 two experts may have equal scores over many
    versions, so `routed` gets a larger `soft_limit` there. In float32 the next update makes equal scores different."""
    if not routed:
        return Bound(limits[dtype], limits[dtype])
    return Bound(ROUTED_LIMIT if dtype == torch.bfloat16 else limits[dtype], ROUTED_LIMIT, True)


class Comparisons:
    """Compares the log-probs of one engine with the trainer's, version after version."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._above_soft_limit = 0  # consecutive distances
        self._last_theirs: list[float] | None = None

    def compare(self, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str | None]:
        """Log-probs `ours` of the engine and `theirs` of the trainer -> (distance in nats, error or None). If `theirs` are those of
        the last call, the weights are the same, and the call does not count towards `CONSECUTIVE`."""
        bound, distance = self._bound, self._bound.distance(ours, theirs)
        if distance <= bound.soft_limit:
            self._above_soft_limit = 0
        elif list(theirs) != self._last_theirs:
            self._above_soft_limit += 1
        self._last_theirs = list(theirs)
        text = f"log-probs of a fixed row that are {distance:.3g} nats off the trainer's"
        if not distance <= bound.hard_limit:  # also if the distance is NaN
            return distance, f"{text}; rounding explains at most {bound.hard_limit:g}"
        if self._above_soft_limit >= CONSECUTIVE:
            text += f": {CONSECUTIVE} comparisons in succession above {bound.soft_limit:g} are no rounding"
            return distance, text
        return distance, None


def fixed_row(vocabulary: int) -> Tensor:
    """Token ids int64 [TOKENS] below `vocabulary`."""
    return (torch.arange(TOKENS) * 7919 + 17) % vocabulary


@torch.no_grad()
def fixed_logprobs(policy: PolicyModel) -> list[float]:
    """Log-probs (nats) [TOKENS - 1] of the tokens of `fixed_row` after the first. Call this on the lane, the device's thread."""
    if policy.module.training:
        policy.module.eval()
    policy.set_training(False)
    positions = torch.arange(TOKENS, device=policy.device)
    tokens = fixed_row(int(policy.config.get_text_config().vocab_size)).to(policy.device)
    hidden_TE = policy.hidden(tokens, positions, TreePlan([TOKENS]))
    logp_TV = policy.logits(hidden_TE[:-1]).log_softmax(-1)
    logprobs: list[float] = logp_TV.gather(1, tokens[1:, None]).squeeze(1).double().tolist()
    return logprobs
