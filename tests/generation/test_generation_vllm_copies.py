"""Linear layers of vLLM read the packed copies that the trainer has made for itself, and a worker has none of its own to make."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from generation_cores import OpenedCore, Worker, needs_vllm, opened_core
from generation_models import change_weights, generate_all, request
from placing import needs_placing
from test_generation_vllm_engine import SAME, policy_and_plain

from asyncrl.generation.worker.control import ControlLine
from asyncrl.generation.worker.opening import copies_for_vllm
from asyncrl.generation.worker.server import Server
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.parameters.placed import Placed
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.types import Generation, GenerationRequest
from asyncrl.weights.copies import PackedCopies
from asyncrl.weights.posted import PostedWeights

pytestmark = [needs_vllm, pytest.mark.filterwarnings("ignore")]

ASKED = [request(9, seed, max_tokens=24, temperature=1.0) for seed in range(4)]


@dataclass
class Sides:
    """The trainer's and the worker's, in one process. `said`: what the node hears."""

    policy: PolicyModel
    copies: PackedCopies
    posted: PostedWeights
    made: OpenedCore
    server: Server
    said: ControlLine

    async def step(self, seed: int) -> int:
        """Another version, published, and the worker at it."""
        version = await self.made.lane.run(lambda: change_weights(self.policy, seed), name="train")
        await self.posted.update_weights(version)
        assert await self.said.receive() == {"bound": version}
        return version

    def own_copies(self) -> set[str]:
        """Kinds of layers that have packed their weights themselves."""
        names = {module: name for name, module in self.made.cores[0].model.named_modules()}
        return {names[each._module].rpartition(".")[2] for each in self.made.cores[0]._weights._linear if each._copies}


@dataclass
class Parts:
    """What is made where no event loop runs. `packed`, `placed`: the copies, as a worker finds them."""

    architecture: str
    policy: PolicyModel
    plain: Any
    owner: Board
    reader: Board
    copies: PackedCopies
    packed: Board
    placed: dict[int, dict[int, Placed]]


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Iterator[Parts]:
    """Of the architecture that the test names."""
    policy, plain = policy_and_plain(request.param)
    needs_placing(policy.dtype)
    weights, copies = policy.weights, PackedCopies.of(policy)
    assert copies is not None
    with Board.create(weights.size, policy.dtype, weights.layout_digest()) as owner:
        with Board.attach(owner.description, os.dup(owner.fd), owner.layout) as reader:
            halves, fd = [reader.half(0), reader.half(1)], os.dup(copies.board.fd)
            packed, placed = copies_for_vllm(policy.dtype, halves, json.loads(json.dumps(copies.message())), fd)
            assert packed is not None
            yield Parts(request.param, policy, plain, owner, reader, copies, packed, placed)
            packed.close()
    copies.close()


@asynccontextmanager
async def opened(parts: Parts) -> AsyncIterator[Sides]:
    node, worker = socket.socketpair()
    ours, theirs = ControlLine(node, "worker 0"), ControlLine(worker, "the node")
    producer: Any = None  # nothing is asked for over the line
    try:
        async with opened_core("vllm", parts.policy, parts.plain, copies=parts.placed) as made:
            server = Server(theirs, made.engine, made.lane, parts.reader, producer, parts.packed)
            posted = PostedWeights(parts.policy, parts.owner, Worker(server), made.lane, copies=parts.copies)
            await server.move(*await posted.post_first())
            assert await ours.receive() == {"bound": 0}
            yield Sides(parts.policy, parts.copies, posted, made, server, ours)
            posted.close()
    finally:
        ours.close()
        theirs.close()


async def alone(architecture: str, asked: list[GenerationRequest]) -> list[list[Generation]]:
    """What a worker that packs for itself samples, with the weights of each version."""
    policy, plain = policy_and_plain(architecture)
    found = []
    async with opened_core("vllm", policy, plain) as made:
        for seed in (1, 2, 3):
            change_weights(policy, seed)
            await made.move(policy.weights.working.clone(), policy.version)
            found.append(await generate_all(made.engine, asked))
    return found


@pytest.mark.parametrize(
    ("parts", "own"), [("llama", set()), ("qwen2", {"qkv_proj"}), ("qwen3_moe", {"gate"})], indirect=["parts"]
)
async def test_it_samples_what_it_samples_from_copies_of_its_own(parts: Parts, own: set[str]) -> None:
    """Bit by bit, over three versions. The vocabulary, which vLLM pads, makes the head a matrix of its own; q, k and v with biases
    between them are no neighbours in the buffer; and a router is no product of the trainer's."""
    answers = []
    async with opened(parts) as sides:
        for seed in (1, 2, 3):
            await sides.step(seed)
            answers.append(await generate_all(sides.made.engine, ASKED))
            computed = await sides.made.engine.outputs()
            assert sides.made.engine.bound.distance(computed, fixed_logprobs(sides.policy)) < SAME
        assert sides.own_copies() == {"lm_head", *own}
    for mine, theirs in zip(answers, await alone(parts.architecture, ASKED), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize("parts", ["llama"], indirect=True)
async def test_a_byte_of_a_copy_that_is_not_the_trainers_is_told_to_the_node(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(parts) as sides:
        complete = sides.copies.complete

        def damaged(half: int, version: int) -> None:
            complete(half, version)
            sides.copies.board.half(half).view(torch.uint8)[5000] ^= 1

        monkeypatch.setattr(sides.copies, "complete", damaged)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sides.server.check)
            await sides.step(1)
            said = await sides.said.receive()
            tasks.cancel_scope.cancel()
        assert said["wrong"] == "bucket 0 of the packed weights of version 1 is not what the trainer wrote"
