"""The score pump: trajectories in, whole scored groups out (edges 3 to 5).

As many scorers as there are reward workers (and one more, so that a worker is never idle while a reply is handled). The
buffer before them is bounded; rollouts wait there for a free scorer.
"""

from __future__ import annotations

import anyio

from asyncrl.transport.queue import QueueReceiver, QueueSender
from asyncrl.types import Group, Trajectory

from .pipeline import Rooms, Scoring, hand_on


class ScorePump:
    def __init__(self, rooms: Rooms, scoring: QueueReceiver[Scoring], groups: QueueSender[Group]) -> None:
        self._rooms = rooms
        self._scoring = scoring
        self._groups = groups

    async def run(self) -> None:
        """Ends when every rollout is scored. Groups that can never be whole by then are dropped and counted."""
        async with self._groups:
            async with self._scoring, anyio.create_task_group() as scorers:
                for _ in range(self._rooms.config.reward.workers + 1):
                    scorers.start_soon(self._score)
            for group_id in self._rooms.stash.incomplete():
                await self._rooms.book.end(group_id, "dropped", "incomplete at the end of the rollouts")

    async def _score(self) -> None:
        rooms, recorder = self._rooms, self._rooms.recorder
        async for item in self._scoring:
            if item.ticket.group_id not in rooms.book:  # a sibling failed meanwhile
                continue
            trajectory = item.trajectory
            if trajectory.reward is None:
                with (
                    recorder.span("score", track="score", group=trajectory.group_id, member=trajectory.member),
                    recorder.wait("score pump", "a reward", on="reward workers", cause="reward"),
                ):
                    [trajectory] = await rooms.reward.score(item.prompt, [trajectory])
            if item.ticket.group_id not in rooms.book:
                continue
            await self._add(item, trajectory)

    async def _add(self, item: Scoring, trajectory: Trajectory) -> None:
        group = self._rooms.book.add(item.ticket, item.prompt, trajectory)
        statistics = self._rooms.stash.statistics()
        self._rooms.recorder.gauge("queue/stash/depth", statistics.waiting_groups)
        if group is not None:
            await hand_on(self._groups, group)
