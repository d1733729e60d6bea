"""Curves of long runs: bounded, and the same as those of all lines where these are averaged."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest

from asyncrl.telemetry.curves import MOST_NAMES, Curves, lines_by_step
from asyncrl.telemetry.report import collect, write_report


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 64, 1000])
def test_a_point_is_the_mean_of_as_many_lines(count: int) -> None:
    draw = random.Random(count)
    rows = [
        {"step": n, "time": float(n), "a": draw.random(), **({"b": float(n)} if n % 3 == 0 else {}), "c": float("nan")}
        for n in range(1, count + 1)
    ]
    for row in rows:  # a cause that is rare, and large where it is
        waited = 0.9 * (row["step"] % 5 == 0)
        row |= {"idle/unexplained": 0.0, "busy/train": 1 - waited} | ({"idle/evaluate": waited} if waited else {})
    seconds = [draw.random() for _ in rows]
    curves = Curves(most=8)
    for row, took in zip(rows, seconds, strict=True):
        curves.add(row, took)
    each = curves.lines_per_point
    assert each == 1 if count <= 8 else len(curves.steps) in range(4, 9)
    parts = [slice(begin, begin + each) for begin in range(0, count, each)]
    assert curves.steps == [rows[part][-1]["step"] for part in parts]
    assert curves.weights == pytest.approx([sum(seconds[part]) for part in parts])
    series = curves.series()
    assert [name for name in series if "/" not in name] == (["a", "b"] if count >= 3 else ["a"])
    assert series["a"] == pytest.approx([sum(row["a"] for row in rows[part]) / len(rows[part]) for part in parts])
    for part, mean in zip(parts, series.get("b", []), strict=False):
        there = [row["b"] for row in rows[part] if "b" in row]
        assert mean == (pytest.approx(sum(there) / len(there)) if there else None)
    evaluated = series.get("idle/evaluate", [0.0] * len(curves.steps))
    assert [sum(shares) for shares in zip(series["busy/train"], evaluated, strict=True)] == pytest.approx(  # type: ignore[arg-type]
        [1.0] * len(curves.steps)
    )
    trained = sum(row["busy/train"] * took for row, took in zip(rows, seconds, strict=True))
    assert curves.seconds("busy/train") == pytest.approx(trained)


def test_lines_come_by_step_and_of_two_the_later_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "from": 0} for step in range(6)] + [{"step": step, "from": 1} for step in (3, 4)]
    path.write_text("\n".join(["not json", *map(json.dumps, lines), '{"time": 1}', '["step"]', '{"step": 9, "fro']))
    assert [(row["step"], row["from"]) for row in lines_by_step(path)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 1),
        (4, 1),
        (5, 0),
    ]
    assert list(lines_by_step(tmp_path / "none")) == []


def test_there_are_no_more_curves_than_a_page_can_hold(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(MOST_NAMES + 100):
            file.write(json.dumps({"step": step, "time": float(step), "loss": 1.0, f"reward/{step}/mean": 1.0}) + "\n")
    found = collect(tmp_path)
    assert len(found["series"]) == MOST_NAMES and found["series"]["loss"][-1] == 1.0
    assert any(f"the first is reward/{MOST_NAMES - 1}/mean" in each for each in found["warnings"])


def test_the_report_of_a_long_run_is_no_larger_than_that_of_a_shorter_one(tmp_path: Path) -> None:
    sizes, peaks = [], []
    for count in (8_000, 16_000):
        run = tmp_path / str(count)
        run.mkdir()
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, count + 1):
                metrics = {f"some/metric_{name}": (step * name % 97) / 7 for name in range(5)}
                file.write(json.dumps({"step": step, "time": float(step), "time/step": 1.0, **metrics}) + "\n")
        tracemalloc.start()
        page = write_report(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(page.stat().st_size)
        assert f"is the mean of {count // 4_000} steps" in page.read_text()
    assert sizes[1] < 1.2 * sizes[0]
    assert peaks[1] < 1.2 * peaks[0]
