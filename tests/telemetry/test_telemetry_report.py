"""report.html: self-contained, safe against what models write, and complete, for short, long and broken runs."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.telemetry.budget import RunBudget
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.report import collect, render, write_report
from asyncrl.telemetry.trace import write_trace

EVIL = "</script><script>alert('</pre>')</script><img src=x onerror=alert(1)> & @DATA@ \u2028"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def simulate_step(recorder: Recorder, clock: Clock, draw: random.Random) -> None:
    """A step's worth of closures, waits and coroutine spans on a clock of our own."""
    started = clock.now
    ended = clock.now
    with recorder.wait("rollout pump", "a slot", on="publish pump", cause="slots"):
        for _ in range(draw.randint(20, 40)):
            recorder.lane_resumed("cpu", ended)
            with recorder.work("engine", "deliver"):
                clock.now += 0.0004
            submitted = clock.now
            clock.now += 0.0002
            name = "prefill" if draw.random() < 0.1 else "decode"
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
        with recorder.lane_busy("cpu", "train_microbatch", submitted=submitted):
            clock.now += draw.uniform(0.03, 0.06)
    with recorder.lane_busy("cpu", "finish_train_step"):
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
        "reward/mean": reward,
        "reward/std": 0.05 + 0.4 * learned * (1 - learned) * 2,
        "reward/exact/mean": reward - 0.05,
        "reward/format/mean": min(1.0, reward + 0.1),
        "reward/bonus/mean": 40 * reward,
        "reward/exact/letters/mean": 0.9,
        "loss": -0.02 + draw.gauss(0, 0.01),
        "optim/grad_norm": math.exp(draw.gauss(-1, 0.4)),
        "optim/clipped": float(step % 2),
        "optim/lr": 1e-5 * (1 - step / (steps + 1)),
        "entropy": 1.8 - learned + draw.gauss(0, 0.03),
        "staleness/mean": draw.uniform(0.4, 1.4),
        "staleness/max": float(draw.choice([1, 2])),
        "completions/mean_length": 60 + 50 * learned + draw.gauss(0, 4),
        "completions/min_length": 12.0,
        "completions/max_length": 128.0,
        "completions/clipped_ratio": 1.0 - learned,
        "kl": 0.02 * step,
        "perf/tokens_per_s": 1200 + draw.gauss(0, 80),
        "mismatch_kl/mean": abs(draw.gauss(2e-4, 1e-4)),
        "clip_ratio/low_mean": abs(draw.gauss(0.01, 0.003)),
        "clip_ratio/high_mean": abs(draw.gauss(0.02, 0.003)),
        "frac_reward_zero_std": learned * 0.6,
        "loop/lag_ms_p99": abs(draw.gauss(3, 1)),
        "queue/stash/depth": float(draw.randint(0, 6)),
        "time/reward": draw.uniform(0.1, 0.2),
    }
    if step % max(1, steps // 5) == 0 or step == 1:
        row["eval/arithmetic/avg@4"] = reward - 0.08
        row["eval/arithmetic/pass@4"] = min(1.0, reward + 0.1)
        row |= {"eval/arithmetic/exact/mean": reward, "eval/arithmetic/completions/mean_length": 60.0 + step}
    return row


def make_run(directory: Path, steps: int, seed: int = 0) -> None:
    """A run directory with fake but plausible contents."""
    draw, clock = random.Random(seed), Clock()
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
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    completion = (
        f"Let me think. {a} times {b} is {a * b if reward else a * b + 3}.\n#### {a * b if reward else a * b + 3}"
    )
    return {
        "step": step,
        "group_id": step * 2 + member // 8,
        "member": member % 8,
        "prompt": [{"role": "user", "content": f"What is {a} x {b}?"}] if member % 2 else f"What is {a} x {b}?",
        "completion": EVIL if step == 1 else completion,
        "reward": reward,
        "components": {"exact": reward, "format": 1.0},
        "versions": {"min": max(0, step - 2), "max": step - 1},
        "completion_length": len(completion) // 3,
        "finish_reason": "stop",
        "advantage": reward - mean,
    }


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


def test_the_timeline_shows_the_last_steps(run_dir: Path) -> None:
    timeline = collect(run_dir)["timeline"]
    names = [row["name"] for row in timeline["rows"]]
    assert names[0] == "cpu"
    assert {"train pump", "score pump", "environment", "environment #2"} <= set(names)
    assert [step for _, step in timeline["steps"]] == [10, 11, 12]
    for row in timeline["rows"]:
        for start, duration, name, key, _ in row["spans"]:
            assert timeline["start"] - 0.1 <= start <= start + duration <= timeline["end"] + 0.2
            assert timeline["names"][name] and key
    lane = [span for row in timeline["rows"] if row["name"] == "cpu" for span in row["spans"]]
    assert {span[3] for span in lane} == {"decode", "prefill", "train"}


def test_rows_of_many_overlapping_spans_are_left_out_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    recorder = Recorder(clock, max_events=10)
    spans = [recorder.span(f"episode {member}", track="environment") for member in range(10)]
    for span in spans:
        clock.now += 1.0
        span.__enter__()
    for span in spans:  # the first in is the first out, as with coroutines: none is nested in another
        clock.now += 1.0
        span.__exit__(None, None, None)
    recorder.instant("one too many", track="environment")
    write_trace(recorder, tmp_path / "trace.json")
    timeline = collect(tmp_path)["timeline"]
    assert [row["name"] for row in timeline["rows"]] == ["environment", *(f"environment #{n}" for n in range(2, 7))]
    assert "4 further rows" in timeline["lead"] and "1 later events were not stored" in timeline["lead"]


def test_an_empty_directory_gives_a_page(tmp_path: Path) -> None:
    data = json.loads(Page(write_report(tmp_path, name="nothing").read_text("utf-8")).data)
    assert data["steps"] == [] and data["timeline"] is None and data["rollouts"] == [] and data["config"] is None


def test_one_step_with_nan_and_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"time":10.0,"loss":null,"reward/mean":0.5,"note":"text"}\n{"st')
    data = collect(tmp_path)
    assert data["series"] == {"reward/mean": [0.5]}
    assert data["weights"] == [0.0]


def test_of_a_step_written_twice_the_later_line_counts(tmp_path: Path) -> None:
    lines = [{"step": s, "time": t, "loss": v} for s, t, v in ((1, 1.0, 0.1), (2, 2.0, 0.2), (2, 5.0, 0.3))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    data = collect(tmp_path)
    assert (data["steps"], data["series"]["loss"]) == ([1, 2], [0.1, 0.3])


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
    assert warning.startswith("Until step 4: 95% of the completions were cut at rollout.max_tokens")
    assert warning.endswith("for 4 steps in a row.")


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    row = {"prompt": "p", "completion": "a" * 50_000 + "z", "reward": None}
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps(row))
    ((shown,),) = [each["rows"] for each in collect(tmp_path)["rollouts"]]
    assert len(shown["completion"]) < 7000 and shown["completion"].endswith("z")
    assert "44,001 characters left out" in shown["completion"]
