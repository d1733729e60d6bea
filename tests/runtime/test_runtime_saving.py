"""When checkpoints are written, that training goes on meanwhile, and that none of them holds NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_helpers import MODEL, REAL, Process, config_of, metrics_of, weights_of, write_yaml

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import DivergenceError
from asyncrl.main import main
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.opened import OpenRun
from asyncrl.runtime.runtime import Runtime
from asyncrl.training.snapshot import unsound

QUICK = REAL | {"train": REAL["train"] | {"max_steps": 30}, "checkpoint": {"keep": 0}}


def versions(run: Path) -> list[int]:
    return CheckpointStore(run / "checkpoints").versions()


async def test_checkpoints_are_written_by_time_where_no_interval_is_given(tmp_path: Path) -> None:
    assert config_of(tmp_path).checkpoint.every_s == 600  # without being asked
    for name, settings in {
        "often": ["checkpoint.every_s=0.05"],
        "interval": ["checkpoint.every_s=0.05", "checkpoint.every=29"],
        "never": ["checkpoint.every_s=null"],
    }.items():
        async with Runtime(config_of(tmp_path, f"run.name={name}", *settings, base=QUICK)) as runtime:
            await runtime.run()
    often = versions(tmp_path / "runs/often")
    assert len(often) > 3 and often[-1] == 30
    assert versions(tmp_path / "runs/interval") == [29, 30]
    assert versions(tmp_path / "runs/never") == [30]


async def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of this model is written only once a later step has its line of metrics."""
    monkeypatch.chdir(tmp_path)
    settings = [f"model.path={MODEL}:build_patient", "checkpoint.every=4", "train.max_steps=7"]
    async with Runtime(config_of(tmp_path, *settings, base=QUICK)) as runtime:
        await runtime.run()
    assert versions(tmp_path / "runs/run") == [4, 7]
    assert (tmp_path / "waited").read_text() == "saw step 6"


@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("replicate", marks=pytest.mark.slow)])
def test_two_ranks_agree_on_the_time(tmp_path: Path, sharding: str) -> None:
    """Each has to bring its part (of the model, of its replay buffer), or the first one would wait for it."""
    tree = QUICK | {"distributed": {"sharding": sharding}, "replay": {"size": 4}}
    tree = tree | {"checkpoint": {"keep": 0, "every_s": 0.05}}
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "asyncrl.main")
    process = Process(tmp_path, str(write_yaml(tmp_path, tree)), program=program)
    assert process.wait(200) == 0, process.output
    run = tmp_path / "runs/run"
    found = versions(run)
    assert len(found) > 3 and found[-1] == 30
    again = Process(tmp_path, str(tmp_path / "run.yaml"), "resume=true", "train.max_steps=32", program=program)
    assert again.wait(200) == 0, again.output
    assert [line["step"] for line in metrics_of(run)] == list(range(1, 33))


def test_a_run_in_which_no_thread_can_be_started_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first step on, to its end. One that gets none at its start says so in a sentence."""
    monkeypatch.chdir(tmp_path)
    refused = False

    def start(thread: threading.Thread, begin: Callable[[threading.Thread], None] = threading.Thread.start) -> None:
        if refused:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def at_a_step(run: OpenRun, report: StepReport, on: Callable[..., None] = OpenRun._on_step) -> None:
        nonlocal refused
        refused = True
        on(run, report)

    monkeypatch.setattr(OpenRun, "_on_step", at_a_step)
    file = str(write_yaml(tmp_path, REAL))
    assert main([file, "train.max_steps=3", "checkpoint.every=2"]) == 0
    assert versions(tmp_path / "runs/run") == [2, 3] and (tmp_path / "runs/run/report.html").exists()
    capsys.readouterr()
    assert main([file, "run.name=two"]) == 2
    assert capsys.readouterr().err.startswith(
        "asyncrl: PlatformError: can't start new thread: no more threads or processes"
    )


def test_a_run_that_diverges_leaves_the_last_good_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 1e38 is too large for float32. What is there already stays, and is named."""
    monkeypatch.chdir(tmp_path)
    file = str(write_yaml(tmp_path, REAL))
    assert main([file, "train.lr=1e38"]) == 3
    error = capsys.readouterr().err
    assert "version 1 has weights that are NaN or infinite" in error and "lower train.lr" in error
    assert "packed copy" not in error and "no version was saved" in error
    assert versions(tmp_path / "runs/run") == []
    assert main([file, "run.name=two", "train.max_steps=2"]) == 0
    assert main([file, "run.name=two", "resume=true", "train.lr=1e38", "checkpoint.every=1"]) == 3
    error = capsys.readouterr().err
    assert "the last good version, all of it finite, is 2: runs/two/checkpoints/step_2" in error
    assert versions(tmp_path / "runs/two") == [2]
    assert (tmp_path / "runs/two/checkpoints/latest").resolve().name == "step_2"
    assert unsound(weights_of(tmp_path / "runs/two", 2)) is None


@pytest.mark.parametrize(
    ("lr", "words"),
    [
        ("3e37", "version 2 has weights that are NaN or infinite, or beyond 1e+18"),  # packed copies of these differ
        ("1e22", "version 2 has weights that are NaN or infinite, or beyond 1e+18"),  # their gradient is NaN
        ("1e15", "the model's logits are not finite in"),  # the engine finds that
    ],
)
def test_finite_weights_that_nothing_can_be_computed_with_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lr: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(write_yaml(tmp_path, REAL | {"preset": "sync"}))
    assert main([file, "train.max_steps=1"]) == 0
    assert main([file, "resume=true", f"train.lr={lr}"]) == 3
    error = capsys.readouterr().err
    assert words in error and "packed copy" not in error and "Traceback" not in error
    assert "the last good version, all of it finite, is 1: runs/run/checkpoints/step_1" in error
    assert versions(tmp_path / "runs/run") == [1]
    assert (tmp_path / "runs/run/checkpoints/latest").resolve().name == "step_1"


async def test_a_state_that_is_not_finite_is_not_saved_though_the_weights_are(tmp_path: Path) -> None:
    """A second moment that overflowed: its weights stand still for ever, and are finite."""
    found = r"version 30 is not saved: state\.optimizer\..*exp_avg_sq holds NaN or infinite"
    with pytest.raises(DivergenceError, match=found) as refused:
        async with Runtime(config_of(tmp_path, base=QUICK)) as runtime:
            runtime.start("spoil", spoil, runtime)
            await runtime.run()
    assert any("no version was saved" in note for note in refused.value.__notes__)
    assert versions(tmp_path / "runs/run") == []


async def spoil(runtime: Runtime) -> None:
    core = runtime.built.core
    assert core is not None
    optimizer = core.optimizer
    await anext(aiter(runtime.steps()))
    moments = optimizer.optimizer.state[optimizer.parameters[0]]["exp_avg_sq"]
    await runtime.built.lanes[0].run(lambda: moments.fill_(torch.inf), name="spoil")


def test_the_place_of_a_value_that_is_not_finite() -> None:
    sound = {"a": [torch.arange(3), torch.empty(0)], "b": {"c": torch.ones(2, dtype=torch.bfloat16)}, "d": 5}
    assert unsound(sound) is None
    assert unsound(sound | {"e": (torch.ones(2), torch.tensor([1.0, -torch.inf]))}) == "e.1"
    assert unsound({"b": {"c": torch.tensor([torch.nan, 1.0], dtype=torch.bfloat16)}}) == "b.c"
    assert unsound(torch.tensor(torch.inf), "x") == "x"
