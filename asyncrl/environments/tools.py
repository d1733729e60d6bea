"""Tools of agents: plain functions that a model may call.

    function --> `as_tool` --> schema for the chat template
    calls of a reply --> `Toolbox.run` --> one message for each call, in the order of the calls

The model may write anything as the arguments of a call, and a tool may raise anything. Each failure of a call becomes a short text
for the model and a count `tools/...`. Only a Ctrl-C is raised in the episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import anyio
from pydantic import ConfigDict, PydanticUserError, ValidationError, validate_call
from pydantic_core import to_jsonable_python

from asyncrl.concurrency.isolated import run_isolated
from asyncrl.concurrency.offload import StandbyThread
from asyncrl.concurrency.shield import call_soon
from asyncrl.config.imports import is_interrupt
from asyncrl.errors import ConfigError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Messages

# At its first use pydantic reads its plugins from files. Use it once at import: a later read would block the event loop.
validate_call(lambda: None)

# Limit of calls of synchronous tools that run at the same time. A call that has missed its deadline counts until the call ends.
MOST_THREADS = 256
# A longer error text is cut.
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `schema`: in OpenAI's form. `call` gets the arguments by keyword. A coroutine function runs on the event loop, any
    other function in a thread. `call` returns a text, or a value that JSON can hold (dataclasses and pydantic models included)."""

    name: str
    schema: Mapping[str, Any]
    call: Callable[..., Any]


AnyTool: TypeAlias = Tool | Callable[..., Any]


def as_tool(tool: AnyTool) -> Tool:
    """Make a tool from a function. The function's docstring must describe the tool and each argument in Google's style, and the
    arguments must have types. The types of a call's arguments are checked. A `Tool` is returned unchanged. Errors: ConfigError."""
    if isinstance(tool, Tool):
        return tool
    name = getattr(tool, "__name__", "")
    if not callable(tool) or not name.isidentifier():
        raise ConfigError(f"{tool!r:.80} is not a tool; give a function with a name, or an asyncrl.Tool")
    # Each access to a method makes a new object, so the cache of `_checked` uses the method's function.
    function = getattr(tool, "__func__", tool)
    schema, checked = _checked(function)
    return Tool(name, schema, checked if function is tool else partial(checked, tool.__self__))  # type: ignore[attr-defined]  # a method


@lru_cache(maxsize=256)
def _checked(function: Callable[..., Any]) -> tuple[dict[str, Any], Callable[..., Any]]:
    """(schema, a wrapper of the function that checks the arguments). Errors: ConfigError."""
    # Not at the top: transformers may import torch, and this module is imported without torch.
    from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        schema = get_json_schema(function)
        # Without a title, older releases of pydantic name an error after `__name__`, and newer releases after `__qualname__`.
        title = getattr(function, "__qualname__", None)
        config = ConfigDict(title=title, arbitrary_types_allowed=True, allow_inf_nan=False)
        return schema, validate_call(config=config)(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"{getattr(function, '__qualname__', function)} cannot be a tool: {error} Give each argument a type, and describe the "
            "tool and each argument in a docstring of Google's style; or give an asyncrl.Tool with a schema of your own"
        ) from error
    except (ValueError, TypeError, NameError, PydanticUserError) as error:
        raise ConfigError(f"{getattr(function, '__qualname__', function)} cannot be a tool: {error}") from error


logger = logging.getLogger(__name__)


class CallRefused(Exception):
    """A tool cannot be called with these arguments. The model reads the text."""


class Toolbox:
    """Runs the calls of tools, with the limits and the counts of a run."""

    def __init__(self, timeout_s: float, max_chars: int, recorder: Recorder) -> None:
        """`timeout_s`: the time limit of one call. `max_chars`: a longer result is cut."""
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self._recorder = recorder
        self._thread_limit = asyncio.Semaphore(MOST_THREADS)
        self._idle: list[StandbyThread] = []
        self._closed = False
        self._logged = set[str]()  # names of tools

    async def run(self, tools: Sequence[Tool], calls: Sequence[Mapping[str, Any]]) -> Messages:
        """Run these calls concurrently. `calls`: in OpenAI's form. Returns a message with the role `tool` for each, in order."""
        by_name = {tool.name: tool for tool in tools}
        return list(await asyncio.gather(*(self._message(by_name, call) for call in calls)))

    async def _message(self, tools: Mapping[str, Tool], call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or {}
        name = str(function.get("name"))
        if (tool := tools.get(name)) is None:
            # The model made up the name, so no metric is named after it.
            self._recorder.count("tools/unknown")
            offered = f"the tools are: {', '.join(tools)}" if tools else "no tools are offered"
            text = f"Error: there is no tool {name!r:.80}; {offered}"
        else:
            text = await self._answer(tool, function.get("arguments"))
        return {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": text}

    async def _answer(self, tool: Tool, arguments: Any) -> str:
        self._recorder.count(f"tools/{tool.name}/calls")
        try:
            values = _arguments(arguments)
            began = anyio.current_time()
            with anyio.move_on_after(self._timeout_s) as timer:
                text = _text(await self._call(tool, values), tool.name)
            self._recorder.observe(f"tools/{tool.name}/seconds", anyio.current_time() - began)
            if timer.cancelled_caught:
                self._recorder.count(f"tools/{tool.name}/timeouts")
                return f"Error: {tool.name} did not answer within {self._timeout_s:g} s"
        except Exception as error:
            # A ValidationError with another title comes from inside the tool. `tool.call` of a method is a `partial`.
            title = getattr(getattr(tool.call, "func", tool.call), "__qualname__", None)
            refused = isinstance(error, CallRefused) or (isinstance(error, ValidationError) and error.title == title)
            self._recorder.count(f"tools/{tool.name}/{'refused' if refused else 'failed'}")
            if not refused and tool.name not in self._logged:
                self._logged.add(tool.name)
                words = "the tool %s raised an error; the model reads the error, and later errors of this tool are only counted"
                logger.warning(words, tool.name, exc_info=error)
            return f"Error: {'' if refused else f'{type(error).__name__}: '}{_brief(error)}"
        if len(text) > self._max_chars:
            self._recorder.count(f"tools/{tool.name}/cut")
            text = f"{text[: self._max_chars]}\n[cut: the first {self._max_chars:,} of {len(text):,} characters]"
        return text

    async def _call(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        call, name = partial(tool.call, **arguments), f"tool {tool.name}"

        async def work() -> Any:
            result = call() if inspect.iscoroutinefunction(tool.call) else await self._in_thread(call)
            return await result if inspect.isawaitable(result) else result

        try:
            return await run_isolated(work, name)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            # SystemExit, for example.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call the function in a thread. A thread cannot be stopped, so a late call counts in `MOST_THREADS` until it ends."""
        await self._thread_limit.acquire()
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        # The start of a thread blocks the loop until the thread runs, so threads are reused.
        try:
            thread = self._idle.pop() if self._idle else StandbyThread("asyncrl-tool")
        except BaseException:
            self._thread_limit.release()
            raise
        done: asyncio.Future[None] = loop.create_future()
        results, errors = list[Any](), list[BaseException]()

        def finish() -> None:
            self._idle.append(thread)
            self._thread_limit.release()
            if self._closed:
                self.close()
            if not done.done():
                done.set_result(None)

        def work() -> None:
            try:
                results.append(context.run(function))
            except BaseException as error:
                errors.append(error)
            call_soon(loop, finish)

        thread.work.put(work)
        await done
        if errors:
            raise errors.pop()
        return results[0]

    def close(self) -> None:
        """End all idle threads. A thread with a running call ends after the call."""
        self._closed = True
        while self._idle:
            self._idle.pop().work.put(None)


def _arguments(written: Any) -> dict[str, Any]:
    """The arguments that the model wrote, as JSON text or as a mapping. Errors: CallRefused."""
    if isinstance(written, str):
        try:
            written = json.loads(written) if written.strip() else None
        except (ValueError, RecursionError) as error:
            raise CallRefused(f"the arguments are not valid JSON: {error}") from None
    written = {} if written is None else written
    if not isinstance(written, Mapping):
        raise CallRefused(
            f"the arguments are {json.dumps(written)[:80]}; expected a JSON object of the arguments by name"
        )
    return {str(name): value for name, value in written.items()}


def _text(result: Any, name: str) -> str:
    """The result of a tool as a text: a text unchanged, any other value as JSON. Errors: TypeError."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the tool {name} returned {result!r:.80}, which JSON cannot hold ({error}); return a text, numbers, lists, mappings, "
            "a dataclass or a pydantic model"
        ) from None


def _plain(value: Any) -> Any:
    """Converts arrays, tensors, and what pydantic knows (dataclasses, dates, paths, sets) to JSON types. Errors: ValueError."""
    return value.tolist() if hasattr(value, "tolist") else to_jsonable_python(value)


def _brief(error: Exception) -> str:
    """The error in one short line, for the model."""
    if isinstance(error, ValidationError):
        text = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)
        )
    else:
        text = " ".join(str(error).split())
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}..."
