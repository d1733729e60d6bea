"""What `model.dtype: auto` is on which device, who says so, and that a run keeps it when it goes on elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_helpers import DRY, REAL, config_of
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.describe import to_yaml
from asyncrl.config.load import load_config
from asyncrl.config.resolve import resolve
from asyncrl.errors import ConfigError
from asyncrl.runtime import decided as module
from asyncrl.runtime.decided import check_chosen, choose_device, choose_dtype, chosen_settings
from asyncrl.runtime.gate import check_model
from asyncrl.runtime.plan import plan
from asyncrl.runtime.runtime import Runtime

AUTO: dict[str, Any] = REAL | {
    "model": REAL["model"] | {"dtype": "auto", "device": "cpu"},
    "telemetry": {"live": "plain"},
}


def processor(monkeypatch: pytest.MonkeyPatch, *flags: str, torch_may: bool = True) -> None:
    """As if this were a processor with these flags."""
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(module, "instruction_set", lambda: " and ".join(flags))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: torch_may)


@pytest.mark.parametrize(
    ("flags", "torch_may", "dtype"),
    [
        (("avx2",), False, "float32"),
        (("avx2", "avx512f"), True, "float32"),
        (("avx2", "avx512f", "avx512_bf16"), True, "bfloat16"),
        (("avx2", "avx512f", "avx512_bf16"), False, "float32"),  # ONEDNN_MAX_CPU_ISA
        (("avx512f", "amx_bf16"), True, "bfloat16"),
        ((), False, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], torch_may: bool, dtype: str
) -> None:
    processor(monkeypatch, *flags, torch_may=torch_may)
    config, device, lines = choose_dtype(config_of(tmp_path, base=AUTO))
    assert config.model.dtype == dtype and device == torch.device("cpu")
    has = "bfloat16 instructions;" if dtype == "bfloat16" else "no bfloat16 instructions that torch may use;"
    assert lines == (f"matrix products in {dtype} on cpu (auto: {has} this processor has {' and '.join(flags)})",)
    # What depends on the dtype is derived from that.
    assert resolve(config).algorithm.mismatch_gate == {"float32": 1e-3, "bfloat16": 0.1}[dtype]


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_auto_on_a_gpu_is_by_its_compute_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    cards(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Card")
    config, device, lines = choose_dtype(config_of(tmp_path, "model.device=auto", base=AUTO), local_rank=1, ranks=2)
    assert (config.model.dtype, device) == (dtype, torch.device("cuda", 1))
    said = f"matrix products in {dtype} on cuda (auto: NVIDIA Card, compute capability {capability[0]}.{capability[1]})"
    assert lines == (said,)
    *_, lines = choose_dtype(config_of(tmp_path, "model.device=auto", "model.dtype=bfloat16", base=AUTO))
    assert any("no instructions for bfloat16. On a CPU the emulation takes" in line for line in lines) == (
        dtype == "float32"
    )


def cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "visible", "local_rank", "ranks", "expected"),
    [
        ("cpu", 4, 1, 4, "cpu"),
        ("auto", 0, 1, 4, "cpu"),
        ("auto", 1, 0, 1, "cuda:0"),
        ("auto", 4, 0, 1, "cuda:0"),
        ("auto", 4, 3, 4, "cuda:3"),
        ("auto", 1, 3, 4, "cuda:0"),  # a launcher shows each rank its own
        ("auto", 2, 3, 4, "4 ranks run on this machine, and torch sees 2 GPUs"),
        ("cuda", 0, 0, 1, "torch finds no CUDA device on this machine; use cpu or auto"),
        ("cuda", 1, 0, 1, "cuda:0"),
        ("cuda", 4, 2, 4, "cuda:2"),
        ("cuda", 1, 2, 4, "cuda:0"),
        ("cuda", 2, 0, 4, "start as many ranks as there are GPUs"),
        ("cuda:2", 4, 0, 1, "cuda:2"),
        ("cuda:4", 4, 0, 1, "torch sees 4 GPU(s) here: cuda:0 to cuda:3"),
        ("cuda:0", 4, 0, 2, "2 ranks of this machine would share that GPU; use cuda"),
    ],
)
def test_a_gpu_has_its_number_and_is_one_ranks_alone(
    name: str, visible: int, local_rank: int, ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(monkeypatch, visible)
    if expected.startswith(("cpu", "cuda")):
        found = choose_device(name, local_rank, ranks)
        assert str(found) == expected and found == torch.device(expected)
    else:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            choose_device(name, local_rank, ranks)


def test_who_insists_on_bfloat16_hears_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "model.dtype=bfloat16", base=AUTO)
    processor(monkeypatch, "avx2")
    *_, (said, warning) = choose_dtype(config)
    assert said == "matrix products in bfloat16 on cpu (model.dtype)"
    assert "this CPU has no instructions for bfloat16" in warning and "Set model.dtype to float32" in warning
    assert warning in plan(config)
    processor(monkeypatch, "avx2", "avx512_bf16")
    assert choose_dtype(config)[2] == (said,)
    processor(monkeypatch, "avx2")
    assert len(choose_dtype(config_of(tmp_path, "model.dtype=float32", base=AUTO))[2]) == 1


def test_a_dry_run_has_no_products(tmp_path: Path) -> None:
    config = config_of(tmp_path, base=DRY)
    assert choose_dtype(config) == (config, torch.device("cpu"), ())


def test_a_run_keeps_the_day_that_its_prompts_have(tmp_path: Path) -> None:
    begun, *_ = choose_dtype(config_of(tmp_path, "data.date=2024-07-26", base=AUTO))
    assert begun.data.date == "2024-07-26" and choose_dtype(config_of(tmp_path, base=AUTO))[0].data.date is not None
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.yaml").write_text(to_yaml(begun), encoding="utf-8")
    assert choose_dtype(config_of(tmp_path, "resume=true", base=AUTO))[0].data.date == "2024-07-26"
    with pytest.raises(ConfigError, match=r"data\.date"):
        config_of(tmp_path, "data.date=yesterday", base=AUTO)


async def test_a_run_keeps_the_dtype_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, "avx2", "avx512_bf16")
    async with Runtime(config_of(tmp_path, "train.max_steps=1", base=AUTO)) as run:
        assert run.config.model.dtype == "bfloat16" and run.config.algorithm.mismatch_gate == 0.1
        assert run.built.policy is not None and run.built.policy.dtype == torch.bfloat16
        await run.run()
    assert load_config([tmp_path / "runs/run/config.yaml"]).model.dtype == "bfloat16"
    assert (
        "matrix products in bfloat16 on cpu (auto: bfloat16 instructions; this processor has avx2 and avx512_bf16)"
        in capsys.readouterr().out
    )

    processor(monkeypatch, "avx2", torch_may=False)
    async with Runtime(config_of(tmp_path, "train.max_steps=2", "resume=true", base=AUTO)) as run:
        assert run.config.model.dtype == "bfloat16" and run.config.algorithm.mismatch_gate == 0.1
        assert (await run.run()).version == 2
    said = capsys.readouterr().out
    assert (
        "matrix products in bfloat16 on cpu (the dtype at the start of the run; a new run on this machine would use float32: auto"
        in said
    )
    assert "this CPU has no instructions for bfloat16" in said
    with pytest.raises(ConfigError, match=r"model.dtype: bfloat16 -> float32"):
        await Runtime(config_of(tmp_path, "resume=true", "model.dtype=float32", base=AUTO)).__aenter__()


def test_ranks_on_unlike_machines_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, base=AUTO)
    processor(monkeypatch, "avx2", "avx512_bf16")
    first, *_ = choose_dtype(config)
    check_chosen(first, chosen_settings(first), 1)
    processor(monkeypatch, "avx2")
    other, *_ = choose_dtype(config)
    with pytest.raises(
        ConfigError, match=r"bfloat16 on the machine of rank 0 and float32 on the machine of rank 1; set"
    ):
        check_chosen(other, chosen_settings(first), 1)


class TensorFloat32(TorchFunctionMode):
    """Products as NVIDIA_TF32_OVERRIDE=1 makes them on a card: of factors with 10 bits."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in (torch.Tensor.__matmul__, torch.Tensor.matmul):
            arguments = [
                (part.view(torch.int32) & ~0x1FFF).view(torch.float32)
                for part in arguments
                if part.dtype == torch.float32
            ] or arguments
        return function(*arguments, **(named or {}))


def test_the_gate_blames_tf32_and_not_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with TensorFloat32(), pytest.raises(ConfigError, match=r"6e-04 from float64, .*NVIDIA_TF32_OVERRIDE \(now 1\)"):
        check_model(model)
