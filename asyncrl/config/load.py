"""Merges configuration files and overrides into one `Config`. A later file overrules earlier files. Overrides overrule files.

Sections, and settings that are mappings, merge deeply. Other values are replaced. A setting in `PATHS` may name a file or directory
in the folder of its YAML file. If such a path exists, the value becomes absolute. Any other value is not changed: it may be a hub
id, a module, or a path from the working directory. Paths in overrides, and every `run.dir`, are relative to the working directory.
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

from .fields import SPLIT_ENGINE_MESSAGE, ConfigField, config_fields, nearest_name, sections
from .schema import Config, schema_of
from .section import expand_home
from .text import parse_file, parse_value

# Name, index of the shard, number of shards, and the hash that older versions of `datasets` append.
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(?:-[0-9a-f]+)?\.parquet")
# Settings that may be a path or `file.py:name`. A key inside of a list has the name `LIST.KEY`.
_NAMES = (
    "data.train data.eval model.path model.tokenizer hooks rollout.environment algorithm.loss algorithm.advantage "
    "reward.functions reward.functions.function reward.model reward.model.path"
)
PATHS = frozenset(_NAMES.split())


def load_config(files: Sequence[str | os.PathLike[str]] = (), overrides: Sequence[str] = ()) -> Config:
    """Merges files and overrides. `resolve()` fills in derived values later.

    Errors: `ConfigError` with the dotted key, its file and line, and the nearest existing name or the expected type.
    """
    tree: dict[str, Any] = {}
    # Dotted key -> the file and line, or the override, that set the key last.
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
    # For a name that is too long `os.path.isdir` is False, but `Path.glob` and `Path.exists` raise an OSError.
    files = sorted(path.parent.glob(f"{glob.escape(path.name)}-*-of-*.parquet")) if os.path.isdir(path.parent) else []
    return [file for file in files if (shard := SHARD.fullmatch(file.name)) and shard[1] == path.name]


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yields name, value and original text of `a.b=value`, `--a.b=value` or `--a.b value`. A dash in a name counts as an
    underscore. Values are YAML.

    `--a.b` without a value means true if the setting is a boolean. If the setting is a string or a list of strings, the text is
    the value and is not read as YAML, with three exceptions: a quoted text, `null` if the setting is a list or may be null, and a
    text that begins with `[` if the setting is a list. Errors: `ConfigError`.
    """
    remaining = list(arguments)
    secret_parts = {part for field in config_fields().values() if field.secret for part in field.name.split(".")}
    while remaining:
        typed = remaining.pop(0)
        name, equals, text = typed.partition("=")
        dashed = name.startswith("--")
        name = name.removeprefix("--").replace("-", "_")
        if not name or not (dashed or equals):
            raise ConfigError(f"override {typed!r} is not understood: write a.b=value or --a.b value")
        field = config_fields().get(name)
        if not equals:
            boolean = field is not None and field.takes("boolean")
            # After a boolean, `c.d=value` is the next override.
            if remaining and not remaining[0].startswith("--") and not (boolean and "=" in remaining[0]):
                text = remaining.pop(0)
                typed = f"{typed} {text}"
            elif boolean:
                text = "true"
            elif field is None and name not in sections():
                raise ConfigError(_unknown(name, f"override {typed!r}"))
            else:
                raise ConfigError(f"override {typed!r} has no value: write {typed} VALUE or {name}=VALUE")
        # The text may have a secret, also under a misspelt name.
        if any(part in typed.replace("-", "_") for part in secret_parts):
            typed = f"{name}=..."
        yield name, _value(field, text, typed), typed


def _value(field: ConfigField | None, text: str, typed: str) -> Any:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"override {typed!r}: the value is not valid UTF-8")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if field is not None and not quoted:
        is_null = text == "null" and (field.takes("null") or field.takes_texts)
        if not is_null and (field.takes("string") or (field.takes_texts and text[:1] != "[")):
            return text
    try:
        value = parse_value(text)
    except ValueError as error:
        if field is not None and (field.takes("string") or field.takes_texts):
            return text
        raise ConfigError(f"override {typed!r}: the value is not valid YAML: {error}; put text in quotes") from error
    # YAML would strip blanks and a `#` comment from an unquoted string.
    unquoted = not quoted and (isinstance(value, str) or (value is None and text.lstrip()[:1] == "#"))
    return text if unquoted and text[:1] not in "[{" else value


def _branch(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for `a.b`. A short form of a section is expanded."""
    first, *rest = name.split(".")
    if not rest:
        return {first: _expand(first, value)}
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def _expand(section: str, value: Any) -> Any:
    """Expands short forms at the top level: an empty section to {}, and `reward: file.py:f` to `reward: {functions: file.py:f}`."""
    if section in sections() and value is None:
        return {}
    return {"functions": value} if section == "reward" and isinstance(value, (str, list)) else value


def _read(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        advice = f"; to set it write {path}=VALUE" if str(path) in config_fields() else ""
        raise ConfigError(f"the configuration file {path} does not exist (looked in {Path.cwd()}){advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    tree, lines = parse_file(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} contains {_short(tree)}; expected a mapping like `train: {{lr: 1e-6}}`")
    tree = {str(key): _expand(str(key), value) for key, value in tree.items()}
    for name, _ in _leaves(tree):
        origin[name] = f"{path} line {lines[name]}" if name in lines else str(path)
    absolute: dict[str, Any] = _make_absolute(tree, "", path.resolve().parent)
    return absolute


def _make_absolute(value: Any, name: str, folder: Path) -> Any:
    """A copy of `value` in which each path that exists in `folder` is absolute. `name`: the dotted name of `value`."""
    if isinstance(value, dict):
        return {key: _make_absolute(item, f"{name}.{key}".lstrip("."), folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_make_absolute(item, name, folder) for item in value]
    if not isinstance(value, str) or not value or name not in PATHS:
        return value
    file, colon, attribute = value.rpartition(":")
    if not file.endswith(".py"):
        file, colon, attribute = value, "", ""
    # Only `file.py:name` is a path of a loss, advantage or environment. Another value is a name, even if a folder has that name.
    if not colon and name.startswith(("algorithm.", "rollout.")):
        return value
    path = folder / (expand_home(file) or "")
    return os.path.normpath(path) + colon + attribute if os.path.exists(path) or parquet_shards(path) else value


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
        if isinstance(value, dict) and value and name not in config_fields():
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _error_lines(item: Mapping[str, Any], origin: Mapping[str, str], schema: type[Config]) -> Iterator[str]:
    """One pydantic error as message lines: one line, or one for each setting of an unknown section."""
    known, keys, value = config_fields(schema), [str(part) for part in item["loc"]], item["input"]
    # How many of the first keys form the name of a setting, or 0. The other keys are inside of the setting's value.
    depth = next((n for n in range(1, len(keys) + 1) if ".".join(keys[:n]) in known), 0)
    name = ".".join(keys[:depth] if depth else keys)
    field, source = known.get(name), _source_of(name, origin)
    # `invalid_key`: the key is not a string.
    unknown = item["type"] in ("extra_forbidden", "invalid_key")
    if field is not None and field.items and len(keys) > depth + 1:
        name, fields = f"{name}[{keys[depth]}].{keys[depth + 1]}", field.items
        if unknown:
            yield f"unknown key {name!r} ({source}); an item has {', '.join(fields)}"
            return
        field = fields[keys[depth + 1]]
        if item["type"] == "missing":
            yield f"{name} is missing ({source}); expected {field.text}"
            return
    if unknown:
        leaves = _leaves({name: value}) if "." not in keys[-1] else [(name, value)]
        yield from (_unknown(leaf, _source_of(leaf, origin), schema, keys[-1]) for leaf, _ in leaves)
        return
    expected = "a mapping" if field is None else field.expected
    if item["type"] == "value_error":
        expected = item["msg"].removeprefix("Value error, ")
    hint = ""
    if isinstance(value, float) and not math.isfinite(value):
        hint = ", and finite"
    elif isinstance(value, str) and field is not None and field.choices:
        matches = difflib.get_close_matches(value.strip().lower(), map(str, field.choices), n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
    elif isinstance(value, (int, float)) and field is not None and field.takes("string"):
        hint = "; put it in quotes"
    is_secret = any(each.secret and f"{each.name}.".startswith(f"{name}.") for each in known.values())
    shown = "a value that is not shown" if is_secret else _short(value)
    yield f"{name} is {shown} ({source}); expected {expected}{hint}"


def _unknown(name: str, source: str, schema: type[Config] = Config, key: str = "") -> str:
    """The error message about an unknown key. `key`: the last key as it was written, which may contain dots."""
    nearest = nearest_name(name, schema)
    advice = f"the nearest is {nearest!r}" if nearest else "nothing similar exists; --help lists all keys"
    if "." in key:
        section, _, inner = key.partition(".")
        advice = f"in a file write `{section}: {{{inner}: ...}}`"
    elif "parallel" in name and "tensor" not in name:
        advice = SPLIT_ENGINE_MESSAGE
    return f"unknown key {name!r} ({source}); {advice}"


def _source_of(name: str, origin: Mapping[str, str]) -> str:
    """The file and line, or the override, that set the key, its nearest parent or one of its children."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:depth])) in origin:
            return origin[prefix]
    return next((source for key, source in origin.items() if key.startswith(f"{name}.")), "default")


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
