"""`asyncrl bench weights`: through the whole tool with the embedded engine, with vLLM where it is, and how its figures are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.generation.vllm.versions import installed_version
from asyncrl.telemetry.records import TraceEvent
from asyncrl_bench.app import main
from asyncrl_bench.child_weights import STEPS, seen
from asyncrl_bench.weights import report, summarise

TOOL = ("weights", "--quick", "--max-tokens", "320")


def ran(tmp_path: Path, *more: str) -> dict[str, Any]:
    assert main([*TOOL, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path), *more]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "bench_weights.json").read_text())
    return found


@pytest.mark.slow
def test_the_whole_tool_on_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real worker, board and proofs, of a tiny model."""
    monkeypatch.setenv("WARM_WORKERS", "")
    written = ran(tmp_path)
    assert "| embedded |" in capsys.readouterr().out
    run = written["runs"][0]["embedded"]
    assert len(run["pause"]) == len(run["total"]) == 2 and min(run["total"]) > max(run["bind"]) > 0
    assert len(run["save"]) == len(run["load"]) == 3 and run["bytes"] > 0


def wide(folder: Path) -> Path:
    """A model with heads that vLLM takes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncrl_bench.job import ModelJob
    from asyncrl_bench.models import make_model

    make_model(ModelJob("tiny", str(folder)))  # its tokenizer and template
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(
        folder, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed: tools/vllm_check runs these")
def test_vllm_in_a_worker_and_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARM_WORKERS", "")
    written = ran(tmp_path, "--model", str(wide(tmp_path / "wide")), "--sides", "vllm,async_llm")
    worker, alone = (written["runs"][0][side] for side in ("vllm", "async_llm"))
    assert len(worker["pause"]) == len(alone["pause"]) == 2
    assert min(alone["total"]) > max(alone["bind"]) > 0


def spans(*given: tuple[str, float, float]) -> list[TraceEvent]:
    return [TraceEvent("X", name, "lane:worker0", start, end - start, None) for name, start, end in given]


def test_what_requests_see_is_the_longest_time_between_two_steps_around_the_move() -> None:
    """A look at the outputs of vLLM is in steps of everything that runs."""
    lane = spans(
        ("engine/decode", 0, 1), ("engine/decode", 1, 2), ("engine/check", 2, 2.1), ("engine/decode", 2.1, 3),
        ("engine/decode", 3.2, 4), ("engine/decode", 4, 5), ("engine/bind", 5, 5.5),
        ("engine/outputs", 5.6, 6.6), ("engine/outputs", 6.6, 7.6), ("engine/decode", 7.6, 8.6),
    )  # fmt: skip
    found = seen(lane, STEPS["vllm"])
    assert found["step"] == pytest.approx(1000) and found["stop"] == pytest.approx(1600)
    assert found["pause"] == pytest.approx(600)
    assert found["bind"] == pytest.approx(500) and found["between"] == pytest.approx(600)
    assert seen(lane[:4], STEPS["vllm"]) == {}
    assert seen(lane, STEPS["embedded"]) == {}, "no second step after the move"


def test_figures_are_medians_of_all_changes() -> None:
    side = {
        "step": [50.0, 52.0],
        "pause": [3.0, 9.0],
        "between": [3.0, 3.4],
        "bind": [1.0, 1.0],
        "total": [400.0, 500.0],
        "bytes": 1 << 20,
    }
    runs = [{"vllm": side, "load": (0.5, 0, 0)}, {"vllm": side | {"pause": [2.0, 1.0]}, "load": (0.6, 0, 0)}]
    found = summarise(runs, "vllm")
    assert (found["pause"], found["between"], found["total"]) == (2.5, pytest.approx(3.2), 450.0)
    lines = "\n".join(report({"vllm": found}, runs))
    assert "0.5 0.6" in lines
