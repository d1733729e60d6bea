"""Files and overrides become one `Config`: YAML files left to right, later wins, then the overrides.

Sections merge deeply; lists and single values are replaced. Relative paths: a value that names a file or directory
(`PATHS`, and the file part of a `file.py:name`) is made absolute against the folder of the YAML file in which it stands
**if it exists there**; otherwise it is left as it is (a hub id, a module, or a path from the working directory).
Overrides are relative to the working directory, and so is `run.dir` always.
"""

from __future__ import annotations

import difflib
import glob
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from asyncrl.errors import ConfigError

from .fields import Knob, expected, knobs, nearest_name, sections
from .old_names import full_name, given_twice, respelled
from .other_names import ABSENT
from .schema import Config, schema_of
from .schema_rollouts import RewardFunctionConfig, RewardModelConfig
from .section import Section, at_home
from .text import parse_file, parse_override, parse_override_text, yaml_problem

# The beginning, the number of the shard, how many there are; what older versions of `datasets` write behind them.
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(?:-[0-9a-f]+)?\.parquet")
# A path, or `file.py:name`. The hooks, and what is listed in `reward`, are handled with them.
PATHS = ("data.train", "data.eval", "model.path", "model.tokenizer")
CODE = ("rollout.environment", "algorithm.loss", "algorithm.advantage")  # a name of ours, or `file.py:name`
# Knobs that are lists of sections: what one item is, and what it must have.
_LISTS: dict[str, tuple[type[Section], str, str, str]] = {
    "reward.functions": (
        RewardFunctionConfig,
        "a reward function",
        "function",
        "`file.py:function` or `module:function`",
    ),
    "reward.model": (RewardModelConfig, "a reward model", "path", "a directory, a hub id or `file.py:function`"),
}


@dataclass(frozen=True, slots=True)
class Override:
    """`a.b=value` or `--a.b value`, as typed."""

    name: str
    value: Any
    typed: str


def load_config(files: Sequence[str | os.PathLike[str]] = (), overrides: Sequence[str] = ()) -> Config:
    """Compose files and overrides. Nothing derived is filled in: that is `resolve()`.

    Errors: `ConfigError` with the dotted key, where it came from, and the nearest existing name or what was expected.
    """
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}  # dotted key -> where it was set last
    for file in files:
        _merge(tree, _read(Path(file), origin))
    for override in _in_one_spelling(parse_overrides(overrides)):
        branch = _branch(override.name, override.value)
        origin.update(dict.fromkeys(_names(branch), f"override {override.typed!r}"))
        _merge(tree, branch)
    return _validate(tree, origin)


def _in_one_spelling(overrides: Sequence[Override]) -> list[Override]:
    """Every override under its dotted name. Errors: ConfigError where two spellings of one name say different things."""
    found: dict[str, Override] = {}
    for override in overrides:
        name = full_name(override.name)
        before = found.get(name)
        if before is not None and before.name != override.name and before.value != override.value:
            raise ConfigError(given_twice(before.name, before.value, override.name, override.value))
        found[name] = override
    return [Override(full_name(each.name), each.value, each.typed) for each in overrides]


def parquet_shards(path: Path) -> list[Path]:
    """The files that `path` is the common beginning of: `data/train` for `data/train-00000-of-00002.parquet`, ..."""
    files = sorted(path.parent.glob(f"{glob.escape(path.name)}-*-of-*.parquet"))
    return [file for file in files if (shard := SHARD.fullmatch(file.name)) and shard[1] == path.name]


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """`a.b=value`, `--a.b=value` and `--a.b value`; a dash in a name is an underscore. Values are YAML.

    A bare `--a.b` is true where the knob is a switch. Where the knob is a string, the text is taken as it stands unless
    it is quoted YAML or null; a list takes a single item too, a string as it stands. Errors: `ConfigError`.
    """
    found: list[Override] = []
    rest = list(arguments)
    while rest:
        typed = rest.pop(0)
        name, equals, text = typed.partition("=")
        dashed = name.startswith("--")
        name = name.removeprefix("--").replace("-", "_")
        if not name or not (dashed or equals):
            raise ConfigError(f"override {typed!r} is not understood: write a.b=value or --a.b value")
        if not equals:
            knob = knobs().get(full_name(name))
            switch = knob is not None and knob.takes_bool
            if rest and not rest[0].startswith("--") and not (switch and "=" in rest[0]):
                text = rest.pop(0)
                typed = f"{typed} {text}"
            elif switch:
                text = "true"
            elif knob is None and name not in sections():
                raise ConfigError(_unknown(name, f"override {typed!r}"))
            else:
                raise ConfigError(f"override {typed!r} has no value: write {typed} VALUE or {name}=VALUE")
        found.append(Override(name, _value(name, text, typed), typed))
    return found


def _value(name: str, text: str, typed: str) -> Any:
    knob = knobs().get(full_name(name))
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"override {typed!r}: the value is not valid UTF-8")
    try:
        value = parse_override(text, knob is None or knob.takes_text or knob.takes_texts)
    except yaml.YAMLError as error:
        if knob is None or not (knob.takes_text or (knob.takes_texts and text[:1] != "[")):
            raise ConfigError(
                f"override {typed!r}: the value is not valid YAML: {yaml_problem(error)}; put text in quotes"
            ) from error
        value = text
    if knob is None or (value is None and (knob.takes_null or knob.takes_texts)):
        return value
    if knob.takes_text:
        return parse_override_text(text)  # `run.name=5`, `data.system_prompt=You are: terse`
    if knob.takes_texts and not isinstance(value, list):
        return [parse_override_text(text)]
    return [value] if knob.takes_list and isinstance(value, (str, int, float)) else value


def _branch(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for `a.b`; a shorthand of a section is written out."""
    first, *rest = name.split(".")
    if not rest:
        return {first: _expand(first, value)}
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def _expand(section: str, value: Any) -> Any:
    """An empty section is a mapping without keys; `reward: file.py:f` means `reward: {functions: file.py:f}`."""
    if section in sections() and value is None:
        return {}
    if section == "reward" and isinstance(value, (str, list)):
        return {"functions": value}
    return value


def _read(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        advice = f"; to set it write {path}=VALUE" if full_name(str(path)) in knobs() else ""
        raise ConfigError(f"the configuration file {path} does not exist (looked in {Path.cwd()}){advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    tree, lines = parse_file(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {_shown(tree)}; expected a mapping like `train: {{lr: 1e-6}}`")
    tree = {str(key): _expand(str(key), value) for key, value in tree.items()}
    for name in _names(tree):
        origin[full_name(name)] = f"{path} line {lines[name]}" if name in lines else str(path)
    try:
        spelled: dict[str, Any] = respelled(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _anchor(spelled, path.resolve().parent)
    return spelled


def _anchor(tree: dict[str, Any], folder: Path) -> None:
    """Make the paths of one file absolute where they exist next to it (in place)."""

    def whole(value: str) -> str:
        inside = folder / (at_home(value) or "")
        return os.path.normpath(inside) if value and (inside.exists() or parquet_shards(inside)) else value

    def code(value: str) -> str:
        file, colon, name = value.rpartition(":")
        return f"{whole(file)}:{name}" if colon and file.endswith(".py") else value

    for place in (*PATHS, *CODE):
        section, _, key = place.partition(".")
        values = tree.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            values[key] = code(values[key] if place in CODE else whole(values[key]))
    if isinstance(tree.get("hooks"), str):
        tree["hooks"] = code(tree["hooks"])
    for place, (_, _, key, _) in _LISTS.items():
        section, _, name = place.partition(".")
        values = tree.get(section)
        if not isinstance(values, dict) or values.get(name) is None:
            continue
        given = values[name]
        values[name] = items = given if isinstance(given, list) else [given]
        for index, item in enumerate(items):
            if isinstance(item, str):
                items[index] = code(whole(item))
            elif isinstance(item, dict) and isinstance(item.get(key), str):
                item[key] = code(whole(item[key]))


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _names(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all leaves: knobs, and what is no mapping or an empty one."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in knobs():
            yield from _names(value, f"{name}.")
        else:
            yield name


def _validate(tree: dict[str, Any], origin: Mapping[str, str]) -> Config:
    schema = schema_of(tree)
    complaints = list(_unknown_names(tree, origin, schema)) or list(_wrong_switches(tree, origin, schema))
    if complaints:
        raise ConfigError("\n".join(complaints))
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        complaints = [_translate(dict(item), origin, schema) for item in items]
        raise ConfigError("\n".join(dict.fromkeys(complaints))) from None


def _unknown_names(tree: Mapping[str, Any], origin: Mapping[str, str], schema: type[Config]) -> Iterator[str]:
    for key in tree:
        if "." in key:
            section, _, rest = key.partition(".")
            yield f"unknown key {key!r} ({_came_from(key, origin)}); in a file write `{section}: {{{rest}: ...}}`"
    for name in _names({key: value for key, value in tree.items() if "." not in key}):
        if name not in knobs(schema) and name not in sections(schema):
            yield _unknown(name, _came_from(name, origin), schema)


def _wrong_switches(tree: Mapping[str, Any], origin: Mapping[str, str], schema: type[Config]) -> Iterator[str]:
    """Python counts true as 1; a configuration must not."""
    for name in _names(tree):
        value: Any = tree
        for part in name.split("."):
            value = value[part]
        knob: Knob | None = knobs(schema).get(name)
        if knob is not None and isinstance(value, bool) and not knob.takes_bool:
            yield _wrong(name, _shown(value), knob.expected, _came_from(name, origin))


def _translate(item: Mapping[str, Any], origin: Mapping[str, str], schema: type[Config]) -> str:
    """One pydantic complaint in our words."""
    known = knobs(schema)
    place = [str(part) for part in item["loc"]]
    depth = next((n for n in range(len(place), 0, -1) if ".".join(place[:n]) in known), 0)
    section = next((n for n in range(len(place), 1, -1) if ".".join(place[:n]) in sections(schema)), 1)
    name = ".".join(place[: depth or section])
    where, found = _came_from(name, origin), item["input"]
    if name in _LISTS and len(place) > depth + 1:
        item_of, what, _, needed = _LISTS[name]
        full, key = f"{name}[{place[depth]}].{place[depth + 1]}", place[depth + 1]
        if item["type"] == "extra_forbidden":
            return f"unknown key {full!r} ({where}); {what} has {', '.join(item_of.model_fields)}"
        if item["type"] == "missing":
            return f"{full} is missing ({where}); expected {needed}"
        return _wrong(full, _shown(found), expected(item_of.model_fields[key]), where)
    if not depth:
        return _wrong(name, _shown(found), "a mapping", where)
    hint = ""
    wanted = item["msg"].removeprefix("Value error, ") if item["type"] == "value_error" else known[name].expected
    choices = known[name].choices
    if isinstance(found, float) and not math.isfinite(found):
        return f"{_wrong(name, _shown(found), known[name].expected, where)}, and finite"
    if isinstance(found, str) and choices:
        near = difflib.get_close_matches(found.strip().lower(), [str(choice) for choice in choices], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
    elif isinstance(found, (int, float)) and known[name].takes_text:
        hint = "; put it in quotes"
    return _wrong(name, _shown(found), wanted, where) + hint


def _unknown(name: str, where: str, schema: type[Config] = Config) -> str:
    absent = ABSENT.get(name.rpartition(".")[2])
    if absent is not None:
        return f"unknown key {name!r} ({where}); {absent}"
    nearest = nearest_name(name, schema)
    advice = f"the nearest is {nearest!r}" if nearest else "nothing similar exists; --help lists all keys"
    return f"unknown key {name!r} ({where}); {advice}"


def _wrong(name: str, found: str, expected: str, where: str) -> str:
    return f"{name} is {found} ({where}); expected {expected}"


def _came_from(name: str, origin: Mapping[str, str]) -> str:
    """Where a key, a parent of it or a child of it was set."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:depth])) in origin:
            return origin[prefix]
    return next((where for key, where in origin.items() if key.startswith(f"{name}.")), "default")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
