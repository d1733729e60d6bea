"""torchrun's environment, the one-rank world, and two real ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from ports import reserved_port

from asyncrl.distributed.world import World
from asyncrl.errors import LifecycleError, PlatformError

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_without_torchrun_it_is_one_rank() -> None:
    world = World.from_env({})
    assert (world.rank, world.world_size, world.is_first) == (0, 1, True)


def test_torchruns_variables() -> None:
    world = World.from_env(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.master_addr, world.master_port, world.restart, world.is_first) == ("node0", 29500, 2, False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"RANK": None}, "RANK"),
        ({"RANK": "4"}, "contradict"),
        ({"RANK": "x"}, "not numbers"),
    ],
)
def test_half_an_environment_is_an_error(change: dict[str, str | None], text: str) -> None:
    env = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(PlatformError, match=text):
        World.from_env(env)


def test_one_rank_needs_no_group_and_its_collectives_change_nothing() -> None:
    world = World()
    with world.open(torch.device("cpu")):
        sums = torch.tensor([1.5, 2.0], dtype=torch.float64)
        flat = torch.arange(4.0)
        assert world.all_reduce_sum_(sums) is sums and sums.tolist() == [1.5, 2.0]
        assert world.reduce_gradients_(flat) is flat
        assert flat.tolist() == [0, 1, 2, 3]
        assert world.all_gather_bytes(b"a") == [b"a"]
        assert not torch.distributed.is_initialized()
        with pytest.raises(LifecycleError, match="twice"):
            world.open(torch.device("cpu"))
        with pytest.raises(LifecycleError, match="more than one rank"):
            world.store("ledger")
    world.close()


def test_a_second_world_of_a_process_is_refused_until_the_first_is_closed() -> None:
    with World().open(torch.device("cpu"), alone=True):
        for other in (World(), World(world_size=2)):
            with pytest.raises(LifecycleError, match="a Runtime of this process holds its process group"):
                other.open(torch.device("cpu"), alone=other.world_size == 1)
            other.close()
        assert dist.is_initialized()
        World().open(torch.device("cpu"))  # it needs no group
    assert not dist.is_initialized()


def test_sums_over_ranks_are_float64() -> None:
    with pytest.raises(TypeError, match="float64"):
        World().all_reduce_sum_(torch.zeros(2))


def test_a_collective_before_open_is_an_error() -> None:
    world = World.from_env(TORCHRUN)
    with pytest.raises(LifecycleError, match="not open"):
        world.reduce_gradients_(torch.zeros(2))
    with pytest.raises(LifecycleError, match=r"world\.open"), world:
        pass


PROGRAM = """
import torch
from asyncrl.distributed.world import World
world = World.from_env()
with world.open(torch.device("cpu"), timeout_s=60):
    sums = world.all_reduce_sum_(torch.tensor([world.rank + 1.0, 0.5], dtype=torch.float64))
    assert sums.tolist() == [3.0, 1.0], sums
    flat = world.reduce_gradients_(torch.full((5,), 10.0 ** world.rank))
    assert flat.tolist() == [11.0] * 5, flat
    assert world.all_gather_bytes(b"%d" % world.rank) == [b"0", b"1"]
    assert world.all_gather_bytes(b"") == [b"", b""]
    store = world.store("ledger")
    store.set(f"hello{world.rank}", "x")
    assert store.get(f"hello{1 - world.rank}") == b"x"
    # torch counts time in which the job was suspended, and the watchdog does not
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert min(store._store.timeout, group.options._timeout).days >= 1, (store._store.timeout, group.options._timeout)
    world.all_reduce_sum_(torch.zeros(1, dtype=torch.float64))
assert not torch.distributed.is_initialized()
print("rank", world.rank, "ok", flush=True)
"""


def start_rank(program: str, rank: int, size: int, port: int) -> subprocess.Popen[str]:
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return warm.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two_ranks(program: str) -> None:
    """Both run it to its end, and say so."""
    with reserved_port() as port:
        ranks = [start_rank(program, rank, 2, port) for rank in range(2)]
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert f"rank {rank} ok" in out


LEAVES = """
import torch
from asyncrl.distributed.world import World
world = World.from_env()
with world.open(torch.device("cpu"), timeout_s=60):
    assert world.all_gather_bytes(b"x" * world.rank * 1000) == [b"", b"x" * 1000]
    if world.rank == 0:
        try:
            world.all_gather_bytes(b"step")
        except RuntimeError as error:
            print("rank 0 ok", type(error).__name__, flush=True)
    else:
        world.leave()
        print("rank 1 ok", flush=True)
"""


def test_a_rank_whose_partner_is_gone_hears_of_it_in_a_gathering() -> None:
    two_ranks(LEAVES)


def test_two_ranks() -> None:
    two_ranks(PROGRAM)


def test_a_rank_leaves_its_group_whatever_its_holders_do() -> None:
    """Else the others would wait for it in a collective until their time-out."""

    def fails() -> None:
        raise RuntimeError("cannot let go")

    world = World().open(torch.device("cpu"), alone=True)
    assert dist.is_initialized()
    world.before_leaving(fails)
    with pytest.raises(RuntimeError, match="cannot let go"):
        world.leave()
    assert not dist.is_initialized()
    world.close()
