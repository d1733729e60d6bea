"""The state of an unfinished step, and the groups that fail in the step.

    building or a forward raises ──▶ GroupsFailed ──▶ the step is aborted
        one rank, first time in the run ──▶ the groups are dropped, the user gets a note, and the next step begins
        otherwise                       ──▶ the run ends with an error that names the groups

In both cases the records of the failed groups are removed from the ring of their producer, so the next run does not get them.
The other groups of the step become claimable again, or wait for the next run. A step is committed once its optimizer step was
applied, even if something fails later.

With several ranks no rank drops a group alone, because the other ranks may be in a collective that includes this group.
A gradient that is not finite does not name a group. So all records of the step leave the ring, and the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from asyncrl.algorithms.base import Loss
from asyncrl.data.store import ADVANTAGES, Rows
from asyncrl.errors import AsyncrlError, DataError, DivergenceError, OutOfMemory, TrainStepError
from asyncrl.types import Group, Microbatch, StepResult

from .pipeline import Ports

MAX_ERROR_CHARACTERS = 300  # of the error in a message about failed groups


@dataclass(slots=True)
class Step:
    """The claimed groups of a step and its progress. `version`: of the weights before the step. `started`: time of the event
    loop's clock, in seconds."""

    version: int
    started: float
    rows: list[Rows] = field(default_factory=list)
    # Replayed groups. The key is the id of the claimed group that the replayed group replaces in this step.
    replayed: dict[int, Group] = field(default_factory=dict)
    # The microbatches of each minibatch. Not used if the step is one optimizer step, which trains microbatches as they come.
    parts: list[list[Microbatch]] = field(default_factory=lambda: [[]])
    results: list[StepResult] = field(default_factory=list)  # of the applied optimizer steps
    # The result of `Trainer.survey`, for a loss that needs sums over the whole step.
    loss: Loss | None = None
    # Sum of the KL of each microbatch, if the KL is subtracted from the rewards.
    kl: list[float] = field(default_factory=list)
    rounds: int = 0  # joined by this rank while the step was filling
    begun: bool = False  # the trainer has an open step
    # An optimizer step has changed the weights. From now on the step must be committed.
    applied: bool = False
    committed: bool = False
    # Another rank was lost during the optimizer step, and may have applied that step. The groups of this step are then not made
    # claimable again, because they may be trained already.
    in_doubt: bool = False

    @property
    def group_ids(self) -> list[int]:
        """Ids of the claimed groups."""
        return [rows.group_id for rows in self.rows]

    def untrained(self) -> list[Rows]:
        """The claimed groups that the trainer does not have yet. They are the groups without advantages."""
        return [rows for rows in self.rows if ADVANTAGES not in rows.columns]


class GroupsFailed(Exception):
    """An error that these groups caused in a step, caught at the end of the step. `cause`: the original error."""

    def __init__(self, group_ids: Iterable[int], cause: Exception) -> None:
        super().__init__(str(cause))
        self.group_ids = frozenset(group_ids)
        self.cause = cause


@contextmanager
def blame_groups(group_ids: Iterable[int]) -> Iterator[None]:
    """Turns an error that the data or the size of these groups caused into GroupsFailed. Errors of asyncrl about something else
    (a closed lane, a hook, a lost rank) are raised unchanged."""
    try:
        yield
    except GroupsFailed:
        raise
    except Exception as error:
        if isinstance(error, AsyncrlError) and not isinstance(error, (DataError, OutOfMemory)):
            raise
        raise GroupsFailed(getattr(error, "groups", ()) or group_ids, error) from error


class FailedGroups:
    """Drops the groups that made a step fail. The second such step of a run ends the run."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        # The message about the groups of the first failed step.
        self._first_failure: str | None = None

    async def end(self, step: Step, error: GroupsFailed | DivergenceError) -> None:
        """Call this method after the step was aborted. Returns if the run can continue. Errors: a TrainStepError
        (DivergenceError if that was the cause) that names the failed groups of this step. The original error, if no group is known
        to be the cause."""
        ports = self._ports
        cause = error.cause if isinstance(error, GroupsFailed) else error
        failed = [rows for rows in step.rows if isinstance(error, DivergenceError) or rows.group_id in error.group_ids]
        names = ", ".join(map(_name, failed))
        message = f"{names} failed in the step ({type(cause).__name__}: {str(cause)[:MAX_ERROR_CHARACTERS]})"
        if ports.alone and self._first_failure is None and isinstance(error, GroupsFailed) and failed:
            with anyio.CancelScope(shield=True):
                for rows in failed:
                    await ports.book.end(rows.group_id, "dropped", message)
            self._first_failure = message
            ports.recorder.count("train/failed_groups", len(failed))
            ports.note(f"{message}: dropped; a second failed step ends the run")
            return
        # The run ends, so these groups need no end in the ledger.
        ports.store.clear([rows.group_id for rows in failed])
        if isinstance(error, DivergenceError) or not failed:
            raise cause
        if self._first_failure is not None:
            message += f"; before it {self._first_failure}. A run survives only one failed step"
        kind = DivergenceError if isinstance(cause, DivergenceError) else TrainStepError
        raise kind(message) from cause


def _name(rows: Rows) -> str:
    """The id of the group, and the name that its producer gave it, if any."""
    leases = ", ".join(dict.fromkeys(map(str, rows.leases)))
    return f"group {rows.group_id}" + (f" ({leases})" if leases else "")
