"""The replay buffer keeps groups with a strong learning signal, to replace groups without a signal in later steps.

    priority of a group = sum |advantage| x sum over reward components of std(component)

Guarantees
* A group of priority 0 is not stored. The buffer holds at most `max_groups` groups. A full buffer replaces its group of the
  lowest priority, and only by a group of a higher priority.
* `draw` returns a group with the tokens, log-probs and versions of its sampling. When the trainer replays the group, it computes
  old log-probs and importance ratios anew.
* `draw` evicts groups with a token that is more than `max_age` versions old.
* A draw depends only on the seed, the key and the groups in the buffer. So a resumed run draws the same groups.

Texts and columns of a group are not kept, because training does not need them.
Call the methods on the thread of the event loop. None awaits. `encode` and `load` are slow. Call `encode` on another thread, and
`load` too, if no other method was called before.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.records.check import SILENT
from asyncrl.types import FinishReason, Group, Prompt, RoutesArray, Ticket, Trajectory

from .store import copy_arrays

MIN_WEIGHT = 1e-8  # of a group in a draw
_COLUMNS: dict[str, npt.DTypeLike] = {
    "tokens": "<i4",
    "mask": "|b1",
    "logprobs": "<f4",
    "sampled_logprobs": "<f4",
    "versions": "<i4",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A group in the buffer, without texts and columns, and its priority. Of metadata only `SILENT` (records/check.py) is kept."""

    group: Group
    priority: float


def priority(group: Group, advantages: npt.ArrayLike) -> float:
    """The priority by the formula above. The std of a component is unbiased, over the members that have the component."""
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
        """`max_age`: policy versions between the oldest token of a group and its next training. Errors: ValueError."""
        if max_groups < 1 or max_age < 0:
            raise ValueError(f"replay: max_groups {max_groups} must be at least 1 and max_age {max_age} at least 0")
        self._max_groups, self._max_age, self._seed = max_groups, max_age, seed
        self._stored: dict[int, Stored] = {}  # by group id, oldest first
        self.evicted = 0  # groups that were too old

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._stored

    def add(self, group: Group, advantages: npt.ArrayLike) -> bool:
        """Store a trained group. False: its priority is 0, no token is scored, or the buffer is full of groups of
        the same or a higher priority."""
        value = priority(group, advantages)
        if value <= 0 or not any(t.mask.any() for t in group.trajectories):
            return False
        if group.group_id not in self._stored and len(self._stored) >= self._max_groups:
            weakest = min(self._stored, key=lambda group_id: self._stored[group_id].priority)
            if value <= self._stored[weakest].priority:
                return False
            del self._stored[weakest]
        self._stored[group.group_id] = Stored(_stripped(group), value)
        return True

    def draw(self, version: int, key: Sequence[int], without: Collection[int] = ()) -> Group | None:
        """A random group, weighted by priority, which the trainer may train at `version`. The group stays in the buffer.

        `key`: numbers >= 0, different for each draw. `without`: group ids that are not drawn. None: no group is left.
        """
        self.evict(version)
        candidates = [stored for group_id, stored in self._stored.items() if group_id not in without]
        if not candidates:
            return None
        weights = np.maximum([stored.priority for stored in candidates], MIN_WEIGHT)
        point = np.random.default_rng([self._seed, *key]).random() * weights.sum()
        index = int(np.searchsorted(np.cumsum(weights), point, side="right"))
        # By rounding, `point` can reach the last sum, and `index` the number of candidates.
        return candidates[min(index, len(candidates) - 1)].group

    def evict(self, version: int) -> int:
        """Remove groups with a token older than `max_age` at `version`. Returns the number of removed groups."""
        old = [g for g, stored in self._stored.items() if version - stored.group.oldest_version > self._max_age]
        for group_id in old:
            del self._stored[group_id]
        self.evicted += len(old)
        return len(old)

    def snapshot(self) -> tuple[Stored, ...]:
        """The groups in the buffer, as an immutable copy that any thread may read."""
        return tuple(self._stored.values())

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the content to the result of `encode`. A smaller buffer keeps the highest priorities. Errors: DataError."""
        stored = decode(state)
        strongest = sorted(range(len(stored)), key=lambda index: -stored[index].priority)[: self._max_groups]
        # Sorted again: the oldest group is first.
        self._stored = {stored[index].group.group_id: stored[index] for index in sorted(strongest)}


def encode(stored: Sequence[Stored]) -> dict[str, Any]:
    """A JSON value. Per-token columns of all trajectories are concatenated, compressed by zlib and encoded in base64."""
    rows = [t for s in stored for t in s.group.trajectories]
    columns = {}
    for name, dtype in _COLUMNS.items():
        joined = np.concatenate([getattr(t, name) for t in rows]) if rows else np.zeros(0)
        columns[name] = base64.b64encode(zlib.compress(joined.astype(dtype).tobytes(), 1)).decode()
    return {
        "groups": [
            [s.group.group_id, s.group.ticket.admitted, s.group.ticket.deadline, s.group.prompt.epoch, s.priority]
            for s in stored
        ],
        "sizes": [len(s.group.trajectories) for s in stored],
        "lengths": [int(t.tokens.size) for t in rows],
        "members": [
            [t.prompt_length, t.temperature, str(t.finish_reason), t.reward, dict(t.components), _is_silent(t)]
            for t in rows
        ],
        "columns": columns,
        "trees": [_pack_tree(t) for t in rows],
        "routes": [None if t.routed_experts is None else _pack(t.routed_experts) for t in rows],
    }


def decode(state: Mapping[str, Any]) -> list[Stored]:
    """The inverse of `encode`. Errors: DataError for a damaged or incomplete value."""
    try:
        lengths = np.array(state["lengths"], dtype=np.int64)
        columns = {
            name: np.frombuffer(zlib.decompress(base64.b64decode(state["columns"][name])), dtype)
            for name, dtype in _COLUMNS.items()
        }
        if any(column.size != lengths.sum() for column in columns.values()) or sum(state["sizes"]) != lengths.size:
            raise ValueError("the columns have another number of tokens than `lengths`, or `sizes` another sum of rows")
        starts = np.cumsum(lengths) - lengths
        stored, row = [], 0
        for (group_id, admitted, deadline, epoch, value), size in zip(state["groups"], state["sizes"], strict=True):
            trajectories = []
            for member in range(size):
                tokens = slice(int(starts[row]), int(starts[row] + lengths[row]))
                arrays: dict[str, Any] = {name: column[tokens].copy() for name, column in columns.items()}
                # Buffers of old checkpoints have no routes.
                arrays["routed_experts"] = _unpack(state["routes"][row]) if "routes" in state else None
                # Buffers of old checkpoints have no trees.
                arrays |= _unpack_tree(state["trees"][row]) if "trees" in state else {}
                trajectories.append(_trajectory(group_id, member, size, state["members"][row], arrays))
                row += 1
            first = trajectories[0]
            prompt = Prompt(group_id, first.tokens[: first.prompt_length], "", {}, epoch)
            stored.append(Stored(Group(Ticket(group_id, admitted, deadline), prompt, tuple(trajectories)), value))
        return stored
    except (KeyError, IndexError, ValueError, TypeError, zlib.error) as error:
        raise DataError(
            f"the saved replay buffer is damaged: {type(error).__name__}: {error}; resume from another checkpoint"
        ) from error


def _pack(routes: RoutesArray) -> list[Any]:
    return [routes.dtype.str, list(routes.shape), base64.b64encode(zlib.compress(routes.tobytes(), 1)).decode()]


def _unpack(packed: Sequence[Any] | None) -> RoutesArray | None:
    if packed is None:
        return None
    dtype, shape, text = packed
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape).copy()


def _pack_tree(t: Trajectory) -> list[Any]:
    return [None if array is None else array.tolist() for array in (t.branches, t.turns)] + [t.turn_rewards]


def _unpack_tree(packed: Sequence[Any]) -> dict[str, Any]:
    branches, turns, rewards = packed
    return {
        "branches": None if branches is None else np.array(branches, np.int32).reshape(-1, 2),
        "turns": None if turns is None else np.array(turns, np.int32),
        "turn_rewards": None if rewards is None else tuple(rewards),
    }


def _trajectory(group_id: int, member: int, size: int, scalars: Sequence[Any], arrays: dict[str, Any]) -> Trajectory:
    prompt_length, temperature, reason, reward, components, silent = scalars
    return Trajectory(
        group_id=group_id,
        member=member,
        group_size=size,
        prompt_length=prompt_length,
        temperature=temperature,
        finish_reason=FinishReason(reason),
        reward=reward,
        components=components,
        metadata={SILENT: True} if silent else {},
        **arrays,
    )


def _is_silent(trajectory: Trajectory) -> bool:
    return bool(trajectory.metadata.get(SILENT))


def _stripped(group: Group) -> Group:
    """A copy of the group as a checkpoint would restore the group. Arrays are copied, so the store can free its rows."""
    trajectories = tuple(
        replace(t, completion="", metadata={SILENT: True} if _is_silent(t) else {}, **copy_arrays(t))
        for t in group.trajectories
    )
    first = trajectories[0]
    prompt = Prompt(group.group_id, first.tokens[: first.prompt_length], "", {}, group.prompt.epoch)
    return Group(group.ticket, prompt, trajectories)
