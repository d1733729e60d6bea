"""The curve of a run as a picture and its numbers as JSON, under tools/results/.

python tools/plot_run.py runs/smollm2_addition
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
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


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


def draw(name: str, numbers: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(numbers["steps"], numbers["reward/mean"], label="training: reward/mean")
    for metric in sorted({m for values in numbers["evaluations"].values() for m in values if "@" in m}):
        points = [(step, values[metric]) for step, values in numbers["evaluations"].items() if metric in values]
        axes.plot(*zip(*points, strict=True), "o--", label=f"held out: {metric}")
    axes.set(xlabel="policy version", ylabel="reward", ylim=(0, 1.02), title=name)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory")
    given = parser.parse_args()
    numbers = record(read(given.run))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{given.run.name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    draw(given.run.name, numbers, RESULTS / f"{given.run.name}.png")
    print(json.dumps({k: v for k, v in numbers.items() if not isinstance(v, list)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
