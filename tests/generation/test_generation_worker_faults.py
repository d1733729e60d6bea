"""The engine of workers whose processes fail in every way: each request has its one answer, and nothing is left.

The workers are processes that speak the whole protocol and have no model (`generation_worker_light`): many can die here.
test_generation_worker_engine.py has the real ones.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import uvloop
from generation_worker_light import tokens_of
from transport_helpers import until

from asyncrl.concurrency.channel import encode
from asyncrl.errors import ConfigError, DivergenceError, EngineClosed, GenerationError, LifecycleError, WorkerDied
from asyncrl.generation.worker import engine as room
from asyncrl.generation.worker.engine import WorkerEngine, WorkerLimits
from asyncrl.generation.worker.peer import Setup
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import Generation, GenerationRequest, SamplingParams

SOON = 30.0  # seconds: a bound for what other processes do, on a busy machine
HERE = {"PYTHONPATH": str(Path(__file__).parent)}
Die = dict[str, str]


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started from another program; everything else of them is as it is."""
    monkeypatch.setattr("asyncrl.generation.worker.peer.PROGRAM", "generation_worker_light")


@pytest.fixture(scope="module", autouse=True)
def used_before() -> None:
    """uvloop keeps a pipe for signals as long as the process lives."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor, no child, no name in shared memory, however a test ends its engine."""
    before = open_here()
    yield
    assert open_here() == before


def open_here() -> tuple[list[str], set[int], list[str]]:
    """(Descriptors, children, names in shared memory.) Of the loop of the test itself they are there before and after."""
    names = [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]
    gc.collect()  # a map is closed with its last array, which a traceback may hold
    return sorted(os.listdir("/proc/self/fd")), {child.pid for child in psutil.Process().children()}, names


class Engine(WorkerEngine):
    """With light workers. `die`: of every life of every worker, in order; a life that is not in it is a good one."""

    def __init__(self, workers: int = 2, die: dict[tuple[int, int], Die] | None = None, **given: Any) -> None:
        self.lives: list[int] = []  # numbers of workers, in the order of their starts
        self.token_s, self.die = given.pop("token_s", 0.002), die or {}
        self.environments: dict[tuple[int, int], dict[str, str]] = given.pop("environments", {})
        self.heard: list[str] = []
        numbers = {"max_sequences": 4, "max_context": 64, "start_s": SOON, "silent_s": SOON, "closure_s": SOON} | given
        super().__init__(
            WorkerLimits(workers=workers, vocabulary=97, has_tokenizer=True, **numbers), self.made, Recorder(nvtx=False)
        )
        self.set_first_weights(0, 0, None)

    def made(self, number: int) -> Setup:
        life = number, self.lives.count(number)
        self.lives.append(number)
        message = {"token_s": self.token_s, "die": self.die.get(life, {})}
        return Setup(message, (), HERE | self.environments.get(life, {}), None)

    def pids(self) -> dict[int, int]:
        """Of the workers that are alive, by number."""
        return {number: peer.process.pid for number, peer in self._peers.items()}

    def kill(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self._peers[number].process.pid, how)


def request(seed: int, size: int = 5, max_tokens: int = 8, key: str | None = None) -> GenerationRequest:
    prompt = np.random.default_rng(seed if key is None else len(key)).integers(0, 97, size).astype(np.int32)
    return GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens), seed, key)


async def test_in_sync_the_groups_of_a_step_meet_the_same_company_whichever_worker_is_faster() -> None:
    """Six groups of three, asked for before anybody serves: each worker has its nine together, though it has four rows."""
    async with Engine(ranks=1) as engine:
        asked = [replace(request(9 * group + member), group=group) for group in range(6) for member in range(3)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(engine.generate(each)) for each in asked]
        assert [answer.result().token_ids.tolist() for answer in answers] == [tokens_of(each) for each in asked]
        await until(lambda: engine.statistics()["decode_steps"] >= 2)
        assert engine.statistics()["decode_steps"] == 2 and engine._finishes == {0: 9, 1: 9}


class Asked:
    """Requests that are under way, and what became of each."""

    def __init__(self, engine: WorkerEngine, requests: list[GenerationRequest]) -> None:
        self.requests = requests
        self.tasks = [asyncio.ensure_future(engine.generate(each)) for each in requests]

    @property
    def answered(self) -> int:
        return sum(task.done() for task in self.tasks)

    async def all_right(self) -> list[Generation]:
        """Every one has its answer, the one that it has without any death."""
        async with asyncio.timeout(SOON):
            answers = await asyncio.gather(*self.tasks)
        for asked, answer in zip(self.requests, answers, strict=True):
            assert answer.token_ids.tolist() == tokens_of(asked)
        return answers

    async def failures(self) -> list[BaseException | Generation]:
        async with asyncio.timeout(SOON):
            return await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    """Open, and all workers are in service."""
    async with engine:
        async with asyncio.timeout(SOON):
            await engine.wait_until_serving()
        yield engine


# ---- deaths at work


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_whatever_is_killed_and_when_every_request_has_its_answer(seed: int) -> None:
    """Deaths at random moments, in the start, too, with groups and single requests, of which some are given up."""
    draw = random.Random(seed)
    requests = [
        request(n, max_tokens=draw.randint(1, 30), key=draw.choice((None, "a", "bb", "ccc"))) for n in range(400)
    ]
    async with serving(Engine(workers=3)) as engine:
        given_up = Asked(engine, [request(1000 + n, max_tokens=30) for n in range(40)])
        asked = Asked(engine, requests)
        killed = 0
        while asked.answered < len(requests):
            await asyncio.sleep(draw.uniform(0.0, 0.05))
            assert not [each for each in asked.tasks if each.done() and each.exception()]
            given_up.tasks[draw.randrange(40)].cancel()
            number, pid = draw.choice([*engine.pids().items(), (0, 0)])
            finished = engine._finishes[number]
            if pid and killed < 10:
                engine.kill(number, draw.choice((signal.SIGKILL, signal.SIGTERM)))
                killed += 1
                # One that had no time to finish anything is at fault, by the third time.
                await until(lambda f=finished, n=number: engine._finishes[n] > f or asked.answered == len(requests))
        await asked.all_right()
        assert killed == 10 or asked.answered == len(requests)
        for task in given_up.tasks:
            task.cancel()
        await given_up.failures()
        statistics = engine.statistics()
        assert statistics["aborted"] + statistics["finished"] >= 440
        assert statistics["reserved_positions"] == 0
        await engine.generate(request(7))


async def test_a_refused_request_gives_its_place_to_one_that_waits() -> None:
    """Nothing else happens that could send it: the worker has refused all that it had."""
    async with serving(Engine(workers=1, die={(0, 0): {"request": "refuse"}}, max_sequences=1)) as engine:
        odd = [request(2 * n + 1) for n in range(engine.limits.capacity)]
        asked = Asked(engine, [*odd, request(2)])
        failures = await asked.failures()
        assert all(isinstance(each, GenerationError) and "is odd" in str(each) for each in failures[:-1])
        assert isinstance(failures[-1], Generation)


async def test_a_worker_that_stands_still_is_named_and_replaced_wherever_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four at work, and their successors at four points of their start, which may take for ever where it computes."""
    moments = {1: "setup", 2: "ready", 3: "bound"}  # and 0 before it has run a line of Python
    die = {(number, 1): {moment: "stop"} for number, moment in moments.items()}
    async with serving(Engine(workers=4, silent_s=1.0, start_s=1e6, die=die)) as engine:
        asked = Asked(engine, [request(n, max_tokens=40) for n in range(30)])
        for number in range(4):
            engine.kill(number, signal.SIGSTOP)
        first = engine.pids()[0]
        await until(lambda: engine.pids().get(0, first) != first)
        engine.kill(0, signal.SIGSTOP)
        await asked.all_right()
        await until(lambda: all(engine.lives.count(number) == 3 for number in range(4)))
    for number in range(4):
        assert (
            len(re.findall(rf"worker {number} \(process \d+\) was killed by SIGKILL: it has sent nothing", caplog.text))
            == 2
        )


@pytest.mark.parametrize(
    ("die", "named"),
    [
        ({"request": "exit"}, "it was told to fail at request"),
        ({"request": "close"}, "was killed by SIGKILL"),
        ({"request": "garbage"}, "no message"),
        ({"request": "hang"}, "its closure engine/stuck has run for"),
        ({"request": "kill"}, "was killed by SIGKILL"),
        ({"bound": "kill"}, "was killed by SIGKILL"),
        ({"bound": "exit"}, "it was told to fail at bound"),
    ],
)
async def test_how_a_worker_died_is_told_and_its_requests_go_on(
    die: Die, named: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.generation.worker.peer.LEAVE_S", 1.0)
    async with serving(Engine(workers=1, die={(0, 0): die})) as engine:
        await Asked(engine, [request(n) for n in range(6)]).all_right()
        assert engine.lives == [0, 0]
    assert named in caplog.text


async def test_a_successor_for_which_there_is_no_process_now_comes_a_moment_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]

    def start(*arguments: Any, begin: Any = subprocess.Popen, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return begin(*arguments, **options)

    async with serving(Engine(workers=1, die={(0, 0): {"request": "kill"}})) as engine:
        monkeypatch.setattr(subprocess, "Popen", start)
        await Asked(engine, [request(n) for n in range(6)]).all_right()
        assert engine.lives == [0, 0, 0]
    assert "Resource temporarily unavailable\nit is started again" in caplog.text


# ---- deaths in the start


@pytest.mark.parametrize(
    ("die", "named"),
    [
        ({"setup": "exit"}, "exited with status 1; its last output:\n(.|\n)*RuntimeError: it was told to fail at setup"),
        ({"ready": "exit"}, "exited with status 1; its last output:\n(.|\n)*RuntimeError: it was told to fail at ready"),
        ({"ready": "kill"}, "was killed by SIGKILL"),
        ({"ready": "garbage"}, "no message: b'Warning"),
        ({"ready": "hang"}, "its closure engine/stuck has run for 1000000 s"),
        ({"setup": "refused"}, r"^engine.kv_positions is too large here$"),
    ],
)  # fmt: skip
async def test_a_first_start_that_fails_ends_the_engine_with_the_reason(die: Die, named: str) -> None:
    engine, error = Engine(workers=2, die={(1, 0): die}), ConfigError if "refused" in die.values() else WorkerDied
    with pytest.raises(error, match=named) as raised:
        async with engine:
            with pytest.raises(GenerationError, match=f"the engine failed: {error.__name__}"):
                await engine.wait_until_serving()
            await anyio.sleep_forever()
    assert getattr(raised.value, "number", 1) == 1
    with pytest.raises(GenerationError, match=r"worker 1|too large here"):
        await engine.generate(request(0))


async def test_a_successor_that_cannot_start_is_given_up_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is broken')\n")
    broken = {"PYTHONPATH": f"{tmp_path}:{HERE['PYTHONPATH']}"}
    engine = Engine(workers=2, environments={(1, 1): broken, (1, 2): broken})
    with pytest.raises(GenerationError, match=r"worker 1 died 3 times in a row: (.|\n)*this numpy is broken"):
        async with serving(engine):
            engine.kill(1)
            await anyio.sleep_forever()
    assert engine.lives == [0, 1, 1, 1] and room.MOST_DEATHS == 3


# ---- weights


@pytest.mark.parametrize("how", ["kill", "exit", "garbage"])
async def test_a_move_ends_although_workers_die_of_it(how: str) -> None:
    async with serving(Engine(workers=2, die={(0, 0): {"weights": how}, (1, 0): {"weights": how}})) as engine:
        asked = Asked(engine, [request(n, max_tokens=20) for n in range(12)])
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        late = await Asked(engine, [request(50 + n) for n in range(8)]).all_right()
        assert all((answer.versions == 1).all() for answer in late)
        await asked.all_right()
        assert sorted(engine.lives) == [0, 0, 1, 1]


async def test_a_move_to_which_all_are_killed_ends_and_the_successors_begin_with_it() -> None:
    async with serving(Engine(workers=2)) as engine:
        for number in (0, 1):
            engine.kill(number, signal.SIGSTOP)
        moving = asyncio.ensure_future(engine.update_weights(1, 1, None))
        await asyncio.sleep(0)
        assert not moving.done()
        for number in (0, 1):
            engine.kill(number)
        async with asyncio.timeout(SOON):
            await moving
            await engine.update_weights(2, 0, None)  # nobody is there to be told
            (answer,) = await Asked(engine, [request(1)]).all_right()
        assert (answer.versions == 2).all()


# ---- life


async def test_closing_fails_everybody_who_waits() -> None:
    engine = Engine(workers=2, token_s=0.05)
    with pytest.raises(EngineClosed, match="never opened"):
        await engine.generate(request(0))
    with pytest.raises(EngineClosed, match="never opened"):
        await engine.update_weights(1, 1, None)
    async with engine:
        with pytest.raises(LifecycleError, match="is open"):
            await engine.__aenter__()
        early = Asked(engine, [request(n, max_tokens=50) for n in range(3)])  # before any worker serves
        await engine.wait_until_serving()
        asked = Asked(engine, [request(n, max_tokens=50) for n in range(40)])
        await until(lambda: engine._router.sent >= 8)
        engine.kill(0, signal.SIGSTOP)
        moving = asyncio.ensure_future(engine.update_weights(1, 1, None))
        await asyncio.sleep(0)
    failures = [*await asked.failures(), *await early.failures(), *await asyncio.gather(moving, return_exceptions=True)]
    assert [type(each) for each in failures] == [EngineClosed] * 44
    with pytest.raises(EngineClosed, match="closed"):
        await engine.generate(request(0))
    with pytest.raises(EngineClosed, match="closed"):
        await engine.wait_until_serving()
    await engine.__aexit__(None, None, None)
    with pytest.raises(LifecycleError, match="opened once"):
        await engine.__aenter__()


async def test_wrong_weights_end_it_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(workers=1)
    with pytest.raises(DivergenceError, match="worker 0: bucket 3"):
        async with serving(engine):
            asked = Asked(engine, [request(n) for n in range(20)])
            engine._peers[0].process.channel._received += encode({"wrong": "bucket 3"})
            await anyio.sleep_forever()
    failures = [each for each in await asked.failures() if not isinstance(each, Generation)]
    assert failures and all(type(each) is EngineClosed and "bucket 3" in str(each) for each in failures)


# ---- cancellation


async def life(engine: Engine, at: list[str]) -> None:
    async with engine:
        at.append("opened")
        await engine.wait_until_serving()
        at.append("serves")
        asked = Asked(engine, [request(n, max_tokens=20) for n in range(8)])
        try:
            await engine.generate(request(20))
            at.append("generated")
            await engine.update_weights(1, 1, None)
            at.append("moved")
        finally:
            for task in asked.tasks:
                task.cancel()
            await asked.failures()
    at.append("closed")


MOMENTS = [(None, turns) for turns in range(10)]
MOMENTS += [(moment, turns) for moment in ("opened", "serves", "generated", "moved") for turns in (0, 1, 2, 4)]


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_a_life_that_is_cancelled_at_any_moment_leaves_nothing(native: bool) -> None:
    """Cancelled after 0, 1, 2, ... turns of the loop, counted from the start and from each thing that it waits for."""
    for moment, turns in MOMENTS[native::2]:
        before, at, scope = open_here(), list[str](), anyio.CancelScope()

        async def scoped(at: list[str] = at, scope: anyio.CancelScope = scope) -> None:
            with scope:
                await life(Engine(workers=1), at)

        task = asyncio.ensure_future(life(Engine(workers=1), at) if native else scoped())
        if moment is not None:
            await until(lambda moment=moment, at=at: moment in at)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(2):  # a second one does no harm
            task.cancel() if native else scope.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(SOON):
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        assert task.cancelled() or scope.cancelled_caught or "closed" in at
        assert open_here() == before, (moment, turns)
        assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_move_may_be_asked_for_again() -> None:
    async with serving(Engine(workers=2)) as engine:
        engine.kill(0, signal.SIGSTOP)
        for turns in range(4):
            moving = asyncio.ensure_future(engine.update_weights(1, 1, None))
            for _ in range(turns):
                await asyncio.sleep(0)
            moving.cancel()
            await asyncio.wait([moving])
            assert moving.cancelled()
        engine.kill(0, signal.SIGCONT)
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        assert all(peer.version == 1 for peer in engine._peers.values())
        assert engine._updates == []
