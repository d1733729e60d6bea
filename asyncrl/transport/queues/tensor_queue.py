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

from .tensor_receive import Received, TensorReceiver, attach_queue
from .tensor_send import TensorSender, share_queue

__all__ = [
    "Received",
    "TensorReceiver",
    "TensorSender",
    "attach_queue",
    "share_queue",
]
