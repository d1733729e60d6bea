"""The facade: `async with Runtime(config) as rt`, in `asyncrl.main` or inside somebody else's event loop.

states      new -> open -> closed; opened and closed in the same task
tasks       one task group (the supervisor); a pump that dies cancels the block and its error is raised at its end
at the end  clean exit: what was submitted is trained (a last, smaller step where `train.partial_final_step`)
            error or cancellation: the open step is aborted, its groups are dropped and counted
            always: a checkpoint of the last committed version (`checkpoint.save_final`), trace, report, books checked
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakSet

import anyio

from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.concurrency.watchdog import Watchdog
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, LifecycleError
from asyncrl.ports import Environment
from asyncrl.pumps.graph import Graph
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.intake import Intake
from asyncrl.pumps.pipeline import StepReport
from asyncrl.records.check import Limits
from asyncrl.rewards.pool import RewardSpec
from asyncrl.telemetry.lag import monitor
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import SamplingParams, Trajectory

from .device import meet, settle
from .directory import RunDirectory
from .embedding import as_group, as_prompt, play, sampled_as
from .garbage import Collector
from .inputs import check_inputs
from .journal import Journal
from .offload import offload
from .plan import announcement
from .profiling import StepProfiler
from .prompts import load_prompts
from .rates import needed_flop
from .rooms import Builder, Built, Overrides, any_rank, check_books
from .saving import EMBEDDED_GROUPS, Checkpointer, SavedRun
from .starting import show_first_step
from .steps import Listener, RunSummary, State, StepStream


class Runtime:
    def __init__(
        self,
        config: Config,
        *,
        rewards: Callable[..., Any] | Sequence[Callable[..., Any] | RewardSpec] = (),
        environment: Environment | None = None,
        hooks: Hooks | None = None,
        prompts: Any = None,
        write: bool = True,
        hard_exit: bool = False,
    ) -> None:
        """`rewards`, `environment`, `hooks`: objects instead of names; `prompts`: as a data function may return them.

        `write=False` leaves no run directory behind. `hard_exit`: the watchdog may end a wedged process (`main` only).
        """
        given = [rewards] if callable(rewards) else list(rewards)
        specs = [r if isinstance(r, RewardSpec) else RewardSpec(r) for r in given]
        self._given = config
        self._overrides = Overrides(tuple(specs), environment, hooks)
        self._rows = prompts
        self._write = write
        self._hard_exit = hard_exit
        self._state = State.NEW
        self._task: asyncio.Task[Any] | None = None
        self._listeners: WeakSet[Listener[StepReport]] = WeakSet()
        self._steps_over = False
        self._stop_agreed = False
        self._pumps_exist = False
        self._watchdog: Watchdog | None = None
        self._started = 0.0
        self._ran = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        if self._state is not State.NEW:
            raise LifecycleError(f"a Runtime is opened once; this one is {self._state.value}. Make a new one")
        self._state, self._task = State.OPEN, asyncio.current_task()
        self._started = time.perf_counter()
        self._stack = AsyncExitStack()
        await self._stack.__aenter__()
        try:
            await self._open()
        except BaseException:
            self._state = State.CLOSED
            await self._stack.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if asyncio.current_task() is not self._task:
            raise LifecycleError(
                "a Runtime must be closed by the task that opened it; keep the `async with` in one task"
            )
        if self._state is State.CLOSED:
            return None
        self._state = State.CLOSED
        if error is None:
            try:
                await self._graph.drain()
                await self._other_ranks()
                self._supervisor.cancel()  # what runs for ever: the lag monitor
            except BaseException as failure:
                await self._stack.__aexit__(type(failure), failure, failure.__traceback__)
                raise
        return await self._stack.__aexit__(kind, error, traceback)

    async def _other_ranks(self) -> None:
        """At a clean end: until every rank released its last step, so that the shared books can be checked.

        A rank that died instead is noticed by torchrun, whose signal cancels this wait.
        """
        ledger = self._rooms.ledger
        while self.world.world_size > 1 and (books := ledger.statistics()).held + books.live + books.claimed:
            seen = ledger.changes
            if ledger.statistics() == books:  # else it changed between the two lines
                await ledger.wait_changed(seen)

    async def _open(self) -> None:
        stack = self._stack
        self.world = world = World.from_env()
        given = self._given
        submitted = self._rows is None and given.data.train is None and given.door.ring is None
        embedding = submitted or self._rows is not None
        settled = await offload(lambda: settle(given, world.local_rank), "device")
        self.config = config = resolve(settled.config, world.world_size, embedding=embedding, submitted=submitted)
        own = self._overrides
        brought = self._rows is not None, bool(own.rewards), own.environment is not None, own.hooks is not None
        await offload(lambda: check_inputs(config, *brought), "inputs")
        leader = world.is_first
        self.directory = directory = RunDirectory(config) if self._write else None
        opened: list[str] = []
        if directory is not None:
            stack.callback(directory.close)  # after everything that writes there
            opened = await offload(lambda: directory.open(config, leader=leader), "run-directory")
        self.recorder = recorder = Recorder(max_events=config.telemetry.trace_events if config.telemetry.trace else 0)
        self._watched: list[Any] = []
        self._watchdog = await stack.enter_async_context(self._make_watchdog())
        saved = await offload(lambda: SavedRun.to_resume(config, directory), "find-checkpoint")
        turn, version = (saved.turn, saved.version) if saved else (0, 0)
        self._journal = stack.enter_context(Journal(config, self.directory if leader else None, recorder, version))
        for line in (*settled.lines, *opened):
            self.note(line)
        self._device = settled.device
        stack.callback(world.close)
        await offload(lambda: meet(world, settled), "rendezvous")
        builder = Builder(config, world, self._device, recorder, stack, self._journal.live.status)
        first_group = EMBEDDED_GROUPS + world.rank if saved is None else saved.next_group(world.rank)
        self.built: Built = await builder.build(self._overrides, turn, version, first_group)
        self._journal.rates = self.built.rates
        self._watched.extend(self.built.lanes)  # only now: loading a model may take longer than any closure may later
        self._rooms = rooms = self.built.rooms
        self._checkpointer = Checkpointer(config, self.directory, self.built, world, recorder)
        with recorder.wait("runtime", "the prompts", on="disk", cause="start"):
            self._prompts, held_out = await offload(
                lambda: load_prompts(config, self.built.tokenizer, world, self._rows), "prompts"
            )
        if saved is not None:
            await self._checkpointer.restore(saved, self._prompts)
        self._journal.reserve = self._checkpointer.bytes_needed()
        await self._journal.open(self.built.tokenizer.decode)
        lane = self.built.lanes[0]
        self._profiler = StepProfiler(config, lane, self._device, self.directory, world.rank, self.note)
        await self._profiler.at(rooms.trainer.version)
        self._graph = Graph(rooms, self._prompts, held_out, self._at_version, self._on_step)
        self._graph.when_finished(self._no_more_steps)
        self._listeners.add(stack.enter_context(Collector(recorder)))  # start-up ends here
        stack.push_async_exit(self._finalize)
        self._supervisor = await stack.enter_async_context(Supervisor())
        if rooms.store_watch is not None:
            rooms.store_watch.attach(self._supervisor.fail)
        self._supervisor.start("event loop lag", monitor, recorder)  # for ever: cancelled when the block ends
        self._graph.start(self._supervisor)
        self._supervisor.start("first step", show_first_step, rooms, self._graph, self._journal.live.status)
        self._pumps_exist = True

    def _make_watchdog(self) -> Watchdog:
        return Watchdog(
            self.config.watchdog,
            recorder=self.recorder,
            lanes=self._watched,
            progress=self._progress,
            work_remains=lambda: self._pumps_exist and self._graph.busy,
            on_stall=lambda error: self._supervisor.fail(error) if self._pumps_exist else None,
            details=[lambda: self._rooms.ledger.describe() if self._pumps_exist else "starting"],
            hard_exit=self._hard_exit,
        )

    def _progress(self) -> tuple[float, ...]:
        books = self._rooms.ledger.statistics()
        return (self._rooms.engine.statistics().get("tokens", 0.0), books.admitted, books.trained, self._graph.scored)

    def expect_end(self, reason: str) -> None:
        """The program is about to cancel the block (a signal): from now on it has `watchdog.abort_grace_s`."""
        if self._watchdog is not None:
            self._watchdog.shutdown_deadline(reason)

    # -- a run over configured data --------------------------------------------------------------------------------

    async def run(self) -> RunSummary:
        """Train on the configured prompts, or on what comes through `door.ring` (`asyncrl.runtime.door`), until `max_steps`,
        `max_epochs` or the time limit. Once per Runtime."""
        self._check_open("run")
        if self._prompts is None and self.config.door.ring is None:
            raise ConfigError(
                "Runtime.run needs prompts: set data.train (or door.ring), or pass prompts=[...] to Runtime"
            )
        if self._ran:
            raise LifecycleError("Runtime.run was called twice; make a new Runtime for a second run")
        self._ran = True
        if not self.config.resume:
            await self._at_version(self._rooms.trainer.version)
        await self._graph.run(self._supervisor)
        return self.summary()

    def start(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run `work(*arguments)` beside the pumps until it ends or the block does; if it fails, the run fails with its error."""
        self._check_open("start")
        self._supervisor.start(name, work, *arguments)

    def note(self, text: str) -> None:
        """A line for people on the live view."""
        self._journal.live.note(text)

    def announce(self) -> None:
        """A few plain lines on what starts, and the warnings of the configuration."""
        for line in announcement(self.config, self.directory.path if self.directory else None, self.built.verdict):
            self.note(line)

    def summary(self) -> RunSummary:
        return RunSummary(
            version=self._rooms.trainer.version,
            books=self._rooms.ledger.statistics(),
            reasons=dict(self._rooms.book.reasons),
            seconds=time.perf_counter() - self._started,
            shares=self._journal.idle(),
            history=self._journal.history.copy(),
        )

    def _on_step(self, report: StepReport) -> None:
        extra = {"perf/needed_flop": needed_flop(report, self.built.policy, self.config)}
        if self._prompts is not None:
            counts = self._prompts.statistics()
            extra |= {f"data/{name}": float(counts[name]) for name in ("epoch", "delivered", "cut", "skipped")}
        full = self._journal.committed(report, extra)
        for listener in self._listeners:
            listener.push(full)

    def _no_more_steps(self) -> None:
        self._steps_over = True
        for listener in self._listeners:
            listener.close()

    async def _at_version(self, version: int) -> None:
        """What is due at a version, before its slots are released: evaluation, its line of metrics, checkpoint.

        In this order: a run that is killed in between and goes on from the checkpoint misses no line. The seconds of the
        checkpoint therefore stand in a later line.
        """
        await self._profiler.at(version)
        await self._agree_on_time()
        await self._checkpointer.say(version, self._prompts, self._graph.in_hand, self._rooms.ids.next)
        last = self._graph.nothing_left()
        await self._journal.write(version, await self._graph.evaluate(version, last))
        if self._checkpointer.due(version, last):
            await self._checkpointer.at_version(version, self._books(), last, self._supervisor.start)

    async def _agree_on_time(self) -> None:
        """Whether the time limit passed on any rank. The step that may be in progress on some of them is the last one: it
        cannot have finished anywhere, since its finish waits for this publish."""
        if self.world.world_size == 1 or self.config.train.time_limit_s is None or self._stop_agreed:
            return
        if await any_rank(self._graph.time_is_up, self.world, self.built.lanes[0], self._device):
            self._stop_agreed = True
            self._graph.stop_at(self._rooms.ledger.turn + 1)

    def _books(self) -> dict[str, Any]:
        return self._checkpointer.books(self._prompts, self._graph.in_hand, self._rooms.ids.next)

    async def _finalize(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """After the pumps ended and before the lanes close. Never hides the error that ended the run."""
        stopped = anyio.current_effective_deadline() == -math.inf or isinstance(error, asyncio.CancelledError)
        with anyio.CancelScope(shield=True):
            version, books = self._rooms.trainer.version, self._books()  # before live groups are ended
            ended = "closed" if error is None else f"run ended: {type(error).__name__}"
            try:
                if error is not None and self.world.world_size > 1:
                    # Another rank may wait in a collective that this one will never join: it must hear of that before
                    # this one waits for it.
                    await offload(self.world.leave, "leave")
                await self._rooms.book.end_all(ended)
                await self._profiler.close(version)
                await self._journal.write_pending()
                await self._checkpointer.at_end(version, books, error, stopped, self.note)
            finally:
                await self._journal.finish(ended if error is not None else "completed")
                self._no_more_steps()
            if error is None:
                check_books(self._rooms)

    # -- embedding -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | list[dict[str, Any]] | Sequence[int],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """Sample a group of `n` completions: a string or messages go through the tokenizer as configured, ints are token ids.

        Each call has a group id of its own, which keys its randomness. Errors: `GenerationError`, `LifecycleError`.
        """
        self._check_open("generate")
        prepared = as_prompt(prompt, self._rooms.ids.take(), columns or {}, self.config.data, self.tokenizer)
        prepared = await self._rooms.hooks.prompt(prepared)
        return await play(self._rooms.environment, prepared, n, sampled_as(sampling, self._rooms.engine))

    async def submit(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float | None],
        *,
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        """Hand over a whole group with one reward each; None: the run's reward functions score that member, with `columns`
        as the columns of its prompt. Waits for a slot (backpressure). Shaping and filters act as on the run's own groups.

        False: its oldest token is too old to be trained within `max_staleness`; it is counted and not trained.
        Errors: DataError (a ValueError) that names the member and the field that cannot be trained; LifecycleError.
        """
        self._check_open("submit")
        members, prompt = as_group(trajectories, rewards, columns or {}, self.tokenizer.decode)
        return await self._graph.submit(members, prompt)

    async def finish(self) -> RunSummary:
        """No more groups will be submitted: train what is here (a smaller last step included); `steps()` ends."""
        self._check_open("finish")
        await self._graph.drain()
        return self.summary()

    def steps(self) -> StepStream[StepReport]:
        """`async for report in rt.steps()`: every step committed from this call on, until the training ends or the
        Runtime closes."""
        stream: StepStream[StepReport] = StepStream()
        self.listen(stream)
        return stream

    def listen(self, listener: Listener[StepReport]) -> None:
        """Tell `listener` of every step from now on. The Runtime keeps a weak reference."""
        self._check_open("listen")
        self._listeners.add(listener)
        if self._steps_over:
            listener.close()

    @property
    def version(self) -> int:
        self._check_open("version", or_closed=True)
        return self._rooms.trainer.version

    @property
    def intake(self) -> Intake:
        """Where doors hand over groups of other processes. Errors: LifecycleError where this Runtime runs its own prompts."""
        self._check_open("intake")
        return self._graph.open_intake()

    @property
    def limits(self) -> Limits:
        """What a trajectory of this run may hold."""
        return self._rooms.limits

    @property
    def tokenizer(self) -> Any:
        self._check_open("tokenizer", or_closed=True)
        return self.built.tokenizer

    def _check_open(self, what: str, *, or_closed: bool = False) -> None:
        if self._state is not State.OPEN and not (or_closed and self._state is State.CLOSED):
            raise LifecycleError(
                f"Runtime.{what}: the Runtime is {self._state.value}; call it inside `async with Runtime(...)`"
            )
