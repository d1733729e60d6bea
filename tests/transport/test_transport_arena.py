"""Arena: ownership by flock, adoption after kill -9, generations, leases, and no room as an error with figures."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import struct
import weakref
from pathlib import Path

import numpy as np
import pytest
from transport_helpers import child, finish, line, say

from asyncrl.errors import (
    ArenaOwned,
    ConfigError,
    LifecycleError,
    OutOfMemory,
    PlatformError,
    StaleHandle,
    TransportError,
)
from asyncrl.transport.memory import segment
from asyncrl.transport.memory.arena import Arena
from asyncrl.transport.memory.extents import Extents
from asyncrl.transport.memory.handles import Handle

OWNER = """
import sys
from asyncrl.transport.memory.arena import Arena
arena = Arena.create(sys.argv[1], 1 << 20)
block = arena.allocate(1000, tag=7)
arena.bytes_of(block)[:5] = b"hello"
gone = arena.allocate(64); arena.free(gone)
print("ready", flush=True)
sys.stdin.readline()
if len(sys.argv) > 2: arena.segment.keep_at_exit(True)
"""


def path(name: str) -> Path:
    return Path("/dev/shm") / f"asyncrl.{name}"


def test_the_name_appears_complete_and_goes_with_the_owner(name: str) -> None:
    with Arena.create(name, 1000) as arena:
        status = path(name).stat()
        assert status.st_size == arena.segment.geometry.total and status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 >= status.st_size  # allocated, not promised
        with pytest.raises(ArenaOwned, match=f"owned by process {os.getpid()}"):
            Arena.create(name, 1000)
        with pytest.raises(ArenaOwned, match="owned by process"):
            Arena.adopt(name)
        assert arena.statistics().tenure == 1
    assert not path(name).exists()
    arena.close()
    with pytest.raises(LifecycleError, match="is closed"):
        arena.allocate(1)
    with pytest.raises(FileNotFoundError):
        Arena.attach(name)


def test_after_kill_9_the_next_owner_adopts_what_is_there(name: str) -> None:
    owner = child(OWNER, name)
    assert line(owner) == "ready"
    with pytest.raises(ArenaOwned, match=f"process {owner.pid}"):
        Arena.create_or_adopt(name, 1 << 20)
    owner.send_signal(signal.SIGSTOP)  # a stopped process is not a dead one
    with pytest.raises(ArenaOwned):
        Arena.adopt(name)
    owner.kill()
    finish(owner)
    with pytest.raises(TransportError, match="nobody owns it"):
        Arena.create(name, 1 << 20)
    with Arena.create_or_adopt(name, 5) as arena:
        (block,) = arena.blocks()
        assert (block.size, block.tag, bytes(arena.bytes_of(block)[:5])) == (1000, 7, b"hello")
        s = arena.statistics()
        assert (s.adopted, s.blocks, s.used, s.tenure, s.size) == (1, 1, 1024, 2, 1 << 20)
        arena.free(block)
        assert arena.allocate(1 << 20).offset == arena.segment.geometry.data


@pytest.mark.parametrize("keep", [False, True])
def test_an_owner_that_forgets_to_close_cleans_up_at_its_end(name: str, keep: bool) -> None:
    owner = child(OWNER, name, *(["keep"] if keep else []))
    line(owner)
    say(owner)
    assert finish(owner) == 0
    assert path(name).exists() == keep
    if keep:
        Arena.adopt(name).close()


def test_a_looker_neither_owns_nor_removes(name: str) -> None:
    with Arena.create(name, 4096) as arena:
        looker = Arena.attach(name)
        with pytest.raises(LifecycleError, match="only its owner"):
            looker.allocate(1)
        looker.close()
        assert path(name).exists()
        arena.segment.board.store(0, 2**64 - 1)
        assert Arena.attach(name).segment.board[0] == 2**64 - 1


def test_a_forked_child_holds_no_lock(name: str) -> None:
    arena = Arena.create(name, 4096)
    context = multiprocessing.get_context("fork")
    up, go = context.Event(), context.Event()

    def child() -> None:
        up.set()
        go.wait()

    process = context.Process(target=child)
    process.start()
    arena.close(keep=True)
    assert up.wait(60)  # what runs at a fork has run in the child
    try:
        Arena.adopt(name).close()  # would be refused if the child still held the description
    finally:
        go.set()
        process.join()


def test_no_room_is_found_at_allocation_and_named(name: str) -> None:
    room = os.statvfs("/dev/shm")
    with pytest.raises(OutOfMemory, match=r"free of .*--shm-size"):
        Arena.create(name, room.f_blocks * room.f_frsize + (1 << 30))
    with Arena.create(name, 4096, blocks=2) as arena:
        with pytest.raises(OutOfMemory, match=r"8,192 bytes asked; 0 of 4,096"):
            arena.allocate(8192)
        first = arena.allocate(64)
        arena.allocate(64)
        with pytest.raises(OutOfMemory, match="0 of 2 block entries"):
            arena.allocate(64)
        arena.free(first)
        arena.allocate(64)
        assert arena.statistics().refused == 2


def test_handles_travel_and_a_stale_one_is_an_error(name: str) -> None:
    with Arena.create(name, 1 << 16) as arena, Arena.attach(name) as peer:
        with arena.lease(400) as lease:
            array = lease.array("<f4", (10, 10))
            array[:] = np.arange(100).reshape(10, 10)
            assert lease.block.offset % 64 == 0
            raw = lease.handle("<f4", (10, 10)).encode()
            assert len(raw) <= 109
            handle = Handle.decode(raw)
            assert handle == lease.handle(np.float32, (10, 10))
            with peer.open(handle) as seen:
                np.testing.assert_array_equal(seen, array)
                assert not seen.flags.writeable
                array[0, 0] = -1
                assert seen[0, 0] == -1  # the same memory
            with pytest.raises(StaleHandle, match="leaves its block"):
                peer.view(Handle(handle.run, handle.block, handle.generation, 4, "<f4", (10, 10)))
            with pytest.raises(StaleHandle, match="was given back"):
                peer.view(Handle(handle.run, 10**6, handle.generation, 0, "<f4", (1,)))
            with pytest.raises(ValueError, match="does not lie"):
                lease.array("<f8", (10, 10))
            reading = peer.open(handle)
            reading.__enter__()
        with pytest.raises(StaleHandle, match="was given back"):  # while it was being read
            reading.__exit__(None, None, None)
        with pytest.raises(StaleHandle, match="was given back"), peer.open(handle):
            pass
        again = arena.lease(400)  # the same entry, a later generation
        assert again.block.index == handle.block
        with pytest.raises(StaleHandle):
            peer.view(handle)
        again.release()
        again.release()
        with pytest.raises(LifecycleError, match="given back"):
            again.handle("<f4", (1,))
    with Arena.create(name, 1 << 16) as other, pytest.raises(StaleHandle, match="another life"):
        other.view(handle)
    for garbage in (b"", raw[:-1], raw + b"x", b"\xff" * len(raw)):
        with pytest.raises(StaleHandle, match="no handle"):
            Handle.decode(garbage)


def test_torch_views_share_the_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    with Arena.create(name, 1 << 16) as arena, arena.lease(64) as lease:
        tensor = torch.from_numpy(lease.array(torch.bfloat16, (4, 8))).view(torch.bfloat16)
        tensor.fill_(1.5)
        assert tensor.dtype == torch.bfloat16 and lease.array("bfloat16", (4, 8))[0, 0] == 0x3FC0
        handle = lease.handle(torch.bfloat16, (4, 8))
        assert (handle.dtype, handle.nbytes) == ("bfloat16", 64)
        assert tensor.data_ptr() % 64 == 0


def test_forgotten_leases_are_given_back_and_counted_once_their_arrays_are_gone(name: str) -> None:
    with Arena.create(name, 1 << 16) as arena:
        lease = arena.lease(100)
        array = lease.array("|u1", (100,))
        part = array[10:20]
        del lease, array
        gc.collect()
        assert arena.statistics().leases == 1  # the slice still reads it
        del part
        gc.collect()
        s = arena.statistics()
        assert (s.leases, s.leaked, s.used, s.blocks) == (0, 1, 0, 0)
        kept = arena.lease(100)
        block = kept.detach()
        del kept
        assert arena.statistics().leases == 0 and arena.blocks() == [block]
        arena.free(block)
        with pytest.raises(StaleHandle, match="already given back"):
            arena.free(block)


def test_arrays_outlive_the_arena(name: str) -> None:
    arena = Arena.create(name, 1 << 16)
    array = arena.lease(8).array("<i8", (1,))
    array[0] = 5
    arena.close()
    gone = weakref.ref(arena.segment)
    del arena
    gc.collect()
    assert array[0] == 5
    del array
    gc.collect()
    assert gone() is None


def test_a_foreign_or_damaged_segment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Arena.create(name, 4096):
        good = path(name).read_bytes()
    damaged = {
        "it has 3 bytes": good[:3],
        "begins with": b"x" * len(good),
        "layout version 9": good[:8] + struct.pack("<I", 9) + good[12:],
        "CRC32": good[:20] + b"\1" + good[21:],
        "does not fit": good + bytes(4096),
    }
    for words, raw in damaged.items():
        path(name).write_bytes(raw)
        with pytest.raises(TransportError, match=words):
            Arena.attach(name)
        with pytest.raises(TransportError, match=words):
            Arena.adopt(name)
    path(name).unlink()
    for bad in ("", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ConfigError, match="shared-memory name"):
            Arena.create(bad, 1)
    monkeypatch.setattr(segment.sys, "platform", "darwin")
    with pytest.raises(PlatformError, match="Linux x86-64"):
        Arena.create(name, 1)


def test_extents_against_a_plain_model() -> None:
    for seed in range(200):
        random_ = random.Random(seed)
        extents, taken = Extents(64 * 40), {}
        last: tuple[int, int] | None = None  # given back just now: whoever asks for as much gets it, else first fit
        for _ in range(100):
            if taken and random_.random() < 0.45:
                start = random_.choice(list(taken))
                last = start, (taken[start] + 63) // 64
                extents.free(start, taken.pop(start))
            else:
                size = random_.choice((100, random_.randint(1, 500)))
                start = extents.allocate(size)
                cells = {cell for s, n in taken.items() for cell in range(s // 64, (s + n + 63) // 64)}
                runs = [
                    all(c not in cells for c in range(a, a + (size + 63) // 64))
                    for a in range(40 - (size + 63) // 64 + 1)
                ]
                assert (start is None) == (not any(runs))
                if start is not None:
                    again = last is not None and last[1] == (size + 63) // 64
                    assert start == (last[0] if again else 64 * runs.index(True))
                    taken[start] = size
                last = None
            assert extents.used == sum((n + 63) // 64 * 64 for n in taken.values())
        copy = Extents(64 * 40)
        for start, size in taken.items():
            assert copy.reserve(start, size) and not copy.reserve(start, size)
        assert copy.largest == extents.largest
        assert (copy._starts, copy._sizes) == (extents._starts, extents._sizes)
        for start in copy._starts[:1]:
            with pytest.raises(AssertionError, match="twice"):
                copy.free(start, 1)
        for start in list(taken)[:1]:
            copy.free(start, taken[start])
            with pytest.raises(AssertionError, match="twice"):
                copy.free(start, taken[start])
