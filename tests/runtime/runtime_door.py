"""Programs outside of a run with doors: they push, they post, they wait (for the tests of whole runs)."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime_helpers import Process, scored

from asyncrl.client import Client

SECONDS = 60.0  # generous on a busy machine; a shutdown that hangs is ended by the watchdog before


def in_shared_memory(name: str) -> list[str]:
    return [path for path in os.listdir("/dev/shm") if name in path]


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[Process]:
    process = Process(*arguments, **options)
    try:
        yield process
    finally:
        process.kill()


class Waiting:
    """A call in a thread of its own, and the error that ended it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None

        def run() -> None:
            try:
                self.result = call()
            except Exception as error:
                self.result = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def ended(self) -> Any:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.result


def blocked(client: Client, group: int) -> Waiting:
    """A push that waits for room, asleep in the kernel."""
    before = client.statistics().waits
    waiting = Waiting(lambda: client.push(group, [scored()], members=[0], group_size=2, timeout=600))
    while client.statistics().waits == before:
        time.sleep(0.01)  # there is no event for "it fell asleep"
    return waiting


def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    """As a program would that knows Atropos' API and nothing but the standard library."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return dict(json.load(reply))


def group(*letters: int) -> dict[str, Any]:
    """Atropos' `ScoredDataGroup`: members that answer prompt [4, 17] with [letter, 5]."""
    return {
        "tokens": [[4, 17, letter, 5] for letter in letters],
        "masks": [[-100, -100, letter, 5] for letter in letters],
        "scores": [letter / 8 for letter in letters],
        "inference_logprobs": [[1.0, 1.0, -2.5, -0.75] for _ in letters],
    }


def door_of(process: Process) -> str:
    found: list[str] = []

    def said() -> bool:
        found[:] = re.findall(r"Atropos environments at (http://\S+)", process.output)
        return bool(found)

    process.wait_until(said, "HTTP door")
    return found[0]
