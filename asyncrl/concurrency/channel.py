"""Messages between a process and its child over a socket pair. A message is a JSON object and may carry bytes.

The receiver finds the bytes as `message["data"]`. A message on the socket:

    magic 4s | length of the JSON u32 | length of the bytes u64 | JSON | bytes

Guarantees of a `Channel`
* `send` never waits. It buffers what the peer has not read, in order.
* Every message that the peer sent before it closed or died can be received, even if our own writes failed. (A transport of
  asyncio closes at the first failed write and drops the unread input. The last messages of a child would be lost.)
* A cancelled `receive` loses no message.

This module imports only the standard library, orjson and `asyncrl.errors`, because each reward worker imports it at its start.
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
_MAX_BYTES = 1 << 33
_CHUNK_BYTES = 1 << 18


def encode(message: Mapping[str, Any], data: bytes = b"") -> bytes:
    """The message as bytes for the socket. NaN and infinities become None, because JSON has no such numbers. Errors: TypeError
    for a value that JSON cannot hold."""
    text = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return _HEADER.pack(_MAGIC, len(text), len(data)) + text + data


def decode(buffer: bytearray) -> dict[str, Any] | None:
    """Remove the first message from `buffer` and return it. None: the message is incomplete. Errors: TransportError if the buffer
    does not begin with a message; the error shows the first bytes."""
    if not buffer.startswith(_MAGIC[: len(buffer)]):
        raise TransportError(f"bytes that are no message: {bytes(buffer[:80])!r}" + "..." * (len(buffer) > 80))
    if len(buffer) < _HEADER.size:
        return None
    _, text_length, data_length = _HEADER.unpack_from(buffer)
    end = _HEADER.size + text_length + data_length
    if end > _MAX_BYTES:
        raise TransportError(f"a message of {end:,} bytes; at most {_MAX_BYTES:,} are allowed")
    if len(buffer) < end:
        return None
    with memoryview(buffer) as view:
        text, data = bytes(view[_HEADER.size : end - data_length]), bytes(view[end - data_length : end])
    del buffer[:end]
    with contextlib.suppress(orjson.JSONDecodeError):
        message = orjson.loads(text)
        if isinstance(message, dict):
            return {**message, "data": data} if data else message
    raise TransportError(f"text that is no JSON object: {bytes(text[:80])!r}" + "..." * (len(text) > 80))


class Channel:
    """One end of the socket pair. Created, used and closed on one event loop. Only one task may receive."""

    def __init__(self, connection: socket.socket, peer: str, notify: Callable[[], None] | None = None) -> None:
        """The channel closes `connection`. `peer` names the process at the other end in error messages. `notify` is called when
        `take` may have a new message."""
        connection.setblocking(False)
        # A child process must not inherit the descriptor: it would keep the connection open.
        connection.set_inheritable(False)
        self._socket = connection
        self._peer = peer
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._received, self._unsent = bytearray(), bytearray()
        # In this order: the peer sends no more, the peer reads no more, `close` was called.
        self._input_ended = self._output_ended = self._closed = False
        self._readable, self._all_sent = asyncio.Event(), asyncio.Event()
        self._loop.add_reader(connection, self._on_readable)

    def take(self) -> dict[str, Any] | None:
        """The next message, or None if it has not arrived completely. Errors: EOFError after the last message; TransportError for
        bytes that are no message, after which the channel is of no use."""
        try:
            message = decode(self._received)
        except TransportError as error:
            raise TransportError(f"{self._peer} wrote into its channel {error}; print to stderr instead") from None
        if message is None and (self._input_ended or self._closed):
            raise EOFError(f"the channel of {self._peer} is closed")
        return message

    async def receive(self) -> dict[str, Any]:
        """Wait for the next message. Errors: the errors of `take`."""
        while (message := self.take()) is None:
            self._readable.clear()
            await self._readable.wait()
        return message

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        """Send a message after all earlier messages. Does nothing if the peer is gone: the receiving task gets EOFError."""
        if self._closed or self._output_ended:
            return
        was_idle = not self._unsent
        self._unsent += encode(message, data)
        if was_idle:
            self._loop.add_writer(self._socket, self._on_writable)
            self._on_writable()

    async def drain(self) -> None:
        """Wait until all sent messages are in the socket. Returns at once if the peer reads no more."""
        while self._unsent:
            self._all_sent.clear()
            await self._all_sent.wait()

    def close(self) -> None:
        """Close the connection and drop all messages that are unsent or not yet received. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._received.clear()
        self._drop_unsent()
        self._loop.remove_reader(self._socket)
        with contextlib.suppress(OSError):
            # A fork of this process may hold a copy of the descriptor. Without shutdown the copy keeps the connection open.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._readable.set()

    def _on_readable(self) -> None:
        """Read until the socket is empty: if the peer died before it had read all our data, uvloop calls this only once."""
        try:
            while not self._input_ended:
                # If the peer closed without reading our data, the kernel reports a reset after the peer's bytes, then the end.
                with contextlib.suppress(ConnectionResetError):
                    data = self._socket.recv(_CHUNK_BYTES)
                    self._received += data
                    self._input_ended = not data
        except BlockingIOError:
            pass
        if self._input_ended:
            self._loop.remove_reader(self._socket)
            self._drop_unsent()
        self._readable.set()
        if self._notify is not None:
            self._notify()

    def _on_writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent[:_CHUNK_BYTES], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except ConnectionError:
            # No error here: the receiving task still gets the peer's last messages, then EOFError.
            self._drop_unsent()
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            self._all_sent.set()

    def _drop_unsent(self) -> None:
        self._output_ended = True
        self._unsent.clear()
        self._loop.remove_writer(self._socket)
        self._all_sent.set()
