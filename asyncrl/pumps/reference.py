"""The reference model's log-probs of whole groups, as a column of their rows.

They depend on the tokens alone, so nothing can make them stale; log-probs of the policy would be another matter, and stay
in the step. The reward workers are other processes: computed beside them, the lane does not wait for them, nor they for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import numpy as np

from asyncrl.data.packing import pack_groups
from asyncrl.data.store import REFERENCE
from asyncrl.ports import Trainer
from asyncrl.types import Float32Array, Group

from .book import GroupBook
from .failing import GroupsFailed, laid_to

_NONE = np.zeros(0, np.float32)


async def logprob_columns(
    trainer: Trainer, groups: Sequence[Group], tokens_per_microbatch: int, model: Literal["policy", "reference"]
) -> list[list[Float32Array]]:
    """[G] of [s] for each group: log-probs of its scored tokens. Errors: those of the trainer."""
    columns = [[_NONE] * len(group.trajectories) for group in groups]
    place = {group.group_id: index for index, group in enumerate(groups)}
    for batch in pack_groups([(group, np.zeros(len(group.trajectories))) for group in groups], tokens_per_microbatch):
        if not batch.scored:
            continue
        with laid_to(batch.group_ids.tolist()):
            logprobs_S = await trainer.compute_logprobs(batch, model)
        ends = np.cumsum(np.bincount(batch.sequence, minlength=batch.sequences))[:-1]
        parts = np.split(np.asarray(logprobs_S), ends)
        for group_id, member, part in zip(batch.group_ids.tolist(), batch.members.tolist(), parts, strict=True):
            columns[place[group_id]][member] = part
    return columns


class ReferenceAhead:
    """Computes the column while the rewards of a group are scored. Used from the loop."""

    def __init__(self, trainer: Trainer, book: GroupBook, tokens_per_microbatch: int, *, wanted: bool) -> None:
        self._trainer = trainer
        self._book = book
        self._size = tokens_per_microbatch
        self.wanted = wanted

    async def compute(self, group: Group) -> None:
        """All members of a group whose rows are in the store. Errors: those of the trainer."""
        with suppress(GroupsFailed):  # the step comes to the same error, where it is laid to the group
            [column] = await logprob_columns(self._trainer, [group], self._size, "reference")
            self._book.write(group.group_id, REFERENCE, column)
