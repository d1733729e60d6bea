"""The console script: `asyncrl run x.yaml a.b=c`, `asyncrl bench step`, `asyncrl shm`.

Of every command: output that nobody reads any more (`| head -1`) is dropped without a word, and Ctrl-C ends it without a traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from asyncrl import __version__
from asyncrl.concurrency.ending import run_program
from asyncrl.telemetry.output import lossy_output

USAGE = """\
asyncrl: asyncio-native reinforcement-learning post-training

  asyncrl run CONFIG.yaml [MORE.yaml ...] [a.b=value ...]   train (the same as a one-rank torchrun -m asyncrl.main)
  asyncrl run --help                                        every setting, its default and what it means
  asyncrl run CONFIG.yaml --dry-run                         print what would run: resolved settings, memory, bounds
  asyncrl prompts CONFIG.yaml [a.b=value ...] [-n 3]        the first prompts as the model reads them
  asyncrl check RUN                                         compare every file of a run's checkpoints with its checksum
  asyncrl check-model PATH                                  which way this runtime can train a model, and how exactly
  asyncrl shm [list | clear [NAME ...]]                     what lies in shared memory; clear what nobody owns
  asyncrl explain NAME                                      formula, paper, normaliser, defaults of a loss or a setting
  asyncrl report RUN                                        write report.html of a run, while it runs or after it died
  asyncrl examples [DIRECTORY]                              list the examples, or copy them
  asyncrl --version                                         the version of this package
  asyncrl bench [step | generate | train | ...] [options]   measure against other systems and this machine's limits
"""


# Where each has its `main`: a module is imported once its command is typed.
COMMANDS = {
    "run": "asyncrl.main",
    "prompts": "asyncrl.cli.prompts",
    "check": "asyncrl.cli.check",
    "check-model": "asyncrl.cli.check_model",
    "explain": "asyncrl.cli.explain",
    "report": "asyncrl.cli.report",
    "examples": "asyncrl.cli.examples",
    "bench": "asyncrl.cli.bench",
    "shm": "asyncrl.cli.shm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as in `asyncrl.errors`; 2 for an unknown command, 130 where Ctrl-C ended one."""
    with lossy_output():
        try:
            return run_program(_main, arguments)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _main(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if given[0] == "--version":
        print(f"asyncrl {__version__}")
        return 0
    if given[0] not in COMMANDS:
        print(f"asyncrl: there is no command {given[0]!r}; the commands are: {', '.join(COMMANDS)}\n", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        return 2
    code: int = import_module(COMMANDS[given[0]]).main(given[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
