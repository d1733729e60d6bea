"""The learning rate as a function of the number of optimizer steps done."""

from __future__ import annotations

import math

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError


class Schedule:
    """Linear warm-up from 0, then constant, or linear or cosine decay to `min_lr_ratio` * peak. k steps are done, 0 <= k < total.

        k < warmup: lr(k) = peak * k / warmup      else: lr(k) = peak * decay((k - warmup) / (total - warmup))

    decay(x) is 1, 1 - (1 - r) x, or r + (1 - r) (1 + cos(pi x)) / 2 (Loshchilov and Hutter, arXiv:1608.03983, eq. 5), with x
    clamped to [0, 1] and r = `min_lr_ratio`. With r = 0 the rates equal those of `transformers.get_scheduler`.
    """

    def __init__(self, config: TrainConfig, total_steps: int | None = None) -> None:
        """`total_steps`: optimizer steps of the run. Errors: ConfigError if None is given and the schedule is not constant."""
        if config.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"train.schedule is {config.schedule}, which needs the last step; set train.max_steps, or train.max_epochs if the "
                "run has prompts, or use constant"
            )
        self.config = config
        self.total_steps = total_steps

    def lr(self, steps_done: int) -> float:
        """The learning rate of the next optimizer step, after `steps_done` steps."""
        config = self.config
        warmup = config.warmup_steps
        if steps_done < warmup:
            return config.lr * steps_done / warmup
        if config.schedule == "constant":
            return config.lr
        assert self.total_steps is not None
        x = min((steps_done - warmup) / max(self.total_steps - warmup, 1), 1.0)
        decayed = x if config.schedule == "linear" else (1 - math.cos(math.pi * x)) / 2
        return config.lr * (1 - (1 - config.min_lr_ratio) * decayed)
