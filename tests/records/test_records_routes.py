"""Routes of experts: the narrowest signed integers, in records and back, and which rows are none."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_records_schema import trajectory, written
from transport_records import draft_of

from asyncrl.errors import DataError
from asyncrl.records.check import Limits, check_routes, check_trajectory, narrowest
from asyncrl.records.layout import Section
from asyncrl.records.read import read
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import plan


def routes_of(length: int, kind: npt.DTypeLike = np.int8) -> npt.NDArray[np.signedinteger]:
    routes = np.stack([np.arange(length * 3), np.arange(length * 3) + 1], 1).reshape(length, 3, 2).astype(kind)
    routes[-1] = -1
    return routes


def test_the_narrowest_signed_integers_hold_every_expert_and_minus_one() -> None:
    found = {experts: narrowest(experts) for experts in (1, 128, 129, 32_768, 32_769)}
    assert list(found.values()) == [np.int8, np.int8, np.int16, np.int16, np.int32]


@pytest.mark.parametrize("kind", (np.int8, np.int16, np.int32))
def test_routes_come_back_as_they_went(kind: npt.DTypeLike) -> None:
    sent = [replace(trajectory(m, 4 + m), routed_experts=routes_of(4 + m, kind)) for m in range(2)]
    raw = written(plan(draft_of(sent)))
    for one, other in zip(sent, trajectories_of(read(raw)), strict=True):
        assert other.routed_experts is not None and other.routed_experts.dtype == kind
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        assert np.shares_memory(np.frombuffer(raw, np.uint8), other.routed_experts)


def test_members_may_be_of_different_widths_and_none_may_lack_them() -> None:
    wide, narrow = (
        replace(trajectory(m, 5), routed_experts=routes_of(5, k)) for m, k in enumerate((np.int16, np.int8))
    )
    found = trajectories_of(read(written(plan(draft_of([narrow, wide])))))
    assert all(t.routed_experts is not None and t.routed_experts.dtype == np.int16 for t in found)
    assert trajectories_of(read(written(plan(draft_of([trajectory(0, 5)])))))[0].routed_experts is None


@pytest.mark.parametrize(("kind", "wider"), ((np.uint8, np.int16), (np.uint16, np.int32)))
def test_unsigned_ones_of_older_writers_are_read(kind: npt.DTypeLike, wider: npt.DTypeLike) -> None:
    old = np.full((4, 3, 2), np.iinfo(kind).max, kind)
    raw = written(plan(draft_of([trajectory(0, 4)], extra={Section.ROUTED_EXPERTS: [old]})))
    assert read(raw).arrays[Section.ROUTED_EXPERTS].dtype == kind
    found = trajectories_of(read(raw))[0].routed_experts
    assert found is not None and found.dtype == wider and (found == np.iinfo(kind).max).all()


@pytest.mark.parametrize(
    ("choice", "what"),
    (
        ((-1, 3), "is partly missing: give all experts, or -1 for each if they are not known"),
        ((3, 3), "names an expert twice: give different experts"),
        ((-2, 3), "is out of range: experts are 0 to 15"),
        ((16, 3), "is out of range: experts are 0 to 15"),
    ),
)
def test_what_no_router_chooses_is_named_with_row_and_layer(choice: tuple[int, int], what: str) -> None:
    routes = routes_of(5)
    check_routes(routes, 16)
    check_routes(routes[:0], 16)
    routes[3, 2] = choice
    with pytest.raises(DataError) as error:
        check_routes(routes, 16)
    assert str(error.value) == f"token 3, layer 2: the choice {list(choice)} {what}"
    with pytest.raises(DataError, match="member 0: routed_experts: token 3, layer 2"):
        check_trajectory(replace(trajectory(0, 5), routed_experts=routes), Limits(routes=(3, 2, 16)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_exactly_the_choices_of_routers_pass(rows: int, layers: int, k: int, random: Random) -> None:
    def choice() -> list[int]:
        whole = random.choice((random.sample(range(6), k), [-1] * k))
        return whole if random.random() < 0.9 else [random.randint(-2, 6) for _ in range(k)]

    drawn = [[choice() for _ in range(layers)] for _ in range(rows)]
    bad = [
        (row, layer)
        for row in range(rows)
        for layer in range(layers)
        if (each := drawn[row][layer]) != [-1] * k and (len(set(each)) < k or min(each) < 0 or max(each) > 5)
    ]
    if not bad:
        check_routes(np.array(drawn, np.int8), 6)
        return
    with pytest.raises(DataError) as error:
        check_routes(np.array(drawn, np.int8), 6)
    assert any(str(error.value).startswith(f"token {row}, layer {layer}: ") for row, layer in bad)


def test_good_routes_are_checked_without_being_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop: sorting those of one long row takes a tenth of a second."""
    calls = []
    sort = np.sort
    monkeypatch.setattr(np, "sort", lambda *given: calls.append(given) or sort(*given))
    routes = np.tile(np.arange(8, dtype=np.int8), (32, 24, 1))
    check_routes(routes, 128)
    assert not calls
    with pytest.raises(DataError, match="out of range"):
        check_routes(routes, 7)
    assert calls, "that is where it sorts"


@pytest.mark.parametrize("prompt_length", (1, 3))
def test_a_trajectory_of_which_nothing_is_known_is_refused(prompt_length: int) -> None:
    mask = np.array([False, False, False, True, False])
    limits, routes = Limits(routes=(3, 2, 16)), np.full((5, 3, 2), -1, np.int8)
    good = trajectory(0, 5, prompt_length=prompt_length, mask=mask, logprobs=-np.ones(5, np.float32))
    good = replace(good, sampled_logprobs=good.logprobs)
    routes[3:] = 0, 1  # of the last trained token, which is only predicted, and of what follows it
    with pytest.raises(DataError, match="member 0: routed_experts is -1 at every token of the forward pass"):
        check_trajectory(replace(good, routed_experts=routes), limits)
    routes[2, 1] = 0, 1
    check_trajectory(replace(good, routed_experts=routes), limits)
    nothing = replace(good, mask=np.zeros(5, np.bool_), routed_experts=np.full_like(routes, -1))
    check_trajectory(nothing, limits)
