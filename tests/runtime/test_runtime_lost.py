"""Ranks that only generate are killed, stopped and asked to end. The run goes on without them, and trains every prompt once."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import reserved_port
from runtime_helpers import (
    DRY,
    ENDLESS,
    HOOKS,
    MODEL,
    PROGRAM,
    REAL,
    REWARDS,
    Process,
    check_trained_once,
    lines_at_least,
    metrics_of,
    start_two,
)

from asyncrl.cli import nodes
from asyncrl.distributed.collectives import LostRank
from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.errors import RankLost, StallError
from asyncrl.runtime import meeting
from asyncrl.runtime.opened import OpenRun
from asyncrl.runtime.progress import Stages

LIMIT_S = 4.0
DIES = Path(__file__).with_name("runtime_dies.py")
TELEMETRY = {"live": "plain", "trace": False, "report": False, "rollouts_per_step": 64}


def run_of(folder: Path, tree: dict[str, Any], faults: Sequence[str], **more: str) -> Any:
    """Rank 0 trains. `faults`: "MOMENT SIGNAL" of each rank that generates, or an empty text."""
    tree = tree | {
        "distributed": {"roles": {"train": 1, "generate": len(faults)}} | tree.get("distributed", {}),
        "watchdog": {"loop_timeout_s": LIMIT_S} | tree.get("watchdog", {}),
        "telemetry": TELEMETRY,
    }
    programs = [(str(DIES), *fault.split()) if fault else PROGRAM for fault in ["", *faults]]
    return start_two(folder, tree, programs=programs, size=len(programs), WARM_WORKERS="", **more)


def test_a_run_goes_on_without_ranks_that_are_lost_at_any_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        check_trained_once(tmp_path / "runs/run", 40)
        # No slot, place or row is left: rank 0 checks the books at the end.
        assert "160 trained" in first.output
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
    assert nodes.main([str(tmp_path / "runs/run")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^0 +\S+ +trains +40 +- +- +now$", shown, re.M)
    assert re.search(r"^3 +\S+ +generates +\d+ +0 +\S+ +lost at \S+: rank 3 has given no sign of life", shown, re.M), (
        shown
    )
    assert re.search(r"^5 .* lost at \S+: rank 5 was stopped by SIGTERM$", shown, re.M), shown
    assert re.search(r"^the run ended .*: completed$", shown, re.M), shown


@pytest.mark.slow
def test_real_ranks_are_lost_in_a_broadcast_and_in_a_pause_and_the_run_is_resumed(tmp_path: Path) -> None:
    """Rank 1 is killed in a bucket of weights. Rank 2 is stopped for longer than the limit, with groups on their way, and goes on
    later. Rank 3 is killed when no other rank is left. Then two ranks resume the run."""
    run = tmp_path / "runs/run"
    tree = ENDLESS | {"checkpoint": {"every": 50}}
    with run_of(tmp_path, tree, ["bucket SIGKILL", "sends SIGSTOP", ""]) as (first, second, third, fourth):
        first.wait_until(lambda: "warning: rank 1 on" in first.output, "the loss of rank 1")
        first.wait_until(lambda: "warning: rank 2 on" in first.output, "the loss of rank 2")
        third.send(signal.SIGCONT)
        assert (second.wait(), third.wait()) == (-signal.SIGKILL, RankLost.exit_code)
        assert "rank 0 has given up rank 2" in third.output, third.output
        steps = len(metrics_of(run))
        first.wait_until(lines_at_least(run, steps + 3), "three more steps")
        fourth.send(signal.SIGKILL)
        assert first.wait() == RankLost.exit_code
        assert "no rank is left that generates: rank 3 has given no sign of life" in first.output, first.output
    stopped_at = metrics_of(run)[-1]["step"]
    tree = REAL | {"train": REAL["train"] | {"max_steps": stopped_at + 4}, "resume": True}
    with run_of(tmp_path, tree, [""]) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output[-3000:]
    check_trained_once(run, stopped_at + 4)


def test_a_rank_that_generates_names_the_reason_why_rank_0_ends(tmp_path: Path) -> None:
    tree = DRY | {"train": DRY["train"] | {"max_steps": 1000}, "reward": f"{REWARDS}:short"}
    with run_of(tmp_path / "stopped", tree, [""]) as (first, second):
        first.wait_until(lines_at_least(tmp_path / "stopped/runs/run", 2), "step 2")
        first.send(signal.SIGTERM)
        assert second.wait() == 128 + signal.SIGTERM, second.output
        assert "another rank was stopped by SIGTERM; this rank ends, too" in second.output
    with run_of(tmp_path / "fails", tree | {"hooks": f"{HOOKS}:failing"}, [""]) as (_, second):
        assert second.wait() == RankLost.exit_code, second.output
        assert "RankLost: rank 0 has ended: HookError: hook after_advantages (fails) failed" in second.output


@pytest.mark.slow
def test_a_run_without_ranks_that_generate_waits_for_a_node_to_join(tmp_path: Path) -> None:
    """Rank 1 is lost, and a node joins and is lost, too. No further node comes, so the run ends at the watchdog's limit."""
    secret = {"ASYNCRL_SECRET": "the secret of these tests"}
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        tree = DRY | {
            "train": DRY["train"] | {"max_steps": 1000},
            "reward": {"functions": [f"{REWARDS}:short"], "timeout_s": 1.0},
            "data": {"max_prompt_tokens": 64, "eval": f"{MODEL}:rows"},
            "evaluate": {"every": 1, "samples": 1, "limit": 2},
            "distributed": {"listen": address},
            "watchdog": {"stall_timeout_s": 20.0, "interval_s": 1.0},
        }
        with run_of(tmp_path, tree, ["generates SIGKILL"], **secret) as (first, second):
            first.wait_until(lambda: "Nodes that join within" in first.output, "the loss of rank 1")
            steps = len(metrics_of(tmp_path / "runs/run"))
            (place := tmp_path / "node").mkdir()
            node = Process(place, address, program=(str(DIES), "sends", "SIGKILL", "join"), WARM_WORKERS="", **secret)
            try:
                assert (second.wait(), node.wait()) == (-signal.SIGKILL, -signal.SIGKILL), node.output
            finally:
                node.kill()
            assert first.wait() == StallError.exit_code, first.output[-3000:]
    assert "no rank generates, and no node has joined (rank 2 has given no sign of life" in first.output
    assert len(metrics_of(tmp_path / "runs/run")) > steps


async def test_a_rank_that_only_generates_does_not_wait_until_rank_0_closes_its_line() -> None:
    ended: list[RankLost] = []
    world = SimpleNamespace(trains=False, joined=None, lost=LostRank())
    parts = {"remote": None, "stages": Stages(), "end_reasons": {}, "ledger": SimpleNamespace(lose=ended.append)}
    run: Any = SimpleNamespace(world=world, **parts)
    run.line = LineClient("127.0.0.1:1", "a secret", "rank 1")
    _, _, on_ended = meeting._on_lost(run)
    reason = "rank 0 was stopped by SIGTERM"
    await on_ended("rank 0", {"reason": reason, "stopped_by": "SIGTERM", "one_rank": True, "stalled": False}, ())
    assert [str(error) for error in ended] == [reason] and ended[0].stopped_by == "SIGTERM"


class Told(LineServer):
    """A line whose peers are rank 1, which is connected, and ranks 2 and 3, which are not."""

    told: list[Any]

    def silences(self) -> dict[str, float]:
        return {"rank 1": 0.0, "rank 2": 0.5, "rank 3": 0.5}

    async def tell_all(self, kind: str, header: Any = None, *buffers: Any) -> None:
        self.told.append(header)


async def test_the_set_of_a_lost_rank_is_named_and_not_that_of_the_rank_that_noticed() -> None:
    """Rank 1 lost rank 2 and says so before its end. A collective fails before rank 2 is given up. Rank 3 only generates."""
    ended: list[RankLost] = []
    roles = SimpleNamespace(shared=" (set of rank {})".format, trains=lambda rank: True, train=(0, 1, 2))
    world = SimpleNamespace(trains=True, joined=None, lost=LostRank(), roles=roles, rank=0, world_size=4)
    parts = {"remote": None, "dispatch": None, "orders": None, "stopped_by": None, "stalled": False}
    parts |= {"stages": Stages(), "end_reasons": {}, "ledger": SimpleNamespace(lose=ended.append), "ended_by": None}
    run: Any = SimpleNamespace(world=world, line=Told("a secret"), **parts)
    run.line.told = []
    _, on_end, _ = meeting._on_lost(run)
    await OpenRun._send_end_reason(run, RankLost("a collective failed"))
    assert [each["reason"] for each in run.line.told] == ["a collective failed; rank 2 (set of rank 2) is disconnected"]
    run.end_reasons["rank 1"] = RankLost("rank 1 lost rank 2")
    on_end("rank 1", None)
    on_end("rank 2", RankLost("rank 0 lost rank 2"))
    assert [str(error) for error in ended] == ["rank 1 lost rank 2", "rank 0 lost rank 2 (set of rank 2)"]
