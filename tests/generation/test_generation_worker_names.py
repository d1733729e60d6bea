"""Segments of workers: their names, and the sweep after a node that was killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transport_helpers import line, living

from asyncrl.generation.worker import names
from asyncrl.generation.worker.names import segment_name, sweep
from asyncrl.transport.memory import segment
from asyncrl.transport.memory.segment import Segment, parts_of, path_of

NODE = """
import asyncio, sys
from asyncrl.generation.worker import names
from asyncrl.transport.memory import segment
names.DIRECTORY = segment.DIRECTORY = sys.argv.pop(1)
from asyncrl.generation.worker.names import segment_name
from asyncrl.transport.queues.tensor_queue import share_queue
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from transport_records import planned
import numpy as np

def put(name):
    with Producer.attach(name) as producer:
        producer.put(planned(0))
        producer.put(planned(1))

async def main(results):
    requests = segment_name("requests", 1)
    settings = RingSettings(size=1 << 20, slots=8, ring_bytes=1 << 14)
    async with RecordRing(results, settings) as ring, share_queue(requests, 4, 1 << 16) as queue:
        await queue.put({"ids": np.arange(3)})
        await asyncio.to_thread(put, results)
        assert not sys.argv[2:] or (await ring.get()).record  # one that was taken, and one that was not
        print(results, requests, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(sys.argv[1] or segment_name("results", 0)))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every run with workers on this machine sweeps /dev/shm as it starts: here is another folder of the same file system."""
    own = f"/dev/shm/names-of-{os.getpid()}"
    os.mkdir(own)
    monkeypatch.setattr(names, "DIRECTORY", own)
    monkeypatch.setattr(segment, "DIRECTORY", own)
    yield own
    shutil.rmtree(own)


@pytest.fixture
def user_ring() -> str:
    """A name that a user might have given to a ring."""
    return f"worker-{uuid.uuid4().hex[:8]}"


def node(*arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return living(NODE, segment.DIRECTORY, *arguments)


def there(*asked: str) -> list[bool]:
    return [Path(path_of(name)).exists() for name in asked]


def test_names_differ_and_say_whose_they_are() -> None:
    made = {segment_name("requests", 1) for _ in range(100)}
    assert len(made) == 100
    assert all(name.startswith(f"worker-requests-1.{os.getpid()}.") for name in made)
    for kind, number in (("Requests", 0), ("", 0), ("a-b", 0), ("requests", -1)):
        with pytest.raises(ValueError, match="small letters and a number from 0"):
            segment_name(kind, number)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_segments_of_a_killed_node_go_and_those_of_one_that_lives_stay(how: signal.Signals) -> None:
    with node("") as dead, node("") as alive:
        left, used = line(dead).split(), line(alive).split()
        assert not sweep()
        assert there(*left, *used) == [True] * 4
        dead.kill()
        dead.wait()
        alive.send_signal(how if how == signal.SIGSTOP else 0)
        assert set(left) <= set(sweep())
        assert there(*left, *used) == [False, False, True, True]
        assert not sweep()
        alive.kill()
        alive.wait()
        assert set(used) <= set(sweep())


def test_a_users_ring_with_records_that_nobody_took_stays(user_ring: str) -> None:
    """Its owner is dead as well, and its name begins as ours do."""
    with node(user_ring, "take") as dead:
        results, requests = line(dead).split()
        assert results == user_ring
        dead.kill()
        dead.wait()
    assert requests in sweep()
    assert there(results, requests) == [True, False]
    assert len(parts_of(user_ring, "ring")) == 1


def test_what_is_damaged_goes_too_and_links_stay(tmp_path: Path) -> None:
    gone, kept = (segment_name("results", number) for number in (0, 1))
    damaged, link = Path(path_of(gone)), Path(path_of(kept))
    other = tmp_path / "file"
    other.write_bytes(b"mine")
    damaged.write_bytes(b"\xff" * 100_000)
    link.symlink_to(other)
    assert sweep() == [gone]
    assert [damaged.exists(), link.is_symlink(), other.read_bytes()] == [False, True, b"mine"]


def test_two_sweeps_at_once_remove_everything_once() -> None:
    segments = [Segment.create(segment_name("requests", number), 4096) for number in range(20)]
    made = {each.name for each in segments}
    for each in segments:
        each.close(unlink=False)

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(asyncio.to_thread(sweep), asyncio.to_thread(sweep)))

    first, second = asyncio.run(both())
    assert made == {*first, *second}
    assert not set(first) & set(second)
    assert there(*made) == [False] * 20
