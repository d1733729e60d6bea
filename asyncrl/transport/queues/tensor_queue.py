"""The tensor queue between two processes: the contract of `queue.py`, with items in shared memory.

    process A: async with share_queue("batches", capacity=4, size=1 << 28) as sender:
                   await sender.put({"tokens": tokens, "logprobs": logprobs})          # one copy, into the slab
    process B: async with await attach_queue("batches") as receiver:
                   async for item in receiver:
                       with item:                                                     # no copy: views of the slab
                           train(item["tokens"])

An item is a mapping of names to numpy arrays. Beside the contract of the queue in process:

* Credits: `capacity` counts items that were put and not yet released. An item is released at the end of its `with`, by
  `release()`, or when the last of its arrays is collected; before that its memory is not used again. `put` waits for a
  credit and for room in the slab, whichever is missing.
* The sender's process owns the slab. A receiver may come later: what was put before waits for it. One receiving process
  at a time; when it closes or dies, `put` raises `anyio.BrokenResourceError`.
* If the sending process dies before it closed, the receiver gets what was put, then `anyio.BrokenResourceError`: an end
  that nobody meant is not the end. (For records that must survive a death there is `record_ring`.)
* A put copies on the caller's thread: a few milliseconds for ten megabytes.

The same for tensors, on a CUDA device through CUDA IPC: `device_queue`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from ...concurrency.offload import offload
from ...errors import OutOfMemory, RingDetached, TransportError
from .. import rendezvous
from ..memory.handles import Handle
from ..memory.segment import Segment, parts_of
from ..memory.slab import Slab
from .queue import QueueEnd, wait_in, wake_all
from .tensor_wire import (
    DEVICE,
    END,
    HELLO,
    HOST,
    Line,
    handles_of,
    hello_message,
    item_message,
    kind_of,
    lay_out,
    number_of,
    release_message,
)

# The owner's event loop has at least this long to answer.
_ANSWER_S = 5.0


class _TensorEnd(QueueEnd):
    """What both ends have: the slab, and who waits."""

    def __init__(self, slab: Slab, capacity: int) -> None:
        self.name, self.slab, self.capacity = slab.segment.name, slab, capacity
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[asyncio.Future[None]] = deque()


class TensorSender(_TensorEnd):
    """The send end: see the module. Every producer uses the same one.

    What is special about shared memory, and otherwise on a device, is in the last four methods.
    """

    kind = HOST

    def __init__(self, slab: Slab, capacity: int) -> None:
        super().__init__(slab, capacity)
        self.puts = 0
        self.gone = False  # nobody receives any more
        self.same_process = False  # as the receiver
        # Where each item lies that was put and not released, by its number.
        self._outstanding: dict[int, int] = {}
        self._early: deque[bytes] = deque()  # before a receiver came
        self._line: Line | None = None
        self._listener: socket.socket | None = rendezvous.listen(slab.segment)
        self._loop.add_reader(self._listener.fileno(), self._exchange)

    @property
    def depth(self) -> int:
        """Items that were put and not released, as far as this side knows."""
        return len(self._outstanding)

    @property
    def has_receiver(self) -> bool:
        """Somebody attached, and has not left."""
        return self._line is not None and not self.gone

    def put_nowait(self, item: Mapping[str, Any]) -> None:
        """Errors: anyio.WouldBlock without a credit or room; OutOfMemory for an item that can never fit; TypeError and
        ValueError for what is no tensor; anyio.BrokenResourceError without a receiver; anyio.ClosedResourceError."""
        self._check_open()
        self._exchange()
        self._check_open()
        pieces, size = self.lay_out(item)
        if len(self._outstanding) >= self.capacity:
            raise anyio.WouldBlock
        try:
            start = self.slab.allocate(size)
        except OutOfMemory:
            if not self._outstanding:
                raise
            raise anyio.WouldBlock from None
        try:
            message = self.fill(start, pieces)
        except BaseException:
            self.slab.free(start)
            raise
        self._outstanding[self.puts] = start
        self.puts += 1
        self._post(message)

    async def put(self, item: Mapping[str, Any]) -> None:
        """Wait for a credit and for room, then put. A cancelled `put` did not put. Errors: as `put_nowait`, also while it
        waits."""
        while True:
            try:
                return self.put_nowait(item)
            except anyio.WouldBlock:
                pass
            await wait_in(self._waiters)

    def close(self) -> None:
        """Let the receiver end once it has taken what was put. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            if not self.gone:
                self._post(END)
            wake_all(self._waiters)

    async def wait_delivered(self) -> None:
        """Until nothing is left that only this process knows of, or nobody is there to want it."""
        while not (self.gone or (self._line is not None and not self._line.unsent and not self._early)):
            await wait_in(self._waiters)

    def hang_up(self) -> None:
        """Let go of the receiver and of the memory; nobody can come any more."""
        self._close_listener()
        if self._line is not None:
            self._line.close()
        self.gone = True
        wake_all(self._waiters)
        self.slab.close()

    def _check_open(self) -> None:
        if self.closed:
            raise anyio.ClosedResourceError
        if self.gone:
            raise anyio.BrokenResourceError

    def _exchange(self) -> None:
        """Whatever can move, without blocking: a receiver comes, credits come back, it goes."""
        if self._listener is not None:
            self._accept()
        if self._line is None:
            return
        messages, over = self._line.receive()
        for message in messages:
            self.on_message(message)
        if over:
            self.gone = True
            self._line.close()
            for start in self._outstanding.values():
                self.slab.free(start)
            self._outstanding.clear()
        if messages or over:
            # All of them: their items have different sizes, and the first one need not fit.
            wake_all(self._waiters)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if not rendezvous.trusted(connection):
            connection.close()
            return
        self.same_process = rendezvous.peer(connection)[0] == os.getpid()
        self._close_listener()  # one receiver: the next one finds that nobody listens
        self._line = Line(self._loop, connection, self._exchange, lambda: wake_all(self._waiters))
        while self._early:
            self._line.send(self._early.popleft())
        # Last: who was greeted has everything that was put before, whatever dies now.
        self._line.send(hello_message(self.kind, self.capacity))
        wake_all(self._waiters)

    def _post(self, message: bytes) -> None:
        """Send a message, or keep it until a receiver comes."""
        if self._line is None:
            self._early.append(message)
        else:
            self._line.send(message)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # -- what a queue on a device does in its own way

    def lay_out(self, item: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """The item's pieces with their places in a block, and the bytes of that block."""
        return lay_out(item)

    def fill(self, start: int, pieces: Mapping[str, Any]) -> bytes:
        """Copy the pieces into the slab; the message that says where they lie."""
        handles = {}
        for name, piece in pieces.items():
            handle = self.slab.handle(start + piece.offset, piece.dtype, piece.values.shape)
            self.slab.array(handle)[...] = piece.values
            handles[name] = handle
        return item_message(self.puts, handles)

    def on_message(self, message: bytes) -> None:
        """The receiver released an item."""
        start = self._outstanding.pop(number_of(message), None)
        if start is not None:
            self.slab.free(start)

    async def wait_let_go(self) -> None:
        """Until the memory may go: shared memory stays for whoever has it mapped."""


class Received(Mapping[str, Any]):
    """An item: arrays by name, views of shared memory that are the receiver's to read and write until the release.

    `with item:` releases it at the end; do not look at its arrays after that.
    """

    def __init__(self, receiver: TensorReceiver, number: int, handles: Mapping[str, Handle]) -> None:
        claim = _Claim()
        self._receiver, self._number = receiver, number
        self._arrays = {name: receiver.look(handle, claim) for name, handle in handles.items()}
        self._finalizer = weakref.finalize(claim, receiver.release_later, number)
        self._finalizer.atexit = False
        self._claim: _Claim | None = claim  # an item without arrays is released with the item itself

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def release(self) -> None:
        """The memory and the credit go back to the sender. Twice is fine."""
        if self._finalizer.detach() is not None:
            self._receiver.release(self._number)

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Claim:
    """Lives as long as an array of its item does."""

    __slots__ = ("__weakref__",)


class TensorReceiver(_TensorEnd):
    """The receive end: `async for` until the sender is closed. Each item goes to one of the tasks that iterate."""

    kind = HOST

    def __init__(self, slab: Slab, connection: socket.socket) -> None:
        super().__init__(slab, 0)
        self.greeting: bytes | None = None  # what the sender's memory is; None: it has not answered
        self._items: deque[tuple[int, dict[str, Handle], bytes]] = deque()  # and the message
        self._ended = self._broken = False
        self._unreleased: deque[int] = deque()  # filled by the garbage collector
        self._line = Line(self._loop, connection, self._exchange)

    async def wait_greeted(self) -> bool:
        """Whether the sender answered; False where another receiver has it."""
        while self.greeting is None and self._line.open:
            await wait_in(self._waiters)
        return self.greeting is not None

    def get_nowait(self) -> Received:
        """The next item, or anyio.WouldBlock. Other errors: anyio.EndOfStream after the last item,
        anyio.BrokenResourceError where the sender died, anyio.ClosedResourceError."""
        if self.closed:
            raise anyio.ClosedResourceError
        if not self._items:
            self._exchange()
        if not self._items:
            if self._broken:
                raise anyio.BrokenResourceError
            raise anyio.EndOfStream if self._ended else anyio.WouldBlock
        return self.take()

    async def get(self) -> Received:
        """Wait for an item. A cancelled `get` did not take. Errors: as `get_nowait`, also while it waits."""
        while True:
            try:
                return self.get_nowait()
            except anyio.WouldBlock:
                pass
            await wait_in(self._waiters)

    def __aiter__(self) -> TensorReceiver:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.get()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """End the sender's puts; items left are dropped, and arrays that are still held keep the memory. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            self.leave()
            self.slab.close()
            wake_all(self._waiters)

    def release_later(self, number: int) -> None:
        """From a finalizer: any thread, at any moment."""
        self._unreleased.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the connection ended with it
            self._loop.call_soon_threadsafe(self._release_all)

    def _release_all(self) -> None:
        while self._unreleased:
            self.release(self._unreleased.popleft())

    def _exchange(self) -> None:
        """Take what came, without blocking."""
        messages, over = self._line.receive()
        for message in messages:
            if message[:1] == HELLO:
                self.capacity, self.greeting = number_of(message), kind_of(message)
            elif message == END:
                self._ended = True
            else:
                self._items.append((number_of(message), handles_of(message), message))
        if over:
            self._broken = not self._ended
            self.on_hang_up()
        if messages or over:
            wake_all(self._waiters)

    # -- what a queue on a device does in its own way

    def look(self, handle: Handle, claim: object) -> Any:
        """The array or tensor that a handle names; it keeps `claim`."""
        return self.slab.array(handle, keep=claim)

    def take(self) -> Received:
        """The next item, which is there."""
        number, handles, _ = self._items.popleft()
        return Received(self, number, handles)

    def release(self, number: int) -> None:
        """Send the release of an item."""
        if self._line.open:
            self._line.send(release_message(number))

    def on_hang_up(self) -> None:
        """The sender is gone. Its memory stays as long as anybody has it mapped."""
        self._line.close()

    def leave(self) -> None:
        """Hang up on the sender."""
        self._line.close()


@asynccontextmanager
async def share_queue(name: str, capacity: int, size: int, *, linger_s: float = 30.0) -> AsyncIterator[TensorSender]:
    """The sending side: a slab `name` with `size` bytes of shared memory, and its send end.

    At the end every item that was put is handed over first: a receiver that has not come yet is waited for, at most
    `linger_s`. After an error or a cancellation nobody waits. Errors: ArenaOwned where the name is in use, TransportError
    where something else of that name is left, OutOfMemory; TransportError at the end where nobody came for the items.
    """
    await prepare(name, capacity)
    async with serve(Slab.create(name, size, device="cpu"), TensorSender, capacity, linger_s) as sender:
        yield sender


async def prepare(name: str, capacity: int) -> None:
    """Remove what a sender that was killed left. Errors: ArenaOwned; TransportError where records of a ring lie there."""
    if capacity < 1:
        raise ValueError(f"queue {name!r}: capacity must be at least 1, found {capacity}")
    await offload(lambda: _remove_leftover(name), "shared memory")


def _remove_leftover(name: str) -> None:
    try:
        segment = Segment.adopt(name)
    except FileNotFoundError:
        return
    rings = parts_of(name, "ring", "damaged")
    segment.close(unlink=not rings)
    if rings:
        raise TransportError(
            f"queue {name!r}: {segment.path} is no queue's: {len(rings)} record rings belong to it, and nobody owns it now. "
            f"Give the queue another name, start the run of those rings again, or remove it with `asyncrl shm clear {name}`"
        )


@asynccontextmanager
async def serve(slab: Slab, end: type[TensorSender], capacity: int, linger_s: float) -> AsyncIterator[TensorSender]:
    """The life of a sending side, which takes the slab over, whatever memory it has. As `share_queue`."""
    try:
        sender = end(slab, capacity)
    except BaseException:
        slab.close()
        raise
    try:
        yield sender
        sender.close()
        with anyio.move_on_after(linger_s) as patience:
            if sender.puts:
                await sender.wait_delivered()
            await sender.wait_let_go()
        if patience.cancelled_caught:
            came = (
                "the receiver did not let go of all"
                if sender.has_receiver or sender.gone
                else "no receiver came for them"
            )
            raise TransportError(f"queue {sender.name!r}: {sender.depth} items were put and {came} in {linger_s} s")
    finally:
        sender.hang_up()


async def attach_queue(name: str, *, timeout_s: float = 30.0) -> TensorReceiver:
    """The receive end of a queue that another process shares, or will share within `timeout_s`.

    Errors: RingDetached where nobody shares it, or another receiver has it.
    """
    return await attach(TensorReceiver, name, timeout_s)


async def attach(end: type[TensorReceiver], name: str, timeout_s: float) -> TensorReceiver:
    """The receiving side of whatever memory. As `attach_queue`."""
    deadline = anyio.current_time() + timeout_s
    while True:
        receiver = _connect(end, name)
        if receiver is not None:
            try:
                with anyio.fail_after(max(_ANSWER_S, deadline - anyio.current_time())):
                    greeted = await receiver.wait_greeted()
                if greeted:
                    _check_kind(receiver)
                    return receiver
            except TimeoutError:
                receiver.close()
                raise RingDetached(f"queue {name!r}: its owner does not answer; its event loop is blocked") from None
            except BaseException:
                receiver.close()
                raise
            receiver.close()
        if anyio.current_time() >= deadline:
            found = "nobody shares it, or another receiver has it" if receiver is None else "another receiver has it"
            raise RingDetached(f"queue {name!r}: {found}; waited {timeout_s} s")
        await anyio.sleep(0.02)  # there is no event for a name that begins to exist


def _check_kind(receiver: TensorReceiver) -> None:
    if receiver.greeting != receiver.kind:
        device = receiver.greeting == DEVICE
        there, call = ("on a device", "attach_device_queue") if device else ("in shared memory", "attach_queue")
        raise TransportError(f"queue {receiver.name!r}: its items lie {there}; receive them with `{call}`")
    # A device that cannot be opened is an error here, not at the first item.
    _ = receiver.slab.memory


def _connect(end: type[TensorReceiver], name: str) -> TensorReceiver | None:
    """None where nobody shares the name, or nobody listens any more."""
    try:
        slab = Slab.attach(name)
    except FileNotFoundError:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(rendezvous.address(slab.segment))  # to a local socket: at once, or refused
        if not rendezvous.trusted(connection):
            raise ConnectionRefusedError  # somebody else's socket is nobody's
        return end(slab, connection)
    except BaseException as error:
        connection.close()
        slab.close()
        if isinstance(error, ConnectionRefusedError):
            return None
        raise
