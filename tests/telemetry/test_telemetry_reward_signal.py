"""Steps whose rewards teach nothing: when they are counted, when they are said, and what is blamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.telemetry.report import collect
from asyncrl.telemetry.reward_signal import CLIPPED, COUNT, SignalWatch, WaitWatch, describe, left_out, warnings

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
    assert [int(line[COUNT]) for line in lines if list(warnings(line))] == [3, 6, 12, 24]
    assert not list(warnings(GOOD)) and not list(warnings(GOOD | {COUNT: 0.0}))


@pytest.mark.parametrize("ends", [True, False])
def test_completions_that_are_cut_are_a_warning_of_their_own_also_where_rewards_differ(ends: bool) -> None:
    """Unless every completion is to have the same length (`rollout.ignore_eos`)."""
    watch, ratios = SignalWatch("grpo", 4, ends), [0.95, 0.9, 0.89, 0.95, 0.9, 1.0]
    steps = [GOOD | {"completions/clipped_ratio": ratio} for ratio in ratios]
    lines = [step | watch.step(step) for step in steps]
    assert [line[CLIPPED] for line in lines] == ([1, 2, 0, 1, 2, 3] if ends else [0] * 6)
    said = [list(warnings(line, ["turns end with <|stop|>"])) for line in lines]
    assert said[:5] == [[]] * 5 and len(said[5]) == ends
    if ends:
        assert "every completion was cut at rollout.max_tokens" in said[5][0] and "<|stop|>" in said[5][0]


def test_what_texts_lack_is_said_once_with_its_count() -> None:
    said: set[str] = set()
    assert list(left_out(GOOD, said)) == []
    [line] = left_out(GOOD | {"text/special_tokens_left_out": 98.0}, said)
    assert "98 special tokens (reward.text.special_tokens=true" in line
    [line] = left_out(GOOD | {"text/special_tokens_left_out": 9.0, "text/ids_without_text": 5.0}, said)
    assert "5 sampled ids" in line and "special tokens" not in line
    assert list(left_out(GOOD | {"text/ids_without_text": 6.0}, said)) == []


@pytest.mark.parametrize(
    ("queued", "words"), [(9.0, "raise reward.workers (1 now), or"), (0.0, "the functions themselves")]
)
def test_steps_that_wait_for_rewards_are_said(queued: float, words: str) -> None:
    watch = WaitWatch(workers=1, concurrency=64)
    slow = {"idle/reward": 0.62, "time/step": 4.0, "time/reward": 20.0, "time/reward_queue": queued}
    lines = [watch.step(slow) for _ in range(7)]
    assert [step for step, line in enumerate(lines, 1) if line] == [3, 6]
    said = str(lines[2])
    assert (
        "for 3 steps in a row the device stood still for rewards, 62% of the last step's 4.0 s" in said
        and words in said
    )
    assert watch.step({"idle/reward": 0.1}) is watch.step(slow) is None  # it counts anew


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (NONE, "no completion had a reward for 3 steps in a row (every reward function returned None)"),
        (NONE, "the functions find nothing that they apply to"),
        (NONE | {"reward/f/errors": 8.0}, "calls of f failed"),
        (ZERO | {"completions/clipped_ratio": 1.0}, "cut at rollout.max_tokens"),
        (ZERO | {"completions/clipped_ratio": 0.92}, "92% of the completions were cut at rollout.max_tokens"),
        (ZERO | {"completions/max_length": 1.0}, "ends with its first token"),
        (ZERO | {"text/openings_left_out": 8.0}, "chat template opens in the prompt, as <think>, of 8 completions"),
        (ZERO | {"text/stops_left_out": 7.0}, "the stop string or token that ended 7 completions (reward.text.stop=true"),
        (ZERO | {"text/special_tokens_left_out": 6.0}, "lacks 6 special tokens"),
        (ZERO | {"text/ids_without_text": 5.0}, "lacks 5 sampled ids that are no token of the tokenizer"),
        (ZERO | {"text/stops_left_out": 7.0, "completions/clipped_ratio": 0.9}, "the end of an answer: raise it, or"),
        (ZERO | {"text/stops_left_out": 7.0, "completions/clipped_ratio": 0.9}, "; or the text that the functions read"),
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
