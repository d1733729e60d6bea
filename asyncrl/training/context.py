"""Context parallelism: a set of `distributed.context` ranks shares each microbatch. In this package all ranks of the set are called
siblings, the leader (pumps/siblings.py) too. Each sibling has the whole microbatch.

Sibling r of n computes the tokens r, r + n, r + 2n, ... and the log-probs and entropies whose source is one of these tokens. A
differentiable all-gather then gives every sibling all S log-probs and entropies, and each sibling evaluates the whole loss. In
backward a sibling keeps the gradient of its own log-probs and entropies. So its gradients of the parameters are those of its own
tokens, and the sum over ranks is exact. All siblings have equal counts, losses and metrics, so only those of sibling 0 are summed.

Shape legend: n siblings, T packed tokens, t = ceil(T/n), S scored tokens, s = largest number of scored tokens of a sibling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.distributed.collectives import Collectives
from asyncrl.models.attention.context import ContextPlan
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.copying import to_device
from asyncrl.types import Int64Array, Microbatch


def tokens_of_rank(values_T: npt.NDArray[Any], siblings: Collectives | None, padding: int = 0) -> npt.NDArray[Any]:
    """[T, ...] -> the values [t, ...] of this rank's tokens, padded with `padding`. Without siblings: `values_T`."""
    if siblings is None:
        return values_T
    filled = np.full((-len(values_T) % siblings.world_size, *values_T.shape[1:]), padding, values_T.dtype)
    return np.ascontiguousarray(np.concatenate([values_T, filled])[siblings.rank :: siblings.world_size])


class Share:
    """The part of a microbatch that this rank computes. Without siblings this is the whole microbatch.

    own: the microbatch, with the columns of a forward (tokens, positions, source, target, temperature) cut to this part.
    """

    def __init__(self, batch: Microbatch, siblings: Collectives | None) -> None:
        self._siblings = siblings
        self._whole = self.own = batch
        # For each scored token its index among the gathered values of all siblings, flattened.
        self._place_S: Int64Array | None = None
        if siblings is None:
            return
        n, rank = siblings.world_size, siblings.rank
        owner_S, scored = batch.source % n, np.arange(batch.scored)
        parts = [scored[owner_S == sibling] for sibling in range(n)]
        longest, local = max(1, *(part.size for part in parts)), parts[rank]
        self._place_S = np.zeros(batch.scored, np.int64)
        for sibling, part in enumerate(parts):
            self._place_S[part] = sibling * longest + np.arange(part.size)

        def padded(values: npt.NDArray[Any], value: float) -> npt.NDArray[Any]:
            return np.append(values, np.full(longest - values.size, value, values.dtype))

        self.own = replace(
            batch,
            tokens=tokens_of_rank(batch.tokens, siblings),
            positions=tokens_of_rank(batch.positions, siblings),
            source=padded(batch.source[local] // n, 0),
            target=padded(batch.target[local], 0),
            temperature=padded(batch.temperature[local], 1),
        )

    def plan(self) -> TreePlan:
        """The attention plan for the tokens of `own`."""
        return TreePlan.of(self._whole) if self._siblings is None else ContextPlan(self._whole, self._siblings)

    def gather_scored(self, logp: Tensor, entropy: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies [s] of `own` -> [S] of all siblings; 0-d bool `unknown` -> whether any is True. A collective."""
        if self._siblings is None or self._place_S is None:
            return logp, entropy, unknown
        gathered: Tensor = _Gather.apply(torch.stack([logp, entropy, unknown.to(logp).expand_as(logp)]), self._siblings)
        place_S = to_device(self._place_S, logp.device)
        all_logp, all_entropy = (gathered[:, i].flatten().index_select(0, place_S) for i in range(2))
        is_unknown = gathered[:, 2].detach().any()
        return all_logp, all_entropy if entropy.requires_grad else all_entropy.detach(), is_unknown

    def gather_tokens(self, values: Tensor) -> Tensor:
        """Values [t, ...] of the tokens of `own` -> [T, ...], differentiable. A collective."""
        if self._siblings is None:
            return values
        gathered: Tensor = _Gather.apply(values.contiguous(), self._siblings)
        return gathered.transpose(0, 1).flatten(0, 1)[: self._whole.tokens.size]


class _Gather(torch.autograd.Function):
    """All-gather: [...] -> [n, ...]. Backward takes only this rank's part of the gradient. Siblings evaluate the same loss, so a
    sum over siblings would count the gradient n times."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, siblings: Collectives) -> Tensor:
        ctx.rank = siblings.rank
        return siblings.all_gather(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank], None
