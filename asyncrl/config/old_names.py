"""Other spellings of our own settings, which go on working: short ones, and those of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError

from .methods import SETTINGS

# Spelling -> dotted name. A method's setting may be written without its section: `algorithm.kl_coef`.
SPELLINGS: Mapping[str, str] = {
    **{f"algorithm.{each.flat}": dotted for dotted, each in SETTINGS.items()},
    "reward.overlong_cache": "reward.overlong.cache",
    "reward.overlong_weight": "reward.overlong.weight",
    "rollout.prefetch_depth": "rollout.max_staleness",
    "rollout.dynamic_sampling": "rollout.filter.dynamic_sampling",
    "rollout.min_mean_reward": "rollout.filter.min_mean_reward",
    "rollout.max_mean_reward": "rollout.filter.max_mean_reward",
    "rollout.filter_by": "rollout.filter.by",
    "rollout.max_refills": "rollout.filter.max_refills",
}
_NULL_IS_NOTHING = ("rollout.max_staleness",)  # null under one of its names leaves it to the other


def full_name(name: str) -> str:
    """The dotted name that a spelling stands for; any other name as it is."""
    return SPELLINGS.get(name, name)


def respelled(tree: Any) -> Any:
    """The tree of a configuration with every setting under its dotted name. Errors: ConfigError for one given twice."""
    if not isinstance(tree, Mapping):
        return tree
    found: dict[Any, Any] = dict(tree)
    for spelling, name in SPELLINGS.items():
        section, _, key = spelling.partition(".")
        branch = found.get(section)
        if not isinstance(branch, Mapping) or key not in branch:
            continue
        branch = found[section] = dict(branch)
        value = branch.pop(key)
        if value is None and name in _NULL_IS_NOTHING:
            continue
        *parents, last = name.split(".")[1:]
        for parent in parents:
            below = branch.get(parent)
            if below is not None and not isinstance(below, Mapping):
                break  # the check of types says what is wrong with it
            branch[parent] = dict(below or {})
            branch = branch[parent]
        else:
            if name in _NULL_IS_NOTHING and branch.get(last) is None:
                branch[last] = value
            if branch.get(last, value) != value:
                raise ConfigError(given_twice(spelling, value, name, branch[last]))
            branch[last] = value
    return found


def given_twice(spelling: str, value: Any, name: str, other: Any) -> str:
    """The complaint about a setting that was given under two of its names."""
    return f"{spelling} is {value} and {name} is {other}: they are two names of one setting; give one of them"
