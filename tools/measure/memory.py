"""Predicted memory beside what a run of the product's own parts takes: `asyncrl.runtime.memory` on every path of a model.

    python tools/measure memory [--case NAME ...] [--dtype float32] [--predict] [--out tools/results/memory.md]

Each case is a child process: it loads a model with random weights, takes one training step of one full microbatch, and decodes
as many sequences as the cache has rows, all to their last token. Between these parts the resident memory of the process is
read from /proc, and its peak within each (`VmHWM`, which the child resets), each less what was there before:

    weights    after the step, less the start: weights, gradients, optimizer, copies
    microbatch peak of a second microbatch, less what lies there between two steps
    cache      peak of decoding, less what lies there before

Cases of fsdp are two ranks, without decoding. A peak of their microbatch has the gathered weights, which are predicted as copies.
The C library gives freed memory back at once (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_): otherwise a part would count what an
earlier one had left. `--predict` measures nothing: it computes the predicted columns of the page `--out` anew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import answers, command, machine, table

MIB = 1 << 20
MEMBERS = 8  # completions of a prompt
TOKENS = 2176  # of a microbatch


@dataclass(frozen=True)
class Case:
    """A model with random weights, the path that it is run on, and the rows of its cache: tokens of a prompt and a completion.
    `lora`: rank of adapters. `fsdp`: "" or, with two ranks, "rounds" or "keep" (see `ShardedParameters`)."""

    kind: str
    settings: dict[str, Any]
    path: str
    prompt: int = 64
    completion: int = 128
    sequences: int = 32
    checkpointing: bool = False
    lora: int = 0
    reference: bool = False
    fsdp: str = ""

    @property
    def ranks(self) -> int:
        return 2 if self.fsdp else 1

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
_NARROW = dict(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=2000, num_hidden_layers=3,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192,
)  # fmt: skip
_LATENT = _SIZES | dict(
    num_key_value_heads=8, q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    first_k_dense_replace=8,
)  # fmt: skip
CASES = {
    "llama, fused": Case("llama", _SIZES, "fused"),
    "llama, packed": Case("llama", _SIZES, "packed"),
    "llama, plain sdpa": Case("llama", _SIZES, "plain (sdpa"),
    "llama, plain eager": Case("llama", _SIZES, "plain (eager"),
    "llama, fused, checkpointing": Case("llama", _SIZES, "fused", checkpointing=True),
    "llama, packed, checkpointing": Case("llama", _SIZES, "packed", checkpointing=True),
    "llama, fused, adapters": Case("llama", _SIZES, "fused", lora=16),
    "llama, fused, reference": Case("llama", _SIZES, "fused", reference=True),
    "llama, fsdp": Case("llama", _SIZES, "packed", fsdp="rounds"),
    "llama, fsdp, kept": Case("llama", _SIZES, "packed", fsdp="keep"),
    "qwen3_moe, fused": Case("qwen3_moe", _QWEN3_MOE, "fused"),
    "qwen3_moe, packed": Case("qwen3_moe", _QWEN3_MOE, "packed"),
    "qwen3_moe, fused, checkpointing": Case("qwen3_moe", _QWEN3_MOE, "fused", checkpointing=True),
    "gpt_oss, fused": Case("gpt_oss", _GPT_OSS, "fused"),
    "qwen3_moe, packed, checkpointing": Case("qwen3_moe", _QWEN3_MOE, "packed", checkpointing=True),
    "gpt_oss, packed": Case("gpt_oss", _GPT_OSS, "packed"),
    "gpt_oss, fused, checkpointing": Case("gpt_oss", _GPT_OSS, "fused", checkpointing=True),
    "gpt_oss, packed, checkpointing": Case("gpt_oss", _GPT_OSS, "packed", checkpointing=True),
    "mistral, window 128, plain eager": Case("mistral", _SIZES | {"sliding_window": 128}, "plain (eager"),
    "deepseek_v3, plain sdpa": Case("deepseek_v3", _LATENT, "plain (sdpa"),
    "deepseek_v3, plain sdpa, long rows": Case(
        "deepseek_v3", _LATENT, "plain (sdpa", prompt=128, completion=1024, sequences=4
    ),
    "deepseek_v3, plain eager": Case("deepseek_v3", _LATENT, "plain (eager"),
    "deepseek_v3, plain sdpa, checkpointing": Case("deepseek_v3", _LATENT, "plain (sdpa", checkpointing=True),
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
    "small deepseek_v3, plain sdpa, long rows": Case(
        "deepseek_v3",
        _LATENT | {"hidden_size": 256, "vocab_size": 2000, "num_hidden_layers": 3},
        "plain (sdpa",
        prompt=128,
        completion=1024,
    ),
}


def config_of(case: Case) -> Any:
    from transformers import AutoConfig

    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(case.kind, **case.settings, **ends)


def build(case: Case) -> Any:
    """The case's model with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32)


def predict(case: Case, dtype: str) -> dict[str, int]:
    """Bytes by purpose, as `--dry-run` shows them. Allocates nothing."""
    from asyncrl.config.schema import Config
    from asyncrl.models.paths import PATHS
    from asyncrl.runtime.memory import Cut, predicted

    algorithm: dict[str, Any] = {"kl": {"coef": 0.1}} if case.reference else {}
    with tempfile.TemporaryDirectory() as folder:
        config_of(case).save_pretrained(folder)
        given = {
            "model": {"path": folder, "dtype": dtype, "device": "cpu", "lora": {"rank": case.lora}},
            "train": {"tokens_per_microbatch": TOKENS, "gradient_checkpointing": case.checkpointing},
            "data": {"max_prompt_tokens": case.prompt},
            "rollout": {"max_tokens": case.completion, "group_size": MEMBERS},
            "engine": {"max_sequences": case.sequences},
            "algorithm": algorithm,
            "distributed": {"sharding": "fsdp" if case.fsdp else "replicate"},
        }
        path = next(each for each in PATHS if str(each).startswith(case.path))
        cut = Cut(case.ranks, case.fsdp == "keep")
        return predicted(Config.model_validate(given), case.ranks, path=path, cut=cut)


def kinds(case: Case, dtype: str) -> dict[str, int]:
    """Predicted bytes of the parts that are measured apart from each other, and of all together."""
    parts = predict(case, dtype)
    microbatch, cache = parts.pop("microbatch"), parts.pop("cache")
    apart = {"weights": sum(parts.values()), "microbatch": microbatch} | ({} if case.fsdp else {"cache": cache})
    return apart | {"all": sum(apart.values())}


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


def child(name: str, dtype: str, only_microbatch: str) -> None:
    """Prints what was measured, in bytes."""
    import torch

    from asyncrl.algorithms.registry import build_loss
    from asyncrl.distributed.world import World

    torch.set_num_threads(1)
    case, world = CASES[name], World.from_env()
    batch = microbatch(case)
    loss = build_loss("reinforce")
    warm_up()
    with world.open(torch.device("cpu")):
        module = build(case)
        with Part() as loading:
            trainer = open_trainer(case, dtype, module, world)
        # As transformers loaded them: given back while the flat buffers are made.
        loaded = 4 * sum(parameter.numel() for parameter in module.parameters())
        step(trainer, loss, batch)
        forget(trainer)
        found = {"weights": status("VmRSS") - loading.before + loaded}
        with Part() as second:
            step(trainer, loss, batch)
        forget(trainer)
        found["microbatch"] = second.peak
        if not only_microbatch and not case.fsdp:
            with Part() as cache:
                asyncio.run(decode(trainer.policy, case))
            found["cache"] = cache.peak
    print(json.dumps({"path": str(trainer.policy.path), "measured": found, "tokens": int(batch.tokens.size)}))


def open_trainer(case: Case, dtype: str, module: Any, world: Any) -> Any:
    import copy

    from torch import nn

    from asyncrl.config.schema import LoraConfig, TrainConfig
    from asyncrl.models.paths import PATHS
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.sharded import ShardedTrainer
    from asyncrl.training.trainer import TorchTrainer

    path = next(each for each in PATHS if str(each).startswith(case.path))
    train = TrainConfig(tokens_per_microbatch=TOKENS, gradient_checkpointing=case.checkpointing)
    options = {"max_completion_length": case.completion, "needs_reference": case.reference}
    if case.fsdp:
        shared = {id(p): nn.Parameter(p.detach()) for p in module.parameters()}
        whole = copy.deepcopy(module, shared)
        policy = PolicyModel(module, dtype, path=path, served=True)
        return ShardedTrainer(policy, whole, train, world.train, **options, keep=case.fsdp == "keep")
    policy = PolicyModel(module, dtype, path=path, lora=LoraConfig(rank=case.lora))
    return TorchTrainer(policy, train, **options)


def warm_up() -> None:
    """What the first product, the first optimizer and the first cache bring into the process, whatever their size."""
    import torch

    weight = torch.nn.Linear(256, 256)
    torch.optim.AdamW(weight.parameters(), fused=True)
    weight(torch.randn(256, 256)).sum().backward()


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


async def decode(policy: Any, case: Case) -> None:
    """All rows of the cache, to their last position."""
    import anyio
    import numpy as np

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.generation.embedded.engine import EmbeddedEngine
    from asyncrl.telemetry.recorder import Recorder
    from asyncrl.types import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_tokens=case.completion, ignore_eos=True)
    recorder = Recorder(nvtx=False)

    async def one(number: int) -> None:
        prompt = np.random.default_rng(number).integers(1, case.vocabulary, case.prompt).astype(np.int32)
        await engine.generate(GenerationRequest(prompt, sampling, seed=number))

    async with ThreadLane("measure", recorder) as lane:
        engine = EmbeddedEngine(
            policy, None, lane, recorder, max_sequences=case.sequences, max_context=case.context, prefill_tokens=128,
        )  # fmt: skip
        async with engine, anyio.create_task_group() as tasks:
            for number in range(case.sequences):
                tasks.start_soon(one, number)


def measure(case: str, dtype: str, only_microbatch: bool = False) -> dict[str, Any]:
    """Predicted and measured bytes by part, those of the rank with most. In child processes."""
    trim = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = case, dtype, "only" if only_microbatch else ""
    found = answers("measure.memory", "child", *words, ranks=CASES[case].ranks, env=trim)
    most = max((each["measured"] for each in found), key=lambda parts: sum(parts.values()))
    return found[0] | {"measured": most | {"all": sum(most.values())}, "predicted": kinds(CASES[case], dtype)}


def row_of(case: str, dtype: str, kind: str, predicted: float, measured: float) -> tuple[object, ...]:
    return case, dtype, kind, f"{predicted:.0f}", f"{measured:.0f}", f"{predicted / max(measured, 1):.2f}"


def measured_on(page: Path) -> Iterator[tuple[int, str, str, str, float]]:
    """(number of the line, case, dtype, part, measured MiB) of each row of the page's tables."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines()):
        cells = line.strip("| ").split(" | ")
        if len(cells) == 6 and cells[0] in CASES:
            yield number, *cells[:3], float(cells[4])


def predict_again(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, case, dtype, kind, measured in measured_on(page):
        row = row_of(case, dtype, kind, kinds(CASES[case], dtype)[kind] / MIB, measured)
        lines[number] = f"| {' | '.join(map(str, row))} |"
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    if options.predict:
        predict_again(options.out)
        return 0
    rows: list[tuple[object, ...]] = []
    for case in options.case or CASES:
        for dtype in options.dtype or ["float32", "bfloat16"]:
            found = measure(case, dtype)
            print(json.dumps({"case": case, "dtype": dtype, **found}), file=sys.stderr, flush=True)
            sides = found["predicted"], found["measured"]
            rows += [row_of(case, dtype, kind, *(side[kind] / MIB for side in sides)) for kind in found["measured"]]
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
