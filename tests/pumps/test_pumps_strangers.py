"""Tasks that end although nobody of ours ended them, and episodes that do not end: each has a name, none a success."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import anyio
import pytest
from pumps_house import House, live
from pumps_plan import Plan, episode_ports, make_prompt
from virtual_time import run_virtual

from asyncrl.concurrency.describe import culprit
from asyncrl.concurrency.supervisor import spawn
from asyncrl.errors import GenerationError, LifecycleError
from asyncrl.generation.dry_run import DryRunEngine
from asyncrl.pumps.rollout import EpisodeFailed, Episodes
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.records import Wait
from asyncrl.types import GenerationRequest, Prompt, SamplingParams, Trajectory


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
    assert raised.group_contains(LifecycleError, match="worker was cancelled by somebody else than its task group")
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


def test_an_episode_that_samples_for_ever_ends_at_its_limit_and_says_how_far_it_came() -> None:
    async def sample(request: Any) -> Any:
        await anyio.sleep(1.0)
        return Sampled

    async def main() -> None:
        recorder = Recorder(asyncio.get_running_loop().time, nvtx=False)
        with pytest.raises(EpisodeFailed) as failed:
            await Episodes(episode_ports(Endless(samples=True), recorder, 10.5, 2)).play(PROMPT, 1, 2, sample, 0)
        told = str(failed.value.__cause__)
        assert re.search(
            r"group 7 did not end within .* = 10.5 s: it asked the engine 11 times and got 30 tokens", told
        )
        assert recorder.active_waits() == [] and "rollout/retries" not in recorder.drain()  # an hour more would be lost

    run_virtual(main)


def test_a_run_with_an_endless_episode_counts_its_group_as_failed() -> None:
    class Once:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
            if (prompt.group_id, member) == (3, 1):
                await anyio.sleep_forever()
            return await self.inner.run(prompt, member, group_size, generate)  # type: ignore[no-any-return]

    async def body(house: House, supervisor: Any) -> None:
        house.ports.environment = Once(house.ports.environment)
        await house.graph.run(supervisor)

    house = live(Plan(groups_per_step=2, max_staleness=0, max_steps=3, max_failed_groups=1), body=body)
    assert house.error is None and house.books.failed == 1 and len(house.reports) == 3
    [reason] = house.book.reasons
    assert "member 1 of group 3 did not end within rollout.timeout_s = 3600 s" in reason


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


def test_the_culprit_is_the_episode_and_not_the_pumps_that_wait_for_each_other() -> None:
    async def main() -> None:
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
            said = culprit(
                recorder.active_waits(), asyncio.get_running_loop().time(), "group 9 of rank 1 is waited for"
            )
            assert said.startswith("member 1 of group 7 waits for its episode from the environment since 3.0 s in ")
            assert "test_pumps_strangers.py" in said and said.endswith(" tool")
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_who_waits_longest_is_not_who_the_others_wait_for() -> None:
    """Pumps begin to wait before what they wait for has even begun. Here the deepest wait is the last one of each beginning."""
    waits = [
        Wait("engine", "a request", "its callers", "requests", 1.0),
        Wait("scorer", "an item", "a sender of queue scoring", "group", 1.0),
        Wait("train pump", "a claimable group", "score pump", "group", 1.0),
        Wait("score pump", "a reward", "reward workers", "reward", 2.0),
        Wait("group 3", "reward 'f'", "an idle reward worker", "reward", 2.1),
        Wait("publish pump", "version 3", "the engines", "publish", 2.2),
        Wait("group 2", "reward 'f'", "reward worker 17", "reward", 2.3),
    ]
    for count in range(1, len(waits) + 1):
        assert culprit(waits[:count], 5.0) == waits[count - 1].describe(5.0)


def test_nobody_waits() -> None:
    assert culprit([], 0.0) == "nobody has a recorded wait"
    assert culprit([], 0.0, "rank 1") == "rank 1"
