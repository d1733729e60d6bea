"""Markdown tables and plots, in the one form that all benches have. matplotlib is imported where something is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def markdown(titles: Sequence[str], rows: Sequence[Sequence[Any]], left: int | None = None) -> list[str]:
    """Columns from `left` on are set to the right."""
    left = len(titles) if left is None else left
    marks = ["---" if i < left else "---:" for i in range(len(titles))]
    return [
        f"| {' | '.join(titles)} |",
        f"|{'|'.join(marks)}|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def matplotlib_found() -> bool:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    return True


@contextmanager
def plot(path: Path, width: float, height: float = 3.8, panels: int = 1) -> Iterator[list[Any]]:
    """The axes of its panels, side by side; what was drawn on them is saved."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    yield list(axes[0])
    for each in axes[0]:
        each.spines[["top", "right"]].set_visible(False)
        if each.get_legend() is None:
            each.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def grouped_bars(axes: Any, groups: Sequence[str], bars: Mapping[str, Sequence[float]], unit: str) -> None:
    """A bar per name of `bars` in each group, with its number."""
    width = 0.8 / max(len(bars), 1)
    for number, (name, heights) in enumerate(bars.items()):
        places = [i + (number - (len(bars) - 1) / 2) * width for i in range(len(groups))]
        axes.bar_label(axes.bar(places, heights, width * 0.92, label=name), fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.margins(y=0.12)


def limit_line(axes: Any, at: int, height: float, text: str, above: float | None = None) -> None:
    """A dashed line over group `at`, and its text over it or at the height `above`."""
    axes.hlines(height, at - 0.42, at + 0.42, colors="black", linestyles="dashed", linewidth=1)
    place = (at, height if above is None else above)
    axes.annotate(text, place, (0, 2), textcoords="offset points", ha="center", fontsize=8)
