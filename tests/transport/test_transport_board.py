"""The weight board: what a child sees through an inherited descriptor, what it cannot do, and the faults that a checksum is for."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_helpers import environment, finish, line, names, own_name, say

from asyncrl.errors import LifecycleError, OutOfMemory, PlatformError, TransportError
from asyncrl.transport.memory import checksum, words
from asyncrl.transport.memory.board import BUCKET_BYTES, Board
from asyncrl.transport.memory.halves import SlabHalves, device_sums

LAYOUT = "0123456789abcdef"
ELEMENTS = 2 * BUCKET_BYTES // 4 + 64  # of float32: two buckets and a small one
BACKENDS = ["native", "numpy"] if checksum.build() == "avx2" else ["numpy"]
# Where the halves lie: a memory file, a slab in shared memory, a slab on a card.
ON_A_CARD = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
PLACES = ["file", "slab", pytest.param("cuda", marks=ON_A_CARD)]

READER = """
import json, mmap, os, sys, zlib
import torch
from asyncrl.transport.memory.board import Board

description, fd = json.loads(sys.argv[1]), int(sys.argv[2])
board = Board.attach(description, fd, description["layout"], torch.device(sys.argv[3]) if sys.argv[3:] else None)
for attempt in (lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED), lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, b"x", 9000)):
    try:
        attempt()
        print("DONE", end=" ")
    except PermissionError:
        print("refused", end=" ")
print(flush=True)
kept = board.half(1)
while True:
    command = sys.stdin.readline().strip()
    if command == "look":
        for index in (0, 1):
            good = sum(board.check(index, bucket) for bucket in range(board.buckets))
            print(board.version(index), good, zlib.crc32(board.half(index).cpu().numpy()), end=" ")
        print(flush=True)
    elif command == "fetch":
        for index in (0, 1):
            passing = board.fetch(index)
            if passing is not None:
                passing()
        print(board.copies, flush=True)
    elif command == "close":
        board.close()
        seen = float(kept[0])
        kept = None
        print(seen, len(os.listdir("/proc/self/fd")), flush=True)
    elif command == "write":
        board.half(0)[0] = 5.0
        print("written", flush=True)
    else:
        break
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(checksum, "_library", None)
    return str(request.param)


name = pytest.fixture(own_name, name="name")


def create(place: str, name: str) -> Board:
    if place == "file":
        return Board.create(ELEMENTS, torch.float32, LAYOUT)
    device = torch.device("cpu" if place == "slab" else "cuda")
    return Board.create(ELEMENTS, torch.float32, LAYOUT, SlabHalves.create(name, ELEMENTS, torch.float32, device))


@pytest.fixture(params=PLACES)
def board(request: pytest.FixtureRequest, name: str) -> Iterator[Board]:
    with create(request.param, name) as made:
        yield made


@pytest.fixture
def in_a_file() -> Iterator[Board]:
    with create("file", "") as made:
        yield made


def put(board: Board, index: int, version: int, source: torch.Tensor) -> None:
    """On the device of the board."""
    board.write(index, version, source.to(board.half(index).device))


def crc(source: torch.Tensor) -> int:
    return zlib.crc32(source.cpu().numpy())


def values(seed: int, dtype: torch.dtype = torch.float32, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reader(board: Board, *copy_to: str) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, "-W", "error", "-c", READER, json.dumps(board.description), str(board.fd), *copy_to],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        pass_fds=[board.fd],
    )


def all_good(board: Board, index: int) -> bool:
    return all(board.check(index, bucket) for bucket in range(board.buckets))


# -- a process of its own ----------------------------------------------------------------------------------------------


def test_a_child_reads_what_is_written_and_changes_no_version_and_no_checksum(board: Board) -> None:
    first, second = values(1), values(2)
    put(board, 0, 4, first)
    with reader(board) as child:
        assert line(child) == "refused refused refused"
        say(child, "look")
        assert line(child).split()[:5] == ["4", str(board.buckets), str(crc(first)), "None", "0"]
        put(board, 1, 5, second)
        say(child, "look")
        assert line(child) == f"4 {board.buckets} {crc(first)} 5 {board.buckets} {crc(second)}"
        say(child, "end")
        assert finish(child) == 0


def test_a_child_that_writes_into_a_file_ends(in_a_file: Board) -> None:
    first = values(1)
    in_a_file.write(0, 4, first)
    with reader(in_a_file) as child:
        line(child)
        say(child, "write")
        assert child.wait(60) == -signal.SIGSEGV
        assert child.stdout is not None and child.stdout.read() == ""
    assert torch.equal(in_a_file.half(0), first) and all_good(in_a_file, 0)


@pytest.mark.parametrize("place", PLACES[1:])
def test_what_a_child_writes_into_a_slab_is_noticed_by_all(place: str, name: str) -> None:
    with create(place, name) as board:
        put(board, 0, 4, values(1))
        with reader(board) as child, Board.attach(board.description, os.dup(board.fd), LAYOUT) as other:
            line(child)
            assert all_good(other, 0)
            say(child, "write")
            assert line(child) == "written"
            say(child, "look")
            assert line(child).split()[:2] == ["4", str(board.buckets - 1)]
            assert [each.check(0, 0) for each in (board, other)] == [False, False]
            say(child, "end")
            assert finish(child) == 0


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_child_on_another_device_reads_copies_which_are_what_it_checks(place: str, name: str) -> None:
    first, second = values(1), values(2)
    with create(place, name) as board:
        put(board, 0, 4, first)
        put(board, 1, 5, second)
        with reader(board, str(board.half(0).device)) as child:
            line(child)
            say(child, "fetch")
            assert line(child) == "True"
            say(child, "look")
            both = f"4 {board.buckets} {crc(first)} 5 {board.buckets} {crc(second)}"
            assert line(child) == both
            board.half(0).zero_()  # in no copy
            say(child, "look")
            assert line(child) == both
            put(board, 1, 6, first)  # the copy is that of version 5, and says so
            say(child, "look")
            assert line(child) == f"4 {board.buckets} {crc(first)} 6 0 {crc(second)}"
            say(child, "fetch")
            line(child)
            say(child, "look")
            zeros = torch.zeros(ELEMENTS)
            assert line(child) == f"4 0 {crc(zeros)} 6 {board.buckets} {crc(first)}"
            say(child, "write")
            assert line(child) == "written"
            say(child, "end")
            assert finish(child) == 0
        assert all_good(board, 1) and not board.half(0).any()


def test_a_slab_whose_owner_is_closed_has_no_name_and_what_was_read_stays(name: str) -> None:
    with create("slab", name) as board:
        put(board, 0, 1, values(1))
        description, fd = board.description, os.dup(board.fd)
        other = Board.attach(description, os.dup(board.fd), LAYOUT)
        assert names(name)
    assert names(name) == []
    assert torch.equal(other.half(0), values(1)) and all_good(other, 0)
    other.close()
    with pytest.raises(FileNotFoundError):
        Board.attach(description, fd, LAYOUT)


def test_what_was_read_stays_when_the_owner_is_gone_and_ends_with_the_last_tensor() -> None:
    made = Board.create(ELEMENTS, torch.float32, LAYOUT)
    source = values(3)
    made.write(1, 0, source)
    with reader(made) as child:
        line(child)
        made.close()
        say(child, "look")
        assert line(child) == f"None 0 {crc(torch.zeros(ELEMENTS))} 0 {made.buckets} {crc(source)}"
        say(child, "close")
        assert line(child).split() == [str(float(source[0])), "4"]  # 0, 1, 2 and the one that lists
        say(child, "end")
        assert finish(child) == 0
    assert not [name for name in os.listdir("/dev/shm") if "weights" in name]


def test_a_child_of_another_layout_is_refused_in_one_sentence(board: Board) -> None:
    with pytest.raises(TransportError, match="layout 0123456789abcdef, but the model of this process has layout fedc"):
        Board.attach(board.description, os.dup(board.fd), "fedc")


def test_a_descriptor_that_is_no_board_or_another_is_refused_and_closed(board: Board, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    opened = set(os.listdir("/proc/self/fd"))
    with Board.create(ELEMENTS, torch.float32, LAYOUT) as other:
        for fd in (os.dup(other.fd), os.open(tmp_path / "file", os.O_RDONLY)):
            with pytest.raises(TransportError, match=f"descriptor {fd} is not the weight board"):
                Board.attach(board.description, fd, LAYOUT)
    assert set(os.listdir("/proc/self/fd")) == opened


def test_a_reader_in_this_process_sees_the_same_and_changes_nothing(board: Board) -> None:
    put(board, 0, 1, values(1))
    with Board.attach(json.loads(json.dumps(board.description)), os.dup(board.fd), LAYOUT) as other:
        assert torch.equal(other.half(0), board.half(0)) and other.version(0) == 1
        assert np.array_equal(other._sums[0], board._sums[0])
        with pytest.raises(LifecycleError, match="created"):
            other.write(1, 2, values(2))
        with pytest.raises(LifecycleError, match="created"):
            other.clear(0)
        with pytest.raises(LifecycleError, match="created"):
            other.complete(0, 2, lambda: board._sums[0])
        with pytest.raises(LifecycleError, match="created"):
            other.cast(0, values(2).double())


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_owner_casts_into_it_is_as_if_it_was_written(backend: str, board: Board, threads: int) -> None:
    put(board, 0, 3, values(1))
    put(board, 1, 4, values(2))
    with reader(board) as child:
        line(child)
        sums = board.cast(1, values(1).double().to(board.half(1).device), threads)
        say(child, "look")
        assert line(child).split()[3:5] == ["None", "0"]  # nobody takes it for version 4 any more
        board.complete(1, 5, sums)
        say(child, "look")
        assert line(child).split()[3:5] == ["5", str(board.buckets)]
        say(child, "end")
        assert finish(child) == 0
    assert np.array_equal(board._sums[0], board._sums[1])
    board.half(1)[-3] += 1
    assert not board.check(1, board.buckets - 1)
    with pytest.raises(ValueError, match="negative"):
        board.complete(1, -1, sums)


def test_what_changes_between_the_cast_and_the_name_is_found(board: Board) -> None:
    sums = board.cast(0, values(1).double().to(board.half(0).device))
    board.half(0)[3] += 1
    board.complete(0, 1, sums)
    assert [board.check(0, bucket) for bucket in range(board.buckets)] == [False] + [True] * (board.buckets - 1)


# -- checksums ---------------------------------------------------------------------------------------------------------


def flipped_bit(half: torch.Tensor, at: int) -> None:
    half.view(torch.int32)[at] ^= 1 << 13


def lowest_bit(half: torch.Tensor, at: int) -> None:
    half.view(torch.uint8)[4 * at] ^= 1


def swapped(half: torch.Tensor, at: int) -> None:
    half[[at, at + 1]] = half[[at + 1, at]]


def swapped_far(half: torch.Tensor, at: int) -> None:
    half[[at, 64]] = half[[64, at]]


def swapped_lines(half: torch.Tensor, at: int) -> None:
    at = at // 16 * 16
    half[at : at + 32] = half[at : at + 32].view(2, 16).flip(0).flatten()


def shifted(half: torch.Tensor, at: int) -> None:
    half[at : at + 32] = half[at - 1 : at + 31].clone()


def shifted_whole(half: torch.Tensor, at: int) -> None:
    start = at * 4 // BUCKET_BYTES * BUCKET_BYTES // 4
    part = half[start : start + BUCKET_BYTES // 4]
    part.copy_(part.roll(1))


def stale(half: torch.Tensor, at: int) -> None:
    start = at * 4 // BUCKET_BYTES * BUCKET_BYTES // 4
    part = half[start : start + BUCKET_BYTES // 4]
    part.copy_(part * (1 + 1e-6))  # what a small step does


def zeroed(half: torch.Tensor, at: int) -> None:
    half[at : at + 4] = 0


FAULTS = (flipped_bit, lowest_bit, swapped, swapped_far, swapped_lines, shifted, shifted_whole, stale, zeroed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_fault_is_noticed_in_its_bucket_alone(
    backend: str, board: Board, bucket: int, fault: Callable[[torch.Tensor, int], None]
) -> None:
    put(board, 0, 3, values(4))
    assert all_good(board, 0)
    fault(board.half(0), bucket * BUCKET_BYTES // 4 + 23)
    others = {0} if fault is swapped_far else set()  # the other place is in the first
    assert [b for b in range(board.buckets) if not board.check(0, b)] == sorted({bucket} | others)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_bit_and_any_two_halves_of_words(data: st.DataObject) -> None:
    """bfloat16: two in a word."""
    source = values(data.draw(st.integers(0, 9)), torch.bfloat16, 4096).view(torch.int16)
    good = checksum.sums_of(source.numpy().view(np.uint8))
    place = data.draw(st.integers(0, 4095))
    changed = source.clone()
    changed[place] ^= 1 << data.draw(st.integers(0, 14))
    assert checksum.sums_of(changed.numpy().view(np.uint8)) != good
    other = data.draw(st.integers(0, 4095))
    changed = source.clone()
    changed[[place, other]] = source[[other, place]]
    assert (checksum.sums_of(changed.numpy().view(np.uint8)) != good) == (source[place] != source[other]).item()


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000), st.booleans(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_native_and_numpy_copy_the_same_and_find_the_same_sums(
    steps: int, size: int, seed: int, ones: bool, threads: int
) -> None:
    if "native" not in BACKENDS:
        pytest.skip("the native copy was not built")
    source = np.random.default_rng(seed).integers(0, 256, 64 * steps, np.uint8)
    if ones:
        source[:] = 255  # the largest sums
    found = []
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            if name == "numpy":
                patch.setattr(checksum, "_library", None)
            memory = np.zeros(64 * steps + 128, np.uint8)
            start = -memory.ctypes.data % 64
            target = memory[start : start + 64 * steps]
            found.append(checksum.copy(source, target, 64 * size, threads))
            assert (
                np.array_equal(target, source) and not memory[:start].any() and not memory[start + 64 * steps :].any()
            )
            for bucket, sums in enumerate(found[-1]):
                part = source[bucket * 64 * size : (bucket + 1) * 64 * size]
                assert checksum.sums_of(part) == tuple(map(int, sums))
    assert np.array_equal(found[0], found[1])


@given(st.integers(1, 100), st.integers(1, 40), st.integers(0, 1000), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_bfloat16_is_made_as_torch_makes_it_and_has_its_sums(steps: int, size: int, seed: int, threads: int) -> None:
    """Of any bits: also what has no value between, what overflows, and what is no number."""
    if "native" not in BACKENDS:
        pytest.skip("the native copy was not built")
    bits = torch.randint(-(2**31), 2**31, (32 * steps,), generator=torch.Generator().manual_seed(seed))
    edges = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x00000001, 0x00008000]
    bits[: len(edges)] = torch.tensor(edges)
    source = bits.to(torch.int32).view(torch.float32)
    memory = np.zeros(64 * steps + 128, np.uint8)
    start = -memory.ctypes.data % 64
    target = memory[start : start + 64 * steps]
    found = checksum.narrow(source.numpy(), target, 64 * size, threads)
    assert np.array_equal(found, checksum.sums(target, 64 * size))
    made, expected = torch.from_numpy(target).view(torch.bfloat16), source.bfloat16()
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made.view(torch.int16)[~made.isnan()], expected.view(torch.int16)[~made.isnan()])
    assert not memory[:start].any() and not memory[start + 64 * steps :].any()


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_device_finds_the_same_sums(steps: int, size: int, seed: int, ones: bool) -> None:
    source = np.random.default_rng(seed).integers(0, 256, 64 * steps, np.uint8)
    if ones:
        source[:] = 255
    found = device_sums(torch.from_numpy(source), 64 * size).numpy().view(np.uint64)
    assert np.array_equal(found, checksum.sums(source, 64 * size))


def test_the_largest_sums_of_a_whole_bucket_and_of_many_are_the_same_on_a_device() -> None:
    source = np.full(70 * BUCKET_BYTES + 64, 255, np.uint8)
    source[5::7] = 3
    found = device_sums(torch.from_numpy(source), BUCKET_BYTES).numpy().view(np.uint64)
    assert np.array_equal(found, checksum.sums(source, BUCKET_BYTES))


def test_the_sums_are_those_of_the_docstring(backend: str) -> None:
    source = np.random.default_rng(0).integers(0, 1 << 32, 48, np.uint32)
    numbers = [int(x) for x in source]
    expected = sum(numbers), sum(i * x for i, x in enumerate(numbers, 1)) % (1 << 64)
    assert checksum.sums_of(source.view(np.uint8)) == expected


# -- half-written ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["board.version:after 1", "board.written 1", "board.version:before 2"])
def test_a_half_that_was_not_written_to_its_end_holds_no_version(
    board: Board, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    put(board, 0, 7, values(1))
    put(board, 1, 8, values(2))
    hits: dict[str, int] = {}

    def fault(where: str) -> None:
        hits[where] = hits.get(where, 0) + 1
        if f"{where} {hits[where]}" == label:
            raise KeyboardInterrupt

    monkeypatch.setattr(words, "FAULT", fault)
    with Board.attach(board.description, os.dup(board.fd), LAYOUT) as other:
        with pytest.raises(KeyboardInterrupt):
            put(board, 0, 9, values(3))
        monkeypatch.undo()
        assert other.version(0) is None and not other.check(0, 0)
        assert other.version(1) == 8 and all_good(other, 1)
        put(board, 0, 9, values(3))
        assert other.version(0) == 9 and all_good(other, 0)


def test_clear_leaves_no_version(board: Board) -> None:
    put(board, 0, 7, values(1))
    board.clear(0)
    assert board.version(0) is None and not board.check(0, 0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_no_room_is_an_error_with_figures() -> None:
    with pytest.raises(OutOfMemory, match=r"needs [\d,]{15,} bytes .* and [\d,]+ are free"):
        Board.create(1 << 44, torch.float32, LAYOUT)


def test_a_file_that_the_system_does_not_allow_is_the_same_error() -> None:
    program = """
import resource, torch
from asyncrl.errors import OutOfMemory
from asyncrl.transport.memory.board import Board
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    Board.create(1 << 20, torch.float32, "x")
except OutOfMemory as error:
    print(error)
"""
    found = warm.run([sys.executable, "-c", program], env=environment(), timeout=120)
    assert found.returncode == 0, found.stderr
    assert "needs 8,392,704 bytes" in found.stdout and "File too large" in found.stdout


def test_a_slab_without_room_is_an_error_with_figures_and_a_way_out(name: str) -> None:
    with pytest.raises(
        OutOfMemory, match=r"needs [\d,]{15,} bytes on cpu .*; use a smaller model or model\.dtype=bfloat16"
    ):
        SlabHalves.create(name, 1 << 44, torch.float32, torch.device("cpu"))


def test_a_board_on_a_gpu_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match=r"torch .* sees none"):
        SlabHalves.create(name, ELEMENTS, torch.float32, torch.device("cuda", 0))


def test_weights_of_another_form_are_refused_and_what_lies_there_stays(board: Board) -> None:
    put(board, 0, 1, values(1))
    here = board.half(0).device
    wrong = (
        values(1, torch.bfloat16).to(here),
        values(1, elements=64).to(here),
        values(1, elements=2 * ELEMENTS).to(here)[::2],
        values(1).to("meta"),
    )
    for source in wrong:
        with pytest.raises(ValueError, match=r"weight board holds|contiguous"):
            board.write(0, 2, source)
    for source in wrong[1:]:
        with pytest.raises(ValueError, match=r"weight board holds|contiguous"):
            board.cast(1, source)
    with pytest.raises(ValueError, match="negative"):
        put(board, 0, -1, values(1))
    with pytest.raises(ValueError, match="multiple of 64"):
        Board.create(3, torch.float32, LAYOUT)
    with pytest.raises(IndexError, match="bucket 3"):
        board.check(0, 3)
    assert board.version(0) == 1 and all_good(board, 0)


def test_closed_it_answers_nothing_and_its_tensors_stay() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    made = Board.create(ELEMENTS, torch.float32, LAYOUT)
    source = values(1)
    made.write(0, 1, source)
    half = made.half(0)
    made.close()
    made.close()
    for call in (
        lambda: made.half(0),
        lambda: made.version(0),
        lambda: made.check(0, 0),
        lambda: made.write(0, 1, source),
    ):
        with pytest.raises(LifecycleError, match="closed"):
            call()
    assert torch.equal(half, source)
    del half
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened
