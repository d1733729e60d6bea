"""What a training rank takes when ranks share each microbatch (`distributed.context`), beside one rank.

    python tools/measure context [--case TOKENS,ROW,RANKS ...] [--checkpointing] [--repeat 1] [--out tools/results/context.md]

A model with random weights (2.6 million parameters) trains on a microbatch of sequences of ROW tokens. All tokens of a sequence
behind its first eighth are scored. Ranks are processes of this machine with one thread each, and talk over gloo.

    memory     the peak of the resident memory of the rank with most during a step, less what was there before the model: weights,
               gradients, optimizer, microbatch. Predicted: `asyncrl.runtime.memory`, as `--dry-run` shows it
    time       the median of the steps after the first, and the processor time of all ranks together, which other programs stretch
               less. One rank has as many threads as there are ranks on the other side
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from commands import answers, command, machine, table

MIB = 1 << 20
SETTINGS: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=8192, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
CASES = ["1024,1024,2", "2048,2048,2", "4096,4096,2", "8192,8192,2", "8192,8192,4", "8192,256,2"]
# The C library gives freed memory back at once, and threads that wait leave the cores to others.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_WAIT_POLICY": "PASSIVE"}


def build(seed: int) -> Any:
    """What `model.path` names in a child: the model, and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SETTINGS)).float(), object()


def microbatch(tokens: int, row: int) -> Any:
    import numpy as np

    from asyncrl.data.packing import pack_groups
    from asyncrl.types import FinishReason, Group, Prompt, Ticket, Trajectory

    groups, mask = [], np.arange(row + 1) >= row // 8
    guess = np.where(mask, -9, 0).astype(np.float32)
    for number in range(tokens // row):
        # The last token is not forwarded.
        ids = np.random.default_rng(number).integers(1, SETTINGS["vocab_size"], row + 1).astype(np.int32)
        sequence = Trajectory(
            group_id=number, member=0, group_size=1, prompt_length=row // 8, tokens=ids, mask=mask, logprobs=guess,
            sampled_logprobs=guess, versions=np.where(mask, 0, -1).astype(np.int32), temperature=1.0,
            finish_reason=FinishReason.LENGTH,
        )  # fmt: skip
        prompt = Prompt(number, ids[: row // 8], "", {})
        groups.append((Group(Ticket(number, 0, 0), prompt, (sequence,)), [1.0]))
    (batch,) = pack_groups(groups, tokens)
    assert batch.tokens.size == tokens
    return batch


def predict(tokens: int, row: int, ranks: int, checkpointing: bool = False) -> int:
    """Bytes of a rank, as `--dry-run` shows them, less the cache."""
    from asyncrl.config.schema import Config
    from asyncrl.runtime.memory import predicted

    given = {
        "model": {"path": f"{Path(__file__).resolve()}:build", "dtype": "float32", "device": "cpu"},
        "train": {"tokens_per_microbatch": tokens, "gradient_checkpointing": checkpointing},
        "data": {"max_prompt_tokens": row // 8},
        "rollout": {"max_tokens": row - row // 8, "group_size": 1},
        "engine": {"max_sequences": 1},
        "distributed": {"context": ranks},
    }
    parts = predicted(Config.model_validate(given), ranks)
    return sum(parts.values()) - parts["cache"]


def rank(tokens: str, row: str, threads: str, checkpointing: str, repeat: str) -> None:
    """In a child, whose environment names its rank: peak, and seconds of a step."""
    import torch
    from measure.memory import Part, status, warm_up

    from asyncrl.algorithms.registry import build_loss
    from asyncrl.config.schema import TrainConfig
    from asyncrl.distributed.world import World
    from asyncrl.models.policy import PolicyModel
    from asyncrl.training.trainer import TorchTrainer

    torch.set_num_threads(int(threads))
    length, world = int(row), World.from_env()
    train = TrainConfig(tokens_per_microbatch=int(tokens), gradient_checkpointing=bool(checkpointing))
    batch, loss = microbatch(int(tokens), length), build_loss("reinforce")
    warm_up()
    with world.open(torch.device("cpu")):
        before, siblings = status("VmRSS"), world if world.world_size > 1 else None
        trainer = TorchTrainer(
            PolicyModel(build(0)[0], "float32"), train, world, max_completion_length=length, siblings=siblings
        )
        seconds, processor = [], []
        for _ in range(int(repeat) + 1):
            started, used = time.monotonic(), time.process_time()
            with Part():
                trainer.begin_train_step(loss)
                trainer.train_microbatch(batch)
                trainer.finish_train_step()
                peak = status("VmHWM") - before
            seconds.append(time.monotonic() - started)
            processor.append(time.process_time() - used)
        found = {"peak": peak}
        found["seconds"], found["processor"] = statistics.median(seconds[1:]), statistics.median(processor[1:])
        print(json.dumps(found), flush=True)


def measure(
    tokens: int, row: int, ranks: int, threads: int, checkpointing: bool = False, repeat: int = 1
) -> dict[str, Any]:
    """The largest peak and the longest time of all ranks, and their processor time together."""
    words = tokens, row, threads, "yes" if checkpointing else "", repeat
    found = answers("measure.context", "rank", *words, ranks=ranks, env=ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)})
    worst: dict[str, Any] = {key: max(answer[key] for answer in found) for key in ("peak", "seconds")}
    worst["predicted"] = predict(tokens, row, ranks, checkpointing)
    return worst | {"processor": sum(answer["processor"] for answer in found)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", metavar="TOKENS,ROW,RANKS")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    rows = []
    for case in options.case or CASES:
        tokens, row, ranks = map(int, case.split(","))
        sides = (1, ranks), (ranks, 1)
        one, several = (measure(tokens, row, *side, options.checkpointing, options.repeat) for side in sides)
        print(json.dumps({"case": case, "one": one, "several": several}), file=sys.stderr, flush=True)
        line: list[object] = [tokens, row, ranks]
        for key, unit, digits in (("peak", MIB, 0), ("predicted", MIB, 0), ("seconds", 1, 1), ("processor", 1, 1)):
            first, second = one[key] / unit, several[key] / unit
            line.append(f"{first:.{digits}f} : {second:.{digits}f} = 1 : {second / first:.2f}")
        rows.append((*line, f"{os.getloadavg()[0]:.0f}"))
    heads = "tokens", "row", "ranks", "peak, MiB", "predicted, MiB", "step, s", "processor time of a step, s", "load"
    lines = list(table(heads, rows))
    print("\n".join(lines))
    if options.out:
        said = f"{time.strftime('%Y-%m-%d')}, `{command()}`, {machine()}."
        meaning = __doc__.partition("\n\nA model")[2]
        text = [
            "# Ranks that share a sequence",
            "",
            said,
            "Each cell is one rank : each of the ranks that share.",
            "",
            *lines,
        ]
        options.out.write_text(
            "\n".join([*text, "", "```text", f"A model{meaning.rstrip()}", "```", ""]), encoding="utf-8"
        )
    return 0
