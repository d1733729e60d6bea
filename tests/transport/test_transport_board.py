"""The weight board: what a child sees through an inherited descriptor, and what it cannot do."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from transport_helpers import environment, finish, line, names, own_name, say

from asyncrl.errors import OutOfMemory, PlatformError, TransportError
from asyncrl.transport.memory import words
from asyncrl.transport.memory.board import Board, weight_slab

LAYOUT = "0123456789abcdef"
ELEMENTS = 131_136
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
            print(board.version(index), zlib.crc32(board.half(index).cpu().numpy()), end=" ")
        print(flush=True)
    elif command == "fetch":
        for index in (0, 1):
            passing = board.fetch(index)
            if passing is not None:
                passing()
        print(board.reads_copies, flush=True)
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


name = pytest.fixture(own_name, name="name")


def create(place: str, name: str) -> Board:
    if place == "file":
        return Board.create(ELEMENTS, torch.float32, LAYOUT)
    device = torch.device("cpu" if place == "slab" else "cuda")
    return Board.create(ELEMENTS, torch.float32, LAYOUT, weight_slab(name, ELEMENTS, torch.float32, device))


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


# -- a process of its own ----------------------------------------------------------------------------------------------


def test_a_child_reads_what_is_written_and_changes_no_version(board: Board) -> None:
    first, second = values(1), values(2)
    put(board, 0, 4, first)
    with reader(board) as child:
        assert line(child) == "refused refused refused"
        say(child, "look")
        assert line(child).split()[:3] == ["4", str(crc(first)), "None"]
        put(board, 1, 5, second)
        say(child, "look")
        assert line(child) == f"4 {crc(first)} 5 {crc(second)}"
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
    assert torch.equal(in_a_file.half(0), first)


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_child_on_another_device_reads_copies(place: str, name: str) -> None:
    first, second = values(1), values(2)
    with create(place, name) as board:
        put(board, 0, 4, first)
        put(board, 1, 5, second)
        with reader(board, str(board.half(0).device)) as child:
            line(child)
            say(child, "fetch")
            assert line(child) == "True"
            say(child, "look")
            both = f"4 {crc(first)} 5 {crc(second)}"
            assert line(child) == both
            board.half(0).zero_()  # in no copy
            say(child, "look")
            assert line(child) == both
            put(board, 1, 6, first)  # the copy is that of version 5
            say(child, "look")
            assert line(child) == f"4 {crc(first)} 6 {crc(second)}"
            say(child, "fetch")
            line(child)
            say(child, "look")
            zeros = torch.zeros(ELEMENTS)
            assert line(child) == f"4 {crc(zeros)} 6 {crc(first)}"
            say(child, "write")
            assert line(child) == "written"
            say(child, "end")
            assert finish(child) == 0
        assert crc(board.half(1)) == crc(first) and not board.half(0).any()


def test_a_slab_whose_owner_is_closed_has_no_name_and_what_was_read_stays(name: str) -> None:
    with create("slab", name) as board:
        put(board, 0, 1, values(1))
        description, fd = board.description, os.dup(board.fd)
        other = Board.attach(description, os.dup(board.fd), LAYOUT)
        assert names(name)
    assert names(name) == []
    assert torch.equal(other.half(0), values(1))
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
        assert line(child) == f"None {crc(torch.zeros(ELEMENTS))} 0 {crc(source)}"
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
        with pytest.raises(TypeError, match="read-only"):
            other.write(1, 2)
        with pytest.raises(TypeError, match="read-only"):
            other.clear(0)


def test_what_the_owner_puts_into_it_is_as_if_it_was_written(board: Board) -> None:
    put(board, 1, 4, values(2))
    with reader(board) as child:
        line(child)
        board.clear(1)
        board.half(1).copy_(values(1).double())
        say(child, "look")
        assert line(child).split()[2] == "None"  # nobody takes it for version 4 any more
        board.write(1, 5)
        say(child, "look")
        assert line(child).split()[2:] == ["5", str(crc(values(1)))]
        say(child, "end")
        assert finish(child) == 0


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
        assert other.version(0) is None
        assert other.version(1) == 8 and crc(other.half(1)) == crc(values(2))
        put(board, 0, 9, values(3))
        assert other.version(0) == 9 and crc(other.half(0)) == crc(values(3))


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
        weight_slab(name, 1 << 44, torch.float32, torch.device("cpu"))


def test_a_board_on_a_gpu_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match=r"torch .* sees no device"):
        weight_slab(name, ELEMENTS, torch.float32, torch.device("cuda", 0))


def test_weights_of_another_form_are_refused_and_what_lies_there_stays(board: Board, name: str) -> None:
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
    with pytest.raises(ValueError, match="negative"):
        put(board, 0, -1, values(1))
    with pytest.raises(ValueError, match="multiple of 64"):
        Board.create(3, torch.float32, LAYOUT, weight_slab(f"{name}-3", 3, torch.float32, torch.device("cpu")))
    assert names(f"{name}-3") == []
    assert board.version(0) == 1 and crc(board.half(0)) == crc(values(1))


def test_closed_it_answers_nothing_and_its_tensors_stay() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    made = Board.create(ELEMENTS, torch.float32, LAYOUT)
    source = values(1)
    made.write(0, 1, source)
    half = made.half(0)
    made.close()
    made.close()
    for call in (lambda: made.half(0), lambda: made.version(0), lambda: made.write(0, 1)):
        with pytest.raises((IndexError, ValueError)):
            call()
    assert torch.equal(half, source)
    del half
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened
