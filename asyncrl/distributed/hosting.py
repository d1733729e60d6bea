"""Opens the ranks' store. Rank 0 hosts the store and listens at one address only.

torchrun's store listens on every interface of the machine, and so does every store that torch opens by default. So ranks use the
store of torchrun only to find their own store:

    rank 0        listens at 127.0.0.1 (all ranks on one machine) or at MASTER_ADDR, on a free port
                  sets in torchrun's store: "secret" = source of the secret, "store" = address and port, sealed with the secret
    other ranks   read both keys and connect

The secret is ASYNCRL_SECRET, if this variable is set. Else, on one machine, rank 0 draws a secret. A file that only this user may
read holds the secret until all ranks have joined. Else there is no secret, and a note warns the user.
The key that seals values is derived from the secret and from a random number of this attempt. So ranks refuse values of an
earlier run with the same secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import orjson
import torch.distributed as dist

from ..errors import PlatformError, StoreForged
from .sealed import SealedStore

VARIABLE = "ASYNCRL_SECRET"
_MIN_LENGTH = 16  # characters of a secret
_LOOPBACK = "127.0.0.1"
_PREFIX = "asyncrl-secret-"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The number of this rank, and the address of the launcher's store."""

    rank: int
    ranks: int
    one_machine: bool  # all ranks run on one machine
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT; 0 without a launcher
    restart: int  # torchrun's count of restarts


@dataclass(slots=True)
class RanksStore:
    """The connection of one rank to the ranks' store, from `open_store`. `notes`: lines for the user."""

    store: SealedStore
    plain: dist.Store  # the same store without seals, for torch's process group
    rank: int
    ranks: int
    notes: list[str] = field(default_factory=list)
    secret_file: Path | None = None  # rank 0 only
    launcher_store: dist.Store | None = None  # rank 0 only, which may host this store, too

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
            self.launcher_store = None  # no rank reads it any more

    def close(self, timeout_s: float) -> list[int]:
        """Leave the store. Rank 0 hosts the store, so it blocks until all ranks have left, at most `timeout_s`.

        Returns, on rank 0, the ranks that have not left."""
        others = range(1, self.ranks)
        with contextlib.suppress(RuntimeError):  # the store is lost
            self.store.set(f"bye/{self.rank}", "1")
            if self.rank:
                # `set` does not wait for the store, but a later `check` does.
                self.store.check([f"bye/{self.rank}"])
            elif not self.store.poll([f"bye/{rank}" for rank in others], timeout_s):
                return [rank for rank in others if not self.store.check([f"bye/{rank}"])]
        return []


def open_store(info: RankInfo, timeout: timedelta, environ: Mapping[str, str] | None = None) -> RanksStore:
    """Host the ranks' store (rank 0) or connect to it (other ranks, which block until rank 0 hosts the store).

    Errors: PlatformError, StoreForged. RuntimeError or OSError if rank 0 cannot be reached within `timeout`.
    """
    secret = (os.environ if environ is None else environ).get(VARIABLE)
    if secret is not None and len(secret) < _MIN_LENGTH:
        raise PlatformError(
            f"{VARIABLE} has {len(secret)} characters; give it at least {_MIN_LENGTH} random characters, the same on every node "
            '(python -c "import secrets; print(secrets.token_hex())")'
        )
    launcher_store = dist.PrefixStore(f"asyncrl/{info.restart}", _launcher_store(info, timeout))
    if info.rank == 0:
        return _host(info, launcher_store, secret, timeout)
    return _join(info, launcher_store, secret, timeout)


def _launcher_store(info: RankInfo, timeout: timedelta) -> dist.Store:
    """torchrun's store. If torchrun hosts none, rank 0 must host a store at the launcher's port."""
    if info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        # OSError: MASTER_ADDR is no address of this machine. Then torch's rendezvous opens a store below, at every address.
        with contextlib.suppress(OSError):
            return _listening_store(_own_address(info), info.port, timeout)
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.ranks, timeout=timeout))
    return store  # type: ignore[no-any-return]  # rendezvous is not typed


def _host(info: RankInfo, launcher_store: dist.Store, secret: str | None, timeout: timedelta) -> RanksStore:
    notes, file = [], None
    if secret is not None:
        launcher_store.set("secret", "environment")
    elif info.one_machine:
        secret = secrets.token_hex()
        file = _write_secret(secret)
        launcher_store.set("secret", f"file {file}")
    else:
        launcher_store.set("secret", "none")
        notes.append(
            f"note: values in the ranks' store are not authenticated: every program that reaches {info.address} can change "
            f"them; set {VARIABLE} to the same secret on every node"
        )
    nonce = secrets.token_hex(16)
    location: dict[str, object] = {"address": None, "port": 0, "nonce": nonce}
    ranks_store: dist.Store = launcher_store
    try:
        address = _LOOPBACK if info.one_machine else _own_address(info)
        own_store = _listening_store(address, 0, timeout)
        location |= {"address": address, "port": own_store.port}
        ranks_store = own_store
    except OSError as error:
        notes.append(
            f"note: the ranks' store cannot listen at MASTER_ADDR={info.address} alone ({error}); torchrun's store is used, "
            "which listens on every interface"
        )
    SealedStore(launcher_store, "", _key(secret, "the ranks' store")).set("store", orjson.dumps(location))
    return RanksStore(
        _sealed(ranks_store, info, secret, nonce), ranks_store, info.rank, info.ranks, notes, file, launcher_store
    )


def _join(info: RankInfo, launcher_store: dist.Store, secret: str | None, timeout: timedelta) -> RanksStore:
    if not SealedStore(launcher_store).poll(["secret", "store"], timeout.total_seconds()):
        raise RuntimeError(f"rank 0 did not host the ranks' store within {timeout.total_seconds():g} s; see its output")
    kind, _, path = launcher_store.get("secret").decode().partition(" ")
    expected = "environment" if secret is not None else "file" if info.one_machine else "none"
    if kind != expected:
        raise PlatformError(
            f"rank 0 takes the secret of the ranks' store from {kind!r}, and rank {info.rank} from {expected!r}: set {VARIABLE} "
            "to the same value on every node, or on none"
        )
    if kind == "file":
        secret = _read_secret(Path(path))
    location = orjson.loads(SealedStore(launcher_store, "", _key(secret, "the ranks' store")).get("store"))
    ranks_store: dist.Store = launcher_store
    if location["address"] is not None:
        ranks_store = dist.TCPStore(location["address"], location["port"], is_master=False, timeout=timeout)
    return RanksStore(_sealed(ranks_store, info, secret, location["nonce"]), ranks_store, info.rank, info.ranks)


def _sealed(store: dist.Store, info: RankInfo, secret: str | None, nonce: str) -> SealedStore:
    return SealedStore(store, f"ranks/{info.restart}/", _key(secret, nonce))


def _key(secret: str | None, purpose: str) -> bytes | None:
    return None if secret is None else hmac.digest(secret.encode(), purpose.encode(), "sha256")


def _own_address(info: RankInfo) -> str:
    """The address of MASTER_ADDR. Errors: OSError for a loopback address if there are several machines."""
    address = str(socket.getaddrinfo(info.address, None, type=socket.SOCK_STREAM)[0][4][0])
    if not info.one_machine and (address.startswith("127.") or address == "::1"):
        raise OSError(f"its address is {address}, which no other machine can reach")
    return address


def _listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at this address alone. Errors: OSError if the address is not of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
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
    """The secret in a file. Errors: StoreForged unless only this user may read the file: every program could set the path."""
    forged = StoreForged(
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
