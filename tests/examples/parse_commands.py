"""Has commands parse their arguments, and end there: `python parse_commands.py FILE.json` with {command: where it stands}.

Each runs in a child that is forked here, so that no import of one is seen by the next. Run in a folder with `examples` and `tools`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# Commands of `asyncrl` without a parser of their own: how many words they take
WORDS = {
    "explain": (1, 1),
    "report": (1, 1),
    "check": (1, 1),
    "examples": (0, 1),
    "join": (1, 1),
    "prompts": (1, 9),
    "--version": (0, 0),
}


class Parsed(BaseException):
    """The arguments were taken."""


def stop_behind(name: str) -> None:
    parse = getattr(argparse.ArgumentParser, name)

    def parse_and_stop(self: Any, *given: Any, **named: Any) -> None:
        parse(self, *given, **named)
        raise Parsed

    setattr(argparse.ArgumentParser, name, parse_and_stop)


def play(words: list[str]) -> None:
    signal.alarm(60)
    if words[0] != "asyncrl":
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")
        return
    name, *rest = words[1:]
    if name in WORDS:
        least, most = WORDS[name]
        assert least <= len([word for word in rest if "=" not in word]) <= most, (
            f"{words}: takes {least} to {most} words"
        )
        raise Parsed

    from asyncrl.cli.app import COMMANDS

    import_module(COMMANDS[name]).main(rest)


def main() -> int:
    failed = 0
    for name in ("parse_args", "parse_intermixed_args"):
        stop_behind(name)
    for command, place in json.loads(Path(sys.argv[1]).read_text()).items():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                play(shlex.split(command))
            except Parsed:
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            failed += 1
            print(f"{place}: {command}: did not take its arguments", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
