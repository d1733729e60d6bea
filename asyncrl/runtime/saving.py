"""Checkpoints of a run: what is captured when, and how a run goes on from one.

Captured at one moment, between two steps: the trainer's state by a closure on the lane, the books and the prompt cursor on
the loop without an await in between. Written by a thread, from host copies. Admitted but untrained groups are kept by id:
on resume their prompts are admitted again first, with the same randomness, so nothing is skipped or repeated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoint.shards import shards_writer, write_shard
from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import Checkpoint, CheckpointStore
from asyncrl.config.describe import to_plain
from asyncrl.config.schema import Config
from asyncrl.data.prompts import REROLLS, PromptSource
from asyncrl.data.replay import encode
from asyncrl.distributed.world import World
from asyncrl.errors import CheckpointError, StallError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.snapshot import host, take

from .directory import RunDirectory
from .offload import offload
from .positions import Positions
from .rooms import Built

if TYPE_CHECKING:
    from asyncrl.training.trainer import TorchTrainer

EMBEDDED_GROUPS = 1 << 40  # group ids of `rt.generate`, far above those of the prompt stream


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint to go on from."""

    checkpoint: Checkpoint

    @classmethod
    def latest(cls, directory: RunDirectory) -> SavedRun:
        found = CheckpointStore(directory.checkpoints).load_latest()
        if found is None:
            raise CheckpointError(f"resume=true: there is no checkpoint in {directory.checkpoints}")
        return cls(found)

    @property
    def version(self) -> int:
        return int(self.checkpoint.run["version"])

    @property
    def turn(self) -> int:
        return int(self.checkpoint.run["turn"])

    def next_group(self, rank: int) -> int:
        """The first unused id for groups of an embedding program: ids key randomness, so none is used twice."""
        return int(self.checkpoint.run["next_group"][str(rank)])

    def positions(self) -> dict[int, dict[str, Any]]:
        """By rank: what it said when this was written, less its replay buffer."""
        run = self.checkpoint.run
        return {
            rank: {
                "turn": run["turn"],
                **{name: run[name][str(rank)] for name in ("prompts", "untrained", "next_group")},
            }
            for rank in range(run["world_size"])
        }


@dataclass(frozen=True, slots=True)
class Written:
    seconds: float
    path: Path
    missing: tuple[int, ...] = ()  # ranks that did not say where they are: they stand where they were a version before


class Checkpointer:
    def __init__(
        self, config: Config, directory: RunDirectory | None, built: Built, world: World, recorder: Recorder
    ) -> None:
        self._config = config
        self._built = built
        self._world = world
        self._recorder = recorder
        self._store = CheckpointStore(directory.checkpoints, config.checkpoint.keep) if directory else None
        self._saved_version: int | None = None
        self._positions = (
            Positions(world.store("checkpoint"), world.rank, world.world_size) if world.world_size > 1 else None
        )

    def due(self, version: int, last: bool) -> bool:
        """Whether a checkpoint of this version is asked for, by the interval or as the last one."""
        if self._store is None or self._built.core is None or version == self._saved_version or version == 0:
            return False
        every = self._config.checkpoint.every
        return (every is not None and version % every == 0) or (last and self._config.checkpoint.save_final)

    def final_due(self, version: int, error: BaseException | None, stopped: bool) -> bool:
        """At the end, however it came. A stalled run writes none: what it would wait for may be what hangs.

        `stopped`: whether the run is being cancelled, whatever else the error says: of ranks that are stopped one leaves
        first, and the others may hear of that in a collective. Where the model is cut, a rank that failed alone writes none:
        the others, whose parts it needs, are only stopped later.
        """
        if isinstance(error, (StallError, CheckpointError)):
            return False
        core = self._built.core
        if core is not None and core.is_sharded and self._world.world_size > 1 and error is not None and not stopped:
            return False
        return self.due(version, last=True)

    async def say(self, version: int, prompts: PromptSource | None, in_hand: int | None, next_group: int) -> None:
        """On every rank, at each version: from now on rank 0 can write a checkpoint of it, whatever becomes of this rank."""
        positions, saving = self._positions, self._config.checkpoint
        if positions is None or self._store is None or self._built.core is None:
            return
        if saving.save_final or saving.every is not None:
            where = self._where(prompts, in_hand, next_group)
            await offload(lambda: positions.say(version, where), "checkpoint-say")

    def books(self, prompts: PromptSource | None, in_hand: int | None, next_group: int) -> dict[str, Any]:
        """Where this rank is in its prompts, taken at one moment (no await). Take it before live groups are ended.

        `untrained`: ids of the prompt stream that were taken from the cursor and not trained: admitted ones, those of the
        open step included, and the one that waits for its slot.
        """
        replay = self._built.rooms.replay
        where = self._where(prompts, in_hand, next_group)
        return {**where, "replay": None if replay is None else replay.snapshot()}

    def _where(self, prompts: PromptSource | None, in_hand: int | None, next_group: int) -> dict[str, Any]:
        rooms = self._built.rooms
        live = {ticket.group_id for ticket in rooms.ledger.live_groups()} | (set() if in_hand is None else {in_hand})
        return {
            "turn": rooms.ledger.turn,
            "prompts": prompts.state_dict() if prompts else None,
            "untrained": sorted(group_id for group_id in live if group_id % REROLLS < EMBEDDED_GROUPS),
            "next_group": next_group,
        }

    async def save(self, version: int, books: dict[str, Any]) -> Written:
        """Errors: CheckpointError, earlier checkpoints untouched."""
        assert self._store is not None and self._built.core is not None
        core = self._built.core
        started = time.perf_counter()
        with (
            self._recorder.span("checkpoint", track="checkpoint", version=version),
            self._recorder.wait("publish pump", f"the checkpoint of version {version}", on="disk", cause="checkpoint"),
        ):
            path = self._store.path(version)
            if (replay := books["replay"]) is not None:
                books = {**books, "replay": await offload(lambda: encode(replay), "replay")}
            if core.is_sharded and self._world.rank:
                await self._write_shard(core, self._store.directory, version)
            everybody, missing = await self._gather(version, books)
            if self._world.rank == 0:
                run = {
                    "version": version,
                    "turn": books["turn"],
                    "prompts": {str(rank): each["prompts"] for rank, each in enumerate(everybody)},
                    "untrained": {str(rank): each["untrained"] for rank, each in enumerate(everybody)},
                    "next_group": {str(rank): each["next_group"] for rank, each in enumerate(everybody)},
                    "replay": {str(rank): each["replay"] for rank, each in enumerate(everybody)},
                    "world_size": self._world.world_size,
                    "config": to_plain(self._config),
                }
                snapshot = await self._built.lanes[0].run(lambda: take(core), name="checkpoint/capture", priority=2)
                if snapshot.version != version:
                    raise CheckpointError(f"captured version {snapshot.version} where {version} was asked for")
                saved = await self._store.save_in_thread(
                    version,
                    lambda folder: snapshot.write_pretrained(folder, self._built.tokenizer, self._config.model.path),
                    state_writer(trainer=snapshot.state, run=run),
                    *(
                        [shards_writer(self._store.directory, version, self._world.world_size)]
                        if core.is_sharded
                        else []
                    ),
                )
                path = saved.path
        self._saved_version = version
        return Written(time.perf_counter() - started, path, tuple(missing))

    async def _write_shard(self, core: TorchTrainer, directory: Path, version: int) -> None:
        """This rank's part of a sharded state, before rank 0 hears that it may take it."""
        state = await self._built.lanes[0].run(lambda: host(core.state_dict()), name="checkpoint/capture", priority=2)
        if state["version"] != version:
            raise CheckpointError(f"captured version {state['version']} where {version} was asked for")
        await offload(lambda: write_shard(directory, version, self._world.rank, state), "checkpoint-shard")

    async def _gather(self, version: int, books: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """See `Positions.gather`."""
        positions, core = self._positions, self._built.core
        if positions is None:
            return [books], []
        sharded = core is not None and core.is_sharded
        return await offload(lambda: positions.gather(version, books, sharded=sharded), "checkpoint-gather")

    async def restore(self, saved: SavedRun, prompts: PromptSource | None) -> None:
        """Weights, optimizer, schedule, version; prompt cursor; untrained groups first. Errors: CheckpointError, DataError."""
        core, run = self._built.core, saved.checkpoint.run
        if core is None:
            raise CheckpointError("resume=true: a dry run has nothing to resume")
        if run["world_size"] != self._world.world_size:
            raise CheckpointError(
                f"resume=true: the checkpoint was written by {run['world_size']} ranks and this run has {self._world.world_size}; "
                "start it with the same number"
            )
        state = await offload(saved.checkpoint.trainer, "restore")
        await self._built.lanes[0].run(lambda: core.load_state_dict(state), name="checkpoint/restore", priority=2)
        if prompts is not None:
            rank = str(self._world.rank)
            prompts.load_state_dict(run["prompts"][rank])
            prompts.requeue(run["untrained"][rank])
        kept, buffer = run.get("replay", {}).get(str(self._world.rank)), self._built.rooms.replay
        if buffer is not None and kept is not None:
            await offload(lambda: buffer.load(kept), "replay")
        if self._positions is not None:
            self._positions.start(saved.positions())
        self._saved_version = saved.version
