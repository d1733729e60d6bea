"""The rollout pump: prompts in, trajectories out (edges 1 to 3). One slot per group, admitted by the ledger.

A group's members play in a task group of their own. A member that fails ends the whole group (its slot goes back at once,
its rows are forgotten); more than `rollout.max_failed_groups` such groups end the run.
"""

from __future__ import annotations

import anyio

from asyncrl.data.prompts import PromptSource
from asyncrl.errors import AsyncrlError, EngineClosed, GenerationError
from asyncrl.transport.queue import QueueSender
from asyncrl.types import Prompt, Ticket

from .pipeline import Rooms, Scoring


class RolloutPump:
    def __init__(self, rooms: Rooms, prompts: PromptSource, scoring: QueueSender[Scoring]) -> None:
        self._rooms = rooms
        self._prompts = prompts
        self._scoring = scoring

    async def run(self) -> None:
        """Ends when the prompts, or the steps that need them, ran out and every group is handed on."""
        async with self._scoring, anyio.create_task_group() as groups:
            while batch := await self._admit_batch():
                for ticket, prompt in batch:
                    groups.start_soon(self._play, ticket, prompt, name=f"rollout group {ticket.group_id}")
            await self._rooms.ledger.exhaust()

    async def _admit_batch(self) -> list[tuple[Ticket, Prompt]]:
        """One group as soon as it has a slot; a whole step's groups where the run must not depend on timing."""
        config = self._rooms.config
        size = 1 if config.rollout.streaming else config.rollout.groups_per_step
        batch: list[tuple[Ticket, Prompt]] = []
        while len(batch) < size and await self._wanted():
            prompt = self._prompts.next()
            if prompt is None:
                break
            with self._rooms.recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
                ticket = await self._rooms.ledger.admit(prompt.group_id)
            assert ticket is not None, "a fresh group always gets a ticket"
            self._rooms.book.open(ticket)
            batch.append((ticket, prompt))
        return batch

    async def _wanted(self) -> bool:
        """Whether another group is needed to reach `max_steps`; waits while that depends on groups that may still fail."""
        max_steps = self._rooms.config.train.max_steps
        if max_steps is None:
            return True
        ledger = self._rooms.ledger
        limit = (max_steps - ledger.first_turn) * self._rooms.config.rollout.groups_per_step
        while True:
            seen = ledger.changes
            books = ledger.statistics()
            if books.admitted - books.dropped - books.failed < limit:
                return True
            if books.live == 0:
                return False
            with self._rooms.recorder.wait("rollout pump", "the last groups", on="train pump", cause="group"):
                await ledger.wait_changed(seen)

    async def _play(self, ticket: Ticket, prompt: Prompt) -> None:
        rooms = self._rooms
        try:
            async with anyio.create_task_group() as members:
                for member in range(rooms.config.rollout.group_size):
                    members.start_soon(self._member, ticket, prompt, member)
        except* EngineClosed:
            raise  # the run is ending: not this group's fault
        except* Exception as failures:
            await self._failed(ticket, failures)

    async def _member(self, ticket: Ticket, prompt: Prompt, member: int) -> None:
        rooms = self._rooms
        group_size = rooms.config.rollout.group_size
        with rooms.recorder.span("rollout", track="rollout", group=ticket.group_id, member=member):
            trajectory = await rooms.environment.run(prompt, member, group_size, rooms.engine.generate)
        await self._scoring.put(Scoring(ticket, prompt, trajectory))

    async def _failed(self, ticket: Ticket, failures: BaseExceptionGroup[Exception]) -> None:
        book, limit = self._rooms.book, self._rooms.config.rollout.max_failed_groups
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        await book.end(ticket.group_id, "failed", f"{type(first).__name__}: {first}"[:200])
        if book.failed > limit:
            if isinstance(first, AsyncrlError):
                raise first
            raise GenerationError(
                f"group {ticket.group_id} failed in the environment ({type(first).__name__}: {first}); "
                f"rollout.max_failed_groups allows {limit} such groups in a run"
            ) from first
