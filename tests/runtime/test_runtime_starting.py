"""What a run shows before its first step."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime_helpers import MODEL, REAL, config_of

from asyncrl.main import run as run_program
from asyncrl.runtime.runtime import Runtime

LOUD = REAL | {"telemetry": {"live": "plain"}}


async def test_every_stage_before_the_first_step_is_shown_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.telemetry.live._SPARSE_S", 0.0)
    monkeypatch.setattr("asyncrl.runtime.opened._SHOWN_EVERY_S", 0.001)
    held_out = (f"data.eval={MODEL}:rows", "evaluate.every=3", "evaluate.samples=2", "evaluate.limit=2")
    async with Runtime(config_of(tmp_path, "train.max_steps=2", *held_out, base=LOUD)) as run:
        await run.run()
    said = capsys.readouterr().out
    before, _, after = said.partition("\nstep 1/2")
    assert after and "first step:" not in after.partition("\n")[2], "it ends with the first step"
    stages = [
        r"products in float32 on cpu \(model\.dtype\)",
        r"starting reward workers: \d",
        r"importing transformers",
        r"measuring prompts and memory",
        r"loading: about [\d.]+ GiB for the run",
        r"checking the model: its own eager pass",
        r"checking the model: path 1 of 7 \(fused\), 1 of 1 layers",
        r"evaluating: \d/4 completions, [\d,]+ tokens sampled",
        r"first step: \d/4 groups in training, \d+ completions scored, [\d,]+ tokens sampled",
    ]
    places = []
    for stage in stages:
        found = re.search(f"^{stage}$", before, re.MULTILINE)
        assert found is not None, (stage, before)
        places.append(found.start())
    assert places[:-2] == sorted(places[:-2]) and min(places[-2:]) > places[-3], before
    sampled = [int(number.replace(",", "")) for number in re.findall(r"^first step: .* scored, ([\d,]+)", before, re.M)]
    assert sampled == sorted(sampled) and sampled[-1] > sampled[0], "the counts move while nobody has a step yet"


def test_a_program_loads_its_modules_without_collections(
    tmp_path: Path, on_loading: Callable[[str], list[bool]]
) -> None:
    collecting = on_loading("asyncrl.runtime.runtime")
    with pytest.raises(ImportError, match="about to be loaded"):
        run_program(config_of(tmp_path))
    assert collecting == [False] and gc.isenabled()
