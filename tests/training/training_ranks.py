"""Living processes, each of them one rank of a world: they answer line by line, so that a case costs a fraction of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from ports import reserved_port

import asyncrl


class Ranks:
    def __init__(self, script: str, folder: Path, size: int, port: int) -> None:
        """`script RANK WORLD PORT OUT` reads a case a line, writes `OUT/RANK.pt`, and says "done"."""
        self.folder, self.size = folder, size
        paths = f"{Path(asyncrl.__file__).parents[1]}:{Path(__file__).parents[1]}"
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.logs = [(folder / f"{rank}.log").open("w") for rank in range(size)]
        self.processes = [
            warm.Popen(
                [sys.executable, "-W", "error", script, str(rank), str(size), str(port), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.logs[rank],
                text=True,
                env=environment,
            )
            for rank in range(size)
        ]

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def run(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        """What each rank found of its line."""
        for line, process in zip(lines, self.processes, strict=True):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n", self.log(rank)
        return [torch.load(self.folder / f"{rank}.pt", weights_only=False) for rank in range(self.size)]

    def close(self) -> None:
        # All of them first: one that ends waits for the others' farewell.
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.stdout is not None
            try:
                process.wait(300)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                log.close()


@contextmanager
def ranks_in(script: str, folder: Path, size: int) -> Iterator[Ranks]:
    with reserved_port() as port:
        ranks = Ranks(script, folder, size, port)
        try:
            yield ranks
        finally:
            ranks.close()


def ranks_of(script: str, size: int) -> Any:
    """A fixture: so many ranks, which live as long as the module."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
        with ranks_in(script, tmp_path_factory.mktemp("ranks"), size) as made:
            yield made

    return ranks
