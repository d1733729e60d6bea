"""The settings as a flat table, made of pydantic's JSON schema: each under its dotted name, with its types, default and sentence.

Loading, `--help`, the diff of two configurations and "did you mean" read this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from .methods import SETTINGS
from .other_names import OTHER_NAMES
from .schema import Config

_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# Of letters: from here on a name is suggested.
_SIMILAR = 0.75


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting."""

    name: str
    default: Any
    text: str
    # A JSON schema for each type that it may have.
    types: tuple[Mapping[str, Any], ...]
    # Where it is a list of sections: the fields of one.
    items: Mapping[str, Knob] = field(default_factory=dict)

    def takes(self, kind: str) -> bool:
        """Whether every value of this JSON type is allowed."""
        return any(each.get("type") == kind and not _choices(each) for each in self.types)

    @property
    def takes_texts(self) -> bool:
        """Whether it may be a list of any texts."""
        return any(each.get("items", {}).get("type") == "string" and "enum" not in each["items"] for each in self.types)

    @property
    def choices(self) -> list[Any]:
        """The values of which it must be one, where there are such."""
        return [value for each in self.types for value in _choices(each)]

    @property
    def expected(self) -> str:
        """Types and bounds in words."""
        if self.items:
            return f"a list of {{{', '.join(self.items)}}}"
        return " or ".join(map(_in_words, self.types))


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _in_words(schema: Mapping[str, Any]) -> str:
    if choices := _choices(schema):
        return "one of " + ", ".join(map(str, choices))
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    if schema["type"] == "array":
        return "a list, each item " + _in_words(schema["items"])
    bounds = " and ".join(f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema)
    return f"{_WORDS[schema['type']]} {bounds}".rstrip()


@cache
def knobs(schema: type[Config] = Config) -> Mapping[str, Knob]:
    """Every setting by its dotted name, in the order of the schema."""
    whole = schema.model_json_schema()
    return {knob.name: knob for knob in _walk(whole, "", whole["$defs"])}


def _walk(section: Mapping[str, Any], prefix: str, named: Mapping[str, Any]) -> Iterator[Knob]:
    for key, about in section["properties"].items():
        if "$ref" in about:
            yield from _walk(_referred(about, named), f"{prefix}{key}.", named)
            continue
        item = _referred(about.get("items", {}), named)
        items = {each.name: each for each in _walk(item, "", named)} if "properties" in item else {}
        types = tuple(about.get("anyOf", [about]))
        yield Knob(f"{prefix}{key}", about.get("default"), about.get("description", ""), types, items)


def _referred(about: Mapping[str, Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = named[about["$ref"].rpartition("/")[2]] if "$ref" in about else about
    return found


@cache
def sections(schema: type[Config] = Config) -> frozenset[str]:
    """Every section by its dotted name: `train`, `model.lora`."""
    return frozenset(name.rpartition(".")[0] for name in knobs(schema)) - {""}


@cache
def _theirs() -> Mapping[str, str]:
    return {**{each.flat: dotted for dotted, each in SETTINGS.items()}, **OTHER_NAMES}


def other_name(name: str) -> str | None:
    """What the setting is called here that goes by `name`, or by its last parts, in another code base or in a call of
    `build_loss`."""
    return next((_theirs()[tail] for tail in _tails(name) if tail in _theirs()), None)


def nearest_name(name: str, schema: type[Config] = Config) -> str | None:
    """The dotted name that was most likely meant by `name`, or None where nothing is similar.

    What others call a setting is looked up; else letters decide.
    """
    if (found := other_name(name)) is not None:
        return found
    # The first section that has a setting of this name has it.
    last = {full.rpartition(".")[2]: full for full in reversed([*knobs(schema)])}
    names = {**last, **_theirs(), **{full: full for full in (*sections(schema), *knobs(schema))}}
    near = (difflib.get_close_matches(tail, names, n=1, cutoff=_SIMILAR) for tail in _tails(name))
    return next((names[each[0]] for each in near if each), None)


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def get(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    return reduce(getattr, name.split("."), config)
