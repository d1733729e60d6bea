"""The running batch of a model on the plain path. The forward and the cache are those of transformers.

Sequences of equal length that are prefilled together form a *cohort*. A cohort has one cache, no padding, and one forward for each
token. The members of a group can form one cohort. If rows must not share a forward (`ModelPath.padded` is false), each sequence
is a cohort of its own.

When a sequence ends, its row is removed from the cohort's cache. If the cache cannot remove rows, the cache is dropped, and the
other sequences are prefilled again. This module does not know what a cache contains: keys and values, or other states. If the model
has no correct cache (`ModelPath.cached` is false), each token costs a forward over all tokens of the sequence.

After each weight update all caches are rebuilt. The run refuses `kv_after_update: keep` on this path.

Shape legend: n sequences of a cohort, L their known tokens, E hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from asyncrl.models.copying import to_device
from asyncrl.models.policy import PolicyModel
from asyncrl.types import GenerationRequest, Int64Array

from .core import HEAD_ROWS, Decoded, disable_training
from .sampling import Drawn, Sampled, Sampler
from .sequences import Sequences


@dataclass(eq=False, slots=True)
class Cohort:
    """Sequences with one cache. `state`: keyword arguments of the next forward of transformers, including the cache."""

    slots: list[int]
    state: dict[str, Any]
    removed: set[int]  # ended slots whose rows are still in the cache


class PlainCore:
    """Has the interface of `Core`."""

    def __init__(self, policy: PolicyModel, sequences: Sequences, *, prefill_tokens: int) -> None:
        """`prefill_tokens`: limit of the tokens of one prefill closure. A longer sequence is prefilled alone, in one closure."""
        self.policy = policy
        self.sequences = sequences
        self.sampler = Sampler()
        self.prefill_tokens = prefill_tokens
        self.version = policy.version
        self.tokens_prefilled = 0
        self.tokens_copied = 0
        self._cohorts: list[Cohort] = []
        self._without_cohort: list[int] = []  # slots

    # -- between closures, on the loop --------------------------------------------------------------------------------

    @property
    def needs_prefill(self) -> bool:
        """Whether a running sequence needs prefill before it can decode."""
        return bool(self._without_cohort)

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """See `Core.add`. The sequence joins a cohort at the next prefill."""
        slot = self.sequences.add(request, stop_ids)
        self._without_cohort.append(slot)
        return slot

    def end_session(self, session: str) -> None:
        """Nothing is kept here for a session."""

    def remove(self, slot: int, *, keep_row: bool = False) -> None:
        """Free the slot. `keep_row` is ignored, because no later request uses the cache of an ended request here."""
        self.sequences.remove(slot)
        self.sequences.moves.clear()
        if slot in self._without_cohort:
            self._without_cohort.remove(slot)
            return
        # A slot in `removed` may be in use again, in a newer cohort.
        cohort = next(cohort for cohort in self._cohorts if slot in cohort.slots and slot not in cohort.removed)
        cohort.removed.add(slot)
        if len(cohort.removed) == len(cohort.slots):
            self._cohorts.remove(cohort)

    # -- on the lane --------------------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Remove ended rows from the caches. After a weight update, drop all caches. `prefill` and `decode` call this first."""
        for cohort in [cohort for cohort in self._cohorts if cohort.removed]:
            self._remove_rows(cohort)
        if self.policy.version != self.version:
            self.version = self.policy.version
            for cohort in list(self._cohorts):
                self._dissolve(cohort)
        return self.version

    def prefill(self) -> int:
        """Build caches for sequences without a cache, at most one cohort for each length. Returns the number of computed tokens."""
        disable_training(self.policy)
        total = 0
        with torch.no_grad():
            self.sync()
            by_length: dict[int, list[int]] = defaultdict(list)
            for slot in self._without_cohort:
                by_length[int(self.sequences.length[slot])].append(slot)
            for length, slots in by_length.items():
                max_members = (self.prefill_tokens - total) // max(length - 1, 1)
                # A sequence that is longer than `prefill_tokens` is prefilled alone.
                if max_members < 1 and total == 0:
                    max_members = 1
                if max_members < 1:
                    break
                members = slots[: max_members if self.policy.path.padded else 1]
                self._without_cohort = [slot for slot in self._without_cohort if slot not in members]
                self._cohorts.append(Cohort(members, self._prefilled_state(members, length - 1), set()))
                self.sequences.cached[members] = length - 1
                total += len(members) * (length - 1)
        computed = total if self.policy.path.cached else 0
        self.tokens_prefilled += computed
        return computed

    def decode(self) -> Decoded:
        """Sample one token for every running sequence, or nothing if a sequence needs prefill first."""
        disable_training(self.policy)
        with torch.no_grad():
            version = self.sync()
            if self.needs_prefill:
                return Decoded(0)
            columns = self.sequences
            slots = np.array([slot for cohort in self._cohorts for slot in cohort.slots], np.int64)
            parts = [part for cohort in self._cohorts for part in self._step(cohort)]
            stopped, ended = columns.append(slots, Sampled.read(parts), version)
        return Decoded(int(slots.size), tuple(stopped.tolist()), tuple(ended.tolist()))

    def _tokens(self, slots: list[int], length: int) -> Tensor:
        return to_device(self.sequences.tokens[np.array(slots), :length], self.policy.device)

    def _prefilled_state(self, slots: list[int], length: int) -> dict[str, Any]:
        """`Cohort.state` after the first `length` tokens. If the model has no cache, the state is empty and nothing is computed."""
        if not self.policy.path.cached:
            return {}
        module: Any = self.policy.module
        state: dict[str, Any] = {"use_cache": True}
        # Some models' own code reads `logits_to_keep`, although the decoder computes no logits.
        if module._supports_logits_to_keep():
            state["logits_to_keep"] = 1
        if length:
            tokens = self._tokens(slots, length)
            state["attention_mask"] = torch.ones_like(tokens)
            self._forward(tokens, state, None)
        else:
            state["attention_mask"] = torch.ones(len(slots), 1, dtype=torch.int64, device=self.policy.device)
        return state

    def _forward(self, tokens_nL: Tensor, state: dict[str, Any], new_tokens: int | None) -> Tensor:
        """Hidden states [n, E] of the last position, without the head. Updates `state` for the next token. `new_tokens`: how many
        of the L tokens are not in the cache; None: there is no cache yet."""
        module: Any = self.policy.module  # transformers' generation mixin is not typed
        arguments = module.prepare_inputs_for_generation(
            tokens_nL, next_sequence_length=new_tokens, is_first_iteration=new_tokens is None, **state
        )
        output = self.policy.decoder(**arguments, return_dict=True)
        state.update(module._update_model_kwargs_for_generation(output, state))
        hidden_nE: Tensor = output.last_hidden_state[:, -1]
        return hidden_nE

    def _step(self, cohort: Cohort) -> list[Drawn]:
        length = int(self.sequences.length[cohort.slots[0]])
        tokens_nL = self._tokens(cohort.slots, length)
        if self.policy.path.cached:
            # A prompt of one token has nothing to prefill, so this forward creates the cache.
            hidden_nE = self._forward(tokens_nL, cohort.state, None if length == 1 else 1)
        else:
            hidden_nE = self.policy.decoder(input_ids=tokens_nL, use_cache=False).last_hidden_state[:, -1]
        slots: Int64Array = np.array(cohort.slots, np.int64)
        return [
            self.sampler.draw(
                self.policy.logits(hidden_nE[start : start + HEAD_ROWS]),
                self.sequences.parameters(slots[start : start + HEAD_ROWS]),
            )
            for start in range(0, slots.size, HEAD_ROWS)
        ]

    def _remove_rows(self, cohort: Cohort) -> None:
        """Remove the rows of ended sequences from the cache. If that fails, dissolve the cohort."""
        kept = [row for row, slot in enumerate(cohort.slots) if slot not in cohort.removed]
        index = to_device(np.array(kept, np.int64), self.policy.device)
        for name, value in cohort.state.items():
            if isinstance(value, Cache):
                # Cache classes that cannot remove rows raise various errors. Nothing is lost: the cache is rebuilt.
                try:
                    _select_rows(value, index)
                except Exception:
                    self._dissolve(cohort)
                    return
            elif isinstance(value, Tensor) and value.ndim and value.shape[0] == len(cohort.slots):
                cohort.state[name] = value.index_select(0, index)
            # An object of another type may have rows that cannot be removed here.
            elif not isinstance(value, (bool, int, float, str, type(None))):
                self._dissolve(cohort)
                return
        cohort.slots = [cohort.slots[row] for row in kept]
        cohort.removed = set()

    def _dissolve(self, cohort: Cohort) -> None:
        """Drop the cache. The running sequences are prefilled again."""
        self._cohorts.remove(cohort)
        slots = [slot for slot in cohort.slots if slot not in cohort.removed]
        self._without_cohort += slots
        self.sequences.cached[slots] = 0


def _select_rows(cache: Cache, index: Tensor) -> None:
    """Keep only the rows `index` [n] of `cache`. Most classes implement `reorder_cache`; some only `batch_select_indices`."""
    kind = type(cache)
    if kind.batch_select_indices is not Cache.batch_select_indices and kind.reorder_cache is Cache.reorder_cache:
        cache.batch_select_indices(index)
    else:
        cache.reorder_cache(index)  # type: ignore[arg-type]  # its annotation is LongTensor, which means int64
