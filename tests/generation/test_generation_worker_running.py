"""A worker moves to new weights while its requests go on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.generation.worker.server import Server
from asyncrl.generation.worker.serving import EmbeddedServing
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.types import Generation, GenerationRequest, PostedVersion, SamplingParams

T = TypeVar("T")
CONTEXT = 400
DECODE, BIND = "engine/decode", "engine/bind"


def policy_of(served: bool, dtype: str) -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
        initializer_range=0.2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config), dtype, served=served)


class Told(ThreadLane):
    """It knows the names of its closures, and calls back when one of them has ended a number of times."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.names = list[str]()
        self.calls = dict[tuple[str, int], Callable[[], object]]()

    def _execute(self, job: Any) -> None:  # on the thread: the order in which they ran
        self.names.append(job.name)
        super()._execute(job)

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        found = await super().run(fn, name=name, priority=priority, cost=cost)
        call = self.calls.pop((name, self.names.count(name)), None)
        if call is not None:
            call()
        return found


class Sides:
    """What the trainer and the worker have before either runs."""

    def __init__(self, dtype: str, boards: list[Board]) -> None:
        self.trainer, self.served = policy_of(served=False, dtype=dtype), policy_of(served=True, dtype=dtype)
        weights = self.trainer.weights
        self.owner = Board.create(weights.size, self.trainer.dtype, weights.layout_digest())
        self.reader = Board.attach(self.owner.description, os.dup(self.owner.fd), self.owner.layout)
        boards += [self.owner, self.reader]


class Made:
    """A worker's server and engine, the node's ends of its line and board, and the trainer."""

    def __init__(self, lane: Told, sides: Sides, **options: Any) -> None:
        self.trainer, self.owner, self.lane = sides.trainer, sides.owner, lane
        node, worker = socket.socketpair()
        self.node, self._line = Channel(node, "worker 0"), Channel(worker, "the node")
        self.engine = EmbeddedServing(
            sides.served, None, lane, Recorder(max_events=0), max_sequences=4, max_context=CONTEXT, **options
        )
        self.server = Server(self._line, self.engine, lane, sides.reader)

    def write(self, version: int, half: int) -> None:
        """An optimizer step that matters."""
        self.trainer.flat.master.mul_(1.2).add_(0.01 * version)
        self.trainer.advance()
        self.trainer.version = version
        self.owner.write(half, version, self.trainer.weights.working)

    def tell(self, version: int, half: int) -> None:
        self.server.weights.set_target(PostedVersion(version, half, fixed_logprobs(self.trainer)))

    async def answer(self) -> dict[str, Any]:
        with anyio.fail_after(30):
            return await self.node.receive()

    def ask(self, seed: int, tokens: int) -> asyncio.Future[Generation]:
        prompt = np.random.default_rng(seed).integers(0, 512, 5).astype(np.int32)
        request = GenerationRequest(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), seed)
        return asyncio.ensure_future(self.engine.generate(request))

    def close(self) -> None:
        self.node.close()
        self._line.close()


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    made: list[Board] = []
    yield made
    for board in made:
        board.close()


@asynccontextmanager
async def opened(boards: list[Board], dtype: str = "float32", **options: Any) -> AsyncIterator[Made]:
    """It serves version 0, which lies in half 0."""
    async with Told("worker0", Recorder(max_events=0)) as lane:
        made = Made(lane, await asyncio.to_thread(Sides, dtype, boards), **options)
        try:
            async with made.engine, plain_task_group() as tasks:
                tasks.start_soon(made.server.weights.run)
                made.write(0, 0)
                made.tell(0, 0)
                assert await made.answer() == {"bound": 0}
                yield made
                tasks.cancel_scope.cancel()
        finally:
            made.close()


@pytest.mark.parametrize("kv_after_update", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_go_on_to_come_from_the_weights_of_before(
    dtype: str, kv_after_update: str, boards: list[Board]
) -> None:
    if not packing_works(DTYPES[dtype], torch.device("cpu")):
        pytest.skip(f"nothing is packed here in {dtype}")
    async with opened(boards, dtype, kv_after_update=kv_after_update) as made:
        begun = asyncio.Event()
        made.lane.calls[DECODE, 10] = begun.set
        running = [made.ask(seed, 200) for seed in range(3)]
        await begun.wait()
        made.write(1, 1)
        made.tell(1, 1)
        assert await made.answer() == {"bound": 1}
        for answer in await asyncio.gather(*running):
            versions = answer.versions.tolist()
            assert versions == sorted(versions) and set(versions) == {0, 1}
            assert versions.count(0) >= 10
        assert await made.lane.run(lambda: fixed_logprobs(made.engine.policy), name="look") == pytest.approx(
            fixed_logprobs(made.trainer), abs=1e-5 if dtype == "float32" else 0.05
        )
        fresh = made.ask(7, 20)
        assert (await fresh).versions.tolist() == [1] * 20


async def test_what_is_told_again_meanwhile_is_answered_once(boards: list[Board]) -> None:
    """As a node does whose own wait was given up."""
    async with opened(boards) as made:
        made.write(1, 1)
        made.lane.calls[BIND, 2] = lambda: made.tell(1, 1)
        made.tell(1, 1)
        assert await made.answer() == {"bound": 1}
        made.write(2, 0)
        made.tell(2, 0)
        assert await made.answer() == {"bound": 2} and made.lane.names.count(BIND) == 3


async def test_a_half_that_holds_another_version_is_wrong(boards: list[Board]) -> None:
    async with opened(boards) as made:
        made.write(3, 1)  # and nobody says so
        made.tell(1, 1)
        message = await made.answer()
        assert "the board holds version 3 where version 1 was announced" in message["wrong"]
        assert made.engine.version == 0
