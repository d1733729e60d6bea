"""How a producer attaches to the owner: over an AF_UNIX socket, which carries the ring's name and two eventfds, but no records.

    producer                                   owner
    {protocol, producer}                  ->
                                          <-   {ring, fresh} + eventfds [data, space], or {error}
    ... the connection stays open; its end shows that the other side has closed or died ...

The address is abstract (no file to clean up). It consists of a random id and the owner's secret. Both are in the header
of the owner's segment, a file that only this user can read. So another user cannot bind the address before the owner does. But
every user sees bound addresses in /proc/net/unix, and could bind this address after the owner's death. So each side asks the kernel
for the user of the other side, and closes a connection to another user.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import RingDetached, TransportError
from ..memory.segment import Segment

PROTOCOL = 2
_MAX_MESSAGE_BYTES = 4096


def address(segment: Segment) -> str:
    """The abstract address of the segment's present owner."""
    return f"\0asyncrl/{segment.random_id.hex()}/{segment.secret}"


def listen(segment: Segment) -> socket.socket:
    """The owner's listening socket, non-blocking."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        listener.bind(address(segment))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, from the kernel. Pid 0: its process is in a pid namespace that this process cannot see."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other side runs as this user."""
    return peer(connection)[1] == os.geteuid()


def send(connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message as JSON, with copies of the descriptors."""
    raw = json.dumps(message).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([raw], ancillary, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and the descriptors that came with it. Errors: EOFError, TransportError, BlockingIOError."""
    fd_space = socket.CMSG_SPACE(4 * 4)  # for four descriptors
    raw, ancillary, flags, _ = connection.recvmsg(_MAX_MESSAGE_BYTES, fd_space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % 4])
    try:
        if not raw:
            raise EOFError("the other side closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TransportError(
                f"a message about a ring is longer than {_MAX_MESSAGE_BYTES} bytes, or its descriptors exceed `ulimit -n`"
            )
        return dict(json.loads(raw)), list(fds)
    except BaseException as error:
        _close(fds)
        if isinstance(error, ValueError | TypeError | RecursionError):
            raise TransportError(f"a message about a ring is not of this protocol: {error}") from error
        raise


def producer_id(hello: dict[str, Any]) -> bytes:
    """The producer's id in its first message (hello). Errors: TransportError, whose text the caller sends to the producer."""
    if hello.get("protocol") != PROTOCOL:
        raise TransportError(
            f"protocol {hello.get('protocol')!r}; this owner speaks {PROTOCOL}: use the same asyncrl on both sides"
        )
    try:
        producer = bytes.fromhex(str(hello["producer"]))
        if len(producer) != 16:
            raise ValueError("16 bytes expected")
    except (KeyError, ValueError) as error:
        raise TransportError(f"a producer introduces itself by 16 bytes in hexadecimal: {error}") from error
    return producer


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


@dataclass(slots=True)
class Attachment:
    """What the owner granted: the segment of the ring and the two eventfds."""

    connection: socket.socket
    ring: str  # the name of the ring's segment
    fresh: bool  # whether the ring is new: made for this attachment
    data: int  # eventfd that the producer writes after a put
    space: int  # eventfd that the owner writes after a release

    def close(self) -> None:
        """Close the connection and the eventfds."""
        self.connection.close()
        _close([self.data, self.space])


def attach(segment: Segment, producer: bytes, deadline: float) -> Attachment | None:
    """Ask the segment's owner for this producer's ring. Returns None if no owner listens, or the owner ends before its answer.

    `deadline`: of `time.monotonic`. Errors: RingDetached if the owner refuses or is late; TransportError; OSError.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        # EAGAIN: the queue of connections that the owner has not accepted is full. The kernel has no event for room in this queue.
        while (code := connection.connect_ex(address(segment))) == errno.EAGAIN and time.monotonic() < deadline:
            time.sleep(0.05)
        if code:
            raise OSError(code, os.strerror(code))
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not is_same_user(connection):
            raise EOFError("another user bound a dead owner's address")
        send(connection, {"protocol": PROTOCOL, "producer": producer.hex()})
        answer, fds = receive(connection)
        if "error" in answer:
            raise RingDetached(f"the owner of the ring {segment.name!r} refused: {answer['error']}")
        if len(fds) != 2:
            _close(fds)
            raise RingDetached(f"the owner of the ring {segment.name!r} sent {len(fds)} descriptors; 2 expected")
        connection.setblocking(False)
        return Attachment(connection, answer["ring"], answer["fresh"], *fds)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            raise RingDetached(
                f"the owner of the ring {segment.name!r} does not answer; its event loop is blocked, or it is stopped"
            ) from None
        if isinstance(error, EOFError | ConnectionRefusedError | ConnectionResetError | BrokenPipeError):
            return None
        raise
