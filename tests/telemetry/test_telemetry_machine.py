"""The processor in words, as a measured number needs it beside itself."""

from __future__ import annotations

import platform

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
