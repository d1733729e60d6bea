"""`Popen`, as `subprocess` has it, for Python programs of ours: started from a process that has loaded torch and transformers.

Loading them takes five to seven seconds of CPU in every process that does, which is most of the time of a test that starts some.
What a program does is the same, but that its end does not take apart what was loaded; tests of the start itself (the installed
commands, torchrun, what is loaded) use `subprocess`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from warm_server import Program

SERVER = Path(__file__).with_name("warm_server.py")
# Variables that are read while modules are loaded, or by the interpreter itself: with another value there the start is a real one.
AT_LOAD = (
    "ASYNCRL_NATIVE",
    "ATEN_",
    "CUDA_",
    "DNNL_",
    "HF_",
    "LD_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "TRANSFORMERS_",
)
LATER = ("PYTHON", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
CONSTANT = {"OMP_NUM_THREADS": "1"}


def _at_load(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_LOAD) and name not in LATER}


class Popen(subprocess.Popen[Any]):
    """Arguments as of `subprocess.Popen`; `preexec_fn` has to be picklable, and is called in the new process."""

    server: socket.socket | None = None
    tied = False  # it is killed when this process ends, as a child that calls `die_with_parent` is
    orphaned = False  # its parent ends when this process ends, as if it were this process
    _status: socket.socket | None = None  # None: a child of this process, as `subprocess` makes them
    _told = b""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, _, *pipes, _, gid, gids, uid, umask, new_session, group = rest
        environment = dict(os.environ if env is None else env)
        usual = close_fds and (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        if not usual or executable or args[0] != sys.executable or _at_load(environment) != _at_load(_base()):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = pipes
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        program = Program(
            arguments=[os.fspath(each) for each in args[1:]],
            directory=os.getcwd() if cwd is None else os.fspath(cwd),
            environment=environment,
            new_session=bool(new_session),
            ignored=[signal.Signals(number) for number in ignored],
            before=preexec_fn,
            inherited=list(pass_fds),
            tied_to=os.getpid() if self.tied else None,
            orphaned=self.orphaned,
        )
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        streams = [here if here != -1 else number for number, here in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            socket.send_fds(_server(), [pickle.dumps(program)], [*streams, theirs.fileno(), *pass_fds])
        self._status, self._child_created, self._hearing = ours, True, threading.Lock()
        self.pid = int(self._next_line(None) or 0)
        assert self.pid, "the server of warm processes has ended"
        devnull = getattr(self, "_devnull", None)
        for here, kept in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if here != -1 and kept != -1 and here != devnull:
                os.close(here)
        if devnull is not None:
            os.close(devnull)
        self._closed_child_pipe_fds = True

    def _next_line(self, timeout_s: float | None) -> str | None:
        """What the guard says; None if it says nothing for so long."""
        assert self._status is not None
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._told:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return None
            said = self._status.recv(64)
            if not said:
                raise AssertionError("the guard of a warm process was killed")
            self._told += said
        line, _, self._told = self._told.partition(b"\n")
        return line.decode()

    def _ended(self, timeout_s: float | None) -> int | None:
        assert self._status is not None
        if not self._hearing.acquire(blocking=timeout_s != 0):
            return None  # another thread waits for it
        try:
            if self.returncode is None:
                status = self._next_line(timeout_s)
                if status is not None:
                    self.returncode = os.waitstatus_to_exitcode(int(status))
                    self._status.close()
            return self.returncode
        finally:
            self._hearing.release()

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc, no-any-return]
        return self._ended(0.0) if self.returncode is None else self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code


# Tools set them for their children. They are read while modules are loaded, and in tests decide nothing: models are directories,
# and torch is told to take one thread.
OF_TOOLS = ("HF_HUB_OFFLINE", "MKL_NUM_THREADS")


def of_a_tool(words: Sequence[Any], *, env: Mapping[str, str], **more: Any) -> Popen:
    """`Popen` for what a tool starts."""
    kept = {name: value for name, value in env.items() if name not in OF_TOOLS}
    return Popen(words, env=kept | {name: os.environ[name] for name in OF_TOOLS if name in os.environ}, **more)


def in_place_of_subprocess(start: Callable[..., Any] = of_a_tool) -> SimpleNamespace:
    """For a module whose children may be warm."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired", "run")}
    return SimpleNamespace(Popen=start, **names)


class Tied(Popen):
    """Its parent is not this process but a guard, which kills it when this process ends."""

    tied = True


class Orphaned(Popen):
    """Its parent is not this process but a guard, which ends when this process does: a rank and its launcher."""

    orphaned = True


GENERATION_WORKERS = {"asyncrl.generation.worker.main", "generation_worker_dying"}


def of_a_node(words: Sequence[str], *, env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    """In the place of `subprocess.Popen` where a run starts its children: generation workers are warm, others are not."""
    if not GENERATION_WORKERS.intersection(words):
        return subprocess.Popen(words, env=env, **more)
    kept = {name: value for name, value in env.items() if name not in OF_TOOLS}
    return Tied(words, env=kept | {name: os.environ[name] for name in OF_TOOLS if name in os.environ}, **more)


def run(command: Sequence[Any], *, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with the output as text; a program that does not end in time is killed."""
    with of_a_tool(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ready() -> None:
    """The server is there: what is started from now on begins at once. An event loop that starts something would have to wait."""
    Popen([sys.executable, "-c", ""]).wait()


def _base() -> dict[str, str]:
    return {**os.environ, **CONSTANT}


_starting = threading.Lock()  # tools have threads that start children


def _server() -> socket.socket:
    with _starting:
        if Popen.server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, str(SERVER), str(theirs.fileno())],
                    env={**_base(), "PYTHONPATH": str(SERVER.parents[1])},
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is not for it
                )
            Popen.server = ours
            atexit.register(_close, ours, process)
        return Popen.server


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


def children() -> list[psutil.Process]:
    """This process' children, without the server."""
    return [child for child in psutil.Process().children() if not _is_server(child)]


def _is_server(process: psutil.Process) -> bool:
    try:
        return str(SERVER) in process.cmdline()
    except psutil.NoSuchProcess:  # a zombie has none: it is somebody's child all the same
        return False
