"""Which worker gets which request: groups stay together, load is even, nothing is lost or answered twice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.generation.worker.router import RoutedJob, Router
from asyncrl.types import GenerationRequest, SamplingParams


def request(key: str | None = None, prompt: int = 4, max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(np.arange(prompt, dtype=np.int32), SamplingParams(max_tokens=max_tokens), 0, key)


class Routed:
    """A router with workers 0..n-1 in service."""

    def __init__(self, workers: int, capacity: int = 4) -> None:
        self.loop = asyncio.new_event_loop()
        self.router = Router(capacity)
        for number in range(workers):
            self.router.add_worker(number)

    def add(self, *args: Any, pinned: bool = False, **kwargs: Any) -> RoutedJob:
        return self.router.add(request(*args, **kwargs), self.loop.create_future(), pinned=pinned)

    def assign(self) -> dict[int, int]:
        return {job.number: job.worker for job in self.router.assign() if job.worker is not None}


@pytest.fixture
def two() -> Any:
    routed = Routed(2)
    yield routed
    routed.loop.close()


def test_one_goes_to_the_worker_with_the_fewest_reserved_tokens(two: Routed) -> None:
    two.add(max_tokens=100)
    two.add(max_tokens=10)
    two.add(max_tokens=10)
    two.add(max_tokens=10)
    assert two.assign() == {0: 0, 1: 1, 2: 1, 3: 1}


def test_members_of_a_group_go_where_the_first_is_and_wait_for_it(two: Routed) -> None:
    group = [two.add("a") for _ in range(6)]
    other = two.add("b")
    # The home is full, and others need not wait for it.
    assert two.assign() == {0: 0, 1: 0, 2: 0, 3: 0, other.number: 1}
    two.router.remove(group[0])
    assert two.assign() == {4: 0}


def test_a_group_that_has_ended_has_no_home_any_more(two: Routed) -> None:
    first = two.add("a")
    two.add(max_tokens=1)
    two.assign()
    assert first.worker == 0
    two.router.remove(first)
    two.add(max_tokens=50)
    two.assign()
    again = two.add("a")
    two.assign()
    assert again.worker == 1


def test_what_a_lost_worker_had_goes_on_elsewhere_before_what_came_later(two: Routed) -> None:
    lost = [two.add("a") for _ in range(3)]
    two.assign()
    later = [two.add("b") for _ in range(4)]
    assert {job.worker for job in lost} == {0}
    two.router.remove_worker(0)
    assert [job.worker for job in lost] == [None] * 3
    assert list(two.assign()) == [0, 1, 2, 3]
    assert {job.worker for job in [*lost, later[0]]} == {1}
    two.router.remove_worker(0)
    assert two.router.waiting == 3


def session(name: str, prompt: int = 4, max_tokens: int = 8) -> GenerationRequest:
    return replace(request(None, prompt, max_tokens), session=name)


def sent_to(two: Routed, asked: GenerationRequest, pinned: bool = False) -> RoutedJob:
    job = two.router.add(asked, two.loop.create_future(), pinned=pinned)
    two.assign()
    return job


def test_a_session_stays_at_its_worker_while_the_load_is_even(two: Routed) -> None:
    router = two.router
    first = sent_to(two, session("a"))
    router.remove(first)
    beside = sent_to(two, request())
    assert first.worker == beside.worker == 0
    # Worker 1 has nothing, and the session's worker has as much as the request itself.
    again = sent_to(two, session("a"))
    assert again.worker == 0
    router.remove(again)
    others = [sent_to(two, request(max_tokens=96)) for _ in range(2)]
    assert [job.worker for job in others] == [1, 0]
    # Worker 0 has 112 tokens and worker 1 has 100. Then worker 1 has nothing, and the session moves and stays.
    assert sent_to(two, session("a")).worker == 0
    router.remove(others[0])
    moved = sent_to(two, session("a"))
    assert moved.worker == 1
    router.remove(moved)
    router.remove(others[1])
    assert sent_to(two, session("a")).worker == 1


def test_a_session_goes_elsewhere_if_its_worker_is_full_pinned_or_lost(two: Routed) -> None:
    router = two.router
    for name in ("a", "b"):
        router.remove(sent_to(two, session(name)))
    full = [sent_to(two, session("a", max_tokens=1)) for _ in range(4)]
    assert {job.worker for job in full[:2]} == {0} and router.sent == 4
    for job in full:
        router.remove(job)
    home = sent_to(two, session("b"))
    other = 1 - home.worker  # type: ignore[operator]
    router.remove(home)
    assert router.pin([home.worker]) == home.worker  # type: ignore[list-item]
    away = sent_to(two, session("b"))
    assert away.worker == other
    router.remove(away)
    held_out = sent_to(two, session("c"), pinned=True)
    assert held_out.worker == home.worker
    router.remove(held_out)
    router.unpin()
    assert sent_to(two, session("c")).worker == home.worker
    router.remove_worker(other)
    assert sent_to(two, session("b")).worker == home.worker


def test_nothing_is_left_of_a_session_that_has_ended(two: Routed) -> None:
    running, waiting = sent_to(two, session("a")), two.router.add(session("a"), two.loop.create_future())
    two.router.end_session("a")
    assert running.request.session is waiting.request.session is None
    two.assign()
    assert two.router._sessions == {}
    two.router.remove_worker(0)
    two.assign()
    assert two.router._sessions == {}


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_of_events_every_request_is_at_one_place(seed: int) -> None:
    """Arrivals, answers, deaths and births at random: the sums hold after every one of them, and all end."""
    draw = random.Random(seed)
    routed = Routed(3, capacity=3)
    router, alive, open_jobs, ended = routed.router, {0, 1, 2}, {}, 0
    for _ in range(600):
        event = draw.choice(("add", "add", "end", "end", "close", "open", "assign"))
        if event == "add":
            job = routed.add(draw.choice((None, "a", "b", "c")), max_tokens=draw.randint(1, 20))
            open_jobs[job.number] = job
        elif event == "end" and open_jobs:
            job = open_jobs.pop(draw.choice(list(open_jobs)))
            assert router.remove(job) == job.worker
            ended += 1
        elif event == "close" and alive:
            worker = draw.choice(sorted(alive))
            alive.discard(worker)
            router.remove_worker(worker)
        elif event == "open" and len(alive) < 3:
            worker = min({0, 1, 2} - alive)
            alive.add(worker)
            router.add_worker(worker)
        else:
            routed.assign()
        sent = [job for job in open_jobs.values() if job.worker is not None]
        assert router.sent == len(sent) and router.waiting == len(open_jobs) - len(sent)
        assert router.reserved == sum(job.reserved for job in sent)
        assert all(router.find(job.number) is job and job.worker in alive for job in sent)
        homes: dict[str, set[int | None]] = {}
        for job in sent:
            if job.request.prefix_key is not None:
                homes.setdefault(job.request.prefix_key, set()).add(job.worker)
        assert all(len(workers) == 1 for workers in homes.values())
    assert ended > 100
    assert len(router.clear()) == len(open_jobs) and router.clear() == []
    routed.loop.close()


def test_a_smaller_priority_goes_first_also_after_a_death() -> None:
    routed = Routed(1, capacity=3)
    router = routed.router
    asked = [replace(request(), priority=priority) for priority in (2, 1, 2, 1, 0, 1)]
    jobs = [router.add(each, routed.loop.create_future()) for each in asked]
    assert [job.number for job in router.assign()] == [4, 1, 3]
    router.remove(jobs[1])
    assert [job.number for job in router.assign()] == [5]
    router.remove_worker(0)
    router.add_worker(0)
    assert [job.number for job in router.assign()] == [4, 3, 5]
    for job in (jobs[3], jobs[4], jobs[5]):
        router.remove(job)
    assert [job.number for job in router.assign()] == [0, 2]
    routed.loop.close()


# -- groups that choose their worker


def chosen(router: Router, loop: asyncio.AbstractEventLoop, groups: list[int]) -> dict[int, int | None]:
    jobs = {g: router.add(replace(request(str(g)), group=g), loop.create_future()) for g in groups}
    list(router.assign())
    return {group: job.worker for group, job in jobs.items()}


def test_in_sync_a_group_has_its_worker_whoever_is_up_free_or_pinned() -> None:
    """The second of two ranks: its groups are 1, 3, 5, ... and every other one is at the same worker, at once."""
    loop = asyncio.new_event_loop()
    router = Router(1, lambda group: group // 2 % 2)
    router.add_worker(1)  # it was faster
    assert chosen(router, loop, [1, 3, 5, 7]) == {1: None, 3: 1, 5: None, 7: 1}
    router.add_worker(0)
    assert [(job.request.group, job.worker) for job in router.assign()] == [(1, 0), (5, 0)]
    assert router.pin([0, 1]) == 0
    assert chosen(router, loop, [9, 11]) == {9: 1, 11: 1}  # steps go on beside the evaluation
    router.unpin()
    router.remove_worker(1)  # its successor gets what it had
    assert [job.request.group for job in router.assign()] == [9] and router.waiting == 3
    router.add_worker(1)
    assert [job.request.group for job in router.assign()] == [3, 7, 11]
    loop.close()


# -- a pinned worker


def test_the_emptiest_is_pinned_and_gets_pinned_requests_alone(two: Routed) -> None:
    two.add(max_tokens=50)
    old = two.add(max_tokens=5)
    assert two.assign() == {0: 0, 1: 1}
    assert two.router.pin([0, 1]) == 1 and two.router.unpinned_on_pinned_worker == 1
    held_out = [two.add(pinned=True) for _ in range(5)]
    others = [two.add(max_tokens=1) for _ in range(5)]
    two.assign()
    assert [job.worker for job in held_out] == [1, 1, 1, None, None]  # it is full with what it had before
    assert [job.worker for job in others] == [0, 0, 0, None, None]
    two.router.remove(old)
    assert two.assign() == {held_out[3].number: 1} and two.router.unpinned_on_pinned_worker == 0
    two.router.unpin()
    for job in held_out[:2]:
        two.router.remove(job)
    assert two.assign() == {held_out[4].number: 1, others[3].number: 1}  # whoever still waits is like any other


def test_a_group_whose_home_is_pinned_goes_on_elsewhere_and_stays_together(two: Routed) -> None:
    two.router.capacity = 8
    first = two.add("a", max_tokens=1)
    two.add(max_tokens=99)
    two.assign()
    assert first.worker == 0 and two.router.pin([0, 1]) == 0
    rest = [two.add("a") for _ in range(2)]
    two.assign()
    assert [job.worker for job in rest] == [1, 1]
    two.router.unpin()
    last = two.add("a", max_tokens=1)
    two.assign()
    assert last.worker == 1  # where the others are
    two.router.remove_worker(1)
    again = two.assign()
    assert {again[job.number] for job in (*rest, last)} == {0}
    for job in (first, *rest, last):
        two.router.remove(job)
    two.router.add_worker(1)
    new = two.add("a")
    two.assign()
    assert new.worker == 1  # it has no home any more, and the other worker has the request of 99 tokens


def test_what_a_pinned_worker_had_waits_for_its_successor_if_it_is_pinned(two: Routed) -> None:
    old = two.add("a")
    two.add(max_tokens=99)
    two.assign()
    assert two.router.pin([0, 1]) == 0
    held_out = two.add(pinned=True)
    two.assign()
    assert (old.worker, held_out.worker) == (0, 0)
    two.router.remove_worker(0)
    assert two.assign() == {old.number: 1} and held_out.worker is None
    two.router.add_worker(0)
    assert two.assign() == {held_out.number: 0}
