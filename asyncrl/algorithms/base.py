"""The input and the output of a loss, and the ratios of log-probs that losses use.

A loss is a pure function of columns with a value per token. A loss returns **sums** and not means. The trainer adds the sums of all
microbatches, and `finish_train_step` divides by the number of tokens or sequences of the whole step over all ranks. So the gradient
does not depend on how the step was split into microbatches and ranks (except with the loss `bnpo`).

A loss may read three log-probs of a token:

    sampler    computed by the engine when the engine sampled the token
    old        computed by the trainer before the first update on this batch; the detached `logp` if there is only one update
    logp       computed by the trainer now, with gradient

The clipped ratio is exp(logp - old). The correction by exp(old - sampler) is in `importance.py`.

Shape legend: S scored tokens of a microbatch (loss mask 1, packed, no padding), B sequences of the microbatch. Scalars are 0-d
tensors. Log-probs are in nats, and ratios are differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from asyncrl.types import Normaliser

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENT_MAX = 1.0  # of the entropy bonus under `EntropyControl`


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Columns of one microbatch, all on one device. The dtype is float32, or float64 in tests and in `try_loss`.

    `old_logp_S` is None if the batch is used for one update. Then the surrogate uses `logp_S.detach()`.
    """

    logp_S: Tensor  # differentiable
    entropy_S: Tensor | None  # differentiable if a term needs the gradient
    sampler_logp_S: Tensor
    advantage_S: Tensor
    sequence_S: Tensor  # int64 in [0, B), non-decreasing
    sequences: int  # B, fully masked sequences included
    old_logp_S: Tensor | None = None
    reference_logp_S: Tensor | None = None
    # Bool: whether a token has a policy loss and an entropy bonus (the top-entropy mask). None: every token has both.
    keep_S: Tensor | None = None
    # Detached importance weights, only for a loss with `takes_weights`.
    importance_S: Tensor | None = None

    @property
    def length_B(self) -> Tensor:
        """Number of scored tokens of each sequence, in the dtype of `advantage_S`. 0 for a fully masked sequence."""
        return self.sequence_sum(self.advantage_S.new_ones(self.advantage_S.shape))

    def sequence_sum(self, value_S: Tensor) -> Tensor:
        """[S] -> [B]: the sum over the tokens of each sequence. Differentiable."""
        return value_S.new_zeros(self.sequences).index_add(0, self.sequence_S, value_S)

    def sequence_mean(self, value_S: Tensor) -> Tensor:
        """[S] -> [B]: the mean over the tokens of each sequence, `sum / max(len, 1)`. Differentiable."""
        return self.sequence_sum(value_S) / self.length_B.clamp(min=1)

    def spread(self, value_B: Tensor) -> Tensor:
        """[B] -> [S]: every token gets the value of its sequence. Differentiable."""
        return value_B.index_select(0, self.sequence_S)


def old_logp(inputs: LossInputs) -> Tensor:
    """[S] detached: the `old` column. Without an `old` column: `logp_S`, so every ratio is 1."""
    return (inputs.logp_S if inputs.old_logp_S is None else inputs.old_logp_S).detach()


def token_ratio(inputs: LossInputs) -> Tensor:
    """[S]: `exp(logp - old)`."""
    return (inputs.logp_S - old_logp(inputs)).exp()


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """[S]: the geometric mean of the token ratios of a sequence, `exp(sum_t (logp_t - old_t) / max(len, 1))`.

    Every token of a sequence has the same value. The gradient reaches all tokens of the sequence.
    """
    return inputs.spread(inputs.sequence_mean(inputs.logp_S - old_logp(inputs)).exp())


def reduction_of(name: str) -> str:
    """How the values of a metric with this name are combined over microbatches and ranks: `min`, `max` or `sum`."""
    if "_min" in name:
        return "min"
    return "max" if "_max" in name else "sum"


@dataclass(frozen=True, slots=True)
class MetricSum:
    """A metric as a sum (0-d, detached) over a microbatch. The sum over the step is divided by the step's count of `normaliser`.

    A metric with `_min` or `_max` in its name is a minimum or maximum over microbatches and ranks, and is not divided.
    """

    value: Tensor
    normaliser: Normaliser


Metrics = dict[str, MetricSum]


@dataclass(frozen=True, slots=True)
class LossSums:
    """The result of a loss. `total` is the differentiable sum. The trainer divides `total` by the count of `Loss.normaliser`."""

    total: Tensor
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """The state of adaptive entropy control, which keeps the mean entropy near `target` (nats) by changing the entropy bonus.

    He et al., "Skywork Open Reasoner 1" (arXiv:2505.22312), section 4.3, with TRL's constants. After each optimizer step the
    coefficient grows by `delta` if the mean entropy of the step was at most `target`. Otherwise the coefficient shrinks by `delta`.
    The coefficient stays in [0, 1]. A step has a bonus only if the entropy of the step before was at most `target`, so the first
    step has no bonus. The mean is over all scored tokens of the step on all ranks. (In TRL the mean is over the tokens that the
    top-entropy mask keeps.) The trainer saves this state in checkpoints.
    """

    coefficient: float  # of the next step, if that step has a bonus
    target: float
    delta: float
    entropy: float = math.inf  # mean of the last step; inf before any step

    @property
    def next_coefficient(self) -> float:
        """The coefficient of the bonus in the next step."""
        return self.coefficient if self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> EntropyControl:
        """The state after a step with this mean entropy."""
        coefficient = self.coefficient + (self.delta if entropy <= self.target else -self.delta)
        return EntropyControl(min(max(coefficient, 0.0), COEFFICIENT_MAX), self.target, self.delta, entropy)


LossFn = Callable[[LossInputs], LossSums]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss for the trainer: a function with bound settings, the normaliser of its sum, and the inputs that it needs."""

    name: str
    fn: LossFn
    normaliser: Normaliser
    needs_reference: bool = False
    needs_entropy_grad: bool = False
    needs_old: bool = True  # whether the loss reads the `old` column
    top_entropy_quantile: float = 1.0
    bonus: float = 0.0  # coefficient of the entropy bonus
    # Whether the bonus and the rest of the loss are divided by different numbers. Then call `with_bonus_scale` for every step.
    bonus_needs_scale: bool = False
    # The first state of adaptive entropy control; None: the coefficient is constant.
    control: EntropyControl | None = None
    with_bonus: Callable[[float], LossFn] | None = None  # coefficient of the bonus -> `fn`

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sum over one microbatch."""
        return self.fn(inputs)

    @property
    def needs_whole_step(self) -> bool:
        """Whether the first backward needs counts or entropies of the whole step, which a streamed step does not know in time."""
        return self.bonus_needs_scale or self.top_entropy_quantile < 1

    def with_control(self, control: EntropyControl) -> Loss:
        """This loss for one step, with the coefficient of `control`. Call this only if `self.control` is not None."""
        assert self.with_bonus is not None
        bonus = control.next_coefficient
        return replace(self, fn=self.with_bonus(bonus), bonus=bonus, control=None)

    def with_bonus_scale(self, scale: float) -> Loss:
        """If `bonus_needs_scale`, this loss for one step, with the bonus times `scale`. Then `normaliser` divides the bonus, too.
        `scale`: the step's count of `normaliser` divided by its number of tokens with a bonus, both over all ranks."""
        if not self.bonus_needs_scale:
            return self
        assert self.with_bonus is not None
        return replace(self, fn=self.with_bonus(scale * self.bonus), bonus_needs_scale=False)
