"""The embedded engine's computation on the lane, in two kinds of closures:

    prefill(): computes keys and values of at most `prefill_tokens` known tokens (prompt tokens and sampled tokens), packed
    decode():  samples one token for every running sequence; the input of a sequence is its last known token

A sequence can decode when the cache holds all its known tokens but the last. Until then the sequence needs prefill. After a weight
update, sequences without sampled tokens need prefill again. With `kv_after_update: recompute` all sequences do.

Versions: each closure reads `policy.version` at its start, and all its tokens get that version. The lane runs one closure at a
time, so the weights cannot change before the closure's end.

Shared prompts: sequences with equal `prefix_key` have equal prompts. While one of them runs, the keys and values of the prompt are
computed once per version. The other sequences copy these keys and values from the row of a running sequence.

Sessions: the row of a finished request is kept for the session's next request. Of the session's rows the next request uses the row
with the longest prefix of the new prompt, and computes only the tokens after this prefix. If the prefix is all of a kept row, the
request takes over the row. If the prefix is a part of a kept row, the request copies the part, or takes over the row if a copy has
no room. From a running row the request always copies. Kept rows are dropped, oldest first, if running sequences need rows or
positions. A prefix is computed again if it is more than `kept_max_age` versions old. A prefix without sampled tokens is computed
again after each change of the version, because no token tells its age.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.copying import to_device
from asyncrl.models.policy import PolicyModel
from asyncrl.models.routes import Routes
from asyncrl.types import GenerationRequest, Int64Array

from .cache import KVCache
from .graphs import DecodeGraphs
from .plans import DecodePlan, ExtendPlan, PromptPiece
from .sampling import Sampled, Sampler
from .sequences import PrefixKey, Sequences

# The LM head computes logits of this many rows at a time. If no filter needs a sort, the logits are freed before the next rows.
HEAD_ROWS = 128


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a decode step. `rows == 0`: nothing was sampled, because a sequence needs prefill first."""

    rows: int  # number of sampled tokens
    stopped: tuple[int, ...] = ()  # slots that ended by a stop token
    ended: tuple[int, ...] = ()  # slots that ended by length


def disable_training(policy: PolicyModel) -> None:
    """Put all modules into eval mode. In training mode a layer with activation checkpointing ignores the cache."""
    if policy.module.training:  # `eval` visits all modules, which takes a millisecond
        policy.module.eval()
    policy.set_training(False)


class Core:
    """The running batch. The owner task calls the methods of the first section, between closures. The lane calls the others."""

    def __init__(
        self,
        policy: PolicyModel,
        cache: KVCache,
        sequences: Sequences,
        *,
        prefill_tokens: int,
        recompute: bool,
        kept_max_age: int | None = None,
    ) -> None:
        """`recompute`: whether `kv_after_update` is `recompute`. `kept_max_age`: see the module docstring; None: no row is kept."""
        self.policy = policy
        self.cache = cache
        self.sequences = sequences
        self.sampler = Sampler()
        self.graphs = DecodeGraphs.of(policy, cache, sequences.max_context)
        self.prefill_tokens = prefill_tokens
        self.recompute = recompute
        self.kept_max_age = kept_max_age
        self.version = policy.version
        self.tokens_prefilled = 0
        self.tokens_copied = 0
        # Shared prompt -> the slots whose rows hold the prompt without its last token, computed with the current version.
        self._holders: dict[PrefixKey, set[int]] = {}
        # Copies of rows, swaps of rows, and changes of the cache's shape, in order. The next closure makes them first.
        self._pending_changes: list[Callable[[], None]] = []

    # -- between closures, on the loop --------------------------------------------------------------------------------

    @property
    def needs_prefill(self) -> bool:
        """Whether a running sequence needs prefill before it can decode."""
        columns = self.sequences
        slots = columns.running_slots
        return bool((columns.cached[slots] < columns.length[slots] - 1).any())

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """Assign a slot and a row to the request. Returns the slot. The caller has checked that running sequences leave room."""
        columns = self.sequences
        limit = int(request.prompt_ids.size) + request.sampling.max_tokens
        source, reused = self._find_prefix(request)
        # A kept row is taken over if the request needs all of it, or if no room is left for a copy.
        if source in columns.kept and (reused == columns.cached[source] or not self._has_room(1, limit)):
            columns.resume(source, request, stop_ids, reused)
            self._queue_moves()
            self._make_room(0, limit)
            return source
        self._make_room(1, limit)
        # Moves and copies may reach a row that the cache's shape does not have yet.
        if columns.kept or reused:
            self._pending_changes.append(self._fit(columns.occupied_slots.size + 1, max(columns.longest, limit)))
        slot = columns.add(request, stop_ids)
        self._queue_moves()
        if reused:
            columns.inherit(slot, source, reused)
            rows = int(columns.row_of[source]), int(columns.row_of[slot])
            self._pending_changes.append(partial(self.cache.copy_row, *rows, reused))
        return slot

    def end_session(self, session: str) -> None:
        """Drop the rows that are kept for the session. The rows of its running requests will not be kept."""
        columns = self.sequences
        for slot in columns.occupied_slots.tolist():
            if columns.session[slot] == session:
                columns.session[slot] = None
                if slot in columns.kept:
                    self._drop(slot)

    def _find_prefix(self, request: GenerationRequest) -> tuple[int, int]:
        """The slot of the request's session whose cache has the longest usable beginning of the prompt, and the length of that
        beginning (0: none is usable). Drops kept rows of the session that are too old."""
        # The longest beginning so far: its length, whether it is a whole kept row, its slot.
        columns, best = self.sequences, (0, False, -1)
        if request.session is None or self.kept_max_age is None:
            return -1, 0
        for slot in columns.occupied_slots.tolist():
            if columns.session[slot] != request.session:
                continue
            if slot in columns.kept and self.version - columns.oldest[slot] > self.kept_max_age:
                self._drop(slot)
                continue
            comparable = min(int(columns.cached[slot]), int(request.prompt_ids.size) - 1)
            differs = np.flatnonzero(columns.tokens[slot, :comparable] != request.prompt_ids[:comparable])
            length = int(differs[0]) if differs.size else comparable
            if length and self._is_usable(length, int(columns.oldest[slot]), int(columns.first_sampled[slot])):
                best = max(best, (length, slot in columns.kept and length == columns.cached[slot], slot))
        return best[2], best[0]

    def _is_usable(self, length: int, oldest: int, first_sampled: int) -> bool:
        """Whether a request may use this cached prefix, see the module docstring. `oldest`, `first_sampled`: see `Sequences`."""
        age = self.version - oldest
        return age == 0 or (self.kept_max_age is not None and age <= self.kept_max_age and length > first_sampled)

    def _has_room(self, rows: int, limit: int) -> bool:
        """Whether the cache has room for `rows` more rows, if every row has at least `limit` positions."""
        columns = self.sequences
        rows += columns.occupied_slots.size
        return rows <= columns.capacity and rows * max(columns.longest, limit) <= self.cache.total_positions

    def _make_room(self, rows: int, limit: int) -> None:
        """Drop kept rows, oldest first, until there is room."""
        columns = self.sequences
        while columns.kept and not self._has_room(rows, limit):
            self._drop(next(iter(columns.kept)))

    def _drop(self, slot: int) -> None:
        self.sequences.remove(slot)
        self._queue_moves()

    def _queue_moves(self) -> None:
        self._pending_changes += [partial(self.cache.swap_rows, *move) for move in self.sequences.moves]
        self.sequences.moves.clear()

    def remove(self, slot: int, *, keep_row: bool = False) -> None:
        """Remove a finished or aborted sequence. `keep_row`: keep slot and row if the request has a session."""
        columns, key = self.sequences, self.sequences.prefix_key[slot]
        if key is not None and (holders := self._holders.get(key)) is not None:
            holders.discard(slot)
            if not holders:
                del self._holders[key]
        if keep_row and self.kept_max_age is not None and columns.session[slot] is not None and columns.cached[slot]:
            columns.keep(slot)
        else:
            columns.remove(slot)
        self._queue_moves()

    # -- on the lane --------------------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Make the pending changes. After a change of version, mark the tokens that need prefill again. Returns the version."""
        version = self.policy.version
        for change in self._pending_changes:
            change()
        self._pending_changes.clear()
        if (rows := self.sequences.occupied_slots.size) > 0:
            self._fit(rows, self.sequences.longest)()
        if version != self.version:
            self.version = version
            self._holders.clear()
            columns = self.sequences
            slots = columns.running_slots
            # Without `recompute`, only a prompt without sampled tokens is computed again. So the prompt's cache entries have the
            # first sampled token's version, except those of a reused prefix. A sampled token's entry has the next token's version.
            stale = slots if self.recompute else slots[columns.length[slots] == columns.prompt_length[slots]]
            for slot in stale.tolist():
                columns.keep_first_routes(slot)
                reused = int(columns.reused[slot])
                if not self._is_usable(reused, int(columns.oldest[slot]), int(columns.first_sampled[slot])):
                    reused, columns.first_sampled[slot] = 0, columns.prompt_length[slot]
                columns.cached[slot] = columns.reused[slot] = reused
        return version

    def _fit(self, rows: int, longest: int) -> Callable[[], None]:
        """A function that makes room for `rows` rows of `longest` positions, and moves the rows that are in use at this call."""
        columns = self.sequences
        preferred = min(columns.max_context, self.cache.total_positions // columns.capacity)
        return partial(self.cache.fit, rows, longest, preferred, columns.cached[columns.occupied_slots])

    def prefill(self) -> int:
        """Compute keys and values of at most `prefill_tokens` tokens. Returns the number of computed tokens."""
        disable_training(self.policy)
        with torch.no_grad():
            self.sync()
            pieces = self._plan_pieces()
            if pieces:
                self._extend(pieces)
                self._copy_new_prefixes()
        total = sum(piece.length for piece in pieces)
        self.tokens_prefilled += total
        return total

    def decode(self) -> Decoded:
        """Sample one token for every running sequence."""
        disable_training(self.policy)
        with torch.no_grad():
            version = self.sync()
            if self.needs_prefill:
                return Decoded(0)
            columns = self.sequences
            slots = columns.running_slots.copy()
            position = columns.length[slots] - 1
            hidden, routes = self._hidden(slots, position)
            sampled = self._sample(hidden, slots)
            # `routes.numpy` waits for the device. A wait before `_sample` would leave the device without work.
            if routes is not None and columns.routes is not None:
                columns.routes[slots, position] = routes.numpy()
            stopped, ended = columns.append(slots, sampled, version)
        return Decoded(int(slots.size), tuple(stopped.tolist()), tuple(ended.tolist()))

    def _hidden(self, slots: Int64Array, position: Int64Array) -> tuple[Tensor, Routes | None]:
        """Hidden states [n, E] of the last known tokens of `slots` [n], at `position` [n], and their routes, if recorded."""
        columns, device = self.sequences, self.cache.device
        tokens = columns.tokens[slots, position]
        if self.graphs is not None and columns.routes is None:
            captured = self.graphs.hidden(tokens, position, columns.cached[columns.occupied_slots[slots.size :]])
            if captured is not None:
                return captured, None
        plan = DecodePlan(self.cache, position)
        plan.routes = None if columns.routes is None else Routes(columns.routes.shape[2])
        return self.policy.hidden(to_device(tokens, device), to_device(position, device), plan), plan.routes

    def _sample(self, hidden: Tensor, slots: Int64Array) -> Sampled:
        parts = []
        for start in range(0, slots.size, HEAD_ROWS):
            part = slots[start : start + HEAD_ROWS]
            logits = self.policy.logits(hidden[start : start + HEAD_ROWS])
            parts.append(self.sampler.draw(logits, self.sequences.parameters(part)))
        return Sampled.read(parts)

    def _plan_pieces(self) -> list[PromptPiece]:
        """Copy the prompts that another row holds. Returns the pieces to compute now: at most `prefill_tokens` tokens."""
        columns, budget = self.sequences, self.prefill_tokens
        slots = columns.running_slots
        pieces: list[PromptPiece] = []
        computing: set[PrefixKey] = set()  # prompts that a piece of this closure computes
        for slot in slots[columns.cached[slots] < columns.length[slots] - 1].tolist():
            key = columns.prefix_key[slot]
            if key is not None and columns.cached[slot] < columns.prompt_length[slot] - 1:
                if key in self._holders:
                    self._copy_prefix(slot, key)
                elif key in computing:
                    continue  # `_copy_new_prefixes` copies the prompt
                else:
                    computing.add(key)
            start = int(columns.cached[slot])
            length = min(int(columns.length[slot]) - 1 - start, budget)
            if length > 0:
                pieces.append(PromptPiece(slot, int(columns.row_of[slot]), start, length))
                budget -= length
        # Neighbouring pieces that start at 0 and have equal lengths share an attention call.
        pieces.sort(key=lambda piece: (piece.start, piece.length))
        return pieces

    def _extend(self, pieces: list[PromptPiece]) -> None:
        columns, device = self.sequences, self.cache.device
        spans = [(piece.slot, piece.start, piece.start + piece.length) for piece in pieces]
        tokens = np.concatenate([columns.tokens[slot, start:stop] for slot, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        plan = ExtendPlan(self.cache, pieces)
        plan.routes = None if columns.routes is None else Routes(columns.routes.shape[2])
        self.policy.hidden(to_device(tokens, device), to_device(positions, device), plan)
        if plan.routes is not None:
            self._store_prompt_routes(pieces, plan.routes)
        for piece in pieces:
            if not piece.start:
                columns.oldest[piece.slot] = self.version
            columns.cached[piece.slot] = piece.start + piece.length
            self._register_holder(piece.slot)

    def _store_prompt_routes(self, pieces: list[PromptPiece], routes: Routes) -> None:
        """Store the routes (chosen experts) of prompt tokens. Recomputed sampled tokens keep the routes of their sampling. Before a
        prompt is recomputed, `Sequences.keep_first_routes` copies the prompt's first routes for the result."""
        columns, computed, start = self.sequences, routes.numpy(), 0
        assert columns.routes is not None
        for piece in pieces:
            count = min(piece.length, int(columns.prompt_length[piece.slot]) - 1 - piece.start)
            if count > 0:
                columns.routes[piece.slot, piece.start : piece.start + count] = computed[start : start + count]
            start += piece.length

    def _register_holder(self, slot: int) -> None:
        """If the row of `slot` holds its prompt without the last token, let other sequences copy this part of the prompt."""
        columns = self.sequences
        key, length = columns.prefix_key[slot], int(columns.prompt_length[slot]) - 1
        if key is not None and length > 0 and columns.cached[slot] >= length:
            self._holders.setdefault(key, set()).add(slot)

    def _copy_new_prefixes(self) -> None:
        """Copy prompts that this closure has completed into the rows of sequences with the same prompt."""
        columns = self.sequences
        slots = columns.running_slots
        for slot in slots[columns.cached[slots] < columns.prompt_length[slots] - 1].tolist():
            key = columns.prefix_key[slot]
            if key is not None and key in self._holders:
                self._copy_prefix(slot, key)

    def _copy_prefix(self, slot: int, key: PrefixKey) -> None:
        columns, holders = self.sequences, self._holders[key]
        holder, length = next(iter(holders)), int(columns.prompt_length[slot]) - 1
        self.cache.copy_row(int(columns.row_of[holder]), int(columns.row_of[slot]), length)
        if columns.routes is not None:
            columns.routes[slot, :length] = columns.routes[holder, :length]
        holders.add(slot)
        columns.cached[slot], columns.oldest[slot] = length, self.version
        self.tokens_copied += length
