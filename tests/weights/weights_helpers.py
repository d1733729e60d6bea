"""Small policies of every kind whose weights are published, and what stands for the engine behind a sink."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import LoraConfig
from asyncrl.data.packing import pack_groups
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.policy import PolicyModel
from asyncrl.types import FinishReason, Group, Microbatch, Prompt, Ticket, Trajectory

KINDS = ("float32", "bfloat16", "lora float32", "lora bfloat16", "cut bfloat16")
_SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def module_of(seed: int = 3) -> Any:
    """Qwen3: norms of heads too, and a head that is tied to the embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=True))


@dataclass
class Rows:
    """The masters of a cut model, of the one rank that there is."""

    masters: dict[str, Tensor]

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.masters.items()

    def local(self, full: Tensor) -> Tensor:
        return full


@dataclass
class Trained:
    """A policy, and an optimizer step for it that matters."""

    policy: PolicyModel
    shards: Rows | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def step(self, scale: float = 0.1, refresh: bool = True) -> int:
        """Every master moves; the modules follow, unless they shall not; the version does."""
        masters = self.policy.flat.named_masters() if self.shards is None else self.shards.named_masters()
        for _, master in masters:
            master.add_(torch.randn(master.shape, generator=self.generator, dtype=master.dtype), alpha=scale)
        if not refresh:
            self.policy.version += 1
            return self.policy.version
        if self.shards is not None:
            assert isinstance(self.policy.flat, ServedParameters)
            for name, master in self.shards.named_masters():
                self.policy.flat.write(name, master)
        return self.policy.advance()


def trained(kind: str) -> Trained:
    what, _, dtype = kind.rpartition(" ")
    module = module_of()
    if what == "cut":
        rows = Rows({name: parameter.detach().clone() for name, parameter in module.named_parameters()})
        return Trained(PolicyModel(module, dtype, served=True), rows)
    lora = LoraConfig(rank=4, alpha=6) if what == "lora" else None
    return Trained(PolicyModel(module, dtype, lora=lora, seed=5))


def batch_of(seed: int, members: int = 4) -> Microbatch:
    """A group of random tokens behind one prompt, with random log-probs and advantages."""
    rng = np.random.default_rng(seed)
    tokens, prompt = [rng.integers(0, 96, 12).astype(np.int32) for _ in range(members)], 5
    for each in tokens:
        each[:prompt] = tokens[0][:prompt]
    mask = np.arange(12) >= prompt
    trajectories = []
    for member, ids in enumerate(tokens):
        logprobs = np.where(mask, -rng.random(12) * 4 - 0.1, 0).astype(np.float32)
        trajectories.append(
            Trajectory(
                group_id=seed, member=member, group_size=members, prompt_length=prompt, tokens=ids, mask=mask,
                logprobs=logprobs, sampled_logprobs=logprobs, versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0, finish_reason=FinishReason.STOP,
            )
        )  # fmt: skip
    group = Group(Ticket(seed, 0, 1), Prompt(seed, tokens[0][:prompt], ""), tuple(trajectories))
    (batch,) = pack_groups([(group, rng.standard_normal(members))], 1000)
    return batch


@asynccontextmanager
async def own_lane() -> AsyncIterator[ThreadLane]:
    async with ThreadLane("cpu", on_start=lambda: torch.set_num_threads(1)) as lane:
        yield lane
