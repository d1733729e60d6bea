"""`asyncrl bench generate --sweep`: milliseconds of a decode step by sequences and context, against what must move.

A step cannot be faster than its FLOP at the GEMM rate, nor than its bytes (weights once, keys and values once) at the rate
of reading memory; the larger of the two is the limit of the cell. A cliff: between two neighbours the step gets slower by
more than the limit does; the table gives the worst such factor.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command import Measured, Place
from .job import RatesJob, SweepJob
from .plots import markdown, plot

Cells = list[dict[str, Any]]


def measure(place: Place) -> Measured:
    options, model = place.options, place.model()
    found: dict[str, Cells] = {}
    rates: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[Cells]] = {dtype: [] for dtype in options.dtypes}
    for repetition in range(options.repetitions):
        for dtype in options.dtypes:
            place.say(f"asyncrl: decode steps, {dtype}, repetition {repetition + 1}")
            label = f"{dtype}-{repetition}"
            seen = place.own("rates", RatesJob(model, dtype, options.threads, memory=True), label)
            rates[dtype] = {key: max(value, rates.get(dtype, {}).get(key, value)) for key, value in seen.items()}
            job = SweepJob.asked(options, model=model, dtype=dtype, warmup_steps=1)
            runs[dtype].append(place.own("sweep", job, label)["cells"])
            found = {name: medians(each, rates[name]) for name, each in runs.items() if each}
            worst = {name: dict(zip(("factor", "where"), cliff(cells), strict=True)) for name, cells in found.items()}
            place.write(bench="generate --sweep", rates=rates, worst_step=worst, cells=found)
    return Measured(
        [line for dtype, cells in found.items() for line in table(dtype, cells)], lambda path: draw(path, found)
    )


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


def table(dtype: str, cells: Cells) -> list[str]:
    """A row per number of sequences, a column per context; each cell: ms, and how often the limit."""
    contexts = sorted({cell["context"] for cell in cells})
    at = {(cell["sequences"], cell["context"]): cell for cell in cells}
    rows = [
        [sequences, *(_shown(at[sequences, context]) for context in contexts)]
        for sequences in sorted({cell["sequences"] for cell in cells})
    ]
    worst, where = cliff(cells)
    return [
        f"{dtype}: ms of a decode step (times its limit)",
        "",
        *markdown(["sequences", *(f"context {context}" for context in contexts)], rows),
        "",
        f"worst step between neighbours beyond what must move: {worst:.2f}x" + (f" ({where})" if where else ""),
        "",
    ]


def _shown(cell: dict[str, Any]) -> str:
    return f"{1e3 * cell['seconds']:.1f} ({cell['times_limit']:.1f}x)" if "seconds" in cell else "too large"


def draw(path: Path, found: dict[str, Cells]) -> None:
    """Per dtype, ms by context, a line per number of sequences and its limit dashed."""
    with plot(path, 4.2 * len(found), panels=len(found)) as panels:
        for axes, (dtype, cells) in zip(panels, found.items(), strict=True):
            for number, sequences in enumerate(sorted({cell["sequences"] for cell in cells})):
                row = [cell for cell in cells if cell["sequences"] == sequences and "seconds" in cell]
                places, color = [cell["context"] for cell in row], f"C{number}"
                axes.plot(places, [1e3 * cell["seconds"] for cell in row], "o-", color=color, label=f"{sequences}")
                axes.plot(places, [1e3 * cell["limit_seconds"] for cell in row], "--", color=color, linewidth=1)
            axes.set(xscale="log", yscale="log", xlabel="context", ylabel="ms of a decode step", title=dtype)
            axes.legend(frameon=False, fontsize=8, title="sequences")
