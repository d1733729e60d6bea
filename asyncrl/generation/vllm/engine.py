"""The engine of a worker that generates with vLLM. `owner.py` admits the requests, and vLLM runs them.

    generate() --> waiting --admit--> running --one step of vLLM per closure on the lane--> result    (owner.py)
    logits of a step --> the embedded engine's sampler --> token, both log-probs, version of the weights

Guarantees, the same as those of the embedded engine
* The random numbers of a request depend only on (seed, index of the token). vLLM itself samples nothing.
* `logprobs` are over the full vocabulary at the sampling temperature (greedy: 1). `sampled_logprobs` are after all filters.
* Each token has the version of the weights that sampled it. Weights change only between two steps, on the device's thread (lane).
* After a change of weights, `kv_after_update: keep` lets sequences with sampled tokens go on with their cached keys and values, and
  computes the other sequences again. `recompute` computes all sequences again. Requests share the keys and values of a prompt only
  within a version or a session. A request may go on with cached tokens of an earlier request of its session (`_CachedPrefix`).
* No sequence is preempted, because vLLM's cache has room for all admitted requests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.generation.embedded.sampling import LogitChanges, RowParams, Sampled, Sampler, keyed_uniform, seed_array
from asyncrl.generation.embedded.stops import StopStrings, stops_of
from asyncrl.generation.lifecycle import TRACK
from asyncrl.generation.owner import Job, OwnedEngine, kept_age_limit
from asyncrl.generation.requests import check_tokens
from asyncrl.models.outputs import DECODED, bound_of, fixed_row
from asyncrl.types import FinishReason, Generation, GenerationRequest, Int64Array, SamplingParams

if TYPE_CHECKING:
    from asyncrl.telemetry.recorder import Recorder

_HEAD_ROWS = 128  # rows whose logits exist in float32 at the same time
_REPLAY = "replay"  # name of the replayed request in the core
# Limits in nats for `models.outputs.Bound`, vLLM against the trainer. Measured with SmolLM2: 0.08 in bfloat16, 1e-5 in float32.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.3}
_GREEDY = SamplingParams(temperature=0)

ChooseTokens = Callable[[Sequence[str], Tensor], Tensor]  # (names of N requests, logits [N, V]) -> tokens [N]


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """The model of a core (`VllmCore`). `stop_ids`: end-of-sequence tokens. `has_experts`: whether a layer has experts."""

    dtype: torch.dtype
    vocabulary: int
    stop_ids: tuple[int, ...]
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class _CachedPrefix:
    """The beginning of a finished request. `tokens`: the prompt and the first sampled token. The weights of `version` computed the
    prompt and sampled that token. vLLM shares cached blocks only between requests of one *salt*, here the number of a version. If
    the prompt of a later request of the session begins with `tokens`, the later request gets the salt `version`. With this salt
    the later request finds the blocks, if vLLM still has them."""

    version: int
    tokens: Int64Array


class RunningRequest:
    """One running request with its sampled tokens. Only the lane changes it."""

    def __init__(self, request: GenerationRequest, stop_ids: tuple[int, ...], stop_strings: StopStrings | None) -> None:
        sampling = request.sampling
        self.request = request
        self.stop_ids = stop_ids
        self.seed = seed_array(request.seed)[0]
        self.session = request.session
        # Version of the `_CachedPrefix` with which the prompt begins. None: the current weights compute the prompt.
        self.base_version: int | None = None
        self.reused = 0  # number of prompt tokens that were cached
        self.count = 0  # number of sampled tokens
        self._stop_strings = stop_strings
        self._tokens = np.zeros(sampling.max_tokens, np.int64)
        self._logprobs = np.zeros((2, sampling.max_tokens), np.float32)  # of the model; as sampled
        self._versions = np.zeros(sampling.max_tokens, np.int32)

    @property
    def first_version(self) -> int:
        """Version of the weights that sampled the first token."""
        return int(self._versions[0])

    @property
    def tokens(self) -> Int64Array:
        """The tokens of the prompt and the sampled tokens."""
        return np.concatenate([self.request.prompt_ids, self._tokens[: self.count]])

    def append(self, token: int, logprobs: tuple[float, float], version: int) -> str | None:
        """Add a token that weights of `version` have sampled. Returns the stop string that the token completes, or None."""
        index, self.count = self.count, self.count + 1
        self._tokens[index], self._logprobs[:, index], self._versions[index] = token, logprobs, version
        return None if self._stop_strings is None else self._stop_strings.hit(self._tokens[: self.count])

    def generation(self, reason: FinishReason, stop: str | None) -> Generation:
        """The finished sequence, in copies. `stop`: the stop string that ended the sequence."""
        tokens, versions = self._tokens[: self.count].astype(np.int32), self._versions[: self.count].copy()
        logprobs, sampled_logprobs = self._logprobs[:, : self.count].copy()
        return Generation(tokens, logprobs, sampled_logprobs, versions, reason, stop=stop)


class Replay:
    """Collects log-probs by teacher forcing, for all known tokens but the first: in nats, over the full vocabulary, temperature 1.
    vLLM computes the log-probs of the prompt. Each later log-prob comes from the step that would sample the token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: the known tokens after the prompt."""
        self._tokens = tokens
        self._prompt_logprobs: list[float] | None = None
        self._logprobs: list[float] = []
        self._next_logprob = 0.0

    def choose(self, logits_V: Tensor) -> int:
        """The next known token. vLLM calls this several times for one token if the prompt takes several steps."""
        token = self._tokens[len(self._logprobs)]
        self._next_logprob = float(logits_V.double().log_softmax(-1)[token])
        return token

    def add_output(self, token: int | None, prompt_logprobs: list[float] | None) -> None:
        """Add a step's output for this sequence. `token` is None while the prompt is incomplete."""
        if prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs
        if token is not None:
            self._logprobs.append(self._next_logprob)

    @property
    def logprobs(self) -> list[float] | None:
        """All log-probs, or None until the last token is computed."""
        done = self._prompt_logprobs is not None and len(self._logprobs) == len(self._tokens)
        return [*(self._prompt_logprobs or ()), *self._logprobs] if done else None


class VllmEngine(OwnedEngine):
    """Implements `ports.Engine` and `weights.sync.BoardEngine` with the core of a vLLM adapter."""

    def __init__(
        self,
        open_core: Callable[[ChooseTokens], Any],
        spec: CoreSpec,
        tokenizer: Any,
        lane: Lane,
        recorder: Recorder,
        *,
        max_sequences: int,
        max_context: int,
        kv_positions: int | None = None,
        kv_after_update: Literal["keep", "recompute"] = "keep",
        kept_prefix_max_age: int = 0,
    ) -> None:
        """`open_core`: creates the core, on the lane. Its argument is the function that samples the tokens."""
        super().__init__(
            lane, recorder, max_sequences=max_sequences, max_context=max_context, kv_positions=kv_positions
        )
        self.spec = spec
        self.dtype, self.output_bound = spec.dtype, bound_of(BOUNDS, spec.dtype, spec.has_experts)
        self.version = -1
        self.tokenizer = tokenizer
        self._open_core = open_core
        self._recompute = kv_after_update == "recompute"
        self._kept_max_age = kept_age_limit(kept_prefix_max_age, self._recompute)
        self._numbers = itertools.count()
        # (slot, new request), or (slot, None) after the request's end or abort. The owner task appends; the next step applies them.
        self._changes: deque[tuple[int, RunningRequest | None]] = deque()
        # Sessions that have ended since the last step.
        self._sessions_to_forget: deque[str] = deque()
        # Only the lane uses the attributes from here on.
        self._core: Any = None
        self._sampler = Sampler()
        self._slots: dict[int, RunningRequest] = {}
        self._slot_of_name: dict[str, int] = {}  # names of requests in the core
        self._sampled_logprobs: dict[str, tuple[float, float]] = {}  # (model, as sampled) of the newest token, by name
        self._replay: Replay | None = None
        self._prefixes: dict[str, list[_CachedPrefix]] = {}  # by session
        self._prefilled = self._copied = 0  # tokens so far
        # Results of steps that `_step` has not reported yet.
        self._ended: list[tuple[int, Generation]] = []
        self._reused: list[tuple[int, int]] = []  # (tokens, age), see `_count_reused`
        self._new_prefilled = 0
        self._batches: list[int] = []  # sampled tokens of each step

    def check(self, request: GenerationRequest) -> None:
        super().check(request)
        check_tokens(request, self.spec.vocabulary, self.tokenizer is not None)

    def statistics(self) -> dict[str, float]:
        """See the base class. Also, since the start: `prefill_tokens` computed, and `copied_tokens` found in the cache."""
        return super().statistics() | {"prefill_tokens": float(self._prefilled), "copied_tokens": float(self._copied)}

    # -- weights.sync.BoardEngine

    def open_on_lane(self) -> None:
        """Create the core. Call this on the lane: vLLM's core belongs to the thread that creates it."""
        self._core = self._open_core(self._choose)

    def move_to(self, half: Tensor, version: int) -> None:
        """Use the weights of `version`, in this half of the weight board, for all later tokens. Call this on the lane."""
        self._core.bind(half, version)
        self.version = version
        if self._recompute:
            self._core.forget_caches()
            return
        # Restart the requests without a sampled token.
        for name in [name for name, slot in self._slot_of_name.items() if not self._slots[slot].count]:
            self._core.abort([name])
            self._add_to_core(self._slot_of_name.pop(name))

    async def outputs(self) -> list[float]:
        """Log-probs of the fixed row (models/outputs.py) with the current weights. Most of the row is a prompt. The last tokens are
        decoded, because decoding uses other kernels and reads the cache."""
        row = fixed_row(self.spec.vocabulary).tolist()
        return await self.replay(row[:-DECODED], row[-DECODED:])

    async def replay(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """See `Replay`. Only one call at a time. Each step is one closure on the lane, and also computes the other requests."""
        replay = Replay(tokens)

        def begin() -> None:
            self._replay = replay
            self._core.add_replay(_REPLAY, prompt, len(tokens))

        await self.lane.run(begin, name="engine/outputs")
        while (logprobs := replay.logprobs) is None:
            await self.lane.run(self._compute, name="engine/outputs")
        return logprobs

    # -- the batch

    async def _prepare(self) -> None:
        if self._core is None:
            await self.lane.run(self.open_on_lane, name="engine/open")

    def _add(self, job: Job) -> int:
        slot, stops = next(self._numbers), stops_of(job.request.sampling, self.spec.stop_ids, self.tokenizer)
        self._changes.append((slot, RunningRequest(job.request, *stops)))
        return slot

    def _remove(self, job: Job, finished: bool) -> None:
        self._changes.append((job.slot, None))

    def _end_session(self, session: str) -> None:
        self._sessions_to_forget.append(session)

    async def _advance(self) -> list[tuple[Job, Generation]]:
        with self.recorder.span("decode", track=TRACK, sequences=len(self._running)):
            batches, prefilled, ended, reused = await self.lane.run(self._step, name="engine/decode")
        self.recorder.count("engine/prefill_tokens", prefilled)
        for tokens, age in reused:
            self._count_reused(tokens, age)
        for rows in batches:
            self._count_step(rows)
        # A request may have been aborted after it ended in a step of `replay`. Its slot is not in `_running` any more.
        return [(self._running[slot], generation) for slot, generation in ended if slot in self._running]

    async def _refresh(self) -> int:
        return await self.lane.run(lambda: self.version, name="engine/weights")

    # -- on the lane

    def _step(self) -> tuple[list[int], int, list[tuple[int, Generation]], list[tuple[int, int]]]:
        """(sampled tokens of each step, prefilled tokens, ended requests, reused tokens and ages) since the last call, including
        steps of `replay`."""
        self._apply_changes()
        # Requests that ended in a step of `replay` are reported without another step.
        if not self._ended:
            self._compute()
        results = self._batches, self._new_prefilled, self._ended, self._reused
        self._batches, self._new_prefilled, self._ended, self._reused = [], 0, [], []
        return results

    def _apply_changes(self) -> None:
        """Add the new requests to the core, and remove the requests that have ended or were aborted. Forget ended sessions."""
        while self._changes:
            slot, added = self._changes.popleft()
            if added is not None:
                self._slots[slot] = added
                self._add_to_core(slot)
                continue
            del self._slots[slot]
            for name in [name for name, other in self._slot_of_name.items() if other == slot]:
                del self._slot_of_name[name]
                self._core.abort([name])
        while self._sessions_to_forget:
            session = self._sessions_to_forget.popleft()
            self._prefixes.pop(session, None)
            for running in self._slots.values():
                if running.session == session:
                    running.session = None

    def _add_to_core(self, slot: int) -> None:
        # A new name: the core keeps the name of an aborted request until the core's next step.
        name, running = f"{slot}.{next(self._numbers)}", self._slots[slot]
        self._slot_of_name[name] = slot
        prompt, max_tokens = running.request.prompt_ids.tolist(), running.request.sampling.max_tokens
        salt, running.base_version = self._choose_salt(running, name)
        running.reused = 0
        self._core.add(name, prompt, max_tokens, running.stop_ids, salt=salt)

    def _choose_salt(self, running: RunningRequest, name: str) -> tuple[str, int | None]:
        """The salt of the request (see `_CachedPrefix`), and its `RunningRequest.base_version`."""
        prompt = running.request.prompt_ids
        prefixes = [] if running.session is None else self._prefixes.get(running.session, [])
        versions = [kept.version for kept in prefixes if np.array_equal(prompt[: kept.tokens.size], kept.tokens)]
        # If nothing may be kept, a request that continues an earlier request gets a new salt: it must find no earlier blocks.
        if versions and self._kept_max_age is None:
            return name, None
        base = max(versions, default=None)
        if base is None or self._kept_max_age is None or self.version - base > self._kept_max_age:
            return str(self.version), None
        return str(base), base

    def _keep_prefix(self, running: RunningRequest) -> None:
        """Let later requests of the session go on with the cached tokens of this finished request."""
        if running.base_version is not None and running.reused:
            self._reused.append((running.reused, running.first_version - running.base_version))
        # The blocks of a request with a base version have the salt of an earlier prefix, which is in the list already.
        if running.session is not None and running.base_version is None:
            prefixes = self._prefixes.setdefault(running.session, [])
            prefixes.append(_CachedPrefix(running.first_version, running.tokens[: running.request.prompt_ids.size + 1]))

    def _compute(self) -> None:
        """Run one step of the core and store its outputs."""
        rows = 0
        for output in self._core.step():
            if output.name == _REPLAY:
                assert self._replay is not None
                self._replay.add_output(output.token, output.prompt_logprobs)
                continue
            slot = self._slot_of_name[output.name]
            running = self._slots[slot]
            self._prefilled += output.computed
            self._new_prefilled += output.computed
            self._copied += output.cached
            running.reused = max(running.reused, output.cached)
            if output.token is None:
                continue
            rows += 1
            stop_string = running.append(output.token, self._sampled_logprobs[output.name], self.version)
            if not stop_string and not output.ended:
                continue
            reason = FinishReason.STOP if stop_string or output.stopped else FinishReason.LENGTH
            self._keep_prefix(running)
            self._ended.append((slot, running.generation(reason, None if output.stopped else stop_string)))
            if not output.ended:
                self._core.abort([output.name])
            del self._slot_of_name[output.name]
        if rows:
            self._batches.append(rows)

    def _choose(self, names: Sequence[str], logits_NV: Tensor) -> Tensor:
        """Sample tokens [N] from logits [N, V]. vLLM ignores tokens of incomplete prompts; `_compute` ignores their log-probs."""
        replayed = None
        if _REPLAY in names:
            assert self._replay is not None
            row = list(names).index(_REPLAY)
            # Before the sampler is called, because it overwrites the logits.
            replayed = row, self._replay.choose(logits_NV[row])
        parts = []
        for start in range(0, len(names), _HEAD_ROWS):
            logits = logits_NV[start : start + _HEAD_ROWS].float().contiguous()
            parts.append(self._sampler.draw(logits, self._parameters(names[start : start + _HEAD_ROWS])))
        sampled = Sampled.read(parts)
        if replayed is not None:
            row, token = replayed
            sampled.tokens[row] = token
        logprobs = zip(sampled.logprobs.tolist(), sampled.sampled_logprobs.tolist(), strict=True)
        self._sampled_logprobs = dict(zip(names, logprobs, strict=True))
        return torch.from_numpy(sampled.tokens)

    def _parameters(self, names: Sequence[str]) -> RowParams:
        """Sampling parameters for the next token of each request; greedy for the replayed request, whose token is replaced."""
        requests = [self._slots[self._slot_of_name[name]] if name in self._slot_of_name else None for name in names]
        sampling = [_GREEDY if running is None else running.request.sampling for running in requests]
        seeds = np.array([0 if running is None else running.seed for running in requests], np.uint64)
        indices = np.array([0 if running is None else running.count for running in requests], np.int64)
        changes = LogitChanges()
        for row, running in enumerate(requests):
            if running is not None and running.request.sampling.changes_logits:
                request = running.request
                changes.add(row, request.sampling, running.stop_ids, running.tokens, request.prompt_ids.size)
        return RowParams(
            np.array([params.temperature for params in sampling], np.float32),
            np.array([params.top_k for params in sampling], np.int64),
            np.array([params.top_p for params in sampling], np.float32),
            np.array([params.min_p for params in sampling], np.float32),
            keyed_uniform(seeds, indices),
            changes,
        )
