"""The ranks' store with an authentication code before every value: what somebody else wrote there is not believed.

    key "books", value v    ->    store: "asyncrl/0/ledger/books" = 32 hex digits of BLAKE2b(secret, name of the key, v), then v

Whoever reaches the store can still delete keys and write nonsense, and so end the run. He cannot make a rank act on what he
wrote: a value that no rank of this run wrote, or wrote for another key, ends the run with `StoreForged`. What a rank wrote under
the same key earlier has the right code; who keeps books must notice that they went back (`shared_books.py`). Counters (`add`)
cannot carry a code, so there are none.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..concurrency import awake
from ..errors import StoreForged

if TYPE_CHECKING:
    from torch.distributed import Store

_CODE = 16  # bytes
_LOOK_S = 0.02


class SealedStore:
    """The calls of torch's `Store` that ranks use, with values sealed by `secret`; without one they are as they are.

    store: one connection; a call blocks its thread, and others that use the same connection. name: stands before every key.
    secret: at most 64 bytes.
    """

    def __init__(self, store: Store, name: str = "", secret: bytes | None = None) -> None:
        self._store: Any = store  # torch's stubs lack half of it
        self._name = name
        self._secret = secret

    def below(self, name: str) -> SealedStore:
        """A connection of its own to the same store, for keys below `name`."""
        return SealedStore(self._store.clone(), f"{self._name}{name}/", self._secret)

    def clone(self) -> SealedStore:
        """A connection of its own to the same keys."""
        return SealedStore(self._store.clone(), self._name, self._secret)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long one call may take."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Returns before the store has it."""
        self._store.set(self._name + key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Waits for a key that is not there. Errors: StoreForged; RuntimeError where the store is gone."""
        return self._open(key, self._store.get(self._name + key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._store.check([self._name + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Until all of them are there. Errors: RuntimeError after `timeout`, or where the store is gone."""
        self._store.wait([self._name + key for key in keys], timeout)

    def poll(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all of them come within that time, by looking again and again: where one may never come. (torch prints a
        line for every `wait` that times out.) Errors: RuntimeError where the store is gone."""
        deadline = awake.now() + timeout_s
        while not self.check(keys):
            if awake.now() >= deadline:
                return False
            # Callers are threads; torch's only other way to wait is the one that prints.
            time.sleep(_LOOK_S)
        return True

    def delete_key(self, key: str) -> None:
        """It need not be there."""
        self._store.delete_key(self._name + key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """What is there afterwards: `desired` where `expected` was there, or nothing was and `expected` is empty. Where
        nothing was there but `expected` is not empty: `expected`."""
        old = self._seal(key, expected) if expected else b""
        new = self._seal(key, desired)
        found: bytes = self._store.compare_set(self._name + key, old, new)
        return self._open(key, found)

    def multi_set(self, values: dict[str, str]) -> None:
        """All in one message."""
        sealed = [self._seal(key, value) for key, value in values.items()]
        self._store.multi_set([self._name + key for key in values], sealed)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As `get`, of all of them at one time."""
        found = self._store.multi_get([self._name + key for key in keys])
        return [self._open(key, value) for key, value in zip(keys, found, strict=True)]

    def _code(self, key: str, value: bytes) -> bytes:
        # The name is as long as it says: no other key and value give the same text.
        name = (self._name + key).encode()
        return (
            blake2b(b"%d %s%s" % (len(name), name, value), digest_size=_CODE, key=self._secret or b"")
            .hexdigest()
            .encode()
        )

    def _seal(self, key: str, value: str | bytes) -> bytes:
        plain = value.encode() if isinstance(value, str) else value
        return plain if self._secret is None else self._code(key, plain) + plain

    def _open(self, key: str, found: bytes) -> bytes:
        if self._secret is None:
            return found
        code, value = found[: 2 * _CODE], found[2 * _CODE :]
        if not hmac.compare_digest(code, self._code(key, value)):
            raise StoreForged(
                f"the value of {self._name}{key} in the ranks' store was not written by a rank of this run: its authentication "
                "code is wrong; keep others from the port of the store, and set ASYNCRL_SECRET to the same value on all nodes"
            )
        return value
