"""Signs of life over a real store: a rank that falls silent is named, and heard of again; a store that is gone is, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from asyncrl.distributed.heartbeat import Heartbeat
from asyncrl.distributed.sealed import SealedStore

EVERY_S = 0.25  # after three of these a rank is silent: no thread should have to wait so long, on a busy machine either

Said = TypeVar("Said")


def until(true: Callable[[], Said]) -> Said:
    """What it said when that was true for the first time: asked again, it may say something else."""
    deadline = time.monotonic() + 20
    while not (said := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # signs of life are heard on a thread that tells nobody
    return said


def one_each(*found: list[str]) -> list[str]:
    """What each of them names, once each names one."""
    return [said for each in found for said in each] if all(len(each) == 1 for each in found) else []


def test_the_rank_that_falls_silent_is_named_until_it_is_heard_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))

    def connect() -> SealedStore:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        return SealedStore(store, "alive/", b"secret")

    first, second = Heartbeat(connect(), 0, 3, EVERY_S), Heartbeat(connect(), 1, 3, EVERY_S)
    with first, second:
        time.sleep(4 * EVERY_S)  # that nothing is said within this time is what is looked at
        assert first.silent() == []  # rank 2 has not been there yet: nobody knows when it would have to
        connect().set("2", "1")  # and never again
        until(lambda: first._heard.keys() == {1, 2} and second._heard.keys() == {0, 2})
        for said in until(lambda: one_each(first.silent(), second.silent())):
            assert said.startswith("rank 2 has given no sign of life for ")
        assert until(lambda: first.silent(1.0))[0].startswith("rank 2 has given no sign of life for ")
        assert first.silent(100.0) == []
        with Heartbeat(connect(), 2, 3, EVERY_S):
            until(lambda: first.silent() == second.silent() == first.silent(1.0) == [])
        until(lambda: first._heard[2] == b"bye")
        time.sleep(4 * EVERY_S)  # that nothing is said of a rank that has ended is what is looked at
        assert first.silent() == second.silent() == first.silent(EVERY_S) == []
    assert first.silent() == []  # closed, it hears of nobody: that says nothing of the others


def test_a_store_that_does_not_answer_is_named() -> None:
    class Deaf:
        def set(self, key: str, value: str) -> None:
            until(lambda: released)

        def check(self, keys: list[str]) -> bool:
            return False

    released = False
    with Heartbeat(Deaf(), 0, 2, EVERY_S) as heartbeat:  # type: ignore[arg-type]  # a store that never answers
        assert until(heartbeat.silent)[0].startswith("the ranks' store, which rank 0 holds, has not answered for ")
        assert until(lambda: heartbeat.silent(1.0)) and heartbeat.silent(100.0) == []
        released = True
