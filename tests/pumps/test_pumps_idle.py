"""Idle time has the cause `environment` while what is outside has the next move, and only then: hand arithmetic in virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from pumps_house import House, live
from pumps_plan import TOKENS, Plan, make_prompt, make_trajectory

from asyncrl.pumps.hooks import Hooks
from asyncrl.pumps.rollout import Episodes
from asyncrl.telemetry.budget import RunBudget
from asyncrl.types import GenerationRequest, SamplingParams

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
        whole = RunBudget()
        whole.step(house.ports.recorder.take_window())
        [lane] = whole.lanes()
        seconds.update(lane.idle)

    house = live(plan, body=account, ports=ports)

    assert house.error is None and house.books.failed == 0
    assert seconds.get("environment", 0.0) == pytest.approx(expected, abs=1e-6)
    assert seconds.get("unexplained", 0.0) == pytest.approx(0.0, abs=1e-6)
