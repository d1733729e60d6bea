"""Packs groups into microbatches of prefix trees.

    tree of a group: [prompt][completion 0][completion 1]...      microbatch: [tree][tree]...

A microbatch with completions of a group holds the prompt of the group once. Each completion ends before its last scored
token, because that token is only a target of the loss. A completion without scored tokens takes no room, but its sequence
is counted: losses that divide by the number of sequences need the count.

With recorded expert routes, members share a prompt only if the prompt's routes are equal: other experts make other keys and
values. Routes can differ if weights changed between two prefills, or if a member comes from an outside producer. The routes of
the last prompt token are not compared, unless the prompt has only one token. They come from the forward that samples the first
token: members run it in batches of different sizes, and rounding alone may choose another expert. A shared prompt gets the
routes of the first member behind it.

Groups are packed in the given order, completions longest first. A new microbatch is opened when the token budget is full. A
completion that is longer than the budget gets a microbatch of its own. The assignment to microbatches changes no gradient.

Shapes: T packed tokens, S scored tokens, s scored tokens of one trajectory, G members of a group, L tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.records.routes import MISSING
from asyncrl.types import Group, Microbatch, Trajectory

from .store import OLD, REFERENCE, Column

GroupColumns: TypeAlias = Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """One trajectory to be packed. `scored`: indices [s] of the scored tokens in the trajectory."""

    trajectory: Trajectory
    advantage: float
    scored: npt.NDArray[np.int64]
    scored_slice: slice | None  # set if `scored` has no gaps
    forward: int  # tokens behind the prompt that are packed
    index: int  # in its group
    columns: GroupColumns


@dataclass(slots=True)
class _Tree:
    """A prompt and the completions that share it in one microbatch. `prefix` is empty if no completion has scored tokens."""

    prefix: npt.NDArray[Any]
    # [L, layers, k]: recorded routes of the member whose prompt is the prefix.
    routes: npt.NDArray[Any] | None = None
    rows: list[_PackedRow] = field(default_factory=list)

    def can_add(self, row: _PackedRow, prefix: npt.NDArray[Any]) -> bool:
        """Whether the tree has no prefix yet, or its prefix and routes equal those of `row`."""
        if not prefix.size or not self.prefix.size:
            return True
        if not np.array_equal(prefix, self.prefix):
            # An environment may give each member another prompt.
            return False
        routes = row.trajectory.routed_experts
        if routes is None or self.routes is None:
            return True
        compared = max(prefix.size - 1, 1)
        return np.array_equal(routes[:compared], self.routes[:compared])


def pack_groups(
    groups: Sequence[tuple[Group, npt.ArrayLike]],
    tokens_per_microbatch: int,
    columns: Sequence[GroupColumns] | None = None,
) -> list[Microbatch]:
    """Microbatches of these groups. Each trajectory is in exactly one microbatch.

    groups: pairs of a group and its advantages [G], in member order.
    columns: one mapping per group, with columns from `data/store.py`. `REFERENCE` and `OLD`, each G arrays [s], become
    `reference_logprobs` and `old_logprobs` of a microbatch in which every scored row has the column.

    A microbatch holds at most `tokens_per_microbatch` packed tokens, prompts included, unless a prompt with a single
    completion is longer. Errors: DataError for a number of advantages other than G, or a scored prompt token. ValueError
    for a budget below 1.
    """
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch is {tokens_per_microbatch}; it must be at least 1")
    microbatches: list[list[_Tree]] = []
    used = 0  # packed tokens of the open microbatch; a row adds `added`
    for (group, advantages), group_columns in zip(groups, columns or [{}] * len(groups), strict=True):
        trees: list[_Tree] = []  # of this group, in the open microbatch
        for row in _rows(group, advantages, group_columns):
            prefix = _prefix(row)
            tree = next((tree for tree in trees if tree.can_add(row, prefix)), None)
            added = row.forward + (prefix.size if tree is None or tree.prefix.size == 0 else 0)
            if not microbatches or (added and used + added > tokens_per_microbatch):
                microbatches.append([])
                used, trees, tree = 0, [], None
                added = row.forward + prefix.size
            if tree is None:
                tree = _Tree(row.trajectory.tokens[:0])
                microbatches[-1].append(tree)
                trees.append(tree)
            if prefix.size and tree.prefix.size == 0:
                tree.prefix, tree.routes = prefix, row.trajectory.routed_experts
            tree.rows.append(row)
            used += added
    return [_assemble(trees) for trees in microbatches]


def _rows(group: Group, advantages: npt.ArrayLike, columns: GroupColumns) -> list[_PackedRow]:
    """The trajectories of the group, sorted by `forward`, longest first; ties in member order."""
    values = np.asarray(advantages, dtype=np.float64).reshape(-1)
    if values.size != len(group.trajectories):
        raise DataError(
            f"group {group.group_id}: {values.size} advantages for {len(group.trajectories)} trajectories; give one each"
        )
    rows = []
    for index, (trajectory, advantage) in enumerate(zip(group.trajectories, values.tolist(), strict=True)):
        if trajectory.branches is not None:
            raise DataError(f"group {group.group_id}, member {trajectory.member}: branches cannot be packed yet")
        scored = np.flatnonzero(trajectory.mask)
        if scored.size and scored[0] < max(trajectory.prompt_length, 1):
            raise DataError(
                f"group {group.group_id}, member {trajectory.member}: token {int(scored[0])} has loss mask 1, but the "
                f"prompt has {trajectory.prompt_length} tokens; only tokens behind a prompt can be trained: set its mask to 0"
            )
        forward = int(scored[-1]) - trajectory.prompt_length if scored.size else 0
        rows.append(_PackedRow(trajectory, advantage, scored, _as_slice(scored), forward, index, columns))
    return sorted(rows, key=lambda row: -row.forward)


def _as_slice(scored: npt.NDArray[np.int64]) -> slice | None:
    if not scored.size or scored[-1] - scored[0] >= scored.size:
        return None
    return slice(int(scored[0]), int(scored[-1]) + 1)


def _prefix(row: _PackedRow) -> npt.NDArray[Any]:
    """A view of the prompt, which is empty if the row has no scored token."""
    return row.trajectory.tokens[: row.trajectory.prompt_length if row.scored.size else 0]


def _assemble(trees: list[_Tree]) -> Microbatch:
    rows = [row for tree in trees for row in tree.rows]
    lengths = [row.scored.size for row in rows]
    packed = sum(tree.prefix.size + sum(row.forward for row in tree.rows) for tree in trees)
    tokens, positions = np.empty(packed, np.int64), np.empty(packed, np.int64)
    source = np.empty(sum(lengths), np.int64)
    prefixes: list[tuple[int, int]] = []
    suffixes: list[tuple[int, int, int]] = []
    cursor = source_end = 0
    routes = _empty_routes(rows, packed)

    def append(trajectory: Trajectory, start: int, length: int) -> None:
        nonlocal cursor
        end, source_slice = cursor + length, slice(start, start + length)
        tokens[cursor:end] = trajectory.tokens[source_slice]
        positions[cursor:end] = np.arange(start, start + length)
        if routes is not None and trajectory.routed_experts is not None:
            routes[cursor:end] = trajectory.routed_experts[source_slice]
        cursor = end

    for index, tree in enumerate(trees):
        prefix_length, prefix_start = tree.prefix.size, cursor
        prefixes.append((prefix_start, prefix_length))
        prefix_row = next((row for row in tree.rows if row.scored.size), tree.rows[0])
        append(prefix_row.trajectory, 0, prefix_length)
        for row in tree.rows:
            suffixes.append((cursor, row.forward, index))
            # The token before a scored token predicts the scored token. Offset -1: that is the last token of the prompt.
            offset = row.scored - prefix_length - 1
            last_prefix_token = prefix_start + prefix_length - 1
            source[source_end : source_end + offset.size] = np.where(offset >= 0, cursor + offset, last_prefix_token)
            source_end += offset.size
            append(row.trajectory, prefix_length, row.forward)
    prefix_table = np.array(prefixes, np.int64).reshape(-1, 2)
    suffix_table = np.array(suffixes, np.int64).reshape(-1, 3)
    return Microbatch(
        tokens=tokens,
        positions=positions,
        prefix_start=prefix_table[:, 0].copy(),
        prefix_length=prefix_table[:, 1].copy(),
        suffix_start=suffix_table[:, 0].copy(),
        suffix_length=suffix_table[:, 1].copy(),
        suffix_tree=suffix_table[:, 2].copy(),
        source=source,
        target=_scored(rows, "tokens", np.int64),
        sequence=np.repeat(np.arange(len(rows), dtype=np.int64), lengths),
        sampler_logprobs=_scored(rows, "logprobs", np.float32),
        temperature=np.repeat(np.array([row.trajectory.temperature for row in rows], np.float32), lengths),
        advantages=np.repeat(np.array([row.advantage for row in rows], np.float32), lengths),
        versions=_scored(rows, "versions", np.int32),
        group_ids=np.array([row.trajectory.group_id for row in rows], np.int64),
        members=np.array([row.trajectory.member for row in rows], np.int64),
        old_logprobs=_stored_column(rows, OLD),
        reference_logprobs=_stored_column(rows, REFERENCE),
        routes=routes,
    )


def _empty_routes(rows: Sequence[_PackedRow], packed: int) -> npt.NDArray[Any] | None:
    """[T, layers, k] filled with `MISSING`, or None without routes. Errors: DataError if rows differ in layers or k."""
    recorded = [row.trajectory.routed_experts for row in rows if row.trajectory.routed_experts is not None]
    if not recorded:
        return None
    shapes = sorted({routes.shape[1:] for routes in recorded})
    if len(shapes) > 1:
        raise DataError(f"routes must have one shape [tokens, layers, k] in all rows; found {shapes} for layers and k")
    return np.full((packed, *shapes[0]), MISSING, np.result_type(*recorded))


def _scored(rows: Sequence[_PackedRow], name: str, dtype: Any) -> npt.NDArray[Any]:
    """[S]: the values of a per-token field of the trajectories at the scored tokens."""
    joined = np.empty(sum(row.scored.size for row in rows), dtype)
    start = 0
    for row in rows:
        column, part = getattr(row.trajectory, name), joined[start : start + row.scored.size]
        if row.scored_slice is not None:
            # A copy of a short slice does not release the GIL, but np.take does. A thread that trains may then keep the
            # GIL for 5 ms, and the event loop, which runs on this thread, would wait.
            part[:] = column[row.scored_slice]
        elif column.dtype == part.dtype:
            # Any other mode allocates a buffer.
            np.take(column, row.scored, out=part, mode="clip")
        else:
            part[:] = column[row.scored]
        start += part.size
    return joined


def _stored_column(rows: Sequence[_PackedRow], name: str) -> npt.NDArray[np.float32] | None:
    """[S]: a column of the store. None if a row with scored tokens lacks the column."""
    scored = [row for row in rows if row.scored.size]
    if not scored or any(name not in row.columns for row in scored):
        return None
    for row in scored:
        values = row.columns[name][row.index]
        if len(values) != row.scored.size:
            raise DataError(
                f"group {row.trajectory.group_id}, member {row.trajectory.member}: {len(values)} values of {name} "
                f"for {row.scored.size} scored tokens; write one value per scored token"
            )
    return np.concatenate([row.columns[name][row.index] for row in scored]).astype(np.float32, copy=False)
