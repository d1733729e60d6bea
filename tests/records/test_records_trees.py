"""Trajectories that branch: their form, what is refused of it, and that nothing of it is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory
from support.trees import paths, random_tree

from asyncrl.client.scored import Scored, Sender, group_draft
from asyncrl.data.replay import ReplayBuffer, encode
from asyncrl.data.stash import same_trajectory
from asyncrl.data.store import Store, copy_arrays
from asyncrl.errors import DataError, RecordError
from asyncrl.pumps.travel import decode_group, encode_group
from asyncrl.records.check import Limits, check_trajectory
from asyncrl.records.layout import ENTRY, HEADER, NEEDED, Section
from asyncrl.records.read import read
from asyncrl.records.trajectories import trajectories_of
from asyncrl.records.write import Draft, plan
from asyncrl.telemetry.rollouts import row
from asyncrl.types import Group, Prompt, Ticket

# [0 1 2 | 3 4], then 5 6 follow token 3, and 7 8 are a text of their own. Replies: 3, 6, 8.
MASK = [False, False, False, True, False, False, True, False, True]
BRANCHES = np.array([[5, 3], [7, -1]], np.int32)
TREE = trajectory(
    0, 2, 3, np.arange(9), prompt_length=3, mask=MASK, branches=BRANCHES, turns=np.array([3, 6, 8], np.int32),
    turn_rewards=(0.5, 0.0, 1.0), reward=1.5,
)  # fmt: skip


def test_the_form_by_hand() -> None:
    assert TREE.segments() == [(0, 5, -1), (5, 7, 3), (7, 9, -1)]
    assert TREE.positions().tolist() == [0, 1, 2, 3, 4, 4, 5, 0, 1] and TREE.longest_path == 6
    assert TREE.path(6).tolist() == [0, 1, 2, 3, 5, 6] and TREE.path(-1).tolist() == [7, 8]
    # The last path is a text of its own, so its prompt ends before its first sampled token.
    assert TREE.completion_ids.tolist() == [8]
    first = {"tokens": TREE.tokens[:7], "mask": TREE.mask[:7], "branches": BRANCHES[:1]}
    assert replace(TREE, **first).completion_ids.tolist() == [3, 5, 6]
    assert (TREE.completion_length, TREE.sampled_length) == (6, 3)
    check_trajectory(TREE, Limits(max_path_tokens=6, max_tokens=9))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_positions_and_paths_equal_a_walk_from_token_to_token(seed: int) -> None:
    tree = random_tree(np.random.default_rng(seed))
    walked = paths(tree)
    assert [tree.path(token).tolist() for token in range(tree.tokens.size)] == walked
    assert tree.positions().tolist() == [len(path) - 1 for path in walked]
    assert tree.longest_path == max(map(len, walked))
    check_trajectory(tree, Limits())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"branches": BRANCHES.astype(np.float32)}, r"branches is float32 .* expected integers \[n, 2\]"),
        ({"branches": BRANCHES[0]}, r"branches is int32 of shape \(2,\)"),
        ({"branches": [[5, 3]]}, "branches is list"),
        ({"branches": BRANCHES[::-1]}, r"branches\[1\] is \(start 5, after 3\) for 9 tokens"),
        ({"branches": np.array([[5, 5]])}, r"branches\[0\] is \(start 5, after 5\)"),
        ({"branches": np.array([[5, -2]])}, r"branches\[0\] is \(start 5, after -2\)"),
        ({"branches": np.array([[9, 0]])}, r"branches\[0\] is \(start 9, after 0\)"),
        ({"branches": np.array([[0, -1]])}, r"branches\[0\] is \(start 0, after -1\)"),
        (
            {"branches": np.array([[2, 1]])},
            r"branches\[0\] begins at token 2, within the prompt \(prompt_length is 3\)",
        ),
        ({"branches": np.array([[6, -1]])}, r"mask\[6\] trains the first token of a text, which no token predicts"),
        ({"turns": np.array([3.0])}, "turns is float64"),
        ({"turns": np.array([], np.int32)}, r"turns is \[\]"),
        ({"turns": np.array([6, 3])}, r"turns is \[6, 3\]"),
        ({"turns": np.array([3, 9])}, r"turns is \[3, 9\] for 9 tokens"),
        ({"turns": np.array([3, 7])}, r"turns is \[3, 7\]"),
        ({"turns": np.array([6, 8])}, "from the first token with mask true on"),
        ({"turns": np.array([-6, 3])}, "turns is"),
        ({"turn_rewards": (1.0, 2.0)}, r"turn_rewards is \(1.0, 2.0\); expected a tuple of 3 numbers"),
        ({"turn_rewards": [0.0, 0.0, 0.0]}, "expected a tuple of 3 numbers"),
        ({"turns": None}, "expected a tuple of 1 numbers"),
        ({"turn_rewards": (0.0, float("nan"), 0.0)}, r"turn_rewards\[1\] is nan; expected a finite number"),
        ({"turn_rewards": (0.0, 0.0, "1")}, r"turn_rewards\[2\] is '1'; expected"),
    ],
)
def test_what_is_no_tree_is_refused_by_member_and_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"^member 2: (.*){says}"):
        check_trajectory(replace(TREE, **changes), Limits())


def test_a_limit_is_one_of_a_path_or_of_all_branches() -> None:
    with pytest.raises(DataError, match=r"member 2: a path has 6 tokens; this run takes 1 to 5 .*rollout.max_tokens"):
        check_trajectory(TREE, Limits(max_path_tokens=5))
    with pytest.raises(DataError, match=r"all branches have 9 tokens; this run takes 1 to 8 .*tokens_per_microbatch"):
        check_trajectory(TREE, Limits(max_path_tokens=6, max_tokens=8))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_a_group_of_trees_arrives_is_replayed_and_is_stored_as_it_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = tuple(random_tree(rng, 7, member, 3, reward=float(member)) for member in range(3))
    group = Group(Ticket(7, 1, 3), Prompt(7, members[0].tokens[:3], "?"), members)
    buffer, restored = ReplayBuffer(2, 10), ReplayBuffer(2, 10)
    buffer.add(group, [1.0, -1.0, 0.0])
    restored.load(orjson.loads(orjson.dumps(encode(buffer.snapshot()))))
    stored = Store().put(group)
    for found in (decode_group(encode_group(group, 0), group.ticket, 0), stored, restored.snapshot()[0].group):
        for a, b in zip(members, found.trajectories, strict=True):
            assert same_trajectory(a, b)


def test_every_field_counts_for_equality_and_is_copied() -> None:
    for changes in ({"branches": None}, {"branches": BRANCHES[:1]}, {"turns": None}, {"turn_rewards": (0.5, 0.0, 2.0)}):
        assert not same_trajectory(TREE, replace(TREE, **changes))
    copied = copy_arrays(TREE)
    assert copied["branches"] is not TREE.branches and copied["turns"] is not TREE.turns


def test_a_producer_sends_a_tree_beside_a_line() -> None:
    line = Scored([1, 2, 3], 0.0, [0, 1, 1], versions=[-1, 0, 0])
    tree = Scored(
        [1, 2, 3, 4], 1.0, [0, 1, 0, 1], versions=[-1, 0, -1, 0], branches=[[2, 0]], turns=[1, 3], turn_rewards=[0, 1]
    )
    record = written(group_draft(0, [line, tree], Sender(0, 0)))
    found = trajectories_of(read(memoryview(record)))
    assert found[0].branches is found[0].turns is found[0].turn_rewards is None
    assert found[1].branches is not None and found[1].branches.tolist() == [[2, 0]]
    assert found[1].turns is not None and found[1].turns.tolist() == [1, 3] and found[1].turn_rewards == (0.0, 1.0)
    flags = {
        section: flag
        for section, _, _, flag, *_ in ENTRY.iter_unpack(record[HEADER.size : HEADER.size + 32 * record[12]])
    }
    # A reader that does not know the section would train the branches as one text.
    assert {section for section, flag in flags.items() if flag & NEEDED} == {Section.BRANCHES}


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"branches": [1, 2]}, "branches must have the shape"), ({"turns": [0.5]}, "section TURNS: int32 expected")],
)
def test_a_producer_is_told_what_is_wrong_with_a_tree(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        group_draft(0, [Scored([1, 2, 3], 0.0, [0, 1, 1], **changes)], Sender(0, 0))


def test_bytes_that_are_no_rows_are_refused() -> None:
    sections = {Section.TOKENS: [np.arange(3, dtype=np.int32)], Section.BRANCHES: [bytes(12)]}
    with pytest.raises(RecordError, match=r"section BRANCHES: 12 bytes are not a whole number of rows \[2\] int32"):
        trajectories_of(read(memoryview(written(Draft(0, [0], 1, sections)))))


def test_a_line_of_the_rollouts_says_what_it_counts() -> None:
    group = Group(Ticket(0, 0, 0), Prompt(0, TREE.tokens[:3], "?"), (TREE,))
    line = row(group, TREE, 0, {})
    counts = (
        "prompt_length",
        "completion_length",
        "trained_tokens",
        "longest_path",
        "branches",
        "turns",
        "turn_rewards",
    )
    assert [line[name] for name in counts] == [3, 6, 3, 6, 2, 3, [0.5, 0.0, 1.0]]


def written(draft: Draft) -> bytearray:
    planned = plan(draft)
    record = bytearray(planned.size)
    planned.write(memoryview(record))
    return record
