"""Groups without advantages that are not run: the same gradient, the same N, and means of metrics over what was run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_helpers import MAX_LENGTH, make_group, make_trainer, tiny_policy, train_step, weights

from asyncrl.algorithms.registry import LOSSES, build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.pumps.building import microbatch_of_counts
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import StepResult


def step(name: str, skip: bool, **numbers: float) -> tuple[StepResult, torch.Tensor, torch.Tensor]:
    """Groups 1 and 2 of 4 have no advantages. Gradient and weights after the step, with a clip that bites."""
    rng = np.random.default_rng(4)
    groups = [make_group(rng, i, masked=(1,) if i == 2 else ()) for i in range(4)]
    silent = [group for group, _ in groups[1:3]]
    groups = [(group, values * (i not in (1, 2))) for i, (group, values) in enumerate(groups)]
    batches = pack_groups([groups[0], groups[3]] if skip else groups, 60)
    if skip:
        batches.append(microbatch_of_counts(silent))
    policy = tiny_policy()
    trainer = TorchTrainer(policy, TrainConfig(lr=0.1, grad_clip=0.01), max_completion_length=MAX_LENGTH)
    result = train_step(trainer, batches, build_loss(name, **numbers))
    return result, policy.flat.grad.clone(), policy.flat.master.clone()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"bnpo"}))
@pytest.mark.parametrize("numbers", [{}, {"off_policy_mask_threshold": 0.1}])
def test_not_run_is_as_good_as_run(name: str, numbers: dict[str, float]) -> None:
    run, gradient, moved = step(name, skip=False, **numbers)
    skipped, gradient_, moved_ = step(name, skip=True, **numbers)
    torch.testing.assert_close(gradient_, gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(moved_, moved, rtol=0, atol=1e-10)
    assert gradient.abs().max() > 1e-4
    assert (skipped.tokens, skipped.sequences) == (run.tokens, run.sequences) == (run.tokens, 16)
    assert skipped.loss == pytest.approx(run.loss, abs=1e-12)
    assert skipped.grad_norm == pytest.approx(run.grad_norm, rel=1e-10)


def test_where_a_microbatch_divides_by_its_own_tokens_it_would_not_be() -> None:
    """Why `resolve` refuses it."""
    run, skipped = step("bnpo", skip=False)[0], step("bnpo", skip=True)[0]
    assert skipped.grad_norm != pytest.approx(run.grad_norm, rel=1e-2)


def test_means_are_over_what_was_run() -> None:
    """Alone, the two groups that run have the same mean entropy as in a step that counts two others beside them."""
    rng = np.random.default_rng(4)
    groups = [make_group(rng, i, masked=(1,) if i == 2 else ()) for i in range(4)]
    trainer = TorchTrainer(tiny_policy(), TrainConfig(lr=0.1), max_completion_length=MAX_LENGTH)
    alone = train_step(trainer, pack_groups([groups[0], groups[3]], 60)).metrics
    beside = step("grpo", skip=True)[0].metrics
    for name in ("entropy", "mismatch_kl/mean", "importance/ratio_mean"):
        assert beside[name] == pytest.approx(alone[name], rel=1e-12), name


def test_a_step_in_which_nothing_runs_still_counts() -> None:
    """As it would if its groups had run: the gradient is 0, and what the optimizer does then is the optimizer's affair."""
    rng = np.random.default_rng(0)
    trainer = make_trainer()
    before = weights(trainer)
    result = train_step(trainer, [microbatch_of_counts([make_group(rng, 0)[0]])])
    assert result.version == 1 and result.tokens > 0 and result.grad_norm == 0
    assert torch.equal(weights(trainer), before)
