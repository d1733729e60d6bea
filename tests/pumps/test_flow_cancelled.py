"""Cancellation at every iteration of the event loop of a run: whatever was going on, the books add up and no step is open.

`live` checks after each: no live or claimed group, every admitted group ended exactly once, no open train step, an applied
optimizer step is in the ledger's books. A run that hangs after its cancellation is a deadlock of the virtual loop: an error.
"""

from __future__ import annotations

import asyncio

import pytest
from pumps_house import House, live
from pumps_plan import Plan

PLANS = {
    "async": Plan(
        groups_per_step=2, prompts=6, rollout_s=lambda g, m: 1.0 + g % 3, publish_s=lambda v, s: 0.5, workers=1
    ),
    "sync": Plan(preset="sync", groups_per_step=2, prompts=5, reward_s=lambda g, m: 0.1, workers=1),
    "updates": Plan(preset="one_off", groups_per_step=2, prompts=4, updates_per_batch=2, tokens_per_microbatch=12),
    "minibatches": Plan(preset="one_off", groups_per_step=2, prompts=4, minibatches=2, tokens_per_microbatch=12),
    "drop": Plan(
        groups_per_step=2,
        max_staleness=1,
        late="drop",
        prompts=8,
        rollout_s=lambda g, m: 9.0 if g == 0 else 1.0,
        max_failed_groups=5,
        fails=lambda g, m: ValueError("no") if g == 3 else None,
    ),
    "engine": Plan(engine=True, groups_per_step=2, prompts=4),
    "evaluation": Plan(groups_per_step=2, max_steps=2, held_out=2, evaluate_every=1, evaluation_s=3.0),
}


@pytest.mark.parametrize("first", [1, 2, *(pytest.param(first, marks=pytest.mark.slow) for first in (3, 4))])
@pytest.mark.parametrize("name", PLANS)
def test_cancelled_at_any_moment_the_books_add_up(name: str, first: int) -> None:
    """Odd ticks by a cancel scope, even ones by `Task.cancel`: a stage of the flow lasts longer than one tick."""
    plan, native = PLANS[name], first % 2 == 0
    length = live(plan).ticks
    ticks = range(first, length + 1, 4)
    cut_short = 0
    for tick in ticks:
        try:
            house = live(plan, cancel_at_tick=tick, native_cancel=native)
        except BaseException as error:
            error.add_note(f"cancelled at tick {tick} of {length}")
            raise
        cut_short += isinstance(house.error, asyncio.CancelledError)
        assert house.error is None or isinstance(house.error, asyncio.CancelledError), (tick, house.error)
    assert cut_short > len(ticks) * 0.8, "most of these runs end early: else this test cancels nothing"


def test_what_a_checkpoint_must_keep_is_known_at_every_version() -> None:
    """The ledger's live groups and the one prompt that waits for its slot: with the trained ones every prompt, once."""
    kept: list[tuple[int, list[int]]] = []

    def note(house: House) -> None:
        live_or_claimed = [ticket.group_id for ticket in house.ledger.live_groups()]
        in_hand = [] if house.graph.waiting_prompt is None else [house.graph.waiting_prompt]
        trained = [group for step in house.trained() for group in step]
        kept.append((house.prompts.delivered, [*live_or_claimed, *in_hand, *trained]))

    async def body(house: House, supervisor: object) -> None:
        publish = house.graph._publish
        inner = publish._at_version

        async def at_version(version: int) -> None:
            await inner(version)
            assert house.graph.waiting_prompt is not None  # all slots are held until this very version is published
            note(house)

        publish._at_version = at_version  # type: ignore[method-assign]
        try:
            await house.graph.run(supervisor)  # type: ignore[arg-type]
        finally:
            note(house)  # cancelled in the middle: before the live groups are ended

    live(Plan(groups_per_step=2, rollout_s=lambda group, member: 1.0 + group % 3), body=body, cancel_at_tick=120)
    assert len(kept) > 3
    for delivered, groups in kept:
        assert sorted(groups) == list(range(delivered)), "a prompt was lost or stands there twice"
