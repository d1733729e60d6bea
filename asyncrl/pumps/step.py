"""One step in the making, and the groups that fail in it.

    building, a forward ──raises──▶ GroupsFailed ──▶ the step is aborted ──▶ one rank, first time: dropped and noted; the next step
                                                                        └──▶ else: the run ends with the names

Either way the records of the failed groups leave their ring, so the next run of it does not fail on them again. The step's other
groups are live again, or wait for the next run. A step whose optimizer step was applied is committed, whatever fails then.

Of several ranks none drops a group by itself: the others may be in a collective that expects it. A step whose gradient is not
finite does not say which group is to blame: all its records leave the ring, and the run ends.
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

# Characters of an error in a message about the groups that failed with it.
SHOWN = 300


@dataclass(slots=True)
class Step:
    """The claimed groups of a step and how far it came. `version`: at which its first microbatch is trained; `started`: on the
    loop's clock."""

    version: int
    started: float
    rows: list[Rows] = field(default_factory=list)
    # By the id of the group whose place the replayed group takes.
    replayed: dict[int, Group] = field(default_factory=dict)
    # One list for each of the batch's `minibatches`; empty where a batch takes one optimizer step, which streams them.
    parts: list[list[Microbatch]] = field(default_factory=lambda: [[]])
    # Of its optimizer steps, as they are applied.
    results: list[StepResult] = field(default_factory=list)
    # Bound to this step, where the loss has to know the whole of it.
    loss: Loss | None = None
    # Sum of the KL per microbatch, where it is taken off the rewards.
    kl: list[float] = field(default_factory=list)
    # That this rank joined while the step filled.
    rounds: int = 0
    # The trainer has an open step.
    begun: bool = False
    # The weights have moved by it: from then on it can only be committed.
    applied: bool = False
    committed: bool = False
    # Another rank left during the optimizer step, and may have applied it. This step's groups are given back to nobody: if that
    # rank has applied it, they are trained.
    in_doubt: bool = False

    @property
    def group_ids(self) -> list[int]:
        """Of the claimed groups."""
        return [rows.group_id for rows in self.rows]

    def untrained(self) -> list[Rows]:
        """Claimed, and not yet given to the trainer: they have no advantages."""
        return [rows for rows in self.rows if ADVANTAGES not in rows.columns]


class GroupsFailed(Exception):
    """Raised inside a step, caught where the step ends. `cause`: the error that these groups brought about."""

    def __init__(self, group_ids: Iterable[int], cause: Exception) -> None:
        super().__init__(str(cause))
        self.group_ids = frozenset(group_ids)
        self.cause = cause


@contextmanager
def laid_to(group_ids: Iterable[int]) -> Iterator[None]:
    """Turns an error that comes from the data or the size of these groups into GroupsFailed. Our errors about something else (a
    closed lane, a hook, a lost rank) go through."""
    try:
        yield
    except GroupsFailed:
        raise
    except Exception as error:
        if isinstance(error, AsyncrlError) and not isinstance(error, (DataError, OutOfMemory)):
            raise
        raise GroupsFailed(getattr(error, "groups", ()) or group_ids, error) from error


class FailedGroups:
    """Drops the groups that a step failed on, once in a run; the second time it ends the run."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        # The sentence about the groups that were dropped.
        self._dropped: str | None = None

    async def end(self, step: Step, error: GroupsFailed | DivergenceError) -> None:
        """After the step was aborted. Returns where the run goes on. Errors: TrainStepError or DivergenceError with the names of
        the groups; the cause itself, where no group is to blame."""
        ports, cause = self._ports, error.cause if isinstance(error, GroupsFailed) else error
        rows = [each for each in step.rows if isinstance(error, DivergenceError) or each.group_id in error.group_ids]
        names = ", ".join(map(_name, rows))
        sentence = f"{names} failed in the step ({type(cause).__name__}: {str(cause)[:SHOWN]})"
        if ports.ranks == 1 and self._dropped is None and isinstance(error, GroupsFailed) and rows:
            with anyio.CancelScope(shield=True):
                for each in rows:
                    await ports.book.end(each.group_id, "dropped", sentence)
            self._dropped = sentence
            ports.recorder.count("train/failed_groups", len(rows))
            ports.note(f"{sentence}: dropped; a second one ends the run")
            return
        # Their tickets end with the run.
        ports.store.clear([each.group_id for each in rows])
        if isinstance(error, DivergenceError) or not rows:
            raise cause
        if self._dropped is not None:
            sentence += f"; before it {self._dropped}. The first was dropped, the second ends the run"
        kind = DivergenceError if isinstance(cause, DivergenceError) else TrainStepError
        raise kind(sentence) from cause


def _name(rows: Rows) -> str:
    """As its producer calls it, where it has one."""
    lent = ", ".join(dict.fromkeys(map(str, rows.leases)))
    return f"group {rows.group_id}" + (f" ({lent})" if lent else "")
