"""The lag monitor on a real loop, blocked on purpose; the processor in words, and how many of its cores are free."""

from __future__ import annotations

import asyncio
import platform
import re
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop

import asyncrl
from asyncrl.telemetry import machine
from asyncrl.telemetry.lag import BlockSampler, monitor, top_user_frame
from asyncrl.telemetry.recorder import Recorder


def my_reward_that_sleeps(looks: list[str | None]) -> None:
    while len(looks) < 2:  # at the second look the first is counted
        time.sleep(0.5)


async def _run_blocked(recorder: Recorder, reports: list[str], looks: list[str | None]) -> None:
    reported = anyio.Event()

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    async with anyio.create_task_group() as group:
        group.start_soon(monitor, recorder, 0.01, 0.1, report)
        await anyio.wait_all_tasks_blocked()  # the monitor is running by now
        looks.clear()
        my_reward_that_sleeps(looks)
        with anyio.fail_after(30):
            await reported.wait()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_blocking_callback_is_named_with_its_duration(
    run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, reports, looks = Recorder(), list[str](), list[str | None]()
    monkeypatch.setattr(
        "asyncrl.telemetry.lag.top_user_frame", lambda thread: looks.append(top_user_frame(thread)) or looks[-1]
    )
    threads = threading.active_count()
    run(_run_blocked(recorder, reports, looks))
    assert threading.active_count() == threads
    found = re.fullmatch(
        r"event loop blocked (\d+\.\d\d) s in test_event_loop_lag\.py:(\d+) my_reward_that_sleeps", reports[0]
    )
    assert found, reports
    assert float(found.group(1)) >= 0.4
    assert int(found.group(2)) - my_reward_that_sleeps.__code__.co_firstlineno in (1, 2)
    metrics = recorder.drain()
    assert metrics["loop/blocked"] >= 1
    assert metrics["loop/lag_ms_p99"] >= 400
    assert any(i.label == "loop" and i.end - i.start >= 0.4 for i in recorder.take_window().idle)
    assert any(event.phase == "i" and event.name == reports[0] for event in recorder.events())


class Thread:
    """The kernel's clocks of the loop's thread: the share of the time in which it computes, or waits for a processor."""

    def __init__(self, computes: float, waits: float) -> None:
        self.thread_time = lambda: computes * time.perf_counter()
        self.delay = lambda sampler: waits * time.perf_counter()
        self.perf_counter = time.perf_counter


@pytest.mark.parametrize(
    ("thread", "reports"),
    [(Thread(0.9, 0.1), 1), (Thread(0.0, 0.0), 1), (Thread(0.1, 0.9), 0)],
    ids=["computes", "sleeps in a call", "waits for a processor"],
)
async def test_code_is_blamed_once_a_minute_and_not_for_a_busy_machine(
    thread: Thread, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.telemetry.lag.time", thread)
    monkeypatch.setattr(BlockSampler, "_processor_wait_s", thread.delay)
    recorder, said, looks = Recorder(), list[str](), list[str | None]()
    monkeypatch.setattr(
        "asyncrl.telemetry.lag.top_user_frame", lambda ident: looks.append(top_user_frame(ident)) or looks[-1]
    )
    async with anyio.create_task_group() as group:
        group.start_soon(monitor, recorder, 0.01, 0.05, said.append)
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            my_agent(looks)
            await anyio.sleep(0.05)  # the monitor looks in between
        group.cancel_scope.cancel()
    assert len(said) == reports and all("my_agent" in each for each in said)
    assert recorder.drain()["loop/blocked"] >= 2


def my_agent(looks: list[str | None]) -> None:
    looks.clear()
    while len(looks) < 5:
        time.sleep(0.01)


async def test_a_block_is_reported_once_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronous client that waits for an answer of the loop that it blocks would end only at its own deadline."""
    monkeypatch.setattr("asyncrl.telemetry.lag._STILL_BLOCKED_S", 0.2)
    reports, during = list[str](), list[str]()

    def my_synchronous_client() -> None:
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            time.sleep(0.05)
        during.extend(reports)
        time.sleep(0.3)

    async with anyio.create_task_group() as group:
        group.start_soon(monitor, Recorder(), 0.01, 0.05, reports.append)
        await anyio.wait_all_tasks_blocked()
        my_synchronous_client()
        await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    assert len(during) == 1 and "event loop still blocked after" in during[0]
    assert "my_synchronous_client, which stops the whole run; in a coroutine use an asynchronous client" in during[0]
    assert sum("still blocked" in each for each in reports) == 1


async def test_a_quiet_loop_is_not_reported() -> None:
    recorder, reports = Recorder(), list[str]()
    with anyio.move_on_after(0.1):
        await monitor(recorder, 0.005, 30.0, reports.append)
    metrics = recorder.drain()
    assert reports == []
    assert "loop/blocked" not in metrics
    assert metrics["loop/lag_ms_p99"] >= 0


def test_sampler_forgets_the_stack_of_an_earlier_block() -> None:
    with BlockSampler(time.perf_counter, 0.02, print) as sampler:
        while not sampler._frames:
            time.sleep(0.05)
        first, _ = sampler.tick()
        second, _ = sampler.tick()
    assert first is not None and "test_sampler_forgets_the_stack_of_an_earlier_block" in first
    assert second is None


def test_top_frame_is_the_users_and_not_the_librarys() -> None:
    inside, leave = threading.Event(), threading.Event()

    def users_code() -> None:
        inside.set()
        leave.wait()  # the innermost Python frames are threading.py's

    thread = threading.Thread(target=users_code)
    thread.start()
    assert inside.wait(10) and thread.ident is not None
    frame = top_user_frame(thread.ident)
    leave.set()
    thread.join()
    assert frame is not None and re.fullmatch(r"test_event_loop_lag\.py:\d+ users_code", frame)


@pytest.mark.parametrize("folder", [Path(asyncrl.__file__).parent, sysconfig.get_path("purelib")])
def test_a_folder_beside_the_package_or_a_library_is_the_users(folder: Any) -> None:
    names = {"look": top_user_frame, "thread": threading.get_ident(), "found": None}
    exec(compile("found = look(thread)", f"{folder}_tasks/rewards.py", "exec"), names)
    assert names["found"] == "rewards.py:1 <module>"


def test_an_idle_event_loop_has_no_culprit() -> None:
    inside, leave = threading.Event(), threading.Event()

    def main_of_the_user() -> None:
        async def body() -> None:
            asyncio.get_running_loop().call_soon(inside.set)
            await asyncio.to_thread(leave.wait)

        asyncio.run(body())

    thread = threading.Thread(target=main_of_the_user)
    thread.start()
    assert inside.wait(10) and thread.ident is not None
    deadline = time.monotonic() + 10  # the loop needs a moment to get from its callback to its selector
    while (frame := top_user_frame(thread.ident)) is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    leave.set()
    thread.join()
    assert frame is None and top_user_frame(-1) is None  # nor has a thread that does not exist


# -- the processor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("fpu sse2 avx2", "AVX2"),
        ("avx2 avx512f avx512bw", "AVX2, AVX-512"),
        ("avx2 avx512f avx512_bf16", "AVX2, AVX-512, bfloat16"),
        ("avx2 avx512f avx512_bf16 amx_bf16", "AVX2, AVX-512, bfloat16, AMX bfloat16"),
        ("", platform.machine()),
    ],
)
def test_the_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"model name": "Some Processor", "flags": flags})
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    assert machine.describe_cpu() == f"Some Processor ({words})"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.instruction_set() == f"{words} (ONEDNN_MAX_CPU_ISA=AVX2)", "the number is of what torch may use"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/jobs/one", {"jobs/one/cpu.max": "150000 100000"}, 1.5),
        ("0::/jobs/one", {"jobs/one/cpu.max": "max 100000", "jobs/cpu.max": "300000 100000"}, 3.0),
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("1:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, 0.5),
        ("1:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 8.0),
        ("5:memory:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, 8.0),
        ("0::/", {}, 8.0),
    ],
)
def test_cores_within_the_quota_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: float
) -> None:
    """As the kernel documents them: cgroup-v2.rst (cpu.max), sched-bwc.rst (cfs_quota_us)."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (tmp_path / "cgroup").write_text(f"9:pids:/\n{group}\n")
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(f"{text}\n")
    assert machine.cpu_quota(tmp_path / "cgroup", tmp_path / "mounted") == cores


@pytest.mark.parametrize(
    ("may_use", "load", "running", "free"),
    [(8, 0.1, 1, 8), (8, 3.2, 4, 5), (8, 7.9, 1, 8), (8, 0.2, 9, 8), (2, 3.0, 4, 2), (8, 40.0, 41, 1)],
)
def test_free_cores_are_those_that_nobody_keeps_busy(
    monkeypatch: pytest.MonkeyPatch, may_use: int, load: float, running: int, free: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(may_use)))
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "_text", lambda file: f"{load} 0 0 {running}/200 1" if "loadavg" in str(file) else "")
    assert machine.free_cores() == free
