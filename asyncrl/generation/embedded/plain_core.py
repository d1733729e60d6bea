"""The running batch of a model on the plain path: transformers' own forward and cache, for any model that generates with one.

Sequences of one known length that come together are a *cohort*: one cache, no padding, one forward a token. (Where rows must
not share a forward, `ModelPath.padded` false, each is its own.) The members of a group are one, so a prompt is run once for
each of them, side by side. A sequence that ends leaves its cohort, whose cache keeps the rows of the others; a cache that
cannot is built anew. What a cache holds is transformers' business alone: keys and values, states of convolutions and of
linear attention, windows. Where it is not right, or there is none, `ModelPath.cached` is false, and a token costs a forward
over the whole row.

After an update of the weights all caches are rebuilt, whatever they hold (`kv_after_update: recompute`).

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

from asyncrl.models.policy import PolicyModel
from asyncrl.types import GenerationRequest, Int64Array

from .core import HEAD_ROWS, Decoded, enter
from .sampling import Sampled, Sampler
from .sequences import Sequences


@dataclass(eq=False, slots=True)
class Cohort:
    """`state`: transformers' own keyword arguments from one forward to the next, the cache among them."""

    slots: list[int]
    state: dict[str, Any]
    left: set[int]  # slots that are gone, whose rows are still in the cache


class PlainCore:
    """The same interface as `Core`. `add` and `remove` belong to the owner task, between closures; all else to the lane."""

    def __init__(self, policy: PolicyModel, sequences: Sequences, *, prefill_tokens: int) -> None:
        """`prefill_tokens`: most tokens of one prefill; a single longer sequence is prefilled alone, at once."""
        self.policy = policy
        self.sequences = sequences
        self.sampler = Sampler()
        self.prefill_tokens = prefill_tokens
        self.version = policy.version
        self.tokens_prefilled = 0
        self.tokens_copied = 0
        self._cohorts: list[Cohort] = []
        self._fresh: list[int] = []  # slots without a cohort

    # -- between closures, on the loop --------------------------------------------------------------------------------

    @property
    def needs_prefill(self) -> bool:
        """A running sequence needs prefill before it can decode."""
        return bool(self._fresh)

    def add(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> int:
        """As `Core.add`; the sequence joins a cohort at the next prefill."""
        slot = self.sequences.add(request, stop_ids)
        self._fresh.append(slot)
        return slot

    def remove(self, slot: int, *, keep_prefix: bool) -> None:
        """Free the slot. (`keep_prefix`: nothing is shared here.)"""
        self.sequences.remove(slot)
        if slot in self._fresh:
            self._fresh.remove(slot)
            return
        cohort = next(each for each in self._cohorts if slot in each.slots and slot not in each.left)
        cohort.left.add(slot)
        if len(cohort.left) == len(cohort.slots):
            self._cohorts.remove(cohort)

    # -- on the lane --------------------------------------------------------------------------------------------------

    def sync(self) -> int:
        """Notice a new version, and who has left; every closure begins with it. Returns the version."""
        for cohort in [each for each in self._cohorts if each.left]:
            self._leave(cohort)
        if self.policy.version != self.version:
            self.version = self.policy.version
            for cohort in list(self._cohorts):
                self._dissolve(cohort)
        return self.version

    def prefill(self) -> int:
        """Caches for sequences that have none, those of one length together. Returns the tokens computed."""
        enter(self.policy)
        total = 0
        with torch.no_grad():
            self.sync()
            by_length: dict[int, list[int]] = defaultdict(list)
            for slot in self._fresh:
                by_length[int(self.sequences.length[slot])].append(slot)
            for length, slots in by_length.items():
                most = max((self.prefill_tokens - total) // max(length - 1, 1), 0 if total else 1)
                most = most if self.policy.path.padded else min(most, 1)
                if not (taken := slots[:most]):
                    break
                self._fresh = [slot for slot in self._fresh if slot not in taken]
                self._cohorts.append(Cohort(taken, self._prefilled(taken, length - 1), set()))
                self.sequences.cached[taken] = length - 1
                total += len(taken) * (length - 1)
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
            slots = np.array([slot for cohort in self._cohorts for slot in cohort.slots], np.int64)
            parts = [part for cohort in self._cohorts for part in self._step(cohort)]
            stopped, ended = columns.append(slots, Sampled.read(parts), version)
        return Decoded(int(slots.size), tuple(stopped.tolist()), tuple(ended.tolist()))

    def _tokens(self, slots: list[int], length: int) -> Tensor:
        """The first `length` tokens of these slots: [n, length], int64."""
        return torch.from_numpy(self.sequences.tokens[np.array(slots), :length]).to(self.policy.device)

    def _prefilled(self, slots: list[int], length: int) -> dict[str, Any]:
        """The state after the first `length` tokens. Without a cache there is none, and nothing is computed."""
        if not self.policy.path.cached:
            return {}
        module: Any = self.policy.module
        state: dict[str, Any] = {"use_cache": True}
        if module._supports_logits_to_keep():  # else those of the whole prompt are made, for nobody
            state["logits_to_keep"] = 1
        if length:
            tokens = self._tokens(slots, length)
            state["attention_mask"] = torch.ones_like(tokens)
            self._forward(tokens, state, None)
        else:
            state["attention_mask"] = torch.ones(len(slots), 1, dtype=torch.int64, device=self.policy.device)
        return state

    def _forward(self, tokens_nL: Tensor, state: dict[str, Any], last: int | None) -> Tensor:
        """Hidden states [n, E] of the last position, by the decoder: the head is the policy's, as in training. `state`
        becomes that of the next token. `last`: tokens that are new; None: all."""
        module: Any = self.policy.module  # transformers' generation mixin is not typed
        arguments = module.prepare_inputs_for_generation(
            tokens_nL, next_sequence_length=last, is_first_iteration=last is None, **state
        )
        output = self.policy.decoder(**arguments, return_dict=True)
        state.update(module._update_model_kwargs_for_generation(output, state))
        hidden_nE: Tensor = output.last_hidden_state[:, -1]
        return hidden_nE

    def _step(self, cohort: Cohort) -> list[Tensor]:
        length = int(self.sequences.length[cohort.slots[0]])
        fresh = length == 1  # one token, and no cache before it
        tokens_nL = self._tokens(cohort.slots, length)
        if self.policy.path.cached:
            hidden_nE = self._forward(tokens_nL, cohort.state, None if fresh else 1)
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

    def _leave(self, cohort: Cohort) -> None:
        """Rows of those who left go out of the cache; where it cannot be told so, it is built anew."""
        kept = [row for row, slot in enumerate(cohort.slots) if slot not in cohort.left]
        index = torch.tensor(kept, dtype=torch.int64, device=self.policy.device)
        for name, value in cohort.state.items():
            if isinstance(value, Cache):
                try:
                    _select_rows(value, index)
                except (
                    Exception
                    # A class of caches that was never asked for this raises anything; nothing is lost with it.
                ):
                    self._dissolve(cohort)
                    return
            elif isinstance(value, Tensor) and value.ndim and value.shape[0] == len(cohort.slots):
                cohort.state[name] = value.index_select(0, index)
            elif not isinstance(value, (bool, int, float, str, type(None))):
                self._dissolve(cohort)
                return
        cohort.slots = [cohort.slots[row] for row in kept]
        cohort.left = set()

    def _dissolve(self, cohort: Cohort) -> None:
        self._cohorts.remove(cohort)
        slots = [slot for slot in cohort.slots if slot not in cohort.left]
        self._fresh += slots
        self.sequences.cached[slots] = 0


def _select_rows(cache: Cache, index: Tensor) -> None:
    """Keep these rows of `cache`. Most layers know it as `reorder_cache` alone; a class with states of its own may know only
    the other name."""
    kind = type(cache)
    if kind.batch_select_indices is not Cache.batch_select_indices and kind.reorder_cache is Cache.reorder_cache:
        cache.batch_select_indices(index)
    else:
        cache.reorder_cache(index)  # type: ignore[arg-type]  # (it says LongTensor, which is int64)
