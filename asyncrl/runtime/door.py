"""The shared-memory door: groups that other processes push (`asyncrl.client`) become groups of a Runtime.

`asyncrl run` opens the door with the setting `door: {ring: my-run}`. A program of your own opens the door like this:

    async with RecordRing("my-run") as ring, Runtime(config) as runtime:
        await serve(runtime, ring)          # until the training ends or the ring is closed

    ring ──▶ trajectories, as views of the record ──▶ gathered until whole ──▶ intake ──▶ rows, under the record's lease
     ▲                                                (pumps/gathering.py)   (pumps/intake.py)      │ trained, or dropped
     └──────────────── the lease ends: the producer's bytes are free again ◀───────────────────────┘

* If the ring is full, its producers wait; no group is dropped for lack of room. Records are read even if the training is busy, so
  the time-out of an incomplete group measures the producers and not the training.
* There is no await between the commit (or drop) of a group and the release of its records, so a resumed run does not train the
  records twice.
* A record that cannot be trained is refused and released (`records/check.py`). If a step or the reward function fails on a checked
  group, that group is dropped. A second failure of the same kind ends the run. With several ranks the first failed step ends it.
* A record leaves the ring when it is trained, dropped or refused. Other records stay, for the next run with a ring of this name.
  Close the ring after the Runtime: a closed ring cannot release the records of trained groups, so the next run trains them again.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.config.resolve import row_limit, staleness_bound
from asyncrl.config.schema import Config
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, DataError, RecordError
from asyncrl.pumps.gathering import DoorGroups, DoorStatistics
from asyncrl.records.check import Limits, check_json
from asyncrl.records.layout import Section
from asyncrl.records.trajectories import group_metadata, trajectories_of
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings

if TYPE_CHECKING:
    from asyncrl.pumps.pipeline import StepReport

    from .runtime import Runtime

# Section of a record -> the reason why a run refuses a record with this section.
REFUSED_SECTIONS = {
    Section.ADVANTAGES: "the run computes advantages from the rewards",
    Section.REFERENCE_LOGPROBS: "the run computes reference log-probs under its own reference weights",
}


def limits_of(runtime: Runtime) -> Limits:
    """The limits of a trajectory from another process: those of `Runtime.submit`, and the longest row of the run's own rollouts."""
    return replace(runtime.limits, max_path_tokens=row_limit(runtime.config))


class _Door:
    """Takes records from a ring, and passes whole groups to the intake. The Runtime calls `push` at each commit of a step, and
    `close` at the end of the training (`Runtime.listen`)."""

    def __init__(self, runtime: Runtime, ring: RecordRing, statistics: DoorStatistics) -> None:
        self._ring = ring
        self._limits = limits_of(runtime)
        self._max_age = staleness_bound(runtime.config)
        self._intake = runtime.intake
        self._gathering = DoorGroups(
            self._intake, runtime.config.door, runtime.tokenizer.decode, runtime.recorder, runtime.note, statistics
        )
        self.scope = anyio.CancelScope()

    def push(self, report: StepReport) -> None:
        """Show producers the new version, and drop incomplete groups that are now too old."""
        with contextlib.suppress(anyio.ClosedResourceError):  # the ring may be closed first
            self._ring.publish_version(report.version)
        self._gathering.end_stale(report.version, self._max_age)

    def close(self) -> None:
        """End `run`, because no further step can use a group."""
        self.scope.cancel()

    def producer_gone(self, producer: bytes) -> None:
        self._gathering.on_producer_gone(producer)

    async def run(self) -> None:
        with self.scope, contextlib.closing(self._gathering):
            async with plain_task_group() as tasks:
                for task in (self._gathering.submit, self._gathering.expire, self._gathering.end_epochs):
                    tasks.start_soon(task)
                async for delivery in self._ring:
                    self._take(delivery)
                    await anyio.lowlevel.checkpoint()  # a full ring must not block the loop
                tasks.cancel_scope.cancel()

    def _take(self, delivery: Delivery) -> None:
        record, gathering = delivery.record, self._gathering
        gathering.on_producer(record.epoch, record.producer)
        try:
            for section, reason in REFUSED_SECTIONS.items():
                if section in record.arrays:
                    name = section.name.lower()
                    raise DataError(f"it holds {name}, which this run does not use: {reason}; leave them out")
            members = trajectories_of(record, group=gathering.group_id(record.epoch, record.group))
            # `delivery.fresh` omits members that arrived in an earlier record.
            new_members = [members[position] for position in delivery.fresh]
            for trajectory in new_members:
                self._intake.check(trajectory, self._limits)
            columns: dict[str, Any] = group_metadata(record)
            check_json(columns, "the group's metadata", written=False)  # only reward functions get these columns
        except (RecordError, DataError) as error:
            gathering.discard(error, record.epoch, record.group)
            delivery.release()
            return
        if not gathering.add(record.epoch, record.group, new_members, columns, delivery):
            delivery.release()


def ring_name(config: Config, rank: int) -> str:
    """The name of this rank's ring. Errors: ConfigError if `door.ring` is not set."""
    if config.door.ring is None:
        raise ConfigError("door.ring is not set: name the ring that producers attach to")
    return config.door.ring if rank == 0 else f"{config.door.ring}-{rank}"


def local_rings(config: Config, world: World) -> list[str]:
    """The names of the rings of this machine's ranks, in the order of the ranks. Errors: ConfigError."""
    first = world.rank - world.local_rank
    return [ring_name(config, rank) for rank in range(first, first + world.local_world_size)]


def ring_of(config: Config) -> RecordRing:
    """The ring of this rank with the sizes of `door.*`, not open yet: use `async with`. Errors: ConfigError."""
    door = config.door
    sizes = RingSettings(door.ring_mib << 20, door.producer_records, door.producer_mib << 20)
    return RecordRing(ring_name(config, World.from_env().rank), sizes)


async def serve(runtime: Runtime, ring: RecordRing, statistics: DoorStatistics | None = None) -> DoorStatistics:
    """Feed `runtime` from `ring` until the training ends or the ring is closed. To stop earlier, cancel the call.
    `runtime` and `ring` stay open. Records of incomplete groups are not released, so the next run gets them.
    `statistics`: is updated during the call and returned; None: a new object. Errors: StallError under `door.on_timeout: error`."""
    counts = statistics or DoorStatistics()
    door = _Door(runtime, ring, counts)
    ring.publish_version(runtime.version)
    ring.recorder = runtime.recorder
    ring.on_producer_end = door.producer_gone
    for line in ring.damage:  # found at the opening
        runtime.note(line)
    ring.on_damage = runtime.note
    runtime.listen(door)
    try:
        await door.run()
    finally:
        # The ring may outlive the Runtime.
        ring.on_damage = ring.on_producer_end = None
    return counts
