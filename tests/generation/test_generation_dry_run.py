"""The dry-run engine under virtual time: costs and lengths. test_generation_contract.py has what all engines promise."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import numpy as np
import pytest
from generation_models import generate_all, request

from asyncrl.concurrency.lane import SimulatedLane
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation
from asyncrl_bench.virtual_time import run_virtual


def simulate(
    count: int, *, max_sequences: int, length_sigma: float, advance_at: float = math.inf, **sampling: Any
) -> tuple[list[Generation], float]:
    """`count` requests of up to 100 tokens at once; the answers and the virtual seconds that they took."""

    async def main() -> tuple[list[Generation], float]:
        begun, now = anyio.current_time(), asyncio.get_running_loop().time
        recorder = Recorder(clock=now, nvtx=False)
        async with SimulatedLane("virtual", recorder) as lane:
            engine = DryRunEngine(
                lane, recorder, max_sequences=max_sequences, max_context=200, decode_step_s=0.5, length_sigma=length_sigma,
                version_source=lambda: int(now() - begun > advance_at),
            )  # fmt: skip
            async with engine:
                started = anyio.current_time()
                answers = await generate_all(
                    engine, [request(10, seed, max_tokens=100, **sampling) for seed in range(count)]
                )
                return answers, anyio.current_time() - started

    return run_virtual(main)


def test_rows_that_end_are_filled_again_at_once() -> None:
    """Continuous batching: no longer than the work divided by the rows, plus one longest completion."""
    answers, seconds = simulate(60, max_sequences=6, length_sigma=0.8)
    steps = sum(answer.token_ids.size for answer in answers)
    longest = max(answer.token_ids.size for answer in answers)
    assert steps / 6 <= seconds / 0.5 <= steps / 6 + longest


def test_lengths_are_log_normal_and_end_as_they_say() -> None:
    answers, _ = simulate(400, max_sequences=400, length_sigma=0.4)
    lengths = np.array([answer.token_ids.size for answer in answers])
    stopped = np.array([answer.finish_reason is FinishReason.STOP for answer in answers])
    assert 44 < np.median(lengths) < 57
    assert (lengths[~stopped] == 100).all() and (lengths[stopped] < 100).all()
    assert 0.0 < (~stopped).mean() < 0.12  # P(N > ln 2 / 0.4) = 4 %
    assert 0.3 < np.log(lengths[stopped]).std() < 0.5
    assert all((answer.token_ids[-1] == 0) == stop for answer, stop in zip(answers, stopped, strict=True))
    assert all((answer.token_ids[:-1] != 0).all() for answer in answers)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop_ids", [(), (7,), (*range(1, 250), 300)])
def test_only_the_last_token_is_one_that_stops(stop_ids: tuple[int, ...], ignore_eos: bool) -> None:
    """As with the other engines: `ignore_eos` ignores the end of sequence, and not `stop_token_ids`."""
    answers, _ = simulate(200, max_sequences=200, length_sigma=0.4, stop_token_ids=stop_ids, ignore_eos=ignore_eos)
    ends = {*stop_ids} if ignore_eos else {*stop_ids, 0}
    for answer in answers:
        *inside, last = answer.token_ids.tolist()
        assert ends.isdisjoint(inside)
        assert (answer.finish_reason is FinishReason.STOP) == (last in ends) == (len(inside) < 99)
    assert any(answer.finish_reason is FinishReason.STOP for answer in answers) == bool(ends)


def test_each_token_carries_the_version_of_its_step() -> None:
    answers, _ = simulate(3, max_sequences=3, length_sigma=0.0, advance_at=10.25)
    for answer in answers:
        assert answer.versions.tolist() == [0] * 21 + [1] * 29


def test_statistics_may_be_asked_for_on_another_thread_while_a_request_starts() -> None:
    """The watchdog does. Its thread may lose the processor at any job."""
    recorder = Recorder(nvtx=False)
    engine = DryRunEngine(
        SimulatedLane("virtual", recorder), recorder, max_sequences=8, max_context=200, version_source=lambda: 0,
        decode_step_s=0.5, length_sigma=0.0,
    )  # fmt: skip

    class Job:
        @property
        def positions(self) -> int:
            engine._running[len(engine._running)] = self  # type: ignore[assignment]
            return 10

    engine._running[0] = Job()  # type: ignore[assignment]
    assert engine.statistics()["reserved_positions"] > 0
