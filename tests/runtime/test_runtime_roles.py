"""Whole runs whose ranks have different roles (`distributed.roles`): weights, groups, prompts, evaluations and the end."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import reserved_port
from runtime_helpers import (
    DRY,
    HOOKS,
    MODEL,
    REAL,
    REWARDS,
    ROOT,
    Process,
    lines_at_least,
    metrics_of,
    run_ranks,
    start_two,
    train,
    weights_of,
)
from support.pages import blocks

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, GenerationError, RankLost
from asyncrl.pumps.train import TrainPump
from asyncrl.runtime.inputs import check_start
from asyncrl.telemetry.sinks import read_jsonl

TELEMETRY = {"live": "plain", "trace": False, "report": False}
SYNC: dict[str, Any] = REAL | {
    "preset": "sync",
    "model": REAL["model"] | {"dtype": "float64"},
    "telemetry": TELEMETRY,
    "data": REAL["data"] | {"eval": f"{MODEL}:rows"},
    "evaluate": {"every": 2, "samples": 2, "limit": 5},
}
ASYNC = REAL | {"train": REAL["train"] | {"max_steps": 4}, "telemetry": TELEMETRY}
ONE_STEP = ASYNC | {"train": REAL["train"] | {"max_steps": 1}}
OTHER = f"model.path={MODEL}:build_other"
EVALUATED = re.compile("^eval/")


def with_roles(tree: dict[str, Any], train: Any, generate: Any, **distributed: Any) -> dict[str, Any]:
    return tree | {"distributed": {"roles": {"train": train, "generate": generate}, **distributed}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run by one rank, which trains the same groups."""
    asyncio.run(train(folder := tmp_path_factory.mktemp("alone"), base=SYNC))
    return folder / "runs/run"


@pytest.mark.parametrize(
    ("trains", "generates", "distributed"),
    [([0, 1], [1, 2], {}), (2, 1, {"sharding": "fsdp"})],
    ids=["a rank does both", "fsdp"],
)
def test_roles_train_the_weights_of_one_rank(
    tmp_path: Path, alone: Path, trains: Any, generates: Any, distributed: dict[str, Any]
) -> None:
    """Only rank 0 has the weights of the other run."""
    outputs = run_ranks(tmp_path, with_roles(SYNC, trains, generates, **distributed), 3, "", OTHER, OTHER)
    check_equal(tmp_path / "runs/run", alone, outputs[0])
    # The lane of the broadcasts waits while the lane of the same device computes. That is no idle time.
    shares = {
        name for line in metrics_of(tmp_path / "runs/run") for name in line if name.startswith(("busy/", "idle/"))
    }
    assert shares and not any("/weights" in name for name in shares), shares
    # Each group is in the files of the rank that trained it.
    files = (tmp_path / "runs/run/rollouts").rglob("step_*.jsonl")
    groups = Counter(row["group_id"] for path in files for row in read_jsonl(path))
    assert groups == dict.fromkeys(range(12), REAL["rollout"]["group_size"])
    # Every rank says what it is, and why.
    for rank, output in enumerate(outputs):
        assert re.search(rf"rank {rank} .*(trains|generates).*distributed\.roles: train", output), output


def check_equal(run: Path, alone: Path, output: str) -> None:
    """Both runs trained the same groups. `output`: of rank 0, which reports the sums of all ranks and complete evaluations."""
    version = REAL["train"]["max_steps"]
    expected = weights_of(alone, version)
    for name, weight in weights_of(run, version).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
    ours, theirs = metrics_of(run), metrics_of(alone)
    for mine, line in zip(ours, theirs, strict=True):
        for name in (name for name in line if EVALUATED.match(name) or name in ("reward/mean", "train/groups")):
            assert mine[name] == pytest.approx(line[name], abs=1e-12), name
    assert "12 admitted, 12 trained, 0 dropped, 0 failed" in output


@pytest.mark.parametrize(
    ("trains", "generates", "distributed"),
    [
        (1, 0, {}),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"sharding": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"context": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_node_that_joins_does_not_change_the_weights(
    tmp_path: Path, alone: Path, trains: int, generates: int, distributed: dict[str, Any]
) -> None:
    """The groups of the second step are played once a node has joined, and all groups if no rank generates."""
    size = trains + generates
    gate = tmp_path / "gate"
    environ = {"ASYNCRL_SECRET": "the secret of this test", "GATE": str(gate), "GATE_FROM": "4", "WARM_WORKERS": ""}
    # Each process notes a hash of each stripe that it sends or receives.
    program, environ["NODES_NOTES"] = (str(ROOT / "tools/chaos/__main__.py"), "nodes:rank"), "notes.jsonl"
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        tree = with_roles(SYNC, trains, generates, listen=address, **distributed) | {"hooks": f"{HOOKS}:waiting"}
        with start_two(tmp_path, tree, program, ["", *[OTHER] * (size - 1)], size=size, **environ) as ranks:
            ranks[0].wait_until(lambda: "nodes may join" in ranks[0].output, "the address")
            (place := tmp_path / "node").mkdir()
            node = Process(place, "join", address, "threads=1", program=program, **environ)
            try:
                node.wait_until(lambda: "this node generates from now on" in node.output, "weights", 240.0)
                gate.touch()
                codes = [rank.wait(150) for rank in (*ranks, node)]
                assert codes == [0] * (size + 1), ranks[0].output[-3000:] + node.output[-3000:]
            finally:
                node.kill()
            check_equal(tmp_path / "runs/run", alone, ranks[0].output)
    assert sum(line.get(f"travel/rank_{size}/groups", 0) for line in metrics_of(tmp_path / "runs/run")) > 0
    assert "done: the run has ended at version 3" in node.output
    # The bytes of a version on the board of the node are those on the boards of the training ranks.
    notes = [
        read_jsonl(folder / "notes.jsonl") for folder in (*(tmp_path / str(rank) for rank in range(trains)), place)
    ]
    *sent, received = (
        {(line["version"], line["sender"]): line["sha"] for line in each if "sha" in line} for each in notes
    )
    assert {version for version, _ in received} >= {1, 2, 3} and received.items() <= {**sent[0], **sent[-1]}.items()


AS_WITH_VLLM = """
import os, sys
from asyncrl.generation.vllm import versions
from asyncrl.main import main
from asyncrl.runtime import placement

versions.installed_version = lambda: "0.32.0"
placement._reason_for_embedded = lambda config, device: {reason}
sys.exit(main(sys.argv[1:]))
"""


def test_rank_0_leaves_vllm_for_a_model_on_the_plain_path_on_all_ranks(tmp_path: Path) -> None:
    """As on a card: `generation.engine: auto` is vLLM on each rank, until rank 0 has compared the paths of the model."""
    tree = ONE_STEP | {"model": {"path": f"{MODEL}:build_stateful", "dtype": "float32"}}
    first, second = run_ranks(tmp_path, with_roles(tree, 1, 1), program=("-c", AS_WITH_VLLM.format(reason=None)))
    assert "generation.engine: embedded (auto: the model runs on the plain path" in first
    assert "rank 1: generation.engine: embedded, as on rank 0" in second


def test_a_training_rank_that_generates_takes_the_engine_of_rank_0(tmp_path: Path) -> None:
    """As if vLLM were installed on the machine of rank 1 alone."""
    code = AS_WITH_VLLM.format(reason="None if os.environ['RANK'] == '1' else 'not installed'")
    output = run_ranks(tmp_path, with_roles(ONE_STEP, [0, 1], [1]), program=("-c", code))[1]
    assert "rank 1: generation.engine: embedded, as on rank 0" in output


async def test_a_run_that_ended_within_a_batch_is_resumed_with_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is then not a multiple of the updates of a batch."""
    apply, applied = TrainPump._apply, 0

    async def cut_off(pump: TrainPump, step: Any, update: int) -> Any:
        nonlocal applied
        applied += 1
        if applied == 4:
            raise RuntimeError("cut off")
        return await apply(pump, step, update)

    tree = ASYNC | {"algorithm": {"updates_per_batch": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(TrainPump, "_apply", cut_off)
        with pytest.raises(RuntimeError, match="cut off"):
            await train(tmp_path, base=tree)
    assert metrics_of(tmp_path / "runs/run")[-1]["step"] == 3
    await asyncio.to_thread(run_ranks, tmp_path, with_roles(tree, 1, 1) | {"resume": True})
    assert metrics_of(tmp_path / "runs/run")[-1]["step"] == 7


ENDS = """
import sys
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.main import main
from asyncrl.pumps.graph import Graph
from asyncrl.runtime import positions

positions.PARTS_TIMEOUT_S = 5.0
finished, is_last_version, asked = LineLedger.finished, Graph.is_last_version, []

def seen(ledger):
    # After the last step rank 0 knows that no prompt is left, and rank 1 does not know it yet.
    return (ledger._rank == 0 and ledger.turn == 3) if asked else finished.fget(ledger)

def ask(graph):
    asked.append(1)
    try:
        return is_last_version(graph)
    finally:
        asked.clear()

LineLedger.finished, Graph.is_last_version = property(seen), ask
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "roles",
    [pytest.param({}, marks=pytest.mark.slow), {"roles": {"train": 2, "generate": 1}}],
    ids=["without roles", "roles"],
)
def test_ranks_that_learn_at_different_moments_that_no_prompt_is_left_save_the_last_version(
    tmp_path: Path, roles: dict[str, Any]
) -> None:
    """With fsdp each rank writes its part when it saves a version, and rank 0 waits for the parts."""
    (program := tmp_path / "rank.py").write_text(ENDS)
    tree = REAL | {"rollout": REAL["rollout"] | {"groups_per_step": 8}, "telemetry": TELEMETRY}
    tree |= {"train": REAL["train"] | {"max_epochs": 1, "max_steps": None}}
    tree |= {"distributed": {"sharding": "fsdp", **roles}}
    size = 3 if roles else 2
    with start_two(tmp_path, tree, (str(program),), size=size, own=("",) * size, WARM_WORKERS="") as ranks:
        codes = [rank.wait(120) for rank in ranks]
        assert codes == [0] * size, [rank.output[-3000:] for rank in ranks]
    assert weights_of(tmp_path / "runs/run", 3)


def test_at_a_standstill_every_rank_says_what_it_waits_for(tmp_path: Path) -> None:
    hanging = DRY | {"rollout": DRY["rollout"] | {"environment": f"{MODEL}:Hanging"}, "telemetry": TELEMETRY}
    tree = with_roles(hanging, 1, 1) | {"watchdog": {"stall_timeout_s": 3.0, "interval_s": 0.5}}
    with start_two(tmp_path, tree) as ranks:
        assert ranks[0].wait(60) == 4 and ranks[1].wait(60), [rank.output for rank in ranks]
        assert "train pump waits for a claimable group" in ranks[0].output
        assert "rank 1: " in ranks[1].output, ranks[1].output
        assert "follow pump waits for the next version of the weights from rank 0" in ranks[1].output
        assert "of group 4 waits for its episode from the environment" in ranks[1].output


@pytest.mark.parametrize(
    ("generate", "placement", "interval"),
    [pytest.param([1], "auto", 1, marks=pytest.mark.slow), ([2], "worker", 2)],
    ids=["a rank does both", "every second step hands weights over"],
)
def test_evaluations_do_not_wait_for_ranks_that_wait_for_rank_0(
    tmp_path: Path, generate: list[int], placement: str, interval: int
) -> None:
    """Rank 0 waits for an evaluation while another training rank has gone on to the end of the next step. The rank that only
    generates merges the adapters of both training ranks, and compares the fixed row. Rank 1 has other weights in its file."""
    tree = with_roles(ASYNC, [0, 1], generate) | {
        "model": ASYNC["model"] | {"lora": {"rank": 2}},
        "rollout": ASYNC["rollout"] | {"max_staleness": 2, "weight_sync_interval": interval},
        "generation": {"placement": placement},
        "data": SYNC["data"],
        "evaluate": {"every": 1, "samples": 2, "limit": 5},
        "watchdog": {"stall_timeout_s": 32.0},
    }
    run_ranks(tmp_path, tree, generate[-1] + 1, "", OTHER)
    evaluated = [line["step"] for line in metrics_of(tmp_path / "runs/run") if any(map(EVALUATED.match, line))]
    assert evaluated == [*range(ASYNC["train"]["max_steps"] + 1)]


def test_an_episode_longer_than_the_stall_timeout_is_progress_on_every_rank(tmp_path: Path) -> None:
    """Three ranks generate and there are two groups, so one rank idles. Rank 0 only trains, and rank 1 does both."""
    tree = with_roles(DRY, [0, 1], [1, 2, 3]) | {
        "rollout": DRY["rollout"] | {"groups_per_step": 2, "max_staleness": 0, "max_tokens": 20},
        "train": DRY["train"] | {"max_steps": 1},
        "dry_run": {"decode_step_s": 0.6, "length_sigma": 0.0},
        "watchdog": {"stall_timeout_s": 4.0, "interval_s": 0.5},
        "reward": {"functions": [f"{REWARDS}:short"], "timeout_s": 1.0},
        "telemetry": TELEMETRY,
    }
    assert "2 trained" in run_ranks(tmp_path, tree, 4)[0]


def test_a_killed_rank_0_ends_the_run_and_is_named(tmp_path: Path) -> None:
    endless = with_roles(ASYNC, 1, 1) | {
        "train": ASYNC["train"] | {"max_steps": 1000},
        "watchdog": {"loop_timeout_s": 10.0},
    }
    with start_two(tmp_path, endless, WARM_WORKERS="") as ranks:
        ranks[0].wait_until(lines_at_least(tmp_path / "runs/run", 2), "step 2")
        ranks[0].send(signal.SIGKILL)
        assert ranks[1].wait(90) not in (0, None)
        assert "rank 0" in ranks[1].output


def test_what_no_step_could_train_fails_where_it_was_played(tmp_path: Path) -> None:
    tree = with_roles(ASYNC, 1, 1)
    tree["rollout"] = ASYNC["rollout"] | {"environment": f"{MODEL}:Alien", "max_failed_groups": 0}
    with start_two(tmp_path, tree, WARM_WORKERS="") as ranks:
        assert ranks[1].wait(90) == GenerationError.exit_code, ranks[1].output[-3000:]
        assert "tokens holds " in ranks[1].output
        assert "rollout.max_failed_groups allows 0 such groups" in ranks[1].output
        # Long before the watchdog's limit: rank 0 is told why.
        assert ranks[0].wait(90) == RankLost.exit_code and "rank 1 has ended: " in ranks[0].output


PARTIAL = """
import asyncio, functools, sys
from asyncrl import Runtime, load_config

def score(value, completions, **columns):
    return [value] * len(completions)

async def main():
    config = load_config([sys.argv[1]], sys.argv[2:])
    async with Runtime(config, rewards=functools.partial(score, 1.0)) as runtime:
        await runtime.run()

asyncio.run(main())
"""


def test_ranks_that_only_train_know_the_names_of_reward_functions(tmp_path: Path) -> None:
    dry = with_roles(DRY, 1, 1) | {"telemetry": TELEMETRY, "train": DRY["train"] | {"max_steps": 1}}
    run_ranks(tmp_path, dry, program=("-c", PARTIAL))
    [line] = metrics_of(tmp_path / "runs/run")
    # Rank 1 tells its tokens after the commit of the only step.
    assert line["engine/tokens"] >= line["train/tokens"]
    with start_two(tmp_path / "another", dry | {"reward": f"{REWARDS}:another_name"}) as ranks:
        assert ranks[1].wait(60) == ConfigError.exit_code, ranks[1].output[-3000:]
        words = "reward functions are named share, and ranks that only train expect the names another_name; give each"
        assert words in ranks[1].output


def test_ranks_with_unlike_reward_models_are_refused(tmp_path: Path) -> None:
    tree = with_roles(ASYNC | {"reward": {"model": f"{MODEL}:judge"}}, [0, 1], [1, 2])
    with start_two(tmp_path, tree, size=3, WARM_WORKERS="") as ranks:
        codes = [rank.wait(90) for rank in ranks]
        shown = ranks[1].output + ranks[2].output
        assert ConfigError.exit_code in codes, shown
        assert re.search(r"'judge' .* has other weights, .* on\s+rank (1|2) than on rank (1|2)", shown), shown


COMMANDS = {"context": blocks("context"), "roles": blocks("roles")}
PAGES = {"context": "ranks 0-1 share sequences, led by rank 0", "roles": "rank 1 only generates"}


def words_of(page: str) -> list[str]:
    """What follows `torchrun` in the command of the page; files by their whole paths."""
    [block] = COMMANDS[page]
    launcher, *words = shlex.split(block.text)
    assert launcher == "torchrun"
    return [str(ROOT / word) if word.endswith(".yaml") else word for word in words]


@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_a_page_has_settings_of_a_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(page)
    assert words[:5] == ["--standalone", "--nproc-per-node", "2", "-m", "asyncrl.main"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_start(load_config(words[5:6], words[6:]), code=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_command_of_a_page_runs(tmp_path: Path, page: str) -> None:
    short = ["train.max_steps=2", "run.overwrite=false", "rollout.groups_per_step=4", "telemetry.live=plain"]
    arguments = *words_of(page), *short, f"run.dir={tmp_path}/runs"
    run = Process(tmp_path, *arguments, program=("-m", "torch.distributed.run"), WARM_WORKERS="")
    assert run.wait(150) == 0, run.output
    assert "8 trained" in run.output and PAGES[page] in run.output


def test_ragged_groups_spread_evenly_over_the_training_ranks(tmp_path: Path) -> None:
    """Completions of log-normal length (sigma 1), 16 groups a step on two training ranks, while generation is ahead of training."""
    lengths = {"group_size": 4, "groups_per_step": 16, "max_tokens": 256, "max_staleness": 2}
    tree = with_roles(DRY, 2, 2) | {
        "rollout": lengths,
        "train": DRY["train"] | {"max_steps": 8, "tokens_per_microbatch": 512},
        "dry_run": {"decode_step_s": 0.0001, "train_token_s": 0.00002, "finish_s": 0.0005, "length_sigma": 1.0},
        "reward": f"{REWARDS}:short",
        "telemetry": TELEMETRY,
    }
    assert "128 trained" in run_ranks(tmp_path, tree, 4)[0]
    lines = [line for line in metrics_of(tmp_path / "runs/run") if "train/balance" in line]
    assert sum(line["train/groups"] for line in lines) == 8 * 16
    # Counts of the ranks that generate are in rank 0's lines.
    assert sum(line.get("engine/tokens", 0) for line in lines) > 0
    balance = [line["train/balance"] for line in lines]
    assert len(balance) == 8 and max(balance) < 1.7 and sum(balance) / 8 < 1.25, balance
    counted = Counter[str]()
    for line in metrics_of(tmp_path / "runs/run"):
        counted.update({name: value for name, value in line.items() if name.startswith("travel/")})
    # A rank other than 0 drops what it counted before the first line.
    assert counted["travel/groups"] > 7 * 16 and counted["travel/bytes"] > 7 * 16 * 1000
    assert counted["travel/rank_2/groups"] + counted["travel/rank_3/groups"] == counted["travel/groups"]
    assert min(counted["travel/rank_2/groups"], counted["travel/rank_3/groups"]) > 0
