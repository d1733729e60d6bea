"""When rounds of a sharded model are due: from the shared books alone, the same number of them on every rank."""

from __future__ import annotations

import pytest

from asyncrl.distributed.ledger import LocalLedger
from asyncrl.pumps.train import Rounds
from asyncrl.types import ClaimState


async def claimed(ledger: LocalLedger, count: int) -> None:
    first = ledger.statistics().admitted
    tickets = [await ledger.admit(first + number) for number in range(count)]
    for ticket in tickets:
        assert ticket is not None
        state, _ = await ledger.claim([ticket])
        assert state is ClaimState.GRANTED


@pytest.mark.parametrize(("every", "groups"), [(2, 8), (3, 8), (1, 5), (9, 8)])
async def test_every_rank_joins_the_same_rounds_however_late_it_looks(every: int, groups: int) -> None:
    ledger = LocalLedger(groups, 0)
    calls: list[list[bool]] = [[], []]

    def rank(number: int) -> Rounds:
        async def join(finishing: bool) -> bool:
            calls[number].append(finishing)
            return finishing

        return Rounds(join, ledger, every)

    quick, slow = rank(0), rank(1)
    joined = [0, 0]
    for _ in range(groups):
        await claimed(ledger, 1)
        while quick.due(joined[0]):  # after each claim; the other one looks when the step is full
            joined[0] += 1
            await quick.join()
    while slow.due(joined[1]):
        joined[1] += 1
        await slow.join()
    for each in (quick, slow):
        await each.last()
    assert joined == [groups // every] * 2
    assert calls[0] == calls[1] == [False] * (groups // every) + [True]


async def test_last_goes_on_until_all_are_finishing() -> None:
    answers = iter([False, False, True])

    async def join(finishing: bool) -> bool:
        assert finishing
        return next(answers)

    await Rounds(join, LocalLedger(1, 0), None).last()
    assert next(answers, None) is None


async def test_nothing_is_due_without_a_sharded_trainer_or_a_streamed_step() -> None:
    ledger = LocalLedger(4, 0)
    await claimed(ledger, 4)

    async def join(finishing: bool) -> bool:
        return True

    assert not Rounds(None, ledger, 1).due(0)
    assert not Rounds(join, ledger, None).due(0)
    await Rounds(None, ledger, 1).last()
