"""Facts about this machine: its processor, instruction sets, and number of free cores. Complete only on Linux with x86-64."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

BFLOAT16 = ("avx512_bf16", "amx_bf16")  # flags of processors that multiply bfloat16
_NAMES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_bf16": "AMX bfloat16"}
# Variables with which a user forbids torch to use some instructions.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


@cache
def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    lines = _text(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    """The model name of the processor, or the architecture if the system does not give the name."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The processor's features, with the kernel's names. Empty if the kernel does not list them."""
    return frozenset(_cpuinfo().get("flags", "").split())


def instruction_set() -> str:
    """The instructions for matrix products, such as "AVX2, AVX-512, bfloat16", and the variables that limit torch to fewer."""
    flags = cpu_flags()
    names = ", ".join(name for flag, name in _NAMES.items() if flag in flags) or platform.machine()
    limits = ", ".join(f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    return f"{names} ({limits})" if limits else names


def describe_cpu() -> str:
    """The model name and the instructions for matrix products."""
    return f"{cpu_model()} ({instruction_set()})"


def free_cores() -> int:
    """The number of cores that this process may use (affinity, cgroup quota) and that no other program uses; at least 1."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    # The fourth field of /proc/loadavg is "running threads/all threads", this thread included.
    fields = _text(Path("/proc/loadavg")).split()
    running = float(fields[3].partition("/")[0]) if len(fields) > 3 else float("inf")
    # The present load leaves out ended programs. The last minute's load leaves out short bursts. The lower value leaves out both.
    busy = min(os.getloadavg()[0], running - 1)
    return max(1, min(allowed, int(cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))), round(cores - busy)))


def cpu_quota(groups: Path, mounted: Path) -> float:
    """The smallest CPU quota, in cores, of the control groups listed in `groups` and their parents; without a quota all cores."""
    quotas = [float(os.cpu_count() or 1)]
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            continue
        group = mounted / ("cpu" if controllers else "") / path.lstrip("/")
        for folder in (group, *group.parents):
            # cgroups of version 2 have "quota period" in one file, those of version 1 have two files. "max" or -1: no quota.
            texts = [_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
            words = " ".join(texts).split()
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def _text(file: Path) -> str:
    """The text of a file of the kernel; empty if there is no such file."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
