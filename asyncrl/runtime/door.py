"""The shared-memory door: groups that other processes push (`asyncrl.client`) become groups of a Runtime.

    door: {ring: my-run}                    # in the configuration of `asyncrl run`; or inside a program of your own:

    async with RecordRing("my-run") as ring, Runtime(config) as runtime:
        await serve(runtime, ring)          # until the training ends or the ring is closed

    ring ──▶ trajectories, as views of the record ──▶ gathered until whole ──▶ intake ──▶ rows, under the record's lease
     ▲                                                (pumps/gathering.py)   (pumps/intake.py)      │ trained, or dropped
     └──────────────── the lease ends: the producer's bytes are free again ◀───────────────────────┘

* A full ring stops its producer; nothing is dropped for want of room. What lies in the rings is read at once, so that the
  time of an incomplete group is the producers' and never the training's.
* A record is released in the very step of the loop that commits or drops its group: a checkpoint of that step finds it gone,
  and a run that goes on from there does not train it again.
* What cannot be trained is refused by name and leaves the ring (`records/check.py`), and so does a group that a step, or the run's
  reward function, fails on all the same: dropped by name, once; a second one ends the run (`pumps/step.py`).
* What else was not trained when the run ends stays in the ring for the next run of this name. The ring is opened before the
  Runtime and closed after it: what is trained once the ring is closed cannot be released, and would come again.
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
from asyncrl.pumps.gathering import DoorStatistics, Gathering
from asyncrl.records.check import Limits, check_json
from asyncrl.records.layout import Section
from asyncrl.records.trajectories import group_metadata, trajectories_of
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings

if TYPE_CHECKING:
    from asyncrl.pumps.pipeline import StepReport
    from asyncrl.records.read import Record

    from .runtime import Runtime

REFUSED = {
    Section.ADVANTAGES: "the run computes advantages from the rewards",
    Section.REFERENCE_LOGPROBS: "the run computes them under its own reference",
}


def limits_of(runtime: Runtime) -> Limits:
    """What a trajectory from outside may be: as for `Runtime.submit`, and no longer than prompts and completions of the run."""
    return replace(runtime.limits, longest=row_limit(runtime.config))


class _Door:
    """Hears every step (`push`) and the end of the training (`close`) in the step of the loop in which they happen."""

    def __init__(self, runtime: Runtime, ring: RecordRing, statistics: DoorStatistics) -> None:
        self._ring = ring
        self._limits = limits_of(runtime)
        self._bound = staleness_bound(runtime.config)
        self._intake = runtime.intake
        self._gathering = Gathering(
            self._intake, runtime.config.door, runtime.tokenizer.decode, runtime.recorder, runtime.note, statistics
        )
        self.scope = anyio.CancelScope()

    def push(self, report: StepReport) -> None:
        """A step was committed."""
        with contextlib.suppress(anyio.ClosedResourceError):  # the ring may be closed before the Runtime is
            self._ring.publish_version(report.version)
        self._gathering.end_stale(report.version, self._bound)

    def close(self) -> None:
        """No step can come any more."""
        self.scope.cancel()

    def producer_gone(self, producer: bytes) -> None:
        self._gathering.gone(producer)

    async def run(self) -> None:
        with self.scope, contextlib.closing(self._gathering):
            async with plain_task_group() as tasks:
                for task in (self._gathering.submit, self._gathering.expire, self._gathering.end_epochs):
                    tasks.start_soon(task)
                async for delivery in self._ring:
                    self._take(delivery)
                    await anyio.lowlevel.checkpoint()  # a ring that is full of records must not hold the loop
                tasks.cancel_scope.cancel()

    def _take(self, delivery: Delivery) -> None:
        record, gathering = delivery.record, self._gathering
        gathering.came(record.epoch, record.producer)
        try:
            refuse_sections(record)
            members = trajectories_of(record, copy=False, group=gathering.own_id(record.epoch, record.group))
            fresh = [members[position] for position in delivery.fresh]
            for trajectory in fresh:
                self._intake.check(trajectory, self._limits)
            columns: dict[str, Any] = group_metadata(record)
            check_json(columns, "the group's metadata", written=False)  # for the reward functions alone
        except (RecordError, DataError) as error:  # such a group can never be whole
            gathering.discard(error, record.epoch, record.group)
            delivery.release()
            return
        if not gathering.add(record.epoch, record.group, fresh, columns, delivery):
            delivery.release()


def refuse_sections(record: Record) -> None:
    """Errors: DataError for what a record may hold and this run would not use."""
    for section, reason in REFUSED.items():
        if section in record.arrays:
            raise DataError(f"it holds {section.name.lower()}, which this run does not use: {reason}; leave them out")


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
            size=settings.ring_mib << 20, slots=settings.producer_records, ring_bytes=settings.producer_mib << 20
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
    # The ring keeps the door alive, which publishes later versions in it.
    ring.on_producer_end = door.producer_gone
    for line in ring.damage.lines:  # found when it was opened
        runtime.note(line)
    ring.damage.listener = runtime.note
    runtime.listen(door)
    try:
        await door.run()
    finally:
        ring.damage.listener = None  # the ring may be closed after the Runtime
    return counts
