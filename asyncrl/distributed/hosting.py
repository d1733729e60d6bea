"""The ranks' store: one of our own, that rank 0 holds and that can be reached where it must be and nowhere else.

torchrun's store (and any that torch opens by itself) listens on every interface of the machine, for everybody. So it is asked
for one thing alone, where the ranks' own store is:

    rank 0   listens at 127.0.0.1 (all ranks on one machine) or at MASTER_ADDR, any free port
             torchrun's store: "secret" -> where the secret comes from; "store" -> address, port, sealed with the secret
    others   read both, connect

The secret. ASYNCRL_SECRET, where it is set. Else, on one machine, rank 0 draws one and leaves it in a file that only this user
may read, until all ranks have joined. Else there is none, and a note says so: torch tells its ranks apart by nothing.
A key of this attempt is drawn from it, so that what an earlier run with the same secret wrote is not believed either.
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
_SHORTEST = 16  # characters
_LOOPBACK = "127.0.0.1"
_PREFIX = "asyncrl-secret-"


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among the others. `port`: of torchrun's store; 0 elsewhere than under a launcher."""

    rank: int
    ranks: int
    one_machine: bool
    address: str
    port: int
    restart: int


@dataclass(slots=True)
class RanksStore:
    """`open_store` makes one. `notes`: lines for the user."""

    store: SealedStore
    plain: dist.Store  # the same, for torch's process group
    rank: int
    ranks: int
    notes: list[str] = field(default_factory=list)
    secret_file: Path | None = None  # of rank 0
    first: dist.Store | None = None  # of rank 0, which may hold that one too

    def meet(self, timeout_s: float) -> None:
        """Blocks until every rank has come. Errors: RuntimeError where one does not."""
        try:
            if self.rank:
                self.store.set(f"joined/{self.rank}", "1")
            else:
                others = range(1, self.ranks)
                if not self.store.poll([f"joined/{rank}" for rank in others], timeout_s):
                    missing = [rank for rank in others if not self.store.check([f"joined/{rank}"])]
                    raise RuntimeError(f"ranks {missing} did not come within {timeout_s:g} s")
        finally:
            if self.secret_file is not None:
                self.secret_file.unlink(missing_ok=True)
            self.first = None  # all have read there what they need

    def close(self, patience_s: float) -> list[int]:
        """Blocks rank 0, which holds the store, until the others no longer need it; so long at most, one may have died. Those
        that it waited for in vain."""
        others = range(1, self.ranks)
        with contextlib.suppress(RuntimeError):  # it is gone
            self.store.set(f"bye/{self.rank}", "1")
            if self.rank:
                self.store.check([f"bye/{self.rank}"])  # its answer: it is there before this connection ends
            elif not self.store.poll([f"bye/{rank}" for rank in others], patience_s):
                return [rank for rank in others if not self.store.check([f"bye/{rank}"])]
        return []


def open_store(place: Place, timeout: timedelta, environ: Mapping[str, str] | None = None) -> RanksStore:
    """Blocks until rank 0 is there. Errors: PlatformError, StoreForged; RuntimeError or OSError where the others cannot be
    reached."""
    given = (os.environ if environ is None else environ).get(VARIABLE)
    if given is not None and len(given) < _SHORTEST:
        raise PlatformError(
            f"{VARIABLE} has {len(given)} characters; give it at least {_SHORTEST} that nobody can guess, on every node the same "
            '(python -c "import secrets; print(secrets.token_hex())")'
        )
    first = _launchers_store(place, timeout)
    outer = dist.PrefixStore(f"asyncrl/{place.restart}", first)
    if place.rank == 0:
        return _host(place, outer, given, timeout)
    return _join(place, outer, given, timeout)


def _launchers_store(place: Place, timeout: timedelta) -> dist.Store:
    """torchrun's. Without it the first of the ranks has to hold one at the port that all were given."""
    if place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        # Not this machine's address: torch's own way, which listens everywhere.
        with contextlib.suppress(OSError):
            return _listening(_own_address(place), place.port, timeout)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.ranks, timeout=timeout))
    return store  # type: ignore[no-any-return]  # rendezvous is not typed


def _host(place: Place, outer: dist.Store, given: str | None, timeout: timedelta) -> RanksStore:
    notes, file, secret = [], None, given
    if given is not None:
        outer.set("secret", "environment")
    elif place.one_machine:
        secret = secrets.token_hex()
        file = _leave(secret)
        outer.set("secret", f"file {file}")
    else:
        outer.set("secret", "none")
        notes.append(
            f"note: values in the ranks' store are not authenticated: whoever reaches {place.address} can change them; set "
            f"{VARIABLE} to the same secret on every node"
        )
    nonce = secrets.token_hex(16)
    announced: dict[str, object] = {"address": None, "port": 0, "nonce": nonce}
    inner: dist.Store = outer
    try:
        address = _LOOPBACK if place.one_machine else _own_address(place)
        own = _listening(address, 0, timeout)
        announced |= {"address": address, "port": own.port}
        inner = own
    except OSError as error:
        notes.append(
            f"note: the ranks' store cannot listen at MASTER_ADDR={place.address} alone ({error}); torchrun's is used, which "
            "listens on every interface"
        )
    SealedStore(outer, "", _key(secret, "the ranks' store")).set("store", orjson.dumps(announced))
    return RanksStore(_sealed(inner, place, secret, nonce), inner, place.rank, place.ranks, notes, file, outer)


def _join(place: Place, outer: dist.Store, given: str | None, timeout: timedelta) -> RanksStore:
    if not SealedStore(outer).poll(["secret", "store"], timeout.total_seconds()):
        raise RuntimeError(f"rank 0 did not say within {timeout.total_seconds():g} s where the ranks' store is")
    said = outer.get("secret").decode()
    kind, _, path = said.partition(" ")
    expected = "environment" if given is not None else "file" if place.one_machine else "none"
    if kind != expected:
        raise PlatformError(
            f"rank 0 takes the secret of the ranks' store from {kind!r}, and rank {place.rank} from {expected!r}: set {VARIABLE} "
            "to the same value on every node, or on none"
        )
    secret = _taken(Path(path)) if kind == "file" else given
    announced = orjson.loads(SealedStore(outer, "", _key(secret, "the ranks' store")).get("store"))
    inner: dist.Store = outer
    if announced["address"] is not None:
        inner = dist.TCPStore(announced["address"], announced["port"], is_master=False, timeout=timeout)
    return RanksStore(_sealed(inner, place, secret, announced["nonce"]), inner, place.rank, place.ranks)


def _sealed(store: dist.Store, place: Place, secret: str | None, nonce: str) -> SealedStore:
    return SealedStore(store, f"ranks/{place.restart}/", _key(secret, nonce))


def _key(secret: str | None, of: str) -> bytes | None:
    return None if secret is None else hmac.digest(secret.encode(), of.encode(), "sha256")


def _own_address(place: Place) -> str:
    """Of MASTER_ADDR. Errors: OSError where it has none that other machines, where there are any, can reach too."""
    address = str(socket.getaddrinfo(place.address, None, type=socket.SOCK_STREAM)[0][4][0])
    if not place.one_machine and (address.startswith("127.") or address == "::1"):
        raise OSError(f"it is {address} here, which no other machine can reach")
    return address


def _listening(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at one address alone. Errors: OSError where it is none of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # torch closes it
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )


def _leave(secret: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX)  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret)
    return Path(name)


def _taken(path: Path) -> str:
    """The path came from a store that anybody can write to. Errors: StoreForged."""
    forged = StoreForged(
        f"torchrun's store names {path} as the file of the secret, which is no such file of this user: somebody else wrote "
        "that; keep others from the port of the store"
    )
    if not path.name.startswith(_PREFIX):
        raise forged
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise forged from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise forged
        return file.read()
