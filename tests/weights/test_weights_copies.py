"""Packed copies beside the board: of every version before anybody hears of it, and every fault on the way ends the update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from placing import needs_placing
from torch import Tensor
from weights_helpers import Trained, own_lane, trained

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.errors import DivergenceError
from asyncrl.models.parameters import packed
from asyncrl.models.parameters.reordered import reorder
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.weights.copies import PackedCopies
from asyncrl.weights.posted import PostedWeights

KINDS = ("float32", "bfloat16", "lora float32", "lora bfloat16")


@dataclass
class Readers:
    """They look at both halves when they are told, and move at once."""

    copies: PackedCopies
    policy: PolicyModel
    asked: list[tuple[int, int]] = field(default_factory=list)

    def reads(self, half: int) -> bool:
        return False

    async def left(self, half: int) -> None:
        raise AssertionError("nobody is pinned")

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        self.asked.append((version, half))
        self.look(version, half)

    def look(self, version: int, half: int) -> None:
        board = self.copies.board
        assert board.version(half) == version and all(board.check(half, each) for each in range(board.buckets))
        placed = self.copies.layout.place(board.half(half), self.policy.dtype)
        for product, copy in zip(self.policy.products, placed, strict=True):
            if copy is not None:
                assert torch.equal(
                    multiplied(copy.tensor, product.inputs), multiplied(reorder(product.weight()), product.inputs)
                )


def multiplied(copy: Tensor, inputs: int) -> Tensor:
    x = torch.linspace(-1, 2, inputs).to(copy.dtype).unsqueeze(0)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, None, "none", [], "")
    return found


@dataclass
class Case:
    trained: Trained
    board: Board
    copies: PackedCopies
    readers: Readers
    sink: PostedWeights
    lane: ThreadLane

    async def step(self) -> int:
        return await self.lane.run(self.trained.step, name="step")


@asynccontextmanager
async def opened(kind: str = "float32") -> AsyncIterator[Case]:
    case = trained(kind)
    policy, weights = case.policy, case.policy.weights
    needs_placing(policy.dtype)
    board = await asyncio.to_thread(Board.create, weights.size, policy.dtype, weights.layout_digest())
    async with own_lane() as lane:
        copies = await lane.run(lambda: PackedCopies.of(policy), name="copies")
        assert copies is not None
        readers = Readers(copies, policy)
        sink = PostedWeights(policy, board, readers, lane, copies=copies)
        try:
            first = await sink.post_first()
            readers.look(first.version, first.half)
            yield Case(case, board, copies, readers, sink, lane)
        finally:
            sink.close()
            await asyncio.to_thread(copies.close)
            await asyncio.to_thread(board.close)


@pytest.mark.parametrize("kind", KINDS)
async def test_readers_find_the_copies_of_each_version_when_they_are_told(kind: str) -> None:
    async with opened(kind) as case:
        for _ in range(4):
            await case.sink.update_weights(await case.step())
            assert case.trained.policy.packed_agrees(case.trained.policy.version)
        assert case.readers.asked == [(1, 1), (2, 0), (3, 1), (4, 0)]


async def test_between_two_updates_nobody_writes_into_what_is_read() -> None:
    """Steps and forward passes of later versions, until one is published."""
    async with opened() as case:
        await case.sink.update_weights(await case.step())
        before = case.copies.board.half(1).clone()
        for _ in range(2):
            version = await case.step()
            assert await case.lane.run(partial(case.trained.policy.packed_agrees, version), name="look")
        assert torch.equal(case.copies.board.half(1), before)
        await case.sink.update_weights(version)
        assert case.readers.asked == [(1, 1), (3, 0)] and torch.equal(case.copies.board.half(1), before)


async def test_copies_of_other_weights_end_the_update_before_anybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions that were written last stay in their place."""
    async with opened() as case:
        await case.sink.update_weights(await case.step())
        monkeypatch.setattr(packed, "write_blocks", lambda *_: None)
        version = await case.step()
        with pytest.raises(DivergenceError, match="its packed copies are not those of the weights"):
            await case.sink.update_weights(version)
        assert case.readers.asked == [(1, 1)]
        assert [case.board.version(half) for half in (0, 1)] == [None, 1]
        assert [case.copies.board.version(half) for half in (0, 1)] == [None, 1]


async def test_a_copy_that_only_says_that_it_is_of_these_weights_ends_the_update() -> None:
    """Of each product in turn, after a second step that is too small to be seen in an output, and did not write them."""
    async with opened() as case:
        policy = case.trained.policy
        for product in policy.products:
            await case.step()
            policy.flat.refreshed, pack = None, policy.flat.refreshed
            version = await case.lane.run(lambda: case.trained.step(1e-5), name="step")
            policy.flat.refreshed = pack
            for each in policy.products:
                each._stamp = each.flat.stamp(each._copied)
                if each is not product:
                    each._sample = each._sampled(each.flat.bound)
            with pytest.raises(DivergenceError, match="its packed copies are not those of the weights"):
                await case.sink.update_weights(version)
            await case.step()
            await case.sink.update_weights(policy.version)
        told = [version for version, _ in case.readers.asked]
        assert told == [3 * turn for turn in range(1, len(policy.products) + 1)]


async def test_an_error_in_the_middle_of_them_leaves_a_half_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("lora float32") as case:  # of merged weights they are made when these are published
        write, calls = packed.write_blocks, 0

        def third(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("the third")
            write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(packed, "write_blocks", third)
        version = await case.step()
        with pytest.raises(RuntimeError, match="the third"):
            await case.sink.update_weights(version)
        assert [case.board.version(half) for half in (0, 1)] == [0, None]
        assert [case.copies.board.version(half) for half in (0, 1)] == [0, None] and case.readers.asked == []
        monkeypatch.undo()
        assert await case.lane.run(
            lambda: all(case.trained.policy.packed_agrees(turn) for turn in range(9)), name="look"
        )
        await case.sink.update_weights(version)
        assert case.readers.asked == [(1, 1)]
