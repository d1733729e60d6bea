"""Collects the members of groups from other processes, and hands the groups to the intake.

    add ──▶ stash, by (epoch, group) ──whole──▶ queue ──▶ Intake.submit (waits for a slot) ──▶ trained or dropped
              │ incomplete: time-out, epoch over, too old, bad record

* Here an epoch is one run of a producer program, not a pass over data: a producer that restarts gets a new epoch.
* With `rollout.late: wait` a group whose policy versions are known is dropped and counted if every step up to its deadline is full:
  its producer can play a new group with newer weights. A group without known versions waits for its slot.
* An incomplete group ends in four cases: `door.timeout_s` after its first member; `door.reconnect_s` after the last producer of its
  epoch left; when a member is too old to be trained; when a record of the group fails its checks.
* At the time-out `door.on_timeout` decides: drop the group, train its members if at least two came, or end the run.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from asyncrl.config.schema import DoorConfig
from asyncrl.data.stash import TOMBSTONES, Ending, GroupKey, Stash, StashedGroup, StashRefused, Status
from asyncrl.data.store import Lease
from asyncrl.errors import DataError, LifecycleError, RewardError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.queues.queue import QueueReceiver, QueueSender, open_queue
from asyncrl.types import Prompt, Trajectory

from .intake import Intake, release

# Limit of the number of incomplete groups in the stash. The rings bound the bytes of these groups.
MAX_INCOMPLETE = 4096
# No real limit of whole groups that wait for slots: the rings bound the queue, as each queued group keeps its bytes in a ring.
MAX_WHOLE = 1 << 30
# The live view shows the first MAX_NOTES refusals. All refusals are counted.
MAX_NOTES = 10


@dataclass(slots=True)
class DoorStatistics:
    """Counts of a door's groups. `refused`: refused members (`StashRefused`), and groups that this run cannot train."""

    submitted: int = 0
    # Dropped: they could not be trained within `max_staleness`.
    too_old: int = 0
    # Dropped: members were missing at the time-out or at the end of their epoch.
    incomplete: int = 0
    # Incomplete at the time-out, and queued for the intake with the members that came in time.
    partial: int = 0
    refused: int = 0
    last_refusal: str = ""


class DoorGroups:
    """The groups of one door (runtime/door.py). `submit`, `expire` and `end_epochs` run as tasks beside the caller of `add`."""

    def __init__(
        self,
        intake: Intake,
        settings: DoorConfig,
        decode: Callable[[Sequence[int]], str],
        recorder: Recorder,
        note: Callable[[str], None],
        statistics: DoorStatistics,
    ) -> None:
        """`decode`: token ids to the text of a prompt, for reward functions and the report."""
        self._intake = intake
        self._reconnect_s = settings.reconnect_s
        self._stash: Stash[Mapping[str, Any]] = Stash(
            MAX_INCOMPLETE, timeout_s=settings.timeout_s, on_timeout=settings.on_timeout, clock=anyio.current_time
        )
        self._decode = decode
        self._recorder = recorder
        self._note = note
        self._counts = statistics
        whole: tuple[QueueSender[StashedGroup[Any]], QueueReceiver[StashedGroup[Any]]] = open_queue(
            "door", MAX_WHOLE, recorder
        )
        self._whole_in, self._whole = whole
        # The producer's key of a group -> the group's id in this run, for the newest `TOMBSTONES` groups. Older ids are not needed:
        # the stash, too, remembers only the newest `TOMBSTONES` ended groups.
        self._ids: OrderedDict[GroupKey, int] = OrderedDict()
        self._producers: dict[int, set[bytes]] = {}  # epoch -> its connected producers
        self._ends: dict[int, float] = {}  # epoch without producers -> the time at which it ends
        self._changed = anyio.Event()
        self._unscored: str | None = None  # message about the newest group whose scoring failed

    def close(self) -> None:
        """End the queue. Do not call `add` or `submit` afterwards."""
        self._whole_in.close()
        self._whole.close()

    def group_id(self, epoch: int, group: int) -> int:
        """The id of a producer's group in this run, the same for all members of the group. The first call takes a new id."""
        key = GroupKey(epoch, group)
        if key not in self._ids:
            self._ids[key] = self._intake.ids.take()
            if len(self._ids) > TOMBSTONES:
                self._ids.popitem(last=False)
        return self._ids[key]

    def add(
        self, epoch: int, group: int, members: Sequence[Trajectory], columns: Mapping[str, Any], lease: Lease
    ) -> bool:
        """Take members that came in one record. `columns`: the columns of their prompt, for the reward functions. Returns False if
        nothing here needs the record's memory; then the caller must release the lease."""
        kept = False
        for trajectory in members:
            try:
                found = self._stash.add(trajectory, columns, lease=lease, epoch=epoch, group=group)
            except StashRefused as error:
                self._refuse(error, epoch, group)
                continue
            kept |= self._pass_on(found) if isinstance(found, StashedGroup) else found is Status.WAITING
        return kept

    def discard(self, error: Exception, epoch: int, group: int) -> None:
        """Drop a group because one of its records cannot be trained: the group can never be whole."""
        self._refuse(error, epoch, group)
        if (rest := self._stash.discard(group, epoch)) is not None:
            release(rest.leases)

    def on_producer(self, epoch: int, producer: bytes) -> None:
        """A producer of this epoch has connected. The epoch does not end before all its producers have left."""
        self._producers.setdefault(epoch, set()).add(producer)
        self._ends.pop(epoch, None)

    def on_producer_gone(self, producer: bytes) -> None:
        """A producer left or died. Epochs without a producer end after `door.reconnect_s`."""
        for epoch, producers in list(self._producers.items()):
            producers.discard(producer)
            if not producers:
                del self._producers[epoch]
                self._ends[epoch] = anyio.current_time() + self._reconnect_s
        self._changed.set()
        self._changed = anyio.Event()

    def end_stale(self, version: int, max_age: int) -> None:
        """Drop incomplete groups with a token more than `max_age` versions older than `version`: they can no longer be trained."""
        for group in self._stash.evict_stale(version, max_age):
            self._drop(group)

    def _refuse(self, error: Exception, epoch: int, group: int) -> None:
        self._counts.refused += 1
        self._counts.last_refusal = f"group {group} of epoch {epoch}: {error}"
        self._recorder.count("door/refused")
        if self._counts.refused <= MAX_NOTES:
            self._note(f"door: refused: {self._counts.last_refusal}")

    async def submit(self) -> None:
        """Hand the queued groups to the intake, one after the other, until the training ends."""
        # The training may end while a group waits for its slot.
        with contextlib.suppress(LifecycleError):
            async for group in self._whole:
                await self._submit(group)
                # The `async for` does not suspend while groups are queued, so many groups could block the event loop.
                await anyio.lowlevel.checkpoint()

    async def expire(self) -> None:
        """End groups at their time-out, until cancelled. Errors: StallError with `on_timeout: error`."""
        while True:
            for group in await self._stash.wait_expired():
                self._pass_on(group)

    async def end_epochs(self) -> None:
        """Drop the incomplete groups of epochs that are over, until cancelled."""
        while True:
            changed, now = self._changed, anyio.current_time()
            for epoch in [epoch for epoch, at in self._ends.items() if at <= now]:
                del self._ends[epoch]
                for group in self._stash.end_epoch(epoch):
                    self._drop(group)
            with anyio.CancelScope(deadline=min(self._ends.values(), default=math.inf)):
                await changed.wait()

    async def _submit(self, group: StashedGroup[Mapping[str, Any]]) -> None:
        leases = tuple(dict.fromkeys(group.leases))
        trajectories = group.trajectories
        if len(trajectories) < group.size:  # ended by a time-out
            size = len(trajectories)
            trajectories = tuple(replace(t, member=number, group_size=size) for number, t in enumerate(trajectories))
        try:
            accepted = await self._intake.submit(trajectories, self._prompt(group), leases)
        # Also catches VersionAhead, which `Intake.submit` raises for records from an earlier run of this name.
        except (DataError, ValueError, RewardError) as error:
            self._refuse(error, group.key.epoch, group.key.group_id)
            release(leases)
            if isinstance(error, RewardError):
                self._on_unscored(error)
            return
        if accepted:
            self._counts.submitted += 1
        else:
            self._count_too_old()

    def _prompt(self, group: StashedGroup[Mapping[str, Any]]) -> Prompt:
        first = group.trajectories[0]
        ids = first.tokens[: first.prompt_length].copy()
        try:
            text = self._decode(ids.tolist())
        except Exception as error:
            # A model may have ids that the tokenizer lacks.
            raise DataError(f"the tokenizer has no text for the prompt ({type(error).__name__}: {error})") from error
        return Prompt(first.group_id, ids, text, group.context)

    def _on_unscored(self, error: RewardError) -> None:
        """With `reward.on_error: fail`: remember the first failure, raise RewardError at the second. One failure may come from the
        bad row of one producer. A second failure counts as a fault of the run."""
        before, self._unscored = self._unscored, self._counts.last_refusal
        if before is not None:
            raise RewardError(
                f"{self._unscored}; before it, {before}. The earlier failure dropped its group; the later failure ends the run"
            ) from error

    def _pass_on(self, group: StashedGroup[Mapping[str, Any]]) -> bool:
        """Queue or drop a group that left the stash. Returns whether the group was queued."""
        if group.trainable:
            self._counts.partial += group.ending is Ending.PARTIAL
            self._whole_in.put_nowait(group)
        else:
            self._drop(group)
        return group.trainable

    def _drop(self, group: StashedGroup[Mapping[str, Any]]) -> None:
        """Count an incomplete group that ended, and release its leases."""
        if group.ending is Ending.STALE:
            self._count_too_old()
        else:
            self._counts.incomplete += 1
            self._recorder.count("door/incomplete")
        release(group.leases)

    def _count_too_old(self) -> None:
        self._counts.too_old += 1
        self._recorder.count("door/too_old")
        if self._counts.too_old == 1:
            self._note(
                "door: a group was too old to be trained within rollout.max_staleness and was dropped; door/too_old counts all "
                "such groups"
            )
