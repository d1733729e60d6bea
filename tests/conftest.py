"""What holds for the tests of every room."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import warm
from blockbuster import blockbuster as module
from hypothesis import settings

settings.register_profile("lanes", deadline=None)  # four lanes share two cores: no test may depend on how fast one is
settings.load_profile("lanes")

gc.disable()  # until all tests are loaded: that makes a million objects and no garbage


def pytest_runtest_setup() -> None:
    """A test that is stopped ends what it has started, by SIGTERM as by Ctrl-C. SIGINT is ignored in the background of a shell,
    and uvloop leaves handlers of its own behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


pytest_runtest_setup()

# (file, functions) -> why they may block where an event loop runs
MAY_BLOCK: dict[tuple[str, tuple[str, ...]], str] = {
    ("asyncrl/transport/rings/link.py", ("start_time",)): "/proc/PID/stat, which the kernel writes from memory",
    ("asyncrl/transport/rings/record_ring.py", ("_rename_damaged",)): "a name in /dev/shm: no disk",
    (
        "asyncrl/transport/memory/segment.py",
        ("check_platform", "close", "owner_of", "parts_of", "_link", "_still_named"),
    ): "names in /dev/shm and /proc: no disk",
    ("asyncrl/concurrency/child.py", ("_start",)): "in a thread, a cancellation could lose the process",
    ("asyncrl/concurrency/child.py", ("open_output", "_on_end", "__init__")): "its log, beside the process",
    ("asyncrl/concurrency/offload.py", ("offload",)): "the system has no thread left",
    ("asyncrl/environments/sandbox.py", ("_start", "_end")): "in a thread, a cancellation could lose the process",
    ("asyncrl/rewards/pool.py", ("__aenter__",)): "os.getcwd: no disk",
    ("asyncrl/config/imports.py", ("_load_file",)): "the user's code is imported before the first step",
    ("asyncrl/models/policy.py", ("set_attention",)): "transformers looks at its own files, before the first step",
    ("asyncrl/telemetry/rollouts.py", ("__init__",)): "before the first step: one mkdir",
    ("asyncrl/checkpoint/store.py", ("versions", "latest_version")): "before the first step, and after the last",
    ("asyncrl/concurrency/watchdog.py", ("_start_sentry",)): "before the first step: the sentry is started",
    ("asyncrl/runtime/directory.py", ("release",)): "after the last step: one unlink",
    ("asyncrl/main.py", ("_print_summary",)): "after the last step",
    ("asyncrl/telemetry/output.py", ("write",)): "standard output and error",
    ("asyncrl/telemetry/sinks.py", ("write",)): "one line a step, into the page cache",
    ("logging/__init__.py", ("emit",)): "a line of a log",
    # Called by tests in their coroutine; a program calls them before its loop begins, or in a thread.
    ("asyncrl/transport/inventory.py", ("clear",)): "names in /dev/shm: no disk",
    ("asyncrl/config/load.py", ("load_config", "load_resolved")): "a configuration is read before the run",
    ("asyncrl/telemetry/sinks.py", ("read_jsonl",)): "read after the run",
    ("asyncrl/cli/prompts.py", ("main",)): "a program of its own",
    ("asyncrl/cli/shm.py", ("main",)): "a program of its own",
}


def pytest_collection_finish() -> None:
    """What was loaded until here stays. Frozen, it is no part of the full collections: every Runtime that opens makes one, and
    would look at all of torch and transformers each time. test_garbage has the collector as a program has it."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = cache(gc.get_freeze_count)  # type: ignore[assignment]  # it counts them one by one


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time of a long run went, file by file."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > 300:
        terminalreporter.section("slowest 20 files")
        for file, spent in seconds.most_common(20):
            terminalreporter.write_line(f"{spent:.0f}s {file}")


_found: list[str] = []


class BlockingError(module.BlockingError):
    """Remembered: it fails the test also where somebody catches it."""

    def __init__(self, func: str) -> None:
        super().__init__(func)
        frame = sys._getframe(1)
        while f"{os.sep}asyncrl{os.sep}" not in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        _found.append(f"{func} in {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")


@pytest.fixture(scope="session")
def blockbuster() -> Iterator[module.BlockBuster]:
    """While an event loop runs, asyncrl calls nothing that blocks: no sleep, no file, no socket that waits.

    Locks are left out: they are held for microseconds, and the threads that hold them never wait for the loop meanwhile.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "BlockingError", BlockingError)
    with module.blockbuster_ctx("asyncrl") as active:
        for name, function in active.functions.items():
            if name.startswith("threading."):
                function.deactivate()
            for file, functions in MAY_BLOCK:
                function.can_block_in(file, functions)
        yield active
    patch.undo()


@pytest.fixture(autouse=True)
def nothing_blocks(blockbuster: module.BlockBuster) -> Iterator[list[str]]:
    """The calls that blocked, which must be none at the end of the test."""
    _found.clear()
    yield _found
    assert not _found, f"called in an event loop: {_found}; call it in a thread, or say in tests/conftest.py why it may"


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the callers of the native kernels: with them, where they were built, and without. What runs without them is
    their reference, and has to be right by itself."""
    if not request.param:
        monkeypatch.setattr("asyncrl.models.native.library._library", None)


@pytest.fixture(scope="module")
def warm_workers() -> Iterator[None]:
    """The generation workers of runs in this process are forked from one that has loaded what they load."""
    warm.ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.concurrency.child.subprocess", warm.in_place_of_subprocess(warm.of_a_node))
        yield


@pytest.fixture
def on_loading(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[bool]]:
    """Of the named module: whether garbage was collected whenever it was about to be loaded, which is an ImportError."""

    def watch(watched: str) -> list[bool]:
        collecting: list[bool] = []

        class Finder:
            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> None:
                if name == watched:
                    collecting.append(gc.isenabled())
                    raise ImportError(f"{name} was about to be loaded")

        monkeypatch.delitem(sys.modules, watched, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        return collecting

    return watch
