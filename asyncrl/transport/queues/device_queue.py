"""The tensor queue on a device: the contract of `queue.py`, with items in a slab (CUDA IPC between processes).

    process A: async with share_device_queue("batches", capacity=4, size=1 << 30) as sender:
                   await sender.put({"tokens": tokens, "logprobs": logprobs})       # one copy, on the device
    process B: async with await attach_device_queue("batches") as receiver:
                   async for item in receiver:
                       with item:                                                  # no copy: views of the slab
                           train(item["tokens"])

An item is a mapping of names to CUDA or CPU tensors or numpy arrays; what comes out lies on the slab's device. Beside the
contract of `tensor_queue`:

* Nobody waits for the device: a put launches copies and records an event, a get makes the receiver's stream wait for it,
  a release records another one, and the memory is written again behind that. (A put of CPU tensors does wait for its
  copies: put what lies on the device.)
* Streams: `put` reads its tensors behind the stream that is current where it is called, and that stream waits for the
  copies: changing a tensor after `put` is safe. An item belongs to the stream that is current where `get` is called;
  join other streams that look at it before its release (torch's own rule for freeing a tensor).
* The memory is the sender's and dies with it. So a sender that leaves in good order waits, at most `linger_s`, until the
  receiver closed and the last of its tensors is gone; a sender that must leave earlier keeps the slab, as long as
  its process lives, until that happens. If its process dies, `get` raises `anyio.BrokenResourceError` at once, and
  items that the receiver still has must not be looked at.
* In one process nothing is opened: the receiver looks at the sender's memory.
* `device="cpu"` is the same queue with shared memory behind it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import torch

from .. import rendezvous
from ..memory.device_memory import FENCE_BYTES, DeviceMemory
from ..memory.handles import Handle, dtype_name
from ..memory.slab import Slab, torch_dtype
from .queue import wait_in
from .tensor_queue import Received, TensorReceiver, TensorSender, attach, prepare, serve
from .tensor_wire import ALIGNMENT, CLOSED, DEVICE, LARGEST, item_message, number_of, release_message

_TAIL = struct.Struct(f"<I{FENCE_BYTES}s")  # of an item: its slot, the fence behind which it is written
# Memory that a receiver in another process may still look at after its queue ended here, and the line that says so.
_kept: list[tuple[socket.socket, DeviceMemory]] = []


@dataclass(frozen=True, slots=True)
class _Piece:
    values: torch.Tensor
    dtype: str
    offset: int


class _DeviceSender(TensorSender):
    kind = DEVICE

    def __init__(self, slab: Slab, capacity: int) -> None:
        super().__init__(slab, capacity)
        self._memory = slab.memory
        self._slots: dict[int, int] = {}  # whose fences each outstanding item has
        self._read: list[bytes] = []  # fences of releases whose memory may be written next

    def lay_out(self, item: Mapping[str, Any]) -> tuple[dict[str, _Piece], int]:
        """Errors: TypeError for what is no tensor on the CPU or a CUDA device, ValueError for other numbers."""
        pieces: dict[str, _Piece] = {}
        size = 0
        for name, value in item.items():
            values = _as_tensor(name, value)
            pieces[name] = _Piece(values, dtype_name(values.dtype), size)
            size += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        return pieces, max(size, ALIGNMENT)

    def fill(self, start: int, pieces: Mapping[str, Any]) -> bytes:
        handles = {
            name: self.slab.handle(start + piece.offset, piece.dtype, tuple(piece.values.shape))
            for name, piece in pieces.items()
        }
        slot = min(set(range(self.capacity)).difference(self._slots.values()))
        message = item_message(self.puts, handles, most=LARGEST - _TAIL.size)  # before anything is launched
        with self._memory.writing() as stream:
            self._wait_for_readers(stream)
            for name, piece in pieces.items():
                target = self.slab.view(handles[name])
                target.copy_(piece.values, non_blocking=target.is_cuda and piece.values.is_cuda)
            fence = self._memory.record(2 * slot, stream)
        self._slots[self.puts] = slot
        return message + _TAIL.pack(slot, fence)

    def _wait_for_readers(self, stream: Any) -> None:
        while self._read:
            try:
                self._memory.wait(self._read[-1], stream)
            except RuntimeError as error:  # the event went with the process that recorded it
                self.gone = True
                raise anyio.BrokenResourceError from error
            self._read.pop()

    def on_message(self, message: bytes) -> None:
        if message == CLOSED:
            self.gone = True
            return
        if number_of(message) in self._outstanding:
            self._read.append(message[-FENCE_BYTES:])
            del self._slots[number_of(message)]
        super().on_message(message)

    async def wait_let_go(self) -> None:
        while self._others_look:
            await wait_in(self._waiters)

    @property
    def _others_look(self) -> bool:
        return self._line is not None and self._line.open and not self.same_process

    def hang_up(self) -> None:
        if self._others_look:
            assert self._line is not None
            connection = self._line.detach()
            connection.shutdown(socket.SHUT_WR)  # the other side reads the end; its own end is still to come
            _kept.append((connection, self._memory))
        del self._memory
        super().hang_up()


class _DeviceReceiver(TensorReceiver):
    kind = DEVICE

    def __init__(self, slab: Slab, connection: socket.socket) -> None:
        super().__init__(slab, connection)
        self._bound: dict[int, tuple[int, Any]] = {}  # item -> its slot, and the stream it belongs to
        self._ending: socket.socket | None = None
        self._same_process = rendezvous.peer(connection)[0] == os.getpid()

    def look(self, handle: Handle, claim: object) -> torch.Tensor:
        return self.slab.view(handle, keep=claim)

    def take(self) -> Received:
        self._exchange()  # a sender that died took the memory with it
        if not self._items:
            raise anyio.BrokenResourceError
        number, handles, message = self._items[0]
        slot, fence = _TAIL.unpack_from(message, len(message) - _TAIL.size)
        memory = self.slab.memory
        stream = memory.stream()
        try:
            memory.wait(fence, stream)
        except RuntimeError as error:  # the event went with the process that recorded it
            self._broken = True
            self._items.clear()
            raise anyio.BrokenResourceError from error
        self._bound[number] = slot, stream
        received = Received(self, number, handles)
        self._items.popleft()
        return received

    def release(self, number: int) -> None:
        slot, stream = self._bound.pop(number)
        if self._line.open:
            fence = self.slab.memory.record(2 * slot + 1, stream)
            self._line.send(release_message(number) + fence)

    def on_hang_up(self) -> None:
        """What was not taken is gone with its memory. What was taken may still be looked at where the sender lives."""
        if self._broken:
            self._items.clear()
        self._end()

    def leave(self) -> None:
        if self._line.open:
            self._line.send(CLOSED)
            self._end()
        self._items.clear()
        connection, self._ending = self._ending, None
        if connection is not None:
            if self.slab.opened:
                self.slab.memory.after(connection.close)  # hangs up when the last tensor is gone
            else:
                connection.close()

    def _end(self) -> None:
        if self._same_process:
            self._line.close()  # tensors keep the very memory that the sender has
        elif self._line.open:
            self._ending = self._line.detach()


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        torch_dtype(dtype_name(value.dtype))
        plain = value if value.flags.writeable and all(step >= 0 for step in value.strides) else value.copy()
        return torch.from_numpy(plain)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"tensor {name!r} is a {type(value).__name__}; expected a torch tensor or a numpy array")
    if value.device.type not in ("cpu", "cuda") or value.layout != torch.strided:
        raise TypeError(
            f"tensor {name!r} lies on {value.device} as {value.layout}; expected a dense one on CUDA or CPU"
        )
    return value.detach()


@asynccontextmanager
async def share_device_queue(
    name: str,
    capacity: int,
    size: int,
    *,
    device: str | torch.device = "cuda",
    linger_s: float = 30.0,
) -> AsyncIterator[TensorSender]:
    """The sending side: a slab `name` of `size` bytes on `device`, and its first send end.

    At the end every item is handed over first, and the receiver has to close and let go of its tensors, all within
    `linger_s`. Errors: as `share_queue`; PlatformError where the device has no IPC.
    """
    _sweep()
    await prepare(name, capacity)
    async with serve(Slab.create(name, size, device=device), _DeviceSender, capacity, linger_s) as sender:
        yield sender


async def attach_device_queue(name: str, *, timeout_s: float = 30.0) -> TensorReceiver:
    """The receive end of a queue that another process shares, or will share within `timeout_s`.

    Errors: as `attach_queue`; PlatformError where this process cannot open the slab's device.
    """
    return await attach(_DeviceReceiver, name, timeout_s)


def _sweep() -> None:
    """Give back the memory of ended queues whose receivers have let go since."""
    for entry in list(_kept):
        with contextlib.suppress(BlockingIOError):
            try:
                while entry[0].recv(LARGEST):
                    pass
            except ConnectionResetError:
                pass
            entry[0].close()
            _kept.remove(entry)
