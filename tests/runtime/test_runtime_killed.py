"""A rank that is killed just after a step: the other one writes the checkpoint of it, and no prompt is trained twice or lost, where
the launcher starts the same job again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import ENDLESS as WITHOUT_END
from runtime_helpers import RANK, complete, metrics_of, start, start_two, started_by

KILLED = (str(Path(__file__).with_name("runtime_killed.py")),)
GROUPS, STEP = 4, 5
# The last setting is for first starts alone.
ENDLESS = WITHOUT_END | {"telemetry": {"live": "plain"}, "run": {"overwrite": True}}


def trained(run: Path) -> tuple[int, set[int]]:
    """Version of the newest checkpoint, and the prompts that its cursors have passed for good."""
    state = json.loads((run / "checkpoints/latest/state/run.json").read_text())
    passed: set[int] = set()
    for rank in ("0", "1"):
        cursor, untrained = state["prompts"][rank], set(state["untrained"][rank])
        taken = set(range(int(rank), cursor["position"], 2))
        assert untrained <= taken
        passed |= taken - untrained - set(cursor["again"])
    return state["version"], passed


@pytest.mark.parametrize(
    ("moment", "sharding", "version"),
    [
        ("commit", "replicate", STEP),
        pytest.param("committed", "replicate", STEP, marks=pytest.mark.slow),
        pytest.param("say", "replicate", STEP, marks=pytest.mark.slow),
        # Its part of the weights went with it: the last checkpoint is whole. Rank 0 does not wait until the watchdog ends the run.
        pytest.param("committed", "fsdp", STEP - 1, marks=pytest.mark.slow),
        pytest.param("say", "fsdp", STEP - 1, marks=pytest.mark.slow),
    ],
)
def test_the_step_of_a_rank_that_was_killed_is_trained_once(
    tmp_path: Path, moment: str, sharding: str, version: int
) -> None:
    tree: dict[str, Any] = ENDLESS | {"checkpoint": {"every": 2}, "distributed": {"sharding": sharding}}
    tree["watchdog"] = {"abort_grace_s": 10.0}  # less than torchrun's 30: a part that never comes is waited for 6 s
    run = tmp_path / "runs/run"
    job = [started_by("torchrun", number, tmp_path) for number in (0, 1)]
    with start_two(tmp_path, tree, KILLED, KILLED=f"1 {STEP} {moment}", **job[0]) as (first, other):
        assert other.wait() == -signal.SIGKILL, other.output
        if moment == "say":  # rank 0 waits for its groups, and is stopped, as torchrun does
            first.send(signal.SIGTERM)
        part_lost = (moment, sharding) == ("say", "fsdp")
        code = 5 if part_lost else 143 if moment == "say" else 12
        assert first.wait() == code, first.output
        assert ("waited for [1]: nothing came" in first.output) is part_lost
    found, before = trained(run)
    assert found == version and len(before) == GROUPS * version, first.output
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, STEP + 1))  # the one that no other rank could report, too
    assert [line.get("train/ranks_reported") for line in lines[:-1]] == [None] * (STEP - 1)
    assert lines[-1].get("train/ranks_reported") == (None if moment == "say" else 1)

    tree["train"] = tree["train"] | {"max_steps": version + 3}
    with start_two(tmp_path, tree, RANK, RANK_WEIGHTS=str(tmp_path), **job[1]) as ranks:
        assert [each.wait() for each in ranks] == [0, 0], ranks[0].output + ranks[1].output
    dumps = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    since = [group for dump in dumps for step in dump["groups"] for group in step]
    assert len(since) == len(set(since)) == GROUPS * 3 and before.isdisjoint(since)
    assert trained(run) == (version + 3, before.union(since))
    assert [line["step"] for line in metrics_of(run)] == list(range(1, version + 4))


def test_a_run_that_is_killed_before_the_line_of_a_step_writes_each_once(tmp_path: Path) -> None:
    """The step is in the books, and no checkpoint has it: it is trained again, and has its line then."""
    tree: dict[str, Any] = ENDLESS | {"checkpoint": {"every": 2}}
    run = tmp_path / "runs/run"
    job = [started_by("SLURM", number, tmp_path) for number in (0, 1)]
    killed = start(tmp_path, tree, program=KILLED, KILLED=f"0 {STEP} line", **job[0])
    assert killed.wait() == -signal.SIGKILL, killed.output
    assert [line["step"] for line in metrics_of(run)] == list(range(1, STEP))

    tree["train"] = tree["train"] | {"max_steps": STEP + 2}
    output = complete(tmp_path, tree, f"run.dir={tmp_path}/runs", **job[1])
    assert f"restart 1 of this job by SLURM: the run in {run} goes on from its newest checkpoint" in output
    assert [line["step"] for line in metrics_of(run)] == list(range(1, STEP + 3))


@pytest.mark.parametrize(
    "moment", ["during", "fails", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("sums", "gather"))]
)
def test_ranks_name_the_one_that_was_killed_or_failed_in_a_collective_and_save_first(
    tmp_path: Path, moment: str
) -> None:
    """Of three ranks. On nccl the collectives of the others would not fail."""
    tree = ENDLESS | {"checkpoint": {"every": None, "save_final": True}}
    with start_two(tmp_path, tree, KILLED, size=3, KILLED=f"1 {STEP} {moment}") as (first, lost, third):
        assert lost.wait() == (1 if moment == "fails" else -signal.SIGKILL), lost.output
        why = "has ended: ArithmeticError: on purpose" if moment == "fails" else "gave no reason"
        for each in (first, third):
            assert each.wait() == 12, each.output
            assert f"rank 1 {why}" in each.output, each.output
    version = json.loads((tmp_path / "runs/run/checkpoints/latest/state/run.json").read_text())["version"]
    assert version in {"gather": (STEP,), "during": (STEP - 1, STEP)}.get(moment, (STEP - 1,))
