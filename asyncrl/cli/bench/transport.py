"""`asyncrl bench transport`: handing one group from a process to another one's event loop, beside the ways there are.

One hand-over: 16 trajectories (ids, mask, log-probs, versions) lie as NumPy arrays in the producer; it is over when the
consumer holds them as arrays and may keep them. One-way time by the machine's one monotonic clock; the stamp travels with
the group. `paced`: one group every millisecond; `full`: as fast as it goes, and then groups per second count.

    ring        a leased record in the event loop, asyncio or uvloop
    stash       the same, as 16 trajectories (views) in the stash, whole
    queue       multiprocessing.Queue, pickled arrays; a blocking get, which is its fastest form
    memcpy      the same bytes copied into a warm buffer in one process: the limit
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.data.stash import Stash, Status
from asyncrl.records.layout import USER_SECTIONS, Section
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import Draft, plan
from asyncrl.transport.producer import Producer
from asyncrl.transport.record_ring import RecordRing
from asyncrl.transport.ring_types import RingSettings

from .processes import PACKAGE_ROOT, environment

MEMBERS = 16
STAMP = USER_SECTIONS.start
SIDES = ("memcpy", "ring", "stash", "queue")
WARM_UP = 0.1  # share of the groups that is not counted
Columns = dict[int, list[np.ndarray[Any, Any]]]


def columns(tokens: int) -> Columns:
    source = np.random.default_rng(0)
    return {
        Section.TOKENS: [source.integers(0, 50_000, tokens, np.int32) for _ in range(MEMBERS)],
        Section.MASK: [np.ones(tokens, bool) for _ in range(MEMBERS)],
        Section.LOGPROBS: [-source.random(tokens, np.float32) for _ in range(MEMBERS)],
        Section.VERSIONS: [np.zeros(tokens, np.int32) for _ in range(MEMBERS)],
    }


def footprint(tokens: int) -> int:
    """Bytes of one group."""
    return MEMBERS * tokens * (4 + 1 + 4 + 4)


def _paces(groups: int, pace_s: float) -> Iterator[int]:
    """Group numbers, each at its time; a late one is not made up for."""
    due = time.monotonic()
    for group in range(groups):
        if pace_s:
            due = max(due + pace_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        yield group


def produce_ring(name: str, tokens: int, groups: int, pace_s: float) -> None:
    data = columns(tokens)
    with Producer.attach(name) as producer:
        for group in _paces(groups, pace_s):
            stamp = time.monotonic_ns().to_bytes(8, "little")
            producer.put(plan(Draft(group, range(MEMBERS), MEMBERS, {**data, STAMP: stamp})))


def produce_queue(queue: Any, tokens: int, groups: int, pace_s: float) -> None:
    data = columns(tokens)
    for group in _paces(groups, pace_s):
        queue.put((group, time.monotonic_ns(), data))


async def consume_ring(tokens: int, groups: int, pace_s: float, *, stash: bool) -> list[tuple[int, int]]:
    """(put, usable) in monotonic ns of every group."""
    settings = RingSettings(
        size=max(1 << 26, 12 * footprint(tokens)), slots=64, ring_bytes=8 * footprint(tokens) + (1 << 16)
    )
    name = f"bench-{os.getpid()}"
    times = []
    async with RecordRing(name, settings) as ring:
        process = multiprocessing.get_context("spawn").Process(target=produce_ring, args=(name, tokens, groups, pace_s))
        process.start()
        waiting: Stash[int] = Stash(1024)
        for _ in range(groups):
            delivery = await ring.get()
            record = delivery.record
            if stash:
                for trajectory in trajectories_of(record, copy=False):
                    arrival = waiting.add(trajectory, record.group, lease=delivery, epoch=record.epoch)
                if arrival.status is not Status.WHOLE:
                    raise AssertionError(f"the group is {arrival.status}")
            times.append((int.from_bytes(record.strings[STAMP], "little"), time.monotonic_ns()))
            delivery.release()
        await asyncio.to_thread(process.join)
    return times


def consume_queue(tokens: int, groups: int, pace_s: float) -> list[tuple[int, int]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(8)
    process = context.Process(target=produce_queue, args=(queue, tokens, groups, pace_s))
    process.start()
    times = []
    for _ in range(groups):
        _, put, _ = queue.get()
        times.append((put, time.monotonic_ns()))
    process.join()
    return times


def copy_only(tokens: int, groups: int, _: float) -> list[tuple[int, int]]:
    data = columns(tokens)
    targets = {section: np.empty(MEMBERS * tokens, arrays[0].dtype) for section, arrays in data.items()}
    times = []
    for _group in range(groups):
        begin = time.monotonic_ns()
        for section, arrays in data.items():
            np.concatenate(arrays, out=targets[section])
        times.append((begin, time.monotonic_ns()))
    return times


def measure(side: str, loop: str, tokens: int, groups: int, pace_s: float) -> dict[str, float]:
    """One run, in this process (it is a fresh one)."""
    if side in ("ring", "stash"):
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
        if loop == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            times = runner.run(consume_ring(tokens, groups, pace_s, stash=side == "stash"))
    else:
        times = (consume_queue if side == "queue" else copy_only)(tokens, groups, pace_s)
    kept = times[int(WARM_UP * len(times)) :]
    taken = np.array([usable - put for put, usable in kept]) / 1e3
    seconds = (kept[-1][1] - kept[0][0]) / 1e9
    return {
        "p50_us": float(np.percentile(taken, 50)),
        "p99_us": float(np.percentile(taken, 99)),
        "groups_per_s": len(kept) / seconds,
    }


def _case(side: str, loop: str, tokens: int, groups: int, pace_s: float) -> dict[str, float]:
    words = [side, loop, str(tokens), str(groups), str(pace_s)]
    command = [sys.executable, "-m", "asyncrl.cli.bench.transport", "--child", *words]
    done = subprocess.run(
        command,
        env=environment(1, package=True),
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str]) -> int:
    given = list(arguments)
    if given[:1] == ["--child"]:
        side, loop, tokens, groups, pace = given[1:]
        print(json.dumps(measure(side, loop, int(tokens), int(groups), float(pace))))
        return 0
    parser = argparse.ArgumentParser(
        prog="asyncrl bench transport", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of each of the 16 trajectories"
    )
    parser.add_argument("--groups", type=int, default=1000, help="hand-overs per run")
    parser.add_argument("--repeats", type=int, default=3, help="the sides alternate; the median counts")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--quick", action="store_true", help="a smoke test of some seconds")
    parser.add_argument("--output", type=Path, help="write the figures as JSON to this file")
    options = parser.parse_args(given)
    if options.quick:
        options.tokens, options.groups, options.repeats = options.tokens[:1], 50, 1
    rows = list(_rows(options))
    _print(rows)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for tokens in options.tokens:
        cases = [
            (side, loop)
            for side in options.sides
            for loop in (("asyncio", "uvloop") if side in ("ring", "stash") else ("",))
        ]
        for pace in (0.001, 0.0):
            runs: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
            for _ in range(options.repeats):
                for case in cases:
                    runs[case].append(_case(*case, tokens, options.groups, pace))
            for (side, loop), found in runs.items():
                medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
                mode = "paced" if pace else "full"
                yield {
                    "tokens": tokens,
                    "side": side,
                    "loop": loop,
                    "mode": mode,
                    "bytes": footprint(tokens),
                    **medians,
                }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print("| group | mode | side | p50 us | p99 us | groups/s | GB/s |\n|---|---|---|---:|---:|---:|---:|")
    for row in rows:
        side = f"{row['side']} {row['loop']}".strip()
        rate = f"{row['groups_per_s']:,.0f}" if row["mode"] == "full" else ""
        speed = f"{row['groups_per_s'] * row['bytes'] / 1e9:.2f}" if row["mode"] == "full" else ""
        print(
            f"| {MEMBERS} x {row['tokens']:,} | {row['mode']} | {side} | {row['p50_us']:,.0f} | {row['p99_us']:,.0f} "
            f"| {rate} | {speed} |"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
