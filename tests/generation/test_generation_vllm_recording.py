"""What is recorded while another program loads its weights, against transformers' own modules; no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from generation_cores import VOCABULARY, small_model
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.generation.vllm.recording import RecordedPiece, fill, record, require_all_read
from asyncrl.models.parameters.flat import ServedParameters
from asyncrl.models.parameters.layout import Layout

FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
PADDED = 160  # rows of an embedding of `VOCABULARY`
Loaded = Iterable[tuple[str, Tensor]]


class Fused:
    """Parameters as vLLM has them: q, k and v in one, gate and up in one, embeddings with rows that pad."""

    def __init__(self, architecture: str) -> None:
        self.flat = ServedParameters(small_model(architecture), torch.float32)
        self.parts: dict[str, list[str]] = {}
        for name in self.flat.names:
            self.parts.setdefault(self._fused(name), []).append(name)
        sizes = dict(zip(self.flat.names, self.flat.shapes, strict=True))
        self.targets: dict[str, Tensor] = {}
        for name, parts in self.parts.items():
            rows = PADDED if sizes[parts[0]][0] == VOCABULARY else sum(sizes[part][0] for part in parts)
            self.targets[name] = torch.full((rows, *sizes[parts[0]][1:]), 7.0)

    def _fused(self, name: str) -> str:
        for part, (fused, _) in FUSED.items():
            name = name.replace(f".{part}.", f".{fused}.")
        return name

    def load(self, weights: Loaded) -> None:
        """Each piece by itself, in the order of the buffer, as vLLM's loaders do."""
        rows: dict[str, int] = {}
        for name, weight in weights:
            target = self.targets[self._fused(name)]
            start = rows.get(self._fused(name), 0)
            target.narrow(0, start, weight.shape[0]).copy_(weight[:])
            rows[self._fused(name)] = start + weight.shape[0]
            if target.shape[0] == PADDED:
                target[weight.shape[0] :].fill_(0)

    def expected(self, buffer: Tensor) -> dict[str, Tensor]:
        views = dict(self.flat.layout().views(buffer))
        whole = {name: torch.cat([views[part] for part in parts]) for name, parts in self.parts.items()}
        return {
            name: torch.cat([found, torch.zeros(PADDED - VOCABULARY, *found.shape[1:])])
            if found.shape[0] == VOCABULARY and found.ndim == 2
            else found
            for name, found in whole.items()
        }

    def record(self, load: Callable[[Loaded], object] | None = None) -> dict[str, list[RecordedPiece]]:
        recorded = record(load or self.load, self.flat.layout(), self.flat.working, self.targets)
        require_all_read(self.flat.layout(), [piece for pieces in recorded.values() for piece in pieces])
        return recorded


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_later_version_is_read_as_it_would_have_been_loaded(architecture: str) -> None:
    model = Fused(architecture)
    recorded = model.record()
    assert recorded.keys() == model.targets.keys()
    for seed in (1, 2):
        later = torch.randn(model.flat.size, generator=torch.Generator().manual_seed(seed))
        for name, expected in model.expected(later).items():
            fill(recorded[name], later, model.targets[name])
            assert torch.equal(model.targets[name], expected), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_neighbours_are_one_copy(architecture: str) -> None:
    """q, k, v and gate, up lie side by side; biases lie between weights, so fused ones do not. Rows that pad are a piece."""
    model = Fused(architecture)
    for name, pieces in model.record().items():
        apart = architecture == "qwen2" and ".qkv_proj." in name
        padded = model.targets[name].shape[0] == PADDED
        assert len(pieces) == (3 if apart else 1) + padded, name
        assert [piece.source is None for piece in pieces] == [False] * (len(pieces) - padded) + [True] * padded


NORM, K = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
COMPUTED = f"computes its parameter {NORM}"
# what a loader does -> what is said of it
WRONG = dict.fromkeys(
    ["changed in place", "replaced", "added into", "all of a list", "overlapping", "scaled"], COMPUTED
) | {
    "transposed": r"computes its parameter model.layers.0.self_attn.o_proj.weight \(128, 128\)",
    "one missing": f"computes its parameter {K.replace('k_proj', 'qkv_proj')}",
    "one unread": f"does not read the weight {NORM}",
}


def wrong_load(model: Fused, what: str) -> Callable[[Loaded], None]:
    norm, left_out = model.targets[NORM], {"one missing": K, "one unread": NORM}.get(what)
    if what == "one unread":
        del model.targets[NORM]
    change: dict[str, Callable[[str, Tensor], Tensor]] = {
        "transposed": lambda name, w: w.t() if name.endswith("o_proj.weight") else w,
        "scaled": lambda name, w: w + 1 if name == NORM else w,
    }
    after: dict[str, Callable[[dict[str, Tensor]], object]] = {
        "changed in place": lambda _: norm.add_(1),
        "replaced": lambda _: norm.copy_(norm * 2),
        "added into": lambda _: torch.add(norm, 1, out=norm),
        "all of a list": lambda _: torch._foreach_mul_([norm], 2.0),
        "overlapping": lambda weights: norm[64:].copy_(weights["model.layers.0.input_layernorm.weight"][:64]),
    }

    def load(weights: Loaded) -> None:
        given = {name: w for name, w in weights if name != left_out}
        model.load((name, change.get(what, lambda _, w: w)(name, w)) for name, w in given.items())
        after.get(what, len)(given)

    return load


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_copy_of_the_buffer_is_refused_by_name(what: str) -> None:
    model = Fused("llama")
    with pytest.raises(ConfigError, match=f"{WRONG[what]}.*use generation.engine=embedded"):
        model.record(wrong_load(model, what))


def test_the_parts_of_two_processes_are_copied_from_rows_and_columns() -> None:
    """As vLLM's tensor parallelism has them: rows of most weights, columns of o_proj and down_proj, and norms in both."""
    flat = ServedParameters(small_model("llama"), torch.float32)
    layout = flat.layout()

    def part(name: str, weight: Tensor, rank: int) -> Tensor:
        if weight.ndim == 1:
            return weight
        return weight.chunk(2, 1 if "o_proj" in name or "down_proj" in name else 0)[rank]

    both = list[RecordedPiece]()
    for rank in (0, 1):
        targets = {name: torch.empty_like(part(name, weight, rank)) for name, weight in layout.views(flat.working)}

        def load(weights: Loaded, rank: int = rank, targets: dict[str, Tensor] = targets) -> None:
            for name, weight in weights:
                targets[name].copy_(part(name, weight, rank))

        recorded = record(load, layout, flat.working, targets)
        # Half a buffer of a slab does not begin where its storage does.
        later = torch.randn(flat.size + 8, generator=torch.Generator().manual_seed(rank))[8:]
        for name, weight in layout.views(later):
            fill(recorded[name], later, targets[name])
            assert torch.equal(targets[name], part(name, weight, rank)), name
            assert len(recorded[name]) == 1
        pieces = [piece for pieces in recorded.values() for piece in pieces]
        for read in (pieces, []):
            with pytest.raises(ConfigError, match=r"does not read the weight model.embed_tokens.weight"):
                require_all_read(layout, read)
        both += pieces
    require_all_read(layout, both)
    without = [piece for piece in both if piece.rows == 1 or piece.size != 96]
    with pytest.raises(ConfigError, match=r"does not read the weight model.layers.0.mlp.down_proj.weight"):
        require_all_read(layout, without)


def test_a_layout_survives_its_message() -> None:
    layout = Fused("qwen3").flat.layout()
    message = {"names": list(layout.names), "shapes": [list(shape) for shape in layout.shapes]}
    again = Layout.from_message(message | {"offsets": list(layout.offsets), "size": layout.size})
    assert again == layout and again.digest(torch.float32) == layout.digest(torch.float32)
    assert again.digest(torch.bfloat16) != layout.digest(torch.float32)
