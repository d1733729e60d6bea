"""Host-side columns of the sequences that are running: one slot each, numpy, allocated once.

A *slot* is where a sequence's columns lie from admission to its end; its *row* is where its keys and values lie now.
Rows are kept compact, slots never move. The owner task and the lane take turns: while a closure runs, nobody else
looks in here.

Shape legend: R slots, C longest context.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from asyncrl.models.routing import RoutesShape
from asyncrl.records.routes import MISSING
from asyncrl.types import FinishReason, Generation, GenerationRequest, Int64Array, RoutesArray, SamplingParams

from .sampling import LogitChanges, RowParams, Sampled, keyed_uniform, seed_array

NO_TOKEN = -1

PrefixKey: TypeAlias = tuple[str, bytes]


def prefix_key(request: GenerationRequest) -> PrefixKey | None:
    """What requests with a common prompt have in common. The tokens are part of it: a broken promise shares nothing."""
    return None if request.prefix_key is None else (request.prefix_key, request.prompt_ids.tobytes())


class Sequences:
    """Columns by slot, and the map rows -> slots. Room for prompt and completion is there from the start."""

    def __init__(self, capacity: int, max_context: int, routes: RoutesShape | None = None) -> None:
        """`routes`: of the model, where it is recorded which experts each token went to."""
        self.capacity = capacity
        self.max_context = max_context
        self.tokens = np.zeros((capacity, max_context), dtype=np.int64)
        self.logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.sampled_logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.versions = np.zeros((capacity, max_context), dtype=np.int32)
        # [capacity, C, layers, k]; what is not known yet is -1, from `add` on.
        self.routes: RoutesArray | None = None
        if routes is not None:
            self.routes = np.empty((capacity, max_context, routes.layers, routes.k), dtype=routes.dtype)
        # By slot, of prompts that were computed again (`keep_first_routes`).
        self._first: dict[int, RoutesArray] = {}
        self.prompt = np.zeros(capacity, dtype=np.int64)  # prompt length
        self.length = np.zeros(capacity, dtype=np.int64)  # known tokens, prompt included
        self.cached = np.zeros(capacity, dtype=np.int64)  # positions whose keys and values the row holds
        self.limit = np.zeros(capacity, dtype=np.int64)  # prompt + max_tokens
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self._changing: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}  # by slot, with its stop tokens
        self.stops = np.full((capacity, 2), NO_TOKEN, dtype=np.int64)
        self.prefix_key: list[PrefixKey | None] = [None] * capacity
        self.row_of = np.full(capacity, -1, dtype=np.int64)
        self._slot_of_row = np.full(capacity, -1, dtype=np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self.count = 0

    @property
    def rows(self) -> Int64Array:
        """Slots of the rows [0..n), a view."""
        return self._slot_of_row[: self.count]

    @property
    def full(self) -> bool:
        """No slot is free."""
        return not self._free

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """Take a slot and the next row. The caller has checked that there is room."""
        slot, row = self._free.pop(), self.count
        sampling, size = request.sampling, int(request.prompt_ids.size)
        self.tokens[slot, :size] = request.prompt_ids
        self.prompt[slot] = self.length[slot] = size
        self.cached[slot] = 0
        self.limit[slot] = size + sampling.max_tokens
        if self.routes is not None:
            self.routes[slot, : self.limit[slot]] = MISSING
        self.seed[slot] = seed_array(request.seed)[0]
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        if sampling.changes_logits:
            self._changing[slot] = sampling, stop_ids
        if len(stop_ids) > self.stops.shape[1]:
            wider = np.full((self.capacity, len(stop_ids)), NO_TOKEN, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(stop_ids)] = stop_ids
        self.prefix_key[slot] = prefix_key(request)
        self._slot_of_row[row] = slot
        self.row_of[slot] = row
        self.count += 1
        return slot

    def remove(self, slot: int) -> tuple[int, int, int] | None:
        """Free a slot. The last row must move into its row: (source row, target row, positions), or None."""
        row, last = int(self.row_of[slot]), self.count - 1
        self.row_of[slot] = -1
        self.prefix_key[slot] = None
        self._first.pop(slot, None)
        self._changing.pop(slot, None)
        self._free.append(slot)
        self.count = last
        if row == last:
            return None
        moved = int(self._slot_of_row[last])
        self._slot_of_row[row] = moved
        self.row_of[moved] = row
        return last, row, int(self.cached[moved])

    def parameters(self, slots: Int64Array) -> RowParams:
        """Sampling numbers of the next token of each slot."""
        index = self.length[slots] - self.prompt[slots]
        changes = LogitChanges()
        for row, slot in enumerate(slots.tolist() if self._changing else ()):
            if slot in self._changing:
                sampling, stop_ids = self._changing[slot]
                changes.add(row, sampling, stop_ids, self.tokens[slot, : self.length[slot]], int(self.prompt[slot]))
        return RowParams(
            self.temperature[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
            keyed_uniform(self.seed[slots], index),
            changes,
        )

    def append(self, slots: Int64Array, sampled: Sampled, version: int) -> tuple[Int64Array, Int64Array]:
        """Store one token per slot. Returns the slots that hit a stop token, and those that only ran out of room."""
        place = self.length[slots]
        self.tokens[slots, place] = sampled.tokens
        self.logprobs[slots, place] = sampled.logprobs
        self.sampled_logprobs[slots, place] = sampled.sampled_logprobs
        self.versions[slots, place] = version
        self.cached[slots] = place
        self.length[slots] = place + 1
        stopped = (sampled.tokens[:, None] == self.stops[slots]).any(axis=1)
        ended = (place + 1 >= self.limit[slots]) & ~stopped
        return slots[stopped], slots[ended]

    def completion(self, slot: int) -> Int64Array:
        """Sampled tokens so far, a view."""
        return self.tokens[slot, self.prompt[slot] : self.length[slot]]

    def keep_first_routes(self, slot: int) -> None:
        """Before the prompt of a sequence is computed under other weights: if it has sampled tokens, it ends with the routes of
        now. `routes` itself goes with the cache, from which others may take the prompt."""
        if self.routes is not None and self.length[slot] > self.prompt[slot] and slot not in self._first:
            self._first[slot] = self.routes[slot, : self.prompt[slot] - 1].copy()

    def _routes_of(self, slot: int) -> RoutesArray | None:
        if self.routes is None:
            return None
        found: RoutesArray = self.routes[slot, : self.length[slot]].copy()
        if slot in self._first:
            found[: self.prompt[slot] - 1] = self._first[slot]
        return found

    def generation(self, slot: int, reason: FinishReason, stop: str | None = None) -> Generation:
        """Copies of the columns of a sequence that ended. `stop`: the stop string that ended it."""
        own = slice(int(self.prompt[slot]), int(self.length[slot]))
        return Generation(
            token_ids=self.tokens[slot, own].astype(np.int32),
            logprobs=self.logprobs[slot, own].copy(),
            sampled_logprobs=self.sampled_logprobs[slot, own].copy(),
            versions=self.versions[slot, own].copy(),
            finish_reason=reason,
            routed_experts=self._routes_of(slot),
            stop=stop,
        )
