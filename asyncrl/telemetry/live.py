"""What a person at the terminal sees: a progress bar with the main numbers, or one plain line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from .output import Lossy

Metrics = Mapping[str, float]
_SPARSE_S = 30.0  # between two lines of one stage where there is no terminal
# The time left stands on the steps of this long; rich's own 30 s would never hold two slow ones.
_PACE_S = 3600.0


def describe(metrics: Metrics) -> list[str]:
    """The main numbers of a step, those that are there, as short texts."""
    parts: list[str] = []
    if "reward/mean" in metrics:
        spread = f"±{metrics['reward/std']:.3f}" if "reward/std" in metrics else ""
        parts.append(f"reward {metrics['reward/mean']:.3f}{spread}")
    parts.extend(f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/"))
    parts.extend(f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("own/"))
    if "staleness/mean" in metrics:
        most = f"/{metrics['staleness/max']:.0f}" if "staleness/max" in metrics else ""
        parts.append(f"staleness {metrics['staleness/mean']:.1f}{most}")
    if "completions/mean_length" in metrics:
        parts.append(f"length {metrics['completions/mean_length']:.0f}")
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "perf/tokens_per_s" in metrics:
        parts.append(f"{metrics['perf/tokens_per_s']:,.0f} tok/s")
    idle = {name[5:]: value for name, value in metrics.items() if name.startswith("idle/") and name.count("/") == 1}
    if idle:
        worst = max(idle, key=lambda cause: idle[cause])
        because = f" ({worst} {100 * idle[worst]:.0f} %)" if idle[worst] >= 0.005 else ""
        parts.append(f"idle {100 * sum(idle.values()):.0f} %{because}")
    return parts


class LiveView:
    """`auto`: the bar on a terminal, plain lines elsewhere; `plain`: lines; `off`: nothing. A context manager.

    `total_steps` is the version at which the run ends, None if only the data or the time ends it. `start` is the
    version that a resumed run goes on from. `step` costs well under a millisecond; `note` prints a line above the bar;
    `status` says what goes on before there is a step. What cannot be written (a pipe that nobody reads, a terminal that was closed)
    is dropped: it ends no run.
    """

    def __init__(
        self,
        mode: Literal["auto", "plain", "off"],
        total_steps: int | None = None,
        *,
        start: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = cast(TextIO, Lossy(sys.stdout if stream is None else stream))
        self._total = total_steps
        self._last = time.perf_counter()
        self._off = mode == "off"
        self._said, self._said_at = "", 0.0
        self._progress: Progress | None = None
        if mode == "auto" and self._stream.isatty():
            # Step and times keep their width; the bar and the numbers share what a narrow terminal leaves.
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
                refresh_per_second=2,  # each refresh is a millisecond or two under the GIL
                speed_estimate_period=_PACE_S,
                expand=True,
            )
            self._task = self._progress.add_task("step", total=total_steps, completed=start, numbers="")

    def __enter__(self) -> LiveView:
        self._last = time.perf_counter()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, version: int, metrics: Metrics) -> None:
        """Version `version` is there; its metrics by the names that `metrics.jsonl` has."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        if self._off:
            return
        parts = describe(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=version, numbers=" · ".join(parts))
        else:
            total = "" if self._total is None else f"/{self._total}"
            self._line("  ".join([f"step {version}{total}", *parts, f"{metrics.get('time/step', took):.1f} s"]))

    def status(self, text: str) -> None:
        """What goes on before the first step: a stage, a colon and its counts. Beside the bar on a terminal, until a step
        has numbers; elsewhere a line when a stage begins, and now and then while its counts change. From any thread."""
        if self._off:
            return
        if self._progress is not None:
            self._progress.update(self._task, numbers=text)
            return
        begins, now = text.partition(":")[0] != self._said.partition(":")[0], time.perf_counter()
        if begins or (text != self._said and now - self._said_at >= _SPARSE_S):
            self._said, self._said_at = text, now
            self._line(text)

    def note(self, text: str) -> None:
        """A line for people, such as "checkpoint written to ..."."""
        if self._off:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
