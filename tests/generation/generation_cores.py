"""Cores for `VllmEngine`: vLLM's own where it is installed, and one made of transformers' plain forward that behaves like it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.generation.embedded.engine import cache_shape
from asyncrl.generation.vllm.engine import CoreSpec, VllmEngine
from asyncrl.generation.vllm.versions import installed_version, load_adapter
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routing import has_experts
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.weights.sync import WeightReader

VOCABULARY = 97
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")  # models with experts
# Architectures of which one is looked at with each push: vLLM itself is held against each of them by tools/vllm_check.
MOST = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", *MIXTURES))]
HAS_VLLM = installed_version() is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: tools/vllm_check runs these")
KINDS = ["plain", pytest.param("vllm", marks=needs_vllm)]


def small_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """Heads of a size that vLLM's attention on CPUs takes. llama: tied; qwen2: with biases; qwen3: norms of heads, not tied; or
    one of `MIXTURES`."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: PreTrainedModel
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.5)
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=False))
    else:
        model = _mixture(architecture, sizes)
    return model.eval()


def _mixture(architecture: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """Two of six experts a token. qwen3_moe: tied, experts of a size that vLLM's kernel pads, and a dense layer before those with
    experts; mixtral: other names in checkpoints; olmoe: weights of experts that do not sum to one."""
    chosen = dict(num_experts_per_tok=2)
    model: PreTrainedModel
    if architecture == "qwen3_moe":
        more: dict[str, Any] = dict(num_experts=6, moe_intermediate_size=48, head_dim=32, norm_topk_prob=True)
        more |= dict(num_hidden_layers=3, mlp_only_layers=[0], tie_word_embeddings=True)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | more, **chosen))
    elif architecture == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**sizes, **chosen, num_local_experts=6, sliding_window=None))
    else:
        model = OlmoeForCausalLM(OlmoeConfig(**sizes, **chosen, num_experts=6))
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@dataclass
class Waiting:
    """A request in the plain core."""

    prompt: list[int]
    limit: int
    stops: set[int]
    probe: bool
    tokens: list[int]


class PlainCore:
    """One forward over the whole row per token, of a policy that reads the buffer: no cache that could be stale."""

    def __init__(self, policy: PolicyModel, plain: PreTrainedModel, choose: Callable[[Sequence[str], Tensor], Tensor]):
        self._policy, self._plain, self._choose = policy, plain, choose
        self._requests: dict[str, Waiting] = {}
        self.recomputed = 0

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], salt: str) -> None:
        assert name not in self._requests
        self._requests[name] = Waiting(list(prompt), max_tokens, set(stop_ids), False, [])

    def add_replay(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        self._requests[name] = Waiting(list(prompt), max_tokens, set(), True, [])

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._requests.pop(name, None)

    def forget_caches(self) -> None:
        self.recomputed += 1

    @torch.no_grad()
    def bind(self, buffer: Tensor, version: int) -> None:
        views = dict(self._policy.weights.layout().views(buffer))
        for name, parameter in self._plain.named_parameters():
            parameter.copy_(views[name])

    def step(self) -> list[Any]:
        with torch.no_grad():
            rows = {name: self._logits(each) for name, each in self._requests.items()}
        if not rows:
            return []
        tokens = self._choose(list(rows), torch.stack([row[-1] for row in rows.values()])).tolist()
        return [self._take(name, token, rows[name]) for name, token in zip(rows, tokens, strict=True)]

    def _logits(self, each: Waiting) -> Tensor:
        logits: Tensor = self._plain(input_ids=torch.tensor([each.prompt + each.tokens]), use_cache=False).logits[0]
        return logits

    def _take(self, name: str, token: int, logits: Tensor) -> Any:
        each = self._requests[name]
        first = not each.tokens
        each.tokens.append(token)
        stopped = token in each.stops
        ended = stopped or len(each.tokens) == each.limit
        if ended:
            del self._requests[name]
        probed = None
        if each.probe and first:
            picked = torch.tensor(each.prompt[1:])[:, None]
            probed = logits[:-1].log_softmax(-1).gather(1, picked)[:, 0].double().tolist()
        computed = len(each.prompt) if first else 0
        return SimpleNamespace(
            name=name, token=token, ended=ended, stopped=stopped, computed=computed, cached=0, prompt_logprobs=probed
        )


def form_of(policy: PolicyModel) -> dict[str, Any]:
    config = json.loads(policy.config.to_json_string(use_diff=False))
    return config | {"architectures": [type(policy.module).__name__]}


def vllm_core(
    policy: PolicyModel,
    choose: Any,
    *,
    sequences: int,
    context: int,
    positions: int,
    split: tuple[Board, bool] | None = None,
    parts: int = 2,
    **options: Any,
) -> Any:
    """On the thread that uses it. What vLLM says while it is imported and built are no warnings of ours. `split`: the board that
    the `parts` processes of the engine read, and whether all but the first read a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = load_adapter()
        # vLLM keeps the variables of the first core of a process, such as a folder that is gone.
        importlib.import_module("vllm.envs").disable_envs_cache()
        size = cache_shape(policy.config, 1, 1).nbytes(policy.dtype)
        room = adapter.CoreLimits(sequences + 1, max(context, 17), positions + 17, 64, size)
        form = adapter.ModelSpec(form_of(policy), policy.weights.layout(), policy.weights.working.clone())
        if split is not None:
            board, copies = split
            options["split"] = adapter.Split(board, [torch.device("cpu")] * parts, [False] + [copies] * (parts - 1))
        return adapter.VllmCore(form, room, choose, **options)


class OpenedCore:
    """An open engine, the lane, and the core below it."""

    def __init__(self, engine: VllmEngine, lane: ThreadLane, cores: list[Any]) -> None:
        self.engine, self.lane, self.cores = engine, lane, cores

    async def move(self, buffer: Tensor, version: int) -> None:
        await self.lane.run(lambda: self.engine.move_to(buffer, version), name="engine/bind", priority=1)


class Workers:
    """One worker's end of the board, as `WeightPublisher` asks it."""

    def __init__(self, reader: WeightReader) -> None:
        self.reader = reader

    async def update_weights(self, version: int, half: int, outputs: Any) -> None:
        await self.reader.move(version, half, outputs)

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        raise AssertionError("nobody is pinned")


@asynccontextmanager
async def board_of(policy: PolicyModel) -> AsyncIterator[tuple[Board, Board]]:
    """The node's end and a worker's."""
    weights = policy.weights

    def make() -> tuple[Board, Board]:
        owner = Board.create(weights.size, policy.dtype, weights.layout_digest())
        return owner, Board.attach(owner.description, os.dup(owner.fd), owner.layout)

    both = await asyncio.to_thread(make)
    yield both
    for each in both:
        each.close()


@asynccontextmanager
async def opened_core(
    kind: str,
    policy: PolicyModel,
    plain: PreTrainedModel,
    tokenizer: Any = None,
    split: tuple[Board, bool] | None = None,
    parts: int = 2,
    **options: Any,
) -> AsyncIterator[OpenedCore]:
    """With version 0 of the policy's weights. `plain`: an untouched copy of the policy's module. `split`: see `vllm_core`."""
    numbers = {"max_sequences": 8, "max_context": 96} | options
    positions = numbers["max_sequences"] * numbers["max_context"]
    cores: list[Any] = []

    def make(choose: Any) -> Any:
        sizes = dict(sequences=numbers["max_sequences"], context=numbers["max_context"], positions=positions)
        core = PlainCore(policy, plain, choose)
        if kind != "plain":
            core = vllm_core(policy, choose, **sizes, split=split, parts=parts)
        cores.append(core)
        return core

    threads = torch.get_num_threads, torch.set_num_threads  # vLLM replaces the second one for good
    recorder = Recorder(nvtx=False)
    made = CoreSpec(policy.dtype, VOCABULARY, (), has_experts(policy.module))
    try:
        async with (
            ThreadLane("test", recorder) as lane,
            VllmEngine(make, made, tokenizer, lane, recorder, **numbers) as engine,
        ):
            await engine.update_weights(-1)  # it has its core
            opened = OpenedCore(engine, lane, cores)
            await opened.move(policy.weights.working.clone(), policy.version)
            yield opened
    finally:
        torch.get_num_threads, torch.set_num_threads = threads
        if kind == "vllm" and cores:
            cores[0].close()
