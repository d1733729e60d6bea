"""The weight board at the sizes of SmolLM2-135M: what a version costs beside a plain copy of the same bytes, on one thread.

    python tools/measure board [--repeat 9] [--layers 30] [--dtype float32 bfloat16]

    write      copy into a half, over memcpy into the same half
    bind       the modules of a reader move to a half
    pack       copies of all weights in oneDNN's layout
    check      what the trainer looks at before it names a version
    refresh    bfloat16: what the optimizer's closure does with the masters, cast into a half
    hand-over  a version, from the optimizer's end until a reader's modules have it, as a run does it (weights/sync.py): checks,
               the copy (float32 alone), the fixed row, and the reader's bind

All sides take turns in one process; what is printed are medians, and of ratios the median of those of a turn.
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
from asyncrl.models.parameters.packed import pack, packing_works
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board
from asyncrl.weights.sync import WeightPublisher, require_current

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


def measure(dtype: str, layers: int, repeat: int) -> None:
    trainer = PolicyModel(module_of(layers), dtype)
    served = PolicyModel(module_of(layers), dtype, served=True)
    weights = trainer.weights
    found: dict[str, list[float]] = {}
    with Board.create(weights.size, trainer.dtype, weights.layout_digest()) as board:
        reader = Board.attach(board.description, os.dup(board.fd), board.layout)
        source, master = weights.working, trainer.flat.master
        for turn in range(repeat + 1):
            half = turn % 2
            target = board.half(half)
            trainer.version = turn
            sides = {
                "memcpy": lambda target=target: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes),
                "copy_": lambda target=target: target.copy_(source),
                "write": lambda half=half, turn=turn: board.write(half, turn, source),
                "check": lambda turn=turn: require_current(trainer, turn),
                "bind": lambda half=half: served.flat.move_to(reader.half(half)),
            }
            if packing_works(trainer.dtype, trainer.device):
                sides["pack"] = lambda: [pack(product.weight()) for product in trainer.products]
            if trainer.flat.has_working_copy:
                sides["cast"] = lambda target=target: target.copy_(master)
            order = list(sides) if turn % 2 else sorted(sides, reverse=True)
            for name in order:
                took = timed(sides[name])
                if turn:  # the first warms up
                    found.setdefault(name, []).append(took)
        reader.close()
    ratio = median(w / m for w, m in zip(found["write"], found["memcpy"], strict=True))
    ratio_torch = median(w / m for w, m in zip(found["write"], found["copy_"], strict=True))
    size = source.nbytes / 2**20
    print(f"{dtype}, {size:,.0f} MiB")
    print(f"  memcpy {median(found['memcpy']):8.2f} ms   copy_ {median(found['copy_']):8.2f} ms")
    print(f"  write  {median(found['write']):8.2f} ms   {ratio:.2f} x memcpy, {ratio_torch:.2f} x copy_")
    print(f"  bind   {median(found['bind']):8.2f} ms   {median(found['bind']) / median(found['memcpy']):.3f} x memcpy")
    print(f"  check  {median(found['check']):8.2f} ms")
    if "pack" in found:
        print(f"  pack   {median(found['pack']):8.2f} ms")
    if "cast" in found:
        print(f"  refresh {median(found['cast']):7.2f} ms   into the half")


class Reader:
    """As an engine reads the board."""

    def __init__(self, policy: PolicyModel, board: Board) -> None:
        self.policy, self.board = policy, Board.attach(board.description, os.dup(board.fd), board.layout)

    def reads(self, half: int) -> bool:
        return False

    async def left(self, half: int) -> None:
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
    print(f"  hand-over {total:5.2f} ms   {', '.join(ratios)}; before it the refresh: {median(found['refresh']):.2f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    print(f"{machine()}; kernels: {library.build()}, one thread")
    for dtype in options.dtype:
        measure(dtype, options.layers, options.repeat)
        asyncio.run(hand_over(dtype, options.layers, options.repeat))
    return 0
