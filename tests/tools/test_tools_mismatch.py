"""The distance of trainer and sampler is judged by transformers' own distance in the same dtype."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import warm

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import commands
from measure.mismatch import FLOAT32, Step, judge


@pytest.mark.parametrize(
    ("dtype", "run", "good"),
    [
        ("bfloat16", (0.039, 0.39), True),
        ("bfloat16", (0.041, 0.39), False),
        ("bfloat16", (0.039, 0.41), False),
        ("bfloat16", (float("nan"), 0.39), False),
        ("float32", (1e-6, 0.9 * FLOAT32), True),
        ("float32", (1e-6, 1.1 * FLOAT32), False),
    ],
)
def test_a_run_is_allowed_twice_the_distance_of_the_oracle(dtype: str, run: tuple[float, float], good: bool) -> None:
    steps = [Step(1, 50, (0.0, 0.0), (0.02, 0.1)), Step(2, 50, run, (0.01, 0.2))]
    said, found = judge(dtype, steps)
    assert found is good and "0.02 and 0.2" in said


def test_a_run_prints_both_and_writes_them_down(tmp_path: Path) -> None:
    small = ("model.dtype=bfloat16", "train.max_steps=2", "rollout.max_tokens=24", "rollout.groups_per_step=2")
    command = [
        sys.executable,
        str(commands.TOOLS / "measure/__main__.py"),
        "mismatch",
        *small,
        "--out",
        str(tmp_path / "found.md"),
    ]
    done = warm.run(command, env=os.environ, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and all("; oracle: mean 0.0" in line and "(384 tokens)" in line for line in lines)
    assert "transformers' eager bfloat16 from its own float32: 0.0" in (tmp_path / "found.md").read_text()
