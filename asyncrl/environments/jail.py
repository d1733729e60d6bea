"""The script that a `Sandbox` (sandbox.py) starts as a process, the jail. Imports nothing of asyncrl.

    run ── jail ── init, process 1 of new Linux namespaces ── interpreter, which runs the policy's code

Guarantees
* The interpreter sees a file system of its own: the folders of Python and of the system's programs, which are read-only, and
  `/sandbox`, which is memory. The interpreter has no network, no capabilities, and no environment variable or process of the run.
* Init ends if the run closes the socket, the run dies, the interpreter ends, or the jail ends. The kernel then kills every process
  of the namespaces, whatever its session or group, and drops `/sandbox`. The jail ends after the last process.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import sys
import traceback
from typing import Any

# linux/sched.h: namespaces of mounts, System V memory, users, processes and networks.
_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_NOBODY = 65534
# The only folder in which the code may write. Not /tmp, because Python itself may lie in /tmp.
_HOME = "/sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main(fd: int, memory: int, processes: int) -> None:
    """Serve the run at socket `fd`. Sends `+` when code can run, or `-` and the reason of a failure. `memory`: bytes."""
    connection, is_root = socket.socket(fileno=fd), os.geteuid() == 0
    try:
        # If the machine runs out of memory, the kernel kills processes of the sandbox first.
        _write("/proc/self/oom_score_adj", "1000")
        _enter_namespaces(is_root)
        init = os.fork()
        if not init:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _make_root(memory)
            _be_init(connection, is_root, memory, processes)
    except OSError as error:
        connection.sendall(f"-{error.strerror}: {error.filename}".encode())
        os._exit(1)
    connection.close()
    os.waitpid(init, 0)


def _enter_namespaces(is_root: bool) -> None:
    """Leave the namespaces of the run. Root also maps the user `nobody`, because the limit of processes does not apply to root."""
    reader, writer = os.pipe()
    jail, mapper = os.getpid(), os.fork()
    if not mapper:
        # This fork stays outside of the new namespaces, because only root outside of them may map two users.
        os.close(writer)
        try:
            if os.read(reader, 1) and not is_root:
                _write(f"/proc/{jail}/setgroups", "deny")
            for name, own in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
                _write(f"/proc/{jail}/{name}", f"{own} {own} 1\n" + f"{_NOBODY} {_NOBODY} 1\n" * is_root)
            # A forked child must not run the cleanup of its parent.
            os._exit(0)
        finally:
            os._exit(1)
    _check(_libc.unshare(_NAMESPACES), "unshare")
    os.write(writer, b"+")
    if os.waitpid(mapper, 0)[1]:
        raise PermissionError(1, "the user may not be mapped", "uid_map")
    os.close(writer)
    os.close(reader)


def _make_root(memory: int) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    # The new root. Only the new mount namespace sees it at /tmp.
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/old")
    if (machine := os.uname().machine) not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, "not known on this kind of processor", f"pivot_root of {machine}")
    _check(_libc.syscall(_PIVOT_ROOT[machine], b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path in dict.fromkeys((*_SYSTEM, sys.base_prefix, sys.prefix)):
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), path)
        elif os.path.exists(f"/old{path}") and not os.path.exists(path):
            _bind(path, _RDONLY | _NOSUID | _NODEV)
    for name in _DEVICES:
        _bind(f"/dev/{name}", _NOSUID)
    os.mkdir("/proc")
    # A container that hides a part of its /proc allows no new /proc. Then the sandbox has no /proc.
    with contextlib.suppress(OSError):
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.mkdir(_HOME)
    _check(_libc.umount2(b"/old", 2), "umount")  # 2: MNT_DETACH
    os.rmdir("/old")
    _restrict("/", _RDONLY)
    _mount("tmpfs", _HOME, "tmpfs", _NOSUID | _NODEV, f"size={memory},mode=1777")
    os.chdir(_HOME)


def _be_init(connection: socket.socket, is_root: bool, memory: int, processes: int) -> None:
    """Wait until the run closes the socket or the interpreter ends. Then exit. Never returns."""
    # The kernel reaps the children of a process that ignores SIGCHLD, orphans included.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    interpreter = os.fork()
    if not interpreter:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _give_up_rights(is_root, memory, processes)
        _serve(connection)
    # If init were dumpable, the policy's code could trace init.
    _libc.prctl(_PR_SET_DUMPABLE, 0)
    ends = select.poll()
    ends.register(connection, select.POLLRDHUP)
    ends.register(os.pidfd_open(interpreter), select.POLLIN)
    ends.poll()
    os._exit(0)


def _give_up_rights(is_root: bool, memory: int, processes: int) -> None:
    if is_root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # `header`: the version of the structure, and 0 for this process. `none`: empty sets of capabilities.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for name, limit in {"AS": memory, "NPROC": processes, "NOFILE": 256, "CORE": 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def _serve(connection: socket.socket) -> None:
    """Answer each request with the output of its code, and then with the request's mark. Never returns. A request is a mark (16
    bytes), the length of the code in bytes (4 bytes), and the code."""
    # Standard input is empty: code that reads it must not read requests. Output and errors of the code go into the connection.
    for number, source in ((0, os.open("/dev/null", os.O_RDWR)), (1, connection.fileno()), (2, connection.fileno())):
        os.dup2(source, number)
    interpreter, variables = os.getpid(), {"__name__": "__main__"}
    connection.sendall(b"+")
    with connection.makefile("rb") as requests:
        while header := requests.read(20):
            _run(requests.read(int.from_bytes(header[16:], "little")).decode(), variables)
            # A fork that the code made must not serve as a second interpreter.
            if os.getpid() != interpreter:
                break
            connection.sendall(header[:16])
    os._exit(0)


def _run(code: str, variables: dict[str, Any]) -> None:
    """Run `code`. If its last statement is an expression, print its value, as an interactive interpreter does."""
    try:
        tree = ast.parse(code, "<code>")
        value = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body.pop()
            exec(compile(tree, "<code>", "exec"), variables)
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), variables)
        else:
            exec(compile(tree, "<code>", "exec"), variables)
        if value is not None:
            print(repr(value))
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _bind(path: str, flags: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(f"/old{path}"):
        os.mkdir(path)
    else:
        os.mknod(path)
    _mount(f"/old{path}", path, None, _BIND | _REC)
    _restrict(path, flags)


def _restrict(path: str, flags: int) -> None:
    # Recursive: a remount would leave the mounts below `path` writable.
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    found = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, 32)
    _check(found, f"mount_setattr {path}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    found = _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())
    _check(found, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
