"""Workers that are replaced by memory and by count: between calls, and no reward is lost."""

import asyncio

import psutil
import pytest
from rewards_helpers import at_work, pool, score, until

from asyncrl.rewards.process import RewardWorker
from asyncrl.telemetry.recorder import Recorder


async def reward(rewards, text):
    return (await score(rewards, text)).reward


def recycled(recorder):
    return recorder.drain().get("reward/workers_recycled", 0)


async def until_alone(rewards):
    """Until whoever was replaced has ended, and his successor is there."""
    await until(lambda: len(rewards._alive) == rewards._config.workers and all(p.serving for p in rewards._alive))


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


async def test_no_reward_is_lost_by_replacements():
    """Three workers that are worn at the same time."""
    recorder, scores, calls, replaced = Recorder(), [], [0], [0]
    async with pool("by_order", workers=3, recorder=recorder, worker_max_calls=4) as rewards:

        async def call():
            while replaced[0] < 5:
                calls[0] += 1
                scores.append(await reward(rewards, "nap"))
                replaced[0] += recycled(recorder)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(call())
    assert len(scores) == calls[0] and None not in scores


async def test_a_call_that_is_under_way_is_not_disturbed(tmp_path):
    recorder, gate = Recorder(), tmp_path / "gate"
    async with pool("judges", recorder=recorder, worker_max_calls=1) as rewards:
        slow = asyncio.ensure_future(reward(rewards, str(gate)))
        await until(lambda: at_work(rewards))
        old = await reward(rewards, "go")
        assert recycled(recorder) == 1
        new = asyncio.ensure_future(reward(rewards, "go"))  # waits for the successor
        for _ in range(20):
            await asyncio.sleep(0)
        assert not slow.done() and not new.done()
        gate.touch()
        assert await slow == old != await new
        await until(lambda: not psutil.pid_exists(int(old)))


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
    monkeypatch.setattr(RewardWorker, "load", lambda *a, load=RewardWorker.load: load(*a[:-1], next(deadlines, 60.0)))
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
        async with asyncio.timeout(60):
            await reward(rewards, "go")
        assert not stopped.is_running()
    assert f"reward worker {process.pid} did not load" in caplog.text
    assert caplog.text.count("it is started again (1 of at most 2 times)") == 1
