"""The wiring of the pumps: who hands what to whom, and who waits for whom.

              (1) slots           (3) scoring                                     (6) publications
    prompts ---------> rollout ------------> score                       train ---------------------> publish
                         pump                 pump                        pump                         pump
                           | (2) requests        |    (4) the way in       ^  (5) ready rows             |
                           v                     '----> intake ---> store -'                             |
                         engine                           ^                                              |
                                    Runtime.submit, doors |                                              |
                                                                                                         |
    slots released together  <-------- evaluation, checkpoint, every sink acknowledged ------------------'

| edge | bounded by | the producer waits for | ends when |
|---|---|---|---|
| 1 | slots | a slot (the publish pump gives them back) | the prompts or the needed steps ran out |
| 2 | slots x group_size | its own reply | the engine closes: every request fails |
| 3 | one trajectory a scorer | a free scorer | the last rollout is handed on |
| 4, 5 | slots | nothing: every group has a slot before it has rows | the ledger is exhausted and no group is left |
| 6 | one publish in flight | the publish before it | the train pump is done |

Whoever ends closes its own end of an edge; the next pump's `async for` then ends. No sentinels, no flags.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import Supervisor, spawn
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import DataError, LifecycleError
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Prompt, Trajectory

from .claims import Claims
from .evaluate import EvaluatePump, Evaluations, Report
from .intake import Intake, ScorePump
from .pipeline import Ports, Publication, Scoring, StepReport
from .publish import PublishPump
from .rollout import RolloutPump
from .screen import Reroll
from .train import TrainPump

T = TypeVar("T")
Edge: TypeAlias = tuple[QueueSender[T], QueueReceiver[T]]


class Graph:
    """The pumps of one rank. `start` runs the half that trains, `run` adds the half that generates."""

    def __init__(
        self,
        ports: Ports,
        prompts: PromptSource | None,
        held_out: Sequence[Prompt],
        at_version: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepReport], None],
        catch_up: Callable[[bool], Awaitable[None]],
        evaluated: int = -1,
    ) -> None:
        """`at_version`: of `PublishPump`; `on_step`: of `TrainPump`; `evaluated`: of `EvaluatePump`. `catch_up(last)` does what is
        due before the first step or, with `last`, what is missing after the last one."""
        self._ports = ports
        self._prompts = prompts
        reroll = Reroll(ports, prompts)
        self.intake = Intake(ports, reroll)
        self._catch_up = catch_up
        self._publish = PublishPump(ports, at_version, partial(catch_up, False))
        self._claims = Claims(ports)
        # The train pump ended by itself: every step was made.
        self._trained_out = False
        self._train = TrainPump(ports, self._claims, reroll, self._publish.published, on_step)
        environment = ports.config.rollout.environment.rpartition(":")[2]  # names of metrics hold no path
        evaluate = EvaluatePump(ports, held_out, environment, evaluated) if held_out else None
        self.evaluations = Evaluations(evaluate, ports.engine, self._publish.sync)
        self._training_tasks: TaskGroup | None = None
        self._finished = anyio.Event()  # no step can come any more, the last one is published
        self._generated = anyio.Event()  # no rollout and no scorer is left
        self._generation_scope = anyio.CancelScope()
        self._pumps: anyio.CancelScope | None = None  # of those that generate
        self._callbacks: list[Callable[[], None]] = []
        self._generating = False
        self._draining = False
        self._fed = False  # groups may come from outside
        self._rollout: RolloutPump | None = None
        self.time_is_up = False

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        """Begin to train the groups that `run` generates or `submit` brings."""
        self._feed(True)
        supervisor.start("training", self._training)

    def _feed(self, fed: bool) -> None:
        """While a program or producers may bring groups, idle time is booked to them where nothing is sampled here."""
        self._ports.recorder.pass_on("the program" if self._fed else "", "the program" if fed else "")
        self._fed = fed

    async def _training(self) -> None:
        edge: Edge[Publication] = open_queue("publications", 1, self._ports.recorder)
        publications_in, publications_out = edge
        try:
            async with publications_in, publications_out, anyio.create_task_group() as pumps:
                self._training_tasks = pumps
                spawn(pumps, "train pump", self._train_to_the_end, publications_in)
                spawn(pumps, "publish pump", self._publish.run, publications_out)
            await self._catch_up(True)
        finally:
            self._finished.set()
            for callback in self._callbacks:
                callback()

    async def _train_to_the_end(self, publications: QueueSender[Publication]) -> None:
        try:
            await self._train.run(publications)
            self._trained_out = True
        finally:
            self._feed(False)
            self._ports.book.over = True
            self.intake.close("the training ended")
        # Groups that are still generated or scored can be in no step.
        self._generation_scope.cancel()

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Call back once no step can come any more; at once if that is so."""
        if self._finished.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def run(self, supervisor: Supervisor) -> None:
        """Generate, score and train the configured prompts until the end. Groups left over are dropped and counted.

        Without prompts: train the groups that are submitted meanwhile. The time limit then trains those that are here: the next
        one may never come.
        """
        await self._publish.published(self._ports.ledger.turn)
        if self._prompts is None:
            self._generated.set()
        else:
            self._generating = True
            self._feed(False)
            supervisor.start("generation", self._generation)
        limit = self._ports.config.train.time_limit_s
        with anyio.move_on_after(limit) as timer:
            await self._finished.wait()
        if timer.cancelled_caught:
            self.time_is_up = True
            if self._prompts is None:
                await self.drain()
            elif self._ports.ranks == 1:  # several have to agree on the last step: see `stop_at`
                self._claims.stop_after_step()
            await self._finished.wait()
        if not self._trained_out:
            if supervisor.failure is not None:
                # The supervisor cancels this task and raises its failure.
                await anyio.sleep_forever()
            turn = self._ports.ledger.turn
            raise LifecycleError(f"the training ended after step {turn}, neither at its end nor with an error")
        # Otherwise a group could be admitted after `end_all`.
        await self._generated.wait()
        self._generating = False
        await self._ports.book.end_all("the run ended first")

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later one. Every rank has to give the same turn, one that no rank has begun."""
        self._claims.stop_at(turn)

    async def _generation(self) -> None:
        assert self._prompts is not None
        calls = self._ports.calls_at_once or self._ports.config.reward.workers
        edge: Edge[Scoring] = open_queue("scoring", calls, self._ports.recorder)
        scoring_in, scoring_out = edge
        try:
            with self._generation_scope:
                async with scoring_in, scoring_out, anyio.create_task_group() as pumps:
                    self._pumps = pumps.cancel_scope
                    self._rollout = rollout = RolloutPump(self._ports, self._prompts, scoring_in)
                    score = ScorePump(self.intake, scoring_out, calls)
                    spawn(pumps, "rollout pump", rollout.run)
                    spawn(pumps, "score pump", score.run)
        finally:
            self._generated.set()

    async def drain(self) -> None:
        """No more groups will be submitted: train those that are here, then end. Returns when the training half ended."""
        if not self._finished.is_set():
            self._draining = True
            self._feed(False)
            self.intake.close("the Runtime takes no more groups")
            await self._ports.ledger.exhaust()
            await self._finished.wait()

    # -- embedding -------------------------------------------------------------------------------------------------

    def open_intake(self) -> Intake:
        """For groups from outside. Errors: LifecycleError where this rank runs its own prompts."""
        if self._generating:
            raise LifecycleError("submit: this Runtime runs its own prompts")
        return self.intake

    async def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> bool:
        """A whole group from outside: see `Intake.submit`."""
        try:
            intake = self.open_intake()
            for trajectory in trajectories:
                intake.check(trajectory, self._ports.limits)
            return await intake.submit(trajectories, prompt)
        except DataError as error:
            raise type(error)(f"submit: {error}") from error.__cause__

    async def settle(self) -> None:
        """Wait until every step is published and written, and every engine has the newest weights."""
        await self._publish.published(self._ports.ledger.turn)
        await self.evaluations.all_reported()
        await self._publish.sync()

    # -- what the facade asks --------------------------------------------------------------------------------------

    async def evaluate(self, version: int, report: Report, *, first: bool, last: bool) -> None:
        """Calls `report` with the metrics of the held-out prompts at this version; with none where it is not due, or there are no
        such prompts. Steps may go on meanwhile, but for the `first` and the `last` version of a run: see `Evaluations.at`. The
        training does not end before."""
        await self.evaluations.at(version, report, last=last, beside=None if first or last else self._training_tasks)

    def nothing_left(self) -> bool:
        """The version in hand is the last one."""
        config, ledger = self._ports.config, self._ports.ledger
        reached = config.train.max_steps is not None and ledger.turn >= config.train.max_steps
        return reached or ledger.finished or self._claims.stopping

    @property
    def in_hand(self) -> int | None:
        """The group id of the prompt that was taken from the cursor and waits for its slot."""
        return None if self._rollout is None else self._rollout.in_hand

    @property
    def busy(self) -> bool:
        """Whether a run goes on, the end is waited for, or submitted groups are not trained yet."""
        waited_for = self._generating or self._draining or self._ports.ledger.statistics().live > 0
        return waited_for and not self._finished.is_set()

    @property
    def ending(self) -> bool:
        """The training is over, or the generation has failed: the pumps that generate are cancelled and have not ended."""
        failed = self._pumps is not None and self._pumps.cancel_called
        return self._generating and (failed or self._finished.is_set())
