"""Tools of agents: schemas as transformers makes them, deadlines, and whatever a model or a tool may do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import enum
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pydantic
import pytest

from asyncrl.concurrency import isolated
from asyncrl.environments import tools
from asyncrl.environments.sandbox import Sandbox
from asyncrl.environments.tools import Tool, Toolbox, as_tool
from asyncrl.errors import ConfigError
from asyncrl.telemetry.recorder import Recorder


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def half(value: float) -> float:
    """Halves a number.

    Args:
        value: the number
    """
    return value / 2


async def weather(
    city: str,
    unit: Unit = Unit.CELSIUS,
    days: int | None = None,
    kind: Literal["rain", "snow"] = "rain",
    both: int | str = 1,
    many: list[str] = [],  # noqa: B006
    nested: dict[str, list[float]] = {},  # noqa: B006
    pair: tuple[int, str] = (1, "a"),
    mixed: list[int] | str = "",
    anything: Any = None,
) -> dict[str, int]:
    """Says how the weather is.

    It may be wrong.

    Args:
        city (str): the city,
            with its country
        unit: the unit
        days: how many days
        kind: what falls (choices: ["rain", "snow"])
        both: a number: or a text
        many: more cities
        nested: numbers by name
        pair: two values
        mixed: numbers or a text
        anything: whatever you like

    Returns:
        dict: The weather
        of the city

    Raises:
        KeyError: no such city
    """
    return {city: 3}


@dataclass
class Row:
    name: str
    cells: list[int]


class Model(pydantic.BaseModel):
    name: str


class Desk:
    def look(self, drawer: str) -> str:
        """Looks into a drawer.

        Args:
            drawer: its name
        """
        return f"nothing in {drawer}"


def nothing() -> None:
    """Does nothing."""


@pytest.mark.parametrize("function", [add, weather, Desk().look, nothing], ids=lambda each: each.__qualname__)
def test_a_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    assert as_tool(function).schema == get_json_schema(function)


def test_what_has_no_schema_is_refused_with_what_to_do() -> None:
    def bare(x: int) -> int:
        return x

    def untyped(x):  # type: ignore[no-untyped-def]
        """Does it.

        Args:
            x: a number
        """

    def unsaid(x: int) -> int:
        """Does it."""
        return x

    def odd(x: threading.Thread) -> None:
        """Does it.

        Args:
            x: a thread
        """

    for function, words in [
        (bare, "bare because it has no docstring"),
        (untyped, "untyped cannot be a tool: Argument x is missing a type hint.* Give each argument a type"),
        (
            unsaid,
            "unsaid cannot be a tool: .*no description for the argument 'x'.* describe the tool and each argument",
        ),
        (odd, "odd cannot be a tool: .*Thread.* give an asyncrl.Tool with a schema of your own"),
        (3, "3 is not a tool"),
    ]:
        with pytest.raises(ConfigError, match=words):
            as_tool(function)  # type: ignore[arg-type]


# -- calls ---------------------------------------------------------------------------------------------------------


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


class House:
    def __init__(self, timeout_s: float = 20.0, most: int = 100) -> None:
        self.recorder = Recorder(max_events=0)
        self.box = Toolbox(timeout_s, most, self.recorder)

    async def run(self, functions: list[Any], *calls: Any) -> list[str]:
        messages = await self.box.run([as_tool(each) for each in functions], calls)
        assert [each["role"] for each in messages] == ["tool"] * len(calls)
        assert [each["tool_call_id"] for each in messages] == [each["id"] for each in calls]
        return [each["content"] for each in messages]

    def counts(self) -> dict[str, float]:
        return {name: value for name, value in self.recorder.drain().items() if not name.endswith("/seconds")}


async def test_functions_coroutines_methods_and_tools_answer_in_the_order_of_the_calls() -> None:
    async def shout(text: str) -> str:
        return text.upper()

    own = Tool("shout", {"type": "function", "function": {"name": "shout"}}, shout)
    house = House()
    texts = await house.run(
        [add, weather, Desk().look, nothing, own],
        call("weather", '{"city": "Rome"}', 1),
        call("add", {"a": "3", "b": 4}, 2),
        call("look", '{"drawer": "one"}', 3),
        call("nothing", None, 4),
        call("shout", '{"text": "hi"}', 5),
    )
    assert texts == ['{"Rome": 3}', "7", "nothing in one", "null", "HI"]
    assert house.counts() == {f"tools/{name}/calls": 1 for name in ("weather", "add", "look", "nothing", "shout")}


@pytest.mark.parametrize(
    ("name", "arguments", "words", "counted"),
    [
        ("add", '{"a": 1', "the arguments are not valid JSON", "add/refused"),
        ("add", '{"a": 1, "b": ' + "9" * 5000 + "}", "the arguments are not valid JSON", "add/refused"),
        ("add", "[" * 100_000, "the arguments are not valid JSON", "add/refused"),
        ("add", "[1, 2]", "expected a JSON object", "add/refused"),
        ("add", "[]", "expected a JSON object", "add/refused"),
        ("add", "false", "expected a JSON object", "add/refused"),
        ("add", '{"a": 1}', "b: Missing required argument", "add/refused"),
        ("add", '{"a": 1, "b": 2, "c": 3}', "c: Unexpected keyword argument", "add/refused"),
        ("add", '{"a": 1, "b": "many"}', "b: Input should be a valid integer", "add/refused"),
        ("half", '{"value": "1e999"}', "value: Input should be a finite number", "half/refused"),
        ("half", '{"value": 1' + "0" * 400 + "}", "value: Input should be a valid number", "half/refused"),
        ("look", '{"drawer": 3}', "drawer: Input should be a valid string", "look/refused"),
        ("python", '{"code": 3}', "code: Input should be a valid string", "python/refused"),
        ("rm -rf /", "{}", "there is no tool 'rm -rf /'; the tools are: add, half, look, python", "unknown"),
        (None, None, "there is no tool", "unknown"),
    ],
)
async def test_a_bad_call_of_the_model_gives_the_model_a_text(
    name: Any, arguments: Any, words: str, counted: str
) -> None:
    house = House()
    [text] = await house.run([add, half, Desk().look, Sandbox().python], call(name, arguments))
    assert text.startswith("Error: ") and words in text and len(text) < 500
    assert house.counts()[f"tools/{counted}"] == 1


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("no\nsuch row"), SystemExit(3), asyncio.CancelledError("x"), Own("left")], ids=repr
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_tool_that_raises_gives_the_model_a_line_and_is_counted(
    error: BaseException, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> str:
        """Breaks."""
        raise error

    async def breaks_too() -> str:
        """Breaks."""
        await asyncio.sleep(0)
        raise error

    breaks_too.__name__ = "breaks"
    house = House()
    [text] = await house.run([breaks_too if asynchronous else breaks], call("breaks", "{}"))
    assert text.startswith("Error: ") and "\n" not in text
    if isinstance(error, ValueError):
        assert text == "Error: ValueError: no such row"
    assert house.counts() == {"tools/breaks/calls": 1, "tools/breaks/failed": 1}
    await house.run([breaks], call("breaks", "{}"))
    assert caplog.text.count("the tool breaks raised") == 1 and "Traceback" in caplog.text


async def test_a_validation_error_from_inside_a_tool_is_a_failure_of_the_tool() -> None:
    def inner(text: str) -> Any:
        """Reads a number.

        Args:
            text: the number
        """
        from pydantic import TypeAdapter

        return TypeAdapter(int).validate_python(text)

    house = House()
    [text] = await house.run([inner], call("inner", '{"text": "x"}'))
    assert "ValidationError" in text and house.counts()["tools/inner/failed"] == 1
    await house.run([inner], call("inner", "{}"))
    assert house.counts() == {"tools/inner/calls": 1, "tools/inner/refused": 1}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Row("a", [1, 2]), '{"name": "a", "cells": [1, 2]}'),
        ({"rows": [Model(name="é")]}, '{"rows": [{"name": "é"}]}'),
        (np.arange(3), "[0, 1, 2]"),
        ({"mean": np.float32(0.5), "day": datetime.date(2026, 1, 31)}, '{"mean": 0.5, "day": "2026-01-31"}'),
        (threading.Lock(), "Error: TypeError: the tool find returned <unlocked"),
        ([object()], "Error: TypeError: the tool find returned [<object object"),
        ({("a", 1): 2}, "Error: TypeError: the tool find returned {('a', 1): 2}, which JSON cannot hold"),
    ],
)
async def test_a_result_is_json_or_its_tool_is_named(result: Any, words: str) -> None:
    """And never a text such as `<object at 0x7f...>`, of which the model could make nothing."""

    def find() -> Any:
        """Finds."""
        return result

    house = House()
    [text] = await house.run([find], call("find", ""))
    refused = words.startswith("Error")
    assert text.startswith(words) if refused else text == words
    assert house.counts().get("tools/find/failed", 0) == refused


async def test_a_megabyte_is_cut_and_says_so() -> None:
    def dump() -> str:
        """Dumps."""
        return "x" * 1_000_000

    house = House()
    [text] = await house.run([dump], call("dump", ""))
    assert text == "x" * 100 + "\n[cut: the first 100 of 1,000,000 characters]"
    assert house.counts()["tools/dump/cut"] == 1


async def test_a_tool_that_hangs_gives_the_model_a_text_and_keeps_its_place_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tools, "MOST_THREADS", 1)
    released, entered = threading.Event(), threading.Event()

    def hangs() -> str:
        """Hangs."""
        entered.set()
        released.wait(60)
        return "late"

    house, before = House(timeout_s=0.2), {*threading.enumerate()}
    try:
        assert await house.run([hangs], call("hangs", "")) == ["Error: hangs did not answer within 0.2 s"]
        assert entered.is_set()
        # The only thread hangs, so the next call gets no thread, and its text says the same.
        assert await house.run([add], call("add", '{"a": 1, "b": 2}')) == ["Error: add did not answer within 0.2 s"]
        counts = house.counts()
        assert counts["tools/hangs/timeouts"] == counts["tools/add/timeouts"] == 1
    finally:
        released.set()
    house.box._timeout_s = 20.0
    assert await house.run([add], call("add", '{"a": 1, "b": 2}')) == ["3"]
    threads = {*threading.enumerate()} - before
    house.box.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


async def test_a_thread_that_cannot_be_started_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tools, "MOST_THREADS", 1)
    house = House()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            assert await house.run([nothing], call("nothing", "")) == ["Error: RuntimeError: can't start new thread"]
    assert await house.run([nothing], call("nothing", "")) == ["null"]
    house.box.close()


async def test_a_coroutine_that_ignores_its_deadline_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolated, "CLEANUP_S", 0.05)
    monkeypatch.setattr(isolated, "ABANDON_S", 0.1)
    released = asyncio.Event()

    async def deaf() -> str:
        """Hears nothing."""
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
        return "late"

    house = House(timeout_s=0.05)
    assert await house.run([deaf], call("deaf", "")) == ["Error: deaf did not answer within 0.05 s"]
    assert "tool deaf ignores its cancellation" in caplog.text
    [left] = [task for task in asyncio.all_tasks() if task.get_name() == "tool deaf"]
    released.set()
    await asyncio.wait([left])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_calls_of_one_reply_run_at_the_same_time(asynchronous: bool) -> None:
    """Each call waits for all others."""
    met, together = threading.Barrier(8), asyncio.Barrier(8)

    def meet() -> bool:
        """Waits for seven others."""
        met.wait(30)
        return True

    async def meet_too() -> bool:
        """Waits for seven others."""
        await together.wait()
        return True

    meet_too.__name__ = "meet"
    texts = await House().run([meet_too if asynchronous else meet], *(call("meet", "{}", n) for n in range(8)))
    assert texts == ["true"] * 8


async def test_a_synchronous_tool_leaves_the_loop_by_itself() -> None:
    def sleeps() -> str:
        """Sleeps."""
        time.sleep(0.3)
        return threading.current_thread().name

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    [text] = await House().run([sleeps], call("sleeps", "{}"))
    ticker.cancel()
    assert text != threading.main_thread().name and ticks > 5


async def test_cancelled_calls_leave_no_task() -> None:
    async def waits() -> str:
        """Waits."""
        await entered.wait()
        await asyncio.Event().wait()
        return ""

    before, entered = asyncio.all_tasks(), asyncio.Barrier(3)
    task = asyncio.create_task(House().run([waits], call("waits", "{}"), call("waits", json.dumps({}), 1)))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
