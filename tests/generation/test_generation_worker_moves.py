"""A worker moves to new weights, on a real board: its requests go on, and it answers at once. Where a device is late its lane goes
on, and nobody is told of what has not happened yet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
import torch
from anyio import wait_all_tasks_blocked
from transformers import LlamaConfig, LlamaForCausalLM
from transport_helpers import own_name

from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, DeviceWait, weight_slab
from asyncrl.types import Generation, GenerationRequest, PostedVersion, SamplingParams
from asyncrl.weights.sync import WeightReader

T = TypeVar("T")
CONTEXT = 400
DECODE, BIND = "engine/decode", "engine/bind"
CPU = torch.device("cpu")

name = pytest.fixture(own_name, name="name")


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
    """What the trainer and the worker have before either runs. `place` of the halves: a file; a slab; a slab of which the worker
    reads copies."""

    def __init__(self, place: str, name: str, dtype: str) -> None:
        self.trainer, self.served = policy_of(served=False, dtype=dtype), policy_of(served=True, dtype=dtype)
        weights = self.trainer.weights
        slab = None if place == "file" else weight_slab(name, weights.size, self.trainer.dtype, CPU)
        self.owner = Board.create(weights.size, self.trainer.dtype, weights.layout_digest(), slab)
        copy_to = CPU if place == "copies" else None
        self.board = Board.attach(self.owner.description, os.dup(self.owner.fd), self.owner.layout, copy_to)

    def close(self) -> None:
        self.owner.close()
        self.board.close()


class Made:
    """A worker's engine and its end of the board, and what the node has: its own end, the line, and the trainer."""

    def __init__(self, lane: Told, sides: Sides, **options: Any) -> None:
        self.trainer, self.owner, self.board, self.lane = sides.trainer, sides.owner, sides.board, lane
        node, worker = socket.socketpair()
        self.node, self._line = Channel(node, "worker 0"), Channel(worker, "the node")
        self.engine = EmbeddedEngine(
            sides.served, None, lane, Recorder(max_events=0), max_sequences=4, max_context=CONTEXT, **options
        )
        self.policy = self.engine.policy
        self.reader = WeightReader(sides.board, self.engine, lane, self._line.send)

    def step(self, version: int) -> None:
        """An optimizer step that matters, on the board."""
        self.trainer.flat.master.mul_(1.2).add_(0.01 * version)
        self.trainer.advance()
        self.owner.write(version % 2, version, self.trainer.weights.working)

    def announce(self, version: int) -> None:
        self.reader.set_target(PostedVersion(version, version % 2, fixed_logprobs(self.trainer)))

    async def move(self, version: int) -> None:
        self.step(version)
        await self.reader.move(version, version % 2, None)

    async def answer(self) -> dict[str, Any]:
        with anyio.fail_after(30):
            return await self.node.receive()

    def reads(self, half: int) -> bool:
        return self.board.half(half).data_ptr() == self.policy.weights.bound.data_ptr()

    def ask(self, seed: int, tokens: int) -> asyncio.Future[Generation]:
        prompt = np.random.default_rng(seed).integers(0, 512, 5).astype(np.int32)
        request = GenerationRequest(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), seed)
        return asyncio.ensure_future(self.engine.generate(request))

    def close(self) -> None:
        self.node.close()
        self._line.close()


@asynccontextmanager
async def opened(place: str, name: str, dtype: str = "float32", **options: Any) -> AsyncIterator[Made]:
    sides = await asyncio.to_thread(Sides, place, name, dtype)
    try:
        async with Told("worker0", Recorder(max_events=0)) as lane:
            with contextlib.closing(Made(lane, sides, **options)) as made:
                yield made
    finally:
        await asyncio.to_thread(sides.close)


@asynccontextmanager
async def serving(name: str, dtype: str = "float32", **options: Any) -> AsyncIterator[Made]:
    """It serves version 0."""
    async with opened("file", name, dtype, **options) as made, made.engine, plain_task_group() as tasks:
        tasks.start_soon(made.reader.run)
        made.step(0)
        made.announce(0)
        assert await made.answer() == {"bound": 0}
        yield made
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("kv_after_update", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_go_on_to_come_from_the_weights_of_before(dtype: str, kv_after_update: str, name: str) -> None:
    if not packing_works(DTYPES[dtype], CPU):
        pytest.skip(f"nothing is packed here in {dtype}")
    async with serving(name, dtype, kv_after_update=kv_after_update) as made:
        begun = asyncio.Event()
        made.lane.calls[DECODE, 10] = begun.set
        running = [made.ask(seed, 200) for seed in range(3)]
        await begun.wait()
        made.step(1)
        made.announce(1)
        assert await made.answer() == {"bound": 1}
        for answer in await asyncio.gather(*running):
            versions = answer.versions.tolist()
            assert versions == sorted(versions) and set(versions) == {0, 1}
            assert versions.count(0) >= 10
        assert await made.lane.run(lambda: fixed_logprobs(made.policy), name="look") == pytest.approx(
            fixed_logprobs(made.trainer), abs=1e-5 if dtype == "float32" else 0.05
        )
        fresh = made.ask(7, 20)
        assert (await fresh).versions.tolist() == [1] * 20


async def test_what_is_announced_again_meanwhile_is_answered_once(name: str) -> None:
    """As a node does whose own wait was given up."""
    async with serving(name) as made:
        made.step(1)
        made.lane.calls[BIND, 2] = lambda: made.announce(1)
        made.announce(1)
        assert await made.answer() == {"bound": 1}
        made.step(2)
        made.announce(2)
        assert await made.answer() == {"bound": 2} and made.lane.names.count(BIND) == 3


@pytest.mark.parametrize("place", ["file", "slab"])
async def test_the_answer_does_not_wait_for_the_next_closure(place: str, name: str) -> None:
    """A decode step that is asked for meanwhile runs behind the move, and the node hears of the move before that has ended."""
    heard = threading.Event()
    async with opened(place, name) as made, plain_task_group() as tasks:
        running = threading.Event()

        async def decode(wait_for: threading.Event) -> None:
            await made.lane.run(lambda: running.set() or wait_for.wait(60), name=DECODE)

        first = threading.Event()
        tasks.start_soon(decode, first)
        assert await asyncio.to_thread(running.wait, 60)
        tasks.start_soon(decode, heard)
        tasks.start_soon(made.move, 0)
        await wait_all_tasks_blocked()
        assert len(made.lane._queue) == 2
        first.set()
        assert await made.answer() == {"bound": 0}
        assert made.reads(0) and not heard.is_set(), "the second decode step still runs"
        heard.set()


# -- a device that is late ---------------------------------------------------------------------------------------------


class Late:
    """What a device was told, and has not done yet: whoever waits for it is heard of, and waits until `come`."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.waited, self._come = threading.Event(), threading.Event()
        self.threads = set[int]()

    def passing(self) -> None:
        self.threads.add(threading.get_ident())
        self.waited.set()
        assert self._come.wait(60)

    async def is_waited_for(self) -> None:
        """On no thread of the lane, which goes on; the node hears nothing, whatever the worker can do without the device."""
        made = self.made
        assert await asyncio.to_thread(self.waited.wait, 60)
        with anyio.fail_after(30):
            assert await made.lane.run(threading.get_ident, name=DECODE) not in self.threads
        await wait_all_tasks_blocked()
        for _ in range(3):
            await asyncio.sleep(0)
        assert made.node._received == b"" and not made.node._input_ended

    def come(self) -> None:
        self._come.set()


@pytest.mark.parametrize("place", ["slab", "copies"])
async def test_the_half_of_before_is_free_only_once_the_device_has_left_it(place: str, name: str) -> None:
    """Closures that the node would wait for are over long before: what they launched is not."""
    async with opened(place, name) as made, plain_task_group() as tasks:
        await made.move(0)
        assert await made.answer() == {"bound": 0}
        late = Late(made)
        made.board.reads_ended = lambda: late.passing  # type: ignore[method-assign]
        tasks.start_soon(made.move, 1)
        await late.is_waited_for()
        assert made.policy.version == 1 and made.reads(1)
        late.come()
        assert await made.answer() == {"bound": 1}


async def test_nothing_is_read_of_a_copy_that_is_not_there_yet(name: str) -> None:
    async with opened("copies", name) as made, plain_task_group() as tasks:
        await made.move(0)
        assert await made.answer() == {"bound": 0}
        late, fetch = Late(made), made.board.fetch

        def slowly(index: int) -> DeviceWait:
            def passing() -> None:
                late.passing()
                fetch(index)

            return passing

        made.board.fetch = slowly  # type: ignore[method-assign]
        tasks.start_soon(made.move, 1)
        await late.is_waited_for()
        assert made.policy.version == 0 and made.reads(0)
        late.come()
        assert await made.answer() == {"bound": 1}
        assert torch.equal(made.policy.weights.bound, made.trainer.weights.working) and made.reads(1)
        assert made.policy.weights.bound.data_ptr() not in {made.owner.half(half).data_ptr() for half in (0, 1)}
