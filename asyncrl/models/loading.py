"""Loads a policy from a Hugging Face directory, a hub id, a GGUF file, a function, or a config.json with random weights.

As a rule a safetensors checkpoint in bfloat16 or float16 is mapped into memory, not copied. The policy casts its weights one by one
on the device, so a process needs little host memory besides the page cache, which all processes of a machine share. Other sources
are loaded into host memory in float32. With `dtype: float64` (ModelConfig) unmapped checkpoints are loaded in float64, and float64
weights from a function stay float64. A checkpoint is refused if transformers would silently load wrong weights or settings.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from asyncrl.config.hub import require_hub
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, first_line

from .head.liger import require_head_kernel
from .head.output import linear_head
from .parameters.lora import find_targets, require_peft
from .parameters.source import (
    call_builder,
    is_builder,
    load_builder,
    model_source,
    refuse_unread_settings,
    tokenizer_source,
)
from .paths import ModelPath
from .policy import DTYPES, PolicyModel
from .rotary import hold_frequencies, length_dependent_message

logger = logging.getLogger("asyncrl.models")

# Chooses the path (paths.py) of a model that was just loaded. In a run this is the gate (runtime/gate.py).
Choose = Callable[[PreTrainedModel], ModelPath]
# transformers and its model classes raise many types of errors for files that they cannot read.
LOADING_ERRORS = (Exception,)
# No code of a checkpoint is run. Without this argument transformers would ask at the terminal whether to run it.
NO_REMOTE_CODE: dict[str, Any] = {"trust_remote_code": False}
# Makes `from_pretrained` return the report that `require_all_weights` reads.
WITH_REPORT: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def load_policy(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    seed: int = 0,
    choose: Choose | None = None,
    longest: int | None = None,
) -> tuple[PolicyModel, Any]:
    """(policy, tokenizer). Errors: ConfigError.

    seed: of the random weights of `random_init` and of adapters; also the argument of a function in `model.path`.
    choose: chooses the path. None: fused if the layers allow it, packed if not. The gate then compares no path.
    longest: tokens of the longest row of a run, for rotary frequencies that depend on the length of a row (rotary.py). None:
    transformers computes the frequencies for each row."""
    if config.lora.rank:
        require_peft()
    require_head_kernel(config.head_kernel, torch.device(device), DTYPES[config.dtype])
    module, tokenizer = load_module(config, seed)
    path = None if choose is None else choose(module)
    if longest is not None:
        hold_rotary(module, longest)
    policy = PolicyModel(
        module, config.dtype, lora=config.lora, seed=seed, head_kernel=config.head_kernel, path=path,
        device=torch.device(device),
    )  # fmt: skip
    return policy, load_tokenizer(config) if tokenizer is None else tokenizer


def load_served(
    config: ModelConfig, device: torch.device | str, seed: int, choose: Choose | None, longest: int
) -> tuple[PolicyModel, PreTrainedModel, Any]:
    """(policy, model, tokenizer) of a run with sharded masters (the weights that the optimizer updates). The policy is on `device`
    in the matmul dtype, and cannot be trained. The model has the loaded tensors, which the caller shards. Errors: ConfigError."""
    require_head_kernel(config.head_kernel, torch.device(device), DTYPES[config.dtype])
    module, tokenizer = load_module(config, seed)
    path = None if choose is None else choose(module)
    hold_rotary(module, longest)
    # The policy rebinds the parameters of `module` to its buffer. `host_model` has other parameters, which keep the loaded tensors.
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
    host_model = copy.deepcopy(module, shared)
    policy = PolicyModel(
        module, config.dtype, served=True, head_kernel=config.head_kernel, path=path, device=torch.device(device)
    )
    return policy, host_model, load_tokenizer(config) if tokenizer is None else tokenizer


def require_saveable(module: PreTrainedModel, tokenizer: Any) -> None:
    """Writes a checkpoint without weights to a temporary directory, so that errors come before the training. First moves generation
    settings of the model's configuration to `generation_config`, and unsets settings of `generation_config` that have no effect,
    because transformers would refuse to write them. Errors: ConfigError."""
    generation, dtype = module.generation_config, getattr(module.config, "dtype", None)
    for name, value in getattr(module.config, "_get_generation_parameters", dict)().items():
        setattr(generation, name, value)
        setattr(module.config, name, None)
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        try:
            generation.save_pretrained(folder)
        except ValueError as error:
            unset = re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE)
            for name in unset:
                setattr(generation, name, None)
            if unset:
                logger.warning("generation_config: %s have no effect, and checkpoints leave them out", ", ".join(unset))
        try:
            module.save_pretrained(folder, state_dict={})
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
        except Exception as error:  # classes of the user may raise any exception
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            raise ConfigError(
                f"model.path: no checkpoint of this model and tokenizer can be written ({cause}); correct their save_pretrained"
            ) from error
        finally:
            module.config.dtype = dtype


def require_ids_fit(module: PreTrainedModel, tokenizer: Any) -> None:
    """Errors: ConfigError if a token id of the tokenizer or of the configurations has no row in the embedding."""
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # annotated as Module
    rows = embedding.weight.shape[0]
    # A text model may share its tokenizer with a model of images, whose placeholder tokens have no rows here (Gemma 3).
    placeholders = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items(), key=lambda item: item[1])
    outside = [f"{token!r} ({number})" for token, number in vocabulary if number >= rows and token not in placeholders]
    settings = {"generation_config": module.generation_config, "config": module.config, "tokenizer": tokenizer}
    for source, config in settings.items():
        for name in ("eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            numbers = value if isinstance(value, (list, tuple)) else [value]
            outside += [f"{source}.{name} ({id_})" for id_ in numbers if isinstance(id_, int) and id_ >= rows]
    if outside:
        more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
        raise ConfigError(
            f"model.path: the embedding has {rows} rows, which is too few for {', '.join(outside[:5])}{more}; save the model after "
            "resize_token_embeddings(len(tokenizer)), or set model.tokenizer to the tokenizer that belongs to the model"
        )


def load_reader(
    config: ModelConfig, device: torch.device | str, seed: int, path: ModelPath, longest: int
) -> PolicyModel:
    """The policy of a worker, a process that only generates and receives its weights from a trainer. `path`: the path that the gate
    in the trainer's process chose. Errors: ConfigError."""
    module, _ = load_module(config, seed)
    hold_rotary(module, longest)
    return PolicyModel(module, config.dtype, served=True, head_kernel="torch", path=path, device=torch.device(device))


def load_module(config: ModelConfig, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """(model on the host, tokenizer). The tokenizer comes from a builder function, and is None without a builder. Dtype of the
    weights: see the module docstring. Errors: ConfigError."""
    refuse_unread_settings(config)
    if is_builder(config):
        module, tokenizer = _call_builder(config, seed)
        # The builder may return another model in the next run of this process.
        _meta_models.clear()
    else:
        module, tokenizer = _build_module(config, seed), None
    _check_tied(module)
    # Modules may have copied the epsilon of the configuration before `_repair` rounded it.
    for part in module.modules():
        if isinstance(getattr(part, "variance_epsilon", None), float):
            part.variance_epsilon = float(f"{part.variance_epsilon:.6g}")  # type: ignore[assignment]  # an attribute of Module: Tensor or Module
    return module, tokenizer


def _call_builder(config: ModelConfig, seed: int) -> tuple[PreTrainedModel, Any]:
    assert config.path is not None
    built = call_builder(config.path, seed, "model.path")
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], PreTrainedModel)) or built[1] is None:
        kind = type(built).__name__
        if isinstance(built, tuple):
            kind = f"({', '.join(type(item).__name__ for item in built)})"
        raise ConfigError(f"model.path: {config.path} returned {kind}; expected (transformers model, tokenizer)")
    module, tokenizer = built
    wide = [(p, p.data) for p in module.parameters() if p.dtype == torch.float64 == _master_dtype(config)]
    module.float()
    for parameter, values in wide:
        parameter.data = values
    return module, tokenizer


# Key: builder, dtype of the masters. Value: model on the meta device, tokenizer. A run needs both often before it loads weights.
_meta_models: dict[tuple[Callable[[int], Any], torch.dtype], tuple[PreTrainedModel, Any]] = {}


def _describe_built(config: ModelConfig) -> tuple[PreTrainedModel, Any]:
    """(model on the meta device, tokenizer) of a builder function. A builder that fails on the meta device, for example because it
    loads weights, is called on the host, and its weights are dropped."""
    key = load_builder(str(config.path), "model.path"), _master_dtype(config)
    if key not in _meta_models:
        try:
            with torch.device("meta"):
                module, tokenizer = _call_builder(config, 0)
        except ConfigError:
            # The cause may be the meta device or an error of the builder. The second call raises the errors of the builder.
            module, tokenizer = _call_builder(config, 0)
        nn.Module.to(module, "meta")
        _meta_models[key] = module, tokenizer
    module, tokenizer = _meta_models[key]
    return copy.deepcopy(module), tokenizer


def hold_rotary(module: PreTrainedModel, longest: int) -> None:
    """Fixes rotary frequencies to those for rows of `longest` tokens (`hold_frequencies`). Errors: ConfigError if this fails."""
    if not hold_frequencies(module, longest):
        raise ConfigError(
            f"model.path: {type(module).__name__} is refused: {length_dependent_message(module.config, longest)}"
        )


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer in `model.tokenizer`, by default that of the model. Errors: ConfigError if no tokenizer can be loaded."""
    source = tokenizer_source(config)
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and config.tokenizer is None else {}
    require_hub(source, "model.tokenizer" if config.tokenizer else "model.path")
    try:
        return AutoTokenizer.from_pretrained(source, **NO_REMOTE_CODE, **gguf)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model.tokenizer: no tokenizer could be loaded from {source!r} ({first_line(error)}); "
            "put tokenizer.json beside the model, or name a directory or hub id in model.tokenizer"
        ) from error


def load_tokenizer_of(config: ModelConfig) -> Any:
    """The tokenizer of the function in `model.path`. Without a function: the result of `load_tokenizer`. Keeps no weights."""
    return _describe_built(config)[1] if is_builder(config) else load_tokenizer(config)


def parameter_count(config: ModelConfig) -> int:
    """Number of the model's parameters. A tied parameter counts once. Memory: see `describe_module`."""
    return sum(parameter.numel() for parameter in describe_module(config).parameters())


def adapter_sizes(config: ModelConfig) -> tuple[int, int]:
    """(parameters of all adapters, and of all weights that have an adapter). 0, 0 without LoRA. Memory: see `describe_module`."""
    if not config.lora.rank:
        return 0, 0
    targets = find_targets(describe_module(config), config.lora)
    adapters = sum(config.lora.rank * experts * (i + o) for experts, o, i in (target.shape for target in targets))
    return adapters, sum(target.weight.numel() for target in targets)


def describe_module(config: ModelConfig) -> PreTrainedModel:
    """The model on the meta device, without weights. Only a builder that loads weights allocates memory, for a moment."""
    if is_builder(config):
        module, _ = _describe_built(config)
    else:
        with torch.device("meta"):
            module = _of_config(config, load_model_config(config))
        if not config.random_init:
            # Without a generation_config.json the model keeps the generation settings from its configuration.
            with contextlib.suppress(OSError):
                module.generation_config = GenerationConfig.from_pretrained(model_source(config))
    module.tie_weights()
    return module


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The transformers configuration of the model, corrected by `_repair`. Errors: ConfigError."""
    if is_builder(config):
        return _describe_built(config)[0].config
    path = model_source(config)
    require_hub(path, "model.path")
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        settings: PretrainedConfig = AutoConfig.from_pretrained(path, **NO_REMOTE_CODE, **gguf)
    except LOADING_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.path: {path!r} brings code of its own (auto_map in its config.json), which is not run; load the model in a "
                "function of yours, and set model.path=file.py:function"
            ) from error
        raise ConfigError(f"model.path: no model configuration in {path!r} ({first_line(error)})") from error
    return _repair(settings)


def _build_module(config: ModelConfig, seed: int) -> PreTrainedModel:
    settings = load_model_config(config)
    if config.random_init:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _of_config(config, settings, dtype=torch.float32)
    path = model_source(config)
    try:
        module, report = _read(config, settings, path)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model.path: the weights of {path!r} could not be loaded ({first_line(error)}); use a complete checkpoint"
        ) from error
    require_all_weights(report, f"model.path: {path!r}", ". Use a complete checkpoint, or model.random_init=true")
    ignored = [] if config.gguf_file else _ignored_tensors(module, path)
    if unused := sorted({*report.get("unexpected_keys", ()), *ignored}):
        logger.warning(
            "model.path: %r holds %d tensors that are no part of the %s that transformers builds, like %s: checkpoints of this "
            "run will not have these tensors", path, len(unused), type(module).__name__, unused[0],
        )  # fmt: skip
    _repair(module.config)
    if config.gguf_file:
        # The weights are dequantized. transformers would refuse to save a model with a quantizer.
        module.hf_quantizer = None  # type: ignore[assignment]  # an attribute of Module: Tensor or Module
    return module


def _read(config: ModelConfig, settings: PretrainedConfig, path: str) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """(model, loading info) by `from_pretrained`. The weights stay in bfloat16 or float16 if `_make_like_float32` succeeds."""
    kind = _class_of(settings)
    options = {**WITH_REPORT, **NO_REMOTE_CODE, **({"gguf_file": config.gguf_file} if config.gguf_file else {})}
    narrow = None if config.gguf_file else _narrow_dtype(_safetensors_files(path))
    if narrow is not None:
        module, report = kind.from_pretrained(path, dtype=narrow, **options)
        if (reason := _make_like_float32(module)) is None:
            return module, report
        logger.info("model.path: the weights are read in float32: %s %s", type(module).__name__, reason)
    module, report = kind.from_pretrained(path, dtype=_master_dtype(config), **options)
    return module, report


def _master_dtype(config: ModelConfig) -> torch.dtype:
    return torch.float64 if config.dtype == "float64" else torch.float32


def _safetensors_files(path: str) -> list[str]:
    """Paths of the model's safetensors files, downloaded if the hub's cache lacks them. Empty if the set is incomplete."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    found = [cached_file(path, "model.safetensors", **quiet)]
    if found == [None] and (index := cached_file(path, "model.safetensors.index.json", **quiet)) is not None:
        names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
        found = [cached_file(path, name, **quiet) for name in names]
    return [file for file in found if file is not None] if None not in found else []


def _narrow_dtype(files: list[str]) -> torch.dtype | None:
    """bfloat16 or float16, if that is the dtype of all floating-point tensors in the files. None in all other cases."""
    kinds = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            kinds |= {tensors.get_slice(name).get_dtype() for name in names}
    floating = {kind for kind in kinds if "F" in kind}
    if len(floating) > 1:
        logger.info("model.path: the weights are read in float32: the files hold %s", ", ".join(sorted(floating)))
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(floating.pop()) if len(floating) == 1 else None


def _make_like_float32(module: PreTrainedModel) -> str | None:
    """Makes settings and buffers equal to those of a model loaded as float32. Returns None, or a reason if this is impossible."""
    if module._keys_to_ignore_on_load_missing:
        return "may have weights that are not in the files"
    if any(map(_is_narrow, (value for part in module.modules() for value in vars(part).values()))):
        return "has tensors in the dtype of the files that are neither weights nor buffers"
    for part in (module.config, *(getattr(module.config, name, None) for name in module.config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32
    saved = module.state_dict().keys()
    narrow = {name: buffer for name, buffer in module.named_buffers() if _is_narrow(buffer)}
    wide: dict[str, Tensor] = {}
    if not narrow.keys() <= saved:
        # The class computed buffers in the dtype of the files. A second model with empty weights computes them in float32.
        with no_init_weights():
            wide = dict(type(module)._from_config(copy.deepcopy(module.config), dtype=torch.float32).named_buffers())
    for name, buffer in narrow.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.float() if name in saved else wide[name]
    return None


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4


def _class_of(settings: PretrainedConfig) -> Any:
    """The class that builds a model from `settings`: transformers' auto class, or for a multimodal checkpoint the class that the
    checkpoint names, because the auto class would drop parts such as a vision tower."""
    class_name = (getattr(settings, "architectures", None) or [""])[0]
    text_class = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(settings.model_type)
    for kind in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        multimodal_class = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).get(settings.model_type)
        if text_class is not None and class_name == multimodal_class and class_name != text_class:
            return getattr(transformers, class_name)
    return AutoModelForCausalLM


def _ignored_tensors(module: PreTrainedModel, path: str) -> list[str]:
    """Names of tensors in the checkpoint that the class ignores and does not report, such as layers for multi-token prediction."""
    patterns = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    if not patterns:
        return []
    loaded, prefix = module.state_dict().keys(), f"{module.base_model_prefix}."
    names: list[str] = []
    for file in _safetensors_files(path):
        with safe_open(file, "pt") as tensors:
            names += [name for name in tensors.keys() if any(pattern.search(name) for pattern in patterns)]  # noqa: SIM118
    # A pattern may also match tensors that the class did load.
    return [name for name in names if loaded.isdisjoint({name, prefix + name, name.removeprefix(prefix)})]


def _of_config(config: ModelConfig, settings: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A model with random weights. Errors: ConfigError if transformers cannot build a causal language model from `settings`."""
    try:
        kind = _class_of(settings)
        build = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
        module: PreTrainedModel = build(settings, **options)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model.path: transformers builds no causal language model from the configuration in {model_source(config)!r} "
            f"({first_line(error)}); check its config.json"
        ) from error
    return module


def require_all_weights(report: Mapping[str, Any], source: str, advice: str) -> None:
    """Errors: ConfigError if the checkpoint lacks a weight or has another shape for it: transformers would leave the weight random.
    `report`: loading info of `from_pretrained`. `source`: the message's first words. `advice`: last words, for a missing weight."""
    mismatched = sorted(report.get("mismatched_keys", ()))
    if mismatched:
        name, actual, expected = mismatched[0]
        raise ConfigError(
            f"{source} holds {name} as {list(actual)}, where the configuration says {list(expected)} ({len(mismatched)} such "
            "weights in all); use a checkpoint that fits its config.json"
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ConfigError(
            f"{source} holds no weights for {missing[:3]} ({len(missing)} in all); transformers would leave them random{advice}"
        )


def _repair(config: PretrainedConfig) -> PretrainedConfig:
    """Changes `config` in place, and returns it. Rounds the epsilon of norms, which GGUF files store as float32
    (9.999999747378752e-06). Removes the quantization settings of GGUF, because transformers dequantizes GGUF weights.
    Errors: ConfigError for other quantized checkpoints."""
    if hasattr(config, "quantization_config"):
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        if getattr(method, "value", method) != "gguf":
            raise ConfigError(f"model.path: the checkpoint is quantized ({method}); training needs full weights")
        del config.quantization_config
    epsilon = getattr(config, "rms_norm_eps", None)
    if epsilon is not None:
        config.rms_norm_eps = float(f"{epsilon:.6g}")
    return config


def _check_tied(module: PreTrainedModel) -> None:
    head, embedding = linear_head(module), module.get_input_embeddings()
    if getattr(module.config, "tie_word_embeddings", False) and head.weight is not embedding.weight:
        raise ConfigError(
            f"model.path: the configuration of {type(module).__name__} says tie_word_embeddings, but head and embedding are two "
            "tensors; set tie_word_embeddings to false in its config.json"
        )
