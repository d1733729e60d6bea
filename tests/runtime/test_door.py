"""Runs that are fed by a ring: groups that never become whole, that cannot be trained, or that fail in the step."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from runtime_helpers import DRY, FED, REWARDS, ROOT, config_of, metrics_of, scored, start
from transport_records import draft_of, drop

from asyncrl import Runtime
from asyncrl.client import AsyncClient, Scored
from asyncrl.config.resolve import resolve
from asyncrl.errors import ConfigError, DivergenceError, RecordTooLarge, RewardError, RingDetached, RingFull, StallError
from asyncrl.records.check import Limits
from asyncrl.records.layout import Section
from asyncrl.records.write import plan
from asyncrl.runtime.door import DoorStatistics, ring_of, serve
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from asyncrl.types import FinishReason, Trajectory

RING = RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)
HALF_A_GROUP = """
import os, signal, sys
from asyncrl.client import Client, Scored
client = Client.attach(sys.argv[1], timeout=60, epoch=int(sys.argv[2]))
client.push(0, [Scored([4, 5], 1.0, [0, 1], [0, -1], prompt_length=1)], members=[0], group_size=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass
class Fed:
    runtime: Runtime
    ring: RecordRing
    counts: DoorStatistics
    name: str
    tasks: Any

    async def until_released(self, records: int) -> None:
        await self.until(lambda: self.ring.statistics().released == records)

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not holds():
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def fed(folder: Path, name: str, *overrides: str, ring: RingSettings = RING) -> AsyncIterator[Fed]:
    """A dry Runtime of our own that is fed from a ring; one step is one group."""
    config = config_of(folder, "rollout.groups_per_step=1", "train.max_steps=null", *overrides, base=DRY)
    counts = DoorStatistics()
    async with RecordRing(name, ring) as opened, Runtime(config, write=False) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, runtime, opened, counts)
            yield Fed(runtime, opened, counts, name, tasks)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("policy", "members", "partial", "incomplete"), [("drop", 2, 0, 1), ("partial", 2, 1, 0), ("partial", 1, 0, 1)]
)
async def test_an_incomplete_group_ends_when_its_time_is_up(
    tmp_path: Path, name: str, policy: str, members: int, partial: int, incomplete: int
) -> None:
    async with fed(tmp_path, name, "door.timeout_s=0.05", f"door.on_timeout={policy}") as f:
        reports = f.runtime.steps()
        async with await AsyncClient.attach(name) as client:
            numbers = [2, 0][:members]
            await client.push(7, [scored(reward=float(m)) for m in numbers], members=numbers, group_size=3)
            await f.until(lambda: f.counts.partial + f.counts.incomplete == 1)
            assert (f.counts.partial, f.counts.incomplete) == (partial, incomplete)
            if partial:
                report = await anext(reports)
                assert report.metrics["idle/environment"] > 0  # until the producer had brought it
                (group,) = report.groups
                assert [(t.member, t.group_size, t.reward) for t in group.trajectories] == [(0, 2, 0.0), (1, 2, 2.0)]
            await client.push(7, [scored(reward=1.0)], members=[1], group_size=3)  # too late
            await f.until_released(2)
        assert f.counts.submitted == partial


async def test_an_incomplete_group_can_end_the_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(StallError, match=r"members \[1\] of 2"):
        async with fed(tmp_path, name, "door.timeout_s=0.05", "door.on_timeout=error") as f:
            async with await AsyncClient.attach(name) as client:
                await client.push(7, [scored()], members=[0], group_size=2)
                await f.until(lambda: False)
    async with RecordRing(name, RING) as ring:  # what was not trained waits for the next run
        assert ring.statistics().replayed == 1
        drop(ring)


@pytest.mark.parametrize("killed", [False, True])
async def test_an_epoch_ends_with_its_last_producer(tmp_path: Path, name: str, killed: bool) -> None:
    async with fed(tmp_path, name, "door.reconnect_s=0") as f:
        async with await AsyncClient.attach(name, epoch=5) as other:
            if killed:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", HALF_A_GROUP, name, "6", env={**os.environ, "PYTHONPATH": str(ROOT)}
                )
                await process.wait()
            else:
                async with await AsyncClient.attach(name, epoch=6) as client:
                    await client.push(0, [scored()], members=[0], group_size=2)
            await other.push(0, [scored()], members=[0], group_size=2)
            await f.until(lambda: f.counts.incomplete == 1)
            await other.push(0, [scored()], members=[1], group_size=2)  # the other epoch goes on
            await f.until(lambda: f.counts.submitted == 1)
        assert f.counts.incomplete == 1
        await f.until_released(3)


async def test_a_producer_that_comes_back_with_its_epoch_completes_its_groups(tmp_path: Path, name: str) -> None:
    async with fed(tmp_path, name, "door.reconnect_s=1000") as f:
        for member in (0, 1):
            async with await AsyncClient.attach(name, epoch=6) as client:
                await client.push(0, [scored()], members=[member], group_size=2)
        await f.until_released(2)
        assert (f.counts.submitted, f.counts.incomplete) == (1, 0)


async def test_an_incomplete_group_that_is_too_old_for_any_step_ends(tmp_path: Path, name: str) -> None:
    async with fed(tmp_path, name, "rollout.max_staleness=0") as f:
        async with await AsyncClient.attach(name) as client:
            await client.push(0, [scored(version=0)], members=[0], group_size=2)
            await client.push(1, [scored(version=0)])
            await f.until(lambda: client.policy_version == 1)
            await f.until(lambda: f.counts.too_old == 1)
            await client.push(2, [scored(version=0)], members=[0], group_size=2)  # on arrival
            await f.until(lambda: f.counts.too_old == 2)
        await f.until_released(3)
        assert (f.counts.submitted, f.counts.incomplete) == (1, 0)


async def test_a_producer_that_is_faster_than_the_training_waits_at_its_full_ring(tmp_path: Path, name: str) -> None:
    """It must not push, and be dropped, as fast as the loop can read: that takes the time of the very step it waits for."""
    four = RingSettings(total_bytes=1 << 20, slots=4, payload_bytes=1 << 16)
    async with fed(tmp_path, name, "rollout.max_staleness=0", ring=four) as f:
        trainer, over = f.runtime.built.ports.trainer, anyio.Event()
        finish = trainer.finish_train_step

        async def late() -> Any:
            await over.wait()
            return await finish()

        trainer.finish_train_step = late  # type: ignore[method-assign]  # the real one, held up
        async with await AsyncClient.attach(name) as client:
            for group in range(4):  # the first one has the only place
                await client.push(group, [scored(version=0)], timeout=30)
            await f.until(lambda: f.counts.too_old == 3)
            with pytest.raises(RingFull):
                await client.push(4, [scored(version=0)], timeout=0.1)
            assert client.policy_version == 0
            over.set()
            await client.push(4, [scored(version=0)], timeout=30)  # goes in as the step ends, and is too old for any
            await f.until(lambda: f.counts.too_old == 4)
            await f.until_released(5)  # nobody has its place: at once
            await client.push(5, [scored(version=1)], timeout=30)
            await f.until(lambda: f.runtime.version == 2)
        assert (f.counts.submitted, f.counts.too_old) == (2, 4)


async def test_what_a_record_holds_lies_in_the_ring_until_it_is_packed(tmp_path: Path, name: str) -> None:
    """Packing copies it, once (tests/data/test_data_packing.py); what is reported of the step outlives the record. And a row is
    the very object that the door made of it: nothing on the way builds another one."""
    async with fed(tmp_path, name, "rollout.groups_per_step=2") as f:
        reports, made, intake = f.runtime.steps(), list[Trajectory](), f.runtime.intake
        check = intake.check

        def watched(trajectory: Trajectory, limits: Limits) -> None:
            made.append(trajectory)
            check(trajectory, limits)

        intake.check = watched  # type: ignore[method-assign]  # the real one, watched
        async with await AsyncClient.attach(name) as client:
            await client.push(0, [scored(), scored(reward=1.0)])
            await f.until(lambda: f.counts.submitted == 1)
            store = f.runtime.built.ports.store
            [group_id] = store._stored
            members = store.rows(group_id).group.trajectories
            assert store.ready() and list(map(id, members)) == list(map(id, made))
            [link] = f.ring._links.values()
            memory = np.frombuffer(link.segment.data, np.uint8)
            for column in ("tokens", "mask", "logprobs", "versions"):
                assert all(np.shares_memory(memory, getattr(t, column)) for t in members), column
            expected = [t.tokens.tolist() for t in members]
            await client.push(1, [scored(), scored(reward=1.0)])
            with anyio.fail_after(30):
                groups = (await anext(reports)).groups
        await f.until_released(2)
        found = next(group for group in groups if group.group_id == group_id)
        assert [t.tokens.tolist() for t in found.trajectories] == expected
        assert not any(np.shares_memory(memory, t.tokens) for t in found.trajectories)
        made.clear()
        del memory, members, link


async def test_groups_that_are_filtered_out_free_a_full_ring(tmp_path: Path, name: str) -> None:
    """No step comes between them: their release may not wait for one."""
    overrides = ("rollout.filter.dynamic_sampling=true", "rollout.filter.max_refills=100", "rollout.max_staleness=0")
    async with fed(
        tmp_path, name, *overrides, ring=RingSettings(total_bytes=1 << 20, slots=2, payload_bytes=1 << 16)
    ) as f:
        reports = f.runtime.steps()
        async with await AsyncClient.attach(name) as client:
            for group in range(12):
                await client.push(group, [scored(), scored()], timeout=30)  # equal rewards: no signal
            await client.push(12, [scored(), scored(reward=1.0)], timeout=30)
            with anyio.fail_after(30):
                assert (await anext(reports)).version == 1
        await f.until_released(13)


async def test_what_is_trained_after_the_door_was_left_is_released_all_the_same(tmp_path: Path, name: str) -> None:
    async with fed(tmp_path, name, "rollout.groups_per_step=2") as f:
        async with await AsyncClient.attach(name) as client:
            await client.push(0, [scored(), scored(reward=1.0)])
            await f.until(lambda: f.counts.submitted == 1)
        f.tasks.cancel_scope.cancel()
    # The Runtime trained it in its last, smaller step; the ring, closed after it, had nothing left to keep.


async def test_a_group_that_the_model_cannot_take_is_refused_with_all_its_members(tmp_path: Path, name: str) -> None:
    async with fed(tmp_path, name) as f:
        async with await AsyncClient.attach(name) as client:
            await client.push(0, [scored()], members=[0], group_size=2)
            await client.push(0, [scored(token=-3)], members=[1], group_size=2)
            await f.until(lambda: f.counts.refused == 1)
            assert re.match("group 0 of epoch [0-9]+: member 1: tokens holds -3;", f.counts.last_refusal)
            long = Scored([4] * 100, 0.0, [0] + [1] * 99, [0] + [-1] * 99, prompt_length=1)
            await client.push(1, [long])
            await f.until(lambda: f.counts.refused == 2)
            assert "member 0: a path has 100 tokens; this run takes 1 to 72" in f.counts.last_refusal
            await client.push(2, [replace(scored(), reward=None)])  # no function of the run scores it
            await f.until(lambda: f.counts.refused == 3)
            assert "came without a reward" in f.counts.last_refusal
            with pytest.raises(RecordTooLarge, match="a ring holds"):
                await client.push(3, [Scored([4] * 20_000, 0.0, prompt_length=1)])
        await f.until_released(4)
        assert f.counts.submitted == 0


GOOD: dict[str, Any] = {
    "group_size": 1,
    "prompt_length": 1,
    "tokens": np.array([4, 5, 6], np.int32),
    "mask": np.array([False, True, True]),
    "logprobs": np.array([0, -1, -1], np.float32),
    "sampled_logprobs": np.array([0, -1, -1], np.float32),
    "versions": np.array([-1, 0, 0], np.int32),
    "temperature": 1.0,
    "finish_reason": FinishReason.STOP,
    "reward": 0.5,
}
RAW = {
    "deep": b"[" * 5000 + b"]" * 5000,
    "nested": b'{"a":' + b"[" * 100 + b"]" * 100 + b"}",
    "surrogate": b'{"a": "\\ud800"}',
    "integer": b'{"a": 1' + b"0" * 30 + b"}",
}
NAMED_BY_NUMBERS = {
    Section.COMPONENTS: [[0.5, 1.0]],
    Section.COMPONENT_NAMES: b'{"names": ["a", 1], "held": [["a", 1]]}',
}


def column(*values: float) -> Any:
    return np.array(values, np.float32)


async def test_a_record_that_cannot_be_trained_leaves_the_ring_and_is_named(tmp_path: Path, name: str) -> None:
    """By writers that check nothing themselves. None of them is given to the next run again."""
    bad: list[tuple[dict[str, Any], dict[int, Any], str]] = [
        *(({"temperature": t}, {}, "member 0: temperature is") for t in (0.0, -1.0, math.nan, math.inf, 9e-7, 1e38)),
        ({"logprobs": column(0, -1, 0.5)}, {}, r"member 0: logprobs\[2\] is 0.5 at a trained token"),
        ({"logprobs": column(0, math.nan, -1)}, {}, r"member 0: logprobs\[1\] is nan"),
        ({"sampled_logprobs": column(0, -math.inf, -1)}, {}, r"member 0: sampled_logprobs\[1\] is -inf"),
        ({"logprobs": column(0, -1e4, -1)}, {}, r"member 0: logprobs\[1\] is -10000"),
        ({"versions": np.array([-1, 0, -5], np.int32)}, {}, "member 0: versions holds -5"),
        ({"versions": np.array([-1, 0, 9], np.int32)}, {}, "by version 9, but this run is at.* from an earlier run"),
        ({"routed_experts": np.zeros((3, 1, 1), np.int8)}, {}, "member 0: routed_experts is given, but this run rep"),
        ({"prompt_length": 0}, {}, "member 0: prompt_length is 0 of 3 tokens"),
        ({"prompt_length": 4}, {}, "member 0: prompt_length is 4 of 3 tokens"),
        ({"mask": np.array([True, True, True])}, {}, r"member 0: mask\[0\] trains a token of the prompt"),
        ({"mask": np.array([False, False, False])}, {}, "member 0: mask trains no token"),
        ({"tokens": np.array([4, 5, -1], np.int32)}, {}, "member 0: tokens holds -1"),
        ({}, {Section.ADVANTAGES: [column(0, 1, 1)]}, "it holds advantages, which this run does not use"),
        (
            {},
            {Section.REFERENCE_LOGPROBS: [column(0, -1, -1)]},
            "it holds reference_logprobs, which this run does not use",
        ),
        ({}, {Section.REWARDS: [math.inf]}, "member 0: reward is inf"),
        ({}, {Section.REWARDS: [1e308]}, r"member 0: reward is 1e\+308"),
        ({}, {Section.REWARDS: [math.nan]}, "without a reward"),
        ({}, NAMED_BY_NUMBERS, "member 0: components holds the name 1"),
        ({}, {Section.METADATA: [RAW["integer"]]}, "member 0: an integer of texts or metadata has more than 64 bits"),
        ({}, {Section.GROUP_METADATA: RAW["nested"]}, "the group's metadata: texts or metadata are nested more than"),
        ({}, {Section.GROUP_METADATA: RAW["surrogate"]}, "the group's metadata: a text holds the lone surrogate"),
        ({}, {Section.METADATA: [RAW["deep"]]}, "METADATA is not valid JSON"),
        ({}, {Section.METADATA: [RAW["nested"]]}, "member 0: texts or metadata are nested more than 64 levels"),
        ({}, {Section.METADATA: [RAW["surrogate"]]}, r"member 0: a text holds the lone surrogate U\+D800"),
    ]
    async with fed(tmp_path, name) as f:
        producer = await AsyncProducer.attach(name)
        for group, (changes, extra, words) in enumerate(bad):
            trajectory = Trajectory(**{"group_id": group, "member": 0, **GOOD, **changes})
            await producer.put(plan(draft_of([trajectory], epoch=5, extra=extra)), timeout=30)
            await f.until_released(group + 1)
            assert re.match(f"group {group} of epoch 5: .*{words}", f.counts.last_refusal), f.counts.last_refusal
        await producer.close()
        assert (f.counts.submitted, f.counts.refused, f.ring.statistics().outstanding) == (0, len(bad), 0)


@asynccontextmanager
async def a_run(
    folder: Path, name: str, *overrides: str, base: Any = DRY
) -> AsyncIterator[tuple[Runtime, RecordRing, DoorStatistics]]:
    """What `asyncrl run` does with `door.ring`, in this process and, unless `base` says otherwise, without a model."""
    config = config_of(folder, f"door.ring={name}", "door.ring_mib=2", "door.producer_mib=1", *overrides, base=base)
    async with ring_of(config) as ring, Runtime(config, write=False) as runtime:
        runtime.start("door", serve, runtime, ring, counts := DoorStatistics())
        yield runtime, ring, counts


async def test_what_a_run_did_not_train_waits_for_the_next_one(tmp_path: Path, name: str) -> None:
    seen, left = [], []
    async with AsyncExitStack() as producers:
        for turn in range(3):
            async with a_run(tmp_path, name, "train.max_steps=1", "rollout.groups_per_step=1") as (runtime, *_):
                if turn == 0:
                    client = await producers.enter_async_context(await AsyncClient.attach(name))
                    for group in range(3):
                        await client.push(group, [scored(reward=float(group))])
                reports = runtime.steps()
                with anyio.fail_after(60):
                    summary = await runtime.run()
                assert summary.version == 1
                seen += [t.reward async for report in reports for g in report.groups for t in g.trajectories]
                left.append(client.statistics().records_held)
    assert (sorted(seen), left) == ([0.0, 1.0, 2.0], [2, 1, 0])


async def test_the_time_limit_trains_what_is_here(tmp_path: Path, name: str) -> None:
    """The next group may never come: a step of fewer groups is the last one."""
    limits = ("train.max_steps=null", "train.time_limit_s=0.1", "rollout.groups_per_step=2")
    async with a_run(tmp_path, name, *limits) as (runtime, _, counts):
        async with await AsyncClient.attach(name) as client:
            await client.push(0, [scored()])
            with anyio.fail_after(60):
                while not counts.submitted:
                    await anyio.lowlevel.checkpoint()
                summary = await runtime.run()
            assert (summary.version, summary.books.trained, client.statistics().records_held) == (1, 1, 0)


async def test_without_prompts_and_without_a_ring_there_is_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train is not set.*or door\.ring"):
        resolve(config_of(tmp_path, base={key: value for key, value in FED.items() if key != "door"}))
    with pytest.raises(ConfigError, match=r"door\.ring is not set"):
        ring_of(config_of(tmp_path, base=DRY))


async def test_a_run_from_yaml_is_fed_by_other_processes_to_its_last_step(tmp_path: Path, name: str) -> None:
    run = start(tmp_path, FED, f"door.ring={name}", "train.max_steps=2", "rollout.max_staleness=1")
    try:
        async with await AsyncClient.attach(name, timeout=200) as client:
            await client.push(99, [Scored([4, 600], 0.0, prompt_length=1)])  # of another tokenizer
            group = 0
            while client.policy_version < 2:
                version = max(0, client.policy_version)
                with contextlib.suppress(RingFull, RingDetached):  # behind the last step
                    await client.push(group, [scored(6 + m, float(m), version) for m in range(3)], timeout=1)
                group += 1
        assert run.wait() == 0
    except BaseException:
        run.kill()
        raise
    assert f"record ring {name!r}" in run.output
    assert re.search("door: refused: group 99 of epoch [0-9]+: member 0: tokens holds 600", run.output)
    lines = metrics_of(tmp_path / "runs/run")
    assert [line["step"] for line in lines] == [1, 2]
    async with RecordRing(name, RING) as ring:  # what came behind the last step waited for the next run
        drop(ring)


EPOCH = 5
QUICKLY_FED = FED | {"door": {"producer_records": 16}}
# Of a policy that is far from the reference this KL is infinite. No two groups share a microbatch.
KL = ("algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3", "train.tokens_per_microbatch=20")
PROMPT = [4] * 12


def far(reward: float) -> Scored:
    """At a temperature that makes a difference of logits a million times as large. Its tokens do not fit beside those of `good`."""
    return Scored([*PROMPT, 6, 5, 6, 5, 6, 5, 6, 5], reward, prompt_length=12, temperature=1e-6)


def good() -> list[Scored]:
    return [Scored([*PROMPT, 5, 6, 5, 6, 5, 6, 5, 6 + i], float(i), prompt_length=12) for i in range(2)]


async def held(name: str) -> int:
    """Records that the next run of this ring would train; they are dropped."""
    async with RecordRing(name) as ring:
        left = ring.statistics().replayed
        drop(ring)
    return left


async def test_a_group_whose_loss_is_not_finite_is_dropped_by_name_and_the_run_ends_by_itself(
    tmp_path: Path, name: str
) -> None:
    async with a_run(tmp_path, name, "train.max_steps=2", *KL, base=QUICKLY_FED) as (runtime, ring, _):
        async with await AsyncClient.attach(name, epoch=EPOCH) as client:
            for group in (0, 1):  # the policy is the reference until the first step
                await client.push(group, good())
            await client.push(2, [far(0.0), far(1.0)])
            for group in (3, 4):
                await client.push(group, good())
            with anyio.fail_after(60):
                summary = await runtime.run()
        assert summary.version == 2 and summary.books.trained == 4
        [reason] = [reason for reason in summary.reasons if "failed in the step" in reason]
        assert f"(group 2 of epoch {EPOCH}) failed in the step (DivergenceError: the loss" in reason
        assert ring.statistics().outstanding == 0


async def test_the_second_one_ends_the_run_and_neither_is_met_by_the_next_one(tmp_path: Path, name: str) -> None:
    said = rf"\(group 3 of epoch {EPOCH}\) failed in the step .*too: group \d+ \(group 2 of epoch {EPOCH}\) failed"
    with pytest.raises(DivergenceError, match=said):
        async with a_run(tmp_path, name, "train.max_steps=9", *KL, base=QUICKLY_FED) as (runtime, *_):
            async with await AsyncClient.attach(name, epoch=EPOCH) as client:
                for group in (0, 1):
                    await client.push(group, good())
                await client.push(2, [far(0.0), far(1.0)])
                await client.push(4, good())
                await client.push(3, [far(0.0), far(1.0)])
                with anyio.fail_after(60):
                    await runtime.run()
    assert await held(name) == 1  # group 4


async def test_a_record_that_the_runs_reward_function_cannot_score(tmp_path: Path, name: str) -> None:
    """It asks for a column that the producer did not send: the first is refused by name, the second ends the run."""
    unscored = [Scored([4, 5, 6], None, [0, 1, 1], prompt_length=1)]
    words = rf"group 2 of epoch {EPOCH}: .*'answer'.*before it, group 0 of epoch {EPOCH}"
    with pytest.raises(RewardError, match=words):
        run = a_run(tmp_path, name, "train.max_steps=9", base=QUICKLY_FED | {"reward": f"{REWARDS}:share"})
        async with run as (runtime, ring, counts):
            async with await AsyncClient.attach(name, epoch=EPOCH) as client:
                await client.push(0, unscored)
                await client.push(1, unscored, metadata={"answer": "a"})
                with anyio.fail_after(60):
                    while counts.refused + counts.submitted < 2:
                        await anyio.lowlevel.checkpoint()
                    assert (counts.refused, counts.submitted, ring.statistics().outstanding) == (1, 1, 1)
                    assert f"group 0 of epoch {EPOCH}: " in counts.last_refusal and "'answer'" in counts.last_refusal
                    await client.push(2, unscored)
                    await runtime.run()
    assert await held(name) == 1
