"""The losses of the GRPO family, one named pure function per published method, in sum form.

Every loss is built from the same four pieces, in TRL's order (`GRPOTrainer._compute_loss`):

    ratio r  ->  clipped surrogate  ->  x importance weight w (detached)  ->  + beta * k3  ->  sum

    l_t = -min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) * w_t + kl_coef * k3_t
    k3_t = exp(ref_t - logp_t) - (ref_t - logp_t) - 1

and returns the sum that its docstring names, with the declared normaliser; the trainer divides once, at finish, by
the true number of tokens or sequences of the whole step. Nothing in here depends on how a step was cut into
microbatches.

`epsilon_high` None means `epsilon`. `importance_cap` None switches the importance weight off. `kl_coef > 0` needs the
reference column. The KL term is not multiplied by the importance weight, nor by the ratio (TRL's
`use_bias_correction_kl`, which TRL switches on by default since 1.x, is not taken over).

Shape legend: S scored tokens of a microbatch (packed, no padding), B its sequences. A fully masked sequence owns no
token but counts in B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.types import Normaliser

from .base import LossInputs, LossSums, MetricSum
from .importance import importance_metrics, old_logp, token_truncate
from .kl import k3


def grpo(
    inputs: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """Group relative policy optimization: token ratio, every sequence weighs the same.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, `r_t = exp(logp_t - old_t)`.
    Normaliser: SEQUENCES. Streams.
    """
    loss_S, metrics = _token_loss(inputs, epsilon, epsilon_high, importance_cap, kl_coef)
    return _sums(inputs.sequence_mean(loss_S).sum(), Normaliser.SEQUENCES, metrics)


def dapo(
    inputs: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """Decoupled clip with token-level aggregation: every token of the step weighs the same.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, `r_t = exp(logp_t - old_t)`.
    Normaliser: TOKENS, of the whole step (not of the microbatch: that would be bnpo). Streams.
    The name stands for clip and aggregation; dynamic sampling and overlong shaping act on groups and rewards.
    """
    loss_S, metrics = _token_loss(inputs, epsilon, epsilon_high, importance_cap, kl_coef)
    return _sums(loss_S.sum(), Normaliser.TOKENS, metrics)


def dr_grpo(
    inputs: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, `r_t = exp(logp_t - old_t)`.
    Normaliser: SEQUENCES_X_MAX_LENGTH. Streams. Its advantages are those of the estimator `dr_grpo` (no division by
    std).
    """
    loss_S, metrics = _token_loss(inputs, epsilon, epsilon_high, importance_cap, kl_coef)
    return _sums(loss_S.sum(), Normaliser.SEQUENCES_X_MAX_LENGTH, metrics)


def gspo(
    inputs: LossInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_cap: float | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """Group sequence policy optimization: one ratio per sequence, the geometric mean of its token ratios.

    Paper: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7 (the paper uses epsilon 3e-4,
    epsilon_high 4e-4: a sequence ratio moves far less than a token ratio).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t` with `r_t = s_b = exp((1 / max(len_b, 1)) sum_t (logp_t - old_t))`
    for every token of sequence b; the gradient flows through the whole ratio. In TRL: loss `grpo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences, not tokens.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """
    ratio_B = inputs.sequence_mean(inputs.logp_S - old_logp(inputs)).exp()
    ratio_S = ratio_B.index_select(0, inputs.sequence_S)
    loss_S, low_S, high_S = _clipped_surrogate(ratio_S, inputs.advantage_S, epsilon, epsilon_high)
    metrics = _clip_metrics(inputs.sequence_mean(low_S).sum(), inputs.sequence_mean(high_S).sum(), Normaliser.SEQUENCES)
    loss_S = _corrected(inputs, loss_S, importance_cap, kl_coef, metrics)
    return _sums(inputs.sequence_mean(loss_S).sum(), Normaliser.SEQUENCES, metrics)


def _token_loss(
    inputs: LossInputs,
    epsilon: float,
    epsilon_high: float | None,
    importance_cap: float | None,
    kl_coef: float,
) -> tuple[Tensor, dict[str, MetricSum]]:
    """`l_t` of the module docstring with the token ratio: [S], and the metrics so far."""
    ratio_S = (inputs.logp_S - old_logp(inputs)).exp()
    loss_S, low_S, high_S = _clipped_surrogate(ratio_S, inputs.advantage_S, epsilon, epsilon_high)
    metrics = _clip_metrics(low_S.sum(), high_S.sum(), Normaliser.TOKENS)
    return _corrected(inputs, loss_S, importance_cap, kl_coef, metrics), metrics


def _clipped_surrogate(
    ratio_S: Tensor, advantage_S: Tensor, epsilon: float, epsilon_high: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic surrogate (Schulman et al., arXiv:1707.06347, eq. 7) with separate bounds.

    Returns `-min(r A, clip(r) A)` [S], and two indicators [S] in the dtype of the ratio: clipped below (r < 1 - epsilon
    and A < 0) and clipped above (r > 1 + epsilon_high and A > 0), where the gradient is 0.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    clipped_S = ratio_S.clamp(1 - epsilon, 1 + high)
    # The minimum of two equal numbers hands half of the gradient to each; on-policy (r = 1) both reach the ratio.
    loss_S = -torch.minimum(ratio_S * advantage_S, clipped_S * advantage_S)
    detached_S = ratio_S.detach()
    low_S = (detached_S < 1 - epsilon) & (advantage_S < 0)
    high_S = (detached_S > 1 + high) & (advantage_S > 0)
    return loss_S, low_S.to(ratio_S.dtype), high_S.to(ratio_S.dtype)


def _clip_metrics(low: Tensor, high: Tensor, normaliser: Normaliser) -> dict[str, MetricSum]:
    return {
        "clip_ratio/low_mean": MetricSum(low, normaliser),
        "clip_ratio/high_mean": MetricSum(high, normaliser),
        "clip_ratio/region_mean": MetricSum(low + high, normaliser),
    }


def _corrected(
    inputs: LossInputs,
    loss_S: Tensor,
    importance_cap: float | None,
    kl_coef: float,
    metrics: dict[str, MetricSum],
) -> Tensor:
    """`loss_t * w_t + kl_coef * k3_t`: [S]; adds the metrics of both terms to `metrics`."""
    if importance_cap is not None:
        weight_S = token_truncate(old_logp(inputs), inputs.sampler_logp_S, importance_cap)
        metrics.update(importance_metrics(weight_S, importance_cap))
        loss_S = loss_S * weight_S
    if kl_coef:
        if inputs.reference_logp_S is None:
            raise ValueError(
                f"kl_coef is {kl_coef}, but the microbatch has no reference log-probs (`reference_logp_S`)"
            )
        kl_S = k3(inputs.logp_S, inputs.reference_logp_S.detach())
        metrics["kl"] = MetricSum(kl_S.detach().sum(), Normaliser.TOKENS)
        loss_S = loss_S + kl_coef * kl_S
    return loss_S


def _sums(total: Tensor, normaliser: Normaliser, metrics: dict[str, MetricSum]) -> LossSums:
    return LossSums(total, {"loss": MetricSum(total.detach(), normaliser), **metrics})
