"""For the owner of record rings: one producer (`Link`), and the socket at which producers attach (`ProducerListener`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...errors import TransportError
from ..memory.segment import Segment
from . import attachment
from .ring import CLOSED, RingMemory, RingReader, format_ring, ring_bytes
from .types import RingStatistics

PAUSE_S = 0.1  # after an `accept` that found no free descriptor


class Link:
    """What the owner has of one producer: ring, process and connection. `connection` is None while the producer is detached."""

    def __init__(self, segment: Segment) -> None:
        """`segment` belongs to the link from now on. Errors: TransportError for a damaged ring, whose segment is closed."""
        try:
            self.memory = RingMemory(segment.data)
            reason = self.memory.find_damage()
            if reason:
                self.memory.release_views()
                raise TransportError(reason)
        except BaseException:
            segment.close(unlink=False)
            raise
        self.memory.undo_unfinished_release()
        self.segment = segment
        self.reader = RingReader(self.memory)
        self.producer = self.memory.producer
        self.connection: socket.socket | None = None
        self.space_event: int | None = None
        self.dead = False  # the producer's process has ended
        self.end_announced = False  # the producer's end is queued for the consumer
        self._pidfd: int | None = None

    @classmethod
    def create(cls, name: str, producer: bytes, pid: int, slots: int, payload: int) -> Link:
        """A new ring in a new segment. `pid` 0: unknown, see `attachment.peer`. Errors: OutOfMemory if /dev/shm has no room."""
        started = (start_time(pid) or 0) if pid else 0
        prepare = partial(format_ring, slots=slots, producer=producer, pid=pid, started=started)
        return cls(Segment.create(name, ring_bytes(slots, payload), prepare=prepare))

    def publish_version(self, version: int) -> None:
        """Write the policy version into the ring for the producer. The word holds version + 1; 0: no version."""
        self.memory.owner.store(1, version + 1)

    @property
    def closed_by_producer(self) -> bool:
        """Whether the producer has closed the ring. Its death alone does not close the ring."""
        return self.memory.state[0] == CLOSED

    def ended(self) -> bool:
        """Whether no more records will come: the producer has closed and disconnected, or has died."""
        return self.dead or (self.connection is None and self.closed_by_producer)

    def open_space_event(self) -> int:
        """The eventfd that the owner writes after a release, to wake the producer. The first call creates it."""
        if self.space_event is None:
            self.space_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self.space_event

    def watch_process(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[Link], None]) -> bool:
        """Make the loop call `on_death` when the producer's process ends, if its pid is known. False: the process has ended."""
        pid = self.memory.pid
        if not pid:
            return True
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        loop.add_reader(self._pidfd, on_death, self)
        # Another start time: the pid was reused. An OSError (no free descriptor) proves no death, so do not catch it.
        return start_time(pid) == self.memory.started

    def connect(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, on_connection: Callable[[Link], None]
    ) -> None:
        """Close the earlier connection, if any, and use this connection. `on_connection`: called when `connection` is readable."""
        self.disconnect(loop)
        self.connection = connection
        loop.add_reader(connection.fileno(), on_connection, self)

    def disconnect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connection, if any."""
        if self.connection is not None:
            loop.remove_reader(self.connection.fileno())
            self.connection.close()
            self.connection = None

    def close_descriptors(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the pidfd, the connection and the eventfd. Records in the ring can still be taken and released."""
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.disconnect(loop)
        if self.space_event is not None:
            os.close(self.space_event)
            self.space_event = None

    def close(self, loop: asyncio.AbstractEventLoop, *, unlink: bool) -> None:
        """Close descriptors and memory. `unlink`: remove the ring. False: the next owner can adopt the ring."""
        self.close_descriptors(loop)
        with contextlib.suppress(BufferError):  # a record is still in use
            self.memory.release_views()
        self.segment.close(unlink=unlink)


class ProducerListener:
    """The owner's listening socket, and the pending connections: those of producers that have sent no hello yet.

    Without a free descriptor `accept` fails, and the socket stays readable. The event loop would spin, so the socket is not watched
    for `PAUSE_S`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        counts: RingStatistics,
        call: Callable[..., None],
        on_hello: Callable[[socket.socket], None],
    ) -> None:
        """`call(callback, *arguments)` runs each callback of the loop. `on_hello(connection)`: called when a hello is readable."""
        self._loop, self._listener, self._counts = loop, listener, counts
        self._call, self._on_hello = call, on_hello
        self._pending: set[socket.socket] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def reject(self, connection: socket.socket) -> None:
        """Close a pending connection."""
        self.hand_over(connection)
        connection.close()

    def hand_over(self, connection: socket.socket) -> None:
        """Stop watching a pending connection, which the caller takes over."""
        self._loop.remove_reader(connection.fileno())
        self._pending.discard(connection)

    def close(self) -> None:
        """Stop listening, and close all pending connections."""
        for connection in list(self._pending):
            self.reject(connection)
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._call, self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # no connection, or one that has already ended
                return
            except OSError:
                self._counts.pauses += 1
                self._loop.remove_reader(self._listener.fileno())
                self._retry = self._loop.call_later(PAUSE_S, self._call, self._listen)
                return
            connection.setblocking(False)
            if attachment.is_same_user(connection):
                self._pending.add(connection)
                self._loop.add_reader(connection.fileno(), self._call, self._on_hello, connection)
            else:
                self._counts.refused += 1
                connection.close()


def start_time(pid: int) -> int | None:
    """The start of process `pid` in clock ticks since boot; None if /proc shows no such process. Pid and start identify a process.

    Errors: OSError if /proc cannot be read, for example without a free descriptor. This does not mean that the process has ended.
    """
    try:
        raw = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(raw.rpartition(")")[2].split()[19])
