"""The terms that every loss may have, in the order of TRL (`GRPOTrainer._compute_loss`):

    surrogate -> x scale of its sign -> x OPSM -> x top-entropy mask -> x importance weight -> + KL
    -> the loss's own sum (-> entropy bonus, in `registry.py`: it has a normaliser of its own)

The KL term is multiplied by no weight, and by the ratio only if asked (`kl.py`). What takes tokens out of the surrogate touches no
denominator: what is masked still counts in N. `importance.py` and `kl.py` have their own terms; the others stand here.

Shape legend: S scored tokens of a microbatch, B its sequences, N scored tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from asyncrl.types import FinishReason, Group, Normaliser, Trajectory

from .base import COEFFICIENT_MAX, EntropyControl, LossInputs, LossSums, Metrics, MetricSum
from .importance import Importance, importance_weights
from .kl import Kl
from .losses import LossMethod
from .method import CheckContext, Method, setting

if TYPE_CHECKING:
    from torch import Tensor


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Tensor:
    """`-coefficient x sum_t H_t`, differentiable; H_t is the entropy of the policy at token t, in nats, at the sampling
    temperature.

    Mnih et al. (arXiv:1602.01783), section 4. Normaliser: TOKENS, whatever that of the loss (as in TRL), so that the
    coefficient means the same with every loss; with a top-entropy mask, the tokens that it keeps. TRL takes the mean
    over each microbatch, so there its value depends on the split; here it is the mean over the step.
    """
    if inputs.entropy_S is None:
        raise ValueError(f"entropy_coef is {coefficient}, but the microbatch has no entropies (`entropy_S`)")
    entropy_S = inputs.entropy_S
    if inputs.keep_S is not None:
        entropy_S = entropy_S.masked_fill(~inputs.keep_S, 0.0)
    return -coefficient * entropy_S.sum()


@dataclass(frozen=True)
class Entropy(Method):
    """The entropy bonus, with a coefficient that stands still or follows a target."""

    section: ClassVar[str] = "entropy"
    switches: ClassVar[tuple[str, ...]] = ("coef", "target")
    off: ClassVar[str] = "algorithm.entropy.coef is 0 and target is not set: there is no bonus; set one of them"
    formula: ClassVar[Any] = entropy_bonus
    coef: float = setting(0.0, "Coefficient of the entropy bonus: a mean over tokens, whatever the loss.", ge=0)
    target: float | None = setting(
        None,
        "Adaptive entropy: coef is where the coefficient begins; it grows while the mean entropy of a step (nats) is at most "
        "this and shrinks otherwise, within [0, 1], and the bonus acts only below the target. TRL: 0.2.",
        gt=0,
    )
    coef_delta: float = setting(0.005, "By how much that coefficient moves per optimizer step.", gt=0, le=1)
    second_gradient_buffer: bool = setting(
        False,
        "Streamed steps with a bonus that is not divided by the same number as the loss: gather its gradient in a buffer of "
        "its own, with a second backward pass.",
        flat="second_gradient_buffer",
    )

    @property
    def on(self) -> bool:
        """Whether there is a bonus, in some step."""
        return self.coef > 0 or self.target is not None

    @property
    def control(self) -> EntropyControl | None:
        """How the coefficient begins, where it is controlled."""
        return None if self.target is None else EntropyControl(self.coef, self.target, self.coef_delta)

    def apart(self, loss: type[LossMethod] | LossMethod) -> bool:
        """Whether the bonus is divided by another number than this loss."""
        return self.on and loss.normaliser is not Normaliser.TOKENS

    def problems(self, around: CheckContext) -> Iterator[str]:
        default = {each.name: each.default for each in self.settings()}["coef_delta"]
        if self.target is None and self.coef_delta != default:
            yield (
                f"algorithm.entropy.coef_delta is {self.coef_delta} but entropy.target is not set: the coefficient of the "
                "bonus stands still; set entropy.target, or leave it out"
            )
        if self.target is not None and self.coef > COEFFICIENT_MAX:
            yield (
                f"algorithm.entropy.coef is {self.coef} with entropy.target {self.target}: a controlled coefficient stays "
                "within [0, 1]; begin inside"
            )
        if around.streaming and self.apart(around.loss) and not self.second_gradient_buffer:
            given = f"coef is {self.coef}" if self.target is None else f"target is {self.target}"
            yield (
                f"algorithm.entropy.{given} with loss {around.loss.name} but steps are streamed: the bonus is divided by "
                f"tokens, the loss by {around.loss.normaliser.value}, and neither number is known while gradients add up; use "
                "entropy.second_gradient_buffer=true (a second buffer of the gradient's size, and a second backward pass), a "
                f"loss that is divided by tokens ({', '.join(around.by_tokens)}), or rollout.streaming=false"
            )

    def warnings(self, around: CheckContext) -> Iterator[str]:
        if self.second_gradient_buffer and not self.apart(around.loss):
            yield (
                f"algorithm.entropy.second_gradient_buffer=true with loss {around.loss.name} and entropy.coef={self.coef}: no "
                "term needs it, none is allocated"
            )


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

    def problems(self, around: CheckContext) -> Iterator[str]:
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


@dataclass(frozen=True)
class Scale(Method):
    """Positive and negative scalers (torchtitan): the policy loss of a token is multiplied by one of them, by the sign of its
    advantage."""

    section: ClassVar[str] = "scale"
    switches: ClassVar[tuple[str, ...]] = ("positive", "negative")
    positive: float = setting(
        1.0, "Factor of the policy loss of tokens with positive advantage.", flat="positive_scale", ge=0
    )
    negative: float = setting(
        1.0, "Factor of the policy loss of tokens with negative advantage.", flat="negative_scale", ge=0
    )

    @property
    def on(self) -> bool:
        """Whether one of the factors differs from 1."""
        return (self.positive, self.negative) != (1.0, 1.0)


@dataclass(frozen=True)
class Terms:
    """The terms of one run, each under the name of its section. A new one is its class, a field here and a line below."""

    importance: Importance = field(default_factory=Importance)
    kl: Kl = field(default_factory=Kl)
    entropy: Entropy = field(default_factory=Entropy)
    scale: Scale = field(default_factory=Scale)
    off_policy_mask: OffPolicyMask = field(default_factory=OffPolicyMask)
    top_entropy: TopEntropy = field(default_factory=TopEntropy)
    mask: Overlong = field(default_factory=Overlong)

    def __iter__(self) -> Iterator[Method]:
        return (getattr(self, each.name) for each in fields(self))


TERMS: tuple[type[Method], ...] = tuple(type(term) for term in Terms())


def loss_sums(method: LossMethod, inputs: LossInputs, terms: Terms) -> LossSums:
    """The loss over one microbatch: the sum to differentiate, and its metrics."""
    weight_S, metrics = importance_weights(inputs, terms.importance) if terms.importance.on else (None, {})
    if method.takes_weights:
        inputs, weight_S = replace(inputs, importance_S=weight_S), None
    loss_S = _per_token(method, inputs, weight_S, terms, metrics)
    total = method.total(inputs, loss_S)
    return LossSums(total, {"loss": MetricSum(total.detach(), method.normaliser), **metrics})


def _per_token(
    method: LossMethod, inputs: LossInputs, weight_S: Tensor | None, terms: Terms, metrics: Metrics
) -> Tensor:
    surrogate = method.surrogate(inputs)
    metrics.update(surrogate.metrics)
    loss_S, scale, share = surrogate.loss_S, terms.scale, terms.top_entropy.quantile
    if scale.on:
        good_S, bad_S = inputs.advantage_S > 0, inputs.advantage_S < 0
        ones_S = loss_S.new_ones(loss_S.shape)
        loss_S = loss_S * ones_S.masked_fill(good_S, scale.positive).masked_fill(bad_S, scale.negative)
    if terms.off_policy_mask.threshold is not None:
        keep_S, found = off_policy_keep(inputs, terms.off_policy_mask.threshold)
        metrics.update(found)
        loss_S = loss_S * keep_S
    if share < 1:
        if inputs.keep_S is None:
            raise ValueError(f"top_entropy_quantile is {share}, but nobody chose the tokens (`keep_S`)")
        loss_S = loss_S * inputs.keep_S
    if weight_S is not None:
        loss_S = loss_S * weight_S
    if terms.kl.in_loss:
        loss_S = loss_S + terms.kl.term(inputs, surrogate.ratio_S, metrics)
    return loss_S
