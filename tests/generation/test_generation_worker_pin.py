"""A worker that stays at a version while the others go on: who gets which request, when a move is over, and whoever dies meanwhile.

Light workers, as in test_generation_worker_faults.py; test_generation_worker_engine.py has real ones.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from test_generation_worker_faults import SOON, Asked, Engine, light, nothing_is_left, request, serving  # noqa: F401
from transport_helpers import until

from asyncrl.errors import EngineClosed
from asyncrl.generation.worker.peer import Peer
from asyncrl.generation.worker.pin import Pin
from asyncrl.ports import PinnedVersion, PinsVersions
from asyncrl.types import Generation, GenerationRequest


async def pinned(engine: Engine, version: int = 0) -> Pin:
    assert isinstance(engine, PinsVersions)
    pin = await engine.pin(version)
    assert pin is not None
    return pin


def evaluate(pin: PinnedVersion, requests: list[GenerationRequest]) -> list[asyncio.Task[Generation]]:
    return [asyncio.ensure_future(pin.generate(each)) for each in requests]


async def versions(tasks: list[asyncio.Task[Generation]]) -> set[int]:
    async with asyncio.timeout(SOON):
        return {int(version) for answer in await asyncio.gather(*tasks) for version in answer.versions}


def bound(engine: Engine) -> dict[int, int]:
    return {number: peer.version for number, peer in engine._peers.items()}


async def test_one_stays_while_the_others_go_on_and_follows_at_the_end() -> None:
    async with serving(Engine(workers=3, token_s=0.004)) as engine:
        pin = await pinned(engine)
        engine.kill(pin.worker, signal.SIGSTOP)  # it answers nothing before the others have moved
        held_out = evaluate(pin, [request(n, max_tokens=50) for n in range(9)])
        rollouts = Asked(engine, [request(50 + n, max_tokens=30) for n in range(12)])
        await until(lambda: engine._router.sent > 12)
        assert all(job.pinned for job in engine._router._loads[pin.worker].jobs.values())
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        others = {0, 1, 2} - {pin.worker}
        assert not all(task.done() for task in held_out)  # it was not waited for
        assert bound(engine) == dict.fromkeys(others, 1) | {pin.worker: 0}
        assert engine.reads(0) and not engine.reads(1)
        late = Asked(engine, [request(80 + n) for n in range(12)])
        assert await versions(late.tasks) == {1}
        engine.kill(pin.worker, signal.SIGCONT)
        assert await versions(held_out) == {0}
        left = asyncio.ensure_future(engine.wait_unread(0))
        await asyncio.sleep(0)
        assert not left.done()
        pin.end()
        # The worker is notified, and its half may not be written before it answers.
        assert engine.reads(0) and engine._router.pinned == pin.worker
        async with asyncio.timeout(SOON):
            await left
        assert bound(engine) == dict.fromkeys((0, 1, 2), 1) and not engine.reads(0)
        pin.end()
        (again,) = await Asked(engine, [request(1)]).all_right()
        assert (again.versions == 1).all()
        await rollouts.all_right()
        assert (await pin.generate(request(2))).versions.tolist() == [1] * 8  # like any other


async def test_a_move_waits_for_what_the_pinned_worker_had_before() -> None:
    async with serving(Engine(workers=2)) as engine:
        for number in (0, 1):  # else one may have answered before it is pinned
            engine.kill(number, signal.SIGSTOP)
        old = Asked(engine, [request(n, max_tokens=40) for n in range(2)])  # one for each
        await until(lambda: engine._router.sent == 2)
        pin = await pinned(engine)
        engine.kill(1 - pin.worker, signal.SIGCONT)
        moving = asyncio.ensure_future(engine.update_weights(1, 1, None))
        await until(lambda: bound(engine)[1 - pin.worker] == 1)
        await asyncio.wait_for(old.tasks[1 - pin.worker], SOON)
        assert engine._router.unpinned_on_pinned_worker == 1 and not moving.done()
        engine.kill(pin.worker, signal.SIGCONT)
        async with asyncio.timeout(SOON):
            await moving
        assert old.tasks[pin.worker].done() and set(old.tasks[pin.worker].result().versions.tolist()) == {0}
        pin.end()


@pytest.mark.parametrize("told", [False, True], ids=["before", "after"])
async def test_the_successor_of_a_pinned_worker_begins_with_the_pinned_version(told: bool) -> None:
    """Killed before the others are told of the next version, and after that: no token of the evaluation is of another one."""
    async with serving(Engine(workers=2, token_s=0.004)) as engine:
        old = Asked(engine, [request(90 + n, max_tokens=50) for n in range(2)])
        pin = await pinned(engine)
        requests = [request(n, max_tokens=40) for n in range(8)]
        held_out = evaluate(pin, requests)
        if not told:
            engine.kill(pin.worker)
        moving = asyncio.ensure_future(engine.update_weights(1, 1, None))
        if told:
            await until(lambda: bound(engine).get(1 - pin.worker) == 1)
            engine.kill(pin.worker)
        async with asyncio.timeout(SOON):
            await moving
            await engine.wait_until_serving()
        assert await versions(held_out) == {0}
        again = Asked(engine, [])
        again.tasks, again.requests = held_out, requests
        await again.all_right()
        await old.all_right()  # that of the dead worker by the other one
        assert engine.lives.count(pin.worker) == 2 and bound(engine) == {pin.worker: 0, 1 - pin.worker: 1}
        pin.end()
        async with asyncio.timeout(SOON):
            await engine.wait_unread(0)
        assert bound(engine) == {0: 1, 1: 1}


async def test_a_pin_that_ends_while_its_worker_is_dead_or_starts_is_over() -> None:
    async with serving(Engine(workers=2)) as engine:
        pin = await pinned(engine)
        held_out = evaluate(pin, [request(0, max_tokens=50)])
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
            engine.kill(pin.worker)
            await until(lambda: pin.worker not in engine._peers or not engine._peers[pin.worker].ready)
            held_out[0].cancel()
            pin.end()
            assert not engine.reads(0)  # nobody looks at it, and the successor begins with what all have
            await engine.update_weights(2, 0, None)
            await engine.wait_until_serving()
        assert bound(engine) == {0: 2, 1: 2}


async def test_the_other_one_may_die_and_its_successor_has_the_newest_version() -> None:
    async with serving(Engine(workers=2, token_s=0.004)) as engine:
        pin = await pinned(engine)
        held_out = evaluate(pin, [request(n, max_tokens=50) for n in range(4)])
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        engine.kill(1 - pin.worker)
        late = Asked(engine, [request(50 + n) for n in range(8)])
        assert await versions(late.tasks) == {1} and await versions(held_out) == {0}
        pin.end()


async def test_there_is_nobody_to_spare_where_one_serves_or_some_are_at_another_version() -> None:
    async with serving(Engine(workers=1)) as engine:
        assert await engine.pin(0) is None
    async with serving(Engine(workers=2)) as engine:
        assert await engine.pin(1) is None
        engine.kill(0)
        await until(lambda: not engine._router.serves(0))
        assert await engine.pin(0) is None  # who is left has all the rollouts
        async with asyncio.timeout(SOON):
            await engine.wait_until_serving()
        (await pinned(engine)).end()


async def test_the_next_pin_waits_until_the_worker_of_the_last_one_has_moved_on() -> None:
    async with serving(Engine(workers=2)) as engine:
        first = await pinned(engine)
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
            second = asyncio.ensure_future(engine.pin(1))
            await asyncio.sleep(0)
            assert not second.done()
            first.end()
            found = await second
        assert found is not None and bound(engine) == {0: 1, 1: 1}
        assert await versions(evaluate(found, [request(n) for n in range(5)])) == {1}
        found.end()
        assert not engine.reads(1)  # nothing came meanwhile


async def test_a_half_that_a_pinned_worker_reads_is_not_announced_as_another_version() -> None:
    async with serving(Engine(workers=2)) as engine:
        pin = await pinned(engine)
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        with pytest.raises(AssertionError, match="the half was written while a worker reads it"):
            await engine.update_weights(2, 0, None)
        pin.end()


async def test_an_engine_that_ends_ends_whoever_waits_for_a_pinned_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Engine(workers=2)) as engine:
        pin = await pinned(engine)
        engine.kill(pin.worker, signal.SIGSTOP)
        held_out = evaluate(pin, [request(0)])
        async with asyncio.timeout(SOON):
            await engine.update_weights(1, 1, None)
        waiting = [asyncio.ensure_future(engine.wait_unread(0)), asyncio.ensure_future(engine.pin(1)), *held_out]
        await asyncio.sleep(0)
        engine.kill(pin.worker, signal.SIGCONT)
    async with asyncio.timeout(SOON):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ends[:2]] == [EngineClosed, EngineClosed]
    assert isinstance(ends[2], (EngineClosed, Generation))  # it may have been answered before


async def test_a_token_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the worker told of a later one, the evaluation would be of two versions."""
    async with serving(Engine(workers=2)) as engine:
        pin = await pinned(engine)
        peer: Peer = engine._peers[pin.worker]
        peer.send_weights(1, 1, None)
        await until(lambda: peer.version == 1)
        with pytest.raises(Exception, match=r"worker \d is pinned to version 0 and sampled with 1"):
            await pin.generate(request(0))
