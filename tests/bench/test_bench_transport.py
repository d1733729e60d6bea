"""`asyncrl bench transport`: every own side really hands groups over; the figures themselves are not judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncrl.cli.app import main
from asyncrl_bench import transport, transport_report
from asyncrl_bench.job import PEERS
from asyncrl_bench.peers import handover_group

PEER = """\
#!{python} -S
import json, sys
job = json.load(open(sys.argv[2]))
times = [(i * 10**9, i * 10**9 + 10**8) for i in range(10)]
print(json.dumps({{"times": times, "versions": {{"script": sys.argv[1].rsplit("/", 1)[-1], "side": job["side"]}}}}))
"""
SIDES = ("memcpy", "stash", "tensor", "queue")  # the ring is in the stash's
OWN = {("memcpy", ""), ("queue", ""), *((side, loop) for side in SIDES[1:3] for loop in ("asyncio", "uvloop"))}


def test_every_own_side_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--cache", str(tmp_path / "c"), "--out", str(tmp_path)]
    code = main(["bench", "transport", "--quick", "--costs", "1024", *places, "--sides", *SIDES])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert {(run["side"], run["loop"]) for run in found["runs"]} == OWN
    assert len(found["runs"]) == 2 * len(OWN)
    for run in found["runs"]:
        assert 0 < run["p50_us"] <= run["p99_us"] and run["groups_per_s"] > 0
        assert (run["groups"], run["bytes"]) == (36, 16 * 256 * 13)
        parts = [run.get(part) for part in transport_report.PARTS]
        assert all(part > 0 for part in parts) if run["side"] == "stash" else parts == [None] * 4
    assert [row["tokens"] for row in found["costs"]] == [1024]
    for row in found["costs"]:
        assert row["write_us"] > 0 and row["read_us"] > 0 and row["read_to_small"] > 0
        assert row["write_share_of_memcpy"] == pytest.approx(row["memcpy_us"] / row["write_us"])
    assert found["command"].startswith("asyncrl bench transport --quick --costs 1024 --sides")
    assert "| 16 x 256 | full | stash uvloop |" in seen.out
    table = (tmp_path / "bench_transport.md").read_text()
    assert table.startswith(f"`{found['command']}`") and table.splitlines()[2] in seen.out
    assert "| groups per second of 16 x 2,048 at least 15 times ray |  | not measured |" in seen.out
    assert (tmp_path / "bench_transport.png").exists() or "matplotlib is not installed" in seen.err


def test_peers_run_in_their_own_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each peer's interpreter is one that answers at once; the scripts they would run are there."""
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(transport, "peer_python", lambda side, cache: python)
    sides = ["ray", "transferqueue", "atropos"]
    words = ["--tokens", "2048", "--repeats", "2", "--costs", "--sides", *sides, "--cache", str(tmp_path / "c")]
    assert main(["bench", "transport", *words, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert found["versions"] == {side: {"script": f"handover_{side}.py", "side": side} for side in sides}
    assert [run["side"] for run in found["runs"]] == 2 * sides + 2 * sides[::-1], "the order turns"
    assert {run["p50_us"] for run in found["runs"]} == {1e5}
    for side in sides:
        assert (PEERS / f"handover_{side}.py").exists()


def test_a_peer_that_fails_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pythons = {}
    for side, program in (("ray", PEER), ("atropos", "#!{python} -S\nraise SystemExit('no server')\n")):
        pythons[side] = tmp_path / side
        pythons[side].write_text(program.format(python=sys.executable))
        pythons[side].chmod(0o755)
    monkeypatch.setattr(transport, "peer_python", lambda side, cache: pythons[side])
    sides = ["--sides", "atropos", "ray"]
    words = ["--tokens", "2048", "--repeats", "1", "--costs", *sides, "--cache", str(tmp_path / "c")]
    assert main(["bench", "transport", *words, "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr()
    assert "left out: " in seen.err and "no server" in seen.err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert {run["side"] for run in found["runs"]} == {"ray"}
    assert "| groups per second of 16 x 2,048 at least 1,000 times atropos |  | not measured |" in seen.out


def run(
    side: str, loop: str, rate: float, repetition: int = 0, p50: float = 1.0, mode: str = "full"
) -> dict[str, object]:
    where = {"tokens": 2048, "bytes": 425984, "mode": mode, "side": side, "loop": loop, "repetition": repetition}
    return {**where, "p50_us": p50, "p99_us": p50, "groups_per_s": rate, "groups": 9, "versions": {}}


def test_goals_are_judged_by_ratios_within_a_repetition() -> None:
    runs = [
        *(run("stash", "uvloop", rate, i, p50=150.0) for i, rate in enumerate((1000.0, 500.0, 1500.0))),
        *(run("queue", "", rate, i) for i, rate in enumerate((250.0, 100.0, 250.0))),
        *(run("ray", "", rate, i) for i, rate in enumerate((60.0, 25.0, 250.0))),
        run("stash", "uvloop", 1.0, p50=99.0, mode="paced"),
        run("stash", "asyncio", 1.0, p50=300.0, mode="paced"),
    ]
    cost = {"write_us": 1, "memcpy_us": 1, "write_gb_s": 1, "memcpy_gb_s": 1}
    costs = [
        {**cost, "tokens": 1, "bytes": 1000, "write_share_of_memcpy": 0.1, "read_us": 50.0, "read_to_small": 1.0},
        {**cost, "tokens": 2, "bytes": 4_000_000, "write_share_of_memcpy": 0.71, "read_us": 60.0, "read_to_small": 1.2},
        {**cost, "tokens": 3, "bytes": 8_000_000, "write_share_of_memcpy": 0.69, "read_us": 80.0, "read_to_small": 1.6},
    ]
    assert transport_report.ratios(runs) == {2048: {"queue": 5.0, "ray": pytest.approx(16.67, abs=0.01)}}
    found = {
        goal.text.split(" times ")[-1].split(" at 70")[0]: (goal.found, goal.holds)
        for goal in transport_report.goals(runs, costs)
    }
    assert found["p50 of a 16 x 2,048 group under 100 us, one group a millisecond"] == (99.0, True)
    assert found["p50 of a 16 x 2,048 group under 100 us, full speed"] == (150.0, False)
    assert found["queue"] == (5.0, True) and found["ray"][1] is True and found["atropos"] == (None, None)
    assert found["write"] == (0.69, False)
    assert [v for k, v in found.items() if k.startswith("read")] == [(1.6, False)]


def test_the_parts_of_a_hand_over_are_told_apart() -> None:
    times = [(at, at + 100_000, at + 40_000, at + 70_000, at + 90_000) for at in range(0, 10**9, 10**8)]
    found = transport.figures(times)
    assert [found[part] for part in transport_report.PARTS] == [40.0, 30.0, 20.0, 10.0]
    assert found["p50_us"] == 100.0 and "write_us" not in transport.figures([row[:2] for row in times])


def test_a_paced_run_waits_for_the_arrival_and_a_slow_one_ends() -> None:
    class Credit:
        taken = 0

        def acquire(self, timeout: float) -> bool:
            self.taken += 1
            return self.taken <= 30 and timeout > 0

    credit = Credit()
    job = {"groups": 30, "pace_s": 0.0, "seconds": 0.0}
    assert list(handover_group.turns(job, credit)) == list(range(handover_group.LEAST))
    assert credit.taken == handover_group.LEAST
    assert len(list(handover_group.turns(job | {"seconds": 60.0}))) == 30
    with pytest.raises(SystemExit, match="group 25: no earlier one arrived"):
        list(handover_group.turns(job | {"seconds": 60.0}, credit))


def test_every_member_of_the_group_has_arrays_of_its_own() -> None:
    columns = handover_group.arrays(10)
    assert {name: column[0].dtype for name, column in columns.items()} == handover_group.COLUMNS
    held = [array for column in columns.values() for array in column]
    assert len({array.ctypes.data for array in held}) == len(held) == 4 * handover_group.MEMBERS
    assert sum(array.nbytes for array in held) == handover_group.footprint(10)
