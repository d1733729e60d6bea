"""The supervisor: the one task group of a run. Its tasks are the pumps, which move groups of completions from stage to stage.

    async with Supervisor() as supervisor:
        supervisor.start("rollout pump", rollout)       any pump fails  -> all others are cancelled and awaited,
        supervisor.start("train pump", train)                              then its exception is raised here
                                                        one pump ends   -> the others go on

Guarantees. The block raises the first exception that happened, without an exception group around it, and not the cancellations that
followed. If a pump raised the exception, a note on the exception names the pump. Each later failure with another text gets a
further note. Errors of closed queues get no note, because the first failure has closed the queues. A cancellation of a pump by
other code than the supervisor is a failure, too: the other pumps would wait for this pump without end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVarTuple, Unpack

import anyio
from anyio.abc import TaskGroup

from ..errors import LifecycleError

Args = TypeVarTuple("Args")


class Supervisor:
    """See the module docstring. One task must open and close the supervisor, as anyio requires."""

    def __init__(self) -> None:
        self._group: TaskGroup | None = None  # while the supervisor is open
        self._owner: asyncio.Task[object] | None = None
        self._failures: list[BaseException] = []  # in the order in which they happened

    async def __aenter__(self) -> Supervisor:
        self._owner = asyncio.current_task()
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert self._group is not None
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._note_failure(error)
        suppressed: bool | None = None
        group_error: BaseException | None = None
        try:
            suppressed = await self._group.__aexit__(kind, error, trace)  # type: ignore[arg-type]  # `trace` is typed `object`
        except BaseException as exc:
            group_error = exc
        finally:
            self._group = None
        # Raised outside of the handler: inside, the exception group would become the context of an exception that it contains.
        if self._failures:
            raise _with_later_errors(self._failures)
        if group_error is not None:
            raise group_error
        return bool(suppressed)

    def start(self, name: str, pump: Callable[[Unpack[Args]], Awaitable[object]], *args: *Args) -> None:
        """Start a task with this name that runs `pump(*args)`."""
        if self._group is None:
            raise LifecycleError(f"the supervisor is not open: it cannot start {name!r}")
        self._group.start_soon(self._run, name, pump, args, name=name)

    @property
    def ending(self) -> bool:
        """Whether the supervisor is open and its tasks were cancelled. Callable from any thread."""
        group = self._group
        return group is not None and group.cancel_scope.cancel_called

    @property
    def failure(self) -> BaseException | None:
        """The first failure, if any, while the supervisor is open. Callable from any thread."""
        return next(iter(self._failures), None)

    def cancel(self) -> None:
        """Cancel every pump and the body of the block. The block then ends without an exception, unless there was a failure."""
        if self._group is not None:
            self._group.cancel_scope.cancel()

    def fail(self, error: BaseException) -> None:
        """End the run with `error`, as if a pump had raised it now. On the loop's thread only."""
        self._note_failure(error)
        self.cancel()

    async def _run(self, name: str, pump: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        try:
            await pump(*args)
        except asyncio.CancelledError:
            if self._cancelled_on_purpose():
                raise
            error = LifecycleError(f"{name} was cancelled, but not by its supervisor")
            self._note_failure(error, name)
            raise error from None
        except BaseException as exc:
            self._note_failure(exc, name)
            raise

    def _cancelled_on_purpose(self) -> bool:
        assert self._group is not None and self._owner is not None
        if self._group.cancel_scope.cancel_called or self._owner.cancelling():
            return True
        return anyio.current_effective_deadline() == -math.inf  # a scope around the supervisor was cancelled

    def _note_failure(self, error: BaseException, name: str | None = None) -> None:
        for leaf in leaves(error):
            if any(leaf is failure for failure in self._failures):
                continue
            if name is not None:
                leaf.add_note(f"in {name}")
            self._failures.append(leaf)


def spawn(group: TaskGroup, name: str, work: Callable[[Unpack[Args]], Awaitable[object]], *args: *Args) -> None:
    """Run `work(*args)` as a task of `group`. If a cancellation comes neither from the group nor from a scope around the group, the
    task raises LifecycleError. A bare task group would treat such a cancellation as an ordinary end."""

    async def run() -> None:
        try:
            await work(*args)
        except asyncio.CancelledError:
            if anyio.current_effective_deadline() == -math.inf:
                raise
            raise LifecycleError(f"{name} was cancelled, but not by its task group") from None

    group.start_soon(run, name=name)


@asynccontextmanager
async def plain_task_group() -> AsyncIterator[TaskGroup]:
    """A task group whose block raises the first error itself, not an exception group, so that callers can catch documented
    errors. Later errors are notes on the first."""
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        failure = _with_later_errors(leaves(group) or [group])
    # Raised outside of the handler: inside, the exception group would become the context of `failure`.
    if failure is not None:
        raise failure


def _with_later_errors(failures: list[BaseException]) -> BaseException:
    """The first failure, with a note for each different later failure. Empties the list, to avoid a reference cycle."""
    first, *others = failures
    noted = {_line(first)}
    for other in others:
        if _line(other) not in noted and not _is_closed_queue(other):
            noted.add(_line(other))
            notes = "; ".join(getattr(other, "__notes__", ()))
            first.add_note(f"afterwards also: {_line(other)}" + (f" ({notes})" if notes else ""))
    failures.clear()
    return first


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_closed_queue(error: BaseException) -> bool:
    """Whether the error only says that an end of a queue is closed. An error with a message says more."""
    return isinstance(error, (anyio.BrokenResourceError, anyio.ClosedResourceError)) and not str(error)


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups, in order, without cancellations."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for child in error.exceptions for leaf in leaves(child)]
    return [] if isinstance(error, asyncio.CancelledError) else [error]
