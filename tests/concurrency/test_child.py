"""Child processes: start, output, ends of every kind, and whose death takes whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import runpy
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import uvloop
from transport_helpers import alive, environment, line, living, until

from asyncrl.concurrency import child as room
from asyncrl.concurrency.child import ChildProcess, open_output
from asyncrl.errors import AsyncrlError

PROGRAM = "child_program"
GENERATES = "asyncrl.generation.worker.main"
PATH = {"PYTHONPATH": str(Path(__file__).parent)}
SOON = 20.0  # seconds: a bound for what another process does, on a busy machine


def start(name: str = "worker 0", log: Path | None = None, program: str = PROGRAM, **settings: Any) -> ChildProcess:
    given = {**os.environ, **PATH, **settings.pop("environment", {})}
    return ChildProcess(name, program, environment=given, output=open_output(log), **settings)


@asynccontextmanager
async def worker(**settings: Any) -> AsyncIterator[ChildProcess]:
    """One that is ready, and has ended after the block."""
    made = start(**settings)
    try:
        yield made
    finally:
        await made.aclose(SOON)
        assert made.ended.done()
        assert not alive(made.pid)


async def ask(made: ChildProcess, **message: Any) -> dict[str, Any]:
    made.channel.send(message)
    async with asyncio.timeout(SOON):
        return await made.channel.receive()


async def end_of(made: ChildProcess) -> int | None:
    await asyncio.wait([made.ended], timeout=SOON)
    return made.exit_code


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def used_before() -> None:
    """uvloop keeps a pipe for signals as long as the process lives, and earlier tests may have left boards to the collector."""
    gc.collect()
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Neither a descriptor nor a child, however a test ends its workers. (The loop's own are there before and after.)"""
    descriptors, before = open_descriptors(), {child.pid for child in psutil.Process().children()}
    yield
    assert open_descriptors() == descriptors
    assert {child.pid for child in psutil.Process().children()} <= before


# ---- start


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_worker_has_what_it_was_given_and_no_more(run: Callable[..., Any]) -> None:
    async def under() -> None:
        read, write = os.pipe()
        os.write(write, b"weights")
        try:
            async with worker(fds=(read,), environment={"ASYNCRL_TEST": "yes"}) as made:
                about = await ask(made, echo="ä", read=read)
                assert (about["echo"], about["environment"], about["inherited"]) == ("ä", "yes", "weights")
                assert about["group"] == about["session"] == made.pid  # Ctrl-C in our terminal is not for it
                assert about["stdin"] == ""
                channel, parent = map(int, about["arguments"])
                assert parent == os.getpid()
                assert about["open"][str(channel)].startswith("socket:")
                pipe = os.readlink(f"/proc/self/fd/{write}")
                assert [each for each, target in about["open"].items() if target == pipe] == [str(read)]
                assert made.status == "is running"
            assert (made.exit_code, made.status) == (0, "exited with status 0")
        finally:
            os.close(read)
            os.close(write)

    run(under())


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such descriptor; a log that cannot be; and no descriptor left to watch the process with."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        start(fds=(10_000,))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        start(log=tmp_path / "file" / "w.log")

    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many"):
        start()


async def test_where_a_process_has_no_descriptor_its_end_is_heard_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    async with worker() as made:
        assert (await ask(made, exit=7)) == {"last": "words"}
        assert await end_of(made) == 7


# ---- output


async def test_output_is_appended_to_the_log_and_each_worker_has_its_own_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "workers" / "worker-0.log"
    for life in ("first", "second"):
        async with worker(log=log) as made:
            await ask(made, say=f"{life} life\n", echo=1)
            await ask(made, say="a warning\n", to=2, echo=1)
            assert made.last_lines() == f"{life} life\na warning"
            assert made.last_lines(1) == "a warning"
        assert made.last_lines() == f"{life} life\na warning"
    assert log.read_text() == "first life\na warning\nsecond life\na warning\n"


async def test_the_last_lines_are_fit_to_be_shown() -> None:
    said = "10%\r50%\r100%\r\n\n\x1b[31mred\x1b[0m\t\x00\n\xff\xfe bytes\n" + "long " * 1000 + "\nunfinished"
    async with worker() as made:
        await ask(made, say=said, echo=1)
        shown = made.last_lines().split("\n")
    long = ("long " * 1000)[: room._LONGEST_LINE] + "..."
    assert shown == ["100%", "�[31mred�[0m\t�", "�� bytes", long, "unfinished"]


async def test_megabytes_of_output_and_a_log_that_is_cut_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    log.write_text("before\n")
    async with worker(log=log) as made:
        for _ in range(4):
            await ask(made, say="x" * 99 + "\n" + "spam\n" * 200_000, echo=1)
        assert made.last_lines(10**9).count("\n") < room._TAIL_BYTES
        os.truncate(log, 0)
        assert made.last_lines() == ""
        await ask(made, say="more than before\n", echo=1)
        assert made.last_lines() == "an before"  # where it began there is something else now; nothing older is shown


# ---- ends


async def test_a_child_that_cannot_start_tells_why() -> None:
    async with worker(program="no_such_module") as made:
        assert await end_of(made) == 1
        with pytest.raises(EOFError):
            await made.channel.receive()
    assert made.last_lines().endswith("No module named no_such_module")


async def test_a_worker_that_ends_is_heard_with_its_last_words() -> None:
    async with worker() as made:
        made.channel.send({"exit": 3})
        made.channel.send({"echo": "never read"})
        assert await end_of(made) == 3
        assert await made.channel.receive() == {"last": "words"}
        with pytest.raises(EOFError):
            await made.channel.receive()
        assert (made.status, made.last_lines()) == ("exited with status 3", "")


@pytest.mark.parametrize("by", ["somebody", "us"])
async def test_a_worker_that_is_killed_is_heard_by_its_signal_and_by_who_receives(by: str) -> None:
    async with worker() as made:
        await ask(made, say="at work\n", echo=1)
        waiting = asyncio.ensure_future(made.channel.receive())
        await asyncio.sleep(0)
        os.kill(made.pid, signal.SIGKILL) if by == "somebody" else made.kill()
        with pytest.raises(EOFError):
            await waiting
        assert await end_of(made) == -signal.SIGKILL
    assert (made.status, made.last_lines()) == ("was killed by SIGKILL", "at work")
    made.kill()
    await made.aclose(0.0)


@pytest.mark.parametrize("how", ["stopped", "stuck"])
async def test_a_worker_that_does_not_end_is_killed_after_its_grace(how: str) -> None:
    async with worker() as made:
        await ask(made, echo=1)
        if how == "stopped":
            os.kill(made.pid, signal.SIGSTOP)
        else:
            assert await ask(made, stick=1) == {"stuck": True}
        began = time.monotonic()
        async with asyncio.timeout(SOON):
            await made.aclose(0.3)
        assert time.monotonic() - began >= 0.3
        assert made.status == "was killed by SIGKILL"


async def test_a_stopped_guard_is_killed_also_if_its_worker_is_hung_up_after_the_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "GUARD_S", 0.5)
    async with worker(guarded=True, environment={"ASYNCRL_TEST_UNTIED": "yes"}) as made:
        await ask(made, echo=1)
        guard = psutil.Process(made.pid)
        guard.suspend()
        made.kill()
        made.hang_up(0.0)
        try:
            assert await end_of(made) == -signal.SIGKILL
        finally:
            end(guard)


@pytest.mark.parametrize("how", ["killed", "ends", "closed"])
async def test_what_a_worker_started_ends_with_it(how: str) -> None:
    async with worker() as made:
        started = (await ask(made, start=1))["started"]
        assert alive(started)
        if how == "killed":
            os.kill(made.pid, signal.SIGKILL)
        elif how == "ends":
            await ask(made, exit=0)
        else:
            await made.aclose(SOON)
        await end_of(made)
        await until(lambda: not alive(started))


async def test_closing_one_worker_leaves_another_alone() -> None:
    """It did not inherit the other's end of a channel, either."""
    async with worker() as first, worker() as second:
        await asyncio.gather(ask(first, echo=1), ask(second, echo=1))
        await first.aclose(SOON)
        assert first.exit_code == 0
        assert (await ask(second, echo=2))["echo"] == 2


async def test_bytes_past_the_protocol_do_not_end_the_process() -> None:
    async with worker() as made:
        made.channel.send({"write": "Warning: no GPU\n"})
        with pytest.raises(AsyncrlError, match=r"worker 0 wrote .* no message: b'Warning: no GPU"):
            await made.channel.receive()
        assert made.status == "is running"


# ---- cancellation


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_a_life_that_is_cancelled_at_any_moment_leaves_nothing(native: bool) -> None:
    """Cancelled after 0, 1, 2, ... turns of the loop, before the start, in `receive` and `aclose`."""
    before, made = open_descriptors(), []

    async def life() -> None:
        await anyio.lowlevel.checkpoint()
        process = start(program="no_such_module")
        made.append(process)
        try:
            with pytest.raises(EOFError):
                await process.channel.receive()
        finally:
            await process.aclose(SOON)
            assert process.ended.done()

    async def cancelled_after(turns: int) -> bool:
        scope = anyio.CancelScope()

        async def scoped() -> None:
            with scope:
                await life()

        task = asyncio.ensure_future(life() if native else scoped())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel() if native else scope.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        return task.cancelled() or scope.cancelled_caught

    for turns in range(12):
        # On a busy machine the child may die before that turn. Then the life has ended by itself, and is tried again.
        for _ in range(20):
            cancelled = await cancelled_after(turns)
            assert open_descriptors() == before
            if cancelled:
                break
        assert cancelled, f"a life never lasted for {turns} turns"
    assert len(made) >= 10
    assert not any(alive(process.pid) for process in made)


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_a_cancelled_close_has_ended_the_worker_all_the_same(turns: int, native: bool) -> None:
    """The worker is stuck: the whole grace would be a minute. A second cancellation does not hurt either."""
    async with worker() as made:
        assert await ask(made, stick=1) == {"stuck": True}
        scope = anyio.CancelScope()

        async def close() -> None:
            with scope:
                await made.aclose(60.0)

        task = asyncio.ensure_future(close())
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel() if native else scope.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(SOON):
            await asyncio.wait([task])
        assert task.cancelled() if native else scope.cancelled_caught
        assert made.exit_code == -signal.SIGKILL
        assert not alive(made.pid)


# ---- the parent ends

NODE = """
import asyncio, os, sys
from asyncrl.concurrency.child import ChildProcess, open_output

async def main(program, words):
    worker = ChildProcess("worker 0", program, environment=os.environ, output=open_output(None))
    for word in words:
        worker.channel.send({word: True})
        await worker.channel.receive()
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""
LATE = """
import os, sys, time
from asyncrl.concurrency.child import die_with_parent
open(os.environ["ASYNCRL_TEST_HERE"], "w").close()
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.001)
die_with_parent(int(sys.argv[2]))
open(os.environ["ASYNCRL_TEST_STILL_HERE"], "w").close()
"""


def node(program: str, *arguments: str, **extra: str) -> Any:
    path = os.pathsep.join([extra.pop("path", ""), PATH["PYTHONPATH"], environment()["PYTHONPATH"]])
    return living(NODE, program, *arguments, PYTHONPATH=path.strip(os.pathsep), **extra)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", ["stuck", "stopped", "untied"])
def test_a_worker_does_not_outlive_the_node(state: str, how: signal.Signals) -> None:
    """Stuck or stopped it is the kernel that ends it; without that, the end of the channel does."""
    extra = {"ASYNCRL_TEST_UNTIED": "yes"} if state == "untied" else {}
    with node(PROGRAM, "stick" if state == "stuck" else "echo", **extra) as parent:
        pid = int(line(parent))
        started = psutil.Process(pid)
        try:
            if state == "stopped":
                os.kill(pid, signal.SIGSTOP)
            parent.send_signal(how)
            parent.wait(SOON)
            asyncio.run(until(lambda: not alive(pid)))  # one that is stuck or stopped reads no channel
        finally:
            end(started)


def test_a_worker_whose_node_ended_before_it_could_ask_ends_itself(tmp_path: Path) -> None:
    (tmp_path / "late_program.py").write_text(LATE)
    here, still = tmp_path / "here", tmp_path / "still"
    names = {"ASYNCRL_TEST_HERE": str(here), "ASYNCRL_TEST_STILL_HERE": str(still)}
    with node("late_program", path=str(tmp_path), **names) as parent:
        pid = int(line(parent))
        started = psutil.Process(pid)
        try:
            asyncio.run(until(here.exists))
            parent.kill()
            parent.wait(SOON)
            asyncio.run(until(lambda: not alive(pid)))
            assert not still.exists()
        finally:
            end(started)


def test_a_worker_is_tied_to_its_node_before_it_loads_what_takes_time_and_loads_it_without_collections(
    monkeypatch: pytest.MonkeyPatch, on_loading: Callable[[str], list[bool]]
) -> None:
    tied: list[int] = []
    monkeypatch.setattr("asyncrl.concurrency.child.die_with_parent", tied.append)
    monkeypatch.setattr(sys, "argv", ["main", "3", "4711"])
    collecting = on_loading("asyncrl.generation.worker.server")
    try:
        with pytest.raises(ImportError, match="about to be loaded"):
            runpy.run_module(GENERATES, run_name="__main__")
    finally:
        gc.enable()
    assert tied == [4711] and collecting == [False]


def end(process: psutil.Process) -> None:
    """Only where the test failed: it is nobody's child any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
