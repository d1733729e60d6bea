"""The reward pool: the user's functions in worker processes, then reward models on the device, behind the `Reward` port.

    score ──▶ one call per function ──▶ a worker with room (FIFO) ──▶ worker ──▶ reply ──▶ components, reward
                                            ▲                          │ has ended (deadline, crash, cancellation), or is worn
                                            └──── keeper ◀─────────────┘ (a task for each worker: starts a successor)

Guarantees
* A call of an `async def` function is a coroutine in its worker. The coroutines that run in a worker have at most `concurrency`
  completions in total. Only a coroutine that runs alone may have more.
* A call of any other function is a blocking call. During a blocking call its worker gets no other call. The worker's coroutines
  cannot run meanwhile, so their deadlines are moved by the time of the blocking call.
* If a blocking call misses its deadline or its caller is cancelled, the worker is killed and replaced. A coroutine is cancelled
  instead, and its worker is killed only if the coroutine does not end.
* A call whose worker was killed because of another call is sent again, once. If a worker crashes while it runs several calls, each
  coroutine is sent again once, as a blocking call, to a worker that runs only this call. This finds the call that crashes.
* If a call of an `async def` function raises, crashes or misses its deadline, the call is repeated up to `retries` times, each time
  with a new deadline. The metric `reward/{fn}/retries` counts the repetitions.
* Callers of the same kind (coroutines, blocking calls) get workers in the order in which they asked. Cancelled callers get none.
* All functions are loaded in every worker before `__aenter__` returns, so an import error ends the run before it starts. If the
  successor of a dead worker dies or needs more than `LOAD_S` to load the functions, another starts: at most `MOST_STARTS` in all.
* A worker is worn when it has gained `worker_max_mib` of memory or had `worker_max_calls` calls. It takes calls until its successor
  has loaded the functions, and ends after its running calls. If no successor can start (a user's file was edited, for example), the
  worn worker goes on. The metric `reward/workers_recycled` counts worn workers that were replaced.
* Every batch of a reward model is one closure on the device's thread (lane), so decoding and training can run between two batches.
  All completions of a batch come from one call of `score`. `on_error` applies to a text that is empty, too long or gets no finite
  score. If the model raises, `on_error` applies to all texts of the call.
* Closing ends every worker, also after an error or a cancellation. The child processes of a worker end with the worker, even if
  this process is killed (concurrency/guard.py).

The task that opens the pool must also close it, on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asyncrl.concurrency.lane import Lane
from asyncrl.concurrency.shield import wait_shielded
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import AsyncrlError, ConfigError, LifecycleError, RewardCrash, RewardError, RewardTimeout
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Int32Array, Prompt, Trajectory

from .calls import Answer, LoadedFunction, RewardSpec, function_source, remote_text, trl_arguments, with_scores
from .judge import Judge
from .process import RewardCall, RewardWorker, WorkerDiedError

if TYPE_CHECKING:
    from asyncrl.models.reward_model import RewardModel

logger = logging.getLogger("asyncrl.rewards")
T = TypeVar("T")

CLOSE_GRACE_S = 3.0  # for idle workers to end; then they are killed
CANCEL_GRACE_S = 5.0  # for a cancelled coroutine; then its worker is killed
LOAD_S = 300.0  # for a worker to import the functions
MOST_STARTS = 3  # tries to start one successor, the first included
_LONGEST_BACKOFF_S = 60.0
_START_RETRY_S = 1.0
_MOST_NAMED = 4  # calls that a message about a crash names


def configured_rewards(config: RewardConfig, functions: Sequence[RewardSpec] = ()) -> list[RewardSpec]:
    """The configured functions and judges. `functions`, if any, replace the configured functions. Errors: ConfigError."""
    specs = [*functions] or [RewardSpec(f.function, f.weight, f.name, f.components) for f in config.functions]
    for each in config.judge:
        fields = each.model_dump(exclude={"name", "weight", "criteria"})
        named = {} if isinstance(each.criteria, str) else each.criteria
        weights = {name: criterion.weight for name, criterion in named.items()}
        criteria = {name: criterion.text for name, criterion in named.items()} or str(each.criteria)
        judge = Judge(criteria=criteria, weights=weights, timeout_s=config.timeout_s, retries=config.retries, **fields)
        specs.append(RewardSpec(judge, each.weight, each.name, weights, config.judge_deadline_s))
    return specs


class RewardPool:
    """Scores groups, see the module docstring. The metric `reward/{fn}/errors` counts failed calls; for a model, failed texts."""

    def __init__(
        self, config: RewardConfig, recorder: Recorder | None = None, functions: Sequence[RewardSpec] = ()
    ) -> None:
        """`functions`: as in `configured_rewards`. Errors: ConfigError."""
        self._config = config
        self._specs = configured_rewards(config, functions)
        self._recorder = recorder if recorder is not None else Recorder(max_events=0, nvtx=False)
        self._jitter = random.Random()  # a user may seed Python's global generator
        # Held by the first waiting caller of each kind. The later callers wait for the lock, in order.
        self._coroutine_lock, self._blocking_lock = anyio.Lock(), anyio.Lock()
        self._changed = anyio.Event()  # see `_notify`
        # While an isolated call (`RewardCall`) waits, this worker gets no further calls.
        self._reserved: RewardWorker | None = None
        # The columns' names for each source of rows. The pool does not open if a function needs a column that a source lacks.
        self.columns: Sequence[Sequence[str]] = ()
        # Returns the entries of `trainer_state`, except `epoch`.
        self.progress: Callable[[], Mapping[str, Any]] = lambda: {"global_step": 0, "max_steps": None}
        self.generation_prompt: Callable[[Int32Array], str] = lambda prompt_ids: ""  # the end of a prompt, as text
        # Returns (base URL, key) of an endpoint of the policy, for functions with the arguments `base_url` and `api_key`.
        self.open_endpoint: Callable[[], tuple[str, str]] | None = None
        self._open = False
        # Set when the pool opens: the functions in order, and the weight of each component in the reward.
        self.functions: list[LoadedFunction] = []
        self.weights: dict[str, float] = {}
        self._alive: set[RewardWorker] = set()
        self._broken: AsyncrlError | None = None  # why dead workers cannot be replaced
        self._tasks: TaskGroup | None = None
        self._models: list[RewardModel] = []
        self._lane: Lane | None = None

    def add_models(self, models: Sequence[tuple[RewardModel, float]], lane: Lane) -> None:
        """Score with these models, too. `models`: (model, weight). `lane`: the thread of their device. The pool must be open.
        Errors: ConfigError if two components have the same name."""
        names = [model.name for model, _ in models]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{len(repeated)} reward models are named {repeated[0]!r}; give each its own `name`")
        if shared := set(names) & set(self.weights):
            raise ConfigError(f"a reward function and a reward model are both named {min(shared)!r}; change one `name`")
        self._models, self._lane = [model for model, _ in models], lane
        self.weights |= {model.name: weight for model, weight in models}

    def calls_at_once(self, size: int) -> int:
        """How many calls with `size` completions can at most run at the same time in all workers. The pool must be open."""
        in_worker = max(1, self._config.concurrency // size) if any(f.asynchronous for f in self.functions) else 1
        return self._config.workers * in_worker

    # ---- opening and closing

    async def __aenter__(self) -> RewardPool:
        """Start all workers and load every function in each. Errors: ConfigError, RewardCrash, RewardTimeout, OSError."""
        self._open = True
        self._folder = os.getcwd()  # later workers start here, too
        sources = [function_source(spec) for spec in self._specs]
        self._init_request = {"path": list(sys.path), "functions": sources, "columns": self.columns}
        try:
            if self._specs:
                await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks = await anyio.create_task_group().__aenter__()
        for slot, process in enumerate(sorted(self._alive, key=lambda p: p.pid)):
            process.slot = slot
            self._tasks.start_soon(self._keep, process, name=f"keeper of reward worker {slot}")
        return self

    async def _start_all(self) -> None:
        # The first error cancels the other starts: they would fail in the same way.
        async with plain_task_group() as starters:
            for _ in range(self._config.workers):
                starters.start_soon(self._start)
        for name in (names := [function.name for function in self.functions]):
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} reward functions are named {name!r}; give each another name (`name` in reward.functions)"
                )
        self.weights = {name: weight for f in self.functions for name, weight in f.spec.weights(f.name).items()}

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            self._notify()
            for process in self._alive:
                if process.serving and not process.hung_up and not process.calls:
                    process.hang_up()
                elif not process.hung_up:
                    # The callers of this worker then raise LifecycleError.
                    process.kill()
            if self._tasks is not None:
                self._tasks.cancel_scope.shield = True
                self._tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_GRACE_S
                await self._tasks.__aexit__(None, None, None)
        finally:
            await self._end(*self._alive)

    async def _end(self, *processes: RewardWorker) -> None:
        """Kill these workers and wait until they have ended, even if this task is cancelled meanwhile."""
        cancelled = None
        # Kill all before the first wait, so that they end at the same time.
        for process in processes:
            process.kill()
        for process in processes:
            cancelled = await wait_shielded(process.ended) or cancelled
            self._alive.discard(process)
        if cancelled is not None:
            raise cancelled

    # ---- workers

    async def _keep(self, process: RewardWorker) -> None:
        """Let the worker serve until it is worn or has ended. Then do the same with a successor."""
        while True:
            process.serving = True
            self._notify()
            try:
                successor = await self._successor(process)
            except AsyncrlError as error:
                self._broken = error
                # Wake the callers that wait for a worker: they raise.
                self._notify()
                return
            successor.slot = process.slot
            process = successor

    async def _successor(self, process: RewardWorker) -> RewardWorker:
        """Wait until the worker is worn or has ended, and start its successor."""
        while True:
            await asyncio.wait([process.ended, process.worn], return_when=asyncio.FIRST_COMPLETED)
            if process.ended.done():
                break
            try:
                successor = await self._start()
            except AsyncrlError as error:
                if self._open:
                    logger.warning("%s; reward worker %d goes on, because no successor can start", error, process.pid)
                process.reset_wear()
                continue
            assert self._tasks is not None
            self._tasks.start_soon(self._wait_ended, process, name=f"end of reward worker {process.pid}")
            process.serving = False
            self._recorder.count("reward/workers_recycled")
            if not process.calls:
                process.hang_up()
            return successor
        await self._end(process)
        for tries in range(1, MOST_STARTS):
            try:
                return await self._start()
            except (RewardTimeout, RewardCrash) as error:
                logger.warning("%s; another worker is started (%d of at most %d times)", error, tries, MOST_STARTS - 1)
        return await self._start()

    async def _wait_ended(self, process: RewardWorker) -> None:
        await asyncio.wait([process.ended])
        await self._end(process)

    def _mark_if_worn(self, process: RewardWorker) -> None:
        max_mib, max_calls = self._config.worker_max_mib, self._config.worker_max_calls
        calls, grown = process.wear
        leaked = max_mib is not None and grown > max_mib << 20
        if process.worn.done() or not (leaked or (max_calls is not None and calls >= max_calls)):
            return
        if leaked:
            logger.warning(
                "reward worker %d has gained %d MiB since the first calls of its functions, more than reward.worker_max_mib = %s; "
                "it is replaced", process.pid, grown >> 20, max_mib
            )  # fmt: skip
        process.worn.set_result(None)

    async def _start(self) -> RewardWorker:
        """Start one worker, add it to `_alive`, and load the functions in it. Errors: as `__aenter__`, and LifecycleError."""
        if not self._open:
            raise LifecycleError("the reward pool was closed while a worker started")
        try:
            process = RewardWorker(self._folder)
        except OSError as error:
            if self._tasks is None:  # the pool is being opened
                raise
            # Processes or descriptors may have run out for a moment.
            await anyio.sleep(_START_RETRY_S)
            raise RewardCrash(f"no reward worker could be started: {error}") from error
        self._alive.add(process)
        try:
            loaded = await process.load(self._specs, self._init_request, LOAD_S)
            if self._tasks is None:
                self.functions = loaded
            return process
        except BaseException:
            await self._end(process)
            raise

    async def _acquire(self, call: RewardCall) -> RewardWorker:
        """A worker with room for this call. Errors: LifecycleError if the pool is closed, RewardError if it is broken."""
        async with self._blocking_lock if call.alone else self._coroutine_lock:
            try:
                return await self._wait_for_room(call)
            finally:
                if call.isolated:
                    self._reserved = None
                    self._notify()

    async def _wait_for_room(self, call: RewardCall) -> RewardWorker:
        while True:
            # Let the event loop run first, so that it notices dead workers, and the call gets none of them.
            await anyio.lowlevel.checkpoint()
            if not self._open:
                raise LifecycleError("the reward pool was closed while a group waited for a worker")
            if self._broken is not None:
                raise RewardError(f"reward workers cannot be replaced: {self._broken}") from self._broken
            if (process := self._worker_with_room(call)) is not None:
                process.calls.add(call)
                return process
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake the callers that wait: a worker has room, or the pool is closed or broken."""
        self._changed.set()
        self._changed = anyio.Event()

    def _worker_with_room(self, call: RewardCall) -> RewardWorker | None:
        """The worker with the fewest running calls among the workers with room for this call; None if there is none. An isolated
        call needs a worker without calls. If there is none, `_worker_with_room` reserves one worker: no other call begins there."""
        serving = [process for process in self._alive if process.serving and not process.hung_up]
        serving.sort(key=lambda process: (len(process.calls), process.slot))
        if call.isolated:
            if self._reserved not in serving:
                self._reserved = next(iter(serving), None)
            return next((process for process in serving if not process.calls), None)
        # A blocking call stops the coroutines of its worker, so the number of coroutines does not matter.
        most_running = math.inf if call.alone else max(0, self._config.concurrency - call.size)
        for process in serving:
            has_room = not process.calls or sum(c.size for c in process.calls) <= most_running
            if has_room and process is not self._reserved and not any(c.alone for c in process.calls):
                return process
        return None

    def _release(self, process: RewardWorker, call: RewardCall) -> None:
        process.calls.discard(call)
        if not process.serving and not process.calls and not process.hung_up:
            process.hang_up()
        self._notify()

    # ---- scoring

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Copies of the trajectories, in order, with `components` and `reward` (the weighted sum of the components that apply). A
        reward that the environment gave is added to the sum. Without functions and models the trajectories are unchanged.
        Errors: `RewardError` or a subclass if `on_error` is `fail` or no worker is left; `LifecycleError` if the pool is closed."""
        if not self._open:
            raise LifecycleError("the reward pool is not open; score inside `async with pool:`")
        scored = list(trajectories)
        if self._specs and scored:
            scored = await self._score_by_functions(prompt, scored)
        if self._models and scored:
            with self._recorder.timed("time/reward"):
                columns = {model.name: await self._scores_by(model, prompt, scored) for model in self._models}
            rows = [{name: column[i] for name, column in columns.items()} for i in range(len(scored))]
            scored = [with_scores(t, row, self.weights) for t, row in zip(scored, rows, strict=True)]
        return scored

    async def _score_by_functions(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        arguments, by_name = trl_arguments(prompt, trajectories, self.generation_prompt(prompt.ids))
        if self.open_endpoint is not None and any(function.asks_policy for function in self.functions):
            by_name["base_url"], by_name["api_key"] = self.open_endpoint()
        with self._recorder.timed("time/reward"):
            answers: dict[str, Answer] = {}
            members = [t.member for t in trajectories]
            turns = [1 if t.turns is None else int(t.turns.size) for t in trajectories]
            state = {**self.progress(), "epoch": float(prompt.epoch)}

            async def call(function: LoadedFunction) -> None:
                request = {"function": function.index, "completions": len(members), "state": state, "turns": turns}
                request |= {"components": [*function.spec.components], "arguments": function.select(arguments, by_name)}
                answers[function.name] = await self._call_or_default(function, prompt.group_id, members, request)

            # The first error cancels the other calls: their answers are not needed.
            async with plain_task_group() as calls:
                for function in self.functions:
                    calls.start_soon(call, function)
        scored = []
        for i, trajectory in enumerate(trajectories):
            scores, by_turn, extras = dict[str, float | None](), dict[str, list[float] | None](), dict[str, Any]()
            for function in self.functions:
                answer = answers[function.name]
                names = function.spec.weights(function.name)
                scores.update(zip(names, [column[i] for column in answer.scores], strict=True))
                by_turn.update(zip(names, [column[i] for column in answer.by_turn], strict=True))
                extras.update({f"{function.name}/{k}": values[i] for k, values in answer.extras.items()})
            scored.append(with_scores(trajectory, scores, self.weights, extras, by_turn))
        return scored

    async def _scores_by(
        self, model: RewardModel, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[float | None]:
        """The scores of one model, or defaults for failed scores (`on_error`). Errors: RewardError if `on_error` is `fail`."""
        label = f"reward model {model.name!r} (group {prompt.group_id})"
        scores: list[float | None] = [None] * len(trajectories)
        try:
            texts = await self._run_model(
                model, lambda: [model.tokenize(prompt.prompt, t.completion) for t in trajectories], "texts"
            )
            valid = [index for index, text in enumerate(texts) if 0 < len(text) <= model.max_text_tokens]
            for batch in model.batches([texts[index] for index in valid]):
                indices = [valid[i] for i in batch]
                work = partial(model.scores, [texts[index] for index in indices])
                for index, value in zip(indices, await self._run_model(model, work, "scores"), strict=True):
                    scores[index] = value
        except LifecycleError:  # the run ends and has closed the device's thread
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            failure = RewardError(f"{label} failed: {reason}")
            failure.__cause__ = error
            return [self._default_score(model.name, failure, len(trajectories))] * len(trajectories)
        for index, text in enumerate(texts):
            score = scores[index]
            if score is None or not math.isfinite(score):
                failure = RewardError(_reason_of(label, model, text, score))
                scores[index] = self._default_score(model.name, failure)
        return scores

    async def _run_model(self, model: RewardModel, work: Callable[[], T], stage: str) -> T:
        assert self._lane is not None
        with self._recorder.wait("score pump", f"reward model {model.name!r}", on="lane", cause="reward"):
            return await self._lane.run(work, name=f"reward/{stage}/{model.name}")

    async def _call_or_default(
        self, function: LoadedFunction, group_id: int, members: Sequence[int], request: dict[str, Any]
    ) -> Answer:
        """The answer. None or 0 replaces each invalid score, and all scores of a failed call. Errors: as `score`."""
        answer: Answer | None = None
        try:
            answer = await self._call(function, group_id, request)
            if not answer.invalid:
                return answer
            invalid = dict.fromkeys(f"{value} for member {members[index]}" for _, index, value in answer.invalid)
            raise RewardError(
                f"reward {function.name!r} failed (group {group_id}): it returned {', '.join(invalid)}; expected finite numbers or "
                f"None, or mappings with {', '.join(map(repr, function.spec.components or ['score']))}"
            )
        except RewardError as error:
            if self._broken is not None:
                raise
            default = self._default_score(function.name, error)
            if answer is None:
                size, count = len(members), len(function.spec.components) or 1
                return Answer([[default] * size for _ in range(count)], [[None] * size] * count)
            for part, index, _ in answer.invalid:
                answer.scores[part][index] = default
            return answer

    def _default_score(self, name: str, error: RewardError, failed: int = 1) -> float | None:
        """The score that replaces a failed score: None or 0. Counts `failed` errors. Raises `error` if `on_error` is `fail`."""
        if self._config.on_error == "fail":
            raise error
        default = None if self._config.on_error == "none" else 0.0
        logger.warning("%s; counted as %s", error, "not applicable" if default is None else "0")
        self._recorder.count(f"reward/{name}/errors", failed)
        return default

    async def _call(self, function: LoadedFunction, group_id: int, request: dict[str, Any]) -> Answer:
        """The answer. A failed call of an async function has up to `retries` more tries. Errors: RewardError or a subclass."""
        who, what = f"group {group_id}", f"reward {function.name!r}"
        tries = 0
        while True:
            try:
                return await self._try_once(function, group_id, request)
            except RewardError as error:
                if not function.asynchronous or tries == self._config.retries or self._broken is not None:
                    raise
                pause = min(2.0**tries, _LONGEST_BACKOFF_S) * self._jitter.uniform(0.5, 1.0)
                tries += 1
                logger.warning("%s; retry %d of %d follows in %.1f s", error, tries, self._config.retries, pause)
            self._recorder.count(f"reward/{function.name}/retries")
            with self._recorder.wait(who, what, on="its next try", cause="reward"):
                await anyio.sleep(pause)

    async def _try_once(self, function: LoadedFunction, group_id: int, request: dict[str, Any]) -> Answer:
        """One try. If the worker died and another call may be the cause, the call is sent a second time."""
        who, what = f"group {group_id}", f"reward {function.name!r}"
        alone, isolated, was_resent = not function.asynchronous, False, False
        while True:
            call = RewardCall(f"{what} of {who}", alone, request["completions"], isolated)
            with (
                self._recorder.wait(who, what, on="a reward worker with room", cause="reward"),
                self._recorder.timed("time/reward_queue"),
            ):
                process = await self._acquire(call)
            try:
                return await self._answer(function, group_id, request, process, call)
            except WorkerDiedError as died:
                if not self._open:
                    raise LifecycleError(f"the reward pool was closed while {what} was running") from None
                others = sorted(other.what for other in process.died_with if other is not call)
                crashed = (
                    f"{what} crashed (group {group_id}): its worker {died.pid} {died.status} and is being replaced"
                )
                if others:
                    more = f", and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
                    crashed += f"; the worker also ran {', '.join(others[:_MOST_NAMED])}{more}"
                may_be_innocent = process.kill_reason or (function.asynchronous and others)
                if was_resent or not may_be_innocent:
                    raise RewardCrash(crashed) from None
                # After a crash any call of the worker may be the cause, so this call runs in a worker without other calls.
                isolated, was_resent = not process.kill_reason, True
                alone |= isolated
                logger.warning("%s; the call is sent again", process.kill_reason or crashed)

    async def _answer(
        self, function: LoadedFunction, group_id: int, request: dict[str, Any], process: RewardWorker, call: RewardCall
    ) -> Answer:
        """Send the call to this worker, release the worker, and return the answer. Errors: WorkerDiedError, RewardError."""
        who, what = f"group {group_id}", f"reward {function.name!r}"
        number: int | None = None
        limit_s = function.spec.timeout_s or self._config.timeout_s
        try:
            with (
                self._recorder.wait(who, what, on=f"reward worker {process.pid}", cause="reward"),
                self._recorder.span(f"reward/{function.name}", track=f"reward worker {process.slot}", group=group_id),
                self._deadlines_moved(process, call, limit_s),
                anyio.fail_after(limit_s) as call.scope,
            ):
                number = process.send(request)
                reply = await process.reply(number)
        except WorkerDiedError:
            self._release(process, call)
            raise
        # After a missed deadline or a cancellation of the caller the worker may still run the call.
        except TimeoutError:
            late = f"{what} did not answer within {limit_s:g} s (group {group_id})"
            self._abandon(process, call, number, late)
            how = f"its worker {process.pid} was killed and is being replaced" if call.alone else "it was cancelled"
            raise RewardTimeout(f"{late}; {how}") from None
        except BaseException:
            self._abandon(process, call, number, f"the caller of {what} (group {group_id}) was cancelled")
            raise
        self._mark_if_worn(process)
        self._release(process, call)
        if "error" in reply:
            raise RewardError(f"{what} failed (group {group_id}): {remote_text(reply['error'])}")
        return Answer(**reply["answer"])

    @contextmanager
    def _deadlines_moved(self, process: RewardWorker, call: RewardCall, limit_s: float) -> Iterator[None]:
        """A blocking call (`call.alone`) stops the worker's coroutines: move their deadlines by the time of the call."""
        others = [other for other in process.calls if call.alone and other is not call]
        started = anyio.current_time()
        for other in others:
            other.scope.deadline += limit_s
        try:
            yield
        finally:
            for other in others:
                other.scope.deadline -= limit_s - (anyio.current_time() - started)

    def _abandon(self, process: RewardWorker, call: RewardCall, number: int | None, why: str) -> None:
        """End a call whose caller no longer waits: cancel its coroutine, or kill its worker. `number`: None for an unsent call."""
        if number is not None and self._open and not call.alone:
            assert self._tasks is not None
            process.cancel(number)
            self._tasks.start_soon(self._wait_cancelled, process, call, number, why, name=f"end of {call.what}")
            return
        if number is not None:
            process.kill_reason = why
            process.kill()
        self._release(process, call)

    async def _wait_cancelled(self, process: RewardWorker, call: RewardCall, number: int, why: str) -> None:
        """Wait for a cancelled coroutine, and kill its worker if the coroutine does not end in time. A coroutine cannot end while
        a blocking call runs, so the remaining time of a blocking call is added to the limit."""
        now = anyio.current_time()
        blocked_s = sum(max(0.0, other.scope.deadline - now) for other in process.calls if other.alone)
        call.scope = anyio.CancelScope(deadline=now + CANCEL_GRACE_S + blocked_s)
        with call.scope, suppress(WorkerDiedError):
            await process.reply(number)
        if call.scope.cancelled_caught:
            process.kill_reason = f"{why}, and did not end when it was cancelled"
            logger.warning("%s: its worker %d was killed", process.kill_reason, process.pid)
            process.kill()
        self._release(process, call)


def _reason_of(label: str, model: RewardModel, text: list[int], score: float | None) -> str:
    if score is not None:
        return f"{label} gave {score}; expected a finite number"
    if not text:
        return f"{label} was given a text without a token; check its tokenizer and the completion"
    return (
        f"{label}: a text has {len(text)} tokens, but the model takes at most {model.max_text_tokens}, and texts are never cut; "
        "lower rollout.max_tokens, raise `max_tokens` of the reward model if it allows more, or set reward.on_error=none"
    )
