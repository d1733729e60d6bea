"""The reservation rule: which groups may enter the run, and which step trains which group, so that no group is trained older than
`max_staleness`. A plain state machine without waiting and I/O. `ledger.py` adds waiting, `line_ledger.py` messages between ranks.

Words
  k, m      groups per step; max_staleness
  v         the turn: the number of committed steps. The open step has the number v
  a         the acknowledged turn: the oldest policy that any engine may still sample from (a <= v). A rank's `release(t)` says that
            its engines have the weights of turn t + 1; `a` is the minimum over the ranks
  c         claimed places of the open step. A step has k places
  deadline  of a group: the last turn at which it may be trained
  live(d)   number of live groups (admitted, not yet claimed) with a deadline <= d
  slot      a group occupies a slot from its admission until the release of its step, or until it is dropped or failed. All ranks
            together have s = (m + 1) k slots. `held` counts the slots of committed steps that are not released

Rule. A new group gets the deadline `a + m`. Its tokens are sampled by policy `a` or later. So a group that is trained by its
deadline is at most `m` turns old, counted from its oldest token. A ready group with deadline `d` may have a place at turn `v` iff
`c < k` and the invariant I holds afterwards:

    I(v, c):   for all j >= 0:   live(v + j) <= k (j + 1) - c        (right side: the free places up to and including turn v + j)

Proof that I always holds, by induction over the events.
  * admit: a free slot means `live + c + held + 1 <= s`, and `held = k (v - a)` if all steps were full. The new deadline
    is `a + m`: the conditions with `v + j < a + m` do not change, and for all others it suffices that
    `live + 1 <= k (a + m - v + 1) - c = s - k (v - a) - c`, which is the slot condition. If `v > a + m` then
    `held >= k (m + 1) = s` and no slot is free. `admit` also checks I itself, because a committed step may have been partial,
    and a group from outside the run has another deadline.
  * claim of a group with deadline `d`: for `v + j >= d` both sides fall by one; for `v + j < d` the rule checks I.
  * commit of a full step (`c = k`): I(v, k) at `j + 1` is literally I(v + 1, 0) at `j`, and at `j = 0` it says that no
    live group has a deadline `<= v`, so no group is too old. `commit` refuses a partial step after which I fails.
  * rollback makes claimed groups live again: for `v + j >= d` both sides grow by one, for `v + j < d` only the right side.
  * drop, fail and release only remove live groups or free slots.
No dead end: if `c < k` and a group is live, the group with the earliest deadline may always claim (no group is live with
an earlier deadline, and `c + 1 <= k`). So a step waits only for the groups with the earliest deadlines, which already
have slots. No group needs to be dropped, and none is trained older than `m`.

Warm-up. While `a < warmup` only `k` slots are given out. So only the groups of step `a` are admitted, and they are trained at turn
`a` with age 0. I still holds, because fewer slots only delay admissions. The publish pump must not skip a publish during the
warm-up: a turn without a release keeps its slots `held`, and the open step needs all `k` slots.

Shares (`by_rank`, for `m = 0`). Without shares, slots that become free together go to the rank that asks first, so two runs of one
configuration may train different steps. With shares a rank admits only its share of the open step: the prompts whose ordinal `n`
has `n % ranks == rank`. No rank waits for another rank's share: all `k` slots are free after the release of the last step, and the
shares add up to `k`. The same rank's next group replaces a dropped group. Once a rank has no more prompts, there are no shares.

Balance (`trainers`, if groups travel to training ranks). A scored group goes to the training rank with the fewest tokens of live
and claimed groups (with `by_id`: to the rank of its id), and is claimed only there. A training rank waits before its next claim
while another training rank has fewer tokens in the open step and a group that may have a place. So the tokens of two ranks with
such groups differ by at most one group. No rank waits for ever: of these ranks, the one with the fewest tokens may always claim.

Lost ranks. If a rank that only generates is lost, its live groups that have not arrived at a training rank are dropped, and `a`
is the minimum over the other ranks. This only removes live groups and frees slots, so I holds. Arrived groups are trained as usual.
Later messages of the lost rank change nothing: `arrive` and `admit` refuse them.

Joining. A rank that joins the run counts from `begin(t)` on, where `t` is the turn of its weights. If `t < a`, then `a` falls to
`t`. The slots of released turns stay free, so a free slot no longer implies I: `admit` checks I for the next admissions, which have
the deadline `t + m`. `begin` refuses a `t` with `t + m < v`, because all those admissions would be too old.

With `late="drop"` groups claim without this rule, in the order in which they are ready. `expired()` lists the groups past their
deadline, and the caller drops them.
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
# The acknowledged turn of a rank without engines. It is later than any turn, so such a rank never lowers the minimum.
_NO_ENGINE = 1 << 60


def first_by_deadline(tickets: Iterable[Ticket]) -> list[Ticket]:
    """The first ticket of each deadline, in the order of `tickets`. Only a ticket's deadline decides if it may have a place."""
    first = dict[int, Ticket]()
    for ticket in tickets:
        first.setdefault(ticket.deadline, ticket)
    return [*first.values()]


def describe_step(
    s: LedgerStatistics, places: int, first: tuple[int, Ticket] | None, unknown: str = "no group is live"
) -> str:
    """One sentence for error messages. `places`: those of a full step. `first`: (rank, ticket) of the group with the earliest
    deadline; None: the sentence ends with `unknown`."""
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
    """A live or claimed group. `rank`: the rank that has the group, because it admitted the group or the group arrived there."""

    ticket: Ticket
    rank: int = 0
    claimed: bool = False
    trainer: int = -1  # the training rank that gets the group; -1: not chosen yet
    tokens: int = 0  # of the group, once it is assigned


@dataclass(slots=True)
class Reservation:
    """The ledger's books. A method that raises has changed nothing."""

    groups_per_step: int
    max_staleness: int
    late: Late = "wait"
    turn: int = 0
    ranks: int = 1
    warmup: int = 0  # below this acknowledged turn: only `groups_per_step` slots
    by_rank: bool = False  # each rank has its share of every step
    # The training ranks that groups travel to. Empty: each group stays on the rank that admitted it.
    trainers: Sequence[int] = ()
    # How `assign` chooses the training rank of a group. True: by the group's id. False: the rank with the fewest tokens.
    by_id: bool = False
    entries: dict[int, ReservedGroup] = field(default_factory=dict)  # by group id, in admission order
    held: dict[int, int] = field(default_factory=dict)  # committed turn -> its slots, until the release
    acknowledged: list[int] = field(default_factory=list)  # per rank: the turn of its engines' weights
    exhausted: list[bool] = field(default_factory=list)  # per rank: True once it admits no more groups
    last_step: dict[int, int] = field(default_factory=dict)  # group id -> rank, of the step that was committed last
    claimed: int = 0  # places of the open step
    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    # The minimum of `acknowledged`, and a rank with this value. Only a change of this rank's value or `begin` changes the minimum.
    _acknowledged_turn: int = field(default=-1, init=False)
    _slowest: int = field(default=0, init=False)
    # Derived from `entries` by `_count`, so that a claim need not visit all entries. `_live`: deadline -> live groups by id.
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
        """Add the group to the derived counts (by=1), or remove it (by=-1). Change an entry only inside `_changing`."""
        deadline, group_id = entry.ticket.deadline, entry.ticket.group_id
        has_arrived = entry.rank == entry.trainer
        tables = self._live, self._arrived.get(entry.rank if has_arrived else -1)
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
        """Set the ranks that admit groups and have engines."""
        for rank in set(range(self.ranks)).difference(ranks):
            self.acknowledged[rank] = _NO_ENGINE
            # If no rank generates, no rank counts as exhausted: the run must not end before a node joins.
            self.exhausted[rank] = bool(ranks)

    def has_engine(self, rank: int) -> bool:
        """False for a rank that only trains, has not begun or is lost."""
        return rank < len(self.acknowledged) and self.acknowledged[rank] != _NO_ENGINE

    def begin(self, turn: int, rank: int) -> bool:
        """A rank that joined the run generates from now on, with the weights of `turn`. Returns False if a group that is admitted
        with these weights would be too old: the rank needs newer weights first."""
        if turn + self.max_staleness < self.turn:
            return False
        missing = rank + 1 - len(self.acknowledged)
        # Ranks with lower numbers may begin after this rank.
        self.acknowledged += [_NO_ENGINE] * missing
        self.exhausted += [True] * missing
        self.acknowledged[rank], self._acknowledged_turn = turn, -1
        # While no rank had an engine, some ranks were not marked as exhausted. Mark them now, because this rank admits groups.
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
        """The number of slots of live and claimed groups, plus the `held` slots."""
        return len(self.entries) + sum(self.held.values())

    def acknowledged_turn(self) -> int:
        """`a`: the oldest policy that an engine may still sample from; `turn` if no rank has an engine."""
        if self.acknowledged[self._slowest] != self._acknowledged_turn:
            self._acknowledged_turn = min(self.acknowledged)
            self._slowest = len(self.acknowledged) - 1 - self.acknowledged[::-1].index(self._acknowledged_turn)
        return min(self.turn, self._acknowledged_turn)

    def fits(self, deadline: int, *, claim: bool) -> bool:
        """Whether the invariant I holds after a group with this deadline is claimed, or (claim=False) admitted."""
        k, v, c = self.groups_per_step, self.turn, self.claimed
        live = 0
        # Check I only at deadlines: between deadlines `live` stays the same, and its bound grows.
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
        """Whether every rank is exhausted and no group is left to train."""
        return not self.entries and all(self.exhausted)

    def step_complete(self) -> bool:
        """Whether the open step is full: all places claimed, or all remaining groups (at least one) claimed and no more to come."""
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
        """The live group with the earliest deadline: the open step waits for it. Of several, the group that changed longest ago."""
        return next(iter(self._live[min(self._live)].values())) if self._live else None

    def due(self, rank: int) -> int | None:
        """How many groups `rank` has not yet admitted from its share of the open step; None if ranks have no shares."""
        if not self.by_rank or any(self.exhausted):
            return None
        first = self.turn * self.groups_per_step
        share = len(range(first + (rank - first) % self.ranks, first + self.groups_per_step, self.ranks))
        return share - sum(entry.rank == rank for entry in self.entries.values())

    def describe(self) -> str:
        """One sentence for error messages and the watchdog: the open step, and the group for which it waits."""
        first = self.first_live()
        return describe_step(
            self.statistics(), self.groups_per_step, None if first is None else (first.rank, first.ticket)
        )

    # -- transitions -----------------------------------------------------------------------------------------------

    def admit(self, group_id: int, oldest: int | None, rank: int = 0) -> tuple[bool, Ticket | None]:
        """Returns (decided, ticket). (False, None): not now, call again after a change. (True, None): refused for ever, because the
        group is too old, or would make another group too old. `oldest`: see `ports.Ledger.admit`."""
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
        """Choose and return the training rank that gets this scored group. A second call returns the same rank."""
        entry = self._live_entry(ticket)
        if entry.trainer < 0:
            with self._changing(entry):
                by_id = self.trainers[ticket.group_id % len(self.trainers)]
                fewest = min(self.trainers, key=self._assigned.__getitem__)
                entry.trainer, entry.tokens = by_id if self.by_id else fewest, tokens
        return entry.trainer

    def arrive(self, ticket: Ticket, sender: int, rank: int) -> bool:
        """Move the group from `sender` to `rank`. Returns False if `sender` no longer has the group. A repeated call has
        the same result while the group is live. Errors: LedgerError if `sender` is lost."""
        self._check_not_lost(sender)
        entry = self.entries.get(ticket.group_id)
        if entry is None or entry.ticket != ticket or entry.rank not in (sender, rank):
            return False
        with self._changing(entry):
            entry.rank = rank
        return True

    def claimants(self) -> list[int]:
        """The training ranks whose next claim succeeds if the step is not full. Each has a group that may get a place. No other
        rank with such a group has fewer tokens in the open step."""
        possible = {deadline for deadline in self._live if self.trainers and self._may_claim(deadline)}
        able = [rank for rank, arrived in self._arrived.items() if not possible.isdisjoint(arrived)]
        fewest = min(map(self._in_step.__getitem__, able), default=0)
        return [rank for rank in able if self._in_step[rank] == fewest]

    def _may_claim(self, deadline: int) -> bool:
        return deadline >= self.turn and (self.late == "drop" or self.fits(deadline, claim=True))

    def claim(self, ready: Iterable[Ticket], rank: int | None = None) -> Ticket | None:
        """Give a place to the first ticket that may have a place, and return this ticket. Returns None if the step is full, if no
        ticket may have a place, or if `rank` must wait for another rank. Tries only the first ticket of each deadline. `rank`: the
        rank that trains the group; None: the rank that has the group. Errors: LedgerError if a tried ticket is not live."""
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
        """Make a claimed group live again: it loses its place in the open step."""
        with self._changing(entry):
            entry.claimed = False
        self.claimed -= 1

    def end(self, ticket: Ticket, outcome: Literal["dropped", "failed"]) -> None:
        """Remove a live group and free its slot. Errors: LedgerError for a group that is not live."""
        self._remove(self._live_entry(ticket))
        self.dropped += outcome == "dropped"
        self.failed += outcome == "failed"

    def commit(self) -> int:
        """Commit the open step and return the next turn. Errors: LedgerError for a step without groups, and (`late="wait"`) for a
        partial step after which a live group could not be trained in time."""
        if not self.claimed:
            raise LedgerError(f"an empty step was committed at turn {self.turn}: no group has a place in it")
        live = 0
        for deadline in sorted(self._live) if self.late == "wait" else ():
            live += len(self._live[deadline])
            if live > self.groups_per_step * (deadline - self.turn):
                too_late = next(iter(self._live[deadline].values())).ticket
                raise LedgerError(
                    f"a partial step ({self.claimed} of {self.groups_per_step} places) was committed at turn "
                    f"{self.turn}, but then group {too_late.group_id} (deadline {too_late.deadline}) cannot be trained "
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
        """Make the claimed groups of `rank` live again; None: of all ranks. Returns their tickets."""
        tickets = []
        for entry in self.entries.values():
            if entry.claimed and rank in (None, entry.rank):
                self.unclaim(entry)
                tickets.append(entry.ticket)
        return tickets

    def release(self, turn: int, rank: int = 0) -> bool:
        """The engines of `rank` have the weights of `turn + 1`. Returns whether slots became free or `a` rose."""
        if not self.has_engine(rank):
            return False
        if not self.acknowledged[rank] <= turn < self.turn:
            raise LedgerError(
                f"turn {turn} was released by rank {rank}, which has acknowledged {self.acknowledged[rank]}; the "
                f"ledger is at {self.turn}: a step is released once, after its commit"
            )
        before, self.acknowledged[rank] = self.acknowledged_turn(), turn + 1
        return self._free_slots() or self.acknowledged_turn() > before

    def _free_slots(self) -> bool:
        released = [t for t in self.held if t < self.acknowledged_turn()]
        for t in released:
            self.trained += self.held.pop(t)
        return bool(released)

    def lose_generator(self, rank: int) -> list[int]:
        """A rank that only generates is lost. Drops its groups that have not arrived at a training rank. Slots no longer wait for
        its `release`. Returns the ids of the dropped groups, which may be admitted again."""
        if not self.has_engine(rank):
            return []
        lost = [e.ticket for e in self.entries.values() if e.rank == rank and not e.claimed]
        for ticket in lost:
            self.end(ticket, "dropped")
        self.acknowledged[rank] = _NO_ENGINE
        # If no rank is left to play these groups again, `rank` does not count as exhausted: a partial step must not leave them out.
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
