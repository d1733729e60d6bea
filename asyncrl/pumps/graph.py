"""How the pumps of one rank are connected. For each edge: its bound, what its producer waits for, and when it ends.

              (1) slots           (3) scoring                                     (6) publications
    prompts ---------> rollout ------------> score                       train ---------------------> publish
                         pump                 pump                        pump                         pump
                           | (2) requests        |    (4) scored           ^  (5) ready rows             |
                           v                     '----> intake ---> store -'                             |
                         engine                           ^                                              |
                                    Runtime.submit, doors |                                              |
                                                                                                         |
    slots released together  <-------- evaluation, checkpoint, every sink acknowledged ------------------'

| edge | bounded by | the producer waits for | ends when |
|---|---|---|---|
| 1 | slots | a slot, which a publish or the drop of a group frees | there are no more prompts, or enough groups for `max_steps` |
| 2 | slots x group_size episodes | the reply of the engine | the engine closes; then every request fails |
| 3 | reward calls at a time | a free scorer | the rollout pump has sent its last trajectory |
| 4, 5 | slots | nothing, because every group with rows has a slot | no rank admits groups any more, and no group is live |
| 6 | one unfinished publish | the previous publish | the train pump ends |

A slot is the right of one group to be in the run. The ledger gives a slot to each group that it admits.

If ranks have different roles (`distributed.roles`), edge 4 leads to a training rank (`travel.py`). A rank that only trains has no
rollout and score pumps. A rank that only generates has the follow pump (`follow.py`) instead of the train and publish pumps. With
context parallelism (`distributed.context`) one of the ranks that share a microbatch leads. The others, its siblings, have the
sibling pump (`siblings.py`) instead of the train pump. A pump that ends closes its edges. This ends the next pump's `async for`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import Supervisor, spawn
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import DataError, LifecycleError
from asyncrl.ports import Environment
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Group, Prompt, Trajectory

from .claims import Claims
from .dispatch import Dispatch
from .evaluate import EvaluatePump, Evaluations, Report
from .follow import EngineVersion, FollowPump, Remote
from .intake import Intake, ScorePump
from .pipeline import Ports, Publication, StepReport
from .publish import PublishPump
from .rollout import GroupPlayer, OwnPrompts, Prompts, RolloutPump
from .screen import Reroll
from .siblings import CallQueue, LeadingTrainer, SiblingPump
from .train import TrainPump
from .travel import Arrivals, Departures

T = TypeVar("T")


@dataclass(slots=True)
class RoleParts:
    """Parts of a rank for `distributed.roles` and `distributed.context`; None: not on this rank. `dispatch`: on rank 0. `remote`:
    on every other rank. `engine_version`: on ranks that only generate. `departures`: on ranks that generate. `arrivals`: on ranks
    that build steps. `leading`: on the leader of siblings. `calls`: on each sibling, from its leader."""

    dispatch: Dispatch | None = None
    remote: Remote | None = None
    engine_version: EngineVersion | None = None
    departures: Departures | None = None
    arrivals: Arrivals | None = None
    leading: LeadingTrainer | None = None
    calls: CallQueue | None = None


Edge: TypeAlias = tuple[QueueSender[T], QueueReceiver[T]]


class Graph:
    """The pumps of one rank. `start` starts the pumps that train, or the follow pump; `run` adds those that generate and score."""

    def __init__(
        self,
        ports: Ports,
        prompts: PromptSource | None,
        held_out: Sequence[Prompt],
        at_version: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepReport], None],
        catch_up: Callable[[bool], Awaitable[None]],
        evaluated: int = -1,
        role_parts: RoleParts | None = None,
    ) -> None:
        """`at_version`: see `PublishPump`. `on_step`: see `TrainPump`. `catch_up(last)` does missing work, such as an evaluation:
        before the first step with `last=False`, after the last step with `last=True`. `evaluated`: the newest evaluated version;
        -1: none. `role_parts`: None unless `Roles.differ` (distributed/roles.py)."""
        self._ports = ports
        self._prompts = prompts
        # Whether all groups come from outside: the program or other processes submit them.
        self._only_submitted = prompts is None and role_parts is None
        self._role_parts = role_parts = role_parts or RoleParts()
        reroll = Reroll(ports, prompts)
        self.intake = Intake(ports, reroll)
        self._catch_up = catch_up
        self._publish = PublishPump(ports, at_version, partial(catch_up, False))
        self._claims = Claims(ports)
        self._training_completed = False  # True: ended without an error or a cancellation
        published = self._publish.wait_published
        self._train: TrainPump | SiblingPump = (
            TrainPump(ports, self._claims, reroll, published, on_step)
            if role_parts.calls is None
            else SiblingPump(ports, role_parts.calls, self._claims, published)
        )
        if role_parts.leading is not None:
            role_parts.leading.wait_published = lambda: published(ports.turn_of(ports.trainer.version))
        environment = ports.config.rollout.environment.rpartition(":")[2]  # no path in names of metrics
        spread = None if role_parts.dispatch is None else role_parts.dispatch.evaluate
        evaluate = EvaluatePump(ports, held_out, environment, evaluated, spread) if held_out else None
        self._evaluate = evaluate
        # A rank with a `Remote` only plays the rows that rank 0 sends: rank 0 decides which versions are evaluated.
        decider = evaluate if role_parts.remote is None else None
        # An evaluation that is spread over ranks pins no version: the other ranks cannot pin versions.
        pinning = ports.engine if spread is None else None
        self.evaluations = Evaluations(decider, pinning, self._publish.sync)
        self._follow = None
        if role_parts.remote is not None:
            if role_parts.engine_version is not None:
                self._follow = FollowPump(ports, role_parts.remote, role_parts.engine_version)
            role_parts.remote.start(ports, prompts, evaluate, self._wait_version)
        self._training_tasks: TaskGroup | None = None
        self._finished = anyio.Event()  # train and publish pumps, or follow pump, have ended
        self._generated = anyio.Event()  # the rollout and score pumps have ended
        self._generation_scope = anyio.CancelScope()  # cancelled at the end of the training
        self._generation_pumps_scope: anyio.CancelScope | None = None  # cancelled if a generating pump fails
        self.on_finish: Callable[[], None] = lambda: None  # called when the training pumps have ended
        self._generating = False
        self._draining = False
        self._accepts_groups = False
        self._rollout: RolloutPump | None = None
        self.time_is_up = False

    def start(self, supervisor: Supervisor) -> None:
        """Start the training pumps (or the follow pump), for the groups that `run` generates and for groups from outside."""
        self._accept_groups(self._only_submitted or self._prompts is not None)
        supervisor.start("training", self._run_training if self._follow is None else self._run_following)
        if self._role_parts.remote is not None and (self._ports.generates or self._ports.follows):
            supervisor.start("reports", self._role_parts.remote.report_often)

    def _accept_groups(self, accepts: bool) -> None:
        """Set whether groups may come from outside. While they may, idle time of the device counts as waiting for the program."""
        self._ports.recorder.change_actor(
            "the program" if self._accepts_groups else "", "the program" if accepts else ""
        )
        self._accepts_groups = accepts

    async def _run_training(self) -> None:
        edge: Edge[Publication] = open_queue("publications", 1, self._ports.recorder)
        publications_in, publications_out = edge
        try:
            async with publications_in, publications_out, anyio.create_task_group() as pumps:
                self._training_tasks = pumps
                spawn(pumps, "train pump", self._run_train_pump, publications_in)
                spawn(pumps, "publish pump", self._publish.run, publications_out)
            await self._catch_up(True)
            if self._role_parts.dispatch is not None:
                await self._role_parts.dispatch.send_ended(self._ports.trainer.version)
        finally:
            self._finish()

    def _finish(self) -> None:
        self._finished.set()
        self.on_finish()

    async def _run_following(self) -> None:
        """In place of `_run_training`, on a rank that only generates."""
        assert self._follow is not None and self._role_parts.remote is not None
        try:
            async with anyio.create_task_group() as pumps:
                spawn(pumps, "follow pump", self._follow.run)
                await self._role_parts.remote.trained.wait()
                self._generation_scope.cancel()
            self._training_completed = True
        finally:
            self._generation_scope.cancel()
            self._accept_groups(False)
            self.intake.close("the training ended")
            self._finish()

    async def _wait_version(self, version: int) -> None:
        """Wait until this rank's engine has this version."""
        if self._follow is not None:
            await self._follow.wait_version(version)
        else:
            await self._publish.wait_published(self._ports.turn_of(version))

    async def _run_train_pump(self, publications: QueueSender[Publication]) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                if self._role_parts.arrivals is not None:
                    spawn(tasks, "arrivals", self._role_parts.arrivals.run)
                await self._train.run(publications)
                tasks.cancel_scope.cancel()
            if self._role_parts.leading is not None:
                await self._role_parts.leading.end()
            self._training_completed = True
            if self._role_parts.dispatch is not None:
                await self._role_parts.dispatch.send_trained()
        finally:
            self._accept_groups(False)
            self._ports.book.training_ended = True
            self.intake.close("the training ended")
        # No step can train the groups that are still being generated or scored.
        self._generation_scope.cancel()

    async def run(self, supervisor: Supervisor) -> None:
        """Generate, score and train the configured prompts until the training ends. Then drop and count the untrained groups.

        Without prompts: train the submitted groups until `drain` ends the training. This method calls `drain` at the time limit."""
        pump = self._follow or self._publish
        await pump.wait_published(self._ports.ledger.turn)
        if not self._only_submitted:
            self._generating = True
            self._accept_groups(False)
        if self._ports.generates and not self._only_submitted:
            supervisor.start("generation", self._run_generation)
        else:
            self._generated.set()
        limit = self._ports.config.train.time_limit_s
        with anyio.move_on_after(limit) as timer:
            await self._finished.wait()
        if timer.cancelled_caught:
            self.time_is_up = True
            if self._only_submitted:
                await self.drain()
            elif (
                self._ports.trains_alone and self._follow is None
            ):  # several ranks agree on a step by `stop_at` instead
                self._claims.stop_after_step()
            await self._finished.wait()
        if not self._training_completed:
            if supervisor.failure is not None:
                # The supervisor cancels this task and raises its failure.
                await anyio.sleep_forever()
            turn = self._ports.ledger.turn
            raise LifecycleError(f"the training stopped early, after step {turn}, without an error; report this bug")
        # Without this wait a group could be admitted after `end_all`.
        await self._generated.wait()
        self._generating = False
        await self._ports.book.end_all("the run ended first")

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later turn. Every rank must pass the same turn, and no rank may have begun it."""
        self._claims.stop_at(turn)

    async def _run_generation(self) -> None:
        assert self._prompts is not None
        prompts: Prompts = (
            self._role_parts.remote or self._role_parts.dispatch or OwnPrompts(self._prompts, self._ports.generating)
        )
        departures = self._role_parts.departures
        calls = self._ports.calls_at_once or self._ports.config.reward.workers
        edge: Edge[Group] = open_queue("scoring", calls, self._ports.recorder)
        scoring_in, scoring_out = edge
        try:
            with self._generation_scope:
                async with scoring_in, scoring_out, anyio.create_task_group() as pumps:
                    self._generation_pumps_scope = pumps.cancel_scope
                    self._rollout = rollout = RolloutPump(self._ports, prompts, scoring_in)
                    if departures is not None:
                        spawn(pumps, "departures", departures.run)
                    score = ScorePump(self.intake, scoring_out, calls)
                    spawn(pumps, "rollout pump", rollout.run)
                    spawn(pumps, "score pump", self._run_score_pump, score)
        finally:
            self._generated.set()

    async def _run_score_pump(self, score: ScorePump) -> None:
        await score.run()
        if self._role_parts.departures is not None:
            self._role_parts.departures.close()

    async def drain(self) -> None:
        """Refuse further groups, and train the accepted groups. Drop the remainder if it is too small for a step."""
        if not self._finished.is_set():
            self._draining = True
            self._accept_groups(False)
            self.intake.close("the Runtime takes no more groups")
            await self._ports.ledger.exhaust()
            await self._finished.wait()
        if self._training_completed:
            await self._ports.book.end_all("the run ended first")

    def open_intake(self) -> Intake:
        """Returns the intake, for groups from outside. Errors: LifecycleError while this rank generates groups of its own prompts,
        and if ranks have different roles, because groups travel between such ranks only during `run`."""
        ports = self._ports
        if ports.depart is not None or not (ports.builds_steps and ports.generates):
            raise LifecycleError(
                "submit, play: distributed.roles or distributed.context is set, and groups travel between ranks only during run(); "
                "leave both out"
            )
        if self._generating:
            raise LifecycleError(
                "submit, play: run() generates the groups of this Runtime; use a Runtime whose run() you do not call"
            )
        return self.intake

    async def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> bool:
        """Check a whole group from outside and give the group to the intake. Result and errors: see `Intake.submit`."""
        try:
            intake = self.open_intake()
            for trajectory in trajectories:
                intake.check(trajectory, self._ports.limits)
            return await intake.submit(trajectories, prompt)
        except DataError as error:
            raise type(error)(f"submit: {error}") from error.__cause__

    async def play(self, environment: Environment, prompt: Prompt, size: int) -> tuple[Trajectory, ...]:
        """Play a group in this environment and give the group to the intake. Result and errors: see `Intake.play`."""
        player = GroupPlayer(replace(self._ports, environment=environment))
        return await self.open_intake().play(prompt.group_id, lambda ticket: player.play(ticket, prompt, size))

    async def wait_published(self) -> None:
        """Wait until every step is published and reported, and every engine has the newest weights. Errors, only with
        `role_parts`: LifecycleError if this rank builds no steps, or if other ranks, which ignore this call, must send weights."""
        ports, interval = self._ports, self._ports.config.rollout.weight_sync_interval
        has_roles = self._role_parts.dispatch is not None or self._role_parts.remote is not None
        if has_roles and (not ports.builds_steps or (interval > 1 and not ports.trains_alone)):
            raise LifecycleError(
                "evaluate: distributed.roles or distributed.context is set; call evaluate on rank 0, and if several ranks train, "
                f"set rollout.weight_sync_interval=1 (it is {interval})"
            )
        await self._publish.wait_published(ports.ledger.turn)
        await self.evaluations.wait_reported()
        await self._publish.sync(release=True)

    async def evaluate(self, version: int, report: Report, *, first: bool, last: bool) -> None:
        """Evaluate the held-out prompts at this version, if due, and call `report`: see `Evaluations.evaluate`. At the `first` and
        the `last` version of a run the training waits for the evaluation. Other evaluations may run during later steps."""
        if self._role_parts.remote is not None and self._evaluate is not None and self._evaluate.due(version, last):
            # Rank 0 lets ranks play the held-out prompts. These ranks get the weights only after all training ranks have sent them.
            await self._publish.sync()
        await self.evaluations.evaluate(
            version, report, last=last, beside=None if first or last else self._training_tasks
        )

    def is_last_version(self) -> bool:
        """Whether it is known that no step follows the version that the trainer has now. All training ranks get the same answer."""
        ports = self._ports
        # `ledger.finished` becomes True at a different moment on each rank, so it is used only if no other rank trains. With
        # fsdp a rank that has seen the end would save the last version, and wait for the shard of a rank that has not seen the end.
        return self._claims.finished or (ports.trains_alone and ports.ledger.finished)

    @property
    def waiting_prompt(self) -> int | None:
        """The group id of the prompt that was taken from the cursor and waits for a slot. None: no prompt waits."""
        return None if self._rollout is None else self._rollout.waiting_prompt

    @property
    def busy(self) -> bool:
        """Whether the training pumps have not ended, and the graph generates, drains or has live groups."""
        has_work = self._generating or self._draining or self._ports.ledger.statistics().live > 0
        return has_work and not self._finished.is_set()

    @property
    def ending(self) -> bool:
        """Whether the generating pumps still run, although the training has ended or one of the generating pumps has failed."""
        failed = self._generation_pumps_scope is not None and self._generation_pumps_scope.cancel_called
        return self._generating and (failed or self._finished.is_set())
