"""YAML as asyncrl reads and writes it: the YAML 1.2 core types, no duplicate keys, line numbers for error messages.

PyYAML follows YAML 1.1, where `1e-6` is a string, `off` and `no` are booleans, `1:30` is ninety and `2026-11-21` a
date. Here numbers are numbers (`1e-6` too), only `true` and `false` are booleans, and everything else is a string: `no` is
one, which a setting that is true or false takes for false, and so does one without a type (`Word`).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from asyncrl.errors import ConfigError

_CORE_TYPES: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"^(?:<<)$", "<"),
)


_TEXT = "tag:yaml.org,2002:str"
_WORD = "tag:asyncrl:word"


class Word(str):
    """`yes`, `no`, `on` or `off` without quotes: text, and where no type says so what it means."""

    @property
    def meaning(self) -> bool:
        """What it means where a value has no type."""
        return self.lower() in ("yes", "on")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's own name and form


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would read as something else than a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML folds the line breaks of Unicode into spaces unless they are escaped, which only double quotes can.
    style = '"' if any(c in value for c in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text, 10)


for _tag, _pattern, _first in _CORE_TYPES:
    # PyYAML looks the empty scalar up under "", every other one under its first character.
    _characters = ["" if c == "\0" else c for c in _first]
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _characters)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _characters)
_Dumper.add_representer(str, _represent_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_Loader.add_implicit_resolver(_WORD, re.compile("^(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"), list("yYnNoO"))
_Loader.add_constructor(_WORD, lambda loader, node: Word(node.value))


def parse_override(text: str, as_it_stands: bool) -> Any:
    """The value of an override, read as in a file. `as_it_stands`: words are kept with ` #`, line breaks and blanks. Raises
    `yaml.YAMLError` where the text is no YAML."""
    node = yaml.compose(text, Loader=_Loader)  # a SafeLoader with other resolvers
    words = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _TEXT)
    return text if as_it_stands and words and text else yaml.load(text, Loader=_Loader)


def parse_override_text(text: str) -> str:
    """The text of an override, as it stands. Quotes around all of it are those of YAML."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    if isinstance(node, yaml.ScalarNode) and node.style in ("'", '"'):
        return str(node.value) if (node.start_mark.index, node.end_mark.index) == (0, len(text)) else text
    return text


def yaml_problem(error: yaml.YAMLError) -> str:
    """What PyYAML says is wrong, in one line, without its own picture of the place."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    said = f"{error.context}, {error.problem}" if error.context else error.problem
    begun = error.context_mark
    if error.context and begun is not None and begun.line != (error.problem_mark or begun).line:
        said = f"{error.context} that begins on line {begun.line + 1}, {error.problem}"
    return f"{said}: indent by spaces" if "'\\t'" in said else said


def parse_file(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """One YAML document and the line (from 1) of every dotted key. Errors: `ConfigError` naming source and line."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        if node is None:
            return None, lines
        _index_lines(node, "", source, lines, ())
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source} line {mark.line + 1} column {mark.column + 1}"
        raise ConfigError(f"{where} is not valid YAML: {yaml_problem(error)}") from error
    finally:
        loader.dispose()


def dump(value: Any) -> str:
    """YAML text that `parse_file` reads back to an equal value."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _index_lines(node: yaml.Node, prefix: str, source: str, lines: dict[str, int], path: tuple[int, ...]) -> None:
    """Record the line of each mapping key; refuse duplicate keys (PyYAML silently keeps the last one)."""
    if id(node) in path:
        raise ConfigError(f"{source} line {node.start_mark.line + 1}: an alias refers to itself")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _index_lines(item, f"{prefix}{index}.", source, lines, (*path, id(node)))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{source} line {key.start_mark.line + 1}: a key must be a plain word")
        name, line = key.value, key.start_mark.line + 1
        if name in seen:
            raise ConfigError(
                f"{source} line {line}: the key {prefix + name!r} stands there twice (first on line {seen[name]}); "
                "remove one of them"
            )
        seen[name] = line
        lines.setdefault(prefix + name, line)
        _index_lines(value, f"{prefix}{name}.", source, lines, (*path, id(node)))
