"""Which experts the sampler sent each token to: against transformers' own forward over the whole row."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from generation_models import tiny_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import open_core
from asyncrl.models.paths import FUSED, PACKED, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams

EXPERTS = 6
NUMBERS: dict[str, Any] = dict(max_sequences=4, max_context=40, kv_positions=160, prefill_tokens=18)


def mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    module = Qwen3MoeForCausalLM(config)
    for name, parameter in module.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter)
    return module.eval()


def opened(recompute: bool = False, path: ModelPath = PACKED) -> tuple[Core, PolicyModel, PreTrainedModel]:
    module = mixture()
    plain = copy.deepcopy(module)
    policy = PolicyModel(module, path=path)
    core = open_core(policy, **NUMBERS, recompute=recompute, record_routes=True)
    assert isinstance(core, Core)
    return core, policy, plain


def request(prompt: npt.NDArray[np.int32], tokens: int, seed: int, key: str | None = None) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), seed, key)


def steps(core: Core, count: int) -> list[int]:
    """Slots that ended."""
    ended: list[int] = []
    for _ in range(count):
        while core.needs_prefill:
            core.prefill()
        ended += core.decode().ended
    return ended


def expected(plain: PreTrainedModel, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[L, layers, k] by transformers, one row, no cache."""
    with torch.no_grad():
        logits = plain(
            input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True
        ).router_logits
    return torch.stack([each.softmax(-1).topk(2).indices for each in logits], 1).numpy()


def check(found: Generation, prompt: npt.NDArray[np.int32], plain: PreTrainedModel) -> None:
    row = np.concatenate([prompt, found.token_ids])
    routes = found.routed_experts
    assert routes is not None and routes.shape == (row.size, 2, 2) and routes.dtype == np.int8
    assert (routes[-1] == -1).all()
    np.testing.assert_array_equal(routes[:-1], expected(plain, row)[:-1])


@pytest.mark.parametrize("path", (PACKED, FUSED), ids=str)
def test_prompts_shared_prompts_and_completions_are_those_of_one_forward(path: ModelPath) -> None:
    core, _, plain = opened(path=path)
    draw = np.random.default_rng(0)
    long, short = (draw.integers(0, 61, size).astype(np.int32) for size in (19, 3))
    longer = draw.integers(0, 61, 33).astype(np.int32)  # two prefills
    prompts = {}
    for number, (prompt, tokens, key) in enumerate(((long, 2, "a"), (long, 5, "a"), (longer, 3, None))):
        prompts[core.add(request(prompt, tokens, number, key), ())] = prompt
    assert core.sequences.routes is not None
    core.sequences.routes[3] = 5  # of nobody
    checked = 0
    for _ in range(5):
        for slot in steps(core, 1):
            check(core.sequences.generation(slot, FinishReason.LENGTH), prompts[slot], plain)
            core.remove(slot)
            checked += 1
    assert checked == 3 and core.tokens_copied == 18
    slot = core.add(request(short, 4, 7), ())
    other = core.add(request(long, 4, 8, "a"), ())  # its prompt has no holder any more
    assert set(steps(core, 4)) == {slot, other} and core.tokens_copied == 18
    check(core.sequences.generation(slot, FinishReason.LENGTH), short, plain)
    check(core.sequences.generation(other, FinishReason.LENGTH), long, plain)


@pytest.mark.parametrize("recompute", (False, True))
def test_after_an_update_each_token_has_the_routes_it_was_sampled_with(recompute: bool) -> None:
    core, policy, plain = opened(recompute)
    prompt = np.arange(9, dtype=np.int32) * 5
    slot = core.add(request(prompt, 6, 1), ())
    steps(core, 3)
    before = core.sequences.generation(slot, FinishReason.ABORT).routed_experts
    with torch.no_grad():
        for name, master in policy.flat.named_masters():
            if name.endswith("gate.weight"):
                master.mul_(-1)
    policy.advance()
    while not steps(core, 1):
        pass
    found = core.sequences.generation(slot, FinishReason.LENGTH)
    assert before is not None and found.routed_experts is not None
    np.testing.assert_array_equal(found.routed_experts[8:11], before[8:11])
    first = expected(plain, prompt)[:, 0]  # of the first layer, whose inputs no gate has moved
    for _, parameter in (each for each in plain.named_parameters() if each[0].endswith("gate.weight")):
        parameter.data.mul_(-1)
    now = expected(plain, np.concatenate([prompt, found.token_ids]))[:, 0]
    np.testing.assert_array_equal(found.routed_experts[:8], before[:8])
    np.testing.assert_array_equal(found.routed_experts[:8, 0], first[:8])
    assert (found.routed_experts[11:14] != -1).all() and (found.routed_experts[14] == -1).all()
    assert not np.array_equal(first[:8], now[:8])


def test_who_shares_a_prompt_that_was_computed_again_has_the_routes_of_its_own_cache() -> None:
    core, policy, plain = opened(recompute=True)
    prompt = np.arange(9, dtype=np.int32) * 5
    first = core.add(request(prompt, 9, 1, "g"), ())
    steps(core, 3)
    for module in (policy, None):
        named = policy.flat.named_masters() if module is not None else plain.named_parameters()
        for name, each in named:
            if name.endswith("gate.weight"):
                each.detach().mul_(-1)
    policy.advance()
    steps(core, 1)
    second = core.add(request(prompt, 2, 2, "g"), ())
    ended: list[int] = []
    while second not in ended:
        ended += steps(core, 1)
    assert core.tokens_copied == 8
    check(core.sequences.generation(second, FinishReason.LENGTH), prompt, plain)
    early = core.sequences.generation(first, FinishReason.ABORT).routed_experts
    late = core.sequences.generation(second, FinishReason.LENGTH).routed_experts
    assert early is not None and late is not None and not np.array_equal(early[:8], late[:8])
    core.remove(first)
    again = core.add(request(prompt, 2, 3), ())
    assert again == first  # the slot knows nothing of the sequence before
    while again not in steps(core, 1):
        pass
    check(core.sequences.generation(again, FinishReason.LENGTH), prompt, plain)


def test_the_next_turn_has_the_routes_of_the_whole_history() -> None:
    """One branch goes on in the kept row, one in a copy; the last sampled token gets its routes only now."""
    module = mixture()
    plain = copy.deepcopy(module)
    core = open_core(PolicyModel(module, path=PACKED), **NUMBERS, recompute=False, record_routes=True, kept_max_age=1)
    assert isinstance(core, Core)
    asked = replace(request(np.arange(9, dtype=np.int32), 4, 1), session="a")
    slot = core.add(asked, ())
    assert steps(core, 4) == [slot]
    answer = core.sequences.generation(slot, FinishReason.LENGTH)
    core.remove(slot, keep_row=True)
    assert core.sequences.routes is not None
    core.sequences.routes[[other for other in range(4) if other != slot]] = 5  # of nobody
    before, prompts = core.tokens_prefilled, {}
    for tool in ([3, 4, 5], [6, 7]):
        prompt = np.concatenate([asked.prompt_ids, answer.token_ids, tool]).astype(np.int32)
        prompts[core.add(replace(asked, prompt_ids=prompt), ())] = prompt
    assert set(steps(core, 4)) == set(prompts) and core.tokens_prefilled - before == 3 + 2
    for other, prompt in prompts.items():
        check(core.sequences.generation(other, FinishReason.LENGTH), prompt, plain)


def test_nothing_is_recorded_unasked_and_a_dense_model_is_refused() -> None:
    policy = PolicyModel(mixture(), path=PACKED)
    core = open_core(policy, **NUMBERS, recompute=False)
    slot = core.add(request(np.arange(3, dtype=np.int32), 1, 0), ())
    assert isinstance(core, Core) and steps(core, 1) == [slot]
    assert core.sequences.generation(slot, FinishReason.LENGTH).routed_experts is None
    with pytest.raises(ConfigError, match="routes of experts are to be recorded, but LlamaForCausalLM has no experts"):
        open_core(PolicyModel(tiny_model("llama")), **NUMBERS, recompute=False, record_routes=True)
