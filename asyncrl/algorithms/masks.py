"""What takes tokens out of the surrogate. Denominators are never touched: what is masked still counts in N.

    off_policy_keep    sequences that the policy has left and that it should unlearn (OPSM), in the loss
    entropy_threshold  the tokens with the highest entropy of the whole step
    without_overlong   tokens of completions that were cut off or are too long, before packing (numpy only)

Shape legend: S scored tokens of a microbatch, B its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from asyncrl.types import FinishReason, Group, Normaliser, Trajectory

from .base import LossInputs, Metrics, MetricSum
from .method import Around, Method, setting

if TYPE_CHECKING:
    from torch import Tensor


def off_policy_keep(inputs: LossInputs, threshold: float) -> tuple[Tensor, Metrics]:
    """Off-policy sequence mask: `[S]` bool, True where `A >= 0` or `mean_t (sampler_t - logp_t) <= threshold` (nats).

    Paper: DeepSeek-V3.2 (arXiv:2512.02556), eq. 9. Detached. A token without a sampler log-prob (NaN) is no evidence: its
    difference counts as 0 and its place in the mean stays. `opsm/dropped_mean`: share of sequences with a token dropped.
    """
    gap_S = (inputs.sampler_logp_S - inputs.logp_S).detach()
    gap_S = gap_S.masked_fill(inputs.sampler_logp_S.isnan(), 0.0)
    # Written so that a NaN of the trainer keeps its sequence: it has to reach the loss.
    far_B = inputs.sequence_mean(gap_S) > threshold
    keep_S = (inputs.advantage_S >= 0) | ~inputs.spread(far_B)
    dropped_B = inputs.sequence_sum((~keep_S).to(gap_S.dtype)) > 0
    return keep_S, {"opsm/dropped_mean": MetricSum(dropped_B.to(gap_S.dtype).sum(), Normaliser.SEQUENCES)}


def entropy_threshold(entropy_N: Tensor, top: float) -> float:
    """The entropy that the share `top` of all tokens reaches: quantile `1 - top` over the scored tokens of all ranks.

    Paper: Wang et al., "Beyond the 80/20 Rule" (arXiv:2506.01939), eq. 6. Linear interpolation, as torch.quantile, which
    refuses more than 16 million elements. Tokens with `entropy >= threshold` are kept. No token: minus infinity.
    """
    count = entropy_N.numel()
    if count == 0:
        return -float("inf")
    ordered_N = entropy_N.double().sort().values
    place = (1 - top) * (count - 1)
    below = int(place)
    above = min(below + 1, count - 1)
    return float(ordered_N[below].lerp(ordered_N[above], place - below))


def without_overlong(group: Group, *, truncated: bool, longest: int | None) -> Group:
    """The group with every token masked of a completion that hit `max_tokens` (`truncated`), or sampled more than `longest`.

    Paper: DAPO (arXiv:2503.14476), section 3.4, "overlong filtering". Rewards and with them the baseline of the group
    stay; the sequence counts in N with no token (TRL: `mask_truncated_completions`, whose advantages also stay).
    """

    if not truncated and longest is None:
        return group

    def filtered(trajectory: Trajectory) -> Trajectory:
        cut = truncated and trajectory.finish_reason is FinishReason.LENGTH
        if cut or (longest is not None and trajectory.sampled_length > longest):
            return replace(trajectory, mask=np.zeros_like(trajectory.mask))
        return trajectory

    return replace(group, trajectories=tuple(map(filtered, group.trajectories)))


@dataclass(frozen=True)
class OffPolicyMask(Method):
    """Off-policy sequence masking (OPSM): sequences that the policy has left and that it should unlearn."""

    section: ClassVar[str] = "off_policy_mask"
    switches: ClassVar[tuple[str, ...]] = ("threshold",)
    formula: ClassVar[Any] = off_policy_keep
    threshold: float | None = setting(
        None,
        "Sequences with negative advantage whose mean log-prob fell by more than this since they were sampled (nats) are left "
        "out of the policy loss.",
        gt=0,
    )


@dataclass(frozen=True)
class TopEntropy(Method):
    """Only the tokens with the highest entropy of the step have a policy loss."""

    section: ClassVar[str] = "top_entropy"
    switches: ClassVar[tuple[str, ...]] = ("quantile",)
    formula: ClassVar[Any] = entropy_threshold
    quantile: float = setting(
        1.0, "Only this share of the tokens, those with the highest entropy of the step, has a policy loss.", gt=0, le=1
    )

    def problems(self, around: Around) -> Iterator[str]:
        """Refused: a quantile in a streamed step, which trains before all its entropies are known."""
        if self.quantile < 1 and around.streaming:
            yield (
                f"algorithm.top_entropy.quantile is {self.quantile} but steps are streamed: which tokens are on top is known "
                "only when all tokens of the step on all ranks are; use rollout.streaming=false, or top_entropy.quantile=1"
            )


@dataclass(frozen=True)
class Overlong(Method):
    """Overlong filtering: completions that were cut off, or are too long, teach nothing. They count as sequences."""

    section: ClassVar[str] = "mask"
    switches: ClassVar[tuple[str, ...]] = ("truncated", "longer_than")
    formula: ClassVar[Any] = without_overlong
    truncated: bool = setting(False, "Completions that hit max_tokens teach nothing; they count as sequences.")
    longer_than: int | None = setting(None, "Episodes with more sampled tokens than this teach nothing.", ge=1)
