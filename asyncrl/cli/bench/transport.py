"""`asyncrl bench transport`: handing one group from a process to another one's event loop, beside the ways there are.

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

Then, for asyncrl alone and over sizes: the write bandwidth against memcpy, and what a read costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.telemetry.machine import describe_cpu

from . import report, shares, transport_report
from .handover import LOOPS
from .job import PEERS, BenchError, HandoverJob
from .peers.handover_group import footprint
from .processes import atropos_python, environment, ray_python, run_json, transferqueue_python
from .shares import Place, positive

OWN = ("memcpy", "ring", "stash", "tensor", "queue")
IN_A_LOOP = ("ring", "stash", "tensor")
PYTHONS = {"ray": ray_python, "transferqueue": transferqueue_python, "atropos": atropos_python}
PACES = {"paced": 0.001, "full": 0.0}
WARM_UP = 0.1  # share of the groups that is not counted

_QUICK: dict[str, Any] = {"tokens": [256], "groups": 40, "repeats": 1, "costs": [256, 1024]}
_DEFAULTS: dict[str, Any] = {
    "tokens": [2048, 8192, 32768], "groups": 1000, "repeats": 3, "costs": [512, 2048, 8192, 20480, 81920, 327680],
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench transport",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a smoke test of some seconds")
    add(
        "--peers",
        action="store_true",
        help="Ray, TransferQueue and Atropos too (some minutes more, and once to install)",
    )
    add("--sides", nargs="+", choices=(*OWN, *PYTHONS), help="these alone")
    add("--tokens", type=positive, nargs="+", help="of each of the 16 trajectories (2048 8192 32768)")
    add("--groups", type=positive, help="hand-overs per run (1000)")
    add("--seconds", type=float, default=5.0, help="no new hand-over in a run after that (5)")
    add("--repeats", type=positive, help="the sides alternate; medians are shown (3)")
    add("--costs", type=int, nargs="*", help="sizes of the write and read costs, as --tokens; none: left out")
    add("--cache", help="where environments are kept (~/.cache/asyncrl/bench)")
    add("--out", default="tools/results", help="folder of the results (tools/results)")
    add("--name", default="bench_transport", help="name of the result files (bench_transport)")
    add("--timeout", type=float, default=300.0, help="seconds that one run may take (300)")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(arguments)
    for name, value in (_QUICK if options.quick else _DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.sides is None:
        options.sides = [*OWN, *(PYTHONS if options.peers else ())]
    return options


def cases(sides: Sequence[str]) -> list[tuple[str, str]]:
    """(side, loop): asyncrl's own sides once per event loop."""
    return [(side, loop) for side in sides for loop in (LOOPS if side in IN_A_LOOP else ("",))]


def measure(place: Place, command: str) -> str:
    """All runs, and the tables. Errors: `BenchError` for asyncrl's own sides; what was measured until then is in the JSON."""
    options = place.options
    pythons = {side: make(place.cache) for side, make in PYTHONS.items() if side in options.sides}
    runs: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    written = Path(options.out) / f"{options.name}.json"
    for repetition in range(options.repeats):
        for found in _repetition(place, pythons, repetition):
            runs.append(found)
            report.write_json(written, transport_report.document(runs, costs, command))
        for tokens in options.costs:
            place.say(f"costs of 16 x {tokens}, repetition {repetition + 1}")
            job = HandoverJob("costs", "uvloop", tokens, min(options.groups, 200), 0.0, options.seconds)
            costs.append({"tokens": tokens, "repetition": repetition, **_own(place, "handover_costs", job)["versions"]})
            report.write_json(written, transport_report.document(runs, costs, command))
    text = transport_report.tables(runs, costs)
    table, plot = written.with_suffix(".md"), written.with_suffix(".png")
    table.write_text(f"`{command}`, {describe_cpu()}\n\n{text}\n")
    also = f", {plot}" if transport_report.write_plot(plot, runs, costs) else ""
    return f"{text}\n\nwritten: {written}, {table}{also}"


def _repetition(place: Place, pythons: dict[str, Path], repetition: int) -> Iterator[dict[str, Any]]:
    """Every case once; the order turns with every repetition."""
    options = place.options
    order = cases(options.sides)
    for tokens in options.tokens:
        for mode, pace in PACES.items():
            for side, loop in order if repetition % 2 == 0 else reversed(order):
                place.say(f"{side} {loop}: 16 x {tokens}, {mode}, repetition {repetition + 1}")
                job = HandoverJob(side, loop, tokens, options.groups, pace, options.seconds)
                try:
                    found = _peer(place, pythons[side], job) if side in pythons else _own(place, "handover", job)
                except BenchError as error:
                    if side not in pythons:
                        raise
                    place.say(f"left out: {error}")  # a peer that fails costs its own figures, not the other sides'
                    continue
                yield {
                    "tokens": tokens,
                    "bytes": footprint(tokens),
                    "mode": mode,
                    "side": side,
                    "loop": loop,
                    "repetition": repetition,
                    **figures(found["times"]),
                    "versions": found["versions"],
                }


def figures(times: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of the groups after the warm-up; `times`: (put, usable) of each in ns, or (put, usable, written, leased, cut)."""
    kept = np.array(times[int(WARM_UP * len(times)) :], np.int64)
    taken = (kept[:, 1] - kept[:, 0]) / 1e3
    seconds = float(kept[:, 1].max() - kept[0, 0]) / 1e9
    p50, p99 = np.percentile(taken, [50, 99]).tolist()
    found = {"groups": len(kept), "p50_us": p50, "p99_us": p99, "groups_per_s": len(kept) / seconds}
    if kept.shape[1] > 2:
        parts = np.diff(kept[:, [0, 2, 3, 4, 1]], axis=1) / 1e3
        found |= dict(zip(transport_report.PARTS, np.median(parts, axis=0).tolist(), strict=True))
    return found


def _own(place: Place, module: str, job: HandoverJob) -> dict[str, Any]:
    return _run(place, job, [sys.executable, "-m", f"asyncrl.cli.bench.{module}"], package=True)


def _peer(place: Place, python: Path, job: HandoverJob) -> dict[str, Any]:
    return _run(place, job, [python, PEERS / f"handover_{job.side}.py"], package=False)


def _run(place: Place, job: HandoverJob, words: list[str | Path], *, package: bool) -> dict[str, Any]:
    label = f"{job.side}-{job.loop}-{job.tokens}-{job.pace_s}"
    file = job.write(place.scratch / f"{label}.json")
    return run_json(
        [*words, file],
        environment=environment(1, package=package),
        log=place.scratch / f"{label}.log",
        timeout_s=place.options.timeout,
    )


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    command = shares.public_command("transport", arguments)
    return shares.call(options, lambda place: measure(place, command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
