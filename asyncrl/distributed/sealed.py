"""The ranks' store with an authentication code before every value, so that ranks refuse values of other programs.

    key "books", value v    ->    store: "asyncrl/0/ledger/books" = 32 hex digits of BLAKE2b(secret, name of the key, v), then v

A program that reaches the store can still end the run: it can delete keys and write nonsense. It cannot make a rank act on its
values: a value that no rank of this run wrote under this key ends the run with `StoreForged`. An older value of the same key has
a valid code, so the ledger must notice old books (`shared_books.py`). Counters (`add`) cannot carry a code, so there are none.
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
_POLL_S = 0.02


class SealedStore:
    """The calls of torch's `Store` that ranks use, with values sealed by `secret` (at most 64 bytes); None: values are not sealed.

    store: a connection. A call blocks its thread and all other threads that use this connection. name: prefix of every key.
    """

    def __init__(self, store: Store, name: str = "", secret: bytes | None = None) -> None:
        self._store: Any = store  # torch's stubs lack some of its methods
        self._name = name
        self._secret = secret

    def below(self, name: str) -> SealedStore:
        """A new connection to the same store, for keys below `name`."""
        return SealedStore(self._store.clone(), f"{self._name}{name}/", self._secret)

    def clone(self) -> SealedStore:
        """A new connection for the same keys."""
        return SealedStore(self._store.clone(), self._name, self._secret)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Send the value; does not wait until the store has it."""
        self._store.set(self._name + key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """The value; waits for the key. Errors: StoreForged; RuntimeError if the store is gone."""
        return self._open(key, self._store.get(self._name + key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._store.check([self._name + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist. Errors: RuntimeError after `timeout`, or where the store is gone."""
        self._store.wait([self._name + key for key in keys], timeout)

    def poll(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist within `timeout_s`, by repeated `check`. For keys that may never come: torch prints a line for
        every `wait` that times out. Errors: RuntimeError where the store is gone."""
        deadline = awake.now() + timeout_s
        while not self.check(keys):
            if awake.now() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def delete_key(self, key: str) -> None:
        """Delete the key, if it exists."""
        self._store.delete_key(self._name + key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`, or if there is none and `expected` is empty. Returns the value afterwards;
        without a value and with another `expected` than "", returns `expected`."""
        old = self._seal(key, expected) if expected else b""
        new = self._seal(key, desired)
        found: bytes = self._store.compare_set(self._name + key, old, new)
        return self._open(key, found)

    def multi_set(self, values: dict[str, str]) -> None:
        """Send all values in one message."""
        sealed = [self._seal(key, value) for key, value in values.items()]
        self._store.multi_set([self._name + key for key in values], sealed)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in one message. Waits and raises errors like `get`."""
        found = self._store.multi_get([self._name + key for key in keys])
        return [self._open(key, value) for key, value in zip(keys, found, strict=True)]

    def _code(self, key: str, value: bytes) -> bytes:
        name = (self._name + key).encode()
        # The length of the name keeps other pairs of name and value from giving the same bytes.
        message = b"%d %s%s" % (len(name), name, value)
        return blake2b(message, digest_size=_CODE, key=self._secret or b"").hexdigest().encode()

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
