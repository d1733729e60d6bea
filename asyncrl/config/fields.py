"""The schema as a flat table: every knob under its dotted name, with its type in words, its default and its sentence.

Loading, `--help`, the diff of two configurations and the nearest-name search all read this one table.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .schema import Config

_PLAIN_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class Knob:
    """One leaf of the configuration tree."""

    name: str  # dotted
    annotation: Any
    default: Any
    text: str  # the sentence under the field
    expected: str  # the type and the bounds in words

    @property
    def _members(self) -> tuple[Any, ...]:
        return tuple(_flat_union(self.annotation))

    @property
    def takes_text(self) -> bool:
        """A free string is a legal value (a Literal is not free)."""
        return str in self._members

    @property
    def takes_null(self) -> bool:
        return type(None) in self._members

    @property
    def takes_bool(self) -> bool:
        return bool in self._members

    @property
    def takes_list(self) -> bool:
        return any(get_origin(member) is tuple for member in self._members)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal, in order; empty for any other type."""
        return tuple(value for m in self._members if get_origin(m) is Literal for value in get_args(m))


@cache
def knobs() -> Mapping[str, Knob]:
    """Every leaf of `Config` by its dotted name, in the order of the schema."""
    return {knob.name: knob for knob in _walk(Config, "")}


@cache
def sections() -> Mapping[str, type[BaseModel]]:
    """Every section by its dotted name (`train`, `rollout`, ...)."""
    return {name: model for name, info in Config.model_fields.items() if (model := _section(info.annotation))}


def nearest_name(name: str) -> str | None:
    """The existing dotted name most like `name`, or None where nothing is similar.

    Compares the whole name and, slightly discounted, the last part alone: `lr` and `optim.lr` both find `train.lr`.
    """
    last = name.rpartition(".")[2]

    def score(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.95 * tail)

    best = max([*knobs(), *sections()], key=score)
    return best if score(best) >= 0.5 else None


def get(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def item_of(knob: Knob) -> type[BaseModel] | None:
    """The section of which a knob is a list; None for any other knob."""
    lists = [member for member in _flat_union(knob.annotation) if get_origin(member) is tuple]
    return _section(get_args(lists[0])[0]) if lists else None


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Knob]:
    for key, info in model.model_fields.items():
        if (section := _section(info.annotation)) is not None:
            yield from _walk(section, f"{prefix}{key}.")
        else:
            yield Knob(f"{prefix}{key}", info.annotation, info.default, info.description or "", expected(info))


def _flat_union(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _flat_union(member)
    else:
        yield annotation


def expected(info: FieldInfo) -> str:
    """The type and the bounds of a field in words."""
    bounds = [
        f"{sign} {getattr(mark, attribute)}"
        for mark in info.metadata
        for attribute, sign in _BOUNDS
        if getattr(mark, attribute, None) is not None
    ]
    words = [_in_words(member) for member in _flat_union(info.annotation)]
    if bounds:
        words[0] += " " + " and ".join(bounds)
    return " or ".join(words)


def _in_words(annotation: Any) -> str:
    if annotation in _PLAIN_NAMES:
        return _PLAIN_NAMES[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is dict:
        return "a mapping"
    if get_origin(annotation) is tuple:
        item = get_args(annotation)[0]
        if _section(item):
            return "a list of {" + ", ".join(item.model_fields) + "}"
        return "a list, each item " + _in_words(item)
    return str(annotation)
