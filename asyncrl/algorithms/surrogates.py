"""The surrogates: per-token policy losses `[S]` before correction and aggregation, and the shares that were clipped.

`A` is the advantage of the token's sequence, `r` a ratio of `ratios.py` (or, for gspo and luspo, one ratio a sequence).
A surrogate that carries its gradient in the log-prob (`-c A logp`) has a detached coefficient c.

Shape legend: S scored tokens of a microbatch, B its sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.types import Normaliser

from .base import LossInputs, Metrics, MetricSum
from .numbers import Numbers


@dataclass(frozen=True, slots=True)
class Surrogate:
    loss_S: Tensor
    ratio_S: Tensor  # unclipped, with gradient: the weight of a bias-corrected KL
    metrics: Metrics = field(default_factory=dict)


def clipped(inputs: LossInputs, ratio_S: Tensor, n: Numbers, *, by_sequence: bool = False) -> Surrogate:
    """PPO's pessimistic surrogate with separate bounds: `-min(r' A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    Schulman et al. (arXiv:1707.06347), eq. 7; epsilon_high: DAPO (arXiv:2503.14476). `r' = min(r, delta)` bounds the loss
    of a bad token made likelier (two-sided clip, INTELLECT-2, arXiv:2505.07291; delta > 1 + epsilon_high). `dual_clip` c
    does the same in the form of Ye et al. (arXiv:1912.09729): `min(loss, -c A)` where A < 0.
    Clip metrics count tokens, or sequences where the ratio belongs to a sequence.
    """
    advantage_S = inputs.advantage_S
    clipped_S = ratio_S.clamp(1 - n.epsilon, 1 + n.high)
    free_S = ratio_S if n.delta is None else ratio_S.clamp(max=n.delta)
    # The minimum of two equal numbers hands half of the gradient to each; on-policy (r = 1) both reach the ratio.
    loss_S = -torch.minimum(free_S * advantage_S, clipped_S * advantage_S)
    if n.dual_clip is not None:
        loss_S = torch.where(advantage_S < 0, torch.minimum(loss_S, -n.dual_clip * advantage_S), loss_S)
    return Surrogate(loss_S, ratio_S, _clip_metrics(inputs, ratio_S, n, by_sequence))


def one_sided(inputs: LossInputs, ratio_S: Tensor, n: Numbers) -> Surrogate:
    """Only the bound that the advantage can run into: `-A min(r, 1 + epsilon_high)` for A > 0, `-A max(r, 1 - epsilon)`
    else. The same function as `clipped` written without its minimum (torchtitan's asymmetric clip)."""
    bounded_S = torch.where(inputs.advantage_S > 0, ratio_S.clamp(max=1 + n.high), ratio_S.clamp(min=1 - n.epsilon))
    return Surrogate(-bounded_S * inputs.advantage_S, ratio_S, _clip_metrics(inputs, ratio_S, n, False))


def clipped_weight(inputs: LossInputs, ratio_S: Tensor, n: Numbers) -> Surrogate:
    """`-sg(clip(r, cispo_low, cispo_high)) A logp`: the clip bounds the weight, and every token keeps its gradient."""
    weight_S = ratio_S.detach().clamp(n.cispo_low, n.cispo_high)
    detached_S, advantage_S = ratio_S.detach(), inputs.advantage_S
    metrics = _shares((detached_S < n.cispo_low) & (advantage_S < 0), (detached_S > n.cispo_high) & (advantage_S > 0))
    return Surrogate(-weight_S * advantage_S * inputs.logp_S, ratio_S, metrics)


def soft_gate(inputs: LossInputs, ratio_S: Tensor, n: Numbers) -> Surrogate:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, tau = sapo_temperature_pos where A > 0, else sapo_temperature_neg.

    Gradient A at r = 1, as that of the plain ratio; it fades smoothly on both sides instead of ending at a clip.
    """
    positive_S = inputs.advantage_S > 0
    tau_S = torch.where(
        positive_S, ratio_S.new_tensor(n.sapo_temperature_pos), ratio_S.new_tensor(n.sapo_temperature_neg)
    )
    return Surrogate(-torch.sigmoid(tau_S * (ratio_S - 1)) * 4 / tau_S * inputs.advantage_S, ratio_S)


def plain(inputs: LossInputs, ratio_S: Tensor) -> Surrogate:
    """`-A logp`: no ratio, no clip."""
    return Surrogate(-inputs.advantage_S * inputs.logp_S, ratio_S)


VESPO_FLOOR = math.log(1e-8)
VESPO_CEILING = 20.0


def gamma_weight(inputs: LossInputs, ratio_S: Tensor, importance_S: Tensor | None, n: Numbers) -> Surrogate:
    """`-phi A logp`, `log phi = lambda + k log w - lambda w`, one detached phi a sequence (phi = 1 at w = 1).

    `log w = sum_t log r_t + sum_t log(importance_t)`: the whole way from sampler to policy. Each log-ratio is held within
    +-20, each log-weight and the sum within [log 1e-8, 20]; (k, lambda) is (vespo_k_pos, vespo_lambda_pos) where A >= 0,
    else (vespo_k_neg, vespo_lambda_neg). A phi that is not finite is 0, as in TRL, but for a NaN of the trainer itself,
    which reaches the loss through logp.
    """
    with torch.no_grad():
        log_w_S = ratio_S.log().clamp(-VESPO_CEILING, VESPO_CEILING)
        if importance_S is not None:
            log_w_S = log_w_S + importance_S.log().clamp(VESPO_FLOOR, VESPO_CEILING)
        log_w_B = inputs.sequence_sum(log_w_S).clamp(VESPO_FLOOR, VESPO_CEILING)
        log_w_S = inputs.spread(log_w_B)
        good_S = inputs.advantage_S >= 0
        k_S = torch.where(good_S, log_w_S.new_tensor(n.vespo_k_pos), log_w_S.new_tensor(n.vespo_k_neg))
        lambda_S = torch.where(good_S, log_w_S.new_tensor(n.vespo_lambda_pos), log_w_S.new_tensor(n.vespo_lambda_neg))
        phi_S = (lambda_S + k_S * log_w_S - lambda_S * log_w_S.exp()).exp()
        phi_S = phi_S.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    metrics = {"vespo/phi_mean": MetricSum(inputs.sequence_mean(phi_S).sum(), Normaliser.SEQUENCES)}
    return Surrogate(-phi_S * inputs.advantage_S * inputs.logp_S, ratio_S, metrics)


def _clip_metrics(inputs: LossInputs, ratio_S: Tensor, n: Numbers, by_sequence: bool) -> Metrics:
    detached_S, advantage_S = ratio_S.detach(), inputs.advantage_S
    low_S = (detached_S < 1 - n.epsilon) & (advantage_S < 0)
    high_S = (detached_S > 1 + n.high) & (advantage_S > 0)
    if not by_sequence:
        return _shares(low_S, high_S)
    low_B, high_B = (inputs.sequence_mean(side_S.to(ratio_S.dtype)) for side_S in (low_S, high_S))
    return _shares(low_B, high_B, Normaliser.SEQUENCES)


def _shares(low: Tensor, high: Tensor, normaliser: Normaliser = Normaliser.TOKENS) -> Metrics:
    """Clipped below (A < 0) and above (A > 0), where the gradient is 0 (cispo: where the weight is bounded)."""
    below, above = low.sum(), high.sum()
    return {
        "clip_ratio/low_mean": MetricSum(below, normaliser),
        "clip_ratio/high_mean": MetricSum(above, normaliser),
        "clip_ratio/region_mean": MetricSum(below + above, normaliser),
    }
