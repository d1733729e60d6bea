"""Weights on the board: what readers find there, what is never written over, and every fault between trainer and half."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transport_helpers import own_name
from weights_helpers import KINDS, Trained, batch_of, module_of, own_lane, trained

from asyncrl.algorithms.registry import build_loss
from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import DivergenceError, LifecycleError
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.policy import PolicyModel
from asyncrl.training.trainer import TorchTrainer
from asyncrl.transport.memory.board import Board
from asyncrl.transport.memory.checksum import Sums
from asyncrl.transport.memory.halves import SlabHalves
from asyncrl.types import Microbatch, PostedVersion
from asyncrl.weights.posted import PostedWeights

name = pytest.fixture(own_name, name="name")


class Guarded(Board):
    """A board that knows which halves somebody may look at."""

    in_use: set[int]

    def write(self, index: int, version: int, source: Tensor, threads: int = 1) -> None:
        self.require_unread(index)
        super().write(index, version, source, threads)

    def complete(self, index: int, version: int, sums: Callable[[], Sums]) -> None:
        self.require_unread(index)
        super().complete(index, version, sums)

    def clear(self, index: int) -> None:
        """Whoever writes into a half by itself does this first."""
        self.require_unread(index)
        super().clear(index)

    def require_unread(self, index: int) -> None:
        assert index not in self.in_use, f"half {index} is written while a reader may read it"

    def is_whole(self, index: int) -> bool:
        return all(self.check(index, bucket) for bucket in range(self.buckets))


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

    async def left(self, half: int) -> None:
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
        self.sink = PostedWeights(trained.policy, board, self.readers, lane, trained.shards)

    async def start(self) -> None:
        self.readers.start(await self.sink.post_first())

    async def step(self) -> int:
        """What somebody reads is as it was written, and the modules read the masters of now, wherever."""
        version = await self.lane.run(self.trained.step, name="step")
        assert all(self.board.is_whole(half) for half in self.board.in_use)
        assert self.policy.weights.strays() == [] and self.policy.packed_agrees(version)
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
    return policy.logits(policy.hidden(tokens, torch.arange(17), TreePlan([0], [17])))


def create(policy: PolicyModel, slab: str | None) -> Guarded:
    weights = policy.weights
    halves = slab and SlabHalves.create(slab, weights.size, policy.dtype, policy.device)
    return Guarded.create(weights.size, policy.dtype, weights.layout_digest(), halves or None)


@asynccontextmanager
async def opened(kind: str = "float32", *, version: int = 0, slab: str | None = None) -> AsyncIterator[Case]:
    """`slab`: the name of one in which the halves are to lie."""
    case = trained(kind)
    case.policy.version = version
    board = await asyncio.to_thread(create, case.policy, slab)
    board.in_use = set()
    try:
        async with own_lane() as lane:
            yield Case(case, board, lane)
    finally:
        await asyncio.to_thread(board.close)


@pytest.mark.parametrize("on_a_slab", [False, True], ids=["file", "slab"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_version_lies_whole_in_the_half_that_nobody_read(kind: str, on_a_slab: bool, name: str) -> None:
    async with opened(kind, version=7, slab=name if on_a_slab else None) as case:
        await case.start()
        expected = {7: case.weights()}
        for _ in range(4):
            version = await case.step()
            expected[version] = case.weights()
            await case.sink.update_weights(version)
            assert case.sink.current[:2] == (version, case.readers.at[0])
    assert case.readers.asked == [(8, 1), (9, 0), (10, 1), (11, 0)]
    assert all(torch.equal(case.readers.seen[version], expected[version]) for version in range(7, 12))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_the_policy_may_be_further_than_what_is_published_and_the_board_says_so(kind: str) -> None:
    async with opened(kind) as case:
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
            other.move_to(case.board.half(half), version)
            assert torch.equal(logits(other), logits(case.policy))
            assert other.version == case.policy.version


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_a_cancelled_move_is_asked_for_again_before_anything_is_written(kind: str) -> None:
    async with opened(kind) as case:
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_after_an_error_of_the_readers_nothing_is_written_until_they_have_moved(kind: str) -> None:
    async with opened(kind) as case:
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_cancelled_while_it_writes_nobody_was_told_and_the_half_is_written_again(kind: str) -> None:
    async with opened(kind) as case:
        await case.start()
        await case.step()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        name = "complete" if kind == "bfloat16" else "write"
        write = getattr(case.board, name)

        def slow(*arguments: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            write(*arguments)

        setattr(case.board, name, slow)  # it tells when it begins
        task = asyncio.create_task(case.sink.update_weights(1))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert case.readers.asked == [] and case.sink.current[:2] == (0, 0)
        await case.sink.update_weights(await case.step())
        assert case.readers.asked == [(2, 1)]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_two_at_once_go_one_after_the_other(kind: str) -> None:
    async with opened(kind) as case:
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


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_the_half_of_a_pinned_reader_is_not_free_and_the_third_version_waits_for_it(kind: str) -> None:
    async with opened(kind) as case:
        await case.start()
        readers = case.readers
        readers.pinned = end = asyncio.Event()
        await case.sink.update_weights(await case.step())  # into the other half: nobody waits
        assert readers.at == [1, 0] and case.sink.current[:2] == (1, 1)
        first = case.board.half(0).clone()
        await case.step()  # `Guarded`: into memory of its own
        assert case.place is None
        task = asyncio.create_task(case.sink.update_weights(2))
        await readers.waiting.wait()
        assert readers.asked == [(1, 1)] and case.board.version(0) == 0
        assert torch.equal(case.board.half(0), first) and case.board.is_whole(0)
        end.set()
        await task
        assert readers.asked == [(1, 1), (2, 0)] and readers.at == [0, 0]
        assert torch.equal(readers.seen[2], case.weights())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_who_waits_until_a_pinned_reader_has_left_casts_into_its_half_and_copies_nothing(kind: str) -> None:
    async with opened(kind) as case:
        await case.start()
        readers = case.readers
        await case.sink.settled()  # nobody is pinned
        readers.pinned = end = asyncio.Event()
        await case.sink.update_weights(await case.step())
        task = asyncio.create_task(case.sink.settled())
        if kind == "float32":  # the step writes into no half
            return await task
        await readers.waiting.wait()
        assert not task.done() and case.place == 1
        end.set()
        await task
        case.board.write = None  # type: ignore[method-assign, assignment]  # nobody copies
        await case.step()
        assert case.place == 0
        await case.sink.update_weights(2)
        assert readers.asked == [(1, 1), (2, 0)] and torch.equal(readers.seen[2], case.weights())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_a_wait_for_a_pinned_reader_may_be_given_up(kind: str) -> None:
    async with opened(kind) as case:
        await case.start()
        readers = case.readers
        readers.pinned = end = asyncio.Event()
        await case.sink.update_weights(await case.step())
        task = asyncio.create_task(case.sink.update_weights(await case.step()))
        await readers.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert case.sink.current[:2] == (1, 1) and case.board.version(0) == 0
        await case.step()  # the half is still read
        end.set()
        await case.sink.update_weights(3)
        assert readers.asked == [(1, 1), (3, 0)] and torch.equal(readers.seen[3], case.weights())


# -- where the working copy lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_a_slab", [False, True], ids=["file", "slab"])
async def test_a_working_copy_is_a_half_of_the_board_and_is_never_copied(on_a_slab: bool, name: str) -> None:
    async with opened("bfloat16", slab=name if on_a_slab else None) as case:
        private = StorageWeakRef(case.policy.weights.working.untyped_storage())
        await case.start()
        gc.collect()
        assert case.place == 0 and private.expired()
        case.board.write = None  # type: ignore[method-assign, assignment]  # nobody copies any more
        for version in range(1, 5):
            for _ in range(version):  # some versions are not published: they lie in the same half
                newest = await case.step()
                assert case.place == version % 2 and case.board.version(version % 2) is None
            await case.sink.update_weights(newest)
            assert case.readers.asked[-1] == (newest, version % 2)
            assert torch.equal(case.readers.seen[newest], case.policy.flat.master.bfloat16())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
async def test_what_the_modules_read_in_other_ways_stays_out_of_the_board(kind: str) -> None:
    async with opened(kind) as case:
        await case.start()
        for _ in range(3):
            await case.sink.update_weights(await case.step())
            assert case.place is None


async def test_steps_while_a_move_is_under_way_touch_neither_half() -> None:
    async with opened("bfloat16") as case:
        await case.start()
        readers = case.readers
        readers.second_waits = asyncio.Event()
        task = asyncio.create_task(case.sink.update_weights(await case.step()))
        await readers.waiting.wait()
        both = case.board.half(0).clone(), case.board.half(1).clone()
        await case.step()
        private = case.policy.weights.working
        await case.step()
        assert case.place is None and case.policy.weights.working is private  # one is enough
        assert all(torch.equal(case.board.half(half), both[half]) for half in (0, 1))
        assert [case.board.version(half) for half in (0, 1)] == [0, 1]
        readers.second_waits.set()
        await task
        await case.sink.update_weights(3)
        assert case.place is None and torch.equal(readers.seen[3], case.weights())
        await case.step()  # to the half that they have left
        assert case.place == 1
        await case.sink.update_weights(4)
        assert torch.equal(readers.seen[4], case.weights())
    assert readers.asked == [(1, 1), (3, 0), (4, 1)]


async def test_a_step_that_waits_behind_the_write_does_not_touch_what_was_written() -> None:
    """It runs before the loop has heard that a version lies there, and so before anybody was told."""
    async with opened("bfloat16") as case:
        await case.start()
        first, go_on = await case.step(), threading.Event()
        case.readers.second_waits = asyncio.Event()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def hold() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(60)

        busy = asyncio.create_task(case.lane.run(hold, name="busy"))
        await begun.wait()
        update = asyncio.create_task(case.sink.update_weights(first))
        step = asyncio.create_task(case.step())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(busy, step)
        assert case.place is None and case.board.version(1) == first and case.board.is_whole(1)
        case.readers.second_waits.set()
        await update
        assert case.readers.asked == [(1, 1)]


async def test_the_trainer_computes_the_same_bits_with_a_board_and_without() -> None:
    """Gradients, masters, log-probs, entropies and those of the reference, over steps of which every second is published."""

    def trainer_of(policy: PolicyModel) -> TorchTrainer:
        config = TrainConfig(lr=3e-3, tokens_per_microbatch=128)
        return TorchTrainer(policy, config, max_completion_length=8, needs_reference=True)

    def step(trainer: TorchTrainer, batch: Microbatch) -> list[Tensor]:
        trainer.begin_train_step(build_loss("grpo"))
        trainer.train_microbatch(batch)
        gradient = trainer.policy.flat.grad.clone()
        trainer.finish_train_step()
        assert trainer.policy.packed_agrees(trainer.version)
        found = [trainer.compute_logprobs(batch), trainer.compute_logprobs(batch, "reference")]
        found.append(trainer.compute_entropies(batch))
        return [gradient, trainer.policy.flat.master.clone(), *map(torch.from_numpy, found)]

    plain = trainer_of(trained("bfloat16").policy)
    async with opened("bfloat16") as case:
        await case.start()
        ours = trainer_of(case.policy)
        for number in range(6):
            batch = batch_of(number)
            found = await case.lane.run(lambda b=batch: step(ours, b), name="step")  # type: ignore[misc]
            expected = await case.lane.run(lambda b=batch: step(plain, b), name="step")  # type: ignore[misc]
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            if number % 2:
                await case.sink.update_weights(number + 1)
                assert torch.equal(case.readers.seen[number + 1], plain.policy.flat.working)
        assert not torch.equal(ours.policy.flat.working, ours.reference)  # the weights have moved
        saved, others = case.policy.host_state(), plain.policy.host_state()
        assert all(torch.equal(saved[name], others[name]) for name in others)
        lies_at = {case.board.half(half).untyped_storage().data_ptr() for half in (0, 1)}
        assert not lies_at & {each.untyped_storage().data_ptr() for each in saved.values()}


async def test_a_restored_trainer_lies_in_the_free_half_and_is_published_from_there() -> None:
    async with opened("bfloat16") as case:
        await case.start()
        masters = {name: torch.full_like(master, 0.5) for name, master in case.policy.flat.named_masters()}
        await case.lane.run(lambda: case.policy.flat.load_masters(masters), name="restore")
        case.policy.version = 41
        assert case.place == 1 and case.board.is_whole(0)
        await case.sink.update_weights(41)
        assert case.readers.asked == [(41, 1)]
        assert torch.equal(case.readers.seen[41], case.policy.flat.master.bfloat16())


async def test_after_the_end_the_modules_keep_their_half_and_go_on_in_it() -> None:
    async with opened("bfloat16") as case:
        await case.start()
        await case.sink.update_weights(await case.step())
        case.sink.close()
        case.board.close()
        before = logits(case.policy)
        case.trained.step()
        assert case.policy.weights.strays() == [] and not torch.equal(logits(case.policy), before)
        assert torch.equal(case.policy.weights.working, case.policy.flat.master.bfloat16())


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
    whole[source.numel() // 2 :] = board.half(1 - index)[source.numel() // 2 :]  # the version before
    Board.write(board, index, version, whole)


def misnamed(board: Board, index: int, version: int, source: Tensor) -> None:
    Board.write(board, index, version - 1, source)


def not_a_number(board: Board, index: int, version: int, source: Tensor) -> None:
    Board.write(board, index, version, torch.full_like(source, float("nan")))


FAULTS = (skipped, corrupted, cut_short, misnamed, not_a_number)
# Not "skipped" of what lies there already: the weights are right, and that their checksums are not, readers see.
CASES = [(kind, fault) for kind in KINDS for fault in FAULTS if (kind, fault) != ("bfloat16", skipped)]


@pytest.mark.parametrize("on_a_slab", [False, True], ids=["file", "slab"])
@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[f"{kind}-{fault.__name__}" for kind, fault in CASES])
async def test_a_half_that_is_not_the_version_ends_the_run_and_no_reader_is_told(
    kind: str, fault: Callable[[Board, int, int, Tensor], None], on_a_slab: bool, name: str
) -> None:
    async with opened(kind, slab=name if on_a_slab else None) as case:
        await case.start()
        await case.sink.update_weights(await case.step())
        told = list(case.readers.asked)
        await case.step()
        board = case.board
        working = case.policy.weights.working
        board.write = lambda index, version, source, threads: fault(board, index, version, source)  # type: ignore[method-assign, assignment]  # the fault
        board.complete = lambda index, version, threads: fault(board, index, version, working)  # type: ignore[method-assign, assignment]  # the fault
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
