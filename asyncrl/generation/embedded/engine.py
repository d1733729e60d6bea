"""Continuous batching over a model in this process: the trainer's own model, or a worker's.

The owner task (`owner.py`) admits a request only if the cache has room for prompt and completion, so no sequence is preempted.
Prefill runs before the next decode step. Training closures have a higher priority on the lane.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from asyncrl.concurrency.lane import Lane
from asyncrl.data.texts import eos_token_ids
from asyncrl.generation.lifecycle import TRACK
from asyncrl.generation.owner import Job, OwnedEngine, kept_age_limit
from asyncrl.generation.requests import check_tokens
from asyncrl.models.outputs import BOUNDS, bound_of, fixed_logprobs
from asyncrl.models.routing import has_experts, require_routing
from asyncrl.types import FinishReason, Generation, GenerationRequest

from .cache import CacheShape, KVCache
from .core import Core, Decoded
from .plain_core import PlainCore
from .sequences import Sequences
from .stops import StopStrings, stops_of

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel
    from asyncrl.telemetry.recorder import Recorder


# How many decode steps last as long as a short prefill. On a GPU a prefill launches kernel by kernel (25 ms with a model of
# 0.6 billion weights on an H200), but a decode step is one graph (6 ms). On a CPU a short prefill is no longer than a decode step.
_PREFILL_STEPS_ON_A_GPU = 4


def cache_shape(config: Any, max_sequences: int, max_context: int) -> CacheShape:
    """The cache's sizes for a causal LM with this `config` of transformers. `.nbytes(dtype)` predicts the memory."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return CacheShape(
        layers=text.num_hidden_layers,
        rows=max_sequences,
        heads=getattr(text, "num_key_value_heads", None) or heads,
        positions=max_context,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def open_core(
    policy: PolicyModel,
    *,
    max_sequences: int,
    max_context: int,
    kv_positions: int,
    prefill_tokens: int,
    recompute: bool,
    record_routes: bool = False,
    kept_max_age: int | None = None,
) -> Core | PlainCore:
    """The running batch for the policy's `ModelPath`. `recompute`, `kept_max_age`: see `Core`. The other parameters are those of
    `EmbeddedEngine`. Errors: ConfigError for `record_routes` if the model's routes cannot be recorded."""
    routes = None
    if record_routes:
        routes = require_routing(policy.routing, policy.module, "routes of experts are to be recorded").shape
    sequences = Sequences(max_sequences, max_context, routes)
    if policy.path.name == "plain":
        return PlainCore(policy, sequences, prefill_tokens=prefill_tokens)
    # One row of all positions. `Core` changes the shape to fit the running sequences.
    shape = cache_shape(policy.config, 1, kv_positions)
    cache = KVCache(shape, policy.dtype, policy.device)
    return Core(policy, cache, sequences, prefill_tokens=prefill_tokens, recompute=recompute, kept_max_age=kept_max_age)


class EmbeddedEngine(OwnedEngine):
    """Implements `ports.Engine`, `ports.WeightSink` and, in a worker, `weights.sync.BoardEngine`. Samples from the trainer's model
    on the trainer's lane, or from a worker's model, which reads the weight board (models/reading.py).

    max_sequences: rows decoded together. max_context: longest prompt + max_tokens of a request. kv_positions: positions that the
    cache allocates for all rows together, each row as long as the longest running sequence. None: max_sequences x max_context.
    prefill_tokens: limit of one prefill closure. kv_after_update: whether running sequences keep or recompute their cached
    keys and values when the version changes. kept_prefix_max_age: largest age, in versions, of a cached prefix that the next
    request of a session may use; 0: no row is kept. record_routes: generations contain the experts of each token.
    eos: ids of the tokens that end a completion, unless a request ignores them; None: those of the tokenizer and the model.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: Any,
        lane: Lane,
        recorder: Recorder,
        *,
        max_sequences: int,
        max_context: int,
        kv_positions: int | None = None,
        prefill_tokens: int = 2048,
        kv_after_update: Literal["keep", "recompute"] = "keep",
        kept_prefix_max_age: int = 0,
        record_routes: bool = False,
        eos: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(
            lane, recorder, max_sequences=max_sequences, max_context=max_context, kv_positions=kv_positions
        )
        self.policy = policy
        self.tokenizer = tokenizer
        if policy.device.type == "cuda":
            self.prefill_steps = _PREFILL_STEPS_ON_A_GPU
        recompute = kv_after_update == "recompute"
        self._open_core = partial(
            open_core,
            policy,
            max_sequences=max_sequences,
            max_context=max_context,
            kv_positions=self.kv_positions,
            prefill_tokens=prefill_tokens,
            recompute=recompute,
            record_routes=record_routes,
            kept_max_age=kept_age_limit(kept_prefix_max_age, recompute),
        )
        self._vocabulary = int(policy.config.get_text_config().vocab_size)
        self._eos = eos_token_ids(policy.module, tokenizer) if eos is None else eos
        self._stop_strings: dict[int, StopStrings] = {}  # by slot
        self._core: Core | PlainCore | None = None
        self.output_bound = bound_of(BOUNDS, policy.dtype, has_experts(policy.module))

    def check(self, request: GenerationRequest) -> None:
        super().check(request)
        check_tokens(request, self._vocabulary, self.tokenizer is not None)

    def statistics(self) -> dict[str, float]:
        """As the base class, and: `prefill_tokens`, computed since the start; `copied_tokens`, copied from shared prompts since the
        start; `kept_rows`, the rows that are kept now for the next request of a session."""
        core = self._core
        if core is None:
            return super().statistics() | dict.fromkeys(("prefill_tokens", "copied_tokens", "kept_rows"), 0.0)
        counts = {"prefill_tokens": float(core.tokens_prefilled), "copied_tokens": float(core.tokens_copied)}
        return super().statistics() | counts | {"kept_rows": float(len(core.sequences.kept))}

    # -- the batch ----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        # On the lane, because only the lane may use its device.
        self._core = await self.lane.run(self._open_core, name="engine/open")

    @property
    def core(self) -> Core | PlainCore:
        """The running batch. The owner task creates it before it admits a request."""
        assert self._core is not None, "the owner task has not created the core yet"
        return self._core

    def _add(self, job: Job) -> int:
        stop_ids, strings = stops_of(job.request.sampling, self._eos, self.tokenizer)
        slot = self.core.add(job.request, stop_ids)
        if strings is not None:
            self._stop_strings[slot] = strings
        return slot

    def _end_session(self, session: str) -> None:
        self.core.end_session(session)

    def _remove(self, job: Job, finished: bool) -> None:
        self._stop_strings.pop(job.slot, None)
        self.core.remove(job.slot, keep_row=finished)

    async def _advance(self) -> list[tuple[Job, Generation]]:
        core = self.core
        if core.needs_prefill:
            with self.recorder.span("prefill", track=TRACK, sequences=len(self._running)):
                tokens = await self.lane.run(core.prefill, name="engine/prefill")
            self.recorder.count("engine/prefill_tokens", tokens)
            return []
        with self.recorder.span("decode", track=TRACK, sequences=len(self._running)):
            decoded = await self.lane.run(core.decode, name="engine/decode")
        # No rows: the version has changed since `needs_prefill` was read, so sequences must be prefilled again first.
        if not decoded.rows:
            return []
        self._count_step(decoded.rows)
        return self._finished_generations(core, decoded)

    def _finished_generations(self, core: Core | PlainCore, decoded: Decoded) -> list[tuple[Job, Generation]]:
        reasons = dict.fromkeys(decoded.ended, FinishReason.LENGTH)
        reasons |= dict.fromkeys(decoded.stopped, FinishReason.STOP)
        strings: dict[int, str] = {}
        for slot, search in self._stop_strings.items():
            # A stop token wins over a stop string.
            if reasons.get(slot) is FinishReason.STOP:
                continue
            if string := search.hit(core.sequences.completion(slot)):
                reasons[slot], strings[slot] = FinishReason.STOP, string
        columns, generation = core.sequences, core.sequences.generation
        for slot in reasons:
            if reused := int(columns.reused[slot]):
                first_version = columns.versions[slot, columns.prompt_length[slot]]
                self._count_reused(reused, int(first_version - columns.oldest[slot]))
        return [(self._running[slot], generation(slot, reason, strings.get(slot))) for slot, reason in reasons.items()]

    async def _refresh(self) -> int:
        return await self.lane.run(self.core.sync, name="engine/weights")

    # -- weights.sync.BoardEngine -------------------------------------------------------------------------------------

    def move_to(self, half: Tensor, version: int) -> None:
        """Let the modules read the weights in `half` of the board. On a CPU the first step after the move packs the weights."""
        self.policy.flat.move_to(half)
        self.policy.version = version

    async def outputs(self) -> list[float]:
        return await self.lane.run(lambda: fixed_logprobs(self.policy), name="engine/outputs")
