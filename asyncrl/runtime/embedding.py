"""What an embedding program hands to `rt.generate` and `rt.submit`, made into what the pumps carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config.schema import DataConfig
from asyncrl.data.tokenizing import encode_prompt
from asyncrl.types import Prompt, Trajectory

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel


def as_prompt(prompt: Any, group_id: int, columns: Mapping[str, Any], config: DataConfig, tokenizer: Any) -> Prompt:
    """A string or messages go through the tokenizer as configured; a sequence of integers is token ids."""
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], (int, np.integer)):
        text = tokenizer.decode(list(prompt))
        return Prompt(group_id=group_id, ids=np.asarray(prompt, np.int32), prompt=text, columns=columns)
    ids = encode_prompt(prompt, config, tokenizer)
    return Prompt(group_id=group_id, ids=np.asarray(ids, np.int32), prompt=prompt, columns=columns)


def as_group(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], tokenizer: Any, policy: PolicyModel | None = None
) -> tuple[tuple[Trajectory, ...], Prompt]:
    """A whole scored group and its prompt, for `policy`. Errors: ValueError that says what is wrong with it."""
    if not trajectories or len(trajectories) != len(rewards):
        raise ValueError(
            f"submit: {len(trajectories)} trajectories with {len(rewards)} rewards; one reward each, at least one"
        )
    group_ids = {t.group_id for t in trajectories}
    if len(group_ids) != 1:
        raise ValueError(f"submit takes the trajectories of one group; these belong to {sorted(group_ids)}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"submit: reward {index} is {reward}; rewards are finite numbers")
    if policy is not None:
        _check_ids(trajectories, int(policy.config.get_text_config().vocab_size))
    scored = tuple(
        replace(t, member=member, group_size=len(trajectories), reward=float(reward))
        for member, (t, reward) in enumerate(zip(trajectories, rewards, strict=True))
    )
    first = scored[0]
    ids = first.tokens[: first.prompt_length]
    return scored, Prompt(group_id=first.group_id, ids=ids, prompt=tokenizer.decode(ids.tolist()))


def _check_ids(trajectories: Sequence[Trajectory], vocabulary: int) -> None:
    """An id outside of the model would end the run in the middle of a step."""
    for index, tokens in enumerate(t.tokens for t in trajectories):
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"submit: trajectory {index} holds token {low if low < 0 else high}; the model's ids are 0 to "
                f"{vocabulary - 1}: was it made with another tokenizer?"
            )
