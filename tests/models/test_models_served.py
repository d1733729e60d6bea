"""Modules that read a board: nothing is copied, nothing of the old storage stays, and the numbers are those of a fresh policy."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models_served import board_of
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.models.outputs import fixed_logprobs
from asyncrl.models.policy import PolicyModel
from asyncrl.transport.memory.board import Board

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def served_policy(dtype: str = "float32", **changed: Any) -> PolicyModel:
    module = LlamaForCausalLM(LlamaConfig(**SIZES | changed, tie_word_embeddings=True))
    return PolicyModel(module, dtype, served=True)


def test_the_parameters_lie_on_the_board_and_the_old_storage_is_let_go(boards: list[Board]) -> None:
    served = served_policy()
    fixed_logprobs(served)
    owner, reader = board_of(served, boards)
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
    served = served_policy()
    for wrong in (torch.zeros(served.weights.size + 64), torch.zeros(served.weights.size, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the modules read"):
            served.flat.move_to(wrong)
    assert served.weights.misplaced_parameters() == []


def test_the_digest_tells_layouts_apart() -> None:
    def digest(*dtype: str, **changed: Any) -> str:
        return served_policy(*dtype, **changed).weights.layout_digest()

    assert digest() == digest()
    others = [digest("bfloat16"), digest(hidden_size=96), digest(intermediate_size=64), digest(num_hidden_layers=1)]
    assert len({digest(), *others}) == 5
