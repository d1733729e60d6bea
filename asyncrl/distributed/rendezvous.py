"""How the ranks of a run find each other: through torchrun's store. Each rank proves itself by a secret that is not in the store.

    rank 0        sets in torchrun's store: "joined/0" = where the secret is; later "line/0" = address of the line (line.py)
    other ranks   read "joined/0" and set "joined/RANK", then read "line/0" and connect to the line with the secret

Every program can write into torchrun's store, so another program can keep the ranks from meeting. But without the secret it can
neither answer for rank 0 nor read the messages of the line.

The secret is the value of ASYNCRL_SECRET. A run on several machines needs this variable. Without the variable, rank 0 of a run on
one machine draws a secret and writes it to a file that only this user may read. Rank 0 deletes the file when all ranks have joined.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..concurrency import awake
from ..errors import PlatformError
from .joining import VARIABLE, require_secret

_LOOPBACK, _EVERYWHERE = "127.0.0.1", "0.0.0.0"
_PREFIX = "asyncrl-secret-"
_POLL_S = 0.02


@dataclass
class RankInfo:
    """What torchrun's variables say about this rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    # torchrun's count of restarts. Keys in the store contain this number, so that a restarted rank reads no earlier keys.
    restart: int = 0

    @property
    def one_machine(self) -> bool:
        """Whether all ranks run on one machine."""
        return self.local_world_size == self.world_size


@dataclass(slots=True)
class Rendezvous:
    """The result of `meet`. `notes`: lines for the user."""

    store: dist.Store  # torchrun's, with the keys of this attempt
    secret: str  # the secret of the run
    host: str  # on rank 0: the address at which its servers listen
    timeout_s: float
    notes: list[str] = field(default_factory=list)

    def get(self, key: str, rank: int) -> str:
        """The value that `rank` has set for the key. Blocks until it is set. Errors: RuntimeError after the timeout."""
        self.wait_for(key, [rank])
        return self.store.get(f"{key}/{rank}").decode()

    def wait_for(self, key: str, ranks: Sequence[int]) -> None:
        """Block until these ranks have set the key. Errors: RuntimeError after `timeout_s` (suspended time does not count)."""
        deadline = awake.now() + self.timeout_s
        while not self.store.check([f"{key}/{rank}" for rank in ranks]):
            if awake.now() >= deadline:
                missing = [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]
                how = "join" if key == "joined" else f"announce the {key}"
                raise RuntimeError(f"ranks {missing} did not {how} within {self.timeout_s:g} s; see their output")
            time.sleep(_POLL_S)


def meet(info: RankInfo, timeout_s: float, environ: Mapping[str, str] | None = None) -> Rendezvous:
    """Find the other ranks. Rank 0 blocks until all ranks have joined. The other ranks block until rank 0 has set "joined/0".

    Errors: PlatformError for a missing, short or forged secret, or loopback MASTER_ADDR; RuntimeError or OSError after `timeout_s`.
    """
    secret = (os.environ if environ is None else environ).get(VARIABLE)
    if secret is not None or not info.one_machine:
        secret = require_secret(f"rank {info.rank} is on one of several machines", environ)
    store = dist.PrefixStore(f"asyncrl/{info.restart}", _launcher_store(info, timedelta(seconds=timeout_s)))
    met = Rendezvous(store, secret or "", "", timeout_s)
    if info.rank == 0:
        _lead(info, met)
    else:
        _join(info, met)
    return met


def _lead(info: RankInfo, met: Rendezvous) -> None:
    met.host = _LOOPBACK if info.one_machine else _own_address(info)
    try:
        socket.create_server((met.host, 0), family=socket.AF_INET6 if ":" in met.host else socket.AF_INET).close()
    except OSError as error:
        met.host = _EVERYWHERE
        met.notes.append(
            f"note: the line of the ranks listens on every interface, because MASTER_ADDR is no address of this machine ({error})"
        )
    file = None
    if not met.secret:
        met.secret = secrets.token_hex()
        file = _write_secret(met.secret)
    try:
        met.store.set("joined/0", "environment" if file is None else f"file {file}")
        met.wait_for("joined", range(1, info.world_size))
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def _join(info: RankInfo, met: Rendezvous) -> None:
    kind, _, path = met.get("joined", 0).partition(" ")
    expected = "environment" if met.secret else "file"
    if kind != expected:
        raise PlatformError(
            f"rank 0 takes the secret of the line from {kind!r}, and rank {info.rank} from {expected!r}: set {VARIABLE} to the "
            "same value for every rank, or for none"
        )
    met.secret = met.secret or _read_secret(Path(path))
    met.store.set(f"joined/{info.rank}", "")


def _launcher_store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """A client of torchrun's store. If torchrun hosts no store, rank 0 hosts one at MASTER_PORT."""
    if info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        # OSError: MASTER_ADDR is no address of this machine. Then `dist.rendezvous` below opens a store at all addresses.
        with contextlib.suppress(OSError):
            return _listening_store(_own_address(info), info.master_port, timeout)
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))
    return store  # type: ignore[no-any-return]  # rendezvous is not typed


def advertised(address: str, reachable: str) -> str:
    """`address` with `reachable` in place of 0.0.0.0, to which other machines cannot connect."""
    return address.replace(_EVERYWHERE, reachable)


def _own_address(info: RankInfo) -> str:
    """MASTER_ADDR; with several machines its IP address. Errors: PlatformError if this is a loopback address."""
    if info.one_machine:
        return info.master_addr
    address = str(socket.getaddrinfo(info.master_addr, None, type=socket.SOCK_STREAM)[0][4][0])
    if address.startswith("127.") or address == "::1":
        raise PlatformError(
            f"MASTER_ADDR={info.master_addr} is {address}, which no other machine can reach; start torchrun with the address of "
            "this machine in the network of the ranks"
        )
    return address


def _listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens only at `address`. Errors: OSError if the address is not of this machine."""
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
    """The secret in a file. Any program can set the path. Errors: PlatformError if the path is no file of this user alone."""
    forged = PlatformError(
        f"torchrun's store names {path} as the file of the secret, but that is no file that this user alone can read; either this "
        "rank came too late, or another program wrote the path; then block other programs from the port of the store"
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
