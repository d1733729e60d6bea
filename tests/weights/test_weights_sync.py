"""Weights on the board: what workers find there, what is never written over, and the faults between trainer and worker."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transport_helpers import own_name
from weights_helpers import KINDS, Case, Trained, batch_of, logits, module_of, opened, trained

from asyncrl.algorithms.registry import build_loss
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import DivergenceError, LifecycleError
from asyncrl.models.outputs import BOUNDS, bound_of, fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.telemetry.recorder import Recorder
from asyncrl.training.trainer import TorchTrainer
from asyncrl.transport.memory.board import Board
from asyncrl.types import Microbatch
from asyncrl.weights.sync import SharedWeights, WeightPublisher, WeightReader

name = pytest.fixture(own_name, name="name")


@pytest.mark.parametrize("on_a_slab", [False, True], ids=["file", "slab"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_version_lies_whole_in_the_half_that_nobody_read(kind: str, on_a_slab: bool, name: str) -> None:
    async with opened(kind, version=7, slab=name if on_a_slab else None) as case:
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
        other = PolicyModel(module_of(seed=9), "bfloat16", served=True)
        for _ in range(2):
            await case.sink.update_weights(await case.step())
            version, half, _ = case.sink.current
            other.flat.move_to(case.board.half(half))
            assert torch.equal(logits(other), logits(case.policy))
            assert version == case.policy.version


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_a_cancelled_move_is_asked_for_again_before_anything_is_written(kind: str) -> None:
    async with opened(kind) as case:
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
        await case.step()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        write = case.board.write

        def slow(*arguments: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            write(*arguments)

        case.board.write = slow  # type: ignore[method-assign]  # it says when it begins
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
        readers = case.readers
        await case.sink.wait_writable()  # nobody is pinned
        readers.pinned = end = asyncio.Event()
        await case.sink.update_weights(await case.step())
        task = asyncio.create_task(case.sink.wait_writable())
        if kind == "float32":  # the step writes into no half
            return await task
        await readers.waiting.wait()
        assert not task.done() and case.place == 1
        end.set()
        await task
        copied = case.board.copied
        await case.step()
        assert case.place == 0
        await case.sink.update_weights(2)
        assert case.board.copied == copied
        assert readers.asked == [(1, 1), (2, 0)] and torch.equal(readers.seen[2], case.weights())


async def test_a_pin_that_ends_before_anybody_waits_for_it_leaves_its_half_to_the_next_step() -> None:
    async with opened("bfloat16") as case:
        case.readers.pinned = end = asyncio.Event()
        await case.sink.update_weights(await case.step())
        end.set()
        await case.readers.wait_unread(0)
        await case.sink.wait_writable()
        await case.step()
        assert case.place == 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
async def test_a_wait_for_a_pinned_reader_may_be_given_up(kind: str) -> None:
    async with opened(kind) as case:
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


async def test_a_write_that_was_cancelled_leaves_its_half_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("bfloat16") as case:
        loop, writes, fixed_row = asyncio.get_running_loop(), asyncio.Event(), case.sink._fixed_row

        def wait_for_cancellation() -> list[float] | None:
            loop.call_soon_threadsafe(writes.set)
            cancelled.wait(60)
            return fixed_row()

        cancelled = threading.Event()
        monkeypatch.setattr(case.sink, "_fixed_row", wait_for_cancellation)
        task = asyncio.create_task(case.sink.update_weights(await case.step()))
        await writes.wait()
        task.cancel()
        loop.call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        await case.sink.wait_writable()
        await case.step()
        assert case.place == 1
        await case.sink.update_weights(2)
        assert torch.equal(case.readers.seen[2], case.weights())


# -- where the working copy lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_a_slab", [False, True], ids=["file", "slab"])
async def test_a_working_copy_is_a_half_of_the_board_and_is_never_copied(on_a_slab: bool, name: str) -> None:
    async with opened("bfloat16", slab=name if on_a_slab else None, start=False) as case:
        private = StorageWeakRef(case.policy.weights.working.untyped_storage())
        await case.start()
        gc.collect()
        assert case.place == 0 and private.expired()
        copied = case.board.copied
        for version in range(1, 5):
            for _ in range(version):  # some versions are not published: they lie in the same half
                newest = await case.step()
                assert case.place == version % 2 and case.board.version(version % 2) is None
            await case.sink.update_weights(newest)
            assert case.readers.asked[-1] == (newest, version % 2)
            assert torch.equal(case.readers.seen[newest], case.policy.flat.master.bfloat16())
        assert case.board.copied == copied


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
async def test_what_the_modules_read_in_other_ways_stays_out_of_the_board(kind: str) -> None:
    async with opened(kind) as case:
        for _ in range(3):
            await case.sink.update_weights(await case.step())
            assert case.place is None


async def test_steps_while_a_move_is_under_way_touch_neither_half() -> None:
    async with opened("bfloat16") as case:
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
        found = [trainer.compute_logprobs(batch), trainer.compute_logprobs(batch, "reference")]
        found.append(trainer.compute_entropies(batch))
        return [gradient, trainer.policy.flat.master.clone(), *map(torch.from_numpy, found)]

    plain = trainer_of(trained("bfloat16").policy)
    async with opened("bfloat16") as case:
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
        masters = {name: torch.full_like(master, 0.5) for name, master in case.policy.flat.named_masters()}
        await case.lane.run(lambda: case.policy.flat.load_masters(masters), name="restore")
        case.policy.version = 41
        assert case.place == 1 and case.board.is_whole(0)
        await case.sink.update_weights(41)
        assert case.readers.asked == [(41, 1)]
        assert torch.equal(case.readers.seen[41], case.policy.flat.master.bfloat16())


async def test_after_the_end_the_modules_keep_their_half_and_go_on_in_it() -> None:
    async with opened("bfloat16") as case:
        await case.sink.update_weights(await case.step())
        case.sink.close()
        case.board.close()
        before = logits(case.policy)
        case.trained.step()
        assert case.policy.weights.misplaced_parameters() == [] and not torch.equal(logits(case.policy), before)
        assert torch.equal(case.policy.weights.working, case.policy.flat.master.bfloat16())


# -- faults ------------------------------------------------------------------------------------------------------------


class Worker:
    """A worker's engine and its end of the board, in this process. `sent`: what the node gets."""

    def __init__(self, case: Case) -> None:
        policy = PolicyModel(module_of(seed=9), str(case.policy.dtype).removeprefix("torch."), served=True)
        self.recorder, self.output_bound = Recorder(max_events=0), bound_of(BOUNDS, policy.dtype, False)
        self.policy, self.lane, self.sent = policy, case.lane, list[Any]()
        self.board, self.fault = case.board, right
        self.reader = WeightReader(case.board, self, case.lane, self.sent.append)

    def move_to(self, half: Tensor, version: int) -> None:
        self.policy.flat.move_to(half)

    async def outputs(self) -> list[float]:
        return await self.lane.run(lambda: fixed_logprobs(self.policy), name="outputs")

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        self.fault(self.board, half)
        await self.reader.move(version, half, outputs)

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        return None


def right(board: Board, half: int) -> None:
    pass


def corrupted(board: Board, half: int) -> None:
    """One small tensor of it: the last norm."""
    board.half(half)[-64:].mul_(2)


def cut_short(board: Board, half: int) -> None:
    middle = board.elements // 2
    board.half(half)[middle:] = board.half(1 - half)[middle:]


def of_the_version_before(board: Board, half: int) -> None:
    board.half(half).copy_(board.half(1 - half))


def not_a_number(board: Board, half: int) -> None:
    board.half(half)[-64:] = float("nan")


def not_named(board: Board, half: int) -> None:
    board.clear(half)


def misnamed(board: Board, half: int) -> None:
    Board.write(board, half, 1)


FAULTS = {
    right: "", corrupted: "fixed row", cut_short: "fixed row", of_the_version_before: "fixed row", not_a_number: "nan nats off",
    not_named: "holds version None where version 2 was announced", misnamed: "holds version 1 where version 2 was announced",
}  # fmt: skip


CASES = [
    *((kind, fault) for kind in ("float32", "bfloat16") for fault in FAULTS),
    *((kind, corrupted) for kind in (*KINDS[2:], "slab")),
]


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[f"{kind}-{fault.__name__}" for kind, fault in CASES])
async def test_a_worker_tells_the_node_of_weights_that_are_not_the_trainers(
    kind: str, fault: Callable[[Board, int], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.weights.sync.OUTPUTS_SHARE", math.inf)
    on_a_slab = kind == "slab"
    async with opened("bfloat16" if on_a_slab else kind, slab=name if on_a_slab else None, start=False) as case:
        worker = Worker(case)
        sink = WeightPublisher(case.policy, case.board, worker, case.lane)
        await worker.reader.move(*await sink.post_first())
        for version in (1, 2):
            await case.lane.run(case.trained.step, name="step")
            worker.fault = fault if version == 2 else right
            await sink.update_weights(version)
        names_another = fault in (not_named, misnamed)
        assert worker.sent[:2] == [{"bound": 0}, {"bound": 1}]
        assert worker.sent[2:3] == [{"bound": 2}] or names_another
        wrong = [message["wrong"] for message in worker.sent if "wrong" in message]
        assert len(wrong) == bool(FAULTS[fault]) and all(FAULTS[fault] in text for text in wrong)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_half_that_was_not_written_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and holds another version; where the trainer's modules read the half, their weights are not the masters'."""
    monkeypatch.setattr("asyncrl.weights.sync.OUTPUTS_SHARE", math.inf)
    async with opened(kind, start=False) as case:
        worker = Worker(case)
        sink = WeightPublisher(case.policy, case.board, worker, case.lane)
        await worker.reader.move(*await sink.post_first())
        in_place = kind == "bfloat16"
        await case.lane.run(lambda: case.trained.step(refresh=not in_place), name="step")
        case.board.write = lambda index, version, source=None: Board.write(case.board, index, version)  # type: ignore[method-assign]  # the fault
        if in_place:
            with pytest.raises(DivergenceError, match="not those that the optimizer has made"):
                await sink.update_weights(1)
            return
        await sink.update_weights(1)
        assert worker.sent[1] == {"bound": 1} and "fixed row" in worker.sent[2]["wrong"]


class Engine:
    """What acknowledges: it writes down what it was told."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def update_weights(self, version: int) -> None:
        self.versions.append(version)


def rebound(case: Trained) -> None:
    parameter = case.policy.weights.parameters[5]
    parameter.data = parameter.data.clone()


def moved_view(case: Trained) -> None:
    weights = case.policy.weights
    weights.parameters[-1].data = weights.view(weights.working, 0).flatten()[: weights.parameters[-1].numel()]


def older_buffer(case: Trained) -> None:
    case.policy.weights.bind(case.policy.weights.working.clone())


def lies(case: Trained) -> None:
    case.policy.version -= 1


def spoiled(case: Trained) -> None:
    case.policy.weights.view(case.policy.weights.working, 7).data.fill_(float("nan"))


PLANTS = {
    rebound: "no longer reads the flat buffer", moved_view: "no longer reads the flat buffer",
    older_buffer: "no longer reads the flat buffer", lies: "at version 0, not yet at 1", spoiled: "NaN or infinite",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("kind", KINDS[:3])
async def test_modules_that_are_not_at_the_version_end_the_run_before_anybody_is_told(
    kind: str, plant: Callable[[Trained], None]
) -> None:
    """With an engine that shares them, and with a board, of which nothing changes."""
    async with opened(kind) as case:
        engine = Engine()
        shared = SharedWeights(case.policy, engine, case.lane)
        await case.step()
        await shared.update_weights(1)
        assert engine.versions == [1]
        await case.lane.run(lambda: plant(case.trained), name="plant")
        for sink in (shared, case.sink):
            with pytest.raises(DivergenceError, match=PLANTS[plant]) as caught:
                await sink.update_weights(1)
            assert caught.value.unusable_weights == (plant is spoiled)
        assert engine.versions == [1] and case.readers.asked == []
        assert (case.board.version(0), case.board.version(1)) == (0, None)


async def test_an_adapter_that_was_rebound_ends_the_run() -> None:
    async with opened("lora float32", start=False) as case:
        parameter = case.policy.flat.parameters[3]
        parameter.data = parameter.data.clone()
        with pytest.raises(DivergenceError, match=r"lora_B.*no longer reads"):
            await SharedWeights(case.policy, Engine(), case.lane).update_weights(0)


async def test_nothing_is_published_before_the_first_version() -> None:
    async with opened(start=False) as case:
        with pytest.raises(LifecycleError, match="post_first"):
            await case.sink.update_weights(1)


async def test_a_board_of_another_layout_is_refused() -> None:
    async with opened(start=False) as case:
        other = trained("bfloat16")
        with pytest.raises(LifecycleError, match="layout"):
            WeightPublisher(other.policy, case.board, case.readers, case.lane)
