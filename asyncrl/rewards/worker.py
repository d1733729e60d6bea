"""The worker process: `python -m asyncrl.rewards.worker FD`, started by exec, never by a fork of the run, and child of its guard.

One request at a time, in the **main thread** (so that `signal.alarm` and everything else that insists on it works),
until the run closes its end of the socket. Its guard (`guard.py`) kills it when the run dies, even in the middle of a call, and
the kernel when its guard dies. What the user's code prints to stdout goes to the run's stderr; the protocol has a descriptor of its
own.

Imports: the standard library, orjson, and what the user's functions import. Never torch: start-up time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from asyncrl.config import imports
from asyncrl.errors import ConfigError
from asyncrl.rewards import forms
from asyncrl.rewards.forms import UsageError, as_trl, brief, columns_check
from asyncrl.rewards.wire import Header, Kind, receive_blocking, send_blocking
from asyncrl.telemetry.output import lossy_output

_FROZEN = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_OUR_FILES = frozenset((__file__, forms.__file__, imports.__file__, importlib.__file__, *_FROZEN))
_PAGE = os.sysconf("SC_PAGESIZE")
_NICENESS = 10  # reward code yields to the lane's torch threads


class Function:
    """A loaded reward function and what its signature takes."""

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self.call = call
        self.name = name
        self.check = columns_check(call)
        self.accepts: list[str] | None = []  # parameter names that may be passed by keyword; None: all (**kwargs)
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.accepts = None
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(f"parameter {parameter.name!r} is positional-only; arguments are passed by name")
            elif self.accepts is not None:
                self.accepts.append(parameter.name)

    def score(self, arguments: dict[str, Any], completions: int, runner: asyncio.Runner) -> list[float | None]:
        """Call it (in the runner's loop where it is async) and check what comes back."""
        self.check(arguments)
        answer = self.call(**arguments)
        if inspect.isawaitable(answer):
            answer = runner.run(_await(answer))
        return check_scores(answer, completions)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def check_scores(answer: Any, completions: int) -> list[float | None]:
    """One finite float or None per completion. Errors: `UsageError` that says what came back instead."""
    if isinstance(answer, (str, bytes, dict)) or not hasattr(answer, "__iter__"):
        raise UsageError(f"it returned {brief(answer)}; expected a list of {completions} floats or None")
    values = list(answer)
    if len(values) != completions:
        raise UsageError(f"it returned {len(values)} values for {completions} completions")
    scores: list[float | None] = []
    for index, value in enumerate(values):
        if value is None:
            scores.append(None)
            continue
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(f"it returned {brief(value)} for completion {index}; expected a finite float or None")
        scores.append(number)
    return scores


def load_functions(sources: Sequence[str | bytes], columns: Sequence[Sequence[str]] = ()) -> list[Function]:
    """Import paths are imported, bytes are cloudpickled callables. `columns`: of the rows of each source of data that is known.
    Errors: `ConfigError` and the user's own; `UsageError` for a function that cannot score such rows."""
    functions = []
    for source in sources:
        found = imports.load_object(source) if isinstance(source, str) else pickle.loads(source)
        call = as_trl(found, source if isinstance(source, str) else brief(found))
        function = Function(call, str(getattr(found, "__name__", type(found).__name__)))
        for there in columns:
            try:
                function.check(there)
            except UsageError as error:
                raise UsageError(f"{function.name}: {error}") from None
        functions.append(function)
    return functions


def describe_error(error: BaseException, kind: Kind) -> bytes:
    """JSON for an ERROR reply; the traceback is of the user's code, without frames of ours.

    What loading raised is one line with its place: the traceback of an import is mostly Python's own.
    """
    message = f"{type(error).__name__}: {error}"
    shown: BaseException | None = error
    if kind is Kind.INIT:
        message, shown = imports.raised(error), None
    if isinstance(error, (UsageError, ConfigError)):  # our own words; the user's error, if there is one, is the cause
        message, shown = str(error), None if kind is Kind.INIT else error.__cause__
    text = ""
    if shown is not None:
        frames = shown.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(shown), shown, frames))
    return orjson.dumps({"message": _utf8(message), "traceback": _utf8(text)})


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: what is mapped and can be read again is no leak. 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE


class Session:
    """State between two requests."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._functions: list[Function] = []
        self._called: set[int] = set()
        self._expected = (
            0  # bytes: what the process had before its calls, and what the first call of each function took
        )
        self.grown = 0  # bytes beyond that

    def serve(self, header: Header, payload: bytes) -> bytes:
        """The payload of the reply; raises what the user's code raises."""
        request = pickle.loads(payload)
        if header.kind is Kind.INIT:
            sys.path.extend(entry for entry in request["path"] if entry not in sys.path)
            self._functions = load_functions(request["functions"], request["columns"])
            found = [{"name": f.name, "accepts": f.accepts} for f in self._functions]
            self._expected = anonymous_bytes()
            return orjson.dumps({"pid": os.getpid(), "functions": found})
        function = self._functions[request["function"]]
        before = anonymous_bytes()
        try:
            return orjson.dumps(function.score(request["arguments"], request["completions"], self._runner))
        finally:
            if hasattr(signal, "setitimer"):  # an alarm that was not switched off must not ring in the next call
                signal.setitimer(signal.ITIMER_REAL, 0)
            self._measure(request["function"], before)

    def _measure(self, index: int, before: int) -> None:
        now = anonymous_bytes()
        if index not in self._called:  # models and tables are loaded by many a first call: they stay, and are no leak
            self._called.add(index)
            self._expected += max(0, now - before)
        self.grown = max(0, now - self._expected)


def main(descriptor: int) -> None:
    """Serve until the other end of the socket `descriptor` closes."""
    os.nice(_NICENESS)
    worker = os.getpid()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)  # a subprocess of the user's function must not keep the socket open
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker loses no printed line
    with asyncio.Runner() as runner, sock, lossy_output():  # what nobody reads any more is no error of a reward
        session = Session(runner)
        while (frame := receive_blocking(sock)) is not None:
            header, payload = frame
            answer_kind = Kind.READY if header.kind is Kind.INIT else Kind.RESULT
            try:
                answer = session.serve(header, payload)
            except BaseException as error:  # SystemExit included: only the process itself may end the process
                answer_kind, answer = Kind.ERROR, describe_error(error, header.kind)
            if os.getpid() != worker:  # a fork made by the user's function came back: it must not answer as well
                os._exit(0)
            send_blocking(sock, answer_kind, header.request_id, answer, session.grown)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent left in the middle of a frame
        main(int(sys.argv[1]))
