"""Predicted memory beside what a run of the product's own parts takes: `asyncrl.training.memory` on every path of a model.

    python tools/measure memory [--case NAME ...] [--dtype float32] [--out tools/results/memory.md]

Each case is a child process: it loads a model with random weights, takes one training step of one full microbatch, and decodes
as many sequences as the cache has rows, all to their last token. Between these parts the resident memory of the process is
read from /proc, and its peak within each (`VmHWM`, which the child resets), each less what was there before:

    compiled   what oneDNN and torch keep of products of so many numbers of rows that older ones leave
    weights    after the step, less the start: masters, gradients, optimizer, copies
    microbatch peak of a second microbatch, less what lies there between two steps
    cache      peak of decoding, less what lies there before
    routes     the same once more, where it is recorded which experts each token went to, less the cache: the engine's table, and
               all sequences that ended

The C library gives freed memory back at once (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_): otherwise a part would count
what an earlier one had left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import command, machine, start, table

MIB = 1 << 20
MEMBERS = 8  # completions of a prompt
TOKENS = 2176  # of a microbatch


@dataclass(frozen=True)
class Case:
    """A model with random weights, the path that it is run on, and the rows of its cache: tokens of a prompt and a completion."""

    kind: str
    settings: dict[str, Any]
    path: str
    prompt: int = 64
    completion: int = 128
    sequences: int = 32
    checkpointing: bool = False
    routes: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.completion

    @property
    def vocabulary(self) -> int:
        return int(self.settings["vocab_size"])


_WIDTH = dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, vocab_size=16_000)
_SIZES = _WIDTH | {"intermediate_size": 1408, "num_hidden_layers": 8}
_MIXTURE = _WIDTH | {"num_hidden_layers": 8, "head_dim": 64, "num_experts_per_tok": 4}
_QWEN3_MOE = _MIXTURE | {"num_experts": 16, "moe_intermediate_size": 384}
_GPT_OSS = _MIXTURE | {"num_local_experts": 16, "intermediate_size": 384}
# Small numbers, and as many choices a token as in a model of 48 layers with 8 experts a token.
_CHOICES: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=16, vocab_size=16_000, num_hidden_layers=12,
    num_experts=64, num_experts_per_tok=32, moe_intermediate_size=8,
)  # fmt: skip
_NARROW = dict(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=2000, num_hidden_layers=3,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192,
)  # fmt: skip
CASES = {
    "llama, fused": Case("llama", _SIZES, "fused"),
    "llama, packed": Case("llama", _SIZES, "packed"),
    "llama, plain sdpa": Case("llama", _SIZES, "plain (sdpa"),
    "llama, plain eager": Case("llama", _SIZES, "plain (eager"),
    "llama, fused, checkpointing": Case("llama", _SIZES, "fused", checkpointing=True),
    "llama, packed, checkpointing": Case("llama", _SIZES, "packed", checkpointing=True),
    "qwen3_moe, fused": Case("qwen3_moe", _QWEN3_MOE, "fused"),
    "qwen3_moe, packed": Case("qwen3_moe", _QWEN3_MOE, "packed"),
    "qwen3_moe, fused, checkpointing": Case("qwen3_moe", _QWEN3_MOE, "fused", checkpointing=True),
    "gpt_oss, fused": Case("gpt_oss", _GPT_OSS, "fused"),
    "qwen3_moe, packed, checkpointing": Case("qwen3_moe", _QWEN3_MOE, "packed", checkpointing=True),
    "gpt_oss, packed": Case("gpt_oss", _GPT_OSS, "packed"),
    "gpt_oss, fused, checkpointing": Case("gpt_oss", _GPT_OSS, "fused", checkpointing=True),
    "gpt_oss, packed, checkpointing": Case("gpt_oss", _GPT_OSS, "packed", checkpointing=True),
    "qwen3_moe, fused, routes": Case("qwen3_moe", _CHOICES, "fused", 576, 64, 384, routes=True),
    "mistral, window 128, plain eager": Case("mistral", _SIZES | {"sliding_window": 128}, "plain (eager"),
    "lfm2, plain sdpa": Case(
        "lfm2",
        _SIZES | {"num_hidden_layers": 10, "layer_types": (["conv"] * 4 + ["full_attention"]) * 2},
        "plain (sdpa",
    ),
    "mamba, plain eager": Case(
        "mamba", {"hidden_size": 160, "num_hidden_layers": 8, "vocab_size": 16_000}, "plain (eager"
    ),
    # Of a size for tests: experts narrower than what they are fed.
    "small qwen3_moe, fused, checkpointing": Case("qwen3_moe", _NARROW, "fused", checkpointing=True),
}


def build(seed: int) -> Any:
    """What `model.path` names in a child: the case's model with random weights, and no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[os.environ["MEASURE_MEMORY_CASE"]]
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case.kind, **case.settings, **ends), dtype=torch.float32
    )
    return model, object()


def status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) * 1024


class Part:
    """Resident memory around a part of the work. `peak` and `left` are above what lay there before."""

    def __enter__(self) -> Part:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark starts again from here
        self.before = status("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        self.left, self.peak = status("VmRSS") - self.before, status("VmHWM") - self.before


def microbatch(case: Case) -> Any:
    """One full microbatch of groups at their longest."""
    import numpy as np

    from asyncrl.data.packing import pack_groups
    from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory

    groups = []
    for number in range(TOKENS // (case.prompt + MEMBERS * case.completion) + 1):
        random = np.random.default_rng(number)
        prompt = random.integers(1, case.vocabulary, case.prompt).astype(np.int32)
        mask = np.arange(case.context) >= case.prompt
        guess = np.where(mask, -9.7, 0).astype(np.float32)
        members = tuple(
            Trajectory(
                group_id=number, member=member, group_size=MEMBERS, prompt_length=case.prompt,
                tokens=np.concatenate([prompt, random.integers(1, case.vocabulary, case.completion).astype(np.int32)]),
                mask=mask, logprobs=guess, sampled_logprobs=guess, versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0, finish_reason=FinishReason.LENGTH,
            )
            for member in range(MEMBERS)
        )  # fmt: skip
        ticket = Ticket(number, 0, 0)
        groups.append((Group(ticket, Prompt(number, prompt, "", {}), members), np.linspace(-1, 1, MEMBERS)))
    return max(pack_groups(groups, TOKENS), key=lambda batch: batch.tokens.size)


def parts_of(name: str, dtype: str, only_microbatch: bool = False) -> dict[str, Any]:
    """In the child: what was predicted and what was measured, in bytes."""
    from asyncrl.algorithms.registry import build_loss
    from asyncrl.config.schema import ModelConfig, TrainConfig
    from asyncrl.models.paths import PATHS
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.memory import Lengths, predict_memory
    from asyncrl.training.trainer import TorchTrainer

    case = CASES[name]
    path = next(each for each in PATHS if str(each).startswith(case.path))
    model = ModelConfig(path=f"{Path(__file__).resolve()}:build", dtype=dtype)
    train = TrainConfig(tokens_per_microbatch=TOKENS, gradient_checkpointing=case.checkpointing)
    predicted = predict_memory(
        model, train, max_sequences=case.sequences, lengths=Lengths(case.prompt, case.completion, MEMBERS), path=path
    )
    batch = microbatch(case)
    warm_up()
    with Part() as compiled:
        if not only_microbatch:
            head_rows = max(256 if dtype == "float32" else 64, case.sequences)
            compile_products(dtype, 1100 if case.path == "fused" else head_rows)
    module, _ = build(0)
    with Part() as loading:
        policy = PolicyModel(module, dtype, path=path)
    module_bytes = 4 * policy.flat.numel  # as transformers loaded it: given back while the flat buffers are made
    trainer = TorchTrainer(policy, train, max_completion_length=case.completion)
    loss = build_loss("reinforce")
    step(trainer, loss, batch)
    forget(trainer)
    weights = status("VmRSS") - loading.before + module_bytes
    with Part() as second:
        step(trainer, loss, batch)
    forget(trainer)
    found = {"compiled": compiled.left, "weights": weights, "microbatch": second.peak}
    if not only_microbatch:
        with Part() as cache:
            asyncio.run(decode(policy, case))
        found["cache"] = cache.peak
    kinds = {
        "weights": ("masters", "gradients", "optimizer", "working_copy", "packed_weights"),
        "microbatch": ("activations", "logits", "working"),
        "cache": ("kv_cache",),
        "compiled": ("compiled",),
    }
    wanted = {kind: sum(predicted[each] for each in names) for kind, names in kinds.items()}
    assert sum(wanted.values()) == sum(predicted.values())
    if case.routes and not only_microbatch:
        wanted["routes"], found["routes"] = routes_of(policy, case, model)
        found["routes"] -= found["cache"]
    return {
        "path": str(policy.path), "parameters": policy.flat.numel, "predicted": wanted, "measured": found,
        "parts": predicted, "tokens": int(batch.tokens.size),
    }  # fmt: skip


def routes_of(policy: Any, case: Case, model: Any) -> tuple[int, int]:
    """(predicted bytes, peak of decoding with routes recorded)."""
    from asyncrl.training.memory import route_bytes

    with Part() as routes:
        ended = asyncio.run(decode(policy, case, record_routes=True))
    assert len(ended) == case.sequences
    return 2 * case.sequences * case.context * route_bytes(model), routes.peak


def warm_up() -> None:
    """What the first product, the first optimizer and the first cache bring into the process, whatever their size."""
    import torch

    weight = torch.nn.Linear(256, 256)
    torch.optim.AdamW(weight.parameters(), fused=True)
    weight(torch.randn(256, 256)).sum().backward()


def compile_products(dtype: str, packed_rows: int) -> None:
    """Of as many numbers of rows as caches hold: a run's batches differ. `packed_rows`: those that packed weights meet."""
    import torch

    from asyncrl.models.parameters.packed import pack, product

    narrow = getattr(torch, dtype)
    weight, rows = torch.randn(128, 64, dtype=narrow), torch.randn(1200, 64, dtype=narrow)
    packed = pack(weight)
    for count in range(1, 1100):
        if count <= packed_rows:
            product(rows[:count], packed, None)
        torch.mm(rows[:count], weight.t())


def forget(trainer: Any) -> None:
    """What a microbatch leaves for the next one is its own, not the weights'. (The first one leaves a cycle of tensors, too.)"""
    from asyncrl.models.head.logprobs import SpareMemory

    gc.collect()
    trainer.forward._spare = SpareMemory()
    if trainer.policy.fused is not None:
        trainer.policy.fused.scratch._buffers.clear()


def step(trainer: Any, loss: Any, batch: Any) -> None:
    trainer.begin_train_step(loss)
    trainer.train_microbatch(batch)
    trainer.finish_train_step()


async def decode(policy: Any, case: Case, *, record_routes: bool = False) -> list[Any]:
    """All rows of the cache, to their last position; with routes, `MEMBERS` of them behind one prompt."""
    import anyio
    import numpy as np

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.generation.embedded.engine import EmbeddedEngine
    from asyncrl.telemetry.recorder import Recorder
    from asyncrl.types import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_tokens=case.completion, ignore_eos=True)
    recorder, ended = Recorder(nvtx=False), []

    async def one(number: int) -> None:
        group = number // MEMBERS if case.routes else number
        prompt = np.random.default_rng(group).integers(1, case.vocabulary, case.prompt).astype(np.int32)
        key = str(group) if case.routes else None
        ended.append(await engine.generate(GenerationRequest(prompt, sampling, seed=number, prefix_key=key)))

    async with ThreadLane("measure", recorder) as lane:
        engine = EmbeddedEngine(
            policy, None, lane, recorder, max_sequences=case.sequences, max_context=case.context, prefill_tokens=128,
            record_routes=record_routes,
        )  # fmt: skip
        async with engine, anyio.create_task_group() as tasks:
            for number in range(case.sequences):
                tasks.start_soon(one, number)
    return ended


def child(file: str, case: str, dtype: str, only_microbatch: str) -> None:
    import torch

    torch.set_num_threads(1)
    Path(file).write_text(json.dumps(parts_of(case, dtype, bool(only_microbatch))), encoding="utf-8")


def measure(case: str, dtype: str, only_microbatch: bool = False) -> dict[str, Any]:
    """In a child process."""
    trim = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {"MEASURE_MEMORY_CASE": case, **trim}
    words = (case, dtype, "only" if only_microbatch else "")
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".json") as answer:
        process = start("measure.memory", "child", answer.name, *words, env=environment, stdout=subprocess.DEVNULL)
        if code := process.wait():
            raise RuntimeError(f"{case}, {dtype}: the child ended with {code}")
        found: dict[str, Any] = json.load(answer)
    return found


def rows_of(case: str, dtype: str, found: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    found = {side: found[side] | {"all": sum(found[side].values())} for side in ("predicted", "measured")}
    for kind, wanted in found["predicted"].items():
        got = found["measured"][kind]
        yield case, dtype, kind, f"{wanted / MIB:.0f}", f"{got / MIB:.0f}", f"{wanted / max(got, 1):.2f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    rows: list[tuple[object, ...]] = []
    for case in options.case or CASES:
        for dtype in options.dtype or ["float32", "bfloat16"]:
            found = measure(case, dtype)
            print(json.dumps({"case": case, "dtype": dtype, **found}), file=sys.stderr, flush=True)
            rows += rows_of(case, dtype, found)
    lines = list(table(("model, path", "dtype", "part", "predicted, MiB", "measured, MiB", "ratio"), rows))
    print("\n".join(lines))
    if options.out:
        said = f"Models with random weights; {TOKENS} packed tokens of groups of {MEMBERS} completions behind a prompt."
        head = [
            "# Predicted and measured memory",
            "",
            f"{time.strftime('%Y-%m-%d')}, `{command()}`, {machine()}.",
            said,
            "",
        ]
        options.out.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    return 0
