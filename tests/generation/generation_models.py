"""Tiny real models, requests, and slow references that share no code with the engine."""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, SamplingParams

VOCABULARY = 97
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Of random models of many families: without attention, and with it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 3, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ATTENTION: dict[str, Any] = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}


def tiny_model(
    architecture: str, dtype: str = "float32", vocabulary: int = VOCABULARY, seed: int = 0
) -> PreTrainedModel:
    """Random weights, wide enough that the distribution is far from flat and that attention matters."""
    torch.manual_seed(seed)
    sizes = ATTENTION | {"vocab_size": vocabulary, "intermediate_size": 96, "max_position_embeddings": 512}
    sizes |= {"attn_implementation": "eager"}
    if architecture == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    return model.to(DTYPES[dtype]).eval()


def policy_and_plain(architecture: str, dtype: str = "float32", **sizes: Any) -> tuple[PolicyModel, PreTrainedModel]:
    """The policy, and a copy of its module with plain eager attention, made before the policy took it over."""
    module = tiny_model(architecture, dtype, **sizes)
    plain = copy.deepcopy(module)
    return PolicyModel(module, dtype), plain


def change_weights(policy: PolicyModel, seed: int = 1, scale: float = 0.3) -> int:
    """An optimizer step that matters: every weight moves, the version ticks, in one closure on the lane."""
    generator = torch.Generator().manual_seed(seed)
    for _, master in policy.flat.named_masters():
        spread = float(master.std()) if master.numel() > 1 else 1.0
        noise = torch.randn(master.shape, generator=generator, dtype=torch.float32)
        master.add_(noise.to(master.dtype) * (scale * (spread or 0.1)))
    return policy.advance()


def plain_copy(policy: PolicyModel, plain: PreTrainedModel) -> PreTrainedModel:
    """A plain model with the policy's present weights."""
    clone = copy.deepcopy(plain)
    own = dict(policy.module.named_parameters())
    for name, parameter in clone.named_parameters():
        parameter.data.copy_(own[name].data)
    return clone


def prompt(length: int, seed: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def request(length: int, seed: int, *, prefix_key: str | None = None, **sampling: Any) -> GenerationRequest:
    """A prompt of `length` tokens made from its key, or else from its seed."""
    source = seed if prefix_key is None else sum(map(ord, prefix_key))
    sampling.setdefault("max_tokens", 12)
    return GenerationRequest(prompt(length, source), SamplingParams(**sampling), seed=seed, prefix_key=prefix_key)


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, asked: GenerationRequest, answer: Generation) -> np.ndarray:
    """Log-probs [C] of the sampled tokens by one plain forward over the whole sequence."""
    tokens = torch.tensor(np.concatenate([asked.prompt_ids, answer.token_ids])[None].astype(np.int64))
    logits = model(input_ids=tokens, use_cache=False).logits[0].double()
    return picked(logits[asked.prompt_ids.size - 1 : -1], asked, answer)


@torch.no_grad()
def cached_logprobs(models: dict[int, PreTrainedModel], asked: GenerationRequest, answer: Generation) -> np.ndarray:
    """The same, token by token with transformers' cache, each token under the weights that its version names."""
    rows = []
    first = models[int(answer.versions[0])]
    name = (
        "cache" if "cache" in inspect.signature(first.forward).parameters else "past_key_values"
    )  # until transformers 5.24
    cached: dict[str, Any] = {name: DynamicCache(), "use_cache": True}
    tokens = torch.tensor(asked.prompt_ids[None].astype(np.int64))
    rows.append(first(input_ids=tokens, **cached).logits[0, -1])
    for token, version in zip(answer.token_ids[:-1], answer.versions[1:], strict=True):
        step = torch.tensor([[int(token)]])
        rows.append(models[int(version)](input_ids=step, **cached).logits[0, -1])
    return picked(torch.stack(rows).double(), asked, answer)


def picked(logits_CV: torch.Tensor, asked: GenerationRequest, answer: Generation) -> np.ndarray:
    temperature = asked.sampling.temperature or 1.0
    logp = torch.log_softmax(logits_CV / temperature, dim=-1)
    return logp.gather(1, torch.tensor(answer.token_ids.astype(np.int64))[:, None])[:, 0].numpy()


class Opened:
    """An open engine with its lane and recorder."""

    def __init__(self, engine: EmbeddedEngine, lane: ThreadLane, recorder: Recorder) -> None:
        self.engine = engine
        self.lane = lane
        self.recorder = recorder


@asynccontextmanager
async def opened(policy: PolicyModel, tokenizer: Any = None, **numbers: Any) -> AsyncIterator[Opened]:
    numbers.setdefault("max_sequences", 8)
    numbers.setdefault("max_context", 96)
    recorder = Recorder(nvtx=False)
    async with (
        ThreadLane("test", recorder) as lane,
        EmbeddedEngine(policy, tokenizer, lane, recorder, **numbers) as engine,
    ):
        yield Opened(engine, lane, recorder)


def assert_plain(
    plain: PreTrainedModel, requests: Sequence[GenerationRequest], answers: Sequence[Generation], atol: float = 1e-4
) -> None:
    """Each answer has the log-probs of one plain forward over its row."""
    for asked, answer in zip(requests, answers, strict=True):
        assert np.abs(answer.logprobs - plain_logprobs(plain, asked, answer)).max() < atol


async def answered(policy: PolicyModel, requests: Sequence[GenerationRequest], **numbers: Any) -> list[Generation]:
    """By an engine of their own."""
    async with opened(policy, **numbers) as run:
        return await generate_all(run.engine, requests)


async def nothing() -> None:
    pass


async def generate_all(
    engine: Any, requests: Sequence[GenerationRequest], beside: Callable[[], Awaitable[object]] = nothing
) -> list[Generation]:
    """All at once, answers in the order of the requests. `beside`: runs while they do."""
    answers: dict[int, Generation] = {}

    async def one(index: int) -> None:
        answers[index] = await engine.generate(requests[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(requests)):
            tasks.start_soon(one, index)
        await beside()
    return [answers[index] for index in range(len(requests))]
