"""What a step needs of a trajectory, field by field: refused with the member, the field and what to do."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.trajectories import trajectory

from asyncrl.errors import DataError
from asyncrl.records.check import MAX_NAME_LENGTH, Limits, check_json, check_trajectory

GOOD = trajectory(0, 2, 3, [4, 5, 6], prompt_length=1, logprob=[0, -1, -2], reward=0.5)
LOOP: list[Any] = []
LOOP += [LOOP, LOOP]  # would be 2^64 lists, if each were looked at


def nested(levels: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(levels), "deep")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(
            ({"temperature": t}, re.escape(f"temperature is {t}; {'greedy ' * (t == 0)}") + r".* from 1e-06 to 1e\+06")
            for t in (0.0, -1.0, 9e-7, 1e-46, 1.1e6, 1e300, math.inf, math.nan, None, "hot")
        ),
        ({"prompt_length": 0}, "prompt_length is 0 of 3"),
        ({"prompt_length": 1.0}, "prompt_length is 1.0 of 3"),
        ({"tokens": np.array([4, 5, 2**31])}, "tokens holds 2147483648"),
        ({"versions": np.array([-1, 0, -2])}, "versions holds -2 at a trained token"),
        ({"versions": np.array([-1, 2**31, 0])}, "versions holds 2147483648 at a trained token"),
        ({"logprobs": np.array([0, -1, -88.0])}, r"logprobs\[2\] is -88 .* from -87 to 0"),
        ({"sampled_logprobs": np.array([0, -1e300, -1])}, r"sampled_logprobs\[1\] is -1e\+300"),
        *(
            ({"reward": r}, "reward is .* scale the rewards")
            for r in (1.1e9, -1e308, math.nan, math.inf, "1", 10**5000)
        ),
        ({"components": {"a": 1e10}}, "a is 1.*scale the rewards"),
        ({"components": {1: 1.0}}, "components holds the name 1; use text"),
        (
            {"components": {"n" * (MAX_NAME_LENGTH + 1): 1.0}},
            f"components holds the name 'n+; .* {MAX_NAME_LENGTH} characters at most",
        ),
        ({"components": [1.0]}, "components is a list"),
        ({"metadata": None}, "metadata is a NoneType"),
        ({"finish_reason": "done"}, "finish_reason is 'done'; expected one of stop, length, abort"),
        ({"metadata": {"a": 2**64}}, "an integer .* more than 64 bits; write it as text"),
        ({"completion": [{"n": -(2**63) - 1}]}, "an integer .* more than 64 bits"),
        ({"metadata": {(1, 2): 3}}, "a key of texts or metadata is a tuple"),
        ({"metadata": {"a": nested(64)}}, "nested more than 64 levels"),
        ({"metadata": {"a": LOOP}}, "nested more than 64 levels"),
        ({"components": {"\ud800": 1.0}}, r"lone surrogate U\+D800"),
    ],
)
def test_what_a_step_cannot_take_is_refused_by_member_and_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"^member 2: (.*){says}"):
        check_trajectory(replace(GOOD, **changes), Limits())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1e-6},
        {"temperature": float(np.float32(1e-6))},  # as a record holds it
        {"temperature": np.float32(0.7)},
        {"temperature": 1e6},
        {"reward": None, "components": {"a": None, "b": 1, "n" * MAX_NAME_LENGTH: 0.0}},
        {"reward": np.float64(-1e9)},
        {"logprobs": np.array([math.nan, -87.0, 0], np.float32)},
        {"logprobs": np.full(3, math.nan, np.float32)},
        {"versions": np.array([-1, -1, 7])},
        {"metadata": {"a": 2**64 - 1, "b": -(2**63), "c": True, 3: None, "d": nested(63)}},
    ],
)
def test_what_it_can_take_passes(changes: dict[str, Any]) -> None:
    check_trajectory(replace(GOOD, **changes), Limits())


def test_what_is_written_nowhere_may_hold_what_no_file_of_ours_can() -> None:
    check_json({"answer": 10**30, (1, 2): 3}, "the columns", written=False)
    with pytest.raises(DataError, match=re.escape("the columns: texts or metadata are nested more than 64")):
        check_json({"answer": nested(100)}, "the columns", written=False)
