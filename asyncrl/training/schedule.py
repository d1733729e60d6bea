"""The learning rate as a function of the number of optimizer steps done."""

from __future__ import annotations

import math

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError


class Schedule:
    """Linear warm-up, then constant, linear or cosine towards `min_lr_ratio`, which comes right behind the last step.

        lr(k) = peak * k / warmup, then peak * decay((k - warmup) / (total - warmup))      k = 0, 1, ..., total - 1

    decay(x) = 1, 1 - (1 - r) x, or r + (1 - r) (1 + cos(pi x)) / 2 (Loshchilov and Hutter, arXiv:1608.03983, eq. 5), with
    x clamped to [0, 1] and r = `min_lr_ratio`. These are the rates of `transformers.get_scheduler`, whose warm-up begins at 0.
    """

    def __init__(self, config: TrainConfig, total_steps: int | None = None) -> None:
        """`total_steps`: optimizer steps of the run. Errors: ConfigError where the schedule needs it and it is None."""
        if config.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"train.schedule is {config.schedule}, which ends at the last step: set train.max_steps, or use constant"
            )
        self.config = config
        self.total_steps = total_steps

    def lr(self, steps_done: int) -> float:
        """Learning rate of the optimizer step that follows after `steps_done` of them."""
        config = self.config
        warmup = config.warmup_steps
        if steps_done < warmup:
            return config.lr * steps_done / warmup
        if config.schedule == "constant":
            return config.lr
        assert self.total_steps is not None
        x = min((steps_done - warmup) / max(self.total_steps - warmup, 1), 1.0)
        share = x if config.schedule == "linear" else (1 - math.cos(math.pi * x)) / 2
        return config.lr * (1 - (1 - config.min_lr_ratio) * share)
