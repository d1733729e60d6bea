"""vLLM 0.32: all that asyncrl knows of its inside. The next minor version gets files of its own, with the same class.

The engine core runs in this thread, without a process or a socket of its own (`InprocClient`). Between two calls of `step` nothing
of it runs: weights are changed there.

Weights. A loader of ours lets vLLM's own loader copy from the buffer once, and records each copy (recording.py). `bind` repeats
those copies from a later buffer into the same parameters. So every layer must compute with its parameters as they were loaded.
On a CPU vLLM would pack them, for oneDNN and for its kernel of experts; `_unpacked` turns that off.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.utils as dispatch
from pydantic import ValidationError
from torch import Tensor, nn
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from asyncrl.errors import ConfigError, first_line
from asyncrl.models.parameters.layout import Layout
from asyncrl.models.routing import RoutesShape
from asyncrl.types import RoutesArray

from .engine import Choose
from .recording import RecordedPiece, fill, record
from .v0_32_routes import CachedRoutes
from .versions import BLOCK

_FORMAT = "asyncrl"
_INSTEAD = "use generation.engine=embedded"
# Where vLLM's loader knows the names of the checkpoints on the hub alone, which transformers has others for: (ours, vLLM's).
_NAMES = {
    "MixtralForCausalLM": (
        (".mlp.", ".block_sparse_moe."),
        (".experts.gate_up_proj", ".experts.w13"),
        (".experts.down_proj", ".experts.w2"),
    )
}
# Whatever vLLM raises for a model that it does not take.
_FAILURES = (
    ValueError, RuntimeError, AssertionError, LookupError, AttributeError, ImportError, OSError, TypeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
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
    """What a step did to one request. `computed`: tokens of the prompt, or computed again, that the step computed. `cached`: tokens
    of the prompt that were in the cache already, reported with the first sampled token."""

    name: str
    token: int | None
    ended: bool
    stopped: bool  # by a stop token
    computed: int
    cached: int
    prompt_logprobs: list[float] | None


class VllmCore:
    """vLLM's scheduler, cache and model, stepped by hand. One thread makes and uses it; one at a time in a process."""

    def __init__(
        self,
        form: ModelSpec,
        room: Room,
        choose: Choose,
        *,
        routes: RoutesShape | None = None,
    ) -> None:
        """`routes`: of the trainer's model, where it is recorded which experts each token goes to.
        Errors: ConfigError where vLLM cannot run this model, or cannot be handed its weights."""
        loader = _loader(form)
        try:
            _inspect_here(form.config["architectures"])
            with _folder() as folder, _unbound_memory(), _unpacked():
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
        _refuse(self.model, loader.parameters)
        self._weights = [(pieces, loader.parameters[name]) for name, pieces in loader.recorded.items()]
        _require_cache(self._core, room)
        self._routes: CachedRoutes | None = None
        if routes is not None:
            self._routes = CachedRoutes(runner, routes, self._core.scheduler.kv_cache_config)

    # -- requests: between two steps

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], salt: str) -> None:
        """A request under a new name. It shares the cache of its prompt with requests of the same `salt` alone."""
        self._add(name, prompt, salt, max_tokens=max_tokens, stop_token_ids=list(stop_ids))

    def add_replay(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """A request that reports the log-probs of its prompt with its first token. It reads no prompt from the cache."""
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
        """End those of them that still run, and free their places in the cache."""
        self._client.abort_requests(list(names))

    def forget_caches(self) -> None:
        """Throw the cached keys and values away. Running requests compute theirs again."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    # -- steps

    @torch.no_grad()
    def step(self) -> list[Stepped]:
        """Compute as many tokens as a step may. What it did, for each request that it computed tokens of."""
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
        """Copy the weights in `buffer` into vLLM's parameters, which stay where they are. The next step computes with them."""
        for pieces, parameter in self._weights:
            fill(pieces, buffer, parameter)

    def close(self) -> None:
        """Free model and cache."""
        self._client.shutdown()


class _Sampler(Sampler):
    """In the place of vLLM's sampler: `choose` draws the tokens."""

    def __init__(self, runner: Any, choose: Choose) -> None:
        super().__init__("raw_logprobs")
        self._runner = runner
        self._choose = choose

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        names = self._runner.input_batch.req_ids[: logits.shape[0]]
        tokens = self._choose(names, logits)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)


class _Loader(BaseModelLoader):
    """Reads the weights of a `ModelSpec`, and records where each goes."""

    form: ModelSpec
    parameters: dict[str, Tensor]
    recorded: dict[str, list[RecordedPiece]]

    def download_model(self, model_config: Any) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Before vLLM works on the parameters."""
        form, kind = self.form, type(self)
        kind.parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        kind.recorded = record(
            lambda weights: model.load_weights(_names_for(model, weights)), form.layout, form.buffer, kind.parameters
        )


def _loader(form: ModelSpec) -> type[_Loader]:
    """A class for one load: vLLM makes the object, and keeps it to itself."""
    loader = type("BufferLoader", (_Loader,), {"form": form})
    register_model_loader(_FORMAT)(loader)
    return loader


def _names_for(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights under names that the model's own loader knows."""
    changes = _NAMES.get(type(model).__name__, ())
    for name, weight in weights:
        for ours, theirs in changes:
            name = name.replace(ours, theirs)
        yield name, weight


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder, which takes the temporary files of this process too: vLLM's world of one process meets over one, which it
    would leave behind. Errors: OSError."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="asyncrl-engine-") as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def _unpacked() -> Iterator[None]:
    """A model that is made here computes with its parameters as they are loaded, also on a CPU. Packed layers keep copies of their
    own, which `bind` does not reach. The experts' kernel for CPUs reads packed weights alone, so `_sum_of_experts` takes its place.
    Slower: in float32 linear layers take about twice the time."""
    kernel: Any = CPUUnquantizedExperts
    before = dispatch.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading

    def leave_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    def leave_experts(experts: Any, layer: nn.Module) -> None:
        experts.apply = partial(_sum_of_experts, experts)

    dispatch.dispatch_cpu_unquantized_gemm = leave_linear
    kernel.process_weights_after_loading = leave_experts
    try:
        yield
    finally:
        dispatch.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading = before


def _sum_of_experts(experts: CPUUnquantizedExperts, *, output: Tensor, **given: Any) -> None:
    """As `CPUUnquantizedExperts.apply`, over plain weights: hidden states [T, H] through w1 [E, 2I, H] (gate and up) and w2
    [E, H, I] of the experts that each token chose [T, k], summed by their weights [T, k]."""
    hidden_TH, w1, w2 = given["hidden_states"], given["w1"], given["w2"]
    chosen_Tk, weights_Tk = given["topk_ids"], given["topk_weights"]
    total_TH = torch.zeros(output.shape, dtype=torch.float32)
    for expert in chosen_Tk.unique().tolist():
        tokens, places = (chosen_Tk == expert).nonzero(as_tuple=True)
        bias_1, bias_2 = (None if bias is None else bias[expert] for bias in (experts.w1_bias, experts.w2_bias))
        gate_up = F.linear(hidden_TH[tokens], w1[expert], bias_1)
        active = apply_moe_activation(given["activation"], gate_up.new_empty(len(tokens), w2.shape[2]), gate_up)
        own = F.linear(active, w2[expert], bias_2).float()
        # Where the router's weights are on the input, the hidden states have them already.
        if not given["apply_router_weight_on_input"]:
            own *= weights_Tk[tokens, places, None]
        total_TH.index_add_(0, tokens, own)
    output.copy_(total_TH)


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
            raise ConfigError(f"generation.engine is vllm, which knows no {name}; {_INSTEAD}")
        if not isinstance(known[name], _RegisteredModel):
            known[name] = _RegisteredModel.from_model_cls(known[name].load_model_cls())


def _arguments(folder: str, form: ModelSpec, room: Room) -> EngineArgs:
    """Eager: compiling takes a minute of processor time at every start, because vLLM cannot read on a CPU what it keeps of it."""
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
    return f"generation.engine is vllm, which cannot run this model: {said}; {_INSTEAD}"


def _cache_bytes(room: Room) -> int:
    return _blocks(room) * BLOCK * room.position_bytes


def _refuse(model: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """Errors: ConfigError for a model that vLLM builds, and would compute wrongly or not at all. `loaded`: the parameters' memory
    when they were loaded."""
    experts = tuple(name for name, module in model.named_modules() if isinstance(module, RoutedExperts))
    now = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name, tensor in loaded.items():
        # Such as the weights of a convolution, for which vLLM's kernels expect packed memory on some processors.
        odd = tensor.ndim > 2 and name.rpartition(".")[0] not in experts
        if odd or now.get(name) != tensor.data_ptr():
            raise ConfigError(
                f"generation.engine is vllm, which lays out its parameter {name} {tuple(tensor.shape)} in a way of its own that "
                f"new versions do not reach; {_INSTEAD}"
            )
    # Scales of a quantized cache, which is never asked for.
    safe = Attention.process_weights_after_loading
    for name, module in model.named_modules():
        own = getattr(type(module), "process_weights_after_loading", None)
        # Of experts, whose kernels are looked at instead.
        if type(module) is UnquantizedFusedMoEMethod:
            continue
        alien = isinstance(module, RoutedExperts) and not _is_plain(module)
        # Its gates are one weight, which is made at its first step.
        derived = isinstance(module, MoERunner) and module._fse_fuse_gate
        if alien or derived or (own is not None and own is not safe):
            raise ConfigError(
                f"generation.engine is vllm, whose {type(module).__name__} ({name or 'the model'}) computes something of its own "
                f"from the first weights, which new versions do not reach; {_INSTEAD}"
            )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for module in model.modules():
        if isinstance(module, Attention) and module.head_size not in sizes:
            raise ConfigError(
                f"generation.engine is vllm, and the model's heads have size {module.head_size}; vLLM's attention on CPUs takes "
                f"{', '.join(map(str, sizes))}; {_INSTEAD}"
            )


def _is_plain(experts: RoutedExperts) -> bool:
    """Whether `_sum_of_experts` computes them."""
    method = experts.quant_method
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return type(method) is UnquantizedFusedMoEMethod and isinstance(kernel, CPUUnquantizedExperts)


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
            f"again; {_INSTEAD}"
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
