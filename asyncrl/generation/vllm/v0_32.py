"""The adapter for vLLM 0.32 and 0.33. Only the files `v0_32*.py` use vLLM's internals, and only internals that both versions share.
A minor version with other internals needs another adapter.

vLLM's engine core runs in this thread, without a process or socket (`InprocClient`). Between two calls of `step` the core does
nothing, so the weights may change.

Weights: vLLM's own loader copies them once from a buffer, and recording.py records each copy. `bind` repeats the copies from
another buffer into the same parameters. Therefore every layer must compute with its parameters as they were loaded. On a CPU vLLM
would pack the weights of linear layers and experts into copies; v0_32_cpu.py prevents this packing.

On a GPU the parameters keep their addresses, so compiled code and CUDA graphs stay valid. `bind` launches the copies on the CUDA
stream of this thread's steps, which vLLM makes the current stream. So the next step reads the new weights without a wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from pydantic import ValidationError
from torch import Tensor, nn
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from asyncrl.errors import ConfigError, first_line
from asyncrl.models.parameters.layout import Layout

from .engine import ChooseTokens
from .recording import RecordedPiece, fill, record, require_all_read
from .temporary import temporary_folder
from .v0_32_split import TRANSFER, Split, SplitExecutor, sends_tokens
from .versions import BLOCK, GPU_WORKSPACE

_FORMAT = "asyncrl"
_USE_OTHER = "use generation.engine=embedded"
# vLLM's loader expects the names of the published checkpoint. Pairs: (name in transformers, name in the checkpoint).
_NAMES = {
    "MixtralForCausalLM": (
        (".mlp.", ".block_sparse_moe."),
        (".experts.gate_up_proj", ".experts.w13"),
        (".experts.down_proj", ".experts.w2"),
    )
}
# Errors that vLLM raises for a model that it cannot run.
FAILURES = (
    ValueError, RuntimeError, AssertionError, LookupError, AttributeError, ImportError, OSError, TypeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model for vLLM. `config`: the config of transformers, as JSON. `buffer`: a flat tensor with weights of some version in this
    layout, on the device of vLLM."""

    config: Mapping[str, Any]
    layout: Layout
    buffer: Tensor


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Limits of the core. They decide how much memory vLLM allocates."""

    sequences: int  # running sequences
    context: int  # tokens of one sequence
    positions: int  # cached positions of all sequences together
    step_tokens: int  # tokens of one step
    position_bytes: int  # keys and values of a position, in one process


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step for one request. `computed`: number of prompt tokens that the step computed, plus sampled tokens that
    it computed again. `cached`: number of prompt tokens that vLLM found in the cache, reported with the first sampled token."""

    name: str
    token: int | None  # None: the prompt is incomplete
    ended: bool
    stopped: bool  # ended by a stop token
    computed: int
    cached: int
    prompt_logprobs: list[float] | None


class VllmCore:
    """vLLM's scheduler, cache and model. Only the thread that creates the core may use it. A process has at most one core."""

    def __init__(self, spec: ModelSpec, limits: CoreLimits, choose: ChooseTokens, split: Split | None = None) -> None:
        """`choose`: samples the tokens of a step. `split`: over which devices the engine is split; None: one device. Errors:
        ConfigError if vLLM cannot run this model, or if new weights could not be copied into vLLM's model."""
        device = spec.buffer.device
        _require_build(device)
        if split is not None:
            SplitExecutor.split, SplitExecutor.config, SplitExecutor.layout = split, spec.config, spec.layout
            choose = sends_tokens(choose)
        try:
            with temporary_folder() as temporary, loading(spec) as loader:
                folder = write_config(spec.config, temporary if device.type == "cpu" else envs.VLLM_CACHE_ROOT)
                config = _engine_config(folder, spec, limits, 1 if split is None else len(split.devices))
                engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except ConfigError:
            raise
        except FAILURES as error:
            raise ConfigError(_failure_message(error, limits)) from error
        self._engine = engine
        self._client = engine.engine_core
        self._core = self._client.engine_core
        executor = self._core.model_executor
        runner = executor.driver_worker.worker.model_runner
        # The model itself, without the wrapper that replays CUDA graphs.
        self.model: nn.Module = runner.get_model()
        runner.sampler = EngineSampler(runner, choose)
        self._scheduled: dict[str, int] = {}  # request -> number of its tokens in the last step
        schedule = self._core.scheduler.schedule

        def schedule_and_record(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            self._scheduled = output.num_scheduled_tokens
            return output

        self._core.scheduler.schedule = schedule_and_record
        require_supported(self.model, loader.parameters, device)
        self._weights = [(pieces, loader.parameters[name]) for name, pieces in loader.recorded.items()]
        read = [piece for pieces, _ in self._weights for piece in pieces]
        require_all_read(spec.layout, read if split is None else read + executor.recorded)
        self._executor: SplitExecutor | None = None
        if split is not None:
            self._executor = executor
            transfer = {"board": split.board, "weights": self._weights, "fetches": False}
            executor.driver_worker.init_weight_transfer_engine(transfer)
        _require_cache(self._core, limits)

    # -- requests: between two steps

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], salt: str) -> None:
        """Add a request. `name` must be new. Requests share cached prompts only with requests of the same `salt`."""
        self._add(name, prompt, salt, max_tokens=max_tokens, stop_token_ids=list(stop_ids))

    def add_replay(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Add a request whose first output has the log-probs of the prompt. vLLM computes the whole prompt, without the cache."""
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
        """End the requests that still run, and free their blocks of the cache."""
        self._client.abort_requests(list(names))

    def forget_caches(self) -> None:
        """Drop all cached keys and values. vLLM computes those of running requests again."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    # -- steps

    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Run one step. Returns an output for each request with tokens in this step."""
        self._scheduled = {}
        outputs = self._client.get_output().outputs
        counts = dict(self._scheduled)
        sampled = [_step_output(output, counts.pop(output.request_id, 0)) for output in outputs]
        return sampled + [StepOutput(name, None, False, False, count, 0, None) for name, count in counts.items()]

    # -- weights: between two steps

    @torch.no_grad()
    def bind(self, buffer: Tensor, version: int) -> None:
        """Copy the weights of this version from `buffer` into vLLM's parameters, in place. The next step computes with them. On a
        GPU this only launches the copies: before you change `buffer`, record an event on the current stream and wait for it. A
        split engine ignores `buffer` and waits for its partners (v0_32_split.py): each process finds the version on the board."""
        if self._executor is not None:
            self._executor.collective_rpc("start_weight_update")
            self._executor.collective_rpc("update_weights", args=({"version": version},))
            self._executor.collective_rpc("finish_weight_update")
            return
        for pieces, parameter in self._weights:
            fill(pieces, buffer, parameter)

    def close(self) -> None:
        self._client.shutdown()


class EngineSampler(Sampler):
    """Replaces vLLM's sampler. `choose` samples the tokens."""

    def __init__(self, runner: Any, choose: ChooseTokens) -> None:
        super().__init__("raw_logprobs")
        self._runner = runner
        self._choose = choose

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        names = self._runner.input_batch.req_ids[: logits.shape[0]]
        tokens = self._choose(names, logits)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)


class _Loader(BaseModelLoader):
    """Loads the weights of a `ModelSpec` into vLLM's model, and records the copies. vLLM creates the object and does not
    return it, so the results are attributes of the class."""

    spec: ModelSpec
    parameters: dict[str, Tensor]
    recorded: dict[str, list[RecordedPiece]]

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        # vLLM calls this before it changes any parameter.
        spec, cls = self.spec, type(self)
        cls.parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        cls.recorded = record(
            lambda weights: model.load_weights(_rename(model, weights)), spec.layout, spec.buffer, cls.parameters
        )


@contextlib.contextmanager
def loading(spec: ModelSpec) -> Iterator[type[_Loader]]:
    """Inside the context vLLM creates the model of `spec` in this process, and loads the weights with the yielded class.
    Errors: ConfigError for an architecture that vLLM does not have."""
    loader = type("BufferLoader", (_Loader,), {"spec": spec})
    register_model_loader(_FORMAT)(loader)
    _load_classes(spec.config["architectures"])
    with _plain_layers(spec.buffer.device):
        yield loader


def _rename(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names that the model's own loader expects."""
    changes = _NAMES.get(type(model).__name__, ())
    for name, weight in weights:
        for transformers_name, checkpoint_name in changes:
            name = name.replace(transformers_name, checkpoint_name)
        yield name, weight


def write_config(config: Mapping[str, Any], root: str) -> str:
    """Write the model's configuration below `root`, and return its folder. The folder's name is a digest of the configuration,
    because on a GPU vLLM finds compiled code by the path. Replaces the file atomically, because other workers may use it."""
    text = json.dumps(config, sort_keys=True)
    folder = Path(root, _FORMAT, hashlib.sha256(text.encode()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"config.json.{os.getpid()}"
    written.write_text(text, encoding="utf-8")
    written.replace(folder / "config.json")
    return str(folder)


def _require_build(device: torch.device) -> None:
    """Errors: ConfigError if the installed vLLM is a build for another kind of device."""
    if current_platform.device_type != device.type:
        raise ConfigError(
            f"generation.engine is vllm, and the installed build of vLLM computes on {current_platform.device_type or 'nothing'} "
            f"here, while the worker is on {device}; install the build for {device.type}, or {_USE_OTHER}"
        )


@contextlib.contextmanager
def _plain_layers(device: torch.device) -> Iterator[None]:
    """Inside the context vLLM creates layers that compute with their parameters as they were loaded."""
    if device.type != "cpu":
        # On a GPU all layers do this, except those that `require_supported` refuses.
        yield
        return
    from .v0_32_cpu import unbound_memory, unpacked

    with unbound_memory(), unpacked():
        yield


def _load_classes(architectures: Sequence[str]) -> None:
    """Load the model's class in this process. vLLM would start another process for that, which is slow. Errors: ConfigError."""
    registered = ModelRegistry.models
    for name in architectures:
        if name not in registered:
            raise ConfigError(f"generation.engine is vllm, which does not support {name}; {_USE_OTHER}")
        if not isinstance(registered[name], _RegisteredModel):
            registered[name] = _RegisteredModel.from_model_cls(registered[name].load_model_cls())


def _engine_config(folder: str, spec: ModelSpec, limits: CoreLimits, processes: int = 1) -> VllmConfig:
    """`processes`: how many processes the engine has. Errors: ConfigError for a model that vLLM computes from copies of its
    weights; vLLM's own errors."""
    config = _engine_arguments(folder, spec, limits, processes).create_engine_config()
    model = config.model_config
    other = (
        "quantized weights" if model.quantization else "multi-head latent attention (MLA)" if model.use_mla else None
    )
    if other is not None:
        raise ConfigError(
            f"generation.engine is vllm, which computes {other} from copies that it makes of the first weights, so new versions "
            f"cannot be copied into it; {_USE_OTHER}"
        )
    # vLLM's executor takes the number of the device from here, and no argument sets the number.
    config.device_config.device = spec.buffer.device
    return config


def _engine_arguments(folder: str, spec: ModelSpec, limits: CoreLimits, processes: int = 1) -> EngineArgs:
    # On a CPU vLLM cannot reuse its compiled code, so compiling would take a minute at every start.
    options: dict[str, Any] = {"enforce_eager": True}
    if spec.buffer.is_cuda:
        _, total = torch.cuda.mem_get_info(spec.buffer.device)
        # vLLM's other kernels for experts rearrange the weights. A check of addresses cannot find a kernel that does so in place.
        options = {"moe_backend": "triton", "gpu_memory_utilization": memory_share(spec, limits, total, processes)}
    if processes > 1:
        options |= {"tensor_parallel_size": processes, "distributed_executor_backend": SplitExecutor}
        options["weight_transfer_config"] = WeightTransferConfig(backend=TRANSFER)
    return EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format=_FORMAT,
        dtype=str(spec.buffer.dtype).removeprefix("torch."),
        max_model_len=limits.context,
        max_num_seqs=limits.sequences,
        max_num_batched_tokens=max(limits.step_tokens, limits.sequences),
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        kv_cache_memory_bytes=_cache_bytes(limits),
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
        **options,
    )


def memory_share(spec: ModelSpec, limits: CoreLimits, total: int, processes: int = 1) -> float:
    """The fraction of a GPU's `total` bytes that vLLM will use. vLLM refuses to start if that much is not free."""
    return min(1.0, (spec.buffer.nbytes // processes + _cache_bytes(limits) + GPU_WORKSPACE) / total)


def _blocks(limits: CoreLimits) -> int:
    """Blocks with which no admitted sequence is preempted. A sequence may fill its last block partly. vLLM reserves one block."""
    return -(-limits.positions // BLOCK) + limits.sequences + 1


def _failure_message(error: Exception, limits: CoreLimits) -> str:
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else first_line(error)
    # The first words of vLLM's message about a lack of memory, in the builds for CPUs and for GPUs.
    scarce = text.partition(": ")[2].startswith(("Available memory on node", "Free memory on device"))
    if scarce or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return (
            f"generation.engine is vllm, whose cache of {_cache_bytes(limits):,} bytes for {limits.positions} positions "
            "does not fit into memory; make engine.kv_positions smaller, or end other programs that use memory"
        )
    return f"generation.engine is vllm, which cannot run this model: {text}; {_USE_OTHER}"


def _cache_bytes(limits: CoreLimits) -> int:
    return _blocks(limits) * BLOCK * limits.position_bytes


def require_supported(model: nn.Module, loaded: Mapping[str, Tensor], device: torch.device) -> None:
    """Errors: ConfigError if `bind` would not change everything that the model computes with, or if vLLM's attention cannot compute
    the model. `loaded`: the parameters' tensors when they were loaded."""
    experts = tuple(name for name, module in model.named_modules() if isinstance(module, RoutedExperts))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name, tensor in loaded.items():
        # For example, vLLM packs the weights of convolutions on some processors.
        may_be_packed = tensor.ndim > 2 and name.rpartition(".")[0] not in experts
        if may_be_packed or addresses.get(name) != tensor.data_ptr():
            raise ConfigError(
                f"generation.engine is vllm, which rearranges its parameter {name} {tuple(tensor.shape)} after loading, so new "
                f"versions cannot be copied into it; {_USE_OTHER}"
            )
    # This method only sets scales of a quantized cache, which is not used here.
    harmless = Attention.process_weights_after_loading
    for name, module in model.named_modules():
        process = getattr(type(module), "process_weights_after_loading", None)
        # The kernel of this method is checked at the `RoutedExperts` that own the method (`_computes_in_place`).
        if type(module) is UnquantizedFusedMoEMethod:
            continue
        other_experts = isinstance(module, RoutedExperts) and not _computes_in_place(module, device)
        # This runner joins its gates into one weight at its first step.
        joins_gates = isinstance(module, MoERunner) and module._fse_fuse_gate
        if other_experts or joins_gates or (process is not None and process is not harmless):
            raise ConfigError(
                f"generation.engine is vllm, whose {type(module).__name__} ({name or 'the model'}) computes something of its own "
                f"from the first weights, so new versions cannot be copied into it; {_USE_OTHER}"
            )
    if device.type == "cpu":
        from .v0_32_cpu import require_head_sizes

        require_head_sizes(model)


def _computes_in_place(experts: RoutedExperts, device: torch.device) -> bool:
    """Whether vLLM computes these experts from the parameters as they were loaded."""
    method = experts.quant_method
    if type(method) is not UnquantizedFusedMoEMethod:
        return False
    if device.type == "cpu":
        from .v0_32_cpu import is_replaced

        return is_replaced(method)
    return method.unquantized_backend is UnquantizedMoeBackend.TRITON


def _require_cache(core: Any, limits: CoreLimits) -> None:
    """Errors: ConfigError if the cache is too small, so that a sequence could be preempted.

    If layers differ (sliding windows beside full attention), vLLM splits them into groups of equal size. A sequence needs blocks in
    each group. The padding of the last group takes memory too."""
    groups = len(core.scheduler.kv_cache_config.kv_cache_groups)
    blocks = int(core.vllm_config.cache_config.num_gpu_blocks)
    needed = groups * (_blocks(limits) - 1) + 1
    if blocks < needed:
        raise ConfigError(
            f"generation.engine is vllm, which keeps the layers of this model in {groups} groups: {blocks} blocks of {BLOCK} "
            f"positions fit into its cache, and all sequences together may need {needed}, so some would be preempted; {_USE_OTHER}"
        )


def _step_output(output: EngineCoreOutput, scheduled: int) -> StepOutput:
    prefill, prompt = output.prefill_stats, output.new_prompt_logprobs_tensors
    # In a decode step one of the scheduled tokens is the input, which does not count as computed.
    computed = scheduled if prefill is not None else max(scheduled - 1, 0)
    return StepOutput(
        output.request_id,
        output.new_token_ids[0] if output.new_token_ids else None,
        output.finish_reason is not None,
        output.finish_reason is FinishReason.STOP,
        computed,
        0 if prefill is None else prefill.num_cached_tokens,
        None if prompt is None else prompt.logprobs[:, 0].double().tolist(),
    )
