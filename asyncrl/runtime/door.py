"""The shared-memory door: groups that other processes push (`asyncrl.client`) become groups of a Runtime.

    door: {ring: my-run}                    # in the configuration of `asyncrl run`; or inside a program of your own:

    async with RecordRing("my-run") as ring, Runtime(config) as runtime:
        await serve(runtime, ring)          # until the training ends or the ring is closed

    ring ──▶ stash, by (epoch, group) ──▶ whole, scored ──▶ runtime.submit (waits for a slot) ──▶ trained or dropped
     ▲          │ time is up, epoch over, too old: dropped and counted                                │
     └──────────┴───── released: the producer's bytes are free again ◀────────────────────────────────┘

* A full ring stops its producer; nothing is dropped for want of room. What lies in the rings is read at once, so that the
  time of an incomplete group is the producers' and never the training's.
* A group of known versions for which no place is left within `rollout.max_staleness` is dropped and counted at once: its
  producer can play a new one with the weights of today. One that says no version waits for its slot. Where the places are
  taken by others, the dropped records keep their room in the ring until one of those others ended: a producer that is
  faster than the training waits at its full ring. It would otherwise push, and be dropped, as fast as the loop can read,
  and take the time of the step that could make room.
* An incomplete group ends by `door.timeout_s` from its first member (`door.on_timeout`: drop it, train what came, or end the
  run), `door.reconnect_s` after the last producer of its epoch went, or when a member of it is too old to be trained.
* A record is released in the very step of the loop that commits or drops its group: a checkpoint of that step finds it gone,
  and a run that goes on from there does not train it again.
* What was not trained when the run ends stays in the ring for the next run of this name. The ring is opened before the
  Runtime and closed after it: what is trained once the ring is closed cannot be released, and would come again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.resolve import staleness_bound, turns_bound, versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.data.stash import Ending, Stash, StashedGroup, StashRefused, Status
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, DataError, LifecycleError, RecordError
from asyncrl.records.check import Limits, check_trains, check_trajectory
from asyncrl.records.trajectories import trajectories_of
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

if TYPE_CHECKING:
    from asyncrl.pumps.pipeline import StepReport
    from asyncrl.transport.rings.record_ring import Delivery

    from .runtime import Runtime

MOST_GROUPS = 4096  # incomplete groups in the stash; their bytes are bounded by the rings
MOST_WHOLE = 1 << 30  # whole groups that wait for slots: the rings, whose records they hold, bound them
NOTES = 10  # refusals that are shown on the live view; all are counted


@dataclass(slots=True)
class DoorStatistics:
    """All but the last count groups."""

    submitted: int = 0
    too_old: int = 0  # to be trained within `max_staleness`
    incomplete: int = 0  # dropped: their time was up, or their epoch over
    partial: int = 0  # submitted with the members that came in time
    refused: int = (
        0  # records that contradict their group, groups that cannot be trained, or not by this run; last_refusal
    )
    last_refusal: str = ""


def limits_of(runtime: Runtime) -> Limits:
    config = runtime.config
    return replace(runtime._rooms.limits, longest=config.data.max_prompt_tokens + config.rollout.max_tokens)


class _Door:
    """Hears every step (`push`) and the end of the training (`close`) in the step of the loop in which they happen."""

    def __init__(self, runtime: Runtime, ring: RecordRing, statistics: DoorStatistics) -> None:
        settings = runtime.config.door
        self._runtime = runtime
        self._ring = ring
        self._limits = limits_of(runtime)
        self._reconnect_s = settings.reconnect_s
        self._stash: Stash[None] = Stash(
            MOST_GROUPS, timeout_s=settings.timeout_s, on_timeout=settings.on_timeout, clock=anyio.current_time
        )
        self._counts = statistics
        whole: tuple[QueueSender[StashedGroup[None]], QueueReceiver[StashedGroup[None]]] = open_queue(
            "door", MOST_WHOLE, runtime.recorder
        )
        self._whole_in, self._whole = whole
        self._submitted: dict[int, tuple[Delivery, ...]] = {}  # by the Runtime's own group id
        self._crowded: list[Delivery] = []  # of dropped groups, until a group ends
        self._feeders: dict[int, set[bytes]] = {}  # epoch -> its producers that have not gone
        self._over: dict[int, float] = {}  # epoch without producers -> when it ends
        self._changed = anyio.Event()
        self._ended = False
        self.scope = anyio.CancelScope()

    # -- what the Runtime and the ring call

    def push(self, report: StepReport) -> None:
        """A step was committed."""
        with contextlib.suppress(anyio.ClosedResourceError):  # the ring may be closed before the Runtime is
            self._ring.publish_version(report.version)
        for group in self._stash.evict_stale(report.version, staleness_bound(self._runtime.config)):
            self._drop(group)
        self.release_ended()

    def close(self) -> None:
        """No step can come any more. Groups that are ended from here on were not trained: the next run gets them."""
        self._ended = True
        self.scope.cancel()

    def producer_gone(self, producer: bytes) -> None:
        for epoch, feeders in list(self._feeders.items()):
            feeders.discard(producer)
            if not feeders:
                del self._feeders[epoch]
                self._over[epoch] = anyio.current_time() + self._reconnect_s
        self._changed.set()
        self._changed = anyio.Event()

    # -- tasks

    async def read(self) -> None:
        async for delivery in self._ring:
            self._take(delivery)
            await anyio.lowlevel.checkpoint()  # a ring that is full of records must not hold the loop

    async def submit(self) -> None:
        with contextlib.suppress(LifecycleError):  # the training ended while a group waited for its slot
            async for group in self._whole:
                await self._submit(group)
                await anyio.lowlevel.checkpoint()  # many may have come together, and none of them may have to wait

    async def expire(self) -> None:
        """Errors: StallError with `on_timeout: error`."""
        while True:
            for group in await self._stash.wait_expired():
                if group.trainable:
                    self._counts.partial += 1
                    self._whole_in.put_nowait(group)
                else:
                    self._drop(group)

    async def end_epochs(self) -> None:
        while True:
            changed, now = self._changed, anyio.current_time()
            for epoch in [epoch for epoch, at in self._over.items() if at <= now]:
                del self._over[epoch]
                for group in self._stash.end_epoch(epoch):
                    self._drop(group)
            with anyio.CancelScope(deadline=min(self._over.values(), default=math.inf)):
                await changed.wait()

    async def follow_books(self) -> None:
        """Groups end between two steps too (filters, deadlines), and a full ring may wait for just that."""
        ledger = self._runtime._rooms.ledger
        seen, ended = ledger.changes, 0
        while True:
            self.release_ended()
            if ended != (ended := self._ended_groups()):
                _release(self._crowded)
                self._crowded.clear()
            seen = await ledger.wait_changed(seen)

    # -- inside

    def release_ended(self) -> None:
        if self._ended or not self._submitted:
            return
        live = {ticket.group_id for ticket in self._runtime._rooms.ledger.live_groups()}
        for group_id in [group_id for group_id in self._submitted if group_id not in live]:
            _release(self._submitted.pop(group_id))

    def _take(self, delivery: Delivery) -> None:
        """Put the new members into the stash; the group into the queue, where they completed it."""
        record, kept = delivery.record, False
        self._feeders.setdefault(record.epoch, set()).add(record.producer)
        self._over.pop(record.epoch, None)
        try:
            # Copied: reports of a step may be read after its records were released.
            trajectories = trajectories_of(record)
            for position in delivery.fresh:
                check_trajectory(trajectories[position], self._limits)
                check_trains(trajectories[position])
        except (RecordError, DataError) as error:  # such a group can never be whole
            self._refuse(error, record.group, record.epoch)
            rest = self._stash.discard(record.group, record.epoch)
            _release((delivery, *(rest.leases if rest is not None else ())))
            return
        if len(delivery.fresh) == record.size:
            whole = self._stash.add_whole(trajectories, None, lease=delivery, epoch=record.epoch)
            if whole is not None:
                self._whole_in.put_nowait(whole)
                return
        for position in delivery.fresh:
            try:
                arrival = self._stash.add(trajectories[position], None, lease=delivery, epoch=record.epoch)
            except StashRefused as error:
                self._refuse(error, record.group, record.epoch)
                continue
            kept |= arrival.status in (Status.WAITING, Status.WHOLE)
            for group in arrival.ended:
                self._drop(group)
            if arrival.whole is not None:
                self._whole_in.put_nowait(arrival.whole)
        if not kept:
            delivery.release()

    async def _submit(self, group: StashedGroup[None]) -> None:
        leases = tuple(dict.fromkeys(group.leases))
        rewards = [trajectory.reward for trajectory in group.trajectories]
        group_id, ended = self._own_id(), self._ended_groups()
        try:
            if any(reward is None for reward in rewards):
                raise DataError("it came without rewards")
            size = len(group.trajectories)  # smaller than it says, where some members did not come in time
            trajectories = [
                replace(trajectory, group_id=group_id, member=place, group_size=size)
                for place, trajectory in enumerate(group.trajectories)
            ]
            accepted = await self._runtime.submit(trajectories, [float(reward or 0.0) for reward in rewards])
        except (DataError, ValueError) as error:  # VersionAhead too: what an earlier run of this name left behind
            self._refuse(error, group.key.group_id, group.key.epoch)
            _release(leases)
            return
        if accepted:
            self._counts.submitted += 1
            self._submitted[group_id] = leases
            self.release_ended()  # it may have ended before we came back
        else:
            self._too_old()
            ledger, per_batch = self._runtime._rooms.ledger, versions_per_batch(self._runtime.config)
            oldest = min(t.oldest_version for t in trajectories if t.oldest_version >= 0)
            hopeless = oldest // per_batch + turns_bound(self._runtime.config) < ledger.turn
            if hopeless or ended != self._ended_groups():
                _release(leases)  # nobody has its place (any more): no other end would bring the room back
            else:
                self._crowded += leases

    def _ended_groups(self) -> int:
        books = self._runtime._rooms.ledger.statistics()
        return books.admitted - books.live - books.claimed

    def _own_id(self) -> int:
        """A group id that no other group of this run has: producers number theirs as they like."""
        runtime = self._runtime
        group_id, runtime._next_group = runtime._next_group, runtime._next_group + runtime.world.world_size
        return group_id

    def _drop(self, group: StashedGroup[None]) -> None:
        """An incomplete group ended."""
        if group.ending is Ending.STALE:
            self._too_old()
        else:
            self._counts.incomplete += 1
            self._runtime.recorder.count("door/incomplete")
        _release(tuple(dict.fromkeys(group.leases)))

    def _too_old(self) -> None:
        self._counts.too_old += 1
        self._runtime.recorder.count("door/too_old")
        if self._counts.too_old == 1:
            self._runtime.note(
                "door: a group was too old to be trained within rollout.max_staleness and was dropped; later ones are counted "
                "as door/too_old"
            )

    def _refuse(self, error: Exception, group: int, epoch: int) -> None:
        self._counts.refused += 1
        self._counts.last_refusal = f"group {group} of epoch {epoch}: {error}"
        self._runtime.recorder.count("door/refused")
        if self._counts.refused <= NOTES:
            self._runtime.note(f"door: refused: {self._counts.last_refusal}")


def _release(leases: Iterable[Delivery]) -> None:
    for delivery in leases:
        delivery.release()


def ring_name(config: Config, rank: int) -> str:
    """Each rank trains what comes through a ring of its own. Errors: ConfigError."""
    ring = config.door.ring
    if ring is None:
        raise ConfigError("door.ring is not set: name the ring that producers attach to")
    return ring if rank == 0 else f"{ring}-{rank}"


def rings_here(config: Config, world: World) -> list[str]:
    """The rings of all ranks of this machine, that of its first rank first. Errors: ConfigError."""
    first = world.rank - world.local_rank
    return [ring_name(config, rank) for rank in range(first, first + world.local_world_size)]


def ring_of(config: Config) -> RecordRing:
    """The ring that `door.*` asks this rank for; open it with `async with`. Errors: ConfigError."""
    settings = config.door
    return RecordRing(
        ring_name(config, World.from_env().rank),
        RingSettings(
            size=settings.ring_mib << 20,
            slots=settings.producer_records,
            ring_bytes=settings.producer_mib << 20,
        ),
    )


async def serve(runtime: Runtime, ring: RecordRing, statistics: DoorStatistics | None = None) -> DoorStatistics:
    """Feed `runtime` from `ring` until the training ends or the ring is closed. Cancel it to stop earlier.

    Both stay open; what waits in the stash is not released. A `statistics` that is given is kept up to date.
    Errors: StallError with `door.on_timeout: error`.
    """
    counts = statistics or DoorStatistics()
    door = _Door(runtime, ring, counts)
    ring.publish_version(runtime.version)
    ring.recorder = runtime.recorder
    ring.on_gone = door.producer_gone  # and so the ring keeps the door, which releases what is trained later, too
    runtime.listen(door)
    with door.scope:
        async with plain_task_group() as tasks:
            for task in (door.submit, door.expire, door.end_epochs, door.follow_books):
                tasks.start_soon(task)
            await door.read()
            tasks.cancel_scope.cancel()
    return counts
