"""`asyncrl shm`: lists owners and records, clears what nobody owns, and loses no accepted record by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.app import main
from asyncrl.client import AsyncClient, Scored
from asyncrl.transport.inventory import Entry, inventory
from asyncrl.transport.memory.segment import Segment
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

OWNER = """
import sys
from asyncrl.transport.memory.segment import Segment
segment = Segment.create(sys.argv[1], 1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"shm-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"


def entry(name: str) -> Entry | None:
    return next((entry for entry in inventory() if entry.name == name), None)


def test_what_is_owned_is_listed_and_not_cleared_and_a_dead_owners_is(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without names `clear` takes all that nobody owns: here, only what is this test's own.
    monkeypatch.setattr("asyncrl.cli.shm.inventory", lambda: [e for e in inventory() if e.name == name])
    command = [sys.executable, "-c", OWNER, name]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    try:
        assert owner.stdout.readline() == "ready\n"
        owner.send_signal(signal.SIGSTOP)  # stopped is not dead
        found = entry(name)
        assert found is not None and found.owner == owner.pid
        assert main(["shm", "clear", name]) == 1
        assert f"owned by process {owner.pid}" in capsys.readouterr().err
        assert main(["shm", "clear"]) == 0 and entry(name) is not None
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdin.close()
        owner.stdout.close()
    found = entry(name)
    assert found is not None and found.owner is None
    assert main(["shm"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    assert row.split()[1] == "nobody"
    assert main(["shm", "clear"]) == 0
    assert "1.0 MiB cleared" in capsys.readouterr().out
    assert entry(name) is None
    assert main(["shm", "clear"]) == 0 and main(["shm"]) == 0
    assert "no shared memory segments of asyncrl" in capsys.readouterr().out
    assert main(["shm", "clear", name]) == 1
    assert "no such segment" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["", ".damaged-2"])
def test_accepted_records_are_not_cleared_without_a_word(
    name: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name += end

    async def leave_one() -> None:
        async with RecordRing(name, RingSettings(total_bytes=1 << 20, slots=8, payload_bytes=1 << 16)) as ring:
            async with await AsyncClient.attach(name) as client:
                await client.push(0, [Scored([1, 2], prompt_length=1)])
                await client.push(1, [Scored([1, 2], prompt_length=1)])
            (await ring.get()).release()
            found = await asyncio.to_thread(entry, name)
            assert found is not None and (found.owner, found.records) == (os.getpid(), 1)

    asyncio.run(leave_one())
    found = entry(name)
    assert found is not None and (found.owner, found.records) == (None, 1)
    assert main(["shm", "clear", name]) == 1
    assert "1 accepted records" in capsys.readouterr().err
    Segment.adopt(name).close(unlink=False)  # it is as it was: the next owner may have it
    assert main(["shm", "clear", name, "--drop-records"]) == 0
    assert entry(name) is None


def test_a_file_that_is_no_segment_is_said_and_can_be_cleared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"/dev/shm/asyncrl.{name}")
    path.write_bytes(b"x" * 10)
    found = entry(name)
    assert found is not None and "not a complete segment of asyncrl" in found.problem
    assert main(["shm", "clear", name]) == 0
    assert not path.exists()


def test_what_is_no_file_is_passed_over(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is opened through a link, and one of them hides no segment."""
    (tmp_path / "file").write_bytes(b"mine")
    ends = ("", ".ring-0123456789abcdef", ".folder", ".beside", " of mine")
    link, part, folder, beside, mine = (Path(f"/dev/shm/asyncrl.{name}{end}") for end in ends)
    for each in (link, part):
        each.symlink_to(tmp_path / "file")
    folder.mkdir()
    beside.write_bytes(b"x" * 10)
    mine.write_bytes(b"x" * 10)
    try:
        assert entry(name) is None and entry(f"{name}.folder") is None
        assert entry(f"{name}.beside") is not None
        for what in (name, f"{name}.folder"):
            assert main(["shm", "clear", what]) == 1
            assert "no segment of yours" in capsys.readouterr().err
        assert link.is_symlink() and part.is_symlink() and (tmp_path / "file").read_bytes() == b"mine"
        link.unlink()
        assert main(["shm", "clear", name]) == 1
        assert "ring-0123456789abcdef is a link" in capsys.readouterr().err
    finally:
        folder.rmdir()
        for each in (link, part, beside, mine):
            each.unlink(missing_ok=True)
