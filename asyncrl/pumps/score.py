"""The score pump: trajectories in, whole scored groups out (edges 3 to 5).

As many scorers as there are reward workers (and one more, so that a worker is never idle while a reply is handled). The
buffer before them is bounded; rollouts wait there for a free scorer. What arrives is one trajectory, or a whole group
whose members are scored in one call of the reward functions (`reward.batch`): the rollout pump decides.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from asyncrl.transport.queues.queue import QueueReceiver, QueueSender
from asyncrl.types import Group, Trajectory

from .pipeline import Rooms, Scoring, hand_on
from .reference import ReferenceAhead
from .screen import Screen, shaped


class ScorePump:
    def __init__(
        self,
        rooms: Rooms,
        scoring: QueueReceiver[Scoring],
        groups: QueueSender[Group],
        saw: Callable[[Group], None] = lambda group: None,
        reference: ReferenceAhead | None = None,
    ) -> None:
        """`saw` hears of every scored group that the filters drop; `reference` works beside the reward workers."""
        self._rooms = rooms
        self._scoring = scoring
        self._groups = groups
        self._reference = ReferenceAhead(rooms) if reference is None else reference
        self._screen = Screen(rooms, saw)

    async def run(self) -> None:
        """Ends when every rollout is scored. Groups that can never be whole by then are dropped and counted."""
        async with self._groups:
            async with self._scoring, anyio.create_task_group() as scorers:
                for _ in range(self._rooms.config.reward.workers + 1):
                    scorers.start_soon(self._score)
            for group_id in self._rooms.stash.incomplete():
                await self._rooms.book.end(group_id, "dropped", "incomplete at the end of the rollouts")

    async def _score(self) -> None:
        rooms = self._rooms
        async for item in self._scoring:
            if item.ticket.group_id not in rooms.book:  # a sibling failed meanwhile
                continue
            scored = await self._rewarded(item)
            for trajectory in scored:
                if item.ticket.group_id in rooms.book:
                    reward, longest = rooms.config.reward, rooms.config.rollout.max_tokens
                    await self._add(item, shaped(trajectory, reward, longest))

    async def _rewarded(self, item: Scoring) -> list[Trajectory]:
        """With rewards; those that the environment has scored itself are not asked for again."""
        rooms, recorder = self._rooms, self._rooms.recorder
        open_ = [t for t in item.trajectories if t.reward is None]
        scored: dict[int, Trajectory] = {}
        if open_:
            first = open_[0]
            with recorder.span("score", track="score", group=first.group_id, member=first.member, members=len(open_)):
                async with anyio.create_task_group() as beside:
                    if self._reference.wanted:
                        beside.start_soon(self._reference.compute, item.ticket, item.prompt, item.trajectories)
                    with recorder.wait("score pump", "a reward", on="reward workers", cause="reward"):
                        scored = {t.member: t for t in await rooms.reward.score(item.prompt, open_)}
        return [scored.get(t.member, t) for t in item.trajectories]

    async def _add(self, item: Scoring, trajectory: Trajectory) -> None:
        group = self._rooms.book.add(item.ticket, item.prompt, trajectory)
        statistics = self._rooms.stash.statistics()
        self._rooms.recorder.gauge("queue/stash/depth", statistics.waiting_groups)
        if group is None:
            return
        group = await self._rooms.hooks.rewarded(group, self._rooms.limits)
        if await self._screen.passes(group):
            await hand_on(self._groups, group)
