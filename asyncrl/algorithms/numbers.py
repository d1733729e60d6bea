"""The numbers of a loss: what the configuration's `algorithm` section says, under the same names. No torch.

Which method reads which number is said in the method's docstring; `check_numbers` refuses what no formula allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Numbers:
    """Ratios and weights are plain numbers, log-probs and entropies are in nats. None switches a bound off."""

    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon
    delta: float | None = None
    dual_clip: float | None = None
    cispo_low: float = 0.0
    cispo_high: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    positive_scale: float = 1.0
    negative_scale: float = 1.0
    importance_mode: str = "token_truncate"
    importance_cap: float | None = 2.0
    importance_floor: float | None = None
    importance_veto: float | None = None
    importance_log_clamp: float | None = None
    off_policy_mask_threshold: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    kl_clamp: float | None = None
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    entropy_target: float | None = None  # set: the coefficient is controlled, and begins at entropy_coef
    entropy_coef_delta: float = 0.005
    top_entropy_quantile: float = 1.0
    old_logprobs: str = "recompute"
    force_on_policy: bool = False

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_bonus(self) -> bool:
        """Whether there is an entropy bonus, in some step."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def corrects(self) -> bool:
        """Whether an importance weight against the sampler is applied at all."""
        bounds = (self.importance_cap, self.importance_floor, self.importance_veto)
        return any(bound is not None for bound in bounds)


NAMES: tuple[str, ...] = tuple(number.name for number in fields(Numbers))
_MAY_BE_ZERO = {"cispo_low", "positive_scale", "negative_scale", "kl_coef", "entropy_coef"}


def check_numbers(numbers: Numbers) -> None:
    """Errors: ConfigError for a number outside its range; the message names it."""
    for name in NAMES:
        value = getattr(numbers, name)
        if isinstance(value, str | bool) or value is None:
            continue
        if name in _MAY_BE_ZERO:
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}; it must be a finite number >= 0")
        elif not value > 0:
            optional = Numbers.__dataclass_fields__[name].type.endswith("None")
            raise ConfigError(f"{name} is {value}; it must be above 0" + (", or null" if optional else ""))
    if numbers.top_entropy_quantile > 1:
        raise ConfigError(f"top_entropy_quantile is {numbers.top_entropy_quantile}; it must be in (0, 1]")
    if numbers.old_logprobs not in ("recompute", "sampler"):
        raise ConfigError(f"old_logprobs is {numbers.old_logprobs!r}; it must be 'recompute' or 'sampler'")
    if numbers.kl_in not in ("loss", "reward"):
        raise ConfigError(f"kl_in is {numbers.kl_in!r}; it must be 'loss' or 'reward'")
