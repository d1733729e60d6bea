"""Every error that asyncrl raises on purpose, as one tree.

    AsyncrlError                exit code 1
    |- ConfigError              2   a setting is unknown, of the wrong form, or contradicts another (also ValueError)
    |- DataError                2   a prompt file or row cannot be used (also ValueError)
    |  `- stash.StashRefused        a trajectory contradicts its group, or a cap is reached; has a reason
    |- PlatformError            2   this machine lacks what the configuration needs
    |- DivergenceError          3   NaN, or sampler and trainer disagree beyond the gate
    |- StallError               4   nothing moved for too long; the message names who waits for whom
    |- CheckpointError          5   a checkpoint could not be written or read, or is damaged; names the path
    |- DirectoryLost            5   the run directory was moved, removed or taken by another run; says where the last checkpoint is
    |- RewardError              6   a reward function or model failed; names it
    |  |- RewardTimeout
    |  `- RewardCrash
    |- GenerationError          7   the engine cannot serve a request
    |  |- EngineClosed
    |  `- WorkerDied                 a process that generates ended by itself; the message has the end of its output
    |- TrainStepError           8   a split-step call in the wrong state (also RuntimeError)
    |- LedgerError              9   a slot or a place was given back twice, or to nobody (also RuntimeError)
    |  `- VersionAhead             a group claims a policy version that no step has reached (also ValueError)
    |- LifecycleError          10   opened twice, used closed, or closed in another task (also RuntimeError)
    |- HookError               13   a function of `Hooks` failed, or returned what it may not; names it
    |- RankLost                12   a collective or the shared ledger failed: another rank has left or died (also RuntimeError)
    |- StoreForged             14   somebody who is no rank of the run writes into the ranks' store; names the key
    |- FetchFailed              1   the sibling that reads for a replica of the model could not (also RuntimeError)
    `- TransportError          11   shared memory, or a process on the other side of it
       |- ArenaOwned                a live process owns the segment
       |- OutOfMemory               a device, a slab or /dev/shm has no room (also MemoryError)
       |- SegmentDamaged              its file cannot be read; what lies in it is kept
       |- StaleHandle               the handle is of another slab, or names what does not lie in this one
       |- RecordError               the bytes are no record that this version reads (also ValueError)
       |- RecordTooLarge            the record can never fit (also ValueError)
       |- RingFull                  no room before the deadline (also TimeoutError)
       `- RingDetached              the owner of the ring is gone, or refused (also ConnectionError)

Exit codes 130, 143 and 129 mean: stopped by SIGINT, SIGTERM or SIGHUP, after the last committed version was checkpointed.
A message says what was asked, what was found and what to do.
"""

from __future__ import annotations

from errno import ENOMEM
from textwrap import indent

LESS_MEMORY = (
    "make train.tokens_per_microbatch smaller (what a microbatch keeps), or engine.kv_positions (the cache), or set "
    "train.gradient_checkpointing=true"
)
# How torch, its CPU allocator and cuBLAS say it.
_SHORTAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class AsyncrlError(Exception):
    """Base of the tree. `exit_code` is what `asyncrl.main` ends with when this error ends a run."""

    exit_code = 1


class ConfigError(AsyncrlError, ValueError):
    """A setting is unknown, out of its bounds or contradicts another one; the message names it and the way out."""

    exit_code = 2


class DataError(AsyncrlError, ValueError):
    """Prompts, or what an external producer pushed, cannot be used; the message names the file and row, or the group.

    `groups`: ids of those that a step cannot use, where that is known.
    """

    exit_code = 2
    groups: tuple[int, ...] = ()


class PlatformError(AsyncrlError):
    """This machine lacks what was asked for: memory, a kind of device, shared memory that can be relied on."""

    exit_code = 2


class DivergenceError(AsyncrlError):
    """Training has gone wrong: a loss, gradient or weight is not finite, or sampler and trainer disagree beyond the gate.

    `groups`: ids of those whose part of a step is not finite, where that is known. `spoiled`: the weights themselves are to
    blame, though they may be finite: no checkpoint is made of them.
    """

    exit_code = 3
    groups: tuple[int, ...] = ()
    spoiled: bool = False


class StallError(AsyncrlError):
    """Nothing moved for too long, and the watchdog or the stash ended the run; the message says who waits for whom."""

    exit_code = 4


class CheckpointError(AsyncrlError):
    """A checkpoint could not be written, or the one to go on from cannot be read; the message names the path."""

    exit_code = 5


class DirectoryLost(AsyncrlError):
    """No CheckpointError: the last checkpoint is written, elsewhere."""

    exit_code = 5


class RewardError(AsyncrlError):
    """A reward function or reward model raised, or gave something that is no reward; the message names it."""

    exit_code = 6


class RewardTimeout(RewardError):
    """A reward function did not answer before its deadline; its worker was killed and replaced."""


class RewardCrash(RewardError):
    """The process of a reward function died while it worked; it was replaced."""


class GenerationError(AsyncrlError):
    """The engine cannot serve a request, or more rollouts failed than may."""

    exit_code = 7


class EngineClosed(GenerationError):
    """The engine closed while a request was waiting, or before it was made."""


class WorkerDied(GenerationError):
    """A process that generates ended, and nobody had asked it to. `status` says how, in words, and `output` is the end of it."""

    def __init__(self, number: int, pid: int, status: str, output: str) -> None:
        said = f"; the last that it wrote:\n{indent(output, '  ')}" if output else "; it wrote nothing"
        super().__init__(f"worker {number} (process {pid}) {status}{said}")
        self.number = number
        self.pid = pid
        self.status = status
        self.output = output


class TrainStepError(AsyncrlError, RuntimeError):
    """A call of the split train step came in the wrong state; nothing was changed."""

    exit_code = 8


class LedgerError(AsyncrlError, RuntimeError):
    """The books of slots and places would go wrong: a bug, or (with several ranks) their store is gone or was made with other
    numbers."""

    exit_code = 9


class VersionAhead(LedgerError, ValueError):
    """Its tokens were sampled for another run, or an earlier one of this name."""


class LifecycleError(AsyncrlError, RuntimeError):
    """Something was opened twice, used before it was opened or after it was closed, or closed in another task."""

    exit_code = 10


class TransportError(AsyncrlError):
    """Shared memory, or the process on the other side of it, is not as it has to be."""

    exit_code = 11


class ArenaOwned(TransportError):
    """A live process holds the segment; a stopped one counts as live."""


class OutOfMemory(TransportError, MemoryError):
    """Found at allocation, never as SIGBUS at the first touch."""


class SegmentDamaged(TransportError):
    """The header of a segment was written over, or the file is none. It is never unlinked for that."""


class StaleHandle(TransportError):
    """A handle of another slab, or of an earlier one of this name; or bytes that are no handle."""


class RecordError(TransportError, ValueError):
    """Torn, damaged, or written for a newer reader."""


class RecordTooLarge(TransportError, ValueError):
    """A record that can never fit; nothing was written."""


class RingFull(TransportError, TimeoutError):
    """Backpressure lasted longer than the deadline; nothing was put, so the caller may try again."""


class RingDetached(TransportError, ConnectionError):
    """Nobody owns the ring, or its owner refused this producer."""


class HookError(AsyncrlError):
    """A function of `Hooks` raised, or returned what it may not; the message names it."""

    exit_code = 13


class RankLost(AsyncrlError, RuntimeError):
    """Seldom the cause of anything: the output of the rank that is gone says what happened."""

    exit_code = 12
    # The signal that ended the rank that is gone, where it was stopped: then so is this one.
    stopped_by: str | None = None


class StoreForged(AsyncrlError):
    """No RuntimeError: it is never taken for a store that is gone."""

    exit_code = 14


class FetchFailed(AsyncrlError, RuntimeError):
    """The leader of a replica could not read what its siblings wait for; the message is the leader's error."""


def divergence_of(error: BaseException | None) -> DivergenceError | None:
    """`error` itself, or what the engine ended with whose callers got it."""
    while error is not None and not isinstance(error, DivergenceError):
        error = error.__cause__
    return error


def name_shortage(error: BaseException, work: str) -> BaseException:
    """`error` of `work` on a device; where memory ran out, an OutOfMemory that names the settings to change."""
    short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM)
    short = short or (isinstance(error, RuntimeError) and any(each in str(error) for each in _SHORTAGES))
    if isinstance(error, AsyncrlError) or not short:
        return error
    found = OutOfMemory(f"no memory was left for {work}: {LESS_MEMORY} ({first_line(error)})")
    found.__cause__ = error
    return found


def first_line(error: BaseException) -> str:
    """An error of another library, short enough to stand in a sentence of ours."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
