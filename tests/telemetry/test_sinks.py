"""Sinks: metrics.jsonl and its resume, TensorBoard, rollouts, the live view."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import resource
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trajectories import trajectory

from asyncrl.errors import ConfigError
from asyncrl.telemetry.live import LiveView
from asyncrl.telemetry.rollouts import RolloutWriter
from asyncrl.telemetry.sinks import JsonlSink, Sinks, each_row, open_sinks, read_jsonl
from asyncrl.types import Group, Prompt, Ticket


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_lines_are_there_at_once_and_nan_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    before = time.time()
    sink.write(1, {"reward/mean": 0.5, "loss": math.nan, "x": math.inf, "np": np.float32(0.25)})  # type: ignore[dict-item]
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert before - 1 <= row.pop("time") <= time.time() + 1
    assert row == {"step": 1, "reward/mean": 0.5, "loss": None, "x": None, "np": 0.25}
    sink.close()
    sink.close()


def test_resume_moves_later_and_broken_lines_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Sinks([JsonlSink(path)]) as sinks:
        for step in range(1, 6):
            sinks.write(step, {"loss": float(step)})
    with path.open("ab") as file:
        file.write(b'{"step":6,"lo')
    sink = JsonlSink(path, resume_step=3)
    sink.write(4, {"loss": 40.0})
    sink.close()
    assert [(row["step"], row["loss"]) for row in lines(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    discarded = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded[:2]] == [4, 5]
    assert discarded[2] == '{"step":6,"lo'
    JsonlSink(path, resume_step=2).close()
    assert len((tmp_path / "metrics.discarded.jsonl").read_text().splitlines()) == 5
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("earlier", [False, True])
def test_more_of_the_last_step_goes_into_its_line(tmp_path: Path, earlier: bool) -> None:
    """An evaluation that is made later: in this life of the run, or after the one that wrote the line."""
    path = tmp_path / "metrics.jsonl"
    sinks = Sinks([JsonlSink(path)])
    for step in (1, 2):
        sinks.write(step, {"loss": float(step), "reward/mean": 0.123456789, "x": math.nan})
    if earlier:
        sinks.close()
        sinks = Sinks([JsonlSink(path, resume_step=2)])
    before = lines(path)
    sinks.write(2, {"eval/a": 1.0}, more=True)
    assert lines(path) == [before[0], before[1] | {"eval/a": 1.0}]
    sinks.write(2, {"eval/a": 2.0, "reward/mean": 0.0}, more=True)  # shorter
    sinks.write(3, {"loss": 3.0})
    sinks.close()
    assert lines(path)[1] == before[1] | {"eval/a": 2.0, "reward/mean": 0.0}
    assert [row["step"] for row in lines(path)] == [1, 2, 3]


def test_a_full_disk_leaves_the_last_line_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2):
        sink.write(step, {"loss": 0.5})
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file of at most this size behaves like one on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            sink.write(2, {"eval/reward": 0.25})
        assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.write(2, {"eval/reward": 0.25})
    sink.write(3, {"loss": 0.125})
    sink.close()
    assert [(line["step"], line.get("eval/reward")) for line in lines(path)] == [(1, None), (2, 0.25), (3, None)]


def test_the_lines_of_a_long_run_are_never_all_in_memory(tmp_path: Path) -> None:
    """Those of a million steps are gigabytes."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "text": "x" * 1000}) + "\n" for step in range(8000)))
    tracemalloc.start()
    assert any(row["step"] == 7999 for row in each_row(path))
    JsonlSink(path, resume_step=1000).close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.with_name("metrics.discarded.jsonl").stat().st_size / 8
    assert [row["step"] for row in each_row(path)] == list(range(1001))


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=3)
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    sink.write(3, {"eval/a": 1.0})  # more of a line that is not there
    sink.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [3]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_every_sink_is_closed_even_if_one_fails(tmp_path: Path) -> None:
    closed: list[str] = []

    class Failing(JsonlSink):
        def close(self) -> None:
            super().close()
            closed.append(self.path.name)
            raise OSError("disk")

    sinks = Sinks([Failing(tmp_path / "a"), Failing(tmp_path / "b")])
    with pytest.raises(OSError, match="disk"):
        sinks.close()
    assert sorted(closed) == ["a", "b"]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "tensorboard.summary", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
        name = module.partition(".")[0]
        with pytest.raises(ConfigError, match=rf"pip install -e '.*\[{name}\]'"):
            open_sinks([name], tmp_path, name="run", config={})


def test_tensorboard_gets_every_scalar_once(tmp_path: Path) -> None:
    """Lives that reach steps 4 and 3, and one from the checkpoint of step 1 after both."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for life, (resume, steps) in enumerate([(None, (0, 1, 2, 3, 4)), (2, (2, 3)), (1, (2, 3))]):
        with open_sinks(["tensorboard"], tmp_path, name="run", config={}, resume_step=resume) as sinks:
            for step in steps:
                sinks.write(step, {"reward/mean": step + life / 4})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    found = [(event.step, event.value) for event in accumulator.Scalars("reward/mean")]
    assert found == [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5)]
    assert accumulator.Tags()["tensors"] == []


def make_group(group_id: int, size: int, completion: str = "four") -> Group:
    prompt = Prompt(group_id, np.array([1, 2], np.int32), "2+2=", {"answer": "4"})
    trajectories = tuple(
        trajectory(
            group_id, member, size, np.arange(5), version=np.array([0, 0, 3, 4, 4]), completion=completion, reward=float(member),
            components={"exact": float(member), "style": None}, metadata={"turns": np.int64(1), "object": object},
        )
        for member in range(size)
    )  # fmt: skip
    return Group(Ticket(group_id, 3, 5), prompt, trajectories)


def test_rollout_lines_say_what_was_written_sampled_and_trained(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    writer.write(6, [make_group(7, 2)], 5, {(7, 1): 0.5})
    first, second = lines(tmp_path / "rollouts" / "step_6.jsonl")
    assert second.pop("metadata")["turns"] == 1
    assert second == {
        "step": 6,
        "group_id": 7,
        "member": 1,
        "epoch": 0,
        "prompt": "2+2=",
        "completion": "four",
        "reward": 1.0,
        "components": {"exact": 1.0, "style": None},
        "versions": {"min": 3, "max": 4},
        "trained_version": 5,
        "staleness": 2,
        "prompt_length": 2,
        "completion_length": 3,
        "trained_tokens": 3,
        "finish_reason": "stop",
        "advantage": 0.5,
    }
    assert (first["member"], first["advantage"]) == (0, None)


def test_an_integer_of_any_size_in_a_prompt_is_written(tmp_path: Path) -> None:
    group = make_group(7, 1)
    for number, written in ((2**64 - 1, 2**64 - 1), (2**64, str(2**64)), (-(2**200), str(-(2**200)))):
        prompt = [{"role": "user", "content": "?", "ids": [{"id": number}]}]
        RolloutWriter(tmp_path).write(1, [replace(group, prompt=replace(group.prompt, prompt=prompt))], 0, {})
        [line] = lines(tmp_path / "rollouts" / "step_1.jsonl")
        assert line["prompt"] == [{"role": "user", "content": "?", "ids": [{"id": written}]}]
        assert line["metadata"]["turns"] == 1


def test_rollouts_are_limited_and_later_ones_set_aside_on_resume(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, limit=3)
    for step in (1, 2, 10):
        writer.write(step, [make_group(step, 2), make_group(step + 1, 2)], step - 1, {})
    assert [(r["group_id"], r["member"]) for r in lines(tmp_path / "rollouts" / "step_1.jsonl")] == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    other = RolloutWriter(tmp_path, resume_step=1, rank=3)
    for step in (1, 2):
        other.write(step, [make_group(step, 2)], step - 1, {})
    RolloutWriter(tmp_path, resume_step=1)
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*.jsonl")) == ["step_1.jsonl"]
    assert [path.name for path in other.directory.iterdir()] == ["step_1.jsonl"]
    assert (tmp_path / "rollouts" / "discarded" / "rank_3" / "step_2.jsonl").exists()
    assert sorted(path.name for path in (tmp_path / "rollouts" / "discarded").glob("*.jsonl")) == [
        "step_10.jsonl",
        "step_2.jsonl",
    ]
    RolloutWriter(tmp_path, decode=lambda ids: f"<s>{ids}").write(7, [make_group(7, 1)], 6, {})
    assert lines(tmp_path / "rollouts" / "step_7.jsonl")[0]["rendered_prompt"] == "<s>[0, 1]"
    RolloutWriter(tmp_path, limit=0).write(5, [make_group(5, 2)], 4, {})
    assert not (tmp_path / "rollouts" / "step_5.jsonl").exists()


METRICS = {
    "reward/mean": 0.51,
    "reward/std": 0.25,
    "staleness/mean": 0.8,
    "staleness/max": 2.0,
    "completions/mean_length": 87.4,
    "loss": 0.0123,
    "perf/tokens_per_s": 1234.5,
    "idle/reward": 0.08,
    "idle/slots": 0.04,
    "idle/unexplained": 0.0,
    "idle/gen/reward": 0.5,
    "time/step": 3.21,
}


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with LiveView("auto", 200, stream=stream) as live:
        live.step(12, METRICS)
        live.note("checkpoint written [12]")
        live.step(13, {"time/step": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 12/200  reward 0.510±0.250  staleness 0.8/2  length 87  loss 0.0123  1,234 tok/s  "
        "idle 12 % (reward 8 %)  3.2 s",
        "checkpoint written [12]",
        "step 13/200  1.0 s",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")


def last_frame(shown: str) -> str:
    """The bar as it stood when the view closed, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    return [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")][-1]


@pytest.mark.parametrize("columns", [60, 80, 100, 140, 200])
@pytest.mark.parametrize(("total", "step"), [(40, 5), (10_000, 9_999)])
def test_a_narrow_terminal_loses_numbers_and_never_the_step_or_the_time_left(
    monkeypatch: pytest.MonkeyPatch, columns: int, total: int, step: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with LiveView("auto", total, stream=stream) as live:
        live.note("[not markup]")
        live.step(step - 1, METRICS)
        live.step(step, METRICS)
    frame = last_frame(stream.getvalue())
    assert len(frame) <= columns and "[not markup]" in stream.getvalue()
    assert re.match(rf"step +{step}/{total} ", frame), frame
    assert len(re.findall(r"\d:\d\d:\d\d ", frame)) == 2, frame  # elapsed and left
    assert "reward 0.510±0.250" in frame
    assert ("idle 12 % (reward 8 %)" in frame) == (columns == 200), "what does not fit ends with an ellipsis"
    assert ("…" in frame) == (columns < 200)


def test_the_time_left_of_slow_steps_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    stream = Terminal()
    with LiveView("auto", 12, stream=stream) as live:
        for step in (1, 2):
            now += 90
            live.step(step, METRICS)
    assert "0:15:00" in last_frame(stream.getvalue())


def test_what_goes_on_before_the_first_step_is_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("asyncrl.telemetry.live.time.perf_counter", lambda: now)
    stream = io.StringIO()
    with LiveView("auto", 200, stream=stream) as live:
        live.status("loading the model: 2 GiB")
        for second in range(65):
            now += 1
            live.status(f"first step: {second} of 64 completions")
        for _ in range(100):  # nothing moves: nothing is said
            now += 1
            live.status("first step: 64 of 64 completions")
    assert stream.getvalue().splitlines() == [
        "loading the model: 2 GiB",
        "first step: 0 of 64 completions",
        "first step: 30 of 64 completions",
        "first step: 60 of 64 completions",
        "first step: 64 of 64 completions",
    ]


def test_what_goes_on_before_the_first_step_stands_beside_the_bar() -> None:
    for steps in (0, 1):
        stream = Terminal()
        with LiveView("auto", 20, stream=stream) as live:
            live.status("loading the model: [2] GiB")
            for step in range(steps):
                live.step(step + 1, METRICS)
        frame = last_frame(stream.getvalue())
        assert ("loading the model: [2] GiB" in frame) == (not steps) and ("reward 0.510" in frame) == bool(steps)


def test_off_prints_nothing() -> None:
    stream = Terminal()
    with LiveView("off", 20, stream=stream) as live:
        live.status("x: 1")
        live.step(1, METRICS)
        live.note("x")
    assert stream.getvalue() == ""


# -- a live view that cannot be written to raises nothing ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_pipe_that_nobody_reads_and_a_terminal_that_is_closed(kind: str) -> None:
    read, write = os.pipe() if kind == "pipe" else pty.openpty()
    with open(write, "w") as stream, LiveView("auto", 3, stream=stream) as view:
        os.close(read)
        for version in range(3):
            view.step(version, {"loss": 1.0})
            view.note("a note")


def test_a_stream_that_is_closed_and_one_that_lacks_characters() -> None:
    closed = io.StringIO()
    closed.close()
    with LiveView("plain", stream=closed) as view:
        view.note("nobody")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with LiveView("plain", stream=narrow) as view:
        view.step(1, {"reward/mean": 0.5, "reward/std": 0.25, "own/turns": 3})
    assert "reward 0.500?0.250  own/turns 3.000" in narrow.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
