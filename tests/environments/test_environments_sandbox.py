"""The sandbox: what its code sees, its limits, and that nothing is left behind, however a call or the run ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from transport_helpers import running

from asyncrl.environments import jail, sandbox
from asyncrl.environments.sandbox import Sandbox
from asyncrl.errors import LifecycleError, PlatformError

# Starts a process that leaves its session and group, and has WORD in its command line.
DAEMON = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000) # WORD"], start_new_session=True)
"""
JAIL = Path(jail.__file__).read_text()
RUN = """
import asyncio, sys
from asyncrl.environments.sandbox import Sandbox

async def main():
    async with Sandbox(timeout_s=100) as box:
        await box.python(sys.argv[1])
        print("started", flush=True)
        await box.python("while True: pass")

asyncio.run(main())
"""


def daemon(word: str) -> str:
    return DAEMON.replace("WORD", word)


def namespace(pid: object) -> int | None:
    """The namespace of process numbers of a process. None: the process has ended."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    return None


def in_namespace(inode: int | None) -> int:
    return sum(name.isdigit() and namespace(name) == inode for name in os.listdir("/proc"))


def jails() -> list[psutil.Process]:
    """The processes that sandboxes of this process have started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if jail.__file__ in child.cmdline():
                found.append(child)
    return found


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  the kernel's list of processes has no event
        await asyncio.sleep(0.01)


async def test_output_and_the_value_of_the_last_line_come_back_and_state_is_kept() -> None:
    async with Sandbox() as box:
        assert await box.python("x = 20\nprint('a')\nx + 1") == "a\n21"
        assert await box.python("x * 2") == "40"
        assert await box.python("open('f', 'w').write('kept')\nNone") == ""
        assert await box.python("open('f').read()") == "'kept'"
        assert "line 2" in (failed := await box.python("def f():\n    1 / 0\nf()")) and "ZeroDivisionError" in failed
        assert "SyntaxError" in await box.python("1 +")
        assert await box.python("input()") and await box.python("x") == "20"


async def test_without_keep_state_each_call_starts_anew() -> None:
    async with Sandbox(keep_state=False) as box:
        assert await box.python("x = 1; f = open('f', 'w')") == ""
        assert "NameError" in await box.python("x")
        assert await box.python("import os; os.listdir('.')") == "[]"


async def test_two_calls_at_a_time_take_turns() -> None:
    async with Sandbox() as box:
        assert await asyncio.gather(*(box.python(f"import time; time.sleep(0.01); {i}") for i in range(5))) == list(
            "01234"
        )


async def test_no_secret_of_the_run_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret-of-the-run")
    (tmp_path / "file").write_text("s3cret-of-the-run")
    look = f"""
import glob, os
seen = [dict(os.environ)]
for path in [*glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), {str(tmp_path / "file")!r}]:
    try: seen.append(open(path, 'rb').read())
    except OSError: pass
's3cret' in repr(seen), len(glob.glob('/proc/[0-9]*')), sorted(os.listdir('/proc/self/fd'))[:3]
"""
    async with Sandbox() as box:
        # Two processes: the first process of the namespace, and the interpreter.
        assert (await box.python(look)).startswith("(False, 2,")


async def test_there_is_no_network_not_even_the_machine_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        async with Sandbox() as box:
            assert "Network is unreachable" in await box.python(connect)


async def test_only_the_working_folder_is_writable_and_its_size_is_limited() -> None:
    async with Sandbox(memory_mib=64) as box:
        for path in ("/x", "/usr/x", f"{sys.prefix}/x", f"{sys.base_prefix}/x", "/proc/sys/kernel/hostname"):
            answer = await box.python(f"open({path!r}, 'w')")
            assert "Read-only file system" in answer or "Permission denied" in answer, answer
        assert "No space left" in await box.python(
            "f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))"
        )


async def test_rights_cannot_be_won_back() -> None:
    # A nested namespace gives capabilities over nothing that the sandbox was given.
    undo = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
before = libc.umount2(b"/usr", 2), libc.unshare(0x20000)
libc.unshare(0x10000000 | 0x20000)
before, libc.umount2(b"/usr", 2), libc.mount(b"none", b"/usr", None, 32 | 4096, None), os.access("/usr", os.W_OK)
"""
    async with Sandbox() as box:
        assert await box.python(undo) == "((-1, -1), -1, -1, False)"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("while True: pass", "ran longer than 2 s"),
        ("import signal\nsignal.signal(15, signal.SIG_IGN)\ntry:\n while True: pass\nexcept BaseException: pass", "ran longer"),
        ("while True: print('spam')", "printed more than 16384 bytes"),
        ("import os\nwhile True: os.write(2, b'x' * 1000000)", "printed more than 16384 bytes"),
        ("bytearray(10 << 30)", "MemoryError"),
        ("import os\nos.kill(os.getpid(), 9)", "the Python process ended"),
        ("import os\nos._exit(0)", "the Python process ended"),
        ("raise SystemExit(1)", "SystemExit"),
        ("import os\nfor pid in (os.getppid(), 1, -1):\n  os.kill(pid, 9)", "Operation not permitted"),
        ("from threading import *\nwhile True: Thread(target=Event().wait, daemon=True).start()", "can't start new thread"),
    ],
)  # fmt: skip
async def test_code_that_misbehaves_ends_alone(code: str, answer: str) -> None:
    async with Sandbox(timeout_s=2) as box:
        assert answer in await box.python(code)
        assert await box.python("1 + 1") == "2"


@pytest.mark.parametrize(("size", "usable"), [(100, True), (101, False)])
async def test_output_that_comes_together_with_its_end_has_the_same_limit(size: int, usable: bool) -> None:
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        exchange = asyncio.create_task(Sandbox(output_bytes=100)._exchange(ours, b"1"))
        mark = (await loop.run_in_executor(None, theirs.recv, 100))[:16]
        theirs.sendall(b"x" * size + mark)
        text, kept = await exchange
    assert (text.count("x"), kept, "printed more than 100 bytes" in text) == (100, usable, not usable)


async def test_a_fork_bomb_is_bounded_and_gone_afterwards() -> None:
    bomb = daemon("of_a_bomb") + "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with Sandbox(timeout_s=2, processes=12) as box:
        answer = asyncio.create_task(box.python(bomb))
        await until(lambda: running("of_a_bomb"))
        # While the namespace is open, no other gets its number.
        held = os.open(f"/proc/{running('of_a_bomb')[0]}/ns/pid", os.O_RDONLY)
        space, most = os.stat(held).st_ino, 0
        while not answer.done():
            most = max(most, in_namespace(space))
            await asyncio.sleep(0.05)
        assert "ran longer" in await answer
        # The limit binds the interpreter's user, who is not the user of the first process if a run is root's.
        assert 3 < most <= 13
        assert in_namespace(space) == 0
        os.close(held)
        assert await box.python("1 + 1") == "2"


@pytest.mark.parametrize("way", ["end", "error", "cancel", "cancel in a call"])
async def test_every_process_has_ended_when_the_block_ends(way: str) -> None:
    started = asyncio.Event()
    word = f"daemon_{way.replace(' ', '_')}"

    async def episode() -> None:
        async with Sandbox() as box:
            await box.python(daemon(word))
            assert running(word)
            started.set()
            if way == "error":
                raise ValueError
            if way == "cancel":
                await asyncio.Event().wait()
            if way == "cancel in a call":
                await box.python("while True: pass")

    task = asyncio.create_task(episode())
    await started.wait()
    if "cancel" in way:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    assert not running(word)


async def test_a_call_outside_the_block_is_refused_and_starts_no_process() -> None:
    async with (box := Sandbox()):
        pass
    for outside in (box, Sandbox()):
        with pytest.raises(LifecycleError, match="inside the `async with` block"):
            await outside.python("1")
    assert not jails()
    async with box:
        assert await box.python("1 + 1") == "2"


async def test_a_cancelled_call_ends_the_process_and_the_next_call_gets_another_one() -> None:
    async with Sandbox() as box:
        await box.python("x = 1")
        call = asyncio.create_task(box.python(daemon("cancelled") + "while True: pass"))
        await until(lambda: running("cancelled"))
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and not running("cancelled")
        assert "NameError" in await box.python("x")


async def test_a_cancellation_at_any_step_leaves_no_process_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode() -> None:
        # The probe of the machine is a part of it.
        monkeypatch.setattr(Sandbox, "_proved", False)
        async with Sandbox() as box:
            await box.python("1 + 1")

    async with Sandbox():
        pass
    before, wait, ended = len(os.listdir("/proc/self/fd")), 0.0, False
    for steps in range(60):
        task = asyncio.create_task(episode())
        # First every step of the loop, then moments of the kernel's work.
        for _ in range(min(steps, 12)):
            await asyncio.sleep(0)
        await asyncio.sleep(wait)
        wait = 0 if steps < 12 else 1.6 * wait + 0.001
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        assert not jails() and len(os.listdir("/proc/self/fd")) == before
        if ended:
            break
    assert ended


async def test_a_process_that_cannot_be_started_is_the_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Sandbox() as box:
        await box.python("1")
        before = len(os.listdir("/proc/self/fd"))
        await box._end()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            with pytest.raises(FileNotFoundError, match="/nowhere/python"):
                await box.python("1")
        assert len(os.listdir("/proc/self/fd")) < before
        assert await box.python("1 + 1") == "2"


async def test_kill_9_of_the_jail_ends_what_is_in_it() -> None:
    async with Sandbox() as box:
        await box.python(daemon("jailed"))
        [of_the_box] = jails()
        of_the_box.kill()
        assert "the Python process ended" in await box.python("while True: pass")
        await until(lambda: not running("jailed"))
        assert await box.python("1 + 1") == "2"


def test_kill_9_of_the_run_leaves_no_process() -> None:
    command = [sys.executable, "-c", RUN, daemon("orphan")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "started\n"
        assert running("orphan")
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while running("orphan") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running("orphan")


def test_an_ordinary_user_needs_no_root() -> None:
    """Root enters as `nobody`, with another interpreter if this one lies where only root may look."""
    python = "/usr/bin/python3"
    if os.geteuid() or not os.access(python, os.X_OK):
        pytest.skip("not root: the other tests show it")
    ours, theirs = socket.socketpair()
    command = [python, "-I", "-c", JAIL, str(theirs.fileno()), str(256 << 20), "16"]
    with (
        theirs,
        subprocess.Popen(command, pass_fds=[theirs.fileno()], user=65534, group=65534, extra_groups=[]) as process,
    ):
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(1) == b"+"
        code = b"import os; print(os.getuid(), os.path.exists('/home'))"
        ours.sendall(b"m" * 16 + len(code).to_bytes(4, "little") + code)
        answer = b""
        while not answer.endswith(b"m" * 16):
            answer += ours.recv(1000)
        assert answer == b"65534 False\n" + b"m" * 16
        ours.close()
        assert process.wait(30) == 0


async def test_a_machine_without_namespaces_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "jail.py"
    refusing.write_text(
        JAIL.replace("_libc.unshare(", "(ctypes.set_errno(1) or 1) and int(").replace("int(_NEWUSER", "bool(_NEWUSER")
    )
    monkeypatch.setattr(jail, "__file__", str(refusing))
    monkeypatch.setattr(Sandbox, "_proved", False)
    with pytest.raises(PlatformError, match=r"no sandbox \(Operation not permitted: unshare\); allow user namespaces"):
        async with sandbox.Sandbox():
            pass
