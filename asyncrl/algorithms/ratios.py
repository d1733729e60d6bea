"""The ratio of the surrogate: how much likelier the policy now makes what was sampled.

Three log-probs of one token meet in a loss: `sampler` (what the engine said when it sampled), `old` (the trainer's before
the first update on this batch; its own, detached, where the batch is used once) and `logp` (the trainer's now, with
gradient). The ratio and its clip stand on logp / old; what is left, old / sampler, is `importance.py`.

Shape legend: S scored tokens of a microbatch, B its sequences. Log-probs in nats; ratios are differentiable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .base import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


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
