"""Continuous batching over the trainer's own model, in this process.

Policy of the owner task: keep the decode batch full. Waiting requests are admitted as soon as a row is free and the budget
of cached positions has room; whoever is behind (a new prompt, a cache to rebuild) is brought forward before the next decode
step. Training closures go first by the lane's own priorities. Room for prompt and completion is reserved at admission:
nothing is ever preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from asyncrl.concurrency.lane import Lane
from asyncrl.data.texts import eos_token_ids
from asyncrl.generation.life import WHO
from asyncrl.generation.owner import Job, OwnedEngine
from asyncrl.generation.requests import check_tokens
from asyncrl.models.routing import require_routing
from asyncrl.types import FinishReason, Generation, GenerationRequest

from .cache import CacheShape, KVCache
from .core import Core, Decoded
from .plain_core import PlainCore
from .sequences import Sequences, prefix_key
from .stops import StopStrings

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel
    from asyncrl.telemetry.recorder import Recorder


def cache_shape(config: Any, max_sequences: int, max_context: int) -> CacheShape:
    """The cache of a Hugging Face causal LM `config`; `.nbytes(dtype)` predicts its memory."""
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
) -> Core | PlainCore:
    """The running batch of a model on its path. Numbers as of `EmbeddedEngine`. Errors: ConfigError where routes are to be
    recorded of a model that has none."""
    routing = (
        require_routing(policy.routing, policy.module, "routes of experts are to be recorded")
        if record_routes
        else None
    )
    sequences = Sequences(max_sequences, max_context, None if routing is None else routing.shape)
    if policy.path.name == "plain":
        return PlainCore(policy, sequences, prefill_tokens=prefill_tokens)
    shape = cache_shape(policy.config, 1, kv_positions)  # the batch gives the cache's rows their length
    cache = KVCache(shape, policy.dtype, policy.device)
    return Core(policy, cache, sequences, prefill_tokens=prefill_tokens, recompute=recompute)


class EmbeddedEngine(OwnedEngine):
    """Implements `ports.Engine` and `ports.WeightSink` on a model shared with the trainer, on the trainer's lane.

    max_sequences: rows decoded together. max_context: longest prompt + max_tokens of a request. kv_positions: of all rows
    together, each as long as the longest that runs; what the cache allocates. None: max_sequences x max_context.
    prefill_tokens: most tokens computed by one prefill closure.
    kv_after_update: what happens to the cached keys and values of running sequences when the version changes.
    record_routes: generations say which experts each token went to.
    eos: every token that ends a completion; None: those of tokenizer and model.
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
        record_routes: bool = False,
        eos: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(
            lane, recorder, max_sequences=max_sequences, max_context=max_context, kv_positions=kv_positions
        )
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens is {prefill_tokens}, expected at least 1")
        self.policy = policy
        self.tokenizer = tokenizer
        self._prefill_tokens = prefill_tokens
        self._recompute = kv_after_update == "recompute"
        self._record_routes = record_routes
        self._vocabulary = int(policy.config.get_text_config().vocab_size)
        self._eos = eos_token_ids(policy.module, tokenizer) if eos is None else eos
        self._stop_strings: dict[int, StopStrings] = {}  # by slot
        self._core: Core | PlainCore | None = None

    def check(self, request: GenerationRequest) -> None:
        """As the base class; and token ids beyond the vocabulary, and stop strings without a tokenizer."""
        super().check(request)
        check_tokens(request, self._vocabulary, self.tokenizer is not None)

    def statistics(self) -> dict[str, float]:
        """As the base class; and `prefill_tokens` computed and `copied_tokens` spared so far."""
        core = self._core
        return super().statistics() | {
            "prefill_tokens": float(core.tokens_prefilled if core else 0),
            "copied_tokens": float(core.tokens_copied if core else 0),
        }

    # -- the batch ----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        self._core = await self.lane.run(self._open_core, name="engine/open")

    def _open_core(self) -> Core | PlainCore:
        """On the lane: its device's memory is allocated by its owner."""
        return open_core(
            self.policy,
            max_sequences=self.max_sequences,
            max_context=self.max_context,
            kv_positions=self.kv_positions,
            prefill_tokens=self._prefill_tokens,
            recompute=self._recompute,
            record_routes=self._record_routes,
        )

    @property
    def core(self) -> Core | PlainCore:
        """The running batch; made by the owner task before it serves anybody."""
        assert self._core is not None, "the owner task prepares the core before anything else"
        return self._core

    def _add(self, job: Job) -> int:
        sampling = job.request.sampling
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos)
        slot = self.core.add(job.request, tuple(dict.fromkeys(stop_ids)))
        if sampling.stop:
            assert self.tokenizer is not None  # `check` refused it otherwise
            self._stop_strings[slot] = StopStrings(self.tokenizer, sampling.stop, sampling.min_tokens)
        return slot

    def _remove(self, job: Job) -> None:
        key = prefix_key(job.request)
        wanted = key is not None and any(prefix_key(other.request) == key for other in self._waiting)
        self._stop_strings.pop(job.slot, None)
        self.core.remove(job.slot, keep_prefix=wanted)

    async def _advance(self) -> list[tuple[Job, Generation]]:
        core = self.core
        if core.needs_prefill:
            with self.recorder.span("prefill", track=WHO, sequences=len(self._running)):
                tokens = await self.lane.run(core.prefill, name="engine/prefill")
            self.recorder.count("engine/prefill_tokens", tokens)
            return []
        with self.recorder.span("decode", track=WHO, sequences=len(self._running)):
            decoded = await self.lane.run(core.decode, name="engine/decode")
        # The weights changed just before, and the caches must be rebuilt first.
        if not decoded.rows:
            return []
        self._tokens += decoded.rows
        self._decode_steps += 1
        self.recorder.observe("engine/decode_batch", decoded.rows)
        self.recorder.count("engine/tokens", decoded.rows)
        return self._ended(core, decoded)

    def _ended(self, core: Core | PlainCore, decoded: Decoded) -> list[tuple[Job, Generation]]:
        reasons = dict.fromkeys(decoded.ended, FinishReason.LENGTH)
        reasons |= dict.fromkeys(decoded.stopped, FinishReason.STOP)
        found: dict[int, str] = {}
        for slot, stop in self._stop_strings.items():
            if reasons.get(slot) is not FinishReason.STOP and (string := stop.hit(core.sequences.completion(slot))):
                reasons[slot], found[slot] = FinishReason.STOP, string
        generation = core.sequences.generation
        return [(self._running[slot], generation(slot, reason, found.get(slot))) for slot, reason in reasons.items()]

    async def _refresh(self) -> int:
        return await self.lane.run(self.core.sync, name="engine/weights")
