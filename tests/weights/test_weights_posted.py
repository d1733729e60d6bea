"""Weights on the board: what readers find there, what is never written over, and every fault between trainer and half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from weights_helpers import KINDS, Trained, module_of, own_lane, trained

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.errors import DivergenceError, LifecycleError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.policy import PolicyModel
from asyncrl.models.served import read_from_board
from asyncrl.transport.memory.board import Board
from asyncrl.weights.posted import Posted, PostedWeights


class Guarded(Board):
    """A board that knows which halves somebody may look at."""

    in_use: set[int]

    def write(self, index: int, version: int, source: Tensor, threads: int = 1) -> None:
        assert index not in self.in_use, f"half {index} is written while a reader may read it"
        super().write(index, version, source, threads)


class Readers:
    """Two readers, the second of which may take its time or fail. Each looks at a half from when it is told until it moves."""

    def __init__(self, board: Guarded) -> None:
        self.board = board
        self.at = [0, 0]
        self.asked: list[tuple[int, int]] = []
        self.seen: dict[int, Tensor] = {}
        self.second_waits: asyncio.Event | None = None
        self.error: Exception | None = None
        self.waiting = asyncio.Event()

    def start(self, posted: Posted) -> None:
        self.at = [posted.half, posted.half]
        self._look(posted.version, posted.half)
        self.outputs = [posted.outputs]

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        self.outputs.append(outputs)
        self.asked.append((version, half))
        self._move(0, half)
        if self.second_waits is not None:
            self.waiting.set()
            await self.second_waits.wait()
        if self.error is not None:
            raise self.error
        self._move(1, half)
        self._look(version, half)

    def _move(self, reader: int, half: int) -> None:
        self.at[reader] = half
        self.board.in_use = set(self.at)

    def _look(self, version: int, half: int) -> None:
        self.board.in_use = set(self.at)
        assert self.board.version(half) == version
        assert all(self.board.check(half, bucket) for bucket in range(self.board.buckets))
        self.seen[version] = self.board.half(half).clone()


class Case:
    def __init__(self, trained: Trained, board: Guarded, lane: ThreadLane) -> None:
        self.trained, self.policy, self.board, self.lane = trained, trained.policy, board, lane
        self.readers = Readers(board)
        self.sink = PostedWeights(trained.policy, board, self.readers, lane, trained.shards)

    async def start(self) -> None:
        self.readers.start(await self.sink.post_first())

    async def step(self) -> int:
        return await self.lane.run(self.trained.step, name="step")

    def weights(self) -> Tensor:
        return self.policy.weights.bound.clone()


@torch.no_grad()
def logits(policy: PolicyModel) -> Tensor:
    tokens = torch.arange(1, 18)
    return policy.logits(policy.hidden(tokens, torch.arange(17), TreePlan([0], [17])))


@asynccontextmanager
async def opened(kind: str = "float32", *, version: int = 0) -> AsyncIterator[Case]:
    case = trained(kind)
    case.policy.version = version
    weights = case.policy.weights
    with await asyncio.to_thread(Guarded.create, weights.size, case.policy.dtype, weights.layout_digest()) as board:
        board.in_use = set()
        async with own_lane() as lane:
            yield Case(case, board, lane)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_version_lies_whole_in_the_half_that_nobody_read(kind: str) -> None:
    async with opened(kind, version=7) as case:
        await case.start()
        expected = {7: case.weights()}
        for _ in range(4):
            version = await case.step()
            expected[version] = case.weights()
            await case.sink.update_weights(version)
            assert case.sink.current[:2] == (version, case.readers.at[0])
    assert case.readers.asked == [(8, 1), (9, 0), (10, 1), (11, 0)]
    assert all(torch.equal(case.readers.seen[version], expected[version]) for version in range(7, 12))


async def test_the_policy_may_be_further_than_what_is_published_and_the_board_says_so() -> None:
    async with opened() as case:
        await case.start()
        await case.step()
        await case.step()
        await case.sink.update_weights(1)
        assert case.readers.asked == [(2, 1)]
        await case.sink.update_weights(2)  # they have it
        assert case.readers.asked == [(2, 1)]
        assert torch.equal(case.readers.seen[2], case.weights())


async def test_a_reader_samples_what_the_trainer_would() -> None:
    """The whole way: trainer's modules -> board -> another policy's modules, which compute the same."""
    async with opened("lora bfloat16") as case:
        await case.start()
        other = PolicyModel(module_of(seed=9), "bfloat16", served=True)
        for _ in range(2):
            await case.sink.update_weights(await case.step())
            version, half, _ = case.sink.current
            read_from_board(other, case.board.half(half), version)
            assert torch.equal(logits(other), logits(case.policy))
            assert other.version == case.policy.version


async def test_a_cancelled_move_is_asked_for_again_before_anything_is_written() -> None:
    async with opened() as case:
        await case.start()
        readers = case.readers
        readers.second_waits = asyncio.Event()
        task = asyncio.create_task(case.sink.update_weights(await case.step()))
        await readers.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert readers.at == [1, 0] and case.sink.current[:2] == (0, 0)  # one on each half: neither is free
        readers.second_waits = None
        await case.sink.update_weights(await case.step())
        assert readers.asked == [(1, 1), (1, 1), (2, 0)]
        assert readers.at == [0, 0] and case.sink.current[:2] == (2, 0)


async def test_after_an_error_of_the_readers_nothing_is_written_until_they_have_moved() -> None:
    async with opened() as case:
        await case.start()
        readers = case.readers
        readers.error = RuntimeError("a worker died")
        for version in (1, 2):
            await case.step()
            with pytest.raises(RuntimeError, match="a worker died"):
                await case.sink.update_weights(version)
        assert readers.asked == [(1, 1), (1, 1)] and readers.at == [1, 0]
        assert (case.board.version(0), case.board.version(1)) == (0, 1)
        readers.error = None
        await case.sink.update_weights(1)  # an older version again: the move is enough
        assert readers.asked[2:] == [(1, 1)]
        await case.sink.update_weights(2)
        assert readers.asked[3:] == [(2, 0)]


async def test_cancelled_while_it_writes_nobody_was_told_and_the_half_is_written_again() -> None:
    async with opened() as case:
        await case.start()
        await case.step()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        write = case.board.write

        def slow(*arguments: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            write(*arguments)

        case.board.write = slow  # type: ignore[method-assign]  # it tells when it begins
        task = asyncio.create_task(case.sink.update_weights(1))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert case.readers.asked == [] and case.sink.current[:2] == (0, 0)
        await case.sink.update_weights(await case.step())
        assert case.readers.asked == [(2, 1)]


async def test_two_at_once_go_one_after_the_other() -> None:
    async with opened() as case:
        await case.start()
        readers = case.readers
        readers.second_waits = asyncio.Event()
        first = asyncio.create_task(case.sink.update_weights(await case.step()))
        await readers.waiting.wait()
        second = asyncio.create_task(case.sink.update_weights(await case.step()))
        await asyncio.sleep(0)
        assert len(readers.asked) == 1
        readers.second_waits.set()
        await asyncio.gather(first, second)
        assert readers.asked == [(1, 1), (2, 0)]


# -- faults ------------------------------------------------------------------------------------------------------------


def skipped(board: Board, index: int, version: int, source: Tensor) -> None:
    """Nothing is written, and the half says that it was."""
    board._versions.store(index, version + 1)


def corrupted(board: Board, index: int, version: int, source: Tensor) -> None:
    """One small tensor of it: the last norm."""
    Board.write(board, index, version, source)
    board.half(index)[-64:].mul_(2)


def cut_short(board: Board, index: int, version: int, source: Tensor) -> None:
    whole = source.clone()
    whole[source.numel() // 2 :] = board.half(index)[source.numel() // 2 :]
    Board.write(board, index, version, whole)


def misnamed(board: Board, index: int, version: int, source: Tensor) -> None:
    Board.write(board, index, version - 1, source)


def not_a_number(board: Board, index: int, version: int, source: Tensor) -> None:
    Board.write(board, index, version, torch.full_like(source, float("nan")))


@pytest.mark.parametrize("fault", [skipped, corrupted, cut_short, misnamed, not_a_number], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_half_that_is_not_the_version_ends_the_run_and_no_reader_is_told(
    kind: str, fault: Callable[[Board, int, int, Tensor], None]
) -> None:
    async with opened(kind) as case:
        await case.start()
        await case.sink.update_weights(await case.step())
        told = list(case.readers.asked)
        await case.step()
        board = case.board
        board.write = lambda index, version, source, threads: fault(board, index, version, source)  # type: ignore[method-assign, assignment]  # the fault
        with pytest.raises(DivergenceError, match=r"differ from the trainer's|says that it holds|NaN|not the base"):
            await case.sink.update_weights(2)
        assert case.readers.asked == told and case.sink.current[:2] == (1, 1)
        assert case.board.version(0) is None


async def test_modules_that_are_stale_are_not_posted() -> None:
    async with opened("bfloat16") as case:
        await case.start()
        await case.lane.run(lambda: case.trained.step(refresh=False), name="step")
        with pytest.raises(DivergenceError, match="sampled weights"):
            await case.sink.update_weights(1)
        with pytest.raises(DivergenceError, match="not yet at 9"):
            await case.sink.update_weights(9)
        assert case.readers.asked == [] and (case.board.version(0), case.board.version(1)) == (0, None)


async def test_nothing_is_published_before_the_first_version_and_that_one_comes_once() -> None:
    async with opened() as case:
        with pytest.raises(LifecycleError, match="post_first"):
            await case.sink.update_weights(1)
        await case.start()
        with pytest.raises(LifecycleError, match="already"):
            await case.sink.post_first()


async def test_a_board_of_another_layout_is_refused() -> None:
    async with opened() as case:
        other = trained("bfloat16")
        with pytest.raises(LifecycleError, match="layout"):
            PostedWeights(other.policy, case.board, case.readers, case.lane)
