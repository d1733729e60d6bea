"""Every loss and every term by its name in the YAML file, in whole runs of a tiny model: the trainer really uses it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import REAL, Process, equal_weights, metrics_of, weights_of, write_yaml

from asyncrl.algorithms.registry import LOSSES
from asyncrl.main import main


def run(
    folder: Path, algorithm: dict[str, Any], *overrides: str, steps: int = 2, **sections: Any
) -> list[dict[str, Any]]:
    tree = REAL | sections | {"algorithm": algorithm, "checkpoint": {"save_final": False}}
    train = tree["train"] | {"max_steps": steps}
    assert main([str(write_yaml(folder, tree | {"train": train})), "run.overwrite=true", *overrides]) == 0
    lines = metrics_of(folder / "runs/run")
    assert all(math.isfinite(line["loss"]) and line["optim/grad_norm"] > 0 for line in lines)
    return lines


def last(folder: Path, algorithm: dict[str, Any], *overrides: str, **more: Any) -> dict[str, Any]:
    return run(folder, algorithm, *overrides, **more)[-1]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_trains_by_name(here: Path, name: str) -> None:
    preset = "sync" if name == "bnpo" else "async"
    line = last(here, {"loss": name, "updates_per_batch": 2}, f"preset={preset}")
    assert ("vespo/phi_mean" in line) == (name == "vespo")
    assert ("clip_ratio/region_mean" in line) == (name not in ("sapo", "vespo", "reinforce"))


def test_the_same_batch_has_another_gradient_under_another_loss(here: Path) -> None:
    """In the first step of a sync run all losses see the same tokens and advantages."""
    norms = {}
    for name in ("grpo", "dapo", "dr_grpo", "luspo", "cispo", "reinforce"):
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
        "scale": {"positive": 0.5},
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


def test_entropy_terms_streamed_with_the_buffer_and_whole_with_a_survey(here: Path) -> None:
    """A coefficient that outweighs the reward: entropy rises in both, and falls without."""
    rising = {"loss": "grpo", "entropy": {"coef": 5.0}}
    buffered = "algorithm.entropy.second_gradient_buffer=true"
    streamed = run(here, rising, buffered, "train.grad_clip=1", steps=3)
    assert streamed[-1]["entropy"] > streamed[0]["entropy"]
    surveyed = run(here, rising | {"top_entropy": {"quantile": 0.5}}, "preset=one_off", "train.grad_clip=1", steps=3)
    assert surveyed[-1]["entropy"] > surveyed[0]["entropy"]
    both = run(here, rising | {"top_entropy": {"quantile": 0.5}, "updates_per_batch": 2}, "preset=sync", steps=2)
    assert both[-1]["entropy"] > both[0]["entropy"]


def test_a_controlled_entropy_coefficient(here: Path) -> None:
    """Below its target the coefficient grows with every optimizer step, above it nothing acts."""
    for loss, way in (
        ("dapo", []),
        ("grpo", ["entropy.second_gradient_buffer=true"]),
        ("grpo", ["updates_per_batch=2"]),
    ):
        low = {"loss": loss, "entropy": {"target": 20.0, "coef_delta": 0.01}}
        lines = run(here, low, *(f"algorithm.{each}" for each in way), steps=3)
        found = [line["entropy_coef"] for line in lines]
        steps = 2 if way == ["updates_per_batch=2"] else 1
        expected = [0.01 * steps * (i + 1) - 0.01 for i in range(3)]
        assert found == pytest.approx(expected, abs=1e-9)
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


def test_what_cannot_stream_exits_2_with_the_way_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for algorithm, words in (
        ({"loss": "bnpo"}, "use loss=dapo"),
        ({"entropy": {"coef": 0.1}}, "second_gradient_buffer=true"),
    ):
        assert main([str(write_yaml(here, REAL | {"algorithm": algorithm}))]) == 2
        assert words in capsys.readouterr().err


def test_the_plan_shows_the_second_buffer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = {"entropy": {"coef": 0.1, "second_gradient_buffer": True}}
    assert main([str(write_yaml(here, REAL | {"algorithm": algorithm})), "--dry-run"]) == 0
    assert "second_gradients" in capsys.readouterr().out


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(Path(__file__).with_name("runtime_rank.py")))


@pytest.mark.parametrize(
    ("preset", "algorithm"),
    [
        ("one_off", {"entropy": {"coef": 0.1}, "top_entropy": {"quantile": 0.4}, "updates_per_batch": 2}),
        pytest.param(
            "async",
            {"entropy": {"coef": 0.1, "second_gradient_buffer": True}, "kl": {"coef": 0.1, "place": "reward"}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_know_the_same_step(here: Path, preset: str, algorithm: dict[str, Any]) -> None:
    """The survey is a collective, also for a rank that got no group; the second buffer needs none."""
    tree = REAL | {"preset": preset, "algorithm": algorithm, "checkpoint": {"save_final": False}}
    tree["rollout"] = REAL["rollout"] | {"groups_per_step": 2}
    process = Process(here, str(write_yaml(here, tree)), RANK_WEIGHTS=str(here), program=TORCHRUN)
    assert process.wait(180) == 0, process.output
    one, other = (torch.load(here / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one["version"] == other["version"] == 3 * algorithm.get("updates_per_batch", 1)
    assert equal_weights(one["weights"], other["weights"])
    assert [len(mine) + len(theirs) for mine, theirs in zip(one["groups"], other["groups"], strict=True)] == [2] * 3
