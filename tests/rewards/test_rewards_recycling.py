"""Workers that are replaced by memory and by count: between calls, one successor before each end, and no reward is lost."""

import asyncio
import logging
import os

import psutil
import pytest
from rewards_helpers import pool, pool_of, score, until

from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.process import RewardWorker
from asyncrl.telemetry.recorder import Recorder


async def reward(rewards, text):
    return (await score(rewards, text)).reward


def recycled(recorder):
    return recorder.drain().get("reward/workers_recycled", 0)


async def until_alone(rewards):
    """Until whoever was replaced has ended, and his successor is there."""
    await until(
        lambda: len(rewards._alive) == rewards._config.workers and not any(p.worn.done() for p in rewards._alive)
    )


async def test_a_worker_that_leaks_is_replaced_and_says_so(caplog):
    recorder = Recorder()
    async with pool("leaks", recorder=recorder, worker_max_mib=20) as rewards:
        pids = []
        for _ in range(8):  # 8 MiB each; the 48 and 8 of the first call do not count
            pids.append(await reward(rewards, "8"))
            await until_alone(rewards)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [4, 4]
    assert recycled(recorder) == 2
    assert "more than reward.worker_max_mib = 20; it is replaced" in caplog.text


async def test_a_worker_is_replaced_after_its_last_call_but_not_without_a_limit():
    recorder = Recorder()
    async with pool("by_order", recorder=recorder, worker_max_calls=3) as rewards:
        pids = []
        for _ in range(9):
            pids.append(await reward(rewards, "go"))
            await until_alone(rewards)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3]
    assert recycled(recorder) == 3
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
    async with pool("by_order", recorder=recorder) as rewards:
        assert len({await reward(rewards, "go") for _ in range(9)}) == 1


async def test_no_place_is_ever_empty_and_no_reward_is_lost():
    """Three workers that are worn at the same time."""
    recorder, scores, counts, calls, replaced = Recorder(), [], [], [0], [0]
    async with pool("by_order", workers=3, recorder=recorder, worker_max_calls=4) as rewards:

        async def watch():
            while replaced[0] < 5:
                replaced[0] += recycled(recorder)
                counts.append(sum(process.serving and not process.hung_up for process in rewards._alive))
                await asyncio.sleep(0)

        async def call():
            while replaced[0] < 5:
                calls[0] += 1
                scores.append(await reward(rewards, "nap"))

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(call())
            group.create_task(watch())
    assert len(scores) == calls[0] and None not in scores
    assert set(counts) == {3}


@pytest.mark.parametrize("name", ["waits_for", "judges"])
async def test_a_call_that_is_under_way_is_not_disturbed(tmp_path, name):
    recorder, gate = Recorder(), tmp_path / "gate"
    async with pool(name, recorder=recorder, worker_max_calls=1) as rewards:
        old = await reward(rewards, "")
        slow = asyncio.ensure_future(reward(rewards, str(gate)))  # begins before the successor is there
        await until(lambda: len(rewards._alive) > 1 and recycled(recorder))
        new = await reward(rewards, "")  # by the successor, as the old one is still at work
        assert not slow.done()
        gate.touch()
        assert await slow == old != new
        await until(lambda: not psutil.pid_exists(int(old)))


async def test_a_successor_that_cannot_load_the_functions_replaces_nobody(tmp_path, caplog):
    file = tmp_path / "edited.py"
    good = "import os\ndef f(completions):\n    return [float(os.getpid())]\n"
    file.write_text(good)
    recorder = Recorder()
    async with pool_of([RewardSpec(f"{file}:f")], recorder, worker_max_calls=2) as rewards:
        pids = [await reward(rewards, "a")]
        file.write_text("def f(completions:\n")
        pids.append(await reward(rewards, "a"))
        await until(lambda: "goes on, because no successor can start" in caplog.text)
        file.write_text(good)
        os.utime(file, (0, 0))
        pids += [await reward(rewards, "a"), await reward(rewards, "a")]
        assert len(set(pids)) == 1
        await until(lambda: recycled(recorder))
        assert await reward(rewards, "a") != pids[0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("turns", range(0, 12, 3))
async def test_closing_while_a_successor_starts_leaves_nobody(turns):
    async with pool("length", worker_max_calls=1) as rewards:
        await reward(rewards, "abc")
        for _ in range(turns):
            await asyncio.sleep(0)
    assert not rewards._alive


@pytest.mark.parametrize("who", ["worker", "guard"])
async def test_a_successor_that_stands_still_is_named_and_replaced(who, monkeypatch, caplog):
    """Stopped before it has loaded the functions. A guard that is stopped cannot obey."""
    deadlines = iter([60.0, 2.0])  # of the first worker and of its successor
    suspended, load = asyncio.Event(), RewardWorker.load

    async def load_later(worker, specs, request, _):
        if (limit_s := next(deadlines, 60.0)) == 2:
            await suspended.wait()
        return await load(worker, specs, request, limit_s)

    monkeypatch.setattr(RewardWorker, "load", load_later)
    monkeypatch.setattr("asyncrl.concurrency.child.GUARD_S", 0.2)
    async with pool("by_order") as rewards:
        (first,) = rewards._alive
        first.kill()
        async with asyncio.timeout(20):
            while not (new := rewards._alive - {first}):  # noqa: ASYNC110
                await asyncio.sleep(0)
            (process,) = new
            stopped = psutil.Process(process.pid)
            while who == "worker" and stopped.pid == process.pid:
                await asyncio.sleep(0)
                stopped = next(iter(stopped.children()), stopped)
        stopped.suspend()
        suspended.set()
        async with asyncio.timeout(60):
            await reward(rewards, "go")
        assert not stopped.is_running()
    assert f"reward worker {process.pid} did not load" in caplog.text
    assert caplog.text.count("another worker is started (1 of at most 2 times)") == 1
