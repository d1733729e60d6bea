"""The report: curves of long runs, steps whose rewards teach nothing, and the page itself."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import tracemalloc
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.device import HostClock

from asyncrl.telemetry.budget import RunBudget
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.report import MOST_NAMES, Curves, collect, render, write_report
from asyncrl.telemetry.reward_signal import (
    CLIPPED,
    WAITED,
    WITHOUT_SIGNAL,
    FaultCounts,
    describe_without_signal,
    lacking_note,
    warnings,
)
from asyncrl.telemetry.trace import write_trace

EVIL = "</script><script>alert('</pre>')</script><img src=x onerror=alert(1)> & @DATA@ \u2028"


def simulate_step(recorder: Recorder, clock: HostClock, draw: random.Random) -> None:
    """A step's worth of closures, waits and coroutine spans on a clock of our own."""
    started = clock.now
    ended = clock.now
    with recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
        for turn in range(draw.randint(20, 40)):
            recorder.lane_resumed("cpu", ended)
            with recorder.work("engine", "deliver"):
                clock.now += 0.0004
            submitted = clock.now
            clock.now += 0.0002
            name = "decode" if turn % 10 else "prefill"
            with recorder.lane_busy("cpu", name, submitted=submitted):
                clock.now += draw.uniform(0.01, 0.02)
            ended = clock.now
    with recorder.wait("train pump", "a whole group", on="score pump", cause="group"):
        with recorder.wait("score pump", "rewards", on="reward workers", cause="reward"):
            clock.now += draw.uniform(0.01, 0.08)
        clock.now += 0.02
    for _ in range(4):
        submitted = clock.now
        clock.now += 0.0003
        with recorder.lane_busy("cpu", "train/microbatch", submitted=submitted):
            clock.now += draw.uniform(0.03, 0.06)
    with recorder.lane_busy("cpu", "train/finish"):
        clock.now += 0.02
    with recorder.span("publish", track="publish pump"):
        clock.now += 0.001
    end = clock.now
    for member in range(12):  # episodes: coroutines that overlap
        clock.now = started + 0.01 * member
        with recorder.span(f"episode {member}", track="environment"):
            clock.now = end - draw.uniform(0, 0.2)
    clock.now = end


def metrics_of(step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    learned = 1 / (1 + math.exp(-8 * (step / max(steps, 8) - 0.4)))
    reward = 0.1 + 0.85 * learned + draw.gauss(0, 0.03)
    row: dict[str, Any] = {
        "reward/mean": reward, "reward/std": 0.05 + 0.8 * learned * (1 - learned), "reward/exact/mean": reward - 0.05,
        "reward/format/mean": min(1.0, reward + 0.1), "reward/bonus/mean": 40 * reward, "reward/exact/letters/mean": 0.9,
        "loss": -0.02, "optim/grad_norm": 0.4, "optim/clipped": float(step % 2), "optim/lr": 1e-5, "entropy": 1.8 - learned,
        "staleness/mean": 0.8, "staleness/max": 2.0, "completions/mean_length": 60.0, "completions/min_length": 12.0,
        "completions/max_length": 128.0, "completions/clipped_ratio": 1.0 - learned, "kl": 0.02 * step,
        "perf/tokens_per_s": 1200.0, "mismatch_kl/mean": 2e-4, "clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.02,
        "frac_reward_zero_std": learned * 0.6, "loop/lag_ms_p99": 3.0, "queue/stash/depth": 3.0, "time/reward": 0.15,
    }  # fmt: skip
    if step % max(1, steps // 5) == 0 or step == 1:
        row["eval/arithmetic/avg@4"] = reward - 0.08
        row["eval/arithmetic/pass@4"] = min(1.0, reward + 0.1)
        row |= {"eval/arithmetic/exact/mean": reward, "eval/arithmetic/completions/mean_length": 60.0 + step}
    return row


def make_run(directory: Path, steps: int, seed: int = 0) -> None:
    """A run directory with fake but plausible contents."""
    draw, clock = random.Random(seed), HostClock()
    recorder, account = Recorder(clock), RunBudget()
    recorder.register_lane("cpu")
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text("preset: async\nseed: 0\nmodel:\n  path: models/tiny\n")
    with (directory / "metrics.jsonl").open("wb") as file:
        at = recorder.started_unix + 0.25  # an evaluation before the first step
        file.write(orjson.dumps({"step": 0, "time": at, "eval/arithmetic/avg@4": 0.1}) + b"\n")
        for step in range(1, steps + 1):
            simulate_step(recorder, clock, draw)
            recorder.instant(f"version {step}", track="train pump")
            window = recorder.take_window()
            row = {"step": step, "time": recorder.started_unix + clock.now - recorder.started}
            row |= {"time/step": window.end - window.start - 0.01, "time/accounted": window.end - window.start}
            row |= metrics_of(step, steps, draw) | account.step(window)
            file.write(orjson.dumps(row) + b"\n")
            with (directory / "rollouts" / f"step_{step}.jsonl").open("wb") as rollouts:
                for member in range(16):
                    rollouts.write(orjson.dumps(rollout_row(step, member, row["reward/mean"], draw)) + b"\n")
    write_trace(recorder, directory / "trace.json")


def rollout_row(step: int, member: int, mean: float, draw: random.Random) -> dict[str, Any]:
    reward = 1.0 if draw.random() < mean else 0.0
    return {
        "step": step, "group_id": step * 2 + member // 8, "member": member % 8,
        "prompt": [{"role": "user", "content": "What is 3 x 4?"}] if member % 2 else "What is 3 x 4?",
        "completion": EVIL if step == 1 else "Let me think.\n#### 12", "reward": reward,
        "components": {"exact": reward, "format": 1.0}, "versions": {"min": max(0, step - 2), "max": step - 1},
        "completion_length": 9, "finish_reason": "stop", "advantage": reward - mean,
    }  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: every tag, and the text of the data element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == ("script", {"type": "application/json", "id": "data"}):
            self.data += data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "tiny <b>run"
    make_run(directory, 12)
    return directory


def test_the_page_loads_nothing_from_elsewhere(run_dir: Path) -> None:
    path = write_report(run_dir, result="finished")
    text = path.read_text("utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert "src" not in attributes
        assert str(attributes.get("href", "#")).startswith("#")
    without_data = text.replace(page.data, "")
    urls = set(re.findall(r"https?://[^\s\"']+", without_data))
    assert urls == {"http://www.w3.org/2000/svg"}  # a namespace's name; nothing is fetched from it
    assert "@import" not in text and "url(" not in without_data


def test_what_the_model_wrote_stays_text(run_dir: Path) -> None:
    text = render(collect(run_dir))
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "<" not in page.data
    completions = {row["completion"] for each in json.loads(page.data)["rollouts"] for row in each["rows"]}
    assert EVIL in completions
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    assert re.search(r"<title>[^<>]*</title>", text)


def test_the_data_of_the_page_is_that_of_the_run(run_dir: Path) -> None:
    data = json.loads(Page(render(collect(run_dir, result="finished"))).data)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert data["steps"] == list(range(13)) and data["trained"] == 12
    assert data["series"]["reward/mean"] == [row.get("reward/mean") for row in rows]
    assert data["series"]["eval/arithmetic/avg@4"][3] is None
    assert data["config"].startswith("preset: async")
    assert data["result"] == "finished" and data["name"] == "tiny <b>run"
    # The whole time from the recorder's start on, that of the evaluation before the first step included, and nothing else.
    assert sum(data["account"]["all"].values()) == pytest.approx(sum(row.get("time/accounted", 0.0) for row in rows))
    assert sum(data["account"]["all"].values()) == pytest.approx(data["duration"], abs=1e-5)
    assert data["weights"][0] == 0.0 and data["account"]["all"]["idle/reward"] > 0.01
    assert data["reward_range"] == [0.0, 1.0]
    assert [each["step"] for each in data["rollouts"]][:: len(data["rollouts"]) - 1] == [12, 1]
    assert all(each["total"] == 16 and len(each["rows"]) == 5 for each in data["rollouts"])


def test_an_empty_directory_gives_a_page(tmp_path: Path) -> None:
    data = json.loads(Page(write_report(tmp_path, name="nothing").read_text("utf-8")).data)
    assert data["steps"] == [] and data["rollouts"] == [] and data["config"] is None


def test_one_step_with_nan_and_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"time":10.0,"loss":null,"reward/mean":0.5,"note":"text"}\n{"st')
    data = collect(tmp_path)
    assert data["series"] == {"reward/mean": [0.5]}
    assert data["weights"] == [0.0]


def test_lanes_are_accounted_apart_and_by_the_lines_that_have_them(tmp_path: Path) -> None:
    """A second lane comes with step 3; a cause that a line does not name took none of its time."""
    one = {"busy/decode": 0.5, "idle/group": 0.5, "idle/unexplained": 0.0}
    both = {"busy/decode": 0.75, "idle/reward": 0.25, "idle/unexplained": 0.0}
    both |= {"busy/gen/decode": 1.0, "idle/gen/unexplained": 0.0}
    both |= {"busy/cpu/decode": 0.5, "idle/cpu/reward": 0.5, "idle/cpu/unexplained": 0.0}
    lines = [{"step": 0, "time": 1.0, "eval/a/avg@1": 1.0}]
    lines += [{"step": n, "time": n + 1.0, "time/accounted": 2.0 * n, **(both if n > 2 else one)} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert collect(tmp_path)["account"] == {
        "all": {"busy/decode": 1 + 2 + 4.5, "idle/group": 1 + 2, "idle/reward": 1.5, "idle/unexplained": 0},
        "cpu": {"busy/decode": 3, "idle/reward": 3, "idle/unexplained": 0},
        "gen": {"busy/decode": 6, "idle/unexplained": 0},
    }


@pytest.fixture(scope="module")
def drawn(run_dir: Path) -> Any:
    """What the page draws, by its own scripts."""
    return _drawn(write_report(run_dir, result="finished"))


def _drawn(page: Path, width: int = 1280) -> Any:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node: the page's scripts cannot be run")
    program = [node, str(Path(__file__).with_name("page.mjs")), str(width)]
    with page.open("rb") as file:
        return json.loads(subprocess.run(program, stdin=file, capture_output=True, check=True, timeout=60).stdout)


def test_numbers_round_to_the_next_unit() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node: the page's scripts cannot be run")
    charts = (resources.files("asyncrl.telemetry") / "assets" / "charts.js").read_text("utf-8")
    shown = "[4e9, 999960, 9999.7, 1234.5].map(number), [0.9997, 179.7, 7199.8, 0.0123].map(seconds)"
    program = f"const document = {{getElementById() {{}}}};{charts};console.log(JSON.stringify([{shown}]))"
    output = subprocess.run([node, "-e", program], capture_output=True, check=True, timeout=60).stdout
    assert json.loads(output) == [["4G", "1M", "10k", "1235"], ["1.00 s", "3 min 0 s", "2 h 0 min", "12.3 ms"]]


def test_only_what_has_one_unit_and_one_size_shares_an_axis(drawn: Any) -> None:
    charts = {chart["title"]: chart["legend"] for chart in drawn["charts"]}
    assert charts["Held-out evaluation, reward"] == ["arithmetic/avg@4", "arithmetic/exact/mean"]
    assert "Held-out arithmetic/completions/mean_length, tokens" in charts
    assert "Held-out arithmetic/pass@4, share of prompts" in charts
    assert charts["Reward by function, reward"] == ["exact", "format"]
    assert {"Reward bonus, reward", "Reward exact/letters, as logged"} <= set(charts)


def test_charts_say_what_they_are_of(drawn: Any) -> None:
    charts = {chart["title"]: chart for chart in drawn["charts"]}
    assert {"KL(policy, reference), nats per token", "KL(sampler, trainer), nats per token"} <= set(charts)
    assert {"Truncated completions, share", "Optimizer steps with a clipped gradient, share"} <= set(charts)
    assert "the weights at the start" in charts["KL(policy, reference), nats per token"]["about"]
    assert "time/reward, seconds" in {chart["title"] for chart in drawn["more"]}
    assert all("A bad value: " in chart["about"] for chart in (*drawn["charts"], *drawn["more"]))


def test_shares_add_up_and_no_step_is_invented(drawn: Any) -> None:
    assert drawn["facts"][0] == ["steps", "12 to version 12"]
    rows = {row[0]: float(row[1].removesuffix(" %")) for row in drawn["table"][1:]}
    assert rows["busy"] + rows["idle"] == pytest.approx(100.0, abs=1e-9)
    parts = [share for name, share in rows.items() if name not in ("busy", "idle")]
    assert sum(parts) == pytest.approx(100.0, abs=1e-9)
    assert len(drawn["bars"]["tops"]) == 12 and "0" not in drawn["bars"]["steps"]
    assert drawn["bars"]["tops"] == pytest.approx([300 - 34 - 10] * 12)


def test_the_page_fits_a_telephone_and_follows_a_dark_screen(run_dir: Path) -> None:
    """Text in a chart keeps its size, as the chart is made for the room that there is; colours stand in one place."""
    page = write_report(run_dir)
    assert _drawn(page, 362)["bars"]["box"] == "0 0 362 300"
    style, script = (
        re.findall(rf"<{tag}>(.*?)</{tag}>", page.read_text(), re.DOTALL)[0] for tag in ("style", "script")
    )
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert set(re.findall(r"--\w[\w-]*(?=:)", light)) == set(re.findall(r"--\w[\w-]*(?=:)", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", style + script)) <= set(re.findall(r"--\w[\w-]*(?=:)", light))
    charts = script[: script.index("const KIND_COLOURS")]
    assert "#" not in re.sub(r"//.*", "", charts), "a colour that a dark screen does not change"
    widths = [int(each) for each in re.findall(r"minmax\((\d+)px", style)]
    assert max(widths, default=0) == 0


def test_truncation_stands_at_the_top(tmp_path: Path) -> None:
    """`completions/steps_clipped`: a run of such steps is a warning of the page, though the rewards differ."""
    steady = {"reward/applicable": 1.0, "reward/min": 0.0, "reward/max": 1.0, "reward/steps_without_signal": 0.0}
    counts = [0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 1.0]
    lines = [
        {"step": n, "time": n, "completions/clipped_ratio": 0.95, "completions/steps_clipped": count, **steady}
        for n, count in enumerate(counts)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    [warning] = collect(tmp_path)["warnings"]
    assert warning.startswith(
        "Until step 4: for 4 steps in a row 95% of the completions were cut at rollout.max_tokens"
    )


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    row = {"prompt": "p", "completion": "a" * 50_000 + "z", "reward": None}
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps(row))
    ((shown,),) = [each["rows"] for each in collect(tmp_path)["rollouts"]]
    assert len(shown["completion"]) < 7000 and shown["completion"].endswith("z")
    assert "44,001 characters left out" in shown["completion"]


# -- curves of long runs: bounded, and the same as those of all lines where these are averaged -----------------------


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
    curves = Curves(count, most_points=8)
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


def test_there_are_no_more_curves_than_a_page_can_hold(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(MOST_NAMES + 100):
            file.write(json.dumps({"step": step, "time": float(step), "loss": 1.0, f"reward/{step}/mean": 1.0}) + "\n")
    found = collect(tmp_path)
    assert len(found["series"]) == MOST_NAMES and found["series"]["loss"][-1] == 1.0
    assert any(f"the first of them is reward/{MOST_NAMES - 1}/mean" in each for each in found["warnings"])


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


# -- steps whose rewards teach nothing -------------------------------------------------------------------------------


NONE = {"reward/applicable": 0.0, "completions/max_length": 9.0, "completions/clipped_ratio": 0.0}
LENGTHS = {"completions/max_length": 9.0, "completions/clipped_ratio": 0.5}
ONE = {"reward/applicable": 1.0, "reward/min": 1.0, "reward/max": 1.0, "frac_reward_zero_std": 1.0, **LENGTHS}
ZERO = ONE | {"reward/min": 0.0, "reward/max": 0.0}
APART = ONE | {"reward/min": 0.0}  # groups differ from each other, completions of a group do not
GOOD = APART | {"frac_reward_zero_std": 0.5}


def counts(watch: FaultCounts, *steps: dict[str, float]) -> list[float | None]:
    return [watch.step(metrics).get(WITHOUT_SIGNAL) for metrics in steps]


def test_what_counts() -> None:
    assert counts(FaultCounts("grpo", 4), NONE, ONE, {}, APART, GOOD, ZERO) == [1, 2, None, 3, 0, 1]
    assert counts(FaultCounts("none", 4), APART, ONE, GOOD) == [0, 1, 0]  # raw rewards teach across groups
    assert counts(FaultCounts("grpo_verl", 1), APART, ZERO) == [0, 1]  # a group of one differs from nobody


def test_it_is_said_at_the_third_step_and_at_every_doubling() -> None:
    watch = FaultCounts("grpo", 4)
    lines = [ZERO | watch.step(ZERO) for _ in range(30)]
    assert [int(line[WITHOUT_SIGNAL]) for line in lines if list(warnings(line))] == [3, 6, 12, 24]
    assert not list(warnings(GOOD)) and not list(warnings(GOOD | {WITHOUT_SIGNAL: 0.0}))


@pytest.mark.parametrize("ends", [True, False])
def test_completions_that_are_cut_are_a_warning_of_their_own_also_where_rewards_differ(ends: bool) -> None:
    """Unless every completion is to have the same length (`rollout.ignore_eos`)."""
    watch, ratios = FaultCounts("grpo", 4, ends), [0.95, 0.9, 0.89, 0.95, 0.9, 1.0]
    steps = [GOOD | {"completions/clipped_ratio": ratio} for ratio in ratios]
    lines = [step | watch.step(step) for step in steps]
    assert [line[CLIPPED] for line in lines] == ([1, 2, 0, 1, 2, 3] if ends else [0] * 6)
    said = [list(warnings(line, ["turns end with <|stop|>"])) for line in lines]
    assert said[:5] == [[]] * 5 and len(said[5]) == ends
    if ends:
        assert "every completion was cut at rollout.max_tokens" in said[5][0] and "<|stop|>" in said[5][0]


def test_what_texts_lack_is_said_once_with_its_count() -> None:
    said: set[str] = set()
    assert list(lacking_note(GOOD, said)) == []
    [line] = lacking_note(GOOD | {"text/special_tokens_left_out": 98.0}, said)
    assert "98 special tokens (reward.text.special_tokens=true" in line
    [line] = lacking_note(GOOD | {"text/special_tokens_left_out": 9.0, "text/stops_left_out": 5.0}, said)
    assert "ended 5 completions" in line and "special tokens" not in line
    assert list(lacking_note(GOOD | {"text/stops_left_out": 6.0}, said)) == []


@pytest.mark.parametrize(("queued", "words"), [(9.0, "raise reward.workers, or"), (0.0, "the functions themselves")])
def test_steps_that_wait_for_rewards_are_said(queued: float, words: str) -> None:
    watch = FaultCounts("grpo", 4)
    slow = GOOD | {"idle/reward": 0.62, "time/step": 4.0, "time/reward": 20.0, "time/reward_queue": queued}
    lines = [list(warnings(slow | watch.step(slow))) for _ in range(7)]
    assert [step for step, line in enumerate(lines, 1) if line] == [3, 6]
    [said] = lines[2]
    assert "for 3 steps in a row the device stood still for rewards, 62% of the last step's 4.0 s" in said
    assert words in said
    assert [watch.step(step)[WAITED] for step in (slow | {"idle/reward": 0.1}, slow)] == [0, 1]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (NONE, "no completion had a reward for 3 steps in a row (every score was None)"),
        (NONE, "the functions find nothing that they apply to"),
        (NONE | {"reward/f/errors": 8.0}, "calls of f failed"),
        (ZERO | {"completions/clipped_ratio": 1.0}, "cut at rollout.max_tokens (of an agent also rollout.max_context)"),
        (ZERO | {"rollout/limited": 9.0}, "likely reason: 9 episodes ran into rollout.max_turns or rollout.max_context"),
        (ZERO | {"completions/clipped_ratio": 0.92}, "92% of the completions were cut at rollout.max_tokens"),
        (ZERO | {"completions/max_length": 1.0}, "ends with its first token"),
        (ZERO | {"text/openings_left_out": 8.0}, "chat template opens in the prompt, such as <think>, of 8 completions"),
        (ZERO | {"text/stops_left_out": 7.0}, "the stop string or token that ended 7 completions (reward.text.stop=true"),
        (ZERO | {"text/special_tokens_left_out": 6.0}, "lacks 6 special tokens"),
        (ZERO | {"text/stops_left_out": 7.0, "completions/clipped_ratio": 0.9}, "the end of an answer: raise the limit, or"),
        (ZERO | {"text/stops_left_out": 7.0, "completions/clipped_ratio": 0.9}, "; or the text that the functions read"),
        (ZERO, "every reward was 0 for 3 steps in a row, so nothing is learned from them; likely reason: the prompts are too"),
        (ONE, "the prompts are solved already, or the function gives the same"),
        (APART, "no group had two different rewards for 3 steps in a row"),
        (APART, "all completions of a prompt are alike"),
    ],
)  # fmt: skip
def test_what_is_blamed(metrics: dict[str, float], words: str) -> None:
    assert words in describe_without_signal(metrics | {WITHOUT_SIGNAL: 3.0})


def test_the_report_names_each_row_of_such_steps_once(tmp_path: Path) -> None:
    watch = FaultCounts("grpo", 4)
    steps = [ZERO, ZERO, GOOD, NONE, NONE, NONE, NONE, GOOD, ONE, ONE, ONE]
    rows = [{"step": 0, "eval/avg": 1.0}]
    rows += [{"step": step, **metrics, **watch.step(metrics)} for step, metrics in enumerate(steps, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = collect(tmp_path)["warnings"]
    assert first.startswith("Until step 7: no completion had a reward for 4 steps in a row")
    assert second.startswith("Until step 11: every reward was 1 for 3 steps in a row")
