"""Windows, capped scores and sinks on the packed path: equal to one dense formula, and to transformers' eager attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from ragged_reference import ReferenceKernel
from test_models_tree_attention import TREES, Nodes, build, dense, inner_levels, inputs, two_levels
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.attention import general as general_attention
from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.paths import PACKED
from asyncrl.models.policy import PolicyModel

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None, max_position_embeddings=64,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN = dict(use_sliding_window=True, max_window_layers=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": dict(sliding_window=5),
    "Mixtral": dict(sliding_window=5, num_local_experts=4),
    "Qwen2": dict(sliding_window=6, **QWEN),
    "Qwen3": dict(sliding_window=4, head_dim=16, **QWEN),
    "Phi3": dict(sliding_window=7),
    "Starcoder2": dict(sliding_window=5),
    "Gemma2": dict(sliding_window=5, head_dim=16, attn_logit_softcapping=3.0, final_logit_softcapping=None),
    "Gemma3Text": dict(sliding_window=6, head_dim=16, layer_types=MIXED),
    "GptOss": dict(
        sliding_window=5,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=MIXED,
        max_position_embeddings=131072,
    ),
    "Olmo3": dict(sliding_window=5, layer_types=MIXED),
    "Exaone4": dict(sliding_window=5, layer_types=MIXED, sliding_window_pattern=2),
    "Cohere2": dict(sliding_window=5, layer_types=MIXED, logit_scale=1.0),
    "Ministral": dict(sliding_window=5, head_dim=16, layer_types=MIXED),
    "GraniteSWA": dict(sliding_window=5, layer_types=MIXED),  # sinks by way of the log-sum-exp
    "Olmoe": dict(sliding_window=5, num_experts=4, num_experts_per_tok=2),  # a window that its mask does not have
}
# Prefixes with the lengths of their suffixes, rows of up to 29 tokens; one tree is a prompt alone.
FOREST = two_levels([(9, [20, 7, 13]), (3, [4, 11]), (25, [])])
DEEP = [(9, -1), (20, 0), (7, 0), (1, 2), (13, 3), (6, 3), (3, -1), (25, -1), (2, 7), (1, 8), (5, 9), (8, 9), (4, 7)]


def model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Nothing is so small, or so constant, that a term with it would not show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    name = f"{family.removesuffix('Text')}ForCausalLM"
    module = getattr(transformers, name)._from_config(config, attn_implementation="eager", dtype=dtype)
    if dtype == torch.float64:
        module.set_experts_implementation("eager")  # grouped products know no float64
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            if parameter.ndim < 2 or "sinks" in path:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    result: PreTrainedModel = module.eval()
    return result


def forest(nodes: Nodes) -> tuple[TreePlan, Tensor, list[list[int]]]:
    """The plan, the position of each token [T], and the packed indices of each path from a root to a leaf."""
    plan, mask = build(nodes)
    # A token that no later token sees ends its path.
    leaves = (mask.sum(0) == 1).nonzero().flatten()
    return plan, mask.sum(1) - 1, [mask[last].nonzero().flatten().tolist() for last in leaves]


def logprobs(policy: PolicyModel, tokens: Tensor, positions: Tensor, plan: TreePlan) -> Tensor:
    return torch.log_softmax(policy.head(policy.hidden(tokens, positions, plan)), -1)


def gradients(policy: PolicyModel) -> dict[str, Tensor]:
    grad = policy.weights.grad
    assert grad is not None
    names = {id(parameter): name for name, parameter in policy.module.named_parameters()}
    return {names[id(p)]: policy.weights.view(grad, i).clone() for i, p in enumerate(policy.weights.parameters)}


# -- the formula ----------------------------------------------------------------------------------------------------------


TERMS = [(1, None, False), (4, None, False), (9, 0.7, True), (None, 0.7, False), (None, None, True), (5, None, True)]


@pytest.mark.parametrize("way", [pytest.param("blocks", marks=pytest.mark.slow), "small blocks", "ragged"])
@pytest.mark.parametrize("case", TERMS, ids=str)
@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
def test_equals_the_dense_formula(
    trees: Nodes, case: tuple[int | None, float | None, bool], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = ReferenceKernel()
    if way == "ragged":
        monkeypatch.setattr("asyncrl.models.attention.tree.kernel_for", lambda *case: kernel)
    if way == "small blocks":
        monkeypatch.setattr(general_attention, "_MAX_QUERIES", 3)
        monkeypatch.setattr(general_attention, "_MIN_QUERIES", 2)
    window, softcap, with_sinks = case
    plan, mask = build(trees)
    leaves = inputs(mask.shape[0], (9, 3, 16), torch.float64)
    generator = torch.Generator().manual_seed(3)
    if with_sinks:
        leaves.append(torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_())
    terms = AttentionTerms(window, softcap, leaves[3] if with_sinks else None)
    out, expected = plan.attend(0, *leaves[:3], 0.3, terms), dense(*leaves[:3], mask, 0.3, terms)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, weights), torch.autograd.grad(expected, leaves, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    if way == "ragged":
        alone = window is not None and softcap is None and not with_sinks
        empty = terms.simplified_for(plan.longest).empty  # a window that no row leaves
        expected_calls = 2 + 2 * inner_levels(trees) if empty else 2 if alone else 0
        assert kernel.calls == expected_calls, "the kernel has neither caps nor sinks"


def test_low_level_calls_take_views_and_add_to_the_gradient_of_the_sinks() -> None:
    """As the fused decoder calls them: query, key and value are slices of one tensor, and so are their gradients."""
    plan, mask = build(TREES["ragged with an empty suffix"])
    joined = torch.cat([part.detach() for part in inputs(mask.shape[0], (4, 2, 8), torch.float64)], 1)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    terms = AttentionTerms(4, 2.0, sinks)
    parts = joined.split([4, 2, 2], 1)
    out, kept = plan.forward(*parts, 0.3, terms)
    grad, sinks_gradient = torch.randn(out.shape, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    into = torch.empty_like(joined)
    plan.backward(grad, (*parts, out, kept), 0.3, into.split([4, 2, 2], 1), terms, sinks_gradient)
    leaves = [part.clone().requires_grad_() for part in (*parts, sinks)]
    expected = dense(*leaves[:3], mask, 0.3, AttentionTerms(4, 2.0, leaves[3]))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    *right, right_sinks = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(into, torch.cat(right, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(sinks_gradient, right_sinks + 1, rtol=0, atol=1e-12)


def test_a_window_that_no_row_leaves_is_plain_attention_bit_for_bit() -> None:
    trees = TREES["ragged with an empty suffix"]
    plan, mask = build(trees)
    longest = int(mask.sum(1).max())
    assert plan.longest == longest
    qkv = inputs(mask.shape[0], (4, 2, 16), torch.float32)
    plain = plan.attend(0, *qkv, 0.3)
    assert torch.equal(plan.attend(0, *qkv, 0.3, AttentionTerms(longest)), plain)
    assert not torch.equal(plan.attend(0, *qkv, 0.3, AttentionTerms(longest - 1)), plain)


def test_work_is_linear_in_the_window() -> None:
    scores = {}
    for tokens in (4000, 8000):
        attention = general_attention.GeneralAttention(TreePlan([tokens]).rows, 200, 8, torch.device("cpu"))
        scores[tokens] = sum(len(each.members[0]) * each.length * each.width for each in attention._lazy_bins)
        assert scores[tokens] <= 1.25 * tokens * (200 + 128)
    assert scores[8000] <= 2.1 * scores[4000]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", [(5, None, False), (None, 2.0, True)], ids=str)
def test_bfloat16_is_as_close_to_the_truth_as_the_formula_in_bfloat16(
    case: tuple[int | None, float | None, bool],
) -> None:
    plan, mask = build(TREES["one long tree"])
    leaves = inputs(mask.shape[0], (4, 2, 16), torch.bfloat16)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    leaves += [sinks] if case[2] else []

    def results(attend: Callable[..., Tensor], own: list[Tensor]) -> list[Tensor]:
        terms = AttentionTerms(case[0], case[1], own[3] if case[2] else None)
        out = attend(*own[:3], terms)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        return [out, *torch.autograd.grad(out, own, weights)]

    truth = results(lambda q, k, v, terms: dense(q, k, v, mask, 0.25, terms), [x.double() for x in leaves])
    narrow = results(lambda q, k, v, terms: dense(q, k, v, mask, 0.25, terms), leaves)
    ours = results(lambda q, k, v, terms: plan.attend(0, q, k, v, 0.25, terms), leaves)
    for own, theirs, right in zip(ours, narrow, truth, strict=True):
        assert own.dtype == torch.bfloat16
        error, allowed = ((x.double() - right).square().mean().sqrt() for x in (own, theirs))
        assert error <= 1.2 * allowed + 1e-4


# -- models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("nodes", [FOREST, DEEP], ids=["two levels", "deep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_its_own_untouched_eager_model(family: str, nodes: Nodes) -> None:
    """Log-probs of every token, gradients of every parameter; packed trees against one row at a time."""
    module = model(family)
    plain = copy.deepcopy(module)
    policy = PolicyModel(module, path=PACKED)
    plan, positions, sequences = forest(nodes)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 61, (plan.tokens,), generator=generator)
    weights = torch.randn(plan.tokens, 61, generator=generator)
    policy.flat.zero_grad()
    ours = logprobs(policy, tokens, positions, plan)
    loss, reference = torch.zeros(()), torch.zeros(())
    for sequence in sequences:
        row = plain(input_ids=tokens[sequence][None], use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(ours[sequence], row, rtol=0, atol=1e-5)
        loss = loss + (ours[sequence] * weights[sequence]).sum()
        reference = reference + (row * weights[sequence]).sum()
    loss.backward()
    reference.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = gradients(policy)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        right = expected[name]
        assert right is not None and (right.norm() > 1e-3 or "k_proj.bias" in name)
        assert (gradient - right).norm() <= 1e-4 * right.norm() + 1e-4, name


@pytest.mark.parametrize("nodes", [FOREST, DEEP], ids=["two levels", "deep"])
@pytest.mark.parametrize("family", ["Mistral", "GptOss"])
def test_any_split_of_the_same_sequences_gives_the_same_gradient(family: str, nodes: Nodes) -> None:
    """Shared prefix or each row for itself, together or one by one. float64."""
    module = model(family, torch.float64)
    policy = PolicyModel(module, "float64")
    _, _, sequences = forest(nodes)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 61, (sum(length for length, _ in nodes),), generator=generator)
    weights = torch.randn(len(tokens), 61, generator=generator, dtype=torch.float64)

    def gradient(parts: list[tuple[Nodes, list[list[int]]]]) -> Tensor:
        """`parts`: nodes, and for each path from a root to a leaf the tokens."""
        policy.flat.zero_grad()
        for trees, members in parts:
            plan, positions, places = forest(trees)
            packed = torch.zeros(plan.tokens, dtype=torch.long)
            for place, member in zip(places, members, strict=True):
                packed[place] = torch.tensor(member)
            result = logprobs(policy, tokens[packed], positions, plan)
            loss = sum((result[place] * weights[packed[place]]).sum() for place in places)
            loss.backward()  # type: ignore[union-attr]
        assert policy.flat.grad is not None
        return policy.flat.grad.clone()

    whole = gradient([(nodes, sequences)])
    alone = gradient([([(len(sequence), -1)], [sequence]) for sequence in sequences])
    unshared = gradient([([(len(sequence), -1) for sequence in sequences], sequences)])
    others = [alone, unshared]
    if nodes is FOREST:
        halves = two_levels([(9, [20]), (25, [])]), two_levels([(5, [11, 17]), (3, [4, 11])])
        others.append(gradient([(halves[0], [sequences[0], sequences[5]]), (halves[1], sequences[1:5])]))
    for other in others:
        assert (whole - other).norm() <= 1e-10 * whole.norm()


def test_checkpointed_layers_give_the_same_gradients() -> None:
    plan, positions, _ = forest(FOREST)
    tokens = torch.randint(0, 61, (plan.tokens,), generator=torch.Generator().manual_seed(5))
    found = []
    for checkpointing in (False, True):
        policy = PolicyModel(model("GptOss"))
        if checkpointing:
            policy.enable_checkpointing()
        policy.set_training(True)
        policy.flat.zero_grad()
        logprobs(policy, tokens, positions, plan)[:, 3].sum().backward()
        found.append(gradients(policy))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
    assert float(found[0]["model.layers.0.self_attn.sinks"].norm()) > 1e-3


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
def test_bfloat16_is_as_close_to_the_truth_as_the_eager_forward_of_that_dtype(family: str) -> None:
    """Mean error of log-probs against float64 of the same weights."""
    module = model(family).to(torch.bfloat16)
    eager, truth = copy.deepcopy(module), copy.deepcopy(module).double()
    policy = PolicyModel(module.float(), "bfloat16")
    plan, positions, sequences = forest(FOREST)
    tokens = torch.randint(0, 61, (plan.tokens,), generator=torch.Generator().manual_seed(5))
    errors = torch.zeros(2)
    with torch.no_grad():
        ours = logprobs(policy, tokens, positions, plan)
        for row in sequences:
            right = truth(input_ids=tokens[row][None], use_cache=False).logits[0].log_softmax(-1)
            theirs = eager(input_ids=tokens[row][None], use_cache=False).logits[0].log_softmax(-1)
            errors += torch.stack([(x.double() - right).abs().mean().float() for x in (ours[row], theirs)])
    assert 0 < errors[0] <= 1.2 * errors[1]


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_sinks_that_do_not_reach_the_attention_are_refused() -> None:
    policy = PolicyModel(LlamaForCausalLM(LlamaConfig(**SIZES)))
    policy.fused = None
    policy.module.model.layers[1].self_attn.sinks = torch.zeros(6)
    with pytest.raises(ConfigError, match="LlamaAttention has `sinks`"):
        policy.hidden(torch.arange(4), torch.arange(4), TreePlan([4]))


def test_sinks_of_another_form_are_refused() -> None:
    policy = PolicyModel(model("GptOss"), path=PACKED)
    for layer in policy.module.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(6, 2))
    with pytest.raises(ConfigError, match=r"sinks \(6, 2\) for 6 heads"):
        policy.hidden(torch.arange(4), torch.arange(4), TreePlan([4]))


def test_a_model_that_reads_its_mask_is_refused() -> None:
    config = transformers.DogeConfig(**SIZES)
    policy = PolicyModel(transformers.DogeForCausalLM(config))
    with pytest.raises(ConfigError, match="of its attention mask"):
        policy.hidden(torch.arange(4), torch.arange(4), TreePlan([4]))
