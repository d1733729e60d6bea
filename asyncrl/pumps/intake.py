"""The intake: groups from every source pass through the same stages before they can be trained.

    own rollouts:    slot, play                    ─┐
    Runtime.submit:  check, slot                   ─┼─▶ store and rewards ─▶ shaping ─▶ hook ─▶ filters ─▶ ready, sent, or dropped
    other processes: check, gather members, slot   ─┘
    (pumps/gathering.py)

* A member that comes with a reward keeps that reward. The reward functions of the run score the other members. A member from
  outside without a reward is refused if the run has no reward functions.
* A group gets its slot before its rewards. So the slots bound how many groups are scored at a time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import anyio

from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.checks import alone_problem
from asyncrl.config.resolve import turns_bound
from asyncrl.data.store import Lease, copy_group
from asyncrl.errors import DataError, LifecycleError, VersionAhead
from asyncrl.records.check import MAX_COMPONENTS, Limits, check_trains, check_trajectory
from asyncrl.transport.queues.queue import QueueReceiver
from asyncrl.types import Group, Prompt, Ticket, Trajectory

from .pipeline import Ports
from .screen import OVERLONG, Reroll, Screen, shape_reward

# The intake remembers the newest ids of groups from outside, up to this number, to refuse a second submit of a group.
MAX_REMEMBERED_IDS = 65_536
logger = logging.getLogger("asyncrl.pumps")


class Intake:
    """Scores and filters groups of every source. Then drops a group, sends it to a training rank, or makes it ready for a claim."""

    def __init__(self, ports: Ports, reroll: Reroll) -> None:
        self._ports, self._screen = ports, Screen(ports)
        self._reroll = reroll
        self._members: dict[int, dict[int, Trajectory]] = {}  # scored members of incomplete own groups
        self._submitted: OrderedDict[int, None] = OrderedDict()  # ids of groups from outside, oldest first
        self._components: set[str] = set()  # names of reward components from outside
        self._warned_of_single_member = False
        self._closed = ""  # why `submit` and `play` are refused; empty: open
        self._waiting: set[anyio.CancelScope] = set()  # a scope for each call that waits for a slot
        self._playing: dict[anyio.CancelScope, anyio.Event] = {}  # scope of a call of `play` -> set at its end
        # Leases of groups that were refused because live groups hold all places. The leases are released when the next group ends.
        self._delayed_leases: list[Lease] = []
        ports.book.on_end = self._on_end
        self.ids = ports.ids
        self.scored = 0  # number of scored trajectories

    async def take(self, part: Group) -> Group | None:
        """Score `part`: one member of a group, or all. Returns the group; None if members are missing or the group has ended."""
        group_id, book, store = part.group_id, self._ports.book, self._ports.store
        self._ports.recorder.gauge("queue/stash/depth", self.incomplete)
        if group_id not in book:  # the group has ended: another member failed, for example
            return None
        if len(part.trajectories) == part.trajectories[0].group_size:
            group = await self._enter(store.put(part))
            self.scored += len(part.trajectories)
            return group
        scored = await self._score_members(part)
        if group_id not in book:
            return None
        members = self._members.setdefault(group_id, {})
        members |= {t.member: t for t in scored}
        self.scored += len(scored)
        if len(members) == scored[0].group_size:
            del self._members[group_id]
            in_order = tuple(members[member] for member in sorted(members))
            return await self._filter(store.put(replace(part, trajectories=in_order)))
        return None

    @property
    def incomplete(self) -> int:
        """The number of this rank's own groups of which some members, but not all, are scored."""
        return len(self._members)

    async def drop_incomplete(self) -> None:
        """Drop and count the incomplete groups, after the end of all rollouts."""
        for group_id in list(self._members):
            await self._ports.book.end(group_id, "dropped", "incomplete at the end of the rollouts")

    async def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, leases: Sequence[Lease] = ()) -> bool:
        """Take a whole group whose members passed `check`. Waits for a slot, and scores members without a reward.
        `leases`: the memory of the group, lent by a producer. The leases are released after the group is trained or dropped.

        Returns False, and drops the group, if no step up to the group's deadline has a free place. If the deadline has passed, the
        leases are released at once. If live groups hold the places, the leases are released when the next group ends. So a fast
        producer waits for room in its ring, and does not keep the event loop busy with refused groups.
        Errors: LifecycleError if the intake is closed, also while this method waits for a slot; DataError for a group that cannot
        be trained or has ended; LedgerError for a live group; VersionAhead. An error gives the slot back, but releases no lease."""
        ports = self._ports
        members = members_in_order(trajectories)
        self._check_open()
        if (group_id := prompt.group_id) in self._submitted and group_id not in ports.book:
            raise DataError(f"group {group_id} was submitted before; submit each group once")
        versions = [t.oldest_version for t in members if t.oldest_version >= 0]
        # None: no token has a version. The ledger then treats the group as fresh.
        oldest = ports.turn_of(min(versions)) if versions else None
        newest = max(t.newest_version for t in members)
        if newest > (version := ports.trainer.version):
            raise VersionAhead(
                f"group {group_id} claims to be sampled by version {newest}, but this run is at version {version}. The group is "
                "from an earlier run, or has the version numbers of another policy: submit groups that this run's weights sampled"
            )
        ends_before = ports.book.end_count
        ticket = await self._admit(group_id, oldest)
        if ticket is None:
            ports.recorder.count("staleness/dropped")
            assert oldest is not None, "a group without versions is never too old"
            # A group that ended during `_admit` may have been the last to end. Then nothing would release delayed leases.
            if oldest + turns_bound(ports.config) < ports.ledger.turn or ends_before != ports.book.end_count:
                release(leases)
            else:
                self._delayed_leases += leases
            return False
        ports.book.add(ticket)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            await self._enter(ports.store.put(Group(ticket, prompt, members), leases), leased=bool(leases))
            self.scored += len(members)
            self._submitted[group_id] = None
            if len(self._submitted) > MAX_REMEMBERED_IDS:
                self._submitted.popitem(last=False)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await ports.book.end(group_id, "dropped", "did not become ready", release=False)
            raise
        return True

    async def play(
        self, group_id: int, play_group: Callable[[Ticket], Awaitable[Group | None]]
    ) -> tuple[Trajectory, ...]:
        """Wait for a slot, play a group with `play_group`, and take the group. Returns its members with their rewards; no members
        if the group failed, or was dropped before it was scored. Errors: LifecycleError as in `submit`; those of `play_group`."""
        self._check_open()
        ticket = await self._admit(group_id, None)
        assert ticket is not None, "a fresh group always gets a ticket"
        self._ports.book.add(ticket)
        group: Group | None = None
        with anyio.CancelScope() as scope:
            self._playing[scope] = anyio.Event()
            try:
                self._check_open()
                played = await play_group(ticket)
                group = None if played is None else await self.take(played)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._ports.book.end(group_id, "dropped", "did not become ready")
                raise
            finally:
                self._playing.pop(scope).set()
        if scope.cancelled_caught:
            raise LifecycleError("play: the Runtime was closed before the group was complete")
        return () if group is None else group.trajectories

    async def end_plays(self) -> None:
        """Cancel all calls of `play`, and wait until their episodes have ended."""
        ends = list(self._playing.items())
        for scope, _ in ends:
            scope.cancel()
        for _, ended in ends:
            await ended.wait()

    def check(self, trajectory: Trajectory, limits: Limits) -> None:
        """Check a member from outside, and remember the names of its components. Errors: DataError that names member and field."""
        check_trajectory(trajectory, limits)
        check_trains(trajectory)
        if trajectory.reward is None and not self._ports.scores:
            raise DataError(
                f"member {trajectory.member} came without a reward, and the run has no reward functions to score it; submit "
                "each member with a reward, or set reward.functions"
            )
        names = self._components | trajectory.components.keys()
        if len(names) > MAX_COMPONENTS:
            raise DataError(
                f"member {trajectory.member}: components has the new name {sorted(names - self._components)[0]!r}; at most "
                f"{MAX_COMPONENTS} different names may come from outside in a run"
            )
        if OVERLONG in trajectory.components and self._ports.config.reward.overlong.cache is not None:
            raise DataError(f"member {trajectory.member}: the component name {OVERLONG!r} is reserved; rename it")
        self._components = names

    def close(self, reason: str) -> None:
        """Refuse every further `submit` and `play`. Calls that wait for a slot raise LifecycleError with `reason`."""
        self._closed = self._closed or reason
        for scope in self._waiting:
            scope.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError(f"submit, play: {self._closed}")

    async def _admit(self, group_id: int, oldest: int | None) -> Ticket | None:
        """`Ledger.admit`, with a LifecycleError if the intake is closed before or during the wait for a slot."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
                return await self._ports.ledger.admit(group_id, oldest)
            finally:
                self._waiting.discard(scope)
        raise LifecycleError(f"submit, play: {self._closed}")

    def _on_end(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            self._members.pop(group_id, None)
        if not self._ports.book.training_ended:
            release(self._delayed_leases)
            self._delayed_leases.clear()

    async def _enter(self, group: Group, *, leased: bool = False) -> Group:
        """Score and filter a group in the store. `leased`: its arrays are memory of a producer. Returns the group with rewards."""
        return await self._filter(replace(group, trajectories=await self._score_members(group)), leased=leased)

    async def _filter(self, group: Group, *, leased: bool = False) -> Group:
        """Shape the rewards of a scored group, then drop the group, make it ready, or send it to a training rank (`depart`)."""
        ports = self._ports
        is_first_single = len(group.trajectories) == 1 and not self._warned_of_single_member
        if is_first_single and (problem := alone_problem(ports.config)):
            self._warned_of_single_member = True
            logger.warning("a group of 1 trajectory (play with n=1, or submit) trains nothing; %s", problem)
        if ports.config.reward.overlong.cache is not None:
            group = replace(
                group, trajectories=tuple(shape_reward(t, ports.config.reward.overlong) for t in group.trajectories)
            )
        if group.group_id not in ports.book:
            return group
        if ports.hooks.after_rewards is not None:
            # The hook may keep the group longer than the lease, so the hook gets a copy.
            with ports.recorder.watch("score pump", f"group {group.group_id}", on="hook after_rewards"):
                group = await ports.hooks.apply_after_rewards(copy_group(group) if leased else group, ports.limits)
        reason = self._screen.reason_to_drop(group)
        if reason is None and ports.depart is not None:
            ports.depart(group)
        elif reason is None:
            ports.book.mark_ready(group)
            ports.recorder.gauge("queue/groups/depth", len(ports.store.ready()))
        elif await ports.book.end(group.group_id, "dropped", reason):
            self._reroll.on_group_end(group)
        return group

    async def _score_members(self, group: Group) -> tuple[Trajectory, ...]:
        """All members, with rewards. Only members without a reward are scored."""
        ports, recorder = self._ports, self._ports.recorder
        unscored = [t for t in group.trajectories if t.reward is None]
        scored: dict[int, Trajectory] = {}
        if unscored:
            first = unscored[0]
            with (
                recorder.span("score", track="score", group=first.group_id, member=first.member, members=len(unscored)),
                recorder.wait("score pump", "a reward", on="reward workers", cause="reward"),
            ):
                scored = {t.member: t for t in await ports.reward.score(group.prompt, unscored)}
        return tuple(scored.get(t.member, t) for t in group.trajectories)


class ScorePump:
    """The score pump: gives played trajectories to the intake, which scores them.

        consumes     trajectories, one by one or a whole group in member order (`reward.batch`): edge 3 of graph.py
        produces     scored groups in the store, through the intake (edge 4)
        waits for    a played trajectory; rewards
        is woken by  the rollout pump; reward workers

    There is one more scorer task than `calls`, so that no reward worker is idle while a scorer handles its result.
    """

    def __init__(self, intake: Intake, scoring: QueueReceiver[Group], calls: int) -> None:
        """`scoring`: groups with one member or all. `calls`: calls of reward functions that may run at a time."""
        self._intake = intake
        self._scoring = scoring
        self._calls = calls

    async def run(self) -> None:
        """Score until the rollout pump ends and all its trajectories are scored. Then drop and count the incomplete groups."""
        async with self._scoring, anyio.create_task_group() as scorers:
            for _ in range(self._calls + 1):
                spawn(scorers, "scorer", self._score)
        await self._intake.drop_incomplete()

    async def _score(self) -> None:
        async for part in self._scoring:
            await self._intake.take(part)


def members_in_order(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """All members of one group, sorted by member number. Errors: DataError if a member number is missing or occurs twice."""
    size = len(trajectories)
    for index, trajectory in enumerate(trajectories):
        if trajectory.group_size != size:
            raise DataError(
                f"group_size of trajectory {index} is {trajectory.group_size}, but {size} trajectories were submitted; submit all "
                "members of a group together"
            )
    members = sorted(trajectories, key=lambda t: t.member)
    numbers = [t.member for t in members]
    if not size or numbers != list(range(size)):
        raise DataError(f"the member numbers are {numbers}; expected each of 0 to {max(size - 1, 0)} once")
    return tuple(members)


def release(leases: Iterable[Lease]) -> None:
    """Release the memory of a group that came from outside."""
    for lease in leases:
        lease.release()
