"""The shared-memory door: groups that other processes push (`asyncrl.client`) become groups of an embedded Runtime.

    async with Runtime(config) as runtime, RecordRing("my-run") as ring:
        await serve(runtime, ring)          # until the training ends or the ring is closed

    ring ──▶ stash, by (epoch, group) ──▶ whole, scored ──▶ runtime.submit (waits for a slot) ──▶ trained or dropped
     ▲                                                                                                │
     └──────────────────────────────── released: the producer's bytes are free again ◀────────────────┘

A full pipeline stops the reading, full rings stop the producers: the backpressure reaches them, and nothing is dropped for it.
What was not trained when the run ends stays in the ring for the next run of this name.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from asyncrl.data.stash import Stash, StashedGroup, StashRefused, Status
from asyncrl.errors import DataError, LifecycleError, RecordError
from asyncrl.records.trajectories import trajectories_of

if TYPE_CHECKING:
    from asyncrl.transport.record_ring import Delivery, RecordRing

    from .runtime import Runtime

MOST_GROUPS = 4096  # incomplete groups in the stash; their bytes are bounded by the rings


@dataclass(slots=True)
class DoorStatistics:
    submitted: int = 0  # groups
    too_old: int = 0  # groups that the ledger found too old
    refused: int = (
        0  # records whose members contradict their group, and groups that cannot be trained; see last_refusal
    )
    last_refusal: str = ""


class _Door:
    def __init__(self, runtime: Runtime, ring: RecordRing, statistics: DoorStatistics) -> None:
        self._runtime = runtime
        self._ring = ring
        self._stash: Stash[None] = Stash(MOST_GROUPS)
        self._counts = statistics
        self._submitted: dict[int, tuple[Delivery, ...]] = {}  # by the Runtime's own group id

    async def read(self) -> None:
        async for delivery in self._ring:
            whole = self._take(delivery)
            if whole is not None:
                await self._submit(whole)

    async def follow(self) -> None:
        """After every step: tell the version, and release what ended."""
        self._ring.publish_version(self._runtime.version)
        async for report in self._runtime.steps():
            self._ring.publish_version(report.version)
            self.release_ended()

    def release_ended(self) -> None:
        live = {ticket.group_id for ticket in self._runtime._rooms.ledger.live_groups()}
        for group_id in [group_id for group_id in self._submitted if group_id not in live]:
            _release(self._submitted.pop(group_id))

    def _take(self, delivery: Delivery) -> StashedGroup[None] | None:
        """Put the new members into the stash; the group, where they completed it."""
        record, kept, whole = delivery.record, False, None
        try:
            # Copied: reports of a step may be read after its records were released.
            trajectories = trajectories_of(record)
            if len(delivery.fresh) == record.size:
                whole = self._stash.add_whole(trajectories, None, lease=delivery, epoch=record.epoch)
                if whole is not None:
                    return whole
            for position in delivery.fresh:
                arrival = self._stash.add(trajectories[position], None, lease=delivery, epoch=record.epoch)
                kept |= arrival.status in (Status.WAITING, Status.WHOLE)
                whole = arrival.whole or whole
        except (RecordError, StashRefused) as error:
            self._refuse(error)
        if not kept:
            delivery.release()
        return whole

    async def _submit(self, group: StashedGroup[None]) -> None:
        leases = tuple(dict.fromkeys(group.leases))
        rewards = [trajectory.reward for trajectory in group.trajectories]
        group_id = self._own_id()
        try:
            if any(reward is None for reward in rewards):
                raise DataError(f"group {group.key.group_id} of epoch {group.key.epoch} came without rewards")
            trajectories = [replace(trajectory, group_id=group_id) for trajectory in group.trajectories]
            accepted = await self._runtime.submit(trajectories, [float(reward or 0.0) for reward in rewards])
        except (DataError, ValueError) as error:
            self._refuse(error)
            _release(leases)
            return
        if not accepted:
            self._counts.too_old += 1
            _release(leases)
            return
        self._counts.submitted += 1
        self._submitted[group_id] = leases
        self.release_ended()  # it may have ended before we came back

    def _own_id(self) -> int:
        """A group id that no other group of this run has: producers number theirs as they like."""
        runtime = self._runtime
        group_id, runtime._next_group = runtime._next_group, runtime._next_group + runtime.world.world_size
        return group_id

    def _refuse(self, error: Exception) -> None:
        self._counts.refused += 1
        self._counts.last_refusal = str(error)


def _release(leases: tuple[Delivery, ...]) -> None:
    for delivery in leases:
        delivery.release()


async def serve(runtime: Runtime, ring: RecordRing, statistics: DoorStatistics | None = None) -> DoorStatistics:
    """Feed `runtime` from `ring` until the training ends or the ring is closed. Cancel it to stop earlier.

    Both stay open; what waits in the stash, or was submitted and not trained, is not released. A `statistics` that is
    given is kept up to date meanwhile.
    """
    counts = statistics or DoorStatistics()
    door = _Door(runtime, ring, counts)
    async with anyio.create_task_group() as tasks:

        async def follow() -> None:
            await door.follow()
            tasks.cancel_scope.cancel()  # no step can come any more

        tasks.start_soon(follow)
        with contextlib.suppress(LifecycleError):  # the training ended while a group waited for its slot
            await door.read()
        tasks.cancel_scope.cancel()
    door.release_ended()
    return counts
