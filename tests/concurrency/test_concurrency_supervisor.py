"""The supervisor: first failure wins, everybody is awaited, nobody vanishes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import pytest
from support.virtual import virtual

from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.errors import LifecycleError, RewardError
from asyncrl_bench.virtual_time import run_virtual


def notes(exc: BaseException) -> str:
    return "\n".join(getattr(exc, "__notes__", ()))


async def sleeps(seconds: float, log: list[str] | None = None, label: str = "") -> None:
    try:
        await anyio.sleep(seconds)
        if log is not None:
            log.append(f"{label} done")
    except asyncio.CancelledError:
        if log is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)  # cleanup that takes its time is awaited too
            log.append(f"{label} cancelled")
        raise


async def fails(after: float, error: BaseException) -> None:
    await anyio.sleep(after)
    raise error


def test_the_end_of_one_pump_does_not_stop_the_others() -> None:
    async def main() -> tuple[list[str], float]:
        log: list[str] = []
        async with Supervisor() as supervisor:
            supervisor.start("a", sleeps, 1.0, log, "a")
            supervisor.start("b", sleeps, 3.0, log, "b")
        return log, asyncio.get_running_loop().time()

    assert run_virtual(main) == (["a done", "b done"], 3.0)


@virtual
async def test_the_first_failure_cancels_and_awaits_the_rest_and_comes_out_bare_with_its_name() -> None:
    error = RewardError("no")
    log: list[str] = []
    with pytest.raises(RewardError) as caught:
        async with Supervisor() as supervisor:
            supervisor.start("slow pump", sleeps, 100.0, log, "slow")
            supervisor.start("score pump", fails, 1.0, error)
    assert caught.value is error
    assert "in score pump" in notes(error)
    assert error.__context__ is None and error.__cause__ is None
    assert log == ["slow cancelled"]
    assert asyncio.get_running_loop().time() == 1.0


@virtual
async def test_a_failure_during_the_shutdown_is_a_note_of_the_first() -> None:
    async def fails_in_cleanup() -> None:
        try:
            await anyio.sleep(100)
        finally:
            raise OSError("disk full")

    with pytest.raises(ValueError, match="first") as caught:
        async with Supervisor() as supervisor:
            supervisor.start("publish pump", fails_in_cleanup)
            supervisor.start("train pump", fails, 1.0, ValueError("first"))
    assert "in train pump" in notes(caught.value)
    assert "afterwards also: OSError: disk full (in publish pump)" in notes(caught.value)


@virtual
async def test_what_follows_from_the_first_failure_is_no_note() -> None:
    """Closed edges, and the same error of many tasks; what says something else is told once."""

    async def fails_next(error: BaseException) -> None:
        try:
            await anyio.sleep(100)
        finally:
            raise error

    with pytest.raises(ValueError, match="first") as caught:
        async with Supervisor() as supervisor:
            supervisor.start("scoring", fails, 1.0, ValueError("first"))
            for _ in range(3):
                supervisor.start("generation", fails_next, anyio.BrokenResourceError())
                supervisor.start("generation", fails_next, anyio.ClosedResourceError())
                supervisor.start("generation", fails_next, ValueError("first"))
                supervisor.start("publishing", fails_next, OSError("disk full"))
            supervisor.start("reading", fails_next, anyio.BrokenResourceError("the sender died"))
    assert caught.value.__notes__[0] == "in scoring"
    assert sorted(caught.value.__notes__[1:]) == [
        "afterwards also: BrokenResourceError: the sender died (in reading)",
        "afterwards also: OSError: disk full (in publishing)",
    ]


class Base(BaseException):
    """No Exception, and none of asyncio's."""


async def grouped() -> None:
    async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
        inner.start_soon(fails, 1.0, KeyError("deep"))
        outer.start_soon(sleeps, 100.0)


async def suicidal() -> None:
    await anyio.sleep(1)
    raise asyncio.CancelledError


# what ends a run -> the pump that ends (None: the body does), and the error that comes out
ENDS: dict[str, tuple[Any, type[BaseException], str]] = {
    "a group of a pump": (grouped, KeyError, "deep"),
    "the body": (None, KeyError, "body"),
    "a stranger who cancels a pump": (suicidal, LifecycleError, "the pump was cancelled"),
    "the watchdog": (None, TimeoutError, "watchdog"),
    "no Exception": (lambda: fails(1.0, Base("mine")), Base, "mine"),
    "nobody, who is asked to end": (None, Base, ""),
}


@pytest.mark.parametrize("what", ENDS)
@virtual
async def test_whatever_ends_a_run_comes_out_alone_and_ends_the_pumps(what: str) -> None:
    pump, kind, text = ENDS[what]
    log: list[str] = []
    expected = contextlib.nullcontext() if not text else pytest.raises(kind, match=text)
    with expected as caught:
        async with Supervisor() as supervisor:
            supervisor.start("a", sleeps, 100.0, log, "a")
            if pump is not None:
                supervisor.start("the pump", pump)
            if what == "the watchdog":
                asyncio.get_running_loop().call_later(1, supervisor.fail, TimeoutError("watchdog"))
            await anyio.sleep(0.5)
            if what == "the body":
                raise KeyError("body")
            if not text:
                supervisor.cancel()
    assert log == ["a cancelled"] and asyncio.get_running_loop().time() <= 1.0
    assert what != "a group of a pump" or "in the pump" in notes(caught.value)


@pytest.mark.parametrize("how", ["native", "scope"])
@virtual
async def test_cancelling_the_owner_is_a_cancellation_not_a_failure(how: str) -> None:
    log: list[str] = []
    scope = anyio.CancelScope()

    async def owner() -> None:
        with scope:
            async with Supervisor() as supervisor:
                supervisor.start("a", sleeps, 100.0, log, "a")
                await anyio.sleep(50)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        await anyio.sleep(1)
        task.cancel() if how == "native" else scope.cancel()
    assert log == ["a cancelled"]
    assert task.cancelled() is (how == "native")


async def test_tasks_start_only_while_it_is_open() -> None:
    supervisor = Supervisor()
    for _ in range(2):
        with pytest.raises(LifecycleError, match="not open"):
            supervisor.start("too early, too late", sleeps, 1.0)
        async with supervisor:
            pass
