"""A version of SmolLM2-135M's sizes on its way over the weight board, in turns with a plain copy of the same bytes, on one thread.

    python tools/measure board [--repeat 9] [--layers 30] [--dtype float32 bfloat16]

    hand-over  from the optimizer's end until a reader's modules have it, as a run does it (weights/sync.py): the copy (float32
               alone), the fixed row, and the reader's bind
    refresh    before it, in bfloat16: the masters are cast into a half

Medians; of ratios the median of those of a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from commands import machine
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.models.native import library
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.weights.sync import WeightPublisher

MS = 1e3


def module_of(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * MS


class Reader:
    """As an engine reads the board."""

    def __init__(self, policy: PolicyModel, board: Board) -> None:
        self.policy, self.board = policy, Board.attach(board.description, os.dup(board.fd), board.layout)

    def reads(self, half: int) -> bool:
        return False

    async def wait_unread(self, half: int) -> None:
        raise AssertionError("nothing is pinned")

    async def update_weights(self, version: int, half: int, outputs: Sequence[float] | None) -> None:
        self.policy.flat.move_to(self.board.half(half))


async def hand_over(dtype: str, layers: int, repeat: int) -> None:
    """In turns with a plain copy of as many bytes, by the same thread."""
    trainer = PolicyModel(module_of(layers), dtype)
    weights, found = trainer.weights, dict[str, list[float]]()
    async with ThreadLane("cpu", on_start=lambda: torch.set_num_threads(1)) as lane:
        with Board.create(weights.size, trainer.dtype, weights.layout_digest()) as board:
            reader = Reader(PolicyModel(module_of(layers), dtype, served=True), board)
            publisher = WeightPublisher(trainer, board, reader, lane)
            await publisher.post_first()
            source, target = weights.working.clone(), torch.empty_like(weights.working)

            def optimize() -> float:
                trainer.flat.master.mul_(1.001)
                trainer.version += 1
                return timed(trainer.flat.refresh)

            for turn in range(repeat + 1):
                took = {"refresh": await lane.run(optimize, name="optimize")}
                began = time.perf_counter()
                await publisher.update_weights(trainer.version)
                took["hand-over"] = (time.perf_counter() - began) * MS
                for name, call in (
                    ("memcpy", lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)),
                    ("copy_", lambda: target.copy_(source)),
                ):
                    took[name] = await lane.run(lambda call=call: timed(call), name="copy")
                for name, milliseconds in took.items():
                    if turn:  # the first warms up
                        found.setdefault(name, []).append(milliseconds)
            publisher.close()
    total, ratios = median(found["hand-over"]), []
    for name in ("memcpy", "copy_"):
        ratio = median(a / b for a, b in zip(found["hand-over"], found[name], strict=True))
        ratios.append(f"{ratio:.2f} x {name} ({median(found[name]):.2f})")
    print(f"{dtype}, {weights.working.nbytes / 2**20:,.0f} MiB: hand-over {total:.2f} ms, {', '.join(ratios)}")
    print(f"  before it the refresh: {median(found['refresh']):.2f} ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    print(f"{machine()}; kernels: {library.build_name()}, one thread")
    for dtype in options.dtype:
        asyncio.run(hand_over(dtype, options.layers, options.repeat))
    return 0
