"""The control line between the node and a worker: one JSON object a line over a socket pair, the same class at both ends.

Guarantees
* `send` never waits. What the other side does not read is kept, in order, up to `UNREAD` bytes; then it is an error.
* Everything that the other side said before it closed or died can be received, whatever became of what we sent. (A transport of
  asyncio closes, with all that lies unread in the socket, at the first error of a write: the last words of a worker would be lost.)
* A `receive` that is cancelled took nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import orjson

from ...errors import TransportError

LONGEST = 16 << 20  # bytes of one message: some MiB of trace spans, several times
UNREAD = 64 << 20  # bytes that wait for the other side to read
_CHUNK = 1 << 18  # bytes read or written in one iteration of the loop
_SHOWN = 80  # bytes of what is no message


class ControlLine:
    """One end. Made, used and closed on one event loop; one task receives."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        """`connection`: one end of a stream, the line's own from here on. `who` is at the other end, in words for messages."""
        connection.setblocking(False)
        connection.set_inheritable(False)  # a process that we start must not keep it open
        self._socket = connection
        self._who = who
        self._loop = asyncio.get_running_loop()
        self._received, self._searched = bytearray(), 0  # no line ends in the first `searched` bytes
        self._unsent = bytearray()
        self._reading = self._writing = False
        self._ended = False  # nothing more comes
        self._deaf = False  # nobody reads any more
        self._closed = False
        self._news, self._sent = asyncio.Event(), asyncio.Event()
        self._watch()

    async def receive(self) -> dict[str, Any]:
        """The next message. Errors: EOFError where there is none because one of the sides has closed or died; TransportError for
        what is no message, after which there is no use in going on."""
        while True:
            line = self._take()
            if line is not None:
                return self._read(line)
            if self._ended or self._closed:
                raise EOFError(f"the control line of {self._who} is closed")
            self._news.clear()
            await self._news.wait()

    def send(self, message: Mapping[str, Any]) -> None:
        """To be read after all that was sent before; to nobody, where the other side is gone (who receives hears of it).

        NaN and infinities arrive as None: JSON has none. Errors: TransportError where the message is longer than `LONGEST`, or
        where the other side does not read.
        """
        data = orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)
        if len(data) > LONGEST + 1:
            raise TransportError(
                f"a message of {len(data):,} bytes for {self._who}; a control line takes at most {LONGEST:,}"
            )
        if self._closed or self._deaf:
            return
        if len(self._unsent) + len(data) > UNREAD:
            raise TransportError(
                f"{self._who} does not read its control line, {len(self._unsent):,} bytes wait there; it is stopped or stuck"
            )
        was_idle = not self._unsent
        self._unsent += data
        if was_idle:
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
        self._unsent.clear()
        self._watch()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy, which would keep it open
        self._socket.close()
        self._news.set()
        self._sent.set()

    # -- inside

    def _take(self) -> bytearray | None:
        """The next line without its end, or None if it is not here yet."""
        end = self._received.find(b"\n", self._searched)
        self._searched = len(self._received) if end < 0 else end
        if self._searched > LONGEST:
            raise TransportError(
                f"{self._who} wrote a line of more than {LONGEST:,} bytes into its control line: "
                f"{bytes(self._received[:_SHOWN])!r}..."
            )
        if end < 0:
            return None
        line = self._received[:end]
        del self._received[: end + 1]
        self._searched = 0
        self._watch()
        return line

    def _read(self, line: bytearray) -> dict[str, Any]:
        with contextlib.suppress(orjson.JSONDecodeError):
            message = orjson.loads(line)
            if isinstance(message, dict):
                return message
        raise TransportError(
            f"{self._who} wrote into its control line what is no JSON object: {bytes(line[:_SHOWN])!r}"
            + "..." * (len(line) > _SHOWN)
        )

    def _on_readable(self) -> None:
        """Take all that is here: where the other side has died with something of ours unread, uvloop calls this only once."""
        try:
            while not self._ended and len(self._received) <= LONGEST:
                with contextlib.suppress(ConnectionResetError):  # the kernel says so between its last words and the end
                    data = self._socket.recv(_CHUNK)
                    self._received += data
                    self._ended = not data
        except BlockingIOError:
            pass
        if self._ended:
            self._nobody_reads()
        self._news.set()
        self._watch()

    def _on_writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent[:_CHUNK], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except ConnectionError:  # its end, and what it said before, are for who receives
            self._nobody_reads()
        if not self._unsent:
            self._sent.set()
        self._watch()

    def _nobody_reads(self) -> None:
        self._deaf = True
        self._unsent.clear()
        self._sent.set()

    def _watch(self) -> None:
        """Listen while there is room, and wait for room at the other side while something is to be sent."""
        reading = not (self._closed or self._ended or len(self._received) > LONGEST)
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self._socket.fileno(), self._on_readable)
            else:
                self._loop.remove_reader(self._socket.fileno())
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._socket.fileno(), self._on_writable)
            else:
                self._loop.remove_writer(self._socket.fileno())
