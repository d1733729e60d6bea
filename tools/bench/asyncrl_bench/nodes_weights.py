"""Weights by broadcast to other nodes: the part of `asyncrl bench nodes` about weights.

broadcast   from the half that the trainer wrote until every node has moved and has said so, over gloo and the line
bare        one `torch.distributed.broadcast` of the same bytes, in turns with the first

step        between two tokens of the node's engine, usually
bind        the move between two steps
pause       the longest time between two tokens around the move, less the usual one. On a CPU the first step packs the weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .command import DTYPES, Place, option, positive, words
from .job import BroadcastJob
from .plots import markdown

OPTIONS = (
    option("--receivers", [1, 2, 3], "nodes that receive", [1], nargs="+", type=positive),
    option("--versions", 16, "versions of a run, after the first", 4),
    option("--sequences", 4, "that a node samples while it moves", 2),
    option("--lora-rank", 0, "of adapters, which then travel alone; 0: all weights are trained", type=int),
    option("--dtypes", "bfloat16", "of the weights, float32 or bfloat16", "float32", type=words(*DTYPES)),
)


def measure_weights(place: Place) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs, and the tables. `place.options` has `OPTIONS` and `model`. Errors: `BenchError`."""
    options, model, runs = place.options, place.model(), list[dict[str, Any]]()
    for dtype in options.dtypes:
        for receivers in options.receivers:
            place.say(f"weights: {dtype}, {receivers} receivers")
            job = BroadcastJob(model, dtype, receivers, options.versions, lora_rank=options.lora_rank)
            found = place.own("broadcast", job, f"{dtype}-{receivers}")
            runs.append({"dtype": dtype, "receivers": receivers, **found})
        place.say(f"weights: {dtype}, a node that samples")
        job = BroadcastJob(model, dtype, 1, options.versions, decodes=True, sequences=options.sequences, pause_s=2.0)
        runs.append(
            {"dtype": dtype, "receivers": 1, "decodes": True, **place.own("broadcast", job, f"{dtype}-decodes")}
        )
    return runs, [*table(runs), "", *pause_table(runs)]


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for dtype, receivers in dict.fromkeys((run["dtype"], run["receivers"]) for run in runs):
        same = [
            run for run in runs if (run["dtype"], run["receivers"]) == (dtype, receivers) and not run.get("decodes")
        ]
        ours, bare = (median(each for run in same for each in run[side]) for side in ("broadcast", "bare"))
        size, sent = same[0]["bytes"], same[0]["sent"]
        rows.append(
            [
                f"{dtype}, {size / 2**20:,.0f} MiB", f"{sent / 2**20:,.1f}", str(receivers), f"{1e3 * ours:,.0f}",
                f"{1e3 * bare:,.0f}", f"{ours / bare:.2f}", f"{sent * receivers / ours / 2**30:.2f}",
            ]
        )  # fmt: skip
    return markdown(["weights", "sent, MiB", "nodes", "broadcast, ms", "bare, ms", "ratio", "GiB/s received"], rows)


def pause_table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for run in runs:
        if run.get("decodes"):
            names = ("step", "step_longest", "bind", "between", "pause")
            rows.append([run["dtype"], *(f"{run[name]:.1f}" for name in names)])
    return markdown(["ms at a node that samples", "step", "longest step", "bind", "no step runs", "pause"], rows)
