"""Messages between a process and its child, over a socket pair: a JSON object each, with bytes behind it where it has some.

Who receives finds the bytes as `message["data"]`.

    magic 4s | length of the JSON u32 | length of the bytes u64 | JSON | bytes

Guarantees of a `Channel`
* `send` never waits. What the other side does not read is kept, in order.
* Everything that the other side sent before it closed or died can be received, whatever became of what we sent. (A transport of
  asyncio closes, with all that lies unread in the socket, at the first error of a write: the last words of a child would be lost.)
* A `receive` that is cancelled took nothing.

The standard library and orjson only: reward workers import this as they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from asyncrl.errors import TransportError

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"ACM1"
_LONGEST = 1 << 33
_CHUNK = 1 << 18


def encode(message: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A message as it travels. NaN and infinities arrive as None: JSON has none. Errors: TypeError for what is no JSON."""
    text = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return _HEADER.pack(_MAGIC, len(text), len(data)) + text + data


def decode(received: bytearray) -> dict[str, Any] | None:
    """Take the first message off `received`; None where it is not whole yet. Errors: TransportError that shows other bytes."""
    if not received.startswith(_MAGIC[: len(received)]):
        raise TransportError(f"what is no message: {bytes(received[:80])!r}" + "..." * (len(received) > 80))
    if len(received) < _HEADER.size:
        return None
    _, length, more = _HEADER.unpack_from(received)
    end = _HEADER.size + length + more
    if end > _LONGEST:
        raise TransportError(f"a message of {end:,} bytes")
    if len(received) < end:
        return None
    with memoryview(received) as view:
        text, data = bytes(view[_HEADER.size : end - more]), bytes(view[end - more : end])
    del received[:end]
    with contextlib.suppress(orjson.JSONDecodeError):
        message = orjson.loads(text)
        if isinstance(message, dict):
            return {**message, "data": data} if data else message
    raise TransportError(f"what is no JSON object: {bytes(text[:80])!r}" + "..." * (len(text) > 80))


class Channel:
    """One end. Made, used and closed on one event loop; one task receives."""

    def __init__(self, connection: socket.socket, who: str, notify: Callable[[], None] | None = None) -> None:
        """`connection` belongs to the channel from here on. `who` is at the other end, for error messages. `notify` is called
        whenever `take` may give something new."""
        connection.setblocking(False)
        # A process that we start must not keep the connection open.
        connection.set_inheritable(False)
        self._socket = connection
        self._who = who
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._received, self._unsent = bytearray(), bytearray()
        # Nothing more comes; nobody reads any more; `close` was called.
        self._ended = self._deaf = self._closed = False
        self._news, self._sent = asyncio.Event(), asyncio.Event()
        self._loop.add_reader(connection, self._on_readable)

    def take(self) -> dict[str, Any] | None:
        """The next message, None where it is not here yet. Errors: EOFError once there will be none; TransportError for what is
        no message, after which there is no use in going on."""
        try:
            found = decode(self._received)
        except TransportError as error:
            raise TransportError(f"{self._who} wrote into its channel {error}") from None
        if found is None and (self._ended or self._closed):
            raise EOFError(f"the channel of {self._who} is closed")
        return found

    async def receive(self) -> dict[str, Any]:
        """The next message. Errors: as `take`."""
        while (found := self.take()) is None:
            self._news.clear()
            await self._news.wait()
        return found

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        """To be read after all that was sent before. Where the other side is gone nothing happens: who receives notices."""
        if self._closed or self._deaf:
            return
        was_idle = not self._unsent
        self._unsent += encode(message, data)
        if was_idle:
            self._loop.add_writer(self._socket, self._on_writable)
            self._on_writable()

    async def drain(self) -> None:
        """Wait until everything has left this process; at once where nobody reads it any more."""
        while self._unsent:
            self._sent.clear()
            await self._sent.wait()

    def close(self) -> None:
        """Hang up. What was not sent yet is dropped (`drain` first), and what was not received. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._received.clear()
        self._forget_unsent()
        self._loop.remove_reader(self._socket)
        with contextlib.suppress(OSError):
            # A fork of this process may hold a copy, which would keep the connection open.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._news.set()

    def _on_readable(self) -> None:
        """Take all that is here: where the other side has died with something of ours unread, uvloop calls this only once."""
        try:
            while not self._ended:
                # The kernel reports a reset between the last words of the other side and its end.
                with contextlib.suppress(ConnectionResetError):
                    data = self._socket.recv(_CHUNK)
                    self._received += data
                    self._ended = not data
        except BlockingIOError:
            pass
        if self._ended:
            self._loop.remove_reader(self._socket)
            self._forget_unsent()
        self._news.set()
        if self._notify is not None:
            self._notify()

    def _on_writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent[:_CHUNK], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except ConnectionError:
            # Who receives gets what the other side sent before, and its end.
            self._forget_unsent()
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            self._sent.set()

    def _forget_unsent(self) -> None:
        """Nobody reads any more."""
        self._deaf = True
        self._unsent.clear()
        self._loop.remove_writer(self._socket)
        self._sent.set()
