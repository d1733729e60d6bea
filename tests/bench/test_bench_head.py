"""`asyncrl bench head`: through the whole tool on a tiny head, its figures, and the memory that it is there to prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_jobs import stand_in
from torch import Tensor

from asyncrl_bench import child_head, head, machine
from asyncrl_bench.app import main
from asyncrl_bench.child_head import run_head
from asyncrl_bench.command import Place
from asyncrl_bench.head import HeadRun, summarise, table
from asyncrl_bench.job import LIGER, HeadJob

PEER = """\
#!{python} -S
import json, sys
job = json.load(open(sys.argv[2]))
times = {{"naive": {{"seconds": [2.0], "cpu_seconds": [2.0]}}, "trl": {{"seconds": [3.0], "cpu_seconds": [3.0]}}}}
print(json.dumps({{"head_bytes": 1 << 20, "times": times, "versions": {{"script": sys.argv[1].rsplit("/", 1)[-1]}}}}))
"""


def test_the_whole_tool_on_a_tiny_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL's side is an interpreter that answers at once; the others compute."""
    peer = stand_in(tmp_path / "python", PEER)
    places = ["--trl-python", str(peer), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    code = main(["head", "--quick", "--peer", "trl", *places])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    assert "| float32 | token-level (dapo) | asyncrl |" in seen.out and "| float32 | reinforce | trl |" in seen.out
    written = json.loads((tmp_path / "out" / "bench_head.json").read_text())
    assert [(run["measure"], run["what"]) for run in written["runs"]] == [
        ("memory", "asyncrl"), ("memory", "naive"), ("memory", "trl"), ("memory", "trl_logits"),
        ("time", "token"), ("time", "sequence"), ("time", "trl"),
    ]  # fmt: skip
    assert written["command"] == "asyncrl bench head --quick --peer trl"
    (entry,) = written["summary"]
    assert entry["head_bytes"]["trl"] == 1 << 20 and entry["times"]["trl"]["trl"]["ratio"] == 1.5
    assert min(entry["times"]["token"]["asyncrl"].values()) > 0
    assert written["versions"]["trl"] == {"script": "trl_head.py"}

    file = tmp_path / "out" / "bench_head.json"
    written["runs"] = [run for run in written["runs"] if run["what"] != "naive"]
    file.write_text(json.dumps(written))
    assert main(["head", "--quick", "--peer", "trl", "--resume", *places]) == 0
    assert capsys.readouterr().err.count("repetition 1") == 1, "one run was missing, and one was made"
    again = json.loads(file.read_text())
    assert len(again["runs"]) == 7 and again["runs"][-1]["what"] == "naive"
    assert main(["head", "--quick", "--resume", "--tokens", "128", *places]) == 1
    assert "has --tokens 64, this call 128" in capsys.readouterr().err


def result(**values: Any) -> dict[str, Any]:
    return {"versions": {}, **values}


def test_shares_are_of_full_logits_and_ratios_of_neighbours() -> None:
    times = {
        "naive": {"seconds": [10.0, 1.0, 2.0], "cpu_seconds": [1.0, 1.0, 1.0]},
        "asyncrl": {"seconds": [11.0, 1.2, 1.8], "cpu_seconds": [1.5, 1.5, 1.5]},
    }
    runs = [
        HeadRun("float32", 0, "memory", "naive", 0.1, result(head_bytes=800 << 20)),
        HeadRun("float32", 0, "memory", "asyncrl", 0.1, result(head_bytes=50 << 20)),
        HeadRun("float32", 0, "time", "token", 0.1, result(times=times)),
    ]
    (entry,) = summarise(runs)
    assert entry["memory_share"] == {"asyncrl": 1 / 16}
    found = entry["times"]["token"]["asyncrl"]
    assert found["ratio"] == pytest.approx(1.1) and found["cpu_ratio"] == 1.5 and found["naive_seconds"] == 2.0
    text = "\n".join(table([entry]))
    assert "| float32 | asyncrl | 50 | 1/16.0 |" in text and "| asyncrl | 1.80 | 2.00 | 1.10 | 1.50 |" in text


def test_the_defaults_are_the_published_size(capsys: pytest.CaptureFixture[str]) -> None:
    options = head.BENCH.parse([])
    assert (options.tokens, options.hidden, options.vocabulary) == (4096, 576, 49_152)
    assert options.dtypes == ("float32", "bfloat16") and options.peer == "trl"
    with pytest.raises(SystemExit, match="2"):
        head.BENCH.parse(["--sequences", "3"])
    assert "--sequences 3 does not divide 4096 tokens" in capsys.readouterr().err


def test_the_head_by_liger_is_a_side_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a stand-in for its kernels says that it was asked, and leaves the work to torch."""
    asked: list[int] = []

    class Kernel:
        def passes(self, temperature_S: Tensor) -> None:
            asked.append(len(temperature_S))

    wanted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(child_head, "choose_head_kernel", lambda *given: wanted.append(given) or Kernel())
    monkeypatch.setattr(machine.metadata, "version", lambda name: "1")
    job = HeadJob(
        tokens=16, hidden=4, vocabulary=50, dtype="float32", threads=1, measure="time", side="token", loss="dapo", steps=2,
        sequences=4, liger=True,
    )  # fmt: skip
    found = run_head(job)
    assert set(found["times"]) == {"naive", "asyncrl", LIGER} and set(found["versions"]) >= {"torch", "liger-kernel"}
    assert asked == [4, 16, 16] and wanted == [("liger", torch.device("cpu"), torch.float32, 50)]
    assert "head_bytes" in run_head(job.of(measure="memory", side=LIGER)) and asked[3:] == [4, 16]
    run_head(job.of(liger=False))
    assert len(asked) == 5
    times = {side: {"seconds": [1.0], "cpu_seconds": [1.0]} for side in ("naive", LIGER)}
    text = "\n".join(table(summarise([HeadRun("float32", 0, "time", "token", 0.1, result(times=times))])))
    assert "| asyncrl, liger | 1.00 |" in text


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        head.BENCH.parse(["--device", "cuda"])
    assert "--device cuda: the environment with TRL that is made here has no CUDA" in capsys.readouterr().err
    if not torch.cuda.is_available():
        places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
        assert main(["head", "--quick", "--device", "cuda", *places]) == 1
        assert "--device cuda: torch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_whole_tool_on_a_gpu(tmp_path: Path) -> None:
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert main(["head", "--quick", "--device", "cuda", *places]) == 0
    (entry,) = json.loads((tmp_path / "out" / "bench_head.json").read_text())["summary"]
    assert {"naive", "asyncrl"} <= set(entry["head_bytes"]) and min(entry["head_bytes"].values()) > 0


@pytest.mark.parametrize(("dtype", "size"), [pytest.param("float32", 4, marks=pytest.mark.slow), ("bfloat16", 2)])
def test_memory_of_the_published_size_is_below_an_eighth_of_full_logits(tmp_path: Path, dtype: Any, size: int) -> None:
    """All 4,096 x 49,152 logits exist, chunk by chunk; a narrow hidden state makes the products cheap. Full logits with
    autograd hold at least logits, their quotient by the temperature, log-softmax and softmax: four of that size."""
    job = HeadJob(
        tokens=4096, hidden=4, vocabulary=49_152, dtype=dtype, threads=1, measure="memory", side="asyncrl", loss="dapo",
        steps=1, sequences=32,
    )  # fmt: skip
    options = head.BENCH.parse(["--cache", str(tmp_path)])
    found = Place("head", options, "").own("head", job, "memory")
    one_chunk = 512 * 49_152 * size
    assert one_chunk < found["head_bytes"] < 4 * 4096 * 49_152 * size / 8
