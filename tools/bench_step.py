"""Whole RL steps against TRL's GRPOTrainer: `python tools/bench_step.py [options]`, the same as `asyncrl bench step`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed
    from asyncrl.cli.bench import main

    sys.exit(main(["step", *sys.argv[1:]]))
