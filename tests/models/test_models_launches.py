"""How many kernels a layer launches on a GPU, counted on a CPU over the branch that a GPU takes: at some 8 us each they, and not
the arithmetic, are the time of a small step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ragged_reference import ReferenceKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.generation.embedded.cache import CacheShape, KVCache
from asyncrl.generation.embedded.plans import DecodePlan
from asyncrl.models.attention.tree import TreePlan
from asyncrl.models.native import gpu, kernels
from asyncrl.models.parameters import flat
from asyncrl.models.policy import PolicyModel

# On a GPU these launch nothing: views, memory, questions to tensors.
FREE = {
    "view", "_unsafe_view", "as_strided", "slice", "select", "expand", "transpose", "t", "permute", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "unbind", "alias", "detach", "empty", "empty_like", "empty_strided", "new_empty",
    "_reshape_alias", "unfold", "promote_types",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operators, less those in `FREE`. The kernel for ragged rows is one, whatever it does here."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.inside = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not self.inside and name not in FREE:
            self.found[name] += 1
        return function(*arguments, **(named or {}))

    def counted_as(self, name: str, count: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """What `call` does on a CPU is `count` launches of `name` on a GPU."""

        def counted(*given: Any) -> Any:
            self.found[name] += count
            self.inside = True
            try:
                return call(*given)
            finally:
                self.inside = False

        return counted


def norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor | None]:
    """torch's fused operator, which has no kernel for CPUs, by the definition."""
    normed, inner = x.float() * scale, grad.float() * weight.float()
    of_x = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale
    return of_x.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype) if wanted[1] else None


def by_torch(call: Callable[..., Any]) -> Callable[..., None]:
    """What a Triton kernel computes."""

    def run(*given: Any) -> None:
        with pytest.MonkeyPatch.context() as without:
            without.setattr(gpu, "PRESENT", False)
            call(*given)

    return run


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    kernels.rotate_(heads, cos, torch.stack((-sin, sin)), sign < 0)


def swiglu_backward_(gate_up: Tensor, grad: Tensor, product: Tensor) -> None:
    kernels.gated_backward_(gate_up, grad, product, kernels.Scratch(), "silu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counted, kernel = Launches(), ReferenceKernel()
    # FlashAttention's backward is three: products with the output, the gradients, a cast.
    for name, count in (("forward", 1), ("cached", 1), ("backward", 3)):
        monkeypatch.setattr(kernel, name, counted.counted_as(f"flash {name}", count, getattr(kernel, name)))
    monkeypatch.setattr(kernels, "_norm", counted.counted_as("norm", 1, kernels._norm))
    backward = counted.counted_as("norm backward", 3, norm_backward)  # of the input, and of the weight in two
    monkeypatch.setattr(kernels, "_norm_backward", backward)
    for place in ("asyncrl.models.attention.tree", "asyncrl.generation.embedded.cache"):
        monkeypatch.setattr(f"{place}.kernel_for", lambda *case: kernel)
    for place in ("kernels", "norms"):
        monkeypatch.setattr(f"asyncrl.models.native.{place}.fuses", lambda x, weight, offset: not offset)
    monkeypatch.setattr("asyncrl.models.native.library.takes", lambda *tensors, **sizes: False)
    monkeypatch.setattr("asyncrl.models.native.kernels._BLOCK_BYTES", 1 << 40)  # a GPU takes all rows at once
    add_product = counted.counted_as("addmm", 1, flat.add_product_)
    monkeypatch.setattr("asyncrl.models.parameters.packed.add_product_", add_product)
    monkeypatch.setattr(gpu, "PRESENT", True)
    monkeypatch.setattr(gpu, "takes", lambda *tensors: True)
    for name, call in (
        ("rotate_", rotate_),
        ("swiglu", partial(kernels.gated, activation="silu")),
        ("swiglu_backward_", swiglu_backward_),
    ):
        monkeypatch.setattr(gpu, name, counted.counted_as(name, 1, by_torch(call)))
    for place in ("policy", "fused.decoder"):
        monkeypatch.setattr(f"asyncrl.models.{place}.packing_works", lambda *case: False)
    yield counted


def policy(layers: int) -> PolicyModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    return PolicyModel(Qwen3ForCausalLM(config), "bfloat16")


def a_layer(count: Callable[[int], Counter[str]]) -> Counter[str]:
    """What one more layer adds."""
    more, less = count(3), count(2)
    return Counter({name: more[name] - less[name] for name in more if more[name] > less[name]})


def test_decode(launches: Launches) -> None:
    def count(layers: int) -> Counter[str]:
        model = policy(layers)
        assert model.fused is not None
        cache = KVCache(CacheShape(layers, 4, 2, 32, 16), model.dtype, torch.device("cpu"))
        position = np.array([3, 9, 4, 20])
        launches.found.clear()
        with torch.no_grad(), launches:
            model.hidden(torch.tensor([1, 2, 3, 4]), torch.from_numpy(position), DecodePlan(cache, position))
        return Counter(launches.found)

    found = a_layer(count)
    assert found["flash cached"] == 1 and found.total() <= 19, found


@pytest.mark.parametrize(("trees", "depth", "most"), [(1, 2, 77), (3, 2, 87), (3, 4, 145)])
def test_training(launches: Launches, trees: int, depth: int, most: int) -> None:
    """The tokens below several nodes are gathered: of queries, keys, values, output and log-sum-exp, forward and backward."""

    def count(layers: int) -> Counter[str]:
        model = policy(layers)
        # A tree: each of its levels below the root has two nodes, and the second one continues.
        levels = np.arange(depth - 1)
        tree = np.r_[-1, (2 * levels).repeat(2)]
        parents = np.concatenate([np.where(tree < 0, -1, tree + number * tree.size) for number in range(trees)])
        plan = TreePlan(np.tile([6, *[5, 9] * (depth - 1)], trees), parents)
        own = [torch.arange(6), *(6 + 9 * level + torch.arange(length) for level in levels for length in (5, 9))]
        positions = torch.cat(own * trees)
        launches.found.clear()
        with launches:
            model.hidden(torch.arange(plan.tokens) % 64, positions, plan).sum().backward()
        return Counter(launches.found)

    found = a_layer(count)
    # One call for each level: FlashAttention's backward is three launches.
    assert found["flash forward"] == depth and found["flash backward"] == 3 * depth and found.total() <= most, found


def test_the_norm_of_a_gpu_is_that_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(7, 24), torch.randn(24), torch.randn(7, 24)

    def compute() -> list[Tensor]:
        out, of_weight = torch.full_like(x, 0.5), torch.full_like(weight, 0.25)
        normed, scale = kernels.rms_norm(x, weight, 1e-5, torch.empty_like(x))
        kernels.rms_norm_backward(grad, x, weight, 1e-5, of_weight, out)
        alone = kernels.rms_norm_backward(grad, x, weight, 1e-5, of_weight, scale=scale)
        return [normed, out, of_weight, alone]

    expected = compute()
    monkeypatch.setattr("asyncrl.models.native.library.takes", lambda *tensors, **sizes: False)
    monkeypatch.setattr(kernels, "fuses", lambda *given: True)
    monkeypatch.setattr(kernels, "_norm_backward", norm_backward)
    for found, right in zip(compute(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=2e-6)
