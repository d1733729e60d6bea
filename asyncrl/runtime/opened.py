"""The open run: its parts, the work at each version (evaluation, metrics, checkpoint), and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncrl.concurrency.describe import describe_wait
from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.concurrency.watchdog import ProgressLimit
from asyncrl.config.resolve import versions_per_batch
from asyncrl.data.prompts import PromptSource
from asyncrl.environments.session import Agents
from asyncrl.errors import (
    ConfigError,
    LedgerError,
    LifecycleError,
    PlatformError,
    RankLost,
    StallError,
    TransportError,
    WorkerDied,
    first_line,
)
from asyncrl.generation.lifecycle import BaseEngine
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.follow import EngineVersion, Remote
from asyncrl.pumps.graph import Graph, RoleParts
from asyncrl.pumps.metrics import COUNTED, logged_means
from asyncrl.pumps.pipeline import Ports, Round, StepReport
from asyncrl.telemetry.lag import monitor
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import LedgerStatistics, Prompt

from .decided import Decided
from .endpoint import LazyEndpoint
from .journal import Journal
from .performance import StepProfiler, needed_flop
from .positions import Positions
from .progress import Listeners, Stages
from .saving import Checkpointer, SavedRun

if TYPE_CHECKING:
    from asyncrl.distributed.connections import Connections
    from asyncrl.distributed.joining import JoinHandler
    from asyncrl.distributed.line import LineClient, LineServer
    from asyncrl.distributed.line_ledger import LineLedger

    # These modules import transformers, which takes seconds, and which `train.kind: dry_run` does not need.
    from asyncrl.models.policy import PolicyModel
    from asyncrl.models.reward_model import RewardModel
    from asyncrl.training.trainer import TorchTrainer
    from asyncrl.weights.orders import ServedOrders

    from .gate import Verdict

_SHOWN_EVERY_S = 1.0
REWARD_MODELS = "reward models"
# The kind of the message with which a rank that ends early says why, and the time limit for sending the message.
END_REASON, _SEND_S = "ended", 1.0
# If one of these errors, or a signal, ends a rank that only generates, the run goes on, because other ranks may be well.
_OF_ONE_RANK = PlatformError, TransportError, WorkerDied, StallError, RankLost


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The state of a run, or its result. `books`: numbers of groups, over all ranks. `reasons`: `dropped: REASON` or
    `failed: REASON` -> number of groups of this rank (on rank 0, if ranks have different roles: of all ranks). `shares`: metrics
    `busy/*` and `idle/*`, as fractions of the run. `history`: (version, metrics) of the newest 2,000 lines of metrics."""

    version: int
    books: LedgerStatistics
    reasons: Mapping[str, int]
    seconds: float
    shares: Mapping[str, float]
    history: Sequence[tuple[int, Mapping[str, float]]]


class OpenRun:
    """The parts of an open run. `opening.open_run` sets the attributes below."""

    # With `train.kind: dry_run` there is no policy, core, verdict, round, reward model or model description.
    saved: SavedRun | None = None  # the checkpoint that is resumed
    journal: Journal
    lanes: tuple[Any, ...]  # ThreadLane | SimulatedLane; the first is the trainer's
    tokenizer: Any
    policy: PolicyModel | None = None
    core: TorchTrainer | None = None
    peak_flops: float | None = None  # FLOP/s of the GPU (performance.py)
    verdict: Verdict | None = None
    round: Round | None = None  # only under fsdp with collectives in each microbatch
    agents: Agents | None = None  # on ranks that generate
    endpoint: LazyEndpoint | None = None  # on ranks that generate
    reward_models: Sequence[RewardModel] = ()  # in the order of `reward.model`, on the first lane
    # On rank 0: the first rank that has loaded its reward models, and their fingerprints.
    first_rewards: tuple[int, list[str]] | None = None
    placement_line: str = ""  # a sentence: device and threads of the engine
    line: LineServer | LineClient | None = None  # to the other ranks; None if there can be no other ranks
    ledger: LineLedger | None = None  # made with the line
    positions: Positions | None = None  # made with the line, on ranks that train
    # Only if ranks have different roles:
    dispatch: Dispatch | None = None  # on rank 0
    remote: Remote | None = None  # on other ranks
    engine_version: EngineVersion | None = None  # on ranks that only generate
    # From `workers.describe_model`, on ranks that only generate.
    model_description: Mapping[str, Any] | None = None
    orders: ServedOrders | None = None  # on rank 0
    entrance: JoinHandler | None = None  # on rank 0, if nodes may join
    connections: Connections
    role_parts: RoleParts | None = None
    ports: Ports
    checkpointer: Checkpointer
    profiler: StepProfiler
    prompts: PromptSource | None = None  # None: groups from outside, or a rank that reads no prompts
    graph: Graph

    def __init__(
        self, decided: Decided, recorder: Recorder, listeners: Listeners, stages: Stages, stack: AsyncExitStack
    ) -> None:
        """`stack`: closes the parts in reverse order."""
        self.decided = decided
        self.config, self.world, self.directory = decided.config, decided.world, decided.directory
        self.recorder = recorder
        self.listeners = listeners
        self.stages = stages
        self.stack = stack
        self.supervisor = Supervisor()
        self.stopped_by: str | None = None  # the name of a signal
        # Another rank -> the reason in its `END_REASON`. Rank 0 has reasons of training ranks, other ranks the reason of rank 0.
        self.end_reasons: dict[str, RankLost] = {}
        self.ended_by: BaseException | None = None  # the error that ended the pumps
        self.stalled = False  # another rank has reported a standstill of the run
        # On rank 0: a lost rank without which the run goes on -> time, reason.
        self.lost: dict[str, tuple[float, str]] = {}
        self._began = time.perf_counter()
        self._stop_agreed = False
        self._ran = False
        self._in_at_version = False  # whether `_at_version` is running

    @property
    def base(self) -> int:
        """`Ports.base`: the version from which turns are counted."""
        if (joined := self.world.joined) is not None:
            return joined.base
        return self.saved.version - self.saved.turn * versions_per_batch(self.config) if self.saved else 0

    def own_agents(self) -> Agents:
        """The `Agents` for episodes of a program. Errors: LifecycleError on a rank that does not generate."""
        if self.agents is None:
            raise LifecycleError("this rank does not generate (distributed.roles); play episodes on a rank that does")
        return self.agents

    def make_pumps(self, held_out: list[Prompt]) -> None:
        """Make the pumps. `held_out`: the prompts of evaluations; empty without evaluations."""
        newest_evaluated = self.saved.newest_evaluated if self.saved else -1
        callbacks = self._at_version, self._on_step, self._catch_up
        self.graph = Graph(self.ports, self.prompts, held_out, *callbacks, newest_evaluated, self.role_parts)
        self.graph.on_finish = self.listeners.close

    def start(self) -> None:
        """Start the pumps. The supervisor must be open."""
        self.supervisor.start("event loop lag", monitor, self.recorder)
        self.graph.start(self.supervisor)
        self.supervisor.start("first step", self._show_first_step)

    async def _show_first_step(self) -> None:
        """Update the status line until the first step is committed: on a slow machine this takes minutes."""
        start = self.ports.trainer.version
        while self.ports.trainer.version == start:
            self.journal.live.status(self._first_step_status())
            await anyio.sleep(_SHOWN_EVERY_S)

    def _first_step_status(self) -> str:
        """A stage, a colon and counts. The main count comes first: a narrow terminal cuts the end off. Groups are counted over all
        ranks, completions and tokens on this rank."""
        tokens = f"{self.ports.engine.statistics().get('tokens', 0.0):,.0f} tokens sampled"
        if self.graph.evaluations.progress is not None:
            done, total = self.graph.evaluations.progress
            return f"evaluating: {done}/{total} completions, {tokens}"
        claimed, groups = self.ports.ledger.statistics().claimed, self.config.rollout.groups_per_step
        scored = f"{self.graph.intake.scored:,.0f} completions scored"
        return f"first step: {claimed}/{groups} groups in training, {scored}, {tokens}"

    async def run(self) -> RunSummary:
        """Train to the end on the prompts or on the groups of the ring. Errors: ConfigError if the run has neither; LifecycleError
        if called twice; the error that ends the pumps."""
        if self.prompts is None and self.config.door.ring is None and self.role_parts is None:
            raise ConfigError("Runtime.run needs prompts: set data.train or door.ring, or pass Runtime prompts=[...]")
        if self._ran:
            raise LifecycleError("Runtime.run was called twice; make a new Runtime for a second run")
        self._ran = True
        await self.graph.run(self.supervisor)
        await self._wait_for_other_ranks()
        self.stages.end()
        return self.summary()

    def summary(self) -> RunSummary:
        return RunSummary(
            version=self.ports.trainer.version,
            books=self.ports.ledger.statistics(),
            reasons=dict(self.ports.book.reasons + (self.dispatch.reasons if self.dispatch else Counter())),
            seconds=time.perf_counter() - self._began,
            shares=self.journal.budget.metrics(),
            history=[*self.journal.history],
        )

    def progress_limit(self) -> ProgressLimit | None:
        """The watchdog's limit while the pumps run; None if they have no work. Called on the watchdog's thread."""
        limits = self.config.watchdog
        if self.graph.ending or self.supervisor.ending:
            # No counters, only a time limit: a task that ignores its cancellation may generate tokens for ever.
            error = self.supervisor.failure
            why = "" if error is None else f" ({first_line(error)})"
            sentence = f"a task that was cancelled when the training ended{why} has not ended"
            return ProgressLimit((), limits.stage_timeout_s, sentence)
        if not (self.graph.busy or self._in_at_version or self.graph.evaluations.progress):
            return None
        if self.role_parts is not None and not self.world.is_first:
            return None  # only rank 0 knows the progress of all ranks that generate
        books = self.ports.ledger.statistics()
        groups = books.admitted, books.trained, books.dropped, books.failed
        # Tokens count as progress, so a long episode is no standstill. An endless episode is ended by `rollout.timeout_s`.
        remote = self.dispatch.progress if self.dispatch else ()
        counters = (*groups, *remote, self.graph.intake.scored, self.ports.engine.statistics().get("tokens", 0.0))
        sentence = "nothing was generated, scored or trained"
        if self.dispatch is not None and not self.dispatch.generating_count:
            reason = f" ({[*self.lost.values()][-1][1]})" if self.lost else ""
            sentence = f"no rank generates, and no node has joined{reason}"
        return ProgressLimit(counters, limits.stall_timeout_s, sentence, remote_cause=self.ports.ledger.remote_cause)

    def _on_step(self, report: StepReport) -> None:
        extra: dict[str, float] = {}
        seconds = report.metrics.get("time/step")
        if self.peak_flops is not None and self.policy is not None and seconds:
            # `distributed.context` ranks divide the work on each microbatch, so this rank did only its part of the work.
            flop = needed_flop(report, self.policy, self.config) / self.config.distributed.context
            extra["perf/mfu"] = flop / seconds / self.peak_flops
        if self.prompts is not None:
            counts = self.prompts.statistics()
            extra |= {f"data/{name}": float(counts[name]) for name in ("epoch", "delivered", "cut", "skipped")}
        self.listeners.push(self.journal.on_commit(report, extra))

    async def _at_version(self, version: int, first: bool = False) -> None:
        """Evaluate if due, write the line of metrics, and save a checkpoint if due. The slots of the step are released afterwards.
        The checkpoint comes last, so a run that is killed and resumed misses no line. If the evaluation runs beside further steps,
        line and checkpoint are written after it, but the checkpoint's state is copied at once. `first`: the run's first version."""
        self._in_at_version = True
        try:
            await self.checkpointer.check_directory()
            await self.profiler.at(version)
            await self._agree_on_time()
            await self.checkpointer.announce(version, self.graph.waiting_prompt)
            last = self.graph.is_last_version()
            # Other ranks send their last counts at the end of the run. `hold` lets the last line wait for them.
            write = self.journal.hold if last and self.dispatch is not None else self.journal.write
            await self.graph.evaluate(version, partial(write, version), first=first, last=last)
            if self.checkpointer.due(version, last):
                state = self.checkpointer.rank_state(self.graph.waiting_prompt)
                await self.checkpointer.at_version(version, state, last, self._start_after_evaluations)
        finally:
            self._in_at_version = False

    async def _catch_up(self, last: bool) -> None:
        """Before the first step (`last=False`): does the work of `_at_version` for the first version of a new run, or an evaluation
        that a resumed run missed. After the last step (`last=True`): rank 0 evaluates the last version if `_at_version` has not."""
        version = self.ports.trainer.version
        if not last and self.saved is None:
            await self._at_version(version, first=True)
        elif (self.world.is_first or not last) and self.graph.evaluations.is_behind(version, last):
            # The argument `last=True` makes the evaluation due at any version, and lets the training wait for it.
            self.journal.live.note(f"evaluating version {version}, which was not evaluated yet")
            await self.graph.evaluate(version, partial(self.journal.write, version), first=False, last=True)

    def _start_after_evaluations(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        async def wait_and_work() -> None:
            await self.graph.evaluations.wait_reported()
            await work(*arguments)

        self.supervisor.start(name, wait_and_work)

    async def _agree_on_time(self) -> None:
        """If the time limit has passed on any rank, make the next step the last on all ranks.
        Some ranks may be in that step already. No rank has finished it, since a step ends only after the collective below."""
        if len(self.world.roles.train) == 1 or self.config.train.time_limit_s is None or self._stop_agreed:
            return
        ranks = self.world.train
        time_is_up = torch.tensor([float(self.graph.time_is_up)], dtype=torch.float64, device=self.decided.device)
        # On the trainer's lane: all ranks must run their collectives in the same order.
        ranks_with_time_up = await self.lanes[0].run(
            lambda: float(ranks.all_reduce_sum_(time_is_up)), name="publish/time", priority=1
        )
        if ranks_with_time_up > 0:
            self._stop_agreed = True
            self.graph.stop_at(self.ports.ledger.turn + 1)

    async def drain(self) -> None:
        """End without an error: `Graph.drain`, then wait until every rank has released its last step."""
        await self.graph.drain()
        await self._wait_for_other_ranks()
        self.supervisor.cancel()  # the lag monitor never ends by itself

    async def _wait_for_other_ranks(self) -> None:
        """Wait until every rank has released its last step, so that every group is counted and the shared books can be checked.
        If a rank dies, torchrun stops this rank by a signal, and the signal cancels the wait."""
        ledger = self.ports.ledger
        self.stages.begin("waiting for the other ranks")
        if self.remote is not None:
            return await self.remote.leave()
        if self.dispatch is not None:
            await self.dispatch.wait_finished([f"rank {rank}" for rank in range(1, self.world.world_size)])
            # Groups that are live now were on their way between two ranks when both ranks stopped.
            for ticket in ledger.live_groups(everywhere=True):
                await ledger.end(ticket, "dropped", "the run ended first")
        while self.line is not None:
            books = ledger.statistics()
            if not books.held + books.live + books.claimed:
                break
            seen = ledger.changes
            # `wait_changed` does not notice a change that came before `ledger.changes` was read.
            if ledger.statistics() == books:
                await ledger.wait_changed(seen)
        if self.dispatch is not None:
            self.dispatch.dismiss()

    async def finalize(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Write the last files, after the end of the pumps and before the lanes close. Never hides the `error` of the run."""
        engine = self.ports.engine
        if isinstance(error, asyncio.CancelledError) and isinstance(engine, BaseEngine) and engine.failure is not None:
            # An engine that fails cancels the pumps. If no pump waits for a reply just then, no pump raises the engine's error.
            error = engine.failure
        self.ended_by = error
        if self.directory is not None:
            self.directory.spare_descriptors.close()
        # In a cancelled scope the deadline is -inf, whatever `error` is.
        stopped = anyio.current_effective_deadline() == -math.inf or isinstance(error, asyncio.CancelledError)
        stopped |= isinstance(error, RankLost) and error.stopped_by is not None
        with anyio.CancelScope(shield=True):
            self.stages.begin("ending the live groups")
            # The result of `rank_state` must contain the live groups, so it is made before `end_all` below ends these groups.
            version, state = self.ports.trainer.version, self.checkpointer.rank_state(self.graph.waiting_prompt)
            outcome = "closed" if error is None else f"run ended: {type(error).__name__}"
            try:
                try:
                    if error is not None and self.line is not None:
                        await self._send_end_reason(error)
                    if error is not None and self.world.world_size > 1:
                        leave = partial(self.positions.leave, version, self.stopped_by) if self.positions else None
                        ends, lost_indices = await leave() if leave else ({}, [])
                        signals = [end.stopped_by for end in ends.values()]
                        signals += [ended.stopped_by for ended in self.end_reasons.values()]
                        stop_signal = next(filter(None, signals), None)
                        lost = [self.world.roles.train[index] for index in lost_indices]
                        missing = [rank for rank in lost if f"rank {rank}" not in self.end_reasons]
                        if stop_signal is not None and isinstance(error, RankLost):
                            # Perhaps all ranks are being stopped, and the signal to this rank has not arrived yet.
                            error.stopped_by = stop_signal
                            stopped = True
                        elif isinstance(error, RankLost):
                            for note in [*reasons_beside(self.end_reasons, error), *self._describe_missing(missing)]:
                                error.add_note(note)
                        # Another rank may wait in a collective that this rank will never join. `World.leave` ends that wait.
                        await offload(self.world.leave, "leave")
                    await self.graph.intake.end_plays()
                    # If ranks have different roles, rank 0 saves the live groups of all ranks. So no other rank may end them first.
                    if error is None or self.remote is None:
                        await self.ports.book.end_all(outcome)
                    self.stages.begin("writing the last metrics")
                    await self.profiler.close(version)
                    logged_by_program = self.ports.recorder.take_counts(("own/",))
                    await self.journal.write_pending(self.ports.recorder.take_counts(COUNTED))
                    await self.journal.write(version, logged_means(logged_by_program))
                    for skipped in self.graph.evaluations.unfinished:
                        self.journal.warn(f"warning: version {skipped} was not evaluated: the run ended first")
                finally:
                    self.stages.begin("writing the last checkpoint")
                    await self.checkpointer.at_end(version, state, error, stopped, self.journal.live.note)
            finally:
                self.stages.begin("writing the trace and the report")
                await self.journal.finish(outcome if error is not None else "completed")
                self.listeners.close()
            if error is None and self.remote is None:
                self._check_books()

    async def _send_end_reason(self, error: BaseException) -> None:
        """Send why this rank ends: rank 0 to all ranks, other ranks to rank 0. Without this message nccl collectives would hang."""
        from asyncrl.distributed.line import LineServer

        world, line = self.world, self.line
        reason = f"rank {world.rank} has ended: {first_line(error)}{world.roles.shared(world.rank)}"
        if isinstance(error, RankLost):
            reason = "; ".join([str(error), *reasons_beside(self.end_reasons, error)])
        stopped_by = self.stopped_by or (error.stopped_by if isinstance(error, RankLost) else None)
        if isinstance(error, RankLost) and isinstance(line, LineServer):
            # The error of a collective does not name the dead rank. Collectives fail before the line declares the rank lost.
            down = {peer for peer, silence_s in line.silences().items() if silence_s} - self.end_reasons.keys()
            # A rank that only generates is in no collective.
            for rank in (rank for rank in world.roles.train if f"rank {rank}" in down):
                reason += f"; rank {rank}{world.roles.shared(rank)} is disconnected"
        if self.stopped_by is not None:
            reason = f"rank {world.rank} was stopped by {self.stopped_by}"
        one_rank = self.stopped_by is not None or isinstance(error, _OF_ONE_RANK)
        stalled = self.stalled or isinstance(error, StallError)
        ended = {"reason": reason, "stopped_by": stopped_by, "one_rank": one_rank, "stalled": stalled}
        # The other end of the line may be gone, or may not read any more.
        with contextlib.suppress(RankLost, LifecycleError), anyio.move_on_after(_SEND_S):
            if isinstance(line, LineServer):
                await line.tell_all(END_REASON, ended)
            elif line is not None:
                await line.tell(END_REASON, ended)

    def _describe_missing(self, ranks: Sequence[int]) -> Iterator[str]:
        if ranks:
            names = " and ".join(f"rank {rank}{self.world.roles.shared(rank)}" for rank in ranks)
            yield f"{names} gave no reason: killed, stopped, hanging, or on a lost machine"

    def describe_waits(self) -> None:
        """Print the longest wait of each kind, because another rank has reported a standstill."""
        self.stalled = True
        kinds = {(wait.what, wait.on): wait for wait in reversed(self.recorder.active_waits())}
        waits = [describe_wait(wait, self.recorder.clock()) for wait in kinds.values()]
        print(f"asyncrl: rank {self.world.rank}: {'; '.join(waits) or 'nobody waits'}", file=sys.stderr, flush=True)

    def _check_books(self) -> None:
        """Check that every admitted group has ended exactly once, and that the store has no rows. Errors: LedgerError."""
        books, store = self.ports.ledger.statistics(), self.ports.store.statistics()
        ended = books.trained + books.dropped + books.failed
        if books.live or books.claimed or books.held or books.admitted != ended or store.rows:
            raise LedgerError(f"the books do not add up at the end of the run: {books}, rows of groups: {store}")


def reasons_beside(reasons: Mapping[str, RankLost], error: RankLost) -> list[str]:
    """Why other ranks have ended, if `error` does not say it: a collective may fail before the reason of the rank arrives."""
    return [told for told in map(str, reasons.values()) if " has ended: " in told and told not in str(error)]
