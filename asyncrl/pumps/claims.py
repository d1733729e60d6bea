"""Claiming: which of the groups that are ready a step gets, in the order that the ledger allows.

Two changes may let another group in: a group became ready, or the ledger moved. Each wakes whoever waits. A waiter takes the event
before it looks at what is ready, so it does not miss a change that comes while it looks.
"""

from __future__ import annotations

import anyio

from asyncrl.types import ClaimState

from .pipeline import Ports
from .step import Step


class Claims:
    """See the module docstring. `changed` is the event that the next change sets; each is used once."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stop_requested = False
        self._stop_turn: int | None = None
        self.changed = anyio.Event()
        ports.book.when_ready(self.notify)

    # -- whether there is another step -----------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """The step in progress, if any, is to be the last one."""
        turn = self._ports.ledger.turn
        return self._stop_requested or (self._stop_turn is not None and turn >= self._stop_turn)

    @property
    def finished(self) -> bool:
        """No step is to be begun any more."""
        limit = self._ports.config.train.max_steps
        return self.stopping or (limit is not None and self._ports.ledger.turn >= limit)

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later one."""
        self._stop_turn = turn

    def stop_after_step(self) -> None:
        """End after the step in progress (time limit): the runtime drops the groups that are not in it."""
        self._stop_requested = True
        self.notify()

    # -- what the step gets ----------------------------------------------------------------------------------------

    async def claim_ready(self, step: Step) -> ClaimState:
        """Every group that may have a place now. FULL: the step gets no more."""
        ports = self._ports
        while True:
            state, ticket = await ports.ledger.claim(ports.store.ready())
            if ticket is None:
                return state
            step.rows.append(ports.book.claimed(ticket))
            ports.recorder.gauge("queue/groups/depth", len(ports.store.ready()))

    @property
    def too_few(self) -> bool:
        """The groups of a step that gets no more are fewer than make one, over all ranks."""
        config = self._ports.config
        least = 1 if config.train.partial_final_step else config.rollout.groups_per_step
        # Every batch is the same number of versions, so each of its minibatches needs a group.
        return self._ports.ledger.statistics().claimed < max(least, config.algorithm.minibatches)

    async def drop_late(self) -> None:
        """The groups past their deadline, where late ones are not waited for."""
        ports = self._ports
        for ticket in ports.ledger.expired() if ports.config.rollout.late == "drop" else ():
            if await ports.book.end(ticket.group_id, "dropped", "past its deadline"):
                ports.counters["staleness/dropped"] += 1

    async def give_back(self) -> None:
        """The step was aborted: its groups are live again and can be claimed by the next one."""
        for ticket in await self._ports.ledger.rollback():
            self._ports.book.reopen(ticket)

    # -- waking ----------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = anyio.Event()

    async def watch(self, seen: int) -> None:
        """For ever: notify of the ledger's changes since number `seen`."""
        while True:
            seen = await self._ports.ledger.wait_changed(seen)
            self.notify()

    async def wait(self, changed: anyio.Event) -> None:
        """Until this event is set. `changed`: taken before the look at what is ready."""
        recorder = self._ports.recorder
        with recorder.timed("time/wait_for_group"):
            with recorder.wait("train pump", "a claimable group", on="score pump", cause="group"):
                await changed.wait()
