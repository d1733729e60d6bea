"""Arena: generations, leases, and the allocator behind them."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

from asyncrl.errors import LifecycleError, StaleHandle
from asyncrl.transport.memory.arena import Arena
from asyncrl.transport.memory.extents import Extents
from asyncrl.transport.memory.handles import Handle


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
        assert arena.statistics().leases == 0
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
