"""The losses, one class each. Adding one is writing its class and its line in `ALL`.

A loss is a ratio (`base.py`) in a surrogate (the class), the terms that every loss may have (`terms.py`), and a sum over the
microbatch. The trainer divides once, at finish, by the true number of the loss's `normaliser` over the whole step. Nothing in
here depends on how a step was cut into microbatches, except in `bnpo`, which is therefore refused where steps are streamed.

    LossMethod      what a loss declares; start here
    Bounded         PPO's clip, which eight losses share with its settings (`algorithm.clip`)

Shape legend: S scored tokens of a microbatch (packed, no padding), B its sequences. A fully masked sequence owns no token but
counts in B.
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

FLOOR, CEILING = math.log(1e-8), 20.0  # of the log-weights of `vespo`


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The policy loss per token before correction and aggregation. `A` is the advantage of the token's sequence.

    A surrogate that carries its gradient in the log-prob (`-c A logp`) has a detached coefficient c.
    """

    loss_S: Tensor
    # Unclipped, with gradient: the weight of a bias-corrected KL.
    ratio_S: Tensor
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class LossMethod(Method):
    """Base of the losses. A subclass has at least `name`, `normaliser`, `surrogate`, and a docstring with formula and paper.

    Fields made by `setting` are its own settings, `algorithm.NAME.*`; a subclass with fields is a frozen dataclass.
    """

    name: ClassVar[str] = ""
    normaliser: ClassVar[Normaliser]
    # The loss that it is where the ratio is always 1: its settings are bounds or gates of it.
    on_policy_is: ClassVar[str] = ""
    # The trainer's log-probs before the first update, where a batch has several.
    needs_old: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False  # log-probs under the weights at the start
    # Entropies with their gradient; without it they are detached.
    needs_entropy: ClassVar[bool] = False
    # Reads `importance_S` itself; otherwise its surrogate is multiplied by them.
    takes_weights: ClassVar[bool] = False
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    # A setting that it does not read, dotted -> what does the same here.
    instead: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.section = cls.section or cls.name

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] policy loss per token; the terms that every loss may have are added by `terms.per_token`."""
        raise NotImplementedError

    def total(self, inputs: LossInputs, loss_S: Tensor) -> Tensor:
        """The sum over the microbatch that the whole step's `normaliser` divides: by default that of the means of the
        sequences where it counts sequences, else that of all tokens."""
        if self.normaliser is Normaliser.SEQUENCES:
            return inputs.sequence_mean(loss_S).sum()
        return loss_S.sum()


def shares(low: Tensor, high: Tensor, normaliser: Normaliser = Normaliser.TOKENS) -> Metrics:
    """Clipped below (A < 0) and above (A > 0), where the gradient is 0 (cispo: where the weight is bounded)."""
    below, above = low.sum(), high.sum()
    return {
        "clip_ratio/low_mean": MetricSum(below, normaliser),
        "clip_ratio/high_mean": MetricSum(above, normaliser),
        "clip_ratio/region_mean": MetricSum(below + above, normaliser),
    }


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

    def problems(self, around: CheckContext) -> Iterator[str]:
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

    def problems(self, around: CheckContext) -> Iterator[str]:
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

    def warnings(self, around: CheckContext) -> Iterator[str]:
        if self.epsilon > 0.05:
            yield (
                f"algorithm.clip.epsilon={self.epsilon} with loss {self.name}: its ratios are means over a sequence and stay "
                "near 1, so this never clips; the paper of gspo uses 3e-4 (and 4e-4 above)"
            )


class PpoClip(Clipped):
    """Proximal policy optimization's clipped objective, with its optional dual clip.

    Paper: Schulman et al. (arXiv:1707.06347), eq. 7; `dual_clip`: Ye et al. (arXiv:1912.09729), eq. 5.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio. The same function as `dapo`.
    """

    name: ClassVar[str] = "ppo_clip"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class Grpo(Clipped):
    """Group relative policy optimization: token ratio, every sequence weighs the same.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, l the clipped surrogate.
    """

    name: ClassVar[str] = "grpo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Dapo(Clipped):
    """Decoupled clip with token-level aggregation: every token of the step weighs the same.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    It divides by the tokens of the whole step, not of the microbatch: that would be bnpo.
    The name stands for clip and aggregation; dynamic sampling and overlong shaping act on groups and rewards.
    """

    name: ClassVar[str] = "dapo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS


class DrGrpo(Clipped):
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Its advantages are those of the estimator `dr_grpo` (no division by
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
    It streams, as long as no sequence is cut in two.
    """

    name: ClassVar[str] = "gspo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES


class Luspo(SequenceClipped):
    """Length-unbiased sequence policy optimization: gspo whose sequences weigh by their length.

    Paper: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261), as TRL has it.
    Formula: `sum_b sum_t l_t` with the sequence ratio of gspo. In TRL: loss `luspo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences.
    It streams, as long as no sequence is cut in two.
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
    It does not stream: the denominator is local, so the gradient depends on which sequences share
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
    """

    name: ClassVar[str] = "one_sided"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] one bound a token: the upper one for a good token, the lower one for a bad one."""
        ratio_S, good_S = token_ratio(inputs), inputs.advantage_S > 0
        bounded_S = ratio_S.clamp(max=1 + self.high).where(good_S, ratio_S.clamp(min=1 - self.epsilon))
        return Surrogate(-bounded_S * inputs.advantage_S, ratio_S, self.clip_metrics(inputs, ratio_S))


@dataclass(frozen=True)
class Cispo(LossMethod):
    """Clipped importance weights instead of clipped updates: no token loses its gradient.

    Paper: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Formula: `sum_t -sg(clip(r_t, low, high)) A_t logp_t`. The bounds are absolute: `high` is TRL's
    `epsilon_high` for this loss and NeMo's `1 + ratio_clip_max`; `low` 0 is no lower bound, as in TRL.
    Clip metrics: tokens whose weight was bounded against their advantage.
    """

    name: ClassVar[str] = "cispo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    on_policy_is: ClassVar[str] = "reinforce"
    instead: ClassVar[Mapping[str, str]] = {
        "algorithm.clip.epsilon_high": "the bound of its ratio is algorithm.cispo.high (5.0 in the paper's reproductions)",
    }
    low: float = setting(0.0, "Absolute lower bound of the detached ratio; 0 is none.", ge=0)
    high: float = setting(5.0, "Absolute upper bound of the detached ratio (TRL's epsilon_high there).", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gradient is in the log-prob; the bounded ratio is a detached weight."""
        ratio_S, advantage_S = token_ratio(inputs), inputs.advantage_S
        detached_S = ratio_S.detach()
        weight_S = detached_S.clamp(self.low, self.high)
        metrics = shares((detached_S < self.low) & (advantage_S < 0), (detached_S > self.high) & (advantage_S > 0))
        return Surrogate(-weight_S * advantage_S * inputs.logp_S, ratio_S, metrics)

    def problems(self, around: CheckContext) -> Iterator[str]:
        if self.low >= self.high:
            yield f"algorithm.cispo.low is {self.low}; expected less than algorithm.cispo.high = {self.high}"


@dataclass(frozen=True)
class Sapo(LossMethod):
    """Soft adaptive policy optimization: a sigmoid gate in place of the clip, colder for bad tokens.

    Paper: Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t -A_t sigmoid(tau (r_t - 1)) 4 / tau`, tau by the sign of A.
    Gradient A at r = 1, as that of the plain ratio; it fades smoothly on both sides instead of ending at a clip.
    """

    name: ClassVar[str] = "sapo"
    normaliser: ClassVar[Normaliser] = Normaliser.SEQUENCES
    on_policy_is: ClassVar[str] = "grpo"
    temperature_pos: float = setting(1.0, "Temperature of the gate where the advantage is positive.", gt=0)
    temperature_neg: float = setting(1.05, "Temperature of the gate elsewhere.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """[S] the gated ratio; `temperature_pos` above advantage 0, `temperature_neg` at and below it."""
        ratio_S, positive_S = token_ratio(inputs), inputs.advantage_S > 0
        tau_S = ratio_S.new_tensor(self.temperature_pos).where(positive_S, ratio_S.new_tensor(self.temperature_neg))
        return Surrogate(-(tau_S * (ratio_S - 1)).sigmoid() * 4 / tau_S * inputs.advantage_S, ratio_S)


class Reinforce(LossMethod):
    """The policy gradient itself, corrected by the importance weight alone.

    Paper: Williams (1992), https://doi.org/10.1007/BF00992696. NeMo: `disable_ppo_ratio`.
    Formula: `sum_t -A_t logp_t`. With `updates_per_batch` above 1 nothing holds the later updates back.
    """

    name: ClassVar[str] = "reinforce"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The ratio is reported, for a KL, and multiplies nothing."""
        return Surrogate(-inputs.advantage_S * inputs.logp_S, token_ratio(inputs))


@dataclass(frozen=True)
class Vespo(LossMethod):
    """Variational sequence-level soft policy optimization: a gamma-shaped weight of the whole sequence's ratio.

    Paper: "VESPO" (arXiv:2602.10693), as TRL has it.
    Formula: `sum_t -phi_b A_t logp_t`, `phi_b = exp(lambda + k log w_b - lambda w_b)`, detached. The importance weights
    of the tokens are part of w, not a factor of the loss; only modes of the token level make sense.
    It streams, as long as no sequence is cut in two.
    `log w_b = sum_t log r_t + sum_t log(importance_t)`: the whole way from sampler to policy. Each log-ratio is held within
    +-20, each log-weight and the sum within [log 1e-8, 20]; (k, lambda) is (k_pos, lambda_pos) where A >= 0, else (k_neg,
    lambda_neg). A phi that is not finite is 0, as in TRL, but for a NaN of the trainer itself, which reaches the loss through
    logp. phi = 1 at w = 1.
    """

    name: ClassVar[str] = "vespo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    takes_weights: ClassVar[bool] = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "algorithm.importance.mode",
            "which adds up the weights of a sequence's tokens itself; use a token mode",
            when=lambda around: (
                IMPORTANCE_MODES[around.at("algorithm.importance.mode")].level != "token"
                and around.at("algorithm.old_logprobs") != "sampler"
            ),
        ),
    )
    k_pos: float = setting(2.0, "Exponent k where the advantage is >= 0.", gt=0)
    lambda_pos: float = setting(3.0, "Decay lambda where the advantage is >= 0.", gt=0)
    k_neg: float = setting(3.0, "Exponent k where the advantage is negative.", gt=0)
    lambda_neg: float = setting(2.0, "Decay lambda where the advantage is negative.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """phi is computed from logarithms and without gradient, bounded on both sides; where it is not finite it counts 0."""
        import torch

        ratio_S = token_ratio(inputs)
        with torch.no_grad():
            log_w_S = ratio_S.log().clamp(-CEILING, CEILING)
            if inputs.importance_S is not None:
                log_w_S = log_w_S + inputs.importance_S.log().clamp(FLOOR, CEILING)
            log_w_B = inputs.sequence_sum(log_w_S).clamp(FLOOR, CEILING)
            log_w_S = inputs.spread(log_w_B)
            good_S = inputs.advantage_S >= 0
            k_S = torch.where(good_S, log_w_S.new_tensor(self.k_pos), log_w_S.new_tensor(self.k_neg))
            lambda_S = torch.where(good_S, log_w_S.new_tensor(self.lambda_pos), log_w_S.new_tensor(self.lambda_neg))
            phi_S = (lambda_S + k_S * log_w_S - lambda_S * log_w_S.exp()).exp()
            phi_S = phi_S.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        metrics = {"vespo/phi_mean": MetricSum(inputs.sequence_mean(phi_S).sum(), Normaliser.SEQUENCES)}
        return Surrogate(-phi_S * inputs.advantage_S * inputs.logp_S, ratio_S, metrics)


ALL: tuple[type[LossMethod], ...] = (
    Grpo,
    Bnpo,
    Dapo,
    DrGrpo,
    Gspo,
    Cispo,
    Sapo,
    Luspo,
    Vespo,
    Reinforce,
    PpoClip,
    OneSided,
)
