"""What a model computes for one short fixed row: two processes that hold the same weights must say the same.

Checksums show that bytes arrived, this shows that they are computed with: an old packed copy, a parameter that was bound to
something else, a model of another form have other outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention.tree import TreePlan
from .policy import PolicyModel

TOKENS = 16
# Nats on average. Both compute the same products in the same order, but perhaps with another number of threads.
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}


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


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean absolute difference in nats; NaN where either has one."""
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
