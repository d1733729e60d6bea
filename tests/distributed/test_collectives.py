"""Collectives that never end: on nccl by a stand-in for its work, on gloo with a rank that never joins."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ports import reserved_port
from test_ranks import start_rank

from asyncrl.distributed import collectives
from asyncrl.distributed.world import World
from asyncrl.errors import RankLost


class NcclWork:
    """As `WorkNCCL`: `wait` returns at once, and an error or an abort ends it without raising."""

    def __init__(self, ends_after: int | None = None, error: Exception | None = None) -> None:
        self.asked, self.ends_after, self.error = 0, ends_after, error
        self.aborted = False
        self.watched = threading.Event()

    def is_completed(self) -> bool:
        self.asked += 1
        self.watched.set()
        return self.aborted or (self.ends_after is not None and self.asked > self.ends_after)

    def wait(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self.error


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[NcclWork]:
    """The works of the next collectives, under the real code of `World`."""
    works: list[NcclWork] = []
    remaining = iter(works)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: next(remaining))
    monkeypatch.setattr(collectives, "abort", lambda: [setattr(work, "aborted", True) for work in works])
    return works


def open_world() -> World:
    world = World(0, 2, 0, 2)
    world._opened = True
    return world


@pytest.mark.parametrize("aborts", [True, False], ids=["the abort ends the kernel", "the abort hangs"])
def test_a_lost_rank_ends_an_nccl_collective_that_would_never_end(
    works: list[NcclWork], monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    if not aborts:
        monkeypatch.setattr(collectives, "abort", threading.Event().wait)
    world, hangs = open_world(), NcclWork()
    works.append(hangs)
    found: list[BaseException] = []

    def lane() -> None:
        try:
            world.reduce_gradients_(torch.ones(3))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=lane)
    thread.start()
    assert hangs.watched.wait(10)
    started = time.monotonic()
    world.lost.report("rank 1 has given no sign of life for 60 s")
    world.lost.report("a second report")
    thread.join(10)
    assert time.monotonic() - started < 1
    assert [type(error) for error in found] == [RankLost]
    assert str(found[0]) == "rank 1 has given no sign of life for 60 s"
    # No later collective is started: the list of works is empty.
    with pytest.raises(RankLost, match="rank 1"):
        world.all_reduce_sum_(torch.ones(1, dtype=torch.float64))


def test_the_garbage_of_an_aborted_collective_is_never_a_result(works: list[NcclWork]) -> None:
    """FSDP2's own collectives are in front of it on the device, and end by the abort. Then this one counts as completed."""
    world, work = open_world(), NcclWork(ends_after=0)
    works.append(work)
    asked = work.is_completed

    def completes_by_the_abort() -> bool:
        world.lost.report("rank 1 is gone")
        return asked()

    work.is_completed = completes_by_the_abort  # type: ignore[method-assign]
    with pytest.raises(RankLost, match="rank 1 is gone"):
        world.reduce_gradients_(torch.ones(3))


def test_an_nccl_collective_that_failed_or_ended(works: list[NcclWork]) -> None:
    world = open_world()
    works += [NcclWork(ends_after=3), NcclWork(ends_after=1, error=RuntimeError("remote process exited"))]
    assert world.reduce_gradients_(torch.ones(3)).tolist() == [1, 1, 1]
    assert works[0].asked == 4
    with pytest.raises(RankLost, match=r"rank 0 of 2: a collective failed.*remote process exited"):
        world.reduce_gradients_(torch.ones(3))


STOPPED = """
import os, signal, sys, threading, time, torch
from asyncrl.distributed.world import World
from asyncrl.errors import RankLost
world = World.from_env()
with world.open(torch.device("cpu"), timeout_s=60):
    world.reduce_gradients_(torch.ones(3))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, world.lost.report, ["rank 1 is silent"]).start()
    try:
        getattr(world, sys.argv[1])(torch.ones(2, 1 << 20))
    except RankLost as lost:
        started = time.monotonic()
        world.leave()
        print(lost, time.monotonic() - started < 1, flush=True)
        raise
"""


@pytest.mark.parametrize("name", ["reduce_gradients_", "all_gather", "all_to_all"])
def test_a_stopped_rank_ends_a_gloo_collective_and_does_not_hold_the_process(name: str) -> None:
    with reserved_port() as port:
        ranks = [start_rank(STOPPED.replace("sys.argv[1]", repr(name)), rank, 2, port) for rank in range(2)]
        try:
            out, err = ranks[0].communicate(timeout=60)
            assert out == "rank 1 is silent True\n", err
            assert ranks[0].returncode == 1 and "RankLost: rank 1 is silent" in err
            assert ranks[1].poll() is None
        finally:
            for each in ranks:
                each.kill()
                each.communicate()


def test_a_wait_on_nccl_is_at_most_a_few_percent_longer(works: list[NcclWork], monkeypatch: pytest.MonkeyPatch) -> None:
    world, work, now = open_world(), NcclWork(), [0.0]
    works.append(work)
    virtual = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(collectives, "time", virtual)
    work.is_completed = lambda: now[0] > 0.05  # type: ignore[method-assign]
    world.reduce_gradients_(torch.ones(3))
    assert now[0] < 0.0525
