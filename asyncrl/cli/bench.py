"""`asyncrl bench`: the benchmarks are a distribution of their own, `asyncrl-bench` (tools/bench in the repository).

Those of the checkout that this package lies in come first: they belong to the same state of the code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "tools" / "bench"
MISSING = """\
asyncrl bench: the benchmarks are a distribution of their own, asyncrl-bench, and it is not installed.
In a checkout of asyncrl: pip install ./tools/bench"""


def main(arguments: Sequence[str]) -> int:
    """Exit codes of `asyncrl_bench`; 2 where it is not there."""
    if (CHECKOUT / "asyncrl_bench").is_dir() and str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    if importlib.util.find_spec("asyncrl_bench") is None:
        print(MISSING, file=sys.stderr)
        return 2
    from asyncrl_bench.app import main as bench

    return bench(arguments)
