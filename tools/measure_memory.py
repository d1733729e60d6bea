"""Predicted memory beside what a run of the product's own parts takes: `asyncrl.training.memory` on every path of a model.

    python tools/measure_memory.py [--case NAME ...] [--dtype float32] [--out tools/results/memory.md]

Each case is a child process: it loads a model with random weights, takes one training step of one full microbatch, and decodes
as many sequences as the cache has rows, all to their last token. Between these parts the resident memory of the process is
read from /proc, and its peak within each (`VmHWM`, which the child resets), each less what was there before:

    weights    after the step, less the start: masters, gradients, optimizer, copies
    microbatch peak of a second microbatch, less what lies there between two steps
    cache      peak of decoding, less what lies there before

The C library gives freed memory back at once (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_): otherwise a part would count
what an earlier one had left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
PROMPT, COMPLETION, MEMBERS = 64, 128, 8
SEQUENCES, TOKENS = 32, 2176
_SIZES = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4, vocab_size=16_000)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, fused": ("llama", _SIZES | {"num_hidden_layers": 8}, "fused"),
    "llama, packed": ("llama", _SIZES | {"num_hidden_layers": 8}, "packed"),
    "llama, plain sdpa": ("llama", _SIZES | {"num_hidden_layers": 8}, "plain (sdpa"),
    "llama, plain eager": ("llama", _SIZES | {"num_hidden_layers": 8}, "plain (eager"),
    "llama, fused, checkpointing": ("llama", _SIZES | {"num_hidden_layers": 8}, "fused"),
    "llama, packed, checkpointing": ("llama", _SIZES | {"num_hidden_layers": 8}, "packed"),
    "mistral, window 128, plain eager": ("mistral", _SIZES | {"num_hidden_layers": 8, "sliding_window": 128}, "plain (eager"),
    "lfm2, plain sdpa": (
        "lfm2",
        _SIZES | {"num_hidden_layers": 10, "layer_types": (["conv"] * 4 + ["full_attention"]) * 2},
        "plain (sdpa",
    ),
    "mamba, plain eager": ("mamba", {"hidden_size": 160, "num_hidden_layers": 8, "vocab_size": 16_000}, "plain (eager"),
}  # fmt: skip


def build(seed: int) -> Any:
    """What `model.path` names in a child: the case's model with random weights, and no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings, _ = CASES[os.environ["MEASURE_MEMORY_CASE"]]
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings, **ends), dtype=torch.float32)
    return model, object()


def status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


class Part:
    """Resident memory around a part of the work. `peak` and `left` are above what lay there before."""

    def __enter__(self) -> Part:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        self.before = status("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        self.left, self.peak = status("VmRSS") - self.before, status("VmHWM") - self.before


def microbatch() -> Any:
    """One full microbatch of groups at their longest."""
    import numpy as np

    from asyncrl.data.packing import pack_groups
    from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory

    groups, size = [], PROMPT + COMPLETION
    for number in range(TOKENS // (PROMPT + MEMBERS * COMPLETION) + 1):
        random = np.random.default_rng(number)
        prompt = random.integers(1, 15_000, PROMPT).astype(np.int32)
        mask = np.arange(size) >= PROMPT
        guess = np.where(mask, -9.7, 0).astype(np.float32)
        members = tuple(
            Trajectory(
                group_id=number, member=member, group_size=MEMBERS, prompt_length=PROMPT,
                tokens=np.concatenate([prompt, random.integers(1, 15_000, COMPLETION).astype(np.int32)]),
                mask=mask, logprobs=guess, sampled_logprobs=guess, versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0, finish_reason=FinishReason.LENGTH,
            )
            for member in range(MEMBERS)
        )  # fmt: skip
        ticket = Ticket(number, 0, 0)
        groups.append((Group(ticket, Prompt(number, prompt, "", {}), members), np.linspace(-1, 1, MEMBERS)))
    return max(pack_groups(groups, TOKENS), key=lambda batch: batch.tokens.size)


def parts_of(case: str, dtype: str) -> dict[str, Any]:
    """In the child: what was predicted and what was measured, in bytes."""
    import torch

    from asyncrl.algorithms.registry import build_loss
    from asyncrl.config.schema import ModelConfig, TrainConfig
    from asyncrl.models.paths import PATHS
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.memory import Lengths, predict_memory
    from asyncrl.training.trainer import TorchTrainer

    path = next(each for each in PATHS if str(each).startswith(CASES[case][2]))
    train = TrainConfig(tokens_per_microbatch=TOKENS, gradient_checkpointing="checkpointing" in case)
    predicted = predict_memory(
        ModelConfig(path=f"{Path(__file__).resolve()}:build", dtype=dtype), train, max_sequences=SEQUENCES,
        lengths=Lengths(PROMPT, COMPLETION, MEMBERS), path=path,
    )  # fmt: skip
    batch = microbatch()
    warm_up()
    module, _ = build(0)
    with Part() as loading:
        policy = PolicyModel(module, dtype, path=path)
    module_bytes = 4 * policy.flat.numel  # as transformers loaded it: given back while the flat buffers are made
    trainer = TorchTrainer(policy, train, max_completion_length=COMPLETION)
    loss = build_loss("reinforce")
    step(trainer, loss, batch)
    forget(trainer)
    weights = status("VmRSS") - loading.before + module_bytes
    with Part() as second:
        step(trainer, loss, batch)
    forget(trainer)
    with Part() as cache:
        asyncio.run(decode(policy))
    kinds = {
        "weights": ("masters", "gradients", "optimizer", "working_copy", "packed_weights"),
        "microbatch": ("activations", "logits", "working"),
        "cache": ("kv_cache",),
    }
    wanted = {kind: sum(predicted[name] for name in names) for kind, names in kinds.items()}
    found = {"weights": weights, "microbatch": second.peak, "cache": cache.peak}
    assert torch.get_num_threads() >= 1 and sum(wanted.values()) == sum(predicted.values())
    return {
        "path": str(policy.path), "parameters": policy.flat.numel, "predicted": wanted, "measured": found,
        "parts": predicted, "tokens": int(batch.tokens.size),
    }  # fmt: skip


def warm_up() -> None:
    """What the first product, the first optimizer and the first cache bring into the process, whatever their size."""
    import torch

    weight = torch.nn.Linear(256, 256)
    torch.optim.AdamW(weight.parameters(), fused=True)
    weight(torch.randn(256, 256)).sum().backward()


def forget(trainer: Any) -> None:
    """What a microbatch leaves for the next one is its own, not the weights'."""
    from asyncrl.models.head.logprobs import Spare

    trainer.forward._spare = Spare()
    if trainer.policy.fused is not None:
        trainer.policy.fused.scratch._buffers.clear()


def step(trainer: Any, loss: Any, batch: Any) -> None:
    trainer.begin_train_step(loss)
    trainer.train_microbatch(batch)
    trainer.finish_train_step()


async def decode(policy: Any) -> None:
    """All rows of the cache, to their last position."""
    import anyio
    import numpy as np

    from asyncrl.concurrency.lane import ThreadLane
    from asyncrl.generation.embedded.engine import EmbeddedEngine
    from asyncrl.telemetry.recorder import Recorder
    from asyncrl.types import GenerationRequest, SamplingParams

    sampling = SamplingParams(max_tokens=COMPLETION, ignore_eos=True)
    recorder = Recorder(nvtx=False)
    async with ThreadLane("measure", recorder) as lane:
        engine = EmbeddedEngine(
            policy, None, lane, recorder, max_sequences=SEQUENCES, max_context=PROMPT + COMPLETION, prefill_tokens=128
        )
        async with engine, anyio.create_task_group() as tasks:
            for number in range(SEQUENCES):
                prompt = np.random.default_rng(number).integers(1, 15_000, PROMPT).astype(np.int32)
                tasks.start_soon(engine.generate, GenerationRequest(prompt, sampling, seed=number))


def measure(case: str, dtype: str) -> dict[str, Any]:
    """In a child process."""
    environment = os.environ | {
        "MEASURE_MEMORY_CASE": case,
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, "--child", answer.name, "--case", case, "--dtype", dtype]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        found: dict[str, Any] = json.load(answer)
    return found


def rows_of(case: str, dtype: str, found: dict[str, Any]) -> list[str]:
    total = {side: sum(found[side].values()) for side in ("predicted", "measured")}
    lines = []
    for kind in (*found["predicted"], "all"):
        wanted, got = ((total if kind == "all" else {s: found[s][kind] for s in total})[side] for side in total)
        lines.append(
            f"| {case} | {dtype} | {kind} | {wanted / MIB:.0f} | {got / MIB:.0f} | {wanted / max(got, 1):.2f} |"
        )
    return lines


def report(lines: list[str], arguments: argparse.Namespace) -> str:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    flags = {
        word
        for word in Path("/proc/cpuinfo").read_text().split()
        if word.startswith(("avx512f", "avx512_bf16", "amx_"))
    }
    head = [
        "# Predicted and measured memory",
        "",
        f"{time.strftime('%Y-%m-%d')}, `python tools/measure_memory.py {' '.join(sys.argv[1:])}`".rstrip(" `") + "`, "
        f"{cpu} ({' '.join(sorted(flags))}), one thread.",
        f"Models with random weights; {TOKENS} packed tokens of groups of {MEMBERS} completions of {COMPLETION} tokens behind "
        f"a prompt of {PROMPT}; {SEQUENCES} sequences of {PROMPT + COMPLETION} positions.",
        "",
        "| model, path | dtype | part | predicted, MiB | measured, MiB | ratio |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases, dtypes = arguments.case or list(CASES), arguments.dtype or ["float32", "bfloat16"]
    if arguments.child:
        import torch

        torch.set_num_threads(1)
        arguments.child.write_text(json.dumps(parts_of(cases[0], dtypes[0])))
        return 0
    lines: list[str] = []
    for case in cases:
        for dtype in dtypes:
            found = measure(case, dtype)
            print(json.dumps({"case": case, "dtype": dtype, **found}), file=sys.stderr, flush=True)
            lines += rows_of(case, dtype, found)
            print("\n".join(lines[-4:]), flush=True)
    if arguments.out:
        arguments.out.write_text(report(lines, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
