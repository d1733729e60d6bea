"""The tensor queue between two processes: the contract of `queue.py`, with items in shared memory.

    process A: async with share_queue("batches", capacity=4, size=1 << 28) as sender:
                   await sender.put({"tokens": tokens, "logprobs": logprobs})          # one copy, into the slab
    process B: async with await attach_queue("batches") as receiver:
                   async for item in receiver:
                       with item:                                                     # no copy: views of the slab
                           train(item["tokens"])

An item is a mapping of names to numpy arrays. Rules beyond the contract of `queue.py`:

* Credits: at most `capacity` items may be put and not yet released. An item is released at the end of its `with`, by
  `release()`, or when its last array is garbage-collected. Before the release its memory is not reused. `put` waits for
  a credit and for room in the slab.
* The sender's process owns the slab. A receiver may attach later and then gets all earlier items. The queue has at most
  one receiving process. When that process closes its end or dies, `put` raises `anyio.BrokenResourceError`.
* If the sending process dies before it closes its end, the receiver gets the remaining items and then
  `anyio.BrokenResourceError`. (For records that must survive a death use `rings/record_ring.py`.)
* `put` copies on the calling thread. Ten megabytes take a few milliseconds.

`device_queue.py` has the same queue for tensors on a CUDA device, through CUDA IPC.
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
from .queue import QueueEnd, wait_for_wake, wake_all
from .tensor_wire import (
    DEVICE,
    END,
    HELLO,
    HOST,
    MessageSocket,
    handles_of,
    hello_message,
    item_message,
    kind_of,
    lay_out,
    number_of,
    release_message,
)

# The owner's event loop has at least this time to answer a receiver, even if the receiver's timeout ends before.
_ANSWER_S = 5.0


class _TensorEnd(QueueEnd):
    """Base of both ends: the slab, and the tasks that wait."""

    def __init__(self, slab: Slab, capacity: int) -> None:
        self.name, self.slab, self.capacity = slab.segment.name, slab, capacity
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[asyncio.Future[None]] = deque()


class TensorSender(_TensorEnd):
    """The send end, see the module. All producers share the end."""

    kind = HOST

    def __init__(self, slab: Slab, capacity: int) -> None:
        super().__init__(slab, capacity)
        self.puts = 0
        self.receiver_gone = False
        self.same_process = False  # whether sender and receiver are in one process
        # The item's number -> the start of its block, for items that were put and not released.
        self._outstanding: dict[int, int] = {}
        self._unsent: deque[bytes] = deque()  # messages before a receiver attached
        self._socket: MessageSocket | None = None
        self._listener: socket.socket | None = rendezvous.listen(slab.segment)
        self._loop.add_reader(self._listener.fileno(), self._process_messages)

    @property
    def depth(self) -> int:
        """The number of items that were put, and whose release this process has not yet received."""
        return len(self._outstanding)

    @property
    def has_receiver(self) -> bool:
        """Whether a receiver is attached."""
        return self._socket is not None and not self.receiver_gone

    def put_nowait(self, item: Mapping[str, Any]) -> None:
        """Put an item, or raise anyio.WouldBlock without a credit or room. Other errors: OutOfMemory for an item larger
        than the slab; TypeError and ValueError for values that are no numbers; anyio.BrokenResourceError if the
        receiver has ended; anyio.ClosedResourceError."""
        self._check_open()
        self._process_messages()
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
        """Wait for a credit and for room, then put. A cancelled `put` has put no item. Errors: as `put_nowait`."""
        while True:
            try:
                return self.put_nowait(item)
            except anyio.WouldBlock:
                pass
            await wait_for_wake(self._waiters)

    def close(self) -> None:
        """Close the send end. The receiver gets the remaining items and then the end. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            if not self.receiver_gone:
                self._post(END)
            wake_all(self._waiters)

    async def wait_delivered(self) -> None:
        """Wait until all messages are sent to a receiver, or the receiver has ended."""
        while not self.receiver_gone and (self._socket is None or self._socket.unsent or self._unsent):
            await wait_for_wake(self._waiters)

    def disconnect(self) -> None:
        """Disconnect the receiver, refuse new receivers, and close the slab."""
        self._close_listener()
        if self._socket is not None:
            self._socket.close()
        self.receiver_gone = True
        wake_all(self._waiters)
        self.slab.close()

    def _check_open(self) -> None:
        if self.closed:
            raise anyio.ClosedResourceError
        if self.receiver_gone:
            raise anyio.BrokenResourceError

    def _process_messages(self) -> None:
        """Accept a receiver, and read its releases and its end, without blocking."""
        if self._listener is not None:
            self._accept()
        if self._socket is None:
            return
        messages, disconnected = self._socket.receive()
        for message in messages:
            self.on_message(message)
        if disconnected:
            self.receiver_gone = True
            self._socket.close()
            for start in self._outstanding.values():
                self.slab.free(start)
            self._outstanding.clear()
        if messages or disconnected:
            # Wake all waiters: items have different sizes, so a later waiter may fit where the first does not.
            wake_all(self._waiters)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _address = self._listener.accept()
        except BlockingIOError:
            return
        if not rendezvous.is_same_user(connection):
            connection.close()
            return
        self.same_process = rendezvous.peer(connection)[0] == os.getpid()
        self._close_listener()  # a second receiver is refused
        self._socket = MessageSocket(self._loop, connection, self._process_messages, lambda: wake_all(self._waiters))
        while self._unsent:
            self._socket.send(self._unsent.popleft())
        # The greeting is last: a greeted receiver has all earlier items, even if this process dies now.
        self._socket.send(hello_message(self.kind, self.capacity))
        wake_all(self._waiters)

    def _post(self, message: bytes) -> None:
        """Send a message, or keep the message until a receiver attaches."""
        if self._socket is None:
            self._unsent.append(message)
        else:
            self._socket.send(message)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # -- overridden for a queue on a device

    def lay_out(self, item: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """(the pieces of an item with their offsets, the bytes of the item's block)."""
        return lay_out(item)

    def fill(self, start: int, pieces: Mapping[str, Any]) -> bytes:
        """Copy the pieces into the block at `start`. Returns the message with their handles."""
        handles = {}
        for name, piece in pieces.items():
            handle = self.slab.handle(start + piece.offset, piece.dtype, piece.values.shape)
            self.slab.array(handle)[...] = piece.values
            handles[name] = handle
        return item_message(self.puts, handles)

    def on_message(self, message: bytes) -> None:
        """Free the block of an item that the receiver has released."""
        start = self._outstanding.pop(number_of(message), None)
        if start is not None:
            self.slab.free(start)

    async def wait_unmapped(self) -> None:
        """Wait until the slab may be closed. For shared memory it returns at once, because a mapping keeps its pages."""


class Received(Mapping[str, Any]):
    """An item: arrays by tensor name. The arrays are views of shared memory, which the receiver may read and write.

    The end of `with item:` releases the item. Do not use its arrays afterwards.
    """

    def __init__(self, receiver: TensorReceiver, number: int, handles: Mapping[str, Handle]) -> None:
        item_life = _ItemLife()
        self._receiver, self._number = receiver, number
        self._arrays = {name: receiver.open_tensor(handle, item_life) for name, handle in handles.items()}
        self._finalizer = weakref.finalize(item_life, receiver.release_from_finalizer, number)
        self._finalizer.atexit = False
        # Without arrays, this reference alone delays the release until the item is collected.
        self._item_life: _ItemLife | None = item_life

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def release(self) -> None:
        """Return memory and credit to the sender. A second release does nothing."""
        if self._finalizer.detach() is not None:
            self._receiver.release(self._number)

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _ItemLife:
    """Each array of an item refers to this object, whose finalizer releases the item."""

    __slots__ = ("__weakref__",)


class TensorReceiver(_TensorEnd):
    """The receive end. Tasks that iterate over it share the items, until the sender is closed."""

    kind = HOST

    def __init__(self, slab: Slab, connection: socket.socket) -> None:
        super().__init__(slab, 0)  # the greeting brings the capacity
        self.greeting: bytes | None = None  # the kind of memory; None until the sender answers
        self._items: deque[tuple[int, dict[str, Handle], bytes]] = deque()  # number, handles, message
        self._ended = self._broken = False
        self._unreleased: deque[int] = deque()  # filled by finalizers
        self._socket = MessageSocket(self._loop, connection, self._process_messages)

    async def wait_greeted(self) -> bool:
        """Wait for the sender's greeting. Returns False if another receiver has the queue."""
        while self.greeting is None and self._socket.open:
            await wait_for_wake(self._waiters)
        return self.greeting is not None

    def get_nowait(self) -> Received:
        """The next item, or raise anyio.WouldBlock. Other errors: anyio.EndOfStream after the last item;
        anyio.BrokenResourceError if the sender died; anyio.ClosedResourceError."""
        if self.closed:
            raise anyio.ClosedResourceError
        if not self._items:
            self._process_messages()
        if not self._items:
            if self._broken:
                raise anyio.BrokenResourceError
            raise anyio.EndOfStream if self._ended else anyio.WouldBlock
        return self.next_item()

    async def get(self) -> Received:
        """Wait for an item. A cancelled `get` has taken no item. Errors: as `get_nowait`, also during the wait."""
        while True:
            try:
                return self.get_nowait()
            except anyio.WouldBlock:
                pass
            await wait_for_wake(self._waiters)

    def __aiter__(self) -> TensorReceiver:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.get()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Close the receive end; remaining items are lost. Arrays in use keep their memory. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            self.disconnect()
            self.slab.close()
            wake_all(self._waiters)

    def release_from_finalizer(self, number: int) -> None:
        """Release an item from its finalizer, which may run on any thread at any time."""
        self._unreleased.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the connection
            self._loop.call_soon_threadsafe(self._release_all)

    def _release_all(self) -> None:
        while self._unreleased:
            self.release(self._unreleased.popleft())

    def _process_messages(self) -> None:
        """Read the sender's messages, without blocking."""
        messages, disconnected = self._socket.receive()
        for message in messages:
            if message[:1] == HELLO:
                self.capacity, self.greeting = number_of(message), kind_of(message)
            elif message == END:
                self._ended = True
            else:
                self._items.append((number_of(message), handles_of(message), message))
        if disconnected:
            self._broken = not self._ended
            self.on_sender_end()
        if messages or disconnected:
            wake_all(self._waiters)

    # -- overridden for a queue on a device

    def open_tensor(self, handle: Handle, item_life: object) -> Any:
        """The array of a handle. The array keeps `item_life` alive."""
        return self.slab.array(handle, keep_alive=item_life)

    def next_item(self) -> Received:
        """Remove and return the first received item."""
        number, handles, _message = self._items.popleft()
        return Received(self, number, handles)

    def release(self, number: int) -> None:
        """Send the release of an item to the sender."""
        if self._socket.open:
            self._socket.send(release_message(number))

    def on_sender_end(self) -> None:
        """Close the socket after the sender's end. Received items stay valid, because mappings keep shared memory."""
        self._socket.close()

    def disconnect(self) -> None:
        """Disconnect from the sender."""
        self._socket.close()


@asynccontextmanager
async def share_queue(name: str, capacity: int, size: int, *, linger_s: float = 30.0) -> AsyncIterator[TensorSender]:
    """A context with the send end of a new queue: a slab `name` of `size` bytes in shared memory.

    The end of the context waits at most `linger_s` seconds until a receiver has attached and got all items. After an
    error or a cancellation it does not wait.
    Errors: ArenaOwned if the name is in use; TransportError if record rings of this name exist; OutOfMemory; at the end
    TransportError if no receiver got all items in time.
    """
    await prepare_name(name, capacity)
    async with run_sender(Slab.create(name, size, device="cpu"), TensorSender, capacity, linger_s) as sender:
        yield sender


async def prepare_name(name: str, capacity: int) -> None:
    """Remove the slab of a killed sender. Errors: ArenaOwned; TransportError if record rings of this name exist."""
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
            f"queue {name!r}: {segment.path} is no queue's: {len(rings)} record rings belong to it and have no owner. Give the "
            f"queue another name, start the run of those rings again, or remove it with `asyncrl shm clear {name}`"
        )


@asynccontextmanager
async def run_sender(
    slab: Slab, end_class: type[TensorSender], capacity: int, linger_s: float
) -> AsyncIterator[TensorSender]:
    """A context with the send end of a queue in the given slab, which the context closes. As `share_queue`."""
    try:
        sender = end_class(slab, capacity)
    except BaseException:
        slab.close()
        raise
    try:
        yield sender
        sender.close()
        with anyio.move_on_after(linger_s) as scope:
            if sender.puts:
                await sender.wait_delivered()
            await sender.wait_unmapped()
        if scope.cancelled_caught:
            attached = sender.has_receiver or sender.receiver_gone
            cause = "the receiver did not release all" if attached else "no receiver attached"
            raise TransportError(
                f"queue {sender.name!r}: {sender.depth} items were put and {cause} in {linger_s} s; raise linger_s"
            )
    finally:
        sender.disconnect()


async def attach_queue(name: str, *, timeout_s: float = 30.0) -> TensorReceiver:
    """The receive end of the queue `name` of another process. Waits at most `timeout_s` seconds for the queue.

    Errors: RingDetached if no process shares the queue, or another receiver has it.
    """
    return await attach_receiver(TensorReceiver, name, timeout_s)


async def attach_receiver(end_class: type[TensorReceiver], name: str, timeout_s: float) -> TensorReceiver:
    """As `attach_queue`, for an end of class `end_class`."""
    deadline = anyio.current_time() + timeout_s
    while True:
        receiver = _connect(end_class, name)
        if receiver is not None:
            try:
                with anyio.fail_after(max(_ANSWER_S, deadline - anyio.current_time())):
                    greeted = await receiver.wait_greeted()
                if greeted:
                    _check_kind(receiver)
                    return receiver
            except TimeoutError:
                receiver.close()
                raise RingDetached(
                    f"queue {name!r}: its owner does not answer; its event loop is blocked: keep blocking calls off the loop"
                ) from None
            except BaseException:
                receiver.close()
                raise
            receiver.close()
        if anyio.current_time() >= deadline:
            cause = "nobody shares it, or another receiver has it" if receiver is None else "another receiver has it"
            raise RingDetached(f"queue {name!r}: {cause}; waited {timeout_s} s. Start a sender or close the receiver")
        await anyio.sleep(0.02)  # the kernel has no event for a new name


def _check_kind(receiver: TensorReceiver) -> None:
    if receiver.greeting != receiver.kind:
        on_device = receiver.greeting == DEVICE
        place, call = ("on a device", "attach_device_queue") if on_device else ("in shared memory", "attach_queue")
        raise TransportError(f"queue {receiver.name!r}: its items lie {place}; receive them with `{call}`")
    # Open the memory now: a device that cannot be opened is an error here, not at the first item.
    _ = receiver.slab.memory


def _connect(end_class: type[TensorReceiver], name: str) -> TensorReceiver | None:
    """A new receive end; None if no process shares the name, or no sender accepts a receiver."""
    try:
        slab = Slab.attach(name)
    except FileNotFoundError:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(rendezvous.address(slab.segment))  # a local socket connects at once or refuses
        if not rendezvous.is_same_user(connection):
            raise ConnectionRefusedError  # the socket belongs to another user
        return end_class(slab, connection)
    except BaseException as error:
        connection.close()
        slab.close()
        if isinstance(error, ConnectionRefusedError):
            return None
        raise
