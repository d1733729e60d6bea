"""The tensor queue between two processes: the contract of `queue.py`, with items in shared memory.

    process A: async with share_queue("batches", capacity=4, size=1 << 28) as sender:
                   await sender.put({"tokens": tokens, "logprobs": logprobs})          # one copy, into the arena
    process B: async with await attach_queue("batches") as receiver:
                   async for item in receiver:
                       with item:                                                     # no copy: views of the arena
                           train(item["tokens"])

An item is a mapping of names to numpy arrays or CPU tensors. Beside the contract of the queue in process:

* Credits: `capacity` counts items that were put and not yet released. An item is released at the end of its `with`, by
  `release()`, or when the last of its arrays is collected; before that its memory is not used again. `put` waits for a
  credit and for room in the arena, whichever is missing.
* The sender's process owns the arena. A receiver may come later: what was put before waits for it. One receiving process
  at a time; when it closes or dies, `put` raises `anyio.BrokenResourceError`.
* If the sending process dies before it closed, the receiver gets what was put, then `anyio.BrokenResourceError`: an end
  that nobody meant is not the end. (For records that must survive a death there is `record_ring`.)
* A put copies on the caller's thread: a few milliseconds for ten megabytes.

The same for CUDA tensors, through CUDA IPC: `device_queue`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from .queue import QueueStatistics, open_queue
from .tensor_receive import Received, TensorReceiver, attach_queue
from .tensor_send import TensorSender, share_queue

__all__ = [
    "ReceiveEnd",
    "Received",
    "SendEnd",
    "TensorReceiver",
    "TensorSender",
    "attach_queue",
    "open_queue",
    "share_queue",
]


class SendEnd(Protocol):
    """What every queue's send end does: `queue.QueueSender`, `TensorSender`."""

    def put_nowait(self, item: Any) -> None:
        """Put, or raise anyio.WouldBlock. Other errors: anyio.BrokenResourceError without a receiver,
        anyio.ClosedResourceError."""
        ...

    async def put(self, item: Any) -> None:
        """Wait for room, then put. Errors: as `put_nowait`, also while it waits. A `put` that is cancelled did not put."""
        ...

    def clone(self) -> SendEnd:
        """Another send end, to be closed by itself."""
        ...

    def close(self) -> None:
        """Closing the last clone lets the receiver end. Twice is fine."""
        ...

    def statistics(self) -> QueueStatistics:
        """A snapshot, as this end knows it."""
        ...


class ReceiveEnd(Protocol):
    """What every queue's receive end does: `queue.QueueReceiver`, `TensorReceiver`."""

    def get_nowait(self) -> Any:
        """The next item, or anyio.WouldBlock. Other errors: anyio.EndOfStream after the last item, anyio.BrokenResourceError
        where the sender died, anyio.ClosedResourceError."""
        ...

    async def get(self) -> Any:
        """Wait for an item. Errors: as `get_nowait`, also while it waits. A `get` that is cancelled did not take."""
        ...

    def clone(self) -> ReceiveEnd:
        """Another receive end, to be closed by itself; each item goes to one of them."""
        ...

    def close(self) -> None:
        """Closing the last clone ends the senders' puts. Twice is fine."""
        ...

    def statistics(self) -> QueueStatistics:
        """A snapshot, as this end knows it."""
        ...

    def __aiter__(self) -> AsyncIterator[Any]: ...
