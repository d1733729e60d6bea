"""Groups that travel between real processes over the line: kill -9 of either side at each of its messages."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import warm
from travel_ranks import Books, Rank

from asyncrl.distributed.line import LineClient, LineServer
from asyncrl.pumps.travel import KIND

SCRIPT = Path(__file__).with_name("travel_process.py")
PROMPTS = 12
DEADLINE_S = 60.0


@contextmanager
def run_of(
    tmp_path: Path, ranks: int, trainers: int = 1, dies: int = -1, at: int = -1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Every rank in a process of its own; rank `dies` kills itself at its message `at`."""
    processes = []
    try:
        for rank in range(ranks):
            words = [rank, trainers, tmp_path / "address", PROMPTS, at if rank == dies else -1]
            words = [sys.executable, str(SCRIPT), *map(str, words)]
            processes.append(warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out + err


def report(out: str) -> dict[str, Any]:
    """What rank 0 printed."""
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))


def test_four_processes_two_of_which_train(tmp_path: Path) -> None:
    with run_of(tmp_path, 4, trainers=2) as (first, *others):
        code, out = ended(first)
        assert code == 0, out
        assert sorted(report(out)["trained"]) == list(range(PROMPTS))
        assert [ended(other)[0] for other in others] == [12] * 3


@pytest.mark.parametrize(
    "at", [*range(0, 15, 2), *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 15, 2))]
)
def test_a_generating_rank_killed_at_any_message_loses_and_repeats_nothing(tmp_path: Path, at: int) -> None:
    """Of three processes the second dies: at an ask of a slot, of a place or of the acknowledgement; before, on its way, after."""
    with run_of(tmp_path, 3, dies=1, at=at) as (first, second, _):
        code, out = ended(first)
        assert code == 0, out
        assert sorted(report(out)["trained"]) == list(range(PROMPTS))
        assert ended(second)[0] in (-signal.SIGKILL, 12)


@pytest.mark.parametrize("at", range(0, 10, 3))
def test_a_training_rank_killed_at_any_message_ends_its_senders_by_name(tmp_path: Path, at: int) -> None:
    with run_of(tmp_path, 3, trainers=2, dies=1, at=at) as (first, second, third):
        assert ended(second)[0] == -signal.SIGKILL
        code, out = ended(first)
        assert code == 0 and report(out)["lost"] == ["rank 1"], out
        code, out = ended(third)
        assert code == 12 and ("rank 2 lost rank 1" in out or "rank 2 lost rank 0" in out), out


async def test_connections_that_are_cut_at_random_bytes_lose_and_repeat_no_group() -> None:
    """The real line through a proxy that closes each connection after a random number of bytes, so that records are cut in the
    middle and acknowledgements are lost."""
    rng, groups = random.Random(5), 60
    books = Books([0], groups)
    trainer, sender = Rank(books, 0, trains=True), Rank(books, 1)
    cuts = 0

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
        while left > 0 and (data := await reader.read(min(left, 1 << 14))):
            writer.write(data)
            await writer.drain()
            left -= len(data)

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cuts
        host, port = server.address.removeprefix("tcp://").split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ways = (
            copy(reader, far_writer, rng.randrange(5_000, 150_000)),
            copy(far_reader, writer, rng.randrange(900, 6_000)),
        )
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, far_writer):
            end.transport.abort()
        cuts += 1

    async with LineServer("a secret") as server, await asyncio.start_server(cut, "127.0.0.1", 0) as proxy:
        server.on(KIND, trainer.arrivals.take)
        host, port = proxy.sockets[0].getsockname()
        async with LineClient(f"{host}:{port}", "a secret", "rank 1") as line, anyio.create_task_group() as tasks:

            async def connect(_: int) -> LineClient:
                return line

            sender.connect = connect
            tasks.start_soon(trainer.arrivals.run)
            for group_id in range(groups):
                ticket = sender.admit(group_id)
                assert ticket is not None
                sender.score(ticket, [rng.randrange(3, 400) for _ in range(4)])
            sender.departures.close()
            with anyio.fail_after(DEADLINE_S):
                await sender.departures.run()
            trained = trainer.train_ready()
            tasks.cancel_scope.cancel()
    assert not sender.store.statistics().rows and not sender.book.tickets
    assert sorted(trained) == list(range(groups)) and cuts > 5
