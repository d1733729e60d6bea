"""The sending side of a tensor queue between processes. The contract: `tensor_queue`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from ...concurrency.offload import offload
from ...errors import OutOfMemory, TransportError
from .. import rendezvous
from ..memory.arena import Arena, Lease
from ..memory.blocks import Block, BlockLease
from ..memory.handles import BFLOAT16
from ..memory.segment import Segment, parts_of
from .queue import QueueEnd, QueueStatistics, wait_in, wake_all
from .tensor_wire import ARENA, END, HELLO, Line, Side, item_message, lay_out, number_of

if TYPE_CHECKING:
    from ...telemetry.recorder import Recorder
    from ...telemetry.records import Cause


class Lender(Protocol):
    """Where the items of a queue lie: `Arena`, or a slab on a device."""

    segment: Segment

    def lease(self, size: int) -> BlockLease:
        """Bytes for one item. Errors: OutOfMemory."""
        ...

    def free(self, block: Block) -> None:
        """The item was released."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class Outbox(Side):
    """The state that the clones of a send end share. What is special about an arena is in the last four methods."""

    def __init__(self, lender: Lender, capacity: int, recorder: Recorder | None, cause: Cause) -> None:
        super().__init__(lender.segment.name, capacity, recorder, cause)
        self.lender = lender
        self.outstanding: dict[int, Block] = {}
        self.early: deque[bytes] = deque()  # before a receiver came
        self.line: Line | None = None
        self.gone = False
        self._listener: socket.socket | None = rendezvous.listen(lender.segment)
        self.loop.add_reader(self._listener.fileno(), self.exchange)

    @property
    def delivered(self) -> bool:
        """Nothing is left that only this process knows of, or nobody is there to want it."""
        return self.gone or (self.line is not None and not self.line.unsent and not self.early)

    def exchange(self) -> None:
        """Whatever can move, without blocking: a receiver comes, credits come back, it goes."""
        if self._listener is not None:
            self._accept()
        if self.line is None:
            return
        messages, over = self.line.receive()
        for message in messages:
            self.take(message)
        if over:
            self._lost()
        if messages or over:
            self.depth(len(self.outstanding))
            wake_all(self.waiters)  # of different sizes: the one that fits need not be the first

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
        self._close_door()  # one receiver: the next one is told that nobody listens
        self.line = Line(self.loop, connection, self.exchange, lambda: wake_all(self.waiters))
        while self.early:
            self.line.send(self.early.popleft())
        self.line.send(HELLO + self.kind)  # last: who was greeted has everything that was put before, whatever dies now
        wake_all(self.waiters)

    def post(self, message: bytes) -> None:
        """Send a message, or keep it until a receiver comes."""
        if self.line is None:
            self.early.append(message)
        else:
            self.line.send(message)

    def put(self, item: Mapping[str, Any]) -> None:
        """Errors: anyio.WouldBlock without a credit or room; OutOfMemory for an item that can never fit."""
        pieces, size = self.lay_out(item)
        if len(self.outstanding) >= self.capacity:
            raise anyio.WouldBlock
        try:
            lease = self.lender.lease(size)
        except OutOfMemory:
            if not self.outstanding:
                raise
            raise anyio.WouldBlock from None
        with contextlib.ExitStack() as undo:
            undo.callback(lease.release)
            message = self.fill(lease, pieces)
            undo.pop_all()
        self.outstanding[self.moved] = lease.detach()
        self.moved += 1
        self.depth(len(self.outstanding))
        self.post(message)

    def _lost(self) -> None:
        self.gone = True
        if self.line is not None:
            self.line.close()
        for block in self.outstanding.values():
            self.lender.free(block)
        self.outstanding.clear()
        self.early.clear()

    def _close_door(self) -> None:
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    async def wait_delivered(self) -> None:
        """Until `delivered`."""
        while not self.delivered:
            await wait_in(self.waiters)

    def close(self) -> None:
        """Hang up; nobody can come any more."""
        self._close_door()
        if self.line is not None:
            self.line.close()
        self.gone = True
        wake_all(self.waiters)
        self.lender.close()

    # -- what a queue through another kind of memory does in its own way

    kind = ARENA
    same_process = False  # as the receiver

    def lay_out(self, item: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """The item's pieces with their places in a block, and the bytes of that block."""
        return lay_out(item)

    def fill(self, lease: Any, pieces: Mapping[str, Any]) -> bytes:
        """Copy the pieces into the leased block; the message that says where they lie."""
        assert isinstance(lease, Lease)
        handles = {}
        for name, piece in pieces.items():
            kind = "<u2" if piece.dtype == BFLOAT16 else piece.dtype
            lease.array(kind, piece.values.shape, offset=piece.offset)[...] = piece.values
            handles[name] = lease.handle(piece.dtype, piece.values.shape, offset=piece.offset)
        return item_message(self.moved, handles)

    def take(self, message: bytes) -> None:
        """A message of the receiver: an item was released."""
        block = self.outstanding.pop(number_of(message), None)
        if block is not None:
            self.lender.free(block)

    async def wait_let_go(self) -> None:
        """Until the memory may go: shared memory stays for whoever has it mapped."""


class TensorSender(QueueEnd):
    """The send end: see `tensor_queue`. One for each producer: `clone` it, and close every clone."""

    def __init__(self, box: Outbox) -> None:
        self._shared = box
        self._closed = False
        box.ends += 1

    def clone(self) -> TensorSender:
        """Another send end, to be closed by itself. Errors: anyio.ClosedResourceError."""
        if self._closed:
            raise anyio.ClosedResourceError
        return TensorSender(self._shared)

    def put_nowait(self, item: Mapping[str, Any]) -> None:
        """Errors: anyio.WouldBlock without a credit or room; OutOfMemory for an item that can never fit; TypeError and
        ValueError for what is no tensor; anyio.BrokenResourceError without a receiver; anyio.ClosedResourceError."""
        self._check_open()
        self._shared.exchange()
        self._check_open()
        self._shared.put(item)

    async def put(self, item: Mapping[str, Any]) -> None:
        """Wait for a credit and for room, then put. A cancelled `put` did not put. Errors: as `put_nowait`, also while it
        waits."""
        while True:
            try:
                return self.put_nowait(item)
            except anyio.WouldBlock:
                pass
            with self._shared.waiting("a credit or room", "the receiver"):
                await wait_in(self._shared.waiters)

    def close(self) -> None:
        """Closing twice is fine. Closing the last clone lets the receiver end."""
        if not self._closed:
            self._closed = True
            self._shared.ends -= 1
            if not self._shared.ends and not self._shared.gone:
                self._shared.post(END)
            wake_all(self._shared.waiters)

    def statistics(self) -> QueueStatistics:
        """`depth` and `gets` as this side knows them: items that were put and not released, and released ones."""
        box = self._shared
        depth = len(box.outstanding)
        waiting = sum(not future.done() for future in box.waiters)
        there = int(box.line is not None and not box.gone)
        return QueueStatistics(
            depth, box.capacity, box.most_depth, box.moved, box.moved - depth, box.ends, there, waiting, 0
        )

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._shared.gone:
            raise anyio.BrokenResourceError


@asynccontextmanager
async def share_queue(
    name: str,
    capacity: int,
    size: int,
    recorder: Recorder | None = None,
    *,
    cause: Cause = "group",
    linger_s: float = 30.0,
) -> AsyncIterator[TensorSender]:
    """The sending side: an arena `name` with `size` bytes, and its first send end.

    At the end every item that was put is handed over first: a receiver that has not come yet is waited for, at most
    `linger_s`. After an error or a cancellation nobody waits. Errors: ArenaOwned where the name is in use, TransportError
    where something else of that name is left, OutOfMemory; TransportError at the end where nobody came for the items.
    """
    async with serve(
        lambda: Arena.create(name, size, blocks=capacity), Outbox, name, capacity, recorder, cause, linger_s
    ) as sender:
        yield sender


def _remove_leftover(name: str) -> None:
    """Remove what a sender that was killed left. Errors: ArenaOwned; TransportError where records of a ring lie there."""
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
async def serve(
    create: Callable[[], Lender],
    box_of: Callable[[Any, int, Recorder | None, Cause], Outbox],
    name: str,
    capacity: int,
    recorder: Recorder | None,
    cause: Cause,
    linger_s: float,
) -> AsyncIterator[TensorSender]:
    """The life of a sending side, whatever memory it has. As `share_queue`."""
    if capacity < 1:
        raise ValueError(f"queue {name!r}: capacity must be at least 1, found {capacity}")
    await offload(lambda: _remove_leftover(name), "shared memory")
    lender = create()
    try:
        box = box_of(lender, capacity, recorder, cause)
    except BaseException:
        lender.close()
        raise
    try:
        sender = TensorSender(box)
        yield sender
        sender.close()
        with anyio.move_on_after(linger_s) as patience:
            if box.moved:
                await box.wait_delivered()
            await box.wait_let_go()
        if patience.cancelled_caught:
            came = "the receiver did not let go of all" if box.line is not None else "no receiver came for them"
            raise TransportError(f"queue {name!r}: {len(box.outstanding)} items were put and {came} in {linger_s} s")
    finally:
        box.close()
