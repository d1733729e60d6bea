#!/usr/bin/env python
"""The proof with real packages: clients of other projects talk to the endpoint (docs/endpoint.md).

    python tools/agent_clients.py NAME [--python INTERPRETER] [--cache FOLDER]

NAME: openai, openai-2.54, anthropic, openai-agents, openenv or schemathesis. Each gets an environment of its own in the cache (made
once, as those of `asyncrl bench`), because some of them do not install together. verifiers: `python tools/adapters.py verifiers`.
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

TESTS = ("tests/endpoint/test_endpoint_clients.py", "tests/runtime/test_runtime_endpoint_clients.py")
NAMES = ("openai", "openai-2.54", "anthropic", "openai-agents", "openenv", "schemathesis")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--python", help="interpreter that has the package; else an environment is made in the cache")
    parser.add_argument("--cache", help="where environments are kept (~/.cache/asyncrl/bench)")
    options = parser.parse_args()
    try:
        python = options.python or str(peer_python(options.name, cache_directory(options.cache)))
    except BenchError as error:
        print(f"agent_clients: {error}", file=sys.stderr)
        return 1
    variable = f"{options.name.upper().replace('-', '_').replace('.', '_')}_PYTHON"
    command = [sys.executable, "-m", "pytest", "-v", "-rs", *TESTS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, variable: python}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
