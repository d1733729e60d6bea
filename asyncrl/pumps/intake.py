"""The one way in: whatever can be trained comes through here, from any source, in the same order.

    own rollouts ── slot ── play ──────────────────────────────┐
    Runtime.submit ── limits ── slot ──────────────────────────┼─▶ whole: rows ─▶ rewards ─▶ shaping ─▶ hook ─▶ filters ─▶ ready
    other processes ── limits ── gathered until whole ── slot ─┘              where a member has none                  ╲
    (pumps/gathering.py)                                                                                         dropped: cleared

* A group has its id from the first trajectory that is built for it, and no other one later (`GroupIds`).
* A member that brings its reward keeps it; one that has none is scored by the run's reward functions. A member without a reward,
  in a run without reward functions, is refused.
* A group of any source gets its slot before its rewards: the slots bound how many groups are scored at a time, and a group that the
  filters drop gives its slot back.
* Shaping and filters are the same for every source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import anyio

from asyncrl.concurrency.supervisor import plain_task_group, spawn
from asyncrl.config.resolve import turns_bound, versions_per_batch
from asyncrl.data.store import REFERENCE, Lease, copy_group
from asyncrl.errors import DataError, LifecycleError, VersionAhead
from asyncrl.records.check import MOST_COMPONENTS, Limits, check_trains, check_trajectory
from asyncrl.transport.queues.queue import QueueReceiver
from asyncrl.types import Group, Prompt, Ticket, Trajectory

from .building import logprob_columns
from .pipeline import Ports, Scoring
from .screen import OVERLONG, Reroll, Screen, shaped
from .step import GroupsFailed

# Ids of groups from outside: more than any pipeline holds at once.
REMEMBERED = 65_536


class Intake:
    """See the module docstring."""

    def __init__(self, ports: Ports, reroll: Reroll) -> None:
        self._ports = ports
        self._screen = Screen(ports)
        self._reroll = reroll
        algorithm = ports.config.algorithm
        needed = ports.loss.needs_reference or ports.reward_penalty is not None
        # The reference's log-probs of a group are computed on the lane while its rewards are scored in other processes.
        self._reference_ahead = needed and algorithm.kl.reference_ahead and ports.score_groups
        self._members: dict[int, dict[int, Trajectory]] = {}  # scored members of own groups that are not whole yet
        self._submitted: OrderedDict[int, None] = OrderedDict()  # ids of groups from outside, the newest ones
        self._components: set[str] = set()  # names that came from outside
        self._closed = ""
        self._waiting: set[anyio.CancelScope] = set()
        # Of groups that were too late for a place, until a group ends.
        self._crowded: list[Lease] = []
        ports.book.when_ended(self._group_ended)
        self.ids = ports.ids
        self.scored = 0  # trajectories

    # -- own rollouts: they have their slot ------------------------------------------------------------------------

    async def take(self, item: Scoring) -> None:
        """Score one played trajectory, or all of a group in member order. The last member makes its group whole."""
        ticket, book, store = item.ticket, self._ports.book, self._ports.store
        self._ports.recorder.gauge("queue/stash/depth", self.incomplete)
        if ticket.group_id not in book:  # a sibling failed meanwhile
            return
        if len(item.trajectories) == item.trajectories[0].group_size:
            await self._enter(store.put(Group(ticket, item.prompt, item.trajectories)))
            self.scored += len(item.trajectories)
            return
        scored = await self._rewarded(Group(ticket, item.prompt, item.trajectories))
        if ticket.group_id not in book:
            return
        members = self._members.setdefault(ticket.group_id, {})
        members |= {t.member: t for t in scored}
        self.scored += len(scored)
        if len(members) == scored[0].group_size:
            del self._members[ticket.group_id]
            whole = tuple(members[place] for place in sorted(members))
            await self._filter(store.put(Group(ticket, item.prompt, whole)))

    @property
    def incomplete(self) -> int:
        """Own groups of which some members are scored and some are not."""
        return len(self._members)

    async def end_of_rollouts(self) -> None:
        """Groups that can never be whole are dropped and counted."""
        for group_id in list(self._members):
            await self._ports.book.end(group_id, "dropped", "incomplete at the end of the rollouts")

    # -- from outside ----------------------------------------------------------------------------------------------

    async def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, leases: Sequence[Lease] = ()) -> bool:
        """Take a whole group, each member of which passed `check`. Waits for a slot, and for rewards that are missing. With
        `leases` the group lies in memory of somebody else's, which is given back once the group was trained or dropped.

        False where the ledger finds the group too old. Its leases end then, unless other groups have the places that it could have
        had: in that case they end when one of those groups ends, so that a producer that is faster than the training waits at
        its full ring. It would otherwise push, and be dropped, as fast as the loop can read, and take the time of the
        step that could make room. Errors: LifecycleError where no step can come any more, also while it waits; DataError
        for a group that cannot be trained, or was submitted before. None of them keeps the slot, or ends a lease.
        """
        ports = self._ports
        members = whole(trajectories)
        self._check_open()
        if (group_id := prompt.group_id) in self._submitted and group_id not in ports.book:
            raise DataError(f"group {group_id} was submitted before; a group is submitted once")
        versions = [t.oldest_version for t in members if t.oldest_version >= 0]
        # None where no token has a version: the group then counts as of the version that has room for it.
        oldest = min(versions) // versions_per_batch(ports.config) if versions else None
        newest = max(t.newest_version for t in members)
        if newest > (version := ports.trainer.version):
            raise VersionAhead(
                f"group {group_id} claims to be sampled by version {newest}, but this run is at {version}: left by an earlier "
                "run, or stamped with another policy's version"
            )
        ended = ports.book.ended
        ticket = await self._admit(group_id, oldest)
        if ticket is None:
            ports.counters["staleness/dropped"] += 1
            assert oldest is not None, "a group without versions is never too old"
            if oldest + turns_bound(ports.config) < ports.ledger.turn or ended != ports.book.ended:
                # No live group has its place (any more), so no end to come would give the memory back.
                _release(leases)
            else:
                self._crowded += leases
            return False
        ports.book.open(ticket)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            await self._enter(ports.store.put(Group(ticket, prompt, members), leases), leased=bool(leases))
            self.scored += len(members)
            self._remember(group_id)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await ports.book.end(group_id, "dropped", "was not handed on", release=False)
            raise
        return True

    def check(self, trajectory: Trajectory, limits: Limits) -> None:
        """Check a member from outside, before anything waits for it. Errors: DataError that names the member and the field."""
        check_trajectory(trajectory, limits)
        check_trains(trajectory)
        if trajectory.reward is None and not self._ports.scores:
            raise DataError(
                f"member {trajectory.member} came without a reward, and the run has no reward functions to score it "
                "(reward.functions); bring one for each member"
            )
        names = self._components | trajectory.components.keys()
        if len(names) > MOST_COMPONENTS:
            raise DataError(
                f"member {trajectory.member}: components brings {sorted(names - self._components)[0]!r}, which would be name "
                f"{MOST_COMPONENTS + 1} of this run; at most {MOST_COMPONENTS} names may come from outside"
            )
        self._components = names
        if OVERLONG in trajectory.components and self._ports.config.reward.overlong.cache is not None:
            raise DataError(f"member {trajectory.member}: component {OVERLONG!r} is that of reward.overlong: rename")

    def close(self, reason: str) -> None:
        """Nobody may submit any more; a `submit` that waits for a slot raises LifecycleError with `reason`."""
        self._closed = self._closed or reason
        for scope in self._waiting:
            scope.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError(f"submit: {self._closed}")

    async def _admit(self, group_id: int, oldest: int | None) -> Ticket | None:
        """As `Ledger.admit`. Errors: LifecycleError once the intake is closed, also while it waits."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
                return await self._ports.ledger.admit(group_id, oldest)
            finally:
                self._waiting.discard(scope)
        raise LifecycleError(f"submit: {self._closed}")

    def _group_ended(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            self._members.pop(group_id, None)
        if not self._ports.book.over:
            _release(self._crowded)
            self._crowded.clear()

    def _remember(self, group_id: int) -> None:
        self._submitted[group_id] = None
        if len(self._submitted) > REMEMBERED:
            self._submitted.popitem(last=False)

    # -- all alike -------------------------------------------------------------------------------------------------

    async def _enter(self, group: Group, *, leased: bool = False) -> None:
        """Score a whole group, which has its slot and its rows in the store, then filter it."""
        await self._filter(replace(group, trajectories=await self._rewarded(group)), leased=leased)

    async def _filter(self, group: Group, *, leased: bool = False) -> None:
        """Shape a group whose members were scored, then drop it or make it ready. A reward that is None does not apply."""
        ports = self._ports
        if ports.config.reward.overlong.cache is not None:
            group = replace(
                group, trajectories=tuple(shaped(t, ports.config.reward.overlong) for t in group.trajectories)
            )
        if group.group_id not in ports.book:
            return
        if ports.hooks.after_rewards is not None:
            # A group that the user's own code keeps must outlive the lease.
            with ports.recorder.watch("score pump", f"group {group.group_id}", on="hook after_rewards"):
                group = await ports.hooks.rewarded(copy_group(group) if leased else group, ports.limits)
        reason = self._screen.refuses(group)
        if reason is None:
            ports.book.scored(group)
            ports.recorder.gauge("queue/groups/depth", len(ports.store.ready()))
        elif await ports.book.end(group.group_id, "dropped", reason):
            ports.counters[f"filter/{reason}"] += 1
            self._reroll.group_ended(group)

    async def _rewarded(self, group: Group) -> tuple[Trajectory, ...]:
        """The members with their rewards; those that came with a reward are not scored again."""
        ports, recorder = self._ports, self._ports.recorder
        missing = [t for t in group.trajectories if t.reward is None]
        scored: dict[int, Trajectory] = {}
        if missing:
            first = missing[0]
            with recorder.span("score", track="score", group=first.group_id, member=first.member, members=len(missing)):
                async with plain_task_group() as beside:
                    if self._reference_ahead and len(group.trajectories) == first.group_size:
                        spawn(beside, "reference log-probs", self._compute_reference, group)
                    with recorder.wait("score pump", "a reward", on="reward workers", cause="reward"):
                        scored = {t.member: t for t in await ports.reward.score(group.prompt, missing)}
        return tuple(scored.get(t.member, t) for t in group.trajectories)

    async def _compute_reference(self, group: Group) -> None:
        """Of all members of a group whose rows are in the store. Errors: those of the trainer."""
        ports = self._ports
        # The step comes to the same error, and drops the group.
        with suppress(GroupsFailed):
            size = ports.config.train.tokens_per_microbatch
            [column] = await logprob_columns(ports.trainer, [group], size, "reference")
            ports.book.write(group.group_id, REFERENCE, column)


class ScorePump:
    """The score pump: played trajectories, through the intake.

        consumes     trajectories, one by one or a whole group in member order (`reward.batch`): edge 3
        produces     scored members for the intake (edge 4)
        waits for    a played trajectory; rewards
        is woken by  the rollout pump; reward workers

    As many scorers as calls of reward functions can be under way, and one more, so that a worker is never idle while a reply is
    handled. The buffer before them is bounded; rollouts wait there for a free scorer.
    """

    def __init__(self, intake: Intake, scoring: QueueReceiver[Scoring], workers: int) -> None:
        self._intake = intake
        self._scoring = scoring
        self._workers = workers

    async def run(self) -> None:
        """Ends when every rollout is scored. Groups that can never be whole by then are dropped and counted."""
        async with self._scoring, anyio.create_task_group() as scorers:
            for _ in range(self._workers + 1):
                spawn(scorers, "scorer", self._score)
        await self._intake.end_of_rollouts()

    async def _score(self) -> None:
        async for item in self._scoring:
            await self._intake.take(item)


def whole(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """All members of one group, in order. Errors: DataError that names what is missing."""
    size = len(trajectories)
    for place, trajectory in enumerate(trajectories):
        if trajectory.group_size != size:
            raise DataError(
                f"group_size of trajectory {place} is {trajectory.group_size}, and {size} were given; a group is submitted as a "
                "whole"
            )
    members = sorted(trajectories, key=lambda t: t.member)
    found = [t.member for t in members]
    if not size or found != list(range(size)):
        raise DataError(f"the fields member are {found}; expected each of 0 to {max(size - 1, 0)} once")
    return tuple(members)


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()
