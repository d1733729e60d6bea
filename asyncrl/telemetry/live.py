"""The output of a run at the terminal: a progress bar with the main numbers, or one plain line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from .output import LossyStream

Metrics = Mapping[str, float]
_STATUS_EVERY_S = 30.0  # between two lines about one stage, if there is no bar
# The remaining time is estimated from the steps of this period. rich's default of 30 s is shorter than two slow steps.
_ESTIMATE_PERIOD_S = 3600.0


def describe(metrics: Metrics) -> list[str]:
    """Short texts of the main numbers of a step. Missing metrics are left out."""

    def shown(name: str, form: str) -> str:
        return form.format(metrics[name]) if name in metrics else ""

    parts = [
        shown("reward/mean", "reward {:.3f}") + shown("reward/std", "±{:.3f}"),
        *(f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")),
        *(f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("own/")),
        shown("staleness/mean", "staleness {:.1f}") + shown("staleness/max", "/{:.0f}"),
        shown("completions/mean_length", "length {:.0f}"),
        shown("loss", "loss {:.4f}"),
        shown("perf/tokens_per_s", "{:,.0f} tok/s"),
    ]
    # Names with two slashes belong to one lane.
    idle = {name: share for name, share in metrics.items() if name.startswith("idle/") and name.count("/") == 1}
    if idle:
        cause = max(idle, key=lambda name: idle[name])
        largest = f" ({cause.removeprefix('idle/')} {100 * idle[cause]:.0f} %)" if idle[cause] >= 0.005 else ""
        parts.append(f"idle {100 * sum(idle.values()):.0f} %{largest}")
    return [part for part in parts if part]


class LiveView:
    """Shows the progress of a run. A context manager. `auto`: a bar on a terminal, lines elsewhere; `plain`: lines; `off`: nothing.

    `total_steps`: the version at which the run ends; None if only the data or a time limit ends the run. `start`: the version of
    the resumed checkpoint; 0 for a new run. Each call costs less than a millisecond. Text that cannot be written is dropped, so a
    closed terminal or pipe does not end the run.
    """

    def __init__(
        self,
        mode: Literal["auto", "plain", "off"],
        total_steps: int | None = None,
        *,
        start: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = cast(TextIO, LossyStream(sys.stdout if stream is None else stream))
        self._total = total_steps
        self._last_step_time = time.perf_counter()
        self._off = mode == "off"
        self._status, self._status_time = "", 0.0
        self._progress: Progress | None = None
        if mode == "auto" and self._stream.isatty():
            # On a narrow terminal the step and the times keep their width. The bar and the numbers share the rest.
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                TextColumn(
                    "{task.fields[numbers]}",
                    markup=False,
                    table_column=Column(ratio=4, no_wrap=True, overflow="ellipsis"),
                ),
                console=Console(file=self._stream),
                refresh_per_second=2,  # a refresh holds the GIL for 1 to 2 ms
                speed_estimate_period=_ESTIMATE_PERIOD_S,
                expand=True,
            )
            self._task = self._progress.add_task("step", total=total_steps, completed=start, numbers="")

    def __enter__(self) -> LiveView:
        self._last_step_time = time.perf_counter()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, version: int, metrics: Metrics) -> None:
        """Show a committed step. `version`: of the policy after the step. `metrics`: by their names in `metrics.jsonl`."""
        now = time.perf_counter()
        seconds, self._last_step_time = now - self._last_step_time, now
        if self._off:
            return
        parts = describe(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=version, numbers=" · ".join(parts))
        else:
            total = "" if self._total is None else f"/{self._total}"
            self._print("  ".join([f"step {version}{total}", *parts, f"{metrics.get('time/step', seconds):.1f} s"]))

    def status(self, text: str) -> None:
        """Show the progress of a stage. `text`: the stage, a colon, and counts. With a bar the text is beside the bar. Without a
        bar the text is printed when the stage begins, then at most every 30 s if counts change. Any thread may call `status`."""
        if self._off:
            return
        if self._progress is not None:
            self._progress.update(self._task, numbers=text)
            return
        is_new_stage = text.partition(":")[0] != self._status.partition(":")[0]
        now = time.perf_counter()
        if is_new_stage or (text != self._status and now - self._status_time >= _STATUS_EVERY_S):
            self._status, self._status_time = text, now
            self._print(text)

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one. For example "checkpoint written to ..."."""
        if self._off:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
