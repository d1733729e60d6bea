"""The quickstart with three seeds, and once with advantages forced to zero: does it learn, and only from its reward?

    python tools/quickstart_curves.py            # writes tools/results/quickstart.json and .png; exit 1 if a goal is missed
    python tools/quickstart_curves.py --placements shared worker --name quickstart_placements      # both, on one picture
    .venv-vllm/bin/python tools/quickstart_curves.py --placements worker vllm --seeds 0 --name quickstart_vllm
    python tools/quickstart_curves.py --of runs/a runs/b --name both      # the curves of runs that are there, nothing is judged
    python tools/quickstart_curves.py --of runs/calculator runs/guess --name agents     # after both examples of agents

Goals: last five steps' mean of `reward/mean` at least 0.9 for every seed; `staleness/max` at least 1; at least 20 % of the
trained tokens in sequences that span two versions; with zero advantages the last ten steps stay near the first ten.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from commands import RESULTS, ROOT

sys.path[:0] = [str(ROOT)]

from asyncrl.telemetry.machine import describe_cpu  # noqa: E402

SEEDS = (0, 1, 2)
KEPT = ("reward/mean", "completions/mean_length", "entropy", "mismatch_kl/mean", "staleness/max", "perf/tokens_per_s")
WORKER = ["generation.placement=worker", "generation.workers=1", "generation.threads=1"]  # as two_devices.yaml says it
PLACED = {
    "shared": ["generation.placement=shared"],
    "worker": WORKER,
    "vllm": [*WORKER, "generation.engine=vllm"],  # in a worker, too
}


def run(name: str, overrides: list[str], directory: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "asyncrl.main", str(ROOT / "examples" / "quickstart.yaml")]
    options = [f"run.dir={directory}", f"run.name={name.replace(' ', '_')}", "telemetry.live=off", *overrides]
    started = time.perf_counter()
    subprocess.run([*command, *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    steps = [line for line in read(Path(directory) / name.replace(" ", "_")) if "reward/mean" in line]
    tokens = sum(line["train/tokens"] for line in steps)
    spanning = sum(line["staleness/spanning_token_share"] * line["train/tokens"] for line in steps)
    return {
        "name": name,
        "overrides": overrides,
        "seconds_whole_process": round(seconds, 1),
        "load_at_the_end": [round(each, 1) for each in os.getloadavg()],
        "reward": [round(line["reward/mean"], 4) for line in steps],
        "last_five": round(mean([line["reward/mean"] for line in steps[-5:]]), 4),
        "staleness_max": max(line["staleness/max"] for line in steps),
        "spanning_token_share": round(spanning / tokens, 4),
        "idle_unexplained_max": round(max(line["idle/unexplained"] for line in steps[1:]), 4),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """First five and last five steps, evaluations, wall time, and the curves."""
    steps = [line for line in lines if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in steps]
    evaluations = {line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines}
    own = sorted({name for line in steps for name in line if name.startswith("own/")})
    return {
        "date": date.today().isoformat(),
        "reward_first_five": mean(rewards[:5]),
        "reward_last_five": mean(rewards[-5:]),
        "minutes_first_to_last_line": round((lines[-1]["time"] - lines[0]["time"]) / 60, 2),
        "evaluations": {step: values for step, values in evaluations.items() if values},
        "steps": [line["step"] for line in steps],
        **{name: [round(line[name], 4) for line in steps if name in line] for name in (*KEPT, *own)},
    }


def missed(result: dict[str, Any]) -> list[str]:
    """The goals that this run did not reach."""
    if result["name"] == "zero":
        first, last = mean(result["reward"][:10]), mean(result["reward"][-10:])
        return [] if abs(last - first) < 0.1 else [f"zero advantages moved the reward from {first:.2f} to {last:.2f}"]
    goals = {
        "last_five >= 0.9": result["last_five"] >= 0.9,
        "staleness_max >= 1": result["staleness_max"] >= 1,
        "spanning_token_share >= 0.2": result["spanning_token_share"] >= 0.2,
    }
    return [goal for goal, reached in goals.items() if not reached]


def draw_runs(runs: dict[str, dict[str, Any]], axes: Any) -> None:
    """Training and evaluations."""
    for index, (name, numbers) in enumerate(runs.items()):
        of = f"{name}, " if len(runs) > 1 else ""
        axes.plot(numbers["steps"], numbers["reward/mean"], f"C{index}", label=f"{of}training: reward/mean")
        evaluated = sorted({m for values in numbers["evaluations"].values() for m in values if "@" in m})
        for metric, marker in zip(evaluated, "os^v", strict=False):
            points = [(step, values[metric]) for step, values in numbers["evaluations"].items() if metric in values]
            axes.plot(*zip(*points, strict=True), f"C{index}{marker}--", label=f"{of}held out: {metric}")


def draw_results(results: list[dict[str, Any]], axes: Any) -> None:
    placements = list(dict.fromkeys(result["placement"] for result in results))
    for result in results:
        zero = result["name"] == "zero"
        color = f"C{placements.index(result['placement'])}" if len(placements) > 1 else None
        style = {"color": "0.5", "linestyle": "--"} if zero else {"color": color, "alpha": 0.8}
        label = "advantages forced to zero" if zero else f"{result['name']}: {result['last_five']:.2f}"
        axes.plot(range(1, len(result["reward"]) + 1), result["reward"], label=label, **style)
    axes.axhline(0.9, color="0.8", linewidth=0.8)


def write(name: str, title: str, kept: Any, curves: Callable[[Any], None]) -> None:
    """What there is so far, as JSON and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    curves(axes)
    axes.set(xlabel="policy version", ylabel="reward/mean", ylim=(0, 1.02), title=title)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    figure.savefig(RESULTS / f"{name}.png", dpi=120)
    plt.close(figure)


def show(folders: list[Path], name: str) -> None:
    """Runs that are there."""
    runs = {folder.name: record(read(folder)) for folder in folders}
    write(name, name, runs if len(runs) > 1 else runs[folders[0].name], lambda axes: draw_runs(runs, axes))
    for run, numbers in runs.items():
        print(run, json.dumps({k: v for k, v in numbers.items() if not isinstance(v, list)}, indent=1))


def planned(given: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Name, placement and settings of each run, in turns: what else the machine does meets all placements."""
    several = len(given.placements) > 1
    for seed in given.seeds:
        for placement in given.placements:
            name = f"{placement} seed{seed}" if several else f"seed{seed}"
            yield name, placement, [f"seed={seed}", *PLACED[placement]]
    if not several:
        yield "zero", given.placements[0], ["algorithm.advantage=zero", *PLACED[given.placements[0]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, passed on to every run")
    parser.add_argument("--placements", nargs="+", choices=PLACED, default=["shared"])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--name", help="of the files; quickstart, or that of the one run")
    parser.add_argument("--of", nargs="+", type=Path, metavar="DIRECTORY", help="runs that are there")
    given = parser.parse_intermixed_args()
    if given.of:
        if len(given.of) > 1 and given.name is None:
            parser.error("several runs need a --name for the files")
        show(given.of, given.name or given.of[0].name)
        return 0
    results: list[dict[str, Any]] = []
    command = shlex.join(["python", "tools/quickstart_curves.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as directory:
        for name, placement, options in planned(given):
            results.append({"placement": placement, **run(name, [*options, *given.overrides], directory)})
            kept = {"date": date.today().isoformat(), "command": command, "cpu": describe_cpu(), "runs": results}
            curves = partial(draw_results, results)
            write(given.name or "quickstart", "examples/quickstart.yaml", kept, curves)
    failed = False
    for result in results:
        complaints = missed(result)
        failed = failed or bool(complaints)
        summary = {key: value for key, value in result.items() if key not in ("reward", "overrides")}
        print(summary, "MISSED: " + "; ".join(complaints) if complaints else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
