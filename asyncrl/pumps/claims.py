"""Claims ready groups for the open step, in the order that the ledger allows.

A claim that failed may succeed after a change: a further group is ready, or the ledger has changed. Each change sets the event
`Claims.changed`. Read that event before you call `claim_ready`; then a change between the call and the wait is not missed.
"""

from __future__ import annotations

import anyio

from asyncrl.types import ClaimState

from .pipeline import Ports
from .step import Step


class Claims:
    """Claims groups for the train pump. At each change the event `changed` is set, and replaced by a new event."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stop_requested = False
        self._stop_turn: int | None = None
        self.changed = anyio.Event()
        ports.book.on_ready = self.notify

    @property
    def finished(self) -> bool:
        """Whether no further step may begin."""
        limits = self._stop_turn, self._ports.config.train.max_steps
        return self._stop_requested or any(limit is not None and self._ports.ledger.turn >= limit for limit in limits)

    def stop_at(self, turn: int) -> None:
        """Begin no step of this turn or a later turn."""
        self._stop_turn = turn

    def stop_after_step(self) -> None:
        """At a time limit: make the open step the last step. The runtime drops the groups that this step does not train."""
        self._stop_requested = True
        self.notify()

    async def claim_ready(self, step: Step) -> ClaimState:
        """Claim all ready groups that can have a place in `step` now. Returns WAIT if `step` may get more groups, FULL if not."""
        ports = self._ports
        while True:
            state, ticket = await ports.ledger.claim(ports.store.ready())
            if ticket is None:
                return state
            step.rows.append(ports.book.claim(ticket))
            ports.recorder.gauge("queue/groups/depth", len(ports.store.ready()))

    @property
    def has_too_few_groups(self) -> bool:
        """Whether the claimed groups of all ranks are too few for a step. Only valid when no further group can be claimed."""
        config = self._ports.config
        needed = 1 if config.train.partial_final_step else config.rollout.groups_per_step
        # Each minibatch is one optimizer step and needs a group. With fewer groups a step would advance the version less.
        return self._ports.ledger.statistics().claimed < max(needed, config.algorithm.minibatches)

    def notify(self) -> None:
        """Wake every task that waits for a change."""
        self.changed.set()
        self.changed = anyio.Event()

    async def watch(self, seen: int) -> None:
        """Call `notify` for each change of the ledger after the change number `seen`. Runs until it is cancelled."""
        while True:
            seen = await self._ports.ledger.wait_changed(seen)
            self.notify()

    async def wait(self, changed: anyio.Event) -> None:
        """Wait for `changed`, a value of `Claims.changed` that was read before the last call of `claim_ready`."""
        recorder = self._ports.recorder
        waiting = recorder.wait("train pump", "a claimable group", on="score pump", cause="group")
        with recorder.timed("time/wait_for_group"), waiting:
            await changed.wait()


async def drop_late(ports: Ports) -> None:
    """If `rollout.late` is `drop`: drop this rank's unclaimed groups that are past their deadline."""
    if ports.config.rollout.late == "drop":
        for ticket in ports.ledger.expired():
            if await ports.book.end(ticket.group_id, "dropped", "past its deadline"):
                ports.recorder.count("staleness/dropped")
