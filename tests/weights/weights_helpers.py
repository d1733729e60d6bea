"""Small policies of every kind whose weights are published, and what stands for the workers that read the board."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.trajectories import trajectory
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import LoraConfig
from asyncrl.data.packing import pack_groups
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board, weight_slab
from asyncrl.types import Group, Microbatch, PostedVersion, Prompt, Ticket
from asyncrl.weights.sync import WeightPublisher

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
    trajectories = tuple(
        trajectory(seed, member, members, ids, prompt_length=prompt, logprob=-rng.random(12) * 4 - 0.1)
        for member, ids in enumerate(tokens)
    )
    group = Group(Ticket(seed, 0, 1), Prompt(seed, tokens[0][:prompt], ""), trajectories)
    (batch,) = pack_groups([(group, rng.standard_normal(members))], 1000)
    return batch


@asynccontextmanager
async def own_lane() -> AsyncIterator[ThreadLane]:
    async with ThreadLane("cpu", on_start=lambda: torch.set_num_threads(1)) as lane:
        yield lane


class Guarded(Board):
    """A board that knows which halves somebody may look at, and what was written into each."""

    in_use: set[int]
    written: dict[int, Tensor]
    copied = 0

    def write(self, index: int, version: int, source: Tensor | None = None) -> None:
        super().write(index, version, source)
        self.copied += source is not None
        self.written[index] = self.half(index).clone()

    def clear(self, index: int) -> None:
        assert index not in self.in_use, f"half {index} is written while a worker may read it"
        super().clear(index)

    def is_whole(self, index: int) -> bool:
        return torch.equal(self.half(index), self.written[index])


class Readers:
    """Two readers, the second of which may take its time or fail. Each looks at a half from when it is told until it moves."""

    def __init__(self, board: Guarded) -> None:
        self.board = board
        self.at = [0, 0]
        self.asked: list[tuple[int, int]] = []
        self.seen: dict[int, Tensor] = {}
        self.second_waits: asyncio.Event | None = None
        self.pinned: asyncio.Event | None = None  # the second one is, until then
        self.error: Exception | None = None
        self.waiting = asyncio.Event()

    def start(self, posted: PostedVersion) -> None:
        self.at = [posted.half, posted.half]
        self._look(posted.version, posted.half)
        self.outputs = [posted.outputs]

    def reads(self, half: int) -> bool:
        return self.pinned is not None and self.at[1] == half

    async def wait_unread(self, half: int) -> None:
        while self.reads(half):
            assert self.pinned is not None
            self.waiting.set()
            await self.pinned.wait()
            self.pinned = None
            self._move(1, self.at[0])

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        self.outputs.append(outputs)
        self.asked.append((version, half))
        self._move(0, half)
        if self.second_waits is not None:
            self.waiting.set()
            await self.second_waits.wait()
        if self.error is not None:
            raise self.error
        if self.pinned is None:
            self._move(1, half)
        self._look(version, half)

    def _move(self, reader: int, half: int) -> None:
        self.at[reader] = half
        self.board.in_use = set(self.at)

    def _look(self, version: int, half: int) -> None:
        self.board.in_use = set(self.at)
        assert self.board.version(half) == version
        assert self.board.is_whole(half)
        self.seen[version] = self.board.half(half).clone()


class Case:
    def __init__(self, trained: Trained, board: Guarded, lane: ThreadLane) -> None:
        self.trained, self.policy, self.board, self.lane = trained, trained.policy, board, lane
        self.readers = Readers(board)
        self.sink = WeightPublisher(trained.policy, board, self.readers, lane)

    async def start(self) -> None:
        self.readers.start(await self.sink.post_first())

    async def step(self) -> int:
        """What somebody reads is as it was written, and the modules read the masters of now, wherever."""
        version = await self.lane.run(self.trained.step, name="step")
        assert all(self.board.is_whole(half) for half in self.board.in_use)
        assert self.policy.weights.misplaced_parameters() == []
        return version

    def weights(self) -> Tensor:
        return self.policy.weights.bound.clone()

    @property
    def place(self) -> int | None:
        """The half that the trainer's modules read; None: memory of their own."""
        at = {self.board.half(half).data_ptr(): half for half in (0, 1)}
        return at.get(self.policy.weights.parameters[0].data_ptr())


@torch.no_grad()
def logits(policy: PolicyModel) -> Tensor:
    tokens = torch.arange(1, 18)
    return policy.logits(policy.hidden(tokens, torch.arange(17), TreePlan([17])))


def create(policy: PolicyModel, slab: str | None) -> Guarded:
    weights = policy.weights
    halves = slab and weight_slab(slab, weights.size, policy.dtype, policy.device)
    return Guarded.create(weights.size, policy.dtype, weights.layout_digest(), halves or None)


@asynccontextmanager
async def opened(
    kind: str = "float32", *, version: int = 0, slab: str | None = None, start: bool = True
) -> AsyncIterator[Case]:
    """`slab`: the name of one in which the halves are to lie. `start`: the first version lies there, and the workers read it."""
    case = trained(kind)
    case.policy.version = version
    board = await asyncio.to_thread(create, case.policy, slab)
    board.in_use, board.written = set(), {}
    try:
        async with own_lane() as lane:
            made = Case(case, board, lane)
            if start:
                await made.start()
            yield made
    finally:
        await asyncio.to_thread(board.close)
