"""The engine of a worker that generates with vLLM: requests wait and are admitted as in the embedded one, and vLLM runs them.

    generate() --> waiting --admit--> running --a step of vLLM per closure--> result                  (owner.py)
    logits of a step --> the embedded engine's sampler --> token, both log-probs, version of the weights

Guarantees, those of the embedded engine:
* The random numbers of a request come from (seed, place) alone: vLLM draws nothing. A repeated request has the same ones.
* `logprobs` are over the whole vocabulary at the sampling temperature, `sampled_logprobs` as really sampled.
* Each token has the version of the weights that sampled it: they change between two steps only, on the lane.
* `keep`: a sequence that has a token goes on with its cached keys and values, and a prompt without one starts again. `recompute`:
  all of them are computed anew. No prompt is ever shared across versions.
* Nothing is preempted: vLLM's cache has room for whatever was admitted.
* Routes of experts, where they are recorded: each token has those that it was sampled with, a prompt those of the keys and values
  that its first token attended to, whoever computed them.

The loop and the lane share one queue of changes: requests that start and requests that are given up. A move of the weights and the
comparison of outputs are closures of the worker, and may run while the owner of this engine admits requests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.generation.embedded.sampling import LogitChanges, RowParams, Sampled, Sampler, keyed_uniform, seed_array
from asyncrl.generation.embedded.stops import StopStrings
from asyncrl.generation.life import WHO
from asyncrl.generation.owner import Job, OwnedEngine
from asyncrl.generation.requests import check_tokens
from asyncrl.models.outputs import DECODED, bound_of, fixed_row
from asyncrl.models.routing import RoutesShape
from asyncrl.records.routes import MISSING
from asyncrl.types import FinishReason, Generation, GenerationRequest, Int64Array, RoutesArray, SamplingParams

if TYPE_CHECKING:
    from asyncrl.telemetry.recorder import Recorder

_HEAD_ROWS = 128  # rows whose logits exist in float32 at the same time
_REPLAY = "replay"
# Nats, as `models.outputs.Bound`. Its kernels round otherwise than ours: SmolLM2 in bfloat16 is 0.08 off, in float32 1e-5.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.3}
_GREEDY = SamplingParams(temperature=0)

Choose = Callable[[Sequence[str], Tensor], Tensor]  # (names of requests, logits [N, V]) -> tokens [N]


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """What a core is made for, beside its room. `dtype`: of its products. `stop_ids`: every token that ends a completion. `routed`:
    the model has experts. `routes`: their shape, where it is recorded which experts each token went to."""

    dtype: torch.dtype
    vocabulary: int
    stop_ids: tuple[int, ...]
    routes: RoutesShape | None = None
    routed: bool = False


class Running:
    """One running request and its columns, with room for all its tokens. On the lane."""

    def __init__(
        self,
        request: GenerationRequest,
        stop_ids: tuple[int, ...],
        stop: StopStrings | None,
        routes: RoutesShape | None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.stop_ids = stop_ids
        self.seed = seed_array(request.seed)[0]
        self.count = 0
        self._stop = stop
        self._prompt = int(request.prompt_ids.size)
        self._routes: RoutesArray | None = None
        if routes is not None:
            limit = self._prompt + sampling.max_tokens
            self._routes = np.full((limit, routes.layers, routes.k), MISSING, routes.dtype)
        self._tokens = np.zeros(sampling.max_tokens, np.int64)
        self._logprobs = np.zeros((2, sampling.max_tokens), np.float32)
        self._versions = np.zeros(sampling.max_tokens, np.int32)

    @property
    def tokens(self) -> Int64Array:
        """Those of the prompt, and what was sampled."""
        return np.concatenate([self.request.prompt_ids, self._tokens[: self.count]])

    def append(self, token: int, logprobs: tuple[float, float], version: int) -> str | None:
        """Adds a token and the version of the weights that sampled it. Returns the stop string that the token completes."""
        at, self.count = self.count, self.count + 1
        self._tokens[at], self._logprobs[:, at], self._versions[at] = token, logprobs, version
        return None if self._stop is None else self._stop.hit(self._tokens[: self.count])

    def keep_routes(self, read: Callable[[int, int], RoutesArray]) -> None:
        """Call it before the token that a step sampled is appended. `read`: routes of positions [start, stop), as cached now. A
        position is read once, so an update that recomputes the cache does not change its routes."""
        if self._routes is not None:
            stop = self._prompt + self.count
            start = stop - 1 if self.count else 0
            self._routes[start:stop] = read(start, stop)

    def generation(self, reason: FinishReason, stop: str | None) -> Generation:
        """What was sampled. `stop`: the stop string that ended it."""
        own = slice(0, self.count)
        whole, sampled = self._logprobs[:, own].copy()
        routes = None if self._routes is None else self._routes[: self._prompt + self.count].copy()
        return Generation(
            self._tokens[own].astype(np.int32), whole, sampled, self._versions[own].copy(), reason, routes, stop
        )


class Replay:
    """A row whose tokens are given, and log-probs of all but the first (nats, of the whole vocabulary at temperature 1): those of
    the prompt as vLLM computes them, each later one from the step that would have sampled the token.

    (vLLM's `trace_decode_token_ids` does the same inside its own sampler, which draws nothing here.)"""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: after the prompt."""
        self._tokens = tokens
        self._prompt_logprobs: list[float] | None = None
        self._logprobs: list[float] = []
        self._next = 0.0

    def choose(self, logits_V: Tensor) -> int:
        """The next token. vLLM asks again for the same one after each part of a prompt that takes several steps."""
        token = self._tokens[len(self._logprobs)]
        self._next = float(logits_V.double().log_softmax(-1)[token])
        return token

    def take(self, token: int | None, prompt_logprobs: list[float] | None) -> None:
        """Notes what a step sampled and computed for this row."""
        if prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs
        if token is not None:
            self._logprobs.append(self._next)

    @property
    def found(self) -> list[float] | None:
        """The log-probs; None until the last token is there."""
        done = self._prompt_logprobs is not None and len(self._logprobs) == len(self._tokens)
        return [*(self._prompt_logprobs or ()), *self._logprobs] if done else None


class VllmEngine(OwnedEngine):
    """Implements `ports.Engine`, and what a worker asks of its engine (worker/serving.py), on a core of an adapter."""

    def __init__(
        self,
        open_core: Callable[[Choose], Any],
        spec: CoreSpec,
        tokenizer: Any,
        lane: Lane,
        recorder: Recorder,
        *,
        max_sequences: int,
        max_context: int,
        kv_positions: int | None = None,
        kv_after_update: Literal["keep", "recompute"] = "keep",
    ) -> None:
        """`open_core`: makes the core, on the lane; its argument draws the tokens."""
        super().__init__(
            lane, recorder, max_sequences=max_sequences, max_context=max_context, kv_positions=kv_positions
        )
        self.spec = spec
        self.dtype, self.bound = spec.dtype, bound_of(BOUNDS, spec.dtype, spec.routed)
        self.version = -1
        self.tokenizer = tokenizer
        self._open_core = open_core
        self._recompute = kv_after_update == "recompute"
        self._numbers = itertools.count()
        self._changes: deque[tuple[int, Running | None]] = deque()  # (slot, its request; None: it was given up)
        # The rest is the lane's.
        self._core: Any = None
        self._sampler = Sampler()
        self._slots: dict[int, Running] = {}
        self._names: dict[str, int] = {}  # of what the core has -> slot
        self._drawn: dict[str, tuple[float, float]] = {}  # log-probs of the newest token of each
        self._ended: list[tuple[int, Generation]] = []  # not yet reported to the owner
        self._replayed: Replay | None = None
        self._prefilled = self._copied = 0
        self._unreported = 0  # of the tokens prefilled
        self._batches: list[int] = []  # tokens of each step that was not reported yet

    def check(self, request: GenerationRequest) -> None:
        """As the base class; and token ids beyond the vocabulary, and stop strings without a tokenizer."""
        super().check(request)
        check_tokens(request, self.spec.vocabulary, self.tokenizer is not None)

    def statistics(self) -> dict[str, float]:
        """As the base class; and `prefill_tokens` computed and `copied_tokens` spared so far."""
        return super().statistics() | {
            "prefill_tokens": float(self._prefilled),
            "copied_tokens": float(self._copied),
        }

    # -- what a worker asks of it

    def open_on_lane(self) -> None:
        """Make the core. On the lane, whose thread it belongs to."""
        self._core = self._open_core(self._choose)

    def move_to(self, half: Tensor, version: int) -> None:
        """Every later token comes from the weights in `half`, which are `version`. On the lane."""
        self._core.bind(half)
        self.version = version
        if self._recompute:
            self._core.forget_caches()
            return
        for name in [name for name, slot in self._names.items() if not self._slots[slot].count]:
            self._core.abort([name])
            self._put(self._names.pop(name))

    async def outputs(self) -> list[float]:
        """Log-probs of the fixed row (models/outputs.py), as the next steps would compute them: most of it as a prompt, the rest as
        steps that decode, which are other kernels and read the cache."""
        row = fixed_row(self.spec.vocabulary).tolist()
        return await self.replay(row[:-DECODED], row[-DECODED:])

    async def replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `Replay`; one at a time. Each step is a closure, and computes for every running request too."""
        replay = Replay(tokens)

        def begin() -> None:
            self._replayed = replay
            self._core.add_replay(_REPLAY, prompt, len(tokens))

        await self.lane.run(begin, name="engine/outputs")
        while (found := replay.found) is None:
            await self.lane.run(self._compute, name="engine/outputs")
        return found

    # -- the batch

    async def _prepare(self) -> None:
        if self._core is None:
            await self.lane.run(self.open_on_lane, name="engine/open")

    def _add(self, job: Job) -> int:
        sampling, slot = job.request.sampling, next(self._numbers)
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.spec.stop_ids)
        stop = None
        if sampling.stop:
            assert self.tokenizer is not None  # `check` refused it otherwise
            stop = StopStrings(self.tokenizer, sampling.stop, sampling.min_tokens)
        self._changes.append((slot, Running(job.request, tuple(dict.fromkeys(stop_ids)), stop, self.spec.routes)))
        return slot

    def _remove(self, job: Job) -> None:
        self._changes.append((job.slot, None))

    async def _advance(self) -> list[tuple[Job, Generation]]:
        with self.recorder.span("decode", track=WHO, sequences=len(self._running)):
            batches, prefilled, ended = await self.lane.run(self._step, name="engine/decode")
        self.recorder.count("engine/prefill_tokens", prefilled)
        for rows in batches:
            self._tokens += rows
            self._decode_steps += 1
            self.recorder.observe("engine/decode_batch", rows)
            self.recorder.count("engine/tokens", rows)
        # A caller may have given up while the outputs were compared. Its slot is gone then.
        return [(self._running[slot], generation) for slot, generation in ended if slot in self._running]

    async def _refresh(self) -> int:
        return await self.lane.run(lambda: self.version, name="engine/weights")

    # -- on the lane

    def _step(self) -> tuple[list[int], int, list[tuple[int, Generation]]]:
        """(tokens of each step, tokens prefilled, what ended) since the last call. Comparing outputs takes steps too."""
        self._apply_changes()
        # What ended while outputs were compared is reported first.
        if not self._ended:
            self._compute()
        batches, prefilled, ended = self._batches, self._unreported, self._ended
        self._batches, self._unreported, self._ended = [], 0, []
        return batches, prefilled, ended

    def _apply_changes(self) -> None:
        """Starts the requests that were admitted since the last closure, and aborts those that were given up."""
        while self._changes:
            slot, running = self._changes.popleft()
            if running is not None:
                self._slots[slot] = running
                self._put(slot)
                continue
            del self._slots[slot]
            for name in [name for name, other in self._names.items() if other == slot]:
                del self._names[name]
                self._core.abort([name])

    def _put(self, slot: int) -> None:
        """Adds the request to the core under a new name, because an aborted one keeps its name until the next step."""
        name, running = f"{slot}.{next(self._numbers)}", self._slots[slot]
        self._names[name] = slot
        request = running.request
        limit = request.sampling.max_tokens
        self._core.add(name, request.prompt_ids.tolist(), limit, running.stop_ids, salt=str(self.version))

    def _compute(self) -> None:
        """One step of the core."""
        rows = 0
        for each in self._core.step():
            if each.name == _REPLAY:
                assert self._replayed is not None
                self._replayed.take(each.token, each.prompt_logprobs)
                continue
            slot = self._names[each.name]
            running = self._slots[slot]
            self._prefilled += each.computed
            self._unreported += each.computed
            self._copied += each.cached
            if each.token is None:
                continue
            rows += 1
            running.keep_routes(partial(self._core.routes, each.name))
            hit = running.append(each.token, self._drawn[each.name], self.version)
            if hit or each.ended:
                reason = FinishReason.STOP if hit or each.stopped else FinishReason.LENGTH
                self._ended.append((slot, running.generation(reason, None if each.stopped else hit)))
            if hit and not each.ended:
                self._core.abort([each.name])
            if hit or each.ended:
                del self._names[each.name]
        if rows:
            self._batches.append(rows)

    def _choose(self, names: Sequence[str], logits_NV: Tensor) -> Tensor:
        """Tokens [N] for logits [N, V]. Their log-probs are kept until the end of the step says which tokens count."""
        given = None
        if _REPLAY in names:
            assert self._replayed is not None
            place = list(names).index(_REPLAY)
            # Before the sampler, which writes into the logits.
            given = place, self._replayed.choose(logits_NV[place])
        parts = []
        for start in range(0, len(names), _HEAD_ROWS):
            own = logits_NV[start : start + _HEAD_ROWS].float().contiguous()
            parts.append(self._sampler.draw(own, self._parameters(names[start : start + _HEAD_ROWS])))
        sampled = Sampled.read(parts)
        if given is not None:
            sampled.tokens[given[0]] = given[1]
        columns = zip(sampled.logprobs.tolist(), sampled.sampled_logprobs.tolist(), strict=True)
        self._drawn = dict(zip(names, columns, strict=True))
        return torch.from_numpy(sampled.tokens)

    def _parameters(self, names: Sequence[str]) -> RowParams:
        """Of the next token of each request. A replay's token is given, so its row is greedy and is not used."""
        found = [self._slots[self._names[name]] if name in self._names else None for name in names]
        sampling = [_GREEDY if each is None else each.request.sampling for each in found]
        seeds = np.array([0 if each is None else each.seed for each in found], np.uint64)
        places = np.array([0 if each is None else each.count for each in found], np.int64)
        changes = LogitChanges()
        for row, each in enumerate(found):
            if each is not None and each.request.sampling.changes_logits:
                changes.add(row, each.request.sampling, each.stop_ids, each.tokens, each.request.prompt_ids.size)
        return RowParams(
            np.array([each.temperature for each in sampling], np.float32),
            np.array([each.top_k for each in sampling], np.int64),
            np.array([each.top_p for each in sampling], np.float32),
            np.array([each.min_p for each in sampling], np.float32),
            keyed_uniform(seeds, places),
            changes,
        )
