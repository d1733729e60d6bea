"""Slots raise when they would go wrong, and change nothing then."""

from __future__ import annotations

import pytest

from asyncrl.concurrency.slots import Slots
from asyncrl.errors import LedgerError


def test_slots_are_taken_and_given_and_never_more_than_there_are() -> None:
    slots = Slots(3)
    slots.take()
    slots.take()
    slots.give()
    assert (slots.total, slots.held, slots.free) == (3, 1, 2)
    for count in (2, -1):
        with pytest.raises(LedgerError, match="over-release"):
            slots.give(count)
    slots.take()
    slots.take()
    with pytest.raises(LedgerError, match="none can be taken"):
        slots.take()
    assert slots.held == 3
    with pytest.raises(ValueError):
        Slots(0)
    with pytest.raises(LedgerError):
        Slots(2, held=3)
