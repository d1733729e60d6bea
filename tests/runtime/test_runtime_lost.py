"""Ranks that only generate are killed, stopped and asked to end. The run goes on without them, and trains every prompt once."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import reserved_port
from runtime_helpers import DRY, MODEL, PROGRAM, REWARDS, Process, metrics_of, rollouts_of, write_yaml

LIMIT_S = 4.0
DIES = Path(__file__).with_name("runtime_dies.py")
TELEMETRY = {"live": "plain", "trace": False, "report": False, "rollouts_per_step": 64}


@contextmanager
def run_of(folder: Path, tree: dict[str, Any], faults: Sequence[str]) -> Iterator[list[Process]]:
    """Rank 0 trains. `faults`: "MOMENT SIGNAL" of each rank that generates, or an empty text."""
    size = 1 + len(faults)
    tree = tree | {
        "distributed": {"roles": {"train": 1, "generate": len(faults)}},
        "watchdog": {"loop_timeout_s": LIMIT_S},
        "telemetry": TELEMETRY,
    }
    ranks = list[Process]()
    with reserved_port() as port:
        try:
            for rank, fault in enumerate(["", *faults]):
                (place := folder / str(rank)).mkdir()
                environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "WARM_WORKERS": ""}
                environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                program = (str(DIES), *fault.split()) if fault else PROGRAM
                arguments = str(write_yaml(place, tree)), f"run.dir={folder}/runs"
                ranks.append(Process(place, *arguments, program=program, **environ))
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()


def check_trained_once(run: Path, first: Process, steps: int) -> None:
    """Every prompt up to the last was trained once, in full steps. Nothing is left of lost groups."""
    groups = Counter(row["group_id"] for row in rollouts_of(run))
    size, per_step = DRY["rollout"]["group_size"], DRY["rollout"]["groups_per_step"]
    assert groups == dict.fromkeys(range(steps * per_step), size), groups
    assert f"{steps * per_step} trained" in first.output


def test_a_run_goes_on_without_ranks_that_are_lost_at_any_moment(tmp_path: Path) -> None:
    """kill -9 of four ranks, and SIGTERM of one; a sixth stays."""
    tree = DRY | {
        "train": DRY["train"] | {"max_steps": 40},
        "dry_run": {"decode_step_s": 0.002, "finish_s": 0.01},
        "reward": f"{REWARDS}:short",
        "data": {"max_prompt_tokens": 64, "eval": f"{MODEL}:rows"},
        "evaluate": {"every": 2, "samples": 2, "limit": 6},
    }
    faults = ["generates SIGKILL", "sends SIGKILL", "idles SIGKILL", "evaluates SIGKILL", "generates SIGTERM", ""]
    with run_of(tmp_path, tree, faults) as (first, *others):
        codes = [rank.wait(120) for rank in (first, *others)]
        assert codes == [0, *[-signal.SIGKILL] * 4, 128 + signal.SIGTERM, 0], first.output[-5000:]
        check_trained_once(tmp_path / "runs/run", first, 40)
        for rank in (1, 2, 3, 4):
            assert re.search(
                rf"warning: rank {rank} on \S+ is lost, and the run goes on: rank {rank} has given", first.output
            )
        assert "is lost, and the run goes on: rank 5 was stopped by SIGTERM" in first.output
        lines = metrics_of(tmp_path / "runs/run")
        assert sum(line.get("groups/dropped/rank lost", 0) for line in lines) > 0
        # Each evaluation is complete.
        assert [line["step"] for line in lines if any(name.startswith("eval/") for name in line)] == list(
            range(0, 41, 2)
        )
