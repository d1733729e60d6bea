"""How many groups a slow rank plays, in virtual time: the real ledger and limits, and engines that wait."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.distributed.ledger import LocalLedger
from asyncrl.distributed.reservation import Reservation
from asyncrl.pumps.dispatch import Dispatch
from asyncrl.pumps.pace import Pace
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import ClaimState
from asyncrl_bench.virtual_time import run_virtual

K = 8


class Line:
    def on(self, *_: Any) -> None:
        """No other process asks."""


class Cluster:
    """Ranks that generate, at these speeds. `wide`: an engine decodes all groups at the price of one; else one after the other.
    `sigma`: of the log-normal lengths of groups. `paced`: the ranks compare their groups."""

    def __init__(
        self,
        speeds: list[float],
        *,
        wide: bool,
        staleness: int = 2,
        steps: int = 200,
        sigma: float = 0.3,
        paced: bool = True,
        seed: int = 7,
    ) -> None:
        self.speeds, self.wide, self.steps, self.sigma, self.paced, self.seed = speeds, wide, steps, sigma, paced, seed
        groups = max(K, len(speeds))
        self.ledger = LocalLedger(Reservation(groups, staleness))
        self.dispatch = Dispatch(Line(), Recorder(max_events=0), [], in_order=False)  # type: ignore[arg-type]
        most = -(-groups * (staleness + 1) // len(speeds))
        self.paces = [Pace(most, lambda: self.ledger.statistics().admitted) for _ in speeds]
        self.ready: list[Any] = []
        self.groups = iter(range(1_000_000))
        self.played = Counter[int]()
        self.times: list[float] = []
        self.by_step: list[Counter[int]] = []
        self.scored = anyio.Event()
        self.on_step: Callable[[Cluster], None] = lambda cluster: None

    async def generate(self, rank: int, tasks: Any) -> None:
        pace, engine = self.paces[rank], anyio.Lock()

        async def play(ticket: Any) -> None:
            # The same for each group of two clusters with the same seed.
            length = random.Random(self.seed << 32 | ticket.group_id).lognormvariate(0.0, self.sigma)
            began, seconds = anyio.current_time(), length / self.speeds[rank]
            if self.wide:
                await anyio.sleep(seconds)
            else:
                async with engine:
                    await anyio.sleep(seconds)
            self.ready.append(ticket)
            self.played[rank] += 1
            pace.end(anyio.current_time() - began)
            self.scored.set()

        while True:
            await pace.begin()
            self.dispatch._note_durations(str(rank), pace.take_played())
            pace.others_mean_s = self.dispatch._others_mean_s(str(rank)) * self.paced
            tasks.start_soon(play, await self.ledger.admit(next(self.groups)))

    async def train(self) -> None:
        while len(self.times) < self.steps:
            scored = self.scored
            state, ticket = await self.ledger.claim(self.ready)
            if ticket is not None:
                self.ready.remove(ticket)
            elif state is ClaimState.FULL:
                await self.ledger.release(await self.ledger.commit() - 1)
                self.times.append(anyio.current_time())
                self.by_step.append(self.played.copy())
                self.on_step(self)
            else:
                await scored.wait()
                self.scored = anyio.Event()

    async def run(self) -> float:
        """The mean seconds of a step of the second half."""
        async with anyio.create_task_group() as tasks:
            for rank in range(len(self.speeds)):
                tasks.start_soon(self.generate, rank, tasks)
            await self.train()
            tasks.cancel_scope.cancel()
        half = self.steps // 2
        return (self.times[-1] - self.times[half - 1]) / (self.steps - half)

    def share(self, rank: int, since: int, until: int = -1) -> float:
        """The part of the groups of these steps that the rank has played."""
        played = self.by_step[until] - self.by_step[since]
        return played[rank] / played.total()


def grid(names: str, *pushed: tuple[Any, ...], nightly: list[tuple[Any, ...]]) -> Any:
    """Some cases with each push, and the other combinations nightly."""
    return pytest.mark.parametrize(names, [*pushed, *(pytest.param(*each, marks=pytest.mark.slow) for each in nightly)])


# `wide`: all groups together, else one by one.
WIDE_AND_STALENESS = grid("wide, staleness", (True, 1), (False, 2), nightly=[(True, 2), (False, 1)])


@WIDE_AND_STALENESS
def test_a_step_with_a_rank_five_times_slower_takes_what_the_sum_of_the_speeds_gives(
    wide: bool, staleness: int
) -> None:
    equal, slowed = (Cluster([1, 1, speed], wide=wide, staleness=staleness) for speed in (1.0, 0.2))
    ideal = run_virtual(equal.run) * 3 / 2.2
    assert run_virtual(slowed.run) < 1.15 * ideal
    assert slowed.share(2, 100) < 0.12
    # Ranks of one speed play as many groups as before.
    assert min(equal.share(rank, 100) for rank in range(3)) > 0.31


@grid("wide, sigma", (True, 0.8), (False, 0.3), nightly=[(True, 0.3), (False, 0.8)])
def test_a_rank_that_was_slow_for_a_while_plays_its_share_again(wide: bool, sigma: float) -> None:
    cluster = Cluster([1, 1, 0.2], wide=wide, steps=500, sigma=sigma)

    def recover(cluster: Cluster) -> None:
        if len(cluster.times) == 100:
            cluster.speeds[2] = 1.0

    cluster.on_step = recover
    run_virtual(cluster.run)
    assert cluster.share(2, 50, 100) < 0.12 and cluster.share(2, 450) > 0.3


@grid(
    "ranks, sigma, wide",
    (4, 1.2, True),
    (16, 0.8, False),
    nightly=[(4, 0.8, True), (4, 0.8, False), (4, 1.2, False), (16, 0.8, True), (16, 1.2, True), (16, 1.2, False)],
)
def test_long_groups_slow_no_rank_if_all_ranks_are_equal(
    ranks: int, sigma: float, wide: bool, caplog: pytest.LogCaptureFixture
) -> None:
    paced, free = (Cluster([1.0] * ranks, wide=wide, sigma=sigma, paced=paced) for paced in (True, False))
    assert run_virtual(paced.run) < 1.03 * run_virtual(free.run)
    # From the start on.
    assert paced.times[20] < 1.03 * free.times[20] and "pauses" not in caplog.text


@WIDE_AND_STALENESS
def test_a_slow_rank_costs_its_share_if_lengths_vary(wide: bool, staleness: int) -> None:
    equal, slowed = (
        [
            run_virtual(Cluster(speeds, wide=wide, staleness=staleness, sigma=0.8, seed=seed, steps=300).run)
            for seed in range(3)
        ]
        for speeds in ([1.0, 1.0, 1.0], [1.0, 1.0, 0.2])
    )
    assert sum(slowed) < 1.2 * sum(equal) * 3 / 2.2


async def wait_begun(pace: Pace) -> float:
    began = anyio.current_time()
    await pace.begin()
    return anyio.current_time() - began


def test_a_pause_ends_when_no_rank_admits_groups() -> None:
    admitted = [0]

    async def main() -> tuple[float, float]:
        pace = Pace(1, lambda: admitted[0])
        pace.others_mean_s, pace.limit, waits = 1.0, 1.0, []
        for others in (True, False):
            await pace.begin()
            pace.end(1000.0)
            async with anyio.create_task_group() as tasks:

                async def play_elsewhere(others: bool = others) -> None:
                    while others:
                        await anyio.sleep(10.0)
                        admitted[0] += 1

                tasks.start_soon(play_elsewhere)
                waits.append(await wait_begun(pace))
                pace.end(1.0)
                tasks.cancel_scope.cancel()
        return waits[0], waits[1]

    assert run_virtual(main) == (4000.0, 1000.0)
