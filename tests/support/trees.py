"""Random trajectories with branches and turns, and the rows that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from support.trajectories import trajectory

from asyncrl.types import Trajectory


def random_tree(
    rng: np.random.Generator, group_id: int = 0, member: int = 0, group_size: int = 1, *, prompt: Any = (1, 2, 3),
    segments: int = 4, longest: int = 6, vocabulary: int = 5, **rest: Any,
) -> Trajectory:  # fmt: skip
    """A few ids only, so that siblings often begin alike. About half of the tokens behind the prompt are sampled."""
    tokens, branches = list(prompt) + rng.integers(1, vocabulary, rng.integers(1, longest + 1)).tolist(), []
    for _ in range(int(rng.integers(0, segments + 1))):
        branches.append((len(tokens), int(rng.integers(-1, len(tokens)))))
        tokens += rng.integers(1, vocabulary, rng.integers(1, longest + 1)).tolist()
    mask = (np.arange(len(tokens)) >= len(prompt)) & (rng.random(len(tokens)) < 0.6)
    mask[[start for start, after in branches if after < 0]] = False
    if not mask.any():
        mask[len(prompt)] = True
    sampled = np.flatnonzero(mask)
    # A reply begins at the first sampled token, and at some of the sampled tokens behind a token that is not.
    begins = [int(t) for t in sampled if t == sampled[0] or not mask[t - 1]]
    turns = [begins[0], *(t for t in begins[1:] if rng.random() < 0.7)]
    made = trajectory(
        group_id, member, group_size, tokens, prompt_length=len(prompt), mask=mask, logprob=-rng.random(len(tokens)),
        sampled=-rng.random(len(tokens)), version=int(rng.integers(0, 4)),
        branches=np.array(branches, np.int32).reshape(-1, 2) if branches else None, turns=np.array(turns, np.int32),
        turn_rewards=tuple(rng.normal(size=len(turns)).tolist()) if rng.random() < 0.5 else None, **rest,
    )  # fmt: skip
    return made


def paths(t: Trajectory) -> list[list[int]]:
    """For each token the indices of its path, by walking from token to token."""
    follows = {} if t.branches is None else {int(start): int(after) for start, after in t.branches}
    found: list[list[int]] = []
    for token in range(t.tokens.size):
        before = follows.get(token, token - 1)
        found.append([*(found[before] if before >= 0 else []), token])
    return found


def lines_of(t: Trajectory) -> list[list[int]]:
    """The paths that no longer path holds."""
    found = paths(t)
    inner = {path[-2] for path in found if len(path) > 1}
    return [path for path in found if path[-1] not in inner]


def rows_of(t: Trajectory) -> list[Trajectory]:
    """The trajectory as lines. The first line with a sampled token trains it."""
    lines = lines_of(t)
    rows, seen = [], np.zeros(t.tokens.size, np.bool_)
    for line in lines:
        mask = t.mask[line] & ~seen[line]
        seen[line] = True
        columns: dict[str, Any] = {
            name: np.where(mask, getattr(t, name)[line], filler).astype(getattr(t, name).dtype)
            for name, filler in (("logprobs", 0), ("sampled_logprobs", 0), ("versions", -1))
        }
        rows.append(
            replace(
                t,
                tokens=t.tokens[line],
                mask=mask,
                prompt_length=1,
                branches=None,
                turns=None,
                turn_rewards=None,
                **columns,
            )
        )
    return rows
