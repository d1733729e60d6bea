"""The step benchmark's parts: options, jobs, figures, child processes. The whole tool is in test_bench_parts_runs.py."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from asyncrl_bench import figures, step
from asyncrl_bench.app import main
from asyncrl_bench.figures import Run
from asyncrl_bench.job import PEERS, REWARD, REWARD_FUNCTION, BenchError, StepJob, cache_directory, write_prompts
from asyncrl_bench.processes import environment, run_json
from asyncrl_bench.step import SHEET, needed_flop, notes, summarise

RATES = {"gemm_flops": 1e6, "decoder_parameters": 100, "head_parameters": 40, "prompt_tokens_max": 12}
parse = step.BENCH.parse


def result(sampled: int = 1000, generated: int = 1000, seconds: float = 10.0, **more: object) -> dict[str, object]:
    return {
        "seconds": seconds, "step_seconds": [seconds / 2] * 2, "steps": 2, "sampled_tokens": sampled,
        "generated_tokens": generated, "prompt_tokens": 200, "sequences": 50, "peak_bytes": 1 << 30, "shares": {},
        "versions": {"torch": "2"}, **more,
    }  # fmt: skip


def run(side: str, repetition: int, seconds: float, gemm: float = 1e6, **more: object) -> Run:
    found = result(seconds=seconds, **more)  # type: ignore[arg-type]
    known = {"seconds": seconds, "gemm_flops": gemm, "peak_bytes": found["peak_bytes"]}
    known |= step.judge(side, job(), RATES, found)
    return Run(side=side, dtype="float32", case="natural", repetition=repetition, **known)  # type: ignore[arg-type]


def table(runs: list[Run]) -> str:
    entries = summarise(runs)
    return "\n".join([*figures.table(entries, SHEET), *notes(entries)])


def job(**changes: object) -> StepJob:
    plain = StepJob(
        model="m", prompts="p", groups_per_step=2, group_size=2, max_tokens=8, max_prompt_tokens=80, dtype="float32",
        lengths="fixed", threads=1, warmup_steps=1, steps=2, overrides=("train.eps=1e-7",),
    )  # fmt: skip
    return plain.of(**changes)


# -- options and jobs --------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_published_job_and_quick_is_small() -> None:
    full, quick = parse([]), parse(["--quick"])
    assert (full.model, full.prompts, full.group_size, full.max_tokens, full.threads) == ("smollm2", 8, 8, 128, 2)
    assert full.dtypes == ("float32", "bfloat16") and full.lengths == ("natural", "fixed") and full.peer == "trl"
    assert (quick.model, quick.prompts, quick.group_size, quick.max_tokens, quick.peer) == ("tiny", 2, 2, 8, "none")
    assert parse(["--quick", "--max-tokens", "9"]).max_tokens == 9, "an option that is given wins over --quick"
    assert parse(["engine.prefill_tokens=64", "--quick", "train.eps=1e-7"]).overrides == [
        "engine.prefill_tokens=64",
        "train.eps=1e-7",
    ]


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "there is no 'speed'; there is: step" in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_nothing_beside_the_peers_shadows_a_package() -> None:
    handover = {f"handover_{side}" for side in ("group", "ray", "transferqueue", "atropos")}
    heads = {"trl_head", "naive_head"}
    alone = {"trl_step", "trl_agents", "vllm_generate", "vllm_weights", "letter_reward", "side", "waiting_agent"}
    assert {path.stem for path in PEERS.glob("*.py")} == {"way", *alone, *heads, *handover}
    for path in {*PEERS.glob("*.py")} - {PEERS / "way.py"}:  # the way of a run, to which the package is linked
        assert not re.search(r"^\s*(import|from) asyncrl", path.read_text(), re.MULTILINE), path


def test_prompts_are_the_same_for_the_same_seed_and_nearly_equal_in_length(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.jsonl", seed=3).read_text()
    assert first == write_prompts(tmp_path / "b.jsonl", seed=3).read_text()
    assert first != write_prompts(tmp_path / "c.jsonl", seed=4).read_text()
    rows = write_prompts(tmp_path / "d.jsonl", 20, seed=3, distinct=8).read_text().splitlines()
    assert len(rows) == 20 and rows[:8] == first.splitlines()[:8] == rows[8:16] and rows[16:] == rows[:4]
    texts = [json.loads(line)["prompt"][0]["content"] for line in first.splitlines()]
    assert len(texts) == 512 and max(map(len, texts)) - min(map(len, texts)) < 40


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_reward_scores_strings_and_messages() -> None:
    spec = importlib.util.spec_from_file_location("letter_reward", REWARD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, REWARD_FUNCTION)
    assert score(["aeio", "xxax", ""], prompts=[]) == [1.0, 0.25, 0.0]
    assert score([[{"role": "assistant", "content": "ab"}]]) == [0.5]


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(None) == tmp_path / "asyncrl" / "bench"
    assert cache_directory(str(tmp_path / "x")) == tmp_path / "x"


def test_rate_and_share_of_the_limit_by_hand() -> None:
    """Prompts count once a group and without the head; tokens where they were both generated and trained."""
    assert (
        needed_flop(RATES, 30, 5) == 30 * 8 * 140 + 5 * 8 * 100
    )  # 8 x (100 + 40) a sampled token, 8 x 100 one of a prompt
    rates = [run("asyncrl", 0, 10.0, generated=generated).figures()["tokens_per_s"] for generated in (800, 1300)]
    assert rates == [80, 100]
    whole = run("asyncrl", 0, 10.0).figures()["limit_share"]
    assert whole == pytest.approx((1000 * 8 * 140 + 200 * 8 * 100) / 1e6 / 10)
    half = run("asyncrl", 0, 10.0, generated=500).figures()["limit_share"]
    assert half == pytest.approx(whole / 2), "prompts are scaled with the tokens that count"


def test_memory_is_compared_and_shares_of_time_are_medians() -> None:
    ours = [run("asyncrl", i, s, shares={"busy/train": 0.5 + i / 10}) for i, s in enumerate((10.0, 20.0, 5.0))]
    theirs = [run("trl", i, s, peak_bytes=2 << 30) for i, s in enumerate((40.0, 40.0, 50.0))]
    (entry,) = summarise([*ours, *theirs])
    assert entry["memory_ratio_to_trl"] == 0.5
    assert entry["shares"] == {"busy/train": pytest.approx(0.6)}


def test_a_repetition_without_its_pair_gives_no_ratio() -> None:
    runs = [run("asyncrl", 0, 10.0), run("trl", 1, 40.0)]
    assert "ratio_to_trl" not in summarise(runs)[0]
    assert "| float32 | natural | asyncrl | 100.0 |  | 5.0 |" in table(runs)


def test_the_table_shows_ratio_limit_memory_and_where_the_time_goes() -> None:
    runs = [run("asyncrl", 0, 10.0, shares={"busy/train": 0.61, "idle/group": 0.0}), run("trl", 0, 40.0)]
    text = table(runs)
    assert "NOTE" not in text
    assert "| float32 | natural | asyncrl | 100.0 | 4.00x trl | 5.0 | 20.0 | 12.8% | 1.00 |" in text
    assert "| float32 | natural | trl | 25.0 |  | 20.0 | 20.0 | 3.2% | 1.00 |" in text
    assert "asyncrl's time, float32, natural: busy/train 61.0%" in text and "idle/group" not in text
    text = table([run("asyncrl", 0, 10.0, generated=700)])
    assert "NOTE, float32, natural: asyncrl's window was not in a steady state: it generated 0.70" in text


# -- child processes ---------------------------------------------------------------------------------------------------


def child(code: str, tmp_path: Path, timeout_s: float | None = 30.0) -> dict[str, object]:
    command = [sys.executable, "-S", "-c", code]
    return run_json(command, environment=environment(1, package=False), log=tmp_path / "log", timeout_s=timeout_s)


def test_the_last_line_of_a_child_is_its_answer_and_a_failure_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print('noise'); print('{\"threads\": %s}' % os.environ['OMP_NUM_THREADS'])"
    assert child(code, tmp_path) == {"threads": 1}
    with pytest.raises(BenchError, match=r"exit code 3; see .*log(?s:.*)out of luck"):
        child("import sys; print('out of luck', file=sys.stderr); print('{}'); sys.exit(3)", tmp_path)
    with pytest.raises(BenchError, match=r"exit code 0(?s:.*)no json here"):
        child("print('no json here')", tmp_path)
    with pytest.raises(BenchError, match="took longer than 0 s"):
        child("import sys; sys.stdin.read(); import signal; signal.pause()", tmp_path, timeout_s=0.2)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")  # only our own side can import the package
    root = Path(__file__).resolve().parents[2]
    assert environment(2, package=True)["PYTHONPATH"] == f"{root}:{root}/tools/bench:/elsewhere"
    assert "PYTHONPATH" not in environment(2, package=False)
