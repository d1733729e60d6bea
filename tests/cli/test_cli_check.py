"""`asyncrl check`: a line for each checkpoint, exit code 5 for damage, and no word against a run that is alive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.checkpoint.manifest import compare_during_run
from asyncrl.checkpoint.state import state_writer
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.cli.app import main


def model_writer(size: int = 100) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(os.urandom(size))
        (directory / "config.json").write_text("{}")

    return write


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Of the run `runs/one`, with three checkpoints."""
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("runs/one/checkpoints"), keep=0)
    for version in (9, 10, 11):
        store.save(version, model_writer(), state_writer(trainer={"step": version}, run={"version": version}))
    return store


def test_a_whole_run_and_one_checkpoint(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "runs/one", "runs/one/checkpoints"):
        assert main(["check", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[1] for line in lines] == ["intact, 5 files, 0.0 MiB"] * 3
        assert [Path(line.split(": ")[0]).name for line in lines] == ["step_9", "step_10", "step_11"]
    for name in ("latest", "step_10"):
        assert main(["check", f"runs/one/checkpoints/{name}"]) == 0
        assert capsys.readouterr().out.count("intact, ") == 1
    elsewhere = store.path(9).rename("model")
    assert main(["check", str(elsewhere)]) == 0 and "model: intact" in capsys.readouterr().out


def test_damage_is_told_file_by_file_and_exits_5(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    (store.path(11) / "model.safetensors").write_bytes(bytes(100))
    (store.path(11) / "config.json").unlink()
    (store.path(10) / "state/run.json").write_bytes(b"{}")
    assert main(["check", "one"]) == 5
    nine, ten, eleven, way_out = capsys.readouterr().out.splitlines()
    assert "step_9: intact" in nine and "step_10: damaged: state/run.json has 2 bytes; expected " in ten
    assert "step_11: damaged: config.json is missing; model.safetensors is not what was written" in eleven
    assert way_out.startswith("resume=true fails: step_11 is damaged; step_9 is intact: run `ln -sfn step_9 runs/one/")
    assert main(["check", "runs/one/checkpoints/step_10"]) == 5
    assert main(["check", "runs/one/checkpoints/step_9"]) == 0
    (store.path(9) / "state/manifest.json").unlink()
    assert main(["check", "one"]) == 5
    said = capsys.readouterr().out
    assert "step_9: damaged: state/manifest.json is missing" in said and "no earlier checkpoint here is intact" in said


def test_what_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/new/checkpoints").mkdir(parents=True)
    assert main(["check", "new"]) == 0
    assert "runs/new/checkpoints: no checkpoint yet" in capsys.readouterr().out
    assert main(["check", "nobody"]) == main(["check", "runs"]) == main(["check"]) == main(["check", "a", "b"]) == 2
    assert "nobody is neither a run directory nor a checkpoint" in capsys.readouterr().err
    assert main(["check", "--help"]) == 0
    assert "5 if a checkpoint is damaged" in capsys.readouterr().out
    assert main(["--help"]) == 0 and "asyncrl check RUN" in capsys.readouterr().out


def test_a_run_that_is_alive_is_not_called_damaged(store: CheckpointStore) -> None:
    """Checkpoints that are written, replaced and removed while they are compared."""
    over = threading.Event()
    alive = CheckpointStore(store.directory, keep=1)

    def save() -> None:
        for version in [number for each in range(12, 40) for number in (each, each)]:
            alive.save(version, model_writer(200_000), model_writer(200_000))
        over.set()

    writer = threading.Thread(target=save)
    writer.start()
    seen: list[object] = []
    while not over.is_set():
        seen += [compare_during_run(store.path(version)) for version in [*store.versions(), 9]]
    writer.join()
    assert None in seen  # those that were removed
    assert {str(each).partition(",")[0] for each in seen} == {"None", "intact"}


def test_a_checkpoint_that_is_replaced_while_it_is_compared(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first manifest is read, then a save of the same version takes its place: the files no longer fit, and are no damage."""
    path, read, reads = store.path(11), Path.read_bytes, 0

    def read_and_replace(self: Path) -> bytes:
        nonlocal reads
        content = read(self)
        reads += 1
        if reads == 1:
            store.save(11, model_writer(300))
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    found = compare_during_run(path)
    assert found is not None and found.faults == () and reads == 2
