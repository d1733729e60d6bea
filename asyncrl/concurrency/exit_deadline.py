"""A deadline for the exit of a process. If the deadline ends the process, the exit code is the command's, or 1 for SystemExit and
Ctrl-C. A process that embeds asyncrl has no deadline.

After a command's last line Python waits for non-daemon threads, exit handlers and children of multiprocessing. Closing an event
loop waits for tasks and threads. Without a deadline, a thread that a library forgot would keep the process alive, with its devices.
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
from collections.abc import Callable, Sequence
from typing import Any

EXIT_LIMIT_S = 25.0  # torchrun kills a process after 30 s
_MESSAGE_S = 3  # time to print the deadline's message


class _Deadline:
    """Ends the process at the deadline. Its thread starts early, because the system may refuse a thread later."""

    def __init__(self) -> None:
        self.enabled = False  # whether this process may be ended
        self.started = threading.Event()  # set when the countdown begins
        self.code, self.unprinted_error, self.limit_s = 1, "", EXIT_LIMIT_S
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        self.started.wait()
        # Imported here: an import at the top of the file would delay the start of every command by a tenth of a second.
        from .describe import describe_holder, describe_tasks

        # Short sleeps, because one long sleep would include the time in which the process is suspended.
        for _ in range(20):
            time.sleep(self.limit_s / 20)
        blockers, tasks = exit_blockers(), asyncio.all_tasks(self.loop) if self.loop else set()
        names = [*blockers.values(), *describe_tasks(tasks)] or [describe_holder(threading.main_thread())]
        print(
            f"{self.unprinted_error}asyncrl: the work ended {self.limit_s:g} s ago, and the process cannot exit because "
            f"of: {'; '.join(names)}. The process ends now, with exit code {self.code}",
            file=sys.stderr,
            flush=True,
        )
        for blocker in blockers:
            if not isinstance(blocker, threading.Thread):
                blocker.kill()  # an orphaned child would keep its devices
        os._exit(self.code)


_deadline = _Deadline()


def run_program(command: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
    """Run `command(arguments)` and return its exit code. If `arguments` is None, the command gets those of this process, and the
    process has a deadline for its exit."""
    if arguments is not None:
        return command(list(arguments))
    _deadline.enabled = True
    # RuntimeError: the system refuses the thread. The command starts threads too, and raises the same error.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_deadline.run, name="asyncrl-end", daemon=True).start()
    try:
        code = command(sys.argv[1:])
    except BaseException as error:
        start_exit_deadline(error)
        raise
    finally:
        _deadline.unprinted_error = ""  # the command or the interpreter prints the error
    start_exit_deadline(code)
    return code


def start_exit_deadline(
    result: int | BaseException, limit_s: float = EXIT_LIMIT_S, loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Call this when the work is done. If the process still runs after `limit_s`, the deadline names what blocks the exit (threads,
    children, tasks of `loop`) and ends the process. Later calls do nothing. In a process that embeds asyncrl, all calls do nothing.

    result: the exit code, or an error. The exit code of an error is its attribute `exit_code`, or 1 without this attribute.
    """
    if not _deadline.enabled or _deadline.started.is_set():
        return
    if isinstance(result, BaseException):
        _deadline.unprinted_error = "".join(traceback.format_exception_only(result))
        result = getattr(result, "exit_code", 1)
    _deadline.code, _deadline.limit_s, _deadline.loop = result, limit_s, loop
    # Fails if stderr is no file, or if the system refuses a thread. Then no stacks are printed.
    with contextlib.suppress(AttributeError, ValueError, OSError, RuntimeError):
        faulthandler.dump_traceback_later(limit_s + _MESSAGE_S / 3, file=sys.__stderr__ or sys.stderr)
    _exit_without_python(result, limit_s + _MESSAGE_S)
    _deadline.started.set()


def exit_blockers() -> dict[Any, str]:
    """Non-daemon threads and children of multiprocessing that keep this process from exiting, each with a description. Leaves out
    the main thread and idle threads of pools."""
    from .describe import describe_holder

    multiprocessing = sys.modules.get("multiprocessing")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    holders = [holder for holder in (*threading.enumerate(), *children) if not holder.daemon]
    texts = {holder: describe_holder(holder) for holder in holders if holder is not threading.main_thread()}
    # An idle thread of a pool waits in the pool's function `_worker`.
    return {holder: text for holder, text in texts.items() if not text.endswith(" _worker")}


def _exit_without_python(code: int, after_s: float) -> None:
    """On Linux call `_exit(code)` after `after_s` seconds, on a thread of the C library. This works even if a thread holds the GIL,
    or if a C++ destructor hangs after Python has ended."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "timer_create"):
        timer, sigev_thread, clock_monotonic = ctypes.c_void_p(), 2, 1
        exit_address = ctypes.cast(libc._exit, ctypes.c_void_p).value
        event = struct.pack("=qiiQ40x", code, 0, sigev_thread, exit_address)  # struct sigevent
        if libc.timer_create(clock_monotonic, event, ctypes.byref(timer)) == 0:
            limit = struct.pack("4l", 0, 0, *divmod(int(after_s * 1e9), 10**9))  # struct itimerspec
            libc.timer_settime(timer, 0, limit, None)
