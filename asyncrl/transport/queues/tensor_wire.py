"""What travels beside the slab for a tensor queue between processes: short messages over one AF_UNIX socket.

sender -> receiver   I, number, (name, handle) of every tensor      E: nothing more comes      H, capacity, kind of memory
receiver -> sender   R, number: the item was released, its memory and its credit go back

A slab on a device adds: to I the slot and the fence behind which the item is written, to R the fence behind which it was
read, and C from a receiver that takes nothing more but may still look at what it has.
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
import numpy.typing as npt

from ..memory.handles import Handle, dtype_name

LARGEST = 65_536  # bytes of a message: some 400 tensors an item
ALIGNMENT = 64
HELLO, END, CLOSED = b"H", b"E", b"C"
HOST, DEVICE = b"host", b"device"  # what a greeting says about the memory
_NUMBER = struct.Struct("<cQ")
_COUNT = struct.Struct("<H")
_PART = struct.Struct("<HH")  # bytes of the name, bytes of the handle


def item_message(number: int, handles: Mapping[str, Handle], most: int = LARGEST) -> bytes:
    """Errors: ValueError for more tensors than one message of `most` bytes names."""
    parts = [_NUMBER.pack(b"I", number), _COUNT.pack(len(handles))]
    for name, handle in handles.items():
        encoded, raw = name.encode(), handle.encode()
        parts += [_PART.pack(len(encoded), len(raw)), encoded, raw]
    message = b"".join(parts)
    if len(message) > most:
        raise ValueError(f"an item of {len(handles)} tensors needs {len(message)} bytes of handles; at most {most}")
    return message


def hello_message(kind: bytes, capacity: int) -> bytes:
    """H: who reads this has got everything that was put before."""
    return _NUMBER.pack(HELLO, capacity) + kind


def kind_of(message: bytes) -> bytes:
    """What H says of the memory."""
    return message[_NUMBER.size :]


def release_message(number: int) -> bytes:
    """R: the item was released."""
    return _NUMBER.pack(b"R", number)


def number_of(message: bytes) -> int:
    """Which item a message is about; of H, the capacity."""
    return int(_NUMBER.unpack_from(message)[1])


def handles_of(message: bytes) -> dict[str, Handle]:
    """Errors: StaleHandle for bytes that are no handle."""
    [count], start = _COUNT.unpack_from(message, _NUMBER.size), _NUMBER.size + _COUNT.size
    handles = {}
    for _ in range(count):
        name, raw = _PART.unpack_from(message, start)
        start += _PART.size
        handles[message[start : start + name].decode()] = Handle.decode(message[start + name : start + name + raw])
        start += name + raw
    return handles


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of an item, and where in the item's block it goes."""

    values: npt.NDArray[Any]
    dtype: str
    offset: int


def lay_out(item: Mapping[str, Any]) -> tuple[dict[str, Piece], int]:
    """The tensors of an item one after the other, 64-byte aligned; and the bytes they take.

    Errors: TypeError for what is no numpy array, ValueError for arrays of objects.
    """
    pieces: dict[str, Piece] = {}
    size = 0
    for name, value in item.items():
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name!r} is a {type(value).__name__}; expected a numpy array (tensors: `device_queue`)")
        pieces[name] = Piece(value, dtype_name(value.dtype), size)
        size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
    return pieces, max(size, ALIGNMENT)


class Line:
    """One end of the connection: whole messages in and out, never blocking, in order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_readable: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_sent`: what had to wait for the other side to read has gone out."""
        connection.setblocking(False)
        self._on_sent = on_sent
        self._loop = loop
        self._socket = connection
        self._waiting: deque[bytes] = deque()
        self._writing = False
        self._reset = False
        self.open = True
        loop.add_reader(connection.fileno(), on_readable)

    @property
    def unsent(self) -> int:
        """Messages that wait for the other side to read."""
        return len(self._waiting)

    def send(self, message: bytes) -> None:
        """Now, or as soon as the other side has read something. To a closed line: nothing (its reader hears of it)."""
        self._waiting.append(message)
        self._flush()

    def _flush(self) -> None:
        while self.open and self._waiting:
            try:
                self._socket.send(self._waiting[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
                self._waiting.clear()
                return
            self._waiting.popleft()
        if self.open and bool(self._waiting) != self._writing:
            self._writing = bool(self._waiting)
            if self._writing:
                self._loop.add_writer(self._socket.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._socket.fileno())
                self._on_sent()

    def receive(self) -> tuple[list[bytes], bool]:
        """The messages that are here, and whether the other side has hung up after them."""
        messages: list[bytes] = []
        while self.open:
            try:
                message = self._socket.recv(LARGEST)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The other side closed while something of ours lay unread with it. The kernel says so once, before the
                # messages that it sent earlier: those are still here.
                if self._reset:
                    return messages, True
                self._reset = True
                continue
            if not message:
                return messages, True
            messages.append(message)
        return messages, False

    def close(self) -> None:
        """Hang up; what was not sent is dropped. Twice is fine."""
        if self.open:
            self.detach().close()

    def detach(self) -> socket.socket:
        """The line ends here, but not for the other side: it does when the returned socket is closed."""
        self.open = False
        self._loop.remove_reader(self._socket.fileno())
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
        return self._socket
