"""Decode steps that are captured once and replayed: on a CPU by a recorder that keeps CUDA's rules, with the kernel's reference."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation_cores import small_model
from generation_models import assert_plain, generate_all, opened, policy_and_plain, request
from ragged_reference import ReferenceKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.generation.embedded.graphs import DecodeGraphs, bucket
from asyncrl.models.attention.interface import AttentionTerms
from asyncrl.models.fused.layers import Mlp
from asyncrl.models.policy import PolicyModel


class Recorder(TorchDispatchMode):
    """A graph: operators with their tensors, by address. Replayed, each writes into the same memory as the first time. Reading a
    number on the host is refused, as a capture refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.inside = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if not self.inside:
            name = function.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "nonzero", "equal"), f"{name} while a graph is captured"
        found = function(*arguments, **(named or {}))
        if not self.inside:
            self.calls.append((function, arguments, named or {}, found))
        return found

    def one(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A kernel that reads lengths on the device: one operator of the graph."""

        def called(*given: Any) -> Tensor:
            self.inside = True
            try:
                found = call(*given)
            finally:
                self.inside = False
            self.calls.append((call, given, {}, found))
            return found

        return called

    def replay(self) -> None:
        with torch.no_grad():
            for function, arguments, named, before in self.calls:
                again = function(*arguments, **named)
                for old, new in zip(
                    *(each if isinstance(each, (tuple, list)) else [each] for each in (before, again)), strict=True
                ):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    """Engines take the kernel's reference, and graphs of recorders: those that were captured."""
    made: list[Recorder] = []
    kernel = ReferenceKernel()
    real = kernel.cached
    monkeypatch.setattr(kernel, "cached", lambda *given: made[-1].one(real)(*given) if open_ else real(*given))
    open_: list[int] = []

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        recorder = Recorder()
        made.append(recorder)
        open_.append(1)
        with recorder:
            out = compute()
        open_.clear()
        return out, recorder.replay

    monkeypatch.setattr("asyncrl.generation.embedded.cache.kernel_for", lambda *case: kernel)
    monkeypatch.setattr("asyncrl.models.fused.decoder.packing_works", lambda *case: False)  # as on a GPU
    monkeypatch.setattr("asyncrl.models.native.library.takes", lambda *tensors, **sizes: False)
    monkeypatch.setattr(DecodeGraphs, "of", classmethod(lambda cls, *given: cls(*given, capture)))
    yield made


def test_buckets_hold_the_rows_and_are_few() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 15, 16, 17, 33)] == [1, 2, 4, 8, 8, 16, 16, 16, 32, 48]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
async def test_what_is_sampled_is_what_the_model_computes(architecture: str, captured: list[Recorder]) -> None:
    """Rows that come and leave, a cache that changes its shape, shared prompts, and new weights on the way; qwen2 has joined
    biases, which are copies of weights."""
    plain = small_model(architecture)
    policy = PolicyModel(copy.deepcopy(plain), "float32")
    requests = [
        request(size, size, max_tokens=3 + size % 7, prefix_key="k" if size == 5 else None)
        for size in (30, 28, 3, 2, 5, 5, 44)
    ]

    def move(factor: float) -> None:
        with torch.no_grad():
            policy.flat.master.mul_(factor)
            for parameter in plain.parameters():
                parameter.mul_(factor)
        policy.advance()

    async with opened(policy, max_sequences=5, kv_positions=200) as run:
        for factor in (1.0, 1.3, 0.8):
            await run.lane.run(lambda factor=factor: move(factor), name="train/finish")
            assert_plain(plain, requests, await generate_all(run.engine, requests))
        graphs, shape = run.engine.core.graphs, run.engine.core.cache.shape
    assert not graphs.failed and len(captured) == len(graphs._graphs) <= 6, (
        "of 1, 2, 4, and as many rows as the cache has"
    )
    assert shape.positions != 96


async def test_surplus_rows_of_a_graph_write_nothing_into_rows_that_are_kept(captured: list[Recorder]) -> None:
    """Three rows run in a bucket of four, and the fourth row is that of a session whose tool runs."""
    plain = small_model("qwen3")
    policy = PolicyModel(copy.deepcopy(plain), "float32")
    async with opened(policy, max_sequences=7, kept_prefix_max_age=1) as run:
        asked = [replace(request(12 + n, n, max_tokens=6), session=f"s{n}") for n in range(3)]
        answers = await generate_all(run.engine, asked)
        beside = [request(20, 10 + n, max_tokens=9) for n in range(3)]
        assert_plain(plain, beside, await generate_all(run.engine, beside))
        assert run.engine.statistics()["kept_rows"] == 3
        before = run.engine.statistics()["prefill_tokens"]
        histories = [
            np.concatenate([each.prompt_ids, answer.token_ids, [7, 8]])
            for each, answer in zip(asked, answers, strict=True)
        ]
        asked = [replace(each, prompt_ids=ids.astype(np.int32)) for each, ids in zip(asked, histories, strict=True)]
        assert_plain(plain, asked, await generate_all(run.engine, asked))
        assert run.engine.statistics()["prefill_tokens"] - before == 3 * 2
    assert captured


async def test_a_step_that_cannot_be_captured_is_run_as_before(
    captured: list[Recorder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(compute: Callable[[], Tensor]) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(DecodeGraphs, "of", classmethod(lambda cls, *given: cls(*given, refused)))
    policy, plain = policy_and_plain("qwen3")
    with caplog.at_level(logging.WARNING):
        async with opened(policy) as run:
            asked = [request(5, 1, max_tokens=6)]
            assert_plain(plain, asked, await generate_all(run.engine, asked))
    assert caplog.text.count("not captured as CUDA graphs (RuntimeError: CUDA error: operation not permitted") == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("float32", "there is no kernel for ragged rows of torch.float32"),
        ("packed", "the model's own code computes the layers"),
        ("experts", "the kernels of experts depend on the routes"),
        ("caps", "no capped scores and no sinks"),
    ],
)
def test_steps_that_a_graph_cannot_hold_are_named(kind: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = SimpleNamespace(mlp=torch.nn.Identity(), terms=AttentionTerms())
    if kind == "caps":
        layer = SimpleNamespace(mlp=Mlp(None, "silu", None), terms=AttentionTerms(softcap=3.0))  # type: ignore[arg-type]
    policy = SimpleNamespace(fused=None if kind == "packed" else SimpleNamespace(layers=[layer]))
    kernel = None if kind == "float32" else ReferenceKernel()
    cache = SimpleNamespace(ragged_kernel=kernel, device=torch.device("cuda"), data=torch.empty(0))
    with caplog.at_level(logging.INFO):
        assert DecodeGraphs.of(policy, cache, 64) is None  # type: ignore[arg-type]
    assert reason in caplog.text
