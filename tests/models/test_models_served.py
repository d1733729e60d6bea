"""Modules that read a board: nothing is copied, nothing of the old storage stays, and the numbers are those of a fresh policy."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.head.logprobs import token_logprobs
from asyncrl.models.parameters.flat import FlatWeights
from asyncrl.models.parameters.packed import packing_works
from asyncrl.models.policy import PolicyModel
from asyncrl.models.served import read_from_board
from asyncrl.transport.memory.board import Board

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
COUNT = 17


def module_of(family: str, seed: int = 3) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
        if family == "gemma3":
            return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, layer_types=["full_attention"] * 2))
        module = Qwen2ForCausalLM(Qwen2Config(**SIZES))  # with biases, which are copied where they are joined
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        return module


def logprobs(policy: PolicyModel) -> torch.Tensor:
    tokens = torch.randint(1, 61, (COUNT,), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        hidden = policy.hidden(tokens, torch.arange(COUNT), TreePlan([0], [COUNT]))
        found, _ = token_logprobs(
            hidden[:-1], policy.head.weight, tokens[1:], torch.ones(COUNT - 1), project=policy.project,
            bias_V=policy.head.bias, transform=policy.transform,
        )  # fmt: skip
    return found


def board_of(weights: FlatWeights, boards: list[Board]) -> tuple[Board, Board]:
    """The owner's, and a reader's, whose memory is read-only."""
    owner = Board.create(weights.size, weights.working.dtype, weights.layout_digest())
    reader = Board.attach(owner.description, os.dup(owner.fd), weights.layout_digest())
    boards += [owner, reader]
    return owner, reader


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_each_move_the_numbers_are_those_of_a_fresh_policy(family: str, dtype: str, boards: list[Board]) -> None:
    trainer = PolicyModel(module_of(family), dtype)
    served = PolicyModel(module_of(family, seed=9), dtype, served=True)
    assert served.weights.layout_digest() == trainer.weights.layout_digest()
    owner, reader = board_of(trainer.weights, boards)
    for version in range(1, 5):
        trainer.flat.master.mul_(1.1).add_(0.01)
        trainer.advance()
        owner.write(version % 2, version, trainer.weights.working)
        read_from_board(served, reader.half(version % 2), version)
        fresh = PolicyModel(copy.deepcopy(trainer.module), dtype)
        assert served.version == version
        assert torch.equal(logprobs(served), logprobs(fresh))
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert all(served.packed_agrees(turn) for turn in range(9)) and served.weights.strays() == []
        product = served._head_product
        assert (product._packed is not None) == product._pack  # packed again, where that works at all


def test_the_parameters_lie_on_the_board_and_the_old_storage_is_let_go(boards: list[Board]) -> None:
    served = PolicyModel(module_of("llama"), "float32", served=True)
    logprobs(served)
    owner, reader = board_of(served.weights, boards)
    owner.write(0, 1, served.weights.working)
    before = StorageWeakRef(served.weights.working.untyped_storage())
    assert not before.expired()
    half = reader.half(0)
    read_from_board(served, half, 1)
    gc.collect()
    assert before.expired()
    for parameter, offset in zip(served.weights.parameters, served.weights.offsets, strict=True):
        assert parameter.data_ptr() == half.data_ptr() + 4 * offset


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_packed_ahead_is_used_after_the_move_and_not_before(
    family: str, dtype: str, boards: list[Board]
) -> None:
    trainer = PolicyModel(module_of(family), dtype)
    served = PolicyModel(module_of(family, seed=9), dtype, served=True)
    owner, reader = board_of(trainer.weights, boards)
    halves = [reader.half(0), reader.half(1)]
    owner.write(0, 0, trainer.weights.working)
    read_from_board(served, halves[0], 0)
    served.make_room_ahead()
    for version in range(1, 6):
        before = logprobs(trainer)
        trainer.flat.master.mul_(1.1).add_(0.01)
        trainer.advance()
        half = version % 2
        owner.write(half, version, trainer.weights.working)
        expected = served.pieces_ahead
        pieces = 0
        for _ in served.pack_ahead(halves[half], version):
            pieces += 1
            if pieces % 3 == 0:
                assert torch.equal(logprobs(served), before)
        assert pieces == expected and all(served.packed_agrees(turn) for turn in range(9))
        copies = [product._other for product in served.products]
        read_from_board(served, halves[half], version)
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert all(served.packed_agrees(turn) for turn in range(9)) and served.weights.strays() == []
        if served._head_product._pack:
            assert [product._copy for product in served.products] == copies  # none was made anew


def test_what_was_packed_ahead_of_something_else_is_not_used(boards: list[Board]) -> None:
    """Left half-way; of another version than the half then holds; never moved to; and a half that is moved to without."""
    dtype = "bfloat16" if packing_works(torch.bfloat16, torch.device("cpu")) else "float32"
    trainer = PolicyModel(module_of("llama"), dtype)
    served = PolicyModel(module_of("llama", seed=9), dtype, served=True)
    owner, reader = board_of(trainer.weights, boards)
    halves = [reader.half(0), reader.half(1)]

    def write(half: int, version: int) -> None:
        trainer.flat.master.mul_(1.1).add_(0.01)
        trainer.advance()
        owner.write(half, version, trainer.weights.working)

    def moved(half: int, version: int) -> None:
        read_from_board(served, halves[half], version)
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert all(served.packed_agrees(turn) for turn in range(9))

    write(0, 1)
    moved(0, 1)
    for stop in (1, 3, served.pieces_ahead - 1):
        write(1, 2)
        pieces = served.pack_ahead(halves[1], 2)
        for _ in range(stop):
            next(pieces)
        moved(1, 2)
        write(0, 3)
        moved(0, 3)
    write(1, 4)
    assert list(served.pack_ahead(halves[1], 4))
    write(1, 6)  # nobody moved to 4
    moved(1, 6)
    write(0, 7)
    assert list(served.pack_ahead(halves[0], 7))
    moved(0, 7)
    write(1, 8)  # nothing was computed with 7: its copies are not in use yet
    assert list(served.pack_ahead(halves[1], 8))
    moved(1, 8)


def test_another_buffer_is_refused_and_nothing_has_moved() -> None:
    served = PolicyModel(module_of("llama"), "float32", served=True)
    for wrong in (torch.zeros(served.weights.size + 64), torch.zeros(served.weights.size, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the modules read"):
            read_from_board(served, wrong, 3)
    assert served.version == 0 and served.weights.strays() == []


def test_the_digest_tells_layouts_apart() -> None:
    def digest(dtype: str = "float32", **changed: Any) -> str:
        module = LlamaForCausalLM(LlamaConfig(**SIZES | changed, tie_word_embeddings=True))
        return PolicyModel(module, dtype, served=True).weights.layout_digest()

    assert digest() == digest()
    others = [digest("bfloat16"), digest(hidden_size=96), digest(intermediate_size=64), digest(num_hidden_layers=1)]
    assert len({digest(), *others}) == 5
