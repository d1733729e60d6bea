"""What nodes exchange: transitions of the ledger a second over the line, groups a second beside other ways, and weights.

    ledger    rank 0 with the books in one process; many ranks, each with its own encrypted connection, in a second process.
              Each rank admits a group and ends it, with one request under way. `live`: groups that are in the books all the time.
    groups    groups of 16 trajectories between two processes, beside multiprocessing.Queue and Ray (nodes_groups.py)
    weights   versions to other nodes beside a bare broadcast, and the pause of a node that samples (nodes_weights.py)
    simulated many more nodes in virtual time, with the real pumps, ledger and messages (nodes_simulation.py)

A group costs two to four transitions (admit, claim; with roles also assign and arrive), and a step costs two per rank (commit,
release). `loop us` is the processor time of rank 0's event loop per transition. Its inverse is the rate that rank 0 reaches if the
loop has a core for itself; the threads of zmq encrypt on another core. `cpu us` are the processor times of whole processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

from .command import MODEL, Bench, Measured, Place, child_options, option, positive, turned
from .job import LedgerJob
from .nodes_groups import OPTIONS as GROUP_OPTIONS
from .nodes_groups import measure_groups
from .nodes_simulation import OPTIONS as SIMULATION_OPTIONS
from .nodes_simulation import draw, measure_simulation
from .nodes_weights import OPTIONS as WEIGHT_OPTIONS
from .nodes_weights import measure_weights
from .plots import markdown

GOAL = 20_000
NODES = 4096
PER_GROUP = 4  # transitions of a group with roles


def measure(place: Place) -> Measured:
    if place.options.only_simulated:
        simulated, lines = measure_simulation(place)
        _write_table(place, lines)
        return Measured(lines, lambda path: draw(path, simulated))
    options, runs = place.options, list[dict[str, Any]]()
    for repetition in range(options.repeats):
        for ranks in turned(options.ranks, repetition):
            for live in options.live:
                place.say(f"ledger: {ranks} ranks, {live} live groups, repetition {repetition + 1}")
                job = LedgerJob(ranks, live, options.seconds)
                found = place.own("ledger", job, f"{ranks}-{live}-{repetition}")
                runs.append({"ranks": ranks, "live": live, "repetition": repetition, **found})
                place.write(ledger=runs)
    groups, group_lines = measure_groups(place)
    place.write(ledger=runs, groups=groups)
    weights, weight_lines = measure_weights(place)
    simulated, simulation_lines = measure_simulation(place)
    place.write(ledger=runs, groups=groups, weights=weights, simulation=simulated)
    lines = [*table(runs), "", *group_lines, "", *weight_lines, "", *simulation_lines]
    _write_table(place, lines)
    return Measured(lines, lambda path: draw(path, simulated))


def _write_table(place: Place, lines: Sequence[str]) -> None:
    machine = f"{describe_cpu()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    head = f"`{place.command}`, {time.strftime('%Y-%m-%d')}, {machine}"
    place.file(".md").write_text("\n".join([head, "", *lines, ""]), encoding="utf-8")


def table(runs: list[dict[str, Any]]) -> list[str]:
    rows, fastest = list[list[str]](), float("inf")
    for ranks, live in dict.fromkeys((run["ranks"], run["live"]) for run in runs):
        same = [run for run in runs if (run["ranks"], run["live"]) == (ranks, live)]
        figures = [
            statistics.median(run[name] for run in same) for name in ("per_s", "loop_us", "cpu_us", "ranks_cpu_us")
        ]
        middle, high = (statistics.median(run["latency_ms"][i] for run in same) for i in (0, 1))
        fastest = min(fastest, figures[1])
        rows.append([str(ranks), str(live), *(f"{figure:,.0f}" for figure in figures), f"{middle:.2f}", f"{high:.2f}"])
    names = [
        "ranks",
        "live groups",
        "transitions/s",
        "loop us",
        "cpu us, rank 0",
        "cpu us, ranks",
        "ms, median",
        "ms, 99 %",
    ]
    rate = 1e6 / fastest
    return [
        *markdown(names, rows),
        "",
        f"The goal is {GOAL:,} transitions a second. Rank 0's loop takes {fastest:.0f} us for a transition: {rate:,.0f} a second "
        f"on a core for itself. With {PER_GROUP} transitions a group that is {rate / PER_GROUP:,.0f} groups a second over all "
        f"nodes: each of {NODES:,} nodes may finish a group every {NODES * PER_GROUP / rate:.1f} s.",
    ]


def check(options: argparse.Namespace) -> str | None:
    return None if options.seconds > 0 else "--seconds must be positive"


BENCH = Bench(
    "nodes",
    __doc__,
    "few ranks, half a second",
    (
        option("--ranks", [1, 16, 64], "ranks that ask at once", [2], nargs="+", type=positive),
        option("--live", [0, 1000], "groups that are live all the time", [10], nargs="+", type=int),
        option("--seconds", 5.0, "of each run", 0.5),
        option("--repeats", 3, "runs of everything; medians are shown", 1),
        *GROUP_OPTIONS,
        *WEIGHT_OPTIONS,
        *SIMULATION_OPTIONS,
        MODEL,
        *child_options("nodes", 300.0),
    ),
    measure,
    check,
)
