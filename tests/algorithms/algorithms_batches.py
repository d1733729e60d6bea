"""Random padded batches in float64, and the packed columns that a loss takes from them.

Shape legend: B sequences, T padded tokens, S scored tokens (mask 1), packed row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.base import Loss, LossInputs, LossSums, MetricSum
from asyncrl.algorithms.terms import entropy_threshold
from asyncrl.types import Normaliser

MAX_LENGTH = 11


@dataclass(frozen=True)
class PaddedBatch:
    logp_BT: Tensor
    old_BT: Tensor | None
    sampler_BT: Tensor
    reference_BT: Tensor
    entropy_BT: Tensor
    advantage_B: Tensor
    completion_mask_BT: Tensor  # int64, right-padded
    tool_mask_BT: Tensor  # int64, holes inside a completion
    keep_BT: Tensor | None = None  # bool: tokens of a top-entropy mask

    @property
    def mask_BT(self) -> Tensor:
        return (self.completion_mask_BT * self.tool_mask_BT).bool()

    def pack(
        self, rows: Sequence[int] | None = None, logp_BT: Tensor | None = None, entropy_BT: Tensor | None = None
    ) -> LossInputs:
        """The scored tokens of `rows`, in that order; with `logp_BT`, `entropy_BT` instead of the batch's own as leaves."""
        chosen = torch.arange(len(self.advantage_B)) if rows is None else torch.tensor(rows, dtype=torch.int64)
        mask = self.mask_BT[chosen]
        logp = (self.logp_BT if logp_BT is None else logp_BT)[chosen]
        return LossInputs(
            logp_S=logp[mask],
            entropy_S=(self.entropy_BT if entropy_BT is None else entropy_BT)[chosen][mask],
            sampler_logp_S=self.sampler_BT[chosen][mask],
            advantage_S=self.advantage_B[chosen][:, None].expand_as(mask)[mask],
            sequence_S=mask.nonzero()[:, 0],
            sequences=len(chosen),
            old_logp_S=None if self.old_BT is None else self.old_BT[chosen][mask],
            reference_logp_S=self.reference_BT[chosen][mask],
            keep_S=None if self.keep_BT is None else self.keep_BT[chosen][mask],
        )

    def with_advantages(self, advantage_B: Tensor) -> PaddedBatch:
        return replace(self, advantage_B=advantage_B)

    def replace_old(self, old_BT: Tensor | None) -> PaddedBatch:
        return replace(self, old_BT=old_BT)

    def to(self, dtype: torch.dtype) -> PaddedBatch:
        columns = {
            key: value.to(dtype) for key, value in vars(self).items() if value is not None and value.is_floating_point()
        }
        return replace(self, **columns)

    def with_top_entropy(self, share: float) -> PaddedBatch:
        """The tokens whose entropy is in the top `share` of the whole batch."""
        threshold = entropy_threshold(self.entropy_BT[self.mask_BT], share)
        return replace(self, keep_BT=self.entropy_BT >= threshold)

    def count(self, normaliser: Normaliser, microbatches: int = 1) -> float:
        """The true N of the whole step."""
        sequences = len(self.advantage_B)
        return {
            Normaliser.TOKENS: max(float(self.mask_BT.sum()), 1.0),
            Normaliser.SEQUENCES: float(sequences),
            Normaliser.SEQUENCES_X_MAX_LENGTH: float(sequences * MAX_LENGTH),
            Normaliser.MICROBATCHES: float(microbatches),
            Normaliser.NONE: 1.0,
        }[normaliser]

    def finish(self, parts: Sequence[Mapping[str, MetricSum]]) -> dict[str, float]:
        """What the trainer does with the metric sums of all microbatches: add (or take the extreme), divide once."""
        values: dict[str, float] = {}
        for key in {key for part in parts for key in part}:
            sums = [part[key] for part in parts if key in part]
            numbers = [float(metric.value) for metric in sums]
            if "_max" in key:
                values[key] = max(numbers)
            else:
                values[key] = sum(numbers) / self.count(sums[0].normaliser, len(parts))
        return values


def random_batch(
    seed: int,
    *,
    sequences: int = 7,
    width: int = 9,
    old: bool = True,
    shift: float = 0.35,
    nan_share: float = 0.0,
    empty_rows: bool = True,
) -> PaddedBatch:
    """Ragged, with holes; row 1 is fully masked if `empty_rows`. `shift` (nats) moves ratios across the clips."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp_BT = -normal(sequences, width).abs() - 0.05
    lengths_B = torch.randint(1, width + 1, (sequences,), generator=generator)
    completion_mask_BT = (torch.arange(width)[None] < lengths_B[:, None]).long()
    tool_mask_BT = (torch.rand(sequences, width, generator=generator) > 0.25).long()
    if empty_rows and sequences > 1:
        tool_mask_BT[1] = 0
    sampler_BT = logp_BT + shift * normal(sequences, width)
    sampler_BT[torch.rand(sequences, width, generator=generator) < nan_share] = float("nan")
    if nan_share:
        tool_mask_BT[0, 0] = 1
        sampler_BT[0, 0] = float("nan")  # at least one scored token without a sampler log-prob, whatever the seed
    old_BT = logp_BT + shift * normal(sequences, width) if old else None
    advantage_B = normal(sequences)
    advantage_B[sequences // 2] = 0.0
    return PaddedBatch(
        logp_BT=logp_BT, old_BT=old_BT, sampler_BT=sampler_BT, reference_BT=logp_BT + shift * normal(sequences, width),
        entropy_BT=normal(sequences, width).abs(), advantage_B=advantage_B, completion_mask_BT=completion_mask_BT,
        tool_mask_BT=tool_mask_BT,
    )  # fmt: skip


def value_and_grad(
    batch: PaddedBatch, loss: Loss, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The step: backward of each microbatch's sums, one division by the true N. `(value, grad_BT, metrics)`."""
    value, grad_BT, _, metrics = value_and_grads(batch, loss, parts)
    return value, grad_BT, metrics


def value_and_grads(
    batch: PaddedBatch, loss: Loss, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """`(value, grad_BT, gradient of the entropies [B, T], metrics)`; the entropy bonus is divided by tokens."""
    count = batch.count(loss.normaliser, len(parts))
    loss = loss.with_bonus_scale(count / batch.count(Normaliser.TOKENS, len(parts)))
    leaves = [column.clone().requires_grad_() for column in (batch.logp_BT, batch.entropy_BT)]
    grads = [torch.zeros_like(leaf) for leaf in leaves]
    value = torch.zeros((), dtype=batch.logp_BT.dtype)
    results: list[LossSums] = []
    for rows in parts:
        sums = loss(batch.pack(rows, *leaves))
        results.append(sums)
        value = value + sums.total.detach() / count
        found = torch.autograd.grad(sums.total, leaves, allow_unused=True)
        for grad, new in zip(grads, found, strict=True):
            if new is not None:
                grad += new / count
    return value, grads[0], grads[1], batch.finish([sums.metrics for sums in results])
