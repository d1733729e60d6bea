"""What the reward models of `reward.model` do not go with. Every complaint names the value, the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from .schema import Config


def check_rewards(config: Config) -> Iterator[str]:
    """Whether a path holds a classifier with one output is known when it is loaded (models/reward_model.py)."""
    if config.reward.model and config.train.kind == "dry_run":
        yield (
            f"reward.model is {config.reward.model[0].path} but train.kind is dry_run, which has no device to score on; leave "
            "it out, or set train.kind=torch"
        )
