"""The reservation rule, as a plain state machine: no waiting, no I/O. The ledgers add waiting and sharing.

Words. `k` groups per step, `m` max_staleness, `v` the turn (number of committed steps), `a` the acknowledged turn: the
oldest policy that any engine may still sample from (`a <= v`). `release(t)` by a rank acknowledges
`t + 1`, and `a` is the least over the ranks. `c` places of the open step are claimed; `live(d)` is the number of live
groups (admitted, not yet claimed) with deadline `<= d`. A group occupies a slot from its admission until the release of
its step, or until it is dropped or failed. `held` counts the slots of committed steps that are not released. All ranks
together have `s = (m + 1) k` slots.

Rule. A new group gets the deadline `a + m`. Its tokens are sampled by `a` or later, so a group that is trained at its
deadline or before is at most `m` turns old, counted from its oldest token and not only from its admission. A ready group
with deadline `d` gets a place at turn `v` iff `c < k` and the invariant still holds afterwards:

    I(v, c):   for all j >= 0:   live(v + j) <= k (j + 1) - c        (the places left up to and including turn v + j)

Proof that I always holds, by induction over the events.
  * admit: a free slot means `live + c + held + 1 <= s`, and `held = k (v - a)` if all steps were full. The new deadline
    is `a + m`: the conditions with `v + j < a + m` do not change, and for all others it suffices that
    `live + 1 <= k (a + m - v + 1) - c = s - k (v - a) - c`, which is the slot condition. If `v > a + m` then
    `held >= k (m + 1) = s` and no slot is free. `admit` also checks I itself, because a step may not have been full, and
    a group that was sampled elsewhere has another deadline.
  * claim of a group with deadline `d`: for `v + j >= d` both sides fall by one; for `v + j < d` the rule checks I.
  * commit of a full step (`c = k`): I(v, k) at `j + 1` is literally I(v + 1, 0) at `j`, and at `j = 0` it says that no
    live group has a deadline `<= v`, so no group is too old. `commit` refuses a partial step after which I fails.
  * rollback gives claimed groups back to `live`: for `v + j >= d` both sides grow by one, for others only the right.
  * drop, fail and release only remove.
No dead end: if `c < k` and a group is live, the group with the earliest deadline may always claim (no group is live with
an earlier deadline, and `c + 1 <= k`). So a step waits at most for the groups with the earliest deadlines, which already
have slots. No group is dropped, and none is trained older than `m`.

Warm-up. While `a < warmup` only `k` slots are given out. So only the groups of step `a` are admitted, and they are trained
at `a` with age 0. Fewer slots only make admissions rarer. `k` slots suffice for the open step if every turn below `warmup`
is released (nothing is `held` at `v = a`): the publish pump must not skip a publish during the warm-up.

Shares (`by_rank`, for `m = 0`). Without shares, slots that come free together go to the rank that asks first, and two runs of one
configuration train different steps. So a rank admits only the ordinals of the open step with `ordinal % ranks == rank`: all `k`
slots are free when a step opens, and the shares add up to `k`, so no rank waits for the share of another. A dropped group is
replaced by the next one of the same rank. Once one rank has no more prompts, all ranks take slots without shares.

Balance (`trainers`, if groups travel to training ranks). A scored group goes to the training rank with the fewest tokens of live
and claimed groups, and is claimed only there. A rank waits with its next claim while another rank has fewer tokens in the open step
and a group that may have a place. So two ranks with such groups differ by at most the tokens of one group. No rank waits for ever:
among the ranks with such a group, the rank with the fewest tokens may always claim.

Lost ranks. If a rank that only generates is lost, its live groups that have not arrived at a training rank are dropped, and `a`
is the least over the other ranks. This only removes live groups and frees slots, so I holds. A group that has arrived is trained as
any other. Messages of the lost rank that come later change nothing: `arrive` and `admit` refuse them.

Joining. A rank that joined the run counts from `begin` on, with the turn `t` of its weights, and `a` falls to `t` if `t < a`. The
turns from `t` to `a` take back no slots, so only the check of I in `admit` bounds the next admissions. They have the deadline
`t + m`, and `begin` refuses a `t` with `t + m < v`: no admission would be possible until the rank has newer weights.

With `late="drop"` groups claim without the rule, in the order in which they are ready. `expired()` lists the groups past
their deadline, and the caller drops them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ..errors import LedgerError, VersionAhead
from ..types import LedgerStatistics, Ticket

Late = Literal["wait", "drop"]
# In place of the acknowledged turn of a rank without engines.
_NO_ENGINE = 1 << 60


def first_by_deadline(tickets: Iterable[Ticket]) -> list[Ticket]:
    """The first ticket of each deadline, in the order of `tickets`: if it may not have a place, no ticket of that deadline may."""
    first = dict[int, Ticket]()
    for ticket in tickets:
        first.setdefault(ticket.deadline, ticket)
    return [*first.values()]


def describe_step(
    s: LedgerStatistics, places: int, first: tuple[int, Ticket] | None, unknown: str = "no group is live"
) -> str:
    """One sentence for error messages. `places`: of a step. `first`: rank and ticket of the group with the earliest deadline; None:
    the sentence ends with `unknown`."""
    waits = unknown
    if first is not None:
        rank, ticket = first
        waits = f"the earliest deadline is {ticket.deadline} (group {ticket.group_id} of rank {rank})"
    return (
        f"turn {s.turn}: {s.claimed} of {places} places claimed, {s.live} live, {s.held} held for publish, "
        f"{s.slots - s.live - s.claimed - s.held} of {s.slots} slots free; {waits}"
    )


@dataclass(slots=True)
class ReservedGroup:
    """A group that holds a slot and is not trained yet. `rank` has the group: it admitted the group, or the group arrived there."""

    ticket: Ticket
    rank: int = 0
    claimed: bool = False
    # The training rank that gets the group, and the tokens of the group. -1: the group is not scored yet.
    trainer: int = -1
    tokens: int = 0


@dataclass(slots=True)
class Reservation:
    """The ledger's books. Methods are transitions: each one checks everything before it changes anything."""

    groups_per_step: int
    max_staleness: int
    late: Late = "wait"
    turn: int = 0
    ranks: int = 1
    warmup: int = 0  # below this turn: only the slots of one step
    by_rank: bool = False  # each rank has its share of every step
    # The training ranks that groups travel to. Empty: each group stays on the rank that admitted it.
    trainers: Sequence[int] = ()
    # The id of a group chooses its training rank, as in a run whose groups stay on their ranks. False: the tokens choose the rank.
    by_id: bool = False
    entries: dict[int, ReservedGroup] = field(default_factory=dict)  # by group id, in admission order
    held: dict[int, int] = field(default_factory=dict)  # turn -> slots of its step, until released
    acknowledged: list[int] = field(default_factory=list)  # per rank: the turn whose weights its engines have
    exhausted: list[bool] = field(default_factory=list)  # per rank: it will admit no more
    last_step: dict[int, int] = field(default_factory=dict)  # group id -> rank, of the step that was committed last
    claimed: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    # The last result of `acknowledged_turn`, and the last rank with that turn: most calls look only at this rank.
    _acknowledged_turn: int = field(default=-1, init=False)
    _slowest: int = field(default=0, init=False)
    # Derived from `entries` by `_count`, so that no transition looks at all entries. `_live`: deadline -> live groups by id.
    _live: dict[int, dict[int, ReservedGroup]] = field(default_factory=dict, init=False)
    _assigned: Counter[int] = field(default_factory=Counter, init=False)  # training rank -> tokens of its groups
    _in_step: Counter[int] = field(default_factory=Counter, init=False)  # training rank -> tokens in the open step
    # Training rank -> deadline -> live groups that have arrived.
    _arrived: dict[int, dict[int, dict[int, ReservedGroup]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.acknowledged = self.acknowledged or [self.turn] * self.ranks
        self.exhausted = self.exhausted or [False] * self.ranks
        self._arrived = {rank: {} for rank in self.trainers}
        for entry in self.entries.values():
            self._count(entry, 1)

    def _count(self, entry: ReservedGroup, by: int) -> None:
        """Add the group to the derived counts (1), or remove it (-1). Change an entry only in `_changing`."""
        deadline, group_id = entry.ticket.deadline, entry.ticket.group_id
        tables = self._live, self._arrived.get(entry.rank if entry.rank == entry.trainer else -1)
        for table in () if entry.claimed else tables:
            if table is not None and by > 0:
                table.setdefault(deadline, {})[group_id] = entry
            elif table is not None:
                del table[deadline][group_id]
                if not table[deadline]:
                    del table[deadline]
        self._assigned[entry.trainer] += by * entry.tokens
        self._in_step[entry.trainer] += by * entry.tokens * entry.claimed

    @contextmanager
    def _changing(self, entry: ReservedGroup) -> Iterator[None]:
        self._count(entry, -1)
        yield
        self._count(entry, 1)

    def _remove(self, entry: ReservedGroup) -> None:
        self._count(self.entries.pop(entry.ticket.group_id), -1)

    def set_generating(self, ranks: Sequence[int]) -> None:
        """Only these ranks admit groups and have engines."""
        for rank in set(range(self.ranks)).difference(ranks):
            self.acknowledged[rank] = _NO_ENGINE
            # Without any rank that generates, the run must not end before a node joins.
            self.exhausted[rank] = bool(ranks)

    def has_engine(self, rank: int) -> bool:
        """False for a rank that only trains, and for a lost rank."""
        return rank < len(self.acknowledged) and self.acknowledged[rank] != _NO_ENGINE

    def begin(self, turn: int, rank: int) -> bool:
        """A rank that joined the run generates from now on. Its engines have the weights of the turns below `turn`. False: these
        weights are too old for a group that is admitted now, so the rank needs newer weights first."""
        if turn + self.max_staleness < self.turn:
            return False
        missing = rank + 1 - len(self.acknowledged)
        # Ranks with lower numbers may join after this one.
        self.acknowledged += [_NO_ENGINE] * missing
        self.exhausted += [True] * missing
        self.acknowledged[rank], self._acknowledged_turn = turn, -1
        # If the last rank with an engine was lost, `lose_generator` did not mark it as exhausted, so that the run went on. Now this
        # rank goes on instead.
        self.exhausted = [
            done or engine == _NO_ENGINE for done, engine in zip(self.exhausted, self.acknowledged, strict=True)
        ]
        self.exhausted[rank] = False
        return True

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """The number of slots of all ranks together."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def slots_taken(self) -> int:
        """Slots of live and claimed groups, and the `held` slots."""
        return len(self.entries) + sum(self.held.values())

    def acknowledged_turn(self) -> int:
        """`a`: the oldest policy that an engine may still sample from."""
        # The turn itself if no rank has an engine.
        if self.acknowledged[self._slowest] != self._acknowledged_turn:
            self._acknowledged_turn = min(self.acknowledged)
            self._slowest = len(self.acknowledged) - 1 - self.acknowledged[::-1].index(self._acknowledged_turn)
        return min(self.turn, self._acknowledged_turn)

    def fits(self, deadline: int, *, claim: bool) -> bool:
        """Whether the invariant I holds after a group with this deadline is claimed, or (claim=False) admitted."""
        k, v, c = self.groups_per_step, self.turn, self.claimed
        live = 0
        # Checking I at deadlines suffices: between deadlines `live` stays the same, and its bound grows.
        for d in sorted({*self._live, deadline}):
            live += len(self._live.get(d, ())) + (d == deadline and not claim)
            if claim and d >= deadline:
                return True  # both sides fall by one
            claimed_then = c + 1 if claim else c
            if (claim or d >= deadline) and live > k * (d - v + 1) - claimed_then:
                return False
        return True

    def expired(self) -> list[Ticket]:
        """Live tickets past their deadline; always empty with `late="wait"`."""
        return [e.ticket for e in self.entries.values() if not e.claimed and e.ticket.deadline < self.turn]

    def finished(self) -> bool:
        """Every rank is exhausted and no group is left to train."""
        return not self.entries and all(self.exhausted)

    def step_complete(self) -> bool:
        """No further group can get a place in the open step: all places are claimed, or no group is live and none will come."""
        if self.claimed == self.groups_per_step:
            return True
        return 0 < self.claimed == len(self.entries) and all(self.exhausted)

    def statistics(self) -> LedgerStatistics:
        return LedgerStatistics(
            turn=self.turn,
            live=len(self.entries) - self.claimed,
            claimed=self.claimed,
            held=sum(self.held.values()),
            admitted=self.admitted,
            trained=self.trained,
            dropped=self.dropped,
            failed=self.failed,
            slots=self.slots,
        )

    def first_live(self) -> ReservedGroup | None:
        """The live group with the earliest deadline: the open step waits for it. Of several, the one that has been
        unchanged for longest."""
        return next(iter(self._live[min(self._live)].values())) if self._live else None

    def due(self, rank: int) -> int | None:
        """Groups of the open step that this rank has still to admit; None where ranks have no shares."""
        if not self.by_rank or any(self.exhausted):
            return None
        first = self.turn * self.groups_per_step
        share = len(range(first + (rank - first) % self.ranks, first + self.groups_per_step, self.ranks))
        return share - sum(entry.rank == rank for entry in self.entries.values())

    def describe(self) -> str:
        """One sentence for error messages and the watchdog: the open step, and what it waits for."""
        first = self.first_live()
        return describe_step(
            self.statistics(), self.groups_per_step, None if first is None else (first.rank, first.ticket)
        )

    # -- transitions -----------------------------------------------------------------------------------------------

    def admit(self, group_id: int, oldest: int | None, rank: int = 0) -> tuple[bool, Ticket | None]:
        """(decided, ticket). (False, None): not now, ask again after a change. (True, None): refused, because the group is too old,
        or could be trained in time only if another group were dropped. `oldest`: see `ports.Ledger.admit`."""
        if group_id in self.entries:
            raise LedgerError(f"group {group_id} was admitted twice")
        self._check_not_lost(rank)
        sampled_from = self.acknowledged_turn()
        if oldest is not None:
            if oldest > self.turn:
                raise VersionAhead(
                    f"group {group_id} claims to be sampled by the weights of turn {oldest}, but this run is at turn {self.turn}: "
                    "submit groups that this run's weights sampled, not those of an earlier run or of another policy"
                )
            sampled_from = oldest
            deadline = oldest + self.max_staleness
            if deadline < self.turn or (self.late == "wait" and not self.fits(deadline, claim=False)):
                return True, None
        if oldest is None and self.due(rank) == 0:
            return False, None
        if self.acknowledged_turn() < self.warmup and self.slots_taken >= self.groups_per_step:
            return False, None
        deadline = sampled_from + self.max_staleness
        if self.slots_taken >= self.slots or deadline < self.turn:
            return False, None
        if self.late == "wait" and not self.fits(deadline, claim=False):
            return False, None
        ticket = Ticket(group_id, sampled_from, deadline)
        self.entries[group_id] = ReservedGroup(ticket, rank)
        self._count(self.entries[group_id], 1)
        self.admitted += 1
        return True, ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Undo an admission whose caller was cancelled."""
        self._remove(self._live_entry(ticket))
        self.admitted -= 1

    def assign(self, ticket: Ticket, tokens: int) -> int:
        """The training rank that gets this scored group. A second call gives the same rank."""
        entry = self._live_entry(ticket)
        if entry.trainer < 0:
            with self._changing(entry):
                by_id = self.trainers[ticket.group_id % len(self.trainers)]
                fewest = min(self.trainers, key=self._assigned.__getitem__)
                entry.trainer, entry.tokens = by_id if self.by_id else fewest, tokens
        return entry.trainer

    def arrive(self, ticket: Ticket, sender: int, rank: int) -> bool:
        """The group of `sender` is at `rank` from now on. False if `sender` has no such group any more. A repeated call has
        the same result. Errors: LedgerError if `sender` is lost."""
        self._check_not_lost(sender)
        entry = self.entries.get(ticket.group_id)
        if entry is None or entry.ticket != ticket or entry.rank not in (sender, rank):
            return False
        with self._changing(entry):
            entry.rank = rank
        return True

    def claimants(self) -> list[int]:
        """The training ranks whose next claim succeeds: among those with a group that may have a place, the ranks with the fewest
        tokens in the open step."""
        possible = {deadline for deadline in self._live if self.trainers and self._may_claim(deadline)}
        able = [rank for rank, arrived in self._arrived.items() if not possible.isdisjoint(arrived)]
        fewest = min(map(self._in_step.__getitem__, able), default=0)
        return [rank for rank in able if self._in_step[rank] == fewest]

    def _may_claim(self, deadline: int) -> bool:
        return deadline >= self.turn and (self.late == "drop" or self.fits(deadline, claim=True))

    def claim(self, ready: Iterable[Ticket], rank: int | None = None) -> Ticket | None:
        """Give a place to the first ticket that may have one; None if none may. Tries the first ticket of each deadline, until one
        gets the place. `rank`: the rank that trains the group, if another rank may have admitted it. Errors: LedgerError if a tried
        ticket is not live."""
        if self.claimed >= self.groups_per_step:
            return None
        # `rank` waits while another rank has fewer tokens in the open step and a group that may have a place.
        if rank is not None and any(self._in_step[other] < self._in_step[rank] for other in self.claimants()[:1]):
            return None
        for ticket in first_by_deadline(ready):
            entry = self._live_entry(ticket)
            if self._may_claim(ticket.deadline):
                with self._changing(entry):
                    entry.claimed = True
                    entry.rank = entry.rank if rank is None else rank
                self.claimed += 1
                return ticket
        return None

    def unclaim(self, entry: ReservedGroup) -> None:
        """Take away the place that the group has in the open step."""
        with self._changing(entry):
            entry.claimed = False
        self.claimed -= 1

    def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"]) -> None:
        """Remove a live group and free its slot. Errors: LedgerError for a group without a slot, or with a place."""
        self._remove(self._live_entry(ticket))
        self.dropped += outcome == "dropped"
        self.failed += outcome == "failed"

    def commit(self) -> int:
        """Close the open step and return the next turn. Errors: LedgerError for a step without groups, and (`late="wait"`) for a
        partial step after which a live group could not be trained in time."""
        if not self.claimed:
            raise LedgerError(f"an empty step was committed at turn {self.turn}: no group has a place in it")
        live = 0
        for deadline in sorted(self._live) if self.late == "wait" else ():
            live += len(self._live[deadline])
            if live > self.groups_per_step * (deadline - self.turn):
                lost = next(iter(self._live[deadline].values())).ticket
                raise LedgerError(
                    f"a partial step ({self.claimed} of {self.groups_per_step} places) was committed at turn "
                    f"{self.turn}, but then group {lost.group_id} (deadline {lost.deadline}) cannot be trained "
                    "in time: commit a partial step only when no group is live"
                )
        self.last_step = {group_id: e.rank for group_id, e in self.entries.items() if e.claimed}
        for entry in [e for e in self.entries.values() if e.claimed]:
            self._remove(entry)
        self.held[self.turn] = self.claimed
        self.claimed = 0
        self.turn += 1
        return self.turn

    def rollback(self, rank: int | None = None) -> list[Ticket]:
        """Make the claimed groups (of one rank, or of all) live again. Returns their tickets."""
        tickets = []
        for entry in self.entries.values():
            if entry.claimed and rank in (None, entry.rank):
                self.unclaim(entry)
                tickets.append(entry.ticket)
        return tickets

    def release(self, turn: int, rank: int = 0) -> bool:
        """This rank's engines have the weights that follow `turn`. True if slots came free: all engines have these weights."""
        if not self.has_engine(rank):
            return False
        if not self.acknowledged[rank] <= turn < self.turn:
            raise LedgerError(
                f"turn {turn} was released by rank {rank}, which has acknowledged {self.acknowledged[rank]}; the "
                f"ledger is at {self.turn}: a step is released once, after its commit"
            )
        self.acknowledged[rank] = turn + 1
        return self._free_slots()

    def _free_slots(self) -> bool:
        released = [t for t in self.held if t < self.acknowledged_turn()]
        for t in released:
            self.trained += self.held.pop(t)
        return bool(released)

    def lose_generator(self, rank: int) -> list[int]:
        """A rank that only generates is lost. Its groups that have not arrived at a training rank are dropped. No slot waits for
        its engine any more. Returns the ids of the dropped groups, which may be admitted again."""
        if not self.has_engine(rank):
            return []
        lost = [e.ticket for e in self.entries.values() if e.rank == rank and not e.claimed]
        for ticket in lost:
            self.end(ticket, "dropped")
        self.acknowledged[rank] = _NO_ENGINE
        # If no rank can play the groups again, a last step without them must not begin.
        self.exhausted[rank] |= any(map(self.has_engine, range(len(self.acknowledged))))
        self._free_slots()
        return [ticket.group_id for ticket in lost]

    def _check_not_lost(self, rank: int) -> None:
        if not self.has_engine(rank):
            raise LedgerError(
                f"rank 0 has given up rank {rank}, and other ranks play its groups; see the output of rank 0 for the reason"
            )

    def _live_entry(self, ticket: Ticket) -> ReservedGroup:
        entry = self.entries.get(ticket.group_id)
        if entry is None or entry.ticket != ticket:
            raise LedgerError(f"group {ticket.group_id} holds no slot: it was never admitted, or has ended already")
        if entry.claimed:
            raise LedgerError(f"group {ticket.group_id} already has a place in the open step of turn {self.turn}")
        return entry
