"""Checkpoints of a run: what is captured when, and how a run goes on from one.

Captured at one moment, between two steps: the trainer's state by a closure on the lane, the books and the prompt cursor on
the loop without an await in between. Written by a thread, from host copies, while training goes on; one at a time. Admitted
but untrained groups are kept by id: on resume their prompts are admitted again first, with the same randomness, so nothing is
skipped or repeated. What holds NaN or infinite values is never written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from asyncrl.checkpoint.shards import shards_writer, write_shard
from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import Checkpoint, CheckpointStore
from asyncrl.concurrency.descriptors import none_left
from asyncrl.concurrency.offload import offload
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, is_prompt
from asyncrl.data.replay import encode
from asyncrl.distributed.world import World
from asyncrl.errors import CheckpointError, ConfigError, DirectoryLost, DivergenceError, StallError, divergence_of
from asyncrl.pumps.pipeline import Ports
from asyncrl.telemetry.sinks import each_row
from asyncrl.training.snapshot import Snapshot, copy_to_host, non_finite_tensor, take_snapshot
from asyncrl.types import Ticket

from .directory import RunDirectory
from .positions import LEAVE_TIMEOUT_S, Positions, after_step

if TYPE_CHECKING:
    from asyncrl.training.trainer import TorchTrainer

Start: TypeAlias = Callable[..., None]  # of a supervisor: (name, work, *arguments)
# Of its grace period, the part in which a stopped run waits for other ranks. The rest is for writing.
_OF_GRACE = 0.6
# Bytes on disk for tokenizer, cursors and metrics, beside the tensors of a checkpoint.
_MARGIN = 16 << 20


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint to go on from."""

    checkpoint: Checkpoint
    evaluated: int  # the newest version that was evaluated; -1: none was

    @classmethod
    def to_resume(cls, config: Config, directory: RunDirectory | None) -> SavedRun | None:
        """None where the run starts anew. Errors: ConfigError."""
        if directory is None and config.resume is True:
            raise ConfigError("resume=true needs the run directory: a Runtime with write=False has none")
        return cls.latest(directory) if directory is not None and directory.goes_on else None

    @classmethod
    def latest(cls, directory: RunDirectory) -> SavedRun:
        """The newest whole checkpoint. Errors: CheckpointError where there is none."""
        found = CheckpointStore(directory.checkpoints).load_latest()
        if found is None:
            raise CheckpointError(f"resume=true: there is no checkpoint in {directory.checkpoints}")
        rows = (row for row in each_row(directory.metrics) if any(name.startswith("eval/") for name in row))
        return cls(found, max((row["step"] for row in rows if row["step"] <= found.version), default=-1))

    @property
    def lines(self) -> list[str]:
        """Lines for people: where the checkpoint lies."""
        unseen = "" if self.checkpoint.verified else " was written without checksums: damage in it would not be noticed"
        return [f"resume: {self.checkpoint.path}{unseen}"]

    @property
    def version(self) -> int:
        """The policy version that it holds."""
        return int(self.checkpoint.run["version"])

    @property
    def turn(self) -> int:
        """The ledger's turn at which the run goes on."""
        return int(self.checkpoint.run["turn"])

    def next_group(self, rank: int) -> int:
        """The first unused id for groups of an embedding program: ids key randomness, so none is used twice."""
        return int(self.checkpoint.run["next_group"][str(rank)])

    def positions(self) -> dict[int, dict[str, Any]]:
        """The books of each rank when the checkpoint was written, without its replay buffer."""
        run = self.checkpoint.run
        return {
            rank: {
                "turn": run["turn"],
                **{name: run[name][str(rank)] for name in ("prompts", "untrained", "next_group")},
            }
            for rank in range(run["world_size"])
        }


@dataclass(frozen=True, slots=True)
class Captured:
    """A version on the host, ready to be written. `snapshot` is None on ranks that write nothing more."""

    version: int
    run: dict[str, Any]
    snapshot: Snapshot | None
    started: float
    # Path and SHA-256 of each other rank's part, where the model is cut.
    shards: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # Ranks whose books are not known: those of the version before are saved.
    missing: tuple[int, ...] = ()


class Checkpointer:
    """See the module docstring."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory | None,
        world: World,
        ports: Ports,
        core: TorchTrainer | None,
        lane: Any,
        tokenizer: Any,
        prompts: PromptSource | None,
    ) -> None:
        """`core`: None in a dry run, which has nothing to save. `lane`: of the trainer. `prompts`: None where groups are
        submitted."""
        self._config = config
        self._directory = directory
        self._world = world
        self._ports = ports
        self._core = core
        self._lane = lane
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._recorder = ports.recorder
        self._store = CheckpointStore(directory.checkpoints, config.checkpoint.keep) if directory else None
        self._saved_version: int | None = None  # written, or on its way
        self._free = anyio.Event()  # nothing is being written
        self._free.set()
        self._ending = False  # the last checkpoint is being made
        self._since = time.monotonic()  # of the last checkpoint by time
        self._time_is_up = False
        # Raised after the next checkpoint.
        self._lost: DirectoryLost | None = None
        self._positions = (
            Positions(world.store("checkpoint"), world.rank, world.world_size) if world.world_size > 1 else None
        )

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written, or the last one made."""
        return self._ending or not self._free.is_set()

    def due(self, version: int, last: bool) -> bool:
        """Whether a checkpoint of this version is asked for: by the interval, by time, or as the last one."""
        if self._store is None or self._core is None or version == self._saved_version or version == 0:
            return False
        every = self._config.checkpoint.every
        by_interval = self._time_is_up or (every is not None and version % every == 0)
        return by_interval or (last and self._config.checkpoint.save_final)

    def final_due(self, version: int, error: BaseException | None, stopped: bool) -> bool:
        """At the end, however it came. A stalled run writes none: what it would wait for may be what hangs. `stopped`: it is being
        cancelled, whatever else the error says (the others may see that a rank was stopped in a collective that it has left).
        Where the model is cut, a rank that failed alone writes none: those whose parts it needs are only stopped later."""
        if isinstance(error, (StallError, CheckpointError)) and not none_left(error):
            return False
        core = self._core
        if core is not None and core.is_sharded and self._world.world_size > 1 and error is not None and not stopped:
            return False
        return self.due(version, last=True)

    async def announce(self, version: int, in_hand: int | None) -> None:
        """On every rank, at each version, before `due`: from now on rank 0 can write a checkpoint of it, whatever becomes of
        this rank. Several ranks agree here on a checkpoint by time: rank 0 looks at its clock, a version ahead."""
        positions, saving = self._positions, self._config.checkpoint
        if self._store is None or self._core is None:
            return
        by_time = saving.every_s is not None and saving.every is None
        up = self._lost is not None or (by_time and time.monotonic() - self._since >= (saving.every_s or 0.0))
        if up:
            self._since = time.monotonic()
        self._time_is_up = up
        if positions is not None and (saving.save_final or saving.every is not None or by_time):
            where = self._where(in_hand)
            self._time_is_up = await offload(
                lambda: positions.announce(version, where, save_next=up), "checkpoint-announce"
            )

    def books(self, in_hand: int | None) -> dict[str, Any]:
        """Where this rank is in its prompts, taken at one moment (no await). Take it before live groups are ended.
        `untrained`: ids of the prompt stream that were taken from the cursor and not trained: admitted ones, those of the open
        step included, and the one that waits for its slot."""
        replay = self._ports.replay
        return {**self._where(in_hand), "replay": None if replay is None else replay.snapshot()}

    def _where(self, in_hand: int | None) -> dict[str, Any]:
        ports = self._ports
        live = {ticket.group_id for ticket in ports.ledger.live_groups()} | (set() if in_hand is None else {in_hand})
        return {
            "turn": ports.ledger.turn,
            "prompts": self._prompts.state_dict() if self._prompts else None,
            "untrained": sorted(filter(is_prompt, live)),
            "next_group": ports.ids.next,
        }

    async def at_version(self, version: int, books: dict[str, Any], last: bool, start: Start) -> None:
        """Save between two steps: the caller waits for the copy on the host alone, `start` runs the writing beside it. The
        last version is waited for. Errors: CheckpointError, earlier checkpoints untouched; DivergenceError."""
        with self._recorder.wait("publish pump", "the checkpoint before", on="disk", cause="checkpoint"):
            await self._free.wait()  # two copies of a model at a time would be one too many
        captured = await self._capture(version, books)
        if last:
            await self._write(captured, last)
        else:
            self._free = anyio.Event()
            start("checkpoint", self._write, captured, last)

    def hurry(self, grace_s: float) -> None:
        """The run is about to be stopped, and has `grace_s` for its end: parts of other ranks may be those of dead ones."""
        if self._positions is not None:
            self._positions.hurry(_OF_GRACE * grace_s)

    async def leave(self, version: int, books: dict[str, Any], stopped_by: str | None) -> str | None:
        """A run of several ranks is cut short: agree with the others on where it ends, before this one leaves them. Returns the
        signal that stopped another rank, if one did."""
        positions = self._positions
        if positions is None:
            return None
        left = await offload(lambda: positions.leave(version, stopped_by), "leave")
        last = max((each.version for each in left.values()), default=version)
        if last > version and self._world.rank != 0:
            # The others have applied a step that this rank left before its end. Its groups are trained, and rank 0 may save it.
            trained = {ticket.group_id for ticket in await self._committed_elsewhere()}
            after = {name: value for name, value in books.items() if name != "replay"}
            after["turn"] += 1
            after["untrained"] = [group for group in books["untrained"] if group not in trained]
            await offload(lambda: positions.announce_last(last, after), "leave")
        return next((each.stopped_by for each in left.values() if each.stopped_by), None)

    async def _committed_elsewhere(self) -> list[Ticket]:
        ledger = self._ports.ledger
        # That rank had committed the step when it wrote its version, so this rank will see both.
        with anyio.move_on_after(LEAVE_TIMEOUT_S):
            while ledger.statistics().turn <= ledger.turn:
                seen = ledger.changes
                if ledger.statistics().turn <= ledger.turn:  # else it changed between the two lines
                    await ledger.wait_changed(seen)
        return ledger.committed_elsewhere()

    async def at_end(
        self,
        version: int,
        books: dict[str, Any],
        error: BaseException | None,
        stopped: bool,
        note: Callable[[str], None],
    ) -> None:
        """Save what is due after everything else ended and nothing is being written; see `final_due`. Errors: as `at_version`.
        Where an `error` ended the run, non-finite weights are a note of it, and a divergence gets a note that names the last good
        version. A divergence that an engine found is the cause of the errors of its callers."""
        diverged = divergence_of(error)
        if diverged is not None and diverged.spoiled:
            note(f"no checkpoint is made of version {version}, whose weights have diverged")
        elif self.final_due(version, error, stopped):
            note(f"writing a checkpoint of version {version}")
            self._ending = True
            try:
                captured = await self._capture(version, books)
                await self._write(captured, True)
                for rank in captured.missing:
                    note(f"rank {rank} did not announce where it is: a resume plays its last groups again")
            except DivergenceError as not_finite:
                if error is None:
                    not_finite.add_note(self.last_good())
                    raise
                (diverged or error).add_note(str(not_finite))
            finally:
                self._ending = False
        if diverged is not None and self._world.is_first:
            diverged.add_note(self.last_good())

    def bytes_needed(self) -> int:
        """Room on disk that the next checkpoint will take, about; 0 where none will be written."""
        core, saving = self._core, self._config.checkpoint
        if self._store is None or core is None or not (saving.save_final or saving.every or saving.every_s):
            return 0
        state = 3 * sum(master.nbytes for _, master in core.parameters.named_masters())  # and two moments
        state *= self._world.world_size if core.is_sharded else 1
        weights = core.policy.weights.working.nbytes
        return state + weights + (0 if core.reference is None else core.reference.nbytes) + _MARGIN

    def last_good(self) -> str:
        """The newest version on disk, in words."""
        version = self._store.latest_version() if self._store is not None else None
        if self._store is None or version is None:
            return "no version was saved"
        return f"the last good version, all of it finite, is {version}: {self._store.path(version)}"

    async def _capture(self, version: int, books: dict[str, Any]) -> Captured:
        """What is asked of the lane and of the other ranks."""
        assert self._store is not None and self._core is not None
        core, lane = self._core, self._lane
        started = time.perf_counter()
        with (
            self._recorder.span("checkpoint/capture", track="checkpoint", version=version),
            self._recorder.wait("publish pump", f"a copy of version {version}", on="the lane", cause="checkpoint"),
        ):
            if (replay := books["replay"]) is not None:
                books = {**books, "replay": await offload(lambda: encode(replay), "replay")}
            # Every rank holds all weights, so all of them raise the same error.
            if core.is_sharded:
                served = core.policy.weights.working
                self._require_sound(
                    await lane.run(lambda: non_finite_tensor(served, "weights"), name="checkpoint/check"), version
                )
            if core.is_sharded and self._world.rank:
                try:
                    books = {**books, "shard": await self._write_shard(core, version)}
                except (CheckpointError, DivergenceError) as error:
                    # Rank 0 waits for this part.
                    await self._gather(version, {**books, "shard": str(error)})
                    raise
            everybody, missing = await self._gather(version, books)
            if self._world.rank:
                self._saved_version = version
                return Captured(version, {}, None, started)
            by_rank = {
                name: {str(rank): each[name] for rank, each in enumerate(everybody)}
                for name in ("prompts", "untrained", "next_group", "replay")
            }
            run = {
                "version": version,
                "turn": books["turn"],
                **by_rank,
                "world_size": self._world.world_size,
                "config": self._config.model_dump(),
            }
            snapshot = await lane.run(lambda: take_snapshot(core), name="checkpoint/capture", priority=2)
            if snapshot.version != version:
                raise CheckpointError(f"captured version {snapshot.version} where {version} was asked for")
            others = range(1, self._world.world_size) if core.is_sharded else ()
            shards = {rank: everybody[rank]["shard"] for rank in others}
            if failed := [f"rank {rank}: {each}" for rank, each in shards.items() if isinstance(each, str)]:
                raise CheckpointError(f"version {version} was not saved: {'; '.join(failed)}")
            return Captured(version, run, snapshot, started, shards, tuple(missing))

    async def look(self, *, raises: bool = True) -> None:
        """Before a write: check that the run directory is still this run's. Errors: DirectoryLost. It is raised after the next
        checkpoint instead where that needs the parts of other ranks: once this rank has failed they write none."""
        if self._directory is None:
            return
        try:
            await offload(self._directory.look, "run-directory")
        except DirectoryLost as error:
            core = self._core
            waits = core is not None and core.is_sharded and self._positions and self._config.checkpoint.save_final
            if raises and not waits:
                raise
            self._lost = error

    async def _write(self, captured: Captured, last: bool) -> None:
        """Not cut short: a run that ends meanwhile waits for it."""
        store, snapshot, version = self._store, captured.snapshot, captured.version
        assert store is not None and self._directory is not None
        try:
            if snapshot is None:
                return
            self._saved_version = version
            with self._recorder.span("checkpoint", track="checkpoint", version=version), anyio.CancelScope(shield=True):
                self._require_sound(await offload(snapshot.non_finite_tensor, "checkpoint-check"), version)
                await self.look(raises=False)
                store.directory = self._directory.checkpoints
                await store.save_in_thread(
                    version,
                    lambda folder: snapshot.write_pretrained(folder, self._tokenizer, self._config.model.path),
                    state_writer(trainer=snapshot.state, run=captured.run),
                    shards_writer(store.directory, version, captured.shards),
                )
            self._recorder.count("time/checkpoint", time.perf_counter() - captured.started)
            if self._lost is not None:
                raise self._lost
        except CheckpointError:
            # At the end it is tried once more, where that may help.
            self._saved_version = None
            # Where the directory was lost during the write, the next checkpoint lies elsewhere.
            await self.look()
            if self._lost is None or last:
                raise
        finally:
            self._free.set()

    def _require_sound(self, place: str | None, version: int) -> None:
        if place is not None:
            self._saved_version = version  # and it is not asked for again
            raise DivergenceError(f"version {version} is not saved: {place} holds NaN or infinite values")

    async def _write_shard(self, core: TorchTrainer, version: int) -> list[str]:
        """Write this rank's part of a sharded state, before rank 0 takes it. Returns what `write_shard` does."""
        directory, rank = self._directory, self._world.rank
        assert directory is not None
        state = await self._lane.run(lambda: copy_to_host(core.state_dict()), name="checkpoint/capture", priority=2)
        self._require_sound(await offload(lambda: non_finite_tensor(state, "state"), "checkpoint-check"), version)
        if state["version"] != version:
            raise CheckpointError(f"captured version {state['version']} where {version} was asked for")
        folder = directory.shards(rank)
        try:
            return await offload(lambda: write_shard(folder, version, rank, state), "checkpoint-shard")
        except CheckpointError:
            if (elsewhere := directory.shards(rank)) == folder:
                raise
            # The directory was lost during the write.
            return await offload(lambda: write_shard(elsewhere, version, rank, state), "checkpoint-shard")

    async def _gather(self, version: int, books: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """See `Positions.gather`. The books of a rank that died after the step was applied come from the shared ledger."""
        positions, core = self._positions, self._core
        if positions is None:
            return [books], []
        sharded = core is not None and core.is_sharded
        everybody, missing = await offload(
            lambda: positions.gather(version, books, sharded=sharded), "checkpoint-gather"
        )
        ledger, turn = self._ports.ledger, books["turn"]
        for rank in [*missing]:
            if ledger.statistics().turn == turn == everybody[rank]["turn"] + 1:
                trained = ledger.last_step(rank)
                everybody[rank] |= after_step(everybody[rank], trained, self._world.world_size)
                missing.remove(rank)
        return everybody, missing

    async def restore(self, saved: SavedRun) -> None:
        """Weights, optimizer, schedule, version; prompt cursor; untrained groups first. Errors: CheckpointError, DataError."""
        core, run = self._core, saved.checkpoint.run
        if core is None:
            raise CheckpointError("resume=true: a dry run has nothing to resume")
        if run["world_size"] != self._world.world_size:
            raise CheckpointError(
                f"resume=true: the checkpoint was written by {run['world_size']} ranks and this run has {self._world.world_size}; "
                "start it with the same number"
            )
        from asyncrl.models.rotary import require_frequencies  # transformers, which a dry run does without

        require_frequencies(
            core.policy.config,
            self._config.data.max_prompt_tokens,  # which no resume changes
            before=run["config"]["rollout"]["max_tokens"],
            now=self._config.rollout.max_tokens,
        )
        state = await offload(saved.checkpoint.trainer, "restore")
        await self._lane.run(lambda: core.load_state_dict(state), name="checkpoint/restore", priority=2)
        # The engines have started with the weights of model.path.
        for sink in self._ports.sinks:
            await sink.update_weights(core.version)
        if (prompts := self._prompts) is not None:
            rank = str(self._world.rank)
            prompts.load_state_dict(run["prompts"][rank])
            prompts.requeue(run["untrained"][rank])
        kept, buffer = run.get("replay", {}).get(str(self._world.rank)), self._ports.replay
        if buffer is not None and kept is not None:
            await offload(lambda: buffer.load(kept), "replay")
        if self._positions is not None:
            self._positions.start(saved.positions())
        self._saved_version = saved.version
