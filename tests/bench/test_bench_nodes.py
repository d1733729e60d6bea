"""`asyncrl bench nodes`: through the whole tool, on few ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.distributed import line_ledger
from asyncrl_bench.app import main
from asyncrl_bench.simulation import Plan, simulate


@pytest.mark.slow
def test_the_ledger_groups_and_weights_are_measured(tmp_path: Path) -> None:
    assert main(["nodes", "--quick", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    written = json.loads((tmp_path / "nodes.json").read_text())
    [run] = written["ledger"]
    assert (run["ranks"], run["live"]) == (2, 10) and run["per_s"] > 100 and run["cpu_us"] > run["loop_us"] > 0
    assert run["latency_ms"][0] <= run["latency_ms"][1]
    assert {run["side"] for run in written["groups"]} == {"line", "queue"}
    assert all(run["groups_per_s"] > 0 and run["cpu_us"] > 0 for run in written["groups"])
    sent, sampled = written["weights"]
    assert len(sent["broadcast"]) == len(sent["bare"]) == 4 and sent["bytes"] == sent["sent"] > 0
    assert sampled["moves"] > 0 and sampled["step"] > 0 and sampled["bind"] > 0
    tables = (tmp_path / "nodes.md").read_text()
    [simulated] = written["simulation"]
    assert simulated["nodes"] == 4 and 0.3 < simulated["share"] <= 1.0 and simulated["load"] > 0
    assert "transitions/s" in tables and "| 16 x 256 | line |" in tables and "Ray is left out" in tables


def test_a_simulated_run_loses_no_token_and_keeps_the_ages() -> None:
    plan = Plan(8, nodes_per_trainer=4, warmup=3, steps=3, ends=True, evaluate_every=4)
    world = simulate(plan)
    result, books = world.result, world.ended
    # `World.on_step` compares the tokens of each group with those that were generated, and its age with the bound.
    assert result.ages.total() == plan.steps * plan.groups_per_step and max(result.ages) <= plan.max_staleness
    assert books.trained == plan.last_step * plan.groups_per_step and books.failed == 0
    assert books.admitted == books.trained + books.dropped and books.live == books.claimed == books.held == 0
    assert len(world.generated) <= books.dropped, "only groups that were dropped at the end are left"
    assert world.evaluated == [0, 4, 8, world.books.turn]
    assert sum(result.training.values()) == pytest.approx(1.0) == sum(result.generating.values())
    assert 0 < result.load < 0.01 and result.handled["ledger admit"] > 0
    # A waiting rank asks for a state for itself, so these messages must not grow with the square of the ranks.
    assert result.handled["watch"] <= 20 * result.ages.total()


def test_claims_do_not_wait_for_the_states_of_many_training_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 training ranks get states as rarely as 3,200: each claim waited for one, and the run had 5 % of the ideal rate.
    monkeypatch.setattr(line_ledger, "_PAUSE_PER_RANK_S", 0.2)
    plan = Plan(32, nodes_per_trainer=2, groups_per_node=4, seats=16, median_s=10.0, warmup=2, steps=1)
    result = simulate(plan).result
    assert result.tokens / result.seconds > 0.5 * plan.ideal
    # The refused claims of all ranks were 8 a group.
    assert result.handled["ledger claim"] < 6 * result.ages.total()
    assert result.handled["watch"] < 2 * result.ages.total()
