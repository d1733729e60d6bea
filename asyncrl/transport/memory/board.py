"""The weight board: two halves of memory. One process (the owner) writes the halves, and other processes (the readers) read them.

Each half is a flat buffer that holds all weights of one version.

    with Board.create(elements, dtype, layout) as board:         a child that was started with `pass_fds=[board.fd]`:
        board.write(0, version, weights)                             board = Board.attach(description, fd, layout)
        start a worker with board.description, board.fd              modules read board.half(0) in place
        board.write(1, version + 1, weights)                         board.version(0)

Guarantees
* The board is a memfd, which has no file name, so a process that dies leaves no file behind. The size of the memfd is sealed.
* All pages are allocated at creation. So a lack of memory raises an error with figures, and no SIGBUS comes later.
* A reader's mapping of the memfd is read-only: there a write into a half is a SIGSEGV, and `write` raises a TypeError. From
  Linux 5.1 on, a seal forbids further writable mappings.
* The memfd has a version word for each half. `write` clears the word before the copy and stores the version after the
  copy, and x86-64 keeps this order (`words.py`).

On a GPU the halves are in one slab (`weight_slab`), which each reader opens once. The version words stay in the memfd.
The mapping of a slab is writable for readers, too. The slab has a name in /dev/shm, which the owner or the next run removes
(`generation/worker/names.py`). A reader on another device than the halves (`copy_to`) has copies of them, and fetches
each version once (`fetch`). Without copies every decode step would read all weights over the bus.

A GPU runs work later than the call that launches the work. So `fetch` and `reads_ended` return a `DeviceWait`: a function
that blocks the calling thread until earlier work of the device has ended. On a CPU both return None. `wait_for_device` calls the
function on another thread, so that the device's own thread (the lane) does not block. Three waits are necessary:
* `write` waits for the owner's stream before it stores the version. So a reader that sees the version may read at once.
* A reader with copies waits for `fetch` before it reads the copy.
* A reader waits for `reads_ended` before it reports that it has moved to the other half.

The board does not count its readers. The caller of `write` must ensure that no process reads the half (weights/sync.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...concurrency.offload import offload
from ...errors import OutOfMemory, TransportError
from .segment import allocate, check_platform
from .slab import Slab, bytes_tensor
from .words import Words, fault

_MAGIC = b"asyncrlB"
_HEAD = struct.Struct("<8s16s")  # magic, 16 random bytes that identify the board
_VERSIONS_AT = 64
# Bytes: the size of a half is a multiple of this, because `Layout` pads each parameter to whole cache lines.
_HALF_MULTIPLE = 64
_PAGE = 4096
# Bytes: the alignment of a half in a slab. torch's CUDA allocator aligns tensors equally.
_SLAB_ALIGNMENT = 512
# F_SEAL_FUTURE_WRITE, Linux 5.1: forbids new writable mappings. The owner's mapping stays writable.
_SEAL_FUTURE_WRITE = 0x10

DeviceWait = Callable[[], None] | None


def record_event(device: torch.device) -> DeviceWait:
    """Returns a wait for the work launched up to now on this thread's current stream of `device`."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps and does not spin
    event.record(torch.cuda.current_stream(device))
    synchronize: Callable[[], None] = event.synchronize
    return synchronize


def copy_beside(source: Tensor, target: Tensor) -> DeviceWait:
    """Copy on a new stream: after the work launched earlier on the current stream, in parallel with later work. CPU: at once."""
    if target.device.type != "cuda":
        target.copy_(source)
        return None
    stream = torch.cuda.Stream(target.device)
    stream.wait_stream(torch.cuda.current_stream(target.device))  # earlier launches may still read the target
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return record_event(target.device)


async def wait_for_device(wait: DeviceWait) -> None:
    """Wait for a device on another thread, so that neither the lane nor the event loop blocks."""
    if wait is not None:
        await offload(wait, "device")


def weight_slab(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Slab:
    """A new slab for the two halves of a board, on a GPU (in tests also on the CPU). Errors: OutOfMemory, PlatformError."""
    size = 2 * _slab_half(elements, dtype)
    if device.type == "cuda":
        # The slab's memory does not come from torch's allocator, which must give its cached blocks back first.
        torch.cuda.empty_cache()
    try:
        return Slab.create(name, size, device=device)
    except OutOfMemory as error:
        raise OutOfMemory(
            f"the weight board needs {size:,} bytes on {device} for two versions of the weights: {error}; use a "
            "smaller model or model.dtype=bfloat16, or generation.placement=shared"
        ) from error


class Board:
    """One process's end of a board; see the module. `create` makes the owner's end, `attach` a reader's. Both block the thread."""

    def __init__(
        self,
        fd: int,
        elements: int,
        dtype: torch.dtype,
        layout: str,
        token: bytes,
        owner: bool,
        slab: Slab | None,
        copy_to: torch.device | None = None,
        one_copy: bool = False,
    ) -> None:
        """`fd` and `slab` belong to the board from now on. Without a slab the halves are in the memfd `fd`. Rest: see `attach`."""
        self.fd = fd
        self.elements, self.dtype, self.layout = elements, dtype, layout
        self.nbytes = elements * dtype.itemsize  # of one half
        self._token = token
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        total = _memfd_bytes(self.nbytes, slab is not None)
        self._map = mmap.mmap(fd, total, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        self._versions = Words(memoryview(self._map), _VERSIONS_AT, 2, "board.version")  # version + 1; 0: none
        self._slab = slab
        if slab is None:
            memory, first, step = bytes_tensor(memoryview(self._map)), _PAGE, _pages(self.nbytes)
        else:
            memory, first, step = slab.tensor(), 0, _slab_half(elements, dtype)
        self._stored = [memory[start : start + self.nbytes].view(dtype) for start in (first, first + step)]
        self.reads_copies = copy_to is not None
        # The tensors that this process reads: the halves themselves, or its copies.
        self._halves = self._stored
        if copy_to:
            copies = self._stored[:1] if one_copy else self._stored
            self._halves = [torch.empty_like(half, device=copy_to) for half in copies] * (2 // len(copies))

    # -- the two constructors

    @classmethod
    def create(cls, elements: int, dtype: torch.dtype, layout: str, slab: Slab | None = None) -> Self:
        """A new board with two empty halves of `elements` numbers. `layout`: `FlatWeights.layout_digest` of the parameters.
        `slab`: holds the halves, and belongs to the board from now on; None: the halves are in the memfd.
        Errors: OutOfMemory with figures, PlatformError, ValueError."""
        with contextlib.ExitStack() as undo:
            if slab is not None:
                undo.callback(slab.close)
            check_platform()
            if elements < 1 or elements * dtype.itemsize % _HALF_MULTIPLE:
                raise ValueError(
                    f"a weight board of {elements} x {dtype}: a half must be a multiple of {_HALF_MULTIPLE} B, above 0"
                )
            token = os.urandom(16)
            fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            _allocate_pages(fd, _memfd_bytes(elements * dtype.itemsize, slab is not None))
            os.pwrite(fd, _HEAD.pack(_MAGIC, token), 0)
            board = cls(fd, elements, dtype, layout, token, True, slab)
            _seal(fd)
            undo.pop_all()
        return board

    @classmethod
    def attach(
        cls,
        description: Mapping[str, Any],
        fd: int,
        layout: str,
        copy_to: torch.device | None = None,
        one_copy: bool = False,
    ) -> Self:
        """Open the board of another process by the inherited descriptor `fd`, which belongs to the board from now on.

        `layout`: the digest of this process's own parameters. `copy_to`: this process reads copies on this device
        (`fetch`); None: this process reads the memory of the board itself. `one_copy`: both halves are copied to the same
        memory, for a reader that never reads a half after it has fetched the other half.
        Errors: TransportError if the board has another layout, or `fd` is another file; PlatformError if this process
        cannot open the memory.
        """
        slab: Slab | None = None
        try:
            dtype: torch.dtype = getattr(torch, description["dtype"])
            elements, token = int(description["elements"]), bytes.fromhex(description["token"])
            if description["layout"] != layout:
                raise TransportError(
                    f"the weight board holds {elements:,} x {description['dtype']} in layout {description['layout']}, but the "
                    f"model of this process has layout {layout}: use the same model, dtype and version of asyncrl in both"
                )
            slab_name = description.get("slab")
            size, head = os.fstat(fd).st_size, os.pread(fd, _HEAD.size, 0)
            expected = _memfd_bytes(elements * dtype.itemsize, slab_name is not None)
            if (size, head) != (expected, _HEAD.pack(_MAGIC, token)):
                raise TransportError(
                    f"descriptor {fd} is not the weight board of the description: it begins with {head[:8]!r} and has "
                    f"{size:,} bytes, but the board has {expected:,}; pass the board's own `fd` with its `description`"
                )
            if slab_name is not None:
                slab = Slab.attach(slab_name)
                if slab.size != (needed := 2 * _slab_half(elements, dtype)):
                    raise TransportError(
                        f"slab {slab_name!r} has {slab.size:,} bytes, but the weight board needs {needed:,}; use the board's own "
                        "slab"
                    )
            return cls(fd, elements, dtype, layout, token, False, slab, copy_to, one_copy)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            if slab is not None:
                slab.close()
            raise

    @property
    def description(self) -> dict[str, Any]:
        """What `attach` needs beside the descriptor, as JSON types."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "elements": self.elements,
            "layout": self.layout,
            "token": self._token.hex(),
            "slab": None if self._slab is None else self._slab.segment.name,
        }

    # -- for the owner

    def write(self, index: int, version: int, source: Tensor | None = None) -> None:
        """Store the weights of `version` in a half, and wait for the device. No process may read the half meanwhile. `source`: a
        flat buffer to copy; None: after `clear` the owner has already written the weights into `half(index)`. Errors: ValueError
        for a negative version, or for a source that is strided or of another shape, dtype or device."""
        if version < 0:
            raise ValueError(f"a weight board cannot hold version {version}: versions must not be negative")
        if source is not None:
            self._require_fit(source)
        self.clear(index)
        if source is not None:
            self._stored[index].copy_(source.detach())
        wait = record_event(self._stored[index].device)
        if wait is not None:
            wait()
        fault("board.written")
        self._versions.store(index, version + 1)

    def clear(self, index: int) -> None:
        """Mark the half as holding no version. Only after this call may the owner write into the half."""
        self._versions.store(index, 0)

    # -- for owner and readers

    def half(self, index: int) -> Tensor:
        """A half, or this process's copy of it, [elements]. The tensor keeps its memory mapped after `close`."""
        return self._halves[index]

    def fetch(self, index: int) -> DeviceWait:
        """With `copy_to`: start the copy of a half that this process does not read now. The returned wait ends when the copy is
        complete; until then the owner must not write into the half. Without `copy_to`: does nothing."""
        return copy_beside(self._stored[index], self._halves[index]) if self.reads_copies else None

    def reads_ended(self) -> DeviceWait:
        """Returns a wait for all reads that this process launched before this call, so also for its reads of the previous half."""
        return record_event(self._halves[0].device)

    def version(self, index: int) -> int | None:
        """The version in the board's own half, not in this process's copy. None for an empty half and during a write."""
        stored = self._versions[index]
        return stored - 1 if stored else None

    def close(self) -> None:
        """Close the board. A tensor of a half that is still in use keeps its memory mapped. Closing twice is fine."""
        if self.fd < 0:
            return
        self._versions.release()
        self._stored, self._halves = [], []
        if self._slab is not None:
            self._slab.close()
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map  # tensors hold their own references to the mapping
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_fit(self, source: Tensor) -> None:
        device = self._stored[0].device
        if source.shape != (self.elements,) or source.dtype != self.dtype or source.device != device:
            raise ValueError(
                f"the weight board holds {self.elements} x {self.dtype} on {device}; found {tuple(source.shape)} x "
                f"{source.dtype} on {source.device}; give a flat buffer of the board's shape, dtype and device"
            )
        if not source.is_contiguous():
            raise ValueError("the weight board takes contiguous weights; found a strided tensor: call .contiguous()")


def _slab_half(elements: int, dtype: torch.dtype) -> int:
    """Bytes of a half in a slab."""
    return -(-elements * dtype.itemsize // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT


def _pages(size: int) -> int:
    return (size + _PAGE - 1) & -_PAGE


def _memfd_bytes(nbytes: int, in_slab: bool) -> int:
    """Bytes of the memfd. `in_slab`: the halves are in a slab, so the memfd has only the page of the versions."""
    return _PAGE + (0 if in_slab else 2 * _pages(nbytes))


def _allocate_pages(fd: int, total: int) -> None:
    """Allocate all pages now. Check the free memory first, because without free memory the kernel kills some process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    error = allocate(fd, total) if total <= free else None
    if total > free or error:
        raise OutOfMemory(
            f"the weight board needs {total:,} bytes of memory for two versions of the weights, and {free:,} are free"
            f"{f' ({error.strerror})' if error else ''}; use a smaller model, model.dtype=bfloat16 or generation.placement=shared"
        ) from error


def _seal(fd: int) -> None:
    """Forbid a change of the size, and further writable mappings."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with contextlib.suppress(OSError):  # Linux before 5.1; readers still map read-only
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
