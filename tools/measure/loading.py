"""Host memory and time of loading a checkpoint, with one rank and with two on a machine.

    python tools/measure loading [--against CHECKOUT] [--dtype bfloat16] [--repeat 3] [--out tools/results/loading.md]

The checkpoint has random weights in bfloat16 in the shape of SmolLM2-135M, as safetensors. Ranks are processes that load at once:
the policy of `replicate`, policy and shards of `fsdp`, or the model alone, which is what a rank with a GPU has on the host.
This process reads `/proc/PID/smaps_rollup` of each rank every few milliseconds, less what the rank had before it loaded:

    private   the highest sum over ranks of Private_Clean and Private_Dirty; mapped files count where one rank alone maps them
    written   the highest sum over ranks of Anonymous: memory that no file holds, and that the system cannot take back
    kept      `written` after the load
    seconds   of the slowest rank

`--against`: another checkout of this project, measured in turns with this one. The table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import ROOT, TOOLS, command, end, machine, table

MIB = 1 << 20
SHAPE: dict[str, Any] = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
CASES = [(what, ranks) for what in ("model", "replicate", "fsdp") for ranks in (1, 2)]


def save_model(folder: str) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    # A page that is not on the disk yet counts as written.
    os.sync()


def rank(sharding: str, folder: str, dtype: str) -> None:
    """In a child: a line before the load, and one with its seconds after it. Lines of the parent let the child go on."""
    import torch

    from asyncrl.config.schema import ModelConfig, TrainConfig
    from asyncrl.distributed.world import World
    from asyncrl.models.loading import load_module, load_policy, load_served
    from asyncrl.training.sharded import ShardedTrainer

    torch.set_num_threads(1)
    config, cpu = ModelConfig(path=folder, dtype=dtype), torch.device("cpu")
    with World.from_env(os.environ).open(cpu, timeout_s=60, single_rank_group=True) as world:
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        if sharding == "model":
            kept: object = load_module(config)
        elif sharding == "fsdp":
            policy, model, _ = load_served(config, cpu, 0, None, 512)
            kept = ShardedTrainer(policy, model, TrainConfig(), world, max_completion_length=8)
        else:
            kept = load_policy(config, cpu, longest=512)
        print(time.perf_counter() - started, flush=True)
        sys.stdin.readline()
        del kept


def memory(pid: int) -> dict[str, int]:
    """Bytes of `/proc/PID/smaps_rollup` by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()[1:]
    found = {name.strip(":"): int(kib) * 1024 for name, kib, _ in map(str.split, lines)}
    return {"private": found["Private_Clean"] + found["Private_Dirty"], "written": found["Anonymous"]}


def total(ranks: list[subprocess.Popen[str]]) -> dict[str, int]:
    each = [memory(process.pid) for process in ranks]
    return {kind: sum(one[kind] for one in each) for kind in each[0]}


def measure(checkout: Path, sharding: str, size: int, folder: str, dtype: str) -> dict[str, float]:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(TOOLS)]), "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, sharding, folder, dtype],
            env=environment | {"RANK": str(number), "LOCAL_RANK": str(number)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for number in range(size)
    ]  # fmt: skip
    try:
        for process in ranks:
            line(process)
        before = total(ranks)
        for process in ranks:
            go_on(process)
        peaks, waiting, seconds = dict.fromkeys(before, 0), list(ranks), 0.0
        while waiting:
            now = total(ranks)
            peaks = {kind: max(peak, now[kind]) for kind, peak in peaks.items()}
            ready = [process for process in waiting if readable(process)]
            waiting = [process for process in waiting if process not in ready]
            seconds = max([seconds, *(float(line(process)) for process in ready)])
        kept = total(ranks)["written"] - before["written"]
        for process in ranks:
            go_on(process)
            process.wait(60)
    finally:
        end(ranks)
    return {kind: (peak - before[kind]) / MIB for kind, peak in peaks.items()} | {"kept": kept / MIB, "s": seconds}


def free_port() -> str:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def readable(process: subprocess.Popen[str]) -> bool:
    import select

    return bool(select.select([process.stdout], [], [], 0.005)[0])


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError(f"a rank ended with {process.wait()}")
    return text


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the products")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)


def rows_of(
    found: dict[tuple[str, int, str], list[dict[str, float]]], sides: list[str]
) -> Iterator[tuple[object, ...]]:
    for case in CASES:
        medians = []
        for side in sides:
            runs = found[*case, side]
            medians.append({kind: statistics.median(one[kind] for one in runs) for kind in runs[0]})
            yield *case, side, *(f"{number:.{0 if kind != 's' else 2}f}" for kind, number in medians[-1].items())
        if len(sides) > 1:
            yield *case, "ratio", *(f"{medians[0][kind] / max(medians[1][kind], 1e-9):.2f}" for kind in medians[0])


def main(options: argparse.Namespace) -> int:
    checkouts = {"this": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    found: dict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for _ in range(options.repeat):
            for sharding, size in CASES:
                for side, checkout in checkouts.items():
                    one = measure(checkout, sharding, size, folder, options.dtype)
                    print(json.dumps({"case": [sharding, size, side], **one}), file=sys.stderr, flush=True)
                    found[sharding, size, side].append(one)
    heads = ("sharding", "ranks", "side", "private, MiB", "written, MiB", "kept, MiB", "seconds")
    lines = list(table(heads, rows_of(found, list(checkouts))))
    print("\n".join(lines))
    if options.out:
        head = ["# Memory and time of loading", "", f"{time.strftime('%Y-%m-%d')}, `{command()}`, {machine()}.", ""]
        options.out.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    rank(*sys.argv[1:])
