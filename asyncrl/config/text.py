"""YAML 1.2 as ruamel.yaml reads and writes it, with line numbers for error messages.

`1e-6` is a number, `true` and `false` (in any usual case) are the only booleans, and `off`, `no`, `1:30` and `2026-11-21` are
text. A repeated key is an error.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML, MappingNode, SafeConstructor, SafeRepresenter, ScalarNode, SequenceNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from asyncrl.errors import ConfigError

_QUOTED = ("yes", "no", "on", "off", "y", "n")


class _Constructor(SafeConstructor):
    """Reads dates, and a lone `=`, as text."""


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, value: str) -> ScalarNode:
        """Quote text that YAML 1.1 would read as a boolean, or that has Unicode line breaks or byte order marks."""
        quoted = value.lower() in _QUOTED or any(c in value for c in "\x85\u2028\u2029\ufeff")
        return self.represent_scalar("tag:yaml.org,2002:str", value, style='"' if quoted else None)


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)
_Representer.add_representer(str, _Representer.represent_text)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.width = 120
    # `vars` satisfies mypy: ruamel.yaml declares both attributes as None.
    vars(yaml).update(default_flow_style=False, sort_base_mapping_type_on_output=False)
    return yaml


def parse_value(text: str) -> Any:
    """Parses one value. Errors: ValueError with the parser's message."""
    try:
        return _yaml().load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(_problem(error)) from error


def parse_file(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """One YAML document and the line (from 1) of every dotted key. Errors: `ConfigError` naming source and line."""
    yaml = _yaml()
    try:
        node = yaml.compose(text)
        lines = dict(_lines(node, source))
        # Not `load`, which would scan and parse the text again.
        return yaml.constructor.construct_document(node) if node is not None else None, lines
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source} line {mark.line + 1} column {mark.column + 1}"
        raise ConfigError(f"{where} is not valid YAML: {_problem(error)}") from error


def dump(value: Any) -> str:
    """YAML text that `parse_file` reads back to an equal value, with lists in place of tuples."""
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue()


def one_line(value: Any) -> str:
    """The value of a setting in one line, for messages: YAML, but `; ` separates the keys of a mapping."""
    if isinstance(value, (tuple, list)) and not any(isinstance(item, dict) for item in value):
        return f"[{', '.join(map(one_line, value))}]"
    return dump(value).removesuffix("\n").removesuffix("\n...").replace("\n", "; ")


def _problem(error: YAMLError | ValueError | RecursionError) -> str:
    """The parser's message in one line, without its excerpt of the text, and without values, which may be secret."""
    if not isinstance(error, MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    text = re.sub(r"(?s)( alias| tag| tag handle) '.*| with value .*", r"\1", error.problem)
    start = error.context_mark
    if error.context and start is not None and start.line != (error.problem_mark or start).line:
        text = f"{error.context} that begins on line {start.line + 1}, {text}"
    elif error.context:
        text = f"{error.context}, {text}"
    return f"{text}: indent by spaces" if "'\\t'" in text else text


def _lines(node: Any, source: str, prefix: str = "", parents: tuple[int, ...] = ()) -> Iterator[tuple[str, int]]:
    """(dotted key, line) of the keys in `node`. `parents`: `id()` of each node that contains `node`."""
    if id(node) in parents:
        raise ConfigError(f"{source} line {node.start_mark.line + 1}: an alias refers to itself")
    parents = (*parents, id(node))
    for item in node.value if isinstance(node, SequenceNode) else ():
        yield from _lines(item, source, f"{prefix}.", parents)
    for key, value in node.value if isinstance(node, MappingNode) else ():
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _lines(value, source, f"{prefix}{key.value}.", parents)
