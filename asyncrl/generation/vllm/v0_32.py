"""vLLM 0.32: all that asyncrl knows of its inside. The next minor version gets files of its own, with the same class.

The engine core runs in this thread, without a process or a socket of its own (`InprocClient`). Between two calls of `step` nothing
of it runs: weights are changed there.

Weights. A loader of ours lets vLLM's own one copy from the buffer once and records it (recording.py). Later versions are laid out
by that, for layers that read packed copies too, between two steps (`bind`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as ops
from pydantic import ValidationError
from torch import Tensor, nn
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from asyncrl.errors import ConfigError, first_line
from asyncrl.models.parameters.layout import Layout
from asyncrl.models.routing import RoutesShape
from asyncrl.types import RoutesArray

from .engine import Choose
from .recording import Recorded, record
from .scratch import scratch_folder
from .v0_32_kernels import use_kernels
from .v0_32_layers import names_for, refuse
from .v0_32_routes import CachedRoutes
from .v0_32_weights import Weights
from .versions import BLOCK

_FORMAT = "asyncrl"
_FAILURES = (
    ValueError, RuntimeError, AssertionError, LookupError, AttributeError, ImportError, OSError, TypeError, MemoryError,
)  # fmt: skip  # whatever its many files raise for a model that they do not take


@dataclass(frozen=True, slots=True)
class Form:
    """What vLLM is made for. `config`: that of transformers, as JSON; `buffer`: of this layout, with any weights."""

    config: Mapping[str, Any]
    layout: Layout
    buffer: Tensor


@dataclass(frozen=True, slots=True)
class Room:
    """Sequences at a time, their longest context and all their positions together; tokens that one step computes."""

    sequences: int
    context: int
    positions: int
    step_tokens: int
    position_bytes: int  # keys and values of one position, all layers


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step did to one request. `computed`: its tokens beside one that decodes, of the prompt or anew; `cached`: those of the
    prompt that were spared, told with its first token."""

    name: str
    token: int | None
    ended: bool
    stopped: bool  # by a stop token
    computed: int
    cached: int
    prompt_logprobs: list[float] | None


class Core:
    """vLLM's scheduler, cache and model, stepped by hand. One thread makes and uses it; one at a time in a process."""

    def __init__(
        self,
        form: Form,
        room: Room,
        choose: Choose,
        *,
        pack: bool = True,
        routes: RoutesShape | None = None,
    ) -> None:
        """`pack`: linear layers read packed copies, made at each version anew; else the buffer where it lies. `routes`: of the
        trainer's model, where it is recorded which experts each token goes to.
        Errors: ConfigError where vLLM cannot run this model, or cannot be handed its weights."""
        ops._supports_onednn = False  # the copies are ours: what it packs while it loads would be thrown away
        loader = _loader(form)
        try:
            _inspect_here(form.config["architectures"])
            with scratch_folder() as folder, _unbound_memory():
                Path(folder, "config.json").write_text(json.dumps(form.config), encoding="utf-8")
                engine = LLMEngine.from_engine_args(_arguments(folder, form, room))
        except ConfigError:
            raise
        except _FAILURES as error:
            raise ConfigError(_why(error, room)) from error
        self._engine = engine
        self._client = engine.engine_core
        self._core = self._client.engine_core
        runner = self._core.model_executor.driver_worker.worker.model_runner
        self.model: nn.Module = runner.model
        runner.sampler = _Sampler(runner, choose)
        self._scheduled: dict[str, int] = {}  # tokens of the last step, by request
        schedule = self._core.scheduler.schedule

        def watched(*args: Any, **options: Any) -> Any:
            found = schedule(*args, **options)
            self._scheduled = found.num_scheduled_tokens
            return found

        self._core.scheduler.schedule = watched
        refuse(self.model, loader.recorded)
        use_kernels(self.model)
        dtype = form.buffer.dtype
        self._weights = Weights(self.model, loader.recorded, loader.owners, dtype, pack=pack)
        _require_cache(self._core, room)
        self._routes: CachedRoutes | None = None
        if routes is not None:
            self._routes = CachedRoutes(runner, routes, self._core.scheduler.kv_cache_config)

    # -- requests: between two steps

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], salt: str) -> None:
        """A request; none of this name is there. Prompts are shared with others of this `salt` alone."""
        self._add(name, prompt, salt, max_tokens=max_tokens, stop_token_ids=list(stop_ids))

    def add_replay(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """One that answers with the log-probs of its prompt, computed anew, with its first token."""
        self._add(name, prompt, name, max_tokens=max_tokens, prompt_logprobs=0)

    def _add(self, name: str, prompt: Sequence[int], salt: str, **sampling: Any) -> None:
        params = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._client.add_request(request)

    def abort(self, names: Sequence[str]) -> None:
        """Those of them that have not ended do; what they held is free."""
        self._client.abort_requests(list(names))

    def forget_caches(self) -> None:
        """The cached keys and values of all requests are computed anew, and none is shared with what was before."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    # -- steps

    @torch.no_grad()
    def step(self) -> list[Stepped]:
        """Compute once for all requests, as many tokens as a step may; what became of those of which some were computed."""
        self._scheduled = {}
        outputs = self._client.get_output().outputs
        counts = dict(self._scheduled)
        stepped = [_stepped(output, counts.pop(output.request_id, 0)) for output in outputs]
        return stepped + [Stepped(name, None, False, False, count, 0, None) for name, count in counts.items()]

    def routes(self, name: str, start: int, stop: int) -> RoutesArray:
        """Where the tokens at these positions of a request of the last step went, [stop - start, layers, k]."""
        assert self._routes is not None  # nobody asks otherwise
        return self._routes.of(name, start, stop)

    # -- weights: between two steps

    @torch.no_grad()
    def bind(self, buffer: Tensor) -> None:
        """The next step computes with the weights in `buffer`, which stays as it is until the next call."""
        self._weights.read(buffer)

    def close(self) -> None:
        """Let go of model and cache."""
        self._client.shutdown()


class _Sampler(Sampler):
    """In the place of vLLM's: who draws, and what is kept of it, is decided outside."""

    def __init__(self, runner: Any, choose: Choose) -> None:
        super().__init__("raw_logprobs")
        self._runner = runner
        self._choose = choose

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        names = self._runner.input_batch.req_ids[: logits.shape[0]]
        tokens = self._choose(names, logits)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)


class _Loader(BaseModelLoader):
    """Reads the weights of a `Form`, and records where each goes."""

    form: Form
    recorded: dict[str, Recorded]
    owners: dict[str, list[tuple[nn.Module, str]]]

    def download_model(self, model_config: Any) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Before vLLM packs anything."""
        kind, targets = type(self), dict(model.named_parameters())
        kind.owners = {
            name: [
                (module, attribute)
                for module in model.modules()
                for attribute, parameter in module._parameters.items()
                if parameter is target
            ]
            for name, target in targets.items()
        }
        plain = {name: target.data for name, target in targets.items()}
        kind.recorded = record(
            lambda weights: model.load_weights(names_for(model, weights)), self.form.layout, self.form.buffer, plain
        )
        now = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for name, tensor in plain.items():
            if now.get(name) != tensor.data_ptr():
                raise ConfigError(
                    f"generation.engine is vllm, which replaces its parameter {name} while it loads, so that new versions cannot "
                    "be handed to it; use generation.engine=embedded"
                )


def _loader(form: Form) -> type[_Loader]:
    """A class for one load: vLLM makes the object, and keeps it to itself."""
    loader = type("BufferLoader", (_Loader,), {"form": form})
    register_model_loader(_FORMAT)(loader)
    return loader


@contextlib.contextmanager
def _unbound_memory() -> Iterator[None]:
    """vLLM would bind all memory of this process to the NUMA node of the first core that it may use, whichever it then runs on:
    all workers of a machine to one node. Without it memory comes from where it is touched first, or as `numactl` says."""
    name, library = "init_cpu_memory_env", torch.ops._C
    before = getattr(library, name)
    setattr(library, name, lambda nodes: None)
    try:
        yield
    finally:
        setattr(library, name, before)


def _inspect_here(architectures: Sequence[str]) -> None:
    """vLLM would start a process to look at the model's class, which takes longer than all the rest."""
    known = ModelRegistry.models
    for name in architectures:
        if name not in known:
            raise ConfigError(f"generation.engine is vllm, which knows no {name}; use generation.engine=embedded")
        if not isinstance(known[name], _RegisteredModel):
            known[name] = _RegisteredModel.from_model_cls(known[name].load_model_cls())


def _arguments(folder: str, form: Form, room: Room) -> EngineArgs:
    """Eager: compiling takes a minute of processor time at every start (what vLLM keeps of it, it cannot read again on a CPU). What
    it would win there is what norms and activations cost as many small operators; see v0_32_kernels.py."""
    return EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format=_FORMAT,
        dtype=str(form.buffer.dtype).removeprefix("torch."),
        max_model_len=room.context,
        max_num_seqs=room.sequences,
        max_num_batched_tokens=max(room.step_tokens, room.sequences),
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        kv_cache_memory_bytes=_cache_bytes(room),
        enforce_eager=True,
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
    )


def _blocks(room: Room) -> int:
    """So many that nobody who was admitted is ever preempted: a begun block for each, and the one that vLLM keeps."""
    return -(-room.positions // BLOCK) + room.sequences + 1


def _why(error: Exception, room: Room) -> str:
    """The sentence for what vLLM raised while it was made."""
    said = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else first_line(error)
    if said.partition(": ")[2].startswith("Available memory on node") or isinstance(error, MemoryError):
        return (
            f"generation.engine is vllm, whose cache of {_cache_bytes(room):,} bytes for {room.positions} positions finds no room "
            "in memory; make engine.kv_positions smaller, or end what else takes memory"
        )
    return f"generation.engine is vllm, which cannot run this model: {said}; use generation.engine=embedded"


def _cache_bytes(room: Room) -> int:
    return _blocks(room) * BLOCK * room.position_bytes


def _require_cache(core: Any, room: Room) -> None:
    """Errors: ConfigError for a cache of another size than was asked for, or one in which a sequence could be preempted.

    Where layers differ (sliding windows beside full attention), vLLM cuts them into groups of equal size, and a sequence takes a
    block of each: those that fill the last group up take memory, too."""
    config, asked = core.vllm_config.cache_config, _cache_bytes(room)
    if config.kv_cache_memory_bytes != asked:
        raise ConfigError(
            f"generation.engine is vllm, which was asked for a cache of {asked:,} bytes and has made one of "
            f"{config.kv_cache_memory_bytes:,}: something overrules it; take VLLM_CPU_KVCACHE_SPACE out of the environment"
        )
    groups, blocks = len(core.scheduler.kv_cache_config.kv_cache_groups), int(config.num_gpu_blocks)
    needed = groups * (_blocks(room) - 1) + 1
    if blocks < needed:
        raise ConfigError(
            f"generation.engine is vllm, which keeps the layers of this model in {groups} groups: {blocks} blocks of {BLOCK} "
            f"positions fit into its cache, and all sequences together may need {needed}, so some would lose theirs and begin "
            "again; use generation.engine=embedded"
        )


def _stepped(output: EngineCoreOutput, scheduled: int) -> Stepped:
    prefill, prompt = output.prefill_stats, output.new_prompt_logprobs_tensors
    return Stepped(
        output.request_id,
        output.new_token_ids[0] if output.new_token_ids else None,
        output.finish_reason is not None,
        output.finish_reason is FinishReason.STOP,
        max(scheduled - (prefill is None), 0),
        0 if prefill is None else prefill.num_cached_tokens,
        None if prompt is None else prompt.logprobs[:, 0].double().tolist(),
    )
