"""Which experts routers choose: recorded, and chosen again; against transformers' own forward and a mixture written out by hand."""

from __future__ import annotations

import copy
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.parameters.frozen import mark_unreached
from asyncrl.models.paths import FUSED, PACKED, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.models.routing import RoutesShape, describe_routes, find_routers, require_routing

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, initializer_range=0.3, max_position_embeddings=64,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(num_experts=5, norm_topk_prob=True),
    "Qwen2Moe": dict(num_experts=5, shared_expert_intermediate_size=16), "Mixtral": dict(num_local_experts=5),
    "Olmoe": dict(num_experts=5), "GptOss": dict(num_local_experts=5, max_position_embeddings=131072),
    "GraniteMoe": dict(num_local_experts=5),
}  # fmt: skip
TOKENS = torch.arange(12) * 7 % 61
POSITIONS = torch.arange(12)


def layers_of(policy: PolicyModel) -> Any:
    return policy.decoder.layers


def module_of(family: str = "Qwen3Moe", **settings: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        for name, parameter in module.named_parameters():
            if "gate.weight" in name or "router" in name:
                nn.init.normal_(parameter, std=0.5)
    return module


BOTH_PATHS = pytest.mark.parametrize("path", (PACKED, FUSED), ids=str)


def policy_of(
    family: str = "Qwen3Moe", dtype: str = "float64", path: ModelPath = PACKED, **settings: Any
) -> PolicyModel:
    return PolicyModel(module_of(family, **settings), dtype, path=path)


def hidden(policy: PolicyModel, routes: Routes | None = None) -> Tensor:
    plan = TreePlan([12])
    plan.routes = routes
    return policy.hidden(TOKENS, POSITIONS, plan)


def recorded(policy: PolicyModel) -> npt.NDArray[Any]:
    assert policy.routing is not None
    routes = policy.routing.record()
    with torch.no_grad():
        hidden(policy, routes)
    return routes.numpy().astype(policy.routing.shape.dtype)


def given(policy: PolicyModel, routes: npt.NDArray[Any], **options: Any) -> Routes:
    assert policy.routing is not None
    return policy.routing.replay(routes, **options)


def backward(policy: PolicyModel, routes: Routes | None) -> dict[str, Tensor]:
    policy.flat.zero_grad()
    policy.set_training(True)
    weight = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    (hidden(policy, routes) * weight).sum().backward()
    policy.set_training(False)
    return {name: grad.clone() for name, grad in policy.flat.named_grads()}


def gates(policy: PolicyModel) -> list[str]:
    return [name for name, _ in policy.flat.named_masters() if name.endswith(("gate.weight", "router.weight"))]


@pytest.mark.parametrize("family", [*FAMILIES, "Llama"])
def test_a_token_costs_the_products_of_the_experts_that_it_takes(family: str) -> None:
    """Against torch's count. Eager experts run only what is routed to them."""
    module = module_of(family)
    policy = PolicyModel(copy.deepcopy(module), "float32", path=PACKED)
    module.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module.eval()(input_ids=TOKENS[None], use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    assert 2 * policy.matmul_parameters * len(TOKENS) == products


def test_weights_that_no_text_reaches_cost_a_token_nothing() -> None:
    module = module_of()
    whole = PolicyModel(copy.deepcopy(module), "float32", path=PACKED).matmul_parameters
    mark_unreached(module, {"model.layers.*.self_attn.q_proj.weight"})
    assert PolicyModel(module, "float32", path=PACKED).matmul_parameters == whole - 2 * 32 * 32


@BOTH_PATHS
@pytest.mark.parametrize("choice", [[0, 5], [-2, 1], [3, -1], [127, 127]])
def test_a_choice_that_is_none_of_the_experts_is_noted_and_another_runs(path: ModelPath, choice: list[int]) -> None:
    """On a GPU an index beyond them would end the context."""
    policy = policy_of("Qwen3Moe", "float32", path)
    right = recorded(policy)
    wrong = right.copy()
    wrong[4, 1] = choice
    for given_TLk, noted in ((right, False), (wrong, True)):
        routes = given(policy, given_TLk)
        with torch.no_grad():
            assert hidden(policy, routes).isfinite().all() and bool(routes.outside) is noted


@BOTH_PATHS
@pytest.mark.parametrize("family", FAMILIES)
def test_the_own_choice_given_again_changes_no_bit(family: str, path: ModelPath) -> None:
    policy = policy_of(family, "float32", path)
    assert policy.routing is not None and policy.routing.shape == RoutesShape(2, 2, 5)
    routes = recorded(policy)
    assert routes.shape == (12, 2, 2) and routes.dtype == np.int8
    with torch.no_grad():
        native = hidden(policy)
        assert torch.equal(hidden(policy, given(policy, routes)), native)
        other = (routes + 1) % 5
        assert not torch.allclose(hidden(policy, given(policy, other)), native)
        assert torch.equal(hidden(policy), native)
    own, replayed = backward(policy, None), backward(policy, given(policy, routes))
    assert all(torch.equal(own[name], replayed[name]) for name in own)


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_are_described_without_a_weight(family: str) -> None:
    found = find_routers(module_of(family))
    with torch.device("meta"):
        described = module_of(family)
    assert found is not None and describe_routes(described) == found[1] == RoutesShape(2, 2, 5)
    assert describe_routes(module_of("Qwen3")) is None


@BOTH_PATHS
@pytest.mark.parametrize("family", ("Qwen3Moe", "Mixtral"))
def test_what_is_recorded_is_what_transformers_says(family: str, path: ModelPath) -> None:
    untouched = module_of(family).eval()
    routes = recorded(policy_of(family, "float32", path))
    with torch.no_grad():
        logits = untouched(input_ids=TOKENS[None], output_router_logits=True).router_logits
    expected = torch.stack([each.softmax(-1).topk(2).indices for each in logits], 1)
    np.testing.assert_array_equal(routes, expected.numpy())


def mixture(block: nn.Module, index_Tk: Tensor) -> Any:
    """A block of Qwen3's as its paper has it, every expert over every token, with these experts and no `topk`."""

    def forward(hidden_1TE: Tensor) -> Tensor:
        rows = hidden_1TE[0]
        scores = (rows @ block.gate.weight.T).softmax(-1, dtype=torch.float32)  # as every router of theirs
        weights = torch.stack([scores[range(len(rows)), index_Tk[:, i]] for i in range(index_Tk.shape[1])], 1)
        weights = (weights / weights.sum(1, keepdim=True)).to(rows.dtype)
        experts = block.experts
        halves = torch.einsum("te,xoe->txo", rows, experts.gate_up_proj).chunk(2, -1)
        each = torch.einsum("txo,xeo->txe", nn.functional.silu(halves[0]) * halves[1], experts.down_proj)
        chosen = each[torch.arange(len(rows))[:, None], index_Tk]
        return (chosen * weights[..., None]).sum(1)[None]

    return forward


@BOTH_PATHS
def test_gradients_are_those_of_gathered_scores(path: ModelPath) -> None:
    policy, other = policy_of(path=path), policy_of()
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(5, dtype=np.int8), (12, 2, 1)), axis=2)[..., :2]
    for number, layer in enumerate(layers_of(other)):
        layer.mlp.forward = mixture(layer.mlp, torch.from_numpy(routes[:, number].astype(np.int64)))
    found, expected = backward(policy, given(policy, routes)), backward(other, None)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-8)
    assert len(gates(policy)) == 2 and all(found[name].abs().sum() > 1 for name in gates(policy))


@BOTH_PATHS
def test_other_scores_leave_the_selection_and_change_the_weights(path: ModelPath) -> None:
    policy = policy_of("GptOss", "float32", path)
    routes = recorded(policy)
    with torch.no_grad():
        before = hidden(policy, given(policy, routes))
        for name, master in policy.flat.named_masters():
            if name.endswith("router.bias"):
                master += torch.linspace(-3, 3, 5)
    policy.flat.refresh()
    assert not np.array_equal(recorded(policy), routes)
    replayed = given(policy, routes)
    with torch.no_grad():
        after = hidden(policy, replayed)
    np.testing.assert_array_equal(replayed.numpy(), routes)
    assert not torch.allclose(before, after)


@BOTH_PATHS
def test_rows_that_are_missing_are_the_routers_own(path: ModelPath) -> None:
    policy = policy_of(path=path)
    with torch.no_grad():
        native, own = hidden(policy), recorded(policy)
        routes = own.copy()
        routes[::2, 0] = routes[:, 1] = -1
        assert torch.equal(hidden(policy, given(policy, routes)), native)
        routes[3, 0] = own[3, 0, ::-1]
        routes[3, 0, 0] = next(each for each in range(5) if each not in own[3, 0])
        replayed = given(policy, routes)
        assert not torch.equal(hidden(policy, replayed), native)
    chosen = replayed.numpy()
    np.testing.assert_array_equal(chosen[:, 0], np.where(routes[:, 0] == -1, own[:, 0], routes[:, 0]))


def test_routes_of_another_model_are_refused() -> None:
    policy = policy_of()
    routes = recorded(policy)
    with pytest.raises(ValueError, match=r"of \[1, 2\] layers and experts a token were given; this model has \[2, 2\]"):
        given(policy, routes[:, :1])


def test_routes_are_told_as_narrow_as_they_came_and_are_not_copied() -> None:
    policy = policy_of()
    routes = np.tile(np.array([1, 0], np.int8), (4096, 2, 1))
    tracemalloc.start()
    try:
        replayed = given(policy, routes)
        assert tracemalloc.get_traced_memory()[1] < routes.nbytes
    finally:
        tracemalloc.stop()
    found = replayed.choose(0, torch.zeros(4096, 2, dtype=torch.int64))
    assert found.dtype == torch.int64 and (found == torch.tensor([1, 0])).all()


@BOTH_PATHS
@pytest.mark.parametrize("missing", (False, True))
def test_layers_that_are_computed_again_choose_the_same(missing: bool, path: ModelPath) -> None:
    policy, plain = policy_of(path=path), policy_of(path=path)
    policy.enable_checkpointing()
    routes = (recorded(policy) + 1) % 5
    routes[::3] = -1 if missing else routes[::3]
    calls = []
    for layer in layers_of(policy):
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[1].clone()))
    found, expected = backward(policy, given(policy, routes)), backward(plain, given(plain, routes))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == 4 and torch.equal(calls[0], calls[3]) and torch.equal(calls[1], calls[2])
    assert policy.routing is not None and policy.routing.current is None


@BOTH_PATHS
def test_nothing_stays_after_an_error_and_two_instances_share_nothing(path: ModelPath) -> None:
    policy = policy_of(path=path)
    other = PolicyModel(copy.deepcopy(policy.module), "float64", path=path)
    routes = (recorded(policy) + 1) % 5
    native = hidden(policy).detach()

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of a layer")

    handle = layers_of(policy)[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        hidden(policy, given(policy, routes))
    handle.remove()
    assert policy.routing is not None and policy.routing.current is None
    assert torch.equal(hidden(policy), native)
    replayed = given(policy, routes)
    hidden(policy, replayed)
    assert torch.equal(hidden(other), native)
    fresh = Routes(2)
    hidden(other, fresh)
    assert not torch.equal(fresh.chosen[0], replayed.chosen[0])


def test_a_layer_whose_router_is_not_told_is_named() -> None:
    policy = policy_of()
    layers_of(policy)[1].self_attn._forward_pre_hooks.clear()
    routes = Routes(2)
    with torch.no_grad():
        hidden(policy, routes)
    with pytest.raises(RuntimeError, match=r"of 2 layers with experts, numbers \[1\] \(from 0\) ran without"):
        routes.numpy()
    module = module_of()
    assert find_routers(module) is not None
    del module.model.layers[0].self_attn.layer_idx
    assert find_routers(module) is None


def test_models_that_choose_otherwise_are_named() -> None:
    dense = PolicyModel(module_of("Qwen3"), path=PACKED)
    deepseek = module_of(
        "DeepseekV3", n_routed_experts=5, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    assert dense.routing is None and find_routers(deepseek) is None
    with pytest.raises(ConfigError, match="router_replay is true, but Qwen3ForCausalLM has no experts"):
        require_routing(None, dense.module, "algorithm.router_replay is true")
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM chooses its experts in a way that"):
        require_routing(None, deepseek, "algorithm.router_replay is true")
