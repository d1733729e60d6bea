"""The ranks that hold one replica of the model together, and how they get the same data.

    rank = ((pp x DP + dp) x CP + cp) x TP + tp          a replica: all ranks with one dp

Ranks of a replica work on the same rows. Either each rank reads them, or the leader reads once and broadcasts them. The
coordinates alone decide which rank writes results back: exactly one rank of each replica does, whatever its layout.

Synchronous, for the lane: all ranks of a replica must call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import torch
import torch.distributed as dist

from ..errors import ConfigError, FetchFailed, LifecycleError

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
_FAILED = -1


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of a rank: its replica (dp), and its part of the replica (tp, cp, pp)."""

    dp: int = 0
    tp: int = 0
    cp: int = 0
    pp: int = 0

    @classmethod
    def of(cls, axes: Mapping[str, int]) -> Coordinates:
        """From named axes. Errors: ConfigError for an unknown axis, which could give a replica two writers."""
        unknown = sorted(set(axes) - {"dp", "tp", "cp", "pp"})
        if unknown:
            raise ConfigError(
                f"coordinates {unknown} are not known; a single writer is computed from dp, tp, cp and pp"
            )
        return cls(**axes)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the results of its replica back: exactly one rank of each does."""
        return self.tp == self.cp == self.pp == 0


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How many ranks there are along each axis."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of this rank, by the formula of the module docstring. Errors: ConfigError for a rank beyond the layout."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} of a layout of {self.world_size} ranks: {self}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(dp, tp, cp, pp)

    def replica(self, dp: int) -> list[int]:
        """The ranks of this replica, the writer first."""
        return [rank for rank in range(self.world_size) if self.coordinates(rank).dp == dp]

    def open_group(self, rank: int, device: torch.device) -> ReplicaGroup | None:
        """The replica of this rank; None where it is alone. A collective over the whole world: all ranks call it."""
        mine: ReplicaGroup | None = None
        for dp in range(self.dp):
            ranks = self.replica(dp)
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = ReplicaGroup(group, ranks.index(rank), len(ranks), device)
        return mine


@dataclass(slots=True)
class ReplicaGroup:
    """The ranks of one replica. `rank`: number of this rank in the replica; number 0 leads."""

    group: Any  # torch.distributed.ProcessGroup
    rank: int
    size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _broken: bool = False

    @property
    def leads(self) -> bool:
        """Whether this rank reads for its replica."""
        return self.rank == 0

    def share(self, read: Callable[[], tuple[Arrays, Any]]) -> tuple[Arrays, Any]:
        """The result of the leader's `read` on all ranks: arrays by name, and values in JSON types (tuples become lists).

        Takes two broadcasts for any number of arrays. Errors: an error of `read` is raised on the leader, and at once as
        FetchFailed on all other ranks. LifecycleError after a broadcast has failed.
        """
        if self._broken:
            raise LifecycleError("a collective of this replica failed before; its ranks are out of step")
        if self.leads:
            return self._lead(read)
        return self._follow()

    def _lead(self, read: Callable[[], tuple[Arrays, Any]]) -> tuple[Arrays, Any]:
        try:
            arrays, beside = read()
            plain = {name: np.array(array, order="C") for name, array in arrays.items()}
            shapes = [(name, array.dtype.str, array.shape) for name, array in plain.items()]
            descriptor = orjson.dumps((shapes, beside))
            payload = b"".join([descriptor, *(array.tobytes() for array in plain.values())])
            head = [len(payload), len(descriptor)]
        except BaseException as error:
            payload = f"{type(error).__name__}: {error}".encode()
            self._send([len(payload), _FAILED], payload)
            raise
        self._send(head, payload)
        return arrays, beside

    def _send(self, head: list[int], payload: bytes) -> None:
        self._broadcast(torch.tensor(head, dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _follow(self) -> tuple[Arrays, Any]:
        size, split = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        payload = self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy()
        if split == _FAILED:
            raise FetchFailed(f"the leader of this replica failed: {payload.tobytes().decode()}")
        shapes, beside = orjson.loads(payload[:split].tobytes())
        arrays: Arrays = {}
        start = split
        for name, dtype, shape in shapes:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[name] = np.frombuffer(payload[start : start + size].tobytes(), dtype).reshape(shape).copy()
            start += size
        return arrays, beside

    def _broadcast(self, values: torch.Tensor) -> torch.Tensor:
        moved = values.to(self.device)
        try:
            self.group.broadcast(moved, 0).wait()
        except BaseException:
            self._broken = True
            raise
        return moved.cpu()
