"""Whole runs whose training ranks share sequences (`distributed.context`): weights, metrics, faults, stops and resumes."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    CLOCKED,
    HOOKS,
    MODEL,
    PROGRAM,
    REAL,
    REWARDS,
    check_trained_once,
    config_of,
    lines_at_least,
    metrics_of,
    rollouts_of,
    run_ranks,
    start_two,
    train,
    weights_of,
)
from test_runtime_roles import ASYNC, OTHER, SYNC, with_roles

from asyncrl import Runtime
from asyncrl.cli import nodes
from asyncrl.errors import ConfigError, OutOfMemory, RankLost, StallError, TrainStepError
from asyncrl.runtime.inputs import check_start
from asyncrl.runtime.plan import plan

STEPS = 5
TREE: dict[str, Any] = SYNC | {"train": REAL["train"] | {"max_steps": STEPS}}
# Several passes over minibatches; log-probs of a reference and of the policy; a term with a denominator of its own.
COSTLY: dict[str, Any] = SYNC | {
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
OWN = re.compile(r"^(engine/|rollout/|travel/|perf/|data/|train/(balance|microbatches)|memory/)")


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
    asyncio.run(train(folder := tmp_path_factory.mktemp("alone"), base=TREE))
    return folder / "runs/run"


# Of a model that has to be gathered for each microbatch, as with less memory.
IN_ROUNDS = """
import sys
from asyncrl.main import main
from asyncrl.runtime import real
real.cut_model = lambda config, device, world, placement: real.Cut(world.world_size)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("size", "distributed", "program"),
    [
        (2, {}, PROGRAM),
        (3, {"roles": {"train": 2, "generate": 1}}, PROGRAM),
        pytest.param(4, {}, PROGRAM, marks=pytest.mark.slow),
        pytest.param(4, {"sharding": "fsdp"}, ("-c", IN_ROUNDS), marks=pytest.mark.slow),
    ],
    ids=["one set", "siblings that only train", "two sets", "two sets, fsdp in rounds"],
)
def test_ranks_that_share_sequences_train_the_weights_of_one_rank(
    tmp_path: Path, alone: Path, size: int, distributed: dict[str, Any], program: tuple[str, ...]
) -> None:
    """Only rank 0 has the weights of the other run. In rounds, each microbatch gathers the sharded weights, so all ranks of both
    sets run their microbatches together."""
    own = "", *[OTHER] * (size - 1)
    outputs = run_ranks(tmp_path, shared(TREE, **distributed), size, *own, program=program)
    check_equal(tmp_path / "runs/run", alone)
    assert "20 admitted, 20 trained, 0 dropped, 0 failed" in outputs[0]
    assert "distributed.context: ranks 0-1 share sequences, led by rank 0" in outputs[1]


@pytest.mark.parametrize("tree", [COSTLY, pytest.param(ROUTED, marks=pytest.mark.slow)], ids=["surveys", "routes"])
async def test_siblings_make_every_call_of_their_leader(tmp_path: Path, tree: dict[str, Any]) -> None:
    await train(tmp_path / "alone", base=tree)
    await asyncio.to_thread(run_ranks, tmp_path / "shared", shared(tree))
    check_equal(tmp_path / "shared/runs/run", tmp_path / "alone/runs/run")


@pytest.mark.slow
def test_each_set_replays_what_one_rank_in_its_place_would(tmp_path: Path) -> None:
    """A rank replays the groups that it has trained. So two sets are compared with two ranks, and not with one."""
    tree = TREE | {"reward": f"{REWARDS}:stingy", "replay": {"size": 3}}
    tree |= {"train": TREE["train"] | {"skip_zero_advantage": True, "max_steps": 8}}
    run_ranks(tmp_path / "plain", tree, 2)
    run_ranks(tmp_path / "shared", shared(tree), 4)
    check_equal(tmp_path / "shared/runs/run", tmp_path / "plain/runs/run")
    assert sum(line.get("replay/groups", 0) for line in metrics_of(tmp_path / "shared/runs/run")) > 4


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


ENDLESS = ASYNC | {
    "train": ASYNC["train"] | {"max_steps": 1000},
    "watchdog": {"loop_timeout_s": 6.0},
    "checkpoint": {"every": 500},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rank", "size"),
    [(signal.SIGKILL, 2, 4), (signal.SIGKILL, 0, 4), (signal.SIGSTOP, 1, 2), (signal.SIGSTOP, 3, 4)],
    ids=["a leader", "rank 0", "a sibling stops", "a sibling of another rank stops"],
)
def test_a_lost_rank_ends_the_run_and_is_named_with_its_set(
    tmp_path: Path, number: signal.Signals, rank: int, size: int
) -> None:
    """With weights on each rank, rank 0 first saves the last step."""
    run = tmp_path / "runs/run"
    with start_two(tmp_path, shared(ENDLESS), size=size, WARM_WORKERS="") as ranks:
        ranks[0].wait_until(lines_at_least(run, 3), "step 3")
        ranks[rank].send(number)
        others = [each for other, each in enumerate(ranks) if other != rank]
        codes = [each.wait(60) for each in others]
        assert codes == [RankLost.exit_code] * (size - 1), [each.output[-2000:] for each in others]
        for each in others:
            # Each of them names this rank with its set, and no other rank.
            named = set(re.findall(r"\(rank (\d) shares sequences with rank (\d): distributed\.context\)", each.output))
            assert named == {(str(rank), str(rank ^ 1))}, each.output[-3000:]
        if rank:
            assert weights_of(run, metrics_of(run)[-1]["step"])


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "sharding"), [(0, "fsdp"), (1, "fsdp"), (2, "replicate")])
def test_a_signal_to_one_rank_is_a_signal_to_all(tmp_path: Path, rank: int, sharding: str) -> None:
    """All ranks end with its exit code, and the last step is saved."""
    run = tmp_path / "runs/run"
    with start_two(tmp_path, shared(ENDLESS, sharding=sharding), size=4, WARM_WORKERS="") as ranks:
        ranks[0].wait_until(lines_at_least(run, 3), "step 3")
        ranks[rank].send(signal.SIGTERM)
        assert [each.wait(60) for each in ranks] == [143] * 4, [each.output[-2000:] for each in ranks]
        for each in (each for other, each in enumerate(ranks) if other != rank):
            assert "another rank was stopped by SIGTERM; this rank ends, too" in each.output, each.output[-2000:]
    assert weights_of(run, metrics_of(run)[-1]["step"])


DIES = """
import os, signal, sys
from asyncrl.distributed.line_ledger import LineLedger
from asyncrl.main import main
from asyncrl.pumps.publish import PublishPump
from asyncrl.pumps.siblings import SiblingPump
from asyncrl.runtime import meeting, positions

rank, moment = os.environ.get("DIES", "0 none").split()
owners = {"_run_call": SiblingPump, "commit": LineLedger, "_publish": PublishPump}
calls = []

def before(owner, call):
    def patched(*arguments, **options):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    setattr(owner, call.__name__, patched)

if moment in owners:
    positions.GATHER_TIMEOUT_S = meeting._LEAVE_AFTER_ERROR_S = 0.5  # of two ranks the other one is dead: nothing comes any more
if moment in owners and os.environ["RANK"] == rank:
    before(owners[moment], getattr(owners[moment], moment))
sys.exit(main(sys.argv[1:]))
"""


def test_a_sibling_that_is_stopped_alone_ends_the_run(tmp_path: Path) -> None:
    """Rank 0 waits for groups of that rank, and not in a collective."""
    run, tree = tmp_path / "runs/run", with_roles(ENDLESS, [0, 1], [1], context=2) | {"hooks": f"{HOOKS}:waiting"}
    environ = {"GATE": str(tmp_path / "never"), "GATE_FROM": "12", "WARM_WORKERS": ""}
    with start_two(tmp_path, tree, **environ) as ranks:
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
    [(1, "_run"), *(pytest.param(0, name, marks=pytest.mark.slow) for name in ("_run", "compute_logprobs"))],
    ids=["the sibling", "the leader", "the reference of the leader"],
)
def test_a_closure_that_fails_on_one_rank_ends_all_ranks_with_its_error(tmp_path: Path, rank: int, method: str) -> None:
    """No group is dropped, as a single rank would do: the other rank is in a collective with that group."""
    tree, environ = ENDLESS | {"algorithm": {"kl": {"coef": 0.1}}}, {"FAILS": str(rank), "METHOD": method}
    with start_two(tmp_path, shared(tree), ("-c", FAILS), WARM_WORKERS="", **environ) as ranks:
        codes = [each.wait(60) for each in ranks]
        texts = [" ".join(each.output.split()) for each in ranks]
        assert codes[1 - rank] == RankLost.exit_code, texts[1 - rank][-3000:]
        assert codes[rank] == (OutOfMemory.exit_code if rank else TrainStepError.exit_code), texts[rank][-3000:]
        assert "no memory for this test" in texts[rank]
        assert f"rank {rank} has ended: " in texts[1 - rank], texts[1 - rank][-3000:]


@pytest.mark.slow
def test_a_sibling_that_hangs_is_named_at_the_leader(tmp_path: Path) -> None:
    tree = ENDLESS | {"watchdog": {"lane_timeout_s": 3.0, "interval_s": 0.5, "abort_grace_s": 4.0}}
    environ = {"WARM_WORKERS": "", "FAILS": "1", "METHOD": "_run", "HANGS": ""}
    with start_two(tmp_path, shared(tree), ("-c", FAILS), **environ) as ranks:
        assert [each.wait(90) for each in ranks] == [StallError.exit_code] * 2, [each.output for each in ranks]
        assert "trainer waits for the call microbatch from rank 1 for" in ranks[0].output
        assert re.search(r"line \d+, in fail", ranks[1].output), ranks[1].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "sharding"),
    [*((moment, "replicate") for moment in ("commit", "_run_call", "_publish", "SIGTERM")), ("SIGTERM", "fsdp")],
)
def test_a_run_that_was_cut_off_is_resumed_and_trains_each_prompt_once(
    tmp_path: Path, moment: str, sharding: str
) -> None:
    """Its sibling dies before a call, between the optimizer step and the commit, or before its publish; or all are stopped. Groups
    are live on both ranks then. With weights on each rank, the resumed run has a third rank that generates for the set, and then no
    set and another rank that generates."""
    run, tree = tmp_path / "runs/run", shared(ENDLESS, sharding=sharding)
    with start_two(tmp_path, tree, ("-c", DIES), WARM_WORKERS="", DIES=f"1 {moment}") as ranks:
        if moment == "SIGTERM":
            ranks[0].wait_until(lines_at_least(run, 4), "step 4")
            for rank in ranks:
                rank.send(signal.SIGTERM)
        expected = 143 if moment == "SIGTERM" else RankLost.exit_code
        assert ranks[0].wait(90) == expected, ranks[0].output[-3000:]
        ranks[1].wait(60)
        named = "rank 1 shares sequences with rank 0" in " ".join(ranks[0].output.split())
        assert named or moment == "SIGTERM", ranks[0].output[-3000:]
    last = metrics_of(run)[-1]["step"]
    later = [(2, shared(ASYNC, sharding=sharding))]
    if sharding == "replicate":
        later = [(3, with_roles(ASYNC, 2, 1, context=2)), (3, with_roles(ASYNC, 1, 2))]
    for size, tree in later:
        last += 3
        tree |= {"resume": True, "train": ASYNC["train"] | {"max_steps": last}}
        assert "resume: " in run_ranks(tmp_path, tree, size)[0]
    check_trained_once(run, last, 12)


CUT = """
import os, signal, sys
from asyncrl.main import main
from asyncrl.pumps.train import TrainPump
from asyncrl.training.trainer import TorchTrainer

finish, apply, applied = TorchTrainer.finish_train_step, TrainPump._apply, []

def stop(trainer):
    result = finish(trainer)
    if trainer.version == 3 and os.environ["RANK"] == os.environ["STOPS"]:
        os.kill(os.getpid(), signal.SIGTERM)
    return result

async def fail(pump, step, update):
    applied.append(update)
    if len(applied) == 4 and os.environ["STOPS"] == "none":
        raise RuntimeError("cut off")
    return await apply(pump, step, update)

TorchTrainer.finish_train_step, TrainPump._apply = stop, fail
sys.exit(main(sys.argv[1:]))
"""


def run_within_a_batch(folder: Path, tree: dict[str, Any], size: int, stops: str, codes: list[int]) -> dict[str, Any]:
    """The last weights of a run that ends after the first of two updates of its second batch, and is resumed."""
    folder.mkdir()
    (program := folder / "rank.py").write_text(CUT)
    tree = tree | {"algorithm": {"updates_per_batch": 2}}
    with start_two(folder, tree, (str(program),), size=size, WARM_WORKERS="", STOPS=stops) as ranks:
        assert [rank.wait(90) for rank in ranks] == codes, [rank.output[-3000:] for rank in ranks]
    run = folder / "runs/run"
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_3"]
    assert "resume: " in run_ranks(folder, tree | {"resume": True}, size)[0]
    groups = Counter(row["group_id"] for row in rollouts_of(run))
    assert groups == dict.fromkeys(range(4 * STEPS), REAL["rollout"]["group_size"])
    return weights_of(run, 2 * STEPS - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stops", "sharding", "codes"),
    [("1", "fsdp", [143, 143]), ("1", "replicate", [143, 143]), ("none", "replicate", [1, 12])],
    ids=["the sibling is stopped, fsdp", "the sibling is stopped", "the leader fails"],
)
def test_a_run_that_ended_within_a_batch_is_resumed_as_one_rank_would_be(
    tmp_path: Path, stops: str, sharding: str, codes: list[int]
) -> None:
    expected = run_within_a_batch(tmp_path / "alone", TREE, 1, "none", [1])
    weights = run_within_a_batch(tmp_path / "shared", shared(TREE, sharding=sharding), 2, stops, codes)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
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
