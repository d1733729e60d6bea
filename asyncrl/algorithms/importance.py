"""Correction for tokens that were sampled by other numbers than the trainer's: an older policy, another kernel.

Three log-probs of one token meet here: `sampler` (what the engine said when it sampled), `old` (the trainer's before
the first update on this batch; its own, detached, where the batch is used once) and `logp` (the trainer's now, with
gradient). The surrogate's ratio and clip stand on logp / old. What is left, old / sampler, is corrected by a detached
weight:

    w_t = min(exp(old_t - sampler_t), C)         "truncated importance sampling", `token_truncate` in TRL

Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); the truncation is Ionides',
"Truncated Importance Sampling" (2008). Denominators are not touched.

A sampler log-prob that is NaN (an engine that could not report it) means weight 1, and no evidence about the mismatch.
Only the sampler's NaN is forgiven: a NaN of the trainer goes through to the loss, where it ends the run.

Where `old_logprobs: sampler` puts the clip around the sampler's log-probs, there is nothing left to correct: the two
corrections are never applied together (`centre_on_sampler`, and the cap is off).

Shape legend: S scored tokens of a microbatch, packed. Log-probs in nats.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.types import Normaliser

from .base import LossInputs, MetricSum


def old_logp(inputs: LossInputs) -> Tensor:
    """[S] detached: the `old` column, or the forward's own log-probs where there is none (on-policy: ratio 1)."""
    return (inputs.logp_S if inputs.old_logp_S is None else inputs.old_logp_S).detach()


def centre_on_sampler(inputs: LossInputs) -> LossInputs:
    """`old_logprobs: sampler`: the sampler's column becomes the `old` one; NaN entries stay on-policy (ratio 1)."""
    sampler_S = inputs.sampler_logp_S
    old_S = torch.where(sampler_S.isnan(), inputs.logp_S.detach(), sampler_S)
    return replace(inputs, old_logp_S=old_S)


def token_truncate(old_logp_S: Tensor, sampler_logp_S: Tensor, cap: float) -> Tensor:
    """[S] detached weights `min(exp(old - sampler), cap)`; 1 where the sampler's log-prob is NaN."""
    return _log_ratio(old_logp_S, sampler_logp_S).exp().clamp(max=cap)


def token_mismatch(trainer_logp_S: Tensor, sampler_logp_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far the trainer is from the sampler, per token: `(k3_S, abs_S, known_S)`, detached.

    k3_S: k3 estimate of KL(sampler || trainer), `exp(d) - d - 1` with `d = trainer - sampler` (the sampler drew the
    tokens, so the ratio is trainer / sampler). abs_S: `|d|`. Both 0 where known_S (bool) is False: NaN log-prob.
    """
    d_S = _log_ratio(trainer_logp_S, sampler_logp_S)
    return torch.expm1(d_S) - d_S, d_S.abs(), ~sampler_logp_S.isnan()


def importance_metrics(weight_S: Tensor, cap: float) -> dict[str, MetricSum]:
    """`importance/ratio_mean`, `importance/ratio_max` (after truncation, as in TRL) and the truncated share of tokens.

    A weight equal to the cap counts as truncated. The largest of no tokens is 0: weights are positive.
    """
    return {
        "importance/ratio_mean": MetricSum(weight_S.sum(), Normaliser.TOKENS),
        "importance/ratio_max": MetricSum(_largest(weight_S), Normaliser.NONE),
        "importance/truncated_mean": MetricSum((weight_S >= cap).to(weight_S.dtype).sum(), Normaliser.TOKENS),
    }


def mismatch_metrics(trainer_logp_S: Tensor, sampler_logp_S: Tensor) -> dict[str, MetricSum]:
    """`mismatch_kl/mean` (k3), `mismatch/abs_mean`, `mismatch/abs_max` in nats, and `mismatch/unknown_tokens`.

    The means divide by all tokens, so tokens without a sampler log-prob pull them towards 0; their number is reported
    beside them (TRL leaves such tokens out of the denominator, which a sum over a split step cannot know in advance).
    """
    k3_S, abs_S, known_S = token_mismatch(trainer_logp_S, sampler_logp_S)
    return {
        "mismatch_kl/mean": MetricSum(k3_S.sum(), Normaliser.TOKENS),
        "mismatch/abs_mean": MetricSum(abs_S.sum(), Normaliser.TOKENS),
        "mismatch/abs_max": MetricSum(_largest(abs_S), Normaliser.NONE),
        "mismatch/unknown_tokens": MetricSum((~known_S).to(abs_S.dtype).sum(), Normaliser.NONE),
    }


def _log_ratio(numerator_S: Tensor, sampler_logp_S: Tensor) -> Tensor:
    """[S] detached `numerator - sampler`, 0 where the sampler's is NaN."""
    difference_S = (numerator_S - sampler_logp_S).detach()
    return difference_S.masked_fill(sampler_logp_S.isnan(), 0.0)


def _largest(value_S: Tensor) -> Tensor:
    return value_S.max() if value_S.numel() else value_S.new_zeros(())
