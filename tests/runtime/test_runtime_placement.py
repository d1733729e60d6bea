"""Where the engine runs: what is chosen, what it says, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import DRY, REAL, config_of

from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.runtime.memory import predicted
from asyncrl.runtime.placement import place

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = World(0, 1, 0, 1, "", 0, 0)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)


@pytest.mark.parametrize(
    ("overrides", "workers", "threads", "trainer", "line"),
    [
        ((), 0, 0, 8, "shared, on the trainer's cpu (auto: no second device)"),
        (("generation.placement=shared",), 0, 0, 8, "shared, on the trainer's cpu (as set)"),
        (("generation.placement=worker",), 1, 4, 4, "1 worker(s) on cpu, 4 thread(s) each, 4 for the trainer (as set)"),
        (
            ("generation.workers=3",),
            3,
            2,
            2,
            "3 worker(s) on cpu, 2 thread(s) each, 2 for the trainer (auto: workers or",
        ),
        (("generation.threads=6",), 1, 6, 2, "1 worker(s) on cpu, 6 thread(s) each, 2 for the trainer"),
        (("generation.threads=6", "threads=5"), 1, 6, 5, "1 worker(s) on cpu, 6 thread(s) each, 5 for the trainer"),
        (("generation.workers=20",), 20, 1, 1, "20 worker(s) on cpu, 1 thread(s) each, 1 for the trainer"),
    ],
)
def test_it_is_chosen_by_what_is_given(
    overrides: tuple[str, ...], workers: int, threads: int, trainer: int, line: str
) -> None:
    placement = place(load_config([], overrides), CPU, ONE)
    assert (placement.workers, placement.threads, placement.trainer_threads) == (workers, threads, trainer)
    assert placement.line.startswith(f"generation: {line}")


def test_ranks_of_one_machine_share_its_cores() -> None:
    placement = place(load_config([], ["generation.workers=1"]), CPU, replace(ONE, world_size=2, local_world_size=2))
    assert (placement.threads, placement.trainer_threads) == (2, 2)


def test_on_a_gpu_it_is_shared_and_a_worker_is_refused() -> None:
    assert "a worker on a GPU of its own is still to come" in place(load_config([]), GPU, ONE).line
    with pytest.raises(ConfigError, match=r"generation\.placement is worker and the trainer is on cuda:0.*use shared"):
        place(load_config([], ["generation.placement=worker"]), GPU, ONE)


@pytest.mark.parametrize(
    ("base", "overrides", "words"),
    [
        (DRY, ("generation.placement=worker",), "generation.placement is worker but engine.kind is dry_run"),
        (REAL, ("generation.placement=shared", "generation.workers=2"), "generation.workers is 2 but .* is shared"),
        (REAL, ("rollout.weight_sync_interval=2",), "generation.placement=worker"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, base: dict[str, Any], overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(config_of(tmp_path, *overrides, base=base))


def test_memory_counts_the_board_and_every_worker(tmp_path: Path) -> None:
    config = resolve(config_of(tmp_path, "generation.workers=2"))
    shared, apart = predicted(config), predicted(config, placement=place(config, CPU, ONE))
    assert apart["weight_board"] == 2 * shared["masters"]  # float32
    assert apart["workers"] > 2 * shared["packed_weights"] and apart["kv_cache"] == shared["kv_cache"]
