"""Stress of the record ring: kills, stops, respawns and restarts at full speed, checked against fsynced logs.

    python tools/chaos stress                          # 20 s; in CI 10
    python tools/chaos stress --seconds 600            # the nightly form

Eight producers put records of random sizes as fast as they can. Once a second one of them dies by SIGKILL at a random
moment; every other one that is started dies at a store of the protocol (injected crash points, in turn). Each comes back as
a new one. The owner is killed every few seconds and restarted; one producer is stopped (SIGSTOP) for longer than every
deadline. Producers log what `put` accepted, the owner logs what it trained before it releases it; both logs
are fsynced. In the end: every accepted record was trained, none twice, none torn, and /dev/shm holds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import anyio
from commands import end, left_in_shared_memory, start, wait_for
from transport_records import planned, whole

from asyncrl.errors import RingDetached, RingFull
from asyncrl.transport.memory import words
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.types import Delivery, RingSettings

SETTINGS = RingSettings(total_bytes=64 << 20, slots=64, payload_bytes=1 << 20)
DEADLINE = 2.0  # seconds a put waits for room
PATIENCE = 240  # seconds for whatever must happen in the end, on a machine that does other things too
STORES = 40  # crash points in about two puts
TAIL = 1 << 20  # bytes of the log that a restarted owner reads: far more than a ring holds


class Log:
    """Lines that survive a kill: written at once, fsynced by `sync`. A torn last line is no line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # end the line that a kill tore; `check` skips what it cannot count

    def write(self, lines: list[str]) -> None:
        os.write(self._fd, "".join(f"{line}\n" for line in lines).encode())

    def sync(self) -> None:
        os.fsync(self._fd)


def read_log(path: Path, tail: int | None = None) -> list[str]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tail) if tail else 0
        file.seek(start)
        rows = file.read().decode().split("\n")
    return rows[1 if start else 0 : -1]


# -- a producer


def produce(name: str, folder: str, number: str, crash: str) -> None:
    directory, epoch, crash_at, stopped = Path(folder), int(number), int(crash), list[bool]()
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    log = Log(directory / f"accepted-{epoch}")
    source = random.Random(epoch)
    if crash_at >= 0:
        _arm(crash_at, source.random() * 1.5)
    group, unsynced = 0, 0
    with Producer.attach(name, timeout=PATIENCE) as producer:
        while not stopped:
            length = int(math.exp(source.uniform(0, math.log(15_000))))
            members = tuple(range(source.randint(1, 4)))
            plan = planned(group, epoch=epoch, members=members, group_size=4, length=length)
            while True:
                try:
                    producer.put(plan, timeout=DEADLINE)
                    break
                except (RingFull, RingDetached):
                    continue  # the same record again: what was left behind is a duplicate then
            log.write([f"{epoch} {group} {len(members)}"])
            group, unsynced = group + 1, unsynced + 1
            if unsynced == 32:
                log.sync()
                unsynced = 0
    log.sync()


def _arm(crash_at: int, after: float) -> None:
    """SIGKILL at the given store, counted from `after` seconds on."""
    begin, seen = time.monotonic() + after, [0]

    def fault(label: str) -> None:
        if time.monotonic() >= begin:
            if seen[0] == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    words.FAULT = fault


# -- the owner


def own(name: str, folder: str) -> None:
    asyncio.run(_own(name, Path(folder)))


async def _own(name: str, directory: Path) -> None:
    path = directory / "trained"
    rows = read_log(path, TAIL)
    # What an owner had not released when it was killed comes again.
    trained = {row for row in rows if row and row[0] != "#"}
    log, stop = Log(path), directory / "stop"  # a file: a signal could come before its handler
    source, held = random.Random(), list[Delivery]()
    async with RecordRing(name, SETTINGS) as ring:
        while not (stop.exists() and not ring.statistics().rings and not held):
            batch = await _some(ring)
            log.write([row for delivery in batch for row in _rows(delivery) if row not in trained])
            log.sync()  # trained: only now may it leave the ring
            held += batch
            source.shuffle(held)
            # Late groups are late, but not for ever: held back without end they would fill a ring for good.
            keep = min(24, len(held)) if batch and not stop.exists() else 0
            for delivery in held[keep:]:
                delivery.release()
            del held[keep:]
            if ring.statistics().torn:
                log.write([f"# torn {ring.statistics().torn}"])
        log.write(["# end " + json.dumps({k: getattr(ring.statistics(), k) for k in ("torn", "deaths", "reclaimed")})])


async def _some(ring: RecordRing) -> list[Delivery]:
    """What is there, at most 64; waits a little for the first one."""
    batch: list[Delivery] = []
    try:
        async with asyncio.timeout(0.2):
            batch.append(await ring.get())
    except TimeoutError:
        return batch
    with contextlib.suppress(anyio.WouldBlock):
        while len(batch) < 64:
            batch.append(ring.get_nowait())
    return batch


def _rows(delivery: Delivery) -> list[str]:
    record = delivery.record
    if not whole(record):
        return [f"# torn content {record.epoch} {record.group}"]
    return [f"{record.epoch} {record.group} {int(record.members[position])}" for position in delivery.fresh]


# -- the one that kills


class Stress:
    def __init__(self, name: str, directory: Path, producers: int) -> None:
        self.name, self.directory = name, directory
        self.epoch = 0
        self.kills: Counter[str] = Counter()
        self.source = random.Random(0)
        self.owner = self._owner()
        self.producers = [self._producer(armed=False) for _ in range(producers)]
        self.epochs = list(range(1, producers + 1))

    def _owner(self) -> subprocess.Popen[bytes]:
        return start(__name__, "own", self.name, self.directory)

    def _producer(self, *, armed: bool) -> subprocess.Popen[bytes]:
        self.epoch += 1
        crash_at = (self.epoch * 7) % STORES if armed else -1
        return start(__name__, "produce", self.name, self.directory, self.epoch, crash_at)

    def run(self, seconds: float) -> None:
        """Kill for `seconds`, counted from the first trained record, and longer until enough was killed.

        Only who has got to work is killed: else a slow machine would see nothing but start-ups.
        """
        if not wait_for(lambda: self._trained_bytes() > 0, PATIENCE, 0.1):
            raise SystemExit(f"nothing was trained within {PATIENCE} s")
        begin, stopped, tick, seen = time.monotonic(), None, 0, 0
        while (passed := time.monotonic() - begin) < seconds or (passed < PATIENCE and not self._enough()):
            time.sleep(1)
            tick += 1
            self._respawn(armed=tick % 2 == 0)
            if (victim := self._victim(stopped)) is not None:
                victim.kill()
                self.kills["producer"] += 1
            if tick % 5 == 0 and self._trained_bytes() > seen:
                self.owner.kill()
                self.owner.wait()
                seen = self._trained_bytes()
                self.owner = self._owner()
                self.kills["owner"] += 1
            if stopped is None and tick % 12 == 3 and self._works(0):
                stopped = (time.monotonic() + 3 * DEADLINE, self.producers[0])
                self.producers[0].send_signal(signal.SIGSTOP)
                self.kills["stopped"] += 1
            elif stopped is not None and time.monotonic() > stopped[0]:
                stopped[1].send_signal(signal.SIGCONT)
                stopped = None
        if stopped is not None:
            stopped[1].send_signal(signal.SIGCONT)

    def _enough(self) -> bool:
        return self.kills["died"] >= 5 and self.kills["owner"] >= 2 and self.kills["stopped"] >= 1

    def _trained_bytes(self) -> int:
        path = self.directory / "trained"
        return path.stat().st_size if path.exists() else 0

    def _works(self, index: int) -> bool:
        """This producer lives and has put something."""
        path = self.directory / f"accepted-{self.epochs[index]}"
        return self.producers[index].poll() is None and path.exists() and path.stat().st_size > 0

    def _victim(self, stopped: tuple[float, subprocess.Popen[bytes]] | None) -> subprocess.Popen[bytes] | None:
        able = [i for i, p in enumerate(self.producers) if self._works(i) and (stopped is None or p is not stopped[1])]
        return self.producers[self.source.choice(able)] if able else None

    def _respawn(self, *, armed: bool) -> None:
        for index, process in enumerate(self.producers):
            if process.poll() is not None:
                if process.returncode != -signal.SIGKILL:
                    raise SystemExit(f"a producer ended by itself with code {process.returncode}")
                self.kills["died"] += 1
                self.producers[index] = self._producer(armed=armed)
                self.epochs[index] = self.epoch

    def finish(self) -> None:
        for process in self.producers:
            process.send_signal(signal.SIGTERM)
        for process in self.producers:
            if process.wait(PATIENCE) not in (0, -signal.SIGKILL, -signal.SIGTERM):
                raise SystemExit(f"a producer ended with code {process.returncode}")
        (self.directory / "stop").touch()
        if self.owner.wait(PATIENCE):
            raise SystemExit(f"the owner ended with code {self.owner.returncode}")


def check(directory: Path, name: str) -> dict[str, object]:
    accepted: set[tuple[int, int, int]] = set()
    for path in directory.glob("accepted-*"):
        for row in read_log(path):
            epoch, group, members = map(int, row.split())
            accepted.update((epoch, group, member) for member in range(members))
    rows = [row for row in read_log(directory / "trained") if row]
    complaints = [row for row in rows if row.startswith("# torn")]
    trained = Counter(tuple(map(int, row.split())) for row in rows if row[0] != "#" and row.count(" ") == 2)
    return {
        "accepted": len(accepted),
        "trained": len(trained),
        "lost": len(accepted - set(trained)),
        "twice": sum(count > 1 for count in trained.values()),
        "torn": len(complaints),
        "left in /dev/shm": left_in_shared_memory(name),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--producers", type=int, default=8)


def main(given: argparse.Namespace) -> int:
    name = f"stress-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        stress = Stress(name, Path(folder), given.producers)
        try:
            stress.run(given.seconds)
            stress.finish()
        finally:
            end([*stress.producers, stress.owner])
        result = check(Path(folder), name)
    print(json.dumps({**result, "kills": dict(stress.kills), "seconds": given.seconds}))
    bad = result["lost"] or result["twice"] or result["torn"] or result["left in /dev/shm"] or not result["accepted"]
    return 1 if bad else 0
