"""The world: which rank this is, and the three collectives that a replicated trainer needs.

Everything here is synchronous and runs on the lane, in one order on every rank: the lane is what keeps collectives from
crossing. With one rank nothing is opened and every collective is a no-op.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from ..errors import LifecycleError, PlatformError, RankLost
from .hosting import Place, RanksStore, open_store
from .sealed import SealedStore

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long rank 0 waits for the others' farewell: within torchrun's grace period of 30 s, of which a checkpoint took some.
_AT_THE_END_S, _AFTER_AN_ERROR_S = 30.0, 5.0

# Of a collective, and of a call of the store. torch counts time in which the whole job was suspended, too; so what never comes to
# an end is for the watchdog (of a lane, of silent ranks) to end.
_PATIENT = timedelta(days=30)


@dataclass
class World:
    """`with world.open(device):` makes the process group; closing destroys it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    # torchrun's restart count: keys in the shared store are never read by a later attempt.
    restart: int = 0
    notes: list[str] = field(default_factory=list, repr=False)  # lines for the user, once it is open
    _ranks: RanksStore | None = field(default=None, repr=False)
    _opened: bool = field(default=False, repr=False)
    _closed: bool = field(default=False, repr=False)
    _leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _owner: ClassVar[World | None] = None  # of this process's group, where one of ours made it

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read torchrun's variables; without them this is the only rank.

        Errors: PlatformError when only some of them are there, or make no sense.
        """
        env = os.environ if environ is None else environ
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        missing = [name for name in _VARIABLES if name not in env]
        if missing:
            raise PlatformError(f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}: start with torchrun")
        try:
            rank, size, local_rank, local_size, port = (
                int(env[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
            )
        except ValueError as exc:
            raise PlatformError(f"torchrun's variables are not numbers: {exc}") from exc
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise PlatformError(
                f"torchrun's variables contradict: RANK {rank} of {size}, LOCAL_RANK {local_rank} of {local_size}"
            )
        restart = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(rank, size, local_rank, local_size, env["MASTER_ADDR"], port, restart)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    def open(self, device: torch.device, timeout_s: float = 600.0, *, alone: bool = False) -> World:
        """Join the others, which takes `timeout_s` at most: nccl on cuda, gloo elsewhere. No-op with one rank, unless `alone` asks
        for a process group all the same (a sharded model needs one).

        Errors: LifecycleError when opened twice, PlatformError when the others cannot be reached.
        """
        if self._opened:
            raise LifecycleError("the world was opened twice")
        if World._owner is not None and (alone or self.world_size > 1):
            raise LifecycleError(
                "a Runtime of this process holds its process group; with several ranks or fsdp close that one first"
            )
        self._opened = True
        timeout = timedelta(seconds=timeout_s)
        if self.world_size == 1:
            if alone and not dist.is_initialized():  # an embedding program's own group of one does as well
                World._owner = self
                cuda = device.type == "cuda"
                dist.init_process_group(
                    "nccl" if cuda else "gloo",
                    store=dist.HashStore(),
                    rank=0,
                    world_size=1,
                    timeout=_PATIENT,
                    device_id=device if cuda else None,
                )
            return self
        World._owner = self
        try:
            self._ranks = open_store(self._place(), timeout)
            self.notes += self._ranks.notes
            self._ranks.meet(timeout_s)
            self._ranks.store.set_timeout(_PATIENT)
            if self._closed:
                raise RuntimeError("this rank was stopped while it waited for the others")
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("group", self._ranks.plain),
                rank=self.rank,
                world_size=self.world_size,
                timeout=_PATIENT,
                device_id=device if device.type == "cuda" else None,
            )
        except (dist.DistError, RuntimeError, OSError) as exc:
            raise PlatformError(
                f"rank {self.rank} of {self.world_size} could not join the others at "
                f"{self.master_addr}:{self.master_port}: {exc}"
            ) from exc
        return self

    def _place(self) -> Place:
        alone = self.local_world_size == self.world_size
        return Place(self.rank, self.world_size, alone, self.master_addr, self.master_port, self.restart)

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group and the store; rank 0, which holds that, waits until the others have, not long where this
        rank `failed`. Closing twice is fine. Errors: RankLost where another one did not leave, and none `failed`: with success
        of this one the launcher would wait for it for ever."""
        failed = failed or self._closed or not dist.is_initialized()
        self.leave()
        ranks, self._ranks = self._ranks, None
        missing = [] if ranks is None else ranks.close(_AFTER_AN_ERROR_S if failed else _AT_THE_END_S)
        if missing and not failed:
            names = " and ".join(f"rank {rank}" for rank in missing)
            raise RankLost(
                f"{names} did not end within {_AT_THE_END_S:g} s of rank {self.rank}: it stands still, or its machine is gone. "
                "What this rank has to write is written"
            )

    def before_leaving(self, forget: Callable[[], None]) -> None:
        """Call `forget` first: who holds the process group must let go of it, or its connections stay open."""
        self._leaving.append(forget)

    def leave(self) -> None:
        """Leave the process group: a rank that waits for this one in a collective gets an error. The store stays."""
        if World._owner is self:
            World._owner = None
            try:
                for forget in self._leaving:
                    forget()
            finally:  # whatever happens there: nobody may wait for this rank
                self._leaving.clear()
                if dist.is_initialized():
                    dist.destroy_process_group()
        self._closed = True

    def __enter__(self) -> World:
        if not self._opened:
            raise LifecycleError("the world is entered with `with world.open(device):`")
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(failed=kind is not None)

    def store(self, name: str) -> SealedStore:
        """A connection of its own to the ranks' shared store, with keys of its own under `name` (for the ledger)."""
        if self._ranks is None:
            raise LifecycleError("the store exists between `open` and `close`, and only with more than one rank")
        return self._ranks.store.below(name)

    # -- collectives; every rank calls them in the same order; RankLost where another one is gone --------------------

    def all_reduce_sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor over the ranks, in place (mask sums, metrics). Returns it."""
        if values.dtype != torch.float64:
            raise TypeError(f"sums over ranks are float64, found {values.dtype}")
        if self._collective():
            with self._together():
                dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def reduce_gradients_(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum the flat gradient buffer over the ranks, in place. The 1/N of the loss is applied before. Returns it."""
        if self._collective():
            with self._together():
                dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        return flat

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """What every rank gives, in rank order; of any lengths. With nccl it travels through the current device of the thread
        that calls: on the lane that is the rank's."""
        if not self._collective():
            return [value]
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        with self._together():
            sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(value)], device=device))
            lengths = [int(size) for size in sizes]
            padded = torch.frombuffer(bytearray(value.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8).to(device)
            every = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(every, padded)
        return [each[:length].cpu().numpy().tobytes() for each, length in zip(every, lengths, strict=True)]

    def _collective(self) -> bool:
        if self.world_size == 1:
            return False
        if not self._opened or self._closed:
            raise LifecycleError("a collective was called on a world that is not open")
        return True

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Errors: RankLost where the collective inside fails."""
        try:
            yield
        except RuntimeError as error:  # dist.DistError is one; gloo raises a bare one
            raise RankLost(
                f"rank {self.rank} of {self.world_size}: a collective failed, most likely because another rank has left or died; "
                f"the output of that rank says why ({error})"
            ) from error
