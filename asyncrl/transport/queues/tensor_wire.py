"""The messages of a tensor queue between processes, over one AF_UNIX socket. The tensors themselves are in the slab.

sender -> receiver   "I", number, (name, handle) of each tensor     an item
                     "H", capacity, kind of memory                  the greeting
                     "E"                                            the end
receiver -> sender   "R", number                                    the item is released: its memory and credit are free
                     "C"                                            the receiver takes no more items, but may still read tensors

For a slab on a device, "I" also has the item's slot and the fence after its writes, and "R" has the fence after its reads.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..memory.handles import Handle, dtype_name

MAX_MESSAGE_BYTES = 65_536  # bytes of a message: about 400 tensors an item
ALIGNMENT = 64
HELLO, END, CLOSED = b"H", b"E", b"C"
HOST, DEVICE = b"host", b"device"  # kinds of memory in a HELLO
_NUMBER = struct.Struct("<cQ")
_COUNT = struct.Struct("<H")
_PART = struct.Struct("<HH")  # bytes of the name, bytes of the handle


def item_message(number: int, handles: Mapping[str, Handle], limit: int = MAX_MESSAGE_BYTES) -> bytes:
    """The message of item `number`. Errors: ValueError if its handles need more than `limit` bytes."""
    parts = [_NUMBER.pack(b"I", number), _COUNT.pack(len(handles))]
    for name, handle in handles.items():
        encoded, raw = name.encode(), handle.encode()
        parts += [_PART.pack(len(encoded), len(raw)), encoded, raw]
    message = b"".join(parts)
    if len(message) > limit:
        raise ValueError(
            f"an item needs {len(message)} bytes of handles; at most {limit}: put fewer tensors in an item"
        )
    return message


def hello_message(kind: bytes, capacity: int) -> bytes:
    """The greeting. Send it after all earlier items, so that a greeted receiver has every item put before."""
    return _NUMBER.pack(HELLO, capacity) + kind


def kind_of(message: bytes) -> bytes:
    """The kind of memory in a greeting."""
    return message[_NUMBER.size :]


def release_message(number: int) -> bytes:
    """The message that the receiver has released item `number`."""
    return _NUMBER.pack(b"R", number)


def number_of(message: bytes) -> int:
    """The number of the item in a message; in a greeting, the capacity."""
    return int(_NUMBER.unpack_from(message)[1])


def handles_of(message: bytes) -> dict[str, Handle]:
    """The handles of an item message by tensor name. Errors: StaleHandle for bytes that are no handle."""
    [count], start = _COUNT.unpack_from(message, _NUMBER.size), _NUMBER.size + _COUNT.size
    handles = {}
    for _ in range(count):
        name_bytes, handle_bytes = _PART.unpack_from(message, start)
        start += _PART.size
        middle, end = start + name_bytes, start + name_bytes + handle_bytes
        handles[message[start:middle].decode()] = Handle.decode(message[middle:end])
        start = end
    return handles


@dataclass(frozen=True, slots=True)
class Piece:
    """One numpy array or torch tensor of an item. `offset`: its first byte in the memory block of the item."""

    values: Any
    dtype: str
    offset: int


def lay_out(item: Mapping[str, Any]) -> tuple[dict[str, Piece], int]:
    """(the tensors of an item with offsets that are multiples of 64, the bytes of the item's block).

    Errors: TypeError for a value that is no numpy array, ValueError for an array of objects.
    """
    pieces: dict[str, Piece] = {}
    size = 0
    for name, value in item.items():
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name!r} is a {type(value).__name__}; expected a numpy array (tensors: `device_queue`)")
        pieces[name] = Piece(value, dtype_name(value.dtype), size)
        size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
    return pieces, max(size, ALIGNMENT)


class MessageSocket:
    """A socket that sends and receives whole messages in order, without blocking."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_readable: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_readable`: called for new messages and the end. `on_sent`: called when the last unsent message is sent."""
        connection.setblocking(False)
        self._on_sent = on_sent
        self._loop = loop
        self._socket = connection
        self._unsent: deque[bytes] = deque()
        self._has_writer = False
        self._reset_seen = False
        self.open = True
        loop.add_reader(connection.fileno(), on_readable)

    @property
    def unsent(self) -> int:
        """The number of messages that wait until the receiver reads."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send now, or when the receiver has read earlier messages. After the other side's end, drop the message."""
        self._unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        while self.open and self._unsent:
            try:
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
                self._unsent.clear()
                return
            self._unsent.popleft()
        if self.open and bool(self._unsent) != self._has_writer:
            self._has_writer = bool(self._unsent)
            if self._has_writer:
                self._loop.add_writer(self._socket.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._socket.fileno())
                self._on_sent()

    def receive(self) -> tuple[list[bytes], bool]:
        """(the messages that can be read now, whether the other side has closed after them)."""
        messages: list[bytes] = []
        while self.open:
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The other side closed with unread messages of ours. The kernel reports the reset once, before earlier
                # messages of the other side; so read on.
                if self._reset_seen:
                    return messages, True
                self._reset_seen = True
                continue
            if not message:
                return messages, True
            messages.append(message)
        return messages, False

    def close(self) -> None:
        """Close the socket. Unsent messages are lost. Closing twice is fine."""
        if self.open:
            self.detach().close()

    def detach(self) -> socket.socket:
        """Stop using the socket, and return it. For the other side the connection ends when the socket is closed."""
        self.open = False
        self._loop.remove_reader(self._socket.fileno())
        if self._has_writer:
            self._loop.remove_writer(self._socket.fileno())
        return self._socket
