"""Which groups a step really trains: its own, but for those without a signal, whose place a replayed group takes.

The group without a signal keeps its place in the ledger's step and its line in the rollouts; its tokens are out of N, the
replayed group's tokens are in. Replayed groups have names of their own in the metrics and count in no other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.data.replay import ReplayBuffer
from asyncrl.data.store import ADVANTAGES, Rows
from asyncrl.ports import Ledger
from asyncrl.types import Group

from .signal import RewardReader


class Replaying:
    """The train pump's view of the replay buffer; without one, every group is trained as it is."""

    def __init__(
        self, buffer: ReplayBuffer | None, ledger: Ledger, reader: RewardReader, versions_per_turn: int
    ) -> None:
        self._buffer = buffer
        self._ledger = ledger
        self._reader = reader
        self._versions = versions_per_turn

    def chosen(self, fresh: Sequence[Rows], replayed: dict[int, Group], version: int) -> list[Rows]:
        """What is trained in the place of each. `replayed`: of the step, by the id of the replaced group; grows.

        `version`: at which the step's first microbatch is trained; the last update of the batch counts for the age.
        """
        return [self._instead(rows, replayed, version + self._versions - 1) or rows for rows in fresh]

    def _instead(self, rows: Rows, replayed: dict[int, Group], last: int) -> Rows | None:
        if self._buffer is None or any(rows.columns[ADVANTAGES]):
            return None
        taken = {group.group_id for group in replayed.values()}
        other = self._buffer.draw(last, (self._ledger.turn, rows.group_id), taken)
        if other is None:
            return None
        replayed[rows.group_id] = other
        return Rows(other, {ADVANTAGES: self._reader.advantages([other])[other.group_id]}, claimed=True)

    def store(self, trained: Sequence[Rows]) -> None:
        """After the step was applied: keep what is strong enough. Only now, so that no step draws its own groups."""
        if self._buffer is not None:
            for rows in trained:
                self._buffer.add(rows.group, rows.columns[ADVANTAGES])

    def sums(self, replayed: Mapping[int, Group]) -> dict[str, float]:
        """`replay/groups`, `replay/tokens`, `replay/size`, `replay/evicted` (so far): of this rank, to be added up."""
        if self._buffer is None:
            return {}
        found = {"replay/groups": float(len(replayed)), "replay/size": float(len(self._buffer))}
        found["replay/evicted"] = float(self._buffer.evicted)
        if replayed:
            found["replay/tokens"] = float(sum(int(t.mask.sum()) for g in replayed.values() for t in g.trajectories))
        return found
