"""Terms that can be added to every loss, in the order of TRL (`GRPOTrainer._compute_loss`):

    surrogate -> x off-policy sequence mask (OPSM) -> x top-entropy mask -> x importance weight -> + KL
    -> the sum of the loss class (-> + entropy bonus, in `registry.py`)

The importance weight does not multiply the KL term. The ratio multiplies the KL term only with `bias_correction`. Tokens that OPSM
or the top-entropy mask removes have no surrogate, but still count in N. `importance.py` and `kl.py` have one term each.

Shape legend: S scored tokens of a microbatch, B sequences of the microbatch, N scored tokens of a step. A is the advantage.
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
    """`-coefficient x sum_t H_t`, differentiable. H_t is the entropy of the policy at token t, in nats, at the sampling
    temperature.

    Mnih et al. (arXiv:1602.01783), section 4. The normaliser is TOKENS for every loss (as in TRL), so that the coefficient has the
    same meaning with every loss. The bonus is the mean over the tokens of the step. With a top-entropy mask it is the mean over
    the tokens that the mask keeps (`Loss.with_bonus_scale`). (TRL takes the mean over each microbatch.)
    """
    if inputs.entropy_S is None:
        raise ValueError(
            f"the entropy coefficient is {coefficient}, but `entropy_S` of the microbatch is None; compute it first"
        )
    entropy_S = inputs.entropy_S
    if inputs.keep_S is not None:
        entropy_S = entropy_S.masked_fill(~inputs.keep_S, 0.0)
    return -coefficient * entropy_S.sum()


@dataclass(frozen=True)
class Entropy(Method):
    """The entropy bonus, with a constant coefficient or a coefficient that is controlled by a target."""

    section: ClassVar[str] = "entropy"
    switches: ClassVar[tuple[str, ...]] = ("coef", "target")
    off: ClassVar[str] = "algorithm.entropy.coef is 0 and target is not set, so there is no bonus; set one of the two"
    formula: ClassVar[Any] = entropy_bonus
    coef: float = setting(
        0.0, "Coefficient of the entropy bonus. The bonus is a mean over tokens with every loss.", ge=0
    )
    target: float | None = setting(
        None,
        "Adaptive entropy control: the coefficient begins at coef, grows while the mean entropy of a step (nats) is at most this "
        "target, and shrinks above the target, within [0, 1]. There is a bonus only while the entropy is at most the target. "
        "TRL: 0.2.",
        gt=0,
    )
    coef_delta: float = setting(0.005, "Change of a controlled coefficient per optimizer step.", gt=0, le=1)

    @property
    def on(self) -> bool:
        """Whether any step may have a bonus."""
        return self.coef > 0 or self.target is not None

    @property
    def control(self) -> EntropyControl | None:
        """The first state of the controller, or None for a constant coefficient."""
        return None if self.target is None else EntropyControl(self.coef, self.target, self.coef_delta)

    def has_other_normaliser(self, loss: type[LossMethod] | LossMethod) -> bool:
        """Whether bonus and loss are divided by different numbers."""
        return self.on and loss.normaliser is not Normaliser.TOKENS

    def problems(self, context: CheckContext) -> Iterator[str]:
        default = {setting.name: setting.default for setting in self.settings()}["coef_delta"]
        if self.target is None and self.coef_delta != default:
            yield (
                f"algorithm.entropy.coef_delta is {self.coef_delta} but entropy.target is not set, so the coefficient is constant; "
                "set entropy.target, or leave coef_delta out"
            )
        if self.target is not None and self.coef > COEFFICIENT_MAX:
            yield (
                f"algorithm.entropy.coef is {self.coef} with entropy.target {self.target}: a controlled coefficient stays "
                "within [0, 1]; set coef to at most 1"
            )
        if context.streaming and self.has_other_normaliser(context.loss):
            value = f"coef is {self.coef}" if self.target is None else f"target is {self.target}"
            yield (
                f"algorithm.entropy.{value} with loss {context.loss.name} but steps are streamed: the bonus is divided by "
                f"tokens, the loss by {context.loss.normaliser.value}, and neither number is known while gradients add up; use "
                "rollout.streaming=false, or a loss that is divided by tokens, such as dapo"
            )


def off_policy_keep(inputs: LossInputs, threshold: float) -> tuple[Tensor, Metrics]:
    """Off-policy sequence mask (OPSM): bool [S], True where `A >= 0` or `mean_t (sampler_t - logp_t) <= threshold` (nats).

    Paper: DeepSeek-V3.2 (arXiv:2512.02556), eq. 9. Detached. In the mean, the difference of a token without a sampler log-prob
    (NaN) is 0. The metric `opsm/dropped_mean` is the share of sequences with a masked token.
    """
    gap_S = (inputs.sampler_logp_S - inputs.logp_S).detach()
    gap_S = gap_S.masked_fill(inputs.sampler_logp_S.isnan(), 0.0)
    # If a log-prob of the trainer is NaN, `> threshold` is False. So the sequence is not masked, and the NaN reaches the loss.
    far_B = inputs.sequence_mean(gap_S) > threshold
    keep_S = (inputs.advantage_S >= 0) | ~inputs.spread(far_B)
    dropped_B = inputs.sequence_sum((~keep_S).to(gap_S.dtype)) > 0
    return keep_S, {"opsm/dropped_mean": MetricSum(dropped_B.to(gap_S.dtype).sum(), Normaliser.SEQUENCES)}


def entropy_threshold(entropy_N: Tensor, top: float) -> float:
    """The quantile `1 - top` of the entropies. The share `top` of the tokens has `entropy >= threshold`; these tokens are kept.

    Paper: Wang et al., "Beyond the 80/20 Rule" (arXiv:2506.01939), eq. 6. Interpolates linearly like torch.quantile, but also
    takes more than 16 million elements. Without tokens the threshold is minus infinity.
    """
    count = entropy_N.numel()
    if count == 0:
        return -float("inf")
    sorted_N = entropy_N.double().sort().values
    position = (1 - top) * (count - 1)
    below = int(position)
    above = min(below + 1, count - 1)
    return float(sorted_N[below].lerp(sorted_N[above], position - below))


def without_overlong(group: Group, *, truncated: bool, longest: int | None) -> Group:
    """Masks completions that were cut at a limit (if `truncated`) or that have more than `longest` sampled tokens (None: no limit).

    Paper: DAPO (arXiv:2503.14476), section 3.4, "overlong filtering". Rewards do not change, so the baseline of the group stays.
    A masked sequence still counts as a sequence of the step. Its tokens do not count. TRL's name: `mask_truncated_completions`.
    """
    if not truncated and longest is None:
        return group

    def masked(trajectory: Trajectory) -> Trajectory:
        hit_limit = truncated and trajectory.finish_reason is FinishReason.LENGTH
        if hit_limit or (longest is not None and trajectory.sampled_length > longest):
            return replace(trajectory, mask=np.zeros_like(trajectory.mask))
        return trajectory

    return replace(group, trajectories=tuple(map(masked, group.trajectories)))


@dataclass(frozen=True)
class OffPolicyMask(Method):
    """Off-policy sequence masking (OPSM): no policy loss for sequences with negative advantage whose log-prob fell too far."""

    section: ClassVar[str] = "off_policy_mask"
    switches: ClassVar[tuple[str, ...]] = ("threshold",)
    formula: ClassVar[Any] = off_policy_keep
    threshold: float | None = setting(
        None,
        "Sequences with negative advantage have no policy loss if their mean log-prob fell by more than this (nats) since they "
        "were sampled; null is off.",
        gt=0,
    )


@dataclass(frozen=True)
class TopEntropy(Method):
    """A policy loss only for the tokens with the highest entropy of the step."""

    section: ClassVar[str] = "top_entropy"
    switches: ClassVar[tuple[str, ...]] = ("quantile",)
    formula: ClassVar[Any] = entropy_threshold
    quantile: float = setting(
        1.0, "The share of tokens that have a policy loss: the tokens with the highest entropy of the step.", gt=0, le=1
    )

    def problems(self, context: CheckContext) -> Iterator[str]:
        if self.quantile < 1 and context.streaming:
            yield (
                f"algorithm.top_entropy.quantile is {self.quantile} but steps are streamed, and the entropies of all tokens of the "
                "step are not known before the first backward; use rollout.streaming=false, or top_entropy.quantile=1"
            )


@dataclass(frozen=True)
class Overlong(Method):
    """Overlong filtering: masks completions that were cut off or are too long."""

    section: ClassVar[str] = "mask"
    switches: ClassVar[tuple[str, ...]] = ("truncated", "longer_than")
    formula: ClassVar[Any] = without_overlong
    truncated: bool = setting(
        False, "Mask completions that were cut at max_tokens or max_context. They still count as sequences."
    )
    longer_than: int | None = setting(None, "Mask episodes with more sampled tokens than this number.", ge=1)


@dataclass(frozen=True)
class Terms:
    """The terms of a run. The name of a field is the section of the term. To add a term, add a field and a line in `_per_token`."""

    importance: Importance = field(default_factory=Importance)
    kl: Kl = field(default_factory=Kl)
    entropy: Entropy = field(default_factory=Entropy)
    off_policy_mask: OffPolicyMask = field(default_factory=OffPolicyMask)
    top_entropy: TopEntropy = field(default_factory=TopEntropy)
    mask: Overlong = field(default_factory=Overlong)

    def __iter__(self) -> Iterator[Method]:
        return (getattr(self, field_.name) for field_ in fields(self))


TERMS: tuple[type[Method], ...] = tuple(type(term) for term in Terms())


def loss_sums(method: LossMethod, inputs: LossInputs, terms: Terms) -> LossSums:
    """The loss over one microbatch, without the entropy bonus: the differentiable sum, and its metrics."""
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
    loss_S, quantile = surrogate.loss_S, terms.top_entropy.quantile
    if terms.off_policy_mask.threshold is not None:
        keep_S, mask_metrics = off_policy_keep(inputs, terms.off_policy_mask.threshold)
        metrics.update(mask_metrics)
        loss_S = loss_S * keep_S
    if quantile < 1:
        if inputs.keep_S is None:
            raise ValueError(
                f"algorithm.top_entropy.quantile is {quantile}, but `keep_S` of the microbatch is None; compute it first"
            )
        loss_S = loss_S * inputs.keep_S
    if weight_S is not None:
        loss_S = loss_S * weight_S
    if terms.kl.in_loss:
        loss_S = loss_S + terms.kl.term(inputs, surrogate.ratio_S, metrics)
    return loss_S
