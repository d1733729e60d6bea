"""Where producers come in: the owner's socket, and the connections of those who have not introduced themselves yet."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from .. import rendezvous
from .types import RingCounters

PAUSE_S = 0.1  # without a free descriptor


class Reception:
    """From its making to `close`, in one loop.

    Whoever waits for a free descriptor of this process is let in when there is one: a socket that cannot be accepted from stays
    readable, so without a pause the loop would try nothing else.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        counts: RingCounters,
        call: Callable[..., None],
        on_hello: Callable[[socket.socket], None],
    ) -> None:
        """`call(callback, *arguments)` is how the loop calls. `on_hello(connection)`: a producer of this user speaks."""
        self._loop, self._listener, self._counts = loop, listener, counts
        self._call, self._on_hello = call, on_hello
        self._here: set[socket.socket] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def dismiss(self, connection: socket.socket) -> None:
        """Hang up."""
        self.let_in(connection)
        connection.close()

    def let_in(self, connection: socket.socket) -> None:
        """Somebody else looks after it from here on."""
        self._loop.remove_reader(connection.fileno())
        self._here.discard(connection)

    def close(self) -> None:
        """Nobody comes any more; who has not introduced himself hears it."""
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
