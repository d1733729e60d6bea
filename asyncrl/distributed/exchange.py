"""An `Exchange` makes the messages between two ends of a line (`line.py`) survive a broken connection.

* Each end numbers its asks and tells. It keeps a message until the answer comes, and sends it again after a reconnection.
* The receiver starts handlers in the order of the numbers. It ignores a message after a gap: the sender sends that message again.
* A message that arrives twice is handled once. If its handler has ended, the second arrival makes the receiver repeat the answer.
* The receiver keeps an answer until it learns from a later message that the sender has the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from .. import errors
from ..errors import AsyncrlError, LifecycleError, RankLost, WorkerDied

Buffer: TypeAlias = bytes | bytearray | memoryview
Answer: TypeAlias = tuple[Any, Sequence[Buffer]]
# (peer, header, buffers) -> answer; None means (None, ()). The received buffers are memoryviews of zmq's frames.
Handler: TypeAlias = Callable[[str, Any, Sequence[Buffer]], Awaitable[Answer | None]]

HELLO, WELCOME, ASK, TELL, ANSWER, ERROR, CANCEL, BYE = range(8)  # operations
WINDOW = 256  # limit of unanswered asks and tells of one end

logger = logging.getLogger("asyncrl.distributed")


@dataclass(slots=True, eq=False)
class _Sent:
    frames: list[Buffer]
    answer: asyncio.Future[Answer]
    in_window: bool  # counted in `_window`


@dataclass(slots=True, eq=False)
class Exchange:
    """The exchange with one peer, over any number of connections. `here`, `peer`: names of the two ends."""

    here: str
    peer: str
    session: str  # random id of the `LineClient`
    handlers: dict[str, Handler]
    transmit: Callable[[Sequence[Buffer]], None]  # may lose the message
    down_since: float | None = None  # time of `awake.now`; None: connected or ended
    error: RankLost | LifecycleError | None = None  # why the exchange has ended
    connection: int = -1  # on a server: descriptor of the newest connection
    _sent: dict[int, _Sent] = field(default_factory=dict)  # number -> unanswered message
    _next: int = 0  # number of the next message to send
    _window: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WINDOW))
    _expected: int = 0  # number of the next message to handle
    _running: dict[int, asyncio.Task[tuple[bytes, Sequence[Buffer]]]] = field(default_factory=dict)
    _answers: dict[int, list[Buffer]] = field(default_factory=dict)  # until their receipt is confirmed
    _confirmed: int = 0  # the peer has the answers to its messages below this number

    async def ask(self, kind: str, header: Any, buffers: Sequence[Buffer]) -> Answer:
        number, sent = await self._await_post(ASK, kind, header, buffers)
        try:
            return await sent.answer
        except asyncio.CancelledError:
            if number in self._sent:
                self.send(CANCEL, number)
            raise

    async def tell(self, kind: str, header: Any, buffers: Sequence[Buffer]) -> None:
        await self._await_post(TELL, kind, header, buffers)

    async def _await_post(self, operation: int, kind: str, header: Any, buffers: Sequence[Buffer]) -> tuple[int, _Sent]:
        """Wait until the window has room, then send. A cancelled call has sent nothing."""
        await self._window.acquire()
        try:
            return self.post(operation, kind, header, buffers, in_window=True)
        except BaseException:
            # The release wakes the next waiting call, and that call raises the error of the exchange, too.
            self._window.release()
            raise

    def post(
        self, operation: int, kind: str, header: Any, buffers: Sequence[Buffer] = (), *, in_window: bool = False
    ) -> tuple[int, _Sent]:
        """Send at once, even if the window is full. The message is kept until its answer."""
        if self.error is not None:
            raise self.error
        number = self._next
        frames: list[Buffer] = [self._pack(operation, number, kind, header), *buffers]
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        # Reads the error, because asyncio logs errors that nobody reads. The caller may have been cancelled.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._next += 1
        sent = self._sent[number] = _Sent(frames, answer, in_window)
        self.transmit(frames)
        return number, sent

    def _pack(self, operation: int, number: int, kind: str = "", header: Any = None) -> bytes:
        lowest = next(iter(self._sent), self._next)
        return orjson.dumps((operation, self.session, number, lowest, kind, header))

    def send(self, operation: int, number: int = 0, kind: str = "", header: Any = None) -> None:
        """Send a message that is neither kept nor sent again."""
        self.transmit([self._pack(operation, number, kind, header)])

    def resend(self) -> None:
        """Send every unanswered message again, after a reconnection."""
        for number, sent in self._sent.items():
            self.transmit(sent.frames)
            if sent.answer.cancelled():
                self.send(CANCEL, number)

    def receive(self, message: Sequence[Any], buffers: Sequence[Buffer]) -> None:
        operation, _, number, lowest, kind, header = message
        if lowest > self._confirmed:
            self._confirmed = lowest
            self._answers = {number: frames for number, frames in self._answers.items() if number >= lowest}
        if operation in (ASK, TELL):
            if number == self._expected:
                self._expected += 1
                self._start(number, operation, kind, header, buffers)
            elif number in self._answers:
                self.transmit(self._answers[number])
        elif operation in (ANSWER, ERROR):
            sent = self._sent.pop(number, None)
            if sent is None:
                return
            if sent.in_window:
                self._window.release()
            if not sent.answer.done():
                if operation == ANSWER:
                    sent.answer.set_result((header, buffers))
                else:
                    sent.answer.set_exception(_error_of(kind, header))
        elif operation == CANCEL and number in self._running:
            self._running[number].cancel()

    def _start(self, number: int, operation: int, kind: str, header: Any, buffers: Sequence[Buffer]) -> None:
        task = self._running[number] = asyncio.get_running_loop().create_task(self._handle(kind, header, buffers))
        # A task that is cancelled before its first step runs none of its code, so the task cannot answer by itself.
        task.add_done_callback(lambda done: self._answer(number, operation, kind, done))

    async def _handle(self, kind: str, header: Any, buffers: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        if kind not in self.handlers:
            raise LifecycleError(f"{self.here} has no handler for {kind!r}, which {self.peer} sent")
        reply, reply_buffers = await self.handlers[kind](self.peer, header, buffers) or (None, ())
        return orjson.dumps(reply), reply_buffers

    def _answer(
        self, number: int, operation: int, kind: str, done: asyncio.Task[tuple[bytes, Sequence[Buffer]]]
    ) -> None:
        del self._running[number]
        error = None if done.cancelled() else done.exception()
        frames: list[Buffer]
        if done.cancelled():
            frames = [self._pack(ERROR, number, "LifecycleError", f"{kind!r} was cancelled")]
        elif error is None:
            reply, buffers = done.result()
            frames = [self._pack(ANSWER, number, "", orjson.Fragment(reply)), *buffers]
        elif isinstance(error, AsyncrlError):
            frames = [self._pack(ERROR, number, type(error).__name__, str(error))]
            if operation == TELL:
                logger.warning("%s could not handle %r of %s: %s", self.here, kind, self.peer, errors.first_line(error))
        else:
            logger.error("%s could not handle %r of %s", self.here, kind, self.peer, exc_info=error)
            text = f"{self.here} could not handle {kind!r}; see its output ({errors.first_line(error)})"
            frames = [self._pack(ERROR, number, "AsyncrlError", text)]
        if self.error is None:
            if number >= self._confirmed:
                self._answers[number] = frames
            self.transmit(frames)

    def end(self, error: RankLost | LifecycleError, *, cancel: bool = True) -> None:
        """End the exchange: waiting and later calls raise `error`. `cancel`: also cancel the handlers of the peer's messages."""
        if self.error is not None:
            return
        self.error, self.down_since = error, None
        for sent in self._sent.values():
            if not sent.answer.done():
                sent.answer.set_exception(error)
        self._sent.clear()
        self._window.release()
        if cancel:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the handlers of the peer's messages."""
        for task in self._running.values():
            task.cancel()

    async def wait_ended(self) -> None:
        """Wait until no handler of the peer's messages runs."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def _error_of(kind: str, text: str) -> AsyncrlError:
    """The error that the peer's handler raised, in the same class of errors.py. AsyncrlError if that class is unknown here, and for
    WorkerDied, whose constructor takes other arguments."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, AsyncrlError) and found is not WorkerDied:
        return found(text)
    return AsyncrlError(text)
