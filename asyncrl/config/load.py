"""Merges configuration files and overrides into one `Config`. A later file replaces values of earlier files, overrides come last.

Sections merge deeply; lists and single values are replaced. Relative paths: a value that names a file or directory
(`PATHS`, and the file part of a `file.py:name`) is made absolute against the folder of the YAML file in which it stands
**if it exists there**; otherwise it is not changed (a hub id, a module, or a path from the working directory).
Overrides are relative to the working directory, and so is `run.dir` always.
"""

from __future__ import annotations

import difflib
import glob
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.errors import ConfigError

from .fields import SPLIT_ENGINE_MESSAGE, Knob, knobs, nearest_name, sections
from .schema import Config, schema_of
from .section import expand_home
from .text import parse_file, parse_value

# Name, number of the shard, count of shards, and the hash that older versions of `datasets` append.
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(?:-[0-9a-f]+)?\.parquet")
# Settings that hold a path or `file.py:name`; for a list of mappings, the key of the item that does.
_NAMES = (
    "data.train data.eval model.path model.tokenizer hooks rollout.environment algorithm.loss algorithm.advantage "
    "reward.functions reward.functions.function reward.model reward.model.path"
)
PATHS = frozenset(_NAMES.split())


def load_config(files: Sequence[str | os.PathLike[str]] = (), overrides: Sequence[str] = ()) -> Config:
    """Compose files and overrides. Nothing derived is filled in: that is `resolve()`.

    Errors: `ConfigError` with the dotted key, where it came from, and the nearest existing name or what was expected.
    """
    tree: dict[str, Any] = {}
    # Dotted key -> file and line, or override, that set it last.
    origin: dict[str, str] = {}
    for file in files:
        _merge(tree, _read(Path(file), origin))
    for name, value, typed in parse_overrides(overrides):
        branch = _branch(name, value)
        origin.update((leaf, f"override {typed!r}") for leaf, _ in _leaves(branch))
        _merge(tree, branch)
    schema = schema_of(tree)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False, include_context=False)
        lines = [text for item in items for text in _error_lines(item, origin, schema)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def parquet_shards(path: Path) -> list[Path]:
    """The shards of `path`: `data/train-00000-of-00002.parquet`, ... for `data/train`."""
    files = sorted(path.parent.glob(f"{glob.escape(path.name)}-*-of-*.parquet"))
    return [file for file in files if (shard := SHARD.fullmatch(file.name)) and shard[1] == path.name]


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yields name, value and typed text of `a.b=value`, `--a.b=value` or `--a.b value`; a dash in a name is an underscore. Values
    are YAML.

    `--a.b` without a value is true where the setting is a switch. Where the setting is a string or a list of strings, the text is
    the value, unless it is quoted YAML, null or a YAML list. Errors: `ConfigError`.
    """
    rest = list(arguments)
    while rest:
        typed = rest.pop(0)
        name, equals, text = typed.partition("=")
        dashed = name.startswith("--")
        name = name.removeprefix("--").replace("-", "_")
        if not name or not (dashed or equals):
            raise ConfigError(f"override {typed!r} is not understood: write a.b=value or --a.b value")
        knob = knobs().get(name)
        if not equals:
            switch = knob is not None and knob.takes("boolean")
            if rest and not rest[0].startswith("--") and not (switch and "=" in rest[0]):
                text = rest.pop(0)
                typed = f"{typed} {text}"
            elif switch:
                text = "true"
            elif knob is None and name not in sections():
                raise ConfigError(_unknown(name, f"override {typed!r}"))
            else:
                raise ConfigError(f"override {typed!r} has no value: write {typed} VALUE or {name}=VALUE")
        yield name, _value(knob, text, typed), typed


def _value(knob: Knob | None, text: str, typed: str) -> Any:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"override {typed!r}: the value is not valid UTF-8")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if knob is not None and not quoted:
        null = text == "null" and (knob.takes("null") or knob.takes_texts)
        if not null and (knob.takes("string") or (knob.takes_texts and text[:1] != "[")):
            return text
    try:
        value = parse_value(text)
    except ValueError as error:
        if knob is not None and (knob.takes("string") or knob.takes_texts):
            return text
        raise ConfigError(f"override {typed!r}: the value is not valid YAML: {error}; put text in quotes") from error
    # YAML would strip blanks and a `#` comment from an unquoted string.
    plain = isinstance(value, str) or (value is None and text.lstrip()[:1] == "#")
    return text if plain and not quoted and text[:1] not in "[{" else value


def _branch(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for `a.b`, with the shorthand of a section expanded."""
    first, *rest = name.split(".")
    if not rest:
        return {first: _expand(first, value)}
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def _expand(section: str, value: Any) -> Any:
    """An empty section becomes a mapping without keys, `reward: file.py:f` becomes `reward: {functions: file.py:f}`."""
    if section in sections() and value is None:
        return {}
    return {"functions": value} if section == "reward" and isinstance(value, (str, list)) else value


def _read(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        advice = f"; to set it write {path}=VALUE" if str(path) in knobs() else ""
        raise ConfigError(f"the configuration file {path} does not exist (looked in {Path.cwd()}){advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    tree, lines = parse_file(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {_shown(tree)}; expected a mapping like `train: {{lr: 1e-6}}`")
    tree = {str(key): _expand(str(key), value) for key, value in tree.items()}
    for name, _ in _leaves(tree):
        origin[name] = f"{path} line {lines[name]}" if name in lines else str(path)
    found: dict[str, Any] = _anchored(tree, "", path.resolve().parent)
    return found


def _anchored(value: Any, name: str, folder: Path) -> Any:
    """`value` with each path made absolute that exists in `folder`, the folder of the file."""
    if isinstance(value, dict):
        return {key: _anchored(each, f"{name}.{key}".lstrip("."), folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_anchored(each, name, folder) for each in value]
    if not isinstance(value, str) or not value or name not in PATHS:
        return value
    file, colon, attribute = value.rpartition(":")
    if not file.endswith(".py"):
        file, colon, attribute = value, "", ""
    inside = folder / (expand_home(file) or "")
    return os.path.normpath(inside) + colon + attribute if inside.exists() or parquet_shards(inside) else value


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf: a setting, an empty mapping, or a value that is no mapping."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in knobs():
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _error_lines(item: Mapping[str, Any], origin: Mapping[str, str], schema: type[Config]) -> Iterator[str]:
    """One pydantic error as message lines: one line, or one for each setting of an unknown section."""
    known, place, found = knobs(schema), [str(part) for part in item["loc"]], item["input"]
    depth = next((n for n in range(1, len(place) + 1) if ".".join(place[:n]) in known), 0)
    name = ".".join(place[:depth] if depth else place)
    knob, where = known.get(name), _came_from(name, origin)
    # `invalid_key`: the key is not a string.
    unknown = item["type"] in ("extra_forbidden", "invalid_key")
    if knob is not None and knob.items and len(place) > depth + 1:
        name, fields = f"{name}[{place[depth]}].{place[depth + 1]}", knob.items
        if unknown:
            yield f"unknown key {name!r} ({where}); an item has {', '.join(fields)}"
            return
        knob = fields[place[depth + 1]]
        if item["type"] == "missing":
            yield f"{name} is missing ({where}); expected {knob.text}"
            return
    if unknown:
        leaves = _leaves({name: found}) if "." not in place[-1] else [(name, found)]
        yield from (_unknown(leaf, _came_from(leaf, origin), schema, place[-1]) for leaf, _ in leaves)
        return
    wanted = "a mapping" if knob is None else knob.expected
    if item["type"] == "value_error":
        wanted = item["msg"].removeprefix("Value error, ")
    hint = ""
    if isinstance(found, float) and not math.isfinite(found):
        hint = ", and finite"
    elif isinstance(found, str) and knob is not None and knob.choices:
        near = difflib.get_close_matches(found.strip().lower(), map(str, knob.choices), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
    elif isinstance(found, (int, float)) and knob is not None and knob.takes("string"):
        hint = "; put it in quotes"
    yield f"{name} is {_shown(found)} ({where}); expected {wanted}{hint}"


def _unknown(name: str, where: str, schema: type[Config] = Config, key: str = "") -> str:
    nearest = nearest_name(name, schema)
    advice = f"the nearest is {nearest!r}" if nearest else "nothing similar exists; --help lists all keys"
    if "." in key:
        section, _, rest = key.partition(".")
        advice = f"in a file write `{section}: {{{rest}: ...}}`"
    elif "parallel" in name:
        advice = SPLIT_ENGINE_MESSAGE
    return f"unknown key {name!r} ({where}); {advice}"


def _came_from(name: str, origin: Mapping[str, str]) -> str:
    """File and line, or override, that set the key, its nearest parent or a child."""
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
