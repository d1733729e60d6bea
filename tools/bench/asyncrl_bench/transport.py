"""Handing one group from a process to another one that trains it, beside the ways there are: up to the packed microbatch.

One hand-over: 16 trajectories (ids, mask, log-probs, versions, rewards) lie as NumPy arrays in the producer. It is in hand when the
consumer may read them as arrays, and over when the group's packed microbatch exists. Behind the hand-over every side does the same
with asyncrl's own parts (peers/way.py): checks, rows of the store, rewards, advantages, packing, and the clear that ends rows and
leases; in the peers' environments too. One-way times by the machine's one monotonic clock, from put on.

`paced`: one group every millisecond at most, and only when the last one was cleared: latency. `full`: three groups between put and
clear, as fast as it goes: groups per second, and the CPU time of a group in all processes of a side together.

    ring             a record ring and the door of a run: leased, read where it lies until it is packed
    client           the same with `asyncrl.client` as the producer, whose push checks and adds texts and metadata
    queue            multiprocessing.Queue
    line             the line between nodes, encrypted, over the loopback device
    local            no transport at all: what every side pays behind its hand-over
    memcpy           the same bytes copied into a warm buffer in one process, no microbatch: the limit of a hand-over
    ray              Ray's object store, an asynchronous actor                       with --peers, each in an environment
    transferqueue    TransferQueue's simple storage                                  of its own, made once and kept in
    atropos          Atropos' HTTP API, its own `run-api`                            the cache

What is handed over as arrays is the store's only once it is copied, as by `Runtime.submit`; a record of the ring is leased.
Then, for asyncrl alone and over sizes: the write bandwidth against memcpy, and what a read costs, up to the stash.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import asyncrl
from asyncrl.telemetry.machine import describe_cpu

from . import transport_report as report
from .command import Bench, Measured, Place, child_options, option, positive, turned
from .job import LOOPS, BenchError, HandoverJob
from .peers.handover_group import MEMBERS, footprint, prompt_of
from .processes import environment, peer_python

OWN = ("memcpy", "local", "ring", "client", "queue", "line")
IN_BOTH_LOOPS = ("ring",)  # the others in uvloop, as a run
PEERS = ("ray", "transferqueue", "atropos")
PACES = {"paced": 0.001, "full": 0.0}
WARM_UP = 0.1  # share of the groups that is not counted


def check(options: argparse.Namespace) -> None:
    if options.sides is None:
        options.sides = [*OWN, *(PEERS if options.peers else ())]


def cases(sides: Sequence[str]) -> list[tuple[str, str]]:
    """(side, loop): the ring once per event loop."""
    return [(side, loop) for side in sides for loop in (LOOPS if side in IN_BOTH_LOOPS else ("",))]


def measure(place: Place) -> Measured:
    """Errors: `BenchError` for asyncrl's own sides."""
    options, load = place.options, os.getloadavg()[0]
    pythons = {side: peer_python(side, place.cache) for side in PEERS if side in options.sides}
    runs: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for repetition in range(options.repeats):
        for found in repetition_of(place, pythons, repetition):
            runs.append(found)
            place.write(**report.document(runs, costs))
        for tokens in options.costs:
            place.say(f"costs of 16 x {tokens}, repetition {repetition + 1}")
            job = HandoverJob("costs", "uvloop", tokens, min(options.groups, 200), 0.0, options.seconds)
            costs.append(
                {"tokens": tokens, "repetition": repetition, **place.own("costs", job, f"{tokens}-{repetition}")}
            )
            place.write(**report.document(runs, costs))
    lines = report.tables(runs, costs)
    loads = f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} behind"  # what else ran disturbs every figure
    head = f"`{place.command}`, {time.strftime('%Y-%m-%d')}, {describe_cpu()}, {os.cpu_count()} cores, {loads}"
    place.file(".md").write_text("\n".join([head, "", *lines, ""]), encoding="utf-8")
    return Measured(lines, lambda path: report.draw(path, runs, costs))


def repetition_of(
    place: Place, pythons: Mapping[str, Path], repetition: int, paces: Mapping[str, float] = PACES
) -> Iterator[dict[str, Any]]:
    """Every case once; the order turns with every repetition."""
    options = place.options
    for tokens in options.tokens:
        for mode, pace in paces.items():
            for side, loop in turned(cases(options.sides), repetition):
                place.say(f"{side} {loop}: 16 x {tokens}, {mode}, repetition {repetition + 1}")
                job = HandoverJob(side, loop, tokens, options.groups, pace, options.seconds)
                measured = partial(place.own, "handover")
                if side in pythons:
                    measured = partial(place.peer, pythons[side], f"handover_{side}", given=peer_environment(place))
                try:
                    found = measured(job, f"{side}-{loop}-{tokens}-{mode}")
                except BenchError as error:
                    if side not in pythons:
                        raise
                    place.say(f"left out: {error}")  # a peer that fails costs its own figures, not the other sides'
                    continue
                where = {"tokens": tokens, "bytes": footprint(tokens), "mode": mode, "side": side, "loop": loop}
                yield where | {"repetition": repetition, **figures(found, tokens), "versions": found["versions"]}


def peer_environment(place: Place) -> dict[str, str]:
    """asyncrl and nothing else from here: the folder that it lies in may hold all packages of this interpreter."""
    folder = place.scratch / "packages"
    folder.mkdir(exist_ok=True)
    link = folder / "asyncrl"
    if not link.is_symlink():
        link.symlink_to(Path(asyncrl.__file__).parent)
    return environment(1, package=False) | {"PYTHONPATH": str(folder)}


def figures(found: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Of one run. `times` of each group in ns, those of the warm-up left out: (put, in hand); (put, in hand, packed); of a ring
    also when its record was written. Errors: `BenchError` where the microbatches do not hold what was put."""
    times = found["times"]
    kept = np.array(times[int(WARM_UP * len(times)) :], np.int64)
    held = (kept[:, 1] - kept[:, 0]) / 1e3
    seconds = float(kept[:, :3].max() - kept[0, 0]) / 1e9
    row: dict[str, Any] = {"groups": len(kept), "groups_per_s": len(kept) / seconds, "hand_us": float(np.median(held))}
    if kept.shape[1] > 2:
        taken = (kept[:, 2] - kept[:, 0]) / 1e3
        row["p50_us"], row["p99_us"] = np.percentile(taken, [50, 99]).tolist()
        row["cpu_us"] = found["cpu_s"] / len(times) * 1e6
        row["packed"] = complete(found, tokens)
    if kept.shape[1] > 3:
        parts = np.diff(kept[:, [0, 3, 1, 2]], axis=1) / 1e3
        row |= dict(zip(report.PARTS, np.median(parts, axis=0).tolist(), strict=True))
    return row


def complete(found: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """What the microbatches of a run held: every token of every group that was put, once. Errors: `BenchError`."""
    groups, prompt = len(found["times"]), prompt_of(tokens)
    completion = tokens - prompt
    put = {
        "groups": groups,
        "microbatches": groups,
        "sequences": groups * MEMBERS,
        "packed_tokens": groups * (prompt + MEMBERS * (completion - 1)),  # the last token of a member is only predicted
        "scored_tokens": groups * MEMBERS * completion,
    }
    if found["packed"] != put:
        raise BenchError(f"put was {put}, the microbatches held {found['packed']}")
    leases = found.get("leases", {"taken": groups, "ended": groups, "outstanding": 0})
    if leases != {"taken": groups, "ended": groups, "outstanding": 0}:
        raise BenchError(f"of {groups} groups these leases are known: {leases}; all have to be taken and ended")
    return put


BENCH = Bench(
    "transport",
    __doc__,
    "16 x 256 tokens, 40 hand-overs",
    (
        option("--peers", False, "Ray, TransferQueue and Atropos too (some minutes more, and once to install)"),
        option("--sides", None, "these alone", nargs="+", choices=(*OWN, *PEERS)),
        option("--tokens", [2048, 8192, 32768], "of each of the 16 trajectories", [256], nargs="+", type=positive),
        option("--groups", 1000, "hand-overs per run", 40),
        option("--seconds", 5.0, "no new hand-over in a run after that"),
        option("--repeats", 3, "the sides alternate; medians are shown", 1),
        option(
            "--costs", [512, 2048, 8192, 20480, 81920, 327680], "sizes of the write and read costs; none: left out",
            [256, 1024], nargs="*", type=int,
        ),
        *child_options("bench_transport", 300.0),
    ),
    measure,
    check,
)  # fmt: skip
