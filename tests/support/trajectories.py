"""A trajectory for the tests of several rooms: a prompt, then sampled tokens; what is not given follows from the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.types import FinishReason, Trajectory


def trajectory(
    group_id: int, member: int, group_size: int, tokens: Any, *, prompt_length: int = 2, mask: Any = None,
    logprob: Any = -1.0, sampled: Any = None, version: Any = 0, **rest: Any,
) -> Trajectory:  # fmt: skip
    """`tokens`: ids, or how many. Of each sampled token: `logprob`, `version`, and `sampled`, as `logprob` if left out."""
    ids = np.arange(1, 1 + tokens) if isinstance(tokens, int) else np.asarray(tokens)
    mask = np.arange(ids.size) >= prompt_length if mask is None else np.asarray(mask, np.bool_)
    fields: dict[str, Any] = {
        "group_id": group_id,
        "member": member,
        "group_size": group_size,
        "prompt_length": prompt_length,
        "tokens": ids.astype(np.int32),
        "mask": mask,
        "logprobs": np.where(mask, logprob, 0).astype(np.float32),
        "sampled_logprobs": np.where(mask, logprob if sampled is None else sampled, 0).astype(np.float32),
        "versions": np.where(mask, version, -1).astype(np.int32),
        "temperature": 1.0,
        "finish_reason": FinishReason.STOP,
    }
    return Trajectory(**(fields | rest))
