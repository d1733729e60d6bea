"""Judges, rubrics and group rewards in whole runs: what a function sees, and what reaches metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_helpers import MODEL, REAL, config_of, metrics_of, reports_of, rollouts_of, write_yaml
from support.judge_server import JudgeServer
from support.pages import blocks

from asyncrl.main import main

FUNCTIONS = """
from dataclasses import replace
import asyncrl
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import GenerationError

@asyncrl.whole_group
async def longest(completions, num_turns, tool_calls, notes, log_extra, log_metric):
    log_metric("seen", len(completions))
    log_extra("hint", [each.get("hint") for each in notes])
    assert num_turns == [1] * len(completions) and tool_calls == [[]] * len(completions)
    most = max(map(len, completions))
    return [{"score": float(len(each) == most), "length": len(each)} for each in completions]

class Fails(SingleTurn):
    async def run(self, prompt, member, group_size, generate):
        if prompt.group_id < 0 and member == 1:
            raise GenerationError("a held-out episode that fails")
        played = await super().run(prompt, member, group_size, generate)
        return replace(played, extras={"own/hint": 1.5})
"""


AGENT = """
async def episode(task, policy):
    reply = await policy.complete(task["prompt"])
    await policy.complete([*reply.ids, *policy.encode("=")])
    policy.note("tries", 2.0)

async def each_reply(completions, num_turns, notes, tool_calls, prompts):
    assert num_turns == [2] * len(completions) and tool_calls == [[]] * len(completions)
    return [[0.25, each["tries"]] for each in notes]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def run(here: Path, *overrides: str, **sections: Any) -> int:
    return main([str(write_yaml(here, REAL | {"preset": "sync"} | sections)), *overrides])


def both(lines: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The first line of a step, and the first with an evaluation."""
    trained = next(line for line in lines if "reward/mean" in line)
    return trained, next(line for line in lines if any(name.startswith("eval/") for name in line))


def test_a_function_for_whole_groups_sees_them_in_training_and_evaluation(here: Path) -> None:
    """Its environment is not single_turn, which alone would call it once for each completion."""
    evaluate, data = {"every": 2, "samples": 3}, REAL["data"] | {"eval": f"{MODEL}:held_out"}
    rollout = REAL["rollout"] | {"environment": "rewards.py:Fails", "retries": 0}
    assert run(here, reward="rewards.py:longest", data=data, evaluate=evaluate, rollout=rollout) == 0
    lines, rows = metrics_of(here / "runs/run"), rollouts_of(here / "runs/run")
    trained = [line for line in lines if "reward/mean" in line]
    size = REAL["rollout"]["group_size"]
    assert all(line["reward/longest/seen/mean"] == size and line["own/hint"] == 1.5 for line in trained)
    lengths = [row["extras"]["longest/length"] for row in rows[: len(rows) // len(trained)]]
    assert trained[0]["reward/longest/length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    _, evaluated = both(lines)
    name = next(key for key in evaluated if key.startswith("eval/")).split("/")[1]
    # The member that failed is not there, and nothing stands for it.
    assert evaluated[f"eval/{name}/longest/seen/mean"] == 2 and evaluated[f"eval/{name}/missing"] > 0
    assert evaluated[f"eval/{name}/longest/hint/mean"] == evaluated[f"eval/{name}/own/hint/mean"] == 1.5
    assert evaluated[f"eval/{name}/longest/length/mean"] > 0


ASKS = """
import aiohttp, asyncrl

async def asks(completions, base_url, api_key, log_extra):
    body = {"model": "any", "prompt": "a3=", "max_tokens": 4}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        texts = []
        for _ in completions:
            async with client.post(f"{base_url}/completions", json=body) as response:
                response.raise_for_status()
                texts.append((await response.json())["choices"][0]["text"])
    log_extra("text", texts)
    return [float(len(text)) for text in texts]
"""


async def test_a_reward_function_may_ask_the_policy_which_is_not_trained_on_that(here: Path) -> None:
    (here / "asks.py").write_text(ASKS)
    reports = await reports_of(config_of(here, "reward.functions=[asks.py:asks]", "preset=async"), write=False)
    assert [report.version for report in reports] == [1, 2, 3]
    trained = [t for report in reports for group in report.groups for t in group.trajectories]
    assert len({t.extras["asks/text"] for t in trained}) > 1
    assert sum(report.metrics["train/tokens"] for report in reports) == sum(t.sampled_length for t in trained)


async def test_the_policy_may_be_its_own_judge(here: Path) -> None:
    """Ten thousand parameters that know a few letters: all their judgements are garbage, and none is a failed request."""
    chosen = ["reward.judge={url: policy, criteria: The answer is long.}", f"model.path={MODEL}:build_chat"]
    chosen += [
        "rollout.max_context=2048",
        "train.tokens_per_microbatch=2048",
        "reward.on_error=none",
        "reward.retries=0",
    ]
    reports = await reports_of(config_of(here, *chosen), write=False)
    assert [report.version for report in reports] == [1, 2, 3]
    for report in reports:
        found = [report.metrics[f"reward/judge/{name}/mean"] for name in ("requests", "garbage", "failures")]
        assert found == [1, 1, 0] and report.metrics["reward/judge/applicable"] == 0


async def test_the_replies_of_an_agent_have_rewards_of_their_own(here: Path) -> None:
    (here / "agent.py").write_text(AGENT)
    chosen = (
        "rollout.environment=agent.py:episode",
        "reward.functions=[agent.py:each_reply]",
        "data.max_prompt_tokens=30",
    )
    reports = await reports_of(config_of(here, *chosen), write=False)
    trained = [trajectory for report in reports for group in report.groups for trajectory in group.trajectories]
    assert len(trained) == 3 * 16 and {t.turn_rewards for t in trained} == {(0.25, 2.0)}
    assert {t.reward for t in trained} == {2.25}
    assert all(report.metrics["reward/each_reply/mean"] == 2.25 for report in reports)


def test_such_a_function_is_refused_where_each_completion_is_scored_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(here, "reward.batch=trajectory", reward="rewards.py:longest") == 2
    words = "'longest' compares the completions of a group (`whole_group`), but reward.batch is"
    assert words in capsys.readouterr().err


def test_the_documented_rubric_trains_and_evaluates(here: Path) -> None:
    [block] = blocks("judge")
    server = JudgeServer()
    with server.serve_in_thread() as url:
        reward = dict(yaml.safe_load(block.text))["reward"]
        judge = reward["judge"] | {"url": url, "key_env": None, "reference": None}
        data = REAL["data"] | {"eval": f"{MODEL}:held_out"}
        sections = {"reward": {"judge": judge, "on_error": "none", "retries": 0}, "data": data}
        assert run(here, "evaluate.every=2", **sections) == 0
    lines, rows = metrics_of(here / "runs/run"), rollouts_of(here / "runs/run")
    names = [f"{judge['name']}/{name}" for name in judge["criteria"]]
    assert {*rows[0]["components"]} == {*names}
    for row in rows:
        assert set(row["components"].values()) == {min(len(row["completion"]), 10) / judge.get("scale", 10)}
    trained, evaluated = both(lines)
    assert all(f"reward/{name}/mean" in trained and f"eval/single_turn/{name}/mean" in evaluated for name in names)
    assert trained[f"reward/{judge['name']}/requests/mean"] == 1


def test_a_judge_alone_scores_the_episodes_of_an_agent(here: Path) -> None:
    (here / "agent.py").write_text(AGENT)
    with JudgeServer().serve_in_thread() as url:
        reward, rollout = {"judge": {"url": url, "criteria": "It is long."}}, {"environment": "agent.py:episode"}
        sections = {"reward": reward, "rollout": REAL["rollout"] | rollout}
        assert run(here, "data.max_prompt_tokens=30", **sections) == 0
    assert all(line["reward/judge/applicable"] == 1 for line in metrics_of(here / "runs/run"))


class HalfSilent(JudgeServer):
    """Every second reply has no score."""

    def reply(self, system: str, user: str) -> Any:
        self.texts.append(user)
        return "I cannot say." if len(self.texts) % 2 else self.score(system, user)


def test_an_evaluation_says_for_how_many_completions_a_judge_gave_a_score(here: Path) -> None:
    with HalfSilent().serve_in_thread() as url:
        judge = {"url": url, "criteria": "It is long."}
        reward, data = {"judge": judge, "on_error": "none", "retries": 0}, REAL["data"] | {"eval": f"{MODEL}:held_out"}
        assert run(here, "evaluate.every=2", reward=reward, data=data) == 0
    trained, evaluated = both(metrics_of(here / "runs/run"))
    assert evaluated["eval/single_turn/judge/applicable"] == evaluated["eval/single_turn/judge/garbage/mean"] == 0.5
    assert trained["reward/judge/applicable"] == 0.5
