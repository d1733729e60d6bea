"""Optimizer, schedule, and the state that a checkpoint holds."""

from __future__ import annotations

import pytest
import torch
from training_helpers import LOSS, make_trainer, microbatches, tiny_policy, train_step, weights

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, TrainStepError
from asyncrl.training.optimizer import Schedule
from asyncrl.training.trainer import TorchTrainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_state_round_trip_is_bit_exact(dtype: str) -> None:
    settings = {"schedule": "cosine", "max_steps": 6, "warmup_steps": 1, "weight_decay": 0.1}
    straight, first = make_trainer(dtype, **settings), make_trainer(dtype, **settings)
    for core in (straight, first):
        train_step(core)
        train_step(core)
    state = {
        key: {n: t.clone() for n, t in value.items()} if key == "masters" else value
        for key, value in first.state_dict().items()
    }
    second = make_trainer(dtype, **settings)
    second.policy.flat.master.zero_()
    second.load_state_dict(state)
    assert second.version == 2 and torch.equal(second.policy.flat.working, first.policy.flat.working)
    first.policy.flat.master.zero_()  # the copy is a copy
    for _ in range(2):
        assert train_step(straight) == train_step(second)
    assert torch.equal(weights(straight), weights(second))


def test_state_of_an_open_step_is_the_last_commit() -> None:
    core = make_trainer()
    train_step(core)
    before = {name: tensor.clone() for name, tensor in core.state_dict()["masters"].items()}
    core.begin_train_step(LOSS)
    core.train_microbatch(microbatches()[0])
    state = core.state_dict()
    assert state["version"] == 1 and all(torch.equal(state["masters"][n], t) for n, t in before.items())
    with pytest.raises(TrainStepError, match="load_state_dict"):
        core.load_state_dict(state)


def test_incomplete_state_is_named() -> None:
    core = make_trainer()
    train_step(core)
    state = core.state_dict()
    del state["masters"]["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        make_trainer().load_state_dict(state)
    needs = TorchTrainer(tiny_policy(), TrainConfig(), max_completion_length=1, needs_reference=True)
    with pytest.raises(KeyError, match="reference"):
        needs.load_state_dict(core.state_dict())


@pytest.mark.parametrize("total", [1, 4, 11])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize(
    "name, other", [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_schedules_are_those_of_transformers(name: str, other: str, warmup: int, total: int) -> None:
    from transformers import get_scheduler

    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    oracle = get_scheduler(other, reference, num_warmup_steps=warmup, num_training_steps=total)
    ours = Schedule(TrainConfig(lr=2.0, schedule=name, warmup_steps=warmup), total)  # type: ignore[arg-type]
    for step in range(total):
        assert ours.lr(step) == pytest.approx(oracle.get_last_lr()[0], rel=1e-12, abs=1e-15), step
        reference.step()
        oracle.step()


def test_schedules() -> None:
    floor = Schedule(TrainConfig(lr=1.0, schedule="linear", min_lr_ratio=0.2), 4)
    assert [floor.lr(k) for k in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    with pytest.raises(ConfigError, match="needs the last step"):
        Schedule(TrainConfig(schedule="linear"), None)
