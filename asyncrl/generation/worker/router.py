"""Chooses the worker of each request. The router only keeps lists: it never waits and sends nothing.

* Requests with the same `prefix_key` go to one worker, their *home*, as long as that worker has at least one of these
  requests. So their prompt is prefilled once.
* A worker may keep the keys and values of a session. So the session's next request goes to the same worker, unless that worker is
  full or has far more reserved tokens (prompt + max_tokens) than another worker.
* Other requests go to the worker with the fewest reserved tokens.
* A worker gets at most `capacity` requests: those that it can run, and a small reserve so that it never waits for the rank. All
  further requests wait in the router, the smallest priority first, then in the order of arrival.

In `preset: sync` the group of a request decides its worker. If that worker is in service, it gets the request at once, even beyond
`capacity`. So the requests that a worker runs together do not depend on timing.

At most one worker is *pinned* to a version (pin.py). It keeps its earlier requests and gets only pinned requests, which no other
worker gets. Groups whose home is the pinned worker get another home.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from asyncrl.types import Generation, GenerationRequest

# A session stays at its worker if that worker's reserved tokens are at most this multiple of the reserved tokens that the least
# loaded worker would have with the request.
_MAX_LOAD_RATIO = 2


@dataclass(eq=False, slots=True)
class RoutedJob:
    """One request, and the future that its caller awaits."""

    number: int  # from 0, in the order of the calls
    request: GenerationRequest
    future: asyncio.Future[Generation]
    worker: int | None = None  # None: the request waits in the router
    pinned: bool = False  # only for the pinned worker

    @property
    def reserved(self) -> int:
        """Tokens of the prompt and of the longest possible completion."""
        return int(self.request.prompt_ids.size) + self.request.sampling.max_tokens


@dataclass(eq=False, slots=True)
class _Load:
    """The requests of one worker."""

    jobs: dict[int, RoutedJob] = field(default_factory=dict)  # by number
    reserved: int = 0  # tokens
    prefixes: Counter[str | None] = field(default_factory=Counter)  # number of `jobs` with each prefix key


class Router:
    """See the module docstring. `worker_of`: returns the worker of a group (`preset: sync`); None: the router chooses."""

    def __init__(self, capacity: int, worker_of: Callable[[int], int] | None = None) -> None:
        self.capacity = capacity
        self._worker_of = worker_of
        self._numbers = itertools.count()
        self._waiting: dict[int, RoutedJob] = {}  # by number, in the order of sending
        self._loads: dict[int, _Load] = {}  # by worker, only workers in service
        self._sessions: dict[str, int] = {}  # session -> the worker of its last request
        self.pinned: int | None = None  # the pinned worker, even if it is out of service

    @property
    def waiting(self) -> int:
        """Number of requests that no worker has."""
        return len(self._waiting)

    @property
    def serving(self) -> int:
        """Number of workers in service."""
        return len(self._loads)

    def serves(self, worker: int) -> bool:
        return worker in self._loads

    @property
    def sent(self) -> int:
        """Number of requests that workers have."""
        return sum(len(load.jobs) for load in self._loads.values())

    @property
    def reserved(self) -> int:
        """Reserved tokens of all sent requests."""
        return sum(load.reserved for load in self._loads.values())

    def add(self, request: GenerationRequest, future: asyncio.Future[Generation], *, pinned: bool = False) -> RoutedJob:
        """Queue a request. `pinned`: only the pinned worker may get the request."""
        job = RoutedJob(next(self._numbers), request, future, pinned=pinned)
        last = next(reversed(self._waiting.values()), job)
        self._waiting[job.number] = job
        if last.request.priority > request.priority:
            self._sort(self._waiting)
        return job

    def add_worker(self, worker: int) -> None:
        self._loads[worker] = _Load()

    def pin(self, workers: Iterable[int]) -> int:
        """Pin the worker among `workers` that has the fewest reserved tokens, and return its number."""
        assert self.pinned is None, "only one worker can be pinned"
        self.pinned = min(workers, key=lambda worker: (self._loads[worker].reserved, worker))
        return self.pinned

    def unpin(self) -> None:
        """End the pin. Unanswered pinned requests become ordinary requests."""
        self.pinned = None
        for job in self._all_jobs():
            job.pinned = False

    @property
    def unpinned_on_pinned_worker(self) -> int:
        """Number of unanswered requests that the pinned worker got before the pin."""
        load = None if self.pinned is None else self._loads.get(self.pinned)
        return 0 if load is None else sum(not job.pinned for job in load.jobs.values())

    def remove_worker(self, worker: int) -> None:
        """Take the worker out of service. Its requests wait again, in their original order."""
        load = self._loads.pop(worker, _Load())
        self._sessions = {session: home for session, home in self._sessions.items() if home != worker}
        for job in load.jobs.values():
            job.worker = None
        self._sort(load.jobs | self._waiting)

    def assign(self) -> Iterator[RoutedJob]:
        """Assign waiting requests to workers, in order, and yield each request after setting its `worker`. A request whose home is
        full goes on waiting for its home."""
        for job in list(self._waiting.values()):
            if self._worker_of is None and not any(self._has_room(load) for load in self._loads.values()):
                return
            worker = self._choose_worker(job)
            if worker is None:
                continue
            del self._waiting[job.number]
            load = self._loads[worker]
            load.jobs[job.number] = job
            load.reserved += job.reserved
            job.worker = worker
            load.prefixes[job.request.prefix_key] += 1
            if job.request.session is not None:
                self._sessions[job.request.session] = worker
            yield job

    def end_session(self, session: str) -> None:
        """Forget the session and its worker, also in unanswered requests."""
        self._sessions.pop(session, None)
        for job in self._all_jobs():
            if job.request.session == session:
                job.request = replace(job.request, session=None)

    def find(self, number: int) -> RoutedJob | None:
        """The request of this number. None if no worker has the request."""
        return next((load.jobs[number] for load in self._loads.values() if number in load.jobs), None)

    def remove(self, job: RoutedJob) -> int | None:
        """Remove an answered or cancelled request. Returns its worker, or None if no worker has the request."""
        if job.worker is None:
            self._waiting.pop(job.number, None)
            return None
        load = self._loads.get(job.worker)
        if load is None or load.jobs.pop(job.number, None) is None:
            return None
        load.reserved -= job.reserved
        load.prefixes[key := job.request.prefix_key] -= 1
        if not load.prefixes[key]:
            del load.prefixes[key]
        return job.worker

    def clear(self) -> list[RoutedJob]:
        """Remove all requests and workers. Returns the unanswered requests."""
        jobs = self._all_jobs()
        self._waiting.clear()
        self._loads.clear()
        self._sessions.clear()
        return jobs

    def _all_jobs(self) -> list[RoutedJob]:
        return [*self._waiting.values(), *(job for load in self._loads.values() for job in load.jobs.values())]

    def _sort(self, waiting: dict[int, RoutedJob]) -> None:
        self._waiting = dict(sorted(waiting.items(), key=lambda item: (item[1].request.priority, item[0])))

    def _choose_worker(self, job: RoutedJob) -> int | None:
        """The worker for this request, or None if the request must wait."""
        loads = self._loads
        if job.pinned:
            return self.pinned if self.pinned in loads and self._has_room(loads[self.pinned]) else None
        if self._worker_of is not None and job.request.group is not None:
            chosen = self._worker_of(job.request.group)
            # The pinned worker is busy with an evaluation. Training needs this request meanwhile, so another worker gets it.
            if chosen == self.pinned:
                return min((worker for worker in loads if worker != chosen), default=None)
            return chosen if self.serves(chosen) else None
        key = job.request.prefix_key
        # A group whose home was pinned for a while has requests at two workers. The home is the worker with most of these requests.
        counts = {w: load.prefixes[key] for w, load in loads.items() if w != self.pinned and load.prefixes[key]}
        if key is not None and counts:
            home = max(counts, key=counts.__getitem__)
            return home if self._has_room(loads[home]) else None
        free = [worker for worker, load in loads.items() if worker != self.pinned and self._has_room(load)]
        least = min(free, key=lambda worker: (loads[worker].reserved, worker), default=None)
        last = None if job.request.session is None else self._sessions.get(job.request.session)
        if least is None or last not in free:
            return least
        return last if loads[last].reserved <= _MAX_LOAD_RATIO * (loads[least].reserved + job.reserved) else least

    def _has_room(self, load: _Load) -> bool:
        return len(load.jobs) < self.capacity
