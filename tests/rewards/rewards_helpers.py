"""Trajectories and pools for the tests of the reward room."""

from pathlib import Path

import numpy as np
from warm import children

from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.pool import RewardPool
from asyncrl.types import FinishReason, Prompt, Trajectory

FILE = Path(__file__).with_name("rewards_functions.py")


def prompt(group_id=0, text="question", **columns):
    return Prompt(group_id=group_id, ids=np.array([1, 2], dtype=np.int32), prompt=text, columns=columns)


def trajectories(*completions, ids=None):
    """One per completion, two prompt tokens and two sampled ones."""
    zeros = np.zeros(4, dtype=np.float32)
    return [
        Trajectory(
            group_id=0,
            member=member,
            group_size=len(completions),
            prompt_length=2,
            tokens=np.array([1, 2, *(ids[member] if ids else (5, member))], dtype=np.int32),
            mask=np.array([False, False, True, True]),
            logprobs=zeros,
            sampled_logprobs=zeros,
            versions=np.array([-1, -1, 0, 0], dtype=np.int32),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            completion=completion,
        )
        for member, completion in enumerate(completions)
    ]


def pool(*names, **settings):
    """A pool of functions of rewards_functions.py."""
    return RewardPool([RewardSpec(f"{FILE}:{name}") for name in names], **settings)


def only_worker():
    """The one worker process, which is the child of our only child, its guard."""
    (guard,) = children()
    (worker,) = [child for child in guard.children() if "asyncrl.rewards.worker" in child.cmdline()]
    return worker
