"""The reward pool's processes: who waits for whom, what cancellation and closing leave, whose death takes whom."""

import asyncio
import errno
import gc
import os
import signal
import subprocess
import threading
from pathlib import Path

import anyio
import psutil
import pytest
import uvloop
from rewards_helpers import at_work, only_worker, pool, pool_of, prompt, score, trajectories, until
from transport_helpers import alive
from warm import children

from asyncrl.errors import LifecycleError, RewardTimeout
from asyncrl.rewards.calls import RewardSpec

ROOT = Path(__file__).resolve().parents[2]


# ---- waiting


async def test_callers_are_served_in_the_order_in_which_they_asked():
    served = []
    async with pool("by_order") as rewards, asyncio.TaskGroup() as group:
        for key in range(8):
            group.create_task(score(rewards, "nap")).add_done_callback(lambda _, key=key: served.append(key))
    assert served == list(range(8))


async def test_two_workers_share_the_work(tmp_path):
    """Two calls are under way at the same time, each in a worker of its own."""
    gate = tmp_path / "gate"
    async with pool("waits_for", workers=2) as rewards, asyncio.TaskGroup() as group:
        both = [group.create_task(score(rewards, str(gate))) for _ in range(2)]
        await until(lambda: at_work(rewards) == 2)
        gate.touch()
    assert len({task.result().reward for task in both}) == 2


async def test_a_slow_call_of_one_group_does_not_disturb_another(tmp_path):
    gate = tmp_path / "gate"
    async with pool("waits_for", workers=2) as rewards, asyncio.TaskGroup() as group:
        slow = group.create_task(score(rewards, str(gate)))
        await until(lambda: rewards._recorder.active_waits())
        for _ in range(10):
            await score(rewards, "")
        assert not slow.done()
        gate.touch()


# ---- cancellation


async def test_a_caller_in_a_cancelled_scope_leaves_no_stale_answer():
    async with pool("by_order") as rewards:
        before = only_worker().pid
        async with anyio.create_task_group() as group:
            group.start_soon(rewards.score, prompt(), trajectories("sleep"))
            await until(lambda: at_work(rewards, before))
            group.cancel_scope.cancel()
        assert (await score(rewards, "go")).reward == only_worker().pid != before


async def test_a_caller_cancelled_in_the_queue_takes_no_worker_with_it(tmp_path):
    gate = tmp_path / "gate"
    async with pool("waits_for") as rewards, asyncio.TaskGroup() as group:
        before = only_worker().pid
        first = group.create_task(score(rewards, str(gate)))
        queued = [group.create_task(score(rewards, "")) for _ in range(3)]
        await until(lambda: at_work(rewards, before))
        queued[0].cancel()
        queued[1].cancel()
        gate.touch()
        assert (await first).reward == before
        assert (await queued[2]).reward == before


@pytest.mark.parametrize("name", ["by_order", "judges"])
async def test_every_moment_of_a_cancellation(name):
    """Cancel after 0, 1, 2, ... turns of the loop: the pool serves the next caller every time."""
    async with pool(name) as rewards:
        for turns in range(25):
            task = asyncio.ensure_future(score(rewards, "sleep"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            async with asyncio.timeout(10):
                assert (await score(rewards, "go")).reward == only_worker().pid


# ---- closing


async def test_closing_while_callers_wait_and_work_fails_them_all():
    async with anyio.create_task_group() as group:
        errors = []

        async def call():
            try:
                await score(rewards, "sleep")
            except LifecycleError as error:
                errors.append(str(error))

        async with pool("by_order") as rewards:
            for _ in range(3):
                group.start_soon(call)
            await until(lambda: len(rewards._recorder.active_waits()) == 3)
    assert len(errors) == 3
    assert all("closed while" in error for error in errors)
    assert not children()


async def test_an_error_or_a_cancellation_in_the_block_leaves_nothing():
    with pytest.raises(ZeroDivisionError):
        async with pool("length", workers=2):
            _ = 1 / 0
    with anyio.move_on_after(0.2):
        async with pool("length", workers=2):
            await anyio.sleep_forever()

    async def forever():
        async with pool("sleeps") as rewards:
            await score(rewards)

    task = asyncio.ensure_future(forever())
    await until(children)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not children()


async def test_a_cancelled_opening_leaves_nothing(tmp_path):
    file = tmp_path / "slow_import.py"
    file.write_text("import time\ntime.sleep(60)\ndef f(completions): pass\n")
    with anyio.move_on_after(0.3) as scope:
        async with pool_of([RewardSpec(f"{file}:f")], workers=2):
            raise AssertionError("opened")
    assert scope.cancelled_caught
    assert not children()


async def open_score_close():
    async with pool("length") as rewards:
        assert (await score(rewards, "abc")).reward == 3.0


async def test_many_cycles_leave_nothing():
    await open_score_close()
    gc.collect()
    me = psutil.Process()
    before = (me.num_fds(), threading.active_count(), len(asyncio.all_tasks()), children())
    for _ in range(25):
        await open_score_close()
    await asyncio.sleep(0)
    assert (me.num_fds(), threading.active_count(), len(asyncio.all_tasks()), children()) == before


def test_it_works_under_uvloop():
    async def run():
        me = psutil.Process()
        await open_score_close()
        before = me.num_fds()
        await open_score_close()
        async with pool("by_order", timeout_s=1.0) as rewards:
            with pytest.raises(RewardTimeout):
                await score(rewards, "sleep")
            assert (await score(rewards, "go")).reward == only_worker().pid
        await asyncio.sleep(0.01)
        assert me.num_fds() == before
        assert not children()

    uvloop.run(run())


# ---- deaths


@pytest.mark.parametrize("refused", [0, 1])
async def test_a_worker_killed_while_idle_is_replaced(refused, monkeypatch):
    """Also where for a moment no process can be started."""
    errors = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * refused

    def start(*arguments, begin=subprocess.Popen, **options):
        if errors:
            raise errors.pop()
        return begin(*arguments, **options)

    async with pool("by_order") as rewards:
        monkeypatch.setattr(subprocess, "Popen", start)
        before = only_worker()
        before.send_signal(signal.SIGKILL)
        await until(lambda: not alive(before.pid))
        assert (await score(rewards, "go")).reward not in (None, float(before.pid))


async def test_ctrl_c_reaches_us_and_not_the_workers():
    async with pool("length"):
        assert os.getpgid(only_worker().pid) != os.getpgid(0)
