"""Garbage collection while a Runtime is open: full collections between two steps, and only of what came after the start.

A full collection looks at every container of the process and holds the GIL meanwhile: 0.2 to 0.4 s once transformers is loaded,
in which the event loop answers nobody. Python begins one wherever an allocation happens to make it due. So, while a Runtime
is open:

* what start-up made is collected once and then frozen: no later collection looks at it
* young objects are collected as always; a full collection is made where a step was committed, once Python's own threshold for it
  is passed, and takes at most a hundredth of the time
* without steps for very long (a program that only generates) Python makes one by itself, a hundred times as late as usual

The state belongs to the process: the first Runtime that opens changes it, the last one that closes gives it back. A program that
disabled the collector, or froze its own objects, keeps that: then nothing is changed, or nothing is frozen.
"""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass

from asyncrl.telemetry.recorder import Recorder

_LATER = 100  # times Python's own threshold: what a program may allocate between two steps, or without any
_SHARE = 0.01  # of the time, at most, goes into full collections


@dataclass(slots=True)
class _Process:
    """What was found, what was put in its place, and how many Collectors are open. Guarded by `_LOCK`."""

    open: int = 0
    found: tuple[int, int, int] = (0, 0, 0)
    ours: tuple[int, int, int] = (0, 0, 0)
    freezes: bool = False


_LOCK = threading.Lock()
_process = _Process()


class Collector:
    """`with Collector(recorder) as collector:` once everything is built; `push` at every committed step (a `steps.Listener`)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._opened = False
        self._due = 0.0  # not before this time

    def __enter__(self) -> Collector:
        with _LOCK:
            if not gc.isenabled() or gc.get_threshold()[0] == 0:
                return self  # the program collects by itself
            if _process.open == 0:
                _process.found = found = gc.get_threshold()
                _process.ours = (found[0], found[1], found[2] * _LATER)
                _process.freezes = gc.get_freeze_count() == 0
                gc.set_threshold(*_process.ours)
            if _process.freezes:
                gc.collect()  # else its garbage would be frozen too, and the memory that this holds
                gc.freeze()
            _process.open += 1
            self._opened = True
        return self

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            if not self._opened:
                return
            self._opened = False
            _process.open -= 1
            if _process.open:
                return
            if gc.get_threshold() == _process.ours:  # else the program has changed it since
                gc.set_threshold(*_process.found)
            if _process.freezes:
                gc.unfreeze()

    def push(self, item: object = None) -> None:
        """A step was committed: collect, where that is due."""
        started = time.perf_counter()
        if not self._opened or not gc.isenabled() or started < self._due:
            return
        if gc.get_count()[2] <= _process.found[2]:
            return
        with self._recorder.work("event loop", "collect garbage"):
            gc.collect()
        ended = time.perf_counter()
        self._due = ended + (ended - started) / _SHARE

    def close(self) -> None:
        """No more steps: nothing to do."""
