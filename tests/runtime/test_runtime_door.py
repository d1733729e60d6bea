"""Another process pushes scored groups through shared memory, and the Runtime trains them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from runtime_helpers import REAL, ROOT, config_of

from asyncrl import Runtime
from asyncrl.client import AsyncClient, Scored
from asyncrl.config.schema import Config
from asyncrl.runtime.door import DoorStatistics, serve
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

RING = RingSettings(size=1 << 20, slots=16, ring_bytes=1 << 16)

PRODUCER = """
import sys
from asyncrl.client import Client, Scored
with Client.attach(sys.argv[1], timeout=60) as client:
    for group in range(int(sys.argv[2])):
        for member in (1, 0):  # one by one, out of order
            scored = Scored(tokens=[4, 5, 6 + member], prompt_length=1, logprobs=[0, -1, -1], reward=float(member),
                            mask=[0, 1, 1], versions=[-1] + 2 * [max(0, client.policy_version)])
            client.push(group, [scored], members=[member], group_size=2, timeout=60)
print("pushed", flush=True)
"""


@pytest.fixture
def name() -> str:
    return f"door-{os.getpid()}"


def embedded(folder: Path) -> Config:
    """As a program's own loop has it: no prompts, no rewards, no end."""
    tree: dict[str, Any] = {k: v for k, v in REAL.items() if k != "reward"}
    tree["data"] = {"max_prompt_tokens": REAL["data"]["max_prompt_tokens"]}
    tree["train"] = {k: v for k, v in REAL["train"].items() if k != "max_steps"}
    return config_of(folder, "rollout.groups_per_step=2", base=tree)


async def test_a_producer_process_feeds_the_training_and_reads_its_version(tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    counts = DoorStatistics()
    async with RecordRing(name, RING) as ring, Runtime(embedded(tmp_path), write=False) as runtime:
        steps = runtime.steps()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, runtime, ring, counts)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PRODUCER, name, "6", stdout=asyncio.subprocess.PIPE, env=environment
            )
            seen = []
            with anyio.fail_after(60):
                async for report in steps:
                    seen += [sorted(t.reward for t in group.trajectories) for group in report.groups]
                    if len(seen) == 6:
                        break
            out, _ = await process.communicate()
            assert (process.returncode, out) == (0, b"pushed\n")
            async with await AsyncClient.attach(name) as client:
                assert client.policy_version == runtime.version == 3
                await client.push(0, [Scored(tokens=[4, 5], prompt_length=1, reward=None)])  # nobody scores it here
                with anyio.fail_after(10):
                    while not counts.refused:
                        await anyio.lowlevel.checkpoint()
            assert "came without a reward" in counts.last_refusal
            summary = await runtime.finish()
        assert seen == [[0.0, 1.0]] * 6
        assert (counts.submitted, counts.too_old, summary.books.trained) == (6, 0, 6)
        s = ring.statistics()
        assert (s.outstanding, s.released, s.duplicates) == (0, 13, 0)
    assert not [path for path in os.listdir("/dev/shm") if name in path]
