"""Adapts reward functions of three forms to TRL's form, which the workers call. The signature of a function shows its form.

| form          | signature                                                                          | called              |
|---------------|------------------------------------------------------------------------------------|---------------------|
| verl          | `compute_score(data_source, solution_str, ground_truth, extra_info=None, ...)`     | once per completion |
| reasoning-gym | `score_answer(answer, entry)`, a data set with this method, or its factory         | once per completion |
| TRL           | any other, such as `f(prompts, completions, completion_ids, **columns)`            | see `reward.batch`  |

verl: `solution_str` is the completion. Every other parameter is a column. Without a column `ground_truth` the function gets
`reward_model["ground_truth"]`, and without a column `extra_info` it gets {}.
reasoning-gym: `entry` is the row. `answer` is the text in the last `<answer>...</answer>`; without these tags, the completion.

The worker processes import this module, so it needs only the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.errors import shown

F = TypeVar("F")
_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Arguments that the run passes, also to `**columns`. If a function takes such an argument, a data column of that name is refused.
RESERVED = ("prompts", "completions", "completion_ids", "generation_prompt", "trainer_state", "log_extra", "log_metric")
# The run passes these only if the signature names them. A name that the signature lacks may be a data column of `**columns`.
BY_NAME = ("num_turns", "tool_calls", "notes", "base_url", "api_key")


def whole_group(function: F) -> F:
    """A decorator for a reward function that compares completions: each call must have all completions of a group. With such a
    function `reward.batch: auto` means `group`, and `reward.batch: trajectory` is refused."""
    function.__dict__["whole_group"] = True
    return function


class UsageError(Exception):
    """A function has a wrong signature, does not fit the data, or returns or logs wrong values. The worker sends no traceback."""


def as_trl(loaded: Any, source: str) -> Callable[..., Any]:
    """Adapts `loaded` to TRL's form. `source`: the name of `loaded` in errors. Errors: `UsageError` if `loaded` has no known form,
    and any error of a function that returns a data set."""
    if not callable(loaded):
        if callable(getattr(loaded, "score_answer", None)):
            return _from_gym(loaded.score_answer)
        raise UsageError(f"{source} is {brief(loaded)}, not a function")
    parameters = inspect.signature(loaded).parameters
    if not parameters:
        data_set = loaded()
        if callable(getattr(data_set, "score_answer", None)):
            return _from_gym(data_set.score_answer)
        raise UsageError(
            f"{source} takes no arguments and returned {brief(data_set)}; expected a reward function, like "
            "f(completions, **columns), or a function that returns a reasoning-gym data set"
        )
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _from_verl(loaded, parameters)
    if {"answer", "entry"} == {p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD}:
        return _from_gym(loaded)
    return loaded  # type: ignore[no-any-return]  # callable() is true


def columns_check(call: Callable[..., Any]) -> Callable[[Collection[str]], None]:
    """Returns `check(columns)`, which raises `UsageError` if `call` (from `as_trl`) needs a column that is not in `columns`."""
    if isinstance(call, _AdaptedFunction):
        own_check = call.check
        return lambda columns: own_check([name for name in columns if name not in RESERVED])
    parameters = inspect.signature(call).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _STARRED]

    def check(columns: Collection[str]) -> None:
        arguments = {*RESERVED, *BY_NAME}
        if missing := [name for name in needed if name not in {*columns, *arguments}]:
            raise UsageError(
                f"it needs {', '.join(map(repr, missing))}; the columns of the data are: "
                f"{_sorted_names({*columns} - arguments)}; a reward function may also take: {_sorted_names(arguments)}"
            )

    return check


def is_async(call: Callable[..., Any]) -> bool:
    """Whether `call` returns a coroutine: an `async def` function or method, or an object with an async `__call__`."""
    if isinstance(call, _AdaptedFunction):
        return call.asynchronous
    # ruff's B004 is meant for `hasattr(x, "__call__")` as a test for callables. Here the method itself is needed.
    return any(inspect.iscoroutinefunction(method) for method in (call, getattr(call, "__call__", None)))  # noqa: B004


def check_reserved(columns: Collection[str], parameters: Collection[str], takes_kwargs: bool) -> None:
    """Errors: `UsageError` for a column with the name of an argument that the run passes to the function. `parameters`: the
    function's parameters. `takes_kwargs`: the function also has `**kwargs`."""
    given = {*parameters, *(RESERVED if takes_kwargs else ())}
    if taken := [name for name in (*RESERVED, *BY_NAME) if name in columns and name in given]:
        raise UsageError(
            f"the data has the columns {', '.join(taken)}, but the run itself passes arguments of these names; rename the columns"
        )


def _text_of(completion: Any) -> str:
    """The completion as one string. If it is a list of messages, the contents of the assistant's messages are joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion if message.get("role") == "assistant")


@dataclass(frozen=True)
class _AdaptedFunction:
    """A function of verl's or reasoning-gym's form, adapted to TRL's form. `check` knows which columns the function needs."""

    call: Callable[..., Any]
    check: Callable[[Collection[str]], None]  # see `columns_check`
    asynchronous: bool

    def __call__(self, completions: list[Any], **columns: list[Any]) -> Any:
        return self.call(completions, **columns)


def _answer_of(completion: Any) -> str:
    text = _text_of(completion)
    match = _ANSWER.match(text)
    return (match.group(1) if match else text).strip()


def brief(value: Any) -> str:
    """`shown(value)` and the value's type, for messages. For an exception: its type and complete text."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    return f"{shown(value)} ({type(value).__name__})"


def _from_verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    # Parameter name -> whether it has no default.
    is_required = {name: p.default is p.empty for name, p in parameters.items() if p.kind not in _STARRED}
    is_required.pop("solution_str")

    def check(columns: Collection[str], has_nested_truth: bool) -> None:
        available = {*columns, "extra_info", *(["ground_truth"] if has_nested_truth else ())}
        missing = [name for name, needed in is_required.items() if needed and name not in available]
        if missing:
            alternative = ' (or reward_model with "ground_truth" in it)' if "ground_truth" in missing else ""
            raise UsageError(
                f"it has verl's signature and needs the columns {', '.join(missing)}{alternative}; the columns of the data are: "
                f"{_sorted_names(columns)}"
            )

    def score(completions: list[Any], **columns: list[Any]) -> Any:
        row = {name: values[0] for name, values in columns.items() if name not in RESERVED}
        nested = row.get("reward_model")
        has_nested_truth = isinstance(nested, Mapping) and "ground_truth" in nested
        check(row, has_nested_truth)
        if has_nested_truth:
            row.setdefault("ground_truth", nested["ground_truth"])  # type: ignore[index]  # `has_nested_truth`: a mapping
        row.setdefault("extra_info", {})
        arguments = {name: row[name] for name in is_required if name in row}
        return _collect([function(solution_str=_text_of(completion), **arguments) for completion in completions])

    # Before the first call only the names of columns are known, so assume that a column `reward_model` has a ground truth.
    return _AdaptedFunction(score, lambda columns: check(columns, "reward_model" in columns), is_async(function))


def _from_gym(function: Callable[..., Any]) -> Callable[..., Any]:
    def check(columns: Collection[str]) -> None:
        if "answer" not in columns:
            raise UsageError(
                "it scores entries of a reasoning-gym data set (question, answer, metadata); the columns of the data are: "
                f"{_sorted_names(columns)}"
            )

    def score(completions: list[Any], prompts: list[Any], **columns: list[Any]) -> Any:
        entry = {name: values[0] for name, values in columns.items() if name not in RESERVED}
        check(entry)
        entry.setdefault("question", prompts[0])
        return _collect([function(answer=_answer_of(text), entry=entry) for text in completions])

    return _AdaptedFunction(score, check, is_async(function))


def _sorted_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _collect(results: list[Any]) -> Any:
    """`results`, or if the function is async: a coroutine that awaits all `results` concurrently and returns their values."""
    if not any(inspect.isawaitable(result) for result in results):
        return results

    async def wait_all() -> list[Any]:
        # After an error the other tasks are cancelled: they must not run while the worker serves the next call.
        tasks = [asyncio.ensure_future(_value(result)) for result in results]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    return wait_all()


async def _value(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result
