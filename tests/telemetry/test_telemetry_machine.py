"""The processor in words, as a measured number needs it beside itself; and how many of its cores are free."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from asyncrl.telemetry import machine


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("fpu sse2 avx2", "AVX2"),
        ("avx2 avx512f avx512bw", "AVX2, AVX-512"),
        ("avx2 avx512f avx512_bf16", "AVX2, AVX-512, bfloat16"),
        ("avx2 avx512f avx512_bf16 amx_bf16", "AVX2, AVX-512, bfloat16, AMX bfloat16"),
        ("", platform.machine()),
    ],
)
def test_the_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"model name": "Some Processor", "flags": flags})
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    assert machine.describe_cpu() == f"Some Processor ({words})"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert machine.instruction_set() == f"{words} (ONEDNN_MAX_CPU_ISA=AVX2)", "the number is of what torch may use"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/jobs/one", {"jobs/one/cpu.max": "150000 100000"}, 1.5),
        ("0::/jobs/one", {"jobs/one/cpu.max": "max 100000", "jobs/cpu.max": "300000 100000"}, 3.0),
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("1:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, 0.5),
        ("1:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 8.0),
        ("5:memory:/box", {"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, 8.0),
        ("0::/", {}, 8.0),
    ],
)
def test_cores_within_the_quota_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: float
) -> None:
    """As the kernel documents them: cgroup-v2.rst (cpu.max), sched-bwc.rst (cfs_quota_us)."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (tmp_path / "cgroup").write_text(f"9:pids:/\n{group}\n")
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(f"{text}\n")
    assert machine.quota(tmp_path / "cgroup", tmp_path / "mounted") == cores


@pytest.mark.parametrize(
    ("may_use", "load", "running", "free"),
    [(8, 0.1, 1, 8), (8, 3.2, 4, 5), (8, 7.9, 1, 8), (8, 0.2, 9, 8), (2, 3.0, 4, 2), (8, 40.0, 41, 1)],
)
def test_free_cores_are_those_that_nobody_keeps_busy(
    monkeypatch: pytest.MonkeyPatch, may_use: int, load: float, running: int, free: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(may_use)))
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "_text", lambda file: f"{load} 0 0 {running}/200 1" if "loadavg" in str(file) else "")
    assert machine.free_cores() == free
