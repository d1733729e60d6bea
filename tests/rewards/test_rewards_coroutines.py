"""`async def` rewards: many calls in one worker's loop, each with its own deadline, its own end and its own tries."""

import asyncio
import pickle
import socket
import subprocess
import sys

import pytest
from rewards_helpers import FILE, at_work, only_worker, pool, prompt, score, trajectories, until

from asyncrl.concurrency.channel import encode
from asyncrl.errors import RewardCrash, RewardError, RewardTimeout
from asyncrl.rewards import pool as pool_module
from asyncrl.telemetry.recorder import Recorder

GROUPS = 8


async def components(rewards, word, group=0):
    """With the columns that the other forms ask for."""
    return (await score(rewards, word, group_id=group, ground_truth="", answer="")).components


@pytest.mark.parametrize("name", ["meets", "meets_verl", "meets_object", "meets_gym"])
async def test_calls_of_all_groups_share_the_loop_of_a_worker(name):
    """Every call waits for all others: one after the other they would never end."""
    async with pool(name, timeout_s=20) as rewards, asyncio.TaskGroup() as tasks:
        assert rewards.calls_at_once(8) == 64
        calls = [tasks.create_task(components(rewards, str(GROUPS), group)) for group in range(GROUPS)]
    assert len({tuple(call.result().values()) for call in calls}) == 1


async def test_no_more_of_them_than_is_asked_for():
    async with pool("crowd", concurrency=3) as rewards, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(components(rewards, "a", group)) for group in range(9)]
    assert max(call.result()["crowd"] for call in calls) == 3


async def test_the_bound_counts_completions_and_a_larger_group_runs_alone():
    async with pool("crowd", concurrency=4) as rewards, asyncio.TaskGroup() as tasks:
        sizes = [2, 2, 2, 5, 1, 1, 5, 2]
        calls = [
            tasks.create_task(rewards.score(prompt(group), trajectories(*["a"] * size)))
            for group, size in enumerate(sizes)
        ]
    # How many calls ran when this one began: at most two groups of two, and a group of five alone.
    together = [call.result()[0].components["crowd"] for call in calls]
    assert max(together) <= 2 and together[3] == together[6] == 1


async def test_one_that_misses_its_deadline_is_cancelled_alone():
    async with pool("judges", timeout_s=0.5) as rewards:
        before = await components(rewards, "go")
        with pytest.raises(RewardTimeout, match=r"did not answer within 0.5 s \(group 5\); it was cancelled"):
            await components(rewards, "sleep", 5)
        assert await components(rewards, "go") == before


async def test_one_that_does_not_end_takes_its_worker_along_and_the_others_are_asked_again(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(pool_module, "CANCEL_GRACE_S", 0.5)
    gate = tmp_path / "gate"
    async with pool("judges", timeout_s=5) as rewards, asyncio.TaskGroup() as tasks:
        before = await components(rewards, "go")
        deaf = tasks.create_task(components(rewards, "deaf", 1))
        await until(lambda: at_work(rewards) == 1)
        deaf.cancel()
        other = tasks.create_task(components(rewards, str(gate), 2))
        await until(lambda: "the call is sent again" in caplog.text)
        gate.touch()
    assert other.result() != before
    assert "and did not end when it was cancelled" in caplog.text


async def test_a_crash_names_who_was_there_and_fails_the_one_alone_that_crashes(tmp_path, caplog):
    gate = tmp_path / "gate"
    async with pool("judges", timeout_s=20) as rewards, asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(components(rewards, str(gate), group)) for group in range(2)]
        await until(lambda: at_work(rewards) == 2)
        gate_opens = tasks.create_task(until(lambda: caplog.text.count("the call is sent again") == 3))
        gate_opens.add_done_callback(lambda _: gate.touch())
        with pytest.raises(
            RewardCrash, match=r"'judges' crashed .group 7.: .* exited with status 7 and is being replaced$"
        ):
            await components(rewards, "exit", 7)
    assert all(other.result()["judges"] is not None for other in others)
    assert "the worker also ran reward 'judges' of group 0, reward 'judges' of group 1; the call is" in caplog.text


async def test_a_call_that_is_sent_again_after_a_crash_shares_its_worker_with_no_other(tmp_path, caplog, monkeypatch):
    """It may be the one that crashes: others in its worker would be lost once more, and be blamed."""
    gate, gate_of_start = tmp_path / "gate", asyncio.Event()
    async with pool("judges", timeout_s=20, workers=2) as rewards, asyncio.TaskGroup() as tasks:

        def call(word, group):
            return tasks.create_task(components(rewards, word, group))

        start = rewards._start

        async def start_later():
            await gate_of_start.wait()
            return await start()

        monkeypatch.setattr(rewards, "_start", start_later)
        call(str(gate), 0)
        await until(lambda: at_work(rewards) == 1)
        running = call(str(gate), 1)
        await until(lambda: at_work(rewards) == 2)
        crashing = asyncio.create_task(components(rewards, "exit", 7))
        await until(lambda: caplog.text.count("the call is sent again") == 2)
        # Both wait for the worker that lives, which gets no further call.
        await until(lambda: rewards._reserved is not None)
        late = call("go", 2)
        gate.touch()
        await asyncio.wait([crashing])
        gate_of_start.set()
    with pytest.raises(RewardCrash, match=r"'judges' crashed .group 7.: .* and is being replaced$"):
        await crashing
    assert late.result() != running.result()


async def test_a_function_that_is_not_async_stops_the_coroutines_and_their_clocks(tmp_path):
    gate = tmp_path / "gate"
    async with pool("judges", "blocks", timeout_s=2) as rewards, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(components(rewards, str(gate)))
        await until(lambda: at_work(rewards) == 1)
        for _ in range(6):  # 2.4 s
            await components(rewards, "block")
        gate.touch()
        assert (await waiting)["judges"] == only_worker().pid


async def test_failed_calls_are_tried_again_if_they_are_coroutines():
    class AtOnce:
        def uniform(self, low, high):
            return 0.0

    recorder = Recorder()
    async with pool("flaky", recorder=recorder, retries=2) as rewards:
        rewards._jitter = AtOnce()
        assert await components(rewards, "a") == {"flaky": 3.0}
    assert recorder.drain()["reward/flaky/retries"] == 2
    async with pool("flaky", recorder=recorder, retries=1) as rewards:
        rewards._jitter = AtOnce()
        with pytest.raises(RewardError, match="ConnectionError: answer 2: 429"):
            await components(rewards, "a")
    async with pool("raises", recorder=recorder, retries=2) as rewards:
        with pytest.raises(RewardError, match="KeyError"):
            await components(rewards, "a")
        assert rewards.calls_at_once(8) == 1
    assert "reward/raises/retries" not in recorder.drain()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_worker_ends_in_good_order_with_a_coroutine_under_way_or_cancelled_before_it_began(cancelled):
    """It reads a call and its cancellation together, as after a blocking call. The run kills a worker that does not reply."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "asyncrl.rewards.worker", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as worker, ours:
        theirs.close()
        load = {"path": [], "functions": [f"{FILE}:meets"], "columns": []}
        call = {"function": 0, "arguments": {"completions": ["2"]}, "state": {}, "completions": 1}
        ours.sendall(encode({"id": 0}, pickle.dumps(load)))
        assert ours.recv(1 << 16)
        ours.sendall(encode({"id": 1}, pickle.dumps(call)) + (encode({"id": 1, "cancel": True}) if cancelled else b""))
        if cancelled:
            ours.settimeout(60)
            assert b"CancelledError" in ours.recv(1 << 16)
        ours.close()
        assert (worker.communicate()[1], worker.returncode) == (b"", 0)
