"""The journal writes one line of metrics, one file of rollouts and one line on the terminal for every committed step.

The recorder's metrics are drained at the commit of a step, so that they belong to that step. The line of metrics is written later,
after the evaluation of the new version and before its checkpoint.

If a file cannot be written during the run (for example because the disk is full), the run warns and continues without the file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio

from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import versions_per_batch
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.pumps.metrics import COUNTED
from asyncrl.pumps.pipeline import StepReport
from asyncrl.telemetry.budget import RunBudget
from asyncrl.telemetry.live import LiveView
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.report import write_report
from asyncrl.telemetry.reward_signal import FaultCounts, lacking_note, warnings
from asyncrl.telemetry.rollouts import Decode, RolloutWriter
from asyncrl.telemetry.sinks import Sinks, open_sinks
from asyncrl.telemetry.trace import write_trace

from .directory import RunDirectory, unusable_message

logger = logging.getLogger("asyncrl.runtime")

HISTORY = 2_000  # lines in Journal.history
# Metrics in the line of every step: 0 in a step that measured no such time.
_ALWAYS = ("time/wait_for_group", "time/reward", "time/logprobs", "time/train", "time/weight_sync")


class Journal:
    """Used as `async with Journal(...) as journal: await journal.open(decode)`. `live` may be used before `open`.
    Call all public methods on the event loop's thread. This thread writes new lines of metrics; other threads do other file I/O."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory | None,
        recorder: Recorder,
        since: int | None,
        base: int = 0,
        *,
        last: int | None = None,
        plain: bool = False,
        rollouts_in: Path | None = None,
        rank: int = 0,
    ) -> None:
        """`directory`: None for a program without a run directory, and for ranks other than 0, which write only rollouts.
        `plain`: plain lines on the terminal even without a directory. `rollouts_in`: the run directory, on a rank that trains.
        `since`: the last version whose line of metrics stays; later lines of an earlier process of the run are removed. None: a new
        run. `base`: see `Ports`. `last`: the last version of the run, if known."""
        self._config, self._base = config, base
        self._directory = directory
        self._recorder = recorder
        # Notes, made at the start, on why completions may not end. Warnings about such completions repeat these notes.
        self.missing_end_notes: list[str] = []
        # Metrics `text/*` that a warning has named. Each counts completions that reward functions see only in part.
        self._warned: set[str] = set()
        # Bytes of the next checkpoint. If fewer bytes of the disk are free, no rollouts are written.
        self.reserve = 0
        self.budget = RunBudget()
        self._faults = FaultCounts(
            config.algorithm.advantage, config.rollout.group_size, completions_should_end=not config.rollout.ignore_eos
        )
        self._pending: dict[int, tuple[StepReport, dict[str, float]]] = {}
        # (version, metrics) of the newest lines.
        self.history: deque[tuple[int, dict[str, float]]] = deque(maxlen=HISTORY)
        start = max(0, since or 0)
        live = "plain" if plain else config.telemetry.live if directory else "off"
        self.live = LiveView(live, last, start=start)
        self._newest = since  # the version of the last line
        self._sinks = Sinks(())
        self._rollouts: RolloutWriter | None = None
        self._rollouts_in, self._rank = rollouts_in, rank
        self._failures, self._last_failure = 0, ""

    async def open(self, decode: Decode) -> None:
        """Open the sinks of metrics and the files of rollouts. `decode`: from token ids to text, for the prompts in the rollouts.
        Errors: ConfigError (a sink that is not installed or refuses to start, a directory that cannot be written)."""
        config, directory = self._config, self._directory
        arguments = config.telemetry.rollouts_per_step, self._newest, decode, self._rank
        if (path := self._rollouts_in) is not None and directory is None:
            with self._skip_on_error(str(path / "rollouts")):
                self._rollouts = await offload(lambda: RolloutWriter(path, *arguments), "rollouts")
        if directory is not None:

            def open_files() -> None:
                self._sinks = open_sinks(
                    config.telemetry.sinks,
                    directory.path,
                    name=config.run.name,
                    config=config.model_dump(),
                    resume_step=self._newest,
                )
                self._rollouts = RolloutWriter(directory.path, *arguments)

            try:
                await offload(open_files, "sinks")
                free = await offload(lambda: shutil.disk_usage(directory.path).free, "sinks")
            except OSError as error:
                raise ConfigError(unusable_message(directory.path, error)) from error
            if free < self.reserve:
                self.warn(
                    f"warning: a checkpoint takes about {self.reserve / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free in "
                    f"{directory.path}"
                )
        self._recorder.take_window()  # the start belongs to no step

    async def __aenter__(self) -> Journal:
        self.live.__enter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            self.live.__exit__(*exc)
        finally:
            with self._skip_on_error("the last lines of the metrics"), anyio.CancelScope(shield=True):
                await offload(self._sinks.close, "closing the sinks of metrics")  # takes seconds for wandb
            if self._failures > 1:
                logger.warning("%d writes failed; the last: %s", self._failures, self._last_failure)

    @contextlib.contextmanager
    def _skip_on_error(self, target: str | Path) -> Iterator[None]:
        """Continue if `target` cannot be written, and warn the first time. If `target` is a path, its partial file is removed: a
        checkpoint may need the space. The removal blocks, so do not use a path on the event loop's thread."""
        try:
            yield
        except OSError as error:
            self._failures, self._last_failure = self._failures + 1, f"{target}: {error.strerror or error}"
            if self._failures == 1:
                logger.warning("could not write %s; the run goes on without it", self._last_failure)
            if isinstance(target, Path):
                with contextlib.suppress(OSError):
                    target.with_name(target.name + ".partial").unlink(missing_ok=True)

    def on_commit(self, report: StepReport, extra: Mapping[str, float]) -> StepReport:
        """Call at the commit of a step. Returns the report with all metrics of the step. `extra`: metrics of the caller."""
        window = self._recorder.take_window()
        metrics = {
            **dict.fromkeys(_ALWAYS, 0.0),
            # The counts in COUNTED stay in the recorder, for the next step. `report.metrics` has the counts of this step.
            **self._recorder.drain(COUNTED),
            # Replaces metrics of the recorder. The recorder's mean reward is over scored groups, the report's over trained groups.
            **report.metrics,
            **self.budget.step(window),
            "time/accounted": window.end - window.start,
            **extra,
        }
        metrics.update(self._faults.step(metrics))
        # In bytes on macOS, in KiB elsewhere.
        unit = 2**30 if sys.platform == "darwin" else 2**20
        metrics["perf/peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        self._pending[report.version] = (report, metrics)
        return StepReport(report.version, report.result, metrics, report.groups, report.advantages)

    async def write(self, version: int, extra: Mapping[str, float]) -> None:
        """Write the line of metrics of `version`, or add to it. `extra`: metrics of the evaluation at `version` (`eval/*`)."""
        if self._directory is not None and self._directory.lost:
            return
        report, metrics = self._pending.get(version, (None, {}))
        line = {**metrics, **extra}
        # Nothing to write, for example at version 0 without an evaluation.
        if not line:
            return
        # Rollouts come first: after a kill every line in the metrics has its rollouts.
        if report is not None:
            await self._write_rollouts(report)
        self._pending.pop(version, None)
        self._remember(version, line)
        with self._skip_on_error(f"the metrics of version {version}"):
            if version != self._newest:
                self._sinks.write(version, line)
            else:
                await offload(lambda: self._sinks.write(version, line, more=True), "metrics")
        self._newest = version
        if report is not None:
            self.live.step(version, line)
            for text in (*warnings(line, self.missing_end_notes), *lacking_note(line, self._warned)):
                self.warn(text)
        else:
            self.live.note("  ".join(f"{name} {value:.3f}" for name, value in extra.items()))

    def _remember(self, version: int, line: dict[str, float]) -> None:
        """Add a line to the history. If the history's last line has the same version, add the metrics to that line."""
        # Each step makes new strings for the same names. Interned names share memory.
        line = {sys.intern(name): value for name, value in line.items()}
        if self.history and self.history[-1][0] == version:
            line = self.history.pop()[1] | line
        self.history.append((version, line))

    def warn(self, text: str) -> None:
        """Print a warning in the live view, or log it if the view is off. Does nothing without `directory`."""
        if self._directory is None:
            return
        if self._config.telemetry.live == "off":
            logger.warning("%s", text.removeprefix("warning: "))
        else:
            self.live.note(text)

    async def _write_rollouts(self, report: StepReport) -> None:
        if self._rollouts is None or self._config.telemetry.rollouts_per_step == 0:
            return
        if self._directory is None and not report.groups:
            return
        writer, version = self._rollouts, report.version
        # The version before the batch. Usually `version` comes after the batch's last update, but a run may end within a batch.
        trained_at = version - 1 - (version - 1 - self._base) % versions_per_batch(self._config)
        advantages = {
            (group_id, member): float(value)
            for group_id, values in report.advantages.items()
            for member, value in enumerate(values)
        }
        path = writer.path(version)

        def write() -> None:
            with self._skip_on_error(path):
                free = shutil.disk_usage(writer.directory).free
                if free < self.reserve:
                    raise OSError(errno.ENOSPC, f"the free {free / 2**20:.1f} MiB are reserved for a checkpoint")
                writer.write(version, report.groups, trained_at, advantages)

        with self._recorder.watch("publish pump", path.name, on="disk"):
            await offload(write, "rollouts")

    async def hold(self, version: int, extra: Mapping[str, float]) -> None:
        """As `write`, but the unwritten line of a committed step waits for `write_pending`."""
        if version not in self._pending:
            return await self.write(version, extra)
        self._pending[version][1].update(extra)

    async def write_pending(self, counts: Mapping[str, float]) -> None:
        """Write the lines of committed steps that are not written yet, at the end of the run. `counts`: added to the last line."""
        if self._pending:
            _, metrics = self._pending[max(self._pending)]
            metrics.update({name: metrics.get(name, 0.0) + value for name, value in counts.items()})
        for version in sorted(self._pending):
            await self.write(version, {})

    async def finish(self, outcome: str) -> None:
        """Write trace.json and report.html at the end of a run. `outcome`: a sentence for report.html, also after a failure."""
        if self._directory is None or self._directory.lost:
            return
        telemetry, directory = self._config.telemetry, self._directory

        def write() -> None:
            if telemetry.trace:
                with self._skip_on_error(directory.trace):
                    write_trace(self._recorder, directory.trace)
            if telemetry.report:
                with self._skip_on_error(directory.report):
                    write_report(directory.path, name=self._config.run.name, result=outcome)

        with anyio.CancelScope(shield=True):
            await offload(write, "report")
