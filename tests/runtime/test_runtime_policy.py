"""Replay, re-roll and filters in real runs: they are really at work, and a run that is cut off goes on as if it was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from runtime_helpers import DRY, FAST, REAL, REWARDS, config_of, metrics_of, rollouts_of, train, unclocked

from asyncrl.data.prompts import REROLLS
from asyncrl.errors import ConfigError
from asyncrl.runtime.runtime import RunSummary, Runtime

STEPS = 8
POLICY: dict[str, Any] = REAL | {
    "preset": "sync",
    "reward": {"functions": f"{REWARDS}:stingy", "overlong": {"cache": 3, "weight": 0.01}},
    "rollout": REAL["rollout"] | {"sync_warmup_steps": 2},
    "replay": {"size": 3, "max_age": 6},
    "reroll": {"start_fraction": 0.25, "reward_at_most": 0.0},
    "train": REAL["train"] | {"max_steps": STEPS},
    "checkpoint": {"every": 1, "keep": 0},
    **FAST,
}


async def run(folder: Path, *overrides: str, stop_at: int | None = None) -> RunSummary:
    with anyio.CancelScope() as scope:
        async with Runtime(config_of(folder, *overrides, base=POLICY)) as runtime, anyio.create_task_group() as tasks:

            async def watch() -> None:
                async for report in runtime.steps():
                    if report.version == stop_at:
                        scope.cancel()

            tasks.start_soon(watch)
            await runtime.run()
            tasks.cancel_scope.cancel()
    return runtime.summary()


async def test_a_run_with_replay_and_re_roll_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary = await run(whole)
    lines = metrics_of(whole / "runs/run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["replay/groups"] for line in lines) > 2 and lines[-1]["replay/size"] == 3
    assert sum(line["reroll/groups"] for line in lines) > 2 and lines[0]["reroll/groups"] == 0
    assert {row["group_id"] for row in rollouts_of(whole / "runs/run")} & set(range(REROLLS, REROLLS + 24))
    assert all(line["reward/overlong/mean"] <= 0 for line in lines)

    await run(cut, stop_at=4)
    state = orjson.loads((cut / "runs/run/checkpoints/step_4/state/run.json").read_bytes())
    assert len(state["replay"]["0"]["groups"]) == 3
    resumed = await run(cut, "resume=true")
    assert resumed.version == summary.version == STEPS
    keys = ("replay/evicted", "data/delivered", "data/skipped")  # counted since the start of the process
    assert _without(unclocked(metrics_of(cut / "runs/run")), keys) == _without(unclocked(lines), keys)
    assert rollouts_of(cut / "runs/run") == rollouts_of(whole / "runs/run")


def _without(lines: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in names} for line in lines]


async def test_groups_without_a_signal_are_replaced_in_a_streamed_run(tmp_path: Path) -> None:
    tree = POLICY | {
        "preset": "async",
        "rollout": REAL["rollout"] | {"filter": {"dynamic_sampling": True, "max_refills": 3}},
    }
    tree |= {"replay": {}, "reroll": {}, "reward": {"functions": f"{REWARDS}:stingy"}}
    tree |= {"train": POLICY["train"] | {"max_steps": 4}, "checkpoint": {}}
    summary = await train(tmp_path, base=tree)
    assert summary.version == 4 and summary.books.trained == 16
    assert summary.reasons["dropped: no signal"] > 8
    lines = metrics_of(tmp_path / "runs/run")
    assert sum(line.get("groups/dropped/no signal", 0) for line in lines) > 8


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.filter.dynamic_sampling=true", "rollout.filter.by=shore"],
            "filter.by is 'shore'; expected `reward` or one of the components: share",
        ),
        (["evaluate.pass_by=overlong", "reward.overlong.cache=2"], "evaluate.pass_by is 'overlong'; expected"),
        (["reward.overlong.cache=2", "reward.functions=[{function: FILE, name: overlong}]"], "give it another `name`"),
    ],
)
async def test_components_that_cannot_be_are_refused_at_the_start(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    tree = DRY | {"reward": {"functions": f"{REWARDS}:share"}}
    given = [text.replace("FILE", f"'{REWARDS}:share'") for text in overrides]
    with pytest.raises(ConfigError, match=words):
        async with Runtime(config_of(tmp_path, *given, base=tree), write=False):
            pass
