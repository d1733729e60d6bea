#!/usr/bin/env python
"""The proof with the real package: a stock Atropos environment, started by its own `serve` command, trains a step over HTTP.

    python tools/atropos_step.py [--python INTERPRETER] [--cache FOLDER]

atroposlib is heavy, so it gets an environment of its own in the cache (made once, as those of `asyncrl bench`). What is
started there is `examples/atropos_env.py serve`; the test that it feeds compares every log-prob to the last bit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench")]

from asyncrl_bench.job import BenchError, cache_directory  # noqa: E402
from asyncrl_bench.processes import peer_python  # noqa: E402

TEST = "tests/runtime/test_runtime_atropos.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter that has atroposlib; else an environment is made in the cache")
    parser.add_argument("--cache", help="where environments are kept (~/.cache/asyncrl/bench)")
    options = parser.parse_args()
    try:
        python = options.python or str(peer_python("atropos", cache_directory(options.cache)))
    except BenchError as error:
        print(f"atropos_step: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-v", "-k", "stock_environment_server", TEST]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "ATROPOS_PYTHON": python}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
