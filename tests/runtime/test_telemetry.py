"""What a run shows before its first step and leaves behind: metrics by their names, a trace, a report, and where the time went."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from runtime_helpers import MODEL, REAL, REWARDS, config_of, metrics_of

from asyncrl.main import run as run_program
from asyncrl.runtime.runtime import RunSummary, Runtime

LOUD = REAL | {"telemetry": {"live": "plain"}}


async def test_every_stage_before_the_first_step_is_shown_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.telemetry.live._STATUS_EVERY_S", 0.0)
    monkeypatch.setattr("asyncrl.runtime.opened._SHOWN_EVERY_S", 0.001)
    held_out = (f"data.eval={MODEL}:rows", "evaluate.every=3", "evaluate.samples=2", "evaluate.limit=2")
    async with Runtime(config_of(tmp_path, "train.max_steps=2", *held_out, base=LOUD)) as run:
        await run.run()
    said = capsys.readouterr().out
    before, _, after = said.partition("\nstep 1/2")
    assert after and "first step:" not in after.partition("\n")[2], "it ends with the first step"
    stages = [
        r"matrix products in float32 on cpu \(model\.dtype\)",
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


# CONVENTIONS: what users of the neighbouring tools look for under these names.
NAMES = [
    "reward/mean", "reward/std", "reward/share/mean", "kl", "mismatch_kl/mean", "mismatch_kl/by_age/0", "entropy",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "frac_reward_zero_std",
    "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/trained_mean_length", "completions/clipped_ratio", "staleness/mean", "staleness/max",
    "staleness/dropped", "perf/tokens_per_s", "perf/peak_memory_gib", "time/step",
    "time/wait_for_group", "time/reward", "time/logprobs", "time/train", "time/weight_sync", "queue/slots/depth",
    "queue/stash/depth", "queue/groups/depth", "queue/scoring/depth", "queue/publications/depth", "loop/lag_ms_p99",
    "optim/grad_norm", "optim/lr", "idle/unexplained", "loss", "train/tokens",
    "train/sequences", "train/groups", "data/epoch", "data/delivered", "data/cut", "data/skipped",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSummary]:
    """An async run with everything that has a metric of its own."""
    folder = tmp_path_factory.mktemp("telemetry")
    tree: dict[str, Any] = REAL | {
        "algorithm": {"kl": {"coef": 0.01}},
        "evaluate": {"every": 10},
        "checkpoint": {"every": 10},
        "rollout": {"group_size": 8, "groups_per_step": 8, "max_tokens": 16},
    }
    tree["data"] = REAL["data"] | {"eval": f"{MODEL}:held_out"}

    async def program() -> RunSummary:
        async with Runtime(config_of(folder, "train.max_steps=20", base=tree)) as runtime:
            return await runtime.run()

    return folder / "runs/run", asyncio.run(program())


def test_every_name_of_the_conventions_is_there(finished: tuple[Path, RunSummary]) -> None:
    lines = metrics_of(finished[0])
    everywhere = set.union(*(set(line) for line in lines))
    assert sorted(set(NAMES) - everywhere) == []
    assert {"time/checkpoint", "eval/single_turn/avg@1", "eval/single_turn/pass@1"} <= everywhere
    assert any(name.startswith("idle/") and name != "idle/unexplained" for name in everywhere)
    assert any(name.startswith("mismatch_kl/by_age/") and name != "mismatch_kl/by_age/0" for name in everywhere)
    for line in lines[1:]:  # those that every step has
        steady = [name for name in NAMES if not name.startswith(("queue/", "mismatch_kl/by_age"))]
        assert sorted(set(steady) - set(line)) == [], line["step"]


def test_one_line_a_version_in_order(finished: tuple[Path, RunSummary]) -> None:
    run, summary = finished
    assert [line["step"] for line in metrics_of(run)] == list(range(21))
    assert [version for version, _ in summary.history] == list(range(21))
    times = [line["time"] for line in metrics_of(run)]
    assert times == sorted(times)


def test_generation_goes_on_while_training(finished: tuple[Path, RunSummary]) -> None:
    """Real staleness, within the bound, and sequences that were sampled by two versions."""
    steps = metrics_of(finished[0])[1:]
    assert max(line["staleness/max"] for line in steps) in (1, 2)
    assert max(line["staleness/spanning_token_share"] for line in steps) > 0


def test_the_wall_time_is_explained(finished: tuple[Path, RunSummary]) -> None:
    """Idle by recorded causes: at most 2 % of the run without one; the shares sum to 1."""
    run, summary = finished
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert summary.shares["idle/unexplained"] <= 0.02
    for line in metrics_of(run)[1:]:
        shares = [value for name, value in line.items() if name.startswith(("busy/", "idle/"))]
        assert sum(shares) == pytest.approx(1)
        assert line["perf/peak_memory_gib"] > 0.05


def test_the_trace_opens(finished: tuple[Path, RunSummary]) -> None:
    trace = json.loads((finished[0] / "trace.json").read_text())
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = {event["name"] for event in spans}
    assert {"rollout", "score", "publish", "checkpoint", "evaluate", "microbatch", "finish"} <= names
    assert any(name.startswith("engine/decode") for name in names)
    assert any(name.startswith("wait: ") for name in names)


def test_the_report_is_one_file_with_the_run_in_it(finished: tuple[Path, RunSummary]) -> None:
    text = (finished[0] / "report.html").read_text()
    assert "reward/mean" in text and "completed" in text
    assert 'src="http' not in text and 'href="http' not in text.replace("https://ui.perfetto.dev", "")


def _decoded(runtime: Runtime) -> int:
    return sum(event.phase == "X" and event.name == "engine/decode" for event in runtime.recorder.events())


def _rewards_at_work(runtime: Runtime) -> bool:
    return any(wait.on.startswith("reward worker ") for wait in runtime.recorder.active_waits())


async def test_a_reward_that_sleeps_does_not_hold_up_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism: rewards are at work in their workers until sixteen more decode steps were made. How much these are slowed
    down is measured by `tools/measure reward_block`."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    tree = REAL | {"reward": {"functions": [f"{REWARDS}:gated"], "workers": 2}, "engine": {"max_sequences": 4}}
    decoded: list[int] = []

    async def watch(runtime: Runtime) -> None:
        while not _rewards_at_work(runtime):  # noqa: ASYNC110  told to nobody
            await asyncio.sleep(0.01)
        decoded.append(_decoded(runtime))
        while _decoded(runtime) < decoded[0] + 16:  # noqa: ASYNC110  told to nobody
            await asyncio.sleep(0.01)
        gate.touch()

    async with Runtime(config_of(tmp_path, base=tree)) as runtime:
        runtime.start("watch", watch, runtime)
        with anyio.fail_after(120):
            assert (await runtime.run()).version == 3
    assert decoded and gate.exists()
