"""Modules that read a board: nothing is copied, nothing of the old storage stays, and the numbers are those of a fresh policy."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch
from models_served import logprobs
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.models.parameters.flat import FlatWeights
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


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
        served.flat.move_to(reader.half(version % 2))
        fresh = PolicyModel(copy.deepcopy(trainer.module), dtype)
        assert torch.equal(logprobs(served), logprobs(fresh))
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert served.weights.strays() == []
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
    served.flat.move_to(half)
    gc.collect()
    assert before.expired()
    for parameter, offset in zip(served.weights.parameters, served.weights.offsets, strict=True):
        assert parameter.data_ptr() == half.data_ptr() + 4 * offset


def test_another_buffer_is_refused_and_nothing_has_moved() -> None:
    served = PolicyModel(module_of("llama"), "float32", served=True)
    for wrong in (torch.zeros(served.weights.size + 64), torch.zeros(served.weights.size, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the modules read"):
            served.flat.move_to(wrong)
    assert served.weights.strays() == []


def test_the_digest_tells_layouts_apart() -> None:
    def digest(dtype: str = "float32", **changed: Any) -> str:
        module = LlamaForCausalLM(LlamaConfig(**SIZES | changed, tie_word_embeddings=True))
        return PolicyModel(module, dtype, served=True).weights.layout_digest()

    assert digest() == digest()
    others = [digest("bfloat16"), digest(hidden_size=96), digest(intermediate_size=64), digest(num_hidden_layers=1)]
    assert len({digest(), *others}) == 5
