"""Which groups a step really trains: its own, but for those without a signal, whose place a replayed group takes.

The group without a signal keeps its place in the ledger's step and its line in the rollouts; its tokens are out of N, the
replayed group's tokens are in. Replayed groups have names of their own in the metrics and count in no other one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.config.resolve import versions_per_batch
from asyncrl.types import Group

from .pipeline import Rooms
from .signal import Advantages, step_advantages


class Replaying:
    """The train pump's view of the replay buffer; without one, every group is trained as it is."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def chosen(
        self, fresh: Sequence[Group], advantages: Advantages, replayed: dict[int, Group], version: int
    ) -> list[tuple[Group, npt.NDArray[np.float64]]]:
        """(group, its advantages) for the microbatches. `replayed`: of the step, by the id of the replaced group; grows.

        `version`: at which the step's first microbatch is trained; the last update of the batch counts for the age.
        """
        rooms, buffer = self._rooms, self._rooms.replay
        result = []
        for group in fresh:
            own = advantages[group.group_id]
            other = None
            if buffer is not None and not own.any():
                last = version + versions_per_batch(rooms.config) - 1
                taken = {g.group_id for g in replayed.values()}
                other = buffer.draw(last, (rooms.ledger.turn, group.group_id), taken)
            if other is None:
                result.append((group, own))
                continue
            replayed[group.group_id] = other
            scale = rooms.config.reward.scale_adv_by_len
            again = step_advantages(rooms.advantage, [other], rooms.weights, scale)
            result.append((other, again[other.group_id]))
        return result

    def store(self, groups: Sequence[Group], advantages: Advantages) -> None:
        """After the step was applied: keep what is strong enough. Only now, so that no step draws its own groups."""
        if self._rooms.replay is not None:
            for group in groups:
                self._rooms.replay.add(group, advantages[group.group_id])

    def sums(self, replayed: dict[int, Group]) -> dict[str, float]:
        """`replay/groups`, `replay/tokens`, `replay/size`, `replay/evicted` (so far): of this rank, to be added up."""
        buffer = self._rooms.replay
        if buffer is None:
            return {}
        found = {"replay/groups": float(len(replayed)), "replay/size": float(len(buffer))}
        found["replay/evicted"] = float(buffer.evicted)
        if replayed:
            found["replay/tokens"] = float(sum(int(t.mask.sum()) for g in replayed.values() for t in g.trajectories))
        return found
