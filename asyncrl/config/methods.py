"""The methods of `algorithms/` as sections of the configuration, and which sections a choice turns on. No torch.

Nothing about a single method stands here: what it declares (`algorithms/method.py`) becomes fields, sentences and bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import create_model

from asyncrl.algorithms import registry
from asyncrl.algorithms.method import Setting

from .section import Section, field

SETTINGS: Mapping[str, Setting] = {each.dotted: each for each in registry.settings().values()}
CENTRE = ("old_logprobs", "force_on_policy")


def names(of: Mapping[str, Any]) -> Any:
    """The type of a setting that names a method."""
    return Literal[tuple(of)]


@cache
def sections() -> Mapping[str, type[Section]]:
    """Every section of methods under `algorithm`, by its name."""
    by_section: dict[str, dict[str, Any]] = {}
    for each in SETTINGS.values():
        annotation = Literal[each.choices] if each.choices else each.annotation
        by_section.setdefault(each.section, {})[each.name] = (
            annotation,
            field(each.default, each.text, **each.bounds),
        )
    made = {}
    for section, found in by_section.items():
        name = "".join(map(str.capitalize, section.split("_"))) + "Config"
        made[section] = globals()[name] = create_model(name, __base__=Section, __module__=__name__, **found)
    return made  # in the module's names too, where pickle looks for them


def numbers(algorithm: Any) -> dict[str, Any]:
    """The whole section `algorithm` (its class is made of what stands here) under flat names, as `build_loss` and
    `build_advantage` take it."""
    found = {each.flat: getattr(getattr(algorithm, each.section), each.name) for each in SETTINGS.values()}
    return found | {name: getattr(algorithm, name) for name in CENTRE}


def about(section: str) -> str:
    """What a section of methods belongs to, for `--help`; empty for any other name."""
    losses = [name for name, loss in registry.LOSSES.items() if loss.section == section and loss.settings()]
    if losses:
        return f"settings of loss {', '.join(losses)}; refused with another"
    for name, each in registry.ADVANTAGES.items():
        if each.settings is not None and each.settings.section == section:
            return f"settings of advantage {name}; refused with another"
    said = [term.__doc__ or "" for term in registry.TERMS if term.section == section]
    return " ".join(said[0].split()).rstrip(".") if said else ""


def unread(algorithm: Any) -> list[str]:
    """The sections of losses and advantages that are not chosen."""
    losses = {loss.section for loss in registry.LOSSES.values()} - {registry.LOSSES[algorithm.loss].section}
    own = {name: each.settings.section for name, each in registry.ADVANTAGES.items() if each.settings is not None}
    others = {section for name, section in own.items() if name != algorithm.advantage}
    return [section for section in sections() if section in losses | others]
