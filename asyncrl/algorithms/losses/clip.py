"""PPO's clip, which eight losses share with its settings: `algorithm.clip`.

Shape legend: S scored tokens of a microbatch, B its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs, Metrics
from ..method import Around, Conflict, setting
from ..ratios import sequence_ratio, token_ratio
from .loss import LossMethod, Surrogate, shares

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Bounded(LossMethod):
    """A ratio that is held within [1 - epsilon, 1 + epsilon_high]."""

    section: ClassVar[str] = "clip"
    epsilon: float = setting(0.2, "Lower clip of the ratio: 1 - epsilon.", flat="epsilon", gt=0)
    epsilon_high: float | None = setting(
        None, "Upper clip: 1 + epsilon_high; epsilon by default.", flat="epsilon_high", gt=0
    )

    @property
    def high(self) -> float:
        """epsilon_high, which is epsilon where it was left out."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def derived(self) -> Mapping[str, Any]:
        """epsilon_high as it is used."""
        return {"epsilon_high": self.high}

    def clip_metrics(self, inputs: LossInputs, ratio_S: Tensor, *, by_sequence: bool = False) -> Metrics:
        """`clip_ratio/*`: the share of tokens whose ratio is beyond the bound that their advantage pushes it to, so that their
        gradient is 0. `by_sequence`: the mean over sequences of those shares."""
        detached_S, advantage_S = ratio_S.detach(), inputs.advantage_S
        low_S = (detached_S < 1 - self.epsilon) & (advantage_S < 0)
        high_S = (detached_S > 1 + self.high) & (advantage_S > 0)
        if not by_sequence:
            return shares(low_S, high_S)
        low_B, high_B = (inputs.sequence_mean(side_S.to(ratio_S.dtype)) for side_S in (low_S, high_S))
        return shares(low_B, high_B, Normaliser.SEQUENCES)

    def problems(self, around: Around) -> Iterator[str]:
        """Refused: an epsilon of 1 or more, as no lower bound would be left."""
        if self.epsilon >= 1:
            yield (
                f"algorithm.clip.epsilon is {self.epsilon}; expected less than 1, since the ratio is clipped to 1 - "
                "epsilon below"
            )


@dataclass(frozen=True)
class Clipped(Bounded):
    """PPO's pessimistic surrogate with separate bounds: `-min(r' A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    Schulman et al. (arXiv:1707.06347), eq. 7; epsilon_high: DAPO (arXiv:2503.14476). `r' = min(r, delta)` bounds the loss
    of a bad token made likelier (two-sided clip, INTELLECT-2, arXiv:2505.07291; delta > 1 + epsilon_high). `dual_clip` c
    does the same in the form of Ye et al. (arXiv:1912.09729): `min(loss, -c A)` where A < 0.
    Clip metrics count tokens, or sequences where the ratio belongs to a sequence.
    """

    by_sequence: ClassVar[bool] = False  # r is the geometric mean over the sequence
    delta: float | None = setting(
        None,
        "Two-sided clip: largest ratio of a token with negative advantage; above 1 + epsilon_high.",
        flat="delta",
        gt=1,
    )
    dual_clip: float | None = setting(
        None,
        "Dual clip c of PPO: the loss of a token with negative advantage is at most c |A|.",
        flat="dual_clip",
        gt=1,
    )

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] the pessimistic of the free and the clipped term, with one ratio a token, or a sequence (`by_sequence`)."""
        ratio_S = sequence_ratio(inputs) if self.by_sequence else token_ratio(inputs)
        advantage_S = inputs.advantage_S
        clipped_S = ratio_S.clamp(1 - self.epsilon, 1 + self.high)
        free_S = ratio_S if self.delta is None else ratio_S.clamp(max=self.delta)
        # The minimum of two equal numbers hands half of the gradient to each; on-policy (r = 1) both reach the ratio.
        loss_S = -(free_S * advantage_S).minimum(clipped_S * advantage_S)
        if self.dual_clip is not None:
            loss_S = loss_S.minimum(-self.dual_clip * advantage_S).where(advantage_S < 0, loss_S)
        return Surrogate(loss_S, ratio_S, self.clip_metrics(inputs, ratio_S, by_sequence=self.by_sequence))

    def problems(self, around: Around) -> Iterator[str]:
        """Refused, beside that: a two-sided clip inside of the clip, or given in both of its spellings."""
        yield from super().problems(around)
        if self.delta is not None and self.delta <= 1 + self.high:
            yield (
                f"algorithm.clip.delta is {self.delta}; expected more than 1 + epsilon_high = {1 + self.high}, or it "
                "would clip before the clip"
            )
        if self.delta is not None and self.dual_clip is not None:
            yield (
                f"algorithm.clip.delta is {self.delta} and dual_clip is {self.dual_clip}: two spellings of one bound; set "
                "one of them"
            )


@dataclass(frozen=True)
class SequenceClipped(Clipped):
    """The same with one ratio a sequence: the geometric mean of the ratios of its tokens."""

    by_sequence: ClassVar[bool] = True

    def warnings(self, around: Around) -> Iterator[str]:
        """Warned of: an epsilon made for ratios of tokens, which ratios of sequences never reach."""
        if self.epsilon > 0.05:
            yield (
                f"algorithm.clip.epsilon={self.epsilon} with loss {self.name}: its ratios are means over a sequence and stay "
                "near 1, so this never clips; the paper of gspo uses 3e-4 (and 4e-4 above)"
            )


class PpoClip(Clipped):
    """Proximal policy optimization's clipped objective, with its optional dual clip.

    Paper: Schulman et al. (arXiv:1707.06347), eq. 7; `dual_clip`: Ye et al. (arXiv:1912.09729), eq. 5.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio. The same function as `dapo`.
    Normaliser: TOKENS. Streams.
    """

    name: ClassVar[str] = "ppo_clip"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class Grpo(Clipped):
    """Group relative policy optimization: token ratio, every sequence weighs the same.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, l the clipped surrogate.
    Normaliser: SEQUENCES. Streams.
    """

    name: ClassVar[str] = "grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Dapo(Clipped):
    """Decoupled clip with token-level aggregation: every token of the step weighs the same.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: TOKENS, of the whole step (not of the microbatch: that would be bnpo). Streams.
    The name stands for clip and aggregation; dynamic sampling and overlong shaping act on groups and rewards.
    """

    name: ClassVar[str] = "dapo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class DrGrpo(Clipped):
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: SEQUENCES_X_MAX_LENGTH. Streams. Its advantages are those of the estimator `dr_grpo` (no division by
    std).
    """

    name: ClassVar[str] = "dr_grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES_X_MAX_LENGTH


class Gspo(SequenceClipped):
    """Group sequence policy optimization: one ratio per sequence, the geometric mean of its token ratios.

    Paper: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7 (the paper uses epsilon 3e-4,
    epsilon_high 4e-4: a sequence ratio moves far less than a token ratio).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t` with `r_t = s_b = exp((1 / max(len_b, 1)) sum_t (logp_t - old_t))`
    for every token of sequence b; the gradient flows through the whole ratio. In TRL: loss `grpo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences, not tokens.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """

    name: ClassVar[str] = "gspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Luspo(SequenceClipped):
    """Length-unbiased sequence policy optimization: gspo whose sequences weigh by their length.

    Paper: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261), as TRL has it.
    Formula: `sum_b sum_t l_t` with the sequence ratio of gspo. In TRL: loss `luspo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """

    name: ClassVar[str] = "luspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over all tokens, where the normaliser would ask for means of sequences: so a sequence weighs by its
        length."""
        return loss_S.sum()


class Bnpo(Clipped):
    """Clipped surrogate, mean over the tokens of each microbatch, mean of those means: TRL's `bnpo`.

    Paper: Xiao et al., "BNPO" (arXiv:2506.02864); only its aggregation, as in TRL.
    Formula: `(1 / max(tokens of the microbatch, 1)) sum_t l_t`.
    Normaliser: MICROBATCHES. Does not stream: the denominator is local, so the gradient depends on which sequences share
    a microbatch (`train.tokens_per_microbatch`, the order of arrival). `dapo` is what it turns into with one denominator.
    """

    name: ClassVar[str] = "bnpo"
    normaliser: ClassVar[Normaliser] = Normaliser.MICROBATCHES
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "rollout.streaming",
            "which divides by the tokens of each microbatch, so the gradient would depend on which groups happened to arrive "
            "together; use loss=dapo (one denominator for the whole step), or rollout.streaming=false",
            when=lambda around: around.streaming,
        ),
        Conflict(
            "train.skip_zero_advantage",
            "which divides by the tokens of each microbatch: those without an advantage matter; leave it out",
            when=lambda around: bool(around.at("train.skip_zero_advantage")),
        ),
    )

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """A mean, not a sum: over the tokens of this microbatch."""
        return loss_S.sum() / max(loss_S.numel(), 1)


class OneSided(Bounded):
    """Asymmetric one-sided clip: each token is bounded only where its advantage pushes it.

    Source: torchtitan's GRPO loss. Equal to `ppo_clip` in value and gradient, without `delta` and `dual_clip`.
    Formula: `sum_t -A_t min(r_t, 1 + epsilon_high)` for A > 0, `-A_t max(r_t, 1 - epsilon)` else.
    Normaliser: TOKENS. Streams.
    """

    name: ClassVar[str] = "one_sided"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] one bound a token: the upper one for a good token, the lower one for a bad one."""
        ratio_S, good_S = token_ratio(inputs), inputs.advantage_S > 0
        bounded_S = ratio_S.clamp(max=1 + self.high).where(good_S, ratio_S.clamp(min=1 - self.epsilon))
        return Surrogate(-bounded_S * inputs.advantage_S, ratio_S, self.clip_metrics(inputs, ratio_S))
