"""Packed copies that one process makes and others read: the numbers are those of a fresh policy, and nothing is packed twice."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest
import torch
from models_served import logprobs
from placing import needs_placing
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.models.parameters import placed
from asyncrl.models.parameters.placed import PackedLayout, placing_works
from asyncrl.models.policy import DTYPES, PolicyModel
from asyncrl.models.served import read_copies, read_from_board
from asyncrl.transport.memory.board import Board
from asyncrl.weights.copies import PackedCopies

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(
    vocab_size=192, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def llama(seed: int = 3, **changed: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SIZES | changed, tie_word_embeddings=True))


class Sides:
    """A trainer with its boards, and a policy that reads them as another process would: of the descriptors, read-only."""

    def __init__(self, dtype: str, boards: list[Board], module: Any = None, other: Any = None) -> None:
        self.trainer = PolicyModel(module or llama(), dtype)
        self.served = PolicyModel(other or llama(seed=9), dtype, served=True)
        weights = self.trainer.weights
        self.owner = Board.create(weights.size, weights.working.dtype, weights.layout_digest())
        boards.append(self.owner)
        reader = Board.attach(self.owner.description, os.dup(self.owner.fd), self.owner.layout)
        boards.append(reader)
        self.halves = [reader.half(0), reader.half(1)]
        copies = PackedCopies.of(self.trainer)
        assert copies is not None
        self.copies = copies
        boards.append(copies.board)
        message = json.loads(json.dumps(copies.message()))
        self.layout = PackedLayout.from_message(message["layout"])
        self.reader = Board.attach(message["board"], os.dup(copies.board.fd), self.layout.digest(self.trainer.dtype))
        boards.append(self.reader)

    @property
    def packed(self) -> list[torch.Tensor]:
        return [self.reader.half(0), self.reader.half(1)]

    def step(self, version: int) -> None:
        self.trainer.flat.master.mul_(1.1).add_(0.01)
        self.trainer.advance()
        self.trainer.version = version

    def publish(self, version: int) -> int:
        """The half."""
        half = version % 2
        self.owner.write(half, version, self.trainer.weights.working)
        self.copies.complete(half, version)
        return half


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biases", [False, True], ids=["llama", "biases"])
def test_readers_compute_with_them_where_they_lie(dtype: str, biases: bool, boards: list[Board]) -> None:
    needs_placing(DTYPES[dtype])
    sides = Sides(dtype, boards, llama(attention_bias=biases), llama(seed=9, attention_bias=biases))
    trainer, served = sides.trainer, sides.served
    logprobs(served)  # as a worker does while it starts: it packs what it has then
    assert read_copies(served, sides.halves, sides.packed, sides.layout)
    assert served.pieces_ahead == 0
    for version in range(5):
        sides.step(version)
        half = sides.publish(version)
        assert list(served.pack_ahead(sides.halves[half], version)) == []  # nothing is left to do
        read_from_board(served, sides.halves[half], version)
        assert torch.equal(logprobs(served), logprobs(PolicyModel(copy.deepcopy(trainer.module), dtype)))
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert all(served.packed_agrees(turn) for turn in range(9)) and served.weights.strays() == []
        first = sides.packed[half].data_ptr()
        for product in served.products:
            assert product._copy is None and product._other is None and product._packed is not None
            at = torch.ops.mkldnn.data_ptr(product._packed)
            assert first <= at < first + sides.layout.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_reads_what_it_wrote_until_its_weights_change(dtype: str, boards: list[Board]) -> None:
    """And then copies of its own: what others read stays as it is."""
    needs_placing(DTYPES[dtype])
    sides = Sides(dtype, boards)
    trainer, layout = sides.trainer, sides.layout

    def on_the_board() -> list[bool]:
        first = sides.copies.board.half(0).data_ptr()
        ats = [torch.ops.mkldnn.data_ptr(product._packed) for product in trainer.products]
        return [first <= at < first + layout.size for at in ats]

    half = sides.publish(0)
    assert half == 0 and all(on_the_board())
    before = logprobs(trainer)
    assert torch.equal(before, logprobs(PolicyModel(copy.deepcopy(trainer.module), dtype))) and all(on_the_board())
    written = sides.packed[0].clone()
    sides.step(1)
    assert not torch.equal(logprobs(trainer), before) and not any(on_the_board())
    assert torch.equal(logprobs(trainer), logprobs(PolicyModel(copy.deepcopy(trainer.module), dtype)))
    assert all(trainer.packed_agrees(turn) for turn in range(9))
    assert torch.equal(sides.packed[0], written)


def test_what_the_trainer_reads_outlives_the_board(boards: list[Board]) -> None:
    needs_placing(torch.float32)
    sides = Sides("float32", boards)
    before = logprobs(sides.trainer)
    sides.publish(0)
    sides.copies.close()
    sides.owner.close()
    assert torch.equal(logprobs(sides.trainer), before)


def test_every_copy_is_the_one_that_torch_makes(boards: list[Board]) -> None:
    needs_placing(torch.float32)
    sides = Sides("float32", boards)
    sides.publish(0)
    x = torch.randn(5, 128)
    for product, form in zip(sides.trainer.products, sides.layout.place(sides.packed[0], torch.float32), strict=True):
        assert form is not None
        x = torch.randn(5, product.inputs)
        fresh = placed.reorder(product.weight())
        found, expected = (
            torch.ops.mkldnn._linear_pointwise(x, each, None, "none", [], "") for each in (form.tensor, fresh)
        )
        assert torch.equal(found, expected)


def test_a_process_that_lays_copies_out_otherwise_makes_its_own(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_placing(torch.float32)
    sides = Sides("float32", boards)
    described = placed._describe
    monkeypatch.setattr(placed, "_describe", lambda packed: described(packed)[:-2] + "ff")
    assert not read_copies(sides.served, sides.halves, sides.packed, sides.layout)
    assert sides.served.pieces_ahead > 0
    read_from_board(sides.served, sides.halves[sides.publish(0)], 0)
    assert torch.equal(logprobs(sides.served), logprobs(sides.trainer))
    assert all(product._copy is not None for product in sides.served.products)


@pytest.mark.parametrize("changed", [{"num_hidden_layers": 1}, {"intermediate_size": 320}])
def test_copies_of_another_model_are_refused(changed: dict[str, int], boards: list[Board]) -> None:
    needs_placing(torch.float32)
    sides = Sides("float32", boards)
    other = PolicyModel(llama(**changed), "float32", served=True)
    with pytest.raises(ValueError, match="of another model"):
        read_copies(other, sides.halves, sides.packed, sides.layout)


def test_where_nothing_can_lie_elsewhere_there_is_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.parameters.reordered.KNOWN_BLOCKS", ())
    assert PackedCopies.of(PolicyModel(llama(), "float32")) is None


def test_a_torch_without_that_interface_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> Any:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    placing_works.cache_clear()
    monkeypatch.setattr(placed, "_library", library)
    try:
        assert not placing_works(torch.float32)
        assert PackedCopies.of(PolicyModel(llama(), "float32")) is None
    finally:
        placing_works.cache_clear()


def test_products_that_only_torch_can_write_are_packed_by_everybody(boards: list[Board]) -> None:
    """The rows of a padded head fill no whole blocks: its copy is made by each process, those of the layers lie on the board."""
    needs_placing(torch.float32)
    sides = Sides("float32", boards, llama(vocab_size=61), llama(seed=9, vocab_size=61))
    trainer, served = sides.trainer, sides.served
    assert None in sides.layout.places and any(sides.layout.places)
    assert read_copies(served, sides.halves, sides.packed, sides.layout)
    assert served.pieces_ahead == 1
    for version in range(3):
        sides.step(version)
        half = sides.publish(version)
        if version:
            list(served.pack_ahead(sides.halves[half], version))
        read_from_board(served, sides.halves[half], version)
        assert torch.equal(logprobs(served), logprobs(trainer))
        assert all(served.packed_agrees(turn) for turn in range(9))
