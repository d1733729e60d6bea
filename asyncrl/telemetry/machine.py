"""What the processor of this machine is and can, in words: every measured number depends on it. Linux on x86-64 knows; no torch."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

BFLOAT16 = ("avx512_bf16", "amx_bf16")  # any of them: products of bfloat16 are instructions
_WORDS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_bf16": "AMX bfloat16"}
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # by which a user keeps torch from what the processor can


@cache
def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").partition("\n\n")[0].splitlines() if file.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    """The model name of the processor; the architecture where nothing says it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """As the kernel names them; empty where it does not."""
    return frozenset(_cpuinfo().get("flags", "").split())


def instruction_set() -> str:
    """What matters to matrix products, such as "AVX2, AVX-512, bfloat16", and what keeps torch from using it."""
    flags = cpu_flags()
    words = ", ".join(word for flag, word in _WORDS.items() if flag in flags) or platform.machine()
    limits = ", ".join(f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    return f"{words} ({limits})" if limits else words


def describe_cpu() -> str:
    """The model name and the widest instructions."""
    return f"{cpu_model()} ({instruction_set()})"
