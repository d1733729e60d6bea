"""Episodes: random numbers, failures, retries, limits, the budget of failed groups; tasks that nobody of ours ended; idle time."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from pumps_house import House, live
from pumps_plan import TOKENS, Plan, ScriptedEnvironment, episode_ports, make_prompt, make_trajectory
from support.virtual import virtual

from asyncrl.concurrency.describe import culprit
from asyncrl.concurrency.supervisor import spawn
from asyncrl.config.imports import is_interrupt
from asyncrl.errors import ConfigError, DivergenceError, GenerationError, LifecycleError, PlatformError
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.rollout import EpisodeFailed, Episodes
from asyncrl.telemetry.budget import lane_budget
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.records import Wait
from asyncrl.types import FinishReason, Generation, GenerationRequest, Prompt, SamplingParams, Trajectory

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

    house = live(Plan(preset="sync", groups_per_step=2, prompts=6, max_failed_groups=0, retries=2, fails=fails))
    assert house.error is None and house.trained() == [[0, 1], [2, 3], [4, 5]]
    assert [report.metrics.get("rollout/retries", 0) for report in house.reports] == [0, 4, 0]


def test_an_error_of_the_run_is_no_failed_episode() -> None:
    """A worker that samples with other weights than it says, through the engine."""
    wrong = DivergenceError("worker 0 is pinned to version 3 and sampled with 4")
    house = live(
        Plan(max_steps=3, max_failed_groups=100, retries=2, fails=lambda group, member: wrong if group == 2 else None)
    )
    assert house.error is wrong and house.books.failed == 0


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", [ConfigError, PlatformError])
def test_a_mistake_of_the_user_ends_the_run_at_once_and_names_the_line(kind: Any, grouped: bool) -> None:
    """As for a tool without a docstring, also if the episode calls it in a task group of its own."""
    times: Counter[tuple[int, int]] = Counter()

    class Mistaken(ScriptedEnvironment):
        async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
            times[prompt.group_id, member] += 1
            if prompt.group_id == 1 and grouped:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.call())
            if prompt.group_id == 1:
                await self.call()
            return await super().run(prompt, member, group_size, generate)

        async def call(self) -> None:
            raise kind("no such tool")

    async def body(house: House, supervisor: Any) -> None:
        house.ports.environment = Mistaken(house)
        await house.graph.run(supervisor)

    house = live(Plan(groups_per_step=2, max_steps=2, max_failed_groups=100, retries=2), body=body)
    line = Mistaken.call.__code__.co_firstlineno + 1
    assert type(house.error) is kind and str(house.error) == f"no such tool ({__file__}:{line} in call)"
    assert max(times.values()) == 1 and house.books.failed == 0


def test_failures_that_differ_in_numbers_and_ids_have_one_count() -> None:
    def fails(group: int, member: int) -> BaseException:
        return OSError(f"session 3f{group}a-0{group}c: no answer of row {group} in {group}.5 s")

    house = live(Plan(groups_per_step=4, max_failed_groups=2, fails=fails))
    assert "The commonest causes: 3 of OSError: session #: no answer of row # in # s." in str(house.error)
    assert [each for each in house.book.reasons if each.startswith("failed")] == [
        "failed: OSError: session #: no answer of row # in # s"
    ]


@pytest.mark.parametrize(
    ("limit", "failed", "words"),
    [
        (2, 3, "rollout.max_failed_groups allows 2 such groups"),
        (None, 5, "(not set: a tenth of all groups, and at least the groups of one step) allows 4"),
    ],
)
def test_a_budget_that_is_used_up_names_itself_and_the_commonest_causes(
    limit: int | None, failed: int, words: str
) -> None:
    house = live(
        Plan(groups_per_step=4, max_failed_groups=limit, fails=lambda group, member: OSError(f"no {'ab'[group % 2]}"))
    )
    assert isinstance(house.error, GenerationError) and isinstance(house.error.__cause__, OSError)
    told = str(house.error)
    assert f". {failed} groups have failed; " in told and words in told
    assert "OSError: no a" in told and "OSError: no b" in told and "The commonest causes: " in told


def test_the_budget_counts_the_failed_groups_of_all_ranks() -> None:
    async def body(house: House, supervisor: Any) -> None:
        for group_id in (100, 101):  # of another rank
            ticket = await house.ledger.admit(group_id)
            assert ticket is not None
            await house.ledger.end(ticket, "failed", "OSError: there")
        await house.graph.run(supervisor)

    plan = Plan(max_steps=9, max_failed_groups=2, fails=lambda group, _: OSError("here") if group == 3 else None)
    words = r"3 groups have failed; .* allows 2 .* causes on this rank: 1 of OSError: here\. "
    assert re.search(words, str(live(plan, body=body).error))


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


async def test_the_log_shows_the_users_line_for_an_error_of_asyncrl(caplog: pytest.LogCaptureFixture) -> None:
    class Asks:
        async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
            return await generate(ASKED)

    async def generate(request: GenerationRequest) -> Generation:
        async def deep(level: int) -> Generation:
            if level:
                return await deep(level - 1)
            raise GenerationError("no room")

        return await deep(12)

    with pytest.raises(EpisodeFailed):
        await Episodes(episode_ports(Asks(), Recorder(max_events=0), 60.0, 0)).play(make_prompt(0), 0, 1, generate, 0)
    [record] = caplog.records
    assert "return await generate(ASKED)" in record.message and "GenerationError: no room" in record.message
    assert "run_isolated" not in record.message and len(record.message.splitlines()) < 40


def test_a_ctrl_c_is_no_failure_where_sigint_raises_it(sigint_is_handled: None) -> None:
    async def within_runner() -> bool:
        return is_interrupt(KeyboardInterrupt())

    assert not is_interrupt(KeyboardInterrupt()) and not is_interrupt(SystemExit())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert is_interrupt(KeyboardInterrupt()) and not is_interrupt(SystemExit())
    assert asyncio.run(within_runner())  # which has a handler of its own, and raises it at the second Ctrl-C


# -- tasks that a stranger cancels, and episodes that do not end -----------------------------------------------------


def sabotaged(at_s: float, which: int) -> tuple[House, str | None]:
    """A run of which one task is cancelled after so many (virtual) seconds. Its name, None if there were fewer tasks."""
    names: list[str] = []

    async def body(house: House, supervisor: Any) -> None:
        owner = asyncio.current_task()

        def cancel() -> None:
            tasks = sorted(asyncio.all_tasks() - {owner}, key=lambda task: task.get_name())
            if which < len(tasks):
                names.append(tasks[which].get_name())
                tasks[which].cancel()

        asyncio.get_running_loop().call_later(at_s, cancel)
        await house.graph.run(supervisor)

    plan = Plan(
        groups_per_step=2, max_staleness=1, max_steps=6, rollout_s=lambda group, member: 1.0 + group % 3, held_out=2
    )
    house = live(plan, body=body)
    return house, names[0] if names else None


@pytest.mark.parametrize("at_s", [0.5, 3.25, 7.125])
def test_a_task_that_a_stranger_cancels_is_an_error_or_changes_nothing(at_s: float) -> None:
    hit = set()
    for which in range(100):
        house, name = sabotaged(at_s, which)
        if name is None:
            break
        if house.error is None:
            assert len(house.reports) == 6, f"{name} was cancelled: a success after {len(house.reports)} of 6 steps"
        else:
            assert isinstance(house.error, (LifecycleError, GenerationError)), f"{name}: {house.error!r}"
            hit.add(name.partition(" of group")[0].rstrip("0123456789 "))
    assert {"train pump", "publish pump", "rollout pump", "score pump", "rollout group", "member"} <= hit


async def test_a_task_of_a_group_cannot_vanish_but_can_be_ended_by_its_group() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("work")

    async with anyio.create_task_group() as tasks:
        spawn(tasks, "worker", work)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            spawn(tasks, "worker", work)
            await anyio.lowlevel.checkpoint()
            [task] = [task for task in asyncio.all_tasks() if task.get_name() == "worker"]
            task.cancel()
            await anyio.sleep_forever()
    assert raised.group_contains(LifecycleError, match="worker was cancelled, but not by its task group")
    assert ended == ["work", "work"]


class Endless:
    """Samples for ever; or waits for ever, for nobody."""

    def __init__(self, samples: bool) -> None:
        self.samples = samples

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
        while self.samples:
            await generate(ASKED)
        return await self.tool()

    async def tool(self) -> Trajectory:
        await anyio.sleep_forever()
        raise AssertionError


class Sampled:
    token_ids = (1, 2, 3)


PROMPT = make_prompt(7)
ASKED = GenerationRequest(PROMPT.ids, SamplingParams(), 0, priority=5)


@virtual
async def test_an_episode_that_samples_for_ever_ends_at_its_limit_and_says_how_far_it_came() -> None:
    async def sample(request: Any) -> Any:
        await anyio.sleep(1.0)
        return Sampled

    recorder = Recorder(asyncio.get_running_loop().time, nvtx=False)
    with pytest.raises(EpisodeFailed) as failed:
        await Episodes(episode_ports(Endless(samples=True), recorder, 10.5, 2)).play(PROMPT, 1, 2, sample, 0)
    told = str(failed.value.__cause__)
    assert re.search(r"group 7 did not end within .* = 10.5 s: it asked the engine 11 times and got 30 tokens", told)
    assert recorder.active_waits() == [] and "rollout/retries" not in recorder.drain()  # an hour more would be lost


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("endless", ["member # of group # did not end within rollout.timeout_s = # s"]),
        ("another member", ["was asked for member #", "returned member #"]),
    ],
)
def test_an_environment_that_breaks_its_word_fails_its_group_alone(how: str, words: list[str]) -> None:
    class Broken(ScriptedEnvironment):
        async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
            broken = (prompt.group_id, member) == (3, 1)
            if broken and how == "endless":
                await anyio.sleep_forever()
            played = await super().run(prompt, member, group_size, generate)
            return replace(played, member=0) if broken else played

    async def body(house: House, supervisor: Any) -> None:
        house.ports.environment = Broken(house)
        await house.graph.run(supervisor)

    house = live(Plan(groups_per_step=2, max_staleness=0, max_steps=3, max_failed_groups=1), body=body)
    assert house.error is None and house.books.failed == 1 and len(house.reports) == 3
    [reason] = house.book.reasons
    assert all(word in reason for word in words)


def test_requests_of_older_groups_go_before_those_of_newer_ones_and_an_evaluation_before_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The priority is the turn that the group has to be trained in."""
    priorities: list[int] = []
    generate = DryRunEngine.generate

    def heard(engine: DryRunEngine, request: GenerationRequest) -> Any:
        priorities.append(request.priority)
        return generate(engine, request)

    monkeypatch.setattr(DryRunEngine, "generate", heard)
    plan = Plan(engine=True, groups_per_step=2, max_staleness=1, max_steps=3, held_out=1, evaluate_every=3)
    assert live(plan).error is None
    rollouts = [each for each in priorities if each >= 0]
    assert rollouts == sorted(rollouts) and set(rollouts) == {1, 2} and min(priorities) == -1


@virtual
async def test_the_culprit_is_the_episode_and_not_the_pumps_that_wait_for_each_other() -> None:
    recorder = Recorder(asyncio.get_running_loop().time, nvtx=False)
    pumps = (
        recorder.wait("publish pump", "an item", on="a sender of queue publications", cause="group"),
        recorder.wait("scorer", "an item", on="a sender of queue scoring", cause="group"),
        recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"),
        recorder.wait("train pump", "a claimable group", on="score pump", cause="group"),
        recorder.wait("engine", "a request", on="its callers", cause="requests"),
    )
    async with anyio.create_task_group() as tasks:
        for pump in pumps:
            pump.__enter__()
        pumps_alone = culprit(recorder.active_waits(), 5.0, "group 9 of rank 1 is waited for")
        assert pumps_alone.startswith(
            "group 9 of rank 1 is waited for; here rollout pump waits for a slot from publish"
        )
        await anyio.sleep(2.0)
        tasks.start_soon(
            Episodes(episode_ports(Endless(samples=False), recorder, 100.0, 0)).play, PROMPT, 1, 2, None, 0
        )
        await anyio.sleep(3.0)
        said = culprit(recorder.active_waits(), asyncio.get_running_loop().time(), "group 9 of rank 1 is waited for")
        assert said.startswith("member 1 of group 7 waits for its episode from the environment for 3.0 s in ")
        assert "test_episodes.py" in said and said.endswith(" tool")
        tasks.cancel_scope.cancel()


def test_who_waits_longest_is_not_who_the_others_wait_for() -> None:
    """Pumps begin to wait before what they wait for has even begun. Here the deepest wait is the last one of each beginning."""
    waits = [
        Wait("engine", "a request", "its callers", "requests", 1.0),
        Wait("scorer", "an item", "a sender of queue scoring", "group", 1.0),
        Wait("train pump", "a claimable group", "score pump", "group", 1.0),
        Wait("score pump", "a reward", "reward workers", "reward", 2.0),
        Wait("group 3", "reward 'f'", "a reward worker with room", "reward", 2.1),
        Wait("publish pump", "version 3", "the engines", "publish", 2.2),
        Wait("group 2", "reward 'f'", "reward worker 17", "reward", 2.3),
    ]
    for count in range(1, len(waits) + 1):
        assert culprit(waits[:count], 5.0) == waits[count - 1].describe(5.0)
    assert (culprit([], 0.0), culprit([], 0.0, "rank 1")) == ("nobody has a recorded wait", "rank 1")


# -- idle time has the cause `environment` while what is outside has the next move -----------------------------------


TOOL_S = 3.0
WHOLE = SamplingParams(max_tokens=TOKENS, ignore_eos=True)  # so that all completions take the same time


class Tool:
    """Asks the engine, then its tool, `rounds` times; the tool of member 1 takes longer by `more`."""

    def __init__(self, rounds: int = 2, more: float = 0.0) -> None:
        self.rounds, self.more = rounds, more

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        for _ in range(self.rounds):
            await generate(GenerationRequest(prompt.ids, WHOLE, seed=1))
            await anyio.sleep(TOOL_S + self.more * member)
        return make_trajectory(prompt.group_id, member, group_size, [0], reward=float(member))


async def hook(prompt: Any) -> Any:
    await anyio.sleep(TOOL_S)
    return prompt


async def submits(house: House, supervisor: object) -> None:
    """A program of one's own, or a producer, which brings a group every now and then."""
    for group in range(2):
        await anyio.sleep(TOOL_S)
        members = tuple(make_trajectory(group, member, 2, [0], reward=float(member)) for member in range(2))
        await house.graph.submit(members, make_prompt(group))


async def generates(house: House, supervisor: object) -> None:
    """As `rt.generate`, with a tool of the program's between two calls."""
    for group in range(2):
        await Episodes(house.ports).play(make_prompt(group), 0, 1, house.ports.engine.generate, priority=0)
        await anyio.sleep(TOOL_S)


CASES: dict[str, tuple[Plan, dict[str, Any], Any, float]] = {
    "a tool": (Plan(prompts=1, groups_per_step=1, engine=True), {"environment": Tool()}, None, 2 * TOOL_S),
    "tools at once": (
        # Four tokens take a second. The tools work from 1 to 4 and from 1 to 6; member 0 samples from 4 to 5, member 1 from 6 to 7,
        # and its second tool works from 7 to 12.
        Plan(prompts=1, groups_per_step=1, engine=True),
        {"environment": Tool(more=2.0)},
        None,
        (4 - 1) + (6 - 5) + (12 - 7),
    ),
    "a hook": (Plan(prompts=1, groups_per_step=1, engine=True), {"hooks": Hooks(before_group=hook)}, None, TOOL_S),
    "a program that submits": (
        Plan(groups_per_step=1, max_staleness=3, train_token_s=0.0, finish_s=0.0),
        {},
        submits,
        2 * TOOL_S,
    ),
    "a program that generates": (
        Plan(engine=True),
        {"environment": Tool(rounds=1)},
        generates,
        2 * (TOOL_S + TOOL_S),  # of its environment, and its own
    ),
    "no tool": (Plan(prompts=2, groups_per_step=1, engine=True), {}, None, 0.0),
    "a slow reward": (Plan(prompts=2, groups_per_step=1, engine=True, reward_s=lambda g, m: 5.0), {}, None, 0.0),
    "a slow publish": (Plan(groups_per_step=1, publish_s=lambda version, sink: 9.0), {}, submits, TOOL_S),
}


@pytest.mark.parametrize("case", CASES)
def test_idle_time_names_the_environment(case: str) -> None:
    plan, ports, body, expected = CASES[case]
    seconds: dict[str, float] = {}

    async def account(house: House, supervisor: Any) -> None:
        await (body(house, supervisor) if body is not None else house.graph.run(supervisor))
        await house.graph.drain()
        window = house.ports.recorder.take_window()
        [lane] = window.lanes
        seconds.update(lane_budget(window, lane).idle)

    house = live(plan, body=account, ports=ports)
    assert house.error is None and house.books.failed == 0
    assert seconds.get("environment", 0.0) == pytest.approx(expected, abs=1e-6)
    assert seconds.get("unexplained", 0.0) == pytest.approx(0.0, abs=1e-6)
