"""Estimators of KL(policy || reference) per token, for tokens that the policy sampled.

Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With `d = ref - logp`:

    k1 = -d                unbiased, high variance, may be negative
    k2 = d^2 / 2           biased, low variance, >= 0; `mse` in verl
    k3 = exp(d) - d - 1    unbiased, low variance, >= 0; in GRPO (DeepSeekMath, arXiv:2402.03300, eq. 4) and in TRL
    abs = |d|              a distance, no estimate of the divergence

An unbiased *value* does not mean an unbiased gradient. For on-policy tokens the mean gradient of k1 is 0. The mean gradient of k2
is the gradient of the KL, and the mean gradient of k3 is the gradient of KL(reference || policy). With `bias_correction` the
estimate is multiplied by the differentiable ratio of the surrogate (DeepSeek-V3.2, arXiv:2512.02556; the default of TRL). Then the
mean gradients of k1 and k3 are the gradient of the KL.

With `place: reward` the estimate has no gradient. The reward of each sequence is reduced by `coef x sum_t kl_t` before advantages
are computed (Ouyang et al., arXiv:2203.02155; TRL's RLOOTrainer, with k1).

Shape legend: S scored tokens, B sequences. Log-probs are in nats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from asyncrl.types import Float32Array, Group, Microbatch, Normaliser

from .base import LossInputs, Metrics, MetricSum
from .method import CheckContext, Method, setting

if TYPE_CHECKING:
    from torch import Tensor

LOG_CLAMP = 20.0  # bound of |d| (nats), if `Kl.clamp` is set


# Functions of d_S = ref - logp.
KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d_S: -d_S,
    "k2": lambda d_S: d_S.square() / 2,
    # For nearly equal log-probs, `exp(d) - d - 1` in float32 would be mostly rounding error, and often negative.
    "k3": lambda d_S: d_S.expm1() - d_S,
    "mse": lambda d_S: d_S.square() / 2,
    "abs": lambda d_S: d_S.abs(),
}


def estimate(
    name: str, logp_S: Tensor, reference_logp_S: Tensor, clamp: float | None = None, weight_S: Tensor | None = None
) -> Tensor:
    """The estimate [S] times `weight_S` (None: 1), differentiable. With `clamp`, `d` is clamped to +-20 nats, and the product to
    +-clamp, so that a single token cannot outweigh a batch (NeMo and verl: clamp 10). The gradient of a clamped value is 0."""
    d_S = reference_logp_S - logp_S
    value_S = KL_ESTIMATORS[name](d_S if clamp is None else d_S.clamp(-LOG_CLAMP, LOG_CLAMP))
    if weight_S is not None:
        value_S = value_S * weight_S
    return value_S if clamp is None else value_S.clamp(-clamp, clamp)


@dataclass(frozen=True)
class Kl(Method):
    """The KL to the reference model (the weights at the start), as a term of the loss or as a penalty on rewards."""

    section: ClassVar[str] = "kl"
    switches: ClassVar[tuple[str, ...]] = ("coef",)
    off: ClassVar[str] = "algorithm.kl.coef is 0, so there is no KL; set algorithm.kl.coef"
    formula: ClassVar[Any] = sys.modules[__name__]
    coef: float = setting(0.0, "Coefficient of the KL to the reference model (the weights at start).", ge=0)
    estimator: str = setting("k3", "Estimator of the KL per token; mse is k2.", choices=KL_ESTIMATORS, fixed=True)
    place: str = setting(
        "loss",
        "Whether the KL is a term of the loss, or is subtracted from rewards before advantages are computed.",
        choices=("loss", "reward"),
        flat="kl_in",
        fixed=True,
    )
    clamp: float | None = setting(
        None,
        "Bound of the KL per token, after `bias_correction` (NeMo, verl: 10). Also clamps log-ratios to +-20 nats. null: neither.",
        gt=0,
    )
    bias_correction: bool = setting(
        False,
        "Multiply the KL term by the ratio of the loss. With this factor the mean gradients of k1 and k3 are the KL's gradient.",
        flat="use_bias_correction_kl",
        fixed=True,
    )

    @property
    def on(self) -> bool:
        """Whether the run has a KL, in the loss or in the reward. Then the run needs the reference's log-probs."""
        return self.coef > 0

    @property
    def in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.on and self.place == "loss"

    def term(self, inputs: LossInputs, ratio_S: Tensor, metrics: Metrics) -> Tensor:
        """`coef x kl_t` [S], times `ratio_S` with `bias_correction`. Adds the metric `kl` to `metrics`."""
        if inputs.reference_logp_S is None:
            raise ValueError(
                f"algorithm.kl.coef is {self.coef}, but `reference_logp_S` of the microbatch is None; compute it first"
            )
        weight_S = ratio_S if self.bias_correction else None
        kl_S = estimate(self.estimator, inputs.logp_S, inputs.reference_logp_S.detach(), self.clamp, weight_S)
        metrics["kl"] = MetricSum(kl_S.detach().sum(), Normaliser.TOKENS)
        return self.coef * kl_S

    def penalties(
        self, batch: Microbatch, reference_logp_S: Float32Array
    ) -> tuple[dict[tuple[int, int], float], float]:
        """The penalty on the reward of each sequence, for `place: reward`: `({(group id, member): coef x sum_t kl_t}, sum of kl_t
        over the microbatch)`, computed in float64.

        The KL is computed from the sampler's log-probs, even of tokens that an older version sampled. A token without a sampler
        log-prob (NaN) has a KL of 0. (TRL uses the trainer's log-probs before the update.)
        """
        import torch

        sampler_S = torch.from_numpy(batch.sampler_logprobs).double()
        kl_S = estimate(self.estimator, sampler_S, torch.from_numpy(reference_logp_S).double(), self.clamp)
        values_S: npt.NDArray[np.float64] = torch.where(sampler_S.isnan(), 0.0, kl_S).numpy()
        sums_B = np.bincount(batch.sequence, weights=values_S, minlength=batch.sequences) * self.coef
        keys = zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)
        return dict(zip(keys, sums_B.tolist(), strict=True)), float(values_S.sum())

    def problems(self, context: CheckContext) -> Iterator[str]:
        if self.place == "reward" and self.bias_correction:
            yield (
                "algorithm.kl.bias_correction is true but algorithm.kl.place is reward: a penalty on the reward has no gradient "
                "to correct; leave bias_correction out or set kl.place=loss"
            )

    def warnings(self, context: CheckContext) -> Iterator[str]:
        if self.in_loss and self.estimator == "k1" and not self.bias_correction:
            yield (
                "algorithm.kl.estimator=k1 in the loss: the mean gradient of k1 is 0, so k1 only adds noise; use k2, k3, "
                "kl.bias_correction=true, or kl.place=reward"
            )


def subtract_penalties(group: Group, penalties: Mapping[tuple[int, int], float]) -> Group:
    """The group with rewards minus penalties. `penalties`: (group id, member) -> penalty. A reward of None stays None."""
    trajectories = (
        t if t.reward is None else replace(t, reward=t.reward - penalties.get((t.group_id, t.member), 0.0))
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))
