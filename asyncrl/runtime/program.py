"""Converts the arguments of `Runtime.generate`, `play` and `submit` into prompts and trajectories. Plays a group of `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.imports import raised
from asyncrl.config.schema import DataConfig
from asyncrl.data.texts import decode
from asyncrl.data.tokenizing import encode_prompt, read_prompt
from asyncrl.environments.policy import as_numbers
from asyncrl.errors import AsyncrlError, DataError, GenerationError
from asyncrl.ports import Generate
from asyncrl.pumps.rollout import EpisodeFailed, Episodes
from asyncrl.rewards.forms import BY_NAME, RESERVED
from asyncrl.types import Prompt, Trajectory


def as_prompt(prompt: Any, group_id: int, columns: Mapping[str, Any], config: DataConfig, tokenizer: Any) -> Prompt:
    """`prompt`: a string or messages, which are tokenized as configured, or a sequence of token ids. Errors: DataError."""
    if not hasattr(prompt, "__len__") or isinstance(prompt, Mapping):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string, a list of messages or token ids")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], (int, np.integer)):
        text = decode(tokenizer, prompt)
        return Prompt(group_id=group_id, ids=np.asarray(prompt, np.int32), prompt=text, columns=columns)
    ids = encode_prompt(prompt, config, tokenizer, columns)
    return Prompt(group_id=group_id, ids=ids, prompt=read_prompt(prompt, config), columns=columns)


def as_task(task: Any, group_id: int, config: DataConfig, tokenizer: Any) -> Prompt:
    """The Prompt of an episode. `task`: a row, or only its prompt. A row may have no prompt, because an episode can make its
    messages from the other columns. Errors: DataError."""
    row = dict(task) if isinstance(task, Mapping) else {config.prompt_column: task}
    prompt = row.pop(config.prompt_column, None)
    if prompt is None:
        return Prompt(group_id=group_id, ids=np.zeros(0, np.int32), prompt="", columns=row)
    return as_prompt(prompt, group_id, row, config, tokenizer)


async def sample_group(episodes: Episodes, prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
    """Play the `n` members of one group at the same time. Returns the members in order. Errors: an AsyncrlError of the environment
    as it is, and a GenerationError for any other error of the environment; DataError if `n` is below 1."""
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
            assert error is not None
            raise GenerationError(f"member {member} failed in the environment ({raised(error)})") from error

    async with plain_task_group() as tasks:
        for member in range(n):
            tasks.start_soon(play_member, member)
    return [results[member] for member in range(n)]


def as_group(
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    components: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> tuple[tuple[Trajectory, ...], Prompt]:
    """(the trajectories, to which rewards, components and metrics were added; their prompt). Arguments: as for `Runtime.submit`.
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
    if taken := [name for name in columns or {} if name in (*RESERVED, *BY_NAME)]:
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
