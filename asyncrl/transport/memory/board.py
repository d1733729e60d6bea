"""The weight board: two halves of memory, each a whole flat buffer of weights, that one process writes and others read.

    with Board.create(elements, dtype, layout) as board:         a child that was started with `pass_fds=[board.fd]`:
        board.write(0, version, weights)                             board = Board.attach(description, fd, layout)
        start a worker with board.description, board.fd              modules read board.half(0), where it lies
        board.write(1, version + 1, weights)                         board.version(0)

Guarantees
* A memfd: it has no name anywhere, so whoever dies, in whatever way, nothing is left. Its size is sealed.
* Its pages are there from the beginning: a full machine is an error with figures here, not a SIGBUS later.
* Who attaches cannot write: the mapping is read-only, and so is every other one that could be made of the descriptor. A write
  into a tensor of `half` ends that process (SIGSEGV) and changes nothing.
* A half says which version it holds; while it is written, and before, it says none. That word is cleared first and stored last,
  and x86-64 keeps the order (`words`).

On a GPU the halves are one slab (`SlabHalves`), exported once and opened once by each reader; versions lie in the memfd all the
same. What is different there: readers could write, and the slab's table has a name until its owner or the next run removes it
(`generation/worker/names.py`). Who reads on another device than the slab's (`copy_to`) has a copy of each half and fetches it once
for each version: every decode step reads all weights, which would go over the bus each time.

A device does later what it is told now. A call that has to know that the device is done returns a `Passing`: it blocks any thread
until the device is, and is None where the device is done already, as always on a CPU. A lane launches and goes on; another thread
waits (`passed`).

    who                        knows that                           because
    the owner, before it       the half is whole                    it waits for its own stream: then no reader has to wait for
    names a version                                                 anything
    a reader, before it says   nothing on its device reads the      `leave` marks its stream behind the last closure that could,
    that it has moved          half of before                       and it waits for the mark, on a thread, while it decodes

The board does not know who reads. Whoever writes has to know that nobody reads that half any more (weights/sync.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ...concurrency.offload import offload
from ...errors import LifecycleError, OutOfMemory, TransportError
from .handles import Handle
from .segment import check_platform
from .slab import Slab
from .words import Words, fault

_MAGIC = b"asyncrlB"
_HEAD = struct.Struct("<8s16s")  # magic, and 16 random bytes: which board it is
_VERSIONS_AT = 64
# Bytes: the size of a half is a multiple, so that each row of a copy is aligned.
_STEP = 64
_PAGE = 4096
# Bytes: a half of a slab begins where torch's own allocator would let a tensor begin.
_APART = 512
# F_SEAL_FUTURE_WRITE, Linux 5.1: no other writable mapping but the one that there is.
_SEAL_FUTURE_WRITE = 0x10

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


class SlabHalves:
    """Two halves in one block of a slab, which others open once: on a GPU, or in tests on the CPU."""

    def __init__(self, slab: Slab, handles: Sequence[Handle]) -> None:
        """Takes the slab over."""
        self._slab, self._handles = slab, handles
        self.tensors = [slab.view(handle) for handle in handles]

    @classmethod
    def create(cls, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Two empty halves on `device`, under a name that nobody else has. Errors: OutOfMemory, PlatformError."""
        apart = -(-elements * dtype.itemsize // _APART) * _APART
        if device.type == "cuda":
            # The slab is not of torch's memory, and can have none that torch holds back.
            torch.cuda.empty_cache()
        try:
            slab = Slab.create(name, 2 * apart, device=device)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"the weight board needs {2 * apart:,} bytes on {device} for two versions of the weights: {error}; use a smaller "
                "model or model.dtype=bfloat16, or generation.placement=shared"
            ) from error
        start = slab.allocate(2 * apart)
        handles = [slab.handle(start + index * apart, dtype, (elements,)) for index in (0, 1)]
        return cls(slab, handles)

    @classmethod
    def attach(cls, described: Mapping[str, Any]) -> Self:
        """Those of another process. Errors: as `Slab.attach`; PlatformError where this process cannot open the memory."""
        slab = Slab.attach(described["name"])
        try:
            return cls(slab, [Handle.decode(bytes.fromhex(each)) for each in described["handles"]])
        except BaseException:
            slab.close()
            raise

    @property
    def described(self) -> dict[str, Any]:
        """For `attach`, as JSON takes it."""
        return {"name": self._slab.segment.name, "handles": [handle.encode().hex() for handle in self._handles]}

    def close(self) -> None:
        """Tensors that are still held keep the memory."""
        self.tensors = []
        self._slab.close()


class _Base:
    """What numpy keeps as the base of an array: the mapping lives as long as the array does.

    It says "writable" also where that is not so: torch has no read-only tensors, and warns of arrays that are.
    """

    def __init__(self, mapping: mmap.mmap, start: int, size: int) -> None:
        self._keep = memoryview(mapping)  # an export: the map cannot be closed under us
        base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (base + start, False)}


class Board:
    """See the module. Made by `create` (the owner) or `attach` (a reader); neither runs where an event loop does."""

    def __init__(
        self,
        fd: int,
        elements: int,
        dtype: torch.dtype,
        layout: str,
        token: bytes,
        owner: bool,
        slab: SlabHalves | None,
        copy_to: torch.device | None = None,
    ) -> None:
        """Takes `fd` and `slab` over. `slab`: where the halves lie; None: behind `fd`, too."""
        self.fd = fd
        self.elements, self.dtype, self.layout = elements, dtype, layout
        self.owner = owner
        self.nbytes = elements * dtype.itemsize  # of a half
        self._token = token
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        total = _total_of(self.nbytes, slab is not None)
        self._map = mmap.mmap(fd, total, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        self._versions = Words(memoryview(self._map), _VERSIONS_AT, 2, "board.version")  # version + 1; 0: none
        self._slab = slab
        self._lying = self._behind() if slab is None else slab.tensors
        self.copies = copy_to is not None
        # What this process reads.
        self._halves = [torch.empty_like(each, device=copy_to) for each in self._lying] if self.copies else self._lying

    # -- the two ways in

    @classmethod
    def create(cls, elements: int, dtype: torch.dtype, layout: str, slab: SlabHalves | None = None) -> Self:
        """Two empty halves of `elements` numbers. `layout`: what says where each parameter lies (`FlatWeights.layout_digest`).
        `slab`: where they lie, of the same size, the board's own from here on; None: in a memory file of its own.

        Errors: OutOfMemory with figures, PlatformError.
        """
        check_platform()
        if elements < 1 or elements * dtype.itemsize % _STEP:
            raise ValueError(f"a weight board of {elements} x {dtype}: its bytes must be a multiple of {_STEP}")
        token = os.urandom(16)
        fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(fd, _total_of(elements * dtype.itemsize, slab is not None))
            os.pwrite(fd, _HEAD.pack(_MAGIC, token), 0)
            board = cls(fd, elements, dtype, layout, token, True, slab)
            _seal(fd)
        except BaseException:
            os.close(fd)
            if slab is not None:
                slab.close()
            raise
        return board

    @classmethod
    def attach(cls, description: Mapping[str, Any], fd: int, layout: str, copy_to: torch.device | None = None) -> Self:
        """The board behind an inherited descriptor, which is closed with it. `layout`: that of this process's own parameters.
        `copy_to`: another device than the board's, on which this process reads copies (`fetch`); None: it reads what lies there.

        Errors: TransportError where the board is for another layout, or the descriptor is no such board; PlatformError where its
        memory cannot be opened here.
        """
        slab: SlabHalves | None = None
        try:
            dtype: torch.dtype = getattr(torch, description["dtype"])
            elements, token = int(description["elements"]), bytes.fromhex(description["token"])
            if description["layout"] != layout:
                raise TransportError(
                    f"the weight board holds {elements:,} x {description['dtype']} in layout {description['layout']}, but the "
                    f"model of this process has layout {layout}: give both the same model, dtype and version of asyncrl"
                )
            described = description.get("slab")
            size, head = os.fstat(fd).st_size, os.pread(fd, _HEAD.size, 0)
            expected = _total_of(elements * dtype.itemsize, described is not None)
            if (size, head) != (expected, _HEAD.pack(_MAGIC, token)):
                raise TransportError(
                    f"descriptor {fd} is not the weight board that was described: it has {size:,} bytes and begins with "
                    f"{head[:8]!r}, expected are {expected:,} bytes; pass the board's own `fd` with its `description`"
                )
            slab = None if described is None else SlabHalves.attach(described)
            return cls(fd, elements, dtype, layout, token, False, slab, copy_to)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            if slab is not None:
                slab.close()
            raise

    @property
    def description(self) -> dict[str, Any]:
        """What a reader needs beside the descriptor, as JSON takes it."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "elements": self.elements,
            "layout": self.layout,
            "token": self._token.hex(),
            "slab": None if self._slab is None else self._slab.described,
        }

    # -- the owner's side

    def write(self, index: int, version: int, source: Tensor | None = None) -> None:
        """The half, which nobody reads, is `version` from now on: a copy of `source`, a flat buffer; without one, what the owner
        has put into `half(index)` by itself since `clear`. Waits for the device. Errors: ValueError for another form."""
        self._require_owner()
        if version < 0:
            raise ValueError(f"version {version} must not be negative")
        if source is not None:
            self._require_fit(source)
        self.clear(index)
        if source is not None:
            self._lying[index].copy_(source.detach())
        done = mark(self._lying[index].device)
        if done is not None:
            done()
        fault("board.written")
        self._versions.store(index, version + 1)

    def clear(self, index: int) -> None:
        """What the half holds is not to be used: it says that it holds no version. From then on the owner may write into it."""
        self._require_owner()
        self._versions.store(index, 0)

    # -- everybody's side

    def half(self, index: int) -> Tensor:
        """A half as this process reads it, [elements]. It keeps the memory mapped, also after `close`."""
        self._check_open()
        return self._halves[index]

    def fetch(self, index: int) -> Passing:
        """Where this process reads copies: begin to copy a half, which nobody here reads. After the passing it is there; the owner
        does not write into it meanwhile."""
        self._check_open()
        return bring(self._lying[index], self._halves[index]) if self.copies else None

    def leave(self) -> Passing:
        """Called where nothing that is launched later reads the half of before: after the passing, nothing reads it any more."""
        self._check_open()
        return mark(self._halves[0].device)

    def version(self, index: int) -> int | None:
        """The version that a half holds; None where it holds none, or is being written."""
        self._check_open()
        stored = self._versions[index]
        return stored - 1 if stored else None

    def close(self) -> None:
        """Let go of it; where tensors of a half are still held, the memory stays until they are gone. Twice is fine."""
        if self.fd < 0:
            return
        self._versions.release()
        self._lying, self._halves = [], []
        if self._slab is not None:
            self._slab.close()
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map  # tensors keep it
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _behind(self) -> list[Tensor]:
        bases = [_Base(self._map, start, self.nbytes) for start in (_PAGE, _PAGE + _pages(self.nbytes))]
        return [torch.from_numpy(np.asarray(base)).view(self.dtype) for base in bases]

    def _check_open(self) -> None:
        if self.fd < 0:
            raise LifecycleError("the weight board is closed")

    def _require_fit(self, source: Tensor) -> None:
        where = self._lying[0].device
        if source.shape != (self.elements,) or source.dtype != self.dtype or source.device != where:
            raise ValueError(
                f"the weight board holds {self.elements} x {self.dtype} on {where}; found {tuple(source.shape)} x "
                f"{source.dtype} on {source.device}"
            )
        if not source.is_contiguous():
            raise ValueError("the weights for the board must be contiguous")

    def _require_owner(self) -> None:
        self._check_open()
        if not self.owner:
            raise LifecycleError("only the process that created a weight board changes it")


def _pages(size: int) -> int:
    return (size + _PAGE - 1) & -_PAGE


def _total_of(nbytes: int, elsewhere: bool) -> int:
    """`elsewhere`: the halves are not behind the descriptor."""
    return _PAGE + (0 if elsewhere else 2 * _pages(nbytes))


def _allocate(fd: int, total: int) -> None:
    """Pages now. A machine without room for them would end some process, perhaps another: so it is asked first."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    why: OSError | None = None
    if total <= free:
        try:
            os.posix_fallocate(fd, 0, total)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            why = error
    raise OutOfMemory(
        f"the weight board needs {total:,} bytes of memory for two versions of the weights, and {free:,} are free"
        f"{f' ({why.strerror})' if why else ''}; use a smaller model or model.dtype=bfloat16, or generation.placement=shared"
    ) from why


def _seal(fd: int) -> None:
    """Nobody changes the size, and nobody else maps it to write."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with contextlib.suppress(OSError):  # an older kernel: readers map it read-only all the same
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
