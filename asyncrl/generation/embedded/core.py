"""What the embedded engine does on the lane: two kinds of bounded closures over one policy model.

    prefill(): at most `prefill_tokens` tokens of sequences whose cache is behind, packed         (compute-bound)
    decode():  one token for every running sequence, the last known token of each being the input

A sequence is ready to decode when its row holds all its known tokens but the last one. A new sequence is behind by its
prompt less one token; with `kv_after_update: recompute` every sequence is behind by all of it after a weight update:
one mechanism serves both, and sampling happens in one place only.

Versions: each closure reads `policy.version` once, at its start. No other closure runs meanwhile, so it names the
weights of everything that the closure computes and samples (invariant 5b).

Shared prompts: sequences with equal `prefix_key` hold equal prompts, so the keys and values of the prompt are computed
once per (key, version) and copied into the rows of the others, from a row that is still alive or from a saved copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.models.copying import to_device
from asyncrl.models.routes import Routes
from asyncrl.types import GenerationRequest, Int64Array, RoutesArray

from .cache import KVCache
from .graphs import DecodeGraphs
from .plans import DecodePlan, ExtendPlan, PromptPiece
from .sampling import Sampled, Sampler
from .sequences import PrefixKey, Sequences

# Rows whose logits exist at the same time: bounds [rows, V] float32 buffers.
HEAD_ROWS = 128


class Policy(Protocol):
    """The part of `models.policy.PolicyModel` that sampling needs."""

    version: int

    @property
    def module(self) -> nn.Module:
        """The model of transformers."""
        ...

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: ExtendPlan | DecodePlan) -> Tensor:
        """As `PolicyModel.hidden`; the plan reads and writes the engine's cache."""
        ...

    def logits(self, hidden_NE: Tensor) -> Tensor: ...

    def set_training(self, training: bool) -> None: ...


@dataclass(slots=True)
class Prefix:
    """Who holds the keys and values of a shared prompt, computed under the current version."""

    length: int  # positions: the prompt less its last token
    holders: set[int] = field(default_factory=set)  # slots
    saved: Tensor | None = None  # [layers, 2, K, length, D], once the last holder is gone
    routes: RoutesArray | None = None  # [length, layers, k], likewise, where they are recorded


@dataclass(frozen=True, slots=True)
class Decoded:
    """One decode step: slots that ended by a stop token and by length. `rows == 0`: a prefill must come first."""

    rows: int
    stopped: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


def enter(policy: Policy) -> None:
    """At the start of a closure that samples: no module trains. (A layer that recomputes drops the cache that it is given.)"""
    # Walking all modules costs a millisecond, asking costs nothing.
    if policy.module.training:
        policy.module.eval()
    policy.set_training(False)


class Core:
    """The running batch. `add` and `remove` belong to the owner task, between closures; all else to the lane."""

    def __init__(
        self, policy: Policy, cache: KVCache, sequences: Sequences, *, prefill_tokens: int, recompute: bool
    ) -> None:
        self.policy = policy
        self.cache = cache
        self.sequences = sequences
        self.sampler = Sampler()
        self.graphs = DecodeGraphs.of(policy, cache, sequences.max_context)
        self.prefill_tokens = prefill_tokens
        self.recompute = recompute
        self.version = policy.version
        self.tokens_prefilled = 0
        self.tokens_copied = 0
        self._prefixes: OrderedDict[PrefixKey, Prefix] = OrderedDict()
        # Row copies that the next closure makes before anything else.
        self._pending: list[Callable[[], None]] = []
        self._ends: list[int] | None = None  # runs of similar length; None after a row came or went

    # -- between closures, on the loop --------------------------------------------------------------------------------

    @property
    def needs_prefill(self) -> bool:
        """A running sequence needs prefill before it can decode."""
        columns = self.sequences
        rows = columns.rows
        return bool((columns.cached[rows] < columns.length[rows] - 1).any())

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """Give a request a slot and a row; its slot. There must be a free one."""
        self._ends = None
        return self.sequences.add(request, stop_ids)

    def remove(self, slot: int, *, keep_prefix: bool) -> None:
        """Free the slot. `keep_prefix`: a waiting request shares its prompt, so a copy outlives the last holder."""
        columns = self.sequences
        key, row = columns.prefix_key[slot], int(columns.row_of[slot])
        prefix = self._prefixes.get(key) if key is not None else None
        if key is not None and prefix is not None and slot in prefix.holders:
            prefix.holders.discard(slot)
            if not prefix.holders and prefix.saved is None:
                if keep_prefix and prefix.length <= self.prefill_tokens:
                    # Now: the slot may have another sequence before the lane comes to it.
                    if columns.routes is not None:
                        prefix.routes = columns.routes[slot, : prefix.length].copy()
                    self._pending.append(lambda: self._save(key, prefix, row))
                else:
                    del self._prefixes[key]
        move = columns.remove(slot)
        if move is not None:
            self._pending.append(lambda: self.cache.copy_row(*move))
        self._ends = None

    # -- on the lane --------------------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Notice a new version and make the pending row copies; every closure begins with it. Returns the version."""
        version = self.policy.version
        for copy in self._pending:
            copy()
        self._pending.clear()
        self._fit()
        if version != self.version:
            self.version = version
            self._prefixes.clear()
            columns = self.sequences
            rows = columns.rows
            # `keep` restarts a prompt before its first token, so that the versions of its tokens tell how to replay a
            # sequence: the prompt under the version of the first token, each token under the version of the next.
            stale = rows if self.recompute else rows[columns.length[rows] == columns.prompt[rows]]
            for slot in stale.tolist():
                columns.keep_first_routes(slot)
            columns.cached[stale] = 0
        return version

    def _fit(self) -> None:
        """Rows as long as the longest sequence that runs: admission has seen to it that all of them are within the budget."""
        columns = self.sequences
        rows = columns.rows
        if rows.size:
            usual = min(columns.max_context, self.cache.room // columns.capacity)
            self.cache.fit(rows.size, int(columns.limit[rows].max()), usual, columns.cached[rows])

    def prefill(self) -> int:
        """Bring sequences forward by at most `prefill_tokens` tokens. Returns the tokens computed."""
        enter(self.policy)
        with torch.no_grad():
            self.sync()
            self.cache.use(self.sequences.rows.size)
            pieces = self._pieces()
            if pieces:
                self._extend(pieces)
                self._share()
        total = sum(piece.length for piece in pieces)
        self.tokens_prefilled += total
        return total

    def decode(self) -> Decoded:
        """One token for every running sequence."""
        enter(self.policy)
        with torch.no_grad():
            version = self.sync()
            if self.needs_prefill:
                return Decoded(0)
            columns = self.sequences
            slots = columns.rows.copy()
            self.cache.use(slots.size)
            position = columns.length[slots] - 1
            sampled = self._sample(self._hidden(slots, position), slots)
            stopped, ended = columns.append(slots, sampled, version)
        return Decoded(int(slots.size), tuple(stopped.tolist()), tuple(ended.tolist()))

    def _hidden(self, slots: Int64Array, position: Int64Array) -> Tensor:
        """Of the last known token of each slot, [n, E]."""
        columns, device = self.sequences, self.cache.device
        tokens = columns.tokens[slots, position]
        if self.graphs is not None and columns.routes is None:
            captured = self.graphs.hidden(tokens, position)
            if captured is not None:
                return captured
        if self._ends is None:
            self._ends = self.cache.runs(position + 1)
        plan = DecodePlan(self.cache, position, self._ends)
        plan.routes = None if columns.routes is None else Routes(columns.routes.shape[2])
        hidden = self.policy.hidden(to_device(tokens, device), to_device(position, device), plan)
        if columns.routes is not None and plan.routes is not None:
            columns.routes[slots, position] = plan.routes.numpy()
        return hidden

    def _sample(self, hidden: Tensor, slots: Int64Array) -> Sampled:
        parts = []
        for start in range(0, slots.size, HEAD_ROWS):
            own = slots[start : start + HEAD_ROWS]
            logits = self.policy.logits(hidden[start : start + HEAD_ROWS])
            parts.append(self.sampler.draw(logits, self.sequences.parameters(own)))
        return Sampled.read(parts)

    def _pieces(self) -> list[PromptPiece]:
        """What to compute now: sequences that are behind, oldest row first, within the budget; prompts shared."""
        columns, budget = self.sequences, self.prefill_tokens
        rows = columns.rows
        pieces: list[PromptPiece] = []
        computing: set[PrefixKey] = set()  # prompts that a piece of this closure computes
        for slot in rows[columns.cached[rows] < columns.length[rows] - 1].tolist():
            key = columns.prefix_key[slot]
            if key is not None and columns.cached[slot] < columns.prompt[slot] - 1:
                if key in self._prefixes:
                    self._copy_prefix(slot, key)
                elif key in computing:
                    continue  # copied as soon as the first of them is through
                else:
                    computing.add(key)
            start = int(columns.cached[slot])
            length = min(int(columns.length[slot]) - 1 - start, budget)
            if length > 0:
                pieces.append(PromptPiece(slot, int(columns.row_of[slot]), start, length))
                budget -= length
        pieces.sort(key=lambda piece: (piece.start, piece.length))  # equal ones share an attention call
        return pieces

    def _extend(self, pieces: list[PromptPiece]) -> None:
        columns, device = self.sequences, self.cache.device
        tokens = np.concatenate([columns.tokens[s.slot, s.start : s.start + s.length] for s in pieces])
        positions = np.concatenate([np.arange(s.start, s.start + s.length) for s in pieces])
        plan = ExtendPlan(self.cache, pieces)
        plan.routes = None if columns.routes is None else Routes(columns.routes.shape[2])
        self.policy.hidden(to_device(tokens, device), to_device(positions, device), plan)
        if plan.routes is not None:
            self._note(pieces, plan.routes)
        for piece in pieces:
            columns.cached[piece.slot] = piece.start + piece.length
            self._register(piece.slot)

    def _note(self, pieces: list[PromptPiece], routes: Routes) -> None:
        """Where the tokens of prompts went, in the cache that is there now. A sequence that has sampled keeps the routes that it
        began with, its prompt's (`Sequences.keep_first_routes`) and those of what follows."""
        columns, found, start = self.sequences, routes.numpy(), 0
        assert columns.routes is not None
        for piece in pieces:
            own = min(piece.length, int(columns.prompt[piece.slot]) - 1 - piece.start)
            if own > 0:
                columns.routes[piece.slot, piece.start : piece.start + own] = found[start : start + own]
            start += piece.length

    def _register(self, slot: int) -> None:
        """The row of `slot` holds its whole prompt under the current version: others may copy it."""
        columns = self.sequences
        key, length = columns.prefix_key[slot], int(columns.prompt[slot]) - 1
        if key is not None and length > 0 and columns.cached[slot] >= length:
            self._prefixes.setdefault(key, Prefix(length)).holders.add(slot)

    def _share(self) -> None:
        """Copy prompts that just became complete into the rows that wait for them."""
        columns = self.sequences
        rows = columns.rows
        for slot in rows[columns.cached[rows] < columns.prompt[rows] - 1].tolist():
            key = columns.prefix_key[slot]
            if key is not None and key in self._prefixes:
                self._copy_prefix(slot, key)

    def _copy_prefix(self, slot: int, key: PrefixKey) -> None:
        columns, prefix = self.sequences, self._prefixes[key]
        row = int(columns.row_of[slot])
        if prefix.holders:
            holder = next(iter(prefix.holders))
            self.cache.copy_row(int(columns.row_of[holder]), row, prefix.length)
            if columns.routes is not None:
                columns.routes[slot, : prefix.length] = columns.routes[holder, : prefix.length]
        else:
            assert prefix.saved is not None
            self.cache.restore(prefix.saved, row)
            if columns.routes is not None:
                assert prefix.routes is not None
                columns.routes[slot, : prefix.length] = prefix.routes
        prefix.saved = prefix.routes = None  # the row is a holder now
        prefix.holders.add(slot)
        columns.cached[slot] = prefix.length
        self.tokens_copied += prefix.length

    def _save(self, key: PrefixKey, prefix: Prefix, row: int) -> None:
        """Keep a prompt whose last holder is going, within `prefill_tokens` saved positions, oldest out first."""
        if self._prefixes.get(key) is not prefix or prefix.holders:
            return
        prefix.saved = self.cache.save(row, prefix.length)
        self._prefixes.move_to_end(key)
        saved = [name for name, entry in self._prefixes.items() if entry.saved is not None]
        total = sum(self._prefixes[name].length for name in saved)
        for name in saved:
            if total <= self.prefill_tokens:
                break
            total -= self._prefixes[name].length
            del self._prefixes[name]
