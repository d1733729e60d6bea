"""Sections that a choice turns on. What they say while they are off would do nothing, so it is refused.

The sections of the algorithm's methods are checked beside these (`check_losses.py`); both are what `own_to_a_method` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .fields import get, knobs
from .methods import SETTINGS
from .schema import Config


@dataclass(frozen=True, slots=True)
class Switched:
    """A section that is read only where `on` says so; `switches` are the settings of it that may be given at any time."""

    on: Callable[[Config], bool]
    off: str  # why it is not read, and the way out
    switches: tuple[str, ...] = ()
    programs: bool = False  # a program that embeds the run may read it without that choice


SWITCHED: Mapping[str, Switched] = {
    "model.lora": Switched(
        lambda config: config.model.lora.rank > 0,
        "model.lora.rank is 0: there are no adapters; set it",
        ("rank",),
    ),
    "reward.overlong": Switched(
        lambda config: config.reward.overlong.cache is not None,
        "reward.overlong.cache is not set: there is no such component; set it",
        ("cache",),
    ),
    "rollout.filter": Switched(
        lambda config: (
            config.rollout.filter.dynamic_sampling
            or config.rollout.filter.min_mean_reward is not None
            or config.rollout.filter.max_mean_reward is not None
        ),
        "no filter is on; set rollout.filter.dynamic_sampling, min_mean_reward or max_mean_reward",
        ("dynamic_sampling", "min_mean_reward", "max_mean_reward"),
    ),
    "door": Switched(
        lambda config: config.door.ring is not None,
        "door.ring is not set; name the ring that it is about",
        ("ring",),
        programs=True,  # `runtime.door.serve` with a ring of the program's own
    ),
    "replay": Switched(
        lambda config: config.replay.size > 0, "replay.size is 0: nothing is played again; set it", ("size",)
    ),
    "reroll": Switched(
        lambda config: config.reroll.start_fraction < 1,
        "reroll.start_fraction is 1: no prompt is played again; set it",
        ("start_fraction",),
    ),
    "telemetry.profile": Switched(
        lambda config: getattr(config.telemetry.profile, "from") is not None,
        "telemetry.profile.from is not set: there is no profile; set it",
        ("from",),
    ),
    "generation": Switched(
        lambda config: config.generation.placement != "shared",
        "generation.placement is shared: there are no workers; set it to worker",
        ("placement",),
    ),
    "dry_run": Switched(
        lambda config: "dry_run" in (config.engine.kind, config.train.kind),
        "neither engine.kind nor train.kind is dry_run; set them",
    ),
}


def own_to_a_method(name: str) -> bool:
    """Whether a setting belongs to a method, so that who has not chosen that method need not know of it."""
    return name in SETTINGS or name.rpartition(".")[0] in SWITCHED


def check_unread(config: Config, embedding: bool) -> Iterator[str]:
    """A complaint for each setting that was given in a section which is off. `embedding`: a program of the user's runs this
    configuration, and may read some of those sections itself."""
    for name, knob in knobs().items():
        section, _, key = name.rpartition(".")
        switched = SWITCHED.get(section)
        if switched is None or key in switched.switches or switched.on(config) or (embedding and switched.programs):
            continue
        value: Any = get(config, name)
        if value != knob.default:
            said = str(value).lower() if isinstance(value, bool) else value
            yield f"{name} is {said} but {switched.off}, or leave it out"
