"""Data of the running sequences in numpy arrays on the host, allocated once.

A *slot* is the index of a sequence in these arrays; it does not change. A *row* is the index of its keys and values in the cache.
When a sequence ends, the last row moves into the free row, so running rows are always [0..n). While a closure runs on the lane,
only that closure may use these arrays. Between closures the owner task uses them.

A finished sequence whose session may go on is *kept*: it stays in its slot, and its row becomes one of the kept rows [n..n + k)
behind the running rows. The next request of the session takes over slot and row, or copies the beginning of the row. The methods
swap rows only in these arrays, and append each swap to `moves`. The caller then swaps the rows of the cache.

Shape legend: R slots, C longest context, n running sequences, k kept sequences.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from asyncrl.models.routing import RoutesShape
from asyncrl.records.check import MISSING
from asyncrl.types import FinishReason, Generation, GenerationRequest, Int64Array, RoutesArray, SamplingParams

from .sampling import LogitChanges, RowParams, Sampled, keyed_uniform, seed_array

NO_TOKEN = -1

PrefixKey: TypeAlias = tuple[str, bytes]
# Two rows that are swapped, and how many positions each of them holds: (row, other, length, other length).
Move: TypeAlias = tuple[int, int, int, int]


def prefix_key(request: GenerationRequest) -> PrefixKey | None:
    """Equal for requests that share a prompt; None: no sharing. The key has the tokens, so a caller's wrong key does no harm."""
    return None if request.prefix_key is None else (request.prefix_key, request.prompt_ids.tobytes())


class Sequences:
    """Arrays indexed by slot, and the map from rows to slots. See the module docstring."""

    def __init__(self, capacity: int, max_context: int, routes: RoutesShape | None = None) -> None:
        """`capacity`: number of slots. `max_context`: maximum length of a sequence. `routes`: shape of recorded routes, or None."""
        self.capacity = capacity
        self.max_context = max_context
        self.tokens = np.zeros((capacity, max_context), dtype=np.int64)
        self.logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.sampled_logprobs = np.zeros((capacity, max_context), dtype=np.float32)
        self.versions = np.zeros((capacity, max_context), dtype=np.int32)
        # [R, C, layers, k]. MISSING: the routes of this token are not known yet.
        self.routes: RoutesArray | None = None
        if routes is not None:
            self.routes = np.empty((capacity, max_context, routes.layers, routes.k), dtype=routes.dtype)
        # Slot -> routes [prompt_length - 1, layers, k], see `keep_first_routes`.
        self._routes_of_first_prefill: dict[int, RoutesArray] = {}
        self.prompt_length = np.zeros(capacity, dtype=np.int64)
        self.length = np.zeros(capacity, dtype=np.int64)  # number of prompt tokens and sampled tokens
        self.cached = np.zeros(capacity, dtype=np.int64)  # number of tokens with keys and values in the cache
        # prompt + max_tokens; of a kept sequence the number of its tokens
        self.limit = np.zeros(capacity, dtype=np.int64)
        self.session: list[str | None] = [None] * capacity
        # How many tokens of the prompt have keys and values that an earlier request of the session left in the cache.
        self.reused = np.zeros(capacity, dtype=np.int64)
        # Version of the weights that computed the first cached token. No other cached token has an older version.
        self.oldest = np.zeros(capacity, dtype=np.int32)
        # Index of the row's first token that this or an earlier request samples. The token's version is at most `oldest`.
        self.first_sampled = np.zeros(capacity, dtype=np.int64)
        self.kept: dict[int, None] = {}  # slots of kept sequences, oldest first
        self.moves: list[Move] = []
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.ones(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        # Slot -> (sampling, stop tokens), for requests that change logits.
        self._logit_changes: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}
        self.stops = np.full((capacity, 2), NO_TOKEN, dtype=np.int64)  # stop tokens, then NO_TOKEN
        self.prefix_key: list[PrefixKey | None] = [None] * capacity
        self.row_of = np.full(capacity, -1, dtype=np.int64)
        self._slot_of_row = np.full(capacity, -1, dtype=np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self.count = 0  # n, the number of running sequences

    @property
    def running_slots(self) -> Int64Array:
        """The slots of rows [0..n), in the order of the rows: int64 [n], a view."""
        return self._slot_of_row[: self.count]

    @property
    def occupied_slots(self) -> Int64Array:
        """The slots of rows [0..n + k), in the order of the rows: int64 [n + k], a view."""
        return self._slot_of_row[: self.count + len(self.kept)]

    @property
    def longest(self) -> int:
        """Positions that the longest occupied row needs."""
        return int(self.limit[self.occupied_slots].max(initial=0))

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """Give the request row n and a slot. A kept row n moves to row n + k. At least one slot must be free. Returns the slot."""
        slot = self._free.pop()
        self._swap(self.count, self.count + len(self.kept))
        self._slot_of_row[self.count] = slot
        self.row_of[slot] = self.count
        self.count += 1
        self._fill(slot, request, stop_ids, 0)
        return slot

    def resume(self, slot: int, request: GenerationRequest, stop_ids: tuple[int, ...], reused: int) -> None:
        """Give the request the slot and row of a kept sequence. The first `reused` cached tokens of the row stay."""
        del self.kept[slot]
        self._swap(int(self.row_of[slot]), self.count)
        self.count += 1
        self._fill(slot, request, stop_ids, reused)

    def inherit(self, slot: int, source: int, reused: int) -> None:
        """Let the new `slot` begin with the first `reused` cached tokens of `source`. The caller copies the row of the cache."""
        self.cached[slot] = self.reused[slot] = reused
        self.oldest[slot] = self.oldest[source]
        self.prefix_key[slot] = None
        if self.first_sampled[source] < reused:
            self.first_sampled[slot] = self.first_sampled[source]
        if self.routes is not None:
            self.routes[slot, :reused] = self.routes[source, :reused]

    def _fill(self, slot: int, request: GenerationRequest, stop_ids: tuple[int, ...], reused: int) -> None:
        sampling, size = request.sampling, int(request.prompt_ids.size)
        self.tokens[slot, :size] = request.prompt_ids
        self.prompt_length[slot] = self.length[slot] = size
        self.cached[slot] = self.reused[slot] = reused
        self.limit[slot] = size + sampling.max_tokens
        self.session[slot] = request.session
        if self.first_sampled[slot] >= reused:
            self.first_sampled[slot] = size
        if self.routes is not None:
            self.routes[slot, reused : self.limit[slot]] = MISSING
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
        # Other sequences copy a shared prompt, whose keys and values must be of one version. Reused tokens may be of another.
        self.prefix_key[slot] = None if reused else prefix_key(request)

    def remove(self, slot: int) -> None:
        """Free the slot of a running or a kept sequence."""
        row, last = int(self.row_of[slot]), self.count - 1
        kept = slot in self.kept
        self._clear(slot)
        self.session[slot] = None
        self._free.append(slot)
        self.row_of[slot] = self._slot_of_row[row] = -1
        # The last running row fills the hole of a running row. Then the last kept row fills the hole among the kept rows.
        if kept:
            del self.kept[slot]
        else:
            self._swap(row, last)
            self.count, row = last, last
        self._swap(row, self.count + len(self.kept))

    def keep(self, slot: int) -> None:
        """Keep slot and row of a running sequence that has just finished. It no longer counts as running."""
        self._clear(slot)
        self._swap(int(self.row_of[slot]), self.count - 1)
        self.count -= 1
        self.kept[slot] = None
        self.limit[slot] = self.length[slot]

    def _clear(self, slot: int) -> None:
        self.prefix_key[slot] = None
        self._routes_of_first_prefill.pop(slot, None)
        self._logit_changes.pop(slot, None)

    def _swap(self, row: int, other: int) -> None:
        """Swap two rows, of which one may be empty. Appends to `moves`."""
        slots = [int(self._slot_of_row[index]) for index in (row, other)]
        if row == other or max(slots) < 0:
            return
        self._slot_of_row[[other, row]] = slots
        for slot, target in zip(slots, (other, row), strict=True):
            if slot >= 0:
                self.row_of[slot] = target
        length, other_length = (int(self.cached[slot]) if slot >= 0 else 0 for slot in slots)
        self.moves.append((row, other, length, other_length))

    def parameters(self, slots: Int64Array) -> RowParams:
        """Sampling parameters for the next token of each slot. Row i of the result belongs to `slots[i]`."""
        index = self.length[slots] - self.prompt_length[slots]
        changes = LogitChanges()
        if self._logit_changes:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._logit_changes:
                    sampling, stop_ids = self._logit_changes[slot]
                    tokens = self.tokens[slot, : self.length[slot]]
                    changes.add(row, sampling, stop_ids, tokens, int(self.prompt_length[slot]))
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
        return self.tokens[slot, self.prompt_length[slot] : self.length[slot]]

    def keep_first_routes(self, slot: int) -> None:
        """Call this before a prompt is computed again with new weights. If the sequence has sampled tokens, its generation gets the
        routes of the prompt's first computation. `self.routes` gets the new routes: other sequences may copy the new prompt."""
        if (
            self.routes is not None
            and self.length[slot] > self.prompt_length[slot]
            and slot not in self._routes_of_first_prefill
        ):
            self._routes_of_first_prefill[slot] = self.routes[slot, : self.prompt_length[slot] - 1].copy()

    def _routes_of(self, slot: int) -> RoutesArray | None:
        if self.routes is None:
            return None
        routes: RoutesArray = self.routes[slot, : self.length[slot]].copy()
        if slot in self._routes_of_first_prefill:
            routes[: self.prompt_length[slot] - 1] = self._routes_of_first_prefill[slot]
        return routes

    def generation(self, slot: int, reason: FinishReason, stop: str | None = None) -> Generation:
        """The finished sequence, in copies. `stop`: the stop string that ended the sequence."""
        completion = slice(int(self.prompt_length[slot]), int(self.length[slot]))
        return Generation(
            token_ids=self.tokens[slot, completion].astype(np.int32),
            logprobs=self.logprobs[slot, completion].copy(),
            sampled_logprobs=self.sampled_logprobs[slot, completion].copy(),
            versions=self.versions[slot, completion].copy(),
            finish_reason=reason,
            routed_experts=self._routes_of(slot),
            stop=stop,
        )
