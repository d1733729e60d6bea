"""`distributed.sharding: fsdp` in whole runs: one rank, two under torchrun, resumed, stopped, and with a rank that is killed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_helpers import (
    ENDLESS,
    FAST,
    RANK,
    REAL,
    equal_weights,
    lines_at_least,
    metrics_of,
    rollouts_of,
    run_ranks,
    start_two,
    train,
    unclocked,
    weights_of,
    write_yaml,
)
from transformers import AutoModelForCausalLM

from asyncrl.checkpoint.manifest import compare
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.errors import CheckpointError, ConfigError

SHARDED: dict[str, Any] = REAL | {
    "distributed": {"sharding": "fsdp"},
    "rollout": REAL["rollout"] | {"groups_per_step": 6},
    "train": REAL["train"] | {"max_steps": 4},
    "checkpoint": {"every": 1, "keep": 0},
}


async def test_a_sync_run_on_one_shard_is_the_replicated_run(tmp_path: Path) -> None:
    """float64: the same completions, the same metrics, the same weights to 1e-10; and each goes on from the other's state."""
    tree = SHARDED | FAST | {"preset": "sync", "algorithm": {"kl": {"coef": 0.1}, "updates_per_batch": 2}}
    tree["model"] = tree["model"] | {"dtype": "float64"}
    one, other = folders = [tmp_path / sharding for sharding in ("fsdp", "replicate")]
    for folder in folders:
        await train(folder, f"distributed.sharding={folder.name}", "train.max_steps=2", base=tree)
    await train(one, "resume=true", "distributed.sharding=replicate", base=tree)
    await train(other, "resume=true", "distributed.sharding=fsdp", base=tree)
    ours, others = (unclocked(metrics_of(folder / "runs/run")) for folder in folders)
    for mine, theirs in zip(ours, others, strict=True):
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
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two asynchronous runs of two ranks. The time limit of the first run, which has rounds, passes on each rank at a
    moment of its own. The second run resumes it for two steps, keeps weights and gradients, and generates in workers."""
    folder = tmp_path_factory.mktemp("two")
    tree = SHARDED | FAST | {"train": SHARDED["train"] | {"max_steps": None, "time_limit_s": 3.0}}
    (folder / "first").mkdir()
    run_ranks(folder, tree, program=RANK, RANK_WEIGHTS=str(folder / "first"), ROUNDS="1")
    tree |= {"resume": True, "train": SHARDED["train"] | {"max_steps": len(metrics_of(folder / "runs/run")) + 2}}
    tree |= {"generation": {"placement": "worker", "threads": 1}}
    run_ranks(folder, tree, program=RANK, RANK_WEIGHTS=str(folder))
    return folder


def dumps(folder: Path) -> list[dict[str, Any]]:
    """What each rank trained, and what it ended with."""
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_two_ranks_share_the_groups_of_every_step_and_end_with_the_same_weights(two_ranks: Path) -> None:
    run, (one, other) = two_ranks / "runs/run", dumps(two_ranks / "first")
    assert one["version"] == other["version"] >= 1 and equal_weights(one["weights"], other["weights"])
    assert equal_weights(weights_of(run, one["version"]), one["named"])
    assert {len(mine) + len(theirs) for mine, theirs in zip(one["groups"], other["groups"], strict=True)} == {6}
    trained = [group for step in one["groups"] + other["groups"] for group in step]
    assert len(trained) == len(set(trained)) == 6 * one["version"]
    assert any(one["groups"]) and any(other["groups"])
    state = json.loads((run / "checkpoints/step_1/state/run.json").read_text())
    assert state["world_size"] == 2 and set(state["prompts"]) == {"0", "1"}


OVER_RANKS = ("reward/", "completions/", "staleness/", "frac_reward_zero_std", "train/", "reroll/")


def test_two_ranks_report_the_figures_of_both(two_ranks: Path) -> None:
    """Each rank, and the file: what one rank with the groups of both would report."""
    one, other = dumps(two_ranks / "first")
    lines = metrics_of(two_ranks / "runs/run")[: one["version"]]
    steps = zip(one["rows"], other["rows"], one["metrics"], other["metrics"], lines, strict=True)
    uneven = 0
    for mine, theirs, here, there, line in steps:
        rewards, lengths, tokens = zip(*mine, *theirs, strict=True)
        assert line["reward/mean"] == pytest.approx(np.mean(rewards), rel=1e-12)
        assert line["completions/mean_length"] == pytest.approx(np.mean(lengths), rel=1e-12)
        assert line["completions/max_length"] == max(lengths) and line["completions/min_length"] == min(lengths)
        assert line["train/groups"] == 6 and line["train/tokens"] == sum(tokens)
        assert line["perf/tokens_per_s"] == pytest.approx(sum(tokens) / line["time/step"])
        names = {name for name in line if name.startswith(OVER_RANKS)}
        assert {"reward/share/std", "frac_reward_zero_std", "staleness/dropped"} <= names
        for name in names:
            assert line[name] == here[name] == there[name], name
        uneven += bool(mine) and abs(np.mean([reward for reward, _, _ in mine]) - line["reward/mean"]) > 1e-6
    assert uneven > 0  # else a rank's own figures would have passed


def test_two_ranks_resume_and_finish_with_the_same_weights(two_ranks: Path) -> None:
    run, (first, _), (one, other) = two_ranks / "runs/run", dumps(two_ranks / "first"), dumps(two_ranks)
    assert one["version"] == other["version"] == first["version"] + 2
    assert equal_weights(one["weights"], other["weights"])
    assert equal_weights(weights_of(run, one["version"]), one["named"])
    assert [len(mine) + len(theirs) for mine, theirs in zip(one["groups"], other["groups"], strict=True)] == [6, 6]
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [*range(1, one["version"] + 1)]
    assert {line["train/sequences"] for line in lines} == {24}
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    assert sorted(path.parent.name for path in (run / "workers").rglob("worker-0.log")) == ["rank_0", "rank_1"]


def test_the_checkpoint_of_two_ranks_is_a_model_and_a_whole_state(two_ranks: Path) -> None:
    checkpoints, version = two_ranks / "runs/run/checkpoints", dumps(two_ranks)[0]["version"]
    model = AutoModelForCausalLM.from_pretrained(checkpoints / f"step_{version}", dtype=torch.float32)
    found = CheckpointStore(checkpoints).load(version)
    assert (found.path / "state/shard_1.pt").exists() and not list((checkpoints / "shards").iterdir())
    state = found.trainer()
    loaded = dict(model.named_parameters())
    assert set(state["masters"]) == set(loaded) == set(state["optimizer"])
    for name, parameter in loaded.items():
        assert torch.equal(state["masters"][name], parameter.data)
        assert state["optimizer"][name]["exp_avg"].shape == parameter.shape
        assert float(state["optimizer"][name]["step"]) == version


def test_a_bit_of_another_ranks_part_is_noticed(two_ranks: Path) -> None:
    """The last checkpoint that the first rank made of both, and the first: its digest came with the rank's message."""
    checkpoints = two_ranks / "runs/run/checkpoints"
    for version in (1, dumps(two_ranks)[0]["version"]):
        shard = checkpoints / f"step_{version}/state/shard_1.pt"
        assert compare(shard.parents[1]).faults == ()
        content = shard.read_bytes()
        shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert compare(shard.parents[1]).faults == ("state/shard_1.pt is not what was written (its SHA-256 differs)",)
        shard.write_bytes(content)


async def test_another_number_of_ranks_is_refused(two_ranks: Path) -> None:
    with pytest.raises(CheckpointError, match="written by 2 ranks and this run has 1; start the run with 2 ranks"):
        await train(two_ranks, "resume=true", "train.max_steps=70", base=SHARDED | FAST)


def test_a_resume_that_needs_other_cursors_is_refused(two_ranks: Path) -> None:
    tree = SHARDED | FAST | {"resume": True, "distributed": {"sharding": "fsdp", "context": 2}}
    with start_two(two_ranks, tree, WARM_WORKERS="") as ranks:
        assert CheckpointError.exit_code in [rank.wait(60) for rank in ranks], ranks[0].output[-3000:]
        assert "without distributed.roles and distributed.context" in " ".join(ranks[0].output.split())


@pytest.mark.parametrize("what", ["replaced", pytest.param("moved", marks=pytest.mark.slow)])
def test_two_ranks_whose_directory_is_lost_end_and_write_nothing_more(tmp_path: Path, what: str) -> None:
    """Neither into a directory of another run nor where their own directory lay."""
    tree = SHARDED | FAST | {"checkpoint": {"every": None}, "train": ENDLESS["train"]}
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
        assert ranks[1].wait(200) != 0
    assert "is no longer this run's" in ranks[0].output
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


def test_a_rank_that_is_killed_ends_the_other_with_an_error(tmp_path: Path) -> None:
    """Without torchrun, which would end the other one itself: the connection is gone, or, where no collective is under way,
    the line says so."""
    tree = SHARDED | FAST | {"checkpoint": {"save_final": False}, "train": ENDLESS["train"]}
    with start_two(tmp_path, tree | {"watchdog": {"loop_timeout_s": 6}}) as ranks:
        ranks[0].wait_until(lines_at_least(tmp_path / "runs/run", 2), "second step", 300)
        ranks[1].kill()
        assert ranks[0].wait(200) not in (0, None)  # a time-out would take 600 s


@pytest.mark.parametrize(
    ("overrides", "words"),
    [(["model.lora.rank=4"], "lora.rank is 4"), (["train.kind=dry_run", "engine.kind=dry_run"], "no weights to shard")],
)
def test_what_cannot_be_cut_is_refused_with_the_way_out(tmp_path: Path, overrides: list[str], words: str) -> None:
    config = load_config([write_yaml(tmp_path, SHARDED)], overrides)
    with pytest.raises(ConfigError, match=words) as refused:
        resolve(config, 2)
    assert "distributed.sharding=replicate" in str(refused.value)
