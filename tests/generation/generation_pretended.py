"""The embedded engine on a pretended device: tensors without data, so that branches are those of a GPU, and a mode that refuses
what makes the host wait. A program of its own, because torch then takes the device for the machine's accelerator.

    python generation_pretended.py steps qwen3 [graphs]     python generation_pretended.py terms
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from generation_models import SIZES, request
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.generation.embedded.core import Core
from asyncrl.generation.embedded.engine import open_core
from asyncrl.generation.embedded.graphs import DecodeGraphs
from asyncrl.generation.embedded.plans import DecodePlan
from asyncrl.generation.embedded.sampling import Sampled
from asyncrl.models.attention.general import GeneralAttention
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.fused import decoder, layers
from asyncrl.models.head.output import NO_TRANSFORM
from asyncrl.models.policy import PolicyModel, prepare

DEVICE = "pretended"
_setup_privateuseone_for_python_backend(DEVICE)
WAYS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"min_p": 0.2},
    {"logit_bias": {3: 2.0}, "bad_words": ((5,),)}, {"repetition_penalty": 1.2, "top_p": 0.5}, {"min_tokens": 3},
]  # fmt: skip


class NoWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU: reads, and copies from memory that is not pinned. `reads` counts the tokens'."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.reading = False
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "masked_select"), f"{name} waits"
        tensors = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        found = function(*arguments, **named)
        tensors += [found] if isinstance(found, Tensor) else []
        devices = {each.device.type for each in tensors if each.ndim}
        if devices == {"cpu", DEVICE}:
            read = name == "_to_copy" and found.device.type == "cpu" and self.reading
            assert read, f"{name} of tensors of the host and of the device"
        return found


class Kernel:
    """The results of the kernel for ragged rows, without data."""

    def cached(self, qkv: Any, *given: Any) -> Tensor:
        return torch.empty_like(qkv[0])


def watch(monkeypatch: pytest.MonkeyPatch) -> NoWaits:
    watched = NoWaits()

    def pinned(values: npt.NDArray[Any], device: torch.device) -> Tensor:
        """`to_device`, which pins for CUDA alone."""
        watched.copies += 1
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device)

    def read(drawn: Any) -> Sampled:
        """As the real one, which finds some numbers."""
        watched.reads += 1
        watched.reading = True
        rows = torch.cat([batch.values for batch in drawn], 1).cpu().shape[1]
        watched.reading = False
        return Sampled(np.full(rows, 7), np.zeros(rows, np.float32), np.zeros(rows, np.float32))

    for module in [each for name, each in sys.modules.items() if name.startswith("asyncrl.")]:
        if hasattr(module, "to_device"):
            monkeypatch.setattr(module, "to_device", pinned)
    monkeypatch.setattr(Sampled, "read", staticmethod(read))
    monkeypatch.setattr("asyncrl.generation.embedded.cache.kernel_for", lambda *case: Kernel())
    return watched


def model(kind: str) -> PreTrainedModel:
    sizes = SIZES | {
        "vocab_size": 1300, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
        "attn_implementation": "eager",
    }  # fmt: skip
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    capped = {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": None}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **capped))


def on_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> PolicyModel:
    """The comparisons at the start read numbers, so they are made before, on a CPU."""
    with unset_fake_temporarily():
        module = model(kind).bfloat16()
        prepare(module)
        calls = decoder.trace(module)
    assert calls is not None
    monkeypatch.setattr(decoder, "trace", lambda module: calls)
    monkeypatch.setattr(decoder, "matches", lambda *given: True)
    monkeypatch.setattr("asyncrl.models.policy.replace_norms", lambda module: 0)
    monkeypatch.setattr("asyncrl.models.policy.is_lookup", lambda embedding: True)
    monkeypatch.setattr(layers, "_activation", lambda function: "silu" if kind == "qwen3" else "gelu_tanh")
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                )
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
    return PolicyModel(module, "bfloat16", transform=NO_TRANSFORM, head_kernel="torch")


def run_steps(kind: str, captured: bool, mode: NoWaits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces and shared ones, every filter and change of logits, rows that end and rows that come, new weights, and a
    cache that changes its shape. gemma2 has capped scores and windows, which the kernel does not take."""
    policy = on_device(kind, monkeypatch)
    assert policy.fused is not None and policy.device.type == DEVICE
    made: list[Tensor] = []

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        made.append(compute())
        return made[-1], lambda: None

    of = classmethod(lambda cls, *given: cls(*given, capture) if captured else None)
    monkeypatch.setattr(DecodeGraphs, "of", of)
    core = open_core(policy, max_sequences=12, max_context=64, kv_positions=500, prefill_tokens=30, recompute=True)
    assert isinstance(core, Core)
    steps = 0

    def run(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            while core.needs_prefill:
                assert core.prefill()
            decoded = core.decode()
            steps += 1
            for slot in (*decoded.stopped, *decoded.ended):
                core.remove(slot)

    with mode:
        for number, way in enumerate(WAYS):
            shared = "shared" if number % 3 == 0 else None
            core.add(request(9, number, prefix_key=shared, max_tokens=2 + number % 4, **way), (2,))
        run(2)
        assert core.sequences.count < len(WAYS)
        core.add(request(40, 50, max_tokens=20), (2,))
        core.add(request(9, 51, prefix_key="shared", max_tokens=20, top_p=0.3), (2,))
        policy.advance()
        run(3)
    assert mode.reads == steps == 5 and mode.copies > 0 and bool(made) == captured


def count_bands_and_bins() -> None:
    """Bands of a decode step and bins of a microbatch, of which each launches a dozen to fifty kernels."""
    bands: dict[str, int] = {}
    bins: dict[str, int] = {}
    random = np.random.default_rng(0)
    position_n = np.sort(random.integers(200, 1500, 64))
    rows = TreePlan([400, *random.integers(20, 300, 40)], [-1, *[0] * 40]).rows
    for device in ("cpu", DEVICE):
        cache = KVCache(CacheShape(1, 64, 8, 1600, 128), torch.bfloat16, torch.device(device))
        plan = DecodePlan(cache, position_n)
        bands[device] = len(plan._bands_of(None))
        bins[device] = len(GeneralAttention(rows, None, 16, torch.device(device))._lazy_bins)
    assert bands["cpu"] > 30 and bands[DEVICE] <= 2, bands
    assert bins["cpu"] > 30 and bins[DEVICE] <= 5, bins


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        watched = watch(patch)
        if sys.argv[1] == "steps":
            run_steps(sys.argv[2], sys.argv[3:] == ["graphs"], watched, patch)
        else:
            count_bands_and_bins()
