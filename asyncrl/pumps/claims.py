"""Claiming: which groups a step gets. The rows that are ready, in the order that the ledger allows.

A change that may let another group in (a group became ready, the ledger moved) wakes whoever waits. It is taken before the
look: what changes while one looks is not slept over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import anyio

from asyncrl.ports import Ledger
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import ClaimState

from .book import GroupBook
from .step import Step


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """What of the configuration decides which groups a step gets."""

    least: int  # claimed groups, over all ranks, that make a step, where no more can come
    drops_late: bool  # `rollout.late: drop`
    max_steps: int | None


class Claims:
    """See the module docstring. `changed` is the event that the next change sets; each is used once."""

    def __init__(
        self, ledger: Ledger, book: GroupBook, rules: ClaimRules, recorder: Recorder, counters: Counter[str]
    ) -> None:
        self._ledger = ledger
        self._book = book
        self._rules = rules
        self._recorder = recorder
        self._counters = counters
        self._stop_requested = False
        self._stop_turn: int | None = None
        self.changed = anyio.Event()
        book.when_ready(self.notify)

    # -- whether there is another step -----------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """The step in progress, if any, was said to be the last one."""
        return self._stop_requested or (self._stop_turn is not None and self._ledger.turn >= self._stop_turn)

    @property
    def finished(self) -> bool:
        """No step is to be begun any more."""
        limit = self._rules.max_steps
        return self.stopping or (limit is not None and self._ledger.turn >= limit)

    @property
    def exhausted(self) -> bool:
        """Nothing can come any more: every rank said so, and no group is left."""
        return self._ledger.finished

    @property
    def seen(self) -> int:
        """The ledger's changes up to now, for `watch`."""
        return self._ledger.changes

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later one."""
        self._stop_turn = turn

    def stop_after_step(self) -> None:
        """End after the step in progress (time limit): whatever is not in it is dropped by the runtime."""
        self._stop_requested = True
        self.notify()

    # -- what the step gets ----------------------------------------------------------------------------------------

    async def claim_ready(self, step: Step) -> ClaimState:
        """Every group that may have a place now. FULL: the step gets no more."""
        while True:
            state, ticket = await self._ledger.claim(self._book.ready())
            if ticket is None:
                return state
            step.rows.append(self._book.claimed(ticket))
            self._recorder.gauge("queue/groups/depth", len(self._book.ready()))

    @property
    def too_few(self) -> bool:
        """Of a step that gets no more: it is none."""
        return self._ledger.statistics().claimed < self._rules.least

    async def drop_late(self) -> None:
        """The groups past their deadline, where late ones are not waited for."""
        for ticket in self._ledger.expired() if self._rules.drops_late else ():
            if await self._book.end(ticket.group_id, "dropped", "past its deadline"):
                self._counters["staleness/dropped"] += 1

    async def give_back(self) -> None:
        """The step was aborted: its groups are live again and can be claimed by the next one."""
        for ticket in await self._ledger.rollback():
            self._book.reopen(ticket)

    # -- waking ----------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake who waits for a change."""
        self.changed.set()
        self.changed = anyio.Event()

    async def watch(self, seen: int) -> None:
        """For ever: the ledger's changes since number `seen`."""
        while True:
            seen = await self._ledger.wait_changed(seen)
            self.notify()

    async def wait(self, changed: anyio.Event) -> None:
        """Until this event is set, told to the recorder as waiting for a group. `changed`: taken before the look at what is
        ready."""
        with self._recorder.timed("time/wait_for_group"):
            with self._recorder.wait("train pump", "a claimable group", on="score pump", cause="group"):
                await changed.wait()
