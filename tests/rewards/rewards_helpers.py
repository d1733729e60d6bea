"""Trajectories and pools for the tests of the reward room."""

import asyncio
from pathlib import Path

import numpy as np
from support.trajectories import trajectory
from warm import children

from asyncrl.config.schema import RewardConfig
from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.pool import RewardPool
from asyncrl.types import Prompt

FILE = Path(__file__).with_name("rewards_functions.py")


def prompt(group_id=0, text="question", **columns):
    return Prompt(group_id=group_id, ids=np.array([1, 2], dtype=np.int32), prompt=text, columns=columns)


def trajectories(*completions, ids=None):
    """One per completion, two prompt tokens and two sampled ones."""
    return [
        trajectory(
            0, member, len(completions), [1, 2, *(ids[member] if ids else (5, member))], logprob=0, completion=text
        )
        for member, text in enumerate(completions)
    ]


def pool_of(specs, recorder=None, **settings):
    """A pool that tries nothing again unless `settings` say so."""
    return RewardPool(RewardConfig(**{"retries": 0, **settings}), recorder, specs)


def pool(*names, **settings):
    """A pool of functions of rewards_functions.py."""
    return pool_of([RewardSpec(f"{FILE}:{name}") for name in names], **settings)


def only_worker():
    """The one worker process, which is the child of our only child, its guard."""
    (guard,) = children()
    (worker,) = [child for child in guard.children() if "asyncrl.rewards.worker" in child.cmdline()]
    return worker


async def score(rewards, completion="a", **columns):
    """The one trajectory with this completion, scored."""
    (scored,) = await rewards.score(prompt(**columns), trajectories(completion))
    return scored


async def until(condition):
    """Wait for another process, whose end or answer is no event here; the test's own deadline is the bound."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def at_work(rewards, pid=""):
    """How many requests reward workers have, or this one."""
    return sum(wait.on.startswith(f"reward worker {pid}") for wait in rewards._recorder.active_waits())
