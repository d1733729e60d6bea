"""`algorithm.minibatches` in whole runs: against a loop written by hand, over two ranks, and resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import REAL, REWARDS, Process, config_of, equal_weights, metrics_of, weights_of, write_yaml
from runtime_model import build, rows
from torch import Tensor

from asyncrl import Runtime
from asyncrl.main import main
from asyncrl.types import Trajectory

EPSILON, LR, ADAM = 0.05, 0.3, 1e-2  # such a large epsilon that rounding, in float32 norms, decides no sign
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(Path(__file__).with_name("runtime_rank.py")))


def tree(**algorithm: Any) -> dict[str, Any]:
    """float64, and nothing in the gradient but the loss."""
    rest = {"importance": {"cap": None}, "clip": {"epsilon": EPSILON}}
    return REAL | {
        "preset": "sync",
        "model": REAL["model"] | {"dtype": "float64"},
        "algorithm": rest | algorithm,
        "train": REAL["train"] | {"grad_clip": None, "lr": LR, "eps": ADAM},
    }


def logprobs(model: Any, trajectory: Trajectory) -> Tensor:
    """Of the sampled tokens, by the plain model, one row at a time."""
    ids = torch.tensor(trajectory.tokens).long()
    every = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return every[torch.tensor(trajectory.mask)[1:]]


def loss_of(name: str, model: Any, part: Sequence[tuple[Trajectory, float, Tensor]]) -> Tensor:
    """PPO's clipped surrogate over a part of the batch, which alone is what it is divided by."""
    sums = []
    for trajectory, advantage, old in part:
        ratio = torch.exp(logprobs(model, trajectory) - old)
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        sums.append(loss.mean() if name == "grpo" else loss.sum())
    by = len(part) if name == "grpo" else sum(int(t.mask.sum()) for t, _, _ in part)
    return torch.stack(sums).sum() / by


def by_hand(name: str, reports: Sequence[Any], cuts: Sequence[int], passes: int) -> dict[str, Tensor]:
    """As TRL orders it: old log-probs of the whole batch at its start; then its slices one after another, as often as asked."""
    model, _ = build(0)
    model = model.double().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=ADAM, weight_decay=0.0)
    for report in reports:
        groups = sorted(report.groups, key=lambda group: group.group_id)
        with torch.no_grad():
            batch = [
                [
                    (t, float(report.advantages[group.group_id][t.member]), logprobs(model, t))
                    for t in group.trajectories
                ]
                for group in groups
            ]
        for _ in range(passes):
            for first, last in zip([0, *cuts], [*cuts, len(groups)], strict=True):
                optimizer.zero_grad()
                loss_of(name, model, [row for group in batch[first:last] for row in group]).backward()
                optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "passes", "parts", "cuts"), [("grpo", 1, 2, (2,)), ("dapo", 2, 3, (2, 3))])
async def test_a_run_is_the_loop_written_by_hand(here: Path, name: str, passes: int, parts: int, cuts: Any) -> None:
    base = tree(loss=name, updates_per_batch=passes, minibatches=parts)
    async with Runtime(config_of(here, "train.max_steps=3", base=base)) as runtime:
        steps = runtime.steps()
        await runtime.run()
        reports = [report async for report in steps]
        assert runtime.built.policy is not None
        weights = {name: tensor.clone() for name, tensor in runtime.built.policy.flat.named_masters()}
    assert [report.version for report in reports] == [passes * parts * turn for turn in (1, 2, 3)]
    assert {report.result.sequences for report in reports} == {16}
    expected = by_hand(name, reports, cuts, passes)
    for tensor, values in weights.items():
        torch.testing.assert_close(values, expected[tensor], rtol=0, atol=3e-5)
    whole = by_hand(
        name, reports, (), passes * parts
    )  # the same number of steps over the whole batch is something else
    assert max(float((weights[tensor] - whole[tensor]).abs().max()) for tensor in weights) > 0.1


@pytest.mark.parametrize("sharding", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_rank_trains(here: Path, sharding: str) -> None:
    """Five prompts, 0, 2, 4 here and 1, 3 there; of the last of three parts one rank has nothing. The advantages are made of
    statistics over the step, and one component of the reward is None for half of the completions."""
    (here / "five.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    functions = [{"function": f"{REWARDS}:share"}, {"function": f"{REWARDS}:short", "weight": 0.5}]
    base = tree(loss="dapo", updates_per_batch=2, minibatches=3, advantage="gdpo")
    base |= {
        "reward": {"functions": functions},
        "data": {"train": "five.jsonl", "max_prompt_tokens": 12},
        "rollout": REAL["rollout"] | {"groups_per_step": 5},
    }
    path = str(write_yaml(here, base | {"train": base["train"] | {"max_epochs": 1}}))
    assert main([path, "run.name=alone"]) == 0
    both = ("run.name=both", f"distributed.sharding={sharding}")
    process = Process(here, path, *both, RANK_WEIGHTS=str(here), program=TORCHRUN)
    assert process.wait(180) == 0, process.output
    ranks = [torch.load(here / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [[sorted(groups) for groups in rank["groups"]] for rank in ranks] == [[[0, 2, 4]], [[1, 3]]]
    one, other = (weights_of(here / "runs" / run, 6) for run in ("alone", "both"))
    for tensor, values in one.items():
        torch.testing.assert_close(other[tensor], values, rtol=0, atol=1e-10)
    (mine,), (theirs,) = (metrics_of(here / "runs" / run) for run in ("alone", "both"))
    assert mine["train/sequences"] == theirs["train/sequences"] == 20
    assert mine["reward/mean"] == theirs["reward/mean"] and mine["reward/short/applicable"] < 1
    assert mine["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-9)


def test_a_resumed_run_is_the_uninterrupted_one(here: Path) -> None:
    path = str(write_yaml(here, tree(minibatches=2, updates_per_batch=2) | {"checkpoint": {"every": 4}}))
    assert main([path, "run.name=whole", "train.max_steps=4"]) == 0
    assert main([path, "run.name=halves", "train.max_steps=2"]) == 0
    assert main([path, "run.name=halves", "train.max_steps=4", "resume=true"]) == 0
    assert [line["step"] for line in metrics_of(here / "runs/halves")] == [4, 8, 12, 16]
    assert equal_weights(weights_of(here / "runs/whole", 16), weights_of(here / "runs/halves", 16))
    assert main([path, "run.name=halves", "resume=true", "algorithm.minibatches=1"]) == 2


def test_more_parts_than_groups_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_yaml(here, tree(minibatches=5)))]) == 2
    assert "algorithm.minibatches is 5; expected at most rollout.groups_per_step = 4" in capsys.readouterr().err
