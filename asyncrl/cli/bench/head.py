"""`asyncrl bench head`: log-probs, entropy and gradients of the LM head alone, against full logits with autograd and TRL's heads.

    for each repetition:
        memory of each side in each dtype, a fresh process each
        time of asyncrl and of full logits in turns, in each dtype, for a token-level and for a sequence-level loss
        time of TRL's and of full logits in turns, in each dtype

Memory: most resident bytes (on a GPU: allocated ones) during forward, loss and backward above those before them, entropy bonus
and temperature on, the weight frozen (so without its gradient); asyncrl's packed copy of the weight counts. Time: the same with
the gradient of the weight. Full logits keep the softmax in the dtype of the products, the cheapest form of them. On a GPU with
liger-kernel, asyncrl's head by Liger's kernels is one more side of both. The JSON is written after every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

from . import report, shares
from .job import LIGER, PEERS, BenchError, HeadJob
from .processes import environment, run_child, run_json, trl_python
from .shares import Place, positive

LOSSES = {
    "token": "dapo",
    "sequence": "gspo",
}  # a loss of each level; both divide nothing here, so the level is all that differs
TIME_BOUNDS = {"token": 1.10, "sequence": 1.40}  # of full logits
MEMORY_BOUND = 1 / 8
LABELS = {"naive": "full logits", LIGER: "asyncrl, liger"}
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
_PLACES = ("--trl-python", "--cache", "--out")
_QUICK: dict[str, Any] = {
    "tokens": 64, "hidden": 16, "vocabulary": 512, "sequences": 4, "steps": 1, "repetitions": 1, "dtypes": "float32",
    "peer": "none", "threads": 1, "device": "cpu",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "tokens": 4096, "hidden": 576, "vocabulary": 49_152, "sequences": 32, "steps": 3, "repetitions": 1,
    "dtypes": "float32,bfloat16", "peer": "trl", "threads": 2, "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadRun:
    """One child process. `load`: of the machine just before, by its own measure; other work makes times wait."""

    dtype: str
    repetition: int
    measure: str  # memory or time
    what: str  # the side, or the level of the loss; `trl` for the times of TRL's sides
    load: float
    result: dict[str, Any]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench head", allow_abbrev=False, description=__doc__.partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--resume", action="store_true", help="go on with an interrupted call: runs in its file are not made again")
    add("--quick", action="store_true", help="smoke test: 64 tokens, a vocabulary of 512, one step, asyncrl alone")
    add("--tokens", type=positive, help="scored tokens (4096)")
    add("--hidden", type=positive, help="hidden size (576)")
    add("--vocabulary", type=positive, help="rows of the head (49152)")
    add("--sequences", type=positive, help="of equal length; divides --tokens (32)")
    add("--steps", type=positive, help="measured steps of a side in a run; the median of their ratios counts (3)")
    add("--device", choices=("cpu", "cuda"), help="cpu (default), or the GPU: there TRL needs --trl-python")
    shares.common_options(
        parser,
        "bench_head",
        model=False,
        repetitions="of everything; medians are shown (1)",
        without_trl="full logits alone",
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    complain = parser()
    given = complain.parse_args(arguments)
    options = shares.fill(complain, given, _QUICK if given.quick else _DEFAULTS)
    if options.tokens % options.sequences:
        complain.error(f"--sequences {options.sequences} does not divide {options.tokens} tokens")
    if options.device == "cuda" and options.peer == "trl" and options.trl_python is None:
        complain.error(
            "--device cuda: the environment with TRL that is made here has no CUDA; --trl-python, or --peer none"
        )
    return options


def measure(place: Place, command: str) -> str:
    options = place.options
    runs = _earlier(options) if options.resume else []
    done = {(run.repetition, run.measure, run.what, run.dtype) for run in runs}
    python = trl_python(options.trl_python, place.cache) if options.peer == "trl" else None
    for repetition in range(options.repetitions):
        for kind, what, dtype in _cases(options):
            if (repetition, kind, what, dtype) in done:
                continue
            place.say(f"{kind}, {what}: {dtype}, repetition {repetition + 1}")
            load = os.getloadavg()[0]
            result = _run(place, _job(options, dtype, kind, what), python, f"{kind}-{what}-{dtype}-{repetition}")
            runs.append(HeadRun(dtype, repetition, kind, what, load, result))
            _write(options, command, runs)
    written = _write(options, command, runs)
    entries = summarise(runs)
    plot = written.with_suffix(".png")
    also = f" and {plot}" if write_plot(plot, entries) else ""
    return f"{table(entries)}\n\nwritten: {written}{also}"


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


def _run(place: Place, job: HeadJob, python: Path | None, label: str) -> dict[str, Any]:
    options, log = place.options, place.scratch / f"{label}.log"
    file = job.write(place.scratch / f"{label}.json")
    if job.side not in _PEER_SIDES:
        return run_child(["head", file], threads=options.threads, log=log, timeout_s=options.timeout)
    assert python is not None
    command = [python, PEERS / "trl_head.py", file]
    own = environment(options.threads, package=False)
    return run_json(command, environment=own, log=log, timeout_s=options.timeout)


def _earlier(options: argparse.Namespace) -> list[HeadRun]:
    """The runs in the file of an interrupted call. Errors: BenchError where it measured something else."""
    path = Path(options.out) / f"{options.name}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    for name in _SIZES:
        there = content["options"].get(name, _DEFAULTS[name])
        if there != getattr(options, name):
            raise BenchError(f"--resume: {path} has --{name} {there}, this call {getattr(options, name)}")
    return [HeadRun(**run) for run in content["runs"]]


def _job(options: argparse.Namespace, dtype: Any, kind: Any, what: str) -> HeadJob:
    return HeadJob(
        tokens=options.tokens,
        hidden=options.hidden,
        vocabulary=options.vocabulary,
        dtype=dtype,
        threads=options.threads,
        measure=kind,
        side=what,
        loss=LOSSES.get(what, LOSSES["token"]),
        steps=options.steps,
        sequences=options.sequences,
        device=options.device,
        liger=_liger(options),
    )


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


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Markdown: memory by side, then the times beside full logits."""
    lines = ["| dtype | side | MiB above the inputs | of full logits |", "|---|---|---|---|"]
    for entry in entries:
        for side, value in entry["head_bytes"].items():
            share = entry["memory_share"].get(side)
            text = "" if not share else f"1/{1 / share:.1f}"
            lines.append(f"| {entry['dtype']} | {LABELS.get(side, side)} | {value / (1 << 20):.0f} | {text} |")
    lines += [
        "",
        "| dtype | loss | side | s | full logits, s | ratio | ratio of CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        for what, sides in entry["times"].items():
            level = f"{what}-level ({LOSSES[what]})" if what in LOSSES else "reinforce"
            for side, f in sides.items():
                lines.append(
                    f"| {entry['dtype']} | {level} | {LABELS.get(side, side)} | {f['seconds']:.2f} | {f['naive_seconds']:.2f} "
                    f"| {f['ratio']:.2f} | {f['cpu_ratio']:.2f} |"
                )
    return "\n".join(lines)


def _write(options: argparse.Namespace, command: str, runs: Sequence[HeadRun]) -> Path:
    path = Path(options.out) / f"{options.name}.json"
    kept = {key: value for key, value in vars(options).items() if f"--{key}".replace("_", "-") not in _PLACES}
    versions = {run.what: run.result["versions"] for run in runs if run.measure == "memory"}
    content = {
        "bench": "head",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command,
        "options": kept,
        "cpu": describe_cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "bounds": {"memory_share": MEMORY_BOUND, "time_ratio": TIME_BOUNDS},
        "summary": summarise(runs),
        "runs": [asdict(run) for run in runs],
    }
    report.write_json(path, content)
    return path


def write_plot(path: Path, entries: Sequence[dict[str, Any]]) -> bool:
    """Bars of memory per dtype and side, with the bound. False without matplotlib."""
    if not report.matplotlib_found():
        return False
    from matplotlib import pyplot

    sides = list(dict.fromkeys(side for entry in entries for side in entry["head_bytes"]))
    figure, axes = pyplot.subplots(figsize=(2.5 + 2.4 * len(entries), 3.8), layout="constrained")
    width = 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        places = [i + (number - (len(sides) - 1) / 2) * width for i in range(len(entries))]
        heights = [entry["head_bytes"].get(side, 0) / (1 << 20) for entry in entries]
        axes.bar_label(axes.bar(places, heights, width * 0.92, label=LABELS.get(side, side)), fmt="%.0f", fontsize=8)
    for i, entry in enumerate(entries):
        bound = entry["head_bytes"].get("naive", 0) * MEMORY_BOUND / (1 << 20)
        axes.hlines(bound, i - 0.42, i + 0.42, colors="black", linestyles="dashed", linewidth=1)
        axes.annotate("1/8", (i + 0.43, bound), fontsize=8, va="center")
    axes.set_xticks(range(len(entries)), [entry["dtype"] for entry in entries])
    axes.set_ylabel("MiB of the head, forward and backward")
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=8)
    report.save_plot(figure, axes, path)
    return True


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    command = shares.public_command("head", arguments, _PLACES)
    return shares.call(options, lambda place: measure(place, command))
