"""wandb (offline) and MLflow (SQLite, files) as they are installed: what a run logs is read back from their stores."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry.sinks import open_sinks

CONFIG = {"train": {"lr": 0.5, "max_steps": None}, "data": {"chat_template_kwargs": {}}, "seed": 3}


def _log(name: str, run_dir: Path) -> None:
    before = threading.active_count()
    with open_sinks([name], run_dir, name="mine", config=CONFIG) as sinks:
        for step in (1, 2):
            sinks.write(step, {"reward/mean": step / 2, "eval/sums/pass@4": 0.25})
    assert threading.active_count() == before or name == "wandb"  # wandb keeps a thread of its own for the next run


def _records(path: Path) -> Iterator[Any]:
    """The records of wandb's log, which has LevelDB's format: `checksum u32, length u16, kind u8`, one block here."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place = path.read_bytes(), 7
    while place < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1, "a record that is cut: the log is longer than one block"
        yield Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # whoever imported it before has had it read the environment
    _log("wandb", tmp_path)
    wandb.teardown()
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(_records(path))
    [run] = [record.run for record in records if record.HasField("run")]
    config = {item.key or ".".join(item.nested_key): item.value_json for item in run.config.update}
    assert run.display_name == "mine" and config["seed"] == "3" and "0.5" in config["train"]
    history = [record.history for record in records if record.HasField("history")]
    found = [{item.key or ".".join(item.nested_key): item.value_json for item in each.item} for each in history]
    assert [(each.step.num, line["reward/mean"]) for each, line in zip(history, found, strict=True)] == [
        (1, "0.5"),
        (2, "1"),
    ]
    assert found[0]["eval/sums/pass@4"] == "0.25"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
@pytest.mark.parametrize("store", ["sqlite beside the runs", "files"])
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    if store == "files":
        uri = f"file://{tmp_path}/mlruns"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "letters")
    else:
        pytest.importorskip("alembic")
    (tmp_path / "run").mkdir()
    _log("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("letters" if store == "files" else "asyncrl")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {
        "train.lr": "0.5",
        "train.max_steps": "None",
        "data.chat_template_kwargs": "{}",
        "seed": "3",
    }
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0)]
    assert run.data.metrics["eval/sums/pass_at_4"] == 0.25


def test_an_mlflow_store_that_is_refused_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at the start, it ends the run with its reason; later it is said once, and training goes on."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/taken/mlruns")
    with pytest.raises(
        ConfigError, match=r"'mlflow', and its store .*/taken/mlruns refused to start: .*MLFLOW_TRACKING"
    ):
        open_sinks(["mlflow"], tmp_path / "run", name="mine", config={})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    with caplog.at_level(logging.WARNING, "asyncrl.telemetry"):
        with open_sinks(["mlflow"], tmp_path / "run", name="mine", config={}) as sinks:
            for step in (1, 2):
                sinks.write(step, {"no such sign: %": 1.0})
    assert [record.getMessage()[:41] for record in caplog.records] == ["mlflow gets no metrics from step 1 on: Ml"]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
