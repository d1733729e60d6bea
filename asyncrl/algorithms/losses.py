"""The losses. Each loss is a class. To add a loss, write its class and add the class to `ALL`.

A loss class computes a surrogate per token from a ratio (`base.py`), and a sum over the microbatch. `terms.py` adds the terms that
every loss may have. The trainer divides once, by the count of the loss's `normaliser` over the whole step. So no loss depends on
how a step is cut into microbatches, except `bnpo`, which is refused if groups are trained as they arrive.

    LossMethod      the base class; start here
    Clipped         PPO's clip and its settings (`algorithm.clip`), for seven losses

Shape legend: S scored tokens of a microbatch (packed, no padding), B sequences of the microbatch. A fully masked sequence has no
token but counts in B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.types import Normaliser

from .base import LossInputs, Metrics, MetricSum, sequence_ratio, token_ratio
from .importance import IMPORTANCE_MODES
from .method import CheckContext, Conflict, Method, setting

if TYPE_CHECKING:
    from torch import Tensor

# Bounds of the log-weights of `vespo`.
_MIN_LOG_WEIGHT, _MAX_LOG_WEIGHT = math.log(1e-8), 20.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The policy loss per token, before corrections and the sum over tokens.

    The gradient flows through logp in a loss `-c A logp` (c: a detached coefficient, A: the advantage), and through the ratio in
    every other loss.
    """

    loss_S: Tensor
    # The unclipped ratio with gradient: the weight of a bias-corrected KL.
    ratio_S: Tensor
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class LossMethod(Method):
    """Base class of the losses. A subclass needs `name`, `normaliser`, `surrogate`, and a docstring with formula and paper.

    Fields made by `setting` are the settings `algorithm.SECTION.*`. SECTION is the attribute `section`, or `name` if `section` is
    empty. A subclass with such fields must be a frozen dataclass.
    """

    name: ClassVar[str] = ""
    normaliser: ClassVar[Normaliser]
    # Name of a loss with the same gradient at a ratio of 1. If given, `force_on_policy` is refused, and the error names that loss.
    on_policy_is: ClassVar[str] = ""
    needs_reference: ClassVar[bool] = False  # log-probs with the weights at the start of the run
    needs_entropy: ClassVar[bool] = False  # entropies with gradient
    # Whether the loss reads the weights `importance_S`. False: `terms.py` multiplies the surrogate by these weights.
    takes_weights: ClassVar[bool] = False
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    # Dotted name of a setting that this loss does not read -> a sentence on what to set instead.
    instead: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.section = cls.section or cls.name

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The policy loss per token [S]. `terms.py` adds the other terms."""
        raise NotImplementedError

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over the microbatch, before the division by the count of `normaliser`. The default is the sum over all tokens;
        with `Normaliser.SEQUENCES` the default is the sum over sequences of the mean over each sequence's tokens."""
        if self.normaliser is Normaliser.SEQUENCES:
            return inputs.sequence_mean(loss_S).sum()
        return loss_S.sum()


def clip_shares(low: Tensor, high: Tensor, normaliser: Normaliser = Normaliser.TOKENS) -> Metrics:
    """The metrics `clip_ratio/*`. `low`, `high`: whether a token is clipped at the bound [S], or the share per sequence [B]."""
    below, above = low.sum(), high.sum()
    return {
        "clip_ratio/low_mean": MetricSum(below, normaliser),
        "clip_ratio/high_mean": MetricSum(above, normaliser),
        "clip_ratio/region_mean": MetricSum(below + above, normaliser),
    }


@dataclass(frozen=True)
class Clipped(LossMethod):
    """PPO's pessimistic surrogate with separate bounds: `-min(r' A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    Schulman et al. (arXiv:1707.06347), eq. 7; epsilon_high: DAPO (arXiv:2503.14476). `r' = min(r, delta)` bounds the loss of tokens
    with A < 0 and a large ratio (two-sided clip, INTELLECT-2, arXiv:2505.07291; delta > 1 + epsilon_high). `dual_clip` c sets the
    same bound in the form of Ye et al. (arXiv:1912.09729): `min(loss, -c A)` where A < 0.
    """

    section: ClassVar[str] = "clip"
    by_sequence: ClassVar[bool] = False  # whether r is `sequence_ratio`
    epsilon: float = setting(0.2, "Lower clip of the ratio: 1 - epsilon.", flat="epsilon", gt=0)
    epsilon_high: float | None = setting(
        None, "Upper clip: 1 + epsilon_high; epsilon by default.", flat="epsilon_high", gt=0
    )
    delta: float | None = setting(
        None,
        "Two-sided clip: largest ratio where the advantage is negative; above 1 + epsilon_high.",
        flat="delta",
        gt=1,
    )
    dual_clip: float | None = setting(
        None, "Dual clip c of PPO: the loss is at most c |A| where the advantage is negative.", flat="dual_clip", gt=1
    )

    @property
    def high(self) -> float:
        """epsilon_high, or epsilon if epsilon_high is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def derived(self) -> Mapping[str, Any]:
        return {"epsilon_high": self.high}

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        ratio_S = sequence_ratio(inputs) if self.by_sequence else token_ratio(inputs)
        advantage_S = inputs.advantage_S
        clipped_S = ratio_S.clamp(1 - self.epsilon, 1 + self.high)
        capped_S = ratio_S if self.delta is None else ratio_S.clamp(max=self.delta)
        # Within the bounds both products are equal. torch then gives half of the gradient to each, and the sum reaches the ratio.
        loss_S = -(capped_S * advantage_S).minimum(clipped_S * advantage_S)
        if self.dual_clip is not None:
            loss_S = loss_S.minimum(-self.dual_clip * advantage_S).where(advantage_S < 0, loss_S)
        return Surrogate(loss_S, ratio_S, self.clip_metrics(inputs, ratio_S.detach()))

    def clip_metrics(self, inputs: LossInputs, ratio_S: Tensor) -> Metrics:
        """`clip_ratio/*`: the share of tokens with A > 0 and a ratio above the upper bound, or A < 0 and a ratio below the lower
        bound. Their gradient is 0. With `by_sequence` the mean over sequences of the share in each sequence."""
        low_S = (ratio_S < 1 - self.epsilon) & (inputs.advantage_S < 0)
        high_S = (ratio_S > 1 + self.high) & (inputs.advantage_S > 0)
        if not self.by_sequence:
            return clip_shares(low_S, high_S)
        low_B, high_B = (inputs.sequence_mean(side_S.to(ratio_S.dtype)) for side_S in (low_S, high_S))
        return clip_shares(low_B, high_B, Normaliser.SEQUENCES)

    def problems(self, context: CheckContext) -> Iterator[str]:
        if self.epsilon >= 1:
            yield (
                f"algorithm.clip.epsilon is {self.epsilon}; expected less than 1, because the lower bound of the ratio is "
                "1 - epsilon"
            )
        if self.delta is not None and self.delta <= 1 + self.high:
            yield (
                f"algorithm.clip.delta is {self.delta}; expected more than 1 + epsilon_high = {1 + self.high}, because the "
                "ratio is clipped at that bound"
            )
        if self.delta is not None and self.dual_clip is not None:
            yield (
                f"algorithm.clip.delta is {self.delta} and dual_clip is {self.dual_clip}, but both set the same bound; set only "
                "one of the two"
            )


@dataclass(frozen=True)
class SequenceClipped(Clipped):
    """`Clipped` with a ratio per sequence: the geometric mean of the ratios of its tokens. Clip metrics count sequences."""

    by_sequence: ClassVar[bool] = True

    def warnings(self, context: CheckContext) -> Iterator[str]:
        if self.epsilon > 0.05:
            yield (
                f"algorithm.clip.epsilon={self.epsilon} with loss {self.name}: ratios of sequences are means and stay near 1, so "
                "this epsilon hardly ever clips; the paper of gspo uses epsilon 3e-4 and epsilon_high 4e-4"
            )


class PpoClip(Clipped):
    """Proximal policy optimization's clipped objective, with its optional dual clip.

    Paper: Schulman et al. (arXiv:1707.06347), eq. 7; `dual_clip`: Ye et al. (arXiv:1912.09729), eq. 5.
    Formula: `sum_t l_t`, where l is the clipped surrogate with the token ratio. The loss `dapo` is the same function.
    """

    name: ClassVar[str] = "ppo_clip"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class Grpo(Clipped):
    """Group relative policy optimization: token ratios, and an equal weight for every sequence.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, where l is the clipped surrogate.
    """

    name: ClassVar[str] = "grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Dapo(Clipped):
    """Decoupled clip with an equal weight for every token of the step.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, where l is the clipped surrogate with the token ratio.
    The denominator is the number of tokens of the whole step. (The loss `bnpo` divides by the tokens of a microbatch.)
    Dynamic sampling and overlong shaping of the paper are not part of the loss, but have their own settings.
    """

    name: ClassVar[str] = "dapo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class DrGrpo(Clipped):
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, where l is the clipped surrogate with the token ratio.
    The paper's advantages are those of the estimator `dr_grpo` (no division by std).
    """

    name: ClassVar[str] = "dr_grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES_X_MAX_LENGTH


class Gspo(SequenceClipped):
    """Group sequence policy optimization: a ratio per sequence, the geometric mean of its token ratios.

    Paper: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7. The paper uses epsilon 3e-4 and
    epsilon_high 4e-4, because a sequence ratio changes far less than a token ratio.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t` with `r_t = s_b = exp((1 / max(len_b, 1)) sum_t (logp_t - old_t))` for every
    token of sequence b. The gradient flows through the whole ratio. In TRL: loss `grpo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences, not tokens. `rollout.streaming` is allowed, because a
    microbatch has only complete sequences.
    """

    name: ClassVar[str] = "gspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Luspo(SequenceClipped):
    """Length-unbiased sequence policy optimization: gspo, in which each sequence is weighted by its length.

    Paper: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261), as in TRL.
    Formula: `sum_b sum_t l_t` with the sequence ratio of gspo. In TRL: loss `luspo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences. `rollout.streaming` is allowed, because a microbatch has
    only complete sequences.
    """

    name: ClassVar[str] = "luspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over all tokens, although `normaliser` counts sequences. So long sequences have more weight."""
        return loss_S.sum()


class Bnpo(Clipped):
    """The clipped surrogate as a mean over the tokens of each microbatch, and the mean of these means: TRL's `bnpo`.

    Paper: Xiao et al., "BNPO" (arXiv:2506.02864). Only the aggregation of the paper is used, as in TRL.
    Formula: `(1 / max(tokens of the microbatch, 1)) sum_t l_t`.
    The gradient depends on the sequences that share a microbatch (`train.tokens_per_microbatch`, the order of arrival). So
    `rollout.streaming` is refused. The same loss with one denominator for the step is `dapo`.
    """

    name: ClassVar[str] = "bnpo"
    normaliser: ClassVar[Normaliser] = Normaliser.MICROBATCHES
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "rollout.streaming",
            "which divides by the tokens of each microbatch, so the gradient would depend on the groups that arrive together; use "
            "loss=dapo (one denominator for the whole step), or rollout.streaming=false",
            when=lambda context: context.streaming,
        ),
        Conflict(
            "train.skip_zero_advantage",
            "which divides by the tokens of each microbatch, so tokens without an advantage have an effect; leave this setting out",
            when=lambda context: bool(context.at("train.skip_zero_advantage")),
        ),
    )

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The mean over the tokens of this microbatch."""
        return loss_S.sum() / max(loss_S.numel(), 1)


@dataclass(frozen=True)
class Cispo(LossMethod):
    """Clipped importance weights instead of clipped updates, so every token keeps its gradient.

    Paper: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Formula: `sum_t -sg(clip(r_t, low, high)) A_t logp_t`, where sg detaches. The bounds are absolute: `high` is TRL's
    `epsilon_high` for this loss and NeMo's `1 + ratio_clip_max`. A `low` of 0 is no lower bound, as in TRL.
    Clip metrics count tokens with A > 0 and a weight at its upper bound, or A < 0 and a weight at its lower bound.
    """

    name: ClassVar[str] = "cispo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    on_policy_is: ClassVar[str] = "reinforce"
    instead: ClassVar[Mapping[str, str]] = {
        "algorithm.clip.epsilon_high": "the upper bound of cispo is algorithm.cispo.high (5.0 in the paper's reproductions)",
    }
    low: float = setting(0.0, "Absolute lower bound of the detached ratio; 0 is no bound.", ge=0)
    high: float = setting(5.0, "Absolute upper bound of the detached ratio (epsilon_high of TRL's cispo).", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        ratio_S, advantage_S = token_ratio(inputs), inputs.advantage_S
        detached_S = ratio_S.detach()
        weight_S = detached_S.clamp(self.low, self.high)
        metrics = clip_shares((detached_S < self.low) & (advantage_S < 0), (detached_S > self.high) & (advantage_S > 0))
        return Surrogate(-weight_S * advantage_S * inputs.logp_S, ratio_S, metrics)

    def problems(self, context: CheckContext) -> Iterator[str]:
        if self.low >= self.high:
            yield f"algorithm.cispo.low is {self.low}; expected less than algorithm.cispo.high = {self.high}"


@dataclass(frozen=True)
class Sapo(LossMethod):
    """Soft adaptive policy optimization: a sigmoid gate instead of the clip.

    Paper: Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t -A_t sigmoid(tau (r_t - 1)) 4 / tau`. Here tau is temperature_pos for A > 0, and
    temperature_neg for A <= 0. At r = 1 the gradient is that of the plain ratio. Away from r = 1 the gradient falls smoothly.
    """

    name: ClassVar[str] = "sapo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES
    on_policy_is: ClassVar[str] = "grpo"
    temperature_pos: float = setting(1.0, "Temperature of the gate where the advantage is positive.", gt=0)
    temperature_neg: float = setting(1.05, "Temperature of the gate where the advantage is negative or 0.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        ratio_S, positive_S = token_ratio(inputs), inputs.advantage_S > 0
        tau_S = ratio_S.new_tensor(self.temperature_pos).where(positive_S, ratio_S.new_tensor(self.temperature_neg))
        return Surrogate(-(tau_S * (ratio_S - 1)).sigmoid() * 4 / tau_S * inputs.advantage_S, ratio_S)


class Reinforce(LossMethod):
    """The plain policy gradient, without a ratio. Importance weights multiply the loss.

    Paper: Williams (1992), https://doi.org/10.1007/BF00992696. NeMo: `disable_ppo_ratio`.
    Formula: `sum_t -A_t logp_t`. With `updates_per_batch` above 1 nothing bounds the later updates.
    """

    name: ClassVar[str] = "reinforce"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        return Surrogate(-inputs.advantage_S * inputs.logp_S, token_ratio(inputs))


@dataclass(frozen=True)
class Vespo(LossMethod):
    """Variational sequence-level soft policy optimization: a weight for each sequence, shaped as a gamma density of its ratio.

    Paper: "VESPO" (arXiv:2602.10693), as in TRL.
    Formula: `sum_t -phi_b A_t logp_t` with a detached `phi_b = exp(lambda + k log w_b - lambda w_b)`, so phi is 1 at w = 1.
    `log w_b = sum_t log r_t + sum_t log(importance_t)` is the log-ratio of policy and sampler. So importance weights of tokens are
    a part of w and not a factor of the loss, and only modes of the token level make sense.
    Each log-ratio is clamped to +-20. Each log-weight and the sum are clamped to [log 1e-8, 20]. (k, lambda) is (k_pos, lambda_pos)
    where A >= 0, and (k_neg, lambda_neg) where A < 0. A phi that is not finite is replaced by 0, as in TRL. This does not
    hide a NaN log-prob of the trainer, because logp itself is a factor of the loss.
    `rollout.streaming` is allowed, because a microbatch has only complete sequences.
    """

    name: ClassVar[str] = "vespo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    takes_weights: ClassVar[bool] = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "algorithm.importance.mode",
            "which multiplies the weights of a sequence's tokens; use a mode of the token level",
            when=lambda context: (
                IMPORTANCE_MODES[context.at("algorithm.importance.mode")].level != "token"
                and context.at("algorithm.old_logprobs") != "sampler"
            ),
        ),
    )
    k_pos: float = setting(2.0, "Exponent k where the advantage is >= 0.", gt=0)
    lambda_pos: float = setting(3.0, "Decay lambda where the advantage is >= 0.", gt=0)
    k_neg: float = setting(3.0, "Exponent k where the advantage is negative.", gt=0)
    lambda_neg: float = setting(2.0, "Decay lambda where the advantage is negative.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        import torch

        ratio_S = token_ratio(inputs)
        with torch.no_grad():
            log_w_S = ratio_S.log().clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
            if inputs.importance_S is not None:
                log_w_S = log_w_S + inputs.importance_S.log().clamp(_MIN_LOG_WEIGHT, _MAX_LOG_WEIGHT)
            log_w_B = inputs.sequence_sum(log_w_S).clamp(_MIN_LOG_WEIGHT, _MAX_LOG_WEIGHT)
            log_w_S = inputs.spread(log_w_B)
            not_negative_S = inputs.advantage_S >= 0
            k_S = torch.where(not_negative_S, log_w_S.new_tensor(self.k_pos), log_w_S.new_tensor(self.k_neg))
            lambda_S = torch.where(
                not_negative_S, log_w_S.new_tensor(self.lambda_pos), log_w_S.new_tensor(self.lambda_neg)
            )
            phi_S = (lambda_S + k_S * log_w_S - lambda_S * log_w_S.exp()).exp()
            phi_S = phi_S.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        metrics = {"vespo/phi_mean": MetricSum(inputs.sequence_mean(phi_S).sum(), Normaliser.SEQUENCES)}
        return Surrogate(-phi_S * inputs.advantage_S * inputs.logp_S, ratio_S, metrics)


ALL: tuple[type[LossMethod], ...] = (
    Grpo, Bnpo, Dapo, DrGrpo, Gspo, Cispo, Sapo, Luspo, Vespo, Reinforce, PpoClip
)  # fmt: skip
