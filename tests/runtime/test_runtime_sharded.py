"""`distributed.sharding: fsdp` in whole runs: one rank, two under torchrun, resumed, stopped, and with a rank that is killed."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    REAL,
    Process,
    config_of,
    equal_weights,
    lines_at_least,
    metrics_of,
    rollouts_of,
    start_two,
    unclocked,
    weights_of,
    write_yaml,
)

from asyncrl import Runtime
from asyncrl.checkpoint.manifest import compare
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.errors import CheckpointError, ConfigError

DUMP = str(Path(__file__).with_name("runtime_rank.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
FAST = {"telemetry": {"live": "off", "trace": False, "report": False}}
SHARDED: dict[str, Any] = REAL | {
    "distributed": {"sharding": "fsdp"},
    "rollout": REAL["rollout"] | {"groups_per_step": 6},
    "train": REAL["train"] | {"max_steps": 4},
    "checkpoint": {"every": 1, "keep": 0},
}


async def run(folder: Path, *overrides: str, base: dict[str, Any]) -> list[dict[str, Any]]:
    async with Runtime(config_of(folder, *overrides, base=base)) as runtime:
        await runtime.run()
    return metrics_of(folder / "runs/run")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "fsdp", tmp_path / "replicate"
    for folder in found:
        folder.mkdir()
    return found


async def test_a_sync_run_on_one_shard_is_the_replicated_run(folders: tuple[Path, Path]) -> None:
    """float64: the same completions, the same metrics, the same weights to 1e-10; and each goes on from the other's state."""
    tree = SHARDED | FAST | {"preset": "sync", "algorithm": {"kl": {"coef": 0.1}, "updates_per_batch": 2}}
    tree["model"] = tree["model"] | {"dtype": "float64"}
    one, other = folders
    for folder, sharding in ((one, "fsdp"), (other, "replicate")):
        await run(folder, f"distributed.sharding={sharding}", "train.max_steps=2", base=tree)
    await run(one, "resume=true", "distributed.sharding=replicate", base=tree)
    lines = await run(other, "resume=true", "distributed.sharding=fsdp", base=tree)
    for mine, theirs in zip(unclocked(metrics_of(one / "runs/run")), unclocked(lines), strict=True):
        assert {name: value for name, value in mine.items() if isinstance(value, float)} == pytest.approx(
            {name: value for name, value in theirs.items() if isinstance(value, float)}, rel=1e-6, abs=1e-8
        )
    assert [row["completion"] for row in rollouts_of(one / "runs/run")] == [
        row["completion"] for row in rollouts_of(other / "runs/run")
    ]
    for version in (4, 8):
        mine, theirs = (weights_of(folder / "runs/run", version) for folder in (one, other))
        for name, values in mine.items():
            torch.testing.assert_close(values, theirs[name], rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Process]:
    """Four asynchronous steps by two ranks, then two more after a resume, which generates in a worker beside each rank."""
    folder = tmp_path_factory.mktemp("two")
    path = str(write_yaml(folder, SHARDED | FAST))
    # The first run has rounds, and the second one keeps weights and gradients.
    first = Process(folder, path, RANK_WEIGHTS=str(folder), ROUNDS="1", program=(*TORCHRUN, DUMP))
    assert first.wait(300) == 0, first.output
    more = ("resume=true", "train.max_steps=6", "generation.placement=worker", "generation.threads=1")
    second = Process(folder, path, *more, RANK_WEIGHTS=str(folder), WARM_WORKERS="", program=(*TORCHRUN, DUMP))
    assert second.wait(300) == 0, second.output
    return folder, second


def test_two_ranks_finish_and_resume_with_the_same_weights(two_ranks: tuple[Path, Process]) -> None:
    folder, _ = two_ranks
    one, other = (torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one["version"] == other["version"] == 6
    assert equal_weights(one["weights"], other["weights"])
    assert equal_weights(weights_of(folder / "runs/run", 6), one["named"])
    assert [len(mine) + len(theirs) for mine, theirs in zip(one["groups"], other["groups"], strict=True)] == [6, 6]
    lines = metrics_of(folder / "runs/run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["train/sequences"] for line in lines} == {24}
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    logs = (folder / "runs/run/workers").rglob("*.log")
    assert sorted(str(path.relative_to(folder / "runs/run/workers")) for path in logs) == [
        "rank_0/worker-0.log",
        "rank_1/worker-0.log",
    ]


def test_the_checkpoint_of_two_ranks_is_a_model_and_a_whole_state(two_ranks: tuple[Path, Process]) -> None:
    from transformers import AutoModelForCausalLM

    from asyncrl.checkpoint.store import CheckpointStore

    folder, _ = two_ranks
    checkpoints = folder / "runs/run/checkpoints"
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "step_6", dtype=torch.float32)
    found = CheckpointStore(checkpoints).load(6)
    assert (found.path / "state/shard_1.pt").exists() and not list((checkpoints / "shards").iterdir())
    state = found.trainer()
    loaded = dict(model.named_parameters())
    assert set(state["masters"]) == set(loaded) == set(state["optimizer"])
    for name, parameter in loaded.items():
        assert torch.equal(state["masters"][name], parameter.data)
        assert state["optimizer"][name]["exp_avg"].shape == parameter.shape
        assert float(state["optimizer"][name]["step"]) == 6


def test_a_bit_of_another_ranks_part_is_noticed(two_ranks: tuple[Path, Process]) -> None:
    """The last checkpoint that the first rank made of both, and the first: its digest came with the rank's message."""
    checkpoints = two_ranks[0] / "runs/run/checkpoints"
    for version in (1, 6):
        shard = checkpoints / f"step_{version}/state/shard_1.pt"
        assert compare(shard.parents[1]).faults == ()
        content = shard.read_bytes()
        shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert compare(shard.parents[1]).faults == ("state/shard_1.pt is not what was written (its SHA-256 differs)",)
        shard.write_bytes(content)


async def test_another_number_of_ranks_is_refused(two_ranks: tuple[Path, Process]) -> None:
    folder, _ = two_ranks
    with pytest.raises(CheckpointError, match="written by 2 ranks and this run has 1; start the run with 2 ranks"):
        await run(folder, "resume=true", "train.max_steps=7", base=SHARDED | FAST)


def test_two_ranks_that_are_stopped_leave_a_checkpoint(tmp_path: Path) -> None:
    tree = SHARDED | FAST | {"checkpoint": {}}
    tree["train"] = tree["train"] | {"max_steps": 100_000}
    process = Process(tmp_path, str(write_yaml(tmp_path, tree)), program=(*TORCHRUN, "-m", "asyncrl.main"))
    place = tmp_path / "runs/run"
    process.wait_until(lines_at_least(place, 3), "third step", 300)
    process.send(signal.SIGTERM)
    assert process.wait(120) != 0
    assert "SIGTERM: aborting the open step" in process.output
    assert (place / "checkpoints/latest/state/shard_1.pt").exists(), process.output


@pytest.mark.parametrize(
    ("what", "every"),
    [("replaced", 1), *(pytest.param(what, None, marks=pytest.mark.slow) for what in ("moved", "replaced"))],
)
def test_two_ranks_whose_directory_is_lost_leave_a_checkpoint(tmp_path: Path, what: str, every: int | None) -> None:
    """And rank 1 writes its part neither into a directory of another run nor where its own directory lay."""
    tree = SHARDED | FAST | {"checkpoint": {"every": every}}
    tree["train"] = tree["train"] | {"max_steps": 100_000}
    place = tmp_path / "runs/run"
    with start_two(tmp_path, tree) as ranks:
        ranks[0].wait_until(lines_at_least(place, 3), "third step", 300)
        for each in ranks:
            each.send(signal.SIGSTOP)
        if what == "moved":
            place.rename(tmp_path / "runs/moved")
        else:
            shutil.rmtree(place)
            place.mkdir()
            (place / ".lock").write_text("of another run")
        for each in ranks:
            each.send(signal.SIGCONT)
        assert ranks[0].wait(200) == 5, ranks[0].output
        ranks[1].wait(200)
    said = re.search(r"The last checkpoint is written to (\S+):", ranks[0].output)
    assert said is not None, ranks[0].output
    [newest] = {(Path(said[1]) / "checkpoints/latest").resolve()}
    assert compare(newest).faults == () and (newest / "state/shard_1.pt").exists()
    if every is None:  # else both ranks may have been in the middle of a write
        assert [each.name for each in place.iterdir()] == [".lock"] if what == "replaced" else not place.exists()
    assert not list(place.parent.glob("run.rank_*"))


# Scores the first step, and so runs before the first checkpoint.
BLOCKING_REWARD = """
from pathlib import Path

def reward(completions, **columns):
    place = Path(__file__).parent / "runs/run/checkpoints"
    place.mkdir(exist_ok=True)
    (place / "shards").write_text("no folder")
    return [float(len(set(text))) for text in completions]
"""


def test_a_part_that_cannot_be_written_fails_the_checkpoint_at_once(tmp_path: Path) -> None:
    """Rank 0 waited 300 s for it."""
    tree = SHARDED | FAST | {"checkpoint": {"every": 2}, "reward": f"{tmp_path}/rewards.py:reward"}
    (tmp_path / "rewards.py").write_text(BLOCKING_REWARD)
    with start_two(tmp_path, tree) as ranks:
        assert ranks[1].wait(200) == ranks[0].wait(200) != 0
    assert "rank 1 could not write its part of version 2" in ranks[0].output
    assert "version 2 was not saved: rank 1: rank 1 could not" in ranks[0].output


REWARD = """
import os

calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls > 20:
        raise RuntimeError("this rank has had enough")
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_ends_the_other_with_an_error(tmp_path: Path, end: str) -> None:
    """Without torchrun, which would end the other one itself: the connection is gone, or, where no collective is under way,
    the line says so."""
    tree = SHARDED | FAST | {"checkpoint": {"save_final": False}}
    tree["train"] = tree["train"] | {"max_steps": 100_000}
    tree["watchdog"] = {"loop_timeout_s": 10}
    (tmp_path / "rewards.py").write_text(REWARD)
    if end == "raises":
        tree["reward"] = f"{tmp_path}/rewards.py:reward"
    with start_two(tmp_path, tree) as ranks:
        if end == "killed":
            ranks[0].wait_until(lines_at_least(tmp_path / "runs/run", 2), "second step", 300)
            ranks[1].kill()
        else:
            assert ranks[1].wait(300) == 6, ranks[1].output
            assert "this rank has had enough" in ranks[1].output
        assert ranks[0].wait(200) not in (0, None)  # a time-out would take 600 s


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.rank=4"], "lora.rank is 4"),
        (["algorithm.entropy.coef=0.1", "algorithm.entropy.second_gradient_buffer=true"], "two backward passes"),
        (["train.kind=dry_run", "engine.kind=dry_run"], "no weights to shard"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(tmp_path: Path, overrides: list[str], words: str) -> None:
    config = load_config([write_yaml(tmp_path, SHARDED)], overrides)
    with pytest.raises(ConfigError, match=words) as refused:
        resolve(config, 2)
    assert "distributed.sharding=replicate" in str(refused.value)
