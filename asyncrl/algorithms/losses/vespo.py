"""The loss `vespo`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from asyncrl.types import Normaliser

from ..base import LossInputs, MetricSum
from ..importance import IMPORTANCE_MODES
from ..method import Conflict, setting
from ..ratios import token_ratio
from .loss import LossMethod, Surrogate

FLOOR, CEILING = math.log(1e-8), 20.0


@dataclass(frozen=True)
class Vespo(LossMethod):
    """Variational sequence-level soft policy optimization: a gamma-shaped weight of the whole sequence's ratio.

    Paper: "VESPO" (arXiv:2602.10693), as TRL has it.
    Formula: `sum_t -phi_b A_t logp_t`, `phi_b = exp(lambda + k log w_b - lambda w_b)`, detached. The importance weights
    of the tokens are part of w, not a factor of the loss; only modes of the token level make sense.
    Normaliser: TOKENS. Streams, as long as no sequence is cut in two.
    `log w_b = sum_t log r_t + sum_t log(importance_t)`: the whole way from sampler to policy. Each log-ratio is held within
    +-20, each log-weight and the sum within [log 1e-8, 20]; (k, lambda) is (k_pos, lambda_pos) where A >= 0, else (k_neg,
    lambda_neg). A phi that is not finite is 0, as in TRL, but for a NaN of the trainer itself, which reaches the loss through
    logp. phi = 1 at w = 1.
    """

    name: ClassVar[str] = "vespo"
    normaliser: ClassVar[Normaliser] = Normaliser.TOKENS
    takes_weights: ClassVar[bool] = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "algorithm.importance.mode",
            "which adds up the weights of a sequence's tokens itself; use a token mode",
            when=lambda around: (
                IMPORTANCE_MODES[around.at("algorithm.importance.mode")].level != "token"
                and around.at("algorithm.old_logprobs") != "sampler"
            ),
        ),
    )
    k_pos: float = setting(2.0, "Exponent k where the advantage is >= 0.", gt=0)
    lambda_pos: float = setting(3.0, "Decay lambda where the advantage is >= 0.", gt=0)
    k_neg: float = setting(3.0, "Exponent k where the advantage is negative.", gt=0)
    lambda_neg: float = setting(2.0, "Decay lambda where the advantage is negative.", gt=0)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """phi is computed from logarithms and without gradient, bounded on both sides; where it is not finite it counts 0."""
        import torch

        ratio_S = token_ratio(inputs)
        with torch.no_grad():
            log_w_S = ratio_S.log().clamp(-CEILING, CEILING)
            if inputs.importance_S is not None:
                log_w_S = log_w_S + inputs.importance_S.log().clamp(FLOOR, CEILING)
            log_w_B = inputs.sequence_sum(log_w_S).clamp(FLOOR, CEILING)
            log_w_S = inputs.spread(log_w_B)
            good_S = inputs.advantage_S >= 0
            k_S = torch.where(good_S, log_w_S.new_tensor(self.k_pos), log_w_S.new_tensor(self.k_neg))
            lambda_S = torch.where(good_S, log_w_S.new_tensor(self.lambda_pos), log_w_S.new_tensor(self.lambda_neg))
            phi_S = (lambda_S + k_S * log_w_S - lambda_S * log_w_S.exp()).exp()
            phi_S = phi_S.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        metrics = {"vespo/phi_mean": MetricSum(inputs.sequence_mean(phi_S).sum(), Normaliser.SEQUENCES)}
        return Surrogate(-phi_S * inputs.advantage_S * inputs.logp_S, ratio_S, metrics)
