"""What an owner has per producer: its ring, its connection, and how it learns of its death. And where new producers come in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...errors import TransportError
from .. import rendezvous
from ..memory.segment import Segment
from .ring import CLOSED, RingMemory, RingReader, format_ring, ring_bytes
from .types import RingStatistics

PAUSE_S = 0.1  # without a free descriptor


class Link:
    """One producer. `connection` is None while it is not attached to this owner."""

    def __init__(self, segment: Segment) -> None:
        """Takes the segment over. Errors: TransportError where no whole ring lies in it; the segment is then let go."""
        try:
            self.memory = RingMemory(segment.data)
            reason = self.memory.contradiction()
            if reason:
                self.memory.release_views()
                raise TransportError(reason)
        except BaseException:
            segment.close(unlink=False)
            raise
        self.memory.forget_begun_release()
        self.segment = segment
        self.reader = RingReader(self.memory)
        self.producer = self.memory.producer
        self.connection: socket.socket | None = None
        self.space: int | None = None
        self.dead = False
        self.gone = False  # it was announced that nothing more will come
        self._pidfd: int | None = None

    @classmethod
    def create(cls, name: str, producer: bytes, pid: int, slots: int, payload: int) -> Link:
        """A new ring in a segment of this name. Errors: OutOfMemory where /dev/shm has no room."""
        started = start_time(pid) or 0 if pid else 0
        prepare = partial(format_ring, slots=slots, producer=producer, pid=pid, started=started)
        return cls(Segment.create(name, ring_bytes(slots, payload), prepare=prepare))

    def holds_records(self) -> bool:
        """A last look: something in the ring was not released, or may be there and cannot be found."""
        return bool(self.reader.poll() or self.reader.outstanding or self.reader.lost)

    @property
    def invisible(self) -> bool:
        """The process cannot be seen from here (another process namespace): only the connection tells of its end."""
        return self.memory.pid == 0

    @property
    def closed_well(self) -> bool:
        """The producer closed its ring in good order."""
        return self.memory.state[0] == CLOSED

    def ended(self) -> bool:
        """Nothing more will come: it closed and hung up, or it died."""
        return self.dead or (self.connection is None and self.closed_well)

    def open_space(self) -> int:
        """The eventfd that says to this producer that something was released; made at the first call."""
        if self.space is None:
            self.space = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self.space

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[Link], None]) -> bool:
        """Call `on_death` when the producer's process ends. False where it has ended already."""
        pid = self.memory.pid
        if not pid:
            return True
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        loop.add_reader(self._pidfd, on_death, self)
        # Else the number belongs to somebody else by now. An error, such as too many open files, says nothing of the process.
        return start_time(pid) == self.memory.started

    def connect(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, on_connection: Callable[[Link], None]
    ) -> None:
        """The producer attached, in the place of an earlier connection; `on_connection` is called when there is something to
        read."""
        self.disconnect(loop)
        self.connection = connection
        loop.add_reader(connection.fileno(), on_connection, self)

    def disconnect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            loop.remove_reader(self.connection.fileno())
            self.connection.close()
            self.connection = None

    def died(self, loop: asyncio.AbstractEventLoop) -> None:
        """The producer's process has ended without closing."""
        self.dead = True
        self.leave(loop)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of the producer; what it put can still be taken and released."""
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.disconnect(loop)
        if self.space is not None:
            os.close(self.space)
            self.space = None

    def close(self, loop: asyncio.AbstractEventLoop, *, unlink: bool) -> None:
        """Let go of descriptors and memory. `unlink`: the ring is removed, else it stays for the next owner."""
        self.leave(loop)
        with contextlib.suppress(BufferError):  # somebody still looks at a record
            self.memory.release_views()
        self.segment.close(unlink=unlink)


class Reception:
    """The owner's socket, and the connections of producers that have not introduced themselves yet. From its making to `close`.

    Without a free descriptor of this process nobody can be let in, and the socket stays readable: so it is not watched for
    0.1 s then, or the loop would try nothing else.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        counts: RingStatistics,
        call: Callable[..., None],
        on_hello: Callable[[socket.socket], None],
    ) -> None:
        """`call(callback, *arguments)` is how the loop calls. `on_hello(connection)`: a producer of this user sent something."""
        self._loop, self._listener, self._counts = loop, listener, counts
        self._call, self._on_hello = call, on_hello
        self._here: set[socket.socket] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def dismiss(self, connection: socket.socket) -> None:
        """Hang up on a visitor."""
        self.let_in(connection)
        connection.close()

    def let_in(self, connection: socket.socket) -> None:
        """Somebody else watches this connection from here on."""
        self._loop.remove_reader(connection.fileno())
        self._here.discard(connection)

    def close(self) -> None:
        """Nobody is let in any more; connections without an introduction end."""
        for connection in list(self._here):
            self.dismiss(connection)
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._call, self._on_visitor)

    def _on_visitor(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # nobody waits any more, or gave up already
                return
            except OSError:
                self._counts.pauses += 1
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._call, self._listen)
                return
            connection.setblocking(False)
            if rendezvous.trusted(connection):
                self._here.add(connection)
                self._loop.add_reader(connection.fileno(), self._call, self._on_hello, connection)
            else:
                self._counts.refused += 1
                connection.close()


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began: with its number it names a process for good. None: no such process.

    Errors: OSError where it cannot be read, such as with too many open files: nobody is dead for that.
    """
    try:
        raw = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(raw.rpartition(")")[2].split()[19])
