"""The journal: every committed step becomes one line of metrics, one file of rollouts, one line on the terminal.

The line of a version is written once what is due at that version (evaluation, checkpoint) is known. The metrics of the
telemetry are drained when the step commits, so that they belong to that step.

A file that cannot be written (a full disk, a lost permission) is left out with a warning: it ends no run and costs no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio

from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.pumps.pipeline import StepReport
from asyncrl.telemetry.budget import RunBudget
from asyncrl.telemetry.live import LiveView
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.report import write_report
from asyncrl.telemetry.reward_signal import SignalWatch, WaitWatch, left_out, warnings
from asyncrl.telemetry.rollouts import Decode, RolloutWriter
from asyncrl.telemetry.sinks import Sinks, open_sinks
from asyncrl.telemetry.trace import write_trace

from .directory import RunDirectory, unusable

logger = logging.getLogger("asyncrl.runtime")

HISTORY = 2_000  # lines
_ALWAYS = ("time/wait_for_group", "time/reward", "time/logprobs", "time/train", "time/weight_sync")  # 0 where none was


class Journal:
    """`async with Journal(...) as journal: await journal.open()`; `live` can be used in between. Everything is called on the
    loop's thread; what opens, writes or renders files goes to threads."""

    def __init__(self, config: Config, directory: RunDirectory | None, recorder: Recorder, since: int | None) -> None:
        """`directory` None: nothing is written (embedding without a run directory, or a rank that is not the leader).
        `since`: lines of earlier lives of the run stay up to this version; None: it had none."""
        self._config = config
        self._directory = directory
        self._recorder = recorder
        # Notes of the start on why completions do not end.
        self.known: list[str] = []
        # Metrics of what texts lack that a warning has named.
        self._said: set[str] = set()
        # Free bytes of disk that rollouts must leave for the next checkpoint.
        self.reserve = 0
        self._budget = RunBudget()
        self._signal = SignalWatch(
            config.algorithm.advantage, config.rollout.group_size, ends=not config.rollout.ignore_eos
        )
        self._waits = WaitWatch(config.reward.workers, config.reward.concurrency)
        self._pending: dict[int, tuple[StepReport, dict[str, float]]] = {}
        # (version, metrics) of the lines: of a long run every second one, every fourth, and so on, and the last one
        self.history: list[tuple[int, dict[str, float]]] = []
        self._added, self._every = 0, 1
        start = max(0, since or 0)
        self.live = LiveView(config.telemetry.live if directory else "off", config.train.max_steps, start=start)
        self._newest = since  # the version of the last line
        self._sinks = Sinks(())
        self._rollouts: RolloutWriter | None = None
        self._lost, self._last_lost = 0, ""  # how often something could not be written; what, and why

    async def open(self, decode: Decode) -> None:
        """Open the sinks. `decode`: the tokenizer's, for the rendered prompts in the rollouts.

        Errors: ConfigError (a sink that is not installed or refuses to start, a directory that cannot be written).
        """
        config, directory = self._config, self._directory
        if directory is not None:

            def files() -> None:
                self._sinks = open_sinks(
                    config.telemetry.sinks,
                    directory.path,
                    name=config.run.name,
                    config=config.model_dump(),
                    resume_step=self._newest,
                )
                self._rollouts = RolloutWriter(directory.path, config.telemetry.rollouts_per_step, self._newest, decode)

            try:
                await offload(files, "sinks")
                free = await offload(lambda: shutil.disk_usage(directory.path).free, "sinks")
            except OSError as error:
                raise ConfigError(unusable(directory.path, error)) from error
            if free < self.reserve:
                self.warn(
                    f"warning: a checkpoint takes about {self.reserve / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free in "
                    f"{directory.path}"
                )
        self._recorder.take_window()  # what was before belongs to no step

    async def __aenter__(self) -> Journal:
        self.live.__enter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            self.live.__exit__(*exc)
        finally:
            with self._without("the last lines of the metrics"), anyio.CancelScope(shield=True):
                await offload(self._sinks.close, "closing the sinks of metrics")  # wandb and MLflow take seconds
            if self._lost > 1:
                logger.warning("%d times something could not be written; the last: %s", self._lost, self._last_lost)

    @contextlib.contextmanager
    def _without(self, what: str | Path) -> Iterator[None]:
        """Go on without `what`. A file that was begun is removed: the room may be a checkpoint's."""
        try:
            yield
        except OSError as error:
            self._lost, self._last_lost = self._lost + 1, f"{what}: {error.strerror or error}"
            if self._lost == 1:
                logger.warning("could not write %s; the run goes on without", self._last_lost)
            if isinstance(what, Path):
                with contextlib.suppress(OSError):
                    what.with_name(what.name + ".partial").unlink(missing_ok=True)

    def committed(self, report: StepReport, extra: Mapping[str, float]) -> StepReport:
        """Call at the commit of a step. Returns the report with all metrics of the step in it."""
        window = self._recorder.take_window()
        metrics = {
            **dict.fromkeys(_ALWAYS, 0.0),
            **self._recorder.drain(),
            # These replace the recorder's: the mean of a reward is that of the trained groups, not of the last scored ones.
            **report.metrics,
            **self._budget.step(window),
            "time/accounted": window.end - window.start,
            **extra,
        }
        metrics.update(self._signal.step(metrics))
        metrics["perf/peak_memory_gib"] = peak_memory_gib()
        self._pending[report.version] = (report, metrics)
        return StepReport(report.version, report.result, metrics, report.groups, report.advantages)

    async def write(self, version: int, extra: Mapping[str, float]) -> None:
        """Write the line of `version`; `extra` is what was due there (`eval/*`)."""
        if self._directory is not None and self._directory.lost:
            return  # the files are another's now, or none's
        report, metrics = self._pending.get(version, (None, {}))
        line = {**metrics, **extra}
        if not line:
            return  # the start of a run that evaluates nothing there
        if report is not None:
            await self._write_rollouts(report)  # before the line: a step that has one has its rollouts too
        self._pending.pop(version, None)
        self._remember(version, line)
        with self._without(f"the metrics of version {version}"):
            if version != self._newest:
                self._sinks.write(version, line)
            else:  # a file is opened
                await offload(lambda: self._sinks.write(version, line, more=True), "metrics")
        self._newest = version
        if report is not None:
            self.live.step(version, line)
            for text in (*warnings(line, self.known), *left_out(line, self._said)):
                self.warn(text)
            self.warn(self._waits.step(line))
        else:
            self.live.note("  ".join(f"{name} {value:.3f}" for name, value in extra.items()))

    def _remember(self, version: int, line: dict[str, float]) -> None:
        """Add to the history. A run of a million steps takes no more memory than one of `HISTORY`."""
        line = {sys.intern(name): value for name, value in line.items()}  # the names are made anew for each step
        if self.history and self.history[-1][0] == version:
            self.history[-1] = (version, self.history[-1][1] | line)
            return
        if self._added and (self._added - 1) % self._every:
            self.history.pop()  # it was kept for being the last
        self.history.append((version, line))
        self._added += 1
        if len(self.history) > HISTORY:
            last = [] if len(self.history) % 2 else self.history[-1:]
            self.history, self._every = self.history[::2] + last, 2 * self._every

    def warn(self, text: str | None) -> None:
        """A line that is seen with the live view and without, where anything is written."""
        if text is None or self._directory is None:
            return
        if self._config.telemetry.live == "off":
            logger.warning("%s", text.removeprefix("warning: "))
        else:
            self.live.note(text)

    async def _write_rollouts(self, report: StepReport) -> None:
        if self._rollouts is None or self._config.telemetry.rollouts_per_step == 0:
            return
        writer, version = self._rollouts, report.version
        trained_at = version - versions_per_batch(self._config)
        advantages = {
            (group_id, member): float(value)
            for group_id, values in report.advantages.items()
            for member, value in enumerate(values)
        }

        def write() -> None:
            free = shutil.disk_usage(writer.directory).free
            if free < self.reserve:
                raise OSError(errno.ENOSPC, f"the {free / 2**20:.1f} MiB that are free there are kept for a checkpoint")
            writer.write(version, report.groups, trained_version=trained_at, advantages=advantages)

        path = writer.path(version)
        with self._without(path), self._recorder.watch("publish pump", path.name, on="disk"):
            await offload(write, "rollouts")

    async def write_pending(self) -> None:
        """The lines of steps that were committed and not written yet, where the run ended in between."""
        for version in sorted(self._pending):
            await self.write(version, {})

    async def finish(self, outcome: str) -> None:
        """Trace and report, after the last step; also of a run that failed."""
        if self._directory is None:
            return
        telemetry, directory = self._config.telemetry, self._directory

        def write() -> None:
            if telemetry.trace:
                with self._without(directory.trace):
                    write_trace(self._recorder, directory.trace)
            if telemetry.report:
                with self._without(directory.report):
                    write_report(directory.path, name=self._config.run.name, result=outcome)

        with anyio.CancelScope(shield=True):
            await offload(write, "report")

    def idle(self) -> dict[str, float]:
        """Shares of the whole run so far: `busy/*`, `idle/*`."""
        return self._budget.metrics()


def peak_memory_gib() -> float:
    """Peak resident memory of this process in GiB (ru_maxrss is in KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)
