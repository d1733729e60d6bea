"""Sinks store the metrics of each step: always in metrics.jsonl, and by choice in wandb, TensorBoard and MLflow.

The event loop calls `write` at every step. `close` may block for seconds, so call it outside the event loop. In every sink, the
number of a step is the policy version. `sinks.json` in the run directory has the ids of this run in wandb and MLflow. A resume uses
these ids, and sends no step twice to wandb and MLflow.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import orjson

from asyncrl.builds import install_command

from ..errors import ConfigError
from .trace import dump

logger = logging.getLogger("asyncrl.telemetry")

IDS = "sinks.json"
_MLFLOW_PARAMS_PER_REQUEST = 100  # the limit of MLflow
# Less than the default of `watchdog.abort_grace_s`, within which a stopped run must end.
_MLFLOW_CLOSE_S = 15.0


class Sink(Protocol):
    """Stores the metrics of each step."""

    id: str  # of this run in the store; empty if the store has one run
    after: int  # `Sinks.write` without `more` skips steps <= `after`

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step. The event loop calls `write`, so `write` may block only for the write of a short line."""

    def close(self) -> None:
        """Store all pending metrics and close. May block for seconds. `write` must not be called afterwards."""


class JsonlSink:
    """Appends one line per step to `metrics.jsonl`: `{"step": v, "time": unix seconds, ...}`. Each line is flushed.

    NaN and infinities become null, because JSON lacks them. If a full disk truncates a new line, a later write completes the line.
    `resume_step`: the version of the resumed checkpoint. The constructor moves lines of later steps and incomplete
    lines to `metrics.discarded.jsonl`.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path, self.id, self.after, self._last_step = path, "", -1, resume_step
        if resume_step is not None:
            discard_after(path, resume_step)
        self._file = path.open("ab")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line. A second write of the last step adds its metrics to the last line. Errors: OSError if the disk is full."""
        if step == self._last_step:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - (1 << 24)))  # the last line has less than 16 MiB
                *_, line = [b"", *file.readlines()]
                if _step_of(line) == step:
                    # Spaces fill the rest of the old line, if the new line is shorter.
                    longer = dump({**orjson.loads(line), **metrics}).ljust(len(line) - 1) + b"\n"
                    if os.pwrite(file.fileno(), longer, size - len(line)) < len(longer):
                        # The disk is full. The old line still fits.
                        os.pwrite(file.fileno(), line, size - len(line))
                        file.truncate(size)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                    return
        self._last_step = step
        self._file.write(dump({"step": step, "time": round(time.time(), 3), **metrics}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def discard_after(path: Path, step: int) -> int:
    """Move the lines of steps after `step` to `<stem>.discarded.jsonl`, and return their number. At every moment each line is in
    at least one of the two files. Only one line at a time is in memory, because a million steps are gigabytes."""
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        if all(_step_of(line) <= step for line in lines):
            return 0
    count = 0
    partial = path.with_name(path.name + ".partial")
    discarded = path.with_name(f"{path.stem}.discarded{path.suffix}")
    with path.open("rb") as lines, partial.open("wb") as kept_file, discarded.open("ab") as discarded_file:
        for line in lines:
            is_later = _step_of(line) > step
            (discarded_file if is_later else kept_file).write(line.rstrip(b"\n") + b"\n")
            count += is_later
        discarded_file.flush()
        os.fsync(discarded_file.fileno())
    os.replace(partial, path)
    return count


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for an incomplete line, which a crash left."""
    try:
        step = orjson.loads(line)["step"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a JSONL file, one at a time. Incomplete lines are skipped. Yields nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def _last_step(run_dir: Path) -> int:
    """The last step that the run wrote before the resume, discarded steps included; -1 if it wrote none."""
    rows = (row for name in ("metrics", "metrics.discarded") for row in each_row(run_dir / f"{name}.jsonl"))
    return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=-1)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a small JSONL file, like `each_row`."""
    return list(each_row(path))


class WandbSink:
    """Weights & Biases. Respects environment variables such as `WANDB_MODE`. A resume removes no steps from wandb."""

    def __init__(
        self, run_dir: Path, name: str, config: Mapping[str, Any], resume_step: int | None, former_id: str | None
    ) -> None:
        """`former_id`: the id of the run at wandb from before the resume."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_missing_message("wandb")) from error
        self.id = os.environ.get("WANDB_RUN_ID") or former_id or secrets.token_hex(4)
        self.after = _last_step(run_dir) if self.id == former_id else -1
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "asyncrl"),
                name=name,
                id=self.id,
                resume="allow",
                dir=str(run_dir),
                config=dict(config),
                allow_val_change=True,  # a resume may change some settings
            )
        except wandb.errors.UsageError as error:  # no API key, and no terminal to ask for one
            raise ConfigError(
                f"telemetry.sinks has 'wandb', and wandb refused to start: {error}. Run `wandb login`, or set WANDB_MODE=offline."
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics to wandb's own process."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """TensorBoard event files under `<run_dir>/tensorboard`. Needs neither torch nor TensorFlow."""

    def __init__(
        self, run_dir: Path, name: str, config: Mapping[str, Any], resume_step: int | None, _id: object
    ) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(_missing_message("tensorboard")) from error
        self.id, self.after = "", -1 if resume_step is None else resume_step
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if resume_step is not None:
            # Makes TensorBoard hide the points after `resume_step` that were written before the resume.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowSink:
    """MLflow (the package `mlflow-skinny` or `mlflow`), written by a thread.

    Respects environment variables such as `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`. Without a URI the runs are in
    `mlflow.db` (SQLite) beside the run directories. MLflow's names have no `@`, so `eval/x/pass@4` becomes `eval/x/pass_at_4`.
    Training never waits for the store: unsent steps wait in memory. After an error the store gets no further steps, and the log has
    a warning. A resume changes neither the parameters nor the points that are already in the store.
    """

    def __init__(
        self, run_dir: Path, name: str, config: Mapping[str, Any], resume_step: int | None, former_id: str | None
    ) -> None:
        """`former_id`: the id of the run in MLflow from before the resume."""
        try:
            import mlflow
            from mlflow.entities import Param
        except ImportError as error:
            raise ConfigError(_missing_message("mlflow")) from error
        default_uri = None if mlflow.is_tracking_uri_set() else f"sqlite:///{run_dir.parent.resolve() / 'mlflow.db'}"
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "asyncrl")
        params = [Param(key, str(value)) for key, value in _leaves(config)]
        self.after = -1
        try:
            self._client = mlflow.MlflowClient(tracking_uri=default_uri)
            if former_id is not None:
                self.id, self.after = former_id, _last_step(run_dir)
                self._client.update_run(self.id, status="RUNNING")
            else:
                existing = self._client.get_experiment_by_name(experiment)
                experiment_id = existing.experiment_id if existing else self._client.create_experiment(experiment)
                self.id = self._client.create_run(experiment_id, run_name=name).info.run_id
                for start in range(0, len(params), _MLFLOW_PARAMS_PER_REQUEST):
                    self._client.log_batch(self.id, params=params[start : start + _MLFLOW_PARAMS_PER_REQUEST])
        # Each kind of store raises errors of its own library.
        except Exception as error:
            raise ConfigError(
                f"telemetry.sinks has 'mlflow', and its store {default_uri or mlflow.get_tracking_uri()} refused to start: "
                f"{type(error).__name__}: {error}; set MLFLOW_TRACKING_URI to the address of the store"
                + (f", or remove {run_dir / IDS} to create a new run in the store" if former_id else "")
            ) from error
        self._queue: queue.Queue[tuple[int, Mapping[str, float], int] | None] = queue.Queue()
        # A daemon, so that the process can end although the store hangs.
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put the metrics into the queue, unless the store has failed."""
        if self._thread.is_alive():
            self._queue.put((step, dict(metrics), int(time.time() * 1000)))

    def _send(self) -> None:
        from mlflow.entities import Metric

        # MLflow retries for minutes before it raises, so the first error ends this thread.
        unsent = "metrics"
        try:
            while (item := self._queue.get()) is not None:
                step, metrics, now = item
                unsent = f"metrics from step {step} on"
                batch = [Metric(key.replace("@", "_at_"), float(value), now, step) for key, value in metrics.items()]
                self._client.log_batch(self.id, metrics=batch)
            unsent = "end of the run"
            self._client.set_terminated(self.id)
        except Exception as error:
            logger.warning("mlflow did not get the %s: %s: %s", unsent, type(error).__name__, error)

    def close(self) -> None:
        """Wait at most 15 s until the thread has sent the queued steps and the end of the run."""
        self._queue.put(None)
        self._thread.join(_MLFLOW_CLOSE_S)
        # `qsize` counts the end marker, but not the step that is being sent. So `qsize` is the number of lacking steps.
        if self._thread.is_alive() and (lacking := self._queue.qsize()):
            logger.warning("mlflow lacks the last %d steps: its store was too slow", lacking)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _missing_message(name: str) -> str:
    return f"telemetry.sinks has {name!r}, and that package is not installed: `{install_command(name)}`"


class Sinks:
    """All sinks of a run. If one sink raises an OSError, `write` and `close` go on with the other sinks."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float], more: bool = False) -> None:
        """Write to every sink. `more`: these are further metrics of the last step. Errors: the first OSError, after all writes."""
        errors: list[OSError] = []
        for sink in self._sinks:
            try:
                if more or step > sink.after:
                    sink.write(step, metrics)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Close all sinks, in reverse order."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_sinks(
    names: Sequence[str], run_dir: Path, *, name: str, config: Mapping[str, Any], resume_step: int | None = None
) -> Sinks:
    """Open metrics.jsonl and the sinks in `names` (`wandb`, `tensorboard`, `mlflow`). Errors: ConfigError for a missing package or
    a store that refuses. Blocks for seconds (wandb starts a process), so call it outside the event loop."""
    classes: dict[str, Callable[..., Sink]] = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "mlflow": MlflowSink}
    run_dir.mkdir(parents=True, exist_ok=True)
    ids: dict[str, str] = {}
    if resume_step is not None and (run_dir / IDS).exists():
        ids = orjson.loads((run_dir / IDS).read_bytes())
    with ExitStack() as opened:  # if a sink cannot be opened, closes the sinks before it
        sinks: list[Sink] = []
        for kind in names:
            sink = classes[kind](run_dir, name, config, resume_step, ids.get(kind))
            opened.callback(sink.close)
            sinks.append(sink)
            ids[kind] = sink.id
        if names:
            (run_dir / f"{IDS}.partial").write_bytes(orjson.dumps(ids))
            os.replace(run_dir / f"{IDS}.partial", run_dir / IDS)
        # Last, because the constructor discards lines of metrics.jsonl. If another sink cannot open, the file must not change.
        sinks.insert(0, JsonlSink(run_dir / "metrics.jsonl", resume_step))
        opened.pop_all()
    return Sinks(sinks)
