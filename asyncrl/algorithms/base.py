"""The loss signature that every algorithm and the split train step share.

A loss is a pure function of per-token columns and returns **sums**, never means: the trainer adds the sums of all
microbatches and divides once, at `finish_train_step`, by the true number of tokens or sequences of the whole step over
all ranks. So the gradient does not depend on how, in which order or where the step was split.

Three log-probs of one token meet in a loss: `sampler` (what the engine said when it sampled), `old` (the trainer's before
the first update on this batch; its own, detached, where the batch is used once) and `logp` (the trainer's now, with
gradient). The ratio and its clip stand on logp / old; what is left, old / sampler, is `importance.py`.

Shape legend: S scored tokens of a microbatch (loss mask 1, packed: no padding), B its sequences, scalars are 0-d
tensors. Log-probs in nats; ratios are differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from asyncrl.types import Normaliser

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENT_MAX = 1.0  # of the entropy bonus, where it is controlled


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Columns of one microbatch. Floating dtype: float32 (float64 in tests); all on one device.

    `old_logp_S is None` means on-policy: the surrogate uses `logp_S.detach()`. It is set where the batch is used for
    more than one update, or where `old_logprobs: sampler` puts the clip around the sampler's log-probs.
    """

    logp_S: Tensor  # differentiable
    # Differentiable where an entropy term asks for it, else detached.
    entropy_S: Tensor | None
    sampler_logp_S: Tensor
    advantage_S: Tensor
    sequence_S: Tensor  # int64 in [0, B), non-decreasing
    sequences: int  # B, fully masked sequences included
    old_logp_S: Tensor | None = None
    reference_logp_S: Tensor | None = None
    # Bool: tokens that the surrogate and the entropy bonus act on; None: all.
    keep_S: Tensor | None = None
    # Detached weights, for a loss that takes them itself (`takes_weights`).
    importance_S: Tensor | None = None

    @property
    def length_B(self) -> Tensor:
        """Scored tokens of each sequence, in the dtype of `logp_S`; 0 for a fully masked one."""
        return self.sequence_sum(self.advantage_S.new_ones(self.advantage_S.shape))

    def sequence_sum(self, value_S: Tensor) -> Tensor:
        """[S] -> [B]: sum over the tokens of each sequence. Differentiable."""
        return value_S.new_zeros(self.sequences).index_add(0, self.sequence_S, value_S)

    def sequence_mean(self, value_S: Tensor) -> Tensor:
        """[S] -> [B]: mean over the tokens of each sequence, `sum / max(len, 1)`. Differentiable."""
        return self.sequence_sum(value_S) / self.length_B.clamp(min=1)

    def spread(self, value_B: Tensor) -> Tensor:
        """[B] -> [S]: every token gets the value of its sequence. Differentiable."""
        return value_B.index_select(0, self.sequence_S)


def old_logp(inputs: LossInputs) -> Tensor:
    """[S] detached: the `old` column, or the forward's own log-probs where there is none (on-policy: ratio 1)."""
    return (inputs.logp_S if inputs.old_logp_S is None else inputs.old_logp_S).detach()


def token_ratio(inputs: LossInputs) -> Tensor:
    """[S]: `exp(logp - old)`."""
    return (inputs.logp_S - old_logp(inputs)).exp()


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """[S]: the geometric mean of the token ratios of the token's sequence, `exp(sum_t (logp_t - old_t) / max(len, 1))`.

    Every token of a sequence has the same value; the gradient flows through the whole ratio.
    """
    return inputs.spread(inputs.sequence_mean(inputs.logp_S - old_logp(inputs)).exp())


def on_policy(inputs: LossInputs) -> LossInputs:
    """`force_on_policy`: without an `old` column the ratio is 1, and its gradient that of the log-prob."""
    return replace(inputs, old_logp_S=None)


def centre_on_sampler(inputs: LossInputs) -> LossInputs:
    """`old_logprobs: sampler`: the sampler's column becomes the `old` one; NaN entries stay on-policy (ratio 1)."""
    sampler_S = inputs.sampler_logp_S
    old_S = inputs.logp_S.detach().where(sampler_S.isnan(), sampler_S)
    return replace(inputs, old_logp_S=old_S)


def kind(name: str) -> str:
    """`min`, `max` or `sum`: how a metric is combined over microbatches and ranks."""
    if "_min" in name:
        return "min"
    return "max" if "_max" in name else "sum"


@dataclass(frozen=True, slots=True)
class MetricSum:
    """A metric as a sum (0-d, detached) and what to divide it by.

    Keys that hold `_min` or `_max` are reduced by minimum or maximum over microbatches and ranks, and never divided.
    """

    value: Tensor
    normaliser: Normaliser


Metrics = dict[str, MetricSum]


@dataclass(frozen=True, slots=True)
class LossSums:
    """`total` is the differentiable sum to call backward on; its normaliser is the loss's declared one.

    `extra` is a second differentiable sum, with `Loss.extra_normaliser`: a term that is divided by something else.
    """

    total: Tensor
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)
    extra: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """A coefficient that holds the mean entropy at `target` (nats): adaptive entropy control.

    He et al., "Skywork Open Reasoner 1" (arXiv:2505.22312), section 4.3; the numbers are TRL's. After each optimizer step the
    coefficient grows by `delta` where the mean entropy of the step was at most `target`, else it shrinks by `delta`, within
    [0, 1]; it begins at `coef`. The bonus acts in a step only if the entropy of the step before was at most
    `target`, so never in the first. The mean is over all scored tokens of the step on all ranks (in TRL over those that
    the top-entropy mask keeps). The state is part of the trainer's checkpoint.
    """

    coefficient: float  # after the last update
    target: float
    delta: float
    entropy: float = math.inf  # of the last step

    @property
    def applied(self) -> float:
        """What the bonus of the next step is multiplied by."""
        return self.coefficient if self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> EntropyControl:
        """The state after a step with this mean entropy."""
        moved = self.coefficient + (self.delta if entropy <= self.target else -self.delta)
        return EntropyControl(min(max(moved, 0.0), COEFFICIENT_MAX), self.target, self.delta, entropy)


LossFn = Callable[[LossInputs], LossSums]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the trainer takes it: the bound pure function, the normaliser of each term and what it needs.

    A step whose loss has an `extra_normaliser` needs a second gradient buffer, or its counts before its first backward;
    one with `top_entropy_quantile` below 1 needs the entropies of the whole step before its first backward. Either
    kind of knowledge comes from `whole_step`, which a streamed step cannot call in time.
    """

    name: str
    fn: LossFn
    normaliser: Normaliser
    needs_reference: bool = False
    needs_entropy_grad: bool = False
    needs_old: bool = True  # False: an `old` column would not be read
    extra_normaliser: Normaliser | None = None
    top_entropy_quantile: float = 1.0
    # How the coefficient of the bonus begins, where it is controlled.
    control: EntropyControl | None = None
    with_bonus: Callable[[float], LossFn] | None = None  # the same loss with this coefficient: what `at` binds

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over one microbatch."""
        return self.fn(inputs)

    @property
    def needs_whole_step(self) -> bool:
        """Whether something has to be known of all ranks' microbatches before the first backward."""
        return self.extra_normaliser is not None or self.top_entropy_quantile < 1

    def at(self, control: EntropyControl) -> Loss:
        """The same loss for one step, with the coefficient that the controller says; only where `control` is not None."""
        assert self.with_bonus is not None
        return replace(self, fn=self.with_bonus(control.applied), control=None)

    def whole_step(self, scale: float) -> Loss:
        """The same loss for a step whose counts are known: `total + scale x extra` under one normaliser.

        `scale` is N of `total` divided by N of `extra`, over all ranks.
        """
        if self.extra_normaliser is None:
            return self

        def joined(inputs: LossInputs) -> LossSums:
            sums = self.fn(inputs)
            assert sums.extra is not None
            return LossSums(sums.total + scale * sums.extra, sums.metrics)

        return replace(self, fn=joined, extra_normaliser=None)
