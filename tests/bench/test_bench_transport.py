"""`asyncrl bench transport`: every own side really hands groups over, up to the microbatch; the figures are not judged here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench_jobs import stand_in

from asyncrl.cli.app import main
from asyncrl.records.layout import Section
from asyncrl.runtime.door import serve
from asyncrl.transport.inventory import inventory
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl_bench import child_handover, transport, transport_report
from asyncrl_bench.job import PEERS, RING, BenchError
from asyncrl_bench.peers import handover_group
from asyncrl_bench.peers.side import cpu_seconds
from asyncrl_bench.peers.way import Way
from asyncrl_bench.processes import environment, run_json

PEER = """\
#!{python} -S
import json, os, sys
job = json.load(open(sys.argv[2]))
times = [(i * 10**9, i * 10**9 + 10**7, i * 10**9 + 10**8) for i in range(10)]
prompt = job["tokens"] // 16
packed = {{"groups": 10, "microbatches": 10, "sequences": 160}}
packed["packed_tokens"] = 10 * (prompt + 16 * (job["tokens"] - prompt - 1))
packed["scored_tokens"] = 10 * 16 * (job["tokens"] - prompt)
found = {{"times": times, "cpu_s": 0.5, "packed": packed}}
path = os.environ["PYTHONPATH"]
versions = {{"script": sys.argv[1].rsplit("/", 1)[-1], "side": job["side"], "from here": os.listdir(path)}}
print(json.dumps({{**found, "versions": versions}}))
"""
SIDES = ("memcpy", "local", "ring", "client", "queue", "line")
OWN = {(side, "") for side in SIDES if side != "ring"} | {("ring", "asyncio"), ("ring", "uvloop")}
PROMPT, TOKENS, GROUPS = 16, 256, 40  # of `--quick`


def packed(groups: int, tokens: int, prompt: int) -> dict[str, int]:
    """What the microbatches of so many groups of 16 hold, by hand."""
    completion = tokens - prompt
    found = {"groups": groups, "microbatches": groups, "sequences": groups * 16}
    found |= {"packed_tokens": groups * (prompt + 16 * (completion - 1)), "scored_tokens": groups * 16 * completion}
    return found


PUT = packed(GROUPS, TOKENS, PROMPT)


@pytest.mark.slow
def test_every_own_side_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--cache", str(tmp_path / "c"), "--out", str(tmp_path)]
    code = main(["bench", "transport", "--quick", "--costs", "1024", *places, "--sides", *SIDES])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert {(run["side"], run["loop"]) for run in found["runs"]} == OWN
    assert len(found["runs"]) == 2 * len(OWN)
    for run in found["runs"]:
        assert run["hand_us"] > 0 and run["groups_per_s"] > 0
        assert (run["groups"], run["bytes"]) == (36, 16 * TOKENS * 13)
        if run["side"] == "memcpy":
            assert "p50_us" not in run and "packed" not in run, "its bytes are in no microbatch"
            continue
        assert run["hand_us"] < run["p50_us"] <= run["p99_us"] and run["cpu_us"] >= 0
        assert run["packed"] == PUT, "every token that was pushed is in a microbatch, once"
        parts = [run.get(part) for part in transport_report.PARTS]
        assert all(part > 0 for part in parts) if run["side"] in ("ring", "client") else parts == [None] * 3
    assert [row["tokens"] for row in found["costs"]] == [1024]
    for row in found["costs"]:
        assert row["write_us"] > 0 and row["read_us"] > 0 and row["read_to_small"] > 0
        assert row["write_share_of_memcpy"] == pytest.approx(row["memcpy_us"] / row["write_us"])
    assert found["command"].startswith("asyncrl bench transport --quick --costs 1024 --sides")
    assert "| 16 x 256 | ring uvloop |" in seen.out
    table = (tmp_path / "bench_transport.md").read_text()
    assert table.startswith(f"`{found['command']}`") and table.splitlines()[2] in seen.out
    assert "| more microbatches of 16 x 2,048 per second than ray |  | not measured |" in seen.out
    assert (tmp_path / "bench_transport.png").exists() or "matplotlib is not installed" in seen.err


async def test_the_way_behind_the_ring_is_that_of_a_run_and_ends_every_lease() -> None:
    """In one process: what the microbatches held is counted by the trainer, which leases ended by the ring."""
    groups, tokens, prompt = 5, 64, handover_group.prompt_of(64)
    ended: list[int] = []
    ring = RecordRing(f"way-{os.getpid()}", child_handover.ring_settings(tokens, groups))
    way = Way(16, tokens, prompt, lambda: ended.append(ring.statistics().released))

    def push() -> list[int]:
        puts = []
        with Producer.attach(ring.name) as producer:
            for group in range(groups):
                puts.append(time.monotonic_ns())
                producer.put(child_handover.record(group, child_handover.sections(tokens)))
        return puts

    async with ring, way:
        way.handed_ns = dict.fromkeys(range(groups), 0)
        way.serve(serve, ring)
        puts = await asyncio.to_thread(push)
        await way.wait_cleared(groups)
        counts = ring.statistics()
    assert (counts.records, counts.released, counts.outstanding) == (groups, groups, 0)
    assert ended == [1, 2, 3, 4, 5], "the lease of a group has ended when it is cleared, and no other one's"
    found = way.result(puts)
    assert all(put < packed for put, _, packed in found["times"])
    assert found["packed"] == packed(groups, tokens, prompt)


async def test_what_was_handed_over_as_arrays_takes_the_same_way() -> None:
    data = handover_group.arrays(64)
    async with Way(16, 64, 4) as way:
        for group in range(3):
            await way.handed(group, data, handover_group.REWARDS)
            await way.wait_cleared(group + 1)
    times = way.result([0, 0, 0])["times"]
    assert [0 < hand < packed for _, hand, packed in times] == [True] * 3
    with pytest.raises(AssertionError, match="4 groups were put, 3 packed"):
        way.result([0, 0, 0, 0])


async def test_a_record_that_the_run_refuses_ends_the_measurement() -> None:
    ring = RecordRing(f"refused-{os.getpid()}", child_handover.ring_settings(64))
    sections = child_handover.sections(64)
    del sections[Section.REWARDS]

    def push() -> None:
        with Producer.attach(ring.name) as producer:
            producer.put(child_handover.record(0, sections))

    with pytest.raises(AssertionError, match="came without a reward"):
        async with ring, Way(16, 64, 4) as way:
            way.serve(serve, ring)
            await asyncio.to_thread(push)
            await way.wait_cleared(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packed": PUT | {"scored_tokens": PUT["scored_tokens"] - 1}}, "the microbatches held"),
        ({"packed": PUT | {"groups": GROUPS - 1}}, "the microbatches held"),
        ({"leases": {"taken": GROUPS, "ended": GROUPS - 1, "outstanding": 1}}, "all have to be taken and ended"),
    ],
)
def test_a_run_that_lost_a_token_or_a_lease_has_no_figures(change: dict[str, object], said: str) -> None:
    run = {"times": [(i, i + 1, i + 2) for i in range(GROUPS)], "cpu_s": 1.0, "packed": PUT}
    assert transport.figures(run, TOKENS)["packed"] == PUT
    with pytest.raises(BenchError, match=said):
        transport.figures(run | change, TOKENS)


def test_peers_run_in_their_own_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each peer's interpreter is one that answers at once; the scripts they would run are there."""
    python = stand_in(tmp_path / "python", PEER)
    monkeypatch.setattr(transport, "peer_python", lambda side, cache: python)
    sides = ["ray", "transferqueue", "atropos"]
    words = ["--tokens", "2048", "--repeats", "2", "--costs", "--sides", *sides, "--cache", str(tmp_path / "c")]
    assert main(["bench", "transport", *words, "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert found["versions"] == {
        side: {"script": f"handover_{side}.py", "side": side, "from here": ["asyncrl"]} for side in sides
    }, "of this interpreter's packages they see asyncrl alone"
    assert [run["side"] for run in found["runs"]] == 2 * sides + 2 * sides[::-1], "the order turns"
    assert {(run["hand_us"], run["p50_us"], run["cpu_us"]) for run in found["runs"]} == {(1e4, 1e5, 5e4)}
    for side in sides:
        assert (PEERS / f"handover_{side}.py").exists()


def test_what_the_peers_import_of_asyncrl_needs_none_of_its_heavy_packages() -> None:
    """Their environments have what `processes.WAY` lists; torch and transformers would be minutes of installing."""
    text = (
        "import sys, asyncrl_bench.peers.way; "
        "print(sorted({'torch', 'transformers', 'uvloop', 'rich', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment(1, package=True), check=True
    )
    assert done.stdout == "[]\n"


def test_a_peer_that_fails_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"ray": PEER, "atropos": "#!{python} -S\nraise SystemExit('no server')\n"}
    pythons = {side: stand_in(tmp_path / side, program) for side, program in programs.items()}
    monkeypatch.setattr(transport, "peer_python", lambda side, cache: pythons[side])
    sides = ["--sides", "atropos", "ray"]
    words = ["--tokens", "2048", "--repeats", "1", "--costs", *sides, "--cache", str(tmp_path / "c")]
    assert main(["bench", "transport", *words, "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr()
    assert "left out: " in seen.err and "no server" in seen.err
    found = json.loads((tmp_path / "bench_transport.json").read_text())
    assert {run["side"] for run in found["runs"]} == {"ray"}
    assert "| 16 x 2,048 in hand (p50) at least 1,000 times sooner than atropos |  | not measured |" in seen.out


def run(
    side: str, loop: str, rate: float, repetition: int = 0, hand: float = 1.0, mode: str = "full"
) -> dict[str, object]:
    where = {"tokens": 2048, "bytes": 425984, "mode": mode, "side": side, "loop": loop, "repetition": repetition}
    figures = {"hand_us": hand, "p50_us": 2 * hand, "p99_us": 2 * hand, "groups_per_s": rate, "cpu_us": 1e6 / rate}
    return {**where, **figures, "groups": 9, "versions": {}}


def test_goals_are_judged_by_ratios_within_a_repetition() -> None:
    runs = [
        *(run("ring", "uvloop", rate, i) for i, rate in enumerate((1000.0, 500.0, 1500.0))),
        *(run("queue", "", rate, i) for i, rate in enumerate((250.0, 100.0, 250.0))),
        *(run("ray", "", rate, i) for i, rate in enumerate((2000.0, 1000.0, 250.0))),
        run("ring", "uvloop", 1.0, hand=99.0, mode="paced"),
        run("ring", "asyncio", 1.0, hand=300.0, mode="paced"),
        run("queue", "", 1.0, hand=495.0, mode="paced"),
        run("ray", "", 1.0, hand=1400.0, mode="paced"),
    ]
    cost = {"write_us": 1, "memcpy_us": 1, "write_gb_s": 1, "memcpy_gb_s": 1}
    costs = [
        {**cost, "tokens": 1, "bytes": 1000, "write_share_of_memcpy": 0.1, "read_us": 50.0, "read_to_small": 1.0},
        {**cost, "tokens": 2, "bytes": 4_000_000, "write_share_of_memcpy": 0.71, "read_us": 60.0, "read_to_small": 1.2},
        {**cost, "tokens": 3, "bytes": 8_000_000, "write_share_of_memcpy": 0.69, "read_us": 80.0, "read_to_small": 1.6},
    ]
    assert transport_report.ratios(runs) == {2048: {"queue": 5.0, "ray": 0.5}}
    assert transport_report.ratios(runs, "cpu_us") == {2048: {"queue": pytest.approx(0.2), "ray": pytest.approx(2.0)}}
    found = {goal.text: (goal.found, goal.holds) for goal in transport_report.goals(runs, costs)}
    assert found["a 16 x 2,048 group in hand within 100 us (p50), one group a millisecond"] == (99.0, True)
    assert found["16 x 2,048 in hand (p50) at least 5 times sooner than queue"] == (5.0, True)
    assert found["16 x 2,048 in hand (p50) at least 15 times sooner than ray"] == (
        pytest.approx(14.14, abs=0.01),
        False,
    )
    assert found["more microbatches of 16 x 2,048 per second than queue"] == (5.0, True)
    assert found["more microbatches of 16 x 2,048 per second than ray"] == (0.5, False)
    assert found["more microbatches of 16 x 2,048 per second than atropos"] == (None, None)
    assert [v for k, v in found.items() if k.startswith("write")] == [(0.69, False)]
    assert [v for k, v in found.items() if k.startswith("read")] == [(1.6, False)]


def test_the_parts_of_a_hand_over_are_told_apart() -> None:
    times = [(at, at + 70_000, at + 100_000, at + 40_000) for at in range(0, 10**9, 10**8)]
    found = transport.figures({"times": times, "cpu_s": 0.1, "packed": packed(10, 256, 16)}, 256)
    assert [found[part] for part in transport_report.PARTS] == [40.0, 30.0, 30.0]
    assert (found["hand_us"], found["p50_us"], found["cpu_us"]) == (70.0, 100.0, 1e4)
    copied = transport.figures({"times": [row[:2] for row in times]}, 256)
    assert copied["hand_us"] == 70.0 and "p50_us" not in copied


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


def test_cpu_time_counts_the_children_that_ended() -> None:
    before = cpu_seconds()
    text = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", text], check=True)
    assert cpu_seconds() - before >= 0.25


KILLED = """\
import asyncio, os, signal, sys
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

async def main():
    async with RecordRing(f"{sys.argv[1]}{os.getpid()}", RingSettings(1 << 20, 8, 1 << 16)):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_children_that_are_killed_leave_nothing_in_shared_memory(tmp_path: Path) -> None:
    command, given = [sys.executable, "-c", KILLED, RING], environment(1, package=True)
    earlier = subprocess.Popen(command, env=given)  # of a call that was killed with its child
    assert earlier.wait() == -signal.SIGKILL
    left = {entry.name for entry in inventory() if entry.name.startswith(RING)}
    assert f"{RING}{earlier.pid}" in left
    with pytest.raises(BenchError, match="exit code -9"):
        run_json(command, environment=given, log=tmp_path / "log", timeout_s=60)
    assert not [entry.name for entry in inventory() if entry.name.startswith(RING) and entry.owner is None]


def test_a_bench_that_is_stopped_takes_its_children_and_their_shared_memory_with_it(tmp_path: Path) -> None:
    places = ["--cache", str(tmp_path / "c"), "--out", str(tmp_path)]
    words = ["bench", "transport", "--quick", "--costs", "--sides", "ring", "--repeats", "500", *places]
    with subprocess.Popen([sys.executable, "-m", "asyncrl.cli.app", *words], env=environment(1, package=True)) as bench:
        names: set[str] = set()
        while not names.intersection(entry.name for entry in inventory()):
            assert bench.poll() is None
            children = psutil.Process(bench.pid).children()
            names |= {f"{RING}{child.pid}" for child in children}
            time.sleep(0.02)  # there is no event that a foreign process could set
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) != 0
    assert names.isdisjoint(entry.name for entry in inventory())
    assert not any(child.is_running() for child in children)
