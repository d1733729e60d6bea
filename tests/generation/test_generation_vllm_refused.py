"""Models that vLLM cannot be handed, on the real one: refused by name before anything is generated."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import dataclasses
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from generation_cores import VOCABULARY, form_of, needs_vllm, opened_core, small_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.errors import ConfigError
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.vllm.versions import load_adapter
from asyncrl.models.policy import PolicyModel
from asyncrl.types import GenerationRequest, SamplingParams

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Of an engine that was not made vLLM keeps its groups of processes, which the next one takes for its own: in a run that
    process ends."""
    yield
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


class Unheard(LlamaForCausalLM):
    """An architecture that vLLM has never heard of."""


def experts() -> PreTrainedModel:
    """Of a width that vLLM's kernel for experts does not take."""
    more = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, hidden_size=48)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | more))


def narrow() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def sliding(layers: int) -> PreTrainedModel:
    """Five layers with a window, then one without, as Gemma 3 has them."""
    more = dict(num_hidden_layers=layers, head_dim=32, sliding_window=64)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | more))


def unheard() -> PreTrainedModel:
    return Unheard(small_model("llama").config)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (experts, "No Unquantized MoE backend supports the deployment configuration"),
        (narrow, "the model's heads have size 16; vLLM's attention on CPUs takes 32, 64"),
        (lambda: sliding(26), "keeps the layers of this model in 7 groups"),
        (unheard, "which does not support Unheard"),
    ],
)
async def test_a_model_that_cannot_be_handed_over_is_refused(build: Any, text: str) -> None:
    torch.manual_seed(0)
    module = build().eval()
    plain = copy.deepcopy(module)
    with pytest.raises(ConfigError, match=f"{text}.*use generation.engine=embedded"):
        async with opened_core("vllm", PolicyModel(module, "float32"), plain):
            pytest.fail("it was opened")


async def test_groups_of_layers_that_come_out_even_have_room_for_everybody() -> None:
    """Two full layers and ten with a window: six groups of two."""
    torch.manual_seed(0)
    module = sliding(12).eval()
    plain, options = copy.deepcopy(module), dict(max_sequences=4, max_context=96)
    async with opened_core("vllm", PolicyModel(module, "float32"), plain, **options) as made:
        scheduler = made.cores[0]._core.scheduler
        assert len(scheduler.kv_cache_config.kv_cache_groups) == 6
        preempted, take = [], scheduler._preempt_request
        scheduler._preempt_request = lambda *a, **k: preempted.append(a) or take(*a, **k)
        sampling = SamplingParams(max_tokens=32, ignore_eos=True)
        prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 64, dtype=np.int32) for seed in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for seed, prompt in enumerate(prompts):
                tasks.create_task(made.engine.generate(GenerationRequest(prompt, sampling, seed)))
        assert not preempted


def small_core() -> tuple[Any, Any, Any]:
    """An adapter, and what its core is made of."""
    adapter = load_adapter()
    policy = PolicyModel(small_model("llama"), "float32")
    size = cache_shape(policy.config, 1, 1).nbytes(policy.dtype)
    form = adapter.ModelSpec(form_of(policy), policy.weights.layout(), policy.weights.working)
    return adapter, form, adapter.CoreLimits(2, 32, 64, 32, size)


def memory_policy() -> int:
    """Of this thread, as Linux numbers it."""
    mode = ctypes.c_int(-1)
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0) == 0
    return mode.value


@pytest.fixture
def threads() -> Iterator[None]:
    """vLLM replaces one of them for good."""
    before = torch.get_num_threads, torch.set_num_threads
    yield
    torch.get_num_threads, torch.set_num_threads = before


def test_the_cache_is_as_large_as_asked_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    adapter, form, room = small_core()  # takes both out
    core = adapter.VllmCore(form, room, lambda names, logits: logits.argmax(-1))
    assert core._core.vllm_config.cache_config.num_gpu_blocks == adapter._blocks(room)
    assert memory_policy() == 0  # the default: vLLM has bound nothing
    core.close()


def test_a_layer_that_computes_from_its_first_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    adapter, form, room = small_core()
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "process_weights_after_loading", lambda self: None, raising=False)
    with pytest.raises(
        ConfigError, match=r"whose RMSNorm \(model.layers.0.input_layernorm\) computes something of its own"
    ):
        adapter.VllmCore(form, room, lambda names, logits: logits.argmax(-1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context": 300, "positions": 600}, r"this model: Value error, User-specified max_model_len \(300\) is greater"),
        ({"positions": 10**10}, "does not fit into memory; make engine.kv_positions smaller"),
    ],
)  # fmt: skip
def test_what_vllm_says_is_told_in_a_sentence(changes: dict[str, int], text: str, threads: None) -> None:
    adapter, form, room = small_core()
    with pytest.raises(ConfigError, match=text):
        adapter.VllmCore(form, dataclasses.replace(room, **changes), lambda names, logits: logits.argmax(-1))
