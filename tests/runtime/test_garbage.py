"""Garbage collection while a Runtime is open: where full collections happen, what they find, and what the process gets back."""

from __future__ import annotations

import asyncio
import errno
import gc
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from runtime_helpers import DRY, config_of, embedded, feed, train
from test_runtime_embedding import share_of_nothing

from asyncrl import Runtime
from asyncrl.config.load import load_config
from asyncrl.pumps.metrics import COUNTED
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime import journal as runtime_journal
from asyncrl.runtime.journal import Journal
from asyncrl.runtime.progress import rare_collections
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.rollouts import RolloutWriter
from asyncrl.types import StepResult


@pytest.fixture(autouse=True, scope="module")
def as_a_program_has_it() -> Iterator[None]:
    """Nothing is frozen before."""
    gc.unfreeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)  # type: ignore[attr-defined]
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
def test_old_objects_are_frozen_and_full_collections_are_rare(full: list[str]) -> None:
    threshold = gc.get_threshold()[2]
    with rare_collections():
        assert gc.get_freeze_count() > 10_000 and gc.get_threshold()[2] == 100 * threshold
        lost = weakref.ref(Knot())
        full.clear()
        many_young_collections(2 * threshold)
        assert not full
        gc.collect()
        assert lost() is None


def test_what_a_program_decided_itself_stays(usual: tuple[int, int, int], full: list[str]) -> None:
    gc.disable()
    try:
        with rare_collections():
            assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
        assert not gc.isenabled() and not full
    finally:
        gc.enable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with rare_collections():
            assert abs(gc.get_freeze_count() - frozen) < 1_000
        assert abs(gc.get_freeze_count() - frozen) < 1_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("how", ["closed", "failed", "two"])
async def test_a_runtime_gives_the_state_back(tmp_path: Path, usual: tuple[int, int, int], how: str) -> None:
    async def use() -> None:
        async with Runtime(embedded(tmp_path, DRY), write=False) as runtime:
            assert gc.get_threshold()[2] == 100 * usual[2] and gc.get_freeze_count() > 0
            await feed(runtime, 2)
            if how == "failed":
                raise KeyError

    if how == "two":
        await asyncio.gather(use(), use())
        return
    with pytest.raises(KeyError) if how == "failed" else nullcontext():
        await use()


async def test_a_run_that_cannot_open_leaves_the_state(tmp_path: Path, usual: tuple[int, int, int]) -> None:
    config = config_of(tmp_path, "telemetry.sinks=[wandb]", base=DRY)
    with pytest.raises(Exception, match="wandb"):
        async with Runtime(config, rewards=share_of_nothing):
            pass
    assert gc.get_threshold() == usual


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
    monkeypatch.setattr(runtime_journal, "HISTORY", 40)
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


def history_of(count: int) -> Iterator[list[tuple[int, dict[str, float]]]]:
    """After each of `count` lines of a journal, which came in two parts."""
    journal = Journal(load_config(), None, Recorder(), None)
    for version in range(count):
        journal._remember(version, {"a": float(version)})
        journal._remember(version, {f"groups/failed/{version}": 1.0})
        yield journal.history


def test_the_history_of_a_long_run_has_its_newest_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_journal, "HISTORY", 8)
    for last, history in enumerate(history_of(20)):
        assert [version for version, _ in history] == [*range(max(0, last - 7), last + 1)]
        assert history[-1] == (last, {"a": float(last), f"groups/failed/{last}": 1.0})


def test_counts_that_come_while_ranks_gather_a_step_are_in_the_next_step() -> None:
    recorder = Recorder()
    journal = Journal(load_config(), None, recorder, None)
    counts = {"groups/dropped/no signal": 2.0, "staleness/dropped": 1.0}
    for name, number in {**counts, "time/checkpoint": 5.0}.items():
        recorder.count(name, number)
    result = StepResult(version=1, loss=0.5, grad_norm=1.0, lr=1e-3, tokens=9, sequences=3, microbatches=1)
    line = journal.on_commit(StepReport(1, result, dict.fromkeys(counts, 7.0), (), {}), {}).metrics
    assert line.items() >= {**dict.fromkeys(counts, 7.0), "time/checkpoint": 5.0}.items()
    assert recorder.take_counts(COUNTED) == counts


async def test_rollouts_that_cannot_be_written_leave_no_file_and_do_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(writer: RolloutWriter, version: int, *_: object, **__: object) -> None:
        writer.path(version).with_name(f"step_{version}.jsonl.partial").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RolloutWriter, "write", write)
    await train(tmp_path, "train.max_steps=1", base=DRY, prompts=[{"prompt": "a"}])
    assert list((tmp_path / "runs/run/rollouts").iterdir()) == []
