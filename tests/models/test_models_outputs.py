"""When two processes that hold the same weights are said to compute the same: of dense models, and where tokens choose experts."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.models.outputs import BOUNDS, CONSECUTIVE, DECODED, TOKENS, Comparisons, bound_of

COUNT = TOKENS - 1
DENSE = bound_of(BOUNDS, torch.float32, routed=False)
ROUTED = bound_of(BOUNDS, torch.float32, routed=True)
ROUTED_BFLOAT16 = bound_of(BOUNDS, torch.bfloat16, routed=True)


def row(version: int) -> list[float]:
    return [-1.0 - 0.01 * version - 0.1 * place for place in range(COUNT)]


def off(version: int, by: dict[int, float]) -> list[float]:
    return [each + by.get(place, 0.0) for place, each in enumerate(row(version))]


def test_each_part_of_the_row_counts_by_itself() -> None:
    """What only steps that decode get wrong is not thinned by the rest."""
    decoded = dict.fromkeys(range(COUNT - DECODED, COUNT), 0.0015)
    assert DENSE.distance(off(0, decoded), row(0)) == pytest.approx(0.0015)
    assert ROUTED.distance(off(0, decoded), row(0)) == pytest.approx(0.0015)
    prompt = dict.fromkeys(range(COUNT - DECODED), 0.002)
    assert DENSE.distance(off(0, prompt), row(0)) == pytest.approx(0.002)


def test_a_token_that_went_to_another_expert_is_no_other_model() -> None:
    """Of the dense one every token counts."""
    tipped = off(0, {3: 4.0, COUNT - 2: 4.0})
    assert DENSE.distance(tipped, row(0)) == pytest.approx(4.0 / DECODED)
    assert ROUTED.distance(tipped, row(0)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("bound", [DENSE, ROUTED, ROUTED_BFLOAT16])
def test_what_is_far_off_or_no_number_is_wrong_at_once(bound: object) -> None:
    for wrong in (dict.fromkeys(range(COUNT), 0.31), {0: math.nan}):
        _, text = Comparisons(bound).compare(off(0, wrong), row(0))  # type: ignore[arg-type]  # a Bound
        assert text is not None and "at most" in text


def test_with_experts_a_little_off_is_wrong_when_it_is_so_of_other_weights_again_and_again() -> None:
    little = dict.fromkeys(range(COUNT), 0.01)
    comparisons = Comparisons(ROUTED)
    said = [comparisons.compare(off(version, little), row(version))[1] for version in range(CONSECUTIVE)]
    assert said[:-1] == [None] * (CONSECUTIVE - 1) and "3 comparisons in succession" in str(said[-1])
    comparisons = Comparisons(ROUTED)
    for version in range(20):  # a tie now and then
        assert comparisons.compare(off(version, little if version % 3 else {}), row(version))[1] is None
    for _ in range(20):  # a tie that stays, of weights that stay
        assert comparisons.compare(off(1, little), row(1))[1] is None


def test_in_bfloat16_ties_stay_ties() -> None:
    comparisons = Comparisons(ROUTED_BFLOAT16)
    for version in range(20):
        assert comparisons.compare(off(version, dict.fromkeys(range(COUNT), 0.2)), row(version))[1] is None
