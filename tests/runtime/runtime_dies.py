"""`python runtime_dies.py MOMENT SIGNAL ARGUMENTS`: a rank of a run that sends itself a signal at a moment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.cli.join import main as join
from asyncrl.distributed.line import LineClient
from asyncrl.main import main
from asyncrl.pumps.evaluate import EvaluatePump
from asyncrl.pumps.follow import Remote
from asyncrl.pumps.rollout import Episodes
from asyncrl.runtime import opening
from asyncrl.transport.memory import words


def before(owner: Any, name: str, when: Callable[..., bool], die: Callable[[], None]) -> None:
    """Die when `owner.name` is called with such arguments."""
    call = getattr(owner, name)

    def patched(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            die()
        return call(*arguments, **options)

    setattr(owner, name, patched)


def wait_for_file() -> None:
    Path("began").touch()
    while not Path("go").exists():
        time.sleep(0.01)


def prepare(moment: str, number: int) -> None:
    calls, sent = 0, 0

    def die() -> None:
        nonlocal calls
        calls += 1
        # Not at once.
        if calls == (2 if moment in ("evaluates", "bucket") else 9):
            os.kill(os.getpid(), number)

    ask = LineClient.ask

    async def ask_and_die(line: LineClient, kind: str, *arguments: Any) -> Any:
        asking = asyncio.ensure_future(ask(line, kind, *arguments))
        if kind == "group":
            await asyncio.sleep(0.01)  # the record is on its way
            die()
        return await asking

    async def ask_and_count(line: LineClient, kind: str, *arguments: Any) -> Any:
        nonlocal sent
        answer = await ask(line, kind, *arguments)
        sent += kind == "group"
        return answer

    match moment:
        case "generates":  # after a group of this rank has arrived at a rank that trains
            LineClient.ask = ask_and_count  # type: ignore[method-assign]  # counts, and asks
            before(Episodes, "play", lambda *_: sent > 0, die)
        case "reads":  # goes on when a file is there
            before(opening, "load_prompts", lambda *_: True, wait_for_file)
        case "idles":
            before(Remote, "next", lambda *_: True, die)
        case "evaluates":
            before(EvaluatePump, "play", lambda *_: True, die)
        case "sends":
            LineClient.ask = ask_and_die  # type: ignore[method-assign]  # the fault
        case "bucket":
            words.FAULT = lambda label: die() if label == "weights.bucket.0" else None


if __name__ == "__main__":
    prepare(sys.argv[1], signal.Signals[sys.argv[2]])
    sys.exit(join(sys.argv[4:]) if sys.argv[3] == "join" else main(sys.argv[3:]))
