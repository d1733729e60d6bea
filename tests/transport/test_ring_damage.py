"""Record ring under attack: openings that fail, memory that is written over, strangers at the owner's socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from transport_helpers import ROOT, both_loops, child, environment, finish, line, living, names
from transport_records import OWNER, SMALL, drop, groups, planned, whole

from asyncrl.cli.app import main
from asyncrl.transport.inventory import clear, inventory
from asyncrl.transport.memory.segment import Segment, parts_of, path_of
from asyncrl.transport.rings.attachment import address
from asyncrl.transport.rings.producer import AsyncProducer
from asyncrl.transport.rings.record_ring import RecordRing


def test_attacks_lose_nothing_and_give_nothing_twice() -> None:
    command = [sys.executable, str(ROOT / "tools" / "chaos"), "rings", "--short", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    for kind, outcome in found.items():
        assert (outcome["lost"], outcome["twice"], outcome["escaped"]) == (0, 0, 0), (kind, outcome)
    assert found["too many open files"]["failed"] >= 3 and found["an error at the n-th call"]["failed"] >= 10
    assert found["an owner killed at the n-th call of its opening"]["failed"] >= 10
    assert found["and while it hands out records"]["failed"] >= 10
    assert found["a bit of one ring's header"]["kept"] >= 8
    header = found["a bit of its segment's header"]
    assert header["kept"] == header["tried"] >= 10
    assert found["a bit of the name's header"]["tried"] >= 10


async def left_by_two(name: str) -> None:
    """Two rings with two records each, and nobody who owns them."""
    async with RecordRing(name, SMALL):
        for first in (0, 10):
            async with await AsyncProducer.attach(name) as producer:
                await producer.put(planned(first))
                await producer.put(planned(first + 1))


def overwrite(name: str, at: int, content: bytes) -> None:
    with Path(path_of(name)).open("r+b") as file:
        file.seek(at)
        file.write(content)


async def taken_by_the_next_owner(name: str) -> tuple[list[int], list[str]]:
    """The groups that an owner gets and releases, and what it says of damage."""
    async with RecordRing(name, SMALL) as ring:
        taken = []
        with contextlib.suppress(anyio.WouldBlock):
            while True:
                taken.append(ring.get_nowait())
        assert all(whole(delivery.record) for delivery in taken)
        assert ring.statistics().damaged == len(ring.damage)
        for delivery in taken:
            delivery.release()
        return groups(taken), list(ring.damage)


@pytest.mark.parametrize(("place", "words"), [(4096 + 9, "no ring"), (20, "CRC32")], ids=["the ring", "its segment"])
def test_a_damaged_ring_is_renamed_shown_and_not_cleared_without_a_word(
    name: str, place: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(left_by_two(name))
    ring = parts_of(name, "ring")[0]
    overwrite(ring, place, b"x")
    before = Path(path_of(ring)).read_bytes()
    found, said = asyncio.run(taken_by_the_next_owner(name))
    assert found in ([0, 1], [10, 11])
    (damaged,) = parts_of(name, "ring", "damaged")
    assert len(said) == 1 and words in said[0] and ring in said[0] and damaged in said[0]
    found, said = asyncio.run(taken_by_the_next_owner(name))
    assert not found and len(said) == 1 and damaged in said[0] and "kept until" in said[0]
    (entry,) = [entry for entry in inventory() if entry.name == name]
    assert entry.records == 0 and damaged in entry.problem
    assert main(["shm", "clear", name]) == 1
    assert damaged in capsys.readouterr().err
    assert Path(path_of(damaged)).read_bytes()[4096:] == before[4096:]
    assert main(["shm", "clear", name, "--drop-records"]) == 0


def test_a_name_whose_header_is_damaged_costs_no_record(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(left_by_two(name))
    overwrite(name, 20, b"x")
    found, said = asyncio.run(taken_by_the_next_owner(name))
    assert sorted(found) == [0, 1, 10, 11] and len(said) == 1 and "CRC32" in said[0]
    assert main(["shm"]) == 0
    assert f"{name}: " in capsys.readouterr().out
    assert main(["shm", "clear", name]) == 0


@both_loops
async def test_a_ring_that_is_damaged_while_it_is_used_is_set_aside_and_its_producer_gets_another(name: str) -> None:
    async with RecordRing(name, SMALL) as ring:
        heard: list[str] = []
        ring.on_damage = heard.append
        first, second = await AsyncProducer.attach(name), await AsyncProducer.attach(name)
        await first.put(planned(0))
        held = await ring.get()
        link = ring._links[first.identity]
        link.memory.head.store(0, 0)
        link.memory.sequences.store(1, 99)
        await second.put(planned(10))  # the owner looks
        other = await ring.get()
        assert other.record.group == 10
        assert len(heard) == 1 and first.identity.hex() in heard[0] and ring.statistics().damaged == 1
        await first.put(planned(1))
        with anyio.fail_after(10):
            found = await ring.get()
        assert found.record.group == 1 and first.statistics().attachments == 2
        for delivery in (held, other, found):
            assert whole(delivery.record)
            delivery.release()
        await first.close()
        await second.close()
    assert names(name)  # the damaged ring is kept
    clear(name, drop_records=True)


STRANGER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen(8)
print("bound", flush=True)
sys.stdin.read()
"""


def address_of(name: str) -> str:
    segment = Segment.attach(name)
    try:
        return address(segment)
    finally:
        segment.close(unlink=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is needed")
async def test_an_address_that_another_user_took_after_the_owners_death_is_nobodys(name: str) -> None:
    process = child(OWNER, name)
    await asyncio.to_thread(line, process)
    producer = await AsyncProducer.attach(name)
    await producer.put(planned(0))
    address = address_of(name)
    process.kill()
    finish(process)
    with living(STRANGER, address[1:]) as stranger:
        assert await asyncio.to_thread(line, stranger) == "bound"
        await producer.put(planned(1))  # accepted, as while nobody owns the ring
        assert not producer.statistics().attached
        async with RecordRing(name, SMALL) as ring:
            assert address_of(name) != address
            await producer.put(planned(2))
            taken = [await ring.get() for _ in range(3)]
            assert groups(taken) == [0, 1, 2] and producer.statistics().attached
            await producer.close()
            drop(ring)


async def test_addresses_of_owners_cannot_be_told_from_earlier_ones(name: str) -> None:
    found = []
    for _ in range(8):
        ring = RecordRing(name, SMALL)
        await ring.__aenter__()
        found.append(int(address_of(name).rpartition("/")[2]) >> 20)
        ring.close()
    assert len(set(found)) == 8 and max(found) > 2**36
