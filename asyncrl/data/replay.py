"""The replay buffer: groups with a strong learning signal, kept to take the place of groups that have none.

    priority of a group = sum |advantage| x sum over components of std(component)        0: never stored

Guarantees
* at most `max_groups` groups; a full buffer replaces its weakest one, and only by a strictly stronger one;
* a group is handed out with the tokens, the sampler's log-probs and the versions it was sampled with: old log-probs and
  importance ratios are computed anew from those, together, when it is trained again;
* never one that holds a token older than `max_age` versions at the time of its training; such groups are thrown away;
* what a draw gives depends on (seed, key) and the content alone, so a resumed run draws what it would have drawn.

Against axolotl's buffer: prompts are not padded, so nothing is misaligned; a step never stores a group before its own
draws; one step gets a group once; the age is bounded. Texts and columns are not kept: nothing trains on them.

Used from the loop's thread; `encode` of a `snapshot()` belongs into a thread. No method waits.
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

from .store import copied

SMALLEST = 1e-8  # of a priority, where groups are drawn in proportion to it
_COLUMNS: dict[str, npt.DTypeLike] = {
    "tokens": "<i4",
    "mask": "|b1",
    "logprobs": "<f4",
    "sampled_logprobs": "<f4",
    "versions": "<i4",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A group in the buffer, without texts and columns, and its priority."""

    group: Group
    priority: float


def priority(group: Group, advantages: npt.ArrayLike) -> float:
    """See the module docstring. The std is unbiased over the members to which the component applies."""
    total = float(np.abs(np.asarray(advantages, dtype=np.float64)).sum())
    names = {name for t in group.trajectories for name in t.components}
    columns = [[t.components.get(name) for t in group.trajectories] for name in sorted(names)]
    spread = 0.0
    for column in columns or [[t.reward for t in group.trajectories]]:
        known = np.array([value for value in column if value is not None], dtype=np.float64)
        if known.size >= 2 and np.ptp(known) > 0:
            spread += float(known.std(ddof=1))
    return total * spread


class ReplayBuffer:
    """See the module docstring."""

    def __init__(self, max_groups: int, max_age: int, seed: int = 0) -> None:
        """`max_groups` 1 or more; `max_age` in policy versions, at the time of training."""
        if max_groups < 1 or max_age < 0:
            raise ValueError(f"replay: max_groups {max_groups} must be at least 1 and max_age {max_age} at least 0")
        self._max_groups, self._max_age, self._seed = max_groups, max_age, seed
        self._stored: dict[int, Stored] = {}  # by group id, in the order of their arrival
        self.evicted = 0  # for their age

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._stored

    def add(self, group: Group, advantages: npt.ArrayLike) -> bool:
        """Offer a trained group. False: without a signal, or not stronger than the weakest of a full buffer."""
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
        """One group, in proportion to its priority, that may still be trained at `version`. It stays in the buffer.

        `key`: numbers >= 0 that name the draw. `without`: group ids that the step has already. None: there is none.
        """
        self.evict(version)
        candidates = [stored for group_id, stored in self._stored.items() if group_id not in without]
        if not candidates:
            return None
        weights = np.maximum([stored.priority for stored in candidates], SMALLEST)
        place = np.random.default_rng([self._seed, *key]).random() * weights.sum()
        index = int(np.searchsorted(np.cumsum(weights), place, side="right"))
        return candidates[min(index, len(candidates) - 1)].group

    def evict(self, version: int) -> int:
        """Throw away what would be older than `max_age` at `version`. How many that were."""
        old = [g for g, stored in self._stored.items() if version - stored.group.oldest_version > self._max_age]
        for group_id in old:
            del self._stored[group_id]
        self.evicted += len(old)
        return len(old)

    def snapshot(self) -> tuple[Stored, ...]:
        """The content at this moment; nothing in it changes afterwards."""
        return tuple(self._stored.values())

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `encode`; the strongest ones where the buffer is smaller now. Errors: DataError."""
        stored = decode(state)
        strongest = sorted(range(len(stored)), key=lambda place: -stored[place].priority)[: self._max_groups]
        self._stored = {stored[place].group.group_id: stored[place] for place in sorted(strongest)}


def encode(stored: Sequence[Stored]) -> dict[str, Any]:
    """JSON types alone: scalars as lists, per-token columns of all trajectories joined, compressed, in base64."""
    rows = [t for s in stored for t in s.group.trajectories]
    columns = {}
    for name, dtype in _COLUMNS.items():
        joined = np.concatenate([getattr(t, name) for t in rows]) if rows else np.zeros(0)
        columns[name] = base64.b64encode(zlib.compress(joined.astype(dtype).tobytes(), 1)).decode()
    return {
        "groups": [
            [
                s.group.ticket.group_id,
                s.group.ticket.admitted,
                s.group.ticket.deadline,
                s.group.prompt.epoch,
                s.priority,
            ]
            for s in stored
        ],
        "sizes": [len(s.group.trajectories) for s in stored],
        "lengths": [int(t.tokens.size) for t in rows],
        "members": [
            [
                t.prompt_length,
                t.temperature,
                str(t.finish_reason),
                t.reward,
                dict(t.components),
                bool(t.metadata.get(SILENT)),
            ]
            for t in rows
        ],
        "columns": columns,
        "routes": [None if t.routed_experts is None else _packed(t.routed_experts) for t in rows],
    }


def decode(state: Mapping[str, Any]) -> list[Stored]:
    """Errors: DataError where the parts do not fit together."""
    try:
        lengths = np.array(state["lengths"], dtype=np.int64)
        columns = {
            name: np.frombuffer(zlib.decompress(base64.b64decode(state["columns"][name])), dtype)
            for name, dtype in _COLUMNS.items()
        }
        if any(column.size != lengths.sum() for column in columns.values()) or sum(state["sizes"]) != lengths.size:
            raise ValueError("columns and lengths differ")
        starts = np.cumsum(lengths) - lengths
        stored, row = [], 0
        for (group_id, admitted, deadline, epoch, value), size in zip(state["groups"], state["sizes"], strict=True):
            trajectories = []
            for member in range(size):
                place = slice(int(starts[row]), int(starts[row] + lengths[row]))
                parts: dict[str, Any] = {name: column[place].copy() for name, column in columns.items()}
                parts["routed_experts"] = _unpacked(state.get("routes", {row: None})[row])
                trajectories.append(_trajectory(group_id, member, size, state["members"][row], parts))
                row += 1
            first = trajectories[0]
            prompt = Prompt(group_id, first.tokens[: first.prompt_length], "", {}, epoch)
            stored.append(Stored(Group(Ticket(group_id, admitted, deadline), prompt, tuple(trajectories)), value))
        return stored
    except (KeyError, IndexError, ValueError, TypeError, zlib.error) as error:
        raise DataError(f"the saved replay buffer cannot be read: {type(error).__name__}: {error}") from error


def _packed(routes: RoutesArray) -> list[Any]:
    return [routes.dtype.str, list(routes.shape), base64.b64encode(zlib.compress(routes.tobytes(), 1)).decode()]


def _unpacked(packed: Sequence[Any] | None) -> RoutesArray | None:
    if packed is None:
        return None
    kind, shape, text = packed
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind).reshape(shape).copy()


def _trajectory(group_id: int, member: int, size: int, scalars: Sequence[Any], parts: dict[str, Any]) -> Trajectory:
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
        **parts,
    )


def _stripped(group: Group) -> Group:
    """Without texts, columns and metadata: what a checkpoint would give back. Copies: the rows it came from are freed."""
    trajectories = tuple(
        replace(
            t,
            completion="",
            metadata={SILENT: True} if t.metadata.get(SILENT) else {},
            **copied(t),
        )
        for t in group.trajectories
    )
    first = trajectories[0]
    prompt = Prompt(group.group_id, first.tokens[: first.prompt_length], "", {}, group.prompt.epoch)
    return Group(group.ticket, prompt, trajectories)
