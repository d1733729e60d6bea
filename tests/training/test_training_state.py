"""Lifecycle, order of finish, failures, divergence, state: everything about the split step but its numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_helpers import LOSS, MAX_LENGTH, make_group, make_trainer, microbatches, tiny_policy, train_step, weights

from asyncrl.algorithms.base import Loss, LossInputs, LossSums, MetricSum
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import DivergenceError, TrainStepError
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import Normaliser


class Failure(BaseException):
    """Not an Exception: what a narrow `except` would let slip."""


def failing_loss(at_call: int, error: BaseException) -> Loss:
    calls = 0

    def fn(inputs: LossInputs) -> LossSums:
        nonlocal calls
        if inputs.sequences:  # the empty evaluation at begin does not count
            calls += 1
        if calls == at_call:
            raise error
        return LOSS(inputs)

    return Loss("failing", fn, LOSS.normaliser)


# -- the state table ---------------------------------------------------------------------------------------------------


def closed(core: TorchTrainer) -> None:
    pass


def opened(core: TorchTrainer) -> None:
    core.begin_train_step(LOSS)
    core.train_microbatch(microbatches()[0])


def committed(core: TorchTrainer) -> None:
    opened(core)
    core.train_microbatch(microbatches()[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.training.optimizer.Schedule.lr", _raise)
        with pytest.raises(Failure):
            core.finish_train_step()


def _raise(*args: object, **kwargs: object) -> None:
    raise Failure


CALLS: dict[str, Callable[[TorchTrainer], object]] = {
    "begin": lambda core: core.begin_train_step(LOSS),
    "micro": lambda core: core.train_microbatch(microbatches()[0]),
    "finish": lambda core: core.finish_train_step(),
    "abort": lambda core: core.abort_train_step(),
}
NO_STEP = "no train step is open; call begin_train_step first"
TABLE = [
    (closed, "begin", None, True), (closed, "micro", NO_STEP, False), (closed, "finish", NO_STEP, False),
    (closed, "abort", None, False), (opened, "begin", "already open", True), (opened, "micro", None, True),
    (opened, "finish", None, False), (opened, "abort", None, False), (committed, "begin", "already open", True),
    (committed, "micro", "was applied", True), (committed, "finish", "was applied", True), (committed, "abort", None, False),
]  # fmt: skip


@pytest.mark.parametrize(("state", "call", "error", "open_after"), TABLE, ids=lambda x: getattr(x, "__name__", None))
def test_state_table(state: Callable, call: str, error: str | None, open_after: bool) -> None:
    core = make_trainer()
    state(core)
    before, gradient, version = weights(core), core.policy.flat.grad.clone(), core.version
    if error is not None:
        with pytest.raises(TrainStepError, match=error):
            CALLS[call](core)
        assert torch.equal(core.policy.flat.grad, gradient)  # a refused call changes nothing
    else:
        result = CALLS[call](core)
        assert (result is not None) == (call == "finish")
    assert (core._step is not None) == open_after
    moved = call == "finish" and error is None
    assert torch.equal(weights(core), before) != moved and core.version == version + moved


def test_train_step_error_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        make_trainer().finish_train_step()


# -- finish ------------------------------------------------------------------------------------------------------------


def test_order_of_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Spy:
        rank, world_size = 0, 1

        def all_reduce_sum_(self, tensor: torch.Tensor) -> None:
            assert tensor.dtype == torch.float64
            log.append("counts" if tensor.ndim == 1 else "metrics")

        def reduce_gradients_(self, flat: torch.Tensor) -> None:
            log.append("reduce" if float(flat.norm()) == pytest.approx(norm / sequences) else "reduce of raw sums")

    core = make_trainer(world=Spy())
    core.begin_train_step(LOSS)
    for batch in microbatches():
        core.train_microbatch(batch)
    norm, sequences = float(core.policy.flat.grad.norm()), 12
    for owner, name, label in (
        (core, "_clip", "clip"),
        (core.optimizer, "step", "step"),
        (core.policy, "advance", "version"),
        (core.optimizer, "set_lr", "schedule"),
    ):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, label=label: (log.append(label), real(*a))[1])
    core.finish_train_step()
    assert log == ["counts", "metrics", "reduce", "clip", "step", "version", "schedule"]


def test_clip_acts_on_the_rescaled_gradient() -> None:
    """A threshold between the norm of the sums and that of the mean must not fire, however often the batch is repeated."""
    free = train_step(make_trainer(grad_clip=None))
    for repeats in (1, 3):
        core = make_trainer(grad_clip=free.grad_norm * 1.01)
        result = train_step(core, microbatches() * repeats)
        assert result.grad_norm == pytest.approx(free.grad_norm, rel=1e-9)
        assert float(core.policy.flat.grad.norm()) == pytest.approx(free.grad_norm, rel=1e-9)
    core = make_trainer(grad_clip=free.grad_norm / 4)
    assert train_step(core).grad_norm == pytest.approx(free.grad_norm)
    assert float(core.policy.flat.grad.norm()) == pytest.approx(free.grad_norm / 4, rel=1e-12)


def test_a_step_without_a_sequence_raises_before_anything_moves() -> None:
    core = make_trainer(weight_decay=0.5)
    train_step(core)  # momentum exists: a step without gradient would move the weights
    before, version = weights(core), core.version
    core.begin_train_step(LOSS)
    with pytest.raises(TrainStepError, match="this step has no sequence on any rank"):
        core.finish_train_step()
    core.abort_train_step()
    assert torch.equal(weights(core), before) and core.version == version


def test_a_step_whose_sequences_are_all_masked_is_counted_and_moves_nothing() -> None:
    """All of them truncated, say: neither weights nor momentum, but the version and the schedule go on."""
    core, other = (make_trainer(weight_decay=0.5) for _ in range(2))
    for each in (core, other):
        train_step(each)
    before, version = weights(core), core.version
    result = train_step(core, microbatches(masked=(0, 1, 2, 3)))
    assert (result.tokens, result.sequences, result.loss, result.grad_norm) == (0, 12, 0.0, 0.0)
    assert torch.equal(weights(core), before) and core.version == result.version == version + 1
    train_step(core, microbatches(seed=1))
    train_step(other, microbatches(seed=1))
    assert torch.equal(weights(core), weights(other))


def test_fully_masked_sequences_count_in_the_sequence_normaliser() -> None:
    rng = np.random.default_rng(1)
    group = make_group(rng, 0)
    masked = [m for m in microbatches(masked=(0, 1, 2, 3))][:1]
    alone = train_step(make_trainer(), pack_groups([group], 1000))
    diluted = train_step(make_trainer(), [*pack_groups([group], 1000), *masked])
    assert (alone.sequences, diluted.sequences) == (4, 8) and alone.tokens == diluted.tokens
    assert diluted.loss == pytest.approx(alone.loss / 2, rel=1e-12)


def test_metric_normalisers_and_extremes() -> None:
    def fn(inputs: LossInputs) -> LossSums:
        ones = torch.ones_like(inputs.logp_S)
        largest = inputs.advantage_S.max() if ones.numel() else inputs.logp_S.new_tensor(float("-inf"))
        return LossSums(
            inputs.logp_S.sum(),
            {
                "per_token": MetricSum(ones.sum() * 2, Normaliser.TOKENS),
                "per_sequence": MetricSum(ones.sum() * 0 + inputs.sequences, Normaliser.SEQUENCES),
                "plain": MetricSum(ones.sum(), Normaliser.NONE),
                "advantage_max": MetricSum(largest, Normaliser.TOKENS),
                "advantage_min": MetricSum(-largest, Normaliser.TOKENS),
            },
        )

    batches = microbatches()
    metrics = train_step(make_trainer(), batches, Loss("probe", fn, Normaliser.TOKENS)).metrics
    assert metrics["per_token"] == 2 and metrics["per_sequence"] == 1
    assert metrics["plain"] == sum(b.scored for b in batches)
    extreme = max(float(b.advantages.max()) for b in batches)
    assert metrics["advantage_max"] == pytest.approx(extreme)
    assert metrics["advantage_min"] == pytest.approx(min(-float(b.advantages.max()) for b in batches))


def test_learning_rate_is_that_of_this_step() -> None:
    core = make_trainer(lr=1.0, warmup_steps=4)
    assert [train_step(core).lr for _ in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_mismatch_by_age_and_of_the_current_version() -> None:
    core = make_trainer()
    train_step(core)
    pure, old, mixed = microbatches()
    pure = replace(pure, versions=np.full_like(pure.versions, 1))
    exact = core.compute_logprobs(pure)
    pure = replace(pure, sampler_logprobs=exact - np.float32(0.25))
    half = np.where(np.arange(mixed.scored) % 2 == 0, 0, 1).astype(np.int32)
    half[mixed.sequence == mixed.sequence[0]] = 0
    metrics = train_step(core, [pure, old, replace(mixed, versions=half)]).metrics
    assert metrics["mismatch/current_tokens"] <= pure.scored + mixed.scored
    assert metrics["mismatch/current_max"] >= 0.25 - 1e-5
    assert {"mismatch_kl/by_age/0", "mismatch_kl/by_age/1"} <= set(metrics)
    fresh = make_trainer()
    fresh.policy.version = 1
    only = train_step(fresh, [pure, old]).metrics  # `old` is wholly of version 0: not compared
    assert only["mismatch/current_tokens"] == pure.scored
    assert only["mismatch/current_mean"] > 0


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("bad"), asyncio.CancelledError(), KeyboardInterrupt(), Failure()], ids=repr
)
def test_exception_in_the_second_microbatch_leaves_the_step_open_and_abort_cleans(error: BaseException) -> None:
    core = make_trainer()
    before = weights(core)
    core.begin_train_step(failing_loss(2, error))
    first, second, _ = microbatches()
    core.train_microbatch(first)
    with pytest.raises(type(error)):
        core.train_microbatch(second)
    with pytest.raises(TrainStepError, match="already open"):
        core.begin_train_step(LOSS)
    core.abort_train_step()
    assert not core.policy.flat.grad.any() and torch.equal(weights(core), before) and core.version == 0
    assert train_step(core) == train_step(make_trainer())  # the next step is clean


def test_failure_after_the_optimizer_step_still_ticks_the_version() -> None:
    core = make_trainer("bfloat16")
    committed(core)
    assert core.version == 1
    flat = core.policy.flat
    assert torch.equal(flat.working, flat.master.to(torch.bfloat16))  # no token is sampled by weights it does not name
    core.abort_train_step()
    assert train_step(core).version == 2


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_divergence_leaves_weights_and_version(poison: str) -> None:
    core = make_trainer()
    before = weights(core)
    batch = microbatches()[0]
    if poison == "loss":
        batch = replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    core.begin_train_step(LOSS)
    core.train_microbatch(batch)
    if poison == "gradient":
        core.policy.flat.grad[0] = float("inf")
    with pytest.raises(DivergenceError, match="unchanged"):
        core.finish_train_step()
    core.abort_train_step()
    assert torch.equal(weights(core), before) and core.version == 0


@pytest.mark.parametrize("beyond", [False, True])
def test_the_mismatch_gate_ends_a_run_before_its_step(beyond: bool) -> None:
    core = make_trainer()
    before = weights(core)
    batch = microbatches()[0]
    batch = replace(batch, sampler_logprobs=core.compute_logprobs(batch) - np.float32(0.25))
    core.mismatch_gate = 0.249 if beyond else 0.251
    core.begin_train_step(LOSS)
    core.train_microbatch(batch)
    if beyond:
        with pytest.raises(
            DivergenceError, match=r"step after version 0 is not applied: .* differ by 0.25 nats .* allows 0.249"
        ):
            core.finish_train_step()
        core.abort_train_step()
    else:
        core.finish_train_step()
    assert torch.equal(weights(core), before) == beyond and core.version == (not beyond)
    assert core.steps_done == bool(core.optimizer.state_dict()) == (not beyond)


def test_logprob_pass_between_microbatches_leaves_gradients_alone() -> None:
    plain = train_step(make_trainer())
    core = TorchTrainer(tiny_policy(), TrainConfig(lr=0.01), max_completion_length=MAX_LENGTH, needs_reference=True)
    core.begin_train_step(LOSS)
    for batch in microbatches():
        core.train_microbatch(batch)
        gradient, before = core.policy.flat.grad.clone(), weights(core)
        core.compute_logprobs(batch)
        core.compute_logprobs(batch, "reference")
        assert torch.equal(core.policy.flat.grad, gradient) and torch.equal(weights(core), before)
    result = core.finish_train_step()
    assert (result.loss, result.grad_norm) == (plain.loss, plain.grad_norm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_stays_at_the_start(dtype: str) -> None:
    core = TorchTrainer(tiny_policy(dtype), TrainConfig(lr=0.1), max_completion_length=MAX_LENGTH, needs_reference=True)
    batch = microbatches()[0]
    start = core.compute_logprobs(batch)
    train_step(core)
    assert np.array_equal(core.compute_logprobs(batch, "reference"), start)
    assert not np.array_equal(core.compute_logprobs(batch), start)


def test_no_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="no reference weights"):
        make_trainer().compute_logprobs(microbatches()[0], "reference")
