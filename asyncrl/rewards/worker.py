"""The worker process, which calls reward functions: `python -m asyncrl.rewards.worker FD`. FD: descriptor of a socket to the run.

* The worker is a new interpreter, not a fork of the run. It ends when the run closes the socket. Its parent, the guard, kills it
  when the run dies, even during a call (concurrency/guard.py). The kernel kills the worker when the guard dies.
* Everything runs in the **main thread**, which `signal.alarm` needs. Calls of `async def` functions are tasks of one event loop.
  Any other call runs while this loop is stopped, so that the function may run an event loop itself.
* Prints of the user's code to stdout go to the run's stderr. Replies go through the socket.
* Imports: the standard library, orjson, and what the user's functions import. Never torch: workers must start fast.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import pickle
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import NoneType, SimpleNamespace
from typing import Any

import orjson

from asyncrl.concurrency.channel import decode, encode
from asyncrl.config import imports
from asyncrl.errors import ConfigError, shown
from asyncrl.rewards import forms
from asyncrl.rewards.forms import UsageError, as_trl, brief, check_reserved, columns_check, is_async
from asyncrl.telemetry.output import lossy_output

_FROZEN = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_OUR_FILES = frozenset((__file__, forms.__file__, imports.__file__, importlib.__file__, *_FROZEN))
_PAGE = os.sysconf("SC_PAGESIZE")
_NICENESS = 10  # the run's torch threads get the processors first


class Function:
    """A loaded reward function and what its signature takes."""

    def __init__(self, call: Callable[..., Any], name: str, whole_group: bool) -> None:
        self.call, self.name = call, name
        self.asynchronous = is_async(call)
        self.whole_group = whole_group
        self.check = columns_check(call)
        # The names of the parameters, and whether the function takes any other keyword argument (**kwargs).
        self.parameters: list[str] = []
        self.takes_kwargs = False
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.takes_kwargs = True
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(f"parameter {parameter.name!r} is positional-only; arguments are passed by name")
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.parameters.append(parameter.name)

    def begin(self, request: dict[str, Any], log: Log) -> Any:
        """Call the function with the arguments of a request. If the result is awaitable, the caller must await it."""
        extra = {"trainer_state": SimpleNamespace(**request["state"]), "log_metric": log.metric, "log_extra": log.extra}
        taken = {name: extra[name] for name in extra if self.takes_kwargs or name in self.parameters}
        self.check(request["arguments"])
        return self.call(**request["arguments"], **taken)


class Log:
    """Collects what one call logs by TRL's `log_metric` and `log_extra`, and the values beside the scores in returned mappings."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: Any) -> None:
        """Log a number of this call. If a name gets several numbers, each completion gets their mean."""
        number = as_number(value)
        if number is None:
            raise UsageError(f"log_metric({name!r}, ...) was given {brief(value)}; expected a number")
        self._metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Any) -> None:
        """Log values of a column. All calls for a column together must give one value for each completion, in order."""
        self._extras.setdefault(str(column), []).extend(values)

    def columns(self, completions: int) -> dict[str, list[Any]]:
        """{name: [a JSON value for each completion]}. Errors: `UsageError` for a column with another length or a metric's name."""
        if both := self._metrics.keys() & self._extras.keys():
            raise UsageError(f"log_metric and a logged column have the same name, {min(both)!r}; rename one of them")
        for name, values in self._extras.items():
            if len(values) != completions:
                raise UsageError(
                    f"log_extra({name!r}, ...) was given {len(values)} values for {completions} completions"
                )
        means = {name: [sum(values) / len(values)] * completions for name, values in self._metrics.items()}
        return {_utf8(name): [_json(value) for value in values] for name, values in (means | self._extras).items()}


def _json(value: Any) -> Any:
    """The value in types that JSON has. Objects of other types become texts. If orjson refuses the value, the result is a text."""
    value = plain(value)
    try:
        return orjson.loads(orjson.dumps(value, default=lambda v: str(plain(v)), option=orjson.OPT_NON_STR_KEYS))
    except (TypeError, RecursionError):
        return _utf8(value if isinstance(value, str) else shown(value))


def plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python's own numbers and lists."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def as_number(value: Any) -> float | None:
    """The value as a float, which may be infinite or NaN. None for text and anything else that is not a real number."""
    value = plain(value)
    try:
        return None if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, ArithmeticError):
        return None


def as_list(answer: Any, completions: int) -> list[Any]:
    """The values of an answer, one for each completion. Errors: `UsageError` if the answer has another length, or is neither an
    iterator nor a sequence of one dimension (a list, an array)."""
    refused = isinstance(answer, (str, bytes, bytearray, memoryview, Mapping, Set))
    sized = hasattr(answer, "__getitem__") and hasattr(answer, "__len__")
    indexed = sized and len(getattr(answer, "shape", (0,))) == 1  # a list has no shape, but one dimension
    if refused or not (indexed or isinstance(answer, Iterator)):
        wanted = f"a list with a number or None for each of the {completions} completions, in their order"
        raise UsageError(f"it returned {brief(answer)}; expected {wanted}")
    values = list(plain(answer))
    if len(values) != completions:
        raise UsageError(f"it returned {len(values)} values for {completions} completions")
    return values


def check_scores(values: Sequence[Any]) -> tuple[list[float | None], list[tuple[int, str]]]:
    """(scores, invalid values as (index, text)). A score is a finite float, or None for a value that is None or invalid."""
    numbers = [None if value is None else as_number(value) for value in values]
    kept = [number if number is not None and math.isfinite(number) else None for number in numbers]
    invalid = [index for index, number in enumerate(kept) if number is None and values[index] is not None]
    return kept, [(index, _utf8(brief(values[index]))) for index in invalid]


def load_functions(sources: Sequence[str | bytes], columns: Sequence[Sequence[str]] = ()) -> list[Function]:
    """Loads the functions: import paths, or callables that cloudpickle pickled. `columns`: the names of the columns of each data
    set, if known. Errors: `ConfigError`; those of the user's code; `UsageError` for a function that cannot score a data set."""
    functions = []
    for source in sources:
        found = imports.load_object(source) if isinstance(source, str) else pickle.loads(source)
        call = as_trl(found, source if isinstance(source, str) else brief(found))
        name = str(getattr(found, "__name__", type(found).__name__))
        function = Function(call, name, bool(getattr(found, "whole_group", False)))
        for names in columns:
            try:
                check_reserved(names, function.parameters, function.takes_kwargs)
                function.check(names)
            except UsageError as error:
                raise UsageError(f"{function.name}: {error}") from None
        functions.append(function)
    return functions


def describe_error(error: BaseException, loading: bool) -> dict[str, str]:
    """The error of a reply: its message, and the traceback from the first frame of the user's code on. If `loading`: no traceback,
    and the message names file and line, because most frames of an import are Python's own."""
    message = f"{type(error).__name__}: {error}"
    traced: BaseException | None = error
    if loading:
        message, traced = imports.raised(error), None
    # Our own errors need no traceback. If an error of the user's code is the cause, show the traceback of the cause.
    if isinstance(error, (UsageError, ConfigError)):
        message, traced = str(error), None if loading else error.__cause__
    text = ""
    if traced is not None:
        frames = traced.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(traced), traced, frames))
    return {"message": _utf8(message), "traceback": _utf8(text)}


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def anonymous_bytes() -> int:
    """Memory of this process in bytes, without mapped files, which do not leak. 0 on a system without /proc."""
    try:
        with open("/proc/self/statm", encoding="utf-8") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE


class SocketSession:
    """Serves the requests of the run. `loop` runs coroutines, and is stopped while a function that is not async runs."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._pid = os.getpid()
        self._functions: list[Function] = []
        self._called: set[int | None] = set()  # indices of called functions; None: the load
        # Memory in bytes. Set after the load, and again after the first call of each function.
        self._baseline = 0
        self._data = bytearray()  # the received part of a message
        self._tasks: dict[int, asyncio.Task[None]] = {}  # coroutines by request
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()  # requests for `_run_sync`
        self._socket_closed = False  # the socket is closed

    def serve(self) -> None:
        """Serve requests until the run closes the socket."""
        while not self._socket_closed:
            self._loop.add_reader(self._sock, self._receive)
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that a function started and left behind
                traceback.print_exc()
            # A function that is not async may run this loop itself. A request that is read meanwhile would start inside the call.
            self._loop.remove_reader(self._sock)
            while self._waiting:
                self._run_sync(*self._waiting.popleft())

    def _receive(self) -> None:
        self._exit_if_forked()
        try:
            data = self._sock.recv(1 << 20)
        except OSError:  # the run was killed
            data = b""
        if not data:
            self._socket_closed = True
            self._loop.stop()
        self._data += data
        while (message := decode(self._data)) is not None:
            self._begin(message)

    def _begin(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "cancel" in message:
            if number in self._tasks:
                # Not at once: a task that is cancelled before its first step runs nothing, so it would not reply.
                self._loop.call_soon(self._tasks[number].cancel)
            return
        try:
            request = pickle.loads(message["data"])
        except BaseException as error:  # of a user's object that is unpickled
            return self._reply(number, {}, error)
        if "function" in request and self._functions[request["function"]].asynchronous:
            self._tasks[number] = self._loop.create_task(self._run_async(number, request))
        else:
            self._waiting.append((number, request))
            self._loop.stop()

    async def _run_async(self, number: int, request: dict[str, Any]) -> None:
        log = Log()
        answer: Any
        try:
            answer = _answer_fields(await self._functions[request["function"]].begin(request, log), log, request)
        # Includes SystemExit and CancelledError: they end this call, and not the worker.
        except BaseException as error:
            answer = error
        del self._tasks[number]
        self._reply(number, request, answer)

    def _run_sync(self, number: int, request: dict[str, Any]) -> None:
        log = Log()
        answer: Any
        try:
            if "function" not in request:
                answer = self._load(request)
            else:
                answer = self._functions[request["function"]].begin(request, log)
                if inspect.isawaitable(answer):  # although the function is no `async def`
                    answer = self._loop.run_until_complete(asyncio.wait_for(answer, None))
                answer = _answer_fields(answer, log, request)
        except BaseException as error:
            answer = error
        # Stop an alarm that the function has set: it must not go off in the next call.
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._reply(number, request, answer)

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        sys.path.extend(entry for entry in request["path"] if entry not in sys.path)
        self._functions = load_functions(request["functions"], request["columns"])
        facts = ("name", "parameters", "takes_kwargs", "asynchronous", "whole_group")
        found = [{fact: getattr(function, fact) for fact in facts} for function in self._functions]
        return {"pid": self._pid, "functions": found}

    def _reply(self, number: int, request: dict[str, Any], answer: Any) -> None:
        """Send a reply. `answer`: the result of `_answer_fields` or `_load`, or the error that was raised."""
        self._exit_if_forked()
        memory = anonymous_bytes()
        # The first call of a function may load models and tables that stay in memory. This growth is not a leak.
        if request.get("function") not in self._called:
            self._called.add(request.get("function"))
            self._baseline = memory
        if self._socket_closed:  # the call was cancelled because the socket is closed
            return
        failed = isinstance(answer, BaseException)
        result: Any = {"error": describe_error(answer, not self._functions)} if failed else {"answer": answer}
        try:
            self._sock.sendall(encode({"id": number, "grown": max(0, memory - self._baseline), **result}))
        except OSError:  # the run was killed
            self._socket_closed = True
            self._loop.stop()

    def _exit_if_forked(self) -> None:
        """Exit in a fork of this process that the user's function made: it must neither answer nor read requests."""
        if os.getpid() != self._pid:
            os._exit(0)


def _answer_fields(answer: Any, log: Log, request: dict[str, Any]) -> dict[str, Any]:
    """The fields of `calls.Answer`. In mappings, the values that are not scores are logged."""
    completions, parts = request["completions"], request["components"]
    values = as_list(answer, completions)
    rows = [value if isinstance(value, Mapping) else {} for value in values]
    names = parts or ["score"]
    for key in dict.fromkeys(key for row in rows for key in row if key not in names):
        log.extra(key, [row.get(key) for row in rows])
    scores, by_turn, invalid = [], [], []
    for part, name in enumerate(names):
        column = [row.get(name, value) for row, value in zip(rows, values, strict=True)]
        for index, value in enumerate(values):
            if parts and not isinstance(value, (Mapping, Exception, NoneType)):
                column[index] = UsageError(f"{brief(value)} in place of a mapping with {', '.join(parts)}")
        turns = [_turn_rewards(value, count) for value, count in zip(column, request["turns"], strict=True)]
        by_turn.append(turns)
        kept, wrong = check_scores([v if t is None else sum(t) for v, t in zip(column, turns, strict=True)])
        scores.append(kept)
        invalid += [(part, index, text) for index, text in wrong]
    return {"scores": scores, "by_turn": by_turn, "invalid": invalid, "extras": log.columns(completions)}


def _turn_rewards(value: Any, turns: int) -> list[float] | None:
    """The rewards of `turns` replies, if `value` is a list with a finite number for each. None for any other value."""
    values = plain(value)
    if not isinstance(values, (list, tuple)) or len(values) != turns:
        return None
    numbers = [math.nan if (number := as_number(each)) is None else number for each in values]
    return numbers if all(map(math.isfinite, numbers)) else None


def main(descriptor: int) -> None:
    """Serve until the run closes the socket. `descriptor`: of our end of the socket."""
    os.nice(_NICENESS)
    sock = socket.socket(fileno=descriptor)
    # A subprocess of the user's function must not keep the socket open.
    sock.set_inheritable(False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker loses no printed line
    # Without `lossy_output` a print would raise after the reader of the output has gone.
    with asyncio.Runner() as runner, sock, lossy_output():
        SocketSession(sock, runner.get_loop()).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
