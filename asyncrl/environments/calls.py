"""Reads the tool calls in the text of a reply. A call that cannot be read stays in the reply's content.

| models | format |
|---|---|
| Hermes, Qwen, SmolLM3 | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| Qwen3.5, Qwen3-Coder | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` |
| GLM | `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` |
| MiniMax | `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` |
| LFM2 | `[NAME(KEY=VALUE)]` as in Python, between special tokens |
| Gemma 4 | `call:NAME{KEY:VALUE}` between special tokens, with special tokens as quotation marks |
| Llama 3 | the whole reply is `{"name": ..., "parameters": {...}}`, perhaps after `<\\|python_tag\\|>` |
| Mistral | `[TOOL_CALLS][{...}]` or `[TOOL_CALLS]NAME[ARGS]{...}` |
| DeepSeek V3 and V3.1, Kimi K2 | special tokens around name and arguments |
| gpt-oss | channels `analysis`, `commentary to=functions.NAME`, `final` |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import DataError
from asyncrl.records.check import check_json

# `\s*` on both sides of this pattern would make the search time of an unclosed call grow with the cube of its white space.
_VALUE = "(.*?)"
_BLOCK = re.compile(rf"<tool_call>{_VALUE}</tool_call>", re.DOTALL)
_FUNCTION = re.compile(
    r"(?:<function=\s*([\w.-]+)\s*>|<(?:\w+:)?invoke name=\"\s*([\w.-]+)\s*\">)(.*)</(?:function|(?:\w+:)?invoke)>",
    re.DOTALL,
)
_NEXT_FUNCTION = re.compile(r"(?:(?<=</function>)|(?<=invoke>))\s*(?=<function=|<(?:\w+:)?invoke name=)")
_PARAMETER = re.compile(
    r"(<(?:\w+:)?parameter(?:=| name=\"))([^<>]*?)\"?>\n?((?:(?!\1).)*?)\n?</(?:\w+:)?parameter>|"
    r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>",
    re.DOTALL,
)
_INVOKE = re.compile(r"<(?:\w+:)?invoke name=.*?</(?:\w+:)?invoke>", re.DOTALL)
_PYTHON = re.compile(rf"<\|tool_call_start\|>{_VALUE}<\|tool_call_end\|>", re.DOTALL)
_GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)(\{.*?\})<tool_call\|>(?:<\|tool_response>)?", re.DOTALL)
_GEMMA_STRING = re.compile(r'(<\|"\|>.*?<\|"\|>)', re.DOTALL)
_DEEPSEEK = re.compile(
    rf"<\uff5ctool\u2581call\u2581begin\uff5c>(?:function<\uff5ctool\u2581sep\uff5c>)?{_VALUE}(?:<\uff5ctool\u2581sep\uff5c>|\n```json\n){_VALUE}(?:\n```)?<\uff5ctool\u2581call\u2581end\uff5c>",
    re.DOTALL,
)
_KIMI = re.compile(
    rf"<\|tool_call_begin\|>(?:functions\.)?{_VALUE}<\|tool_call_argument_begin\|>{_VALUE}<\|tool_call_end\|>",
    re.DOTALL,
)
_MISTRAL = re.compile(
    r"\[TOOL_CALLS\]\s*(?:([\w.-]+)(?:\[ARGS\])?\s*)?([\[{].*?[\]}])\s*(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
)
_CHANNEL = re.compile(
    r"(.*?)(?:(?:<\|start\|>assistant)?(?: to=functions\.([\w.-]+))?<\|channel\|>(\w+)(?: to=functions\.([\w.-]+))?"
    r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)|\Z)",
    re.DOTALL,
)
# Tokens that a model writes around all its calls. They are removed if at least one call was read.
_WRAPPERS = re.compile(
    r"<\uff5ctool\u2581calls\u2581(?:begin|end)\uff5c>|<\|tool_calls_section_(?:begin|end)\|>|</?(?:minimax:tool_call|atem:function_calls)>"
)
# The beginning of a call. A match in the content that remains after reading is a call that could not be read.
_BEGUN = re.compile(
    r"<tool_call>|<(?:\w+:)?invoke name=|<\|tool_call(?:_start\|)?>|\[TOOL_CALLS\]|"
    r"<\uff5ctool\u2581call\u2581begin\uff5c>|<\|tool_call_begin\|>|<\|python_tag\|>"
)
Call = tuple[str, str]  # (name, arguments as JSON text)


def read_calls(text: str, tools: Sequence[Any]) -> tuple[str, str, list[Call], int]:
    """(reasoning, content without the calls, calls, number of calls that could not be read). The reasoning is empty unless the
    reply has channels (gpt-oss). `tools`: schemas of the tools that the model may call."""
    if "<|channel|>" in text:
        return _channels(text)
    calls: list[Call] = []
    content = text
    # Each pattern is searched in the whole text, so calls that match different patterns may change their order.
    for pattern, read in (
        (_BLOCK, lambda match: _from_block(match[1], tools)),
        (_INVOKE, lambda match: _from_block(match[0], tools)),
        (_MISTRAL, lambda match: _checked_call(match[1], match[2]) if match[1] else _from_json(match[2])),
        (_DEEPSEEK, lambda match: _checked_call(match[1], match[2])),
        (_KIMI, lambda match: _checked_call(re.sub(r":\d+\Z", "", match[1].strip()), match[2])),
        (_PYTHON, lambda match: _from_python(match[1])),
        (_GEMMA, lambda match: _checked_call(match[1], _gemma_to_json(match[2]))),
    ):

        def take(match: re.Match[str], read: Any = read) -> str:
            found = read(match)
            calls.extend(found)
            return "" if found else match[0]

        content = pattern.sub(take, content)
    if not calls and (bare := content.strip().removeprefix("<|python_tag|>").strip()).startswith("{"):
        names = {name_of(tool) for tool in tools}
        found = [call for part in _values(bare) for call in _from_json(part)]
        if found and all(name in names for name, _ in found):
            calls, content = found, ""
    if calls:
        content = _WRAPPERS.sub("", content)
    return "", content, calls, len(_BEGUN.findall(content))


def _channels(text: str) -> tuple[str, str, list[Call], int]:
    thoughts: list[str] = []
    contents: list[str] = []
    calls: list[Call] = []
    unread = 0
    for message in _CHANNEL.finditer(text):
        outside, name = message[1], message[2] or message[4]
        # The prompt may end within the analysis, and then the text before the first channel is a thought.
        if message[3] and "<|end|>" in outside:
            thought, _, outside = outside.rpartition("<|end|>")
            thoughts.append(thought)
        contents.append(outside)
        if name:
            found = _checked_call(name, message[5])
            calls += found
            unread += not found
            contents += [] if found else [message[0].removeprefix(message[1])]
        elif message[3]:
            (thoughts if message[3] == "analysis" else contents).append(message[5])
    return "\n".join(thoughts).strip(), "".join(contents), calls, unread


def _from_block(body: str, tools: Sequence[Any]) -> list[Call]:
    """The calls in a block: in JSON, or with their arguments in tags. An empty list if a call of the block cannot be read."""
    body = body.strip()
    if body.startswith(("{", "[")):
        return _from_json(body)
    calls: list[Call] = []
    for part in _NEXT_FUNCTION.split(body):
        function = _FUNCTION.fullmatch(part)
        name, mark, rest = part.partition("<arg_key>")
        name, inside = (function[1] or function[2], function[3]) if function else (name.strip(), mark + rest)
        # Text between the arguments comes from a tag that is not closed or has no value.
        if not re.fullmatch(r"[\w.-]+", name) or _PARAMETER.sub("", inside).strip():
            return []
        schema: Any = next((tool for tool in tools if name_of(tool) == name), {})
        parameters = (schema.get("function") or schema).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        arguments = {}
        for match in _PARAMETER.finditer(inside):
            key, value = (match[2], match[3]) if match[1] else (match[4].strip(), match[5])
            known = properties.get(key) if isinstance(properties, Mapping) else None
            is_text = isinstance(known, Mapping) and known.get("type") == "string"
            arguments[key] = value if is_text else _decoded(value, value)
        found = _checked_call(name, json.dumps(arguments))
        if not found:
            return []
        calls += found
    return calls


def _from_json(written: Any) -> list[Call]:
    value = _decoded(written, None) if isinstance(written, str) else written
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        found = _checked_call(
            call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        if not found:
            return []
        calls += found
    return calls


def _checked_call(name: str, arguments: str) -> list[Call]:
    """One call. An empty list if the name is empty, or if the arguments are not a JSON object that UTF-8 can hold."""
    name, decoded = name.strip(), _decoded(arguments.strip() or "{}", None)
    if not isinstance(decoded, dict) or not name:
        return []
    try:
        text = json.dumps(decoded, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return []
    # JSON can encode half of a surrogate pair, UTF-8 cannot.
    return [] if re.search("[\ud800-\udfff]", name + text) else [(name, text)]


def _from_python(text: str) -> list[Call]:
    """The calls in Python's syntax: one call or a list of calls. Arguments are literals, passed by name."""
    try:
        written = ast.parse(text.strip(), mode="eval").body
        calls = []
        for call in written.elts if isinstance(written, ast.List) else [written]:
            # A positional argument has no name, and neither has `**mapping`.
            if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
                return []
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            found = _checked_call(ast.unparse(call.func), json.dumps(arguments))
            if not found:
                return []
            calls += found
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _gemma_to_json(text: str) -> str:
    """The JSON text of a mapping in Gemma's form: keys have no quotes, and strings are between special tokens."""
    pieces = _GEMMA_STRING.split(text)
    # The pattern has one group, so every second piece is a string between special tokens.
    pieces[1::2] = [json.dumps(piece[5:-5], ensure_ascii=False) for piece in pieces[1::2]]
    pieces[::2] = [re.sub(r"([\w.-]+):", r'"\1":', piece) for piece in pieces[::2]]
    return "".join(pieces)


def _values(text: str) -> list[Any]:
    """The JSON values of a text, separated by `;` or white space. An empty list if the text has anything else."""
    values, start = [], 0
    decoder = json.JSONDecoder()
    while start < len(text):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        start = end + len(re.match(r"[\s;]*", text[end:])[0])  # type: ignore[index]  # matches the empty text
    return values


def _decoded(text: str, default: Any) -> Any:
    """The value of a JSON text. `default` if the text is invalid JSON (NaN and Infinity are invalid), has half of a surrogate pair,
    or is nested too deeply for a template."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        check_json(value, "a call", written=False)
    except (ValueError, RecursionError, DataError):
        return default
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def name_of(tool: Any) -> str:
    """The name in a tool's schema, directly or under the key `function`. An empty text if the schema is no mapping."""
    return str((tool.get("function") or tool).get("name")) if isinstance(tool, Mapping) else ""
