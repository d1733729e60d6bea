"""The store: what is ready and in which order, who owns which memory, and that nothing of a group is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.trajectories import trajectory

from asyncrl.data.store import ADVANTAGES, OLD, REFERENCE, REWARDS, TOKEN_DTYPES, Rows, Store, copy_group
from asyncrl.errors import DataError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Group, Prompt, Ticket, Trajectory


class Counted:
    """A lease that knows how often it was ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = 0
        self.error = error

    def release(self) -> None:
        self.ended += 1
        if self.error is not None:
            raise self.error


def make_trajectory(group_id: int, member: int, size: int, length: int = 5, reward: float | None = None) -> Trajectory:
    ids = np.arange(length) + 100 * member
    return trajectory(group_id, member, size, ids, logprob=-1.5, sampled=-1.25, version=3, reward=reward)


def make_group(group_id: int, size: int = 2, length: int = 5) -> Group:
    """Member m has `length` + m tokens."""
    members = tuple(make_trajectory(group_id, member, size, length + member) for member in range(size))
    return Group(Ticket(group_id, 0, 2), Prompt(group_id, np.arange(2, dtype=np.int32), ""), members)


def rewarded(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, reward=float(t.member)) for t in group.trajectories))


def put_and_score(store: Store, *group_ids: int, leases: Sequence[Counted] = ()) -> None:
    for group_id in group_ids:
        store.score(rewarded(store.put(make_group(group_id), leases)))


def ready(store: Store) -> list[int]:
    return [ticket.group_id for ticket in store.ready()]


def contents(rows: Rows) -> tuple[Any, ...]:
    return rows.group, dict(rows.columns), rows.leases, rows.claimed


# -- presence is readiness ---------------------------------------------------------------------------------------------


def test_scores_take_the_place_of_what_was_put() -> None:
    store = Store()
    put = store.put(make_group(1, size=3))
    store.score(rewarded(put))
    rows = store.rows(1)
    assert rows.columns[REWARDS] == [0.0, 1.0, 2.0]
    assert [t.reward for t in rows.group.trajectories] == [0.0, 1.0, 2.0]
    unknown = replace(put, trajectories=tuple(replace(t, reward=None) for t in put.trajectories))
    store.score(unknown)  # a reward that does not apply is a reward
    assert store.rows(1).columns[REWARDS] == [None] * 3 and ready(store) == [1]


# -- whose memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leased", [False, True])
def test_dtypes_are_normalised_also_under_a_lease(leased: bool) -> None:
    group = make_group(1, size=1)
    wide = {"tokens": np.int64, "mask": np.uint8, "logprobs": np.float64, "sampled_logprobs": np.float16}
    [member] = group.trajectories
    odd = replace(member, **{name: getattr(member, name).astype(kind) for name, kind in wide.items()})
    store = Store()
    [kept] = store.put(replace(group, trajectories=(odd,)), [Counted()] if leased else ()).trajectories
    for name, kind in TOKEN_DTYPES.items():
        assert getattr(kept, name).dtype == kind
        assert getattr(kept, name).tolist() == getattr(member, name).tolist()
        assert np.shares_memory(getattr(kept, name), getattr(odd, name)) == (leased and name == "versions")
    assert store.statistics() == (1, 0)


@pytest.mark.parametrize("leased", [False, True])
def test_arrays_that_somebody_else_brings_with_the_scores_are_copied(leased: bool) -> None:
    """A hook may return a group of its own, keep it, and write to it later."""
    store = Store()
    put = store.put(make_group(1), [Counted()] if leased else ())
    theirs = rewarded(copy_group(put))
    store.score(theirs)
    theirs.trajectories[1].tokens[:] = -7
    mine = store.rows(1).group.trajectories[1]
    assert mine.tokens.tolist() == put.trajectories[1].tokens.tolist() and mine.reward == 1.0
    kept = [t.tokens for t in store.rows(1).group.trajectories]
    store.score(rewarded(store.rows(1).group))  # the store's own are not copied again
    assert all(a is t.tokens for a, t in zip(kept, store.rows(1).group.trajectories, strict=True))


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_cannot_be_ended_keeps_no_other_one() -> None:
    store = Store()
    broken, others = Counted(OSError("gone")), [Counted(), Counted()]
    put_and_score(store, 1, leases=[others[0], broken])
    put_and_score(store, 2, leases=[others[1]])
    with pytest.raises(OSError, match="gone"):
        store.clear([1, 2])
    assert [lease.ended for lease in others] == [1, 1] and broken.ended == 1
    assert store.statistics() == (0, 0) and ready(store) == []


def test_a_closed_store_holds_nothing_and_ends_no_lease() -> None:
    lease = Counted()
    store = Store()
    put_and_score(store, 1, 2, leases=[lease])
    store.close()
    assert store.statistics() == (0, 0) and ready(store) == [] and 1 not in store and lease.ended == 0


# -- what fails changes nothing ----------------------------------------------------------------------------------------


def shorter(group: Group) -> Group:
    return replace(group, trajectories=group.trajectories[:1])


def torn(group: Group, column: str = "versions") -> Group:
    """The last member's column is one shorter than its tokens."""
    *rest, last = group.trajectories
    return replace(group, trajectories=(*rest, replace(last, **{column: getattr(last, column)[:-1]})))


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "put: is here": (lambda s: s.put(make_group(1)), DataError, "group 1 is in the store already"),
    "put: is here, leased": (lambda s: s.put(make_group(1), [Counted()]), DataError, "in the store already"),
    **{
        f"put: {name}": (
            lambda s, n=name: s.put(torn(make_group(4), n)),
            DataError,
            f"group 4, member 1: {name} has sh",
        )
        for name in TOKEN_DTYPES
        if name != "tokens"
    },
    "put: tokens": (lambda s: s.put(torn(make_group(4), "tokens")), DataError, "group 4, member 1: mask has shape"),
    "put: leased": (lambda s: s.put(torn(make_group(4)), [Counted()]), DataError, "versions has shape"),
    "score: not here": (lambda s: s.score(make_group(4)), KeyError, "group 4 is not in the store"),
    "score: fewer": (lambda s: s.score(shorter(make_group(1))), DataError, "scored with 1 members"),
    "score: torn": (lambda s: s.score(torn(make_group(1))), DataError, "versions has shape"),
    "write: not here": (lambda s: s.write(4, OLD, [0, 0]), KeyError, "group 4 is not in the store"),
    "write: count": (lambda s: s.write(1, OLD, [0.0]), DataError, "group 1: 1 values of old_logprobs for 2 members"),
    "claim: claimed": (lambda s: s.claim(2), KeyError, "2"),
    "unclaim: not here": (lambda s: s.unclaim(4), KeyError, "group 4 is not in the store"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_changes_nothing(name: str) -> None:
    operation, kind, message = FAILURES[name]
    store = Store()
    put_and_score(store, 1, 2)
    store.write(1, REFERENCE, [np.zeros(3, np.float32), np.zeros(4, np.float32)])
    store.claim(2)
    before = {group_id: contents(store.rows(group_id)) for group_id in (1, 2)}
    books = store.statistics(), ready(store)
    with pytest.raises(kind, match=message):
        operation(store)
    assert (store.statistics(), ready(store)) == books and 4 not in store
    assert {group_id: contents(store.rows(group_id)) for group_id in (1, 2)} == before


# -- whatever the order ------------------------------------------------------------------------------------------------

IDS = st.integers(0, 2)


class Operations(RuleBasedStateMachine):
    """Any operations in any order, beside a model of what is held: plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(max_events=0, nvtx=False)
        self.store = Store(self.recorder)
        self.columns: dict[int, set[str]] = {}  # of each group that is here
        self.sizes: dict[int, int] = {}  # rows
        self.order: list[int] = []
        self.claimed: set[int] = set()
        self.leases: dict[int, list[Counted]] = {}
        self.owed: list[tuple[Counted, int]] = []  # of groups that are gone: how often they were to be ended

    def look(self, group_id: int) -> None:
        found = self.columns[group_id]
        if REWARDS in found and group_id not in self.claimed and group_id not in self.order:
            self.order.append(group_id)

    @rule(group_id=IDS, size=st.integers(1, 3), length=st.integers(2, 6), leases=st.integers(0, 2))
    def put(self, group_id: int, size: int, length: int, leases: int) -> None:
        made, group = [Counted() for _ in range(leases)], make_group(group_id, size, length)
        if group_id in self.columns:
            with pytest.raises(DataError):
                self.store.put(group, made)
            assert all(lease.ended == 0 for lease in made)
            return
        put = self.store.put(group, made)
        for ours, theirs in zip(put.trajectories, group.trajectories, strict=True):
            pairs = [(getattr(ours, name), getattr(theirs, name)) for name in TOKEN_DTYPES]
            assert {np.shares_memory(*pair) for pair in pairs} == {leases > 0}
            assert all((mine == yours).all() and mine.flags.writeable == (leases > 0) for mine, yours in pairs)
        self.columns[group_id], self.leases[group_id] = set(), made
        self.sizes[group_id] = size

    @rule(group_id=IDS, torn_one=st.booleans())
    def score(self, group_id: int, torn_one: bool) -> None:
        if group_id not in self.columns:
            with pytest.raises(KeyError):
                self.store.score(make_group(group_id))
            return
        group = self.store.rows(group_id).group
        if torn_one:
            with pytest.raises(DataError):
                self.store.score(torn(group))
            return
        self.store.score(rewarded(group))
        self.columns[group_id].add(REWARDS)
        self.look(group_id)

    @rule(group_id=IDS, column=st.sampled_from([ADVANTAGES, REFERENCE, OLD]), width=st.integers(0, 9))
    def write(self, group_id: int, column: str, width: int) -> None:
        rows = self.sizes.get(group_id, 2)
        values = np.zeros(rows) if column == ADVANTAGES else [np.zeros(width, np.float32)] * rows
        if group_id not in self.columns:
            with pytest.raises(KeyError):
                self.store.write(group_id, column, values)
            return
        self.store.write(group_id, column, values)
        self.columns[group_id].add(column)
        self.look(group_id)

    @rule(data=st.data(), scored=st.booleans())
    def finish(self, data: st.DataObject, scored: bool) -> None:
        """What is required of every group, in either order: alone, few would ever be ready."""
        for group_id in data.draw(st.permutations(sorted(self.columns))):
            for step in (scored, not scored):
                if step:
                    self.score(group_id, False)
                else:
                    self.write(group_id, REFERENCE, 3)

    @rule(group_id=IDS)
    def claim_what_is_not_ready(self, group_id: int) -> None:
        if group_id not in self.order:
            with pytest.raises(KeyError):
                self.store.claim(group_id)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.order))
        rows = self.store.rows(group_id)
        assert self.store.claim(group_id) is rows and rows.claimed
        self.order.remove(group_id)
        self.claimed.add(group_id)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.claimed)))
        self.store.unclaim(group_id)
        self.claimed.remove(group_id)
        self.columns[group_id] -= {ADVANTAGES, OLD}
        self.look(group_id)

    @rule(group_ids=st.lists(IDS, max_size=2), release=st.booleans())
    def clear(self, group_ids: list[int], release: bool) -> None:
        here = [group_id for group_id in dict.fromkeys(group_ids) if group_id in self.columns]
        assert self.store.clear(group_ids, release=release) == sum(self.sizes[group_id] for group_id in here)
        for group_id in here:
            self.owed += [(lease, int(release)) for lease in self.leases.pop(group_id)]
            del self.columns[group_id], self.sizes[group_id]
            self.claimed.discard(group_id)
        self.order = [group_id for group_id in self.order if group_id not in here]

    @invariant()
    def agrees(self) -> None:
        rows, claimed = sum(self.sizes.values()), sum(self.sizes[group_id] for group_id in self.claimed)
        assert self.store.statistics() == (rows, claimed)
        assert self.recorder.drain().get("queue/store/depth", rows) == rows
        assert ready(self.store) == self.order
        assert all((group_id in self.store) == (group_id in self.columns) for group_id in range(3))
        assert all(set(self.store.rows(g).columns) == found for g, found in self.columns.items())
        assert all(lease.ended == 0 for leases in self.leases.values() for lease in leases)
        assert all(lease.ended == times for lease, times in self.owed)

    def teardown(self) -> None:
        self.clear(list(range(3)), True)
        assert self.store.statistics() == (0, 0) and ready(self.store) == []


Operations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = Operations.TestCase
