"""Steps whose rewards teach nothing: when they are counted, when they are said, and what is blamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.telemetry.report import collect
from asyncrl.telemetry.reward_signal import COUNT, SignalWatch, describe, warning

NONE = {"reward/applicable": 0.0, "completions/max_length": 9.0, "completions/clipped_ratio": 0.0}
LENGTHS = {"completions/max_length": 9.0, "completions/clipped_ratio": 0.5}
ONE = {"reward/applicable": 1.0, "reward/min": 1.0, "reward/max": 1.0, "frac_reward_zero_std": 1.0, **LENGTHS}
ZERO = ONE | {"reward/min": 0.0, "reward/max": 0.0}
APART = ONE | {"reward/min": 0.0}  # groups differ from each other, completions of a group do not
GOOD = APART | {"frac_reward_zero_std": 0.5}


def counts(watch: SignalWatch, *steps: dict[str, float]) -> list[float | None]:
    return [watch.step(metrics).get(COUNT) for metrics in steps]


def test_what_counts() -> None:
    assert counts(SignalWatch("grpo", 4), NONE, ONE, {}, APART, GOOD, ZERO) == [1, 2, None, 3, 0, 1]
    assert counts(SignalWatch("none", 4), APART, ONE, GOOD) == [0, 1, 0]  # raw rewards teach across groups
    assert counts(SignalWatch("grpo_verl", 1), APART, ZERO) == [0, 1]  # a group of one differs from nobody


def test_it_is_said_at_the_third_step_and_at_every_doubling() -> None:
    watch = SignalWatch("grpo", 4)
    lines = [ZERO | watch.step(ZERO) for _ in range(30)]
    assert [int(line[COUNT]) for line in lines if warning(line)] == [3, 6, 12, 24]
    assert warning(GOOD) is None and warning(GOOD | {COUNT: 0.0}) is None


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (NONE, "no completion had a reward for 3 steps in a row (every reward function returned None)"),
        (NONE, "the functions find nothing that they apply to"),
        (NONE | {"reward/f/errors": 8.0}, "calls of f failed"),
        (ZERO | {"completions/clipped_ratio": 1.0}, "cut at rollout.max_tokens"),
        (ZERO | {"completions/max_length": 1.0}, "ends with its first token"),
        (ZERO, "every reward was 0 for 3 steps in a row, so nothing is learned from them; likely reason: the prompts are too"),
        (ONE, "the prompts are solved already, or the function gives the same"),
        (APART, "no group had two different rewards for 3 steps in a row"),
        (APART, "all completions of a prompt are alike"),
    ],
)  # fmt: skip
def test_what_is_blamed(metrics: dict[str, float], words: str) -> None:
    assert words in describe(metrics | {COUNT: 3.0})


def test_the_report_names_each_row_of_such_steps_once(tmp_path: Path) -> None:
    watch = SignalWatch("grpo", 4)
    steps = [ZERO, ZERO, GOOD, NONE, NONE, NONE, NONE, GOOD, ONE, ONE, ONE]
    rows = [{"step": 0, "eval/avg": 1.0}]
    rows += [{"step": step, **metrics, **watch.step(metrics)} for step, metrics in enumerate(steps, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = collect(tmp_path)["warnings"]
    assert first.startswith("Until step 7: no completion had a reward for 4 steps in a row")
    assert second.startswith("Until step 11: every reward was 1 for 3 steps in a row")
