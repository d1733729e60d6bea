"""The ranks' store: keys and values at rank 0, for calls that block a thread. The line carries them, so they are encrypted.

    rank 0        serves a line at 127.0.0.1 (all ranks on one machine) or at MASTER_ADDR, on a free port
                  sets in torchrun's store: "secret" = source of the secret, "line" = address of the line
    other ranks   read both keys and connect with the secret

Every program can write into torchrun's store. Such a program can keep ranks from their store, but it cannot answer for rank 0, and
it cannot read or write a value: it does not know the secret.

The secret is ASYNCRL_SECRET, if this variable is set. Else, on one machine, rank 0 draws a secret. A file that only this user may
read holds the secret until all ranks have joined. On several machines the variable must be set.

The line runs on a thread of its own, which answers while the event loop of the run is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ..concurrency import awake
from ..errors import PlatformError
from .exchange import Answer, Buffer
from .line import SILENCE_S, LineClient, LineServer

VARIABLE = "ASYNCRL_SECRET"
_MIN_LENGTH = 16  # characters of a secret
_LOOPBACK = "127.0.0.1"
_PREFIX = "asyncrl-secret-"
_POLL_S = 0.02

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The number of this rank, and the address of the launcher's store."""

    rank: int
    ranks: int
    one_machine: bool  # all ranks run on one machine
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT; 0 without a launcher
    restart: int  # torchrun's count of restarts


class RankStore:
    """Keys and values below a name, from any thread. Every method blocks. Errors: RankLost if rank 0 is lost."""

    def __init__(self, thread: LineThread, name: str = "") -> None:
        self._thread, self._name = thread, name

    def below(self, name: str) -> RankStore:
        """The same store, for keys below `name`."""
        return RankStore(self._thread, f"{self._name}{name}/")

    def set(self, key: str, value: str | bytes) -> None:
        """Write the value. Returns after rank 0 has it."""
        self._call("set", [key], [value.encode() if isinstance(value, str) else value])

    def get(self, key: str) -> bytes:
        """The value; waits for the key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in one message; waits for every key."""
        return [bytes(value) for value in self._call("get", keys)[1]]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._call("check", keys)[0])

    def poll(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist within `timeout_s`."""
        deadline = awake.now() + timeout_s
        while not self.check(keys):
            if awake.now() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def delete_key(self, key: str) -> None:
        """Delete the key, if it exists."""
        self._call("delete", [key])

    def _call(self, operation: str, keys: Sequence[str], values: Sequence[Buffer] = ()) -> Answer:
        return self._thread.call([operation, [self._name + key for key in keys]], values)


class LineThread:
    """The thread with one end of the line: on rank 0 the server with the values, elsewhere a client."""

    def __init__(self, end: LineServer | LineClient, host: str = "") -> None:
        """Blocks until the end is open. `host`: where a server listens. Errors: OSError, RankLost."""
        self.end = end
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncrl-ranks-store", daemon=True)
        self._thread.start()
        end.on("store", self._answer)
        try:
            if isinstance(end, LineServer):
                self._run(end.open(host))
            else:
                self._run(end.__aenter__())
        except BaseException:
            self._stop()
            raise

    def call(self, request: Any, values: Sequence[Buffer]) -> Answer:
        """Blocks until rank 0 has answered."""
        if isinstance(self.end, LineServer):
            return self._run(self._answer(self.end.name, request, values))
        return self._run(self.end.ask("store", request, values))

    def close(self) -> None:
        """Close the end of the line and end the thread."""
        try:
            self._run(self._end_all())
        finally:
            self._stop()

    async def _end_all(self) -> None:
        await self.end.aclose()
        # Calls of this process that wait for a key.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the ranks' store is closed")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except CancelledError as error:
            raise RuntimeError("the ranks' store was closed during a call") from error

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, peer: str, request: Any, values: Sequence[Buffer]) -> Answer:
        operation, keys = request
        if operation == "set":
            self._values[keys[0]] = bytes(values[0])
            self._changed.set()
            self._changed = asyncio.Event()
        elif operation == "delete":
            self._values.pop(keys[0], None)
        elif operation == "get":
            while not self._has(keys):
                await self._changed.wait()
            return None, [self._values[key] for key in keys]
        return self._has(keys), ()

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


@dataclass(slots=True)
class RanksStore:
    """The store of one rank, from `open_store`. `notes`: lines for the user. `secret`: for further lines of this run."""

    store: RankStore
    thread: LineThread
    launcher_store: dist.Store  # for torch's process group
    secret: str
    host: str  # where a server of rank 0 listens
    rank: int
    ranks: int
    notes: list[str] = field(default_factory=list)
    secret_file: Path | None = None  # rank 0 only
    silence_s: float = SILENCE_S
    lost: set[int] = field(default_factory=set)  # ranks for which `close` does not wait

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Block until every rank has joined. Errors: RuntimeError after `timeout_s`."""
        try:
            if self.rank:
                self.store.set(f"joined/{self.rank}", "1")
            else:
                others = range(1, self.ranks)
                if not self.store.poll([f"joined/{rank}" for rank in others], timeout_s):
                    missing = [rank for rank in others if not self.store.check([f"joined/{rank}"])]
                    raise RuntimeError(f"ranks {missing} did not join within {timeout_s:g} s; see their output")
        finally:
            if self.secret_file is not None:
                self.secret_file.unlink(missing_ok=True)

    def close(self, timeout_s: float) -> list[int]:
        """Leave the store. Rank 0 has the values, so it blocks until all ranks have left, at most `timeout_s`.

        Returns, on rank 0, the ranks that have not left."""
        others, missing = sorted({*range(1, self.ranks)} - self.lost), list[int]()
        with contextlib.suppress(RuntimeError):  # rank 0 is lost
            self.store.set(f"bye/{self.rank}", "1")
            if not self.rank and not self.store.poll([f"bye/{rank}" for rank in others], timeout_s):
                missing = [rank for rank in others if not self.store.check([f"bye/{rank}"])]
        self.thread.close()
        return missing


def open_store(
    info: RankInfo, timeout: timedelta, silence_s: float = SILENCE_S, environ: Mapping[str, str] | None = None
) -> RanksStore:
    """Serve the ranks' store (rank 0) or connect to it (other ranks, which block until rank 0 serves the store).

    Errors: PlatformError. RuntimeError or OSError if rank 0 cannot be reached within `timeout`.
    """
    secret = (os.environ if environ is None else environ).get(VARIABLE)
    example = 'python -c "import secrets; print(secrets.token_hex())"'
    if secret is None and not info.one_machine:
        raise PlatformError(
            f"the ranks are on several machines, and {VARIABLE} is not set on the machine of rank {info.rank}; set it to the same "
            f"{_MIN_LENGTH} or more random characters on every machine ({example})"
        )
    if secret is not None and len(secret) < _MIN_LENGTH:
        raise PlatformError(
            f"{VARIABLE} has {len(secret)} characters; give it at least {_MIN_LENGTH} random characters, the same on every "
            f"machine ({example})"
        )
    launcher_store = _launcher_store(info, timeout)
    keys = dist.PrefixStore(f"asyncrl/{info.restart}", launcher_store)
    ranks = (_serve if info.rank == 0 else _join)(info, launcher_store, keys, secret, timeout)
    ranks.thread.end.silence_s = ranks.silence_s = silence_s
    return ranks


def _launcher_store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """torchrun's store. If torchrun hosts none, rank 0 must host a store at the launcher's port."""
    if info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        # OSError: MASTER_ADDR is no address of this machine. Then torch's rendezvous opens a store below, at every address.
        with contextlib.suppress(OSError):
            return _listening_store(_own_address(info), info.port, timeout)
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.ranks, timeout=timeout))
    return store  # type: ignore[no-any-return]  # rendezvous is not typed


def _serve(
    info: RankInfo, launcher_store: dist.Store, keys: dist.Store, secret: str | None, timeout: timedelta
) -> RanksStore:
    notes, file = [], None
    source = "environment"
    if secret is None:
        secret = secrets.token_hex()
        file = _write_secret(secret)
        source = f"file {file}"
    host = _LOOPBACK if info.one_machine else _own_address(info)
    try:
        thread = LineThread(LineServer(_of_attempt(secret, info)), host)
    except OSError as error:
        host = "0.0.0.0"
        notes.append(
            f"note: the line of the ranks listens on every interface, because MASTER_ADDR is elsewhere ({error})"
        )
        thread = LineThread(LineServer(_of_attempt(secret, info)), host)
    keys.set("secret", source)
    keys.set("line", advertised(thread.end.address, host, info.address))
    return RanksStore(RankStore(thread), thread, launcher_store, secret, host, 0, info.ranks, notes, file)


def _join(
    info: RankInfo, launcher_store: dist.Store, keys: dist.Store, secret: str | None, timeout: timedelta
) -> RanksStore:
    deadline = awake.now() + timeout.total_seconds()
    while not keys.check(["secret", "line"]):
        if awake.now() >= deadline:
            raise RuntimeError(
                f"rank 0 did not serve the ranks' store within {timeout.total_seconds():g} s; see its output"
            )
        time.sleep(_POLL_S)
    kind, _, path = keys.get("secret").decode().partition(" ")
    expected = "file" if secret is None else "environment"
    if kind != expected:
        raise PlatformError(
            f"rank 0 takes the secret of the line from {kind!r}, and rank {info.rank} from {expected!r}: set {VARIABLE} to the "
            "same value for every rank, or for none"
        )
    secret = secret or _read_secret(Path(path))
    line = LineClient(keys.get("line").decode(), _of_attempt(secret, info), f"rank {info.rank}")
    return RanksStore(RankStore(thread := LineThread(line)), thread, launcher_store, secret, "", info.rank, info.ranks)


def _of_attempt(secret: str, info: RankInfo) -> str:
    """A rank of an earlier attempt cannot join."""
    return f"{secret}/{info.restart}"


def advertised(address: str, host: str, reachable: str) -> str:
    """The address of a server that listens at `host`, for other machines. `reachable`: the address if it listens everywhere."""
    return address.replace("0.0.0.0", reachable) if host == "0.0.0.0" else address


def _own_address(info: RankInfo) -> str:
    """The address of MASTER_ADDR. Errors: PlatformError for a loopback address if there are several machines."""
    if info.one_machine:
        return info.address
    address = str(socket.getaddrinfo(info.address, None, type=socket.SOCK_STREAM)[0][4][0])
    if address.startswith("127.") or address == "::1":
        raise PlatformError(
            f"MASTER_ADDR={info.address} is {address}, which no other machine can reach; start torchrun with the address of this "
            "machine in the network of the ranks"
        )
    return address


def _listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at this address alone. Errors: OSError if the address is not of this machine."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(4096)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # torch closes the descriptor
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )


def _write_secret(secret: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX)  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret)
    return Path(name)


def _read_secret(path: Path) -> str:
    """The secret in a file. Errors: PlatformError unless only this user may read the file: every program could set the path."""
    forged = PlatformError(
        f"torchrun's store names {path} as the file of the secret, which is no such file of this user: another program wrote "
        "the path; block other programs from the port of the store"
    )
    if not path.name.startswith(_PREFIX):
        raise forged
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise forged from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise forged
        return file.read()
