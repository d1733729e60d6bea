"""What a policy computes, for comparing policies."""

from __future__ import annotations

import torch

from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.head.logprobs import token_logprobs
from asyncrl.models.policy import PolicyModel

COUNT = 17


def logprobs(policy: PolicyModel) -> torch.Tensor:
    tokens = torch.randint(1, 61, (COUNT,), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        hidden = policy.hidden(tokens, torch.arange(COUNT), TreePlan([0], [COUNT]))
        found, _ = token_logprobs(
            hidden[:-1], policy.head.weight, tokens[1:], torch.ones(COUNT - 1), project=policy.project,
            bias_V=policy.head.bias, transform=policy.transform,
        )  # fmt: skip
    return found
