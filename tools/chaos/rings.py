"""Attacks the opening of a record ring, and its memory: nothing that was accepted may be lost, and nothing may come twice.

    python tools/chaos rings            # every attack in full, some minutes
    python tools/chaos rings --short    # as in CI

Three producers put records, and all are killed, the owner too. What then lies in shared memory is attacked again and again, from
the same bytes. *Failed openings*: with no more than k files; with an exception at the n-th call of the system or the library.
*Owners killed* (SIGKILL) at the n-th call of their opening, and of handing out records. After each the next owner has to get
every record once. *Damage*: one flipped bit in the header of one ring, in the header of its segment, in the header of the name.
No error may come out, the other rings have to give all that they have, and the damaged one gives its records or is kept.
*A stranger* binds addresses before the owner does. Prints a table; exits 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import anyio
from commands import ROOT, end, start, table
from transport_records import planned, whole

from asyncrl.transport.memory.segment import HEADER_BYTES, parts_of, path_of
from asyncrl.transport.rings.producer import Producer
from asyncrl.transport.rings.record_ring import RecordRing
from asyncrl.transport.rings.ring import RingMemory, RingReader
from asyncrl.transport.rings.types import RingSettings

SETTINGS = RingSettings(total_bytes=1 << 18, slots=8, payload_bytes=1 << 14)
RECORDS = 5  # of each producer
RINGS = 3
OPENED, FAILED, SURVIVED = 0, 3, 4  # exit codes of a child that tries; the last: opened although something was broken
TRANSPORT = str(ROOT / "asyncrl" / "transport")


@dataclass
class Outcome:
    """Of one kind of attack."""

    tried: int = 0
    failed: int = 0  # openings that did not succeed, owners that were killed
    lost: int = 0  # accepted records that were neither given, nor kept in what was set aside
    twice: int = 0
    escaped: int = 0  # errors that came out of an owner where none may
    kept: int = 0  # rings or segments that were set aside
    said: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Seen:
    """What an owner got."""

    groups: Counter[int]
    damaged: int
    counted: int  # damage of any kind: torn, begun and not put, set aside
    escaped: str


# -- the victim


Left: TypeAlias = dict[str, bytes]  # by the name of each segment


def left_behind(name: str) -> Left:
    """The segments with the records of three producers, all of whom were killed, as their owner was."""
    owner = _child("own", name)
    for ring in range(RINGS):
        producer = _child("produce", name, ring)
        end([producer])
    end([owner])
    return {part: Path(path_of(part)).read_bytes() for part in (name, *parts_of(name, "ring"))}


def _child(role: str, *words: object) -> subprocess.Popen[bytes]:
    """One that has got to work."""
    child = start(__name__, role, *words, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    return child


def own(name: str) -> None:
    """Open the ring, let nobody have a record, and wait for the kill."""

    async def wait() -> None:
        async with RecordRing(name, SETTINGS):
            print("ready", flush=True)
            await anyio.sleep_forever()

    asyncio.run(wait())


def produce(name: str, ring: str) -> None:
    epoch = int(ring)
    with Producer.attach(name) as producer:
        for record in range(RECORDS):
            producer.put(planned(100 * epoch + record, epoch=epoch))
        print("ready", flush=True)
        signal.pause()


def groups_of(ring: int) -> set[int]:
    return {100 * ring + record for record in range(RECORDS)}


EVERY = set().union(*map(groups_of, range(RINGS)))


def restore(name: str, content: Left) -> None:
    remove(name)
    for part, raw in content.items():
        Path(path_of(part)).write_bytes(raw)
        Path(path_of(part)).chmod(0o600)


def remove(name: str) -> None:
    for path in Path(path_of(name)).parent.glob(f"{Path(path_of(name)).name}*"):
        path.unlink()


# -- owners


async def take_all(name: str, *, release: bool = True) -> Seen:
    """Everything that an owner gets, and that it opened without an error."""
    found: Counter[int] = Counter()
    try:
        async with RecordRing(name, SETTINGS) as ring:
            with contextlib.suppress(anyio.WouldBlock):
                while True:
                    delivery = ring.get_nowait()
                    found[delivery.record.group if whole(delivery.record) else -1] += 1
                    if release:
                        delivery.release()
            s = ring.statistics()
        return Seen(found, s.damaged, s.damaged + s.torn + s.half_written, "")
    except Exception as error:
        return Seen(found, 0, 0, repr(error))


def in_child(attack: Callable[[], object]) -> int:
    """The exit code of a forked child that tries: what it breaks, and what it leaves open, goes with it."""
    pid = os.fork()
    if not pid:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        code = FAILED
        with contextlib.suppress(BaseException):
            attack()
            code = OPENED
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _open(name: str, prepare: Callable[[], None], done: Callable[[], int]) -> None:
    ring = RecordRing(name, SETTINGS)
    prepare()
    try:
        await ring.__aenter__()
    finally:
        code = done()
    os._exit(code)  # as a kill: an owner that opened leaves all of it


# -- openings that fail


def with_few_files(name: str, more: int) -> int:
    """Exit code of an opening that may have `more` files beside those of the loop."""

    def limit() -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    return in_child(lambda: asyncio.run(_open(name, limit, lambda: OPENED)))


class AtCall:
    """`on` to `off`: at the n-th call (from 0) out of the transport's Python code something happens."""

    def __init__(self, nth: int, happens: Callable[[], object]) -> None:
        self._nth, self._happens, self._seen = nth, happens, 0

    def on(self) -> None:
        threading.setprofile(self._watch)
        sys.setprofile(self._watch)

    def off(self) -> int:
        sys.setprofile(None)
        return SURVIVED if self._seen > self._nth else OPENED

    def _watch(self, frame: FrameType, event: str, argument: object) -> None:
        here = event == "c_call" and frame.f_code.co_filename.startswith(TRANSPORT)
        self._seen += here
        if here and self._seen == self._nth + 1:
            self._happens()


def with_an_error_at(name: str, nth: int) -> int:
    """Exit code of an opening in which the n-th call raises."""
    error = OSError(24, "of the attack")
    call = AtCall(nth, lambda: (_ for _ in ()).throw(error))
    return in_child(lambda: asyncio.run(_open(name, call.on, call.off)))


def killed_at(name: str, nth: int) -> int:
    """Exit code of an owner that is killed at the n-th call of its opening."""
    call = AtCall(nth, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return in_child(lambda: asyncio.run(_open(name, call.on, call.off)))


def killed_with_records_at(name: str, nth: int) -> int:
    """Exit code of an owner that is killed at the n-th call after its opening: while it hands out records, and releases none."""
    call = AtCall(nth, lambda: os.kill(os.getpid(), signal.SIGKILL))

    async def take() -> None:
        async with RecordRing(name, SETTINGS) as ring:
            call.on()
            with contextlib.suppress(anyio.WouldBlock):
                while ring.get_nowait():
                    pass
            os._exit(call.off())

    return in_child(lambda: asyncio.run(take()))


def failed_openings(name: str, content: Left, attack: Callable[[str, int], int], step: int, most: int) -> Outcome:
    """`attack` at 0, step, ... until an opening succeeds; then the next owner is asked for all records."""
    outcome = Outcome()
    for n in range(0, most, step):
        restore(name, content)
        code = attack(name, n)
        outcome.tried += 1
        outcome.failed += code in (FAILED, -signal.SIGKILL)
        outcome.escaped += code not in (OPENED, FAILED, SURVIVED, -signal.SIGKILL)
        judge(outcome, asyncio.run(take_all(name)), set())
        if code == OPENED:
            break
    return outcome


# -- damage


def judge(outcome: Outcome, seen: Seen, damaged: set[int], kept: bool = False) -> None:
    """Count what is missing. Records of the `damaged` may be missing where they are kept, or counted as damage."""
    if seen.escaped:
        outcome.escaped += 1
        outcome.said[seen.escaped[:120]] += 1
    missing = EVERY - set(seen.groups)
    if missing and missing <= damaged and (kept or seen.counted):
        missing = set()
    outcome.lost += len(missing)
    outcome.twice += sum(count > 1 for count in seen.groups.values()) + len(set(seen.groups) - EVERY)


def flipped(name: str, content: Left, part: str, places: Iterable[int], bits: int) -> Outcome:
    """One bit of a segment at each place (or each of `bits`), and an owner that takes what it gets. Records of the ring in `part`
    may be kept instead."""
    chance, outcome = random.Random(0), Outcome()
    damaged = {group for ring in range(RINGS) for group in groups_of(ring) if ring_of(content, ring) == part}
    for place, number in itertools.product(places, range(bits)):
        bit = number if bits == 8 else chance.randrange(8)
        raw = bytearray(content[part])
        raw[place] ^= 1 << bit
        restore(name, content | {part: bytes(raw)})
        seen = asyncio.run(take_all(name))
        left = parts_of(name, "ring", "damaged")
        outcome.tried += 1
        outcome.kept += bool(left)
        before = outcome.lost
        judge(outcome, seen, damaged, kept=bool(left))
        outcome.said[f"lost by bit {bit} of byte {place}"] += outcome.lost - before
        remove(name)
    return outcome


def ring_of(content: Left, ring: int) -> str:
    """The segment with the records of the producer `ring`, which are whole."""
    for part in content.keys() - {min(content)}:
        reader = RingReader(RingMemory(memoryview(bytearray(content[part]))[HEADER_BYTES:]))
        if reader.take(*reader.replay()[0]).group in groups_of(ring):
            return part
    raise AssertionError(f"no segment has records of producer {ring}")


# -- a stranger


def stranger(name: str, content: Left) -> Outcome:
    """Somebody who can see every socket binds the addresses that the next owners would have, did they count."""
    outcome = Outcome()
    restore(name, content)
    owner = _child("own", name)
    prefix = f"@asyncrl/{content[name][20:36].hex()}/"
    rows = [row.split()[-1] for row in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()]
    number = next(int(row.removeprefix(prefix)) for row in rows if row.startswith(prefix))
    sockets = []
    for ahead in range(1, 65):
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        taken.bind(f"\0{prefix[1:]}{number + ahead}")
        taken.listen(1)
        sockets.append(taken)
    end([owner])
    for _ in range(8):
        outcome.tried += 1
        judge(outcome, asyncio.run(take_all(name, release=False)), set())
    for taken in sockets:
        taken.close()
    return outcome


def attacks(name: str, *, short: bool) -> dict[str, Outcome]:
    """Every attack, by what it is."""
    content = left_behind(name)
    rare, bits = (7, 1) if short else (1, 8)
    ring, words = ring_of(content, 1), 320 + 40 * SETTINGS.slots
    # Without the version: another one is refused, not damaged.
    header = [place for place in range(0, 100, rare) if not 8 <= place < 16]
    try:
        return {
            "too many open files": failed_openings(name, content, with_few_files, 1, 100),
            "an error at the n-th call": failed_openings(name, content, with_an_error_at, rare, 5000),
            "an owner killed at the n-th call of its opening": failed_openings(name, content, killed_at, rare, 5000),
            "and while it hands out records": failed_openings(name, content, killed_with_records_at, rare, 5000),
            "a bit of one ring's header": flipped(
                name, content, ring, range(HEADER_BYTES, HEADER_BYTES + words, rare), bits
            ),
            "a bit of its segment's header": flipped(name, content, ring, header, bits),
            "a bit of the name's header": flipped(name, content, name, header, bits),
            "a stranger at the next addresses": stranger(name, content),
        }
    finally:
        remove(name)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--short", action="store_true", help="not every call and every byte")
    parser.add_argument("--json", action="store_true")


def main(given: argparse.Namespace) -> int:
    found = attacks(f"attack-{os.getpid()}", short=given.short)
    if given.json:
        print(json.dumps({kind: vars(outcome) for kind, outcome in found.items()}))
    else:
        heads = ("attack", "tried", "owners that failed", "lost", "twice", "errors", "kept aside")
        rows = [(kind, o.tried, o.failed, o.lost, o.twice, o.escaped, o.kept) for kind, o in found.items()]
        print("\n".join(table(heads, rows)))
        said = [f"    {kind}: {n} x {text}" for kind, o in found.items() for text, n in o.said.items() if n]
        print("\n".join(said), file=sys.stderr)
    return int(any(o.lost or o.twice or o.escaped for o in found.values()))
