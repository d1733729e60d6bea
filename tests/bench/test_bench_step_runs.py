"""The step benchmark run for real, on a tiny model: asyncrl's side through the whole tool, and TRL's script where TRL is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from bench_jobs import stand_in

from asyncrl_bench.app import main
from asyncrl_bench.job import PEERS, ModelJob, StepJob, write_prompts
from asyncrl_bench.processes import environment, run_json

PEER = """\
#!{python} -S
import json, sys
job = json.load(open(sys.argv[2]))
print(json.dumps({{"seconds": 4.0, "step_seconds": [4.0], "steps": job["steps"], "sampled_tokens": 32,
    "generated_tokens": 32, "prompt_tokens": 120, "sequences": 4, "peak_bytes": 1 << 20, "shares": {{}},
    "versions": {{"script": sys.argv[1].rsplit("/", 1)[-1], "microbatch": job["microbatch"]}}}}))
"""


def test_quick_runs_the_real_thing_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's side is an interpreter that answers at once; asyncrl's side is a whole Runtime in its own process."""
    peer = stand_in(tmp_path / "python", PEER)
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--trl-python", str(peer)]
    code = main(["step", "--quick", "--peer", "trl", "--lengths", "fixed", "--steps", "3", *places, "train.eps=1e-7"])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| float32 | fixed | asyncrl |" in seen.out and "x trl" in seen.out

    written = json.loads((tmp_path / "out" / "bench_step.json").read_text())
    ours, theirs = written["runs"]
    assert (ours["side"], theirs["side"]) == ("asyncrl", "trl")
    assert ours["steps"] == 3 and ours["sequences"] == 12 and ours["mean_length"] == 8, (
        "fixed: past the end of sequence"
    )
    assert ours["sampled_tokens"] == 96 and ours["generated_tokens"] > 0 and ours["tokens_per_s"] > 0
    assert ours["peak_gib"] > 0.05 and 0 < ours["limit_share"] < 1
    assert sum(ours["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert written["versions"]["trl"] == {"script": "trl_step.py", "microbatch": 4}
    assert "train.eps=1e-7" in written["command"]
    assert not list((tmp_path / "cache").glob("run-*")), "jobs and logs of a good run are removed"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_script_of_the_peer_measures_trl(tmp_path: Path) -> None:
    from asyncrl_bench.models import make_model

    make_model(ModelJob("tiny", str(tmp_path / "tiny")))
    job = StepJob(
        model=str(tmp_path / "tiny"), prompts=str(write_prompts(tmp_path / "prompts.jsonl", 16)), groups_per_step=2,
        group_size=2, max_tokens=4, max_prompt_tokens=80, dtype="float32", lengths="fixed", threads=1, warmup_steps=0,
        steps=1, microbatch=2,
    )  # fmt: skip
    answer = run_json(
        [sys.executable, PEERS / "trl_step.py", job.write(tmp_path / "job.json")],
        environment=environment(1, package=False),
        log=tmp_path / "log",
        timeout_s=120,
    )
    assert answer["sampled_tokens"] == 16 and answer["sequences"] == 4 and len(answer["step_seconds"]) == 1
    assert 160 < answer["prompt_tokens"] < 220 and answer["peak_bytes"] > 1 << 27
