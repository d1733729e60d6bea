"""Makes configuration sections from the methods of `algorithms/`, and says which sections the chosen methods read. No torch.

The code is the same for all methods: the settings that a method declares (`algorithms/method.py`) become fields, help and bounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import create_model

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages import Estimator, of_group
from asyncrl.algorithms.losses import LossMethod
from asyncrl.algorithms.method import Method, Setting
from asyncrl.errors import ConfigError

from .imports import load_object
from .section import SettingsSection, field

SETTINGS: Mapping[str, Setting] = {each.dotted: each for each in registry.settings().values()}
CENTRE = ("old_logprobs", "force_on_policy")


def made_of(settings: Iterable[Setting]) -> dict[str, type[SettingsSection]]:
    """Name -> section with these settings."""
    by_section: dict[str, dict[str, Any]] = {}
    for each in settings:
        annotation = Literal[each.choices] if each.choices else each.annotation
        by_section.setdefault(each.section, {})[each.name] = annotation, field(each.default, each.text, **each.bounds)
    return {
        section: create_model(
            section.title().replace("_", "") + "Config", __base__=SettingsSection, __module__=__name__, **found
        )
        for section, found in by_section.items()
    }


# Every section of methods under `algorithm`, by its name.
SECTIONS: Mapping[str, type[SettingsSection]] = made_of(SETTINGS.values())
# pickle finds a class by its name in this module.
globals().update({each.__name__: each for each in SECTIONS.values()})


def load_method(kind: str, address: str, reserved: Collection[str] = ()) -> type[Method] | None:
    """Register the user's `loss` or `advantage` under its address. Returns the class that declares its settings, or None.
    `reserved`: names that its section must not have. Errors: ConfigError."""

    def refused(text: str) -> ConfigError:
        return ConfigError(f"algorithm.{kind} is {address!r}, {text}")

    try:
        found = load_object(address)
    except ConfigError as error:
        raise ConfigError(f"algorithm.{kind}: {error}") from error
    method: type[Method] | None
    if kind == "loss":
        if not isinstance(found, type) or not issubclass(found, LossMethod):
            raise refused("which is no class derived from asyncrl.LossMethod")
        if not found.name or not hasattr(found, "normaliser") or found.surrogate is LossMethod.surrogate:
            raise refused("which must have `name`, `normaliser` and `surrogate`; see asyncrl.LossMethod")
        method = found
    else:
        found = of_group()(found) if inspect.isfunction(found) else found
        if not isinstance(found, Estimator):
            raise refused("which is no function of rewards; write one under asyncrl.of_group() or asyncrl.of_step()")
        method = found.settings
    try:
        declared = method.settings() if method is not None else ()
    except (TypeError, NameError) as error:
        raise refused(f"whose settings cannot be read: {error}") from error
    taken = {*reserved, *SECTIONS} - {loss.section for loss in registry.LOSSES.values()}
    flats = {each.flat for each in SETTINGS.values() if each.section in taken}
    section = method.section if method is not None else "own"
    if section in taken or not section.isidentifier() or flats & {each.flat for each in declared}:
        raise refused(f"whose settings would be algorithm.{section}.*, which are taken; give it another `name`")
    registry.OWN[kind, address] = found
    return method


def settings_of(algorithm: Any) -> Mapping[str, Setting]:
    """Dotted name -> setting, for all built-in methods and for the user's chosen ones."""
    chosen = (registry.loss_named(algorithm.loss), registry.advantage_named(algorithm.advantage).settings)
    return {**SETTINGS, **{each.dotted: each for method in chosen if method for each in method.settings()}}


def numbers(algorithm: Any) -> dict[str, Any]:
    """The values of the section `algorithm` under flat names: the arguments of `build_loss` and `build_advantage`."""
    known = settings_of(algorithm).values()
    found = {each.flat: getattr(getattr(algorithm, each.section), each.name) for each in known}
    return found | {name: getattr(algorithm, name) for name in CENTRE}


def about(section: str) -> str:
    """The line of `--help` about a section of methods; empty for any other section."""
    losses = [name for name, loss in registry.LOSSES.items() if loss.section == section and loss.settings()]
    if losses:
        return f"settings of loss {', '.join(losses)}; refused with another"
    for name, each in registry.ADVANTAGES.items():
        if each.settings is not None and each.settings.section == section:
            return f"settings of advantage {name}; refused with another"
    texts = [term.__doc__ or "" for term in registry.TERMS if term.section == section]
    return " ".join(texts[0].split()).rstrip(".") if texts else ""


def unread(algorithm: Any) -> list[str]:
    """The sections of losses and advantages that are not chosen."""
    losses = {loss.section for loss in registry.LOSSES.values()} - {registry.loss_named(algorithm.loss).section}
    own = {name: each.settings.section for name, each in registry.ADVANTAGES.items() if each.settings is not None}
    others = {section for name, section in own.items() if name != algorithm.advantage}
    return [section for section in SECTIONS if section in losses | others]
