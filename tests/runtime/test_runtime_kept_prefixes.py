"""Keys and values between the turns of an agent, in whole runs: reused, freed, and no part of what a sync run computes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from runtime_helpers import CLOCKED, REAL, config_of, metrics_of, rollouts_of, train
from transport_helpers import until

from asyncrl import Runtime
from asyncrl.config.resolve import staleness_bound
from asyncrl.telemetry.sinks import read_jsonl

pytestmark = pytest.mark.usefixtures("warm_workers")
ROOMY = ("data.max_prompt_tokens=30", "rollout.ignore_eos=true")


async def patient(task: dict[str, Any], policy: Any) -> float:
    """Three turns. Tools take any time."""
    ids, text = policy.encode(task["prompt"]), ""
    for _ in range(3):
        reply = await policy.complete(ids)
        await asyncio.sleep(random.uniform(0, 0.01))
        ids, text = [*reply.ids, *policy.encode("=")], text + reply.text
    return float(text.count(task["prompt"][0])) / 24


@pytest.mark.parametrize("placement", ["shared", "worker"])
async def test_a_run_reuses_what_was_cached_and_has_no_row_left_at_the_end(tmp_path: Path, placement: str) -> None:
    config = config_of(
        tmp_path, *ROOMY, "rollout.max_tokens=6", f"generation.placement={placement}", "train.max_steps=4", base=REAL
    )
    async with Runtime(config, environment=patient) as runtime:
        summary = await runtime.run()
        engine: Any = runtime.built.ports.engine
        await until(lambda: not engine.statistics()["kept_rows"] and not engine.statistics()["running"])
    assert runtime.directory is not None and summary.books.failed == 0
    lines = read_jsonl(runtime.directory.path / "metrics.jsonl")
    found = [line for line in lines if line.get("engine/kept_prefix_hits")]
    assert sum(line["engine/kept_prefix_hits"] for line in found) > 4 * 4 * 2
    assert max(line["engine/kept_prefix_age_max"] for line in found) <= staleness_bound(config)
    # Each hit has at least a reply but its last token.
    assert all(line["engine/kept_prefix_tokens_reused"] >= 6 * line["engine/kept_prefix_hits"] for line in found)


async def test_a_sync_run_does_not_depend_on_how_long_tools_take(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        own = f"run.name={name}", *ROOMY, "rollout.max_tokens=6", "preset=sync"
        await train(tmp_path, *own, environment=patient)
        lines = metrics_of(tmp_path / "runs" / name)
        assert not any(key.startswith("engine/kept_prefix") for line in lines for key in line)
        runs.append((lines, rollouts_of(tmp_path / "runs" / name)))
    (first, rollouts), (second, others) = runs
    assert [row["completion"] for row in rollouts] == [row["completion"] for row in others]
    for one, two in zip(first, second, strict=True):
        for key in one.keys() & two.keys():
            if not key.startswith((*CLOCKED, "engine/")):
                assert one[key] == two[key], key
