"""What the processor of this machine is and can, in words: every measured number depends on it. Linux on x86-64 knows; no torch.
And how many of its cores a process may use, and are free.
"""

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
    lines = _text(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines()
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


def free_cores() -> int:
    """Cores that this process may use (affinity, quota of its control groups) and no other program keeps busy, at least 1. Busy:
    over the last minute, and at this moment: neither a program that has just ended counts, nor a short burst."""
    there = os.cpu_count() or 1
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    # How many threads run now, this one included.
    running = (_text(Path("/proc/loadavg")).split()[3:] or ["inf/"])[0].partition("/")[0]
    busy = min(os.getloadavg()[0], float(running) - 1)
    return max(1, min(may_use, int(quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))), round(there - busy)))


def quota(groups: Path, mounted: Path) -> float:
    """Cores: the tightest quota of this process's control groups, of version 1 or 2, and of those around them."""
    found = [float(os.cpu_count() or 1)]
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        own = mounted / ("cpu" if controllers else "") / path.lstrip("/")
        for folder in (own, *own.parents) if controllers in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu") else ():
            told = [_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
            most, period, *_ = [*" ".join(told).split(), "", ""]
            if most.isdecimal() and period.isdecimal():
                found.append(int(most) / int(period))
    return min(found)


def _text(file: Path) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
