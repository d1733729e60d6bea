"""Log-probs, entropy and gradients of the LM head alone, against full logits with autograd and TRL's heads.

    for each repetition:
        memory of each side in each dtype, a fresh process each
        time of asyncrl and of full logits in turns, in each dtype, for a token-level and for a sequence-level loss
        time of TRL's and of full logits in turns, in each dtype

Memory: most resident bytes (on a GPU: allocated ones) during forward, loss and backward above those before them, entropy bonus
and temperature on, the weight frozen (so without its gradient); asyncrl's packed copy of the weight counts. Time: the same with
the gradient of the weight. Full logits keep the softmax in the dtype of the products, the cheapest form of them. On a GPU with
liger-kernel, asyncrl's head by Liger's kernels is one more side of both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .command import Bench, Measured, Place, cuda_peer, option, peer_options, run_options
from .job import LIGER, BenchError, HeadJob
from .plots import grouped_bars, limit_line, markdown, plot
from .processes import peer_python

LOSSES = {"token": "dapo", "sequence": "gspo"}  # both divide nothing here, so the level is all that differs
TIME_BOUNDS = {"token": 1.10, "sequence": 1.40}  # of full logits
MEMORY_BOUND = 1 / 8
LABELS = {"naive": "full logits", LIGER: "asyncrl, liger"}
MIB = 1 << 20
_PEER_SIDES = ("trl", "trl_logits")
_SIZES = (
    "tokens",
    "hidden",
    "vocabulary",
    "sequences",
    "threads",
    "steps",
    "device",
)  # what runs of one file have in common


@dataclass(frozen=True, slots=True)
class HeadRun:
    """One child process. `load`: of the machine just before, by its own measure; other work makes times wait."""

    dtype: str
    repetition: int
    measure: str  # memory or time
    what: str  # the side, or the level of the loss; `trl` for the times of TRL's sides
    load: float
    result: dict[str, Any]


def check(options: argparse.Namespace) -> str | None:
    if options.tokens % options.sequences:
        return f"--sequences {options.sequences} does not divide {options.tokens} tokens"
    return cuda_peer(options)


def measure(place: Place) -> Measured:
    options = place.options
    runs = _earlier(options) if options.resume else []
    done = {(run.repetition, run.measure, run.what, run.dtype) for run in runs}
    python = peer_python("trl", place.cache, options.trl_python) if options.peer == "trl" else None
    for repetition in range(options.repetitions):
        for kind, what, dtype in _cases(options):
            if (repetition, kind, what, dtype) in done:
                continue
            place.say(f"{kind}, {what}: {dtype}, repetition {repetition + 1}")
            load = os.getloadavg()[0]
            job, label = _job(options, dtype, kind, what), f"{kind}-{what}-{dtype}-{repetition}"
            if python is not None and what in _PEER_SIDES:
                result = place.peer(python, "trl_head", job, label)
            else:
                result = place.own("head", job, label)
            runs.append(HeadRun(dtype, repetition, kind, what, load, result))
            _write(place, runs)
    _write(place, runs)
    entries = summarise(runs)
    return Measured(table(entries), lambda path: draw(path, entries))


def _cases(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(measure, what, dtype) in the order of the runs."""
    peers = _PEER_SIDES if options.peer == "trl" else ()
    own = ("asyncrl", LIGER) if _liger(options) else ("asyncrl",)
    parts = [("memory", side) for side in (*own, "naive", *peers)] + [("time", level) for level in LOSSES]
    if peers:
        parts.append(("time", "trl"))
    return [(kind, what, dtype) for kind, what in parts for dtype in options.dtypes]


def _liger(options: argparse.Namespace) -> bool:
    return options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def _earlier(options: argparse.Namespace) -> list[HeadRun]:
    """The runs in the file of an interrupted call. Errors: BenchError where it measured something else."""
    path = Path(options.out) / f"{options.name}.json"
    if not path.exists():
        return []
    content, defaults = json.loads(path.read_text(encoding="utf-8")), BENCH.parse([])
    for name in _SIZES:
        there = content["options"].get(name, getattr(defaults, name))
        if there != getattr(options, name):
            raise BenchError(f"--resume: {path} has --{name} {there}, this call {getattr(options, name)}")
    return [HeadRun(**run) for run in content["runs"]]


def _job(options: argparse.Namespace, dtype: Any, kind: Any, what: str) -> HeadJob:
    loss = LOSSES.get(what, LOSSES["token"])
    return HeadJob.asked(options, dtype=dtype, measure=kind, side=what, loss=loss, liger=_liger(options))


def summarise(runs: Sequence[HeadRun]) -> list[dict[str, Any]]:
    """By dtype: bytes of each side and their share of full logits; medians of seconds and of paired ratios to full logits."""
    entries = []
    for dtype in dict.fromkeys(run.dtype for run in runs):
        own = [run for run in runs if run.dtype == dtype]
        found: dict[str, list[float]] = {}
        for run in own:
            if run.measure == "memory":
                found.setdefault(run.what, []).append(run.result["head_bytes"])
        memory = {side: statistics.median(values) for side, values in found.items()}
        base = memory.get("naive", 0)
        entry: dict[str, Any] = {"dtype": dtype, "head_bytes": memory, "memory_share": {}, "times": {}}
        if base:
            entry["memory_share"] = {side: value / base for side, value in memory.items() if side != "naive"}
        for what in dict.fromkeys(run.what for run in own if run.measure == "time"):
            taken = [run.result["times"] for run in own if run.measure == "time" and run.what == what]
            entry["times"][what] = {side: _against(taken, side) for side in taken[0] if side != "naive"}
        entries.append(entry)
    return entries


def _against(taken: Sequence[Mapping[str, Any]], side: str) -> dict[str, float]:
    """`side` beside full logits, over all steps of all runs: those that ran next to each other are compared."""
    figures: dict[str, float] = {}
    for unit, name in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
        ours = [value for times in taken for value in times[side][unit]]
        full = [value for times in taken for value in times["naive"][unit]]
        figures[unit], figures[f"naive_{unit}"] = statistics.median(ours), statistics.median(full)
        figures[name] = statistics.median(a / b for a, b in zip(ours, full, strict=True))
    return figures


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Memory by side, then the times beside full logits."""
    memory, times = [], []
    for entry in entries:
        for side, value in entry["head_bytes"].items():
            share = entry["memory_share"].get(side)
            text = f"1/{1 / share:.1f}" if share else ""
            memory.append([entry["dtype"], LABELS.get(side, side), f"{value / MIB:.0f}", text])
        for what, sides in entry["times"].items():
            level = f"{what}-level ({LOSSES[what]})" if what in LOSSES else "reinforce"
            for side, f in sides.items():
                found = [f"{f[key]:.2f}" for key in ("seconds", "naive_seconds", "ratio", "cpu_ratio")]
                times.append([entry["dtype"], level, LABELS.get(side, side), *found])
    return [
        *markdown(["dtype", "side", "MiB above the inputs", "of full logits"], memory),
        "",
        *markdown(["dtype", "loss", "side", "s", "full logits, s", "ratio", "ratio of CPU seconds"], times),
    ]


def _write(place: Place, runs: Sequence[HeadRun]) -> None:
    place.write(
        versions={run.what: run.result["versions"] for run in runs if run.measure == "memory"},
        bounds={"memory_share": MEMORY_BOUND, "time_ratio": TIME_BOUNDS},
        summary=summarise(runs),
        runs=[asdict(run) for run in runs],
    )


def draw(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Bars of memory per dtype and side, with the bound."""
    sides = dict.fromkeys(side for entry in entries for side in entry["head_bytes"])
    bars = {LABELS.get(side, side): [entry["head_bytes"].get(side, 0) / MIB for entry in entries] for side in sides}
    with plot(path, 2.5 + 2.4 * len(entries)) as (axes,):
        grouped_bars(axes, [entry["dtype"] for entry in entries], bars, "MiB of the head, forward and backward")
        for i, entry in enumerate(entries):
            limit_line(axes, i, entry["head_bytes"].get("naive", 0) * MEMORY_BOUND / MIB, "1/8")


BENCH = Bench(
    "head",
    __doc__,
    "64 tokens, a vocabulary of 512, one step, asyncrl alone",
    (
        option("--resume", False, "go on with an interrupted call: runs in its file are not made again"),
        option("--tokens", 4096, "scored tokens", 64),
        option("--hidden", 576, "hidden size", 16),
        option("--vocabulary", 49_152, "rows of the head", 512),
        option("--sequences", 32, "of equal length; divides --tokens", 4),
        option("--steps", 3, "measured steps of a side in a run; the median of their ratios counts", 1),
        option("--device", "cpu", "cpu, or cuda: a GPU, where TRL needs --trl-python", choices=("cpu", "cuda")),
        *run_options("bench_head", repetitions=1),
        *peer_options("trl", "trl"),
    ),
    measure,
    check,
)
