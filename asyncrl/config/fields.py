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

from .old_names import SPELLINGS, full_name
from .other_names import NOT_HERE, OTHER_NAMES, other_name
from .schema import Config

_PLAIN_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
_MISTYPED = 0.9  # one letter of ten
_COMMON, _SIMILAR = 0.5, 0.6  # of words, of letters: from here on a name is suggested
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class Knob:
    """One leaf of the configuration tree."""

    name: str  # dotted
    annotation: Any
    default: Any
    text: str  # the sentence under the field
    expected: str  # the type and the bounds in words
    secret: bool  # written nowhere

    @property
    def _members(self) -> tuple[Any, ...]:
        return tuple(_flat_union(self.annotation))

    @property
    def takes_text(self) -> bool:
        """A free string is a legal value (a Literal is not free)."""
        return str in self._members

    @property
    def takes_null(self) -> bool:
        """Whether it may be null."""
        return type(None) in self._members

    @property
    def takes_bool(self) -> bool:
        """Whether it may be true or false: a flag without a value then means true."""
        return bool in self._members

    @property
    def takes_texts(self) -> bool:
        """Whether it may be a list of free strings."""
        return tuple[str, ...] in self._members

    @property
    def takes_list(self) -> bool:
        """Whether it may be a list."""
        return any(get_origin(member) is tuple for member in self._members)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal, in order; empty for any other type."""
        return tuple(value for m in self._members if get_origin(m) is Literal for value in get_args(m))


@cache
def knobs(schema: type[Config] = Config) -> Mapping[str, Knob]:
    """Every leaf of the configuration by its dotted name, in the order of the schema."""
    return {knob.name: knob for knob in _walk(schema, "")}


@cache
def sections(schema: type[Config] = Config) -> Mapping[str, type[BaseModel]]:
    """Every section by its dotted name (`train`, `model.lora`, ...)."""
    return dict(_walk_sections(schema, ""))


def nearest_name(name: str, schema: type[Config] = Config) -> str | None:
    """The existing dotted name that was most likely meant by `name`, or None where nothing is similar.

    What other code bases call a knob is looked up (`other_names`). Else the one with most words in common, whole words or
    their beginnings: `clip_grad_norm` finds `train.grad_clip`. Letters decide between equals, and find what is mistyped.
    """
    last = name.rpartition(".")[2]
    known = other_name(name)
    if known is not None or last in NOT_HERE:
        return known
    if mistyped := difflib.get_close_matches(last, OTHER_NAMES, n=1, cutoff=_MISTYPED):
        return OTHER_NAMES[mistyped[0]]

    def score(candidate: str) -> tuple[float, float]:
        tail = candidate.rpartition(".")[2]
        words = _common_words(name, candidate) if full_name(candidate) in knobs(schema) else 0.0
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        letters = max(whole, 0.95 * difflib.SequenceMatcher(None, last, tail).ratio())
        return words if words >= _COMMON else 0.0, letters

    best = max([*knobs(schema), *SPELLINGS, *sections(schema)], key=score)
    words, letters = score(best)
    return full_name(best) if words or letters >= _SIMILAR else None


def _common_words(name: str, candidate: str) -> float:
    """Words of the last part of `name` that the last part of `candidate` has, in its section half, and half again for each
    that the two sections share; over the words there are. 0 where only the sections are alike."""
    (asked_section, _, asked), (section, _, tail) = name.rpartition("."), candidate.rpartition(".")
    places = {**dict.fromkeys(section.split("."), 0.5), **dict.fromkeys(tail.split("_"), 1.0)}
    words = asked.split("_")
    found = sum(max((places[word] for word in places if _same_word(word, each)), default=0.0) for each in words)
    shared = sum(0.5 for each in section.split(".") if any(_same_word(each, one) for one in asked_section.split(".")))
    return 2 * (found + shared) / (len(words) + len(tail.split("_"))) if found else 0.0


def _same_word(one: str, other: str) -> bool:
    """Equal, or one the beginning of the other: eval, evaluate."""
    short, long = sorted((one, other), key=len)
    return (one == other != "") or (len(short) >= 3 and long.startswith(short))


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
            text, secret = info.description or "", bool(info.exclude)
            yield Knob(f"{prefix}{key}", info.annotation, info.default, text, expected(info), secret)


def _walk_sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, info in model.model_fields.items():
        if (section := _section(info.annotation)) is not None:
            yield f"{prefix}{key}", section
            yield from _walk_sections(section, f"{prefix}{key}.")


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
