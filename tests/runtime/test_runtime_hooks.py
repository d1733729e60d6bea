"""Functions of the user's own between the stages: what they are given, what they may change, and how they end a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from runtime_helpers import DRY, REAL, complete, config_of, metrics_of, reports_of, rollouts_of, start
from support.pages import blocks

from asyncrl import Hooks, Runtime, SamplingParams, Trajectory, load_config
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import ConfigError, HookError
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.build import ByteTokenizer
from asyncrl.types import Group, Prompt

ROWS = [{"prompt": "abc"}]
BROKEN = """
from asyncrl import Hooks

def broken(group):
    return group.nothing

hooks = Hooks(after_rewards=broken)
"""


class Scored:
    """Plays one turn and scores it by the number of the member: no reward workers have to be started."""

    async def run(self, prompt: Prompt, member: int, group_size: int, generate: Any) -> Trajectory:
        inner = SingleTurn(ByteTokenizer(), SamplingParams(max_tokens=8), 0)
        return replace(await inner.run(prompt, member, group_size, generate), reward=float(member))


async def dry(folder: Path, hooks: Hooks | None, *overrides: str) -> list[StepReport]:
    config = config_of(folder, *overrides, base=DRY)
    return await reports_of(config, environment=Scored(), hooks=hooks, prompts=ROWS, write=False)


def tenth(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, reward=(t.reward or 0) / 10) for t in group.trajectories))


async def test_every_stage_is_given_and_may_be_changed(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def before_group(prompt: Prompt) -> Prompt:
        seen["before_group"] += 1
        return replace(prompt, ids=prompt.ids[:2], prompt="ab")

    async def after_rewards(group: Group) -> Group:
        await anyio.lowlevel.checkpoint()
        assert [t.reward for t in group.trajectories] == [0, 1, 2, 3] and group.prompt.prompt == "ab"
        seen["after_rewards"] += 1
        return tenth(group)

    def after_advantages(group: Group, advantages: Any) -> list[float]:
        assert [t.reward for t in group.trajectories] == [0, 0.1, 0.2, 0.3] and advantages.sum() == pytest.approx(0)
        seen["after_advantages"] += 1
        return [1.0, 2.0, 3.0, 4.0]

    hooks = Hooks(before_group=before_group, after_rewards=after_rewards, after_advantages=after_advantages)
    reports = await dry(tmp_path, hooks)
    assert len(reports) == 3 and seen["after_advantages"] == 12 <= seen["after_rewards"] <= seen["before_group"]
    for report in reports:
        assert report.metrics["reward/mean"] == pytest.approx(0.15)
        assert {t.prompt_length for group in report.groups for t in group.trajectories} == {2}
        assert [values.tolist() for values in report.advantages.values()] == [[1, 2, 3, 4]] * 4


async def test_what_answers_nothing_changes_nothing(tmp_path: Path) -> None:
    async def look(*given: Any) -> None:
        return None

    plain, watched = [
        await dry(tmp_path, hooks, "preset=sync")
        for hooks in (Hooks(), Hooks(before_group=look, after_rewards=look, after_advantages=look))
    ]
    for one, other in zip(plain, watched, strict=True):
        assert [g.group_id for g in one.groups] == [g.group_id for g in other.groups]
        assert all(np.array_equal(one.advantages[g], other.advantages[g]) for g in one.advantages)


async def test_filters_see_the_rewards_of_the_hook(tmp_path: Path) -> None:
    def equal_in_odd_groups(group: Group) -> Group | None:
        if group.group_id % 2 == 0:
            return None
        return replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories))

    hooks = Hooks(after_rewards=equal_in_odd_groups)
    reports = await dry(tmp_path, hooks, "rollout.filter.dynamic_sampling=true")
    assert {group.group_id % 2 for report in reports for group in report.groups} == {0}


async def test_groups_of_a_program_pass_the_same_hooks(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.max_steps=null", "rollout.groups_per_step=1", base=DRY)
    hooks = Hooks(before_group=lambda prompt: replace(prompt, ids=prompt.ids[:1]), after_rewards=tenth)
    async with Runtime(config, hooks=hooks, write=False) as runtime:
        steps = runtime.steps()
        group = await runtime.generate("abc", n=2)
        assert [t.prompt_length for t in group] == [1, 1]
        await runtime.submit(group, [0.0, 10.0])
        await runtime.finish()
    [report] = [report async for report in steps]
    assert [t.reward for t in report.groups[0].trajectories] == [0.0, 1.0]


def fails(*given: Any) -> Any:
    raise KeyError("of mine")


async def cancels(*given: Any) -> Any:
    import asyncio

    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (Hooks(before_group=fails), r"hook before_group \(fails\) failed: KeyError: 'of mine'"),
        (Hooks(after_rewards=fails), r"hook after_rewards \(fails\) failed: KeyError"),
        (Hooks(after_advantages=fails), r"hook after_advantages \(fails\) failed: KeyError"),
        (Hooks(before_group=cancels), r"hook before_group \(cancels\) cancelled itself\n"),
        (Hooks(before_group=lambda prompt: replace(prompt, group_id=-1)), "expected None or a Prompt of group"),
        (Hooks(after_rewards=lambda group: [1.0]), r"returned \[1.0\]; expected None or the Group \d+ with 4"),
        (
            Hooks(after_rewards=lambda g: replace(g, trajectories=[replace(t, reward=np.inf) for t in g.trajectories])),
            "expected trajectories that can be trained .member 0: reward is inf",
        ),
        (Hooks(after_advantages=lambda group, values: values[:2]), "expected None or 4 finite float32 numbers"),
        (Hooks(after_advantages=lambda group, values: values * np.nan), "expected None or 4 finite float32 numbers"),
        (Hooks(after_advantages=lambda group, values: values + 1e39), "expected None or 4 finite float32 numbers"),
        (Hooks(after_advantages=lambda group, values: [10**400] * 4), "expected None or 4 finite float32 numbers"),
        (Hooks(after_advantages=lambda group, values: values.sort()), "read-only"),
    ],
)
async def test_a_hook_that_fails_ends_the_run_by_its_name(tmp_path: Path, hooks: Hooks, words: str) -> None:
    with anyio.fail_after(60), pytest.raises(HookError, match=words):
        await dry(tmp_path, hooks)


async def test_what_is_no_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after_rewards is a str; expected a function"):
        await dry(tmp_path, Hooks(after_rewards="f.py:f"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"hooks.py:dry', a function; expected an asyncrl\.Hooks"):
        await dry(tmp_path, None, f"hooks={__file__}:dry")
    with pytest.raises(ConfigError, match=r"no_such_file\.py"):
        await dry(tmp_path, None, "hooks=no_such_file.py:f")


def test_the_example_of_the_page_trains_from_the_configuration(tmp_path: Path) -> None:
    code, settings = blocks("hooks")
    (tmp_path / "hooks.py").write_text(code.text)
    mine = tmp_path / "hooks.yaml"
    mine.write_text(settings.text)
    assert load_config([mine]).hooks == f"{tmp_path}/hooks.py:hooks"  # counted from its own folder
    complete(tmp_path, REAL, str(mine), "train.max_steps=2")
    rewards = [row["reward"] for row in rollouts_of(tmp_path / "runs/run")]
    assert len(metrics_of(tmp_path / "runs/run")) == 2 and max(rewards) <= 0.5


def test_a_hook_of_the_configuration_that_fails_ends_the_program_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(BROKEN)
    run = start(tmp_path, {**REAL, "hooks": "hooks.py:hooks"})
    assert run.wait(200) == HookError.exit_code == 13
    file = tmp_path / "hooks.py"
    words = f"HookError: hook after_rewards (broken) failed: AttributeError: 'Group' object has no attribute 'nothing' ({file}:"
    assert words in run.output
    assert "afterwards also" not in run.output  # the pumps around it end by it, which nobody needs to read
