"""The wiring of the pumps: who hands what to whom, and who waits for whom.

              (1) slots           (3) scoring          (5) groups            (6) publications
    prompts ---------> rollout ------------> score ------------> train ---------------------> publish
                         pump                 pump       ^         pump                         pump
                           | (2) requests                | submit                                |
                           v                             |                                       |
                         engine                     embedding                                    |
                                                                                                 |
    slots released together  <-------- evaluation, checkpoint, every sink acknowledged ----------'

| edge | bounded by | the producer waits for | ends when |
|---|---|---|---|
| 1 | slots | a slot (the publish pump gives them back) | the prompts or the needed steps ran out |
| 2 | slots x group_size | its own reply | the engine closes: every request fails |
| 3 | one trajectory a scorer | a free scorer | the last rollout is handed on |
| 5 | slots | nothing: every group has a slot, so the buffer cannot overflow | rollouts scored, nobody may submit |
| 6 | one publish in flight | the publish before it | the train pump is done |

Whoever ends closes its own end of an edge; the next pump's `async for` then ends. No sentinels, no flags.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import anyio

from asyncrl.concurrency.supervisor import Supervisor
from asyncrl.config.resolve import slots, versions_per_batch
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import DataError, LifecycleError
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Group, Prompt, Ticket, Trajectory

from .evaluate import EvaluatePump
from .pipeline import Publication, Rooms, Scoring, StepReport
from .publish import PublishPump
from .reference import ReferenceAhead
from .reroll import Reroll
from .rollout import RolloutPump
from .score import ScorePump
from .train import TrainPump

T = TypeVar("T")
Edge: TypeAlias = tuple[QueueSender[T], QueueReceiver[T]]


class Graph:
    """The pumps of one rank. `start` runs the half that trains, `run` adds the half that generates."""

    def __init__(
        self,
        rooms: Rooms,
        prompts: PromptSource | None,
        held_out: Sequence[Prompt],
        at_version: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepReport], None],
    ) -> None:
        config, recorder = rooms.config, rooms.recorder
        self._rooms = rooms
        self._prompts = prompts
        groups: Edge[Group] = open_queue("groups", slots(config), recorder)
        publications: Edge[Publication] = open_queue("publications", 1, recorder)
        self._groups_in, groups_out = groups
        publications_in, publications_out = publications
        self._reroll = Reroll(rooms, prompts)
        self._reference = ReferenceAhead(rooms)
        self._publish = PublishPump(rooms, publications_out, at_version)
        self._train = TrainPump(
            rooms, groups_out, publications_in, self._publish.published, on_step, self._reroll, self._reference
        )
        self._evaluate = EvaluatePump(rooms, held_out, config.rollout.environment) if held_out else None
        self._finished = anyio.Event()  # no step can come any more, the last one is published
        self._generated = anyio.Event()  # no rollout and no scorer is left
        self._generation_scope = anyio.CancelScope()
        self._callbacks: list[Callable[[], None]] = []
        self._generating = False
        self._rollout: RolloutPump | None = None
        self.time_is_up = False

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("training", self._training)

    async def _training(self) -> None:
        try:
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(self._train_to_the_end, name="train pump")
                pumps.start_soon(self._publish.run, name="publish pump")
        finally:
            self._finished.set()
            for callback in self._callbacks:
                callback()

    async def _train_to_the_end(self) -> None:
        await self._train.run()
        # In the same step of the loop in which edge 5 closed: a scorer that still wants to hand a group on is cancelled,
        # where it would otherwise end the run with "broken resource" (time limit, slow last publish).
        self._generation_scope.cancel()

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Call back once no step can come any more; at once if that is so."""
        if self._finished.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def run(self, supervisor: Supervisor) -> None:
        """Generate, score and train the configured prompts until the end. Groups left over are dropped and counted.

        Without prompts: train what is submitted meanwhile. The time limit then trains what is here: the next group may
        never come.
        """
        if self._prompts is None:
            self._generated.set()
        else:
            self._generating = True
            supervisor.start("generation", self._generation)
        limit = self._rooms.config.train.time_limit_s
        with anyio.move_on_after(limit) as timer:
            await self._finished.wait()
        if timer.cancelled_caught:
            self.time_is_up = True
            if self._prompts is None:
                await self.drain()
            elif self._rooms.ranks == 1:  # several have to agree on the last step: see `stop_at`
                self._train.stop_after_step()
            await self._finished.wait()
        await self._generated.wait()  # else a group could be admitted after the others were ended
        self._generating = False
        await self._rooms.book.end_all("the run ended first")

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later one. Every rank says the same turn, none that has begun anywhere."""
        self._train.stop_at(turn)

    async def _generation(self) -> None:
        assert self._prompts is not None
        edge: Edge[Scoring] = open_queue("scoring", self._rooms.config.reward.workers, self._rooms.recorder)
        scoring_in, scoring_out = edge
        try:
            with self._generation_scope:
                async with anyio.create_task_group() as pumps:
                    self._rollout = rollout = RolloutPump(self._rooms, self._prompts, scoring_in)
                    score = ScorePump(
                        self._rooms, scoring_out, self._groups_in.clone(), self._reroll.saw, self._reference
                    )
                    self._groups_in.close()  # a run owns the edge: embedding may not submit beside it
                    pumps.start_soon(rollout.run, name="rollout pump")
                    pumps.start_soon(score.run, name="score pump")
        finally:
            self._generated.set()

    async def drain(self) -> None:
        """No more groups will be submitted: train what is here, then end. Returns when the training half ended."""
        if not self._finished.is_set():
            self._groups_in.close()
            await self._rooms.ledger.exhaust()
            await self._finished.wait()

    # -- embedding -------------------------------------------------------------------------------------------------

    async def submit(self, trajectories: tuple[Trajectory, ...], prompt: Prompt) -> bool:
        """A whole scored group from outside; waits for a slot. False where the ledger finds it too old.

        Errors: LifecycleError where no step can come any more, also while it waits; DataError for a group that was
        submitted before or does not fit together. None of them keeps the slot.
        """
        rooms = self._rooms
        if self._generating:
            raise LifecycleError("submit: this Runtime runs its own prompts")
        versions = [t.oldest_version for t in trajectories if t.oldest_version >= 0]
        # None, where no token says its age: it counts as of the version that has room for it.
        oldest = min(versions) // versions_per_batch(rooms.config) if versions else None
        ticket = await self._admit(prompt.group_id, oldest)
        if ticket is None:
            rooms.counters["staleness/dropped"] += 1
            return False
        rooms.book.open(ticket)
        try:
            group = await rooms.hooks.rewarded(self._whole(ticket, trajectories, prompt), rooms.limits)
            await self._groups_in.put(group)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await rooms.book.end(prompt.group_id, "dropped", "was not handed on")
            if isinstance(error, (anyio.BrokenResourceError, anyio.ClosedResourceError)):
                raise LifecycleError("submit: the training ended") from error
            raise
        return True

    async def _admit(self, group_id: int, oldest: int | None) -> Ticket | None:
        """As `Ledger.admit`, but not for longer than slots can come free. Errors: LifecycleError."""
        with anyio.CancelScope() as scope:
            self.when_finished(scope.cancel)
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
                return await self._rooms.ledger.admit(group_id, oldest)
            finally:
                if scope.cancel in self._callbacks:
                    self._callbacks.remove(scope.cancel)
        raise LifecycleError("submit: the training ended")

    def _whole(self, ticket: Ticket, trajectories: tuple[Trajectory, ...], prompt: Prompt) -> Group:
        group: Group | None = None
        for trajectory in trajectories:
            group = self._rooms.book.add(ticket, prompt, replace(trajectory, group_id=prompt.group_id))
        if group is None:
            raise DataError(
                f"submit: group {prompt.group_id} does not become whole: it ended before, or its {len(trajectories)} "
                f"trajectories are not the members 0 to {len(trajectories) - 1}; a group is submitted once"
            )
        return group

    # -- what the facade asks --------------------------------------------------------------------------------------

    async def evaluate(self, version: int, last: bool) -> dict[str, float]:
        if self._evaluate is None or not self._evaluate.due(version, last):
            return {}
        await self._publish.sync()  # what is evaluated is this version, whatever the interval says
        return await self._evaluate.run(version)

    @property
    def evaluating(self) -> tuple[int, int] | None:
        """(completions that are scored, all of them) of the evaluation that runs now."""
        return None if self._evaluate is None else self._evaluate.progress

    def nothing_left(self) -> bool:
        """The version in hand is the last one."""
        config, ledger = self._rooms.config, self._rooms.ledger
        reached = config.train.max_steps is not None and ledger.turn >= config.train.max_steps
        return reached or ledger.finished or self._train.stopping

    @property
    def in_hand(self) -> int | None:
        """The group id of the prompt that was taken from the cursor and waits for its slot."""
        return None if self._rollout is None else self._rollout.in_hand

    @property
    def busy(self) -> bool:
        """Whether somebody waits for the pipeline to move: a run, or groups that were submitted."""
        return not self._finished.is_set() and (self._generating or self._rooms.ledger.statistics().live > 0)

    @property
    def scored(self) -> float:
        return float(self._rooms.stash.statistics().accepted)
