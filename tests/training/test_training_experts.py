"""Models with experts: recorded routes in the passes that replay them, and the auxiliary loss that balances experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import lines_of
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import EXPERTS, LOSS, MAX_LENGTH, make_group, tiny_module, tiny_policy, train_step, with_routes
from training_partition import SEQUENCES, SIZE, groups
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl.algorithms.base import Loss, LossInputs, LossSums
from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.errors import ConfigError, DataError
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.paths import FUSED, PACKED, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.training.balance import BALANCE_METRIC, balance_of
from asyncrl.training.passes import UNREPLAYED
from asyncrl.training.trainer import TorchTrainer
from asyncrl.types import FinishReason, GenerationRequest, Group, Microbatch, SamplingParams, Trajectory

COEFFICIENT = 0.5  # of the tiny model
BOTH_PATHS = pytest.mark.parametrize("path", (PACKED, FUSED), ids=str)


def trainer(dtype: str = "float64", balance: bool = True, path: ModelPath = PACKED, **options: Any) -> TorchTrainer:
    module = tiny_module("moe")
    module.config.output_router_logits = balance
    config = TrainConfig(grad_clip=None, **options.pop("train", {}))
    return TorchTrainer(PolicyModel(module, dtype, path=path), config, max_completion_length=MAX_LENGTH, **options)


def gradient(
    core: TorchTrainer, loss: Loss, batches: list[Microbatch]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    result = train_step(core, batches, loss)
    return {name: grad.clone() for name, grad in core.policy.flat.named_grads()}, {
        **result.metrics,
        "loss": result.loss,
    }


def split(where: list[int]) -> list[Microbatch]:
    """Sequence `g x SIZE + m` is member m of group g."""
    found: list[Microbatch] = []
    for number in sorted(set(where)):
        part = []
        for place, (group, advantages) in enumerate(groups(3)):
            mine = [m for m in range(SIZE) if where[place * SIZE + m] == number]
            if mine:
                kept = replace(group, trajectories=tuple(group.trajectories[m] for m in mine))
                part.append((kept, advantages[mine]))
        found += pack_groups(part, 10_000)
    return found


def balance_by_transformers(sequences: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Its own forward and its own function, a line at a time; (gradient, value)."""
    module = tiny_module("moe").double().eval()
    module.set_experts_implementation("eager")
    rows = [t for group, _ in groups(3) for t in group.trajectories]
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if row.mask.any():
            needed = {token for scored in np.flatnonzero(row.mask) for token in row.path(int(scored))[:-1].tolist()}
            parts = []
            for line in lines_of(row):
                tokens = torch.from_numpy(row.tokens[line].astype(np.int64))
                of_line = module(input_ids=tokens[None], output_router_logits=True).router_logits
                parts.append([layer[[token in needed for token in line]] for layer in of_line])
                needed -= set(line)
            logits = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
            weight = 1 / len(rows) if sequences else row.mask.sum() / sum(t.mask.sum() for t in rows)
            total = total + weight * load_balancing_loss_func(logits, EXPERTS, 2)
    (COEFFICIENT * total).backward()
    none = torch.zeros(())
    return {name: none if p.grad is None else p.grad for name, p in module.named_parameters()}, float(total.detach())


@pytest.mark.parametrize(
    ("name", "path"), (("dapo", PACKED), ("grpo", PACKED), ("dr_grpo", PACKED), ("grpo", FUSED)), ids=str
)
def test_experts_are_balanced_alike_however_a_step_is_split(name: str, path: ModelPath) -> None:
    loss, core, other = build_loss(name), trainer(path=path), trainer(balance=False, path=path)
    state = core.state_dict()
    kept = {key: {n: v.clone() for n, v in state[key].items()} for key in ("masters",)}
    whole = [0] * SEQUENCES
    unbalanced, found = gradient(other, loss, split(whole))
    assert BALANCE_METRIC not in found
    added, value = balance_by_transformers(sequences=name != "dapo")
    assert sum(float(each.abs().sum()) for each in added.values()) > 0.1

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, 3), min_size=SEQUENCES, max_size=SEQUENCES))
    def holds(where: list[int]) -> None:
        core.policy.flat.load_masters(kept["masters"])
        balanced, metrics = gradient(core, loss, split(where))
        for each, grad in balanced.items():
            torch.testing.assert_close(grad, unbalanced[each] + added[each], rtol=0, atol=2e-7)
        assert metrics[BALANCE_METRIC] == pytest.approx(value, rel=1e-6)
        assert metrics["loss"] == pytest.approx(found["loss"] + COEFFICIENT * value, rel=1e-6)

    holds()


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        each = found if isinstance(found, (tuple, list)) else (found,)
        self.numbers = max(self.numbers, *(one.numel() for one in each if isinstance(one, torch.Tensor)), 0)
        return found


def test_balance_makes_no_tensor_of_more_than_one_layer() -> None:
    (batch,) = split([0] * SEQUENCES)
    routes, size = Routes(6, keep_logits=True), batch.tokens.size
    for layer in range(6):
        routes.choose(layer, torch.zeros(size, 4, dtype=torch.int64))
        routes.keep(layer, torch.randn(size, 32, requires_grad=True))
    with Largest() as seen:
        balance_of(routes, batch).sum().backward()
    assert seen.numbers == size * 32


class Heard:
    """A loss that keeps what it was given."""

    def __init__(self) -> None:
        self.inputs: list[LossInputs] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(LOSS, name)

    def __call__(self, inputs: LossInputs) -> LossSums:
        self.inputs.append(inputs)
        return LOSS(inputs)


@BOTH_PATHS
@pytest.mark.parametrize("checkpointing", (False, True))
def test_old_logprobs_and_training_replay_and_the_reference_does_not(checkpointing: bool, path: ModelPath) -> None:
    core = trainer(path=path, needs_reference=True, train={"gradient_checkpointing": checkpointing})
    (native,) = split([0] * SEQUENCES)
    batch = with_routes(native)
    old, entropies = core.compute_logprobs(batch), core.compute_entropies(batch)
    assert np.abs(old - core.compute_logprobs(native)).max() > 0.01
    assert np.abs(entropies - core.compute_entropies(native)).max() > 0.001
    np.testing.assert_array_equal(core.compute_logprobs(batch, "reference"), core.compute_logprobs(native, "reference"))
    np.testing.assert_array_equal(core.compute_logprobs(batch, "reference"), core.compute_logprobs(native))
    loss = Heard()
    core.begin_train_step(loss)  # type: ignore[arg-type]  # a stand-in that listens
    core.train_microbatch(batch)
    np.testing.assert_array_equal(loss.inputs[-1].logp_S.detach().float().numpy(), old)
    assert core.finish_train_step().grad_norm > 0
    assert core.policy.routing is not None and core.policy.routing.current is None


def sampled(core: TorchTrainer, lengths: tuple[int, ...]) -> Group:
    """A group of the product's own sampler, with routes."""
    numbers: dict[str, Any] = dict(max_sequences=4, max_context=40, kv_positions=160, prefill_tokens=64)
    engine = open_core(core.policy, **numbers, recompute=False, record_routes=True)
    group = make_group(np.random.default_rng(0), 0, size=len(lengths))[0]
    prompt = group.prompt.ids
    slots = [
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=n, ignore_eos=True), i, "0"), ())
        for i, n in enumerate(lengths)
    ]
    found: dict[int, Trajectory] = {}
    while len(found) < len(slots):
        while engine.needs_prefill:
            engine.prefill()
        for slot in engine.decode().ended:
            generation = engine.sequences.generation(slot, FinishReason.LENGTH)
            size = prompt.size + generation.token_ids.size
            mask = np.arange(size) >= prompt.size
            logprobs = np.zeros(size, np.float32)
            logprobs[mask] = generation.logprobs
            found[slots.index(slot)] = replace(
                group.trajectories[slots.index(slot)], tokens=np.concatenate([prompt, generation.token_ids]), mask=mask,
                logprobs=logprobs, sampled_logprobs=logprobs, versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0, routed_experts=generation.routed_experts,
            )  # fmt: skip
            engine.remove(slot)
    return replace(group, trajectories=tuple(found[i] for i in range(len(slots))))


@BOTH_PATHS
def test_what_was_sampled_is_trained_with_the_same_logprobs(path: ModelPath) -> None:
    """Float32, the same weights, other products: a whole tree at once instead of a token at a time. Prompts are shared."""
    core = trainer("float32", path=path)
    group = sampled(core, (9, 12, 4))
    (batch,) = pack_groups([(group, [0.0] * 3)], 1000)
    assert batch.routes is not None and batch.routes.dtype == np.int8
    (alone,) = pack_groups([(replace(group, trajectories=group.trajectories[1:2]), [0.0])], 1000)
    recorded = group.trajectories[1].routed_experts
    assert recorded is not None
    np.testing.assert_array_equal(alone.routes, recorded[:-1])
    assert batch.tokens.size == len(batch.routes) and (batch.routes >= 0).all()
    np.testing.assert_allclose(core.compute_logprobs(batch), batch.sampler_logprobs, atol=2e-5, rtol=0)
    other = replace(batch, routes=(batch.routes + 1) % EXPERTS)
    assert np.abs(core.compute_logprobs(other) - batch.sampler_logprobs).max() > 0.01


def test_a_completion_is_trained_behind_its_own_prompt_whatever_its_siblings_had() -> None:
    core = trainer()
    group = sampled(core, (9, 7, 6))
    first, second, third = group.trajectories
    assert second.routed_experts is not None
    moved = second.routed_experts.copy()
    moved[: second.prompt_length] = (moved[: second.prompt_length] + 1) % EXPERTS
    group = replace(group, trajectories=(first, replace(second, routed_experts=moved), third))
    (batch,) = pack_groups([(group, [0.0] * 3)], 1000)
    found = core.compute_logprobs(batch)
    for place, member in enumerate(batch.members.tolist()):
        (alone,) = pack_groups([(replace(group, trajectories=(group.trajectories[member],)), [0.0])], 1000)
        np.testing.assert_allclose(found[batch.sequence == place], core.compute_logprobs(alone), atol=1e-6, rtol=0)


def test_routes_that_are_missing_or_of_another_model() -> None:
    core = trainer("float32")
    group = sampled(core, (3, 2))
    first, second = group.trajectories
    half = replace(group, trajectories=(first, replace(second, routed_experts=None)))
    (batch,) = pack_groups([(half, [0.0, 0.0])], 1000)
    assert batch.routes is not None and int((batch.routes == -1).all((1, 2)).sum()) == 1  # of the second, what runs
    none = replace(group, trajectories=tuple(replace(t, routed_experts=None) for t in group.trajectories))
    assert pack_groups([(none, [0.0, 0.0])], 1000)[0].routes is None
    assert first.routed_experts is not None
    strange = replace(group, trajectories=(first, replace(second, routed_experts=second.tokens[:, None, None])))
    with pytest.raises(DataError, match="routes must have one shape"):
        pack_groups([(strange, [0.0, 0.0])], 1000)
    dense = TorchTrainer(tiny_policy("float32"), TrainConfig(), max_completion_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="asyncrl supports no router of the model"):
        dense.compute_logprobs(batch)


def test_tokens_whose_routes_are_missing_are_counted() -> None:
    core = trainer()
    batches = [with_routes(batch) for batch in split([0] * SIZE + [1] * (SEQUENCES - SIZE))]
    for batch in batches:
        assert batch.routes is not None
        batch.routes[:] = 0, 1
    _, metrics = gradient(core, LOSS, batches)
    assert metrics[UNREPLAYED] == 0
    for batch, count in zip(batches, (2, 3), strict=True):
        assert batch.routes is not None
        batch.routes[:count, 0] = batch.routes[1, 1] = -1  # a token counts once
    _, metrics = gradient(core, LOSS, batches)
    assert metrics[UNREPLAYED] == 5


@pytest.mark.parametrize("layers", ((0,), (0, 1)))
def test_a_forward_in_which_a_router_was_not_told_is_no_step(layers: tuple[int, ...]) -> None:
    core = trainer()
    (batch,) = split([0] * SEQUENCES)
    for layer in layers:
        decoder: Any = core.policy.decoder
        decoder.layers[layer].self_attn._forward_pre_hooks.clear()
    text = re.escape(f"of 2 layers with experts, numbers {list(layers)} (from 0) ran without")
    core.begin_train_step(LOSS)
    with pytest.raises(RuntimeError, match=text):
        core.train_microbatch(batch)
    with pytest.raises(RuntimeError, match=text):
        core.compute_logprobs(with_routes(batch))


def test_balance_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.skip_zero_advantage is true and the model's configuration has"):
        trainer(train={"skip_zero_advantage": True})
    core = trainer()
    core.policy.routing = None
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef 0\.5, but Qwen3MoeForCausalLM chooses its experts in a"
    ):
        TorchTrainer(core.policy, TrainConfig(), max_completion_length=MAX_LENGTH)
