"""A group that fails in a step all the same: dropped by its name, once; the second one ends the run.

    building, a forward ──raises──▶ GroupsFailed ──▶ the step is aborted ──▶ one rank, first time: dropped and noted; the next step
                                                                        └──▶ else: the run ends with the names

Either way the records of these groups leave their ring: the next run of it does not fail on them again. The step's other
groups are live again, or wait for the next run. A step whose optimizer step was applied is committed, whatever fails then.

Of several ranks none drops by itself: the others may be in a collective that expects it. A step whose gradient is not finite
does not say whose fault that is: all its records leave the ring, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import anyio

from asyncrl.data.store import Rows
from asyncrl.errors import AsyncrlError, DataError, DivergenceError, OutOfMemory, TrainStepError
from asyncrl.telemetry.recorder import Recorder

from .book import GroupBook
from .step import Step

SHOWN = 300  # characters of an error


class GroupsFailed(Exception):
    """Raised inside a step, caught where the step ends. `cause`: what these groups brought about."""

    def __init__(self, group_ids: Iterable[int], cause: Exception) -> None:
        super().__init__(str(cause))
        self.group_ids = frozenset(group_ids)
        self.cause = cause


@contextmanager
def laid_to(group_ids: Iterable[int]) -> Iterator[None]:
    """An error that comes of their data, or of their size. Ours that are about something else (a closed lane, a hook, a lost rank)
    go through."""
    try:
        yield
    except GroupsFailed:
        raise
    except Exception as error:
        if isinstance(error, AsyncrlError) and not isinstance(error, (DataError, OutOfMemory)):
            raise
        raise GroupsFailed(getattr(error, "groups", ()) or group_ids, error) from error


class Failing:
    """Of one rank: what becomes of groups that a step failed on."""

    def __init__(self, book: GroupBook, recorder: Recorder, note: Callable[[str], None], *, alone: bool) -> None:
        """`alone`: no other rank takes part in the steps."""
        self._book = book
        self._recorder = recorder
        self._note = note
        self._alone = alone
        self._before: str | None = None  # the group that was dropped, with its reason

    async def step_failed(self, step: Step, error: GroupsFailed | DivergenceError) -> None:
        """After the step was aborted. Returns where the run goes on. Errors: TrainStepError or DivergenceError with the names;
        the cause itself, where nobody is to blame."""
        cause = error.cause if isinstance(error, GroupsFailed) else error
        rows = [each for each in step.rows if isinstance(error, DivergenceError) or each.group_id in error.group_ids]
        names = ", ".join(map(_name, rows))
        said = f"{names} failed in the step ({type(cause).__name__}: {str(cause)[:SHOWN]})"
        goes_on = self._alone and self._before is None and isinstance(error, GroupsFailed) and bool(rows)
        if goes_on:
            with anyio.CancelScope(shield=True):
                for each in rows:
                    await self._book.end(each.group_id, "dropped", said)
            self._before = said
            self._recorder.count("train/failed_groups", len(rows))
            self._note(f"{said}: dropped; a second one ends the run")
            return
        self._book.store.clear([each.group_id for each in rows])  # their tickets end with the run
        if isinstance(error, DivergenceError) or not rows:
            raise cause
        before = (
            ""
            if self._before is None
            else f"; before it {self._before}. The first was dropped, the second ends the run"
        )
        kind = DivergenceError if isinstance(cause, DivergenceError) else TrainStepError
        raise kind(f"{said}{before}") from cause


def _name(rows: Rows) -> str:
    """As its producer calls it, where it has one."""
    lent = ", ".join(dict.fromkeys(map(str, rows.leases)))
    return f"group {rows.group_id}" + (f" ({lent})" if lent else "")
