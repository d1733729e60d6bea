"""Frames between the pool and its worker processes, over one socket pair per worker.

    magic 4s | kind u8 | request id u64 | payload length u64 | grown u64 | payload

Requests (INIT, CALL) are pickled by cloudpickle: columns arrive as exactly the Python objects they were, and a callable
object travels by value. Replies (READY, RESULT, ERROR) are JSON: what a worker writes cannot run code in the parent.
Every reply carries the id of its request; a reply to a request that is not open is discarded by the reader. A CANCEL carries
the id of the request that it ends; the reply to that one says that it has ended.
`grown`: bytes of memory that the worker has gained since the first calls of its functions (0 in requests).
No asyncio and nothing heavy here: the worker imports this module at start.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("<4sBQQQ")
_MAGIC = b"ARW2"
_LONGEST = 1 << 33  # bytes; more than that is a corrupted header, not a payload
HEADER_SIZE = _HEADER.size


class Kind(IntEnum):
    """What a frame is."""

    INIT = 1  # parent -> worker: import path, functions
    CALL = 2  # parent -> worker: index of the function, arguments
    CANCEL = 6  # parent -> worker: end the coroutine of this request
    READY = 3  # worker -> parent: its process number; names, accepted parameters and kind of the functions
    RESULT = 4  # worker -> parent: one float or null per completion, what is no score, what the function logged
    ERROR = 5  # worker -> parent: the function (or its import) raised; message and traceback text


_KINDS = frozenset(int(kind) for kind in Kind)


class Header(NamedTuple):
    """What stands before the payload, without the magic; `length` in bytes."""

    kind: Kind
    request_id: int
    length: int
    grown: int


class WireError(Exception):
    """The bytes are no frame of ours: somebody else wrote into the socket."""


def pack(kind: Kind, request_id: int, length: int, grown: int = 0) -> bytes:
    """The header that goes before `length` bytes of payload."""
    return _HEADER.pack(_MAGIC, kind, request_id, length, grown)


def unpack(data: bytes | bytearray) -> Header:
    """Errors: `WireError` where `data` is not a header."""
    magic, kind, request_id, length, grown = _HEADER.unpack(data)
    if magic != _MAGIC or length > _LONGEST or kind not in _KINDS:
        raise WireError(f"not a frame header: {data!r}")
    return Header(Kind(kind), request_id, length, grown)


def send_blocking(sock: socket.socket, kind: Kind, request_id: int, payload: bytes, grown: int) -> None:
    """Worker side. Errors: `OSError` where the parent is gone."""
    sock.sendall(pack(kind, request_id, len(payload), grown))
    sock.sendall(payload)


def take_frame(data: bytearray) -> tuple[Header, bytes] | None:
    """Take the first frame off `data`; None where it is not whole yet. Errors: `WireError`."""
    if len(data) < HEADER_SIZE:
        return None
    header = unpack(data[:HEADER_SIZE])
    end = HEADER_SIZE + header.length
    if len(data) < end:
        return None
    payload = bytes(data[HEADER_SIZE:end])
    del data[:end]
    return header, payload
