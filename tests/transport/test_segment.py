"""Segments: whole under their name or not there, owned by flock, adopted after kill -9, and no room as an error with figures."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
from pathlib import Path

import pytest
from transport_helpers import child, finish, line, say

from asyncrl.errors import ArenaOwned, ConfigError, OutOfMemory, PlatformError, SegmentDamaged, TransportError
from asyncrl.transport.inventory import inventory
from asyncrl.transport.memory import segment
from asyncrl.transport.memory.segment import Segment, base_name, new_part, parts_of, path_of

OWNER = """
import sys
from asyncrl.transport.memory.segment import Segment
segment = Segment.create(sys.argv[1], 1 << 20)
segment.data[:5] = b"hello"
print("ready", flush=True)
sys.stdin.readline()
"""


def path(name: str) -> Path:
    return Path(path_of(name))


def test_the_name_appears_complete_and_goes_with_the_owner(name: str) -> None:
    def prepare(data: memoryview) -> None:
        assert not path(name).exists()
        data[:3] = b"abc"

    owner = Segment.create(name, 1000, prepare=prepare)
    status = path(name).stat()
    assert status.st_size == 4096 + len(owner.data) and status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= status.st_size  # allocated, not promised
    for second in (lambda: Segment.create(name, 1000), lambda: Segment.adopt(name)):
        with pytest.raises(ArenaOwned, match=f"owned by process {os.getpid()}"):
            second()
    looker = Segment.attach(name)
    assert bytes(looker.data[:3]) == b"abc"
    looker.close(unlink=True)  # it neither owns nor removes
    assert path(name).exists() and not owner.sealed
    looker = Segment.attach(name)
    owner.close(unlink=True)
    owner.close(unlink=True)
    assert not path(name).exists() and looker.sealed
    looker.close(unlink=False)
    with pytest.raises(FileNotFoundError):
        Segment.attach(name)


def test_after_kill_9_the_next_owner_adopts_what_is_there(name: str) -> None:
    owner = child(OWNER, name)
    assert line(owner) == "ready"
    owner.send_signal(signal.SIGSTOP)  # a stopped process is not a dead one
    with pytest.raises(ArenaOwned, match=f"process {owner.pid}"):
        Segment.adopt(name)
    owner.kill()
    finish(owner)
    with pytest.raises(TransportError, match="nobody owns it"):
        Segment.create(name, 1 << 20)
    adopted = Segment.adopt(name)
    assert (adopted.adopted, bytes(adopted.data[:5])) == (True, b"hello")
    adopted.close(unlink=True)


def test_the_name_of_an_owner_that_forgets_to_close_stays_for_the_next(name: str) -> None:
    owner = child(OWNER, name)
    line(owner)
    say(owner)
    assert finish(owner) == 0
    Segment.adopt(name).close(unlink=True)


def test_a_forked_child_holds_no_lock(name: str) -> None:
    owner, second = Segment.create(name, 4096), Segment.create(f"{name}-second", 4096)
    context = multiprocessing.get_context("fork")
    up, go = context.Event(), context.Event()

    def child() -> None:
        # A fork of the fork runs the same hook, which finds the segment closed.
        if (grandchild := os.fork()) == 0:
            os._exit(sum(each._fd >= 0 for each in segment._open_segments))
        clean = os.waitpid(grandchild, 0)[1] == 0 and owner._fd == second._fd == -1
        if not clean:
            os._exit(3)
        up.set()
        go.wait()

    process = context.Process(target=child)
    process.start()
    owner.close(unlink=False)
    assert up.wait(60)  # what runs at a fork has run in the child
    try:
        Segment.adopt(name).close(unlink=True)  # would be refused if the child still held the description
    finally:
        go.set()
        process.join()
        second.close(unlink=True)
    assert process.exitcode == 0


def test_no_room_is_found_at_creation_and_named(name: str) -> None:
    room = os.statvfs("/dev/shm")
    with pytest.raises(OutOfMemory, match=r"free of .*--shm-size"):
        Segment.create(name, room.f_blocks * room.f_frsize + (1 << 30))


def test_a_foreign_or_damaged_segment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Segment.create(name, 4096)
    good = path(name).read_bytes()
    owner.close(unlink=True)
    damaged = {
        "it has 3 bytes": good[:3],
        "begins with": b"x" * len(good),
        "layout version 9": good[:8] + struct.pack("<I", 9) + good[12:],
        "CRC32": good[:20] + b"\1" + good[21:],
        "do not make a file": good + bytes(4096),
    }
    for words, raw in damaged.items():
        path(name).write_bytes(raw)
        with pytest.raises(TransportError, match=words):
            Segment.attach(name)
        with pytest.raises(TransportError, match=f"{words}.*asyncrl shm clear") as raised:
            Segment.adopt(name)
        assert not isinstance(raised.value, SegmentDamaged) or f"clear {name} --drop-records" in str(raised.value)
    path(name).unlink()
    path(name).symlink_to("/dev/null")
    for open_it in (Segment.attach, Segment.adopt):
        with pytest.raises(TransportError, match="is a link or a folder, or of another user"):
            open_it(name)
    path(name).unlink()
    for bad in ("", "a/b", ".hidden", "x" * 121):
        with pytest.raises(ConfigError, match="shared-memory name"):
            Segment.create(bad, 1)
    monkeypatch.setattr(segment.sys, "platform", "darwin")
    with pytest.raises(PlatformError, match="Linux x86-64"):
        Segment.create(name, 1)


def test_parts_are_found_by_the_name_that_they_belong_to(name: str) -> None:
    parts = {kind: new_part(name, kind) for kind in ("ring", "damaged")}
    others = [f"{name}-1", new_part(f"{name}-1", "ring"), f"{name}.ring-1"]
    made = [Segment.create(each, 0) for each in (*parts.values(), *others)]
    assert parts_of(name, "ring") == [parts["ring"]] and parts_of(name, "ring", "damaged") == sorted(parts.values())
    assert {base_name(part) for part in parts.values()} == {name} and base_name(others[2]) == others[2]
    listed = [entry.name for entry in inventory() if entry.name.startswith(name)]
    assert listed == [name, f"{name}-1", others[2]]
    assert path(new_part("x" * 120, "ring"))  # however long the name
    for each in made:
        each.close(unlink=True)
