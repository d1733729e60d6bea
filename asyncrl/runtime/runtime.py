"""The facade: `async with Runtime(config) as rt`, in `asyncrl.main` or inside somebody else's event loop.

states      new -> open -> closed; opened and closed in the same task
open        what the run is gets decided (`decided.py`) and then opened (`opening.py`), whole or not at all; what is asked of the
            Runtime before is a LifecycleError
tasks       one task group (the supervisor); a pump that dies cancels the block and its error is raised at its end
at the end  clean exit: what was submitted is trained (a last, smaller step where `train.partial_final_step`)
            error or cancellation: the open step is aborted, its groups are dropped and counted
            always: a checkpoint of the last committed version (`checkpoint.save_final`), trace, report, books checked
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from asyncrl.concurrency.descriptors import none_left, way_out
from asyncrl.concurrency.ending import exit_blockers
from asyncrl.concurrency.offload import offload, standing_by
from asyncrl.concurrency.watchdog import ProgressLimit, Watchdog
from asyncrl.config.schema import Config, WatchdogConfig
from asyncrl.distributed.world import World
from asyncrl.errors import AsyncrlError, DataError, LifecycleError, StallError
from asyncrl.ports import Environment
from asyncrl.pumps.evaluate import EvaluatePump
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.intake import Intake
from asyncrl.pumps.pipeline import StepReport
from asyncrl.pumps.rollout import Episodes
from asyncrl.records.check import Limits
from asyncrl.rewards.pool import RewardSpec
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Prompt, SamplingParams, Trajectory

from .decided import decide
from .directory import RunDirectory
from .embedding import as_group, as_numbers, as_prompt, play
from .opened import OpenRun, RunSummary
from .opening import open_run
from .plan import announcement
from .progress import Listener, Listeners, Stages, StepStream

logger = logging.getLogger("asyncrl.runtime")

# Runtimes of a process open one after another, in whatever loops: transformers changes torch's own functions while it builds a
# model, and what `inputs` reads before a run belongs to the process.
_OPENING = threading.Lock()


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Runtime:
    """A run inside an event loop: `async with Runtime(config) as rt`. It is opened and closed in the same task.

    `run` trains on the configured prompts. `generate`, `submit` and `finish` are for programs that make the groups themselves.
    `steps` iterates over what was trained."""

    def __init__(
        self,
        config: Config,
        *,
        rewards: Callable[..., Any] | Sequence[Callable[..., Any] | RewardSpec] = (),
        environment: Environment | None = None,
        hooks: Hooks | None = None,
        prompts: Any = None,
        write: bool = True,
        checked: bool = False,
        hard_exit: bool = False,
    ) -> None:
        """`rewards`, `environment`, `hooks`: objects instead of names; `prompts`: as a data function may return them.

        `write=False` leaves no run directory behind. `checked`: `check_start` was called. `hard_exit`: the watchdog may end a
        wedged process (both: `main` only).
        """
        given = [rewards] if callable(rewards) else list(rewards)
        specs = [r if isinstance(r, RewardSpec) else RewardSpec(r) for r in given]
        self._decide = partial(
            decide,
            config,
            rewards=tuple(specs),
            environment=environment,
            hooks=hooks,
            prompts=prompts,
            write=write,
            checked=checked,
        )
        self.recorder = Recorder(max_events=config.telemetry.trace_events if config.telemetry.trace else 0)
        self._listeners: Listeners[StepReport] = Listeners()
        self._state = _State.NEW
        self._task: asyncio.Task[Any] | None = None
        self._stack = AsyncExitStack()
        self._run: OpenRun | None = None  # from the end of the opening on, also when it is closed
        self._stages = Stages()
        self._stall: StallError | None = None  # while it is being opened
        self._hard_exit = hard_exit
        self._watchdog = self._make_watchdog(config.watchdog)

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        if self._state is not _State.NEW:
            raise LifecycleError(f"a Runtime is opened once; this one is {self._state.value}. Make a new one")
        self._state, self._task = _State.OPEN, asyncio.current_task()
        await self._stack.__aenter__()
        if not self._hard_exit:  # else the end of the process names them
            self._stack.callback(_name_left, exit_blockers())
        try:
            await self._stack.enter_async_context(self._watchdog)  # first, so that it is closed last
            self._stack.enter_context(standing_by())
            try:
                await offload(_OPENING.acquire, "the opening of another Runtime")
                decided = await self._decide(self._stages)
                self._run = await open_run(decided, self.recorder, self._listeners, self._stages, self._stack)
            finally:
                # A cancelled `offload` ends once its thread has the lock, so the lock is released here, too.
                if _OPENING.locked():
                    _OPENING.release()
        except BaseException as error:
            self._state = _State.CLOSED
            await self._unwind(error)
            if self._stall is not None and isinstance(error, asyncio.CancelledError):
                if self._task is not None:
                    self._task.uncancel()
                raise self._stall from None
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if asyncio.current_task() is not self._task:
            raise LifecycleError(
                "a Runtime must be closed by the task that opened it; keep the `async with` in one task"
            )
        if self._state is _State.CLOSED or self._run is None:
            return None
        self._state = _State.CLOSED
        if error is None:
            try:
                await self._run.drain()
            except BaseException as failure:
                await self._unwind(failure)
                raise
        return await self._unwind(error)

    async def _unwind(self, error: BaseException | None) -> bool | None:
        """Close everything and raise the first error, with notes of the errors that closing raised. An error of closing that is the
        cause of the first one is raised instead."""
        try:
            return await self._stack.__aexit__(
                type(error) if error else None, error, error.__traceback__ if error else None
            )
        except BaseException as last:
            first = error if self._run is None else self._run.ended_by
            if first is None or isinstance(first, asyncio.CancelledError) or first.__cause__ is last:
                raise
            later: BaseException | None = last
            while later is not None and later is not first:
                if isinstance(later, AsyncrlError) or later is last:
                    first.add_note(f"and at the end: {type(later).__name__}: {later}")
                later = later.__context__
            if none_left(last) or none_left(first):
                first.add_note(way_out())
            raise first from first.__cause__

    def _make_watchdog(self, settings: WatchdogConfig) -> Watchdog:
        """Its questions come from a thread of its own, also while the run is being opened."""

        def standing() -> ProgressLimit | None:
            stage = self._stages.standing(settings.stage_timeout_s)
            return self._run.standing() if stage is None and self._run is not None else stage

        return Watchdog(
            settings,
            recorder=self.recorder,
            lanes=self._stages.lanes,
            progress_limit=standing,
            on_stall=self._end,
            details=[lambda: self._run.ports.ledger.describe() if self._run is not None else "starting"],
            silent_ranks=self._stages.silent_ranks,
            hard_exit=self._hard_exit,
            name=f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else "",
        )

    def _end(self, error: StallError) -> None:
        """The run stalls: fail it, or cancel its opening. A stage of the end can only be ended with the process."""
        if self._run is not None:
            self._run.supervisor.fail(error)
        elif self._task is not None:
            self._stall = error
            self._task.cancel()

    def expect_end(self, reason: str) -> None:
        """The program is about to cancel the block, because of a signal of that name: from now on the end may take
        `watchdog.abort_grace_s`."""
        if self._run is not None:
            self._run.stopped_by = reason
            self._run.checkpointer.hurry(self._run.config.watchdog.abort_grace_s)
        self._watchdog.shutdown_deadline(reason)

    def saving(self) -> bool:
        """Whether a checkpoint is being written, or the last one made."""
        return self._run is not None and self._run.checkpointer.saving

    # -- a run over configured data --------------------------------------------------------------------------------

    async def run(self) -> RunSummary:
        """Train on the configured prompts, or on what comes through `door.ring` (`asyncrl.runtime.door`), until `max_steps`,
        `max_epochs` or the time limit. Once per Runtime."""
        return await self._open("run").run()

    def start(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run `work(*arguments)` beside the pumps until it ends or the block does; if it fails, the run fails with its error."""
        self._open("start").supervisor.start(name, work, *arguments)

    def note(self, text: str) -> None:
        """A line for people on the live view."""
        self._opened("note").journal.live.note(text)

    def announce(self) -> None:
        """A few plain lines on what starts, and the warnings of the configuration."""
        run, path = self._opened("announce"), self.directory.path if self.directory else None
        outside = run.decided.rows is None and self.config.data.train is None
        for line in announcement(self.config, path, run.verdict, run.placed, outside=outside):
            self.note(line)

    def summary(self) -> RunSummary:
        """How far the run is, or how it ended."""
        return self._opened("summary").summary()

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

        Each call has a group id of its own, which keys its randomness: two calls with the same arguments differ, as the members
        of one do. `rollout.retries` and `rollout.timeout_s` hold here, too. Errors: `GenerationError`, `LifecycleError`.
        """
        ports = self._open("generate").ports
        prepared = as_prompt(prompt, ports.ids.take(), columns or {}, self.config.data, self.tokenizer)
        prepared = await ports.hooks.prompt(prepared)
        if sampling is None:
            return await play(Episodes(ports), prepared, n, ports.engine.generate)
        played = await play(
            Episodes(ports), prepared, n, lambda asked: ports.engine.generate(replace(asked, sampling=sampling))
        )
        # An environment stamps the run's temperature, and a trainer divides the logits by what is stamped.
        return [replace(trajectory, temperature=sampling.temperature) for trajectory in played]

    async def submit(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float | None],
        *,
        columns: Mapping[str, Any] | None = None,
        components: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Hand over a whole group with one reward each; None: the run's reward functions score that member, with `columns`
        as the columns of its prompt. Waits for a slot (backpressure). Shaping and filters act as on the run's own groups.
        `components` of the reward, `metrics` of your own: by name a number or None for each trajectory, or one number for all. The
        step that trains the group has them in `reward/NAME/mean` and `reward/own/NAME/mean`.

        False: its oldest token is too old to be trained within `max_staleness`; it is counted and not trained.
        Errors: DataError (a ValueError) that names the member and the field that cannot be trained; LifecycleError.
        """
        graph = self._open("submit").graph
        members, prompt = as_group(self.tokenizer, trajectories, rewards, components, metrics, columns)
        return await graph.submit(members, prompt)

    def log(self, name: str, value: float) -> None:
        """A metric of your own, from any thread: `own/NAME` of a step is the mean of what all ranks logged since the step before;
        the last line has what came after it. Errors: DataError for a name or a value that is none; LifecycleError."""
        self._open("log")
        for own, number in as_numbers({name: [value]}, 1, "log", "own/")[0].items():
            self.recorder.log(own, number)

    async def evaluate(
        self, play: Callable[[Any], Awaitable[Trajectory]], prompts: Iterable[Any], *, name: str = "own"
    ) -> dict[str, float]:
        """Evaluate a loop of your own: `await play(prompt)` returns the trajectory of an episode with its reward (None: the run's
        functions score it), `evaluate.samples` times for each prompt, all at once. One that fails is played again, as those of an
        environment. No step moves the weights meanwhile, so a `submit` inside of it may wait for ever.
        The metrics are those of `data.eval`, `eval/NAME/avg@k` and so on; they stand in the line of this version.
        """
        run = self._open("evaluate")
        as_numbers({name: 0}, 1, "evaluate")
        if self.config.data.eval and name == self.config.rollout.environment.rpartition(":")[2]:
            raise DataError(f"evaluate: {name!r} is the name of the evaluation of data.eval; choose another")

        async def episode(prompt: Prompt, *_: Any) -> Trajectory:
            played = await play(prompt.prompt)
            if not isinstance(played, Trajectory):
                raise DataError(f"evaluate: an episode returned {played!r:.80}; expected an asyncrl.Trajectory")
            run.graph.intake.check(played, self.limits)
            return played

        ports = replace(run.ports, environment=SimpleNamespace(run=episode))
        pump = EvaluatePump(ports, [Prompt(0, np.zeros(0, np.int32), prompt) for prompt in prompts], name)
        async with run.ports.book.weights_lock:
            await run.graph.wait_published()
            await run.journal.write(self.version, metrics := await pump.run(self.version))
        return metrics

    async def finish(self) -> RunSummary:
        """Say that no more groups come. What is here is trained, a smaller last step included, and `steps()` ends."""
        run = self._open("finish")
        await run.graph.drain()
        return run.summary()

    def steps(self) -> StepStream[StepReport]:
        """`async for report in rt.steps()`: every step committed from this call on, until the training ends or the
        Runtime closes."""
        stream: StepStream[StepReport] = StepStream()
        self.listen(stream)
        return stream

    def listen(self, listener: Listener[StepReport]) -> None:
        """Tell `listener` of every step from now on. The Runtime keeps a weak reference."""
        self._open("listen")
        self._listeners.add(listener)

    # -- state of an open or closed one ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version: how many optimizer steps the weights have taken."""
        return self._opened("version").ports.trainer.version

    @property
    def intake(self) -> Intake:
        """Where doors hand over groups of other processes. Errors: LifecycleError where this Runtime runs its own prompts."""
        return self._open("intake").graph.open_intake()

    @property
    def config(self) -> Config:
        """The resolved configuration: nothing in it is left to be derived."""
        return self._opened("config").config

    @property
    def world(self) -> World:
        """The ranks of this run, and which of them this one is."""
        return self._opened("world").world

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory; None if the run writes nothing."""
        return self._opened("directory").directory

    @property
    def built(self) -> OpenRun:
        """What is open of this rank: model, trainer, lanes and every port."""
        return self._opened("built")

    @property
    def limits(self) -> Limits:
        """What a trajectory of this run may hold."""
        return self._opened("limits").ports.limits

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, with its chat template. In a dry run bytes are tokens."""
        return self._opened("tokenizer").tokenizer

    def _open(self, what: str) -> OpenRun:
        if self._state is not _State.OPEN:
            raise self._misused(what)
        return self._opened(what)

    def _opened(self, what: str) -> OpenRun:
        if self._run is None:
            raise self._misused(what)
        return self._run

    def _misused(self, what: str) -> LifecycleError:
        state = "not open yet" if self._state is _State.OPEN else self._state.value
        return LifecycleError(f"Runtime.{what}: the Runtime is {state}; call it inside `async with Runtime(...)`")


class NotebookRuntime(Runtime):
    """`rt = await NotebookRuntime(config).open()` in one cell of a notebook, `await rt.close()` in another. A program uses
    `async with Runtime`.

    Each cell is a task, and a Runtime is closed by the task that opened it: so a task of its own holds it open in between.
    """

    _holder: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Errors: those of opening a Runtime, LifecycleError."""
        if self._holder is not None:
            raise LifecycleError("NotebookRuntime.open was called twice; make a new one")
        self._close_asked, opened = asyncio.Event(), asyncio.Event()
        self._holder = asyncio.create_task(self._hold(opened), name="asyncrl notebook")
        self._holder.add_done_callback(lambda _: opened.set())
        try:
            await opened.wait()
        except asyncio.CancelledError:
            # The cell was interrupted: what it began is ended.
            self._holder.cancel()
            await asyncio.wait([self._holder])
            raise
        if self._holder.done():
            await self._holder  # raises what went wrong
        self._holder.add_done_callback(self._say_end)
        return self

    async def close(self) -> None:
        """Trains what was submitted, and closes. Errors: what ended the training, also where that was long before."""
        if self._holder is None:
            raise LifecycleError("NotebookRuntime.close: it was never opened")
        self._close_asked.set()
        await asyncio.shield(self._holder)

    async def _hold(self, opened: asyncio.Event) -> None:
        async with self:
            opened.set()
            await self._close_asked.wait()

    def _say_end(self, holder: asyncio.Task[None]) -> None:
        error = None if holder.cancelled() else holder.exception()
        if error is not None and not self._close_asked.is_set():
            print(f"asyncrl: the training ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _name_left(before: Mapping[Any, str]) -> None:
    """What was begun while the Runtime was open, in user code or a library, and holds the user's process now."""
    if left := exit_blockers(before):
        logger.warning("the Runtime is closed, and the process does not end before: %s", "; ".join(left.values()))
