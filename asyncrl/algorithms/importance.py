"""Importance correction: detached weights for tokens whose sampler log-probs differ from the trainer's.

The log-probs differ if an older policy sampled the tokens, or if engine and trainer use different kernels. A weight multiplies the
surrogate of its token. The weight is computed from a ratio old / sampler at one of three levels:

    token      exp(d_t)                         d_t = old_t - sampler_t
    sequence   exp(sum_t d_t)                   one weight for all tokens of a sequence
    geometric  exp(sum_t d_t / max(len, 1))     one weight for all tokens of a sequence

Bounds [floor, cap] act in one of two ways. `truncate` clamps the ratio. `mask` replaces a ratio outside of the bounds by 0.

    mode               level      bounds     known as
    token_truncate     token      truncate   TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You
                                             Off-Policy RL Training" (2025); `tis` is the same
    token_mask         token      mask       MIS in TRL. With a floor it is `icepop`: IcePop (Ring-1T, arXiv:2510.18855)
    sequence_truncate  sequence   truncate
    sequence_mask      sequence   mask       TRL's default
    geometric_truncate, geometric_mask       as the two modes above, at the geometric level (verl)
    sequence_mask_tis  masks a sequence by its geometric ratio; tokens of unmasked sequences have the untruncated ratio of the
                       token level (NeMo's seq-mask-tis)

`veto`: if a token of a sequence has a ratio below the veto, all tokens of the sequence get weight 0 (verl: 1e-4).
`log_clamp`: bound of |d_t| in nats (verl: 20). `truncate` is from Ionides, "Truncated Importance Sampling" (2008). A masked token
counts in N, the number of scored tokens of the step.

A sampler log-prob of NaN means that the engine reported no log-prob. Then d_t is 0. A NaN of the trainer reaches the loss and ends
the run. With `old_logprobs: sampler` the clip is around the sampler's log-probs, and there are no importance weights.

Shape legend: S scored tokens of a microbatch, B sequences of the microbatch. Log-probs are in nats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncrl.types import Normaliser

from .base import LossInputs, Metrics, MetricSum, old_logp
from .method import CheckContext, Method, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImportanceMode:
    """A value of `algorithm.importance.mode`: the level of the ratio, and the action of the bounds."""

    level: Literal["token", "sequence", "geometric"]
    action: Literal["truncate", "mask"]
    raw_token_weights: bool = False  # whether unmasked tokens get the ratio of the token level
    # Published values of floor and cap, for a mode that requires both.
    required_bounds: str = ""


IMPORTANCE_MODES: Mapping[str, ImportanceMode] = {
    "token_truncate": ImportanceMode("token", "truncate"),
    "tis": ImportanceMode("token", "truncate"),
    "token_mask": ImportanceMode("token", "mask"),
    "icepop": ImportanceMode("token", "mask", required_bounds="0.5 and 5.0"),
    "sequence_truncate": ImportanceMode("sequence", "truncate"),
    "sequence_mask": ImportanceMode("sequence", "mask"),
    "geometric_truncate": ImportanceMode("geometric", "truncate"),
    "geometric_mask": ImportanceMode("geometric", "mask"),
    "sequence_mask_tis": ImportanceMode("geometric", "mask", raw_token_weights=True, required_bounds="0.999 and 1.002"),
}


@dataclass(frozen=True)
class Importance(Method):
    """The correction of differences between sampler and trainer: a detached weight on the surrogate of each token."""

    section: ClassVar[str] = "importance"
    switches: ClassVar[tuple[str, ...]] = ("cap", "floor", "veto")
    off: ClassVar[str] = "cap, floor and veto are null, so there is no correction; set one of the three"
    formula: ClassVar[Any] = sys.modules[__name__]
    mode: str = setting(
        "token_truncate",
        "Level of the ratio old / sampler (token, sequence, or geometric mean of the sequence), and whether bounds clamp the ratio "
        "(truncate) or set it to 0 (mask). tis is token_truncate, icepop is token_mask. sequence_mask_tis masks sequences by their "
        "geometric mean, and tokens of unmasked sequences have their own ratio.",
        choices=IMPORTANCE_MODES,
        fixed=True,
    )
    cap: float | None = setting(
        2.0, "Upper bound of the ratio old / sampler. Without cap, floor and veto there is no correction.", gt=0
    )
    floor: float | None = setting(None, "Lower bound of the ratio old / sampler.", gt=0)
    veto: float | None = setting(
        None, "A sequence with a token whose ratio is below this value gets weight 0 (verl: 1e-4).", gt=0
    )
    log_clamp: float | None = setting(
        None, "Log-ratios old - sampler are clamped to +- this many nats (verl: 20).", gt=0
    )

    @property
    def on(self) -> bool:
        return any(bound is not None for bound in (self.cap, self.floor, self.veto))

    def problems(self, context: CheckContext) -> Iterator[str]:
        if context.at("algorithm.old_logprobs") == "sampler":
            return
        cap, floor = self.cap, self.floor
        if cap is not None and floor is not None and floor >= cap:
            yield f"algorithm.importance.floor is {floor}; expected less than algorithm.importance.cap = {cap}"
        example = IMPORTANCE_MODES[self.mode].required_bounds
        if example and (cap is None or floor is None):
            yield (
                f"algorithm.importance.mode is {self.mode} with floor={floor} and cap={cap}; this mode needs both bounds: set both "
                f"({example} are published values)"
            )


def importance_weights(inputs: LossInputs, settings: Importance) -> tuple[Tensor, Metrics]:
    """Detached weights [S], and their metrics. Call this only if `settings.on`."""
    mode = IMPORTANCE_MODES[settings.mode]
    floor = 0.0 if settings.floor is None else settings.floor
    cap = math.inf if settings.cap is None else settings.cap
    d_S = _log_ratio(old_logp(inputs), inputs.sampler_logp_S)
    if settings.log_clamp is not None:
        d_S = d_S.clamp(-settings.log_clamp, settings.log_clamp)
    if mode.level == "token":
        ratio, normaliser = d_S.exp(), Normaliser.TOKENS
    else:
        over_sequence = inputs.sequence_sum if mode.level == "sequence" else inputs.sequence_mean
        ratio, normaliser = over_sequence(d_S).exp(), Normaliser.SEQUENCES
    # Comparisons with NaN are false. So a NaN of the trainer is not `outside`, and reaches the loss.
    outside = (ratio < floor) | (ratio > cap)
    weight = ratio.clamp(floor, cap) if mode.action == "truncate" else ratio.masked_fill(outside, 0.0)
    # Unlike TRL, leave out sequences without scored tokens (ratio 1), because a microbatch of such sequences may be skipped.
    counted = ratio.new_ones(ratio.shape) if mode.level == "token" else (inputs.length_B > 0).to(ratio.dtype)
    # `ratio_*` are of the weights after the bounds, as in TRL. `bounded_mean` is the share of ratios outside of the bounds.
    metrics = {
        "importance/ratio_mean": MetricSum((weight * counted).sum(), normaliser),
        "importance/ratio_max": MetricSum(_largest(weight * counted), Normaliser.NONE),
        "importance/bounded_mean": MetricSum((outside * counted).sum(), normaliser),
    }
    weight_S = weight if mode.level == "token" else inputs.spread(weight)
    if mode.raw_token_weights:
        weight_S = d_S.exp().masked_fill(weight_S == 0, 0.0)
    if settings.veto is not None:
        vetoed_B = inputs.sequence_sum((d_S.exp() < settings.veto).to(d_S.dtype)) > 0
        metrics["importance/vetoed_mean"] = MetricSum(vetoed_B.to(d_S.dtype).sum(), Normaliser.SEQUENCES)
        weight_S = weight_S.masked_fill(inputs.spread(vetoed_B), 0.0)
    return weight_S, metrics


def mismatch_metrics(trainer_logp_S: Tensor, sampler_logp_S: Tensor) -> Metrics:
    """`mismatch_kl/mean` (the k3 estimate of KL(sampler || trainer)), `mismatch/abs_mean`, `mismatch/abs_max` in nats,
    `mismatch/ratio_max` (trainer / sampler) and `mismatch/unknown_tokens`.

    A token without a sampler log-prob (NaN) counts as equal, which lowers the means. `mismatch/unknown_tokens` counts these tokens.
    (TRL divides by the tokens with a sampler log-prob. In a step of several microbatches that number is not known.)
    """
    d_S = _log_ratio(trainer_logp_S, sampler_logp_S)
    abs_S = d_S.abs()
    return {
        "mismatch_kl/mean": MetricSum((d_S.expm1() - d_S).sum(), Normaliser.TOKENS),
        "mismatch/abs_mean": MetricSum(abs_S.sum(), Normaliser.TOKENS),
        "mismatch/abs_max": MetricSum(_largest(abs_S), Normaliser.NONE),
        "mismatch/ratio_max": MetricSum(_largest(d_S.exp()), Normaliser.NONE),
        "mismatch/unknown_tokens": MetricSum(sampler_logp_S.isnan().to(abs_S.dtype).sum(), Normaliser.NONE),
    }


def _log_ratio(numerator_S: Tensor, sampler_logp_S: Tensor) -> Tensor:
    """[S] detached `numerator - sampler`, or 0 where the sampler's log-prob is NaN."""
    difference_S = (numerator_S - sampler_logp_S).detach()
    return difference_S.masked_fill(sampler_logp_S.isnan(), 0.0)


def _largest(value_S: Tensor) -> Tensor:
    return value_S.max() if value_S.numel() else value_S.new_zeros(())
