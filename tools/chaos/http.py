"""Attacks the HTTP door of a live run: whatever is sent, the run trains every group that was accepted.

    python tools/chaos http                        # a run of the quickstart's model is started; 6,000 mutated requests

Strangers (no key, other hosts, web pages), gzip bombs, deep and wide JSON, a body of 16 MiB, a thousand silent connections,
a thousand registrations, senders that never end, and mutations of good requests, byte by byte. Beside each attack a client asks
for `/info` all the time: the longest it waited is the lag. Prints a table; exits 1 where something was answered 5xx, where the
run ended, or where a good group was not trained.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from commands import EXAMPLES, ROOT, table

JSON = "Content-Type: application/json"
PATIENCE_S = 60.0  # for a reply to a request that is complete
FULL = b'"status":"full"'


@dataclass
class Outcome:
    """Of one attack."""

    answers: Counter[str] = field(default_factory=Counter)
    lag_ms: float = 0.0
    memory_mib: float = 0.0  # most, above that before
    descriptors: int = 0  # most


@dataclass
class Target:
    """A door, the process behind it, and what this program posted there that has to be trained."""

    url: str
    pid: int
    good: list[float] = field(default_factory=list)  # rewards

    def send(self, raw: bytes, patience: float = PATIENCE_S) -> str:
        """The status of the reply; "closed" or "silent" where there was none. 503 for want of room is "full"."""
        parts = urlsplit(self.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=patience) as connection:
                connection.sendall(raw)
                reply = connection.recv(1 << 16)
        except TimeoutError:
            return "silent"
        except OSError:
            return "closed"
        if FULL in reply:
            return "full"
        return reply[9:12].decode("ascii", "replace") if reply.startswith(b"HTTP/") else "closed"

    def request(
        self, method: str, path: str, body: bytes = b"", *headers: str, host: str = "", key: bool = True
    ) -> bytes:
        parts = urlsplit(self.url)
        lines = [
            f"{method} {parts.path if key else ''}{path} HTTP/1.1",
            f"Host: {host or parts.netloc}",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *(headers or (JSON,)),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def post_good(self, members: int = 2) -> None:
        """One group whose rewards nobody else has."""
        rewards = [1000.0 + len(self.good) + i for i in range(members)]
        self.good += rewards
        said = self.send(self.request("POST", "/scored_data", json.dumps(group(rewards)).encode()))
        if said != "200":
            raise AssertionError(f"a good group was answered {said}")


def group(rewards: list[float], tokens: int = 4) -> dict[str, Any]:
    n = len(rewards)
    ids = [4, 5] + [6] * (tokens - 2)
    return {
        "tokens": [ids] * n,
        "masks": [[-100, -100, *ids[2:]]] * n,
        "scores": rewards,
        "inference_logprobs": [[1.0, 1.0] + [-1.25] * (tokens - 2)] * n,
        "messages": None,
        "env_id": 0,
    }


def large_group(members: int = 72, tokens: int = 8_000) -> bytes:
    content = group([1.0] * members, tokens)
    row = [1.0, 1.0] + [-1.2345678901234567] * (tokens - 2)
    bad = [*content["tokens"][0][:-1], 1_000_000]
    content["tokens"] = [*content["tokens"][:-1], bad]
    content["masks"] = [*content["masks"][:-1], [-100, -100, *bad[2:]]]
    return json.dumps({**content, "inference_logprobs": [row] * members}).encode()


LARGE = large_group()  # as those of the bombs


@contextmanager
def watched(target: Target, outcome: Outcome) -> Iterator[None]:
    """Asks for `/info`, and looks at the process, until the attack is over."""
    over = threading.Event()
    before = memory_of(target.pid)

    def watch() -> None:
        while not over.is_set():
            start = time.perf_counter()
            said = target.send(target.request("GET", "/info", b""))
            outcome.lag_ms = max(outcome.lag_ms, (time.perf_counter() - start) * 1e3)
            if said != "200":
                outcome.answers[f"/info {said}"] += 1
            outcome.memory_mib = max(outcome.memory_mib, memory_of(target.pid) - before)
            outcome.descriptors = max(outcome.descriptors, len(os.listdir(f"/proc/{target.pid}/fd")))
            over.wait(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def memory_of(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def strangers(target: Target, outcome: Outcome, _: int) -> None:
    body = json.dumps(group([1.0, 2.0])).encode()
    post = ("POST", "/scored_data", body)
    port = urlsplit(target.url).port
    for raw in (
        target.request(*post, key=False),
        target.request(*post, JSON, "Authorization: Bearer of-bad-news-only", key=False),
        target.request("GET", "/status", key=False),
        target.request(*post, host=f"rebound.example:{port}"),
        target.request(*post, JSON, "Origin: http://page.example"),
        target.request(*post, "Content-Type: text/plain"),
    ):
        outcome.answers[target.send(raw)] += 1


@functools.cache
def bomb_bodies(size: int) -> list[tuple[bytes, tuple[str, ...]]]:
    """Of `size` MiB each, once unpacked: (body, headers)."""
    fill = size << 20
    pieces = (b"{},", b"[],", b"0,", b'"a",', b"[", b"]", b'{"a":', b"\\", b'"', b"1.5,")
    packed = [gzip.compress(b"[" + piece * (fill // len(piece)) + b"{}]", 1) for piece in pieces]
    plain = ('{"tokens": [[' + "0," * (fill // 4) + "0]]}", '{"tokens": [' + "[4]," * (fill // 8) + "[4]]}")
    return [(body, (JSON, "Content-Encoding: gzip")) for body in packed] + [(body.encode(), (JSON,)) for body in plain]


def bombs(target: Target, outcome: Outcome, size: int) -> None:
    for body, headers in bomb_bodies(size):
        outcome.answers[target.send(target.request("POST", "/scored_data_list", body, *headers))] += 1


def large(target: Target, outcome: Outcome, _: int) -> None:
    """A group of 15 MiB as it may be, read to its last token: the model does not know that one."""
    for _ in range(3):
        outcome.answers[target.send(target.request("POST", "/scored_data", LARGE))] += 1


def silent(target: Target, outcome: Outcome, count: int) -> None:
    """Connections that say nothing, or never end their headers; a good client is served all the same."""
    parts = urlsplit(target.url)
    held = []
    try:
        for index in range(count):
            held.append(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S))
            if index % 2:
                held[-1].sendall(b"GET /info HTTP/1.1\r\nHo")
            if index % 100 == 99:
                target.post_good()
        outcome.answers["connections"] += len(held)
    finally:
        for connection in held:
            connection.close()


def registrations(target: Target, outcome: Outcome, count: int) -> None:
    def register(index: int) -> str:
        body = json.dumps({"desired_name": f"{index}" + "x" * (index % 90), "weight": 1.0}).encode()
        return target.send(target.request("POST", "/register-env", body))

    with ThreadPoolExecutor(8) as pool:
        outcome.answers.update(pool.map(register, range(count)))


def mutated(target: Target, outcome: Outcome, count: int) -> None:
    def one(seed: int) -> str:
        chance = random.Random(seed)
        said = target.send(mutation(target, chance), patience=1.0)
        if seed % 50 == 0:
            target.post_good()
        return said

    with ThreadPoolExecutor(8) as pool:
        outcome.answers.update(pool.map(one, range(count)))


def mutation(target: Target, chance: random.Random) -> bytes:
    """A good request, damaged: in its JSON, in its bytes behind the key, or both."""
    content: Any = group([chance.random() for _ in range(chance.randint(1, 3))])
    if chance.random() < 0.6:
        small = [None, True, -1, 1e308, 2**70, "", "\x00", float("nan")]
        odd = [*small, [], {}, [[]], [None], {"a": 1}, [4, "x"], [[4] * 9] * 3]
        for _ in range(chance.randint(1, 3)):
            content[chance.choice([*content, "overrides", "group_overrides", "env_id", "images"])] = chance.choice(odd)
    if chance.random() < 0.3:
        content = [content] * chance.randint(0, 3)
    body, headers = json.dumps(content).encode(), [JSON]
    if chance.random() < 0.3:
        body = gzip.compress(body)
        headers.append("Content-Encoding: gzip")
    path = chance.choice(
        ["/scored_data", "/scored_data_list", "/register-env", "/disconnect-env", "/status-env", "/nothing"]
    )
    raw = bytearray(target.request(chance.choice(["POST", "POST", "GET", "PUT"]), path, body, *headers))
    first = raw.index(b"HTTP/1.1")
    for _ in range(chance.choice([0, 1, 1, 4])):
        at = chance.randrange(first, len(raw))
        kind = chance.randrange(4)
        if kind == 0:
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at:at] = chance.randbytes(chance.randint(1, 20))
        elif kind == 2:
            del raw[at : at + chance.randint(1, 20)]
        else:
            raw[at:at] = chance.choice(
                [b"\r\n", b"Transfer-Encoding: chunked\r\n", b"\xff" * 9000, b"Expect: 100-continue\r\n"]
            )
    return bytes(raw)


def attack(target: Target, requests: int) -> dict[str, Outcome]:
    """By name. `requests`: mutated ones; other attacks are as large as they have to be, or less where it is below a thousand."""
    whole = requests >= 1000
    bomb_bodies(180 if whole else 24)  # before anything is timed: it holds this interpreter
    plan: list[tuple[str, Callable[[Target, Outcome, int], None], int]] = [
        ("strangers", strangers, 0),
        ("bombs", bombs, 180 if whole else 24),
        ("large body", large, 0),
        ("silent connections", silent, 1000 if whole else 400),
        ("registrations", registrations, 3000 if whole else 200),
        ("mutated", mutated, requests),
    ]
    found = {}
    for name, what, size in plan:
        outcome = found[name] = Outcome()
        target.post_good()
        with watched(target, outcome):
            what(target, outcome, size)
        target.post_good()
    return found


def failures(found: dict[str, Outcome]) -> list[str]:
    """Answers that nobody may cause."""
    return [
        f"{name}: {count} x {said}"
        for name, outcome in found.items()
        for said, count in outcome.answers.items()
        if re.match(r"5|/info", said)
    ]


def untrained(target: Target, rollouts: Path, patience: float = 120.0) -> set[float]:
    """The rewards of good groups that are not among what the run trained."""
    left, seen, until = set(target.good), set[Path](), time.monotonic() + patience
    while left and time.monotonic() < until:
        for path in set(rollouts.glob("step_*.jsonl")) - seen:
            left -= {json.loads(line)["reward"] for line in path.read_text(encoding="utf-8").splitlines()}
            seen.add(path)
        target.send(
            target.request("POST", "/scored_data", json.dumps(group([0.0, 1.0])).encode()), 5.0
        )  # fills the last step
        time.sleep(0.2)
    return left


def rows_of(found: dict[str, Outcome]) -> Iterator[str]:
    heads = ("attack", "answers", "longest wait of another client, ms", "memory, MiB", "descriptors")
    rows = []
    for name, each in found.items():
        answers = ", ".join(f"{count} x {said}" for said, count in sorted(each.answers.items()))
        rows.append((name, answers, f"{each.lag_ms:.0f}", f"+{each.memory_mib:.0f}", each.descriptors))
    yield from table(heads, rows)


@contextmanager
def quickstart(folder: Path) -> Iterator[tuple[Target, Path]]:
    """A run of its own, on the quickstart's model."""
    settings = [f"run.dir={folder}", "run.name=attacked", f"door.ring=attacked-{os.getpid()}", "door.http_port=0"]
    settings += ["rollout.groups_per_step=2", "rollout.max_staleness=1000", "rollout.max_tokens=8192"]
    settings += ["train.time_limit_s=3600", "train.tokens_per_microbatch=9000", "telemetry.live=plain"]
    settings += ["engine.max_sequences=1"]
    command = [sys.executable, "-m", "asyncrl.main", str(EXAMPLES / "agent_loop.yaml"), *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    log = folder / "log.txt"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as run:
        try:
            while not (said := re.search(r"environments at (http://\S+)", log.read_text(encoding="utf-8"))):
                if run.poll() is not None:
                    sys.exit(log.read_text(encoding="utf-8"))
                time.sleep(0.1)
            yield Target(said[1], run.pid), folder / "attacked" / "rollouts"
        finally:
            run.send_signal(signal.SIGTERM)
            print(f"the run ended with {run.wait(60)} after SIGTERM")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=6000, help="mutated ones")


def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, quickstart(Path(folder)) as (target, rollouts):
        found = attack(target, given.requests)
        print("\n".join(rows_of(found)))
        bad, left = failures(found), untrained(target, rollouts)
        print(
            f"{len(target.good)} good members posted, {len(left)} not trained; answers that may not be: {bad or 'none'}"
        )
        return 1 if bad or left else 0
