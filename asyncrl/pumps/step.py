"""The state of an unfinished step, and the groups that fail in the step.

    building microbatches or training raises ──▶ GroupsFailed ──▶ the step is aborted
        one training rank, first time in the run ──▶ the groups are dropped, the user gets a note, and the next step begins
        second time, or several training ranks   ──▶ the run ends with an error that names the groups

In both cases the records of the failed groups are removed from the ring of their producer, so the next run does not get them. If a
group of the replay buffer fails, the group leaves the buffer, and the claimed group that it replaced counts as failed.
The other groups of the step can be claimed again, in this run or in the next. If the optimizer step was applied, the step is
committed and not aborted, even if something fails later.

With several training ranks the run always ends, because other ranks may already wait in a collective of the step.
If a DivergenceError names no group (as for a gradient with NaN or inf), all records of the step leave the ring, and the run ends.
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

MAX_ERROR_CHARACTERS = 300  # length of the quoted error in a message


@dataclass(slots=True)
class Step:
    """The claimed groups of a step, and its progress. `version`: version of the weights before the step. `started`: when the
    step started, in seconds of the event loop's clock."""

    version: int
    started: float
    rows: list[Rows] = field(default_factory=list)
    # Replayed groups. The key is the id of the claimed group that the replayed group replaces in this step.
    replayed: dict[int, Group] = field(default_factory=dict)
    # The microbatches of each minibatch. Only used if the step takes several optimizer steps.
    parts: list[list[Microbatch]] = field(default_factory=lambda: [[]])
    results: list[StepResult] = field(default_factory=list)  # of the applied optimizer steps
    loss: Loss | None = None  # from `Trainer.survey`; None: no survey was made
    # For each microbatch the sum of the KL over its tokens, if the KL is subtracted from the rewards.
    kl: list[float] = field(default_factory=list)
    rounds: int = 0  # rounds joined while the step was filled; see train.py
    begun: bool = False  # the trainer has an open step
    applied: bool = False  # the weights have changed, so the step must be committed
    committed: bool = False
    # Another rank was lost during the optimizer step, and may have applied that step. The groups of this step are then not made
    # claimable again, because they may be trained already.
    in_doubt: bool = False

    @property
    def group_ids(self) -> list[int]:
        """Ids of the claimed groups."""
        return [rows.group_id for rows in self.rows]

    def untrained(self) -> list[Rows]:
        """The claimed groups without advantages: no microbatches were built from them yet."""
        return [rows for rows in self.rows if ADVANTAGES not in rows.columns]


class GroupsFailed(Exception):
    """These groups, or one of them, made a step fail. `TrainPump` catches this error. `cause`: the original error."""

    def __init__(self, group_ids: Iterable[int], cause: Exception) -> None:
        super().__init__(str(cause))
        self.group_ids = frozenset(group_ids)
        self.cause = cause


@contextmanager
def blame_groups(group_ids: Iterable[int]) -> Iterator[None]:
    """Turns an error that these groups may have caused into GroupsFailed. Errors of asyncrl that groups cannot cause (a closed
    lane, a hook, a lost rank) are raised unchanged."""
    try:
        yield
    except GroupsFailed:
        raise
    except Exception as error:
        if isinstance(error, AsyncrlError) and not isinstance(error, (DataError, OutOfMemory)):
            raise
        raise GroupsFailed(getattr(error, "groups", ()) or group_ids, error) from error


class FailedGroups:
    """Drops the groups that made a step fail. The run ends at the second failed step; with several training ranks, at the first."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._first_failure: str | None = None  # the message about the first failed step

    async def end(self, step: Step, error: GroupsFailed | DivergenceError) -> None:
        """Call this method after the step was aborted. Raises unless the run can continue. Errors: TrainStepError with the names of
        the failed groups; a DivergenceError stays a DivergenceError. If no group is known as the cause: the original error."""
        ports = self._ports
        cause = error.cause if isinstance(error, GroupsFailed) else error
        replaced = {group.group_id: group_id for group_id, group in step.replayed.items()}
        blamed = step.group_ids if isinstance(error, DivergenceError) else [replaced.get(g, g) for g in error.group_ids]
        failed = [rows for rows in step.rows if rows.group_id in blamed]
        names = ", ".join(_name(rows, step.replayed.get(rows.group_id)) for rows in failed)
        if ports.replay is not None:
            ports.replay.remove(replayed for replayed, group_id in replaced.items() if group_id in blamed)
        message = f"{names} failed in the step ({type(cause).__name__}: {str(cause)[:MAX_ERROR_CHARACTERS]})"
        if ports.trains_alone and self._first_failure is None and isinstance(error, GroupsFailed) and failed:
            with anyio.CancelScope(shield=True):
                for rows in failed:
                    await ports.book.end(rows.group_id, "dropped", message)
            self._first_failure = message
            ports.recorder.count("train/failed_groups", len(failed))
            ports.note(f"{message}: dropped; a second failed step ends the run")
            return
        # The run ends, so the ledger need not know that these groups have ended.
        ports.store.clear([rows.group_id for rows in failed])
        if isinstance(error, DivergenceError) or not failed:
            raise cause
        if self._first_failure is not None:
            message += f"; an earlier step failed, too: {self._first_failure}. A second failed step ends the run"
        kind = DivergenceError if isinstance(cause, DivergenceError) else TrainStepError
        raise kind(message) from cause


def _name(rows: Rows, replayed: Group | None) -> str:
    """The id of the group, the name that its producer gave it, if any, and the group that was trained in its place, if any."""
    leases = ", ".join(dict.fromkeys(map(str, rows.leases)))
    name = f"group {rows.group_id}" + (f" ({leases})" if leases else "")
    return name if replayed is None else f"{name} (replaced by group {replayed.group_id} of the replay buffer)"
