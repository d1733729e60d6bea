"""The proof in one process: every way in which modules can come to compute with other weights than the trainer's is planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from weights_helpers import KINDS, Trained, own_lane, trained

from asyncrl.errors import DivergenceError
from asyncrl.models.parameters.packed import JoinedLinear, packing_works
from asyncrl.weights.proof import Proof
from asyncrl.weights.shared import SharedWeights


class Engine:
    """What acknowledges: it writes down what it was told."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def update_weights(self, version: int) -> None:
        self.versions.append(version)


def products(case: Trained) -> list[JoinedLinear]:
    fused = case.policy.fused
    assert fused is not None
    return [case.policy._head_product, *(product for layer in fused.layers for product in layer.products)]


@torch.no_grad()
def use(case: Trained) -> None:
    """A decode step's products: packed copies are made."""
    for product in products(case):
        product(torch.ones(2, product.inputs, dtype=case.policy.dtype))


async def published(case: Trained, plant: Callable[[Trained], object] | None = None, versions: int = 1) -> list[int]:
    """What the engine was told, after `versions` updates; `plant` comes between the last step and its publication."""
    engine = Engine()
    async with own_lane() as lane:
        sink = SharedWeights(case.policy, engine, lane, case.shards)
        for version in range(1, versions + 1):
            await lane.run(lambda: use(case), name="decode")
            await lane.run(case.step, name="step")
            await lane.run(lambda: use(case), name="decode")
            if plant is not None and version == versions:
                await lane.run(lambda: plant(case), name="plant")  # type: ignore[misc]  # the lambda is called here
            try:
                await sink.update_weights(version)
            except DivergenceError:
                assert engine.versions == list(range(1, version))  # the engine was not told
                raise
    return engine.versions


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_refreshed_is_acknowledged_at_every_version(kind: str) -> None:
    assert await published(trained(kind), versions=4) == [1, 2, 3, 4]


@torch.no_grad()
def not_refreshed(case: Trained) -> None:
    case.step(refresh=False)


def rebound(case: Trained) -> None:
    parameter = case.policy.weights.parameters[5]
    parameter.data = parameter.data.clone()  # the same values, today


def moved_view(case: Trained) -> None:
    weights = case.policy.weights
    weights.parameters[-1].data = weights.view(weights.working, 0).flatten()[: weights.parameters[-1].numel()]


def replaced(case: Trained) -> None:
    attention = case.policy.module.model.layers[1].self_attn
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach().clone(), requires_grad=False)


def untied(case: Trained) -> None:
    head = case.policy.module.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def exchanged_module(case: Trained) -> None:
    mlp = case.policy.module.model.layers[2].mlp
    old = mlp.up_proj
    mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype)


def added(case: Trained) -> None:
    case.policy.module.model.layers[0].mlp.extra = nn.Parameter(torch.ones(3))


def older_buffer(case: Trained) -> None:
    weights = case.policy.weights
    weights.bind(weights.working.clone())


def lies(case: Trained) -> None:
    case.policy.version -= 1


PLANTS = (rebound, moved_view, replaced, untied, exchanged_module, added, older_buffer, lies)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_modules_that_read_something_else_end_the_run(kind: str, plant: Callable[[Trained], object]) -> None:
    with pytest.raises(DivergenceError, match=r"no longer reads the flat buffer|not yet at 2"):
        await published(trained(kind), plant, versions=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
async def test_a_working_copy_that_was_not_refreshed_ends_the_run(kind: str) -> None:
    with pytest.raises(DivergenceError, match=r"differ from the trainer's|not the base with the trainer's adapters"):
        await published(trained(kind), not_refreshed)


async def test_an_adapter_that_was_rebound_ends_the_run() -> None:
    def plant(case: Trained) -> None:
        parameter = case.policy.flat.parameters[3]
        parameter.data = parameter.data.clone()

    with pytest.raises(DivergenceError, match=r"lora_B.*no longer reads"):
        await published(trained("lora float32"), plant)


@pytest.mark.parametrize("layer", [0, 1])
async def test_merged_weights_of_an_older_version_end_the_run(layer: int) -> None:
    """The first layer's, and those of the layer that version 1 looks at."""

    @torch.no_grad()
    def plant(case: Trained) -> None:
        lora = case.policy.lora
        assert lora is not None
        merged = lora.weights.view(lora.weights.working, lora._places[layer])
        merged.copy_(lora._base[layer])
        use(case)

    with pytest.raises(DivergenceError, match="not the base with the trainer's adapters"):
        await published(trained("lora bfloat16"), plant)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora float32", "cut bfloat16"])
async def test_a_packed_copy_of_the_version_before_ends_the_run(kind: str) -> None:
    """Of each product in turn, after a step that is too small to be seen in an output: its stamp says that it is fresh."""
    case = trained(kind)
    if not packing_works(case.policy.dtype, case.policy.device):
        pytest.skip("this torch does not pack weights here")
    scale = 1e-3 if case.policy.dtype == torch.bfloat16 else 1e-5
    proof = Proof(case.policy, case.shards)
    case.step()
    for product in products(case)[1 if "lora" in kind else 0 :]:  # adapters leave the head as it is
        use(case)
        assert product._packed is not None
        version = case.step(scale)
        product._stamp = product.flat.stamp(product._copied)
        with pytest.raises(DivergenceError, match="its packed copies are not"):
            proof.prove(version)
        product._stamp = None
        proof.prove(version)


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_that_are_not_finite_are_named_as_such(kind: str) -> None:
    def plant(case: Trained) -> None:
        case.policy.weights.view(case.policy.weights.working, 7).data.fill_(float("nan"))

    with pytest.raises(DivergenceError, match="NaN or infinite"):
        await published(trained(kind), plant)


async def test_one_stale_norm_among_all_weights_is_found() -> None:
    """The smallest parameter has positions of its own in the sample."""

    @torch.no_grad()
    def plant(case: Trained) -> None:
        weights = case.policy.weights
        place = min(range(len(weights.shapes)), key=lambda i: torch.Size(weights.shapes[i]).numel())
        weights.view(weights.working, place).mul_(1.1)

    with pytest.raises(DivergenceError, match="sampled weights of the engine differ"):
        await published(trained("bfloat16"), plant)
