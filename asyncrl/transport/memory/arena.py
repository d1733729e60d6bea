"""Leased blocks of one shared-memory segment: the owner allocates, anybody with a handle looks, nothing is copied.

    with Arena.create("run", 1 << 28) as arena:                      another process, with the handle's bytes:
        with arena.lease(4 * n) as lease:                                peer = Arena.attach("run")
            lease.array("<f4", (n,))[:] = values                         with peer.open(Handle.decode(raw)) as array:
            send(lease.handle("<f4", (n,)).encode()); await answer           use(array)

Guarantees
* One allocator: only the owner of the segment allocates and frees. Blocks begin at multiples of 64 bytes.
* Each block has a generation number that grows by one at every allocation and every return; odd means taken. A handle
  made before a block was given back is `StaleHandle`, checked against the arena's bounds, never a segmentation fault.
* A lease that is forgotten (collected without `release`) is given back and counted. Arrays of a lease keep it alive, and
  the mapping stays as long as any array does, also after `close`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import ArenaStatistics, Block, BlockLease, BlockTable
from .handles import Handle, dtype_name, numpy_dtype
from .segment import Segment


class Arena:
    """See the module. Made by `create` (the owner) or `attach` (lookers)."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        g = segment.geometry
        self.table = BlockTable(segment, g.data, g.total - g.data, "arena")

    @classmethod
    def create(cls, name: str, size: int, *, blocks: int = 1024) -> Arena:
        """A new arena with `size` bytes for data. Errors: as `Segment.create`."""
        if size < 1 or blocks < 1:
            raise ValueError(f"arena {name!r}: size and blocks must be positive, found {size} and {blocks}")
        return cls(Segment.create(name, size, blocks))

    @classmethod
    def attach(cls, name: str) -> Arena:
        """Look into an arena that somebody else owns. Errors: as `Segment.attach`."""
        return cls(Segment.attach(name))

    # -- the owner's side

    def allocate(self, size: int) -> Block:
        """A block that stays until `free`. Errors: OutOfMemory with figures, LifecycleError."""
        return self.table.allocate(size)

    def free(self, block: Block) -> None:
        """Give a block back. Errors: StaleHandle where that was done already."""
        self.table.free(block)

    def lease(self, size: int) -> Lease:
        """A block that is given back at the end of its `with`, or when it is forgotten. Errors: as `allocate`."""
        return Lease(self, self.allocate(size))

    # -- everybody's side

    def open(self, handle: Handle) -> Reading:
        """`with arena.open(handle) as array`: a read-only view. Errors: StaleHandle, at the beginning or the end."""
        return Reading(self, handle)

    def view(self, handle: Handle, *, writable: bool = False, keep: object = None) -> npt.NDArray[Any]:
        """The array a handle names, without copying. The caller knows that the block stays. Errors: StaleHandle.

        `keep` lives as long as the array does (as the mapping does anyway).
        """
        self.table.check_open()
        block = self.table.checked(handle)
        return self._array(block, handle.offset, handle.dtype, handle.shape, writable, (self, keep))

    def statistics(self) -> ArenaStatistics:
        """As this process knows it: only the owner sees what is used."""
        return self.table.statistics()

    def close(self) -> None:
        """Let go. An owner also removes the name. Twice is fine."""
        if not self.segment.closed:
            self.table.close()
            self.segment.close(unlink=True)

    def __enter__(self) -> Arena:
        self.table.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _array(
        self, block: Block, offset: int, dtype: str, shape: tuple[int, ...], writable: bool, keep: object
    ) -> npt.NDArray[Any]:
        found = numpy_dtype(dtype)
        size = math.prod(shape) * found.itemsize
        if offset < 0 or offset % found.itemsize or offset + size > block.size:
            raise ValueError(
                f"{dtype} {list(shape)} at {offset} does not lie (aligned) in a block of {block.size} bytes"
            )
        start = block.offset + offset
        return np.asarray(ArrayBase(self.segment, start, found, shape, writable, keep))


class ArrayBase:
    """What numpy keeps as the base of an array in a segment: mapping and lease live as long as the array does."""

    def __init__(
        self, segment: Segment, start: int, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool, keep: object
    ) -> None:
        self._keep = (keep, segment.buffer[start:start], segment.map)  # an export: the map cannot be closed under us
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": shape,
            "data": (segment.address + start, not writable),
        }


class Lease(BlockLease):
    """The right to write a block until `release`, the end of the `with`, or `detach`."""

    def __init__(self, arena: Arena, block: Block) -> None:
        super().__init__(arena.table, block)
        self._arena = arena

    def array(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> npt.NDArray[Any]:
        """A writable array in the block; it keeps the lease alive. Errors: ValueError where it does not fit."""
        self._check()
        return self._arena._array(self.block, offset, dtype_name(dtype), shape, True, self)


class Reading:
    """A look at a block that others own: checked when it begins and again when it ends (it copies nothing)."""

    def __init__(self, arena: Arena, handle: Handle) -> None:
        self._arena = arena
        self._handle = handle

    def __enter__(self) -> npt.NDArray[Any]:
        return self._arena.view(self._handle)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and not self._arena.segment.closed:
            self._arena.table.checked(self._handle)  # given back under the reader: what it saw may be a mixture
