"""Checkpoints of a run: when a checkpoint is made, how its state is captured and written, and how a run resumes.

The whole state is captured at one moment, between two steps. A closure on the lane copies the trainer's state to the host. The
event loop reads ledger and prompt cursor, without an await between the two. A thread then writes the copies, one checkpoint at a
time, while the training continues. State with NaN or infinite values is never written.

Prompts whose groups were admitted and not trained are saved as ids. A resumed run plays them first, with the same random numbers.
So no prompt is skipped. No prompt is trained twice, unless a rank died before it announced its position (`Captured.missing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from asyncrl.checkpoint.shards import SHARDS, shards_writer, write_shard
from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import Checkpoint, CheckpointStore
from asyncrl.concurrency.descriptors import descriptor_advice
from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import row_limit
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, is_prompt
from asyncrl.data.replay import encode
from asyncrl.distributed.world import World
from asyncrl.errors import CheckpointError, ConfigError, DivergenceError, RankLost, StallError, divergence_of
from asyncrl.pumps.pipeline import Ports
from asyncrl.telemetry.sinks import each_row
from asyncrl.training.snapshot import Snapshot, copy_to_host, non_finite_tensor, take_snapshot

from .directory import RunDirectory
from .positions import Positions, RankState, after_step

if TYPE_CHECKING:
    from asyncrl.training.trainer import TorchTrainer

StartTask: TypeAlias = Callable[..., None]  # (name, work, *arguments)
# Bytes on disk for tokenizer, cursors and metrics, beside the tensors of a checkpoint.
_MARGIN = 16 << 20


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The checkpoint of a run that is resumed."""

    checkpoint: Checkpoint
    newest_evaluated: int  # a version; -1: none was evaluated

    @classmethod
    def to_resume(cls, config: Config, directory: RunDirectory | None) -> SavedRun | None:
        """The checkpoint to resume, or None for a new run. Errors: ConfigError; CheckpointError if there is no checkpoint."""
        if directory is None and config.resume is True:
            raise ConfigError("resume=true needs the run directory: a Runtime with write=False has none")
        return cls.latest(directory) if directory is not None and directory.resumes else None

    @classmethod
    def latest(cls, directory: RunDirectory) -> SavedRun:
        """The newest checkpoint. Errors: CheckpointError if there is none or the checkpoint is damaged."""
        checkpoint = CheckpointStore(directory.checkpoints).load_latest()
        if checkpoint is None:
            raise CheckpointError(f"resume=true: there is no checkpoint in {directory.checkpoints}")
        rows = (row for row in each_row(directory.metrics) if any(name.startswith("eval/") for name in row))
        return cls(checkpoint, max((row["step"] for row in rows if row["step"] <= checkpoint.version), default=-1))

    @property
    def version(self) -> int:
        return int(self.checkpoint.run["version"])

    @property
    def turn(self) -> int:
        """The first turn of the resumed ledger."""
        return int(self.checkpoint.run["turn"])

    def require_cursor(self, one_cursor: bool) -> None:
        """`one_cursor`: this run has one prompt cursor for all ranks. Errors: CheckpointError for the other kind of checkpoint."""
        prompts = self.checkpoint.run["prompts"]
        # A checkpoint of one training rank fits both kinds of run.
        if prompts["0"] is None or "1" not in prompts or (prompts["1"] is None) is one_cursor:
            return
        kinds = ["one prompt cursor for each rank", "one prompt cursor for all ranks"]
        remedy = "without distributed.roles and distributed.context"
        if not one_cursor:
            remedy = (
                "with distributed.roles, so that some rank only trains or only generates, or with distributed.context"
            )
        raise CheckpointError(
            f"resume=true: the checkpoint has {kinds[not one_cursor]}, and this run has {kinds[one_cursor]}; resume it {remedy}"
        )

    def next_group(self, rank: int) -> int:
        """The first unused id for groups of a program or a door. An id seeds random numbers, so no id may be used twice."""
        return int(self.checkpoint.run["next_group"][str(rank)])

    def positions(self) -> dict[int, RankState]:
        """Index of a training rank, as in `Positions` -> its state when the checkpoint was written, without the replay buffer."""
        run, names = self.checkpoint.run, ("prompts", "untrained", "next_group")
        ranks = range(run["world_size"])
        return {rank: {"turn": run["turn"], **{name: run[name][str(rank)] for name in names}} for rank in ranks}


@dataclass(frozen=True, slots=True)
class Captured:
    """Host copies of one version, ready to be written. `snapshot` is None on ranks that have nothing to write."""

    version: int
    run: dict[str, Any]
    snapshot: Snapshot | None
    started: float
    # Sharded model: rank -> path and SHA-256 of its part. Only of ranks that share a copy of the model with rank 0.
    shards: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # Ranks that did not announce the version. Their state at the version before is saved.
    missing: tuple[int, ...] = ()


@dataclass(eq=False)
class Checkpointer:
    """Decides when a checkpoint is due, captures and writes checkpoints, and restores a run from a checkpoint."""

    config: Config
    directory: RunDirectory | None
    world: World
    ports: Ports
    core: TorchTrainer | None  # None with `train.kind: dry_run`: such a run saves nothing
    lane: Any  # the trainer's
    tokenizer: Any
    prompts: PromptSource | None  # as in `OpenRun`
    # Ids of prompts that other ranks have taken from the cursor and that are not in the ledger yet.
    unadmitted: Callable[[], set[int]]
    positions: Positions | None  # None if there can be no other rank

    def __post_init__(self) -> None:
        directory, config = self.directory, self.config
        self._store = CheckpointStore(directory.checkpoints, config.checkpoint.keep) if directory else None
        # The newest version that was written, is being written, or was refused.
        self._saved_version: int | None = None
        self._idle = anyio.Event()  # not set while a copy waits to be written, or is written
        self._idle.set()
        self.saving = False  # a checkpoint is being written, or captured by `at_end`
        self._last_by_time = time.monotonic()  # when `every_s` last made a checkpoint due
        self._due_by_time = False
        # Ranks that only generate have no position of their own: rank 0 has the prompt cursor.
        self._ranks = len(self.world.roles.train)

    def due(self, version: int, last: bool) -> bool:
        """Whether to save this version: by `checkpoint.every` or `checkpoint.every_s`, or as the `last` (`save_final`)."""
        if self._store is None or self.core is None or version == self._saved_version or version == 0:
            return False
        if self.directory is not None and self.directory.lost:
            return False
        every = self.config.checkpoint.every
        by_interval = self._due_by_time or (every is not None and version % every == 0)
        return by_interval or (last and self.config.checkpoint.save_final)

    def final_due(self, version: int, error: BaseException | None, stopped: bool) -> bool:
        """Whether to save `version` at the end of a run. `stopped`: the run is being cancelled. Even then `error` may be another
        error than the cancellation, for example the error of a collective that another stopped rank left.
        After a stall or a failed checkpoint nothing is saved: the save could hang or fail, too. With a sharded model, a rank that
        failed alone saves nothing: the other ranks are still running and write no parts."""
        # If the process has run out of file descriptors, the reserved descriptors suffice for a checkpoint.
        if isinstance(error, (StallError, CheckpointError)) and not descriptor_advice(error):
            return False
        core = self.core
        if core is not None and core.is_sharded and self._ranks > 1 and error is not None and not stopped:
            return False
        return self.due(version, last=True)

    async def announce(self, version: int, waiting_prompt: int | None) -> None:
        """Call on every rank at each version, before `due`. If the model is not sharded, rank 0 can then save the version without
        this rank. For checkpoints by time, rank 0 reads its clock one version ahead, so that all ranks save the same version.
        `waiting_prompt`: the id of the prompt that was taken from the cursor and waits for a slot; None: no prompt waits."""
        positions, settings = self.positions, self.config.checkpoint
        if self._store is None or self.core is None:
            return
        every_s = settings.every_s if settings.every is None else None
        self._due_by_time = every_s is not None and time.monotonic() - self._last_by_time >= every_s
        if self._due_by_time:
            self._last_by_time = time.monotonic()
        if positions is not None and (settings.save_final or settings.every is not None or every_s is not None):
            state = self._position(waiting_prompt)
            self._due_by_time = await positions.announce(version, state, save_next=self._due_by_time)

    def rank_state(self, waiting_prompt: int | None) -> RankState:
        """The position of this rank in its prompts, and its replay buffer, read without an await. Call before `GroupBook.end_all`.
        In the result `untrained` has the ids of prompts that were taken and not trained. They include the groups of the open step
        and the group `waiting_prompt`, which waits for its slot."""
        replay = self.ports.replay
        return {**self._position(waiting_prompt), "replay": None if replay is None else replay.snapshot()}

    def _position(self, waiting_prompt: int | None) -> RankState:
        ports = self.ports
        waiting = set() if waiting_prompt is None else {waiting_prompt}
        # If there is one cursor for all ranks, rank 0 saves the groups of all ranks.
        one_cursor = self.world.roles.differ
        has_cursor = self.world.is_first or not one_cursor
        tickets = ports.ledger.live_groups(everywhere=one_cursor and has_cursor)
        live = {ticket.group_id for ticket in tickets} | waiting | self.unadmitted()
        return {
            "turn": ports.ledger.turn,
            "prompts": self.prompts.state_dict() if self.prompts and has_cursor else None,
            "untrained": sorted(filter(is_prompt, live)) if has_cursor else [],
            "next_group": ports.ids.next,
        }

    async def at_version(self, version: int, state: RankState, last: bool, start: StartTask) -> None:
        """Save between two steps. Returns after the copy to the host. A task of `start` writes the copy during later steps. The
        `last` version is written before the return. Errors: CheckpointError (earlier checkpoints are intact), DivergenceError."""
        with self.ports.recorder.wait("publish pump", "the checkpoint before", on="disk", cause="checkpoint"):
            # The host may lack memory for a second copy of the model.
            await self._idle.wait()
        captured = await self._capture(version, state)
        if last:
            await self._write(captured)
        else:
            self._idle = anyio.Event()
            start("checkpoint", self._write, captured)

    async def at_end(
        self, version: int, state: RankState, error: BaseException | None, stopped: bool, note: Callable[[str], None]
    ) -> None:
        """Write the last checkpoint, if `final_due`. Call after all pumps have ended, while no checkpoint is being written.
        `error`: the error that ended the run, or None. `note` prints a line. If the weights are not finite, `error` gets a note.
        After a divergence `error` gets a note on rank 0 that names the last good version. A DivergenceError among the causes of
        `error` gets these notes in place of `error`. Errors: as `at_version`; a DivergenceError only if `error` is None."""
        noted: BaseException | None = divergence_of(error)
        if isinstance(noted, DivergenceError) and noted.unusable_weights:
            note(f"no checkpoint is made of version {version}, whose weights have diverged")
        elif self.final_due(version, error, stopped):
            note(f"writing a checkpoint of version {version}")
            self.saving = True
            try:
                captured = await self._capture(version, state)
                await self._write(captured)
                for rank in captured.missing:
                    note(f"rank {rank} did not announce its position: a resume plays its last groups again")
            except DivergenceError as not_finite:
                if error is None:
                    not_finite.add_note(self.last_good())
                    raise
                noted = noted or error
                noted.add_note(str(not_finite))
            finally:
                self.saving = False
        elif isinstance(error, RankLost) and self.core is not None and self.core.is_sharded:
            error.add_note(
                f"version {version} is not saved, because the lost rank held a part of it (distributed.sharding is fsdp): "
                f"{self.last_good()}"
            )
        if noted is not None and self.world.is_first:
            noted.add_note(self.last_good())

    def bytes_needed(self) -> int:
        """The approximate size of the next checkpoint in bytes; 0 if the run writes no checkpoints."""
        core, settings = self.core, self.config.checkpoint
        if self._store is None or core is None or not (settings.save_final or settings.every or settings.every_s):
            return 0
        # Weights and two moments.
        state = 3 * core.shards * sum(master.nbytes for _, master in core.parameters.named_masters())
        weights = core.policy.weights.working.nbytes
        return state + weights + (0 if core.reference is None else core.reference.nbytes) + _MARGIN

    def last_good(self) -> str:
        """A sentence that names the newest version on disk."""
        version = self._store.latest_version() if self._store is not None else None
        if self._store is None or version is None:
            return "no version was saved"
        return f"the newest saved version without NaN or infinite values is {version}: {self._store.path(version)}"

    async def _capture(self, version: int, state: RankState) -> Captured:
        """Copy the trainer's state on the lane, and collect the state of all ranks on rank 0."""
        assert self._store is not None and self.core is not None
        core, lane, trainers = self.core, self.lane, self.world.roles.train
        started = time.perf_counter()
        with (
            self.ports.recorder.span("checkpoint/capture", track="checkpoint", version=version),
            self.ports.recorder.wait("publish pump", f"a copy of version {version}", on="the lane", cause="checkpoint"),
        ):
            if (replay := state["replay"]) is not None:
                state = {**state, "replay": await offload(lambda: encode(replay), "replay")}
            # Every rank has all weights in the matmul dtype (`served`). So all ranks raise this error, and none waits for another.
            if core.is_sharded:
                served = core.policy.weights.working
                self._require_finite(
                    await lane.run(lambda: non_finite_tensor(served, "weights"), name="checkpoint/check"), version
                )
            if 0 < self.world.train.rank < core.shards:
                try:
                    state = {**state, "shard": await self._write_shard(core, version)}
                except (CheckpointError, DivergenceError) as error:
                    # Rank 0 waits for this part, and gets the error instead.
                    await self._gather(version, {**state, "shard": str(error)})
                    raise
            states, missing = await self._gather(version, state)
            if self.world.rank:
                self._saved_version = version
                return Captured(version, {}, None, started)
            run: dict[str, Any] = {"version": version, "turn": state["turn"], "world_size": self._ranks}
            run["config"] = self.config.model_dump()
            for name in ("prompts", "untrained", "next_group", "replay"):
                run[name] = {str(rank): rank_state[name] for rank, rank_state in enumerate(states)}
            snapshot = await lane.run(lambda: take_snapshot(core), name="checkpoint/capture", priority=2)
            if snapshot.version != version:
                raise CheckpointError(f"captured version {snapshot.version} where {version} was asked for")
            shards = {rank: states[rank]["shard"] for rank in range(1, core.shards)}
            # The entry of a part that was not written is a string: the error.
            failed = [(trainers[rank], shard) for rank, shard in shards.items() if isinstance(shard, str)]
            if failures := [f"rank {rank}: {error}" for rank, error in failed]:
                raise CheckpointError(f"version {version} was not saved: {'; '.join(failures)}")
            return Captured(version, run, snapshot, started, shards, tuple(trainers[rank] for rank in missing))

    async def check_directory(self) -> None:
        """Call at each version and checkpoint. Errors: DirectoryLost if the run directory is no longer this run's."""
        if self.directory is not None:
            await offload(self.directory.check_still_ours, "run-directory")

    async def _write(self, captured: Captured) -> None:
        """Write on a thread. A cancelled caller waits until the writing has ended."""
        store, snapshot, version = self._store, captured.snapshot, captured.version
        assert store is not None and self.directory is not None
        try:
            if snapshot is None:
                return
            self._saved_version, self.saving = version, True
            with (
                self.ports.recorder.span("checkpoint", track="checkpoint", version=version),
                anyio.CancelScope(shield=True),
            ):
                self._require_finite(await offload(snapshot.non_finite_tensor, "checkpoint-check"), version)
                await self.check_directory()
                await store.save_in_thread(
                    version,
                    lambda folder: snapshot.write_pretrained(folder, self.tokenizer, self.config.model.path),
                    state_writer(trainer=snapshot.state, run=captured.run),
                    shards_writer(store.directory, version, captured.shards),
                )
            self.ports.recorder.count("time/checkpoint", time.perf_counter() - captured.started)
        except CheckpointError:
            # Lets the end of the run try this version again (`final_due`).
            self._saved_version = None
            # The directory may have been lost during the write.
            await self.check_directory()
            raise
        finally:
            self.saving = False
            self._idle.set()

    def _require_finite(self, place: str | None, version: int) -> None:
        """`place`: the tensor with NaN or infinite values, or None."""
        if place is not None:
            self._saved_version = version  # so that `due` refuses it
            raise DivergenceError(f"version {version} is not saved: {place} holds NaN or infinite values")

    async def _write_shard(self, core: TorchTrainer, version: int) -> list[str]:
        """Write this rank's part of a sharded state, before rank 0 collects the parts. Returns the result of `write_shard`."""
        directory, rank = self.directory, self.world.train.rank
        assert directory is not None
        state = await self.lane.run(lambda: copy_to_host(core.state_dict()), name="checkpoint/capture", priority=2)
        self._require_finite(await offload(lambda: non_finite_tensor(state, "state"), "checkpoint-check"), version)
        if state["version"] != version:
            raise CheckpointError(f"captured version {state['version']} where {version} was asked for")
        folder = directory.checkpoints / SHARDS
        return await offload(lambda: write_shard(folder, version, rank, state), "checkpoint-shard")

    async def _gather(self, version: int, state: RankState) -> tuple[list[RankState], list[int]]:
        """As `Positions.gather`. If a rank ended before it announced the last version, its state is computed from the ledger."""
        positions, core = self.positions, self.core
        if positions is None:
            return [state], []
        sharded = core is not None and core.is_sharded
        states, missing = await positions.gather(version, state, sharded=sharded)
        ledger, turn = self.ports.ledger, state["turn"]
        for rank in [*missing]:
            # The missing rank announced its state one step ago, and all ranks have committed that step.
            if ledger.statistics().turn == turn and states[rank]["turn"] == turn - 1:
                trained = ledger.last_step(self.world.roles.train[rank])
                states[rank] |= after_step(states[rank], trained, self._ranks)
                missing.remove(rank)
        return states, missing

    async def restore(self, saved: SavedRun) -> None:
        """Restore weights, optimizer, schedule, version, replay buffer and prompt cursor. Prompts of untrained groups come first.
        Errors: CheckpointError, DataError."""
        core, run = self.core, saved.checkpoint.run
        if core is None:
            raise CheckpointError("resume=true: a run with train.kind=dry_run has nothing to resume")
        rank = str(self.world.train.rank)
        saved.require_cursor(self.world.roles.differ)
        # The number of ranks may change only if every rank holds the whole model and all ranks share one cursor.
        needs_same_ranks = core.is_sharded or not self.world.roles.differ
        if needs_same_ranks and run["world_size"] != self._ranks:
            raise CheckpointError(
                f"resume=true: the checkpoint was written by {run['world_size']} ranks and this run has {self._ranks}; start the "
                f"run with {run['world_size']} ranks"
            )
        from asyncrl.models.rotary import require_frequencies  # imports transformers, which takes seconds

        data, rollout = run["config"]["data"], run["config"]["rollout"]
        before = rollout.get("max_context") or data["max_prompt_tokens"] + rollout["max_tokens"]
        require_frequencies(core.policy.config, before=before, now=row_limit(self.config))
        state = await offload(saved.checkpoint.trainer, "restore")
        await self.lane.run(lambda: core.load_state_dict(state), name="checkpoint/restore", priority=2)
        # The engines still have the weights of `model.path`.
        for sink in self.ports.sinks:
            await sink.update_weights(core.version)
        if (prompts := self.prompts) is not None and (self.world.is_first or not self.world.roles.differ):
            prompts.load_state_dict(run["prompts"][rank])
            prompts.requeue(run["untrained"][rank])
        replay, buffer = run.get("replay", {}).get(rank), self.ports.replay
        if buffer is not None and replay is not None:
            await offload(lambda: buffer.load(replay), "replay")
        if self.positions is not None:
            self.positions.resumed = saved.positions()
        self._saved_version = saved.version
