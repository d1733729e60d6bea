"""The engine of real workers: what it answers is what the engine in this process answers, token for token, whoever dies meanwhile.

One engine of two workers serves nearly all tests here; the loop only runs during a test.
test_generation_worker_faults.py has the ends of every kind, with lighter workers.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from generation_models import generate_all, plain_copy, plain_logprobs
from transport_helpers import until

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.load import load_config
from asyncrl.distributed.world import World
from asyncrl.errors import EngineClosed, GenerationError
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.generation.worker.engine import WorkerEngine
from asyncrl.generation.worker.names import segment_name
from asyncrl.generation.worker.peer import Peer
from asyncrl.models.loading import load_policy
from asyncrl.models.policy import PolicyModel
from asyncrl.ports import Engine
from asyncrl.runtime import workers as runtime_workers
from asyncrl.runtime.decided import Decided
from asyncrl.runtime.directory import RunDirectory
from asyncrl.runtime.opened import OpenRun
from asyncrl.runtime.placement import Placement
from asyncrl.runtime.progress import Listeners, Stages
from asyncrl.runtime.workers import open_workers
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, weight_slab
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams
from asyncrl.weights.sync import WeightPublisher

MODEL, REWARDS = (Path(__file__).parents[1] / f"runtime/runtime_{name}.py" for name in ("model", "rewards"))
SOON = 60.0  # seconds: a bound for what other processes do, on a busy machine
CONTEXT = 60


class Opened:
    """An open engine with two workers or one, the policy whose weights they read, and its lane."""

    def __init__(
        self, engine: WorkerEngine, posted: WeightPublisher, policy: PolicyModel, tokenizer: Any, lane: ThreadLane
    ) -> None:
        self.engine, self.posted = engine, posted
        self.policy, self.tokenizer, self.lane = policy, tokenizer, lane

    def peers(self) -> list[Peer]:
        return list(self.engine._peers.values())

    def pids(self) -> list[int]:
        return [peer.process.pid for peer in self.peers()]

    async def expected(self, requests: list[GenerationRequest]) -> list[Generation]:
        """What the engine in this process answers with the present weights."""
        own = EmbeddedEngine(
            self.policy, self.tokenizer, self.lane, Recorder(nvtx=False), max_sequences=8, max_context=CONTEXT
        )
        async with own:
            return await generate_all(own, requests)

    async def next_version(self, seed: int) -> int:
        """An optimizer step that matters, and all workers have moved to it."""

        def train() -> int:
            for _, master in self.policy.flat.named_masters():
                noise = torch.randn(master.shape, generator=torch.Generator().manual_seed(seed))
                master.add_(noise, alpha=0.05)
            return self.policy.advance()

        version = await self.lane.run(train, name="train/finish", priority=1)
        await self.posted.update_weights(version)
        return version


@asynccontextmanager
async def opened(folder: Path, workers: int, kv_after_update: str, apart: bool = False) -> AsyncIterator[Opened]:
    """As a run opens it. `apart`: as where the workers have another device than the trainer."""
    overrides = [
        f"run.dir={folder}", f"model.path={MODEL}:build", "model.dtype=float32", f"data.train={MODEL}:rows",
        f"reward={REWARDS}:share", f"data.max_prompt_tokens={CONTEXT - 40}", "rollout.max_tokens=40", "engine.max_sequences=6",
        "rollout.group_size=4", f"engine.kv_after_update={kv_after_update}", "seed=1",
        "engine.kept_prefix_max_age=1",
    ]  # fmt: skip
    config = await asyncio.to_thread(load_config, [], overrides)
    directory = await asyncio.to_thread(RunDirectory, config)
    recorder, device = Recorder(nvtx=False), torch.device("cpu")
    placement = Placement((torch.device("cpu", 0) if apart else device,) * workers, 1, 1, "")
    assert placement.on_other_device(0) == apart
    async with AsyncExitStack() as stack:
        lane = await stack.enter_async_context(ThreadLane("trainer", recorder))
        policy, tokenizer = await lane.run(lambda: load_policy(config.model, device, config.seed), name="load")
        decided = Decided(config, World.from_env(), device, directory=directory)
        run = OpenRun(decided, recorder, Listeners(), Stages(), stack)
        run.policy, run.tokenizer, run.lanes = policy, tokenizer, (lane,)
        engine, posted = await open_workers(run, placement, 6 * CONTEXT)
        yield Opened(engine, posted, policy, tokenizer, lane)


pytestmark = [pytest.mark.usefixtures("warm_workers"), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(warm_workers: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Opened]:
    """An engine of two workers. A task of its own holds it open between tests: it is closed in the task that opened it."""
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def hold() -> None:
        async with opened(tmp_path_factory.mktemp("engine"), 2, "keep") as held:
            ready.set_result(held)
            await stop.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold())
        yield await ready
        pids = ready.result().pids()
        stop.set()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert left() == []


def left() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]


def request(size: int, seed: int, key: str | None = None, **sampling: Any) -> GenerationRequest:
    prompt = np.random.default_rng(len(key) if key is not None else seed % 1000).integers(2, 22, size).astype(np.int32)
    return GenerationRequest(prompt, SamplingParams(**({"max_tokens": 12} | sampling)), seed, key)


def many(count: int, first: int = 0) -> list[GenerationRequest]:
    """Of every kind."""
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 3}, {"ignore_eos": True, "max_tokens": 30},
        {"stop": ("a", "bc")}, {"stop_token_ids": (5, 6, 7)}, {"max_tokens": 1}, {"stop": ("é\n\"'",)},
    ]  # fmt: skip
    made = [request(1 + n % 17, first + n, **kinds[n % len(kinds)]) for n in range(count)]
    made += [request(9, first + 500 + n, key="group " + "x" * (n // 4), max_tokens=20) for n in range(12)]
    return [*made, request(3, -5), request(3, 2**63 + 11), request(CONTEXT - 1, 4, max_tokens=1)]


def assert_same(answers: list[Generation], expected: list[Generation]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert answer.token_ids.tolist() == other.token_ids.tolist()
        assert answer.finish_reason is other.finish_reason
        assert np.allclose(answer.logprobs, other.logprobs, atol=1e-5)
        assert np.allclose(answer.sampled_logprobs, other.sampled_logprobs, atol=1e-5)
        assert answer.versions.tolist() == other.versions.tolist()


async def reported(made: Opened) -> None:
    """Wait until every worker has said what it did up to now. (The first word that comes may be an old one.)"""
    for peer in made.peers():
        for _ in range(3):
            known = peer.statistics
            while peer.statistics is known:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.01)


async def test_answers_are_those_of_the_engine_in_this_process_and_have_their_form(made: Opened) -> None:
    assert isinstance(made.engine, Engine)
    requests = many(40)
    answers = await generate_all(made.engine, requests)
    assert_same(answers, await made.expected(requests))
    for asked, answer in zip(requests, answers, strict=True):
        size = answer.token_ids.size
        assert 1 <= size <= asked.sampling.max_tokens
        assert answer.token_ids.dtype == answer.versions.dtype == np.int32
        assert answer.logprobs.dtype == answer.sampled_logprobs.dtype == np.float32
        assert answer.logprobs.shape == answer.sampled_logprobs.shape == answer.versions.shape == (size,)
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}
    alone = [await made.engine.generate(asked) for asked in requests[:6]]
    assert_same(alone, answers[:6])
    tokens = sum(answer.token_ids.size for answer in [*answers, *alone])
    await until(lambda: made.engine.statistics()["tokens"] == tokens)  # they are reported
    statistics = made.engine.statistics()
    assert statistics["finished"] == len(requests) + 6 and statistics["waiting"] == 0


async def test_the_members_of_a_group_share_one_prefill(made: Opened) -> None:
    await reported(made)
    before = made.engine.statistics()
    for pid in made.pids():  # so that all three are there before the first is served
        os.kill(pid, signal.SIGSTOP)
    requests = [request(17, n, key="shared prompt") for n in range(3)]
    tasks = [asyncio.ensure_future(made.engine.generate(asked)) for asked in requests]
    await until(lambda: made.engine._router.sent == 3 and not any(each._outbox for each in made.peers()))
    for pid in made.pids():
        os.kill(pid, signal.SIGCONT)
    answers = await asyncio.gather(*tasks)
    tokens = before["tokens"] + sum(answer.token_ids.size for answer in answers)
    await until(lambda: made.engine.statistics()["tokens"] == tokens)
    # The last token of the prompt begins the decoding.
    assert made.engine.statistics()["prefill_tokens"] - before["prefill_tokens"] == 16


async def test_turns_find_what_their_session_has_left_and_a_dead_worker_takes_only_its_own_with_it(
    made: Opened,
) -> None:
    def next_turns(asked: list[GenerationRequest], answers: list[Generation]) -> list[GenerationRequest]:
        histories = zip(asked, answers, strict=True)
        rows = [np.concatenate([each.prompt_ids, answer.token_ids, [3, 4, 5]]) for each, answer in histories]
        return [replace(each, prompt_ids=row.astype(np.int32)) for each, row in zip(asked, rows, strict=True)]

    engine = made.engine
    asked = [replace(request(9, 700 + n, max_tokens=6, ignore_eos=True), session=f"s{n}") for n in range(6)]
    answers = await generate_all(engine, asked)
    homes = dict(engine._router._sessions)
    assert sorted(homes.values()) == [0] * 3 + [1] * 3
    await until(lambda: engine.statistics()["kept_rows"] == 6)
    await reported(made)
    before = engine.statistics()["prefill_tokens"]
    asked = next_turns(asked, answers)
    answers = await generate_all(engine, asked)
    assert_same(answers, await made.expected(asked))
    await reported(made)
    assert engine.statistics()["prefill_tokens"] - before == 6 * 3 and engine._router._sessions == homes
    # Killed between two turns: three sessions compute their histories again.
    lost = engine._peers[0].process.pid
    os.kill(lost, signal.SIGKILL)
    await until(lambda: 0 in engine._peers and engine._peers[0].process.pid != lost and engine._router.serves(0))
    assert {home for home in engine._router._sessions.values()} == {1}
    asked = next_turns(asked, answers)
    assert_same(await generate_all(engine, asked), await made.expected(asked))
    for each in asked:
        engine.end_session(str(each.session))
    await until(lambda: engine.statistics()["kept_rows"] == 0)
    assert engine._router._sessions == {}


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (request(0, 0), "prompt is empty"),
        (request(CONTEXT, 0, max_tokens=5), r"max_tokens=5 are 65 .*max_context=60"),
        (request(4, 0, temperature=float("nan")), "temperature is nan"),
        (request(4, 0, top_p=0.0), "top_p is 0"),
        (replace(request(4, 0), prompt_ids=np.array([3, 23], np.int32)), r"token ids from 3 to 23, .*\[0, 23\)"),
        (request(4, 0, stop=("\ud800",)), "this request cannot be served: .*lone surrogate"),
        (request(4, 0, stop={"END": 1}.keys()), "a tuple of strings"),
    ],
)
async def test_what_cannot_be_served_is_refused(made: Opened, asked: GenerationRequest, text: str) -> None:
    with pytest.raises(GenerationError, match=text):
        await made.engine.generate(asked)


class Word(StrEnum):
    END = "END"


class Id(IntEnum):
    FIVE = 5


async def test_numbers_of_numpy_and_of_a_program_are_numbers(made: Opened) -> None:
    """As an environment may compute them. A worker cannot import the classes of a program."""
    plain = request(4, 3, temperature=0.5, max_tokens=9, stop_token_ids=(5,))
    sampling = SamplingParams(
        temperature=np.float64(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(9),  # type: ignore[arg-type]
        stop_token_ids=(np.int32(5),),  # type: ignore[arg-type]
    )
    enumerated = replace(sampling, stop=(Word.END,), stop_token_ids=(Id.FIVE,), logit_bias=defaultdict(lambda: 0.0))
    [answer] = [await made.engine.generate(replace(plain, sampling=enumerated))]
    assert_same([answer], [await made.engine.generate(replace(plain, sampling=replace(plain.sampling, stop=("END",))))])
    given = replace(plain, sampling=sampling, seed=np.int64(3))  # type: ignore[arg-type]
    assert_same([await made.engine.generate(given)], [await made.engine.generate(plain)])


async def test_who_gives_up_frees_a_place_and_hundreds_at_once_do(made: Opened) -> None:
    long = {"max_tokens": 40, "ignore_eos": True}
    tasks = [asyncio.ensure_future(made.engine.generate(request(9, n, **long))) for n in range(300)]
    await until(lambda: any(task.done() for task in tasks))  # running and waiting ones are left
    before = made.engine.statistics()["aborted"]
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    given_up = sum(isinstance(each, asyncio.CancelledError) for each in results)
    assert given_up > 100 and made.engine.statistics()["aborted"] - before == given_up
    assert made.engine.statistics()["reserved_positions"] == 0
    requests = many(10, first=50)
    assert_same(await generate_all(made.engine, requests), await made.expected(requests))
    await until(lambda: made.engine.statistics()["running"] == made.engine.statistics()["waiting"] == 0)


async def moved_while_they_run(made: Opened, seed: int) -> tuple[int, list[GenerationRequest], list[Generation]]:
    """(next version, requests, answers). As many requests as it takes until the workers have moved: of different lengths, so that
    some are under way at any moment, however fast the worker and however slow the move is."""
    requests, tasks = list[GenerationRequest](), list[asyncio.Future[Generation]]()
    moving: asyncio.Future[int] | None = None
    while moving is None or not moving.done():
        while sum(not task.done() for task in tasks) < 24:
            requests.append(request(5, len(tasks), max_tokens=20 + len(tasks) % 20, ignore_eos=True))
            tasks.append(asyncio.ensure_future(made.engine.generate(requests[-1])))
        if moving is None and any(task.done() for task in tasks):
            moving = asyncio.ensure_future(made.next_version(seed))
        pending = [task for task in tasks if not task.done()]
        await asyncio.wait([*pending, *([moving] if moving else [])], return_when=asyncio.FIRST_COMPLETED)
    return moving.result(), requests, await asyncio.gather(*tasks)


async def mixed_while_they_run(made: Opened, seed: int) -> tuple[int, int, list[GenerationRequest], list[Generation]]:
    """(last version, next version, requests, answers): some answers have tokens of both versions. On a busy machine the workers may
    have nothing to do just when they move, so there are several attempts."""
    for attempt in range(6):
        old = made.policy.version
        version, requests, answers = await moved_while_they_run(made, seed + 100 * attempt)
        if any(answer.versions[0] == old and answer.versions[-1] == version for answer in answers):
            return old, version, requests, answers
    raise AssertionError("in no attempt were requests under way while the workers moved")


async def test_a_version_that_comes_while_they_run_is_on_the_tokens(made: Opened) -> None:
    old, version, _, running = await mixed_while_they_run(made, seed=1)
    late = many(4, first=90)
    answers = await generate_all(made.engine, late)
    assert_same(answers, await made.expected(late))
    assert all((answer.versions == version).all() for answer in answers)
    moved = [answer.versions for answer in running]
    assert all((np.diff(versions) >= 0).all() and set(versions.tolist()) <= {old, version} for versions in moved)


async def test_workers_that_are_killed_cost_no_answer_and_change_none(made: Opened) -> None:
    """Their successors begin with the present version, which is not the first."""
    requests = many(80, first=200)
    tasks = [asyncio.ensure_future(made.engine.generate(asked)) for asked in requests]
    await until(lambda: sum(task.done() for task in tasks) > 20)
    pids = made.pids()
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: sum(task.done() for task in tasks) > 60)
    os.kill(pids[1], signal.SIGKILL)
    assert_same(await asyncio.gather(*tasks), await made.expected(requests))
    async with asyncio.timeout(SOON):
        await made.engine.wait_until_serving()
    version = await made.next_version(seed=2)
    again = many(10, first=300)
    answers = await generate_all(made.engine, again)
    assert_same(answers, await made.expected(again))
    assert all((answer.versions == version).all() for answer in answers)
    assert not set(pids) & set(made.pids())


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["it is killed", "it lives"])
async def test_a_pinned_worker_computes_with_its_version_to_the_end_whoever_dies(made: Opened, kill: bool) -> None:
    """The other half is written meanwhile and the other worker moves; the version after that waits until it has left."""
    version, requests = made.policy.version, many(30, first=600)
    expected = await made.expected(requests)
    pin = await made.engine.pin(version)
    assert pin is not None
    tasks = [asyncio.ensure_future(pin.generate(asked)) for asked in requests]
    assert await made.next_version(seed=11) == version + 1
    assert made.engine.reads(pin.weights.half) and made.posted.current.half != pin.weights.half
    late = many(6, first=700)
    assert_same(await generate_all(made.engine, late), await made.expected(late))  # of the next version
    if kill:
        os.kill(made.engine._peers[pin.worker].process.pid, signal.SIGKILL)
    third = asyncio.ensure_future(made.next_version(seed=12))
    assert_same(await asyncio.gather(*tasks), expected)
    assert not third.done() and made.posted.current.version == version + 1
    pin.end()
    assert await third == version + 2
    await until(lambda: {peer.version for peer in made.peers()} == {version + 2})
    assert_same(await generate_all(made.engine, late), await made.expected(late))


async def test_one_worker_recomputes_and_closing_or_failing_leaves_nothing(tmp_path: Path) -> None:
    """`kv_after_update: recompute`: each token after the move is what the new weights say of the whole sequence."""
    before = left()
    async with opened(tmp_path, 1, "recompute") as made:
        old, version, requests, answers = await mixed_while_they_run(made, seed=3)
        mixed = [n for n, answer in enumerate(answers) if answer.versions[0] == old and answer.versions[-1] == version]

        def check() -> None:
            plain = plain_copy(made.policy, runpy.run_path(str(MODEL))["build"](0)[0].eval())
            for n in mixed:
                told = plain_logprobs(plain, requests[n], answers[n])
                new = answers[n].versions == version
                assert np.allclose(answers[n].logprobs[new], told[new], atol=1e-4)
                assert not np.allclose(answers[n].logprobs[~new], told[~new], atol=1e-3)

        await asyncio.to_thread(check)
        pids = made.pids()
        waiting = [asyncio.ensure_future(made.engine.generate(request(4, n, max_tokens=40))) for n in range(50)]
        await until(lambda: made.engine._router.sent > 0)
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(type(each) is EngineClosed for each in failures) > 40
    assert not [pid for pid in pids if psutil.pid_exists(pid)] and left() == before


def on_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The board lies where that of a GPU would lie, in memory of the CPU."""

    def create(elements: int, dtype: torch.dtype, layout: str, device: torch.device) -> Board:
        return Board.create(elements, dtype, layout, weight_slab(segment_name(), elements, dtype, device))

    monkeypatch.setattr(runtime_workers, "create_board", create)


@pytest.mark.parametrize("apart", [False, True], ids=["there", "copies"])
async def test_workers_read_a_slab_where_it_lies_or_copies_of_it(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_slab(monkeypatch)
    before = left()
    async with opened(tmp_path, 1, "keep", apart) as made:
        assert any("worker-weights-0" in name for name in left())
        for seed in (4, 5, 6):  # both halves, and the first again
            version = await made.next_version(seed)
            requests = many(6, first=seed)
            answers = await generate_all(made.engine, requests)
            assert_same(answers, await made.expected(requests))
            assert all((answer.versions == version).all() for answer in answers)
        (pid,) = made.pids()
        os.kill(pid, signal.SIGKILL)
        assert_same(await generate_all(made.engine, requests), answers)  # of its successor
        await made.next_version(seed=7)
    assert left() == before


async def test_a_worker_that_is_killed_while_it_moves_costs_neither_the_move_nor_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the closure that moves, with requests under way; by itself, so that it is there that it dies."""
    flag = tmp_path / "die"
    flag.touch()
    monkeypatch.setenv("DIES_WHERE_THERE_IS", str(flag))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("asyncrl.generation.worker.peer.PROGRAM", "generation_worker_dying")
    async with opened(tmp_path, 1, "keep") as made:
        (pid,) = made.pids()
        assert flag.exists()
        version, requests, answers = await moved_while_they_run(made, seed=8)
        assert version == made.posted.current.version == 1
        assert not flag.exists() and pid not in made.pids()
        versions = [set(answer.versions.tolist()) for answer in answers]
        assert all(each in ({0}, {1}) for each in versions)  # nothing of a dead worker goes on: it is sampled anew
        late = [n for n, each in enumerate(versions) if each == {1}]
        assert late, "its successor begins with the version that it was moving to"
        expected = await made.expected([requests[n] for n in late])
        assert_same([answers[n] for n in late], expected)
        await made.next_version(seed=9)
