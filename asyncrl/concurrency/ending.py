"""The end of a process has a deadline, and the exit code is that of what the process did.

After its last line Python waits for each thread that is no daemon, for exit handlers and children of multiprocessing, and the
closing of a loop waits for tasks and threads: what a library or user code left there would keep the process, and its devices, for
ever. A process whose program is somebody else's is never ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Sequence
from typing import Any

END_S = 25.0  # torchrun kills after 30
_SLACK_S = 3  # in which what is left is named


class _Deadline:
    """Ends the process, on a thread that is made at its start: later there may be none to be had."""

    def __init__(self) -> None:
        self.watches = False
        self.begun = threading.Event()
        self.code, self.error, self.within_s = 1, "", END_S
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        self.begun.wait()
        # It takes a tenth of a second, which the start of a command does without.
        from .describe import describe_tasks, place_of

        # In parts: time in which the process was stopped does not count.
        for _ in range(20):
            time.sleep(self.within_s / 20)
        left, tasks = left_behind(), asyncio.all_tasks(self.loop) if self.loop else set()
        names = [*left.values(), *describe_tasks(tasks)] or [place_of(threading.main_thread())]
        print(
            f"{self.error}asyncrl: the work is done, and {self.within_s:g} s later this still keeps the process from its end: "
            f"{'; '.join(names)}. It ends now, with exit code {self.code}",
            file=sys.stderr,
            flush=True,
        )
        for each in left:
            if not isinstance(each, threading.Thread):
                each.kill()  # else the child would go on, and hold its devices
        os._exit(self.code)


_deadline = _Deadline()


def run_program(command: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
    """`command(arguments)`. None: those of the process, whose program it is then, and which ends in time."""
    if arguments is not None:
        return command(list(arguments))
    _deadline.watches = True
    with contextlib.suppress(RuntimeError):  # there is no thread to be had: the command says so
        threading.Thread(target=_deadline.run, name="asyncrl-end", daemon=True).start()
    try:
        code = command(sys.argv[1:])
    except BaseException as error:
        over(error)
        raise
    finally:
        _deadline.error = ""  # it is printed
    over(code)
    return code


def over(ended: int | BaseException, within_s: float = END_S, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """The work is done: what stands after `within_s` is named, and the process ends. The first call counts.

    `ended`: the exit code, or the error that has it, which may not have been printed yet. `loop`: one that is still open.
    """
    if not _deadline.watches or _deadline.begun.is_set():
        return
    if isinstance(ended, BaseException):
        _deadline.error = "".join(traceback.format_exception_only(ended))
        ended = getattr(ended, "exit_code", 1)
    _deadline.code, _deadline.within_s, _deadline.loop = ended, within_s, loop
    with contextlib.suppress(
        AttributeError, ValueError, OSError, RuntimeError
    ):  # stderr is no file; no thread is to be had
        faulthandler.dump_traceback_later(within_s + _SLACK_S / 3, file=sys.__stderr__ or sys.stderr)
    _exit_without_python(ended, within_s + _SLACK_S)
    _deadline.begun.set()


def left_behind(before: Container[Any] = ()) -> dict[Any, str]:
    """What keeps this process from ending, and did not `before`, with its name: threads that are no daemons, less idle ones of
    pools, and children of multiprocessing."""
    from .describe import place_of

    made = sys.modules.get("multiprocessing")
    children = [] if made is None else made.active_children()
    found = [each for each in (*threading.enumerate(), *children) if not each.daemon and each not in before]
    places = {each: place_of(each) for each in found if each is not threading.main_thread()}
    return {each: place for each, place in places.items() if not place.endswith(" _worker")}


def _exit_without_python(code: int, after_s: float) -> None:
    """`_exit(code)` on a thread of the C library: where the GIL is held, or Python is gone and a destructor of C++ hangs."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "timer_create"):
        timer, sigev_thread, clock_monotonic = ctypes.c_void_p(), 2, 1
        act = ctypes.cast(libc._exit, ctypes.c_void_p).value
        event = struct.pack("=qiiQ40x", code, 0, sigev_thread, act)  # struct sigevent
        if libc.timer_create(clock_monotonic, event, ctypes.byref(timer)) == 0:
            when = struct.pack("4l", 0, 0, *divmod(int(after_s * 1e9), 10**9))  # struct itimerspec
            libc.timer_settime(timer, 0, when, None)
