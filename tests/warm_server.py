"""A Python process that has loaded what our programs load, and forks: a program that is started from it begins at once.

`warm.Popen` starts it and asks it. One message is one program: a pickled `Program` with four descriptors (standard input, output
and error, and the one at which its process id and then its wait status are told), and those that it inherits. For each program
there is a guard, a fork that starts the program as its own child, waits for it and tells its end: so it is reaped at once, and the
server never waits.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

LARGEST = 1 << 20  # bytes of a message
MOST = 64  # descriptors of a message
WORKERS_TOO = "WARM_WORKERS"  # in the environment of a program: its generation workers are warm
ABOVE = 1000  # numbers that no program was told to inherit
# What a run, a rank and its tests load. Not `asyncrl.main`, which is run as a program.
LOADED = (
    "numpy.ma",
    "torch",
    "torch.distributed.launcher.api",
    "uvloop",
    "anyio._backends._asyncio",
    "transformers.generation.utils",
    "transformers.models.qwen3.modeling_qwen3",
    "asyncrl",
    "asyncrl.checkpoint.store",
    "asyncrl.client",
    "asyncrl.config.describe",
    "asyncrl.config.load",
    "asyncrl.distributed.line_ledger",
    "asyncrl.generation.embedded.engine",
    "asyncrl.generation.worker.server",
    "asyncrl.runtime.door",
    "asyncrl.runtime.real",
    "asyncrl.runtime.runtime",
    "asyncrl.training.lane_trainer",
    "asyncrl.training.sharded",
    "asyncrl.weights.sync",
)


@dataclass
class Program:
    """What the command line, the environment and the parent of a process would give it."""

    arguments: list[str]  # after the interpreter
    directory: str | None
    environment: dict[str, str]
    new_session: bool = False
    ignored: list[signal.Signals] = field(default_factory=list)
    before: Callable[[], object] | None = None
    inherited: list[int] = field(default_factory=list)  # numbers of the descriptors that follow the first four
    tied_to: int | None = None  # the process that starts it, and is to be its parent: for the program its guard is
    orphaned: bool = False  # its guard ends with the process that starts it


def serve(control: socket.socket) -> Program | None:
    """Start what is asked for. Returns a program in the process that is to be it, and None at the end of the server."""
    while True:
        while _reap(os.WNOHANG):
            pass
        message, descriptors, _, _ = socket.recv_fds(control, LARGEST, MOST)
        if not message:
            while _reap(0):
                pass
            return None
        guard = os.fork()
        if guard == 0:
            control.close()
            program: Program = pickle.loads(message)
            if _guard(descriptors[3], tied=program.tied_to is not None, orphaned=program.orphaned):
                os._exit(0)
            _become(program, descriptors)
            return program
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(options: int) -> bool:
    try:
        return os.waitpid(-1, options)[0] != 0
    except ChildProcessError:
        return False


def _guard(status: int, *, tied: bool, orphaned: bool) -> bool:
    """True in the guard, once the program has ended; False in the program. When nobody listens at `status` any more a program that
    is `tied` is killed, and one that is `orphaned` has no guard any more."""
    os.setsid()  # signals to the program's group are not for its guard
    pid = os.fork()
    if pid == 0:
        return False
    for descriptor in range(3):
        os.close(descriptor)
    os.closerange(3, status)
    os.closerange(status + 1, 4096)  # else a pipe of the program would have another end
    with contextlib.suppress(OSError):
        os.write(status, f"{pid}\n".encode())
    if tied or orphaned:
        program = os.pidfd_open(pid)
        if program not in select.select([status, program], [], [])[0]:
            if orphaned:
                os._exit(0)
            os.kill(pid, signal.SIGKILL)
    ended = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        os.write(status, f"{ended}\n".encode())
    return True


def _become(program: Program, descriptors: list[int]) -> None:
    """The state in which an interpreter begins."""
    if program.new_session:
        os.setsid()
    if program.tied_to is not None:  # it is told who its parent is
        told, guard = str(program.tied_to), str(os.getppid())
        program.arguments = [guard if each == told else each for each in program.arguments]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for target, descriptor in zip([0, 1, 2, None, *program.inherited], above, strict=True):
        if target is not None:
            os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.valid_signals():
        if number in program.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:  # the server's, who may have been started under nohup
            signal.signal(number, signal.SIG_DFL)
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ.clear()
    os.environ.update(program.environment)
    if program.directory is not None:
        os.chdir(program.directory)
    after = [path for path in program.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = after + [path for path in sys.path[1:] if path not in before]
    importlib.invalidate_caches()
    if "PYTHONUNBUFFERED" in program.environment:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.stderr.reconfigure(write_through=True)  # type: ignore[union-attr]
    if program.before is not None:
        program.before()


def run(program: Program) -> None:
    """As `python` runs its command line: `-m module`, `-c code` or a script, after `-u`, `-P` and `-W error`."""
    rest, safe = list(program.arguments), False
    while (option := rest[0]) in ("-u", "-P", "-W"):
        rest.pop(0)
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        elif option == "-P":
            safe = True
        else:
            sys.warnoptions.append(rest[0])
            warnings.simplefilter(rest.pop(0))  # type: ignore[arg-type]
    if rest[:2] == ["-m", "torch.distributed.run"] or WORKERS_TOO in program.environment:
        _children_are_forked()
    sys.orig_argv = [sys.executable, *program.arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if rest[0] == "-m":
        if not safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = rest[1:]
        with open("/proc/self/comm", "w") as name:
            name.write(rest[1])  # the command line that others see is the server's
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
    elif rest[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
        sys.argv = rest
        main.__dict__["__file__"] = rest[0]
        with open(rest[0], "rb") as script:
            code = compile(script.read(), rest[0], "exec")
        exec(code, main.__dict__)


def _children_are_forked() -> None:
    """torchrun starts its ranks, and a run its generation workers, from a server of its own, a fork of this one: they are as warm
    as it is."""
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
    import warm

    import asyncrl.concurrency.child

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        ours.close()
        os.setsid()
        raise Forked(theirs)
    theirs.close()
    warm.Popen.server = ours
    atexit.register(os.waitpid, server, 0)
    atexit.register(ours.close)
    handler.Popen = warm.Orphaned  # type: ignore[misc]
    asyncrl.concurrency.child.subprocess = warm.in_place_of_subprocess(warm.of_a_node)  # type: ignore[assignment]


class Forked(BaseException):
    """Carries a new server out of the program that it was forked from."""


def main(control: socket.socket) -> None:
    program = serve(control)
    if program is None:
        os._exit(0)  # its start was all that it was for
    code: object = 0
    try:
        run(program)
    except Forked as forked:
        main(forked.args[0])
    except SystemExit as left:
        code = left.code or 0
    _end(code)


def made_once() -> None:
    """What every run makes once in its process, of the same code each time."""
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    importlib.import_module("asyncrl.telemetry.explained").metric("loss")
    importlib.import_module("asyncrl.config.fields").nearest_name("")


def _end(code: object) -> None:
    """As an interpreter ends, but for taking apart all that was loaded: that takes longer than many a program."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(code, int):
            os._exit(code)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    gc.disable()
    for name in LOADED:
        importlib.import_module(name)
    made_once()
    gc.freeze()  # a program need not look for garbage among all that was loaded
    gc.get_freeze_count = functools.cache(gc.get_freeze_count)  # type: ignore[assignment]  # it counts them one by one
    gc.get_freeze_count()
    gc.enable()
    main(socket.socket(fileno=int(sys.argv[1])))
