"""Slots raise when they would go wrong, and change nothing then."""

from __future__ import annotations

import pytest

from asyncrl.concurrency.slots import Slots
from asyncrl.errors import LedgerError


def test_take_and_give() -> None:
    slots = Slots(3)
    slots.take()
    slots.take()
    slots.give()
    assert (slots.total, slots.held, slots.free) == (3, 1, 2)


@pytest.mark.parametrize("count", [2, -1])
def test_over_release_raises_and_changes_nothing(count: int) -> None:
    slots = Slots(3, held=1)
    with pytest.raises(LedgerError, match="over-release"):
        slots.give(count)
    assert slots.held == 1


def test_taking_more_than_there_are_raises() -> None:
    slots = Slots(1)
    slots.take()
    with pytest.raises(LedgerError, match="none can be taken"):
        slots.take()
    assert slots.held == 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError):
        Slots(0)
    with pytest.raises(LedgerError):
        Slots(2, held=3)
