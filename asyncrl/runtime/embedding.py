"""Converts the arguments of `rt.generate` and `rt.submit` into the prompts and trajectories of the pumps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.schema import DataConfig
from asyncrl.data.texts import decode
from asyncrl.data.tokenizing import encode_prompt, read_prompt
from asyncrl.errors import AsyncrlError, DataError, GenerationError
from asyncrl.ports import Generate
from asyncrl.pumps.rollout import EpisodeFailed, Episodes
from asyncrl.rewards.forms import RESERVED
from asyncrl.types import Prompt, Trajectory

_NAME = re.compile(r"(?=.{1,100}$)[\w@: -][\w@:. -]*(/[\w@: -][\w@:. -]*)*")  # metric names that every sink takes


def as_prompt(prompt: Any, group_id: int, columns: Mapping[str, Any], config: DataConfig, tokenizer: Any) -> Prompt:
    """A string or messages go through the tokenizer as configured; a sequence of integers is token ids. Errors: DataError."""
    if not hasattr(prompt, "__len__"):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string, a list of messages or token ids")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], (int, np.integer)):
        text = decode(tokenizer, prompt)
        return Prompt(group_id=group_id, ids=np.asarray(prompt, np.int32), prompt=text, columns=columns)
    ids = encode_prompt(prompt, config, tokenizer, columns)
    return Prompt(group_id=group_id, ids=ids, prompt=read_prompt(prompt, config), columns=columns)


async def play_group(episodes: Episodes, prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
    """Play the `n` members of one group at the same time. Returns the members in order. Errors: those of asyncrl; GenerationError
    for any other error of the environment; DataError if `n` is below 1."""
    if n < 1:
        raise DataError(f"a group of n={n} completions was asked for; expected 1 or more")
    results: dict[int, Trajectory] = {}

    async def play_member(member: int) -> None:
        try:
            results[member] = await episodes.play(prompt, member, n, generate, priority=0)
        except EpisodeFailed as failed:
            error = failed.__cause__
            if isinstance(error, AsyncrlError):
                raise error from error.__cause__
            raise GenerationError(
                f"member {member} failed in the environment ({type(error).__name__}: {error})"
            ) from error

    async with plain_task_group() as tasks:
        for member in range(n):
            tasks.start_soon(play_member, member)
    return [results[member] for member in range(n)]


def as_numbers(named: Mapping[str, Any], count: int, argument: str, prefix: str = "") -> list[dict[str, float]]:
    """For each of `count` members: name -> number. `named`: name -> a list with a value for each member, or one value for all
    members; a value is a number or None, which is left out. `argument` is for errors. Errors: DataError."""
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    for name, values in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(f"{argument}: {name!r:.80} is no name: letters, digits, _ - . : @, parts between slashes")
        has_many = isinstance(values, list | tuple) or bool(getattr(values, "shape", None))
        member_values = list(values) if has_many else [values] * count
        if len(member_values) != count:
            raise DataError(f"{argument}: {name} has {len(member_values)} values for {count} trajectories")
        for member, value in enumerate(member_values):
            if value is None:
                continue
            try:
                # Tensors and arrays of one number have `item`.
                plain = value.item() if hasattr(value, "item") else value
                number = math.nan if isinstance(plain, str | bytes) else float(plain)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                number = math.nan
            if not math.isfinite(number):
                raise DataError(f"{argument}: {name} {member} is {value!r:.80}; expected a finite number, or None")
            rows[member][f"{prefix}{name}"] = number
    return rows


def as_group(
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    components: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> tuple[tuple[Trajectory, ...], Prompt]:
    """(the trajectories, to which rewards, components and metrics were added; their prompt). Arguments: of `Runtime.submit`.
    Errors: DataError."""
    if not trajectories or len(trajectories) != len(rewards):
        raise DataError(
            f"submit: {len(trajectories)} trajectories with {len(rewards)} rewards; give at least one, and one reward each"
        )
    for index, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise DataError(
                f"submit: trajectory {index} is {type(trajectory).__name__}; expected an asyncrl.Trajectory from `generate`"
            )
    if len(group_ids := {t.group_id for t in trajectories}) != 1:
        raise DataError(f"submit takes the trajectories of one group; these belong to {sorted(group_ids)}")
    if taken := [name for name in columns or {} if name in RESERVED]:
        raise DataError(f"submit: columns has {taken[0]!r}, which the run itself gives to reward functions; rename it")
    scores = as_numbers({"reward": list(rewards)}, len(rewards), "submit")
    parts = as_numbers(components or {}, len(rewards), "submit: components")
    extras = as_numbers(metrics or {}, len(rewards), "submit: metrics", "own/")
    members = tuple(
        replace(t, reward=score.get("reward"), components={**t.components, **part}, extras={**t.extras, **numbers})
        for t, score, part, numbers in zip(trajectories, scores, parts, extras, strict=True)
    )
    first = members[0]
    ids = first.tokens[: first.prompt_length]
    return members, Prompt(first.group_id, ids, decode(tokenizer, ids.tolist()), columns or {})
