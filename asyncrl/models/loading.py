"""Loading a policy: a Hugging Face directory, a hub id, a GGUF file, or a config.json with seeded random weights.

Weights are always loaded as float32 (the masters); `ModelConfig.dtype` decides what the products are computed in. What
would silently compute something else than the checkpoint means is refused here, before anything is trained.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from asyncrl.config.hub import require_hub
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, first_line

from .head.liger import require_head_kernel
from .head.output import linear_head
from .parameters.lora import find_targets, require_peft
from .parameters.source import call_builder, is_builder, load_builder, model_source, require_unread, tokenizer_source
from .paths import ModelPath
from .policy import DTYPES, PolicyModel
from .rotary import hold_frequencies, not_held

logger = logging.getLogger("asyncrl.models")

Choose = Callable[[PreTrainedModel], ModelPath]  # how a model that was just loaded is run; the gate of a run
# Of transformers, for what it cannot read: a configuration is checked by rules of its own, and by whatever a class does with it.
LOADING_ERRORS = (Exception,)
# A directory's own code is not run. (Without a word about it, transformers would ask at the terminal.)
OWN_CODE: dict[str, Any] = {"trust_remote_code": False}
REPORTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for `require_all_weights`


def load_policy(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    seed: int = 0,
    choose: Choose | None = None,
    longest: int | None = None,
) -> tuple[PolicyModel, Any]:
    """(policy, tokenizer). `seed` keys the random weights of `random_init`. Errors: ConfigError.

    `model.path` may also be `file.py:function` or `module:function`: it is called with the seed and returns both. `choose`:
    see there; without it, the path is what the model's parts allow, and nothing but its head is compared. `longest`: tokens of
    the longest row of a run, for rotary frequencies that follow it (rotary.py); None: each row has its own.
    """
    if config.lora.rank:
        require_peft()
    require_head_kernel(config.head_kernel, torch.device(device), DTYPES[config.dtype])
    module, tokenizer = load_module(config, seed)
    path = None if choose is None else choose(module)
    if longest is not None:
        hold_rotary(module, longest)
    nn.Module.to(module, torch.device(device))
    policy = PolicyModel(module, config.dtype, lora=config.lora, seed=seed, head_kernel=config.head_kernel, path=path)
    return policy, load_tokenizer(config) if tokenizer is None else tokenizer


def load_served(
    config: ModelConfig, device: torch.device | str, seed: int, choose: Choose | None, longest: int
) -> tuple[PolicyModel, PreTrainedModel, Any]:
    """(policy, model, tokenizer) of a sharded run: a policy on `device` that only reads, in the matmul dtype, and the same
    model once more, on the host and in float32, to be cut over the ranks. Errors: ConfigError."""
    require_head_kernel(config.head_kernel, torch.device(device), DTYPES[config.dtype])
    module, tokenizer = load_module(config, seed)
    path = None if choose is None else choose(module)
    hold_rotary(module, longest)
    twin = copy.deepcopy(module)
    nn.Module.to(module, torch.device(device))
    policy = PolicyModel(module, config.dtype, served=True, head_kernel=config.head_kernel, path=path)
    return policy, twin, load_tokenizer(config) if tokenizer is None else tokenizer


def require_saveable(module: PreTrainedModel, tokenizer: Any) -> None:
    """Write a checkpoint without weights to a temporary directory, so that what cannot be written is told before a run, not at its
    first checkpoint. Where transformers writes no `generation_config` because settings in it have no effect, they are unset;
    generation settings in the model's own configuration move there. Errors: ConfigError."""
    generation, before = module.generation_config, getattr(module.config, "dtype", None)
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
        except Exception as error:  # whatever a class of the user's raises
            said = " ".join(str(error).split())[:400]
            raise ConfigError(
                f"model.path: no checkpoint of this model and tokenizer can be written ({type(error).__name__}: {said})"
            ) from error
        finally:
            module.config.dtype = before


def require_rows(module: PreTrainedModel, tokenizer: Any) -> None:
    """Errors: ConfigError for token ids that have no row in the embedding."""
    embedding: nn.Embedding = module.get_input_embeddings()  # type: ignore[assignment]  # a Module, to its annotation
    rows = embedding.weight.shape[0]
    # Text models keep the placeholder of an image in the tokenizer that they share with larger ones (Gemma 3).
    placeholders = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    found = [
        f"{token!r} ({number})"
        for token, number in sorted(getattr(tokenizer, "get_vocab", dict)().items(), key=lambda item: item[1])
        if number >= rows and token not in placeholders
    ]
    for where, holder in (
        ("generation_config", module.generation_config),
        ("config", module.config),
        ("tokenizer", tokenizer),
    ):
        for name in ("eos_token_id", "pad_token_id"):
            given = getattr(holder, name, None)
            numbers = given if isinstance(given, (list, tuple)) else [given]
            found += [f"{where}.{name} ({each})" for each in numbers if isinstance(each, int) and each >= rows]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ConfigError(
            f"model.path: the embedding has {rows} rows, and beyond them are {', '.join(found[:5])}{more}; save the model after "
            "resize_token_embeddings(len(tokenizer)), or name the tokenizer that belongs to it in model.tokenizer"
        )


def load_reader(
    config: ModelConfig, device: torch.device | str, seed: int, path: ModelPath, longest: int
) -> PolicyModel:
    """The policy of a process that only generates: it reads weights that somebody else writes, and is run on the path that was
    found for them. Errors: ConfigError."""
    module, _ = load_module(config, seed)
    hold_rotary(module, longest)
    nn.Module.to(module, torch.device(device))
    return PolicyModel(module, config.dtype, served=True, head_kernel="torch", path=path)


def load_module(config: ModelConfig, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """The model as transformers loads it, float32 on the host, and the tokenizer of a builder, else None. Errors: ConfigError."""
    require_unread(config)
    if is_builder(config):
        module, tokenizer = _call_builder(config, seed)
    else:
        module, tokenizer = _build_module(config, seed), None
    _check_tied(module)
    return module, tokenizer


def _call_builder(config: ModelConfig, seed: int) -> tuple[PreTrainedModel, Any]:
    assert config.path is not None
    built = call_builder(config.path, seed, "model.path")
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], PreTrainedModel)):
        found = (
            f"({', '.join(type(each).__name__ for each in built)})"
            if isinstance(built, tuple)
            else type(built).__name__
        )
        raise ConfigError(f"model.path: {config.path} returned {found}; expected (transformers model, tokenizer)")
    module, tokenizer = built
    return module.float(), tokenizer


_called: dict[
    Callable[[int], Any], tuple[PreTrainedModel, Any]
] = {}  # of builders that could not be called on the meta device


def _describe_built(config: ModelConfig) -> tuple[PreTrainedModel, Any]:
    """A builder's model on the meta device, and its tokenizer. A builder that cannot be called there, as one that loads weights,
    is really called, once, and what it made is forgotten but for its form."""
    builder = load_builder(str(config.path), "model.path")
    if builder not in _called:
        try:
            with torch.device("meta"):
                return _call_builder(config, 0)
        except ConfigError:
            # Whatever user code raises there; if it is wrong, the call below says how.
            module, tokenizer = _call_builder(config, 0)
        nn.Module.to(module, "meta")
        _called[builder] = module, tokenizer
    module, tokenizer = _called[builder]
    return copy.deepcopy(module), tokenizer


def hold_rotary(module: PreTrainedModel, longest: int) -> None:
    """As `hold_frequencies`. Errors: ConfigError where it cannot."""
    if not hold_frequencies(module, longest):
        raise ConfigError(f"model.path: {type(module).__name__} is refused: {not_held(module.config, longest)}")


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of `model.tokenizer`, or the model's own. Errors: ConfigError where there is none."""
    source = tokenizer_source(config)
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file and config.tokenizer is None else {}
    require_hub(source, "model.tokenizer" if config.tokenizer else "model.path")
    try:
        return AutoTokenizer.from_pretrained(source, **OWN_CODE, **gguf)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model.tokenizer: no tokenizer could be loaded from {source!r} ({first_line(error)}); "
            "put tokenizer.json beside the model, or name a directory or hub id in model.tokenizer"
        ) from error


def load_tokenizer_of(config: ModelConfig) -> Any:
    """The tokenizer of a run without its model's weights: that of the function in `model.path`, or `load_tokenizer`'s."""
    if is_builder(config):
        return _describe_built(config)[1]
    return load_tokenizer(config)


def parameter_count(config: ModelConfig) -> int:
    """Number of the model's parameters, tied ones once, from the configuration alone: nothing is allocated."""
    return sum(parameter.numel() for parameter in describe_module(config).parameters())


def adapter_sizes(config: ModelConfig) -> tuple[int, int]:
    """(parameters of the adapters, weights that they are merged into), from the configuration alone; zeros without any."""
    if not config.lora.rank:
        return 0, 0
    targets = find_targets(describe_module(config), config.lora)
    adapters = sum(config.lora.rank * experts * (i + o) for experts, o, i in (target.shape for target in targets))
    return adapters, sum(target.weight.numel() for target in targets)


def describe_module(config: ModelConfig) -> PreTrainedModel:
    """The model on the meta device: nothing is allocated, but for a moment by a builder that loads weights."""
    if is_builder(config):
        module, _ = _describe_built(config)
    else:
        with torch.device("meta"):
            module = _of_config(config, load_model_config(config))
        if not config.random_init:
            # Most have one; else it is made of the model's configuration.
            with contextlib.suppress(OSError):
                module.generation_config = GenerationConfig.from_pretrained(model_source(config))
    module.tie_weights()
    return module


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The transformers configuration behind `model.path`, repaired where it came from a GGUF file."""
    if is_builder(config):
        return _describe_built(config)[0].config
    path = model_source(config)
    require_hub(path, "model.path")
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(path, **OWN_CODE, **gguf)
    except LOADING_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.path: {path!r} brings code of its own (auto_map in its config.json), which is not run; load it in a "
                "function of yours and name that, model.path=file.py:function"
            ) from error
        raise ConfigError(f"model.path: no model configuration in {path!r} ({first_line(error)})") from error
    return _repair(found)


def _build_module(config: ModelConfig, seed: int) -> PreTrainedModel:
    if config.random_init:
        settings = load_model_config(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _of_config(config, settings, dtype=torch.float32)
    path = model_source(config)
    settings = load_model_config(config)
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    try:
        loaded: Any = _class_of(settings).from_pretrained(path, dtype=torch.float32, **REPORTED, **OWN_CODE, **gguf)
    except LOADING_ERRORS as error:
        raise ConfigError(f"model.path: the weights of {path!r} could not be loaded ({first_line(error)})") from error
    module, report = loaded
    require_all_weights(report, f"model.path: {path!r}", ". Use a complete checkpoint, or model.random_init=true")
    if lost := sorted({*report.get("unexpected_keys", ()), *_ignored(module, path)}):
        logger.warning(
            "model.path: %r holds %d tensors that are no part of the %s that transformers builds, like %s: they are in no "
            "checkpoint of this run",
            path,
            len(lost),
            type(module).__name__,
            lost[0],
        )
    _repair(module.config)
    if config.gguf_file:
        # The weights are dequantized: with it, transformers would refuse to save them.
        module.hf_quantizer = None
    return module  # type: ignore[no-any-return]  # transformers: Any


def _class_of(settings: PretrainedConfig) -> Any:
    """The class that a checkpoint names, where transformers' auto class would take its language model alone: then a checkpoint of
    the run would lack the rest (a vision tower). Else the auto class."""
    named = (getattr(settings, "architectures", None) or [""])[0]
    own = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(settings.model_type)
    for kind in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        if own is not None and named == mapping.get(settings.model_type) != own:
            return getattr(transformers, named)
    return AutoModelForCausalLM


def _ignored(module: PreTrainedModel, path: str) -> list[str]:
    """Names of tensors in the checkpoint's safetensors files that its class leaves out without a word (layers that predict further
    tokens). A pattern of the class may fit names that it loads, too."""
    patterns = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    if not patterns:
        return []
    own, prefix = module.state_dict().keys(), f"{module.base_model_prefix}."
    names = [name for name in _names_in_files(path) if any(each.search(name) for each in patterns)]
    return [name for name in names if own.isdisjoint({name, prefix + name, name.removeprefix(prefix)})]


def _names_in_files(path: str) -> list[str]:
    """Of a directory, or of a model of the hub, which was downloaded by now."""
    place = Path(path)
    for name in ("model.safetensors.index.json", "model.safetensors") if not place.is_dir() else ():
        found = cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            place = Path(found).parent
            break
    names: list[str] = []
    for file in place.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return names


def _of_config(config: ModelConfig, settings: PretrainedConfig, **given: Any) -> PreTrainedModel:
    """Errors: ConfigError for a configuration of something else, or one that its class does not build."""
    try:
        kind = _class_of(settings)
        build = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
        built: PreTrainedModel = build(settings, **given)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model.path: transformers builds no causal language model from the configuration in {model_source(config)!r} "
            f"({first_line(error)})"
        ) from error
    return built


def require_all_weights(report: Mapping[str, Any], where: str, why: str) -> None:
    """`report`: what transformers says about the loading. Errors: ConfigError that names what it would have made up."""
    other = sorted(report.get("mismatched_keys", ()))
    if other:
        name, held, wanted = other[0]
        raise ConfigError(
            f"{where} holds {name} as {list(held)}, where the configuration says {list(wanted)} ({len(other)} such weights in all)"
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ConfigError(
            f"{where} holds no weights for {missing[:3]} ({len(missing)} in all); transformers would have left them random{why}"
        )


def _repair(config: PretrainedConfig) -> PretrainedConfig:
    """GGUF stores the norm's epsilon as float32 (9.999999747378752e-06) and marks the loaded weights as quantized."""
    if hasattr(config, "quantization_config"):
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        if getattr(method, "value", method) != "gguf":
            raise ConfigError(f"model.path: the checkpoint is quantized ({method}); training needs its full weights")
        del config.quantization_config
    epsilon = getattr(config, "rms_norm_eps", None)
    if epsilon is not None:
        config.rms_norm_eps = float(f"{epsilon:.6g}")
    return config


def _check_tied(module: PreTrainedModel) -> None:
    head, embedding = linear_head(module), module.get_input_embeddings()
    if getattr(module.config, "tie_word_embeddings", False) and head.weight is not embedding.weight:
        raise ConfigError(
            f"model.path: {type(module).__name__} says tie_word_embeddings, but head and embedding are two tensors"
        )
    # The repaired epsilon must reach the modules, which copied it when they were built.
    for part in module.modules():
        if isinstance(getattr(part, "variance_epsilon", None), float):
            part.variance_epsilon = float(f"{part.variance_epsilon:.6g}")  # type: ignore[assignment]  # an attribute of Module: Tensor or Module
