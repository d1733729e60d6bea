"""The score pump: played trajectories in, through the intake (edge 3).

As many scorers as calls of reward functions can be under way (and one more, so that a worker is never idle while a reply is
handled). The buffer before them is bounded; rollouts wait there for a free scorer. What arrives is one trajectory, or a whole group
whose members are scored in one call of the reward functions (`reward.batch`): the rollout pump decides.
"""

from __future__ import annotations

import anyio

from asyncrl.concurrency.supervisor import spawn
from asyncrl.transport.queues.queue import QueueReceiver

from .intake import Intake
from .pipeline import Scoring


class ScorePump:
    """See the module docstring."""

    def __init__(self, intake: Intake, scoring: QueueReceiver[Scoring], workers: int) -> None:
        self._intake = intake
        self._scoring = scoring
        self._workers = workers

    async def run(self) -> None:
        """Ends when every rollout is scored. Groups that can never be whole by then are dropped and counted."""
        async with self._scoring, anyio.create_task_group() as scorers:
            for _ in range(self._workers + 1):
                spawn(scorers, "scorer", self._score)
        await self._intake.end_of_rollouts()

    async def _score(self) -> None:
        async for item in self._scoring:
            await self._intake.take(item)
