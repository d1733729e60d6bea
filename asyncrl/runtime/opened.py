"""A run between its opening and its end: all its parts, what is due at a version, and how it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.concurrency.watchdog import ProgressLimit
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import ConfigError, LedgerError, LifecycleError, RankLost
from asyncrl.pumps.graph import Graph
from asyncrl.pumps.metrics import logged_means
from asyncrl.pumps.pipeline import Ports, Round, StepReport
from asyncrl.rewards.models import TextModel
from asyncrl.telemetry.lag import monitor
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import LedgerStatistics, Prompt

from .decided import Decided
from .journal import Journal
from .performance import DeviceRates, StepProfiler, needed_flop
from .progress import Listeners, Stages
from .saving import Checkpointer, SavedRun

if TYPE_CHECKING:
    # transformers takes seconds to import, and a dry run needs none
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.trainer import TorchTrainer

    from .gate import Verdict


_SHOWN_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended. `reasons`: why groups were dropped or failed, counted. `shares`: `busy/*` and `idle/*` of the whole run.
    `history`: (version, metrics) of the lines written; of more than 2,000 an even part."""

    version: int
    books: LedgerStatistics
    reasons: Mapping[str, int]
    seconds: float
    shares: Mapping[str, float]
    history: Sequence[tuple[int, Mapping[str, float]]]


class OpenRun:
    """See the module docstring. `opening.open_run` opens its parts; the supervisor is opened and closed around it."""

    # The parts, in the order in which they are opened. A dry run has none of those that may be None.
    saved: SavedRun | None = None  # the checkpoint that the run goes on from
    journal: Journal
    lanes: tuple[Any, ...]  # ThreadLane | SimulatedLane, the trainer's first
    tokenizer: Any
    policy: PolicyModel | None = None
    core: TorchTrainer | None = None
    rates: DeviceRates | None = None
    verdict: Verdict | None = None
    round: Round | None = None  # of a trainer whose microbatches are collectives
    reward_models: Sequence[TextModel] = ()  # in the order of `reward.model`, on the first lane
    # A line for people: where the engine runs, and with how many threads.
    placed: str = ""
    ports: Ports
    checkpointer: Checkpointer
    profiler: StepProfiler
    prompts: PromptSource | None = None  # None where groups are submitted
    graph: Graph
    collect_garbage: Callable[[], None]

    def __init__(
        self,
        decided: Decided,
        recorder: Recorder,
        listeners: Listeners[StepReport],
        stages: Stages,
        stack: AsyncExitStack,
    ) -> None:
        """`stack`: closes what is opened, in reverse order."""
        self.decided = decided
        self.config, self.world, self.directory = decided.config, decided.world, decided.directory
        self.recorder = recorder
        self.listeners = listeners
        self.stages = stages
        self.stack = stack
        self.supervisor = Supervisor()
        self.stopped_by: str | None = None  # a signal
        self.ended_by: BaseException | None = None  # what ended the pumps
        self._began = time.perf_counter()
        self._stop_agreed = False
        self._ran = False
        # Whether evaluation, metrics or checkpoint of a version are under way, also before the first step.
        self._at_a_version = False

    def wire(self, held_out: list[Prompt]) -> None:
        """Make the pumps of what is open. `held_out`: what evaluations play; empty: there are none."""
        evaluated = self.saved.evaluated if self.saved else -1
        pumped = self._at_version, self._on_step, self._catch_up
        self.graph = Graph(self.ports, self.prompts, held_out, *pumped, evaluated)
        self.graph.on_finish(self.listeners.close)

    def start(self) -> None:
        """Start what trains; the supervisor is open."""
        if self.ports.store_watch is not None:
            self.ports.store_watch.attach(self.supervisor.fail)
        self.supervisor.start("event loop lag", monitor, self.recorder)  # for ever: cancelled when the block ends
        self.graph.start(self.supervisor)
        self.supervisor.start("first step", self._show_first_step)

    async def _show_first_step(self) -> None:
        """Every second until the first step is committed, which on a slow machine is minutes away."""
        start = self.ports.trainer.version
        while self.ports.trainer.version == start:
            self.journal.live.status(self._first_step())
            await anyio.sleep(_SHOWN_EVERY_S)

    def _first_step(self) -> str:
        """A stage, a colon and counts, the main one first: a narrow terminal cuts the rest off. Groups are those of all ranks,
        completions and tokens those of this one."""
        tokens = f"{self.ports.engine.statistics().get('tokens', 0.0):,.0f} tokens sampled"
        if self.graph.evaluations.progress is not None:
            done, total = self.graph.evaluations.progress
            return f"evaluating: {done}/{total} completions, {tokens}"
        claimed, groups = self.ports.ledger.statistics().claimed, self.config.rollout.groups_per_step
        scored = f"{self.graph.intake.scored:,.0f} completions scored"
        return f"first step: {claimed}/{groups} groups in training, {scored}, {tokens}"

    async def run(self) -> RunSummary:
        """Train on the prompts, or on what comes through the ring, to the end. Once."""
        if self.prompts is None and self.config.door.ring is None:
            raise ConfigError(
                "Runtime.run needs prompts: set data.train (or door.ring), or pass prompts=[...] to Runtime"
            )
        if self._ran:
            raise LifecycleError("Runtime.run was called twice; make a new Runtime for a second run")
        self._ran = True
        await self.graph.run(self.supervisor)
        return self.summary()

    def summary(self) -> RunSummary:
        """How it stands, or, at the end, how it ended."""
        return RunSummary(
            version=self.ports.trainer.version,
            books=self.ports.ledger.statistics(),
            reasons=dict(self.ports.book.reasons),
            seconds=time.perf_counter() - self._began,
            shares=self.journal.idle(),
            history=self.journal.history[:],
        )

    def standing(self) -> ProgressLimit | None:
        """Asked by the watchdog, on a thread of its own. Tokens count: an episode that samples for ever has a limit of its
        own (`rollout.timeout_s`), and a long one is no standstill."""
        limits = self.config.watchdog
        if self.graph.ending or self.supervisor.ending:
            # What does not let itself be cancelled may generate for ever: nothing counts as progress.
            error = self.supervisor.failure
            why = "" if error is None else f" ({type(error).__name__}: {str(error).partition(chr(10))[0][:300]})"
            sentence = f"what was cancelled when the training ended{why} has gone on"
            return ProgressLimit((), limits.stage_timeout_s, sentence)
        if not (self.graph.busy or self._at_a_version or self.graph.evaluations.progress):
            return None
        books = self.ports.ledger.statistics()
        ended = books.admitted, books.trained, books.dropped, books.failed
        counters = (*ended, self.graph.intake.scored, self.ports.engine.statistics().get("tokens", 0.0))
        sentence = "nothing was generated, scored or trained"
        return ProgressLimit(counters, limits.stall_timeout_s, sentence, remote_cause=self.ports.ledger.remote_cause)

    # -- steps and versions ------------------------------------------------------------------------------------------

    def _on_step(self, report: StepReport) -> None:
        extra: dict[str, float] = {}
        rates, policy, seconds = self.rates, self.policy, report.metrics.get("time/step")
        if rates is not None and policy is not None and seconds:
            extra |= rates.shares(needed_flop(report, policy, self.config), seconds)
        if self.prompts is not None:
            counts = self.prompts.statistics()
            extra |= {f"data/{name}": float(counts[name]) for name in ("epoch", "delivered", "cut", "skipped")}
        self.listeners.push(self.journal.committed(report, extra))
        self.collect_garbage()

    async def _at_version(self, version: int, first: bool = False) -> None:
        """What is due at a version, before its slots are released: evaluation, its line of metrics, checkpoint.

        In this order: a run that is killed in between and goes on from the checkpoint misses no line. The seconds of the
        checkpoint therefore stand in a later line. Where steps go on beside the evaluation, the lines from its version on wait
        for its end, and so does the writing of a checkpoint, though not the copy that is written. `first`: of the run.
        """
        self._at_a_version = True
        try:
            await self.checkpointer.look()
            await self.profiler.at(version)
            await self._agree_on_time()
            await self.checkpointer.announce(version, self.graph.waiting_prompt)
            last = self.graph.is_last_version()
            await self.graph.evaluate(version, partial(self.journal.write, version), first=first, last=last)
            if self.checkpointer.due(version, last):
                books = self.checkpointer.books(self.graph.waiting_prompt)
                await self.checkpointer.at_version(version, books, last, self._start_when_told)
        finally:
            self._at_a_version = False

    async def _catch_up(self, last: bool) -> None:
        """Before the first step: what is due at the version that a new run begins with, or the evaluation that the run had not made
        when it was stopped. After the `last` one, on the first rank: its evaluation, where it was not known to be the last."""
        version = self.ports.trainer.version
        if not (last or self.saved):
            await self._at_version(version, first=True)
        elif self.graph.evaluations.is_behind(version, last) and (self.world.is_first or not last):
            self.journal.live.note(f"evaluating version {version}, which was not evaluated yet")
            await self.graph.evaluate(version, partial(self.journal.write, version), first=True, last=True)

    def _start_when_told(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        async def when_told() -> None:
            await self.graph.evaluations.wait_reported()
            await work(*arguments)

        self.supervisor.start(name, when_told)

    async def _agree_on_time(self) -> None:
        """Whether the time limit passed on any rank. The step that may be in progress on some of them is the last one: it
        cannot have finished anywhere, since its finish waits for this publish."""
        world = self.world
        if world.world_size == 1 or self.config.train.time_limit_s is None or self._stop_agreed:
            return
        up = torch.tensor([float(self.graph.time_is_up)], dtype=torch.float64, device=self.decided.device)
        # On the lane of the trainer, whose collectives this one must not cross.
        if await self.lanes[0].run(lambda: float(world.all_reduce_sum_(up)), name="publish/time", priority=1) > 0:
            self._stop_agreed = True
            self.graph.stop_at(self.ports.ledger.turn + 1)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """A clean end: what was submitted is trained, and every rank has released its last step."""
        await self.graph.drain()
        self.stages.begin("waiting for the other ranks")
        await self._other_ranks()
        self.supervisor.cancel()  # what runs for ever: the lag monitor

    async def _other_ranks(self) -> None:
        """Until every rank released its last step, so that the shared books can be checked.

        A rank that died instead is noticed by torchrun, whose signal cancels this wait.
        """
        ledger = self.ports.ledger
        while self.world.world_size > 1 and (books := ledger.statistics()).held + books.live + books.claimed:
            seen = ledger.changes
            if ledger.statistics() == books:  # else it changed between the two lines
                await ledger.wait_changed(seen)

    async def finalize(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """After the pumps ended and before the lanes close. Never hides the error that ended the run."""
        self.ended_by = error
        if self.directory is not None:
            self.directory.reserve.spend()
        stopped = anyio.current_effective_deadline() == -math.inf or isinstance(error, asyncio.CancelledError)
        with anyio.CancelScope(shield=True):
            self.stages.begin("ending the groups in hand")
            # Before live groups are ended.
            version, books = self.ports.trainer.version, self.checkpointer.books(self.graph.waiting_prompt)
            ended = "closed" if error is None else f"run ended: {type(error).__name__}"
            try:
                try:
                    if error is not None and self.world.world_size > 1:
                        by = await self.checkpointer.leave(version, books, self.stopped_by)
                        if by is not None and isinstance(error, RankLost):
                            # All ranks are being stopped, and the signal of this one comes later.
                            error.stopped_by = by
                            stopped = True
                        # Another rank may wait in a collective that this one will never join. Leaving ends that wait, so it
                        # comes before this one waits for the others.
                        await offload(self.world.leave, "leave")
                    await self.ports.book.end_all(ended)
                    self.stages.begin("writing the last metrics")
                    await self.profiler.close(version)
                    await self.journal.write_pending()
                    await self.journal.write(version, logged_means(self.ports.recorder.take_counts(("own/",))))
                    for missed in self.graph.evaluations.unfinished:
                        self.journal.warn(f"warning: version {missed} was not evaluated: the run ended first")
                finally:  # whatever went wrong there
                    self.stages.begin("writing the last checkpoint")
                    await self.checkpointer.at_end(version, books, error, stopped, self.journal.live.note)
            finally:
                self.stages.begin("writing the trace and the report")
                await self.journal.finish(ended if error is not None else "completed")
                self.listeners.close()
            if error is None:
                self._check_books()

    def _check_books(self) -> None:
        """At the end of a run every admitted group ended exactly once, and took its rows with it. Errors: LedgerError."""
        books, store = self.ports.ledger.statistics(), self.ports.store.statistics()
        ended = books.trained + books.dropped + books.failed
        if books.live or books.claimed or books.held or books.admitted != ended or store.rows or store.bytes:
            raise LedgerError(f"the books do not add up at the end of the run: {books}, rows of groups: {store}")
