"""Where the metrics of a step go. One small Protocol; JSONL always, wandb, TensorBoard and MLflow where chosen.

`write` is called on the event loop once a step: the JSONL sink writes one line (tens of microseconds), the others
hand over to a thread or process of their own. `close` may wait for seconds until they have everything: not on the loop.
The one step axis is the policy version. `sinks.json` in the run directory says which run of wandb and MLflow is this one: a resume
goes on with it, and none of the sinks gets a step twice.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from asyncrl.builds import install

from ..errors import ConfigError
from .trace import dump

logger = logging.getLogger("asyncrl.telemetry")

IDS = "sinks.json"
_MLFLOW_PARAMS = 100  # the most that one of its requests takes
_MLFLOW_WAITING = 100  # steps; some kilobytes each
# Less than `watchdog.abort_grace_s`, in which a run that is stopped has to end.
_MLFLOW_CLOSE_S = 15.0


class Sink(Protocol):
    """Takes the metrics of each step. `close` may be called twice."""

    id: str  # of this run, where the sink has other runs, too
    after: int  # the last step that it has already

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of step `step`, which is the policy version. On the event loop: no longer than a short line takes."""
        ...

    def close(self) -> None:
        """Everything that was written is kept; nothing is written afterwards. May wait for seconds."""
        ...


class JsonlSink:
    """`metrics.jsonl`: `{"step": v, "time": unix seconds, ...}`, one line a step, appended and flushed.

    NaN and infinities become null, which JSON lacks. A line that a full disk cut short is completed by the next write that finds
    room. `resume_step` (the version of the checkpoint that the run goes on
    from): lines of later steps, and lines that are not whole, move to `metrics.discarded.jsonl` first.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path, self.id, self.after, self._last = path, "", -1, resume_step
        if resume_step is not None:
            discard_after(path, resume_step)
        self._file = path.open("ab")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line; what comes for the same step goes into it. Errors: OSError where the disk is full."""
        if step == self._last:
            with self.path.open("r+b") as file:
                file.seek(-min(file.seek(0, os.SEEK_END), 1 << 24), os.SEEK_END)  # a line is shorter
                *_, line = [b"", *file.readlines()]
                if _step_of(line) == step:
                    file.seek(-len(line), os.SEEK_END)
                    file.write(dump({**orjson.loads(line), **metrics}).ljust(len(line) - 1) + b"\n")
                    return
        self._last = step
        self._file.write(dump({"step": step, "time": round(time.time(), 3), **metrics}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def discard_after(path: Path, step: int) -> int:
    """Move the lines of steps after `step` to `<stem>.discarded.jsonl`; how many. No line is ever in neither file, and one at a
    time in memory: those of a million steps are gigabytes."""
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        if all(_step_of(line) <= step for line in lines):
            return 0
    count = 0
    partial = path.with_name(path.name + ".partial")
    discarded = path.with_name(f"{path.stem}.discarded{path.suffix}")
    with path.open("rb") as lines, partial.open("wb") as keeps, discarded.open("ab") as takes:
        for line in lines:
            late = _step_of(line) > step
            (takes if late else keeps).write(line.rstrip(b"\n") + b"\n")
            count += late
        takes.flush()
        os.fsync(takes.fileno())
    os.replace(partial, path)
    return count


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for one that a crash cut short."""
    try:
        step = orjson.loads(line)["step"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file, in order, one in memory at a time, without a last line that a crash cut short. None
    without a file."""
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
    """The last step of the earlier lives of a run; -1 without any."""
    rows = (row for name in ("metrics", "metrics.discarded") for row in each_row(run_dir / f"{name}.jsonl"))
    return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=-1)


@dataclass(frozen=True, slots=True)
class Life:
    """What a sink is told of the run that opens it."""

    run_dir: Path
    name: str
    config: Mapping[str, Any]
    resume_step: int | None = None  # of the checkpoint that it goes on from
    id: str | None = None  # under which the sink knows its earlier lives


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """As `each_row`, all of them: of a file that is known to be small."""
    return list(each_row(path))


class WandbSink:
    """Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT` and so on are wandb's own and respected. A step that it has stays."""

    def __init__(self, life: Life) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_missing("wandb")) from error
        self.id = os.environ.get("WANDB_RUN_ID") or life.id or secrets.token_hex(4)
        self.after = _last_step(life.run_dir) if self.id == life.id else -1
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "asyncrl"),
                name=life.name,
                id=self.id,
                resume="allow",
                dir=str(life.run_dir),
                config=dict(life.config),
                allow_val_change=True,  # `resume` itself, and what else a resume may change
            )
        except wandb.errors.UsageError as error:  # no API key and nobody to ask for one
            raise ConfigError(
                f"telemetry.sinks has 'wandb', and wandb refused to start: {error}. "
                "Run `wandb login`, or set WANDB_MODE=offline."
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over to wandb's own process."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until wandb has everything."""
        self._run.finish()


class TensorBoardSink:
    """TensorBoard event files under `<run_dir>/tensorboard`; needs neither torch nor TensorFlow. A resume takes back the points
    after its checkpoint."""

    def __init__(self, life: Life) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(_missing("tensorboard")) from error
        self.id, self.after = "", -1 if life.resume_step is None else life.resume_step
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(life.run_dir / "tensorboard"))
        if life.resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=life.resume_step + 1, session_log=start))
        self._closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """A scalar each, flushed."""
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if not self._closed:
            self._closed = True
            self._writer.close()


class MlflowSink:
    """MLflow, through `mlflow-skinny` or the whole package; a thread of ours hands over.

    `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` and so on are MLflow's own and respected; without an address the runs are in
    `mlflow.db` (SQLite) beside the run directories. MLflow's names have no `@`: `eval/x/pass@4` is `eval/x/pass_at_4` there.
    Training never waits for the store, and `metrics.jsonl` has every step. One that fails gets no further steps; one that is
    slower than the steps has 100 of them waiting, and lacks those that come while they do. The log says so once. It changes
    neither parameters nor points: of a resumed run it keeps those of the first life.
    """

    def __init__(self, life: Life) -> None:
        try:
            import mlflow
            from mlflow.entities import Param
        except ImportError as error:
            raise ConfigError(_missing("mlflow")) from error
        own = None if mlflow.is_tracking_uri_set() else f"sqlite:///{life.run_dir.parent.resolve() / 'mlflow.db'}"
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "asyncrl")
        params = [Param(key, str(value)) for key, value in _leaves(life.config)]
        self.after = -1
        try:
            self._client = mlflow.MlflowClient(tracking_uri=own)
            if life.id is not None:
                self.id, self.after = life.id, _last_step(life.run_dir)
                self._client.update_run(self.id, status="RUNNING")
            else:
                found = self._client.get_experiment_by_name(experiment)
                place = found.experiment_id if found else self._client.create_experiment(experiment)
                self.id = self._client.create_run(place, run_name=life.name).info.run_id
                for start in range(0, len(params), _MLFLOW_PARAMS):
                    self._client.log_batch(self.id, params=params[start : start + _MLFLOW_PARAMS])
        except Exception as error:
            # MLflow's own, and those of the libraries of each kind of store.
            raise ConfigError(
                f"telemetry.sinks has 'mlflow', and its store {own or mlflow.get_tracking_uri()} refused to start: "
                f"{type(error).__name__}: {error}; MLFLOW_TRACKING_URI says where it is"
                + (f"; without {life.run_dir / IDS} a new run is made there" if life.id else "")
            ) from error
        self._waiting: queue.Queue[tuple[int, Mapping[str, float], int] | None] = queue.Queue(_MLFLOW_WAITING)
        self._lacks, self._closed = 0, False  # steps
        # A daemon: where the store hangs, the process must still be able to end.
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over to the thread, or leave the step out."""
        if not self._thread.is_alive():
            return  # it said why
        try:
            self._waiting.put_nowait((step, dict(metrics), int(time.time() * 1000)))
        except queue.Full:
            self._lacks += 1
            if self._lacks == 1:
                logger.warning(
                    "mlflow's store is slower than the steps: %d of them wait for it, and step %d is left out there, as each "
                    "that finds no room; metrics.jsonl has them all",
                    _MLFLOW_WAITING,
                    step,
                )

    def _work(self) -> None:
        from mlflow.entities import Metric

        # MLflow tries for minutes before it raises: one failure is the last call.
        what = "metrics"
        try:
            while (item := self._waiting.get()) is not None:
                step, metrics, now = item
                what = f"metrics from step {step} on"
                batch = [Metric(key.replace("@", "_at_"), float(value), now, step) for key, value in metrics.items()]
                self._client.log_batch(self.id, metrics=batch)
            what = "end of the run"
            self._client.set_terminated(self.id)
        except Exception as error:
            logger.warning("mlflow gets no %s: %s: %s", what, type(error).__name__, error)

    def close(self) -> None:
        """Wait for the thread, for at most 15 s; the last that it sends is that the run is over."""
        if self._closed:
            return
        self._closed, thread = True, self._thread
        until = time.monotonic() + _MLFLOW_CLOSE_S
        # Without room for it the store hangs, or an error has ended the thread.
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_MLFLOW_CLOSE_S if thread.is_alive() else 0.0)
        thread.join(max(0.0, until - time.monotonic()))
        # The end is in the queue in the place of the step that the thread has in hand.
        lacks = self._lacks + (self._waiting.qsize() if thread.is_alive() else 0)
        if lacks:
            logger.warning("mlflow lacks %d steps, for which its store was too slow", lacks)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _missing(name: str) -> str:
    return f"telemetry.sinks has {name!r}, and that package is not installed: `{install(name)}`"


class Sinks:
    """All sinks of a run as one; each of them is written and closed, also if another one fails (OSError, then, at the end)."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float], more: bool = False) -> None:
        """To every sink; `more`: of the last step. Errors: the first OSError, after all of them."""
        failed: list[OSError] = []
        for sink in self._sinks:
            try:
                if more or step > sink.after:
                    sink.write(step, metrics)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Every sink, in reverse order."""
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
    """`metrics.jsonl` and the sinks in `names` (`wandb`, `tensorboard`, `mlflow`). ConfigError: unknown, or not installed.

    May take seconds (wandb starts a process): not on the event loop.
    """
    makers: dict[str, Callable[[Life], Sink]] = {
        "wandb": WandbSink,
        "tensorboard": TensorBoardSink,
        "mlflow": MlflowSink,
    }
    unknown = [each for each in names if each not in makers]
    if unknown:
        raise ConfigError(f"telemetry.sinks has {unknown[0]!r}; known are {', '.join(makers)}")
    run_dir.mkdir(parents=True, exist_ok=True)
    ids: dict[str, str] = {}
    if resume_step is not None and (run_dir / IDS).exists():
        ids = orjson.loads((run_dir / IDS).read_bytes())
    with ExitStack() as opened:  # if one cannot be opened, those before it are closed again
        sinks: list[Sink] = []
        for each in names:
            sink = makers[each](Life(run_dir, name, config, resume_step, ids.get(each)))
            opened.callback(sink.close)
            sinks.append(sink)
            ids[each] = sink.id
        if names:
            (run_dir / f"{IDS}.partial").write_bytes(orjson.dumps(ids))
            os.replace(run_dir / f"{IDS}.partial", run_dir / IDS)
        # Opened last, so that a sink that refuses leaves an earlier run's lines alone; written first.
        sinks.insert(0, JsonlSink(run_dir / "metrics.jsonl", resume_step))
        opened.pop_all()
    return Sinks(sinks)
