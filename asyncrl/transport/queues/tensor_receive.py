"""The receiving side of a tensor queue between processes. The contract: `tensor_queue`."""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import anyio

from ...errors import RingDetached, TransportError
from .. import rendezvous
from ..memory.arena import Arena
from ..memory.handles import BFLOAT16, Handle
from .queue import QueueEnd, QueueStatistics, wait_in, wake_all
from .tensor_wire import ARENA, END, HELLO, SLAB, Line, Side, handles_of, number_of, release_message

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder
    from ...telemetry.records import Cause

_ANSWER_S = 5.0  # at least this long for the owner's event loop to come around


class Received(Mapping[str, Any]):
    """An item: arrays by name, views of shared memory that are the receiver's to read and write until the release.

    `with item:` releases it at the end; do not look at its arrays after that.
    """

    def __init__(self, box: Inbox, number: int, handles: Mapping[str, Handle]) -> None:
        claim = _Claim()
        self._box, self._number, self._handles = box, number, handles
        self._arrays = {name: box.look(handle, claim) for name, handle in handles.items()}
        self._finalizer = weakref.finalize(claim, box.release_later, number)
        self._finalizer.atexit = False
        self._claim: _Claim | None = claim  # an item without arrays is released with the item itself

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def tensor(self, name: str) -> Any:
        """The same as a torch tensor, bfloat16 too (its array holds the raw 16 bits)."""
        import torch

        found = torch.from_numpy(self._arrays[name])
        return found.view(torch.bfloat16) if self._handles[name].dtype == BFLOAT16 else found

    def release(self) -> None:
        """The memory and the credit go back to the sender. Twice is fine."""
        if self._finalizer.detach() is not None:
            self._box.release(self._number)

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Claim:
    """Lives as long as an array of its item does."""

    __slots__ = ("__weakref__",)


class Inbox(Side):
    """The state that the clones of a receive end share."""

    kind = ARENA

    def __init__(self, lender: Any, connection: socket.socket, recorder: Recorder | None, cause: Cause) -> None:
        super().__init__(lender.segment.name, lender.segment.geometry.blocks, recorder, cause)
        self.lender = lender
        self.items: deque[tuple[int, dict[str, Handle], bytes]] = deque()  # and the message
        self.greeted = self.ended = self.broken = False
        self.greeting = b""
        self._unreleased: deque[int] = deque()  # filled by the garbage collector
        self.line = Line(self.loop, connection, self.exchange)

    @staticmethod
    def attach(name: str) -> Any:
        """What the sender shares under this name."""
        return Arena.attach(name)

    def opened(self) -> None:
        """The sender has greeted: what is needed before the first item."""

    def look(self, handle: Handle, claim: object) -> Any:
        """The array or tensor that a handle names; it keeps `claim`."""
        return self.lender.view(handle, writable=True, keep=claim)

    def take(self) -> Received:
        """The next item, which is there."""
        number, handles, _ = self.items.popleft()
        self.moved += 1
        self.depth(len(self.items))
        return Received(self, number, handles)

    def exchange(self) -> None:
        """Take what came, without blocking."""
        messages, over = self.line.receive()
        for message in messages:
            if message[:1] == HELLO:
                self.greeted, self.greeting = True, message[1:]
            elif message == END:
                self.ended = True
            else:
                self.items.append((number_of(message), handles_of(message), message))
        if over:
            self.broken = not self.ended
            self.hung_up()
        if messages or over:
            self.depth(len(self.items))
            wake_all(self.waiters)

    def hung_up(self) -> None:
        """The sender is gone. Its arena stays as long as anybody has it mapped."""
        self.line.close()

    def release(self, number: int) -> None:
        """Tell the sender that the item was released."""
        if self.line.open:
            self.line.send(release_message(number))

    def release_later(self, number: int) -> None:
        """From a finalizer: any thread, at any moment."""
        self._unreleased.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the connection ended with it
            self.loop.call_soon_threadsafe(self._release_all)

    def _release_all(self) -> None:
        while self._unreleased:
            self.release(self._unreleased.popleft())

    def close(self) -> None:
        """Hang up."""
        self.line.close()
        self.lender.close()  # arrays that are still held keep the mapping


class TensorReceiver(QueueEnd):
    """The receive end: see `tensor_queue`. `async for` until the last sender is closed; each item goes to one clone."""

    def __init__(self, box: Inbox) -> None:
        self._shared = box
        self._closed = False
        box.ends += 1

    def clone(self) -> TensorReceiver:
        """Another receive end, to be closed by itself. Errors: anyio.ClosedResourceError."""
        if self._closed:
            raise anyio.ClosedResourceError
        return TensorReceiver(self._shared)

    def get_nowait(self) -> Received:
        """The next item, or anyio.WouldBlock. Other errors: anyio.EndOfStream after the last item,
        anyio.BrokenResourceError where the sender died, anyio.ClosedResourceError."""
        box = self._shared
        if self._closed:
            raise anyio.ClosedResourceError
        if not box.items:
            box.exchange()
        if not box.items:
            if box.broken:
                raise anyio.BrokenResourceError
            raise anyio.EndOfStream if box.ended else anyio.WouldBlock
        return box.take()

    async def get(self) -> Received:
        """Wait for an item. A cancelled `get` did not take. Errors: as `get_nowait`, also while it waits."""
        while True:
            try:
                return self.get_nowait()
            except anyio.WouldBlock:
                pass
            with self._shared.waiting("an item", "a sender"):
                await wait_in(self._shared.waiters)

    def __aiter__(self) -> TensorReceiver:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.get()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Closing twice is fine. Closing the last clone ends the sender's puts; items left are dropped."""
        if not self._closed:
            self._closed = True
            self._shared.ends -= 1
            if not self._shared.ends:
                self._shared.close()
            wake_all(self._shared.waiters)

    def statistics(self) -> QueueStatistics:
        """As this side knows it: `depth` and `puts` count what came, taken or not."""
        box = self._shared
        box.exchange()
        there = int(not box.ended and not box.broken)
        waiting = sum(not future.done() for future in box.waiters)
        depth = len(box.items)
        return QueueStatistics(
            depth, box.capacity, box.most_depth, box.moved + depth, box.moved, there, box.ends, 0, waiting
        )


async def attach_queue(
    name: str, recorder: Recorder | None = None, *, cause: Cause = "group", timeout_s: float = 30.0
) -> TensorReceiver:
    """The receive end of a queue that another process shares, or will share within `timeout_s`.

    Errors: RingDetached where nobody shares it, or another receiver has it.
    """
    return TensorReceiver(await attach(Inbox, name, recorder, cause, timeout_s))


async def attach(box_of: type[Inbox], name: str, recorder: Recorder | None, cause: Cause, timeout_s: float) -> Inbox:
    """The receiving side of whatever memory. As `attach_queue`."""
    deadline = anyio.current_time() + timeout_s
    while True:
        box = _connect(box_of, name, recorder, cause)
        if box is not None:
            try:
                with anyio.fail_after(max(_ANSWER_S, deadline - anyio.current_time())):
                    while not box.greeted and box.line.open:
                        await wait_in(box.waiters)
                if box.greeted:
                    _check_kind(box)
                    box.opened()
                    return box
            except TimeoutError:
                box.close()
                raise RingDetached(f"queue {name!r}: its owner does not answer; its event loop is blocked") from None
            except BaseException:
                box.close()
                raise
            box.close()
        if anyio.current_time() >= deadline:
            found = "nobody shares it, or another receiver has it" if box is None else "another receiver has it"
            raise RingDetached(f"queue {name!r}: {found}; waited {timeout_s} s")
        await anyio.sleep(0.02)  # a name that does not exist yet tells nobody when it does


def _check_kind(box: Inbox) -> None:
    if box.greeting != box.kind:
        there, call = ("a slab", "attach_device_queue") if box.greeting == SLAB else ("an arena", "attach_queue")
        raise TransportError(f"queue {box.name!r}: its items lie in {there}; receive them with `{call}`")


def _connect(box_of: type[Inbox], name: str, recorder: Recorder | None, cause: Cause) -> Inbox | None:
    """None where nobody shares the name, or nobody listens any more."""
    try:
        lender = box_of.attach(name)
    except FileNotFoundError:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(rendezvous.address(lender.segment))  # to a local socket: at once, or refused
        if not rendezvous.trusted(connection):
            raise ConnectionRefusedError  # somebody else's socket is nobody's
        return box_of(lender, connection, recorder, cause)
    except BaseException as error:
        connection.close()
        lender.close()
        if isinstance(error, ConnectionRefusedError):
            return None
        raise
