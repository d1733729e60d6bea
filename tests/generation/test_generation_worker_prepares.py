"""While a worker prepares a move to new weights its requests go on with those of before, and nobody is answered yet."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
import torch
from placing import needs_placing
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.concurrency.supervisor import plain_task_group
from asyncrl.generation.worker import server
from asyncrl.generation.worker.control import ControlLine
from asyncrl.generation.worker.opening import attach_copies
from asyncrl.generation.worker.server import Server
from asyncrl.generation.worker.serving import EmbeddedServing
from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board
from asyncrl.types import Generation, GenerationRequest, PostedVersion, SamplingParams
from asyncrl.weights.copies import PackedCopies

T = TypeVar("T")
CONTEXT = 400
DECODE, PREPARE, BIND = "engine/decode", "engine/prepare", "engine/bind"


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

    def __init__(self, dtype: str, boards: list[Board], copies: bool = False) -> None:
        self.trainer, self.served = policy_of(served=False, dtype=dtype), policy_of(served=True, dtype=dtype)
        weights = self.trainer.weights
        self.owner = Board.create(weights.size, self.trainer.dtype, weights.layout_digest())
        self.reader = Board.attach(self.owner.description, os.dup(self.owner.fd), self.owner.layout)
        boards += [self.owner, self.reader]
        self.copies = PackedCopies.of(self.trainer) if copies else None
        self.read: Board | None = None
        if self.copies is not None:
            halves, fd = [self.reader.half(0), self.reader.half(1)], os.dup(self.copies.board.fd)
            self.read = attach_copies(self.served, halves, json.loads(json.dumps(self.copies.message())), fd)
            assert self.read is not None
            boards += [self.copies.board, self.read]


class Made:
    """A worker's server and engine, the node's ends of its line and board, and the trainer."""

    def __init__(self, lane: Told, sides: Sides, **options: Any) -> None:
        self.trainer, self.owner, self.lane = sides.trainer, sides.owner, lane
        node, worker = socket.socketpair()
        self.node, self._line = ControlLine(node, "worker 0"), ControlLine(worker, "the node")
        self.engine = EmbeddedServing(
            sides.served, None, lane, Recorder(max_events=0), max_sequences=4, max_context=CONTEXT, **options
        )
        producer: Any = None  # requests are given to the engine itself
        self.copies = sides.copies
        self.server = Server(self._line, self.engine, lane, sides.reader, producer, sides.read)

    def write(self, version: int, half: int) -> None:
        """An optimizer step that matters."""
        self.trainer.flat.master.mul_(1.2).add_(0.01 * version)
        self.trainer.advance()
        self.trainer.version = version
        self.owner.write(half, version, self.trainer.weights.working)
        if self.copies is not None:
            self.copies.complete(half, version)

    def tell(self, version: int, half: int) -> None:
        self.server.tell(PostedVersion(version, half, fixed_logprobs(self.trainer)))

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
async def opened(
    boards: list[Board], dtype: str = "float32", copies: bool = False, **options: Any
) -> AsyncIterator[Made]:
    """It serves version 0, which lies in half 0; where it can be, with packed copies that the trainer makes."""
    async with Told("worker0", Recorder(max_events=0)) as lane:
        made = Made(lane, await asyncio.to_thread(Sides, dtype, boards, copies), **options)
        try:
            async with made.engine, plain_task_group() as tasks:
                tasks.start_soon(made.server.follow)
                tasks.start_soon(made.server.check)
                made.write(0, 0)
                made.tell(0, 0)
                assert await made.answer() == {"bound": 0}
                yield made
                tasks.cancel_scope.cancel()
        finally:
            made.close()


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece each."""
    monkeypatch.setattr("asyncrl.generation.worker.server._SLICE_S", 0.0)
    monkeypatch.setattr("asyncrl.generation.worker.server._MOST_SLICES", 10_000)


@pytest.mark.parametrize("kv_after_update", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tokens_go_on_to_come_from_the_weights_of_before(
    dtype: str, kv_after_update: str, boards: list[Board]
) -> None:
    if not packing_works(DTYPES[dtype], torch.device("cpu")):
        pytest.skip(f"nothing is packed here in {dtype}")
    async with opened(boards, dtype, kv_after_update=kv_after_update) as made:
        slices = made.engine.policy.pieces_ahead
        assert slices > 5
        begun = asyncio.Event()
        made.lane.calls[DECODE, 10] = begun.set
        running = [made.ask(seed, 200) for seed in range(3)]
        await begun.wait()
        made.write(1, 1)
        before = len(made.lane.names)
        made.tell(1, 1)
        assert await made.answer() == {"bound": 1}
        names = made.lane.names[before:]
        moved = names.index(BIND)
        assert names[:moved].count(PREPARE) >= slices and PREPARE not in names[moved:]
        assert names[:moved].count(DECODE) >= slices - 2  # between any two
        assert (PREPARE, PREPARE) not in pairwise(names)
        for answer in await asyncio.gather(*running):
            versions = answer.versions.tolist()
            assert versions == sorted(versions) and set(versions) == {0, 1}
            assert versions.count(0) > slices  # the old ones served all the while
        assert await made.lane.run(lambda: fixed_logprobs(made.engine.policy), name="look") == pytest.approx(
            fixed_logprobs(made.trainer), abs=1e-5 if dtype == "float32" else 0.05
        )
        fresh = made.ask(7, 20)
        assert (await fresh).versions.tolist() == [1] * 20


async def test_requests_that_are_given_up_meanwhile_free_their_places(boards: list[Board]) -> None:
    async with opened(boards) as made:
        begun, half_way = asyncio.Event(), asyncio.Event()
        made.lane.calls[DECODE, 5] = begun.set
        made.lane.calls[PREPARE, 3] = half_way.set
        running = [made.ask(seed, 300) for seed in range(4)]
        waiting = made.ask(9, 4)
        await begun.wait()
        made.write(1, 1)
        made.tell(1, 1)
        await half_way.wait()
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert (await waiting).versions.size == 4
        assert await made.answer() == {"bound": 1}
        statistics = made.engine.statistics()
        assert statistics["aborted"] == 4 and statistics["running"] == 0


async def test_what_is_told_again_meanwhile_is_answered_once(boards: list[Board]) -> None:
    """As a node does whose own wait was given up."""
    async with opened(boards) as made:
        made.write(1, 1)
        made.lane.calls[PREPARE, 3] = lambda: made.tell(1, 1)
        made.tell(1, 1)
        assert await made.answer() == {"bound": 1}
        pieces = made.engine.policy.pieces_ahead
        assert made.lane.names.count(PREPARE) <= pieces + 1 and made.lane.names.count(BIND) == 2
        made.write(2, 0)
        made.tell(2, 0)
        assert await made.answer() == {"bound": 2}


@pytest.mark.parametrize("place", [1, 4])
async def test_newer_weights_take_the_place_of_those_that_are_being_prepared(place: int, boards: list[Board]) -> None:
    """Their copies are of the newer ones altogether, and only those are answered."""
    async with opened(boards) as made:
        running = made.ask(3, 100)

        def newer() -> None:
            made.write(2, 1)  # over what was being prepared
            made.tell(2, 1)

        made.write(1, 1)
        made.lane.calls[PREPARE, place] = newer
        made.tell(1, 1)
        assert await made.answer() == {"bound": 2}
        assert made.lane.names.count(BIND) == 2
        policy = made.engine.policy
        assert await made.lane.run(lambda: all(policy.packed_agrees(turn) for turn in range(13)), name="look")
        assert await made.lane.run(lambda: fixed_logprobs(policy), name="look") == pytest.approx(
            fixed_logprobs(made.trainer), abs=1e-5
        )
        versions = (await running).versions.tolist()
        assert versions == sorted(versions) and set(versions) <= {0, 2}


async def test_a_half_that_changes_while_it_is_prepared_is_wrong(boards: list[Board]) -> None:
    async with opened(boards) as made:
        made.write(1, 1)
        made.lane.calls[PREPARE, 2] = lambda: made.write(3, 1)  # and nobody says so
        made.tell(1, 1)
        message = await made.answer()
        assert "the board holds version 3 where version 1 was announced" in message["wrong"]
        assert made.engine.version == 0


async def test_where_there_is_no_room_they_are_packed_after_the_move(boards: list[Board]) -> None:
    async with opened(boards, "bfloat16", packs_ahead=False) as made:
        for version in (1, 2, 3):
            made.write(version, version % 2)
            made.tell(version, version % 2)
            assert await made.answer() == {"bound": version}
            answer = await made.ask(version, 8)
            assert answer.versions.tolist() == [version] * 8
        assert PREPARE not in made.lane.names
        assert all(product._other is None for product in made.engine.policy.products)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_where_the_trainer_has_packed_the_weights_a_move_is_one_closure(dtype: str, boards: list[Board]) -> None:
    """After the decode step that it is announced in, whatever runs; its tokens come from the new weights, and nothing is packed."""
    needs_placing(DTYPES[dtype])
    async with opened(boards, dtype, copies=True) as made:
        running = [made.ask(seed, 300) for seed in range(3)]
        for version in (1, 2, 3, 4):
            begun = asyncio.Event()
            made.lane.calls[DECODE, made.lane.names.count(DECODE) + 5] = begun.set
            await begun.wait()
            made.write(version, version % 2)
            before = len(made.lane.names)
            made.tell(version, version % 2)
            assert await made.answer() == {"bound": version}
            names = made.lane.names[before:]
            assert names[: names.index(BIND)].count(DECODE) <= 2 and PREPARE not in names
            assert await made.lane.run(lambda: fixed_logprobs(made.engine.policy), name="look") == pytest.approx(
                fixed_logprobs(made.trainer), abs=1e-5 if dtype == "float32" else 0.05
            )
        for answer in await asyncio.gather(*running):
            versions = answer.versions.tolist()
            assert versions == sorted(versions) and versions[-1] == 4
        assert all(product._copy is product._other is None for product in made.engine.policy.products)


async def test_packed_weights_that_were_not_written_are_told(boards: list[Board]) -> None:
    needs_placing(torch.float32)
    async with opened(boards, copies=True) as made:
        assert made.copies is not None
        copies, made.copies = made.copies, None
        made.write(1, 1)
        made.tell(1, 1)
        message = await made.answer()
        assert "the board holds version None where version 1 was announced" in message["wrong"]
        assert made.engine.version == 0
        assert copies.board.version(0) == 0


async def test_a_byte_of_the_packed_weights_that_is_another_one_is_found(boards: list[Board]) -> None:
    """In the last of their buckets, by the checks that go on beside the tokens."""
    needs_placing(torch.float32)
    async with opened(boards, copies=True) as made:
        assert made.copies is not None
        made.write(1, 1)
        made.copies.board.half(1)[-4096 - 1] += 1
        made.tell(1, 1)
        assert await made.answer() == {"bound": 1}
        last = made.copies.board.buckets - 1
        message = await made.answer()
        assert message["wrong"] == f"bucket {last} of the packed weights of version 1 is not what the trainer wrote"


@pytest.mark.parametrize(("longest_s", "least"), [(math.inf, 40), (0.0035, 40), (0.0035, 1)])
def test_a_slice_has_its_pieces_and_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, longest_s: float, least: int
) -> None:
    """A piece takes a millisecond, on a clock of the test's own."""
    now = [0.0]

    def pieces() -> Iterator[None]:
        for _ in range(100):
            now[0] += 0.001
            yield

    monkeypatch.setattr("asyncrl.generation.worker.server.time.monotonic", lambda: now[0])
    monkeypatch.setattr("asyncrl.generation.worker.server._SLICE_S", 0.0015)
    left, slices = pieces(), list[float]()
    while True:
        began = now[0]
        ready = server._go_on(left, least, longest_s)
        slices.append(round(1e3 * (now[0] - began)))
        if ready:
            break
    usual = 40 if longest_s == math.inf else 4 if least > 1 else 2
    assert sum(slices) == 100 and set(slices[:-2]) == {usual} and max(slices) == usual
