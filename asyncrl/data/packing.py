"""Packing groups into microbatches of prefix trees.

    tree of a group: [prompt][completion 0][completion 1]...      packed: [tree][tree]...

A prompt stands once per microbatch that holds completions of its group. A completion keeps only the tokens that have to
run forward: those up to the last scored one, without that last one itself, which is only predicted. (So the hidden state
at `source` exists for every target, and nothing else is computed.) A fully masked completion needs no token at all; its
sequence is still counted, because sequence normalisers count it.

Where routes of experts were recorded, members share a prompt only where its routes are the same: another choice makes other
keys and values, and a weight update between two prefills, or a member from outside, may bring one. The routes of the prompt's
last token are not compared, if it has others: each member records them as it samples its first token, in batches of different
sizes, whose rounding alone may choose another expert. A shared prompt has those of the first completion behind it.

Trees are laid out greedily: groups in the order given, completions longest first, a new microbatch when the budget is
full. A completion that is longer than the budget gets a microbatch of its own. Which microbatch holds what changes no
gradient.

Shape legend as in `types`: T packed tokens, S scored tokens, B sequences, G members of a group, L tokens of a trajectory.
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

Columns: TypeAlias = Mapping[str, Column]  # of a group


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """One trajectory to be packed. `forward`: suffix tokens that run; `scored`: indices [s] into the trajectory."""

    trajectory: Trajectory
    advantage: float
    scored: npt.NDArray[np.int64]
    piece: slice | None  # `scored` as a slice, where it stands in one piece
    forward: int
    place: int  # in its group
    columns: Columns


@dataclass(slots=True)
class _Tree:
    """A prompt and the completions that share it in one microbatch. `prefix` is empty where no token is scored."""

    prefix: npt.NDArray[Any]
    # [L, layers, k] of the member that gave the prefix, where it has some.
    routes: npt.NDArray[Any] | None = None
    rows: list[_PackedRow] = field(default_factory=list)

    def takes(self, row: _PackedRow, prefix: npt.NDArray[Any]) -> bool:
        """Whether `row` can stand behind the prefix, or gives the first one."""
        if not prefix.size or not self.prefix.size:
            return True
        if not np.array_equal(prefix, self.prefix):
            return False  # an environment gave this member another prompt
        routes = row.trajectory.routed_experts
        if routes is None or self.routes is None:
            return True
        compared = max(prefix.size - 1, 1)
        return np.array_equal(routes[:compared], self.routes[:compared])


def pack_groups(
    groups: Sequence[tuple[Group, npt.ArrayLike]],
    tokens_per_microbatch: int,
    columns: Sequence[Columns] | None = None,
) -> list[Microbatch]:
    """`groups`: (group, advantages [G] in member order). Every trajectory lands in exactly one microbatch.

    columns: of each group the columns that were written for it (`data/store.py`): `REFERENCE` and `OLD`, [G] of [s], become
    `reference_logprobs` and `old_logprobs` where every group has them. What a token brings is copied once, to its place in
    the microbatch.

    A microbatch holds at most `tokens_per_microbatch` packed tokens, prompts included, unless a single prompt with one
    completion is longer. Errors: DataError where advantages and members do not fit, or a prompt token is to be scored
    that nothing predicts; ValueError for a budget below 1.
    """
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch is {tokens_per_microbatch}; it must be at least 1")
    microbatches: list[list[_Tree]] = []
    used = 0  # packed tokens of the open microbatch
    for (group, advantages), written in zip(groups, columns or [{}] * len(groups), strict=True):
        trees: list[_Tree] = []  # of this group, in the open microbatch
        for row in _rows(group, advantages, written):
            prefix = _prefix(row)
            tree = next((each for each in trees if each.takes(row, prefix)), None)
            cost = row.forward + (prefix.size if tree is None or tree.prefix.size == 0 else 0)
            if not microbatches or (cost and used + cost > tokens_per_microbatch):
                microbatches.append([])
                used, trees, tree = 0, [], None
                cost = row.forward + prefix.size
            if tree is None:
                tree = _Tree(row.trajectory.tokens[:0])
                microbatches[-1].append(tree)
                trees.append(tree)
            if prefix.size and tree.prefix.size == 0:
                tree.prefix, tree.routes = prefix, row.trajectory.routed_experts
            tree.rows.append(row)
            used += cost
    return [_assemble(trees) for trees in microbatches]


def _rows(group: Group, advantages: npt.ArrayLike, columns: Columns) -> list[_PackedRow]:
    """The group's trajectories, longest forward part first (equal lengths in member order)."""
    values = np.asarray(advantages, dtype=np.float64).reshape(-1)
    if values.size != len(group.trajectories):
        raise DataError(
            f"group {group.group_id}: {values.size} advantages for {len(group.trajectories)} trajectories; one each"
        )
    rows = []
    for place, (trajectory, advantage) in enumerate(zip(group.trajectories, values.tolist(), strict=True)):
        scored = np.flatnonzero(trajectory.mask)
        if scored.size and scored[0] < max(trajectory.prompt_length, 1):
            raise DataError(
                f"group {group.group_id}, member {trajectory.member}: token {int(scored[0])} has loss mask 1, but the "
                f"prompt has {trajectory.prompt_length} tokens; only what follows a prompt can be trained"
            )
        forward = int(scored[-1]) - trajectory.prompt_length if scored.size else 0
        rows.append(_PackedRow(trajectory, advantage, scored, _piece(scored), forward, place, columns))
    return sorted(rows, key=lambda row: -row.forward)


def _piece(scored: npt.NDArray[np.int64]) -> slice | None:
    if not scored.size or scored[-1] - scored[0] >= scored.size:
        return None
    return slice(int(scored[0]), int(scored[-1]) + 1)


def _prefix(row: _PackedRow) -> npt.NDArray[Any]:
    """A view of the prompt; nothing where no token is scored."""
    return row.trajectory.tokens[: row.trajectory.prompt_length if row.scored.size else 0]


def _assemble(trees: list[_Tree]) -> Microbatch:
    rows = [row for tree in trees for row in tree.rows]
    lengths = [row.scored.size for row in rows]
    packed = sum(tree.prefix.size + sum(row.forward for row in tree.rows) for tree in trees)
    tokens, positions = np.empty(packed, np.int64), np.empty(packed, np.int64)
    source = np.empty(sum(lengths), np.int64)
    prefixes: list[tuple[int, int]] = []
    suffixes: list[tuple[int, int, int]] = []
    cursor = scored = 0
    routes = _empty_routes(rows, packed)

    def lay(trajectory: Trajectory, start: int, length: int) -> None:
        nonlocal cursor
        end, own = cursor + length, slice(start, start + length)
        tokens[cursor:end] = trajectory.tokens[own]
        positions[cursor:end] = np.arange(start, start + length)
        if routes is not None and trajectory.routed_experts is not None:
            routes[cursor:end] = trajectory.routed_experts[own]
        cursor = end

    for index, tree in enumerate(trees):
        prompt, prefix_start = tree.prefix.size, cursor
        prefixes.append((prefix_start, prompt))
        first = next((row for row in tree.rows if row.scored.size), tree.rows[0])
        lay(first.trajectory, 0, prompt)
        for row in tree.rows:
            suffixes.append((cursor, row.forward, index))
            # Of the predicting token inside the suffix; -1: the last prompt token.
            offset = row.scored - prompt - 1
            last = prefix_start + prompt - 1
            source[scored : scored + offset.size] = np.where(offset >= 0, cursor + offset, last)
            scored += offset.size
            lay(row.trajectory, prompt, row.forward)
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
        old_logprobs=_written(rows, OLD),
        reference_logprobs=_written(rows, REFERENCE),
        routes=routes,
    )


def _empty_routes(rows: Sequence[_PackedRow], packed: int) -> npt.NDArray[Any] | None:
    """[T, layers, k] of -1, where a row has routes. Errors: DataError where rows are of different models."""
    found = [row.trajectory.routed_experts for row in rows if row.trajectory.routed_experts is not None]
    if not found:
        return None
    shapes = sorted({routes.shape[1:] for routes in found})
    if len(shapes) > 1:
        raise DataError(f"routes of one model have one shape behind the tokens; found {shapes}")
    return np.full((packed, *shapes[0]), MISSING, np.result_type(*found))


def _scored(rows: Sequence[_PackedRow], name: str, dtype: Any) -> npt.NDArray[Any]:
    """[S]: the scored tokens' part of a per-token column, each number copied once."""
    joined = np.empty(sum(row.scored.size for row in rows), dtype)
    start = 0
    for row in rows:
        column, part = getattr(row.trajectory, name), joined[start : start + row.scored.size]
        if row.piece is not None:
            # Unlike what follows this keeps the GIL for a short row: to get it back from a lane that trains takes up to
            # 5 ms, on the thread of the event loop.
            part[:] = column[row.piece]
        elif column.dtype == part.dtype:
            np.take(column, row.scored, out=part, mode="clip")  # any other mode would buffer
        else:
            part[:] = column[row.scored]
        start += part.size
    return joined


def _written(rows: Sequence[_PackedRow], name: str) -> npt.NDArray[np.float32] | None:
    """[S] of a written column; None where a row that has scored tokens lacks it."""
    scored = [row for row in rows if row.scored.size]
    if not scored or any(name not in row.columns for row in scored):
        return None
    for row in scored:
        if len(row.columns[name][row.place]) != row.scored.size:
            raise DataError(
                f"group {row.trajectory.group_id}, member {row.trajectory.member}: {len(row.columns[name][row.place])} values "
                f"of {name} for {row.scored.size} scored tokens; one each"
            )
    return np.concatenate([row.columns[name][row.place] for row in scored]).astype(np.float32, copy=False)
