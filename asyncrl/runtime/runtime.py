"""The facade: `async with Runtime(config) as rt`, in `asyncrl.main` or in a program's own event loop.

states      new -> open -> closed; opened and closed in the same task
open        `decided.py` resolves the settings, then `opening.py` opens the parts; if one part fails, the others are closed
tasks       one task group (the supervisor); the error of a pump cancels the block and is raised at the end of the block
at the end  without an error: submitted groups are trained (in a last, smaller step under `train.partial_final_step`), and the
            ledger's numbers are checked
            error or cancellation: the open step is aborted; all live groups are dropped and counted
            always: trace and report, and a checkpoint of the last committed version if `Checkpointer.final_due` allows it
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import numpy as np

from asyncrl.concurrency.descriptors import descriptor_advice
from asyncrl.concurrency.offload import offload
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.concurrency.watchdog import ProgressLimit, Watchdog
from asyncrl.config.schema import Config, WatchdogConfig
from asyncrl.distributed.world import World
from asyncrl.environments.loading import check_episode, takes_policy
from asyncrl.environments.policy import AgentEnvironment, EpisodeFunction, as_numbers
from asyncrl.errors import AsyncrlError, DataError, LifecycleError, RankLost, StallError
from asyncrl.ports import Environment
from asyncrl.pumps.evaluate import EvaluatePump
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.intake import Intake
from asyncrl.pumps.rollout import Episodes
from asyncrl.records.check import Limits
from asyncrl.rewards.pool import RewardSpec
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Prompt, SamplingParams, Trajectory

from .decided import decide
from .directory import RunDirectory
from .opened import OpenRun, RunSummary
from .opening import open_run
from .plan import announcement
from .program import as_group, as_prompt, as_task, sample_group
from .progress import Listener, Listeners, Stages, StepStream

# Only one Runtime of a process opens at a time, also if several event loops run: transformers replaces functions of torch while it
# builds a model, and `inputs.py` keeps rows in a global variable.
_OPENING = threading.Lock()
# Fractions of `watchdog.abort_grace_s`, both counted from the signal that stops a run. After the first fraction collectives are
# given up. After the second fraction, `Positions.gather` no longer waits for other ranks, so that the checkpoint can be written.
_COLLECTIVE_FRACTION, _WAIT_FRACTION = 0.25, 0.6


class Runtime:
    """A run inside an event loop: `async with Runtime(config) as rt`. The same task must open and close a Runtime.
    `run` trains on the configured prompts. `generate`, `submit` and `finish` are for programs that make the groups themselves.
    A use before the block raises LifecycleError. After the block only `summary`, `note`, `announce` and the properties other than
    `intake` work. `saving` and `expect_end` never raise."""

    def __init__(
        self,
        config: Config,
        *,
        rewards: Callable[..., Any] | Sequence[Callable[..., Any] | RewardSpec] = (),
        environment: Environment | EpisodeFunction | None = None,
        hooks: Hooks | None = None,
        prompts: Any = None,
        write: bool = True,
        checked: bool = False,
        hard_exit: bool = False,
        world: World | None = None,
    ) -> None:
        """`rewards`, `environment` (also a coroutine function), `hooks`: objects instead of those that the configuration names.
        `prompts`: rows, in any form that a data function may return. `write=False`: make no run directory.
        For `main` only: `checked`: `check_start` was called; `hard_exit`: the watchdog may end the process if it hangs; `world`:
        the World of a node that joined a run; None: from the environment variables."""
        functions = [rewards] if callable(rewards) else list(rewards)
        specs = [function if isinstance(function, RewardSpec) else RewardSpec(function) for function in functions]
        self._decide = partial(
            decide,
            config,
            rewards=tuple(specs),
            environment=environment,
            hooks=hooks,
            prompts=prompts,
            write=write,
            checked=checked,
            world=world,
        )
        self.recorder = Recorder(max_events=config.telemetry.trace_events if config.telemetry.trace else 0)
        self._listeners = Listeners()
        self._state: Literal["new", "open", "closed"] = "new"
        self._task: asyncio.Task[Any] | None = None
        self._stack = AsyncExitStack()
        self._run: OpenRun | None = None  # set at the end of the opening
        self._stages = Stages()
        self._stages.end_opening = self._end_opening
        self._opening_error: StallError | RankLost | None = None  # why the opening was cancelled
        self._hard_exit = hard_exit
        self._watchdog = self._make_watchdog(config.watchdog)

    async def __aenter__(self) -> Runtime:
        if self._state != "new":
            raise LifecycleError(f"this Runtime is already {self._state}, and opens only once; make a new Runtime")
        self._state, self._task = "open", asyncio.current_task()
        await self._stack.__aenter__()
        try:
            await self._stack.enter_async_context(self._watchdog)  # first, so it is closed last
            acquired: list[bool] = []  # empty until this Runtime has the lock
            try:
                await offload(lambda: acquired.append(_OPENING.acquire()), "the opening of another Runtime")
                decided = await self._decide(self._stages)
                self._run = await open_run(decided, self.recorder, self._listeners, self._stages, self._stack)
            finally:
                # A cancelled `offload` returns only when its thread has the lock: release the lock after a cancellation, too.
                if acquired:
                    _OPENING.release()
        except BaseException as error:
            self._state = "closed"
            if self._opening_error is not None and self._task is not None and isinstance(error, asyncio.CancelledError):
                # Uncancel before the parts close: in a cancelled task, task groups raise CancelledError, not `_opening_error`.
                self._task.uncancel()
                await self._unwind(self._opening_error)
                raise self._opening_error from None
            await self._unwind(error)
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if asyncio.current_task() is not self._task:
            raise LifecycleError("a Runtime must be closed by the task that opened it; use `async with` in one task")
        if self._state == "closed" or self._run is None:
            return None
        self._state = "closed"
        if error is None:
            try:
                await self._run.drain()
            except BaseException as failure:
                await self._unwind(failure)
                raise
        return await self._unwind(error)

    async def _unwind(self, error: BaseException | None) -> bool | None:
        """Close all parts. Raises the error that ended the run, with notes for the errors that the closing raised.
        If an error of the closing is the `__cause__` of the run's error, that cause is raised instead."""
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
            if advice := descriptor_advice(last) or descriptor_advice(first):
                first.add_note(advice)
            raise first from first.__cause__

    def _make_watchdog(self, settings: WatchdogConfig) -> Watchdog:
        """The event loop calls `on_stall`. The watchdog's threads call the other functions given here, also during the opening."""

        def progress_limit() -> ProgressLimit | None:
            stage_limit = self._stages.progress_limit(settings.stage_timeout_s)
            if stage_limit is not None or self._run is None:
                return stage_limit
            return self._run.progress_limit()

        return Watchdog(
            settings,
            recorder=self.recorder,
            lanes=self._stages.lanes,
            progress_limit=progress_limit,
            on_stall=self._fail_run,
            details=[lambda: self._run.ports.ledger.describe() if self._run is not None else "starting"],
            silent_ranks=self._stages.silent_ranks,
            hard_exit=self._hard_exit,
            name=f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else "",
        )

    def _fail_run(self, error: StallError | RankLost) -> None:
        """Fail the run, or cancel its opening. If the run is closing, this has no effect, and only the end of the process helps."""
        if self._run is not None:
            if isinstance(error, RankLost):
                # Without `report` the lane would wait for the lost rank, and the pumps for the lane.
                self._run.world.lost.report(str(error))
            self._run.supervisor.fail(error)
        elif self._task is not None:
            self._opening_error = error
            self._task.cancel()

    def _end_opening(self, error: RankLost) -> bool:
        if self._run is not None or self._state != "open":
            return False
        self._fail_run(error)
        return True

    def expect_end(self, reason: str) -> None:
        """Call before the block is cancelled because of a signal. If the run has not ended after `watchdog.abort_grace_s`, the
        watchdog raises an alarm. `reason`: the name of the signal."""
        if self._run is not None:
            grace_s = self._run.config.watchdog.abort_grace_s
            self._run.stopped_by = reason
            if self._run.positions is not None:
                self._run.positions.limit_waits(_WAIT_FRACTION * grace_s)
            # With nccl, a collective hangs if a stopped rank never joins it. `report` makes the collective fail.
            text = f"the run was stopped by {reason} in a collective that other ranks left"
            wait_s, report = _COLLECTIVE_FRACTION * grace_s, self._run.world.lost.report
            asyncio.get_running_loop().call_later(wait_s, report, text)
        self._watchdog.shutdown_deadline(reason)

    def saving(self) -> bool:
        """Whether a checkpoint is being written, or the closing run captures its last checkpoint."""
        return self._run is not None and self._run.checkpointer.saving

    async def run(self) -> RunSummary:
        """Train on the configured prompts, or on the groups that arrive in `door.ring` (`door.py`), until `train.max_steps`,
        `train.max_epochs` or `train.time_limit_s`. May be called once."""
        return await self._require_open("run").run()

    def start(self, name: str, work: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run `work(*arguments)` as a task beside the pumps. A failed task fails the run. The end of the block cancels the task."""
        self._require_open("start").supervisor.start(name, work, *arguments)

    def note(self, text: str) -> None:
        """Print a line above the live view."""
        self._require_run("note").journal.live.note(text)

    def announce(self) -> None:
        """Print the first lines of the run: sizes, placement, how the model is computed (models/paths.py), warnings."""
        run, path = self._require_run("announce"), self.directory.path if self.directory else None
        for line in announcement(self.config, path, run.verdict, run.placement_line, rows=run.decided.row_count):
            self.note(line)

    def summary(self) -> RunSummary:
        """The state of the run, or its result after the end."""
        return self._require_run("summary").summary()

    async def generate(
        self,
        prompt: str | list[dict[str, Any]] | Sequence[int],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """Sample a group of `n` completions. `prompt`: text or messages, which are tokenized as configured, or token ids.
        Each call takes a new group id, which seeds the sampling: two equal calls use different random numbers.
        `sampling`: None: as in `rollout.*`. `columns`: the columns of the prompt, for reward functions. `rollout.retries` and
        `rollout.timeout_s` apply. Errors: GenerationError, DataError."""
        ports = self._require_open("generate").ports
        prepared = as_prompt(prompt, ports.ids.take(), columns or {}, self.config.data, self.tokenizer)
        prepared = await ports.hooks.apply_before_group(prepared)
        if sampling is None:
            return await sample_group(Episodes(ports), prepared, n, ports.engine.generate)
        trajectories = await sample_group(
            Episodes(ports), prepared, n, lambda request: ports.engine.generate(replace(request, sampling=sampling))
        )
        # The environment wrote the run's temperature. The trainer divides logits by the temperature that a trajectory names.
        return [replace(trajectory, temperature=sampling.temperature) for trajectory in trajectories]

    async def play(self, episode: EpisodeFunction, task: Any, *, n: int | None = None) -> list[Trajectory]:
        """Play and submit a group: `n` episodes of the coroutine function `episode(task, policy)`. Waits for a slot (backpressure).

        `task`: a row (a mapping), or a prompt. `n`: by default `rollout.group_size`; most advantages need 2 or more. The settings
        for retries and limits apply. Returns the episodes with their rewards, or an empty list if the group has failed;
        the run counts failed groups.
        Errors: GenerationError if more groups failed than `rollout.max_failed_groups`; DataError, ConfigError, LifecycleError."""
        run = self._require_open("play")
        environment = AgentEnvironment(run.own_agents(), check_episode(episode, "play: the episode"))
        size = self.config.rollout.group_size if n is None else n
        if size < 1:
            raise DataError(f"play: n is {n}; expected 1 or more episodes")
        prompt = as_task(task, run.ports.ids.take(), self.config.data, self.tokenizer)
        # The task group raises the error of an episode as it is, without an ExceptionGroup around it.
        async with plain_task_group():
            played = await run.graph.play(environment, prompt, size)
        return list(played)

    def endpoint(self) -> tuple[str, str]:
        """(base URL, key) of the policy over HTTP, for requests that belong to no episode: their completions are not trained. An
        episode uses `policy.base_url` and `policy.api_key` instead. Errors: ConfigError, LifecycleError."""
        run = self._require_open("endpoint")
        run.own_agents()
        assert run.endpoint is not None
        return run.endpoint.open(None)

    async def submit(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[float | None],
        *,
        columns: Mapping[str, Any] | None = None,
        components: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Submit all trajectories of a group, with one reward each. Waits for a slot (backpressure).

        A reward of None: the run's reward functions score that trajectory, with `columns` as the columns of its prompt.
        `components` are parts of the reward; `metrics` are numbers of your own. Both map a name to a list with a number or None for
        each trajectory, or to one number for all. They become the step's metrics `reward/NAME/mean` and `own/NAME`.
        Reward shaping and filters apply.

        Returns False if the oldest token is too old for `rollout.max_staleness`: the group is dropped and counted.
        Errors: DataError (a ValueError) that names the member and the field that cannot be trained.
        """
        graph = self._require_open("submit").graph
        members, prompt = as_group(self.tokenizer, trajectories, rewards, components, metrics, columns)
        return await graph.submit(members, prompt)

    def log(self, name: str, value: float) -> None:
        """Log a metric of your own, from any thread. `own/NAME` of a step is the mean of all ranks' values since the previous step.
        Rank 0's values after the last step are in the last line of metrics. Errors: DataError for an invalid name or value."""
        self._require_open("log")
        for metric, number in as_numbers({name: [value]}, 1, "log", "own/")[0].items():
            self.recorder.log(metric, number)

    async def evaluate(
        self, play: EpisodeFunction | Callable[[Any], Awaitable[Any]], prompts: Iterable[Any], *, name: str = "own"
    ) -> dict[str, float]:
        """Evaluate an episode loop of your own, with `evaluate.samples` concurrent episodes per prompt. Returns the metrics.
        `play`: a coroutine function `episode(task, policy)`, as for `Runtime.play`; or a coroutine function that gets a prompt and
        returns the trajectory of one episode. The run's reward functions score an episode without a reward. A failed episode is
        played again up to `rollout.retries` times, and then left out. The weights stay the same during the call, so a `submit` in
        `play` may wait for ever. The metrics, such as `eval/NAME/avg@k`, are written to the metrics line of the present version."""
        run, function = self._require_open("evaluate"), cast(Any, play)
        as_numbers({name: 0}, 1, "evaluate")
        if self.config.data.eval and name == self.config.rollout.environment.rpartition(":")[2]:
            raise DataError(f"evaluate: {name!r} is the name of the evaluation of data.eval; choose another name")

        async def episode(prompt: Prompt, *_: Any) -> Trajectory:
            trajectory = await function(prompt.prompt)
            if not isinstance(trajectory, Trajectory):
                raise DataError(f"evaluate: an episode returned {trajectory!r:.80}; expected an asyncrl.Trajectory")
            run.graph.intake.check(trajectory, self.limits)
            return trajectory

        if isinstance(prompts, str | Mapping):
            raise DataError(f"evaluate: prompts is {prompts!r:.80}; give a list of prompts or rows")
        rows = [Prompt(0, np.zeros(0, np.int32), prompt) for prompt in prompts]
        if not rows:
            raise DataError("evaluate: the list of prompts is empty")
        environment: Any = SimpleNamespace(run=episode)
        if takes_policy(play):
            environment = AgentEnvironment(run.own_agents(), function)
            rows = [as_task(row.prompt, 0, self.config.data, self.tokenizer) for row in rows]
        pump = EvaluatePump(replace(run.ports, environment=environment), rows, name)
        async with run.ports.book.weights_lock:
            await run.graph.wait_published()
            await run.journal.write(self.version, metrics := await pump.run(self.version))
        return metrics

    async def finish(self) -> RunSummary:
        """Declare that no more groups come. Returns when all groups are trained, or dropped if no step needs them. Ends `steps`."""
        run = self._require_open("finish")
        await run.graph.drain()
        return run.summary()

    def steps(self) -> StepStream:
        """`async for report in rt.steps()`: all steps that are committed after this call, until the training ends."""
        stream = StepStream()
        self.listen(stream)
        return stream

    def listen(self, listener: Listener) -> None:
        """Notify `listener` of every step from now on. The Runtime keeps only a weak reference to `listener`."""
        self._require_open("listen")
        self._listeners.add(listener)

    @property
    def version(self) -> int:
        """The policy version: the number of optimizer steps, with those before a resume. A step without trained tokens counts."""
        return self._require_run("version").ports.trainer.version

    @property
    def intake(self) -> Intake:
        """The intake for groups of other processes. Errors: LifecycleError, also if this Runtime plays its own prompts."""
        return self._require_open("intake").graph.open_intake()

    @property
    def config(self) -> Config:
        """The resolved configuration of this run."""
        return self._require_run("config").config

    @property
    def world(self) -> World:
        """The ranks of this run, with the number of this rank."""
        return self._require_run("world").world

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory; None if the run writes no files."""
        return self._require_run("directory").directory

    @property
    def built(self) -> OpenRun:
        """The open parts of this rank: model, trainer, lanes, ports."""
        return self._require_run("built")

    @property
    def limits(self) -> Limits:
        """The limits of this run for a trajectory: lengths, token ids and routes."""
        return self._require_run("limits").ports.limits

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, with its chat template. With `train.kind: dry_run` each byte is a token."""
        return self._require_run("tokenizer").tokenizer

    def _require_open(self, method: str) -> OpenRun:
        if self._state != "open":
            raise self._misuse(method)
        return self._require_run(method)

    def _require_run(self, method: str) -> OpenRun:
        """The run, open or closed."""
        if self._run is None:
            raise self._misuse(method)
        return self._run

    def _misuse(self, method: str) -> LifecycleError:
        state = "not open yet" if self._state == "open" else self._state
        return LifecycleError(f"Runtime.{method}: the Runtime is {state}; use it inside `async with Runtime(...)`")


class NotebookRuntime(Runtime):
    """For notebooks: `rt = await NotebookRuntime(config).open()` in one cell, `await rt.close()` in another.
    One task must open and close a Runtime, but each cell is a task. So a background task opens, holds and closes the Runtime."""

    _holder: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Open the Runtime. Errors: those of opening a Runtime; LifecycleError if called twice."""
        if self._holder is not None:
            raise LifecycleError("NotebookRuntime.open was called twice; make a new NotebookRuntime")
        self._close_requested, opened = asyncio.Event(), asyncio.Event()
        self._holder = asyncio.create_task(self._hold(opened), name="asyncrl notebook")
        self._holder.add_done_callback(lambda _: opened.set())
        try:
            await opened.wait()
        except asyncio.CancelledError:  # the user interrupted the cell
            self._holder.cancel()
            await asyncio.wait([self._holder])
            raise
        if self._holder.done():
            await self._holder  # raises the error of the opening
        self._holder.add_done_callback(self._print_early_end)
        return self

    async def close(self) -> None:
        """Train all submitted groups, then close. Errors: the error that ended the training, maybe long before this call."""
        if self._holder is None:
            raise LifecycleError("NotebookRuntime.close was called before open; call open first")
        self._close_requested.set()
        await asyncio.shield(self._holder)

    async def _hold(self, opened: asyncio.Event) -> None:
        async with self:
            opened.set()
            await self._close_requested.wait()

    def _print_early_end(self, holder: asyncio.Task[None]) -> None:
        error = None if holder.cancelled() else holder.exception()
        if error is not None and not self._close_requested.is_set():
            print(f"asyncrl: the training ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
