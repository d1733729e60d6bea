"""Packing groups into microbatches of prefix trees.

    tree of a group: [prompt][completion 0][completion 1]...      packed: [tree][tree]...

A prompt stands once per microbatch that holds completions of its group. A completion keeps only the tokens that have to
run forward: those up to the last scored one, without that last one itself, which is only predicted. (So the hidden state
at `source` exists for every target, and nothing else is computed.) A fully masked completion needs no token at all; its
sequence is still counted, because sequence normalisers count it.

Trees are laid out greedily: groups in the order given, completions longest first, a new microbatch when the budget is
full. A completion that is longer than the budget gets a microbatch of its own. Which microbatch holds what changes no
gradient (SEMANTICS §1.2).

Shape legend as in `types`: T packed tokens, S scored tokens, B sequences, G members of a group, L tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.types import Group, Microbatch, Trajectory


@dataclass(frozen=True, slots=True)
class _Row:
    """One trajectory to be packed. `forward`: suffix tokens that run; `scored`: indices [s] into the trajectory."""

    trajectory: Trajectory
    advantage: float
    scored: npt.NDArray[np.int64]
    forward: int


@dataclass(slots=True)
class _Tree:
    """A prompt and the completions that share it in one microbatch. `prefix` is empty where no token is scored."""

    prefix: npt.NDArray[np.int64]
    rows: list[_Row] = field(default_factory=list)


def pack_groups(groups: Sequence[tuple[Group, npt.ArrayLike]], tokens_per_microbatch: int) -> list[Microbatch]:
    """`groups`: (group, advantages [G] in member order). Every trajectory lands in exactly one microbatch.

    A microbatch holds at most `tokens_per_microbatch` packed tokens, prompts included, unless a single prompt with one
    completion is longer. Errors: DataError where advantages and members do not fit, or a prompt token is to be scored
    that nothing predicts; ValueError for a budget below 1.
    """
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch is {tokens_per_microbatch}; it must be at least 1")
    microbatches: list[list[_Tree]] = []
    used = 0  # packed tokens of the open microbatch
    for group, advantages in groups:
        tree: _Tree | None = None
        for row in _rows(group, advantages):
            prefix = _prefix(row)
            if tree is not None and prefix.size and tree.prefix.size and not np.array_equal(prefix, tree.prefix):
                tree = None  # an environment gave this member another prompt: nothing can be shared
            cost = row.forward + (prefix.size if tree is None or tree.prefix.size == 0 else 0)
            if not microbatches or (cost and used + cost > tokens_per_microbatch):
                microbatches.append([])
                used, tree = 0, None
                cost = row.forward + prefix.size
            if tree is None:
                tree = _Tree(np.zeros(0, np.int64))
                microbatches[-1].append(tree)
            if prefix.size and tree.prefix.size == 0:
                tree.prefix = prefix
            tree.rows.append(row)
            used += cost
    return [_assemble(trees) for trees in microbatches]


def _rows(group: Group, advantages: npt.ArrayLike) -> list[_Row]:
    """The group's trajectories, longest forward part first (equal lengths in member order)."""
    values = np.asarray(advantages, dtype=np.float64).reshape(-1)
    if values.size != len(group.trajectories):
        raise DataError(
            f"group {group.group_id}: {values.size} advantages for {len(group.trajectories)} trajectories; one each"
        )
    rows = []
    for trajectory, advantage in zip(group.trajectories, values.tolist(), strict=True):
        scored = np.flatnonzero(trajectory.mask)
        if scored.size and scored[0] < max(trajectory.prompt_length, 1):
            raise DataError(
                f"group {group.group_id}, member {trajectory.member}: token {int(scored[0])} has loss mask 1, but the "
                f"prompt has {trajectory.prompt_length} tokens; only what follows a prompt can be trained"
            )
        forward = int(scored[-1]) - trajectory.prompt_length if scored.size else 0
        rows.append(_Row(trajectory, advantage, scored, forward))
    return sorted(rows, key=lambda row: -row.forward)


def _prefix(row: _Row) -> npt.NDArray[np.int64]:
    if not row.scored.size:
        return np.zeros(0, np.int64)
    return row.trajectory.tokens[: row.trajectory.prompt_length].astype(np.int64)


def _assemble(trees: list[_Tree]) -> Microbatch:
    tokens: list[npt.NDArray[np.int64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    prefixes: list[tuple[int, int]] = []
    suffixes: list[tuple[int, int, int]] = []
    sources: list[npt.NDArray[np.int64]] = []
    rows: list[_Row] = []
    cursor = 0
    for index, tree in enumerate(trees):
        prompt = tree.prefix.size
        prefix_start = cursor
        prefixes.append((prefix_start, prompt))
        tokens.append(tree.prefix)
        positions.append(np.arange(prompt))
        cursor += prompt
        for row in tree.rows:
            suffixes.append((cursor, row.forward, index))
            tokens.append(row.trajectory.tokens[prompt : prompt + row.forward].astype(np.int64))
            positions.append(np.arange(prompt, prompt + row.forward))
            offset = row.scored - prompt - 1  # of the predicting token inside the suffix; -1: the last prompt token
            sources.append(np.where(offset >= 0, cursor + offset, prefix_start + prompt - 1))
            rows.append(row)
            cursor += row.forward
    prefix_table = np.array(prefixes, np.int64).reshape(-1, 2)
    suffix_table = np.array(suffixes, np.int64).reshape(-1, 3)
    lengths = [row.scored.size for row in rows]
    return Microbatch(
        tokens=_join(tokens, np.int64),
        positions=_join(positions, np.int64),
        prefix_start=prefix_table[:, 0].copy(),
        prefix_length=prefix_table[:, 1].copy(),
        suffix_start=suffix_table[:, 0].copy(),
        suffix_length=suffix_table[:, 1].copy(),
        suffix_tree=suffix_table[:, 2].copy(),
        source=_join(sources, np.int64),
        target=_join([row.trajectory.tokens[row.scored] for row in rows], np.int64),
        sequence=np.repeat(np.arange(len(rows), dtype=np.int64), lengths),
        sampler_logprobs=_join([row.trajectory.logprobs[row.scored] for row in rows], np.float32),
        temperature=np.repeat(np.array([row.trajectory.temperature for row in rows], np.float32), lengths),
        advantages=np.repeat(np.array([row.advantage for row in rows], np.float32), lengths),
        versions=_join([row.trajectory.versions[row.scored] for row in rows], np.int32),
        group_ids=np.array([row.trajectory.group_id for row in rows], np.int64),
        members=np.array([row.trajectory.member for row in rows], np.int64),
    )


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
