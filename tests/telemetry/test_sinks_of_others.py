"""wandb (offline) and MLflow (SQLite, files) as they are installed: what a run logs is read back from their stores."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.runtime.runtime import Runtime
from asyncrl.telemetry import sinks as module
from asyncrl.telemetry.sinks import open_sinks

CONFIG = {"train": {"lr": 0.5, "max_steps": None}, "data": {"chat_template_kwargs": {}}, "seed": 3}


def _log(name: str, run_dir: Path) -> None:
    before = threading.active_count()
    with open_sinks([name], run_dir, name="mine", config=CONFIG) as sinks:
        for step in (1, 2):
            sinks.write(step, {"reward/mean": step / 2, "eval/sums/pass@4": 0.25})
    assert threading.active_count() == before or name == "wandb"  # wandb keeps a thread of its own for the next run


def _resumed(name: str, run_dir: Path) -> None:
    """From the checkpoint of step 1, with another setting: step 2 comes again."""
    config = {**CONFIG, "train": {"lr": 0.25}}
    with open_sinks([name], run_dir, name="mine", config=config, resume_step=1) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"reward/mean": step / 4})


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
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    wandb.teardown()  # whoever imported it before has had it read the environment
    _log("wandb", tmp_path)
    _resumed("wandb", tmp_path)
    wandb.teardown()
    paths = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records, again = (list(_records(path)) for path in paths)
    [run, second] = [record.run for record in records + again if record.HasField("run")]
    assert run.run_id == second.run_id == json.loads((tmp_path / "sinks.json").read_text())["wandb"]
    assert [record.history.step.num for record in again if record.HasField("history")] == [3]
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
@pytest.mark.parametrize("store", [pytest.param("sqlite beside the runs", marks=pytest.mark.slow), "files"])
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
    _resumed("mlflow", tmp_path / "run")
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
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0), (3, 0.75)]
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
    assert [record.getMessage()[:46] for record in caplog.records] == ["mlflow did not get the metrics from step 1 on:"]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


class _Store(ThreadingHTTPServer):
    """As much of MLflow's REST store as a run needs. It takes a batch of metrics only while `open` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.open = threading.Event()
        self.asked = threading.Event()  # a batch waits
        self.may_end = threading.Event()
        self.may_end.set()
        self.steps: list[int] = []
        self.ended = threading.Event()

    def __enter__(self) -> _Store:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.open.set()
        self.may_end.set()
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Store

    def do_GET(self) -> None:
        self._answer({"experiment": {"experiment_id": "1", "name": "asyncrl", "lifecycle_stage": "active"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: dict[str, Any] = {}
        if self.path.endswith("runs/create"):
            answer = {"run": {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}, "data": {}}}
        elif self.path.endswith("log-batch") and body.get("metrics"):
            self.server.asked.set()
            self.server.open.wait()
            self.server.steps += [metric["step"] for metric in body["metrics"]]
        elif self.path.endswith("runs/update"):
            self.server.ended.set()
            self.server.may_end.wait()
        self._answer(answer)

    def _answer(self, tree: dict[str, Any]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Store]:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with _Store() as store:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{store.server_port}")
        yield store


def test_an_mlflow_store_that_is_slower_than_the_steps(
    tmp_path: Path, slow_store: _Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps wait in memory, and none is lost."""
    with caplog.at_level(logging.WARNING, "asyncrl.telemetry"):
        with open_sinks(["mlflow"], tmp_path, name="mine", config={}) as sinks:
            sinks.write(0, {"a": 1.0})
            assert slow_store.asked.wait(60)  # that one is on its way
            for step in range(1, 151):
                sinks.write(step, {"a": 1.0})
            slow_store.open.set()
    assert slow_store.steps == list(range(151)) and slow_store.ended.is_set() and not caplog.records
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 151


def test_an_mlflow_store_that_hangs_at_the_end(
    tmp_path: Path, slow_store: _Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MLFLOW_CLOSE_S", 0.3)
    with caplog.at_level(logging.WARNING, "asyncrl.telemetry"):
        with open_sinks(["mlflow"], tmp_path, name="mine", config={}) as sinks:
            sinks.write(0, {"a": 1.0})
            assert slow_store.asked.wait(60)
            for step in range(1, 5):
                sinks.write(step, {"a": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "mlflow lacks the last 5 steps: its store was too slow"
    ]
    slow_store.open.set()
    for thread in threading.enumerate():
        if thread.name == "mlflow":
            thread.join(60)
            assert not thread.is_alive()
    assert slow_store.steps == [0, 1, 2, 3, 4]


async def test_a_run_closes_its_sinks_beside_the_loop(tmp_path: Path, slow_store: _Store) -> None:
    """The store answers the last request only once the event loop has run again: closed on the loop, neither would ever end."""
    slow_store.open.set()
    slow_store.may_end.clear()
    tree = {"engine": {"kind": "dry_run"}, "train": {"kind": "dry_run", "max_steps": 2}, "rollout": {"max_tokens": 8}}
    (tmp_path / "run.yaml").write_text(
        json.dumps(tree | {"run": {"dir": str(tmp_path)}, "telemetry": {"live": "off", "sinks": ["mlflow"]}})
    )
    config = load_config([tmp_path / "run.yaml"])
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    asked = threading.Thread(target=lambda: slow_store.ended.wait(60) and loop.call_soon_threadsafe(ended.set))
    asked.start()

    async def answer() -> None:
        await ended.wait()
        slow_store.may_end.set()

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        async with Runtime(config) as rt:
            await rt.run()
    asked.join()
    assert set(slow_store.steps) == {1, 2}
