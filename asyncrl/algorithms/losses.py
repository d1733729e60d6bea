"""The losses of the GRPO family, one named pure function per published method, in sum form.

Each is a ratio (`ratios.py`), a surrogate on it (`surrogates.py`), the terms that every loss may have (`corrected`) and an
aggregation. The order is TRL's (`GRPOTrainer._compute_loss`):

    ratio -> surrogate -> x scale of its sign -> x OPSM -> x top-entropy mask -> x importance weight -> + kl_coef x KL
    -> aggregation (-> entropy bonus, in `registry.py`: it has a normaliser of its own)

and returns the sum that its docstring names, with the declared normaliser; the trainer divides once, at finish, by the
true number of tokens or sequences of the whole step. Nothing in here depends on how a step was cut into microbatches,
except in `bnpo`, which is therefore refused where steps are streamed.

Positive and negative scalers (torchtitan): the surrogate of a token is multiplied by `positive_scale` where A > 0 and by
`negative_scale` where A < 0. The KL term is multiplied by no weight, and by the ratio only if asked (`kl.py`).

Shape legend: S scored tokens of a microbatch (packed, no padding), B its sequences. A fully masked sequence owns no
token but counts in B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.types import Normaliser

from . import surrogates
from .base import LossInputs, LossSums, Metrics, MetricSum
from .importance import importance_weights
from .kl import estimate
from .masks import off_policy_keep
from .numbers import Numbers
from .ratios import sequence_ratio, token_ratio
from .surrogates import Surrogate


def grpo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Group relative policy optimization: token ratio, every sequence weighs the same.

    Paper: Shao et al., "DeepSeekMath" (arXiv:2402.03300), eq. 3.
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t`, l the clipped surrogate.
    Normaliser: SEQUENCES. Streams.
    """
    return _sequence_means(inputs, *corrected(inputs, surrogates.clipped(inputs, token_ratio(inputs), n), n))


def bnpo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Clipped surrogate, mean over the tokens of each microbatch, mean of those means: TRL's `bnpo`.

    Paper: Xiao et al., "BNPO" (arXiv:2506.02864); only its aggregation, as in TRL.
    Formula: `(1 / max(tokens of the microbatch, 1)) sum_t l_t`.
    Normaliser: MICROBATCHES. Does not stream: the denominator is local, so the gradient depends on which sequences share
    a microbatch (`train.tokens_per_microbatch`, the order of arrival). `dapo` is what it turns into with one denominator.
    """
    loss_S, metrics = corrected(inputs, surrogates.clipped(inputs, token_ratio(inputs), n), n)
    return _sums(loss_S.sum() / max(loss_S.numel(), 1), Normaliser.MICROBATCHES, metrics)


def dapo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Decoupled clip with token-level aggregation: every token of the step weighs the same.

    Paper: Yu et al., "DAPO" (arXiv:2503.14476), eq. 8 (the paper uses epsilon 0.2, epsilon_high 0.28, no KL).
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: TOKENS, of the whole step (not of the microbatch: that would be bnpo). Streams.
    The name stands for clip and aggregation; dynamic sampling and overlong shaping act on groups and rewards.
    """
    return _token_sum(inputs, *corrected(inputs, surrogates.clipped(inputs, token_ratio(inputs), n), n))


def dr_grpo(inputs: LossInputs, n: Numbers) -> LossSums:
    """GRPO done right: a constant denominator, so that long wrong answers are not favoured.

    Paper: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio.
    Normaliser: SEQUENCES_X_MAX_LENGTH. Streams. Its advantages are those of the estimator `dr_grpo` (no division by
    std).
    """
    loss_S, metrics = corrected(inputs, surrogates.clipped(inputs, token_ratio(inputs), n), n)
    return _sums(loss_S.sum(), Normaliser.SEQUENCES_X_MAX_LENGTH, metrics)


def gspo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Group sequence policy optimization: one ratio per sequence, the geometric mean of its token ratios.

    Paper: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7 (the paper uses epsilon 3e-4,
    epsilon_high 4e-4: a sequence ratio moves far less than a token ratio).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t l_t` with `r_t = s_b = exp((1 / max(len_b, 1)) sum_t (logp_t - old_t))`
    for every token of sequence b; the gradient flows through the whole ratio. In TRL: loss `grpo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences, not tokens.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """
    surrogate = surrogates.clipped(inputs, sequence_ratio(inputs), n, by_sequence=True)
    return _sequence_means(inputs, *corrected(inputs, surrogate, n))


def cispo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Clipped importance weights instead of clipped updates: no token loses its gradient.

    Paper: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Formula: `sum_t -sg(clip(r_t, cispo_low, cispo_high)) A_t logp_t`. The bounds are absolute: `cispo_high` is TRL's
    `epsilon_high` for this loss and NeMo's `1 + ratio_clip_max`; `cispo_low` 0 is no lower bound, as in TRL.
    Normaliser: TOKENS. Streams. Clip metrics: tokens whose weight was bounded against their advantage.
    """
    return _token_sum(inputs, *corrected(inputs, surrogates.clipped_weight(inputs, token_ratio(inputs), n), n))


def sapo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Soft adaptive policy optimization: a sigmoid gate in place of the clip, colder for bad tokens.

    Paper: Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347).
    Formula: `sum_b (1 / max(len_b, 1)) sum_t -A_t sigmoid(tau (r_t - 1)) 4 / tau`, tau by the sign of A.
    Normaliser: SEQUENCES. Streams.
    """
    return _sequence_means(inputs, *corrected(inputs, surrogates.soft_gate(inputs, token_ratio(inputs), n), n))


def luspo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Length-unbiased sequence policy optimization: gspo whose sequences weigh by their length.

    Paper: "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261), as TRL has it.
    Formula: `sum_b sum_t l_t` with the sequence ratio of gspo. In TRL: loss `luspo` with
    `importance_sampling_level="sequence"`. Clip metrics count sequences.
    Normaliser: SEQUENCES. Streams, as long as no sequence is cut in two.
    """
    surrogate = surrogates.clipped(inputs, sequence_ratio(inputs), n, by_sequence=True)
    loss_S, metrics = corrected(inputs, surrogate, n)
    return _sums(loss_S.sum(), Normaliser.SEQUENCES, metrics)


def vespo(inputs: LossInputs, n: Numbers) -> LossSums:
    """Variational sequence-level soft policy optimization: a gamma-shaped weight of the whole sequence's ratio.

    Paper: "VESPO" (arXiv:2602.10693), as TRL has it.
    Formula: `sum_t -phi_b A_t logp_t`, `phi_b = exp(lambda + k log w_b - lambda w_b)`, detached. The importance weights
    of the tokens are part of w, not a factor of the loss; only modes of the token level make sense.
    Normaliser: TOKENS. Streams, as long as no sequence is cut in two.
    """
    weight_S, metrics = importance_weights(inputs, n) if n.corrects else (None, {})
    surrogate = surrogates.gamma_weight(inputs, token_ratio(inputs), weight_S, n)
    loss_S, rest = corrected(inputs, surrogate, n, importance=False)
    return _token_sum(inputs, loss_S, {**metrics, **rest})


def reinforce(inputs: LossInputs, n: Numbers) -> LossSums:
    """The policy gradient itself, corrected by the importance weight alone.

    Paper: Williams (1992), https://doi.org/10.1007/BF00992696. NeMo: `disable_ppo_ratio`.
    Formula: `sum_t -A_t logp_t`. With `updates_per_batch` above 1 nothing holds the later updates back.
    Normaliser: TOKENS. Streams.
    """
    return _token_sum(inputs, *corrected(inputs, surrogates.plain(inputs, token_ratio(inputs)), n))


def ppo_clip(inputs: LossInputs, n: Numbers) -> LossSums:
    """Proximal policy optimization's clipped objective, with its optional dual clip.

    Paper: Schulman et al. (arXiv:1707.06347), eq. 7; `dual_clip`: Ye et al. (arXiv:1912.09729), eq. 5.
    Formula: `sum_t l_t`, l the clipped surrogate with the token ratio. The same function as `dapo`.
    Normaliser: TOKENS. Streams.
    """
    return dapo(inputs, n)


def one_sided(inputs: LossInputs, n: Numbers) -> LossSums:
    """Asymmetric one-sided clip: each token is bounded only where its advantage pushes it.

    Source: torchtitan's GRPO loss. Equal to `ppo_clip` in value and gradient, without `delta` and `dual_clip`.
    Formula: `sum_t -A_t min(r_t, 1 + epsilon_high)` for A > 0, `-A_t max(r_t, 1 - epsilon)` else.
    Normaliser: TOKENS. Streams.
    """
    return _token_sum(inputs, *corrected(inputs, surrogates.one_sided(inputs, token_ratio(inputs), n), n))


def corrected(
    inputs: LossInputs, surrogate: Surrogate, n: Numbers, *, importance: bool = True
) -> tuple[Tensor, Metrics]:
    """The terms that every loss may have, in the order of the module docstring: `(l_S, metrics)`."""
    loss_S, metrics = surrogate.loss_S, dict(surrogate.metrics)
    if (n.positive_scale, n.negative_scale) != (1.0, 1.0):
        good_S, bad_S = inputs.advantage_S > 0, inputs.advantage_S < 0
        scale_S = torch.ones_like(loss_S).masked_fill(good_S, n.positive_scale).masked_fill(bad_S, n.negative_scale)
        loss_S = loss_S * scale_S
    if n.off_policy_mask_threshold is not None:
        keep_S, found = off_policy_keep(inputs, n.off_policy_mask_threshold)
        metrics.update(found)
        loss_S = loss_S * keep_S
    if n.top_entropy_quantile < 1:
        if inputs.keep_S is None:
            raise ValueError(
                f"top_entropy_quantile is {n.top_entropy_quantile}, but nobody chose the tokens (`keep_S`)"
            )
        loss_S = loss_S * inputs.keep_S
    if importance and n.corrects:
        weight_S, found = importance_weights(inputs, n)
        metrics.update(found)
        loss_S = loss_S * weight_S
    if n.kl_coef and n.kl_in == "loss":
        loss_S = loss_S + n.kl_coef * _kl(inputs, surrogate.ratio_S, n, metrics)
    return loss_S, metrics


def _kl(inputs: LossInputs, ratio_S: Tensor, n: Numbers, metrics: Metrics) -> Tensor:
    if inputs.reference_logp_S is None:
        raise ValueError(f"kl_coef is {n.kl_coef}, but the microbatch has no reference log-probs (`reference_logp_S`)")
    kl_S = estimate(n.kl_estimator, inputs.logp_S, inputs.reference_logp_S.detach(), n.kl_clamp)
    if n.use_bias_correction_kl:
        kl_S = kl_S * ratio_S
    metrics["kl"] = MetricSum(kl_S.detach().sum(), Normaliser.TOKENS)
    return kl_S


def _sequence_means(inputs: LossInputs, loss_S: Tensor, metrics: Metrics) -> LossSums:
    return _sums(inputs.sequence_mean(loss_S).sum(), Normaliser.SEQUENCES, metrics)


def _token_sum(inputs: LossInputs, loss_S: Tensor, metrics: Metrics) -> LossSums:
    return _sums(loss_S.sum(), Normaliser.TOKENS, metrics)


def _sums(total: Tensor, normaliser: Normaliser, metrics: Metrics) -> LossSums:
    return LossSums(total, {"loss": MetricSum(total.detach(), normaliser), **metrics})
