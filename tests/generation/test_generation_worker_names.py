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
from asyncrl.generation.worker.names import remove_orphaned_segments, segment_name
from asyncrl.transport.memory import segment
from asyncrl.transport.memory.segment import Segment, parts_of, path_of

NODE = """
import asyncio, sys
from asyncrl.generation.worker import names
from asyncrl.transport.memory import segment
names.DIRECTORY = segment.DIRECTORY = sys.argv.pop(1)
from asyncrl.generation.worker.names import segment_name
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings
from transport_records import planned

def put(name):
    with Producer.attach(name) as producer:
        producer.put(planned(0))
        producer.put(planned(1))

async def main(user_ring):
    weights = segment.Segment.create(segment_name(), 4096)
    async with RecordRing(user_ring, RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 14)) as ring:
        await asyncio.to_thread(put, user_ring)
        assert (await ring.get()).record  # one that was taken, and one that was not
        print(weights.name, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(sys.argv[1]))
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


def node(ring: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return living(NODE, segment.DIRECTORY, ring)


def there(*asked: str) -> list[bool]:
    return [Path(path_of(name)).exists() for name in asked]


def test_names_differ_and_name_their_process() -> None:
    made = {segment_name() for _ in range(100)}
    assert len(made) == 100
    assert all(name.startswith(f"worker-weights-0.{os.getpid()}.") for name in made)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_segment_of_a_killed_node_goes_and_that_of_one_that_lives_stays(
    how: signal.Signals, user_ring: str
) -> None:
    """So does a user's ring whose owner is dead, with a record that nobody took, though its name begins as ours do."""
    with node(user_ring) as dead, node(f"{user_ring}-2") as alive:
        left, used = line(dead), line(alive)
        assert not remove_orphaned_segments()
        assert there(left, used, user_ring) == [True] * 3
        dead.kill()
        dead.wait()
        alive.send_signal(how if how == signal.SIGSTOP else 0)
        assert remove_orphaned_segments() == [left]
        assert there(left, used, user_ring) == [False, True, True]
        alive.kill()
        alive.wait()
        assert remove_orphaned_segments() == [used]
        assert len(parts_of(user_ring, "ring")) == 1


def test_what_is_damaged_goes_too_and_links_stay(tmp_path: Path) -> None:
    gone, kept = (segment_name() for _ in range(2))
    damaged, link = Path(path_of(gone)), Path(path_of(kept))
    other = tmp_path / "file"
    other.write_bytes(b"mine")
    damaged.write_bytes(b"\xff" * 100_000)
    link.symlink_to(other)
    assert remove_orphaned_segments() == [gone]
    assert [damaged.exists(), link.is_symlink(), other.read_bytes()] == [False, True, b"mine"]


def test_two_sweeps_at_once_remove_everything_once() -> None:
    segments = [Segment.create(segment_name(), 4096) for _ in range(20)]
    made = {each.name for each in segments}
    for each in segments:
        each.close(unlink=False)

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(*(asyncio.to_thread(remove_orphaned_segments) for _ in range(2))))

    first, second = asyncio.run(both())
    assert made == {*first, *second}
    assert not set(first) & set(second)
    assert there(*made) == [False] * 20
