"""From runs to figures: tokens per second, the arithmetic limit, medians, a table, JSON and a plot. Pure but for the writing.

What is counted. `sampled tokens` are the tokens that were sampled and trained in the measured steps. In the steady state of an
asynchronous run as many are generated as trained, but a short window can hold more of one than of the other: the rate
counts the smaller number, and both are in the JSON; the table has a note where they are far apart. The limit stands on the best
GEMM rate that the whole call has seen in the dtype.

Needed FLOP of a step: 2 per parameter of a matrix product and token forward, 4 backward; every sampled token is sampled once and
trained once (8 in all), every prompt is prefilled and trained once per group (8, without the head, which a prompt does not
need). Attention over the context, the optimizer, norms and softmax are left out, so the share of the limit is a little too low.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.telemetry.machine import describe_cpu

_FLOP_PER_PARAMETER = 2 + 2 + 4  # sampled or prefilled; forward; backward
GIB = 1 << 30
UNSTEADY = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """What `child.py machine` answers."""

    gemm_flops: float  # FLOP/s, in the dtype of the case
    decoder_parameters: int
    head_parameters: int
    prompt_tokens_mean: float
    prompt_tokens_max: int

    def needed_flop(self, sampled_tokens: float, prompt_tokens: float) -> float:
        body = self.decoder_parameters * (sampled_tokens + prompt_tokens)
        return float(_FLOP_PER_PARAMETER * (body + self.head_parameters * sampled_tokens))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side in one repetition."""

    side: str
    dtype: str
    lengths: str
    repetition: int
    result: dict[str, Any]
    machine: Machine

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second, by the smaller of the trained and the generated tokens of the window."""
        return min(self.result["sampled_tokens"], self.result["generated_tokens"]) / self.result["seconds"]

    def limit_share(self, gemm_flops: float) -> float:
        """Needed FLOP of the counted tokens and their prompts, over what the GEMM rate would do in that time."""
        tokens = self.tokens_per_s * self.result["seconds"]
        prompts = self.result["prompt_tokens"] * tokens / max(self.result["sampled_tokens"], 1)
        return self.machine.needed_flop(tokens, prompts) / gemm_flops / self.result["seconds"]

    def figures(self, gemm_flops: float | None = None) -> dict[str, float]:
        """`gemm_flops`: the rate that the limit stands on; that of this run's repetition by default."""
        result = self.result
        return {
            "tokens_per_s": self.tokens_per_s,
            "seconds_per_step": result["seconds"] / result["steps"],
            "mean_length": result["sampled_tokens"] / result["sequences"],
            "limit_share": self.limit_share(gemm_flops or self.machine.gemm_flops),
            "generated_to_trained": result["generated_tokens"] / max(result["sampled_tokens"], 1),
            "peak_gib": result["peak_bytes"] / GIB,
        }


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry per case (dtype and lengths), in order: medians per side, the median of the paired ratios, shares of time."""
    entries = []
    for dtype, lengths in dict.fromkeys((run.dtype, run.lengths) for run in runs):
        case = [run for run in runs if (run.dtype, run.lengths) == (dtype, lengths)]
        rate = max(run.machine.gemm_flops for run in runs if run.dtype == dtype)
        entry: dict[str, Any] = {"dtype": dtype, "lengths": lengths, "gemm_gflops": rate / 1e9, "sides": {}}
        for side in dict.fromkeys(run.side for run in case):
            figures = [run.figures(rate) for run in case if run.side == side]
            entry["sides"][side] = {
                "runs": len(figures),
                **{name: statistics.median(each[name] for each in figures) for name in figures[0]},
            }
        ours = {run.repetition: run for run in case if run.side == "asyncrl"}
        for peer in (side for side in entry["sides"] if side != "asyncrl"):
            theirs = {run.repetition: run for run in case if run.side == peer}
            pairs = [(ours[i], theirs[i]) for i in sorted(ours.keys() & theirs.keys())]
            if pairs:
                ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
                memory = [a.result["peak_bytes"] / b.result["peak_bytes"] for a, b in pairs]
                entry[f"ratio_to_{peer}"] = statistics.median(ratios)
                entry[f"ratios_to_{peer}"] = ratios
                entry[f"memory_ratio_to_{peer}"] = statistics.median(memory)
        names = sorted({name for run in ours.values() for name in run.result["shares"]})
        entry["shares"] = {
            name: statistics.median(run.result["shares"].get(name, 0.0) for run in ours.values()) for name in names
        }
        entries.append(entry)
    return entries


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Markdown, readable as it stands: a row per case and side, the ratio on asyncrl's row; then asyncrl's time."""
    lines = [
        "| dtype | lengths | side | sampled tokens/s | ratio | s/step | tokens/completion | of the limit | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        ratios = [f"{value:.2f}x {key.removeprefix('ratio_to_')}" for key, value in entry.items() if "ratio_to_" in key]
        ratios = [text for text in ratios if "memory" not in text]
        for side, f in entry["sides"].items():
            ratio = ", ".join(ratios) if side == "asyncrl" else ""
            lines.append(
                f"| {entry['dtype']} | {entry['lengths']} | {side} | {f['tokens_per_s']:.1f} | {ratio} "
                f"| {f['seconds_per_step']:.1f} | {f['mean_length']:.1f} | {f['limit_share']:.1%} | {f['peak_gib']:.2f} |"
            )
    for entry in entries:
        if entry["shares"]:
            spent = sorted(entry["shares"].items(), key=lambda item: -item[1])
            text = ", ".join(f"{name} {share:.1%}" for name, share in spent if share >= 0.0005)
            lines += ["", f"asyncrl's time, {entry['dtype']}, {entry['lengths']}: {text}"]
        ours = entry["sides"].get("asyncrl")
        if ours and abs(ours["generated_to_trained"] - 1) > UNSTEADY:
            lines += ["", f"NOTE, {entry['dtype']}, {entry['lengths']}: asyncrl's window was not in a steady state: "]
            lines[-1] += f"it generated {ours['generated_to_trained']:.2f} of what it trained; take more --steps"
    for dtype, rate in {entry["dtype"]: entry["gemm_gflops"] for entry in entries}.items():
        lines += ["", f"GEMM rate, {dtype}: {rate:.0f} GFLOP/s"]
    return "\n".join(lines)


def document(runs: Sequence[Run], entries: Sequence[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and where, when and with what."""
    return {
        "bench": "step",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": options.pop("command"),
        "options": options,
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "versions": {"asyncrl": _version("asyncrl"), **_peer_versions(runs)},
        "summary": list(entries),
        "runs": [
            {
                "side": run.side,
                "dtype": run.dtype,
                "lengths": run.lengths,
                "repetition": run.repetition,
                **run.figures(),
                "gemm_gflops": run.machine.gemm_flops / 1e9,
                **{key: value for key, value in run.result.items() if key != "versions"},
                "prompt_tokens_mean": run.machine.prompt_tokens_mean,
                "decoder_parameters": run.machine.decoder_parameters,
                "head_parameters": run.machine.head_parameters,
            }
            for run in runs
        ],
    }


def _peer_versions(runs: Sequence[Run]) -> dict[str, Any]:
    return {run.side: run.result["versions"] for run in runs}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "a clone"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def matplotlib_found() -> bool:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    return True


def save_plot(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_plot(path: Path, entries: Sequence[dict[str, Any]], unit: str = "sampled tokens/s, whole RL steps") -> bool:
    """Bars of tokens per second per case and side, with the arithmetic limit. False without matplotlib."""
    if not matplotlib_found():
        return False
    from matplotlib import pyplot

    sides = list(dict.fromkeys(side for entry in entries for side in entry["sides"]))
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.7 * len(entries), 3.6), layout="constrained")
    width = 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        places = [i + (number - (len(sides) - 1) / 2) * width for i in range(len(entries))]
        heights = [entry["sides"].get(side, {}).get("tokens_per_s", 0.0) for entry in entries]
        axes.bar_label(axes.bar(places, heights, width * 0.92, label=side), fmt="%.0f", fontsize=8)
    for i, entry in enumerate(entries):
        ours = entry["sides"].get("asyncrl")
        if ours and ours["limit_share"]:
            limit = ours["tokens_per_s"] / ours["limit_share"]
            axes.hlines(limit, i - 0.42, i + 0.42, colors="black", linestyles="dashed", linewidth=1)
            axes.annotate(f"limit {limit:.0f}", (i, limit), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(entries)), [_label(entry) for entry in entries])
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=8)
    save_plot(figure, axes, path)
    return True


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']}\n" + (entry["case"] if "case" in entry else f"{entry['lengths']} lengths")
