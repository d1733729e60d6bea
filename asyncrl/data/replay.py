"""The replay buffer keeps groups with a strong learning signal, to replace groups without a signal in later steps.

    priority of a group = (sum of |advantage| over the members) x (sum over the reward components of the std over the members)

Guarantees
* A group of priority 0 is not stored. The buffer holds at most `max_groups` groups. A full buffer replaces its group of the
  lowest priority, and only by a group of a higher priority.
* `draw` returns a group with the tokens, log-probs and versions of its sampling. The trainer computes old log-probs and importance
  ratios of a replayed group anew.
* `draw` removes groups with a trained token that is more than `max_age` versions old. An unknown version counts as -1.
* A draw depends only on its arguments, the seed and the groups in the buffer. So a resumed run draws the same groups.

Texts and columns of a group are not kept, because training does not need them.
Call the methods on the thread of the event loop. No method awaits. The function `encode` is slow: call it on another thread.
`load` is slow, too: it may run on another thread, before the first call of any other method.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.records.check import SILENT
from asyncrl.records.read import read
from asyncrl.records.trajectories import draft_of, group_metadata, trajectories_of
from asyncrl.records.write import plan
from asyncrl.types import Group, Prompt, Ticket

from .store import copy_arrays

MIN_WEIGHT = 1e-8  # smallest weight of a group in a draw


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group in the buffer, without texts and columns, and its priority. Of metadata only `SILENT` (records/check.py) is kept."""

    group: Group
    priority: float


def priority(group: Group, advantages: npt.ArrayLike) -> float:
    """The priority by the formula above. The std of a component is over the members that have it, with Bessel's correction."""
    total = float(np.abs(np.asarray(advantages, dtype=np.float64)).sum())
    names = {name for t in group.trajectories for name in t.components}
    columns = [[t.components.get(name) for t in group.trajectories] for name in sorted(names)]
    spread = 0.0
    # Without components the reward itself is the only column.
    for column in columns or [[t.reward for t in group.trajectories]]:
        values = np.array([value for value in column if value is not None], dtype=np.float64)
        if values.size >= 2 and np.ptp(values) > 0:
            spread += float(values.std(ddof=1))
    return total * spread


class ReplayBuffer:
    """At most `max_groups` groups of a high priority: see the module docstring."""

    def __init__(self, max_groups: int, max_age: int, seed: int = 0) -> None:
        """`max_age`: largest age, in policy versions, of the oldest token of a group that is drawn."""
        self._max_groups, self._max_age, self._seed = max_groups, max_age, seed
        self._stored: dict[int, BufferedGroup] = {}  # by group id, the first stored first
        self.evicted = 0  # groups removed because they were too old

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, group: Group, advantages: npt.ArrayLike) -> bool:
        """Store a trained group. False: its priority is 0, no token has mask 1, or the buffer is full of groups of
        the same or a higher priority."""
        value = priority(group, advantages)
        if value <= 0 or not any(t.mask.any() for t in group.trajectories):
            return False
        if group.group_id not in self._stored and len(self._stored) >= self._max_groups:
            weakest = min(self._stored, key=lambda group_id: self._stored[group_id].priority)
            if value <= self._stored[weakest].priority:
                return False
            del self._stored[weakest]
        self._stored[group.group_id] = BufferedGroup(_stripped(group), value)
        return True

    def remove(self, group_ids: Iterable[int]) -> None:
        """Remove groups. Ids that the buffer lacks have no effect."""
        for group_id in group_ids:
            self._stored.pop(group_id, None)

    def draw(self, version: int, key: Sequence[int], without: Collection[int] = ()) -> Group | None:
        """A random group, weighted by priority, without tokens too old for training at `version`. The group stays in the buffer.

        `key`: integers >= 0, different for each draw. `without`: group ids that are not drawn. Returns None if no group is left.
        """
        old = [g for g, stored in self._stored.items() if version - stored.group.oldest_version > self._max_age]
        self.remove(old)
        self.evicted += len(old)
        candidates = [stored for group_id, stored in self._stored.items() if group_id not in without]
        if not candidates:
            return None
        weights = np.maximum([stored.priority for stored in candidates], MIN_WEIGHT)
        index = np.random.default_rng([self._seed, *key]).choice(len(candidates), p=weights / weights.sum())
        return candidates[int(index)].group

    def snapshot(self) -> tuple[BufferedGroup, ...]:
        """The groups in the buffer, as an immutable copy that any thread may read."""
        return tuple(self._stored.values())

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the content to the result of `encode`. A smaller buffer keeps the groups of highest priority. Errors: DataError."""
        stored = decode(state)
        strongest = sorted(range(len(stored)), key=lambda index: -stored[index].priority)[: self._max_groups]
        # In the saved order again, so that the group that was stored first is first.
        self._stored = {stored[index].group.group_id: stored[index] for index in sorted(strongest)}


def encode(stored: Sequence[BufferedGroup]) -> dict[str, Any]:
    """A JSON value: for each group a record (records/layout.py), compressed by zlib and encoded in base64."""
    return {"groups": [_encode_group(s) for s in stored]}


def decode(state: Mapping[str, Any]) -> list[BufferedGroup]:
    """The inverse of `encode`. Errors: DataError for a damaged value."""
    try:
        return [_decode_group(text) for text in state["groups"]]
    except (KeyError, ValueError, TypeError, zlib.error) as error:
        raise DataError(
            f"the saved replay buffer is damaged, or of another version of asyncrl: {type(error).__name__}: {error}; resume from "
            "another checkpoint, or with replay.size=0"
        ) from error


def _encode_group(stored: BufferedGroup) -> str:
    group, ticket = stored.group, stored.group.ticket
    kept: dict[str, Any] = {"oldest": ticket.oldest, "deadline": ticket.deadline}
    kept |= {"epoch": group.prompt.epoch, "priority": stored.priority}
    record = plan(draft_of(group.group_id, group.trajectories, 0, kept)).record()
    return base64.b64encode(zlib.compress(record, 1)).decode()


def _decode_group(text: str) -> BufferedGroup:
    record = read(zlib.decompress(base64.b64decode(text)))
    kept, members = group_metadata(record), tuple(trajectories_of(record))
    ticket = Ticket(record.group, kept["oldest"], kept["deadline"])
    prompt = Prompt(record.group, members[0].tokens[: members[0].prompt_length], "", {}, kept["epoch"])
    return BufferedGroup(Group(ticket, prompt, members), kept["priority"])


def _stripped(group: Group) -> Group:
    """A copy of the group as a checkpoint would restore the group. Arrays are copied, so the store can free its rows."""
    trajectories = tuple(
        replace(t, completion="", metadata={SILENT: True} if t.metadata.get(SILENT) else {}, **copy_arrays(t))
        for t in group.trajectories
    )
    first = trajectories[0]
    prompt = Prompt(group.group_id, first.tokens[: first.prompt_length], "", {}, group.prompt.epoch)
    return Group(group.ticket, prompt, trajectories)
