"""The checksum by which ranks compare their weights."""

from __future__ import annotations

import pytest
import torch

from asyncrl.training.agreement import bit_sum, different_ranks, exact_halves


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "count"), [(0, 6), (0, 7), (1, 6), (1, 1), (0, 0)])
def test_every_flipped_bit_changes_the_sum(dtype: torch.dtype, first: int, count: int) -> None:
    """Also in a view that starts at an odd element, and in a last element without a partner."""
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    values = torch.randn(10, dtype=dtype, generator=torch.Generator().manual_seed(0))[first : first + count]
    before = bit_sum(values)
    for element in range(count):
        for bit in range(8 * dtype.itemsize):
            flipped = values.clone() if first == 0 else torch.cat([torch.zeros(first, dtype=dtype), values])[first:]
            number = flipped.view(integers)
            number[element] ^= torch.iinfo(integers).min if bit == 8 * dtype.itemsize - 1 else 1 << bit
            assert bit_sum(flipped) != before


def test_halves_of_a_sum_are_exact() -> None:
    sums = torch.tensor([-1, 2**63 - 1, -(2**63), (1 << 53) + 1])
    upper, lower = exact_halves(sums).view(2, -1).to(torch.int64)
    assert torch.equal(upper * 2**32 + lower, sums)


def test_most_ranks_are_right_and_the_first_of_two() -> None:
    assert different_ranks(torch.tensor([[1.0], [2], [1], [1]]), 1) == [1]
    assert different_ranks(torch.tensor([[1.0], [2]]), 1) == [1]
    # Ranks 0, 2, 4 hold the same rows, and so do 1, 3, 5.
    assert different_ranks(torch.tensor([[1.0], [5], [3], [5], [3], [5]]), 2) == [0]
