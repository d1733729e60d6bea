"""The ranks of a run: their environment and collectives, and how they meet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import warm
from ports import reserved_port

from asyncrl.distributed import rendezvous
from asyncrl.distributed.rendezvous import Rendezvous, meet
from asyncrl.distributed.world import World
from asyncrl.errors import LifecycleError, PlatformError

# -- the environment, one rank, and two real ranks over gloo ---------------------------------------------------------


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
        assert world.all_gather(torch.ones(2)).tolist() == world.all_to_all(torch.ones(1, 2)).tolist() == [[1, 1]]
        assert not torch.distributed.is_initialized()
    world.close()


def test_a_second_world_of_a_process_is_refused_until_the_first_is_closed() -> None:
    with World().open(torch.device("cpu"), single_rank_group=True):
        for other in (World(), World(world_size=2)):
            with pytest.raises(LifecycleError, match="a Runtime of this process holds its process group"):
                other.open(torch.device("cpu"), single_rank_group=other.world_size == 1)
            other.close()
        assert dist.is_initialized()
        World().open(torch.device("cpu"))  # it needs no group
    assert not dist.is_initialized()


def test_a_world_that_could_not_open_keeps_no_other_from_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRL_SECRET", raising=False)

    def fails(*_: object) -> None:
        raise OSError("no such device")

    for failing, reason in ((World(world_size=2), "ASYNCRL_SECRET"), (World(), "no such device")):
        with monkeypatch.context() as patched, pytest.raises((PlatformError, OSError), match=reason):
            patched.setattr(World, "_init_group", fails)
            failing.open(torch.device("cpu"), single_rank_group=True)
        with World().open(torch.device("cpu"), single_rank_group=True):
            assert dist.is_initialized()


def test_sums_over_ranks_are_float64() -> None:
    with pytest.raises(TypeError, match="float64"):
        World().all_reduce_sum_(torch.zeros(2))


def test_a_collective_before_open_is_an_error() -> None:
    world = World.from_env(TORCHRUN)
    with pytest.raises(LifecycleError, match="not open"):
        world.reduce_gradients_(torch.zeros(2))


PROGRAM = """
import os, psutil, torch
from asyncrl.distributed.world import World
world = World.from_env()
with world.open(torch.device("cpu"), timeout_s=60):
    mine, launcher = psutil.Process(), psutil.Process().parent()
    looked_at = [mine, launcher] if "LAUNCHER_TOO" in os.environ else [mine]
    listening = [c.laddr.ip for p in looked_at for c in p.net_connections("inet") if c.status == "LISTEN"]
    everywhere = [ip for ip in listening if ip in ("0.0.0.0", "::")]
    assert listening and not everywhere, listening
    assert world.notes == []
    sums = world.all_reduce_sum_(torch.tensor([world.rank + 1.0, 0.5], dtype=torch.float64))
    assert sums.tolist() == [3.0, 1.0], sums
    flat = world.reduce_gradients_(torch.full((5,), 10.0 ** world.rank))
    assert flat.tolist() == [11.0] * 5, flat
    assert world.all_gather_bytes(b"%d" % world.rank) == [b"0", b"1"]
    assert world.all_gather_bytes(b"") == [b"", b""]
    parts = torch.tensor([[0, 1], [2, 3]], dtype=torch.bfloat16) + 10 * world.rank
    assert world.all_to_all(parts).tolist() == [[2 * world.rank + i + 10 * r for i in range(2)] for r in range(2)]
    assert world.all_gather(parts).tolist() == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    store = world._met.store
    store.set(f"hello{world.rank}", "x")
    assert store.get(f"hello{1 - world.rank}") == b"x"
    # torch counts time in which the job was suspended, and the watchdog does not
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert min(store.timeout, group.options._timeout).days >= 1
    world.all_reduce_sum_(torch.zeros(1, dtype=torch.float64))
assert not torch.distributed.is_initialized()
print(f"rank {world.rank} ok", flush=True)
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
    """Their collectives and their store; and nothing of them listens on every interface."""
    two_ranks(PROGRAM)


def test_a_rank_leaves_its_group_whatever_its_holders_do() -> None:
    """Else the others would wait for it in a collective until their time-out."""

    def fails() -> None:
        raise RuntimeError("cannot let go")

    world = World().open(torch.device("cpu"), single_rank_group=True)
    assert dist.is_initialized()
    world.before_leaving(fails)
    with pytest.raises(RuntimeError, match="cannot let go"):
        world.leave()
    assert not dist.is_initialized()
    world.close()


# -- how ranks meet: where they listen, their secret, what is refused ------------------------------------------------


SECRET = "a secret of many letters"
ALONE = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint")


@pytest.mark.slow
def test_under_torchrun_too(tmp_path: Path) -> None:
    """torchrun's own store does listen everywhere, unless it is started as docs/design/ranks.md says."""
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LAUNCHER_TOO": "1"}
    options = (*ALONE, str(tmp_path / "rendezvous"), "--nproc-per-node", "2")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    # The parent of a warm rank is not its launcher. So three processes load torch, in 15 s of CPU time. How long that takes depends
    # on the load of the machine, and pytest's own limit ends a launcher that hangs.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as launcher:
        try:
            out, err = launcher.communicate()
        finally:
            launcher.kill()
    assert launcher.returncode == 0, err
    assert sorted(re.findall(r"rank \d ok", out)) == ["rank 0 ok", "rank 1 ok"]


# -- two ranks as two threads ----------------------------------------------------------------------------------------


def met(
    *given: dict[str, str], ranks: int = 0, one_machine: bool = True, address: str = "127.0.0.1"
) -> list[Rendezvous | BaseException]:
    """What `meet` returned or raised for each rank; `given`: their environments."""
    results = dict[int, Rendezvous | BaseException]()

    def rank_main(rank: int, port: int) -> None:
        try:
            size = ranks or len(given)
            place = World(rank, size, 0, size if one_machine else 1, address, port)
            results[rank] = meet(place, 3.0, environ=given[rank])
        except BaseException as error:
            results[rank] = error

    with reserved_port() as port:
        threads = [threading.Thread(target=rank_main, args=(rank, port)) for rank in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[rank] for rank in range(len(given))]


@pytest.fixture(autouse=True)
def _port_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rendezvous reads its address from the environment; both ranks are threads of this process."""
    real = rendezvous._launcher_store

    def launchers_store(place: World, timeout: timedelta) -> dist.Store:
        monkeypatch.setenv("MASTER_ADDR", place.master_addr)
        monkeypatch.setenv("MASTER_PORT", str(place.master_port))
        return real(place, timeout)

    monkeypatch.setattr(rendezvous, "_launcher_store", launchers_store)


def both(*given: dict[str, str], **rest: object) -> tuple[Rendezvous, Rendezvous]:
    first, other = met(*given, **rest)  # type: ignore[arg-type]
    assert isinstance(first, Rendezvous) and isinstance(other, Rendezvous), (first, other)
    return first, other


def test_without_a_secret_of_the_user_ranks_of_one_machine_draw_one() -> None:
    first, other = both({}, {})
    first.store.set("a/0", "1")
    assert other.get("a", 0) == "1"
    assert (first.host, first.notes) == ("127.0.0.1", []) and first.secret == other.secret and len(first.secret) == 64
    kind, _, path = first.get("joined", 0).partition(" ")
    assert kind == "file" and not Path(path).exists()  # both have read it


def test_torchruns_store_has_no_secret() -> None:
    first, _ = both({"ASYNCRL_SECRET": SECRET}, {"ASYNCRL_SECRET": SECRET})
    assert first.get("joined", 0) == "environment" and first.get("joined", 1) == ""


def test_a_rank_that_does_not_come_is_named_and_no_secret_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    real = rendezvous._write_secret
    monkeypatch.setattr(rendezvous, "_write_secret", lambda secret: written.append(real(secret)) or written[-1])
    [error] = met({}, ranks=3)
    assert isinstance(error, RuntimeError) and str(error).startswith("ranks [1, 2] did not join within 3 s")
    assert [path.exists() for path in written] == [False]


def test_ranks_of_several_machines_listen_at_the_launchers_address() -> None:
    address = own_address()
    first, other = both({"ASYNCRL_SECRET": SECRET}, {"ASYNCRL_SECRET": SECRET}, one_machine=False, address=address)
    assert (first.host, first.notes, other.get("joined", 0)) == (address, [], "environment")


def test_where_the_launchers_address_is_not_of_this_machine_rank_0_listens_everywhere() -> None:
    place = World(0, 1, 0, 0, "192.0.2.1", 0)
    found = Rendezvous(dist.HashStore(), SECRET, "", 1.0)
    rendezvous._lead(place, found)
    assert found.host == "0.0.0.0" and "listens on every interface" in found.notes[0]
    assert rendezvous.advertised("tcp://0.0.0.0:7", "node0") == "tcp://node0:7"


def test_an_address_that_others_cannot_reach_is_refused() -> None:
    first = met({"ASYNCRL_SECRET": SECRET}, ranks=2, one_machine=False)[0]
    assert isinstance(first, PlatformError) and "127.0.0.1, which no other machine can reach" in str(first)


@pytest.mark.parametrize(("first", "other"), [(SECRET, None), (None, SECRET)])
def test_a_secret_that_is_not_set_for_every_rank_is_an_error(first: str | None, other: str | None) -> None:
    error = met(*({"ASYNCRL_SECRET": each} if each else {} for each in (first, other)))[1]
    assert isinstance(error, PlatformError) and "for every rank, or for none" in str(error)


def test_several_machines_need_a_secret() -> None:
    for rank in (0, 1):
        with pytest.raises(PlatformError, match=f"rank {rank} is on one of several .* is not set; set it to"):
            meet(World(rank, 2), 20.0, environ={})


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(PlatformError, match="ASYNCRL_SECRET has 6 characters; set it to the same 16"):
        meet(World(0, 2, 0, 2), 20.0, environ={"ASYNCRL_SECRET": "secret"})


@pytest.mark.parametrize("kind", ["other name", "readable by others", "link", "absent"])
def test_a_file_that_somebody_else_names_is_no_secret(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("id_rsa" if kind == "other name" else "asyncrl-secret-x")
    target = tmp_path / "asyncrl-secret-y"
    if kind != "absent":
        (target if kind == "link" else path).write_text(SECRET)
        (target if kind == "link" else path).chmod(0o644 if kind == "readable by others" else 0o600)
    if kind == "link":
        path.symlink_to(target)
    with pytest.raises(PlatformError, match="no file that this user alone can read"):
        rendezvous._read_secret(path)


def own_address() -> str:
    """One that is not the loopback."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family.name == "AF_INET" and not each.address.startswith("127.")
    ]
    if not found:
        pytest.skip("this machine has no address but the loopback")
    return found[0]


def test_nothing_that_ranks_exchange_is_pickled() -> None:
    """What workers and their own parent say to each other is, over a pair of sockets; nothing else is loaded that way."""
    allowed = {"rewards/worker.py", "rewards/process.py", "rewards/calls.py"}
    allowed |= {f"generation/worker/{name}.py" for name in ("engine", "peer", "server")}
    words = re.compile(
        r"(?:all_gather|broadcast|gather|scatter|send|recv)_object|pickle\.(?:loads|load|dumps|dump)\(|weights_only=False"
    )
    package = ROOT / "asyncrl"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if words.search(path.read_text())}
    assert found <= allowed, found - allowed
