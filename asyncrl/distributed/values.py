"""Keys and values at rank 0, which other ranks read and write over the line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import LifecycleError
from .exchange import Answer, Buffer

# (request, buffers) -> answer of `KeyValues.answer`
Call = Callable[[Any, Sequence[Buffer]], Coroutine[Any, Any, Answer]]


class KeyValues:
    """The values, for one event loop. `answer` is a handler of the line."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def answer(self, peer: str, request: Any, values: Sequence[Buffer]) -> Answer:
        """[set, [key]] writes one value. [get, keys] waits for all keys."""
        operation, keys = request
        if operation == "set":
            self._values[keys[0]] = bytes(values[0])
            self._changed.set()
            self._changed = asyncio.Event()
            return None, ()
        while not self._values.keys() >= {*keys}:
            await self._changed.wait()
        return None, [self._values[key] for key in keys]

    def keep(self, prefix: str) -> None:
        """Delete the values whose keys do not begin with `prefix`."""
        self._values = {key: value for key, value in self._values.items() if key.startswith(prefix)}


class LineStore(dist.Store):
    """The values as the store of torch's process groups. Its methods block: call them on other threads than the event loop."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._request, self._loop = call, asyncio.get_running_loop()

    def set(self, key: str, value: str | bytes) -> None:
        """Returns after rank 0 has the value. Errors: those of the line."""
        self._call("set", [key], None, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value; waits for the key. Errors: those of the line."""
        return bytes(self._call("get", [key], None)[1][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. Errors: TimeoutError; those of the line."""
        self._call("get", keys, timeout)

    def _call(self, operation: str, keys: Sequence[str], timeout: timedelta | None, *values: bytes) -> Answer:
        call = asyncio.run_coroutine_threadsafe(self._request([operation, keys], values), self._loop)
        try:
            return call.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            call.cancel()
            raise TimeoutError(f"no other node has set {' and '.join(keys)} within {timeout}") from None
        except CancelledError as error:
            raise LifecycleError("the line was closed during a call of the store") from error
