"""`asyncrl bench train`, `generate` and `step` run for real on a tiny model, each through the whole tool."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from bench_jobs import stand_in

from asyncrl.telemetry.machine import BFLOAT16, cpu_flags
from asyncrl_bench.app import main
from asyncrl_bench.job import PEERS, ModelJob, StepJob, write_prompts
from asyncrl_bench.processes import environment, run_json

PEER = """\
#!{python} -S
import json, sys
job = json.load(open(sys.argv[2]))
rows = json.load(open(job["prompts"]))
print(json.dumps({{"seconds": 4.0, "tokens": job["sequences"] * job["max_tokens"], "peak_bytes": 1 << 20,
    "versions": {{"script": sys.argv[1].rsplit("/", 1)[-1], "prompts": len(rows)}}}}))
"""


TRL = """\
#!{python} -S
import json, sys
job = json.load(open(sys.argv[2]))
print(json.dumps({{"seconds": 4.0, "step_seconds": [4.0], "steps": job["steps"], "sampled_tokens": 32,
    "generated_tokens": 32, "prompt_tokens": 120, "sequences": 4, "peak_bytes": 1 << 20, "shares": {{}},
    "versions": {{"script": sys.argv[1].rsplit("/", 1)[-1], "microbatch": job["microbatch"]}}}}))
"""


def places(folder: Path) -> list[str]:
    return ["--cache", str(folder / "cache"), "--out", str(folder / "out")]


@pytest.mark.slow
def test_training_through_the_whole_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 where it has instructions: without, the rate of its products alone takes minutes."""
    dtypes = ["float32", "bfloat16" if cpu_flags() & {*BFLOAT16} else "float32"]
    code = main(["train", "--quick", "--dtypes", ",".join(dict.fromkeys(dtypes)), *places(tmp_path)])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| float32 | 2 x 2 ragged | asyncrl |" in seen.out and f"of a step, {dtypes[-1]}: " in seen.out

    written = json.loads((tmp_path / "out" / "bench_train.json").read_text())
    assert [each["dtype"] for each in written["runs"]] == [*dict.fromkeys(dtypes)]
    ours = written["runs"][0]
    assert ours["packed_tokens"] == ours["needed_tokens"], "one microbatch: every prompt runs once"
    head, body, scored = ours["head_parameters"], ours["body_parameters"], ours["scored_tokens"]
    assert ours["needed_flop"] == 6 * (body * ours["packed_tokens"] + head * scored)
    assert 0 < ours["limit_share"] < 1 and ours["peak_gib"] > 0.05
    for parts in written["breakdown"].values():
        assert sum(parts.values()) == pytest.approx(1)
        assert min(parts[name] for name in ("products", "head", "attention", "elementwise", "optimizer", "rest")) > 0
    assert not list((tmp_path / "cache").glob("run-*")), "jobs and logs of a good run are removed"


@pytest.mark.slow
def test_turns_through_the_whole_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["turns", "--quick", *places(tmp_path)])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| float32 | 4 x 3 turns | asyncrl |" in seen.out and "x computed_again" in seen.out
    sides = json.loads((tmp_path / "out" / "bench_turns.json").read_text())["summary"][0]["sides"]
    # Two first prompts of 12 tokens. Then each of four episodes twice has a reply of 4 tokens and 3 tokens of a tool. The last
    # token of a prompt is the first input of a decode step.
    assert sides["asyncrl"]["prefill_tokens"] == 2 * 11 + 4 * 2 * 3
    assert sides["computed_again"]["prefill_tokens"] == 2 * 11 + 4 * (18 + 25)
    assert sides["asyncrl"]["tokens_per_s"] > 0


@pytest.mark.slow
def test_generation_through_the_whole_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's side is an interpreter that answers at once; asyncrl's side is a whole engine in its own process."""
    peer = stand_in(tmp_path / "python", PEER)
    code = main(["generate", "--quick", "--peer", "vllm", "--vllm-python", str(peer), *places(tmp_path)])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| float32 | 4 x 6 | asyncrl |" in seen.out and "x vllm" in seen.out
    written = json.loads((tmp_path / "out" / "bench_generate.json").read_text())
    ours, theirs = written["runs"]
    assert ours["tokens"] == theirs["tokens"] == 24 and ours["decode_steps"] == 6
    assert ours["prefill_tokens"] == 2 * 7, "each prompt once per group, its last token decodes"
    assert written["versions"]["vllm"] == {"script": "vllm_generate.py", "prompts": 4}


@pytest.mark.slow
def test_the_sweep_through_the_whole_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 64 positions of the tiny model take 32 KiB of keys and values, 2 x 16 take 9 KiB; there is room for 16 KiB."""
    room = ["--contexts", "16,64", "--cache-gib", str(16 / (1 << 20))]
    code = main(["generate", "--quick", "--sweep", *room, *places(tmp_path)])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| sequences | context 16 | context 64 |" in seen.out and seen.out.count("too large") >= 1
    written = json.loads((tmp_path / "out" / "bench_decode.json").read_text())
    cells = written["cells"]["float32"]
    assert [(each["sequences"], each["context"]) for each in cells] == [(1, 16), (1, 64), (2, 16), (2, 64)]
    assert "seconds" in cells[0] and "seconds" not in cells[3]
    assert cells[0]["times_limit"] > 1 and cells[0]["bytes"] > 0


def test_quick_runs_the_real_thing_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's side is an interpreter that answers at once; asyncrl's side is a whole Runtime in its own process."""
    peer = stand_in(tmp_path / "python", TRL)
    given = [*places(tmp_path), "--trl-python", str(peer)]
    code = main(["step", "--quick", "--peer", "trl", "--lengths", "fixed", "--steps", "3", *given, "train.eps=1e-7"])
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
