"""Correction for tokens that were sampled by other numbers than the trainer's: an older policy, another kernel.

A detached weight multiplies the surrogate of each token. Its raw form is a ratio old / sampler at one of three levels,

    token      exp(d_t)                     d_t = old_t - sampler_t
    sequence   exp(sum_t d_t)               one weight for all tokens of a sequence
    geometric  exp(sum_t d_t / max(len, 1))

and bounds [floor, cap] act on it in one of two ways: `truncate` clamps it, `mask` replaces what is outside by 0 (equality
is kept, and nothing is raised to the floor afterwards: what was masked stays masked).

    mode               level      bounds     known as
    token_truncate     token      truncate   TIS: Yao et al., "Your Efficient RL Framework Secretly Brings You
                                             Off-Policy RL Training" (2025); `tis` is the same
    token_mask         token      mask       MIS in TRL; IcePop (Ring-1T, arXiv:2510.18855) with a floor: `icepop`
    sequence_truncate  sequence   truncate
    sequence_mask      sequence   mask       TRL's default
    geometric_truncate, geometric_mask       the same at the geometric level (verl)
    sequence_mask_tis  the geometric mean decides whether a sequence is kept; its tokens keep their raw, untruncated
                       token weights (NeMo's seq-mask-tis)

`veto`: a sequence that holds a token with ratio below it gets weight 0 as a whole (verl: 1e-4).
`log_clamp`: d_t within +- that many nats (verl: 20). The truncation itself is Ionides', "Truncated Importance
Sampling" (2008). Denominators are not touched: a masked token counts in N.

A sampler log-prob that is NaN (an engine that could not report it) means d = 0, and no evidence about the mismatch.
Only the sampler's NaN is forgiven: a NaN of the trainer goes through to the loss, where it ends the run.

Where `old_logprobs: sampler` puts the clip around the sampler's log-probs, there is nothing left to correct: the two
corrections are never applied together.

Shape legend: S scored tokens of a microbatch, B its sequences. Log-probs in nats.
"""

from __future__ import annotations

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
class Mode:
    """A value of `algorithm.importance.mode`: the level of the ratio, and how the bounds act on it."""

    level: Literal["token", "sequence", "geometric"]
    action: Literal["truncate", "mask"]
    raw_token_weights: bool = False  # of what the mask leaves
    # It is nothing without floor and cap: published values of the two.
    both_sides: str = ""


IMPORTANCE_MODES: Mapping[str, Mode] = {
    "token_truncate": Mode("token", "truncate"),
    "tis": Mode("token", "truncate"),
    "token_mask": Mode("token", "mask"),
    "icepop": Mode("token", "mask", both_sides="0.5 and 5.0"),
    "sequence_truncate": Mode("sequence", "truncate"),
    "sequence_mask": Mode("sequence", "mask"),
    "geometric_truncate": Mode("geometric", "truncate"),
    "geometric_mask": Mode("geometric", "mask"),
    "sequence_mask_tis": Mode("geometric", "mask", raw_token_weights=True, both_sides="0.999 and 1.002"),
}


@dataclass(frozen=True)
class Importance(Method):
    """The correction against the sampler's log-probs: a detached weight on the surrogate of each token."""

    section: ClassVar[str] = "importance"
    switches: ClassVar[tuple[str, ...]] = ("cap", "floor", "veto")
    off: ClassVar[str] = "cap, floor and veto are null: there is no correction; set one of them"
    formula: ClassVar[Any] = sys.modules[__name__]
    mode: str = setting(
        "token_truncate",
        "Level of the ratio old / sampler (token, whole sequence, geometric mean), and whether bounds clamp it or set it to 0; "
        "tis and icepop name the two token modes, sequence_mask_tis masks sequences by their geometric mean and keeps raw "
        "token weights.",
        choices=IMPORTANCE_MODES,
        fixed=True,
    )
    cap: float | None = setting(
        2.0, "Upper bound of that ratio; null: none. Without cap, floor and veto the correction is off.", gt=0
    )
    floor: float | None = setting(None, "Lower bound of that ratio.", gt=0)
    veto: float | None = setting(
        None, "A sequence that holds a token whose ratio is below this gets weight 0 (verl: 1e-4).", gt=0
    )
    log_clamp: float | None = setting(
        None, "Log-ratios old - sampler are clamped to +- this many nats (verl: 20).", gt=0
    )

    @property
    def on(self) -> bool:
        """Whether there is a bound. Without one the sampler's log-probs correct nothing."""
        return any(bound is not None for bound in (self.cap, self.floor, self.veto))

    def problems(self, around: CheckContext) -> Iterator[str]:
        if around.at("algorithm.old_logprobs") == "sampler":
            return
        cap, floor = self.cap, self.floor
        if cap is not None and floor is not None and floor >= cap:
            yield f"algorithm.importance.floor is {floor}; expected less than algorithm.importance.cap = {cap}"
        example = IMPORTANCE_MODES[self.mode].both_sides
        if example and (cap is None or floor is None):
            yield (
                f"algorithm.importance.mode is {self.mode} with floor={floor} and cap={cap}; it masks on both sides: set both "
                f"({example} are published values)"
            )


def importance_weights(inputs: LossInputs, n: Importance) -> tuple[Tensor, Metrics]:
    """[S] detached weights by the mode of `n`, and their metrics."""
    mode = IMPORTANCE_MODES[n.mode]
    d_S = _log_ratio(old_logp(inputs), inputs.sampler_logp_S)
    if n.log_clamp is not None:
        d_S = d_S.clamp(-n.log_clamp, n.log_clamp)
    if mode.level == "token":
        ratio, normaliser = d_S.exp(), Normaliser.TOKENS
    else:
        sums = inputs.sequence_sum if mode.level == "sequence" else inputs.sequence_mean
        ratio, normaliser = sums(d_S).exp(), Normaliser.SEQUENCES
    bound = bounded(ratio, mode.action, n.floor, n.cap)
    # A fully masked sequence has ratio 1 (the sum over no token) and no weight to report: its microbatch may be skipped.
    real = d_S.new_ones(d_S.shape) if mode.level == "token" else (inputs.length_B > 0).to(d_S.dtype)
    metrics = importance_metrics(ratio * real, bound * real, normaliser)
    weight_S = bound if mode.level == "token" else inputs.spread(bound)
    if mode.raw_token_weights:
        weight_S = d_S.exp().masked_fill(weight_S == 0, 0.0)
    if n.veto is not None:
        vetoed_B = inputs.sequence_sum((d_S.exp() < n.veto).to(d_S.dtype)) > 0
        metrics["importance/vetoed_mean"] = MetricSum(vetoed_B.to(d_S.dtype).sum(), Normaliser.SEQUENCES)
        weight_S = weight_S.masked_fill(inputs.spread(vetoed_B), 0.0)
    return weight_S, metrics


def bounded(ratio: Tensor, action: Literal["truncate", "mask"], floor: float | None, cap: float | None) -> Tensor:
    """The ratio with its bounds applied; NaN stays NaN."""
    if action == "truncate":
        return ratio if floor is None and cap is None else ratio.clamp(min=floor, max=cap)
    outside = ratio.new_zeros(ratio.shape).bool()
    if floor is not None:
        outside = outside | (ratio < floor)
    if cap is not None:
        outside = outside | (ratio > cap)
    return ratio.masked_fill(outside, 0.0)


def token_mismatch(trainer_logp_S: Tensor, sampler_logp_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far the trainer is from the sampler, per token: `(k3_S, d_S, known_S)`, detached.

    d_S: `trainer - sampler`. k3_S: k3 estimate of KL(sampler || trainer), `exp(d) - d - 1` (the sampler drew the tokens,
    so the ratio is trainer / sampler). Both 0 where known_S (bool) is False: NaN log-prob.
    """
    d_S = _log_ratio(trainer_logp_S, sampler_logp_S)
    return d_S.expm1() - d_S, d_S, ~sampler_logp_S.isnan()


def importance_metrics(ratio: Tensor, bound: Tensor, normaliser: Normaliser) -> Metrics:
    """`importance/ratio_mean`, `importance/ratio_max` (after the bounds, as in TRL) and the share of ratios that the
    bounds changed, of tokens or of sequences, as the mode's level is. The largest of none is 0: weights are positive.
    Fully masked sequences count as 0 in the means (TRL counts them as ratio 1)."""
    return {
        "importance/ratio_mean": MetricSum(bound.sum(), normaliser),
        "importance/ratio_max": MetricSum(_largest(bound), Normaliser.NONE),
        "importance/bounded_mean": MetricSum((bound != ratio).to(ratio.dtype).sum(), normaliser),
    }


def mismatch_metrics(trainer_logp_S: Tensor, sampler_logp_S: Tensor) -> Metrics:
    """`mismatch_kl/mean` (k3), `mismatch/abs_mean`, `mismatch/abs_max` in nats, `mismatch/ratio_max` (trainer / sampler)
    and `mismatch/unknown_tokens`.

    The means divide by all tokens, so tokens without a sampler log-prob pull them towards 0; their number is reported
    beside them (TRL leaves such tokens out of the denominator, which a sum over a split step cannot know in advance).
    """
    k3_S, d_S, known_S = token_mismatch(trainer_logp_S, sampler_logp_S)
    abs_S = d_S.abs()
    return {
        "mismatch_kl/mean": MetricSum(k3_S.sum(), Normaliser.TOKENS),
        "mismatch/abs_mean": MetricSum(abs_S.sum(), Normaliser.TOKENS),
        "mismatch/abs_max": MetricSum(_largest(abs_S), Normaliser.NONE),
        "mismatch/ratio_max": MetricSum(_largest(d_S.exp()), Normaliser.NONE),
        "mismatch/unknown_tokens": MetricSum((~known_S).to(abs_S.dtype).sum(), Normaliser.NONE),
    }


def _log_ratio(numerator_S: Tensor, sampler_logp_S: Tensor) -> Tensor:
    """[S] detached `numerator - sampler`, 0 where the sampler's is NaN."""
    difference_S = (numerator_S - sampler_logp_S).detach()
    return difference_S.masked_fill(sampler_logp_S.isnan(), 0.0)


def _largest(value_S: Tensor) -> Tensor:
    return value_S.max() if value_S.numel() else value_S.new_zeros(())
