"""`asyncrl bench agents`: through the whole tool on short steps, and how long its tools take."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from asyncrl_bench.agents import BENCH, ratios, require_equal_tokens
from asyncrl_bench.app import main
from asyncrl_bench.job import BenchError
from asyncrl_bench.peers import waiting_agent


@pytest.mark.slow
def test_the_whole_tool_on_short_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL is that of the tests' own interpreter. All sides sample and train the same numbers of tokens."""
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    trl = ["--peer", "trl", "--trl-python", sys.executable, "--trl-steps", "1"]
    assert main(["agents", "--quick", *trl, *places]) == 0
    seen = capsys.readouterr().out
    sides = ["async", "sync", "TRL, rollout_func", "TRL, tools"]
    assert all(f"| {side} |" in seen for side in sides) and "goal, async at most 1.15: " in seen
    [run] = json.loads((tmp_path / "bench_agents.json").read_text())["runs"]
    assert sorted(run["seconds"]) == sorted(f"{side}, {tools}" for side in sides for tools in ("instant", "waiting"))
    counted = {
        (each["sampled_tokens"] / each["steps"], each["prompt_tokens"] / each["steps"])
        for each in run["sides"].values()
    }
    assert {sampled for sampled, _ in counted} == {4 * waiting_agent.REPLIES * 4} and len(counted) == 1
    # A step lasts at least as long as the three shortest waits of one of its episodes; TRL's tools wait for all four in turn.
    least = 3 * waiting_agent.LEAST_S
    assert min(run["seconds"][f"{side}, waiting"] for side in sides[1:3]) > least
    assert run["seconds"]["TRL, tools, waiting"] > 4 * least


def test_sides_with_different_numbers_of_tokens_are_refused() -> None:
    sides = {"async, instant": {"sampled_tokens": 64, "steps": 2}, "sync, instant": {"sampled_tokens": 64, "steps": 1}}
    with pytest.raises(BenchError, match=r"different numbers of tokens a step: .*32.*64"):
        require_equal_tokens(sides)


def test_agents_that_make_no_whole_microbatch_of_trl_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        BENCH.parse(["--prompts", "3", "--group-size", "8"])
    assert "--trl-microbatch 16 does not divide 24 agents" in capsys.readouterr().err


def test_tools_take_between_a_fifth_of_a_second_and_two() -> None:
    drawn = [waiting_agent.seconds() for _ in range(2000)]
    assert min(drawn) >= 0.2 and max(drawn) <= 2.0 and 0.5 < statistics.median(drawn) < 0.8


def test_a_ratio_compares_the_same_preset() -> None:
    seconds = {"async, instant": 2.0, "async, waiting": 2.2, "sync, instant": 3.0, "sync, waiting": 6.0}
    assert ratios(seconds) == pytest.approx({"async": 1.1, "sync": 2.0})
