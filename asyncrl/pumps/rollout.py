"""The rollout pump: prompts in, trajectories out (edges 1 to 3). One slot per group, admitted by the ledger.

A group's members play in a task group of their own. A member that fails, its retries included (episode.py), ends the whole
group: its slot goes back at once, to another prompt, and its rows are forgotten. More than `rollout.max_failed_groups` such
groups end the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.schema import RolloutConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import DataError, GenerationError
from asyncrl.ports import Engine, Ledger
from asyncrl.records.check import Limits, check_trajectory
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueSender
from asyncrl.types import Prompt, Ticket, Trajectory

from .book import GroupBook
from .episode import EpisodeFailed, Episodes
from .hooks import Hooks
from .pipeline import Scoring, hand_on

_CAUSES = 3  # that are named where the budget is used up


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What the rollout pump works with."""

    recorder: Recorder
    ledger: Ledger
    book: GroupBook
    engine: Engine
    environment: Episodes
    hooks: Hooks
    limits: Limits
    rollout: RolloutConfig
    max_steps: int | None
    at_once: int | None  # groups of this rank that are played at a time; None: as many as have slots
    whole_groups: bool  # a group is handed on once its last member is done, not member by member


class RolloutPump:
    """See the module docstring."""

    def __init__(self, parts: RolloutParts, prompts: PromptSource, scoring: QueueSender[Scoring]) -> None:
        self._parts = parts
        self._prompts = prompts
        self._scoring = scoring
        self._playing = None if parts.at_once is None else anyio.Semaphore(parts.at_once)
        self._over_budget = False
        self.in_hand: int | None = None  # a prompt taken from the cursor that waits for its slot: a checkpoint keeps it

    async def run(self) -> None:
        """Ends when the prompts, or the steps that need them, ran out and every group is handed on."""
        together: list[tuple[Ticket, Prompt]] = []
        async with self._scoring, anyio.create_task_group() as groups:
            while (admitted := await self._admit()) is not None:
                together.append(admitted)
                if not self._parts.ledger.due():
                    self._start(groups, together)
            self._start(groups, together)
            await self._parts.ledger.exhaust()

    def _start(self, groups: TaskGroup, together: list[tuple[Ticket, Prompt]]) -> None:
        """They enter the engine in the same turn of the loop, so that reruns of `sync` have the same company on each rank."""
        for ticket, prompt in together:
            spawn(groups, f"rollout group {ticket.group_id}", self._play, ticket, prompt)
        together.clear()

    async def _admit(self) -> tuple[Ticket, Prompt] | None:
        """The next group, as soon as it has a slot. None: no more are needed, or there are no more prompts.

        It must be played at once, never kept until others have their slots too (but for those that are `due`, which wait for
        nobody): the step may wait for this very group.
        (Where the slots of a whole step come free together, the admissions after the first do not yield, so its groups
        still enter the engine in the same turn: `sync` depends on no timing.)
        """
        if self._playing is not None:
            with self._parts.recorder.wait("rollout pump", "its own groups", on="the engine", cause="slots"):
                await self._playing.acquire()
        prompt = self._prompts.next() if await self._wanted() else None
        if prompt is None:
            return None
        with self._parts.recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
            self.in_hand = prompt.group_id  # also after a cancellation: the cursor is past it and nobody played it
            ticket = await self._parts.ledger.admit(prompt.group_id)
        self.in_hand = None
        assert ticket is not None, "a fresh group always gets a ticket"
        self._parts.book.open(ticket)
        return ticket, prompt

    async def _wanted(self) -> bool:
        """Whether another group is needed to reach `max_steps`; waits while that depends on groups that may still fail."""
        max_steps = self._parts.max_steps
        if max_steps is None:
            return True
        ledger = self._parts.ledger
        limit = (max_steps - ledger.first_turn) * self._parts.rollout.groups_per_step
        while True:
            seen = ledger.changes
            books = ledger.statistics()
            if books.admitted - books.dropped - books.failed < limit:
                return True
            if books.live == 0:
                return False
            with self._parts.recorder.wait("rollout pump", "the last groups", on="train pump", cause="group"):
                await ledger.wait_changed(seen)

    async def _play(self, ticket: Ticket, prompt: Prompt) -> None:
        parts = self._parts
        done: dict[int, Trajectory] = {}
        try:
            if parts.hooks.before_group is not None:
                with parts.recorder.watch("rollout pump", f"group {ticket.group_id}", on="hook before_group"):
                    prompt = await parts.hooks.prompt(prompt)
            async with anyio.create_task_group() as members:
                for member in range(parts.rollout.group_size):
                    name = f"member {member} of group {ticket.group_id}"
                    spawn(members, name, self._member, ticket, prompt, member, done)
        except* EpisodeFailed as failures:
            await self._failed(ticket, failures)
        else:
            if parts.whole_groups:
                await hand_on(self._scoring, Scoring(ticket, prompt, tuple(done[member] for member in sorted(done))))
        finally:
            if self._playing is not None:
                self._playing.release()

    async def _member(self, ticket: Ticket, prompt: Prompt, member: int, done: dict[int, Trajectory]) -> None:
        trajectory = await self._episode(ticket, prompt, member)
        if self._parts.whole_groups:
            done[member] = trajectory
        else:  # an error here is the score pump's end, not ours
            await hand_on(self._scoring, Scoring(ticket, prompt, (trajectory,)))

    async def _episode(self, ticket: Ticket, prompt: Prompt, member: int) -> Trajectory:
        """Errors: as `Episodes.play`."""
        parts, group_id = self._parts, prompt.group_id
        group_size = parts.rollout.group_size
        with parts.recorder.span("rollout", track="rollout", group=group_id, member=member):
            # What has to be trained first goes first: the second round of an old group before the first of a new one.
            trajectory = await parts.environment.play(
                prompt, member, group_size, parts.engine.generate, ticket.deadline
            )
        try:
            if (trajectory.group_id, trajectory.member, trajectory.group_size) != (group_id, member, group_size):
                raise GenerationError(
                    f"the environment was asked for member {member} of {group_size} of group {group_id} and returned "
                    f"member {trajectory.member} of {trajectory.group_size} of group {trajectory.group_id}"
                )
            check_trajectory(trajectory, parts.limits)
        except DataError as error:
            raise EpisodeFailed from GenerationError(
                f"the environment returned a trajectory of group {group_id} that cannot be trained: {error}"
            )
        except Exception as error:  # a bug of the environment, which would return the same again
            raise EpisodeFailed from error
        return trajectory

    async def _failed(self, ticket: Ticket, failures: BaseExceptionGroup[EpisodeFailed]) -> None:
        """The group's slot goes to another prompt, within the budget. Errors: GenerationError once that is used up."""
        book, rollout = self._parts.book, self._parts.rollout
        error = failures.exceptions[0].__cause__
        assert error is not None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        await book.end(ticket.group_id, "failed", f"{type(error).__name__}: {error}"[:200])
        limit, asked = rollout.max_failed_groups, "rollout.max_failed_groups"
        if limit is None:
            asked += ", left out, is a tenth of all groups and at least those of a step, and"
            limit = max(rollout.groups_per_step, self._parts.ledger.statistics().admitted // 10)
        if book.failed > limit and not self._over_budget:
            self._over_budget = True  # others fail in the same moment, and have nothing to add
            causes = [f"{count} of {reason.removeprefix('failed: ')}" for reason, count in book.reasons.items()]
            raise GenerationError(
                f"group {ticket.group_id} failed in the environment ({type(error).__name__}: {error}), as {book.failed} groups "
                f"did; {asked} allows {limit} such groups in a run. The last causes: {'; '.join(causes[-_CAUSES:])}"
            ) from error
