"""Groups come over HTTP as Atropos sends them, from a stock environment server of the real package too, and train a run."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import numpy as np
import pytest
from runtime_helpers import ROOT, Process, embedded
from transport_records import drop

from asyncrl import Runtime, load_config
from asyncrl.client import AsyncClient, Scored
from asyncrl.config.schema import Config
from asyncrl.runtime.door import DoorStatistics
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra [http]")

from asyncrl.atropos.door import AtroposDoor, serve  # noqa: E402
from asyncrl.http.access import Address  # noqa: E402

RING = RingSettings(total_bytes=1 << 20, slots=16, payload_bytes=1 << 16)
ENVIRONMENT = ROOT / "examples" / "atropos_env.py"
# An interpreter that has atroposlib; it is heavy, so tools/atropos_step.py gives it an environment of its own.
ATROPOS = os.environ.get("ATROPOS_PYTHON") or (sys.executable if importlib.util.find_spec("atroposlib") else None)
M = -100


@asynccontextmanager
async def served(
    config: Config, counts: DoorStatistics, *, discard: bool = False
) -> AsyncIterator[tuple[Runtime, AtroposDoor]]:
    """`discard`: what comes behind the last step, which a next run would get."""
    name = f"atropos-{os.getpid()}"
    async with RecordRing(name, RING) as ring, Runtime(config, write=False) as runtime:
        async with anyio.create_task_group() as tasks:

            async def door_(*, task_status: anyio.abc.TaskStatus[AtroposDoor]) -> None:
                await serve(runtime, ring, at=Address(port=0), statistics=counts, task_status=task_status)

            yield runtime, await tasks.start(door_)
            await runtime.finish()  # no step can come any more: the door closes by itself
        if discard:
            drop(ring)
    assert not [path for path in os.listdir("/dev/shm") if name in path]


def group(*letters: int, logprobs: bool = True) -> dict[str, Any]:
    """Members that answer prompt [4, 17] with [letter, 5] (two tokens of the model of these tests)."""
    return {
        "tokens": [[4, 17, letter, 5] for letter in letters],
        "masks": [[M, M, letter, 5] for letter in letters],
        "scores": [float(letter == 4) for letter in letters],
        "inference_logprobs": [[1.0, 1.0, -2.5 - letter / 7, -3.25] for letter in letters] if logprobs else None,
        "env_id": None,
    }


async def test_groups_over_http_and_through_shared_memory_train_one_run(tmp_path: Path) -> None:
    counts = DoorStatistics()
    async with served(embedded(tmp_path), counts) as (runtime, door), aiohttp.ClientSession() as http:
        reports = runtime.steps()
        async with await AsyncClient.attach(f"atropos-{os.getpid()}") as client:
            scored = [
                Scored([4, 17, x, 5], float(x == 4), [0, 0, 1, 1], [0, 0, -2, -3], prompt_length=2) for x in (4, 6)
            ]
            await client.push(0, scored)
        with anyio.fail_after(60):
            async with http.post(f"{door.url}/scored_data", json=group(4, 6, 7)) as reply:
                assert (reply.status, (await reply.json())["status"]) == (200, "received")
            first = await anext(reports)
            async with http.post(
                f"{door.url}/scored_data_list", json=[group(4, 6), group(4, 7, logprobs=False)]
            ) as reply:
                assert reply.status == 200
            second = await anext(reports)
            while door.groups.held():  # released: the books of the ring close with the step
                await anyio.lowlevel.checkpoint()
            async with http.get(f"{door.url}/status-env", json={"env_id": 0}) as reply:
                status = await reply.json()
        assert (status["current_step"], status["queue_size"]) == (2, 0)
        by_size = {len(g.trajectories): g for g in first.groups}
        assert sorted(by_size) == [2, 3]  # one from each door
        for trajectory, letter in zip(by_size[3].trajectories, (4, 6, 7), strict=True):
            assert trajectory.tokens.tolist() == [4, 17, letter, 5]
            assert trajectory.logprobs.tolist() == [0, 0, float(np.float32(-2.5 - letter / 7)), -3.25]
            assert (trajectory.versions.tolist(), trajectory.reward) == ([-1, -1, 0, 0], float(letter == 4))
        assert all(
            math.isfinite(value)
            for report in (first, second)
            for value in (report.result.loss, report.result.grad_norm)
        )
        assert first.result.tokens == 10 and second.result.tokens == 8
        assert [t.oldest_version for g in second.groups for t in g.trajectories] == [1] * 4
    assert (counts.submitted, counts.refused, counts.too_old) == (4, 0, 0)
    with pytest.raises(OSError):
        await anyio.connect_tcp("127.0.0.1", urlsplit(door.url).port or 0)


def ends_well(server: Process) -> None:
    """It was told that the run is over: no stack trace, no retries."""
    try:
        assert server.wait(60) == 0, server.output[-4000:]
    finally:
        server.kill()


@pytest.mark.skipif(ATROPOS is None, reason="needs atroposlib: tools/atropos_step.py")
async def test_a_stock_environment_server_of_atroposlib_trains_a_step_with_its_logprobs_intact(tmp_path: Path) -> None:
    counts, tokenizer = DoorStatistics(), tmp_path / "tokenizer"
    overrides = ["rollout.groups_per_step=4", f"run.dir={tmp_path}", "run.name=repeat"]
    config = load_config([ROOT / "examples" / "agent_loop.yaml"], overrides)
    async with AsyncExitStack() as exits, served(config, counts, discard=True) as (runtime, door):
        runtime.tokenizer.save_pretrained(tokenizer)
        reports = runtime.steps()
        flags = {"tokenizer_name": str(tokenizer), "rollout_server_url": door.url, "use_wandb": "false"}
        arguments = [part for name, value in flags.items() for part in (f"--env.{name}", value)]
        server = Process(
            tmp_path, "serve", *arguments, program=(str(ENVIRONMENT),), python=str(ATROPOS), HF_HUB_OFFLINE="1"
        )
        exits.callback(ends_well, server)
        try:
            with anyio.fail_after(120):
                report = await anext(reports)
        except TimeoutError:
            raise AssertionError(server.output[-4000:]) from None
        names = runtime.tokenizer.convert_ids_to_tokens
        assert len(report.groups) == 4 and report.version == 1
        for trajectory in [t for g in report.groups for t in g.trajectories]:
            letter, count, equals, *answer = names(trajectory.tokens.tolist())
            assert (trajectory.prompt_length, equals, len(answer)) == (3, "=", int(count))
            assert trajectory.mask.tolist() == [False] * 3 + [True] * len(answer)
            expected = np.float32([0, 0, 0] + [math.log(0.125 + 0.5 * (a == letter)) for a in answer])
            assert trajectory.logprobs.tolist() == expected.tolist()  # to the last bit
            assert trajectory.reward == answer.count(letter) / int(count)
        assert report.result.tokens == sum(int(t.mask.sum()) for g in report.groups for t in g.trajectories)
        assert report.result.grad_norm > 0 and door.groups.statistics.refused == 0
    assert counts.refused == 0 and counts.submitted >= 4
