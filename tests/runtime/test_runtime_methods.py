"""Every loss and every term by its name in whole runs, and minibatches against a loop written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import (
    FAST,
    RANK,
    REAL,
    REWARDS,
    config_of,
    equal_weights,
    metrics_of,
    run_ranks,
    weights_of,
    write_yaml,
)
from runtime_model import build, rows
from torch import Tensor

from asyncrl import Runtime
from asyncrl.algorithms.registry import LOSSES
from asyncrl.main import main
from asyncrl.types import Trajectory


def run(
    folder: Path, algorithm: dict[str, Any], *overrides: str, steps: int = 2, **sections: Any
) -> list[dict[str, Any]]:
    tree = REAL | FAST | sections | {"algorithm": algorithm, "checkpoint": {"save_final": False}}
    train = tree["train"] | {"max_steps": steps}
    assert main([str(write_yaml(folder, tree | {"train": train})), "run.overwrite=true", *overrides]) == 0
    lines = metrics_of(folder / "runs/run")
    assert all(math.isfinite(line["loss"]) and line["optim/grad_norm"] > 0 for line in lines)
    return lines


def last(folder: Path, algorithm: dict[str, Any], *overrides: str, **more: Any) -> dict[str, Any]:
    return run(folder, algorithm, *overrides, **more)[-1]


ON_ONE_BATCH = ("grpo", "dapo", "dr_grpo", "luspo", "cispo", "reinforce")


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - set(ON_ONE_BATCH)))
def test_every_other_loss_trains_by_name(here: Path, name: str) -> None:
    preset = "sync" if name == "bnpo" else "async"
    line = last(here, {"loss": name, "updates_per_batch": 2}, f"preset={preset}")
    assert ("vespo/phi_mean" in line) == (name == "vespo")
    assert ("clip_ratio/region_mean" in line) == (name not in ("sapo", "vespo"))


def test_the_same_batch_has_another_gradient_under_another_loss(here: Path) -> None:
    """In the first step of a sync run all losses see the same tokens and advantages."""
    norms = {}
    for name in ON_ONE_BATCH:
        [line] = run(here, {"loss": name, "importance": {"cap": None}}, "preset=sync", steps=1)
        norms[name] = line["optim/grad_norm"]
    assert norms["cispo"] == pytest.approx(norms["dapo"], rel=1e-5)  # on-policy they are one, and one with
    assert norms["reinforce"] == pytest.approx(norms["dapo"], rel=1e-5)
    assert norms["luspo"] != pytest.approx(norms["dapo"], rel=1e-3)
    assert norms["grpo"] != pytest.approx(norms["dr_grpo"], rel=1e-3)


def test_importance_modes_opsm_and_their_metrics(here: Path) -> None:
    algorithm = {
        "loss": "dapo",
        "importance": {"mode": "sequence_mask_tis", "floor": 0.5, "cap": 2.0, "veto": 1e-4, "log_clamp": 20.0},
        "off_policy_mask": {"threshold": 0.01},
        "updates_per_batch": 2,
        "clip": {"dual_clip": 3.0},
    }
    line = last(here, algorithm)
    assert {"importance/bounded_mean", "importance/vetoed_mean", "opsm/dropped_mean"} <= set(line)
    assert line["opsm/dropped_mean"] > 0  # at the second update the policy has left the sampler
    assert any(name.startswith("mismatch_kl/by_age/") for name in line) and line["mismatch/ratio_max"] >= 1


def test_kl_in_the_loss_and_in_the_reward(here: Path) -> None:
    in_loss = run(here, {"kl": {"coef": 0.1, "estimator": "k3", "bias_correction": True}}, "preset=sync", steps=3)
    assert abs(in_loss[0]["kl"]) < 1e-6 < in_loss[-1]["kl"]
    in_reward = run(here, {"kl": {"coef": 50.0, "estimator": "k1", "place": "reward"}}, "preset=sync", steps=3)
    plain = run(here, {}, "preset=sync", steps=3)
    assert abs(in_reward[0]["kl"]) < 1e-4 < abs(in_reward[-1]["kl"])
    assert in_reward[0]["reward/mean"] == plain[0]["reward/mean"]  # rewards are reported as they were given
    assert in_reward[1]["optim/grad_norm"] != pytest.approx(plain[1]["optim/grad_norm"], rel=1e-3)


def test_entropy_terms_of_whole_steps(here: Path) -> None:
    """A coefficient that outweighs the reward: the entropy rises, and falls without."""
    rising = {"loss": "grpo", "entropy": {"coef": 5.0}}
    surveyed = run(here, rising | {"top_entropy": {"quantile": 0.5}}, "preset=one_off", "train.grad_clip=1", steps=3)
    assert surveyed[-1]["entropy"] > surveyed[0]["entropy"]
    both = run(here, rising | {"top_entropy": {"quantile": 0.5}, "updates_per_batch": 2}, "preset=sync", steps=2)
    assert both[-1]["entropy"] > both[0]["entropy"]


def test_a_controlled_entropy_coefficient(here: Path) -> None:
    """Below its target the coefficient grows with every optimizer step, above it nothing acts."""
    low = {"loss": "grpo", "entropy": {"target": 20.0, "coef_delta": 0.01}}
    for updates in (1, 2):
        lines = run(here, low, f"algorithm.updates_per_batch={updates}", "preset=one_off", steps=3)
        expected = [0.01 * updates * (i + 1) - 0.01 for i in range(3)]
        assert [line["entropy_coef"] for line in lines] == pytest.approx(expected, abs=1e-9)
    high = {"loss": "dapo", "entropy": {"target": 0.01, "coef": 0.5}}
    assert [line["entropy_coef"] for line in run(here, high, steps=2)] == [0, 0]


def test_overlong_filters_take_tokens_and_no_sequences(here: Path) -> None:
    rollout = {"group_size": 4, "groups_per_step": 4, "max_tokens": 8}
    plain = run(here, {}, "preset=sync", steps=1, rollout=rollout)[0]
    for algorithm in ({"mask": {"truncated": True}}, {"mask": {"longer_than": 7}}):
        line = run(here, algorithm, "preset=sync", steps=1, rollout=rollout)[0]
        assert line["train/sequences"] == plain["train/sequences"] == 16
        long = plain["train/tokens"] - line["train/tokens"]
        assert line["train/tokens"] > 0 and long > 0 and long % 8 == 0  # all of the completions of 8 tokens


@pytest.mark.parametrize("algorithm", [{"loss": "dapo"}, {"loss": "grpo", "updates_per_batch": 2, "kl": {"coef": 0.1}}])
def test_a_run_of_truncated_completions_ends_as_asked_and_teaches_nothing(
    here: Path, algorithm: dict[str, Any]
) -> None:
    rollout = REAL["rollout"] | {"ignore_eos": True}
    tree = REAL | {"rollout": rollout, "algorithm": algorithm | {"mask": {"truncated": True}}}
    assert main([str(write_yaml(here, tree)), "train.weight_decay=0.5", "checkpoint.every=1", "checkpoint.keep=0"]) == 0
    lines = metrics_of(here / "runs/run")
    assert [(line["train/tokens"], line["train/sequences"]) for line in lines] == [(0, 16)] * 3
    updates = algorithm.get("updates_per_batch", 1)
    first, last = (weights_of(here / "runs/run", updates * step) for step in (1, 3))
    assert equal_weights(first, last)


def test_centres_of_the_clip(here: Path) -> None:
    moved = last(here, {"loss": "dapo", "updates_per_batch": 3, "clip": {"epsilon": 0.01}}, "preset=sync")
    assert moved["clip_ratio/region_mean"] > 0
    forced = last(here, {"loss": "dapo", "updates_per_batch": 3, "force_on_policy": True}, "preset=sync")
    assert forced["clip_ratio/region_mean"] == 0
    sampler = last(here, {"loss": "dapo", "updates_per_batch": 3, "clip": {"epsilon": 0.01}, "old_logprobs": "sampler"})
    assert sampler["clip_ratio/region_mean"] > 0 and "importance/ratio_mean" not in sampler


def test_what_cannot_be_exits_2_with_the_way_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm, words in (
        ({"loss": "bnpo"}, "use loss=dapo"),
        ({"entropy": {"coef": 0.1}}, "rollout.streaming=false"),
        ({"minibatches": 5}, "algorithm.minibatches is 5; expected at most rollout.groups_per_step = 4"),
    ):
        assert main([str(write_yaml(here, REAL | {"algorithm": algorithm}))]) == 2
        assert words in capsys.readouterr().err


EPSILON, LR, ADAM = 0.05, 0.3, 1e-2  # such a large epsilon that rounding, in float32 norms, decides no sign


def tree(**algorithm: Any) -> dict[str, Any]:
    """float64, and nothing in the gradient but the loss."""
    rest = {"importance": {"cap": None}, "clip": {"epsilon": EPSILON}}
    return (
        REAL
        | FAST
        | {
            "preset": "sync",
            "model": REAL["model"] | {"dtype": "float64"},
            "algorithm": rest | algorithm,
            "train": REAL["train"] | {"grad_clip": None, "lr": LR, "eps": ADAM},
        }
    )


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
    whole = by_hand(name, reports, (), passes * parts)  # as many steps over the whole batch are something else
    assert max(float((weights[tensor] - whole[tensor]).abs().max()) for tensor in weights) > 0.1


@pytest.mark.parametrize("sharding", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_train_what_one_rank_trains(here: Path, sharding: str) -> None:
    """Five prompts, 0, 2, 4 here and 1, 3 there; of the last of three parts one rank has nothing, and takes part in the survey of
    entropies all the same. The advantages are made of statistics over the step, and one component of the reward is None for half of
    the completions."""
    (here / "five.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    functions = [{"function": f"{REWARDS}:share"}, {"function": f"{REWARDS}:short", "weight": 0.5}]
    survey = {"entropy": {"coef": 0.1}, "top_entropy": {"quantile": 0.4}}
    base = tree(loss="dapo", updates_per_batch=2, minibatches=3, advantage="gdpo", **survey)
    base |= {
        "reward": {"functions": functions},
        "data": {"train": str(here / "five.jsonl"), "max_prompt_tokens": 12},
        "rollout": REAL["rollout"] | {"groups_per_step": 5},
    }
    base |= {"train": base["train"] | {"max_epochs": 1}}
    assert main([str(write_yaml(here, base)), "run.name=alone"]) == 0
    both = base | {"run": {"name": "both"}, "distributed": {"sharding": sharding}}
    run_ranks(here, both, program=RANK, RANK_WEIGHTS=str(here))
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
