"""The curves of one run, or of several together, as a picture and their numbers as JSON, under tools/results/.

python tools/plot_run.py runs/smollm2_addition
python tools/plot_run.py runs/smollm2_shared runs/smollm2_worker --name smollm2_placements
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
KEPT = ("reward/mean", "completions/mean_length", "entropy", "mismatch_kl/mean", "staleness/max", "perf/tokens_per_s")


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """First five and last five steps, evaluations, wall time, and the curves."""
    steps = [line for line in lines if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in steps]
    evaluations = {line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines}
    return {
        "date": date.today().isoformat(),
        "reward_first_five": sum(rewards[:5]) / 5,
        "reward_last_five": sum(rewards[-5:]) / 5,
        "minutes_first_to_last_line": round((lines[-1]["time"] - lines[0]["time"]) / 60, 2),
        "evaluations": {step: values for step, values in evaluations.items() if values},
        "steps": [line["step"] for line in steps],
        **{name: [round(line[name], 4) for line in steps if name in line] for name in KEPT},
    }


def draw(title: str, runs: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, (name, numbers) in enumerate(runs.items()):
        of = f"{name}, " if len(runs) > 1 else ""
        axes.plot(numbers["steps"], numbers["reward/mean"], f"C{index}", label=f"{of}training: reward/mean")
        evaluated = sorted({m for values in numbers["evaluations"].values() for m in values if "@" in m})
        for metric, marker in zip(evaluated, "os^v", strict=False):
            points = [(step, values[metric]) for step, values in numbers["evaluations"].items() if metric in values]
            axes.plot(*zip(*points, strict=True), f"C{index}{marker}--", label=f"{of}held out: {metric}")
    axes.set(xlabel="policy version", ylabel="reward", ylim=(0, 1.02), title=title)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--name", help="of the files; the run's where there is one")
    given = parser.parse_args()
    if len(given.runs) > 1 and given.name is None:
        parser.error("several runs need a --name for the files")
    runs = {run.name: record(read(run)) for run in given.runs}
    name = given.name or given.runs[0].name
    RESULTS.mkdir(exist_ok=True)
    kept = runs if len(runs) > 1 else runs[given.runs[0].name]
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    draw(name, runs, RESULTS / f"{name}.png")
    for run, numbers in runs.items():
        print(run, json.dumps({k: v for k, v in numbers.items() if not isinstance(v, list)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
