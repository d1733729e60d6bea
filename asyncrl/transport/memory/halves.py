"""Where the two halves of a weight board lie, and who computes over them: memory of the host, or a slab on a device.

A device does later what it is told now. A call that has to know that the device is done returns a `Passing`: it blocks any thread
until the device is, and is None where the device is done already, as always on a CPU. A lane launches and goes on; another thread
waits (`passed`).

    who                        knows that                           because
    the owner, before it       the half is whole                    it waits for its own stream: then no reader has to wait for
    names a version                                                 anything
    a reader, before it says   nothing on its device reads the      `leave` marks its stream behind the last closure that could,
    that it has moved          half of before                       and it waits for the mark, on a thread, while it decodes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...concurrency.offload import offload
from ...errors import OutOfMemory
from .handles import Handle
from .slab import Slab

# Bytes: a half begins where torch's own allocator would let a tensor begin.
_APART = 512

Passing = Callable[[], None] | None


def mark(device: torch.device) -> Passing:
    """The device has done what was launched up to now on this thread's current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
    event.record(torch.cuda.current_stream(device))
    waits: Callable[[], None] = event.synchronize
    return waits


def bring(source: Tensor, target: Tensor) -> Passing:
    """Copy to another device, beside what that one computes meanwhile: on a stream of its own there."""
    if target.device.type != "cuda":
        target.copy_(source)
        return None
    beside = torch.cuda.Stream(target.device)
    beside.wait_stream(torch.cuda.current_stream(target.device))  # what may still read the target
    with torch.cuda.stream(beside):
        target.copy_(source, non_blocking=True)
        return mark(target.device)


async def passed(passing: Passing) -> None:
    """Wait for a device, on a thread: lane and loop go on."""
    if passing is not None:
        await offload(passing, "device")


class HostHalves:
    """Two pieces of memory that this process has mapped."""

    device = torch.device("cpu")
    copies = False

    def __init__(self, halves: Sequence[npt.NDArray[np.uint8]], dtype: torch.dtype) -> None:
        self._halves, self._dtype = halves, dtype

    def tensor(self, index: int) -> Tensor:
        """A half as it lies there, flat."""
        return torch.from_numpy(self._halves[index]).view(self._dtype)

    def fetch(self, index: int) -> Passing:
        """See `Board.fetch`."""
        return None

    def leave(self) -> Passing:
        """See `Board.leave`."""
        return None

    def close(self) -> None:
        """The tensors keep the memory."""
        self._halves = ()


class SlabHalves:
    """One block of a slab, which others open once: on a GPU, or on the CPU for the proof of all that is not the device's.

    Who opens it reads it where it lies, or on another device (`copy_to`) a copy of its own, which it fetches once for each version:
    every decode step reads all weights, and they would go over the bus each time. Whoever opens a slab can write it.
    """

    def __init__(self, slab: Slab, handles: Sequence[Handle], copy_to: torch.device | None) -> None:
        """Takes the slab over."""
        self._slab, self._handles = slab, handles
        self._lying = [slab.view(handle) for handle in handles]
        self.device = self._lying[0].device
        self.copies = copy_to is not None
        self._read = [torch.empty_like(each, device=copy_to) for each in self._lying] if self.copies else self._lying

    @classmethod
    def create(cls, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Two empty halves on `device`, under a name that nobody else has. Errors: OutOfMemory, PlatformError."""
        apart = -(-elements * dtype.itemsize // _APART) * _APART
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the slab is not of torch's memory, and can have none that torch holds back
        try:
            slab = Slab.create(name, 2 * apart, device=device, blocks=1)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"the weight board needs {2 * apart:,} bytes on {device} for two versions of the weights: {error}; use a smaller "
                "model or model.dtype=bfloat16, or generation.placement=shared"
            ) from error
        lease = slab.lease(2 * apart)
        handles = [lease.handle(dtype, (elements,), offset=index * apart) for index in (0, 1)]
        lease.detach()
        return cls(slab, handles, None)

    @classmethod
    def attach(cls, described: Mapping[str, Any], copy_to: torch.device | None) -> Self:
        """Those of another process. Errors: as `Slab.attach`; PlatformError where this process cannot open the memory."""
        slab = Slab.attach(described["name"])
        try:
            return cls(slab, [Handle.decode(bytes.fromhex(each)) for each in described["handles"]], copy_to)
        except BaseException:
            slab.close()
            raise

    @property
    def described(self) -> dict[str, Any]:
        """For `attach`, as JSON takes it."""
        return {"name": self._slab.segment.name, "handles": [handle.encode().hex() for handle in self._handles]}

    def tensor(self, index: int) -> Tensor:
        """A half as this process reads it, flat."""
        return self._read[index]

    def fetch(self, index: int) -> Passing:
        """See `Board.fetch`."""
        return bring(self._lying[index], self._read[index]) if self.copies else None

    def leave(self) -> Passing:
        """See `Board.leave`."""
        return mark(self._read[0].device)

    def close(self) -> None:
        """The tensors keep the memory."""
        self._lying, self._read = [], []
        self._slab.close()
