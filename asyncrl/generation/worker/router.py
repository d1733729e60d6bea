"""Which worker gets which request. Nothing here waits or talks to anybody.

Requests that share a prompt (`prefix_key`) go to one worker, as long as any of them is there: the prompt is prefilled once. Any
other goes to the worker with the fewest reserved tokens (prompt + max_tokens of what it has). A worker is sent what it can run
and a small reserve, so that it never waits for the node; the rest stays here, by priority and then in the order of arrival, and
can still go to whoever is free first, or lives longest.

In `preset: sync` the group of a request chooses its worker, which gets it at once: whoever is free first, or up first, would meet
other company in a rerun.

One worker may be pinned: it gets pinned requests alone, and they go to nobody else. What it had before stays there; groups that
were at home there go on elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from asyncrl.types import Generation, GenerationRequest


@dataclass(eq=False, slots=True)
class RoutedJob:
    """One request, the future that its caller waits for, and where it is."""

    number: int  # in the order of arrival, of this node
    request: GenerationRequest
    future: asyncio.Future[Generation]
    worker: int | None = None  # None: it waits here
    pinned: bool = False  # for the pinned worker alone

    @property
    def reserved(self) -> int:
        """Tokens that it may take."""
        return int(self.request.prompt_ids.size) + self.request.sampling.max_tokens


@dataclass(eq=False, slots=True)
class _Load:
    """What one worker in service has."""

    jobs: dict[int, RoutedJob] = field(default_factory=dict)  # by number
    reserved: int = 0


class Router:
    """`capacity`: requests that a worker has at most, running ones and its reserve. `worker_of`: a group's; None: any."""

    def __init__(self, capacity: int, worker_of: Callable[[int], int] | None = None) -> None:
        self.capacity = capacity
        self._worker_of = worker_of
        self._numbers = itertools.count()
        self._waiting: dict[int, RoutedJob] = {}  # by number; in the order in which they are to be sent
        self._loads: dict[int, _Load] = {}  # workers in service
        # Prefix key -> its worker, and how many of its requests are at workers: there, and at one that was pinned meanwhile.
        self._homes: dict[str, tuple[int, int]] = {}
        # The worker that gets pinned requests alone, in service or not.
        self.pinned: int | None = None

    @property
    def waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._waiting)

    @property
    def serving(self) -> int:
        """How many workers are in service."""
        return len(self._loads)

    def serves(self, worker: int) -> bool:
        """Whether it is in service."""
        return worker in self._loads

    @property
    def sent(self) -> int:
        """Requests that workers have."""
        return sum(len(load.jobs) for load in self._loads.values())

    @property
    def reserved(self) -> int:
        """Tokens of prompts and completions that those may take."""
        return sum(load.reserved for load in self._loads.values())

    def add(self, request: GenerationRequest, future: asyncio.Future[Generation], *, pinned: bool = False) -> RoutedJob:
        """A new request; it waits. `pinned`: for the pinned worker."""
        job = RoutedJob(next(self._numbers), request, future, pinned=pinned)
        last = next(reversed(self._waiting.values()), job)
        self._waiting[job.number] = job
        if last.request.priority > request.priority:
            self._sort(self._waiting)
        return job

    def open(self, worker: int) -> None:
        """The worker is in service."""
        self._loads[worker] = _Load()

    def pin(self, workers: Iterable[int]) -> int:
        """Pin that of these with the fewest reserved tokens. Returns which."""
        assert self.pinned is None, "one at a time"
        self.pinned = min(workers, key=lambda worker: (self._loads[worker].reserved, worker))
        return self.pinned

    def unpin(self) -> None:
        """It gets what any other gets; a pinned request that somebody still waits for is one like any other."""
        self.pinned = None
        for job in self._everybody():
            job.pinned = False

    @property
    def unpinned_at_pinned(self) -> int:
        """Requests that the pinned worker had before and has not answered."""
        load = None if self.pinned is None else self._loads.get(self.pinned)
        return 0 if load is None else sum(not job.pinned for job in load.jobs.values())

    def close(self, worker: int) -> int:
        """It is not any more: what it had waits again, in the old order, before what came later. Returns how many."""
        load = self._loads.pop(worker, None)
        if load is None or not load.jobs:
            return 0
        for job in load.jobs.values():
            job.worker = None
            self._leave_home(job)
        self._sort(load.jobs | self._waiting)
        return len(load.jobs)

    def assign(self) -> Iterator[RoutedJob]:
        """Give waiting requests to workers, in their order; yields each with its `worker` set. Whose home is full waits for it."""
        for job in list(self._waiting.values()):
            if self._worker_of is None and not any(self._has_room(load) for load in self._loads.values()):
                return
            worker = self._place(job)
            if worker is None:
                continue
            del self._waiting[job.number]
            load = self._loads[worker]
            load.jobs[job.number] = job
            load.reserved += job.reserved
            job.worker = worker
            key = job.request.prefix_key
            if key is not None:
                self._homes[key] = worker, self._homes.get(key, (worker, 0))[1] + 1
            yield job

    def find(self, number: int) -> RoutedJob | None:
        """The job of that number that a worker has."""
        return next((load.jobs[number] for load in self._loads.values() if number in load.jobs), None)

    def end(self, job: RoutedJob) -> int | None:
        """It was answered or given up. Returns the worker that had it."""
        if job.worker is None:
            self._waiting.pop(job.number, None)
            return None
        load = self._loads.get(job.worker)
        if load is None or load.jobs.pop(job.number, None) is None:
            return None
        load.reserved -= job.reserved
        self._leave_home(job)
        return job.worker

    def forget(self) -> list[RoutedJob]:
        """Everybody who waits for an answer; nobody does any more."""
        jobs = self._everybody()
        self._waiting.clear()
        self._loads.clear()
        self._homes.clear()
        return jobs

    def _everybody(self) -> list[RoutedJob]:
        return [*self._waiting.values(), *(job for load in self._loads.values() for job in load.jobs.values())]

    def _sort(self, waiting: dict[int, RoutedJob]) -> None:
        self._waiting = dict(sorted(waiting.items(), key=lambda item: (item[1].request.priority, item[0])))

    def _place(self, job: RoutedJob) -> int | None:
        loads = self._loads
        if job.pinned:
            return self.pinned if self.pinned in loads and self._has_room(loads[self.pinned]) else None
        if self._worker_of is not None and job.request.group is not None:
            chosen = self._worker_of(job.request.group)
            # Steps go on beside an evaluation: it would be no use to wait.
            if chosen == self.pinned:
                chosen = min((worker for worker in loads if worker != chosen), default=chosen)
            return chosen if self.serves(chosen) and chosen != self.pinned else None
        home = self._homes.get(job.request.prefix_key or "")
        if job.request.prefix_key is not None and home is not None and home[0] in loads and home[0] != self.pinned:
            return home[0] if self._has_room(loads[home[0]]) else None
        others = ((worker, load) for worker, load in loads.items() if worker != self.pinned)
        free = [(load.reserved, worker) for worker, load in others if self._has_room(load)]
        return min(free)[1] if free else None

    def _has_room(self, load: _Load) -> bool:
        return len(load.jobs) < self.capacity

    def _leave_home(self, job: RoutedJob) -> None:
        key = job.request.prefix_key
        if key is None or key not in self._homes:
            return
        worker, count = self._homes[key]
        if count > 1:
            self._homes[key] = worker, count - 1
        else:
            del self._homes[key]
