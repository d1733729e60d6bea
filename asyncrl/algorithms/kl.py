"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With `d = ref - logp`:

    k1 = -d                unbiased, high variance, may be negative
    k2 = d^2 / 2           biased, low variance, >= 0; `mse` in verl
    k3 = exp(d) - d - 1    unbiased, low variance, >= 0
    abs = |d|              a distance, no estimate of the divergence

Unbiased says something about the *value*. As a loss term its gradient is another matter: the gradient of k1 has mean 0
(it is the bare score function), that of k2 is the gradient of the KL, that of k3 is the gradient of KL(reference ||
policy) where the tokens are on-policy. Multiplied by the surrogate's ratio, with its gradient (`use_bias_correction_kl`:
DeepSeek-V3.2, arXiv:2512.02556; on by default in TRL, off here), the gradient of k1 and of k3 is that of the KL.

In the reward (`kl_in: reward`) the estimate carries no gradient: each sequence's reward is lowered by
`kl_coef x sum_t kl_t` before advantages are taken (Ouyang et al., arXiv:2203.02155; TRL's RLOOTrainer, with k1).

Shape legend: S scored tokens. Both arguments `[S]`, one floating dtype, in nats; the result `[S]`, differentiable in
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.types import Float32Array, Group, Microbatch

KLFn = Callable[[Tensor, Tensor], Tensor]

LOG_CLAMP = 20.0  # nats, where `kl_clamp` is set


def k1(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`logp - ref`."""
    return logp_S - reference_logp_S


def k2(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`(logp - ref)^2 / 2`."""
    return (logp_S - reference_logp_S).square() / 2


def k3(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`: the KL term of GRPO (DeepSeekMath, arXiv:2402.03300, eq. 4), and TRL's.

    `expm1` instead of `exp(.) - 1`: the two log-probs are nearly equal most of the time, and float32 `exp(d) - d - 1`
    is then mostly rounding error, and often negative.
    """
    d_S = reference_logp_S - logp_S
    return torch.expm1(d_S) - d_S


def absolute(logp_S: Tensor, reference_logp_S: Tensor) -> Tensor:
    """`|logp - ref|`."""
    return (logp_S - reference_logp_S).abs()


KL_ESTIMATORS: Mapping[str, KLFn] = {"k1": k1, "k2": k2, "k3": k3, "mse": k2, "abs": absolute}


def estimate(name: str, logp_S: Tensor, reference_logp_S: Tensor, clamp: float | None = None) -> Tensor:
    """[S]: the named estimator; with `clamp`, of log-ratios within +-20 nats, and the value within +-clamp.

    NeMo and verl clamp at 10 and 20: one token of a far-away policy cannot outweigh a batch. The gradient outside is 0.
    """
    fn = KL_ESTIMATORS[name]
    if clamp is None:
        return fn(logp_S, reference_logp_S)
    near_S = logp_S - (logp_S - reference_logp_S).clamp(-LOG_CLAMP, LOG_CLAMP)
    return fn(logp_S, near_S).clamp(-clamp, clamp)


@dataclass(frozen=True, slots=True)
class RewardPenalty:
    """`kl_in: reward`: what the KL to the reference takes off the reward of each sequence."""

    coefficient: float
    estimator: str
    clamp: float | None = None

    def __call__(self, batch: Microbatch, reference_logp_S: Float32Array) -> tuple[dict[tuple[int, int], float], float]:
        """`({(group id, member): coefficient x sum_t kl_t}, sum of kl_t over the microbatch)`, float64.

        The policy is the one that sampled: the sampler's own log-probs, whatever version they are of. A token for which
        the sampler reported none (NaN) adds nothing. (TRL takes the trainer's log-probs before the update.)
        """
        sampler_S = torch.from_numpy(batch.sampler_logprobs).double()
        kl_S = estimate(self.estimator, sampler_S, torch.from_numpy(reference_logp_S).double(), self.clamp)
        values_S: npt.NDArray[np.float64] = torch.where(sampler_S.isnan(), 0.0, kl_S).numpy()
        sums_B = np.bincount(batch.sequence, weights=values_S, minlength=batch.sequences) * self.coefficient
        keys = zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)
        return dict(zip(keys, sums_B.tolist(), strict=True)), float(values_S.sum())


def lowered(group: Group, penalties: Mapping[tuple[int, int], float]) -> Group:
    """The group with its members' penalties taken off their rewards; what is unscorable stays so."""
    less = (
        t if t.reward is None else replace(t, reward=t.reward - penalties.get((t.group_id, t.member), 0.0))
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(less))
