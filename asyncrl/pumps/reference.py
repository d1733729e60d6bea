"""The reference model's log-probs of a group, computed while its rewards are still being scored.

They depend on the tokens alone, so nothing can make them stale; log-probs of the policy would be another matter, and stay
in the step. The reward workers are other processes: without this the lane would wait for them, and they for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from asyncrl.data.packing import pack_groups
from asyncrl.types import Float32Array, Group, Microbatch, Prompt, Ticket, Trajectory

from .pipeline import Rooms


class ReferenceAhead:
    """Columns of whole groups by (group id, member), from scoring until their step is over. Used from the loop."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        algorithm = rooms.config.algorithm
        needed = rooms.loss.needs_reference or rooms.reward_penalty is not None
        self.wanted = needed and algorithm.reference_ahead and rooms.score_groups
        self._columns: dict[int, dict[int, Float32Array]] = {}

    async def compute(self, ticket: Ticket, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """All members of a group. Errors: those of the trainer."""
        if not self.wanted:
            return
        group = Group(ticket, prompt, tuple(trajectories))
        size = self._rooms.config.train.tokens_per_microbatch
        columns: dict[int, Float32Array] = {}
        for batch in pack_groups([(group, np.zeros(len(trajectories)))], size):
            if not batch.scored:
                continue
            reference_S = await self._rooms.trainer.compute_logprobs(batch, "reference")
            for sequence, member in enumerate(batch.members.tolist()):
                columns[member] = reference_S[batch.sequence == sequence]
        self._columns[group.group_id] = columns

    async def column(self, batch: Microbatch) -> Float32Array:
        """[S] of a microbatch: what is known already, else computed now, for all of it."""
        lengths = np.bincount(batch.sequence, minlength=batch.sequences)
        parts = []
        for group_id, member, length in zip(batch.group_ids.tolist(), batch.members.tolist(), lengths, strict=True):
            part = self._columns.get(group_id, {}).get(member)
            if length and (part is None or part.size != length):
                return await self._rooms.trainer.compute_logprobs(batch, "reference")
            if length and part is not None:
                parts.append(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def keep_only(self, group_ids: Collection[int]) -> None:
        """Forget the groups that were trained or dropped."""
        self._columns = {g: columns for g, columns in self._columns.items() if g in group_ids}

    def __len__(self) -> int:
        return len(self._columns)
