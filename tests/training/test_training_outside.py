"""Token ids that changed after they were checked, as a producer can do that writes into a record which it has put."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_helpers import EXPERTS, MAX_LENGTH, VOCABULARY, make_group, tiny_policy, train_step

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import DataError
from asyncrl.training.trainer import TorchTrainer


# The last token of a completion is scored and never runs; the first ones of a prompt run and are never scored.
@pytest.mark.parametrize(("place", "token"), [(-1, VOCABULARY), (0, -1), (-2, 2**31 - 1), (-1, -(2**31))])
def test_such_a_step_is_not_applied_and_its_group_is_named(place: int, token: int) -> None:
    """Of a microbatch with three groups, the one, on any device: nothing is looked up under such an id."""
    groups = [make_group(np.random.default_rng(4), group_id) for group_id in range(3)]
    trainer = TorchTrainer(tiny_policy(), TrainConfig(lr=0.1), max_completion_length=MAX_LENGTH, needs_reference=True)
    [batch] = pack_groups(groups, 10_000)
    tokens = max(groups[1][0].trajectories, key=lambda trajectory: trajectory.tokens.size).tokens
    tokens[place] = token
    [spoiled] = pack_groups(groups, 10_000)

    before = trainer.policy.flat.master.clone()
    trainer.begin_train_step(build_loss("grpo"))
    trainer.train_microbatch(batch)
    trainer.train_microbatch(spoiled)
    said = rf"the model has no token {token}, only 0 to {VOCABULARY - 1}: a record changed after it was checked"
    with pytest.raises(DataError, match=said) as raised:
        trainer.finish_train_step()
    assert raised.value.groups == (1,) and torch.equal(trainer.policy.flat.master, before)
    trainer.abort_train_step()
    for ask in (
        trainer.compute_logprobs,
        trainer.compute_entropies,
        lambda batch: trainer.compute_logprobs(batch, "reference"),
    ):
        with pytest.raises(DataError, match=said) as raised:
            ask(spoiled)
        assert raised.value.groups == (1,)
    assert train_step(trainer, [batch]).version == 1


def test_a_route_to_no_expert_is_laid_to_its_microbatch() -> None:
    policy = tiny_policy(kind="moe")
    trainer = TorchTrainer(policy, TrainConfig(lr=0.1), max_completion_length=MAX_LENGTH)
    [batch] = pack_groups([make_group(np.random.default_rng(4), group_id) for group_id in (3, 8)], 10_000)
    routes = np.zeros((batch.tokens.size, 2, 2), np.int8)
    routes[:, :, 1] = 1
    routes[5, 1] = EXPERTS
    with pytest.raises(DataError, match="a route names an expert that the model lacks") as raised:
        trainer.compute_logprobs(replace(batch, routes=routes))
    assert raised.value.groups == (3, 8)
    with pytest.raises(DataError, match="a route names an expert that the model lacks"):
        train_step(trainer, [replace(batch, routes=routes)])
    assert trainer.version == 0
