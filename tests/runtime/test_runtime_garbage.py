"""Garbage collection while a Runtime is open: where full collections happen, what they find, and what the process gets back."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import DRY, config_of
from test_runtime_embedding import embedded, feed, share_of_nothing

from asyncrl import Runtime
from asyncrl.runtime import journal as runtime_journal
from asyncrl.runtime.garbage import Collector
from asyncrl.runtime.history import History
from asyncrl.telemetry.recorder import Recorder


@pytest.fixture(autouse=True, scope="module")
def as_a_program_has_it() -> Iterator[None]:
    """Nothing is frozen before."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Knot:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def usual() -> Iterator[tuple[int, int, int]]:
    """The thresholds that a program has; the test must leave them, and nothing frozen."""
    before = gc.get_threshold()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    yield before
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == (True, before, 0)


@pytest.fixture
def full() -> Iterator[list[str]]:
    """The functions in which full collections began."""
    seen: list[str] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            frame = sys._getframe(1)
            seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    gc.callbacks.append(callback)
    yield seen
    gc.callbacks.remove(callback)


def many_young_collections(count: int) -> None:
    """As many collections of the middle generation, which is what a full one becomes due by."""
    for _ in range(count):
        gc.collect(1)


@pytest.mark.usefixtures("usual")
def test_a_step_collects_what_came_after_the_start_once_that_is_due(full: list[str]) -> None:
    with Collector(Recorder()) as collector:
        assert gc.get_freeze_count() > 10_000
        knot = weakref.ref(Knot())
        many_young_collections(2)  # it is in the oldest generation now, had it lived
        old = Knot()
        lost = weakref.ref(old)
        many_young_collections(2)
        del old
        full.clear()
        collector.push()
        assert not full  # not due
        many_young_collections(gc.get_threshold()[2] // 100 + 1)
        assert not full and lost() is not None
        collector.push()
        assert full == ["garbage.py:push"] and lost() is None and knot() is None


@pytest.mark.usefixtures("usual")
def test_full_collections_take_at_most_a_hundredth_of_the_time(
    full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            cls.now += 1.0  # so that a collection takes a second
            return cls.now

    monkeypatch.setattr("asyncrl.runtime.garbage.time", Clock)
    with Collector(Recorder()) as collector:
        full.clear()
        for _ in range(250):
            many_young_collections(11)
            collector.push()
    assert full == ["garbage.py:push"] * 3


@pytest.mark.usefixtures("usual")
def test_without_steps_python_collects_by_itself_but_late(full: list[str]) -> None:
    with Collector(Recorder()):
        full.clear()
        kept: list[list[int]] = []
        while not full and len(kept) < 50_000_000:
            kept.extend([[] for _ in range(10_000)])
        assert full == ["test_runtime_garbage.py:<listcomp>"] and len(kept) > 1_000_000


def test_the_process_gets_back_what_it_had(usual: tuple[int, int, int]) -> None:
    one, other = Collector(Recorder()), Collector(Recorder())
    with pytest.raises(KeyError), one:
        raise KeyError
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
    one, other = Collector(Recorder()), Collector(Recorder())
    one.__enter__()
    other.__enter__()
    one.__exit__()  # the first one to open is the first one to close
    assert gc.get_threshold() != usual and gc.get_freeze_count() > 0
    other.__exit__()
    other.__exit__()
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0


def test_what_a_program_decided_itself_stays(usual: tuple[int, int, int], full: list[str]) -> None:
    gc.disable()
    try:
        with Collector(Recorder()) as collector:
            assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
            collector.push()
        assert not gc.isenabled() and not full
    finally:
        gc.enable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with Collector(Recorder()):
            assert abs(gc.get_freeze_count() - frozen) < 1_000
        assert abs(gc.get_freeze_count() - frozen) < 1_000
    finally:
        gc.unfreeze()
    with Collector(Recorder()):
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
    gc.set_threshold(*usual)


@pytest.mark.parametrize("how", ["closed", "failed", "cancelled", "two"])
async def test_a_runtime_gives_the_state_back(tmp_path: Path, usual: tuple[int, int, int], how: str) -> None:
    async def use() -> None:
        async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
            assert gc.get_threshold()[2] == 100 * usual[2] and gc.get_freeze_count() > 0
            await feed(runtime, 2)
            if how == "failed":
                raise KeyError
            if how == "cancelled":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)

    try:
        if how == "two":
            await asyncio.gather(use(), use())
        else:
            await use()
    except KeyError:
        assert how == "failed"
    except asyncio.CancelledError:
        assert how == "cancelled"
        asyncio.current_task().uncancel()  # type: ignore[union-attr]


async def test_a_run_that_cannot_open_leaves_the_state(tmp_path: Path, usual: tuple[int, int, int]) -> None:
    config = config_of(tmp_path, "telemetry.sinks=[wandb]", base=DRY)
    with pytest.raises(Exception, match="wandb"):
        async with Runtime(config, rewards=share_of_nothing):
            pass
    assert gc.get_threshold() == usual


async def test_a_run_collects_in_full_between_its_steps_alone(tmp_path: Path, full: list[str]) -> None:
    config = config_of(tmp_path, "train.max_steps=60", base=DRY)
    async with Runtime(config, rewards=share_of_nothing, write=False) as runtime:
        full.clear()
        gc.set_threshold(20, 2, runtime_threshold := gc.get_threshold()[2])
        assert runtime_threshold > 100
        await runtime.run()
        assert full and set(full) == {"garbage.py:push"}
        spans = [event for event in runtime.recorder.events() if event.name == "collect garbage"]
        assert len(spans) == len(full)
        gc.set_threshold(700, 10, 10)


def test_the_trace_is_nothing_for_the_collector_to_look_at() -> None:
    recorder = Recorder()
    for number in range(100):
        with recorder.span("decode", track="engine", batch=number), recorder.wait("a", "b", on="c", cause="group"):
            recorder.instant("x", track="y", text="z")
    for _ in range(3):  # an event, its args and each of these: from the inside out
        gc.collect()
    assert len(recorder._events) == 300
    assert not any(gc.is_tracked(event) for event in recorder._events)
    assert recorder.events()[-1].args == {"batch": 99}


def kept_by_place() -> dict[str, int]:
    """Blocks of memory that live now, by the line that asked for them."""
    gc.collect()
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
    return {str(each.traceback): each.count for each in snapshot.statistics("lineno")}


@pytest.mark.slow
def test_a_step_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once trace and history are full, and every prompt was seen. Blocks are counted: of what each step leaves there are two
    hundred more each time. What is under way by chance, or comes once, is not there twice."""
    monkeypatch.setattr(runtime_journal, "History", lambda: History(most=40))
    overrides = [
        "train.max_steps=681",
        "telemetry.trace_events=100",
        "rollout.groups_per_step=1",
        "rollout.max_tokens=2",
    ]
    found: list[dict[str, int]] = []

    async def program() -> None:
        async with Runtime(config_of(tmp_path, *overrides, base=DRY)) as runtime:

            async def look() -> None:
                async for step in runtime.steps():
                    if step.version in (280, 480, 680):
                        found.append(kept_by_place())

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(look())
                await runtime.run()

    tracemalloc.start()
    try:
        asyncio.run(program())
    finally:
        tracemalloc.stop()
    grown = [{place: after[place] - before.get(place, 0) for place in after} for before, after in pairwise(found)]
    assert {place: count for place, count in grown[1].items() if min(count, grown[0].get(place, 0)) > 150} == {}


def test_the_history_of_metrics_takes_little_and_says_the_same() -> None:
    history = History()
    lines: list[tuple[int, dict[str, float]]] = [
        (version, {f"some/metric_{name}": float(version * name) for name in range(100)}) for version in range(1000)
    ]
    lines[500] = (500, {"eval/other": 1.0})
    for version, metrics in lines:
        history.add(version, metrics)
    assert list(history) == lines and history[500] == lines[500] and history[-2:] == lines[-2:] and len(history) == 1000
    before = history.copy()
    history.add(1000, {"a": 2.0})
    assert (len(before), len(history)) == (1000, 1001)
    inside: list[Any] = [each for names, numbers in history._numbers for each in (names, numbers)]
    size = sum(sys.getsizeof(each) for each in {id(each): each for each in inside}.values())
    assert size < 1_000_000  # of dictionaries: eight


def test_the_history_forgets_the_names_of_lines_that_it_no_longer_has() -> None:
    """An environment's errors may give each step a metric of its own."""
    history = History(most=8)
    for version in range(1000):
        history.add(version, {f"groups/failed/{version}": 1.0})
    assert len(history._names) <= 2 * 8 and history[-1] == (999, {"groups/failed/999": 1.0})


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 33, 100, 1000])
def test_the_history_of_a_long_run_is_thinned_evenly(count: int) -> None:
    history = History(most=8)
    for version in range(count):
        history.add(version, {"a": float(version)})
        history.add(version, {"b": 1.0})  # more of the same line
        line = version, {"a": float(version), "b": 1.0}
        assert len(history) <= 8 and history[0] == (0, {"a": 0.0, "b": 1.0}) and history[-1] == line
    versions = [version for version, _ in history]
    steps = {after - before for before, after in pairwise(versions[:-1])}
    assert len(steps) <= 1, versions  # evenly, but for the last one
    assert len(history) >= min(count, 4)
    assert list(history.copy()) == list(history)
