"""Every error that asyncrl raises on purpose, as one tree.

    AsyncrlError                exit code 1
    |- ConfigError              2   a setting is unknown, of the wrong form, or contradicts another (also ValueError)
    |- DataError                2   a prompt file or row cannot be used (also ValueError)
    |- PlatformError            2   this machine lacks what the configuration needs
    |- DivergenceError          3   NaN, or sampler and trainer disagree beyond the gate
    |- StallError               4   nothing moved for too long; the message names who waits for whom
    |- CheckpointError          5   a checkpoint could not be written or read; names the path
    |- RewardError              6   a reward function failed; names the function
    |  |- RewardTimeout
    |  `- RewardCrash
    |- GenerationError          7   the engine cannot serve a request
    |  `- EngineClosed
    |- TrainStepError           8   a split-step call in the wrong state (also RuntimeError)
    |- LedgerError              9   a slot or a place was given back twice, or to nobody (also RuntimeError)
    `- LifecycleError          10   opened twice, used closed, or closed in another task (also RuntimeError)

Exit codes 130 and 143 mean: stopped by SIGINT or SIGTERM, after the last committed version was checkpointed.
A message says what was asked, what was found and what to do.
"""

from __future__ import annotations


class AsyncrlError(Exception):
    """Base of the tree. `exit_code` is what `asyncrl.main` ends with when this error ends a run."""

    exit_code = 1


class ConfigError(AsyncrlError, ValueError):
    exit_code = 2


class DataError(AsyncrlError, ValueError):
    exit_code = 2


class PlatformError(AsyncrlError):
    exit_code = 2


class DivergenceError(AsyncrlError):
    exit_code = 3


class StallError(AsyncrlError):
    exit_code = 4


class CheckpointError(AsyncrlError):
    exit_code = 5


class RewardError(AsyncrlError):
    exit_code = 6


class RewardTimeout(RewardError):
    """A reward function did not answer before its deadline; its worker was killed and replaced."""


class RewardCrash(RewardError):
    """The process of a reward function died while it worked; it was replaced."""


class GenerationError(AsyncrlError):
    exit_code = 7


class EngineClosed(GenerationError):
    """The engine closed while a request was waiting, or before it was made."""


class TrainStepError(AsyncrlError, RuntimeError):
    exit_code = 8


class LedgerError(AsyncrlError, RuntimeError):
    exit_code = 9


class LifecycleError(AsyncrlError, RuntimeError):
    exit_code = 10
