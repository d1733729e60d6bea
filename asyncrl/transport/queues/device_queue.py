"""The tensor queue on a device: the contract of `queue.py`, with items in a slab (CUDA IPC between processes).

    process A: async with share_device_queue("batches", capacity=4, size=1 << 30) as sender:
                   await sender.put({"tokens": tokens, "logprobs": logprobs})       # one copy, on the device
    process B: async with await attach_device_queue("batches") as receiver:
                   async for item in receiver:
                       with item:                                                  # no copy: views of the slab
                           train(item["tokens"])

An item is a mapping of names to CUDA or CPU tensors or numpy arrays. Received tensors are on the slab's device. Rules
beyond those of `tensor_queue.py`:

* No call waits for the device, apart from a `put` of CPU tensors, which waits for its copies. `put` launches copies and
  records an event. `get` makes the receiver's stream wait for that event. A release records another event, and later
  writes into the same memory wait for the release's event.
* Streams: `put` copies after the work of the stream that is current at the call, and that stream waits for the copies.
  So a change of a tensor after `put` is safe. An item belongs to the stream that is current at `get`. If other streams
  read the item, join these streams before the release (torch's own rule for freeing a tensor).
* The memory belongs to the sender and ends with its process. So a sender that closes waits, at most `linger_s`, until
  the receiver has closed and its last tensor is gone. If that takes longer, the sender closes with a TransportError,
  and its process keeps the memory. If the process dies, `get` raises `anyio.BrokenResourceError`, and the receiver must
  not use its items.
* If sender and receiver are in one process, the receiver uses the sender's memory directly.
* `device="cpu"` gives the same queue in shared memory.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import torch

from .. import rendezvous
from ..memory.device_memory import FENCE_BYTES, DeviceMemory
from ..memory.handles import Handle, dtype_name
from ..memory.slab import Slab, torch_dtype
from .queue import wait_for_wake
from .tensor_queue import Received, TensorReceiver, TensorSender, attach_receiver, prepare_name, run_sender
from .tensor_wire import ALIGNMENT, CLOSED, DEVICE, MAX_MESSAGE_BYTES, Piece, item_message, number_of, release_message

# A slot, and a fence: the bytes by which the receiver waits for the sender's event (memory/device_memory.py).
_TAIL = struct.Struct(f"<I{FENCE_BYTES}s")  # end of an item message
# Memory of closed queues that receivers in other processes still map, and the connection to each receiver. The receiver closes
# the connection when it has unmapped the memory: then this process may free the memory.
_mapped_slabs: list[tuple[socket.socket, DeviceMemory]] = []


class _DeviceSender(TensorSender):
    kind = DEVICE

    def __init__(self, slab: Slab, capacity: int) -> None:
        super().__init__(slab, capacity)
        self._memory = slab.memory
        # Number of an outstanding item -> its slot. Fence 2 * slot follows the writes, fence 2 * slot + 1 the reads.
        self._slots: dict[int, int] = {}
        self._read_fences: list[bytes] = []  # of released items; later writes must wait for these fences

    def lay_out(self, item: Mapping[str, Any]) -> tuple[dict[str, Piece], int]:
        """As `TensorSender.lay_out`. Errors: TypeError for other values and devices; ValueError for unknown dtypes."""
        pieces: dict[str, Piece] = {}
        size = 0
        for name, value in item.items():
            values = _as_tensor(name, value)
            pieces[name] = Piece(values, dtype_name(values.dtype), size)
            size += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
        return pieces, max(size, ALIGNMENT)

    def fill(self, start: int, pieces: Mapping[str, Any]) -> bytes:
        handles = {
            name: self.slab.handle(start + piece.offset, piece.dtype, tuple(piece.values.shape))
            for name, piece in pieces.items()
        }
        slot = min(set(range(self.capacity)).difference(self._slots.values()))
        # Before the launches: an item with too many tensors is an error without side effects.
        message = item_message(self.puts, handles, limit=MAX_MESSAGE_BYTES - _TAIL.size)
        with self._memory.writing() as stream:
            self._wait_for_readers(stream)
            for name, piece in pieces.items():
                target = self.slab.view(handles[name])
                target.copy_(piece.values, non_blocking=target.is_cuda and piece.values.is_cuda)
            fence = self._memory.record(2 * slot, stream)
        self._slots[self.puts] = slot
        return message + _TAIL.pack(slot, fence)

    def _wait_for_readers(self, stream: Any) -> None:
        while self._read_fences:
            try:
                self._memory.wait(self._read_fences[-1], stream)
            except RuntimeError as error:  # the event ended with its process
                self.receiver_gone = True
                raise anyio.BrokenResourceError from error
            self._read_fences.pop()

    def on_message(self, message: bytes) -> None:
        if message == CLOSED:
            self.receiver_gone = True
            return
        if number_of(message) in self._outstanding:
            self._read_fences.append(message[-FENCE_BYTES:])
            del self._slots[number_of(message)]
        super().on_message(message)

    async def wait_unmapped(self) -> None:
        while self._mapped_elsewhere:
            await wait_for_wake(self._waiters)

    @property
    def _mapped_elsewhere(self) -> bool:
        return self._socket is not None and self._socket.open and not self.same_process

    def disconnect(self) -> None:
        if self._mapped_elsewhere:
            assert self._socket is not None
            connection = self._socket.detach()
            connection.shutdown(socket.SHUT_WR)  # the receiver gets end-of-file, but can still send
            _mapped_slabs.append((connection, self._memory))
        del self._memory
        super().disconnect()


class _DeviceReceiver(TensorReceiver):
    kind = DEVICE

    def __init__(self, slab: Slab, connection: socket.socket) -> None:
        super().__init__(slab, connection)
        # Number of an item -> its slot, and the stream that was current at `get`.
        self._slots_and_streams: dict[int, tuple[int, Any]] = {}
        self._detached_socket: socket.socket | None = None  # open until the memory is unmapped
        self._same_process = rendezvous.peer(connection)[0] == os.getpid()

    def open_tensor(self, handle: Handle, item_life: object) -> torch.Tensor:
        return self.slab.view(handle, keep_alive=item_life)

    def next_item(self) -> Received:
        self._process_messages()  # after the death of the sender its memory must not be used
        if not self._items:
            raise anyio.BrokenResourceError
        number, handles, message = self._items[0]
        slot, fence = _TAIL.unpack_from(message, len(message) - _TAIL.size)
        memory = self.slab.memory
        stream = memory.stream()
        try:
            memory.wait(fence, stream)
        except RuntimeError as error:  # the event ended with its process
            self._broken = True
            self._items.clear()
            raise anyio.BrokenResourceError from error
        self._slots_and_streams[number] = slot, stream
        received = Received(self, number, handles)
        self._items.popleft()
        return received

    def release(self, number: int) -> None:
        slot, stream = self._slots_and_streams.pop(number)
        if self._socket.open:
            fence = self.slab.memory.record(2 * slot + 1, stream)
            self._socket.send(release_message(number) + fence)

    def on_sender_end(self) -> None:
        """After the sender's death, drop the items that `get` has not returned. A live sender keeps their memory."""
        if self._broken:
            self._items.clear()
        self._close_or_detach()

    def disconnect(self) -> None:
        if self._socket.open:
            self._socket.send(CLOSED)
            self._close_or_detach()
        self._items.clear()
        connection, self._detached_socket = self._detached_socket, None
        if connection is not None:
            if self.slab.opened:
                self.slab.memory.on_unmapped(connection.close)
            else:
                connection.close()

    def _close_or_detach(self) -> None:
        if self._same_process:
            self._socket.close()  # tensors refer to the sender's own memory object
        elif self._socket.open:
            self._detached_socket = self._socket.detach()


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        torch_dtype(dtype_name(value.dtype))  # raises for dtypes that torch lacks
        # `torch.from_numpy` takes no negative strides, and warns about read-only arrays.
        usable = value.flags.writeable and all(step >= 0 for step in value.strides)
        return torch.from_numpy(value if usable else value.copy())
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"tensor {name!r} is a {type(value).__name__}; expected a torch tensor or a numpy array")
    if value.device.type not in ("cpu", "cuda") or value.layout != torch.strided:
        raise TypeError(
            f"tensor {name!r} lies on {value.device} with layout {value.layout}; expected a dense tensor on CUDA or CPU"
        )
    return value.detach()


@asynccontextmanager
async def share_device_queue(
    name: str, capacity: int, size: int, *, device: str | torch.device = "cuda", linger_s: float = 30.0
) -> AsyncIterator[TensorSender]:
    """A context with the send end of a new queue: a slab `name` of `size` bytes on `device`.

    The end of the context waits at most `linger_s` seconds until a receiver has got all items, closed its end, and
    dropped its tensors. Errors: as `share_queue`; PlatformError for a device without IPC.
    """
    _free_unmapped_slabs()
    await prepare_name(name, capacity)
    async with run_sender(Slab.create(name, size, device=device), _DeviceSender, capacity, linger_s) as sender:
        yield sender


async def attach_device_queue(name: str, *, timeout_s: float = 30.0) -> TensorReceiver:
    """The receive end of the queue `name` of another process. Waits at most `timeout_s` seconds for the queue.

    Errors: as `attach_queue`; PlatformError if this process cannot open the slab's device.
    """
    return await attach_receiver(_DeviceReceiver, name, timeout_s)


def _free_unmapped_slabs() -> None:
    """Free the slabs of closed queues whose receivers have unmapped the memory since."""
    for connection, memory in list(_mapped_slabs):
        try:
            while connection.recv(MAX_MESSAGE_BYTES):
                pass
        except BlockingIOError:
            continue  # open, so the receiver still maps the memory
        except ConnectionResetError:
            pass  # the receiver's process died
        connection.close()
        _mapped_slabs.remove((connection, memory))
