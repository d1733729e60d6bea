"""The rank of this process, and its collectives with all other ranks (collectives.py).

The methods block: call them on the lane, the thread of the device. With one rank every collective is a no-op, and only `fsdp` needs
a process group. If some ranks only generate, `World.train` has the collectives over the training ranks, numbered from 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..errors import ConfigError, LifecycleError, PlatformError, RankLost
from .collectives import NO_TIMEOUT as _NO_TIMEOUT
from .collectives import Collectives, LostRank, abort
from .joining import JoinedRun, require_secret
from .line import LineClient, LineServer
from .rendezvous import RankInfo, Rendezvous, advertised, meet
from .roles import Roles

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class World(RankInfo, Collectives):
    """The ranks of a run. `with world.open(device):` creates torch's process group, and its exit destroys the group."""

    roles: Roles = field(default_factory=Roles)  # `runtime/decided.py` sets it, before `open`
    # Set on a node that joined a run. Such a node is the only rank of its own world and does not call `open`.
    joined: JoinedRun | None = None
    ended_well: bool = False  # on a joined node: rank 0 ended the run without an error
    notes: list[str] = field(default_factory=list, repr=False)  # lines for the user, set by `open`
    lost: LostRank = field(default_factory=LostRank, repr=False)
    _met: Rendezvous | None = field(default=None, repr=False)
    _opened: bool = field(default=False, repr=False)
    _closed: bool = field(default=False, repr=False)
    _train: Collectives | None = field(default=None, repr=False)  # set by `open` unless all ranks train
    # Set by `open` with `distributed.context`: collectives over the siblings, the ranks that share the sequences of this rank.
    # `_leaders`, only on a leader: collectives over the leaders of all sets of siblings.
    siblings: Collectives | None = field(default=None, init=False, repr=False)
    _leaders: Collectives | None = field(default=None, repr=False)
    _leave_callbacks: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _owner: ClassVar[World | None] = None  # the World whose `leave` destroys the process group

    def __post_init__(self) -> None:
        if not self.roles.differ:
            everyone = tuple(range(self.world_size))
            self.roles = Roles(everyone, everyone)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world of torchrun's environment variables. Without these variables, a world of one rank.

        Errors: PlatformError if some variables are missing or have impossible values."""
        env = os.environ if environ is None else environ
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        missing = [name for name in _VARIABLES if name not in env]
        if missing:
            raise PlatformError(f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}; start with torchrun")
        try:
            rank, size, local_rank, local_size, port = (
                int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
            )
            restart = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        except ValueError as exc:
            raise PlatformError(f"torchrun's variables are not numbers: {exc}; start with torchrun") from exc
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise PlatformError(
                f"torchrun's variables contradict each other: RANK {rank} of {size}, LOCAL_RANK {local_rank} of {local_size}"
            )
        return cls(rank, size, local_rank, local_size, env["MASTER_ADDR"], port, restart)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_open(self) -> bool:
        return self._opened and not self._closed

    @property
    def trains(self) -> bool:
        """Whether this rank trains."""
        return self.roles.trains(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank trains, and is the first of its siblings or has none. Only such a rank gets scored groups."""
        return self.rank in self.roles.leaders

    @property
    def follows(self) -> bool:
        """Whether this rank trains, and gets its batches from the leader of its siblings."""
        return self.trains and not self.leads

    @property
    def generates(self) -> bool:
        """Whether this rank generates."""
        return self.roles.generates(self.rank)

    @property
    def _all_train(self) -> bool:
        return self.roles.train == tuple(range(self.world_size))

    @property
    def train(self) -> Collectives:
        """The collectives over the training ranks; this world itself if all ranks train. Errors: LifecycleError on a rank that only
        generates, and before `open`."""
        if self._all_train:
            return self
        if self._train is None:
            raise LifecycleError(
                f"rank {self.rank} has no collectives of training ranks: it only generates, or is not open"
            )
        return self._train

    def open(self, device: torch.device, timeout_s: float = 600.0, *, single_rank_group: bool = False) -> World:
        """Wait for the other ranks, at most `timeout_s`, and create the process group: nccl on cuda, gloo elsewhere.

        No-op with one rank, unless `single_rank_group` is true: a sharded model needs a process group even with one rank.
        Errors: LifecycleError if a World of this process has a process group already. PlatformError if other ranks do not join.
        ConfigError if not all ranks were started with the same `roles`.
        """
        if World._owner is not None and (single_rank_group or self.world_size > 1):
            raise LifecycleError(
                "a Runtime of this process holds its process group; with several ranks or fsdp close that Runtime first"
            )
        self._opened = True
        # Off: torch's own handling of a failed nccl collective would end the process by SIGABRT, without a checkpoint.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        try:
            if self.world_size == 1:
                # If the program has already created a process group, use that group.
                if single_rank_group and not dist.is_initialized():
                    World._owner = self
                    self._init_group(dist.HashStore(), device)
                return self
            World._owner = self
            self._met = meet(self, timeout_s)
            self.notes += self._met.notes
            self._require_same_roles(self._met)
            self._met.store.set_timeout(_NO_TIMEOUT)
            if self._closed:  # another thread called `close`
                raise RuntimeError("this rank was stopped while it waited for the others")
            self._init_group(dist.PrefixStore("group", self._met.store), device)
            self._make_groups()
        except BaseException as exc:
            self.close(failed=True)  # after an error no `__exit__` follows
            if self.world_size == 1 or not isinstance(exc, (dist.DistError, RuntimeError, OSError)):
                raise
            raise PlatformError(
                f"rank {self.rank} of {self.world_size} could not join the others at {self.master_addr}:{self.master_port}: {exc}"
            ) from exc
        return self

    def _require_same_roles(self, met: Rendezvous) -> None:
        """Errors: ConfigError if ranks have different `roles`. Such ranks would create different groups, and wait for ever."""
        met.store.set(f"roles/{self.rank}", str(self.roles))
        for rank in range(1, self.world_size) if self.is_first else [0]:
            if (theirs := met.get("roles", rank)) != str(self.roles):
                raise ConfigError(
                    f"rank {rank} has the {theirs}, and rank {self.rank} the {self.roles}; give all ranks the same "
                    "distributed.roles, distributed.context and distributed.listen"
                )

    @property
    def leaders(self) -> Collectives:
        """On a leader: the collectives over the leaders of all sets of siblings; `train` if no ranks share sequences."""
        return self.train if self._leaders is None else self._leaders

    def _init_group(self, store: dist.Store, device: torch.device) -> None:
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        rank, size = self.rank, self.world_size
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_NO_TIMEOUT, device_id=bound)

    def _make_groups(self) -> None:
        if not self._all_train:
            self._train = self._group_of(self.roles.train)
        if self.roles.context > 1:
            groups = [self._group_of(ranks) for ranks in self.roles.sets]
            self.siblings = next(filter(None, groups), None)
            self._leaders = self._group_of(self.roles.leaders)

    def _group_of(self, ranks: tuple[int, ...]) -> Collectives | None:
        """The collectives over these ranks; None if this rank is not one of them. All ranks must call it, in the same order."""
        group: Any = dist.new_group(list(ranks), timeout=_NO_TIMEOUT)
        return SomeRanks(self, group, ranks) if self.rank in ranks else None

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group and torchrun's store. A second call does nothing. `failed`: see `leave`."""
        self.leave(failed=failed)
        self._met = None

    def before_leaving(self, callback: Callable[[], None]) -> None:
        """Make `leave` call `callback`, which must delete references to the process group: a reference keeps connections open."""
        self._leave_callbacks.append(callback)

    def leave(self, *, failed: bool = True) -> None:
        """Leave the process group. On gloo, ranks that wait for this rank in a collective get an error.
        `failed`: on nccl, do not wait for collectives that other ranks may never join."""
        if World._owner is self:
            World._owner = None
            try:
                for callback in self._leave_callbacks:
                    callback()
            finally:  # other ranks must not wait for this rank
                self._leave_callbacks.clear()
                for part in (self._train, self.siblings, self._leaders):
                    if part is not None:
                        part.group = None
                if failed and dist.is_initialized() and dist.get_backend() == "nccl":
                    abort()
                elif dist.is_initialized():
                    dist.destroy_process_group()
        self._closed = True

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(failed=kind is not None)

    @property
    def secret(self) -> str:
        """The secret of the run, for its lines. Errors: PlatformError on a single rank with `listen` and without ASYNCRL_SECRET."""
        if self.joined is not None:
            return self.joined.secret
        return require_secret("distributed.listen is set") if self._met is None else self._met.secret

    @property
    def host(self) -> str:
        """On rank 0: the address at which its servers must listen."""
        assert self._met is not None, "before `open`, or a single rank"
        return self._met.host

    def announce_line(self, server: LineServer) -> None:
        """For rank 0: announce the address of the open server to the other ranks. Blocks."""
        assert self._met is not None, "before `open`, or a single rank"
        self._met.store.set("line/0", advertised(server.address, self.master_addr))

    def join_line(self, silence_s: float) -> LineClient:
        """For ranks above 0: an unopened client of rank 0's server. Blocks until rank 0 has announced this server.
        Errors: RankLost if rank 0 announces no server in time."""
        try:
            if self.joined is not None:
                address = self.joined.address
            else:
                assert self._met is not None, "before `open`, or a single rank"
                address = self._met.get("line", 0)
        except RuntimeError as error:
            raise RankLost(f"rank 0 has not opened its line; see its output ({error})") from error
        return LineClient(address, self.secret, f"rank {self.rank}", silence_s=silence_s)


class SomeRanks(Collectives):
    """The collectives of a world over some of its ranks."""

    def __init__(self, world: World, group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> None:
        self._world, self.group, self.lost = world, group, world.lost
        self.rank, self.world_size = ranks.index(world.rank), len(ranks)

    @property
    def is_open(self) -> bool:
        return self._world.is_open
