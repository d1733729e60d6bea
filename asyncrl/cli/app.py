"""The console script: `asyncrl run x.yaml a.b=c`, `asyncrl bench step`, `asyncrl shm`.

If the reader of the output closes the pipe (`| head -1`), the rest is dropped silently. Ctrl-C ends a command without a traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from asyncrl import __version__
from asyncrl.concurrency.exit_deadline import run_program
from asyncrl.telemetry.output import lossy_output

USAGE = """\
asyncrl: asyncio-native reinforcement-learning post-training

  asyncrl run CONFIG.yaml [MORE.yaml ...] [a.b=value ...]   train (the same as a one-rank torchrun -m asyncrl.main)
  asyncrl run --help                                        list every setting with its default and meaning
  asyncrl run CONFIG.yaml --dry-run                         print the plan of a run: resolved settings, memory, bounds
  asyncrl join HOST:PORT [a.b=value ...]                    generate for a run that listens there (distributed.listen)
  asyncrl prompts CONFIG.yaml [a.b=value ...] [-n 3]        print the first prompts after the chat template
  asyncrl check RUN                                         compare the files of a run's checkpoints with their checksums
  asyncrl check-model PATH [a.b=value ...]                  compare every path that computes a model with eager transformers
  asyncrl shm [list | clear [NAME ...]]                     list your shared-memory segments; remove those without an owner
  asyncrl explain NAME                                      print what a loss, an advantage, a setting or a metric means
  asyncrl report RUN                                        write report.html of a run, running or ended
  asyncrl nodes RUN                                         list the ranks of a run: role, version, load, who is lost
  asyncrl examples [DIRECTORY]                              list the examples, or copy them
  asyncrl --version                                         print the version of this package
  asyncrl bench [step | generate | train | ...] [options]   measure against other systems and this machine's limits
"""

# Command -> the module with its `main`. `_main` imports only the module that it calls, since some imports take seconds.
COMMANDS = {
    "run": "asyncrl.main",
    "join": "asyncrl.cli.join",
    "prompts": "asyncrl.cli.prompts",
    "check": "asyncrl.cli.check",
    "check-model": "asyncrl.cli.check_model",
    "explain": "asyncrl.cli.explain",
    "report": "asyncrl.cli.report",
    "nodes": "asyncrl.cli.nodes",
    "examples": "asyncrl.cli.examples",
    "bench": "asyncrl.cli.bench",
    "shm": "asyncrl.cli.shm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code of the command, 2 for an unknown command, or 130 after Ctrl-C."""
    with lossy_output():
        try:
            return run_program(_main, arguments)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "help"
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"asyncrl {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"asyncrl: there is no command {command!r}; the commands are: {', '.join(COMMANDS)}\n", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        return 2
    code: int = import_module(COMMANDS[command]).main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
