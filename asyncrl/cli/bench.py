"""`asyncrl bench`: runs the benchmarks, which are a separate distribution, `asyncrl-bench` (tools/bench in the repository).

In a checkout, the checkout's benchmarks run, even if `asyncrl-bench` is installed: they match the code of the checkout.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "tools" / "bench"
MISSING = """\
asyncrl bench: the benchmarks are a separate distribution, asyncrl-bench, and asyncrl-bench is not installed.
To install it, run in a checkout of asyncrl: pip install ./tools/bench"""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks. Returns the exit code of `asyncrl_bench`, or 2 if Python does not find `asyncrl_bench`."""
    if (CHECKOUT / "asyncrl_bench").is_dir() and str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    if importlib.util.find_spec("asyncrl_bench") is None:
        print(MISSING, file=sys.stderr)
        return 2
    from asyncrl_bench.app import main as bench

    return bench(arguments)
