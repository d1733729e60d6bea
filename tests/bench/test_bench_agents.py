"""`asyncrl bench agents`: through the whole tool on short steps, and how long its tools take."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from asyncrl_bench.agents import ratios
from asyncrl_bench.app import main
from asyncrl_bench.peers import waiting_agent


@pytest.mark.slow
def test_the_whole_tool_on_short_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--quick", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr().out
    assert "| async |" in seen and "| sync |" in seen and "goal, async at most 1.15: " in seen
    [run] = json.loads((tmp_path / "bench_agents.json").read_text())["runs"]
    assert sorted(run["seconds"]) == ["async, instant", "async, waiting", "sync, instant", "sync, waiting"]
    # A sync step lasts at least as long as the three shortest waits of one of its episodes.
    assert run["seconds"]["sync, waiting"] > 3 * waiting_agent.LEAST_S


def test_tools_take_between_a_fifth_of_a_second_and_two() -> None:
    drawn = [waiting_agent.seconds() for _ in range(2000)]
    assert min(drawn) >= 0.2 and max(drawn) <= 2.0 and 0.5 < statistics.median(drawn) < 0.8


def test_a_ratio_compares_the_same_preset() -> None:
    seconds = {"async, instant": 2.0, "async, waiting": 2.2, "sync, instant": 3.0, "sync, waiting": 6.0}
    assert ratios(seconds) == pytest.approx({"async": 1.1, "sync": 2.0})
