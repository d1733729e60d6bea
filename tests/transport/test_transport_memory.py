"""What an owner of record rings remembers of the members that came."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.transport.rings.types import CameBefore


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_the_memory_of_members_against_a_plain_model(steps: list[tuple[bool, int, int]]) -> None:
    memory, known = CameBefore(1000), set[tuple[int, int]]()
    for arrives, group, first in steps:
        members = (first, first + 2)
        if arrives:
            expected = tuple(i for i, member in enumerate(members) if (group, member) not in known)
            assert memory.fresh((0, group), members) == expected
        else:
            memory.leave((0, group), members)
        known.update((group, member) for member in members)


def test_only_the_latest_groups_that_left_are_remembered() -> None:
    memory = CameBefore(3)
    for group in (1, 2):
        assert memory.fresh((0, group), (0, 1)) == (0, 1)
        memory.leave((0, group), (0, 1))
    assert memory.fresh((0, 2), (0, 1, 2)) == (2,)
    assert memory.fresh((0, 1), (1,)) == (0,)
    memory.leave((0, 3), (5, 6, 7))  # as many as it keeps: the others are forgotten, those in the ring are not
    assert memory.fresh((0, 2), (0, 2)) == (0,)
    assert memory.fresh((0, 3), (5, 6, 7)) == () and (0, 3) not in memory._here  # such a record is let go at once
