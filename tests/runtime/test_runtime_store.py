"""Somebody else on the machine writes into the store of a run of two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from ports import reserved_port
from runtime_helpers import REAL, Process, lines_at_least, write_yaml

ENDLESS = REAL | {"train": REAL["train"] | {"max_steps": 100_000}}


def store_of_the_ranks(port: int) -> dist.TCPStore:
    """As anybody finds it who can reach torchrun's."""
    launchers = dist.TCPStore("127.0.0.1", port, is_master=False)
    [key] = [key for key in launchers.list_keys() if key.endswith("asyncrl/0/store")]  # type: ignore[attr-defined]
    said = json.loads(launchers.get(key)[32:])
    assert said["address"] == "127.0.0.1"
    return dist.TCPStore(said["address"], said["port"], is_master=False)


def test_a_ledger_that_somebody_overwrites_ends_the_run_with_the_name_of_the_key(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
    with reserved_port() as port:
        program = (*torchrun, str(port), "-m", "asyncrl.main")
        process = Process(tmp_path, str(write_yaml(tmp_path, ENDLESS)), program=program)
        try:
            process.wait_until(lines_at_least(tmp_path / "runs/run", 2), "second step")
            attacker = store_of_the_ranks(port)
            [books] = [key for key in attacker.list_keys() if key.endswith("ledger/books")]  # type: ignore[attr-defined]
            there = attacker.get(books)
            attacker.set(books, (there[:32] + there[32:].replace(b'"turn":', b'"turn":1')).decode())
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert (
        "StoreForged: the value of ranks/0/ledger/books in the ranks' store was not written by a rank" in process.output
    )
