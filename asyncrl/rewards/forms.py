"""The forms in which rewards are written, told apart by their signature and made into TRL's, which the workers call.

| form          | signature                                                                           | called            |
|---------------|-------------------------------------------------------------------------------------|-------------------|
| TRL           | anything else, like `f(prompts, completions, completion_ids, **columns)`            | once for a group  |
| verl          | `compute_score(data_source, solution_str, ground_truth, extra_info=None, ...)`      | once a completion |
| reasoning-gym | `score_answer(answer, entry)`; a data set that has it; a function that returns one  | once a completion |

verl: `ground_truth` is the column of that name or `reward_model["ground_truth"]`, `extra_info` is {} where there is none,
every other parameter is a column; `score` of a returned dictionary counts, what else it has is logged as by TRL's `log_extra`.
reasoning-gym: `entry` is the row, `answer` what stands between the last `<answer>` and `</answer>` of the completion, and all of it
where there is no such pair.
Imported by the worker processes: the standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)
# Arguments that are not columns: a column of the data that a function would take by one of these names is refused.
RESERVED = ("prompts", "completions", "completion_ids", "generation_prompt", "trainer_state", "log_extra", "log_metric")


class UsageError(Exception):
    """The function was found but cannot be used: sent without a traceback."""


def as_trl(found: Any, source: str) -> Callable[..., Any]:
    """`found` as a function in TRL's form. Errors: `UsageError`, and whatever a function that returns a data set raises."""
    if not callable(found):
        if callable(getattr(found, "score_answer", None)):
            return _from_gym(found.score_answer)
        raise UsageError(f"{source} is {brief(found)}, not a function")
    parameters = inspect.signature(found).parameters
    if not parameters:
        made = found()
        if callable(getattr(made, "score_answer", None)):
            return _from_gym(made.score_answer)
        raise UsageError(
            f"{source} takes no arguments and returned {brief(made)}; expected a reward function, like "
            "f(completions, **columns), or a function that returns a reasoning-gym data set"
        )
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _from_verl(found, parameters)
    if {"answer", "entry"} == {p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD}:
        return _from_gym(found)
    return found  # type: ignore[no-any-return]  # callable, as its form shows


def columns_check(call: Callable[..., Any]) -> Callable[[Collection[str]], None]:
    """What tells of the columns of a row whether `call`, as `as_trl` gave it, can score it: by a `UsageError` that names what is
    missing."""
    if isinstance(call, _InOtherForm):
        own = call.check
        return lambda there: own([name for name in there if name not in RESERVED])
    parameters = inspect.signature(call).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]

    def check(there: Collection[str]) -> None:
        found = {*there, *RESERVED}
        if missing := [name for name in needed if name not in found]:
            raise UsageError(
                f"it needs {', '.join(map(repr, missing))}, but the row has only: {', '.join(sorted(found))}"
            )

    return check


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calling it only makes a coroutine: `async def`, also as a method or as `__call__` of an object."""
    if isinstance(call, _InOtherForm):
        return call.asynchronous
    # It is not asked whether it can be called, which B004 takes it for.
    return any(inspect.iscoroutinefunction(each) for each in (call, getattr(call, "__call__", None)))  # noqa: B004


def check_reserved(names: Collection[str], accepts: Collection[str] | None) -> None:
    """Errors: `UsageError` where a function that takes these arguments (None: all) would get one of ours and not the column."""
    if taken := [name for name in RESERVED if name in names and (accepts is None or name in accepts)]:
        raise UsageError(
            f"the data has the columns {', '.join(taken)}, but the run itself gives rewards an argument of that name; rename them"
        )


def text_of(completion: Any) -> str:
    """What the model wrote, as one string: a conversation's messages of the assistant, one after the other."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion if message.get("role") == "assistant")


@dataclass(frozen=True)
class _InOtherForm:
    """A function of another form, called as one of TRL's; which columns it needs does not stand in its signature."""

    call: Callable[..., Any]
    check: Callable[[Collection[str]], None]  # see `columns_check`
    asynchronous: bool

    def __call__(self, completions: list[Any], **columns: list[Any]) -> Any:
        return self.call(completions, **columns)


def _answer_of(completion: Any) -> str:
    text = text_of(completion)
    found = _ANSWER.match(text)
    return (found.group(1) if found else text).strip()


def brief(value: Any) -> str:
    """A value in words, for messages: its first 80 characters and its type."""
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"


def _from_verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {name: p.default is p.empty for name, p in parameters.items() if p.kind not in fixed}
    wanted.pop("solution_str")

    def check(there: Collection[str], truth: bool) -> None:
        found = {*there, "extra_info", *(["ground_truth"] if truth else ())}
        missing = [name for name, needed in wanted.items() if needed and name not in found]
        if missing:
            also = ' (or reward_model with "ground_truth" in it)' if "ground_truth" in missing else ""
            raise UsageError(
                f"it has verl's signature and needs the columns {', '.join(missing)}{also}; the columns of the data are: "
                f"{_listed(there)}"
            )

    def score(completions: list[Any], **columns: list[Any]) -> Any:
        row = {name: values[0] for name, values in columns.items() if name not in RESERVED}
        model = row.get("reward_model")
        truth = isinstance(model, Mapping) and "ground_truth" in model
        check(row, truth)
        if truth:
            row.setdefault("ground_truth", model["ground_truth"])  # type: ignore[index]  # a mapping, as `truth` says
        row.setdefault("extra_info", {})
        arguments = {name: row[name] for name in wanted if name in row}
        results = [function(solution_str=text_of(each), **arguments) for each in completions]
        return _gathered(results, columns["log_extra"])

    return _InOtherForm(score, lambda there: check(there, "reward_model" in there), is_async(function))


def _from_gym(function: Callable[..., Any]) -> Callable[..., Any]:
    def check(there: Collection[str]) -> None:
        if "answer" not in there:
            raise UsageError(
                "it scores entries of a reasoning-gym data set (question, answer, metadata); the columns of the data are: "
                f"{_listed(there)}"
            )

    def score(completions: list[Any], prompts: list[Any], **columns: list[Any]) -> Any:
        entry = {name: values[0] for name, values in columns.items() if name not in RESERVED}
        check(entry)
        entry.setdefault("question", prompts[0])
        return _gathered([function(answer=_answer_of(each), entry=entry) for each in completions], columns["log_extra"])

    return _InOtherForm(score, check, is_async(function))


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _gathered(results: list[Any], log_extra: Any) -> Any:
    """The scores; where the function is async, something that is awaited in the worker's own loop for all of them."""
    if not any(inspect.isawaitable(result) for result in results):
        return _scores(results, log_extra)

    async def wait_all() -> list[Any]:
        # Where one fails the call is over: the others must not run on in a worker that serves the next call.
        tasks = [asyncio.ensure_future(_value(result)) for result in results]
        try:
            return _scores(await asyncio.gather(*tasks), log_extra)
        finally:
            for task in tasks:
                task.cancel()

    return wait_all()


async def _value(result: Any) -> Any:
    return await result if isinstance(result, Awaitable) else result


def _scores(results: Sequence[Any], log_extra: Any) -> list[Any]:
    """`score` of each dictionary, or what is no score as it is; every other key of a dictionary is logged as a column."""
    rows = [result if isinstance(result, Mapping) else {} for result in results]
    for key in dict.fromkeys(key for row in rows for key in row if key != "score"):
        log_extra(key, [row.get(key) for row in rows])
    return [row.get("score", result) for row, result in zip(rows, results, strict=True)]
