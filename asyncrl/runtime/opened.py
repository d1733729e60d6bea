"""A run between its opening and its end: all its parts, what is due at a version, and how it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import torch

from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.concurrency.watchdog import Standing
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, LifecycleError, RankLost
from asyncrl.pumps.graph import Graph
from asyncrl.pumps.metrics import logged_means
from asyncrl.pumps.pipeline import StepReport
from asyncrl.telemetry.lag import monitor
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Prompt

from .build import Built, any_rank, check_books
from .directory import RunDirectory
from .journal import Journal
from .performance import StepProfiler, needed_flop
from .saving import Checkpointer, SavedRun
from .stages import Stages
from .starting import show_first_step
from .steps import Listeners, RunSummary


@dataclass(frozen=True, slots=True)
class Foundation:
    """What a run stands on, known before its model is loaded."""

    config: Config  # resolved: nothing in it is left to be derived
    world: World
    device: torch.device
    recorder: Recorder
    directory: RunDirectory | None  # None: the run writes nothing
    journal: Journal
    listeners: Listeners[StepReport]
    stages: Stages
    began: float  # time.perf_counter


class OpenRun:
    """See the module docstring. Made by `opening.open_run`; the supervisor is opened and closed around it."""

    def __init__(
        self,
        base: Foundation,
        built: Built,
        checkpointer: Checkpointer,
        profiler: StepProfiler,
        prompts: PromptSource | None,
        held_out: list[Prompt],
        saved: SavedRun | None,
    ) -> None:
        """`prompts`: None where groups are submitted. `held_out`: what evaluations play; empty: there are none."""
        self.base = base
        self.config = base.config
        self.built = built
        self.ports = built.ports
        self.prompts = prompts
        self.journal = base.journal
        self.ports.note = base.journal.live.note
        self._saved = saved
        evaluated = saved.evaluated if saved else -1
        self.graph = Graph(built.ports, prompts, held_out, self._at_version, self._on_step, self._catch_up, evaluated)
        self.graph.when_finished(base.listeners.close)
        self.supervisor = Supervisor()
        self._checkpointer = checkpointer
        self._profiler = profiler
        self._stop_agreed = False
        self.stopped_by: str | None = None  # a signal
        self.ended_by: BaseException | None = None  # what ended the pumps
        self.collect_garbage: Callable[[], None] = lambda: None
        self._ran = False
        self._at_a_version = False  # evaluation, metrics, checkpoint: also before the first step

    def start(self) -> None:
        """Start what trains; the supervisor is open."""
        if self.ports.store_watch is not None:
            self.ports.store_watch.attach(self.supervisor.fail)
        self.supervisor.start("event loop lag", monitor, self.base.recorder)  # for ever: cancelled when the block ends
        self.graph.start(self.supervisor)
        self.supervisor.start("first step", show_first_step, self.ports, self.graph, self.journal.live.status)

    async def run(self) -> RunSummary:
        """See `Runtime.run`."""
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
            seconds=time.perf_counter() - self.base.began,
            shares=self.journal.idle(),
            history=self.journal.history[:],
        )

    def standing(self) -> Standing | None:
        """Asked by the watchdog, on a thread of its own. Tokens count: an episode that samples for ever has a limit of its
        own (`rollout.timeout_s`), and a long one is no standstill."""
        limits = self.config.watchdog
        if self.graph.ending or self.supervisor.ending:
            # What does not let itself be cancelled may generate for ever: nothing counts as progress.
            error = self.supervisor.failure
            why = "" if error is None else f" ({type(error).__name__}: {str(error).partition(chr(10))[0][:300]})"
            sentence = f"what was cancelled when the training ended{why} has gone on"
            return Standing((), limits.stage_timeout_s, sentence)
        if not (self.graph.busy or self._at_a_version or self.graph.evaluating):
            return None
        books = self.ports.ledger.statistics()
        ended = books.admitted, books.trained, books.dropped, books.failed
        counters = (*ended, self.graph.scored, self.ports.engine.statistics().get("tokens", 0.0))
        sentence = "nothing was generated, scored or trained"
        return Standing(counters, limits.stall_timeout_s, sentence, elsewhere=self.ports.ledger.elsewhere)

    # -- steps and versions ------------------------------------------------------------------------------------------

    def _on_step(self, report: StepReport) -> None:
        extra: dict[str, float] = {}
        rates, policy, seconds = self.built.rates, self.built.policy, report.metrics.get("time/step")
        if rates is not None and policy is not None and seconds:
            extra |= rates.shares(needed_flop(report, policy, self.config), seconds)
        if self.prompts is not None:
            counts = self.prompts.statistics()
            extra |= {f"data/{name}": float(counts[name]) for name in ("epoch", "delivered", "cut", "skipped")}
        self.base.listeners.push(self.journal.committed(report, extra))
        self.collect_garbage()

    async def _at_version(self, version: int, first: bool = False) -> None:
        """What is due at a version, before its slots are released: evaluation, its line of metrics, checkpoint.

        In this order: a run that is killed in between and goes on from the checkpoint misses no line. The seconds of the
        checkpoint therefore stand in a later line. Where steps go on beside the evaluation, the lines from its version on wait
        for its end, and so does the writing of a checkpoint, though not the copy that is written. `first`: of the run.
        """
        self._at_a_version = True
        try:
            await self._do_what_is_due(version, first)
        finally:
            self._at_a_version = False

    async def _catch_up(self, last: bool) -> None:
        """Before the first step: what is due at the version that a new run begins with, or the evaluation that the run had not made
        when it was stopped. After the `last` one, on the first rank: its evaluation, where it was not known to be the last."""
        version = self.ports.trainer.version
        if not (last or self._saved):
            await self._at_version(version, first=True)
        elif self.graph.evaluations.owes(version, last) and (self.base.world.is_first or not last):
            self.journal.live.note(f"evaluating version {version}, which was not evaluated yet")
            await self.graph.evaluate(version, partial(self.journal.write, version), first=True, last=True)

    async def _do_what_is_due(self, version: int, first: bool) -> None:
        if self.base.directory is not None:
            await offload(self.base.directory.look, "run-directory")
        await self._profiler.at(version)
        await self._agree_on_time()
        await self._checkpointer.say(version, self.prompts, self.graph.in_hand, self.ports.ids.next)
        last = self.graph.nothing_left()
        await self.graph.evaluate(version, partial(self.journal.write, version), first=first, last=last)
        if self._checkpointer.due(version, last):
            await self._checkpointer.at_version(version, self._books(), last, self._start_when_told)

    def _start_when_told(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        async def when_told() -> None:
            await self.graph.all_reported()
            await work(*arguments)

        self.supervisor.start(name, when_told)

    async def _agree_on_time(self) -> None:
        """Whether the time limit passed on any rank. The step that may be in progress on some of them is the last one: it
        cannot have finished anywhere, since its finish waits for this publish."""
        world = self.base.world
        if world.world_size == 1 or self.config.train.time_limit_s is None or self._stop_agreed:
            return
        if await any_rank(self.graph.time_is_up, world, self.built.lanes[0], self.base.device):
            self._stop_agreed = True
            self.graph.stop_at(self.ports.ledger.turn + 1)

    def _books(self) -> dict[str, Any]:
        return self._checkpointer.books(self.prompts, self.graph.in_hand, self.ports.ids.next)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """A clean end: what was submitted is trained, and every rank has released its last step."""
        await self.graph.drain()
        self.base.stages.begin("waiting for the other ranks")
        await self._other_ranks()
        self.supervisor.cancel()  # what runs for ever: the lag monitor

    async def _other_ranks(self) -> None:
        """Until every rank released its last step, so that the shared books can be checked.

        A rank that died instead is noticed by torchrun, whose signal cancels this wait.
        """
        ledger = self.ports.ledger
        while self.base.world.world_size > 1 and (books := ledger.statistics()).held + books.live + books.claimed:
            seen = ledger.changes
            if ledger.statistics() == books:  # else it changed between the two lines
                await ledger.wait_changed(seen)

    def expect_end(self, reason: str) -> None:
        """The run is about to be cancelled: a signal, by its name."""
        self.stopped_by = reason
        self._checkpointer.hurry(self.base.config.watchdog.abort_grace_s)

    @property
    def saving(self) -> bool:
        """As `Checkpointer.saving`."""
        return self._checkpointer.saving

    async def finalize(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """After the pumps ended and before the lanes close. Never hides the error that ended the run."""
        self.ended_by = error
        if self.base.directory is not None:
            self.base.directory.reserve.spend()
        stopped = anyio.current_effective_deadline() == -math.inf or isinstance(error, asyncio.CancelledError)
        with anyio.CancelScope(shield=True):
            self.base.stages.begin("ending the groups in hand")
            version, books = self.ports.trainer.version, self._books()  # before live groups are ended
            ended = "closed" if error is None else f"run ended: {type(error).__name__}"
            try:
                try:
                    if error is not None and self.base.world.world_size > 1:
                        by = await self._checkpointer.leave(version, books, self.stopped_by)
                        if by is not None and isinstance(error, RankLost):
                            # A stop in progress: this rank hears of it before its own signal.
                            error.stopped_by = by
                            stopped = True
                        # Another rank may wait in a collective that this one will never join: it must hear of that before
                        # this one waits for it.
                        await offload(self.base.world.leave, "leave")
                    await self.ports.book.end_all(ended)
                    self.base.stages.begin("writing the last metrics")
                    await self._profiler.close(version)
                    await self.journal.write_pending()
                    await self.journal.write(version, logged_means(self.ports.recorder.take_counts(("own/",))))
                    for missed in self.graph.unevaluated:
                        self.journal.warn(f"warning: version {missed} was not evaluated: the run ended first")
                finally:  # whatever went wrong there
                    self.base.stages.begin("writing the last checkpoint")
                    await self._checkpointer.at_end(version, books, error, stopped, self.journal.live.note)
            finally:
                self.base.stages.begin("writing the trace and the report")
                await self.journal.finish(ended if error is not None else "completed")
                self.base.listeners.close()
            if error is None:
                check_books(self.ports)
