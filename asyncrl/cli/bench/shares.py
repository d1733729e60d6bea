"""What the benches share: options; and `bench train` and `bench generate`: runs, medians per side, the document. Pure but for JSON.

The limit of a run is the time that its needed FLOP take at the best GEMM rate that the whole call has seen in the dtype.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

from . import report
from .job import MODELS, BenchError, cache_directory
from .processes import run_child

DTYPES = ("float32", "bfloat16")
_PLACES = ("--vllm-python", "--cache", "--out")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side in one repetition. `case` tells what was measured, for people: `64 x 128`."""

    side: str
    dtype: str
    case: str
    repetition: int
    seconds: float
    tokens: float  # those that the rate counts
    needed_flop: float
    gemm_flops: float  # seen beside this run
    peak_bytes: int
    result: dict[str, Any]

    def figures(self, gemm_flops: float | None = None) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "seconds": self.seconds,
            "limit_share": self.needed_flop / (gemm_flops or self.gemm_flops) / self.seconds,
            "peak_gib": self.peak_bytes / report.GIB,
        }


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry per dtype and case, in order: medians per side, and the medians of the paired ratios to each peer."""
    entries = []
    for dtype, case in dict.fromkeys((run.dtype, run.case) for run in runs):
        own = [run for run in runs if (run.dtype, run.case) == (dtype, case)]
        rate = max(run.gemm_flops for run in runs if run.dtype == dtype)
        entry: dict[str, Any] = {"dtype": dtype, "case": case, "gemm_gflops": rate / 1e9, "sides": {}}
        for side in dict.fromkeys(run.side for run in own):
            figures = [run.figures(rate) for run in own if run.side == side]
            medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
            entry["sides"][side] = {"runs": len(figures), **medians}
        ours = {run.repetition: run for run in own if run.side == "asyncrl"}
        for peer in (side for side in entry["sides"] if side != "asyncrl"):
            theirs = {run.repetition: run for run in own if run.side == peer}
            pairs = [(ours[i].figures(), theirs[i].figures()) for i in sorted(ours.keys() & theirs.keys())]
            if pairs:
                ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]
                entry[f"ratio_to_{peer}"] = statistics.median(ratios)
                entry[f"ratios_to_{peer}"] = ratios
                entry[f"memory_ratio_to_{peer}"] = statistics.median(a["peak_gib"] / b["peak_gib"] for a, b in pairs)
        entries.append(entry)
    return entries


def table(entries: Sequence[dict[str, Any]], what: str) -> str:
    """Markdown: a row per dtype, case and side, the ratio on asyncrl's row. `what`: the tokens that are counted."""
    lines = [
        f"| dtype | job | side | {what}/s | ratio | s | of the limit | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        ratios = [
            f"{value:.2f}x {key.removeprefix('ratio_to_')}"
            for key, value in entry.items()
            if key.startswith("ratio_to_")
        ]
        for side, f in entry["sides"].items():
            ratio = ", ".join(ratios) if side == "asyncrl" else ""
            lines.append(
                f"| {entry['dtype']} | {entry['case']} | {side} | {f['tokens_per_s']:.1f} | {ratio} "
                f"| {f['seconds']:.2f} | {f['limit_share']:.1%} | {f['peak_gib']:.2f} |"
            )
    for dtype, rate in {entry["dtype"]: entry["gemm_gflops"] for entry in entries}.items():
        lines += ["", f"GEMM rate, {dtype}: {rate:.0f} GFLOP/s"]
    return "\n".join(lines)


def document(bench: str, runs: Sequence[Run], options: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Everything that was measured, and where, when and with what."""
    return {
        "bench": bench,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command,
        "options": {key: value for key, value in options.items() if f"--{key}".replace("_", "-") not in _PLACES},
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "versions": {run.side: run.result["versions"] for run in runs},
        "summary": summarise(runs),
        "runs": [
            {
                "side": run.side,
                "dtype": run.dtype,
                "case": run.case,
                "repetition": run.repetition,
                **run.figures(),
                "gemm_gflops": run.gemm_flops / 1e9,
                **{key: value for key, value in run.result.items() if key != "versions"},
            }
            for run in runs
        ],
    }


# -- options -----------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def common_options(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    model: bool = True,
    dtypes: str = "which of them",
    repetitions: str = "alternating runs; medians are shown (3)",
    without_trl: str | None = None,
) -> None:
    """What every bench with runs has. `without_trl`: what is measured then; None: TRL is no peer of this bench."""
    add = parser.add_argument
    if model:
        add("--model", help="smollm2 (default), tiny, or a model directory")
    add("--dtypes", help=f"float32,bfloat16: {dtypes}")
    add("--threads", type=positive, help="torch threads of each side (2)")
    add("--repetitions", type=positive, help=repetitions)
    if without_trl is not None:
        add("--peer", choices=("trl", "none"), help=f"trl (default), or {without_trl}")
        add(
            "--trl-python",
            help="interpreter or folder of an existing environment with TRL; else one is made in the cache",
        )
    kept = "models and environments" if model else "environments"
    add("--cache", help=f"where {kept} are kept (~/.cache/asyncrl/bench)")
    add("--out", default="tools/results", help="folder of the results (tools/results)")
    add("--name", default=name, help=f"name of the result files ({name})")
    add("--timeout", type=float, help="seconds that one run may take")


def fill(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    values: Mapping[str, Any],
    **lists: Sequence[str],
) -> argparse.Namespace:
    """`values` where an option was not given; the dtypes, and each of `lists`, as a tuple of known words.

    Exits with 2 and a sentence where they make no sense.
    """
    for name, value in values.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, known in {"dtypes": DTYPES, **lists}.items():
        words = tuple(dict.fromkeys(part.strip() for part in getattr(options, name).split(",")))
        if unknown := [word for word in words if word not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(known)}")
        setattr(options, name, words)
    model = getattr(options, "model", None)
    if model is not None and model not in MODELS and not Path(model).is_dir():
        parser.error(f"--model: {model!r} is neither a directory nor one of {', '.join(MODELS)}")
    return options


def public_command(bench: str, arguments: Sequence[str], places: Sequence[str] = _PLACES) -> str:
    """What is written beside the figures: without the options that only name places on this machine."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip or word.startswith(tuple(f"{option}=" for option in places)):
            skip = False
        elif word in places:
            skip = True
        else:
            kept.append(word)
    return shlex.join(["asyncrl", "bench", bench, *kept])


# -- one call of the tool ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call works: `scratch` holds the jobs and the logs of its runs."""

    options: argparse.Namespace
    cache: Path
    scratch: Path

    @property
    def model(self) -> Path:
        given = self.options.model
        return self.cache / "models" / given if given in MODELS else Path(given).absolute()

    def child(self, command: str, job: Path, label: str) -> dict[str, Any]:
        """A command of `child.py`; the first one makes the model. Errors: `BenchError`."""
        made = [self.options.model] if self.options.model in MODELS else []
        log = self.scratch / f"{label}.log"
        options = self.options
        return run_child([command, job, *made], threads=options.threads, log=log, timeout_s=options.timeout)

    @staticmethod
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def call(options: argparse.Namespace, measure: Callable[[Place], str]) -> int:
    """`measure` in a scratch folder; what it returns is printed. 1 where a run failed: the message names a log in it."""
    cache = cache_directory(options.cache)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    try:
        text = measure(Place(options, cache, scratch))
    except BenchError as error:
        print(f"asyncrl bench: {error}", file=sys.stderr)
        return 1
    print(text)
    shutil.rmtree(scratch, ignore_errors=True)
    return 0
