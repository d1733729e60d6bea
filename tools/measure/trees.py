"""What forward and backward over a tree of tokens cost, beside one line of as many distinct tokens.

    python tools/measure trees [--dtype float32 bfloat16] [--device cuda] [--layers 4] [--out FILE.md]

A random model of SmolLM2's width (576, 9 heads, 3 of them for keys). The head is left out: its cost is that of the sampled tokens
on every side. Sides take turns, and the best time of each counts. On a CPU that is the time of the processor, which other programs
stretch less than the clock. Exits 1 where a tree costs more than `ALLOWED` of its line.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from commands import command, machine, table
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.models.attention.interface import register
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.policy import PolicyModel

ALLOWED = 1.1
Nodes = list[tuple[int, int]]  # length and parent of each


def shapes(history: int, branches: int, tokens: int) -> dict[str, Nodes]:
    """Trees of `branches` branches, of `tokens` tokens in the mean."""
    lengths = np.linspace(tokens // 2, tokens + tokens // 2, branches).astype(int).tolist()
    forks, comb = [(history, -1)], list[tuple[int, int]]()
    for length in lengths:
        half, quarter = length // 2, length // 4
        forks += [(half, 0), (quarter, len(forks)), (length - half - quarter, len(forks))]
        # A piece of the history follows the piece before it, and a branch leaves it.
        comb += [(history // branches, max(len(comb) - 2, -1)), (length, len(comb))]
    return {
        f"{branches} branches behind the history": [(history, -1), *((length, 0) for length in lengths)],
        f"each of {branches} branches forks again": forks,
        f"{branches} branches along the history": comb,
    }


def plan_of(nodes: Nodes) -> TreePlan:
    return TreePlan(*zip(*nodes, strict=True))


def passes(model: PolicyModel, nodes: Nodes) -> Callable[[], float]:
    """A function that computes forward and backward, and returns its seconds."""
    position = np.concatenate([np.arange(row.context.size, row.total) for row in plan_of(nodes).rows])
    positions = torch.from_numpy(position).to(model.device)
    on_cpu = model.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    def run() -> float:
        started = clock()
        model.hidden(positions % 512, positions, plan_of(nodes)).sum().backward()
        if not on_cpu:
            torch.cuda.synchronize()
        return clock() - started

    return run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--history", type=int, default=1000)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=150, help="mean length of a branch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    register()
    torch.set_num_threads(options.threads)
    config = LlamaConfig(
        vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=options.layers, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    rows, worst = [], 0.0
    cases = shapes(options.history, options.branches, options.tokens).items()
    for dtype, (name, nodes) in itertools.product(options.dtype, cases):
        torch.manual_seed(0)
        model = PolicyModel(LlamaForCausalLM(config).to(options.device), dtype)
        distinct, plan = sum(length for length, _ in nodes), plan_of(nodes)
        sides = passes(model, nodes), passes(model, [(distinct, -1)])
        taken = [[side() for side in sides] for _ in range(options.repeat + 1)][1:]
        tree, line = map(min, zip(*taken, strict=True))
        worst = max(worst, tree / line)
        tokens = distinct, sum(row.size for row in plan.sequences())
        times = f"{tree * 1e3:.0f}", f"{line * 1e3:.0f}", f"{tree / line:.2f}"
        rows.append((dtype, name, len(plan.levels) + 1, *tokens, *times))
    heads = ["", "tree", "levels", "distinct tokens", "tokens of its rows", "tree, ms", "line, ms", "tree / line"]
    lines = [f"`{command()}` on {machine()}:", "", *table(heads, rows)]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return int(worst > ALLOWED)
