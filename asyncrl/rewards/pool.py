"""The reward pool: the user's functions in worker processes, behind the `Reward` port.

    score ──▶ one call per function ──▶ idle workers (FIFO) ──▶ worker ──▶ reply ──▶ components, reward
                                            ▲                     │ deadline, crash, cancellation: killed; or worn
                                            └──── keeper ◀────────┘ (one per place: starts the next)

| who waits | for what           | bounded by                     | woken when                         |
|-----------|--------------------|--------------------------------|------------------------------------|
| caller    | an idle worker     | the deadlines of those before  | a worker is idle; the pool closes  |
| caller    | the reply          | `timeout_s`                    | reply, deadline, death of a worker |
| keeper    | its worker's end   | -                              | the process ends, or is worn       |
| keeper    | another's renewal  | the start of a worker          | its successor is loaded, or failed |

Guarantees
* A worker serves one request at a time; after a deadline, a crash or a cancelled caller it is killed and replaced, so
  no answer to an old request is ever taken for a new one (request ids guard that a second time).
* Callers get workers in the order in which they asked. A caller that is cancelled while it waits loses nothing.
* All functions are loaded in every worker before `__aenter__` returns: an import error ends the run before it starts.
* A worker that is worn (it gained `max_mib` of memory, or had `max_calls`) goes on until its successor has loaded the functions,
  and leaves between two calls. One successor starts at a time.
* Closing ends every worker, also when the block is left by an error or a cancellation. What a worker had started ends with it
  (`guard.py`), also where this process is killed; opening ends what dead runs left (`leftovers.py`).

Opened and closed in the same task, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread
import orjson
from anyio.abc import TaskGroup

from asyncrl.concurrency.shield import wait_shielded
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import AsyncrlError, ConfigError, LifecycleError, RewardCrash, RewardError, RewardTimeout
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Int32Array, Prompt, Trajectory

from . import leftovers
from .calls import Answer, LoadedFunction, RewardSpec, arguments_of, remote_text, source_of, with_scores
from .loading import load
from .process import WorkerDiedError, WorkerProcess
from .wire import Kind

logger = logging.getLogger("asyncrl.rewards")

CLOSE_GRACE_S = 3.0  # for idle workers to leave, which includes that they are killed

OnError: TypeAlias = Literal["fail", "none", "zero"]


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class RewardPool:
    """See the module docstring. `timeout_s` is the deadline of one call of one function on one group, in seconds.

    `on_error` decides what a function that raised, crashed or missed its deadline means: `fail` raises, `none` counts
    the component as not applicable, `zero` as 0; the last two are logged and counted as `reward/{fn}/errors`.
    `max_mib` and `max_calls` bound what one worker gains in memory and how often it is called (None: without bound); then
    another takes its place, which `reward/workers_recycled` counts.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        workers: int = 1,
        timeout_s: float = 30.0,
        on_error: OnError = "fail",
        recorder: Recorder | None = None,
        max_mib: int | None = None,
        max_calls: int | None = None,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(f"reward workers ({workers}) and timeout_s ({timeout_s}) must be positive")
        self._specs = tuple(functions)
        self._workers = workers
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._recorder = recorder if recorder is not None else Recorder(max_events=0, nvtx=False)
        self._max_mib = max_mib
        self._max_calls = max_calls
        self.columns: Sequence[Sequence[str]] = ()  # of known rows, by source: a function that needs others is refused
        self.progress: Callable[[], Mapping[str, Any]] = lambda: {
            "global_step": 0,
            "max_steps": None,
        }  # of the run, now
        self.generation_prompt: Callable[[Int32Array], str] = lambda prompt_ids: ""  # the end of a prompt, as text
        self._state = _State.NEW
        self._loaded: list[LoadedFunction] = []
        self._weights: dict[str, float] = {}
        self._alive: set[WorkerProcess] = set()
        self._broken: AsyncrlError | None = None  # why workers cannot be replaced any more
        self._tasks: TaskGroup | None = None
        self._renewal = anyio.Lock()
        self._started = 0  # workers, which gives each a mark of its own

    @classmethod
    def from_config(
        cls, config: RewardConfig, recorder: Recorder | None = None, functions: Sequence[RewardSpec] = ()
    ) -> RewardPool:
        """`functions`: in the place of those of the configuration."""
        specs = functions or [RewardSpec(f.function, f.weight, f.name) for f in config.functions]
        limits = (config.worker_max_mib, config.worker_max_calls)
        return cls(specs, config.workers, config.timeout_s, config.on_error, recorder, *limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions in order; known once the pool is open."""
        return tuple(function.name for function in self._loaded)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each function in the sum, by name; known once the pool is open."""
        return dict(self._weights)

    # ---- life

    async def __aenter__(self) -> RewardPool:
        """Start all workers and load every function in each. Errors: `ConfigError`, `RewardCrash`, `RewardTimeout`."""
        if self._state is not _State.NEW:
            raise LifecycleError("a reward pool can be opened once; make a new one")
        self._state = _State.OPEN
        self._owner = asyncio.current_task()
        self._folder = os.getcwd()  # replacements start where the first workers did, wherever the run goes
        sources = [source_of(spec) for spec in self._specs]
        self._init_request = {"path": list(sys.path), "functions": sources, "columns": self.columns}
        self._idle_send, self._idle = anyio.create_memory_object_stream[WorkerProcess](math.inf)
        try:
            if self._specs:
                await self._end_leftovers()
                await self._start_all()
        except BaseException:
            await self._close()
            raise
        self._tasks = await anyio.create_task_group().__aenter__()
        for place, process in enumerate(sorted(self._alive, key=lambda p: p.pid)):
            process.place = place
            self._tasks.start_soon(self._keep, process, name=f"keeper of reward worker {place}")
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        if self._state is _State.OPEN and asyncio.current_task() is not self._owner:
            raise LifecycleError("a reward pool must be closed by the task that opened it")
        await self._close()
        return None

    async def _end_leftovers(self) -> None:
        self._mark, left = await anyio.to_thread.run_sync(lambda: (leftovers.owner(), leftovers.end_of_dead_runs()))
        if left:
            logger.warning("killed what reward functions of dead runs had left behind: %s", ", ".join(left))

    async def _start_all(self) -> None:
        errors: list[AsyncrlError] = []

        async def start_one() -> None:
            try:
                _, self._loaded = await self._start()
            except AsyncrlError as error:
                errors.append(error)
                starters.cancel_scope.cancel()  # the others would say the same

        async with anyio.create_task_group() as starters:
            for _ in range(self._workers):
                starters.start_soon(start_one)
        if errors:
            raise errors[0]
        for name in (names := self.names):
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} reward functions are named {name!r}; give each another name (`name` in reward.functions)"
                )
        self._weights = {f.name: spec.weight for f, spec in zip(self._loaded, self._specs, strict=True)}

    async def _close(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        try:
            self._idle_send.close()
            while self._idle.statistics().current_buffer_used:
                process = self._idle.receive_nowait()
                if process.usable:
                    process.hang_up()
            self._idle.close()
            for process in self._alive:
                if process.usable:  # a caller is still waiting for it: it hears that the pool closed
                    process.kill()
            if self._tasks is not None:
                self._tasks.cancel_scope.shield = True
                self._tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_GRACE_S
                await self._tasks.__aexit__(None, None, None)
        finally:
            for process in self._alive:
                process.destroy()
            await self._end(*self._alive)

    async def _end(self, *processes: WorkerProcess) -> None:
        """Kill those that live, and wait until nothing of them is left, whatever is cancelled meanwhile."""
        cancelled = None
        for process in processes:
            process.destroy()
            cancelled = await wait_shielded(process.exited) or cancelled
            self._alive.discard(process)
        if cancelled is not None:
            raise cancelled

    # ---- workers

    async def _keep(self, process: WorkerProcess) -> None:
        """Keep one place filled."""
        while True:
            self._release(process)
            try:
                successor = await self._successor(process)
            except AsyncrlError as error:
                self._broken = error
                self._idle_send.close()  # nobody must wait for a worker that will never come
                return
            if successor is None:
                return
            successor.place = process.place
            process = successor

    async def _successor(self, process: WorkerProcess) -> WorkerProcess | None:
        """Who comes after a worker that has ended, or is worn and goes on meanwhile. None: the pool was closed."""
        while True:
            await process.attention.wait()
            if process.exited.done():
                break
            process.attention.clear()
            async with self._renewal:
                try:
                    successor, _ = await self._start()
                except AsyncrlError as error:
                    if self._state is _State.OPEN:
                        logger.warning("%s; reward worker %d stays as no other can be started", error, process.pid)
                        process.forgive()
                    continue
            assert self._tasks is not None
            self._recorder.count("reward/workers_recycled")
            process.leaving = True
            if not process.busy:
                process.hang_up()
            self._tasks.start_soon(self._see_off, process, name=f"end of reward worker {process.pid}")
            return successor
        await self._see_off(process)
        if self._state is _State.CLOSED:
            return None
        successor, _ = await self._start()
        return successor

    async def _see_off(self, process: WorkerProcess) -> None:
        """Until nothing is left of a worker that has ended, or will in its own time."""
        await asyncio.wait([process.exited])
        await self._end(process)
        if process.guard_was_killed and (left := await anyio.to_thread.run_sync(leftovers.end_of_worker, process.mark)):
            logger.warning(
                "the guard of reward worker %d was killed; killed what it left: %s", process.pid, ", ".join(left)
            )

    def _look_at_wear(self, process: WorkerProcess) -> None:
        calls, grown = process.wear
        leaked = self._max_mib is not None and grown > self._max_mib << 20
        if process.worn or not (leaked or (self._max_calls is not None and calls >= self._max_calls)):
            return
        if leaked:
            logger.warning(
                "reward worker %d has gained %d MiB since the first calls of its functions, more than reward.worker_max_mib = %s; "
                "it is replaced", process.pid, grown >> 20, self._max_mib
            )  # fmt: skip
        process.worn = True
        process.attention.set()

    async def _start(self) -> tuple[WorkerProcess, list[LoadedFunction]]:
        """Start one worker and load the functions in it; it is then in `_alive`."""
        self._started += 1
        process = await WorkerProcess.start(self._folder, leftovers.mark_of(self._mark, self._started))
        self._alive.add(process)
        try:
            if self._state is _State.CLOSED:
                raise LifecycleError("the reward pool was closed while a worker started")
            return process, await load(process, self._specs, self._init_request)
        except BaseException:
            await self._end(process)
            raise

    async def _acquire(self) -> WorkerProcess:
        """The next idle worker, first come first served."""
        while True:
            try:
                process = await self._idle.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                if self._broken is not None:
                    raise RewardError(f"reward workers cannot be replaced: {self._broken}") from self._broken
                raise LifecycleError("the reward pool was closed while a group waited for a worker") from None
            if process.usable and not process.hung_up:  # else it ended while it was idle; its keeper sends the next one
                process.busy = True
                return process

    def _release(self, process: WorkerProcess) -> None:
        process.busy = False
        if process.leaving and process.usable:
            process.hang_up()
        if process.usable and self._state is _State.OPEN and self._broken is None:
            self._idle_send.send_nowait(process)

    # ---- scoring

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same trajectories, in order, with `components` and `reward` (the weighted sum of what applies).

        A reward that the environment itself gave is added to the sum. Without functions they come back as they are.
        Errors: `RewardError` and its kinds where `on_error` is `fail`; `LifecycleError` where the pool is not open.
        """
        if self._state is not _State.OPEN:
            raise LifecycleError(f"the reward pool is {self._state.value}; score inside `async with pool:`")
        if not self._specs or not trajectories:
            return list(trajectories)
        arguments = arguments_of(prompt, trajectories, self.generation_prompt(prompt.ids))
        with self._recorder.timed("time/reward"):
            failures: list[AsyncrlError] = []
            answers: dict[str, Answer] = {}
            members = [t.member for t in trajectories]
            state = {**self.progress(), "epoch": float(prompt.epoch)}

            async def call(function: LoadedFunction) -> None:
                request = {"function": function.index, "completions": len(members), "state": state}
                request["arguments"] = function.select(arguments)
                try:
                    answers[function.name] = await self._as_configured(function, prompt.group_id, members, request)
                except AsyncrlError as error:
                    failures.append(error)
                    calls.cancel_scope.cancel()  # fail fast: the other functions' answers are not needed any more

            async with anyio.create_task_group() as calls:
                for function in self._loaded:
                    calls.start_soon(call, function)
            if failures:
                raise failures[0]
        scored = []
        for i, trajectory in enumerate(trajectories):
            scores = {name: answers[name].scores[i] for name in self.names}
            extras = {f"{name}/{k}": v[i] for name in self.names for k, v in answers[name].extras.items()}
            scored.append(with_scores(trajectory, scores, self._weights, self._recorder, extras))
        return scored

    async def _as_configured(
        self, function: LoadedFunction, group_id: int, members: Sequence[int], request: dict[str, Any]
    ) -> Answer:
        """The answer, with what `on_error` makes of a call that failed and of members whose score is none."""
        answer: Answer | None = None
        try:
            answer = await self._call(function, group_id, request)
            if not answer.wrong:
                return answer
            found = ", ".join(f"{what} for member {members[place]}" for place, what in answer.wrong)
            raise RewardError(
                f"reward {function.name!r} failed (group {group_id}): it returned {found}; expected finite numbers or None (in "
                "verl's form, or dictionaries with `score`)"
            )
        except RewardError as error:
            if self._on_error == "fail" or self._broken is not None:
                raise
            logger.warning("%s; counted as %s", error, "not applicable" if self._on_error == "none" else "0")
            self._recorder.count(f"reward/{function.name}/errors")
            instead = None if self._on_error == "none" else 0.0
            if answer is None:
                return Answer([instead] * len(members))
            for place, _ in answer.wrong:
                answer.scores[place] = instead
            return answer

    async def _call(self, function: LoadedFunction, group_id: int, request: dict[str, Any]) -> Answer:
        """One call in one worker. Errors: `RewardError`, `RewardTimeout`, `RewardCrash`, each naming the function."""
        who, what = f"group {group_id}", f"reward {function.name!r}"
        with self._recorder.wait(who, what, on="an idle reward worker", cause="reward"):
            process = await self._acquire()
        try:
            with (
                self._recorder.wait(who, what, on=f"reward worker {process.pid}", cause="reward"),
                self._recorder.span(f"reward/{function.name}", track=f"reward worker {process.place}", group=group_id),
                anyio.fail_after(self._timeout_s),
            ):
                kind, body = await process.request(Kind.CALL, request)
        except TimeoutError:
            process.kill()
            raise RewardTimeout(
                f"{what} did not answer within {self._timeout_s:g} s (group {group_id}); "
                f"its worker {process.pid} was killed and is being replaced"
            ) from None
        except WorkerDiedError as died:
            if self._state is _State.CLOSED:
                raise LifecycleError(f"the reward pool was closed while {what} was at work") from None
            raise RewardCrash(
                f"{what} crashed (group {group_id}): its worker {died.pid} {died.status} and is being replaced"
            ) from None
        except BaseException:
            process.kill()  # cancelled: it may be in the middle of the call
            raise
        else:
            self._look_at_wear(process)
        finally:
            self._release(process)
        reply = orjson.loads(body)
        if kind is Kind.ERROR:
            raise RewardError(f"{what} failed (group {group_id}): {remote_text(reply)}")
        return Answer(**reply)
