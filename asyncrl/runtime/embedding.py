"""What an embedding program hands to `rt.generate` and `rt.submit`, made into what the pumps carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.schema import DataConfig
from asyncrl.data.texts import decode
from asyncrl.data.tokenizing import encode_prompt, read_prompt
from asyncrl.errors import AsyncrlError, DataError, GenerationError
from asyncrl.ports import Engine, Generate
from asyncrl.pumps.episode import EpisodeFailed, Episodes
from asyncrl.types import Generation, GenerationRequest, Prompt, SamplingParams, Trajectory


def as_prompt(prompt: Any, group_id: int, columns: Mapping[str, Any], config: DataConfig, tokenizer: Any) -> Prompt:
    """A string or messages go through the tokenizer as configured; a sequence of integers is token ids. Errors: DataError."""
    if not hasattr(prompt, "__len__"):
        raise DataError(f"the prompt is {type(prompt).__name__}; expected a string, a list of messages or token ids")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], (int, np.integer)):
        text = decode(tokenizer, prompt)
        return Prompt(group_id=group_id, ids=np.asarray(prompt, np.int32), prompt=text, columns=columns)
    ids = encode_prompt(prompt, config, tokenizer, columns)
    return Prompt(group_id=group_id, ids=ids, prompt=read_prompt(prompt, config), columns=columns)


def sampled_as(sampling: SamplingParams | None, engine: Engine) -> Generate:
    """The engine's `generate`, with other sampling parameters than the request's where some are given."""
    if sampling is None:
        return engine.generate

    async def generate(request: GenerationRequest) -> Generation:
        return await engine.generate(replace(request, sampling=sampling))

    return generate


async def play(episodes: Episodes, prompt: Prompt, n: int, generate: Generate) -> list[Trajectory]:
    """The `n` members of one group, in order, all at once. Errors: those of asyncrl; GenerationError where the environment
    raised another, DataError for no member at all."""
    if n < 1:
        raise DataError(f"a group of n={n} completions was asked for; expected 1 or more")
    results: dict[int, Trajectory] = {}

    async def one(member: int) -> None:
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
            tasks.start_soon(one, member)
    return [results[member] for member in range(n)]


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError):
        return False


def as_group(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    columns: Mapping[str, Any],
    tokenizer: Any,
) -> tuple[tuple[Trajectory, ...], Prompt]:
    """The trajectories with their rewards, and their prompt. Errors: ValueError (DataError)."""
    if not trajectories or len(trajectories) != len(rewards):
        raise DataError(
            f"submit: {len(trajectories)} trajectories with {len(rewards)} rewards; one reward each, at least one"
        )
    for index, given in enumerate(trajectories):
        if not isinstance(given, Trajectory):
            raise DataError(
                f"submit: trajectory {index} is {type(given).__name__}; expected an asyncrl.Trajectory, as `generate` returns"
            )
    group_ids = {t.group_id for t in trajectories}
    if len(group_ids) != 1:
        raise DataError(f"submit takes the trajectories of one group; these belong to {sorted(group_ids)}")
    for index, reward in enumerate(rewards):
        if reward is not None and not _is_number(reward):
            raise DataError(
                f"submit: reward {index} is {reward!r:.80}; rewards are finite numbers, or None: the run scores it"
            )
    members = tuple(
        replace(given, reward=None if reward is None else float(reward))
        for given, reward in zip(trajectories, rewards, strict=True)
    )
    first = members[0]
    ids = first.tokens[: first.prompt_length]
    return members, Prompt(first.group_id, ids, decode(tokenizer, ids.tolist()), columns)
