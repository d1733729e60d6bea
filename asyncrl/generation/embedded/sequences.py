"""Data of the running sequences in numpy arrays on the host, allocated once.

A *slot* is the index of a sequence in these arrays; it does not change. A *row* is the index of its keys and values in the cache.
When a sequence ends, the last row moves into the free row, so rows are always [0..n). While a closure runs on the lane, only that
closure may use these arrays. Between closures the owner task uses them.

Shape legend: R slots, C longest context, n running sequences.
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
    """Equal for requests that share a prompt. It contains the tokens, so a wrong `prefix_key` of a caller does no harm."""
    return None if request.prefix_key is None else (request.prefix_key, request.prompt_ids.tobytes())


class Sequences:
    """Arrays indexed by slot, and the map from rows to slots."""

    def __init__(self, capacity: int, max_context: int, routes: RoutesShape | None = None) -> None:
        """`capacity`: number of slots. `max_context`: most tokens of a sequence. `routes`: shape of recorded routes, or None."""
        self.capacity = capacity
        self.max_context = max_context
        self.tokens = np.zeros((capacity, max_context), dtype=np.int64)
        self.logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.sampled_logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.versions = np.zeros((capacity, max_context), dtype=np.int32)
        # [R, C, layers, k]. `add` sets all entries of a slot to MISSING.
        self.routes: RoutesArray | None = None
        if routes is not None:
            self.routes = np.empty((capacity, max_context, routes.layers, routes.k), dtype=routes.dtype)
        # Slot -> routes [prompt - 1, layers, k], see `keep_first_routes`.
        self._first_prompt_routes: dict[int, RoutesArray] = {}
        self.prompt = np.zeros(capacity, dtype=np.int64)  # tokens of the prompt
        self.length = np.zeros(capacity, dtype=np.int64)  # tokens of prompt and completion so far
        self.cached = np.zeros(capacity, dtype=np.int64)  # tokens with keys and values in the cache
        self.limit = np.zeros(capacity, dtype=np.int64)  # prompt + max_tokens
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        # Slot -> (sampling, stop tokens), for requests that change logits.
        self._logit_changes: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}
        self.stops = np.full((capacity, 2), NO_TOKEN, dtype=np.int64)
        self.prefix_key: list[PrefixKey | None] = [None] * capacity
        self.row_of = np.full(capacity, -1, dtype=np.int64)
        self._slot_of_row = np.full(capacity, -1, dtype=np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self.count = 0

    @property
    def running_slots(self) -> Int64Array:
        """The slots of rows [0..n), in the order of the rows: int64 [n], a view."""
        return self._slot_of_row[: self.count]

    @property
    def full(self) -> bool:
        return not self._free

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """Assign a free slot and the next row to the request. Returns the slot. The caller has checked that a slot is free."""
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
            self._logit_changes[slot] = sampling, stop_ids
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
        """Free a slot. Returns the copy that the cache must make, (source row, target row, positions), or None."""
        row, last = int(self.row_of[slot]), self.count - 1
        self.row_of[slot] = -1
        self.prefix_key[slot] = None
        self._first_prompt_routes.pop(slot, None)
        self._logit_changes.pop(slot, None)
        self._free.append(slot)
        self.count = last
        if row == last:
            return None
        moved = int(self._slot_of_row[last])
        self._slot_of_row[row] = moved
        self.row_of[moved] = row
        return last, row, int(self.cached[moved])

    def parameters(self, slots: Int64Array) -> RowParams:
        """Sampling parameters for the next token of each slot. Row i of the result belongs to `slots[i]`."""
        index = self.length[slots] - self.prompt[slots]
        changes = LogitChanges()
        if self._logit_changes:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._logit_changes:
                    sampling, stop_ids = self._logit_changes[slot]
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
        """Store one token per slot. Returns the slots whose token is a stop token, and the other slots that reached their limit."""
        position = self.length[slots]
        self.tokens[slots, position] = sampled.tokens
        self.logprobs[slots, position] = sampled.logprobs
        self.sampled_logprobs[slots, position] = sampled.sampled_logprobs
        self.versions[slots, position] = version
        self.cached[slots] = position
        self.length[slots] = position + 1
        stopped = (sampled.tokens[:, None] == self.stops[slots]).any(axis=1)
        ended = (position + 1 >= self.limit[slots]) & ~stopped
        return slots[stopped], slots[ended]

    def completion(self, slot: int) -> Int64Array:
        """The sampled tokens so far, a view."""
        return self.tokens[slot, self.prompt[slot] : self.length[slot]]

    def keep_first_routes(self, slot: int) -> None:
        """Call this before a prompt is computed again with new weights. If the sequence has sampled tokens, its generation gets the
        prompt's first routes. `self.routes` gets the new ones, because other sequences may copy the new prompt."""
        if self.routes is not None and self.length[slot] > self.prompt[slot] and slot not in self._first_prompt_routes:
            self._first_prompt_routes[slot] = self.routes[slot, : self.prompt[slot] - 1].copy()

    def _routes_of(self, slot: int) -> RoutesArray | None:
        if self.routes is None:
            return None
        routes: RoutesArray = self.routes[slot, : self.length[slot]].copy()
        if slot in self._first_prompt_routes:
            routes[: self.prompt[slot] - 1] = self._first_prompt_routes[slot]
        return routes

    def generation(self, slot: int, reason: FinishReason, stop: str | None = None) -> Generation:
        """The finished sequence, in copies. `stop`: the stop string that ended it."""
        completion = slice(int(self.prompt[slot]), int(self.length[slot]))
        return Generation(
            token_ids=self.tokens[slot, completion].astype(np.int32),
            logprobs=self.logprobs[slot, completion].copy(),
            sampled_logprobs=self.sampled_logprobs[slot, completion].copy(),
            versions=self.versions[slot, completion].copy(),
            finish_reason=reason,
            routed_experts=self._routes_of(slot),
            stop=stop,
        )
