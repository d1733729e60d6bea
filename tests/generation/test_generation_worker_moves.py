"""What a worker does at a new version, on a real board: it answers at once, and its checks come round to every bucket."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import anyio
import pytest
import torch
from anyio import wait_all_tasks_blocked
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.generation.worker.control import ControlLine
from asyncrl.generation.worker.main import Server
from asyncrl.generation.worker.serving import EmbeddedServing
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import BUCKET_BYTES, Board

T = TypeVar("T")
CHECKS = 3  # closures between two versions


def policy_of(served: bool) -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=997, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config), "float32", served=served)


class Made:
    """A server without requests, and what the node has of it."""

    def __init__(self, lane: ThreadLane, recorder: Recorder, boards: Boards) -> None:
        node, worker = socket.socketpair()
        self.node, self._line = ControlLine(node, "worker 0"), ControlLine(worker, "the node")
        engine = EmbeddedServing(policy_of(served=True), None, lane, recorder, max_sequences=1, max_context=8)
        self.policy, self.weights, self.owner = engine.policy, boards.weights, boards.owner
        producer: Any = None  # nothing is generated
        self.server = Server(self._line, engine, lane, boards.reader, producer)

    async def move(self, version: int, *, damaged: int | None = None) -> None:
        """`damaged`: a bucket in which a bit flips after it was written."""
        half = version % 2
        self.owner.write(half, version, self.weights)
        if damaged is not None:
            self.owner.half(half).view(torch.uint8)[damaged * BUCKET_BYTES] ^= 1
        await self.server.move(version, half, None)

    def close(self) -> None:
        self.node.close()
        self._line.close()


class Boards(NamedTuple):
    """The node's end, the worker's, and what the node writes."""

    owner: Board
    reader: Board
    weights: torch.Tensor


@pytest.fixture
def boards() -> Iterator[Boards]:
    weights = policy_of(served=False).weights
    with Board.create(weights.size, torch.float32, weights.layout_digest()) as owner:
        with Board.attach(owner.description, os.dup(owner.fd), owner.layout) as reader:
            yield Boards(owner, reader, weights.working)


@asynccontextmanager
async def opened(boards: Boards, lane_type: type[ThreadLane] = ThreadLane) -> AsyncIterator[Made]:
    recorder = Recorder(max_events=0)
    async with lane_type("worker0", recorder) as lane:
        made = Made(lane, recorder, boards)
        try:
            yield made
        finally:
            made.close()


async def test_the_answer_does_not_wait_for_the_next_closure(boards: Boards) -> None:
    """A decode step that is asked for meanwhile runs behind the move, and the node hears of the move before that has ended."""
    heard = threading.Event()
    async with opened(boards) as made, plain_task_group() as tasks:
        running = threading.Event()
        lane: ThreadLane = made.server._lane

        async def decode(wait_for: threading.Event) -> None:
            await lane.run(lambda: running.set() or wait_for.wait(60), name="engine/decode")

        first = threading.Event()
        tasks.start_soon(decode, first)
        assert await asyncio.to_thread(running.wait, 60)
        tasks.start_soon(decode, heard)
        with anyio.fail_after(30):
            tasks.start_soon(made.move, 0)
            await wait_all_tasks_blocked()
            assert lane.statistics()["queued"] == 2
            first.set()
            assert await made.node.receive() == {"bound": 0}
        assert made.policy.version == 0 and not heard.is_set(), "the second decode step still runs"
        heard.set()


class Restless(ThreadLane):
    """A new version after every few checks: fewer than there are buckets."""

    made: Made
    checks = 0
    damaged: int

    async def run(self, fn: Callable[[], T], *, name: str, priority: int = 0, cost: float = 0.0) -> T:
        found = await super().run(fn, name=name, priority=priority, cost=cost)
        if name == "engine/check":
            self.checks += 1
            if self.checks % CHECKS == 0:
                await self.made.move(self.checks // CHECKS, damaged=self.damaged)
        return found


@pytest.mark.parametrize("bucket", [0, -1])
async def test_every_bucket_is_checked_in_the_end_although_versions_are_faster(
    boards: Boards, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.generation.worker.main._SLICE_S", 0.0)  # one bucket a closure
    async with opened(boards, Restless) as made, plain_task_group() as tasks:
        lane: Any = made.server._lane
        buckets = made.owner.buckets
        assert buckets > 2 * CHECKS
        lane.made, lane.damaged = made, range(buckets)[bucket]
        await made.move(0)
        tasks.start_soon(made.server.check)
        tasks.start_soon(made.move, 0)
        with anyio.fail_after(20):
            message: dict[str, Any] = {}
            while "wrong" not in message:
                message = await made.node.receive()
        assert f"bucket {range(buckets)[bucket]} of the weights" in message["wrong"]
        assert lane.checks <= 2 * buckets + CHECKS
