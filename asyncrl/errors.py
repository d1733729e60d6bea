"""Every error that asyncrl raises on purpose, with the exit code of a run that the error ends (table: docs/failures.md).

A run stopped by SIGINT, SIGTERM or SIGHUP exits with 130, 143 or 129 (main.py).
Each message says what was requested, what was found, and what to do.
"""

from __future__ import annotations

from errno import ENOMEM
from textwrap import indent

# Advice in messages about a lack of memory.
LESS_MEMORY = (
    "make train.tokens_per_microbatch (activations) or engine.kv_positions (the cache) smaller, or set "
    "train.gradient_checkpointing=true"
)
# Texts by which torch, its CPU allocator and cuBLAS report a lack of memory.
_SHORTAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class AsyncrlError(Exception):
    """Base of the tree. `exit_code`: the exit code of a run that this error ends."""

    exit_code = 1


class ConfigError(AsyncrlError, ValueError):
    """A setting is unknown, out of bounds or contradicts another setting. The message names the setting and a remedy."""

    exit_code = 2


class DataError(AsyncrlError, ValueError):
    """Prompts or pushed trajectories cannot be used. The message names the file and row, or the group.

    `groups`: ids of the groups that a step cannot use, where the ids are known.
    """

    exit_code = 2
    groups: tuple[int, ...] = ()


class PlatformError(AsyncrlError):
    """This machine lacks something that is needed, such as a kind of device, shared memory, a secret or the other ranks."""

    exit_code = 2


class DivergenceError(AsyncrlError):
    """A loss, gradient, weight or logit is not finite, or samplers, trainer or ranks disagree on weights or log-probs.

    `groups`: ids of the groups whose part of a step is not finite, where the ids are known.
    `unusable_weights`: if True, no checkpoint of the weights is written, even if each weight is finite.
    """

    exit_code = 3
    groups: tuple[int, ...] = ()
    unusable_weights: bool = False


class StallError(AsyncrlError):
    """No task made progress for too long. The message names the waiting tasks and what each task waits for."""

    exit_code = 4


class CheckpointError(AsyncrlError):
    """A checkpoint could not be written, or a resume cannot read its checkpoint. The message names the path."""

    exit_code = 5


class DirectoryLost(AsyncrlError):
    """The run directory was moved, removed or taken by another run."""

    exit_code = 5


class RewardError(AsyncrlError):
    """A reward function or model raised, or returned an invalid reward. The message names the function or model."""

    exit_code = 6


class RewardTimeout(RewardError):
    """A reward function did not answer before its deadline. The call was cancelled, or its worker process killed."""


class RewardCrash(RewardError):
    """The worker process of a reward function died during a call, and was replaced."""


class GenerationError(AsyncrlError):
    """The engine cannot serve a request, or more rollouts failed than the settings allow."""

    exit_code = 7


class EpisodeLimit(GenerationError):
    """A request exceeds `rollout.max_turns` or `rollout.max_context`. The tokens that the episode sampled before are trained."""


class EngineClosed(GenerationError):
    """The engine was closed before it answered a request."""


class WorkerDied(GenerationError):
    """A generation worker ended unexpectedly. `status`: how the worker ended, in words. `output`: the last lines it printed."""

    def __init__(self, number: int, pid: int, status: str, output: str) -> None:
        last_output = f"; its last output:\n{indent(output, '  ')}" if output else "; it had no output"
        super().__init__(f"worker {number} (process {pid}) {status}{last_output}")
        self.number = number
        self.pid = pid
        self.status = status
        self.output = output


class TrainStepError(AsyncrlError, RuntimeError):
    """Groups failed in a step, and the message names them. Or a method of the split train step was called in the wrong state, and
    the call changed nothing."""

    exit_code = 8


class LedgerError(AsyncrlError, RuntimeError):
    """The counts of slots and places would become wrong. The cause is a bug or, with several ranks, a setting
    that differs between ranks."""

    exit_code = 9


class VersionAhead(LedgerError, ValueError):
    """A token has a version that no step has reached: it is of another policy, or of an earlier run of this name."""


class LifecycleError(AsyncrlError, RuntimeError):
    """An object was opened twice, used before opening or after closing, or closed in another task."""

    exit_code = 10


class TransportError(AsyncrlError):
    """Shared memory, or the process at its other end, is in a wrong state."""

    exit_code = 11


class ArenaOwned(TransportError):
    """A live process owns the segment. A process that SIGSTOP suspended counts as live."""


class OutOfMemory(TransportError, MemoryError):
    """Memory ran out. Shared memory is allocated at creation, so the first touch of a page cannot end in SIGBUS."""


class SegmentDamaged(TransportError):
    """The file is no segment, or its header was overwritten. Such a file is never unlinked automatically."""


class RecordError(TransportError, ValueError):
    """The bytes of a record are incomplete, damaged or of a newer version, or a producer's trajectories make no valid record."""


class RecordTooLarge(TransportError, ValueError):
    """The record can never fit into a ring. Nothing was written."""


class RingFull(TransportError, TimeoutError):
    """The ring stayed full until the deadline. The caller may put the same record again."""


class RingDetached(TransportError, ConnectionError):
    """Nobody owns the ring, or its owner refused this producer or did not answer."""


class HookError(AsyncrlError):
    """A function of `Hooks` raised, or returned a wrong value. The message names the function."""

    exit_code = 13


class RankLost(AsyncrlError, RuntimeError):
    """Another rank has ended or gives no sign of life. The cause is usually in the output of that rank."""

    exit_code = 12

    def __init__(self, text: str, stopped_by: str | None = None) -> None:
        """`stopped_by`: the name of the signal that ended the other rank, if any. This rank gets the exit code of that signal."""
        super().__init__(text)
        self.stopped_by = stopped_by


def divergence_of(error: BaseException | None) -> DivergenceError | None:
    """The first DivergenceError in the chain of `error` and its causes, or None."""
    while error is not None and not isinstance(error, DivergenceError):
        error = error.__cause__
    return error


def name_shortage(error: BaseException, work: str) -> BaseException:
    """An OutOfMemory that names the settings to change, if `error` means that memory ran out during `work`; else `error`."""
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
    no_memory = no_memory or (isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES))
    if isinstance(error, AsyncrlError) or not no_memory:
        return error
    shortage = OutOfMemory(f"no memory was left for {work}: {LESS_MEMORY} ({first_line(error)})")
    shortage.__cause__ = error
    return shortage


def shown(value: object) -> str:
    """`repr(value)`; of a longer text the first 80 characters and "...". Python has no `repr` for an integer of more than 4,300
    digits, and the answer of a model may have such an integer."""
    try:
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    except ValueError:
        return f"{type(value).__name__} with too many digits"


def first_line(error: BaseException) -> str:
    """Class and first line of an error, with at most 200 characters of the line: short enough to quote in a message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
