"""`asyncrl bench overlap` and `overlap-dry`: through the whole tool on short steps, and how their figures are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.telemetry.machine import describe_cpu
from asyncrl.telemetry.records import TraceEvent
from asyncrl_bench.app import main
from asyncrl_bench.child_overlap import busy, hand_over, stops
from asyncrl_bench.overlap import figures
from asyncrl_bench.overlap_dry import Pace


@pytest.mark.slow
def test_the_whole_tool_on_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real workers, lanes and steps of a tiny model: all three runs."""
    monkeypatch.setenv("WARM_WORKERS", "")
    assert main(["overlap", "--quick", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr().out
    assert (
        "| step to longer side |" in seen and "lane worker0: " in seen and "| a plain copy of the same bytes," in seen
    )
    written = json.loads((tmp_path / "bench_overlap.json").read_text())
    run = written["runs"][0]
    assert run["sides"]["generation"]["tokens"] > 0 and run["sides"]["training"]["tokens"] > 0
    worker, shared = run["worker"], run["shared"]
    assert list(worker["busy"]) == ["cpu", "worker0"] and list(shared["busy"]) == ["cpu"]
    assert "decode" not in worker["busy"]["cpu"] and "train" not in worker["busy"]["worker0"]
    assert {"train", "decode"} <= shared["busy"]["cpu"].keys()
    assert len(worker["hand_over"]["total"]) >= 1 and set(shared["hand_over"]) == {"bytes", "memcpy", "checkpoint"}
    for name, closures in worker["timeline"]["lanes"].items():
        ends = [end for _, _, end in closures]
        assert ends == sorted(ends) and 0 < ends[-1] <= worker["timeline"]["commits"][-1], name


def side(seconds: float, tokens: int) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": tokens}


def test_sides_are_counted_per_token_of_the_run_with_a_worker() -> None:
    run = {"staleness_mean": 1.0, "staleness_max": 2.0, "generated_tokens": 400}
    found = {
        "sides": {"generation": side(10.0, 100), "training": side(16.0, 200)},  # 0.1 and 0.08 s a token
        "worker": {**run, "seconds": 44.0, "sampled_tokens": 400, "busy": {"cpu": {"train": 17.0, "publish": 1.0}}},
        "shared": {**run, "seconds": 36.0, "sampled_tokens": 200},
    }
    got = figures(found, steps=2)
    assert (got["generation alone"], got["training alone"]) == pytest.approx((20.0, 16.0))
    assert got["step to longer side"] == pytest.approx(22 / 20)
    assert got["longer side to shorter"] == pytest.approx(20 / 16)
    assert got["sum of sides to longer"] == pytest.approx(36 / 20)
    assert got["shared to sum of sides"] == pytest.approx(36 / 36) and got["shared to worker"] == pytest.approx(36 / 22)
    assert got["step to busier lane"] == pytest.approx(22 / 18)


def spans(track: str, *given: tuple[str, float, float]) -> list[TraceEvent]:
    return [TraceEvent("X", name, track, start, end - start, None) for name, start, end in given]


def test_a_hand_over_is_cut_into_its_parts() -> None:
    worker = spans(
        "lane:worker0", ("engine/decode", 1.0, 2.0), ("engine/check", 2.1, 2.2), ("engine/decode", 2.3, 4.0),
        ("engine/bind", 4.1, 4.2), ("engine/decode", 4.5, 7.0), ("engine/prefill", 7.1, 7.5), ("engine/decode", 7.6, 8.0),
    )  # fmt: skip
    trainer = spans("lane:cpu", ("train/finish", 1.0, 2.0), ("train/begin", 2.0, 2.4), ("publish/write", 2.5, 3.5))
    published = spans("publish pump", ("publish", 2.1, 4.9))
    lanes = {"cpu": trainer, "worker0": worker}
    found = hand_over([*worker, *trainer, *published], lanes, 0.0, 10.0)
    ms = {name: pytest.approx([1e3 * value for value in values]) for name, values in {
        "usual_gap": [0.3], "decode": [1.7], "gap": [0.5], "bind": [0.1], "decode_after": [2.5],
        "token_gap": [2.0], "stop": [3.0], "to_write": [0.5], "write": [1.0], "to_bind": [0.6], "to_answer": [0.7], "total": [2.9],
    }.items()}  # fmt: skip
    assert found == ms
    assert busy(worker, 3.0, 7.2, steps=2) == pytest.approx({"decode": 1.75, "publish": 0.05, "prefill": 0.05})


def test_the_stop_of_decoding_is_the_longest_gap_between_two_tokens_around_a_move() -> None:
    def decode(start: float, end: float) -> tuple[str, float, float]:
        return ("engine/decode", start, end)

    own = spans(
        "lane:worker0", decode(0, 1), decode(1, 2), ("engine/prefill", 2, 9), decode(9, 10), ("engine/check", 10, 10.5),
        decode(10.5, 11.5),  # usual: 1, 1.5
        decode(12, 13), decode(13, 15),  # 1.5; and 2, whatever the reason; 1
        decode(15.2, 16), ("engine/bind", 16, 16.1), decode(16.1, 17), decode(17, 18.7),
        decode(18.7, 19.7), ("engine/bind", 20, 21), ("engine/prefill", 21, 30), decode(30, 31), decode(31, 32.5),
        ("engine/bind", 33, 34), decode(34, 35),  # its second step is not there any more
    )  # fmt: skip
    usual, longest = stops(own)
    assert usual == pytest.approx([1, 1.5, 1.5, 2, 1, 1]) and longest == pytest.approx([1.7, 1.5])


def test_the_dry_run_on_short_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap-dry", "--quick", "--out", str(tmp_path)]) == 0
    seen = capsys.readouterr().out
    assert "| two devices, step to the longer lane |" in seen
    written = json.loads((tmp_path / "bench_overlap_dry.json").read_text())
    assert seen.endswith(f"measured on {describe_cpu()}\n") and written["cpu"] == describe_cpu()
    assert written["command"] == "asyncrl bench overlap-dry --quick"
    for name, runs in written["runs"].items():
        for run in runs:  # a lane never does more than the clock allows, but for what runs at the edges of the window
            work = run["decode"] + run["train"] if name == "one device" else max(run["decode"], run["train"])
            assert 1.2 * run["step"] >= work > 0
    assert written["train_token_s"] > 0


def test_what_a_step_is_compared_with() -> None:
    pace = Pace(step=1.2, decode=1.0, train=0.5, tokens=10.0)
    assert pace.to_longer == pytest.approx(1.2) and pace.to_sum == pytest.approx(0.8)
