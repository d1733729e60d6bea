"""The errors that asyncrl raises for a user, with the exit code of a run that the error ends (table: docs/failures.md).

A run stopped by SIGINT, SIGTERM or SIGHUP exits with 130, 143 or 129 (main.py).
A message says, as far as it can, what was requested, what was found, and what to do.
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
    """Base class. `exit_code`: the exit code of a run that this error ends."""

    exit_code = 1


class ConfigError(AsyncrlError, ValueError):
    """A setting is unknown, out of bounds, contradicts another setting, or names something that cannot be used."""

    exit_code = 2


class DataError(AsyncrlError, ValueError):
    """Prompts, trajectories or other data that the program passes cannot be used. The message says which.

    `groups`: ids of the groups that a step cannot use; empty if not known.
    """

    exit_code = 2
    groups: tuple[int, ...] = ()


class PlatformError(AsyncrlError):
    """This machine lacks what the run needs, such as a kind of device, shared memory, a secret or a connection to other ranks."""

    exit_code = 2


class DivergenceError(AsyncrlError):
    """A loss, gradient, weight or logit is not finite. Or samplers, trainer or ranks disagree on weights or log-probs.

    `groups`: ids of the groups whose loss or gradient is not finite; empty if not known.
    `unusable_weights`: if True, no checkpoint of the weights is written, even if each weight is finite.
    """

    exit_code = 3
    groups: tuple[int, ...] = ()
    unusable_weights: bool = False


class StallError(AsyncrlError):
    """The run, its shutdown, or a group of `door.ring` (with `door.on_timeout: error`) made no progress for too long."""

    exit_code = 4


class CheckpointError(AsyncrlError):
    """A checkpoint could not be written, or a run cannot be resumed from its checkpoint."""

    exit_code = 5


class DirectoryLost(AsyncrlError):
    """The run directory was moved, removed or taken by another run."""

    exit_code = 5


class RewardError(AsyncrlError):
    """A reward function or model raised, or returned an invalid reward, or a reward worker cannot be started."""

    exit_code = 6


class RewardTimeout(RewardError):
    """A reward function did not load or answer before its deadline. A late coroutine is cancelled. A late worker is killed."""


class RewardCrash(RewardError):
    """The worker process of a reward function died during a call or a load, or could not be started."""


class GenerationError(AsyncrlError):
    """The engine cannot serve a request, or more rollouts failed than the settings allow."""

    exit_code = 7


class EpisodeLimit(GenerationError):
    """A request exceeds `rollout.max_turns`, `rollout.max_context` or `train.tokens_per_microbatch`. Earlier tokens are trained."""


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
    """A train step failed for the groups that the message names. Or a method of `Trainer` was called in the wrong state, such as
    `finish_train_step` without an open step; that call changed nothing."""

    exit_code = 8


class LedgerError(AsyncrlError, RuntimeError):
    """The ledger's counts of groups would become wrong. The cause is a bug or, with several ranks, a setting that differs between
    ranks."""

    exit_code = 9


class VersionAhead(LedgerError, ValueError):
    """A token has a policy version that this run has not reached: the token is of another policy, or of an earlier run."""


class LifecycleError(AsyncrlError, RuntimeError):
    """A method was called at the wrong time or in the wrong place, such as before opening, after closing, or in another task."""

    exit_code = 10


class TransportError(AsyncrlError):
    """Shared memory, or the other process that maps this memory, is in a wrong state."""

    exit_code = 11


class ArenaOwned(TransportError):
    """A live process owns the segment of shared memory. A process that SIGSTOP suspended counts as live."""


class OutOfMemory(TransportError, MemoryError):
    """Memory ran out. All pages of shared memory are allocated at its creation: this error replaces a SIGBUS at a later access."""


class SegmentDamaged(TransportError):
    """The file is no segment of shared memory, or its header was overwritten. Only `asyncrl shm clear` unlinks the file."""


class RecordError(TransportError, ValueError):
    """The bytes of a record are incomplete, damaged or of a newer version, or a producer's trajectories make no valid record."""


class RecordTooLarge(TransportError, ValueError):
    """The record can never fit into a ring. Nothing was written."""


class RingFull(TransportError, TimeoutError):
    """The ring stayed full until the deadline. The caller may put the same record again."""


class RingDetached(TransportError, ConnectionError):
    """No process owns the ring, or its owner refused this producer, or the owner did not answer."""


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
    """`repr(value)`, cut after 80 characters. Python has no `repr` for an integer of more than 4,300 digits, which a model may
    write; the result then names only the type."""
    try:
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    except ValueError:
        return f"{type(value).__name__} with too many digits"


def first_line(error: BaseException) -> str:
    """Class and first line of an error, with at most 200 characters of the line: short enough to quote in a message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
