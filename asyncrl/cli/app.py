"""The console script: `asyncrl run x.yaml a.b=c`, `asyncrl bench step`, `asyncrl shm`.

Of every command: output that nobody reads any more (`| head -1`) is dropped without a word, and Ctrl-C ends it without a traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from asyncrl import __version__
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


def _run(arguments: Sequence[str]) -> int:
    from asyncrl.main import main as run

    return run(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from asyncrl.cli.bench import main as bench

    return bench(arguments)


def _shm(arguments: Sequence[str]) -> int:
    from asyncrl.cli.shm import main as shm

    return shm(arguments)


def _explain(arguments: Sequence[str]) -> int:
    from asyncrl.cli.explain import main as explain

    return explain(arguments)


def _check(arguments: Sequence[str]) -> int:
    from asyncrl.cli.check import main as check

    return check(arguments)


def _check_model(arguments: Sequence[str]) -> int:
    from asyncrl.cli.check_model import main as check_model

    return check_model(arguments)


def _prompts(arguments: Sequence[str]) -> int:
    from asyncrl.cli.prompts import main as prompts

    return prompts(arguments)


def _report(arguments: Sequence[str]) -> int:
    from asyncrl.cli.report import main as report

    return report(arguments)


def _examples(arguments: Sequence[str]) -> int:
    from asyncrl.cli.examples import main as examples

    return examples(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "prompts": _prompts,
    "check": _check,
    "check-model": _check_model,
    "explain": _explain,
    "report": _report,
    "examples": _examples,
    "bench": _bench,
    "shm": _shm,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as in `asyncrl.errors`; 2 for an unknown command, 130 where Ctrl-C ended one."""
    with lossy_output():
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _main(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if given[0] == "--version":
        print(f"asyncrl {__version__}")
        return 0
    command = COMMANDS.get(given[0])
    if command is None:
        print(f"asyncrl: there is no command {given[0]!r}; the commands are: {', '.join(COMMANDS)}\n", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        return 2
    return command(given[1:])


if __name__ == "__main__":
    sys.exit(main())
