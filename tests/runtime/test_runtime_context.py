"""Whole runs whose training ranks share sequences (`distributed.context`): weights, metrics, faults, stops and resumes."""

from __future__ import annotations

import re
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    CLOCKED,
    MODEL,
    REAL,
    ROOT,
    Process,
    config_of,
    lines_at_least,
    metrics_of,
    rollouts_of,
    start_two,
    weights_of,
)
from support.pages import blocks
from test_runtime_roles import ASYNC, OTHER, SYNC, run_ranks, with_roles

from asyncrl import Runtime
from asyncrl.cli import nodes
from asyncrl.errors import CheckpointError, ConfigError, OutOfMemory, RankLost, StallError, TrainStepError
from asyncrl.runtime.inputs import check_start
from asyncrl.runtime.plan import plan

STEPS = 5
TREE: dict[str, Any] = SYNC | {"train": REAL["train"] | {"max_steps": STEPS}}
# Several passes over minibatches; log-probs of a reference and of the policy; a term with a denominator of its own.
COSTLY: dict[str, Any] = TREE | {
    "algorithm": {
        "updates_per_batch": 2,
        "minibatches": 2,
        "kl": {"coef": 0.1},
        "entropy": {"coef": 0.01},
        "top_entropy": {"quantile": 0.5},
    }
}
# Adapters on a model with experts, whose recorded routes are sent to the sibling, and checkpointed activations.
ROUTED: dict[str, Any] = TREE | {
    "model": SYNC["model"] | {"path": f"{MODEL}:build_experts", "lora": {"rank": 2}},
    "algorithm": {"router_replay": True},
    "train": TREE["train"] | {"gradient_checkpointing": True},
}
# Of the run, not of its groups: which ranks played them, and what the process needs.
OWN = re.compile(r"^(engine/|rollout/|travel/|perf/|data/|store/|train/(balance|microbatches)|memory/)")


def shared(tree: dict[str, Any], **distributed: Any) -> dict[str, Any]:
    return tree | {"distributed": {"context": 2, **distributed}}


def check_equal(run: Path, alone: Path) -> None:
    """Both runs trained the same groups to the same weights, and count each of them once."""
    [last] = {metrics_of(alone)[-1]["step"]}
    expected = weights_of(alone, last)
    for name, weight in weights_of(run, last).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
    for mine, line in zip(metrics_of(run), metrics_of(alone), strict=True):
        for name in (
            name for name in line if not (name.startswith(CLOCKED) or name.endswith("_ms") or OWN.match(name))
        ):
            assert mine[name] == pytest.approx(line[name], abs=1e-9), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run by one rank, which trains the same groups."""
    run_ranks(folder := tmp_path_factory.mktemp("alone"), TREE, 1)
    return folder / "runs/run"


@pytest.mark.parametrize(
    ("size", "distributed"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        (4, {"sharding": "fsdp"}),
        (3, {"roles": {"train": 2, "generate": 1}}),
    ],
    ids=["one set", "two sets", "two sets, fsdp", "siblings that only train"],
)
def test_ranks_that_share_sequences_train_the_weights_of_one_rank(
    tmp_path: Path, alone: Path, size: int, distributed: dict[str, Any]
) -> None:
    """Only rank 0 has the weights of the other run."""
    outputs = run_ranks(tmp_path, shared(TREE, **distributed), size, "", *[OTHER] * (size - 1))
    check_equal(tmp_path / "runs/run", alone)
    assert "20 admitted, 20 trained, 0 dropped, 0 failed" in outputs[0]
    assert "distributed.context: ranks 0-1 share sequences, led by rank 0" in outputs[1]


def test_siblings_make_the_rounds_of_their_leader(tmp_path: Path, alone: Path) -> None:
    """Each microbatch gathers the sharded weights, so all ranks of both sets run their microbatches together."""
    environ = {"ROUNDS": "1", "RANK_WEIGHTS": str(tmp_path), "WARM_WORKERS": ""}
    program = (str(MODEL.with_name("runtime_rank.py")),)
    with start_two(tmp_path, shared(TREE, sharding="fsdp"), program, ("",) * 4, size=4, **environ) as ranks:
        codes = [rank.wait(150) for rank in ranks]
        assert codes == [0] * 4, [rank.output[-3000:] for rank in ranks]
    check_equal(tmp_path / "runs/run", alone)


@pytest.mark.parametrize("tree", [COSTLY, pytest.param(ROUTED, marks=pytest.mark.slow)], ids=["surveys", "routes"])
def test_siblings_make_every_call_of_their_leader(tmp_path: Path, tree: dict[str, Any]) -> None:
    run_ranks(tmp_path / "alone", tree, 1)
    run_ranks(tmp_path / "shared", shared(tree), 2)
    check_equal(tmp_path / "shared/runs/run", tmp_path / "alone/runs/run")


def test_a_run_that_streams_its_steps_trains_each_prompt_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers of all ranks generate, get weights and evaluate while two sets train, with FSDP over all four ranks."""
    tree = ASYNC | {
        "rollout": ASYNC["rollout"] | {"max_staleness": 2},
        "data": SYNC["data"],
        "evaluate": {"every": 2, "samples": 1, "limit": 5},
    }
    output = run_ranks(tmp_path, shared(tree, sharding="fsdp"), 4)[0]
    assert "16 trained" in output
    run = tmp_path / "runs/run"
    assert sum(line.get("train/groups", 0) for line in metrics_of(run)) == 16
    assert nodes.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^0 +\S+ +trains and generates +4 ", shown, re.M), shown
    assert re.search(r"^1 +\S+ +trains with rank 0 and generates +4 ", shown, re.M), shown
    assert re.search(r"^3 +\S+ +trains with rank 2 and generates +4 ", shown, re.M), shown


def test_the_command_of_the_page(tmp_path: Path) -> None:
    [block] = blocks("context")
    launcher, *words = shlex.split(block.text)
    assert launcher == "torchrun"
    short = ["train.max_steps=2", "run.overwrite=false", "rollout.groups_per_step=4", "telemetry.live=plain"]
    arguments = [str(ROOT / word) if word.endswith(".yaml") else word for word in words]
    program = ("-m", "torch.distributed.run")
    run = Process(tmp_path, *arguments, *short, f"run.dir={tmp_path}/runs", program=program, WARM_WORKERS="")
    assert run.wait(150) == 0, run.output
    assert "8 trained" in run.output and "ranks 0-1 share sequences, led by rank 0" in run.output


ENDLESS = ASYNC | {
    "train": ASYNC["train"] | {"max_steps": 1000},
    "watchdog": {"loop_timeout_s": 4.0},
    "checkpoint": {"every": 500},
}


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
        (signal.SIGSTOP, 3),
    ],
    ids=["a sibling", "a leader", "rank 0", "a sibling stops", "a sibling of another rank stops"],
)
def test_a_lost_rank_ends_the_run_and_is_named_with_its_set(tmp_path: Path, number: signal.Signals, rank: int) -> None:
    """With weights on each rank, rank 0 first saves the last step."""
    run = tmp_path / "runs/run"
    with start_two(tmp_path, shared(ENDLESS), size=4, own=("",) * 4, WARM_WORKERS="") as ranks:
        ranks[0].wait_until(lines_at_least(run, 3), "step 3")
        ranks[rank].send(number)
        others = [each for other, each in enumerate(ranks) if other != rank]
        assert [each.wait(60) for each in others] == [RankLost.exit_code] * 3, [each.output[-2000:] for each in others]
        if rank == 0:
            assert all("rank 0" in each.output for each in others)
            return
        other = {1: "0", 2: "3", 3: "2"}[rank]
        text = " ".join(ranks[0].output.split())
        assert f"rank {rank} shares sequences with rank {other}: distributed.context" in text, ranks[0].output[-3000:]
        steps = [line["step"] for line in metrics_of(run)]
        assert weights_of(run, steps[-1])


DIES = """
import os, signal, sys
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.main import main
from asyncrl.pumps.publish import PublishPump
from asyncrl.pumps.siblings import SiblingPump

rank, moment = os.environ.get("DIES", "0 none").split()
owners = {"_make": SiblingPump, "commit": LineLedger, "_publish": PublishPump}
calls = []

def before(owner, call):
    def patched(*arguments, **options):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    setattr(owner, call.__name__, patched)

if moment in owners and os.environ["RANK"] == rank:
    before(owners[moment], getattr(owners[moment], moment))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "moment",
    [pytest.param("_make", marks=pytest.mark.slow), "commit", pytest.param("_publish", marks=pytest.mark.slow)],
)
def test_a_sibling_that_dies_at_a_moment_of_a_step_costs_no_prompt(tmp_path: Path, moment: str) -> None:
    """Before a call, between the optimizer step and the commit, and before its publish. The run is resumed from the last step."""
    (program := tmp_path / "rank.py").write_text(DIES)
    with start_two(tmp_path, shared(ENDLESS), (str(program),), WARM_WORKERS="", DIES=f"1 {moment}") as ranks:
        assert ranks[0].wait(90) == RankLost.exit_code, ranks[0].output[-3000:]
        assert "rank 1 shares sequences with rank 0" in " ".join(ranks[0].output.split()), ranks[0].output[-3000:]
    last = 10
    tree = shared(ASYNC) | {"resume": True, "train": ASYNC["train"] | {"max_steps": last}}
    assert "resume: " in run_ranks(tmp_path, tree, 2)[0]
    groups = Counter(row["group_id"] for row in rollouts_of(tmp_path / "runs/run"))
    assert set(groups.values()) == {REAL["rollout"]["group_size"]}
    assert len(groups) == last * REAL["rollout"]["groups_per_step"]


def test_a_sibling_that_is_stopped_alone_ends_the_run(tmp_path: Path) -> None:
    """Rank 0 waits for groups of that rank, and not in a collective."""
    run, hooks = tmp_path / "runs/run", {"hooks": f"{MODEL.with_name('runtime_hooks.py')}:waiting"}
    environ = {"GATE": str(tmp_path / "never"), "GATE_FROM": "12", "WARM_WORKERS": ""}
    with start_two(tmp_path, with_roles(ENDLESS, [0, 1], [1], context=2) | hooks, size=2, **environ) as ranks:
        ranks[0].wait_until(lines_at_least(run, 3), "step 3")
        ranks[1].send(signal.SIGTERM)
        assert [rank.wait(30) for rank in ranks] == [143, 143], [rank.output[-3000:] for rank in ranks]
    assert weights_of(run, metrics_of(run)[-1]["step"])


FAILS = """
import os, sys, time
from asyncrl.errors import OutOfMemory
from asyncrl.main import main
from asyncrl.training.trainer import TorchTrainer

method, calls = os.environ["METHOD"], []
run = getattr(TorchTrainer, method)

def fail(*arguments):
    calls.append(1)
    if len(calls) == 6 and os.environ["RANK"] == os.environ["FAILS"]:
        if "HANGS" in os.environ:
            time.sleep(3600)
        raise OutOfMemory("no memory for this test")
    return run(*arguments)

setattr(TorchTrainer, method, fail)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("rank", "method"),
    [pytest.param(0, "_run", marks=pytest.mark.slow), (1, "_run"), (0, "compute_logprobs")],
    ids=["the leader", "the sibling", "the reference of the leader"],
)
def test_a_closure_that_fails_on_one_rank_ends_all_ranks_with_its_error(tmp_path: Path, rank: int, method: str) -> None:
    """No group is dropped, as a single rank would do: the other rank is in a collective with that group."""
    (program := tmp_path / "rank.py").write_text(FAILS)
    tree, environ = ENDLESS | {"algorithm": {"kl": {"coef": 0.1}}}, {"FAILS": str(rank), "METHOD": method}
    with start_two(tmp_path, shared(tree), (str(program),), WARM_WORKERS="", **environ) as ranks:
        codes = [each.wait(60) for each in ranks]
        texts = [" ".join(each.output.split()) for each in ranks]
        assert codes[1 - rank] == RankLost.exit_code, texts[1 - rank][-3000:]
        assert codes[rank] == (OutOfMemory.exit_code if rank else TrainStepError.exit_code), texts[rank][-3000:]
        assert "no memory for this test" in texts[rank]
        assert f"rank {rank} has ended: " in texts[1 - rank], texts[1 - rank][-3000:]


@pytest.mark.slow
def test_a_sibling_that_hangs_is_named_at_the_leader(tmp_path: Path) -> None:
    (program := tmp_path / "rank.py").write_text(FAILS)
    tree = ENDLESS | {"watchdog": {"lane_timeout_s": 3.0, "interval_s": 0.5, "abort_grace_s": 4.0}}
    environ = {"WARM_WORKERS": "", "FAILS": "1", "METHOD": "_run", "HANGS": ""}
    with start_two(tmp_path, shared(tree), (str(program),), **environ) as ranks:
        assert [each.wait(90) for each in ranks] == [StallError.exit_code] * 2, [each.output for each in ranks]
        assert "trainer waits for the call microbatch from rank 1 since" in ranks[0].output
        assert re.search(r'rank\.py", line \d+, in fail', ranks[1].output), ranks[1].output


@pytest.mark.parametrize("sharding", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_stopped_run_is_resumed_and_trains_each_prompt_once(tmp_path: Path, sharding: str) -> None:
    """With weights on each rank, the resumed run has a third rank that generates for the set, and then no set."""
    run = tmp_path / "runs/run"
    first = shared(ENDLESS, sharding=sharding)
    with start_two(tmp_path, first, size=2, WARM_WORKERS="") as ranks:
        ranks[0].wait_until(lines_at_least(run, 4), "step 4")
        for rank in ranks:
            rank.send(signal.SIGTERM)
        assert [rank.wait(60) for rank in ranks] == [143, 143], [rank.output[-3000:] for rank in ranks]
    last = metrics_of(run)[-1]["step"]
    later = [(2, shared(ASYNC, sharding=sharding))]
    if sharding == "replicate":
        later = [(3, with_roles(ASYNC, 2, 1, context=2)), (2, with_roles(ASYNC, 1, 1))]
    for size, tree in later:
        last += 3
        output = run_ranks(tmp_path, tree | {"resume": True, "train": ASYNC["train"] | {"max_steps": last}}, size)[0]
        assert "resume: " in output
    groups = Counter(row["group_id"] for row in rollouts_of(run))
    assert set(groups.values()) == {REAL["rollout"]["group_size"]}
    trained = last * REAL["rollout"]["groups_per_step"]
    assert len(groups) == trained
    # A prompt is missing only if the last run ended before its turn.
    assert sorted(groups)[: trained - 12] == list(range(trained - 12))


def test_a_resume_that_needs_other_cursors_is_refused(tmp_path: Path) -> None:
    run_ranks(tmp_path, ASYNC, 2)
    with start_two(tmp_path, shared(ASYNC) | {"resume": True}, WARM_WORKERS="") as ranks:
        assert CheckpointError.exit_code in [rank.wait(60) for rank in ranks], ranks[0].output[-3000:]
        assert "without distributed.roles and distributed.context" in " ".join(ranks[0].output.split())


@pytest.mark.parametrize("sharding", [pytest.param("replicate", marks=pytest.mark.slow), "fsdp"])
def test_a_time_limit_ends_all_ranks_after_one_step(tmp_path: Path, sharding: str) -> None:
    tree = ENDLESS | {"train": ENDLESS["train"] | {"time_limit_s": 3.0}}
    run_ranks(tmp_path, shared(tree, sharding=sharding), 2)
    run = tmp_path / "runs/run"
    assert weights_of(run, metrics_of(run)[-1]["step"])


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (["distributed.context=3"], "form no sets of 3; start a multiple of 3 training ranks"),
        (
            ["distributed.context=2", "generation.placement=shared"],
            "with distributed.context every engine runs in workers",
        ),
        (
            ["distributed.context=2", "door.ring=ring", "data.train=null"],
            "distributed.context is set and door.ring is ring",
        ),
        (
            ["distributed.context=2", "reroll.start_fraction=0.5"],
            "distributed.context is set and reroll.start_fraction",
        ),
        (
            ["distributed.context=2", "reward.model=vowels.py:vowels", "data.eval=rows.jsonl"],
            "reward.model and data.eval are set, and rank 2 trains and generates",
        ),
        (
            ["distributed.context=2", "train.kind=dry_run", "engine.kind=dry_run"],
            "train.kind is dry_run, which has no model",
        ),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: list[str], text: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_start(config_of(tmp_path, *setting), code=False)


def test_ranks_with_other_sets_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with start_two(tmp_path, shared(TREE), own=("", "distributed.context=1"), WARM_WORKERS="") as ranks:
        # Rank 0 hosts the store, and perhaps ends before the other rank has read it.
        assert ranks[0].wait(60) == ConfigError.exit_code and ranks[1].wait(60), ranks[0].output[-3000:]
        assert "give all ranks the same distributed.roles, distributed.context" in " ".join(ranks[0].output.split())


async def test_a_single_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run has 1 training rank"):
        async with Runtime(config_of(tmp_path, "distributed.context=2")):
            raise AssertionError("the run was opened")


def test_the_plan_names_sets_and_leaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    lines = plan(config_of(tmp_path, "distributed.context=2")).splitlines()
    assert sum("ranks 0-1 share sequences, led by rank 0" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("model", "context", "text"),
    [
        ("build", 3, "the model has 2 attention heads, which 3 ranks cannot share equally; choose a divisor of 2"),
        ("build_stateful", 2, "distributed.context is 2, but this model runs on the path"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, context: int, text: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = config_of(tmp_path, f"distributed.context={context}", f"model.path={MODEL}:{model}")
    with pytest.raises(ConfigError, match=text):
        plan(config)
