"""Where the two halves of a weight board lie, and who computes over them: memory of the host, or a slab on a device.

A device does later what it is told now. Whoever has to know that it was done gets a `Passing`: a call that blocks any thread until
the device has come so far, or None where it has, as always on a CPU. A lane tells the device and goes on; another thread waits.

    who                        knows that                           because
    the owner, before it       the half is whole                    it waits for its own stream, as it takes the checksums off the
    names a version                                                 device: then no reader has to wait for anything
    a reader, before it says   nothing on its device reads the      `leave` marks its stream behind the last that could, and it
    that it has moved          half of before                       waits for the mark, on a thread, while it goes on to decode
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ...errors import OutOfMemory
from . import checksum
from .checksum import Bytes, Sums
from .handles import Handle
from .slab import Slab

BUCKET_BYTES = 1 << 18  # measured (tools/measure_board.py): a check stays below 0.3 ms, without native code too
_AT_ONCE = 64  # buckets that a device sums at a time: six times their 16 MiB is what that takes beside them
_APART = 512  # bytes: a half begins where torch's own allocator would let a tensor begin

Passing = Callable[[], None] | None


class Looked(NamedTuple):
    """So many buckets were compared with their checksums. `wrong`, after `passing`: the first that has another one, or None."""

    buckets: int
    passing: Passing
    wrong: Callable[[], int | None]


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


def device_sums(data: Tensor, size: int) -> Tensor:
    """As `checksum.sums`, computed where `data` lies: int64 [buckets, 2], the bits of numbers modulo 2^64. `data`: uint8, flat."""
    words, width = data.view(torch.int32), size // 4
    whole = words.numel() // width * width
    rows = words[:whole].view(-1, width)
    parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    if whole < words.numel():
        parts.append(words[whole:].view(1, -1))
    return torch.cat([_sums_of_rows(part) for part in parts])


def _sums_of_rows(words: Tensor) -> Tensor:
    values = words.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    places = torch.arange(1, words.shape[1] + 1, device=words.device)
    return torch.stack((values.sum(1), values.mul_(places).sum(1)), 1)


class HostHalves:
    """Two pieces of memory that this process has mapped."""

    device = torch.device("cpu")
    copies = False

    def __init__(self, halves: Sequence[Bytes], dtype: torch.dtype) -> None:
        self._halves, self._dtype = halves, dtype

    def tensor(self, index: int) -> Tensor:
        """A half as it lies there, flat."""
        return torch.from_numpy(self._halves[index]).view(self._dtype)

    def copy(self, index: int, source: Tensor, threads: int) -> Sums:
        """Put `source` there, in one pass with its checksums. Nobody on a device or in another process sees a part of it alone
        who sees a later store."""
        return checksum.copy(source.view(torch.uint8).numpy(), self._halves[index], BUCKET_BYTES, threads)

    def cast(self, index: int, source: Tensor, threads: int) -> Callable[[], Sums]:
        """See `Board.cast`."""
        if (source.dtype, self._dtype) == (torch.float32, torch.bfloat16) and checksum.build() != "numpy":
            sums = checksum.narrow(source.numpy(), self._halves[index], BUCKET_BYTES, threads)
        else:
            self.tensor(index).copy_(source)
            sums = checksum.sums(self._halves[index], BUCKET_BYTES, threads)
        return lambda: sums

    def inspect(self, index: int, first: int, most: int, expected: Sums, seconds: float) -> Looked:
        """See `Board.inspect`."""
        until, data = time.monotonic() + seconds, self._halves[index]
        for count in range(1, most + 1):
            bucket = (first + count - 1) % len(expected)
            one, other = expected[bucket]
            start = bucket * BUCKET_BYTES
            if checksum.sums_of(data[start : start + BUCKET_BYTES]) != (int(one), int(other)):
                return Looked(count, None, partial(_known, bucket))
            if time.monotonic() >= until:
                break
        return Looked(count, None, partial(_known, None))

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
    every decode step reads all weights, and they would go over the bus each time. Whoever opens a slab can write it; that nobody
    does, only the checksums say.
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

    def copy(self, index: int, source: Tensor, threads: int) -> Sums:
        """As `HostHalves.copy`: when this returns the half is whole, for whoever looks at it from another process."""
        self._lying[index].copy_(source)
        return _on_the_host(device_sums(source.view(torch.uint8), BUCKET_BYTES))

    def cast(self, index: int, source: Tensor, threads: int) -> Callable[[], Sums]:
        """See `Board.cast`; who asks for the checksums waits for the device."""
        self._lying[index].copy_(source)
        sums = device_sums(self._lying[index].view(torch.uint8), BUCKET_BYTES)
        return lambda: _on_the_host(sums)

    def inspect(self, index: int, first: int, most: int, expected: Sums, seconds: float) -> Looked:
        """See `Board.inspect`; so many that telling the device takes about a tenth of a millisecond."""
        count = min(most, len(expected) - first, _AT_ONCE)
        part = self._read[index].view(torch.uint8)[first * BUCKET_BYTES : (first + count) * BUCKET_BYTES]
        # To pinned memory, which is not waited for; what was written is never sent to the device, which would be.
        found = device_sums(part, BUCKET_BYTES).to("cpu", non_blocking=True)
        written = expected[first : first + count].copy()
        return Looked(count, mark(part.device), partial(_first_other, found, written, first))

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


def _known(wrong: int | None) -> int | None:
    return wrong


def _first_other(found: Tensor, written: Sums, first: int) -> int | None:
    others = (found.numpy().view(np.uint64) != written).any(1).nonzero()[0]
    return first + int(others[0]) if len(others) else None


def _on_the_host(found: Tensor) -> Sums:
    # Waits for the stream on which they are computed, and with that for whatever was launched on it before.
    sums: Sums = found.cpu().numpy().view(np.uint64)
    return sums
