"""Episodes: random numbers of each request, what fails one, how often it is played again, and the budget of failed groups."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import Plan, episode_ports, make_prompt, make_trajectory

from asyncrl.config.imports import is_interrupt
from asyncrl.errors import ConfigError, DivergenceError, GenerationError
from asyncrl.pumps.rollout import EpisodeFailed, Episodes
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams

SEED = 12


class Own(BaseException):
    """As an interpreter within the environment may have one."""


LEAVING = [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), Own("left")]


@pytest.fixture
def sigint_is_handled() -> Iterator[None]:
    """As in a run: no Ctrl-C raises anything."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


# -- random numbers


class Rounds:
    """Asks one after another, and then at once, always with the same seed; its first attempt fails behind the last answer."""

    def __init__(self) -> None:
        self.attempts = 0

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        self.attempts += 1
        request = GenerationRequest(prompt.ids, SamplingParams(), SEED)
        await generate(request)
        await generate(request)
        await asyncio.gather(generate(request), generate(request))
        if self.attempts == 1:
            raise ConnectionError("reset by peer")
        return make_trajectory(prompt.group_id, member, group_size, [0])


async def test_each_request_of_an_episode_has_random_numbers_of_its_own_and_a_retry_the_same() -> None:
    seeds: list[int] = []

    async def generate(request: GenerationRequest) -> Generation:
        seeds.append(request.seed)
        nothing = np.zeros(0, np.int32)
        return Generation(nothing, nothing, nothing, nothing, FinishReason.STOP)

    recorder = Recorder(max_events=0)
    await Episodes(episode_ports(Rounds(), recorder, 60.0, 2)).play(make_prompt(3), 1, 2, generate, 0)
    digests = [
        hashlib.blake2b(struct.pack("<QQ", SEED, n), digest_size=8, person=b"asyncrl-request").digest()
        for n in (1, 2, 3)
    ]
    assert seeds == [SEED, *(int.from_bytes(each, "little") for each in digests)] * 2
    assert len(set(seeds)) == 4
    assert recorder.drain()["rollout/retries"] == 1


# -- what fails an episode, and how often it is played again


@pytest.mark.usefixtures("sigint_is_handled")
@pytest.mark.parametrize("failure", [*LEAVING, ConnectionError("reset by peer")], ids=repr)
def test_whatever_an_environment_raises_is_a_failed_episode(failure: BaseException) -> None:
    """It is played three times, then another prompt takes the place of its group, and the run reaches its end."""
    played: Counter[tuple[int, int]] = Counter()

    def fails(group: int, member: int) -> BaseException | None:
        played[group, member] += 1
        return failure if (group, member) == (3, 1) else None

    house = live(Plan(groups_per_step=2, max_staleness=0, max_steps=3, max_failed_groups=None, retries=2, fails=fails))

    assert house.error is None and [len(step) for step in house.trained()] == [2, 2, 2]
    assert house.books.failed == 1 and all(3 not in step for step in house.trained())
    assert played[3, 1] == (1 if isinstance(failure, GeneratorExit) else 3)


def test_an_episode_that_fails_by_chance_is_played_again_and_its_group_is_trained() -> None:
    times: Counter[tuple[int, int]] = Counter()

    def fails(group: int, member: int) -> BaseException | None:
        times[group, member] += 1
        return ConnectionError("reset by peer") if group == 3 and times[group, member] <= 2 else None

    drained: dict[str, float] = {}

    async def body(house: House, supervisor: Any) -> None:
        await house.graph.run(supervisor)
        drained.update(house.ports.recorder.drain())

    house = live(
        Plan(preset="sync", groups_per_step=2, prompts=6, max_failed_groups=0, retries=2, fails=fails), body=body
    )
    assert house.error is None and house.trained() == [[0, 1], [2, 3], [4, 5]]
    assert drained["rollout/retries"] == 4


def test_an_error_of_the_run_is_no_failed_episode() -> None:
    """A worker that samples with other weights than it says, through the engine."""
    wrong = DivergenceError("worker 0 is pinned to version 3 and sampled with 4")
    house = live(
        Plan(max_steps=3, max_failed_groups=100, retries=2, fails=lambda group, member: wrong if group == 2 else None)
    )
    assert house.error is wrong and house.books.failed == 0


def test_what_no_retry_mends_is_not_played_again() -> None:
    times: Counter[int] = Counter()

    def fails(group: int, member: int) -> BaseException | None:
        times[group] += 1
        return ConfigError("no such tool") if group == 1 and member == 0 else None

    house = live(Plan(groups_per_step=2, max_steps=2, max_failed_groups=1, retries=2, fails=fails))
    assert house.error is None and times[1] <= 2


@pytest.mark.parametrize(
    ("limit", "failed", "words"),
    [
        (2, 3, "rollout.max_failed_groups allows 2 such groups"),
        (
            None,
            5,
            "rollout.max_failed_groups, left out, is a tenth of all groups and at least those of a step, and allows 4",
        ),
    ],
)
def test_a_budget_that_is_used_up_names_itself_and_the_last_causes(limit: int | None, failed: int, words: str) -> None:
    plan = Plan(
        groups_per_step=4, max_failed_groups=limit, fails=lambda group, member: OSError(f"no {'ab'[group % 2]}")
    )
    house = live(plan)
    assert isinstance(house.error, GenerationError) and isinstance(house.error.__cause__, OSError)
    told = str(house.error)
    assert f"as {failed} groups did" in told and words in told
    assert "OSError: no a" in told and "OSError: no b" in told and "The last causes: " in told


def test_by_default_one_group_of_ten_may_fail_for_ever() -> None:
    plan = Plan(
        groups_per_step=2,
        max_steps=50,
        max_failed_groups=None,
        fails=lambda group, member: OSError("no") if group % 11 == 5 else None,
    )
    house = live(plan)
    assert house.error is None and len(house.reports) == 50 and house.books.failed > 5


@pytest.mark.parametrize("whole", [False, True])
def test_an_evaluation_goes_on_without_the_members_that_failed(whole: bool) -> None:
    """Of four completions that of the second prompt's second member is missing, and of the others nothing is lost."""
    plan = Plan(
        prompts=4,
        held_out=2,
        evaluate_every=1,
        score_groups=whole,
        reward=lambda group, member: float(member),
        fails=lambda group, member: SystemExit(0) if (group, member) == (-2, 1) else None,
    )
    config = plan.config()
    config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"samples": 2})})
    house = live(plan, ports={"config": config})
    assert house.error is None
    for metrics in house.evaluations.values():
        (missing,) = (value for name, value in metrics.items() if name.endswith("/missing"))
        assert missing == 1 and metrics["eval/single_turn/avg@2"] == pytest.approx((0 + 1 + 0) / 3)


async def test_the_first_failure_of_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def run(self, *_: Any) -> Any:
            raise LookupError("no such tool")

    ports = episode_ports(Broken(), Recorder(max_events=0), 60.0, 1)
    for _ in range(3):
        with pytest.raises(EpisodeFailed) as failed:
            await Episodes(ports).play(make_prompt(0), 0, 1, None, 0)  # type: ignore[arg-type]
        assert isinstance(failed.value.__cause__, LookupError)
    [record] = caplog.records
    assert 'raise LookupError("no such tool")' in record.message and "LookupError: no such tool" in record.message


def test_a_ctrl_c_is_no_failure_where_sigint_raises_it(sigint_is_handled: None) -> None:
    async def within_runner() -> bool:
        return is_interrupt(KeyboardInterrupt())

    assert not is_interrupt(KeyboardInterrupt()) and not is_interrupt(SystemExit())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert is_interrupt(KeyboardInterrupt()) and not is_interrupt(SystemExit())
    assert asyncio.run(within_runner())  # which has a handler of its own, and raises it at the second Ctrl-C
