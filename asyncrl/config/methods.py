"""Makes sections of the configuration from the methods of `algorithms/`: losses, advantages and terms. Does not import torch.

Fields, bounds and help texts come from the settings that each method declares (`algorithms/method.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import ValidationError, create_model

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages import Estimator, of_group
from asyncrl.algorithms.losses import LossMethod
from asyncrl.algorithms.method import Method, Setting
from asyncrl.errors import ConfigError

from .imports import load_object
from .section import SettingsSection, field

# Dotted name -> setting, for the built-in methods.
SETTINGS: Mapping[str, Setting] = {setting.dotted: setting for setting in registry.settings().values()}


def make_sections(settings: Iterable[Setting]) -> dict[str, type[SettingsSection]]:
    """Name -> class of the section, for every section that `settings` name."""
    by_section: dict[str, dict[str, Any]] = {}
    for setting in settings:
        annotation = Literal[setting.choices] if setting.choices else setting.annotation
        fields = by_section.setdefault(setting.section, {})
        fields[setting.name] = annotation, field(setting.default, setting.text, **setting.bounds)
    sections = {}
    for section, fields in by_section.items():
        name = section.title().replace("_", "") + "Config"
        sections[section] = create_model(name, __base__=SettingsSection, __module__=__name__, **fields)
    return sections


# Name -> class, for every section of methods under `algorithm`.
SECTIONS: Mapping[str, type[SettingsSection]] = make_sections(SETTINGS.values())
# pickle finds a class by its name in this module.
globals().update({section.__name__: section for section in SECTIONS.values()})


def load_method(kind: str, address: str, reserved: Collection[str] = ()) -> type[Method] | None:
    """Loads and registers a loss or advantage of the user under its address. `kind`: "loss" or "advantage". Returns the class that
    declares its settings, or None. `reserved`: names that the section of these settings must not have. Errors: ConfigError."""

    def error_of(text: str) -> ConfigError:
        return ConfigError(f"algorithm.{kind} is {address!r}, {text}")

    try:
        loaded = load_object(address)
    except ConfigError as error:
        raise ConfigError(f"algorithm.{kind}: {error}") from error
    method: type[Method] | None
    if kind == "loss":
        if not isinstance(loaded, type) or not issubclass(loaded, LossMethod):
            raise error_of("which is no class derived from asyncrl.LossMethod")
        if not loaded.name or not hasattr(loaded, "normaliser") or loaded.surrogate is LossMethod.surrogate:
            raise error_of("which must have `name`, `normaliser` and `surrogate`; see asyncrl.LossMethod")
        method = loaded
    else:
        loaded = of_group()(loaded) if inspect.isfunction(loaded) else loaded
        if not isinstance(loaded, Estimator):
            raise error_of("which is no advantage function; decorate a function with asyncrl.of_group() or .of_step()")
        method = loaded.settings
    try:
        declared = method.settings() if method is not None else ()
        for section in make_sections(declared).values():
            # pydantic checks no default by itself.
            section(**{setting.name: setting.default for setting in declared})
    except ValidationError as error:
        first = error.errors()[0]
        raise error_of(f"whose setting {first['loc'][0]} has the default {first['input']!r}: {first['msg']}") from error
    except (TypeError, NameError) as error:
        raise error_of(f"whose settings cannot be read: {error}") from error
    # A loss of the user may use the section of a built-in loss.
    usable = {loss.section for loss in registry.LOSSES.values()} if kind == "loss" else set()
    taken = {*reserved, *SECTIONS} - usable
    taken_flat_names = {setting.flat for setting in SETTINGS.values() if setting.section in taken}
    clashes = bool(taken_flat_names & {setting.flat for setting in declared})
    if method is not None and not method.section.isidentifier():
        raise error_of(f"whose `name` gives its settings the section {method.section!r}; use letters, digits and _")
    if method is not None and (clashes or method.section in taken):
        raise error_of(f"whose settings would be algorithm.{method.section}.*, which are taken; give it another `name`")
    registry.OWN[kind, address] = loaded
    return method


def settings_of(algorithm: Any) -> Mapping[str, Setting]:
    """Dotted name -> setting, for all built-in methods and for the chosen methods of the user."""
    chosen = (registry.loss_named(algorithm.loss), registry.advantage_named(algorithm.advantage).settings)
    return {**SETTINGS, **{setting.dotted: setting for method in chosen if method for setting in method.settings()}}


def flat_values(algorithm: Any) -> dict[str, Any]:
    """The values of all settings of methods, and of `registry.CLIP_CENTRE_SETTINGS`, under flat names: arguments of `build_loss`
    and `build_advantage`."""
    settings = settings_of(algorithm).values()
    values = {setting.flat: getattr(getattr(algorithm, setting.section), setting.name) for setting in settings}
    return values | {name: getattr(algorithm, name) for name in registry.CLIP_CENTRE_SETTINGS}


def about(section: str) -> str:
    """The line of `--help` about a section that methods declare. Empty for any other section."""
    losses = [name for name, loss in registry.LOSSES.items() if loss.section == section and loss.settings()]
    if losses:
        return f"settings of loss {', '.join(losses)}; refused with another loss"
    for name, estimator in registry.ADVANTAGES.items():
        if estimator.settings is not None and estimator.settings.section == section:
            return f"settings of advantage {name}; refused with another advantage"
    texts = [term.__doc__ or "" for term in registry.TERMS if term.section == section]
    return " ".join(texts[0].split()).rstrip(".") if texts else ""


def unread_sections(algorithm: Any) -> list[str]:
    """The sections of the losses and advantages that are not chosen."""
    losses = {loss.section for loss in registry.LOSSES.values()} - {registry.loss_named(algorithm.loss).section}
    estimators = (estimator for name, estimator in registry.ADVANTAGES.items() if name != algorithm.advantage)
    advantages = {estimator.settings.section for estimator in estimators if estimator.settings is not None}
    return [section for section in SECTIONS if section in losses | advantages]
