"""The weight board: two halves of shared memory, each a whole flat buffer of weights, that one process writes and others read.

    with Board.create(elements, dtype, layout) as board:         a child that was started with `pass_fds=[board.fd]`:
        board.write(0, version, weights)                             board = Board.attach(description, fd, layout)
        start a worker with board.description, board.fd              modules read board.half(0), where it lies
        board.write(1, version + 1, weights)                         board.check(0, bucket)

Guarantees
* A memfd: it has no name anywhere, so whoever dies, in whatever way, nothing is left. Its size is sealed.
* Its pages are there from the beginning: a full machine is an error with figures here, not a SIGBUS later.
* Who attaches cannot write: the mapping is read-only, and so is every other one that could be made of the descriptor. A write
  into a tensor of `half` ends that process (SIGSEGV) and changes nothing.
* A half says which version it holds, with a checksum for every bucket; while it is written, and before, it says none. That word
  is cleared first and stored last, and x86-64 keeps the order (`words`, `checksum.c`).

What it does not know: who reads. Whoever writes has to know that nobody reads that half any more (weights/posted.py).
Only on the CPU so far.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ...errors import LifecycleError, OutOfMemory, PlatformError, TransportError
from . import checksum
from .checksum import STEP, Bytes, Sums
from .segment import check_platform
from .words import Words, fault

BUCKET_BYTES = 1 << 18  # measured (tools/measure_board.py): a check stays below 0.3 ms, without native code too
_MAGIC = b"asyncrlB"
_HEAD = struct.Struct("<8s16s")  # magic, and 16 random bytes: which board it is
_VERSIONS_AT, _SUMS_AT = 64, 128
_PAGE = 4096
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1: no other writable mapping but the one that there is


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

    def __init__(self, fd: int, elements: int, dtype: torch.dtype, layout: str, token: bytes, owner: bool) -> None:
        """Takes `fd` over."""
        self.fd = fd
        self.elements, self.dtype, self.layout = elements, dtype, layout
        self.owner = owner
        self.nbytes = elements * dtype.itemsize  # of a half
        self.buckets = -(-self.nbytes // BUCKET_BYTES)
        self._token = token
        self._first = _first_half(self.buckets)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if owner else 0)
        self._map = mmap.mmap(fd, self._total(), mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        self._versions = Words(memoryview(self._map), _VERSIONS_AT, 2, "board.version")  # version + 1; 0: none
        count = 4 * self.buckets
        sums = self._bytes(_SUMS_AT, 8 * count).view(np.uint64)
        self._sums = sums.reshape(2, self.buckets, 2)
        self._halves = [self._bytes(self._first + i * _pages(self.nbytes), self.nbytes) for i in (0, 1)]

    # -- the two ways in

    @classmethod
    def create(cls, elements: int, dtype: torch.dtype, layout: str, device: str = "cpu") -> Self:
        """Two empty halves of `elements` numbers. `layout`: what says where each parameter lies (`FlatWeights.layout_digest`).

        Errors: OutOfMemory with figures, PlatformError for another device or platform.
        """
        if torch.device(device).type != "cpu":
            raise PlatformError(
                f"a weight board on {device} was asked for, but there is none on GPUs yet; generate on the CPU, or with "
                "generation.placement=shared"
            )
        check_platform()
        if elements < 1 or elements * dtype.itemsize % STEP:
            raise ValueError(f"a weight board of {elements} x {dtype}: its bytes must be a multiple of {STEP}")
        token = os.urandom(16)
        fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(fd, _total_of(elements * dtype.itemsize))
            os.pwrite(fd, _HEAD.pack(_MAGIC, token), 0)
            board = cls(fd, elements, dtype, layout, token, True)
            _seal(fd)
        except BaseException:
            os.close(fd)
            raise
        return board

    @classmethod
    def attach(cls, description: Mapping[str, Any], fd: int, layout: str) -> Self:
        """The board behind an inherited descriptor, which is closed with it. `layout`: that of this process's own parameters.

        Errors: TransportError where the board is for another layout, or the descriptor is no such board.
        """
        try:
            dtype: torch.dtype = getattr(torch, description["dtype"])
            elements, token = int(description["elements"]), bytes.fromhex(description["token"])
            if description["layout"] != layout:
                raise TransportError(
                    f"the weight board holds {elements:,} x {description['dtype']} in layout {description['layout']}, but the "
                    f"model of this process has layout {layout}: give both the same model, dtype and version of asyncrl"
                )
            size, head = os.fstat(fd).st_size, os.pread(fd, _HEAD.size, 0)
            expected = _total_of(elements * dtype.itemsize)
            if (size, head) != (expected, _HEAD.pack(_MAGIC, token)):
                raise TransportError(
                    f"descriptor {fd} is not the weight board that was described: it has {size:,} bytes and begins with "
                    f"{head[:8]!r}, expected are {expected:,} bytes; pass the board's own `fd` with its `description`"
                )
            return cls(fd, elements, dtype, layout, token, False)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    @property
    def description(self) -> dict[str, Any]:
        """What a reader needs beside the descriptor, as JSON takes it."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "elements": self.elements,
            "layout": self.layout,
            "token": self._token.hex(),
        }

    # -- the owner's side

    def write(self, index: int, version: int, source: Tensor, threads: int = 1) -> None:
        """Copy a flat buffer into a half that nobody reads, with its checksums; then the half is `version`. Blocks."""
        self._require_owner("write")
        if source.shape != (self.elements,) or source.dtype != self.dtype or source.device.type != "cpu":
            raise ValueError(
                f"the weight board holds {self.elements} x {self.dtype} on the CPU; found {tuple(source.shape)} x "
                f"{source.dtype} on {source.device}"
            )
        if not source.is_contiguous():
            raise ValueError("the weights for the board must be contiguous")
        values = source.detach().view(torch.uint8).numpy()
        self._name(index, version, lambda: checksum.copy(values, self._halves[index], BUCKET_BYTES, threads))

    def complete(self, index: int, version: int, threads: int = 1) -> None:
        """As `write`, of weights that the owner has put into `half(index)` by itself, after `clear`: nothing is copied. Blocks."""
        self._require_owner("complete")
        self._name(index, version, lambda: checksum.sums(self._halves[index], BUCKET_BYTES, threads))

    def _name(self, index: int, version: int, fill: Callable[[], Sums]) -> None:
        if version < 0:
            raise ValueError(f"version {version} must not be negative")
        self._versions.store(index, 0)
        self._sums[index] = fill()
        fault("board.written")
        self._versions.store(index, version + 1)

    def clear(self, index: int) -> None:
        """What the half holds is not to be used: it says that it holds no version. From then on the owner may write into it."""
        self._require_owner("clear")
        self._versions.store(index, 0)

    # -- everybody's side

    def half(self, index: int) -> Tensor:
        """A half as it lies there, [elements]. It keeps the memory mapped, also after `close`."""
        self._check_open()
        return torch.from_numpy(self._halves[index]).view(self.dtype)

    def version(self, index: int) -> int | None:
        """The version that a half holds; None where it holds none, or is being written."""
        self._check_open()
        stored = self._versions[index]
        return stored - 1 if stored else None

    def check(self, index: int, bucket: int) -> bool:
        """Whether a bucket holds what was written into it: computed again from what lies there. Takes under 0.3 ms."""
        self._check_open()
        if not self._versions[index]:
            return False
        start = bucket * BUCKET_BYTES
        if not 0 <= start < self.nbytes:
            raise IndexError(f"bucket {bucket} of a weight board with {self.buckets}")
        found = checksum.sums_of(self._halves[index][start : start + BUCKET_BYTES])
        first, second = self._sums[index, bucket]
        return found == (int(first), int(second))

    def close(self) -> None:
        """Let go of it; where tensors of a half are still held, the memory stays until they are gone. Twice is fine."""
        if self.fd < 0:
            return
        self._versions.release()
        self._halves.clear()
        del self._sums
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map  # tensors keep it
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bytes(self, start: int, size: int) -> Bytes:
        return np.asarray(_Base(self._map, start, size))

    def _total(self) -> int:
        return _total_of(self.nbytes)

    def _check_open(self) -> None:
        if self.fd < 0:
            raise LifecycleError("the weight board is closed")

    def _require_owner(self, what: str) -> None:
        self._check_open()
        if not self.owner:
            raise LifecycleError(f"{what}: only the process that created a weight board changes it")


def _pages(size: int) -> int:
    return (size + _PAGE - 1) & -_PAGE


def _first_half(buckets: int) -> int:
    return _pages(_SUMS_AT + 32 * buckets)


def _total_of(nbytes: int) -> int:
    return _first_half(-(-nbytes // BUCKET_BYTES)) + 2 * _pages(nbytes)


def _allocate(fd: int, total: int) -> None:
    """Pages now. A machine without room for them would end some process, perhaps another: so it is asked first."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
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
