"""`asyncrl bench generate --sweep`: milliseconds of a decode step by sequences and context, against what must move.

A step cannot be faster than its FLOP at the GEMM rate, nor than its bytes (weights once, keys and values once) at the rate
of reading memory; the larger of the two is the limit of the cell. A cliff: between two neighbours the step gets slower by
more than the limit does; the table gives the worst such factor.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

from . import report
from .job import GenerateJob, SweepJob
from .shares import Place

Cells = list[dict[str, Any]]


def measure(place: Place, command: str) -> str:
    options = place.options
    found: dict[str, Cells] = {}
    rates: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[Cells]] = {dtype: [] for dtype in options.dtypes}
    written = Path()
    for repetition in range(options.repetitions):
        for dtype in options.dtypes:
            place.say(f"asyncrl: decode steps, {dtype}, repetition {repetition + 1}")
            seen = place.child("rates", _rates_job(place, dtype), f"rates-{dtype}-{repetition}")
            rates[dtype] = {key: max(value, rates.get(dtype, {}).get(key, value)) for key, value in seen.items()}
            runs[dtype].append(
                place.child("sweep", _job(place, dtype, repetition), f"sweep-{dtype}-{repetition}")["cells"]
            )
            found = {name: medians(each, rates[name]) for name, each in runs.items() if each}
            written = _write(place, command, found, rates)
    plot = written.with_suffix(".png")
    also = f" and {plot}" if write_plot(plot, found) else ""
    return "\n".join([*(table(dtype, cells) for dtype, cells in found.items()), f"written: {written}{also}"])


def _rates_job(place: Place, dtype: Any) -> Path:
    options = place.options
    job = GenerateJob(
        model=str(place.model),
        prompts="",
        sequences=1,
        group_size=1,
        prompt_tokens=1,
        max_tokens=1,
        dtype=dtype,
        threads=options.threads,
        warmup_tokens=1,
    )
    return job.write(place.scratch / f"rates-{dtype}.json")


def _job(place: Place, dtype: Any, repetition: int) -> Path:
    options = place.options
    job = SweepJob(
        model=str(place.model),
        sequences=options.sequences,
        contexts=options.contexts,
        dtype=dtype,
        threads=options.threads,
        warmup_steps=1,
        steps=options.steps,
        cache_gib=options.cache_gib,
    )
    return job.write(place.scratch / f"sweep-{dtype}-{repetition}.json")


def medians(runs: Sequence[Cells], rates: dict[str, Any]) -> Cells:
    """One cell per size: the median of its seconds, its limit, and how much slower it is. Cells left out keep no seconds."""
    cells = []
    for same in zip(*runs, strict=True):
        cell = {key: same[0][key] for key in ("sequences", "context")}
        if "seconds" in same[0]:
            seconds = statistics.median(one["seconds"] for one in same)
            by_flop, by_bytes = same[0]["flop"] / rates["gemm_flops"], same[0]["bytes"] / rates["read_bytes_per_s"]
            limit = max(by_flop, by_bytes)
            cell |= {
                "seconds": seconds,
                "flop": same[0]["flop"],
                "bytes": same[0]["bytes"],
                "limit_seconds": limit,
                "bound_by": "FLOP" if by_flop >= by_bytes else "bytes",
                "times_limit": seconds / limit,
            }
        cells.append(cell)
    return cells


def cliff(cells: Cells) -> tuple[float, str]:
    """The worst factor by which a step gets slower than its limit does between two neighbours, and where."""
    at = {(cell["sequences"], cell["context"]): cell for cell in cells if "seconds" in cell}
    sequences, contexts = (sorted({key[i] for key in at}) for i in (0, 1))
    worst, where = 1.0, ""
    for (n, context), cell in at.items():
        for other in (_next(sequences, n), context), (n, _next(contexts, context)):
            if other in at:
                factor = at[other]["times_limit"] / cell["times_limit"]
                if factor > worst:
                    worst, where = factor, f"{n} x {context} to {other[0]} x {other[1]}"
    return worst, where


def _next(values: Sequence[int], value: int) -> int:
    """The next larger one; 0 where there is none."""
    return min((other for other in values if other > value), default=0)


def table(dtype: str, cells: Cells) -> str:
    """Markdown: a row per number of sequences, a column per context; each cell: ms, and how often the limit."""
    contexts = sorted({cell["context"] for cell in cells})
    lines = [
        f"{dtype}: ms of a decode step (times its limit)",
        "",
        "| sequences | " + " | ".join(f"context {context}" for context in contexts) + " |",
        "|" + "---|" * (len(contexts) + 1),
    ]
    for sequences in sorted({cell["sequences"] for cell in cells}):
        row = [
            cell
            for context in contexts
            for cell in cells
            if (cell["sequences"], cell["context"]) == (sequences, context)
        ]
        texts = [f"{1e3 * c['seconds']:.1f} ({c['times_limit']:.1f}x)" if "seconds" in c else "too large" for c in row]
        lines.append(f"| {sequences} | " + " | ".join(texts) + " |")
    worst, where = cliff(cells)
    lines += [
        "",
        f"worst step between neighbours beyond what must move: {worst:.2f}x" + (f" ({where})" if where else ""),
        "",
    ]
    return "\n".join(lines)


def _write(place: Place, command: str, found: dict[str, Cells], rates: dict[str, dict[str, Any]]) -> Path:
    options = place.options
    path = Path(options.out) / f"{options.name}.json"
    worst = {dtype: dict(zip(("factor", "where"), cliff(cells), strict=True)) for dtype, cells in found.items()}
    content = {
        "bench": "generate --sweep",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command,
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "rates": rates,
        "worst_step": worst,
        "cells": found,
    }
    report.write_json(path, content)
    return path


def write_plot(path: Path, found: dict[str, Cells]) -> bool:
    """Per dtype, ms by context, a line per number of sequences and its limit dashed. False without matplotlib."""
    if not report.matplotlib_found():
        return False
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(found), figsize=(4.2 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for axes, (dtype, cells) in zip(all_axes[0], found.items(), strict=True):
        for number, sequences in enumerate(sorted({cell["sequences"] for cell in cells})):
            row = [cell for cell in cells if cell["sequences"] == sequences and "seconds" in cell]
            places = [cell["context"] for cell in row]
            axes.plot(places, [1e3 * cell["seconds"] for cell in row], "o-", color=f"C{number}", label=f"{sequences}")
            axes.plot(places, [1e3 * cell["limit_seconds"] for cell in row], "--", color=f"C{number}", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="context", ylabel="ms of a decode step", title=dtype)
        axes.legend(frameon=False, fontsize=8, title="sequences")
        axes.spines[["top", "right"]].set_visible(False)
    report.save_plot(figure, all_axes[0][0], path)
    return True
