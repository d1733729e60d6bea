"""The watchdog in real processes: wedged loop or lane, stall, hanging shutdown, a held GIL; and when it keeps quiet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import uvloop
import warm

from asyncrl.concurrency import awake
from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.watchdog import ProgressLimit, Watchdog
from asyncrl.config.schema import WatchdogConfig
from asyncrl.errors import StallError
from asyncrl.telemetry.recorder import Recorder

ROOT = Path(__file__).resolve().parents[2]

# A run with a watchdog of short timeouts. `body()` is the test's own; SHORT names the timeout under test.
PROGRAM = """
import asyncio, os, re, sys, threading, time
import anyio
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.watchdog import ProgressLimit, Watchdog
from asyncrl.config.schema import WatchdogConfig
from asyncrl.errors import StallError
from asyncrl.telemetry.recorder import Recorder

timeouts = dict(interval_s=0.05, loop_timeout_s=30, lane_timeout_s=30, stall_timeout_s=30, abort_grace_s=0.4)
progress = (0, 0)

{body}

async def main():
    recorder = Recorder(nvtx=False)
    lane = ThreadLane("trainer", recorder, close_timeout_s=20)
    supervisor = Supervisor()
    timeouts_now = {{**timeouts, **SHORT}}
    watchdog = Watchdog(
        WatchdogConfig(**timeouts_now), recorder=recorder, lanes=[lane], hard_exit=HARD,
        on_stall=supervisor.fail,
        progress_limit=lambda: ProgressLimit(progress, timeouts_now["stall_timeout_s"], "nothing was generated, scored or trained"),
        details=[lambda: "turn 7: 3 of 4 places claimed"],
    )
    async with watchdog, lane, supervisor:
        await body(recorder, lane, supervisor, watchdog)

try:
    asyncio.run(main())
except StallError as error:
    print("ended by StallError:", error, flush=True)
    sys.exit(error.exit_code)
"""


def run_program(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "users_program.py"
    path.write_text(PROGRAM.format(body=textwrap.dedent(body)))
    # Less than what hangs in these programs would take.
    return warm.run([sys.executable, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=50.0)


# what hangs -> the limit under test, what the body does, and what stderr says
WEDGED = {
    "the loop": (
        "dict(loop_timeout_s=0.4)",
        "await anyio.sleep(0.2); hangs()",
        [
            "the event loop has been silent for",
            "(event loop)",
            "turn 7: 3 of 4 places claimed",
            "users_program.py",
            "hangs",
        ],
    ),
    "a lane": (
        "dict(lane_timeout_s=0.4)",
        'supervisor.start("train pump", lambda: lane.run(hangs, name="microbatch")); await anyio.sleep(60)',
        ["lane 'trainer' has been held by closure 'microbatch'", "hangs", "task 'train pump'"],
    ),
    "the shutdown": (
        "{}",
        'watchdog.shutdown_deadline("SIGTERM")\n            with anyio.CancelScope(shield=True): await anyio.sleep(60)',
        ["shutdown (SIGTERM) did not end within 0.4 s"],
    ),
}


@pytest.mark.parametrize("what", WEDGED)
def test_what_hangs_is_named_and_the_process_ended(tmp_path: Path, what: str) -> None:
    short, body, named = WEDGED[what]
    done = run_program(
        tmp_path,
        f"""
        SHORT, HARD = {short}, True

        def hangs():
            time.sleep(60)

        async def body(recorder, lane, supervisor, watchdog):
            {body}
        """,
    )
    assert done.returncode == 4, done.stderr
    assert all(words in done.stderr for words in [*named, "ending the process with exit code 4"]), done.stderr


def test_a_stall_says_who_waits_for_whom_and_ends_the_run_in_order(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        SHORT, HARD = dict(stall_timeout_s=0.4, abort_grace_s=20), True

        async def train(recorder):
            with recorder.wait("train pump", "a whole group", on="score pump", cause="group"):
                try:
                    await asyncio.Event().wait()
                finally:
                    print("train pump cleaned up", flush=True)

        async def body(recorder, lane, supervisor, watchdog):
            supervisor.start("train pump", train, recorder)
            await anyio.sleep(60)
        """,
    )
    assert done.returncode == 4, done.stderr
    assert "nothing was generated, scored or trained for" in done.stderr
    assert "train pump waits for a whole group from score pump for" in done.stderr
    assert "Event.wait" in done.stderr
    assert "train pump cleaned up" in done.stdout and "ended by StallError" in done.stdout
    assert "ending the process" not in done.stderr  # it ended by itself


def test_children_and_strangers_are_left_alone(tmp_path: Path) -> None:
    """The hard end concerns this process only: a process it started lives on until it notices by itself."""
    marker = tmp_path / "child_lives"
    done = run_program(
        tmp_path,
        f"""
        import subprocess
        SHORT, HARD = dict(loop_timeout_s=0.3), True

        async def body(recorder, lane, supervisor, watchdog):
            code = "import sys, pathlib; sys.stdin.read(); pathlib.Path({str(marker)!r}).touch()"
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)
            time.sleep(60)
        """,
    )
    assert done.returncode == 4, done.stderr
    deadline = time.perf_counter() + 20
    while not marker.exists():  # its stdin closed with the parent; then it ends in its own time
        assert time.perf_counter() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "held",
    [
        're.match(r"(a+)+$", "a" * 64 + "b")  # computes',
        "ctypes.PyDLL(None).sleep(60)  # waits\nWatchdog._main = lambda self: None  # and it has not looked, not even once",
    ],
)
def test_a_held_gil_ends_the_process_too(tmp_path: Path, held: str) -> None:
    call, _, before = held.partition("\n")
    done = run_program(
        tmp_path,
        """
        SHORT, HARD = dict(loop_timeout_s=0.6, lane_timeout_s=0.6), True

        def catastrophic():
            CALL

        async def body(recorder, lane, supervisor, watchdog):
            await anyio.sleep(0.3)
            catastrophic()

        import ctypes
        BEFORE
        """.replace("CALL", call).replace("BEFORE", before),
    )
    assert done.returncode == -signal.SIGABRT, (done.returncode, done.stderr)
    assert "no thread has run Python for 1 s: something holds the interpreter's lock" in done.stderr
    assert "catastrophic" in done.stderr


def test_embedded_it_never_ends_the_process(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        SHORT, HARD = dict(loop_timeout_s=0.3, abort_grace_s=0.2), False

        async def body(recorder, lane, supervisor, watchdog):
            await anyio.sleep(0.1)
            time.sleep(1.2)  # far beyond loop_timeout and abort_grace
            await anyio.sleep(60)
        """,
    )
    assert done.returncode == 4, done.stderr  # the program's own reaction to the error
    assert "ended by StallError: the event loop has been silent" in done.stdout
    assert "ending the process" not in done.stderr


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_a_suspended_run_wakes_as_it_was(tmp_path: Path, library: str) -> None:
    """Stopped for longer than any limit, with a closure on the lane and a deadline on the loop: nobody speaks of it."""
    done = run_program(
        tmp_path,
        """
        import subprocess, uvloop
        SHORT, HARD = dict(stall_timeout_s=2, loop_timeout_s=2, lane_timeout_s=2), True
        asyncio.run = LIBRARY.run

        async def body(recorder, lane, supervisor, watchdog):
            global progress
            with anyio.fail_after(2.5):
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: lane.run(lambda: time.sleep(0.6), name="microbatch"))
                    stop = f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"
                    with subprocess.Popen(["sh", "-c", stop], start_new_session=True):
                        pass
                    for i in range(20):
                        progress = (i, 0)
                        await anyio.sleep(0.03)
        """.replace("LIBRARY", library),
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- in this process -----------------------------------------------------------------------------------------------


def short(**timeouts: float) -> WatchdogConfig:
    values = {
        "interval_s": 0.02,
        "loop_timeout_s": 30,
        "lane_timeout_s": 30,
        "stall_timeout_s": 30,
        "abort_grace_s": 30,
    }
    return WatchdogConfig(**{**values, **timeouts})  # type: ignore[arg-type]


async def test_standing_still_without_work_is_no_stall(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[StallError] = []
    work = False
    done = anyio.Event()

    def stop(error: StallError) -> None:
        heard.append(error)
        done.set()

    watchdog = Watchdog(
        short(),
        recorder=Recorder(nvtx=False),
        progress_limit=lambda: ProgressLimit((1, 2), 0.1, "nothing moved") if work else None,
        on_stall=stop,
        hard_exit=False,
    )
    async with watchdog:
        await anyio.sleep(0.3)
        assert heard == []
        work = True
        with anyio.fail_after(10):
            await done.wait()
    assert len(heard) == 1 and "nothing moved for 0.1" in str(heard[0])
    assert "asyncrl watchdog" in capsys.readouterr().err


async def test_a_gap_in_which_the_process_computed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that holds the GIL for long is no suspension."""
    at, used = 1000.0, 5.0
    for name, value in {"_last_reading": at, "_cpu_reading": (at, used), "_suspended_s": 0.0}.items():
        monkeypatch.setattr(awake, name, value)
    monkeypatch.setattr(awake, "time", SimpleNamespace(monotonic=lambda: at, process_time=lambda: used))
    found = []
    with awake.on_loop(asyncio.get_running_loop()):
        for seconds, computed in [(0.9, 0.0), (10.0, 0.25), (10.0, 10.0), (0.1, 0.0)]:
            at, used = at + seconds, used + computed
            found.append(awake.suspended_s())
    assert found == pytest.approx([0.0, 8.75, 8.75, 8.75]) and awake.now() == pytest.approx(at - 8.75)


@pytest.mark.parametrize("trouble", ["a broken counter", "no thread can be had"])
async def test_what_befalls_the_watchdog_ends_no_watch(
    trouble: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[StallError] = []
    done = anyio.Event()

    def limit() -> ProgressLimit:
        if trouble == "a broken counter":
            raise ZeroDivisionError("oops")
        return ProgressLimit((1, 2), 0.1, "nothing moved")

    def stop(error: StallError) -> None:
        heard.append(error)
        done.set()

    async with Watchdog(short(), recorder=Recorder(nvtx=False), progress_limit=limit, on_stall=stop, hard_exit=False):
        if trouble == "no thread can be had":
            monkeypatch.setattr(threading.Thread, "start", no_thread)
        with anyio.fail_after(10):
            await done.wait()
    said = "ZeroDivisionError: oops" if trouble == "a broken counter" else "nothing moved for 0.1"
    assert said in str(heard[0]) and said in capsys.readouterr().err


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_timer_does_not_count_time_in_which_the_job_was_suspended() -> None:
    async def main() -> float:
        loop, fired = asyncio.get_running_loop(), asyncio.Event()
        time_of, away = loop.time, 0.0
        loop.time = lambda: time_of() - away  # type: ignore[method-assign]  # of this loop alone
        began = loop.time()
        awake.call_later(loop, 0.05, fired.set)
        awake.call_later(loop, 0.02, lambda: pytest.fail("it was cancelled"))()
        away = 0.04  # the clock of uvloop's own timers runs on
        await fired.wait()
        return loop.time() - began

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) > 0.0499  # sums of floats round


async def test_work_that_may_never_end_is_left_by_who_is_cancelled() -> None:
    before, go_on = threading.active_count(), threading.Event()
    with anyio.move_on_after(0.01) as scope:
        await offload(go_on.wait, "work", abandon=True)
    assert scope.cancelled_caught and threading.active_count() == before + 1
    assert await offload(lambda: 5, "work", abandon=True) == 5
    [left] = [each for each in threading.enumerate() if each.name == "asyncrl-work"]
    go_on.set()
    left.join(10)
    assert not left.is_alive()


async def test_closing_ends_the_thread_and_a_countdown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # the time that counts: before the end no moment is too late
    stand_in = SimpleNamespace(now=lambda: now[0], on_loop=awake.on_loop)
    monkeypatch.setattr("asyncrl.concurrency.watchdog.awake", stand_in)
    before = threading.active_count()
    watchdog = Watchdog(
        short(abort_grace_s=0.05),
        recorder=Recorder(nvtx=False),
        progress_limit=lambda: ProgressLimit((0,), 30.0, "nothing moved"),
        on_stall=lambda error: pytest.fail(str(error)),
        hard_exit=True,  # if closing did not end the countdown, this would end the test run
    )
    async with watchdog:
        watchdog.shutdown_deadline("test")
    watchdog.close()
    for _ in range(20):  # a jump would not count: it is taken for a process that was stopped
        now[0] += 0.04
        await asyncio.sleep(0.01)
    assert threading.active_count() == before
