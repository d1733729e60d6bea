"""What an owner holds per producer: its ring, its connection, and the means to hear of its death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from ...errors import OutOfMemory, TransportError
from ..memory.arena import Arena, Block
from ..memory.owners import start_time
from ..rendezvous import PROTOCOL
from .ring import CLOSED, TAG, RingMemory, RingReader, block_bytes, format_ring


class Link:
    """One producer. `connection` is None while it is not attached to this owner."""

    def __init__(self, arena: Arena, block: Block) -> None:
        self.block = block
        self.memory = RingMemory(arena.bytes_of(block))
        self.reader = RingReader(self.memory)
        self.producer = self.memory.producer
        self.connection: socket.socket | None = None
        self.space: int | None = None
        self.dead = False
        self.told = False  # that nothing more will come
        self._pidfd: int | None = None

    @classmethod
    def create(cls, arena: Arena, producer: bytes, pid: int, slots: int, payload: int) -> Link:
        """A new ring. Errors: OutOfMemory."""
        started = start_time(pid) or 0 if pid else 0
        try:
            block = arena.allocate(
                block_bytes(slots, payload),
                tag=TAG,
                prepare=lambda buffer: format_ring(buffer, slots, producer, pid, started),
            )
        except OutOfMemory as error:
            raise OutOfMemory(
                f"no room for one more producer ({len(arena.blocks())} have a part; door.ring_mib, door.producer_mib): {error}"
            ) from None
        link = cls(arena, block)
        link.reader.replay()
        return link

    @classmethod
    def adopt(cls, arena: Arena, block: Block) -> Link:
        """A ring that an earlier owner made. Errors: TransportError where it is damaged."""
        return cls(arena, block)

    @property
    def invisible(self) -> bool:
        """The process cannot be seen from here (another process namespace): only the connection tells of its end."""
        return self.memory.state[1] == 0

    @property
    def closed_well(self) -> bool:
        """The producer closed its ring in good order."""
        return self.memory.state[0] == CLOSED

    def ended(self) -> bool:
        """Nothing more will come: it closed and hung up, or it died."""
        return self.dead or (self.connection is None and self.closed_well)

    def open_space(self) -> int:
        """The eventfd by which this producer hears that something was released; made at the first call."""
        if self.space is None:
            self.space = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self.space

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[Link], None]) -> bool:
        """Ask the kernel to tell when the process ends. False where it has ended already."""
        pid, started = self.memory.state[1], self.memory.state[2]
        if not pid:
            return True
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            same = start_time(pid) == started  # else the number belongs to somebody else by now
            if same:
                loop.add_reader(self._pidfd, on_death, self)
                return True
        except BaseException:
            os.close(self._pidfd)
            self._pidfd = None
            raise
        os.close(self._pidfd)
        self._pidfd = None
        return False

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
        """The producer's process has ended without closing: nothing of it is watched any more."""
        self.dead = True
        self._unwatch(loop)
        self.disconnect(loop)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of the producer; what it put can still be taken and released."""
        self._unwatch(loop)
        self.disconnect(loop)
        if self.space is not None:
            os.close(self.space)
            self.space = None

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of descriptors and views; the ring itself stays as it is."""
        self.leave(loop)
        with contextlib.suppress(BufferError):  # somebody still looks at a record
            self.memory.release_views()

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def introduced(message: dict[str, object]) -> bytes:
    """The producer that says so at the rendezvous. Errors: TransportError to send back."""
    if message.get("protocol") != PROTOCOL:
        raise TransportError(
            f"protocol {message.get('protocol')!r}; this owner speaks {PROTOCOL}: use the same asyncrl on both sides"
        )
    try:
        producer = bytes.fromhex(str(message["producer"]))
        if len(producer) != 16:
            raise ValueError("16 bytes expected")
    except (KeyError, ValueError) as error:
        raise TransportError(f"a producer introduces itself by 16 bytes in hexadecimal: {error}") from error
    return producer
