"""Handing one group from a process to another one's event loop, beside the ways there are.

One hand-over: 16 trajectories (ids, mask, log-probs, versions) lie as NumPy arrays in the producer; it is over when the
consumer holds them as arrays and may keep them. One-way time by the machine's one monotonic clock. `paced`: one group every
millisecond at most, and only when the last one arrived; `full`: as fast as it goes, and then groups per second count.

    ring, stash      a leased record in the event loop; the same as 16 trajectories in the stash, whole
    tensor           the tensor queue
    queue            multiprocessing.Queue
    memcpy           the same bytes copied into a warm buffer in one process: the limit
    ray              Ray's object store, an asynchronous actor                       with --peers, each in an environment
    transferqueue    TransferQueue's simple storage                                  of its own, made once and kept in
    atropos          Atropos' HTTP API, its own `run-api`                            the cache

Then, for asyncrl alone and over sizes: the write bandwidth against memcpy, and what a read costs. What the consumer does with a
record is in arrival.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.telemetry.machine import describe_cpu

from . import transport_report as report
from .command import Bench, Measured, Place, child_options, option, positive, turned
from .job import LOOPS, BenchError, HandoverJob
from .peers.handover_group import footprint
from .processes import peer_python

OWN = ("memcpy", "ring", "stash", "tensor", "queue")
IN_A_LOOP = ("ring", "stash", "tensor")
PEERS = ("ray", "transferqueue", "atropos")
PACES = {"paced": 0.001, "full": 0.0}
WARM_UP = 0.1  # share of the groups that is not counted


def check(options: argparse.Namespace) -> None:
    if options.sides is None:
        options.sides = [*OWN, *(PEERS if options.peers else ())]


def cases(sides: Sequence[str]) -> list[tuple[str, str]]:
    """(side, loop): asyncrl's own sides once per event loop."""
    return [(side, loop) for side in sides for loop in (LOOPS if side in IN_A_LOOP else ("",))]


def measure(place: Place) -> Measured:
    """Errors: `BenchError` for asyncrl's own sides."""
    options = place.options
    pythons = {side: peer_python(side, place.cache) for side in PEERS if side in options.sides}
    runs: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for repetition in range(options.repeats):
        for found in _repetition(place, pythons, repetition):
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
    place.file(".md").write_text("\n".join([f"`{place.command}`, {describe_cpu()}", "", *lines, ""]))
    return Measured(lines, lambda path: report.draw(path, runs, costs))


def _repetition(place: Place, pythons: dict[str, Path], repetition: int) -> Iterator[dict[str, Any]]:
    """Every case once; the order turns with every repetition."""
    options = place.options
    for tokens in options.tokens:
        for mode, pace in PACES.items():
            for side, loop in turned(cases(options.sides), repetition):
                place.say(f"{side} {loop}: 16 x {tokens}, {mode}, repetition {repetition + 1}")
                job = HandoverJob(side, loop, tokens, options.groups, pace, options.seconds)
                own = partial(place.own, "handover")
                measured = partial(place.peer, pythons[side], f"handover_{side}") if side in pythons else own
                try:
                    found = measured(job, f"{side}-{loop}-{tokens}-{mode}")
                except BenchError as error:
                    if side not in pythons:
                        raise
                    place.say(f"left out: {error}")  # a peer that fails costs its own figures, not the other sides'
                    continue
                where = {"tokens": tokens, "bytes": footprint(tokens), "mode": mode, "side": side, "loop": loop}
                yield where | {"repetition": repetition, **figures(found["times"]), "versions": found["versions"]}


def figures(times: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of the groups after the warm-up; `times`: (put, usable) of each in ns, or (put, usable, written, leased, cut)."""
    kept = np.array(times[int(WARM_UP * len(times)) :], np.int64)
    taken = (kept[:, 1] - kept[:, 0]) / 1e3
    seconds = float(kept[:, 1].max() - kept[0, 0]) / 1e9
    p50, p99 = np.percentile(taken, [50, 99]).tolist()
    found = {"groups": len(kept), "p50_us": p50, "p99_us": p99, "groups_per_s": len(kept) / seconds}
    if kept.shape[1] > 2:
        parts = np.diff(kept[:, [0, 2, 3, 4, 1]], axis=1) / 1e3
        found |= dict(zip(report.PARTS, np.median(parts, axis=0).tolist(), strict=True))
    return found


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
