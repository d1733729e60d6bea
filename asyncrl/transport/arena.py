"""Leased blocks of one shared-memory segment: the owner allocates, anybody with a handle looks, nothing is copied.

    with Arena.create("run", 1 << 28) as arena:                      another process, with the handle's bytes:
        with arena.lease(4 * n) as lease:                                peer = Arena.attach("run")
            lease.array("<f4", (n,))[:] = values                         with peer.open(Handle.decode(raw)) as array:
            send(lease.handle("<f4", (n,)).encode()); await answer           use(array)

Guarantees
* One allocator: only the owner of the segment allocates and frees. Blocks begin at multiples of 64 bytes.
* Each block has a generation number that grows by one at every allocation and every return; odd means taken. A handle
  made before a block was given back is `StaleHandle`, checked against the arena's bounds, never a segmentation fault.
* The block table in the segment is written so that a crash between any two stores leaves it readable: a block exists
  from the store of its odd generation on. An adopting owner finds exactly the blocks that existed.
* A lease that is forgotten (collected without `release`) is given back and counted. Arrays of a lease keep it alive, and
  the mapping stays as long as any array does, also after `close`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ArenaOwned, LifecycleError, OutOfMemory, StaleHandle, TransportError
from .extents import Extents
from .handles import BFLOAT16, Handle, dtype_name, numpy_dtype
from .segment import Segment
from .words import Words

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Block:
    """An allocated block: `offset` in bytes from the start of the segment, `tag` the owner's own number for its use."""

    index: int
    generation: int
    offset: int
    size: int
    tag: int


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    size: int  # bytes for data
    used: int
    most_used: int
    largest_free: int
    blocks: int
    most_blocks: int
    allocations: int
    refused: int  # allocations that found no room
    leases: int
    leaked: int  # leases that were collected without release
    adopted: int  # blocks found at adoption
    tenure: int


class Arena:
    """See the module. Made by `create`, `adopt`, `create_or_adopt` (owners) or `attach` (lookers)."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        g = segment.geometry
        buffer = segment.buffer
        self._generations = Words(buffer, g.table, g.blocks, "arena.generation")
        self._offsets = Words(buffer, g.table + 8 * g.blocks, g.blocks, "arena.offset")
        self._sizes = Words(buffer, g.table + 16 * g.blocks, g.blocks, "arena.size")
        self._tags = Words(buffer, g.table + 24 * g.blocks, g.blocks, "arena.tag")
        self._extents = Extents(g.total - g.data)
        self._lock = threading.Lock()
        self._forgotten: deque[Block] = deque()  # filled by the garbage collector, emptied under the lock
        self._free = list(range(g.blocks - 1, -1, -1))
        self._most_used = self._most_blocks = self._allocations = self._refused = self._leases = self._leaked = 0
        self._adopted = self._adopt_blocks() if segment.owner else 0

    @classmethod
    def create(cls, name: str, size: int, *, blocks: int = 1024) -> Arena:
        """A new arena with `size` bytes for data. Errors: as `Segment.create`."""
        if size < 1 or blocks < 1:
            raise ValueError(f"arena {name!r}: size and blocks must be positive, found {size} and {blocks}")
        return cls(Segment.create(name, size, blocks))

    @classmethod
    def adopt(cls, name: str) -> Arena:
        """The arena of a dead owner, with every block it had. Errors: as `Segment.adopt`."""
        return cls(Segment.adopt(name))

    @classmethod
    def create_or_adopt(cls, name: str, size: int, *, blocks: int = 1024) -> Arena:
        """What a restarted program calls. An adopted arena keeps the geometry it has. Errors: ArenaOwned, OutOfMemory."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return cls.adopt(name)
            try:
                return cls.create(name, size, blocks=blocks)
            except ArenaOwned:
                raise
            except TransportError as error:
                if isinstance(error, OutOfMemory):
                    raise
                # its owner died between our two looks: adopt it

    @classmethod
    def attach(cls, name: str) -> Arena:
        return cls(Segment.attach(name))

    # -- the owner's side

    def allocate(self, size: int, *, tag: int = 0, prepare: Callable[[memoryview], None] | None = None) -> Block:
        """A block that stays until `free`, also across owners. Errors: OutOfMemory with figures, LifecycleError.

        `prepare` fills the bytes before the block exists: an adopting owner never finds it half prepared.
        """
        self._check(owner=True)
        with self._lock:
            self._collect()
            start = self._extents.allocate(size) if self._free else None
            if start is None:
                self._refused += 1
                s = self._extents
                raise OutOfMemory(
                    f"arena {self.segment.name!r}: {size:,} bytes asked; {s.used:,} of {s.size:,} are in use, the largest "
                    f"free piece has {s.largest:,}, {len(self._free)} of {len(self._generations)} block entries are free"
                )
            data = self.segment.geometry.data
            if prepare is not None:
                try:
                    prepare(self.segment.buffer[data + start : data + start + size])
                except BaseException:
                    self._extents.free(start, size)
                    raise
            index = self._free.pop()
            block = Block(index, self._generations[index] + 1, data + start, size, tag)
            self._offsets.store(index, block.offset)
            self._sizes.store(index, size)
            self._tags.store(index, tag)
            self._generations.store(index, block.generation)  # from here on the block exists
            self._allocations += 1
            self._most_used = max(self._most_used, self._extents.used)
            self._most_blocks = max(self._most_blocks, len(self._generations) - len(self._free))
            return block

    def free(self, block: Block) -> None:
        """Give a block back. Errors: StaleHandle where that was done already."""
        self._check(owner=True)
        with self._lock:
            self._give_back(block)

    def blocks(self) -> list[Block]:
        """The blocks that exist, as the table in shared memory says."""
        self._check()
        return [self._block(index) for index, g in enumerate(self._generations.view.tolist()) if g & 1]

    def lease(self, size: int, *, tag: int = 0) -> Lease:
        """A block that is given back at the end of its `with`, or when it is forgotten. Errors: as `allocate`."""
        lease = Lease(self, self.allocate(size, tag=tag))
        self._leases += 1
        return lease

    # -- everybody's side

    def open(self, handle: Handle) -> Reading:
        """`with arena.open(handle) as array`: a read-only view. Errors: StaleHandle, at the beginning or the end."""
        return Reading(self, handle)

    def view(self, handle: Handle, *, writable: bool = False, keep: object = None) -> npt.NDArray[Any]:
        """The array a handle names, without copying. The caller knows that the block stays. Errors: StaleHandle.

        `keep` lives as long as the array does (as the mapping does anyway).
        """
        self._check()
        block = self._checked(handle)
        return self._array(block, handle.offset, handle.dtype, handle.shape, writable, (self, keep))

    def bytes_of(self, block: Block) -> memoryview:
        """The block's bytes, writable."""
        self._check()
        return self.segment.buffer[block.offset : block.offset + block.size]

    def statistics(self) -> ArenaStatistics:
        with self._lock:
            if self.segment.owner and not self.segment.closed:
                self._collect()
            s = self._extents
            return ArenaStatistics(
                size=s.size, used=s.used, most_used=self._most_used, largest_free=s.largest,
                blocks=len(self._generations) - len(self._free) if self.segment.owner else 0,
                most_blocks=self._most_blocks, allocations=self._allocations, refused=self._refused,
                leases=self._leases, leaked=self._leaked, adopted=self._adopted,
                tenure=0 if self.segment.closed else self.segment.tenure,
            )  # fmt: skip

    def close(self, *, keep: bool = False) -> None:
        """Let go. An owner also removes the name, unless `keep` leaves it for the next owner. Twice is fine."""
        if not self.segment.closed:
            for words in (self._generations, self._offsets, self._sizes, self._tags):
                words.release()
            self.segment.close(unlink=not keep)

    def __enter__(self) -> Arena:
        self._check()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _check(self, *, owner: bool = False) -> None:
        if self.segment.closed:
            raise LifecycleError(f"arena {self.segment.name!r} is closed")
        if owner and not self.segment.owner:
            raise LifecycleError(
                f"arena {self.segment.name!r}: only its owner allocates and frees; this process attached"
            )

    def _block(self, index: int) -> Block:
        return Block(index, self._generations[index], self._offsets[index], self._sizes[index], self._tags[index])

    def _adopt_blocks(self) -> int:
        data = self.segment.geometry.data
        found = self.blocks()
        for block in found:
            if not self._extents.reserve(block.offset - data, block.size):
                raise TransportError(
                    f"{self.segment.path}: block {block.index} ({block.offset}+{block.size}) overlaps another or leaves the "
                    "segment; remove it with `asyncrl shm clear`"
                )
        taken = {block.index for block in found}
        self._free = [index for index in self._free if index not in taken]
        self._most_used, self._most_blocks = self._extents.used, len(found)
        return len(found)

    def _give_back(self, block: Block) -> None:
        if self._generations[block.index] != block.generation:
            raise StaleHandle(f"arena {self.segment.name!r}: block {block.index} was already given back")
        self._generations.store(block.index, block.generation + 1)
        self._extents.free(block.offset - self.segment.geometry.data, block.size)
        self._free.append(block.index)

    def _collect(self) -> None:
        while self._forgotten:
            self._give_back(self._forgotten.popleft())
            self._leaked += 1
            self._leases -= 1

    def _checked(self, handle: Handle) -> Block:
        g = self.segment.geometry
        if handle.run != g.run:
            raise StaleHandle(
                f"the handle belongs to another life of an arena than {self.segment.name!r}, which was made anew"
            )
        if (
            handle.block >= g.blocks
            or self._generations[handle.block] != handle.generation
            or not handle.generation & 1
        ):
            raise StaleHandle(
                f"arena {self.segment.name!r}: block {handle.block} of generation {handle.generation} was given back"
            )
        block = self._block(handle.block)
        inside = handle.offset >= 0 and handle.offset + handle.nbytes <= block.size
        if not inside or block.offset < g.data or block.offset + block.size > g.total:
            raise StaleHandle(f"arena {self.segment.name!r}: the handle leaves its block of {block.size} bytes")
        return block

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
        return np.asarray(_Memory(self.segment, start, found, shape, writable, keep))


class _Memory:
    """What numpy keeps as the base of an array: it keeps the mapping and the lease alive as long as the array lives."""

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


class Lease:
    """The right to write a block until `release`, the end of the `with`, or `detach`."""

    def __init__(self, arena: Arena, block: Block) -> None:
        self.block = block
        self._arena = arena
        self._finalizer = weakref.finalize(self, arena._forgotten.append, block)
        self._finalizer.atexit = False

    def array(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> npt.NDArray[Any]:
        """A writable array in the block; it keeps the lease alive. Errors: ValueError where it does not fit."""
        self._check()
        return self._arena._array(self.block, offset, dtype_name(dtype), shape, True, self)

    def tensor(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> torch.Tensor:
        """The same as a torch tensor on the CPU (numpy dtypes, torch dtypes, bfloat16 too)."""
        import torch

        array = self.array(dtype, shape, offset=offset)
        return (
            torch.from_numpy(array).view(torch.bfloat16) if dtype_name(dtype) == BFLOAT16 else torch.from_numpy(array)
        )

    def handle(self, dtype: Any, shape: tuple[int, ...], *, offset: int = 0) -> Handle:
        self._check()
        run = self._arena.segment.geometry.run
        handle = Handle(run, self.block.index, self.block.generation, offset, dtype_name(dtype), tuple(shape))
        if offset < 0 or offset + handle.nbytes > self.block.size:
            raise ValueError(f"{dtype} {list(shape)} at {offset} does not lie in a block of {self.block.size} bytes")
        return handle

    def detach(self) -> Block:
        """Leave the block in the arena; whoever takes it over calls `arena.free(block)`."""
        self._check()
        self._finalizer.detach()
        self._arena._leases -= 1
        return self.block

    def release(self) -> None:
        """Give the block back. Twice is fine."""
        if self._finalizer.detach() is not None:
            self._arena._leases -= 1
            if not self._arena.segment.closed:
                self._arena.free(self.block)

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise LifecycleError(f"the lease on block {self.block.index} was given back")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Reading:
    """A look at a block that others own: checked when it begins and again when it ends (it copies nothing)."""

    def __init__(self, arena: Arena, handle: Handle) -> None:
        self._arena = arena
        self._handle = handle

    def __enter__(self) -> npt.NDArray[Any]:
        return self._arena.view(self._handle)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and not self._arena.segment.closed:
            self._arena._checked(self._handle)  # given back under the reader: what it saw may be a mixture
