"""A kill at every store of the protocol in turn, on both sides: nothing accepted is lost, nothing torn, nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import anyio
import pytest
from transport_helpers import ROOT, both_loops, child, environment, finish, line
from transport_records import planned, whole

from asyncrl.transport.memory import words
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.ring import RingMemory, RingReader, RingWriter, format_ring, ring_bytes
from asyncrl.transport.rings.types import RingSettings

SETTINGS = RingSettings(total_bytes=8 << 20, slots=8, payload_bytes=1 << 14)

ARM = """
import json, os, signal, sys
from asyncrl.transport.memory import words

def arm_at(wanted, nth):
    "SIGKILL at the n-th time that this place is reached."
    seen = [0]
    def fault(label):
        seen[0] += label == wanted
        if seen[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    words.FAULT = fault

def arm(k):
    "SIGKILL at the k-th place from here on."
    seen = [0]
    def fault(label):
        if seen[0] == k:
            os.write(1, (json.dumps([k, label]) + "\\n").encode())
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1
    words.FAULT = fault

def every(work):
    "Fork for k = 0, 1, ... until one survives."
    k = 0
    while True:
        pid = os.fork()
        if not pid:
            try:
                work(k)
            except BaseException as error:
                os.write(1, (json.dumps([k, "error", repr(error)]) + "\\n").encode())
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            os.write(1, (json.dumps([k, "survived"]) + "\\n").encode())
            return
        k += 1
"""

PRODUCERS = (
    ARM
    + """
from transport_records import planned
from asyncrl.transport.rings.producer import Producer

def work(k):
    producer = Producer.attach(sys.argv[1])
    producer.put(planned(2 * k))
    arm(k)
    producer.put(planned(2 * k + 1))
    words.FAULT = None
    producer.close()

every(work)
"""
)

STEPS = ("ring.state", "ring.offset", "ring.size", "ring.check", "ring.sequence", "ring.head")


@both_loops
async def test_a_producer_killed_at_every_store_of_a_put(name: str) -> None:
    arrived: Counter[int] = Counter()
    async with RecordRing(name, SETTINGS) as ring:
        process = child(PRODUCERS, name)
        said: list[list[object]] = []

        def listen() -> None:
            while not said or said[-1][1] != "survived":
                said.append(json.loads(line(process)))

        async def consume() -> None:
            while True:
                delivery = await ring.get()
                assert whole(delivery.record)
                arrived[delivery.record.group] += 1
                delivery.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            await asyncio.to_thread(listen)
            with anyio.fail_after(120):
                while ring.statistics().rings:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert finish(process) == 0
        s = ring.statistics()
    labels = [str(row[1]) for row in said]
    assert "error" not in labels, said
    wanted = {f"{step}:{when}" for step in STEPS for when in ("before", "after")}
    assert set(labels) == wanted | {"section", "table", "header", "producer.notify", "survived"}
    accepted = labels.index("ring.head:after")
    expected = {2 * k for k in range(len(labels))} | {2 * k + 1 for k in range(accepted, len(labels))}
    assert arrived == Counter(dict.fromkeys(expected, 1))
    assert (s.torn, s.duplicates, s.deaths) == (0, 0, len(labels) - 1)
    assert s.half_written == accepted - labels.index("ring.state:after")


@pytest.mark.parametrize("in_use", [(), (0,), (0, 1)], ids=["next slot", "passes over one", "passes over two"])
@pytest.mark.parametrize("place", [f"{step}:{when}" for step in STEPS for when in ("before", "after")])
def test_a_put_that_passes_over_slots_in_use_and_is_interrupted_at_every_store(
    place: str, in_use: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is sound for a new owner at any time. A later put arrives once, the interrupted put only if it was accepted."""
    buffer = memoryview(bytearray(ring_bytes(4, 4096)))
    format_ring(buffer, 4, b"p" * 16, os.getpid(), 1)
    writer, reader = RingWriter(RingMemory(buffer)), RingReader(RingMemory(buffer))
    for group in range(4):
        assert writer.try_put(planned(group))
    reader.replay()
    held = {slot: reader.memory.sequences[slot] for slot in range(4)}
    for slot in set(range(4)) - set(in_use):
        reader.release(slot, held.pop(slot))
    as_found: list[bytes] = []

    def interrupt(label: str) -> None:
        if label == place and not as_found:
            as_found.append(bytes(buffer))
            raise KeyboardInterrupt

    monkeypatch.setattr(words, "FAULT", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.try_put(planned(4))
    monkeypatch.setattr(words, "FAULT", None)
    killed = RingMemory(memoryview(bytearray(as_found[0])))
    accepted = place == "ring.head:after"
    assert killed.find_damage() == reader.memory.find_damage() == ""
    assert len(RingReader(killed).replay()) == len(in_use) + accepted
    arrived = []
    for group in range(5, 12):
        for slot, sequence in reader.poll():
            arrived.append(reader.take(slot, sequence).group)
            reader.release(slot, sequence)
        if in_use and group == 6:
            reader.release(0, held.pop(0))
        assert writer.try_put(planned(group))
        assert reader.memory.find_damage() == ""
    arrived += [reader.take(*found).group for found in reader.poll()]
    assert arrived == [4] * accepted + list(range(5, 12))
    assert reader.lost == 0


OWNERS = (
    ARM
    + """
import asyncio
from transport_records import whole
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import RingSettings

log = os.open(sys.argv[2], os.O_RDWR | os.O_APPEND | os.O_CREAT)

async def own(most):
    rows = os.pread(log, 1 << 20, 0).decode().split()
    trained = {int(row) for row in rows}
    async with RecordRing(sys.argv[1], RingSettings(**json.loads(sys.argv[3]))) as ring:
        held = []
        while len(trained) < most:
            delivery = await ring.get()
            assert whole(delivery.record)
            group = delivery.record.group
            if group not in trained:  # an owner was killed before it released what it had trained
                trained.add(group)
                os.write(log, f"{group}\\n".encode())
            held.append(delivery)
            if len(held) == 2:
                held.pop().release()
        for delivery in held:
            delivery.release()
        while ring.statistics().rings:  # until the producer has closed and its ring is free
            await asyncio.sleep(0)

for k, (label, nth) in enumerate([*json.loads(sys.argv[4]), ["", 0]]):
    pid = os.fork()
    if not pid:
        try:
            if nth:
                arm_at(label, nth)
            asyncio.run(own(2 * (k + 1)))
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(1, (json.dumps([label, nth, code]) + "\\n").encode())
"""
)
PLACES: list[tuple[str, int]] = [
    # The first `segment.link`, and three words of life, are of the name itself; what follows is of a ring.
    *(("segment.link", nth) for nth in (1, 2)),
    *((f"segment.life:{when}", nth) for nth in (1, 2, 3, 4) for when in ("before", "after")),
    *((f"ring.owner:{when}", nth) for nth in (1, 2) for when in ("before", "after")),
    *((f"ring.released:{when}", nth) for nth in (1, 2) for when in ("before", "after")),
    ("ring.release", 1),
    *((f"segment.life:{when}", 5) for when in ("before", "after")),
]


def test_an_owner_killed_at_every_store_of_its_life(name: str, tmp_path: Path) -> None:
    """Every owner lives until all groups put so far are trained; each but the last is killed at one place."""
    log = tmp_path / "trained"
    settings = {"total_bytes": 1 << 20, "slots": 8, "payload_bytes": 1 << 14}
    process = child(OWNERS, name, str(log), json.dumps(settings), json.dumps(PLACES))
    rounds = threading.Semaphore(1)
    failed: list[BaseException] = []

    def produce() -> None:
        try:
            for k in range(len(PLACES) + 1):
                rounds.acquire(timeout=120)
                with Producer.attach(name, timeout=120) as producer:
                    for group in (2 * k, 2 * k + 1):
                        producer.put(planned(group), timeout=120)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    said = []
    for _ in range(len(PLACES) + 1):  # each owner that ends lets two more groups be put
        said.append(json.loads(line(process)))
        rounds.release()
    assert finish(process) == 0
    thread.join(60)
    assert not failed
    assert said == [[label, nth, -signal.SIGKILL] for label, nth in PLACES] + [["", 0, 0]]
    trained = [int(row) for row in log.read_text().split()]
    assert Counter(trained) == Counter(range(2 * len(said))), "lost, or trained twice"


@pytest.mark.slow
def test_under_kills_stops_and_restarts_nothing_accepted_is_lost_torn_or_trained_twice() -> None:
    """The ten-second form of `tools/chaos stress`."""
    command = [sys.executable, str(ROOT / "tools" / "chaos"), "stress", "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["lost"], result["twice"], result["torn"], result["left in /dev/shm"]) == (0, 0, 0, [])
    assert result["accepted"] > 100
    kills = result["kills"]
    assert kills["died"] >= 5 and kills["owner"] >= 2 and kills["stopped"] >= 1
