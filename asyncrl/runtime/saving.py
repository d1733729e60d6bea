"""Checkpoints of a run: what is captured when, and how a run goes on from one.

Captured at one moment, between two steps: the trainer's state by a closure on the lane, the books and the prompt cursor on
the loop without an await in between. Written by a thread, from host copies. Admitted but untrained groups are kept by id:
on resume their prompts are admitted again first, with the same randomness, so nothing is skipped or repeated.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import Checkpoint, CheckpointStore
from asyncrl.config.describe import to_plain
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.distributed.world import World
from asyncrl.errors import CheckpointError, StallError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.snapshot import take

from .directory import RunDirectory
from .rooms import Built


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


@dataclass(frozen=True, slots=True)
class Written:
    seconds: float
    path: Path


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

    def due(self, version: int, last: bool) -> bool:
        """Whether a checkpoint of this version is asked for, by the interval or as the last one."""
        if self._store is None or self._built.core is None or version == self._saved_version or version == 0:
            return False
        every = self._config.checkpoint.every
        return (every is not None and version % every == 0) or (last and self._config.checkpoint.save_final)

    def final_due(self, version: int, error: BaseException | None) -> bool:
        """At the end, however it came. A stalled run writes none: what it would wait for may be what hangs.

        One rank alone may not capture at an error, since a capture of several ranks is a collective.
        """
        if isinstance(error, (StallError, CheckpointError)) or (self._world.world_size > 1 and error is not None):
            return isinstance(error, asyncio.CancelledError) and self.due(version, last=True)
        return self.due(version, last=True)

    async def save(self, version: int, prompts: PromptSource | None) -> Written:
        """Errors: CheckpointError, earlier checkpoints untouched."""
        assert self._store is not None and self._built.core is not None
        core, rooms = self._built.core, self._built.rooms
        started = time.perf_counter()
        with (
            self._recorder.span("checkpoint", track="checkpoint", version=version),
            self._recorder.wait("publish pump", f"the checkpoint of version {version}", on="disk", cause="checkpoint"),
        ):
            run = {
                "version": version,
                "turn": rooms.ledger.turn,
                "prompts": {str(self._world.rank): prompts.state_dict() if prompts else None},
                "untrained": {str(self._world.rank): self._untrained()},
                "world_size": self._world.world_size,
                "config": to_plain(self._config),
            }
            run = await self._gather(run)
            snapshot = await self._built.lanes[0].run(lambda: take(core), name="checkpoint/capture", priority=2)
            if snapshot.version != version:
                raise CheckpointError(f"captured version {snapshot.version} where {version} was asked for")
            path = self._store.path(version)
            if self._world.rank == 0:
                saved = await self._store.save_in_thread(
                    version,
                    lambda folder: snapshot.write_pretrained(folder, self._built.tokenizer),
                    state_writer(trainer=snapshot.state, run=run),
                )
                path = saved.path
        self._saved_version = version
        return Written(time.perf_counter() - started, path)

    def _untrained(self) -> list[int]:
        """Group ids of the prompt stream that were admitted and not trained, those of the open step included."""
        live = (ticket.group_id for ticket in self._built.rooms.ledger.live_groups())
        return sorted(group_id for group_id in live if group_id < EMBEDDED_GROUPS)

    async def _gather(self, run: dict[str, Any]) -> dict[str, Any]:
        """Every rank's cursor and untrained groups, in one record."""
        if self._world.world_size == 1:
            return run
        everybody = await self._built.lanes[0].run(
            lambda: self._world.all_gather_object(run), name="checkpoint/gather", priority=2
        )
        for key in ("prompts", "untrained"):
            run[key] = {rank: value for other in everybody for rank, value in other[key].items()}
        return run

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
        state = saved.checkpoint.trainer()
        await self._built.lanes[0].run(lambda: core.load_state_dict(state), name="checkpoint/restore", priority=2)
        if prompts is not None:
            rank = str(self._world.rank)
            prompts.load_state_dict(run["prompts"][rank])
            prompts.requeue(run["untrained"][rank])
        self._saved_version = saved.version


EMBEDDED_GROUPS = 1 << 40  # group ids of `rt.generate`, far above those of the prompt stream
