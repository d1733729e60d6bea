"""Memory, threads and references where something happens in the middle of a plan or a write; natively, and in Python."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from records_helpers import usual
from transport_records import written

from asyncrl.errors import RecordError
from asyncrl.records import native
from asyncrl.records.layout import SPECS, Section
from asyncrl.records.read import Record, read
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import Draft, Plan, plan
from asyncrl.types import Trajectory


@pytest.mark.skipif(native.records is None, reason="Python's own walk over a dictionary refuses to go on")
def test_a_collection_that_changes_the_sections_is_survived() -> None:
    """The interpreter may run anything where it collects garbage, also between two sections of a plan."""
    kept, cut_short = [], 0  # keeping every plan makes each one allocate, so that there is something to collect for
    for wait in range(40):
        sections: dict[int, Any] = usual() | {0x8001 + i: os.urandom(100) for i in range(20)}
        draft, left = Draft(1, range(3), 3, sections), iter(range(wait))

        def clear(phase: str, info: dict[str, int], sections: Any = sections, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                sections.clear()

        threshold = gc.get_threshold()
        gc.callbacks.append(clear)
        gc.set_threshold(3, 1, 1)
        try:
            kept.append(plan(draft))
        except RecordError:  # it was empty when the Python looked
            cut_short += 1
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(clear)
    assert cut_short
    for planned in kept:
        assert len(written(planned)) == planned.size


def test_a_list_that_changes_after_the_plan_cannot_overrun_the_buffer() -> None:
    sections = usual()
    planned = plan(Draft(1, range(3), 3, sections))
    guard = bytearray(b"\xaa") * (planned.size + 4096)
    for change in ([np.zeros(4000, np.int32)] * 3, [np.zeros(50, np.int64)] * 3, [], [None] * 3):
        sections[Section.TOKENS][:] = change
        with pytest.raises((ValueError, TypeError)):
            planned.write(memoryview(guard)[: planned.size])
        assert guard[planned.size :] == b"\xaa" * 4096
    sections[Section.TOKENS][:] = [np.zeros(50, np.int32)] * 3
    with pytest.raises(ValueError):
        planned.write(memoryview(guard)[: planned.size - 64])
    planned.write(memoryview(guard)[: planned.size])
    assert read(guard).arrays[Section.TOKENS].tolist() == [0] * 150


def test_a_crash_point_between_two_stores_leaves_no_record() -> None:
    planned = plan(Draft(1, range(3), 3, usual()))
    calls: list[str] = []
    planned.write(memoryview(bytearray(planned.size)), fault=calls.append)
    assert calls == ["section"] * len(planned.parts) + ["table", "header"]
    for crash in range(len(calls) - 1):
        left = iter(range(crash + 1))

        def fault(where: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise RuntimeError(where)

        buffer = memoryview(bytearray(planned.size))
        with pytest.raises(RuntimeError, match=calls[crash + 1]):
            planned.write(buffer, fault=fault)
        if crash + 1 < len(calls) - 1:
            with pytest.raises(RecordError, match="no record begins here"):
                read(buffer)


def test_columns_keep_the_mapping_alive() -> None:
    planned = plan(Draft(1, range(3), 3, usual()))
    mapping = mmap.mmap(-1, 1 << 16)
    view = memoryview(mapping)
    planned.write(view[: planned.size])
    column = trajectories_of(read(view), copy=False)[2].tokens
    view.release()
    with pytest.raises(BufferError):
        mapping.close()
    assert column.tolist() == list(range(2, 52)) and not column.flags.writeable
    with pytest.raises(ValueError):
        column.flags.writeable = True
    del column
    mapping.close()


def test_other_threads_run_while_a_large_record_is_copied() -> None:
    columns = [np.zeros(40_000_000, np.int32)]
    planned = plan(Draft(1, [0], 1, {Section.TOKENS: columns}))
    buffer = memoryview(bytearray(planned.size))
    turns, begun, over = [0], threading.Event(), threading.Event()

    def turn() -> None:
        while not over.is_set():
            turns[0] += 1
            begun.set()
            time.sleep(0)  # gives the interpreter back of its own accord

    before = sys.getswitchinterval()
    other = threading.Thread(target=turn)
    other.start()
    try:
        assert begun.wait(10)
        sys.setswitchinterval(100)  # nobody is made to give way any more
        start = turns[0]
        planned.write(buffer)
        assert turns[0] > start
    finally:
        sys.setswitchinterval(before)
        over.set()
        other.join()


def test_nothing_is_leaked() -> None:
    sections = usual() | {Section.REWARDS: [0.0] * 3}
    draft, broken = Draft(1, range(3), 3, sections), Draft(1, [0, 0], 3, sections)
    buffer = memoryview(bytearray(plan(draft).size))
    watched = [
        np.dtype(np.int32),
        np.dtype(bool),
        SPECS[Section.TOKENS],
        None,
        Trajectory,
        Record,
        Plan,
        sections[0x8000],
    ]
    watched += [draft, buffer, *sections[Section.TOKENS]]

    def work() -> None:
        for _ in range(300):
            plan(draft).write(buffer)
            for copy in (True, False):
                trajectories_of(read(buffer), copy=copy)
            for refused in (
                lambda: plan(broken),
                lambda: read(buffer, sequence=5),
                lambda: plan(draft).write(buffer[:64]),
            ):
                with pytest.raises((RecordError, ValueError)):
                    refused()

    work()
    gc.collect()
    before = [sys.getrefcount(one) for one in watched]
    work()
    gc.collect()
    after = [sys.getrefcount(one) for one in watched]
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)
