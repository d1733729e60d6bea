"""Atropos' `ScoredData` as the records of a run: what is taken over, what is refused, and why."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transport_records import written

from asyncrl.algorithms.registry import build_advantage
from asyncrl.atropos.scored_data import read_group
from asyncrl.client.scored import Sender, group_draft
from asyncrl.data.packing import pack_groups
from asyncrl.errors import DataError
from asyncrl.pumps.building import RewardReader
from asyncrl.records.check import SILENT, Limits
from asyncrl.records.read import read
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import plan
from asyncrl.types import Group, Prompt, Ticket, Trajectory

LIMITS = Limits(max_path_tokens=8, vocabulary=100)
M = -100
ALONE = {"scores": [1], "inference_logprobs": None}
DEEP = functools.reduce(lambda inner, _: [inner], range(100), "deep")


def group(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[7, 8, 9, 10], [7, 8, 11]],
        "masks": [[M, M, 9, 10], [M, M, 11]],
        "scores": [1, -0.5],
        "inference_logprobs": [[1.0, 1.0, -0.125, -2.7182817], [1.0, 1.0, -0.3]],
        **changes,
    }


def trajectories(item: dict[str, Any], version: int = 3) -> list[Trajectory]:
    """By the very way that a group goes: client's record, bytes, the door's trajectories."""
    scored = read_group(item, LIMITS, version)
    draft = group_draft(5, scored, Sender(epoch=1, policy_version=version))
    return trajectories_of(read(written(plan(draft))))


def test_a_group_arrives_with_its_tokens_masks_scores_and_logprobs() -> None:
    first, second = trajectories(group())
    assert first.tokens.tolist() == [7, 8, 9, 10]
    assert first.mask.tolist() == [False, False, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.125, float(np.float32(-2.7182817))]  # 1.0 where masked means none
    assert first.versions.tolist() == [-1, -1, 3, 3]
    assert (first.reward, second.reward) == (1.0, -0.5)
    assert (first.prompt_length, second.prompt_length) == (2, 2)
    assert (first.group_size, second.member, first.temperature) == (2, 1, 1.0)


def test_several_turns_keep_their_masked_middle() -> None:
    item = group(masks=[[M, 8, M, 10], [M, M, 11]], inference_logprobs=[[1, -1, 1, -2], [1, 1, -3]])
    first, second = trajectories(item)
    assert first.mask.tolist() == [False, True, False, True]
    assert first.logprobs.tolist() == [0, -1, 0, -2]
    assert (first.prompt_length, second.prompt_length) == (1, 1)  # the same for all: what is masked in every member


def test_pieces_of_several_prompts_have_their_own_lengths() -> None:
    first, second = trajectories(group(tokens=[[7, 8, 9, 10], [1, 2, 11]]))
    assert (first.prompt_length, second.prompt_length) == (2, 2)
    item = group(tokens=[[7, 8, 9, 10], [1, 2, 11]], masks=[[M, M, M, 10], [M, M, 11]])
    assert [t.prompt_length for t in trajectories(item)] == [3, 2]


def test_without_logprobs_the_ratio_is_one() -> None:
    first = trajectories(group(inference_logprobs=None))[0]
    assert first.logprobs[:2].tolist() == [0, 0] and np.isnan(first.logprobs[2:]).all()


def test_a_trained_first_token_is_masked_because_nothing_predicts_it() -> None:
    first = trajectories(group(masks=[[7, 8, 9, 10], [M, M, 11]], inference_logprobs=[[-1] * 4, [1, 1, -1]]))[0]
    assert first.mask.tolist() == [False, True, True, True]
    assert first.versions.tolist() == [-1, 3, 3, 3] and first.logprobs[0] == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1.0, 1.0]),
        ({"group_overrides": {"temperature": 0.5}}, [0.5, 0.5]),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.625}}, [0.625, 0.625]),
        ({"generation_params": {"temperature": 0.75}, "overrides": [{"temperature": 2}, {}]}, [2.0, 0.75]),
        ({"generation_params": {"temperature": None}, "overrides": [None, None]}, [1.0, 1.0]),
    ],
)
def test_the_nearest_temperature_counts(changes: dict[str, Any], expected: list[float]) -> None:
    assert [t.temperature for t in trajectories(group(**changes))] == expected


def test_versions_may_be_given() -> None:
    item = group(group_overrides={"policy_version": 1}, overrides=[{"policy_version": 2}, {}])
    assert [t.oldest_version for t in trajectories(item)] == [2, 1]


def test_an_advantage_that_is_set_to_zero_means_what_it_means_for_every_source() -> None:
    """Its reward, times its own length, counts in the comparison of its group; its tokens keep their mask."""
    first, second = trajectories(group(overrides=[{"set_advantage_to_zero": True}, {}]))
    assert first.mask.tolist() == [False, False, True, True] and first.oldest_version == 3
    assert (first.metadata, second.metadata) == ({SILENT: True}, {})
    members = [replace(t, metadata={SILENT: True} if t.member == 0 else {}) for t in trajectories(group())]
    posted, submitted = (
        Group(Ticket(5, 0, 2), Prompt(5, first.tokens[:2], ""), tuple(each)) for each in ((first, second), members)
    )
    reader = RewardReader(build_advantage("dr_grpo"), {}, scale_by_length=True)
    assert {g: a.tolist() for g, a in reader.advantages([posted]).items()} == {5: [0.0, -0.5 - (2.0 - 0.5) / 2]}
    assert np.array_equal(reader.advantages([posted])[5], reader.advantages([submitted])[5])
    [one], [other] = (pack_groups([(each, [0.0, -1.25])], 64) for each in (posted, submitted))
    assert one.scored == other.scored == 3  # N, by whichever door


def test_messages_and_the_environment_travel() -> None:
    talk = [[{"role": "user", "content": "a", "reward": None}], [{"role": "user", "content": "b"}]]
    assert trajectories(group(messages=talk))[1].completion == talk[1]
    assert trajectories(group(env_id=4))[0].metadata == {"env_id": 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [[]], "masks": [[]], **ALONE}, "member 0: tokens is empty; a trajectory has 1 token or more"),
        ({"tokens": [[7] * 9], "masks": [[7] * 9], **ALONE}, "a path has 9 tokens; this run takes 1 to 8"),
        (
            {"tokens": [[7, 8, 9.5, 10], [7, 8, 11]]},
            "tokens\\[0\\] holds float64 of shape \\(4,\\); expected a list of integers",
        ),
        ({"tokens": [[7, 8, 9, 2**40], [7, 8, 11]]}, "32-bit"),
        ({"tokens": [[7, 8, 9, 2**70], [7, 8, 11]]}, "tokens\\[0\\] holds object"),
        ({"tokens": [[7, [8], 9, 10], [7, 8, 11]]}, "not a list of numbers"),
        ({"tokens": ["7890", [7, 8, 11]]}, "tokens\\[0\\] is a str"),
        (
            {"tokens": [[7, 8, 9, 100]], "masks": [[M, M, 9, 100]], **ALONE},
            "member 0: tokens holds 100; the model's ids are 0 to 99",
        ),
        ({"tokens": [[-1, 8, 9, 10], [7, 8, 11]]}, "holds -1"),
        ({"masks": [[M, M, 9], [M, M, 11]]}, "masks\\[0\\] has 3 entries for 4 tokens"),
        ({"masks": [[M, M, 9, 10]]}, "masks has 1 entries for 2 members"),
        ({"masks": [[0, 0, 1, 1], [M, M, 11]]}, "masks\\[0\\]\\[0\\] is 0, and the token is 7"),
        ({"scores": [1.0]}, "scores has 1 entries for 2 members"),
        ({"scores": [1.0, None]}, "scores\\[1\\] is None"),
        ({"scores": [1.0, math.inf]}, "scores\\[1\\] is inf"),
        ({"scores": [1.0, True]}, "scores\\[1\\] is True"),
        ({"inference_logprobs": [[1, 1, -1], [1, 1, -1]]}, "inference_logprobs\\[0\\] has 3 entries"),
        ({"inference_logprobs": [[1, 1, 1.0, -1], [1, 1, -1]]}, "member 0: logprobs\\[2\\] is 1 at a trained token"),
        (
            {"inference_logprobs": [[1, 1, -1, -1e300], [1, 1, -1]]},
            "member 0: logprobs\\[3\\] is -inf at a trained token",
        ),
        ({"inference_logprobs": [[1, 1, None, -1], [1, 1, -1]]}, "inference_logprobs\\[0\\] holds object"),
        ({"inference_logprobs": [None, [1, 1, -1]]}, "inference_logprobs\\[0\\] is missing"),
        ({"ref_logprobs": [[0] * 4, [0] * 3]}, "ref_logprobs cannot be used: this run computes"),
        ({"advantages": [[1] * 4, [1] * 3]}, "advantages cannot be used"),
        ({"images": ["x", "y"]}, "images cannot be used"),
        ({"distill_token_ids": [[[1]]]}, "does not distil"),
        ({"overrides": [{}]}, "overrides has 1 entries for 2 members"),
        ({"overrides": [3, {}]}, "overrides\\[0\\] is a int"),
        ({"generation_params": {"temperature": 0}}, "member 0: temperature is 0"),
        ({"generation_params": {"temperature": "hot"}}, "member 0: temperature is hot"),
        ({"group_overrides": {"policy_version": 4}}, "policy_version of member 0 is 4"),
        ({"generation_params": {"temperature": 9e-7}}, "member 0: temperature is 9e-07"),
        ({"generation_params": {"temperature": 1e-46}}, "member 0: temperature is 1e-46"),
        ({"generation_params": {"temperature": 1e38}}, "member 0: temperature is 1e\\+38"),
        ({"scores": [1e308, 0]}, "member 0: reward is 1e\\+308"),
        ({"inference_logprobs": [[1, 1, -1, -1e4], [1, 1, -1]]}, "member 0: logprobs\\[3\\] is -10000"),
        ({"generation_params": {"temperature": -1}}, "member 0: temperature is -1"),
        ({"masks": [[M] * 4, [M, M, 11]]}, "member 0: mask trains no token"),
        ({"tokens": [[7, 8, 9, -(2**40)], [7, 8, 11]]}, "32-bit"),
        ({"messages": [[{"role": "user"}], []]}, "messages\\[0\\] is not a list"),
        ({"messages": [[{"role": "user", "content": DEEP}], []]}, "nested more than 64 levels"),
        ({"env_id": DEEP}, "nested more than 64 levels"),
        ({"of another program": DEEP}, "nested more than 64 levels"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_group(group(**changes), LIMITS, 3)


def test_no_object() -> None:
    with pytest.raises(DataError, match="the group is a list"):
        read_group([1], LIMITS, 0)
