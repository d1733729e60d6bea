"""What a worker does at a new version, on a real board: it answers at once. Where a device is late its lane goes on, and nobody is
told of what has not happened yet."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import pytest
import torch
from anyio import wait_all_tasks_blocked
from transformers import LlamaConfig, LlamaForCausalLM
from transport_helpers import own_name

from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.generation.worker.serving import EmbeddedServing
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, Passing, SlabHalves
from asyncrl.weights.sync import WeightReader


def policy_of(served: bool) -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=997, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config), "float32", served=served)


class Made:
    """A worker without requests, and what the node has of it."""

    def __init__(self, lane: ThreadLane, recorder: Recorder, boards: Boards) -> None:
        node, worker = socket.socketpair()
        self.node, self._line = Channel(node, "worker 0"), Channel(worker, "the node")
        engine = EmbeddedServing(policy_of(served=True), None, lane, recorder, max_sequences=1, max_context=8)
        self.policy, self.weights, self.owner, self.lane = engine.policy, boards.weights, boards.owner, lane
        self.reader = WeightReader(boards.reader, engine, lane, self._line.send)

    async def move(self, version: int) -> None:
        half = version % 2
        self.owner.write(half, version, self.weights)
        await self.reader.move(version, half, None)

    def close(self) -> None:
        self.node.close()
        self._line.close()


class Boards(NamedTuple):
    """The node's end, the worker's, and what the node writes."""

    owner: Board
    reader: Board
    weights: torch.Tensor


name = pytest.fixture(own_name, name="name")


@pytest.fixture(params=["file", "slab", "copies"])
def boards(request: pytest.FixtureRequest, name: str) -> Iterator[Boards]:
    """In a file; in a slab; in a slab of which the worker reads copies."""
    weights, here = policy_of(served=False).weights, torch.device("cpu")
    slab = None if request.param == "file" else SlabHalves.create(name, weights.size, torch.float32, here)
    with Board.create(weights.size, torch.float32, weights.layout_digest(), slab) as owner:
        copy_to = here if request.param == "copies" else None
        with Board.attach(owner.description, os.dup(owner.fd), owner.layout, copy_to) as reader:
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


@pytest.mark.parametrize("boards", ["file", "slab"], indirect=True)
async def test_the_answer_does_not_wait_for_the_next_closure(boards: Boards) -> None:
    """A decode step that is asked for meanwhile runs behind the move, and the node hears of the move before that has ended."""
    heard = threading.Event()
    async with opened(boards) as made, plain_task_group() as tasks:
        running = threading.Event()
        lane: ThreadLane = made.lane

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


# -- a device that is late ---------------------------------------------------------------------------------------------


class Late:
    """What a device was told, and has not done yet: whoever waits for it is heard of, and waits until `come`."""

    def __init__(self) -> None:
        self.waited, self._come = threading.Event(), threading.Event()
        self.threads = set[int]()

    def passing(self) -> None:
        self.threads.add(threading.get_ident())
        self.waited.set()
        assert self._come.wait(60)

    async def is_waited_for(self) -> None:
        assert await asyncio.to_thread(self.waited.wait, 60)

    def come(self) -> None:
        self._come.set()


async def lane_goes_on(made: Made) -> int:
    """The thread of a closure that runs now."""
    lane: ThreadLane = made.lane
    with anyio.fail_after(30):
        return await lane.run(threading.get_ident, name="engine/decode")


async def heard_nothing(made: Made) -> None:
    """The worker does what it can do without the device, and says nothing."""
    await wait_all_tasks_blocked()
    for _ in range(3):
        await asyncio.sleep(0)
    assert made.node._received == b"" and not made.node._ended


@pytest.mark.parametrize("boards", ["slab", "copies"], indirect=True)
async def test_the_half_of_before_is_free_only_once_the_device_has_left_it(boards: Boards) -> None:
    """Closures that the node would wait for are over long before: what they launched is not."""
    async with opened(boards) as made, plain_task_group() as tasks:
        await made.move(0)
        assert await made.node.receive() == {"bound": 0}
        late = Late()
        boards.reader.leave = lambda: late.passing  # type: ignore[method-assign]
        tasks.start_soon(made.move, 1)
        await late.is_waited_for()
        assert made.policy.version == 1 and boards.reader.half(1).data_ptr() == made.policy.weights.bound.data_ptr()
        assert await lane_goes_on(made) not in late.threads
        await heard_nothing(made)
        late.come()
        with anyio.fail_after(30):
            assert await made.node.receive() == {"bound": 1}


@pytest.mark.parametrize("boards", ["copies"], indirect=True)
async def test_nothing_is_read_of_a_copy_that_is_not_there_yet(boards: Boards) -> None:
    async with opened(boards) as made, plain_task_group() as tasks:
        await made.move(0)
        assert await made.node.receive() == {"bound": 0}
        late, fetch = Late(), boards.reader.fetch

        def slowly(index: int) -> Passing:
            def passing() -> None:
                late.passing()
                fetch(index)

            return passing

        boards.reader.fetch = slowly  # type: ignore[method-assign]
        tasks.start_soon(made.move, 1)
        await late.is_waited_for()
        assert await lane_goes_on(made) not in late.threads
        assert made.policy.version == 0 and made.policy.weights.bound.data_ptr() == boards.reader.half(0).data_ptr()
        await heard_nothing(made)
        late.come()
        with anyio.fail_after(30):
            assert await made.node.receive() == {"bound": 1}
        assert torch.equal(made.policy.weights.bound, boards.weights)
        assert made.policy.weights.bound.data_ptr() not in {boards.owner.half(half).data_ptr() for half in (0, 1)}
