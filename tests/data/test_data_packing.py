"""Packing: every trajectory once, every scored token once, with the right source, target, position and columns."""

from __future__ import annotations

import sys
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory
from support.trees import random_tree, rows_of

from asyncrl.data import packing
from asyncrl.data.packing import pack_groups
from asyncrl.data.store import OLD, REFERENCE
from asyncrl.errors import DataError
from asyncrl.types import Group, Microbatch, Prompt, Ticket, Trajectory


def make_trajectory(
    group_id: int, member: int, size: int, prompt: list[int], completion: list[int], mask: list[bool]
) -> Trajectory:
    full = [False] * len(prompt) + mask
    # Columns that name the token they belong to: a mix-up cannot go unseen.
    name = 1000.0 * group_id + 100.0 * member + np.arange(len(full))
    return trajectory(
        group_id, member, size, [*prompt, *completion], prompt_length=len(prompt), mask=full, logprob=-name, sampled=0,
        version=np.arange(len(full)) % 3, temperature=1.0 + member / 8,
    )  # fmt: skip


def make_group(
    group_id: int, prompt: list[int], members: list[tuple[list[int], list[bool]]]
) -> tuple[Group, list[float]]:
    trajectories = tuple(
        make_trajectory(group_id, i, len(members), prompt, tokens, mask) for i, (tokens, mask) in enumerate(members)
    )
    advantages = [group_id + i / 16 for i in range(len(members))]
    return Group(Ticket(group_id, 0, 2), Prompt(group_id, np.array(prompt, np.int32), ""), trajectories), advantages


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[Group, list[float]]]:
    token = st.integers(0, 99)
    groups = []
    for group_id in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=8))
        members = []
        for _ in range(draw(st.integers(1, 5))):
            completion = draw(st.lists(token, max_size=12))
            mask = draw(st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)))
            members.append((completion, mask))
        groups.append(make_group(group_id, prompt, members))
    return groups


@st.composite
def groups_of_trees(draw: st.DrawFn) -> list[tuple[Group, list[float]]]:
    rng, groups = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), []
    common = rng.integers(1, 4, draw(st.integers(0, 12))).tolist()
    for group_id in range(draw(st.integers(1, 3))):
        size, prompt = draw(st.integers(1, 4)), [*common, *rng.integers(1, 4, rng.integers(1, 6)).tolist()]
        members = tuple(
            random_tree(rng, group_id, i, size, prompt=prompt, segments=draw(st.integers(0, 5)), vocabulary=3)
            for i in range(size)
        )
        named = tuple(
            replace(t, logprobs=-(1000.0 * group_id + 100 * i + np.arange(t.tokens.size)).astype(np.float32))
            for i, t in enumerate(members)
        )
        group = Group(Ticket(group_id, 0, 2), Prompt(group_id, np.array(prompt, np.int32), ""), named)
        groups.append((group, [group_id + i / 16 for i in range(size)]))
    return groups


def starts_of(batch: Microbatch) -> list[int]:
    """The first packed token of each node."""
    return (np.cumsum(batch.node_length) - batch.node_length).tolist()


def path_to(batch: Microbatch, index: int) -> list[int]:
    """The packed tokens that `index` sees, itself included, by the rules of `Microbatch`."""
    starts = starts_of(batch)
    node = int(np.searchsorted(starts, index, "right")) - 1
    seen = list(range(starts[node], index + 1))
    while (node := int(batch.node_parent[node])) >= 0:
        seen = [*range(starts[node], starts[node] + int(batch.node_length[node])), *seen]
    return seen


def nodes_of(batch: Microbatch, member: int) -> list[int]:
    """The nodes of a member of a microbatch of one group."""
    sequence = batch.members.tolist().index(member)
    return batch.member_node[batch.member_sequence == sequence].tolist()


@settings(max_examples=150, deadline=None)
@given(batches() | groups_of_trees(), st.integers(1, 60))
def test_every_scored_token_once_with_its_context_and_columns(groups: list, budget: int) -> None:
    expected = {
        (t.group_id, t.member, int(i)): t
        for group, _ in groups
        for t in group.trajectories
        for i in np.flatnonzero(t.mask)
    }
    advantages = {(g.group_id, i): a for g, values in groups for i, a in enumerate(values)}
    sequences = []
    for batch in pack_groups(groups, budget):
        sequences += list(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True))
        assert (np.diff(batch.sequence) >= 0).all()
        for s in range(batch.scored):
            key = int(batch.group_ids[batch.sequence[s]]), int(batch.members[batch.sequence[s]])
            index = int(-batch.sampler_logprobs[s]) - 1000 * key[0] - 100 * key[1]
            t = expected.pop((*key, index))
            path, whole = path_to(batch, int(batch.source[s])), t.path(index)[:-1]
            assert batch.tokens[path].tolist() == t.tokens[whole].tolist()
            assert batch.positions[path].tolist() == list(range(len(whole)))
            assert batch.target[s] == t.tokens[index]
            assert batch.versions[s] == t.versions[index]
            assert batch.temperature[s] == np.float32(t.temperature)
            assert batch.advantages[s] == np.float32(advantages[key])
    assert not expected
    assert sorted(sequences) == sorted((t.group_id, t.member) for group, _ in groups for t in group.trajectories)


@settings(max_examples=150, deadline=None)
@given(batches() | groups_of_trees(), st.integers(1, 60))
def test_nodes_are_in_preorder_and_the_budget_is_kept(groups: list, budget: int) -> None:
    rows = {(t.group_id, t.member): t for group, _ in groups for t in group.trajectories}
    for batch in pack_groups(groups, budget):
        assert batch.node_length.sum() == batch.tokens.size and (batch.node_length > 0).all()
        for node, parent in enumerate(batch.node_parent.tolist()):
            ancestors, at = [-1], node - 1
            while node and at >= 0:
                ancestors.append(at)
                at = int(batch.node_parent[at])
            assert parent in ancestors
        pairs = list(zip(batch.member_sequence.tolist(), batch.member_node.tolist(), strict=True))
        assert pairs == sorted(pairs) and set(batch.member_node.tolist()) == set(range(batch.node_length.size))
        for row, key in enumerate(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)):
            # The nodes of a sequence hold the paths to its scored tokens, and nothing else.
            nodes, t = batch.member_node[batch.member_sequence == row], rows[key]
            needed = {token for scored in np.flatnonzero(t.mask).tolist() for token in t.path(scored)[:-1].tolist()}
            assert batch.node_length[nodes].sum() == len(needed)
            assert t.branches is not None or len(set(nodes.tolist())) == nodes.size
        if batch.tokens.size > budget:  # only where one row is longer than the budget
            first = batch.member_node[batch.member_sequence == batch.member_sequence[0]]
            assert set(first.tolist()) == set(batch.member_node.tolist())
        assert batch.tokens.dtype == batch.source.dtype == np.int64


@pytest.fixture(scope="module")
def tree_row() -> type:
    """TRL's trie."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # everything in trl.experimental warns
        from trl.experimental.async_grpo.packing import TreeRow
    return TreeRow


@settings(max_examples=300, deadline=None)
@given(batches() | groups_of_trees())
def test_never_more_tokens_than_the_trie_of_trl_of_the_same_rows(tree_row: type, groups: list) -> None:
    theirs = tree_row()
    for group, _ in groups:
        for row in [row for t in group.trajectories for row in rows_of(t) if row.mask.any()]:
            theirs.add({"input_ids": row.tokens, "completion_mask": row.mask, "group_id": row.group_id})
    (batch,) = pack_groups(groups, 1 << 20)
    assert batch.tokens.size <= len(theirs.tokens)
    assert batch.scored == theirs.trained


def test_prompt_once_per_microbatch_and_again_where_the_group_is_split() -> None:
    group = make_group(0, [1, 2, 3, 4], [([10 * i + 5] * 6, [True] * 6) for i in range(4)])
    (whole,) = pack_groups([group], 100)
    # The last token is only predicted.
    assert whole.node_length.tolist() == [4, 5, 5, 5, 5] and whole.node_parent.tolist() == [-1, 0, 0, 0, 0]
    first, second = pack_groups([group], 14)
    assert first.node_length.tolist() == second.node_length.tolist() == [4, 5, 5]


def test_longest_completion_first_and_members_keep_their_names() -> None:
    group = make_group(0, [1], [([n] * n, [True] * n) for n in (2, 9, 4)])
    (batch,) = pack_groups([group], 100)
    assert batch.members.tolist() == [1, 2, 0] and batch.node_length.tolist() == [1, 8, 3, 1]


def test_a_sampled_token_that_members_share_is_packed_once() -> None:
    completions = [5, 6, 7, 8, 9], [2, 2, 2, 2], [5, 6, 7, 4], [5, 9, 4]
    (batch,) = pack_groups([make_group(0, [1, 2], [(c, [True] * len(c)) for c in completions])], 100)
    # The node of 5, 6, 7 is not cut for the single token 5, which the last member has in common.
    assert batch.tokens.tolist() == [1, 2, 5, 6, 7, 8, 5, 9, 2, 2, 2]
    assert batch.node_length.tolist() == [2, 3, 1, 2, 3] and batch.node_parent.tolist() == [-1, 0, 1, 0, 0]
    assert [nodes_of(batch, member) for member in range(4)] == [[0, 1, 2], [0, 4], [0, 1], [0, 3]]
    assert batch.source.tolist() == [1, 2, 3, 4, 5, 1, 8, 9, 10, 1, 2, 3, 4, 1, 6, 7]


def test_the_start_of_two_prompts_is_shared_if_it_saves_more_than_the_trie_of_trl() -> None:
    def tokens(shared: int) -> int:
        start = list(range(100, 100 + shared))
        pair = [make_group(n, [*start, n], [([10 * n + i] * 4, [True] * 4) for i in range(4)]) for n in (1, 2)]
        return pack_groups(pair, 1000)[0].tokens.size

    # The four rows of the first group spare at least 1, 2, 1 and 1 tokens. No last token of a row is packed.
    saved = [2 * (shared + 1 + 4 * 3) - tokens(shared) for shared in (1, 3, 5, 6, 40)]
    assert saved == [0, 0, 0, 6, 40]


def with_prompt_routes(lengths: list[int], routes: list[int | None]) -> tuple[Group, list[float]]:
    """Members of one prompt of 4 tokens; each prompt token went to expert `routes[member]`, each sampled one to 10 + member."""
    group, advantages = make_group(0, [1, 2, 3, 4], [([50 + n] * n, [True] * n) for n in lengths])
    members = []
    for t, expert in zip(group.trajectories, routes, strict=True):
        column = np.full((t.tokens.size, 1, 1), 10 + t.member, np.int8)
        column[:4] = -1 if expert is None else expert
        members.append(replace(t, routed_experts=column))
    return replace(group, trajectories=tuple(members)), advantages


def routes_before(batch: Microbatch, member: int) -> list[int]:
    """Of the prompt that stands before this member's completion."""
    assert batch.routes is not None
    start = starts_of(batch)[nodes_of(batch, member)[0]]
    return batch.routes[start : start + 4, 0, 0].tolist()


def test_members_share_a_prompt_only_where_it_went_to_the_same_experts() -> None:
    group = with_prompt_routes([9, 8, 7, 6, 5], [None, 1, 2, 1, None])
    (batch,) = pack_groups([group], 100)
    # One prompt for each choice, whatever the order of the members.
    assert batch.node_length[batch.node_parent < 0].tolist() == [4, 4, 4 + 6]
    found = [routes_before(batch, member) for member in range(5)]
    assert found == [[-1] * 4, [1] * 4, [2] * 4, [1] * 4, [-1] * 4]
    assert batch.tokens.size == 3 * 4 + 8 + 7 + 6 + 5 + 4
    pieces = pack_groups([group], 13)
    assert [(b.tokens.size, b.members.tolist()) for b in pieces] == [
        (12, [0]),
        (11, [1]),
        (10, [2]),
        (9, [3]),
        (8, [4]),
    ]
    assert [routes_before(b, m) for m, b in enumerate(pieces)] == found


def test_the_last_token_of_a_prompt_may_have_gone_elsewhere() -> None:
    (first, second), advantages = with_prompt_routes([3, 2], [1, 1])[0].trajectories, [0.0, 1.0]
    assert second.routed_experts is not None
    second.routed_experts[3] = 7
    group = Group(Ticket(0, 0, 2), Prompt(0, np.array([1, 2, 3, 4], np.int32), ""), (first, second))
    (batch,) = pack_groups([(group, advantages)], 100)
    assert batch.node_length.tolist() == [4, 2, 1] and routes_before(batch, 1) == [1] * 4
    cut = [
        replace(t, tokens=t.tokens[3:], mask=t.mask[3:], prompt_length=1, logprobs=t.logprobs[3:])
        for t in (first, second)
    ]
    members = [replace(t, routed_experts=o.routed_experts[3:]) for t, o in zip(cut, (first, second), strict=True)]  # type: ignore[index]  # theirs are there
    (batch,) = pack_groups([(replace(group, trajectories=tuple(members)), advantages)], 100)
    assert batch.node_length.tolist() == [3, 2]  # no token is shared, not even the only one of the prompt


def test_errors_name_the_group() -> None:
    assert pack_groups([], 10) == []
    group, _ = make_group(7, [1], [([5], [True])] * 2)
    with pytest.raises(DataError, match="group 7: 1 advantages for 2"):
        pack_groups([(group, [0.0])], 10)
    bad = make_trajectory(3, 0, 1, [1, 2], [5], [True])
    bad.mask[1] = True
    with pytest.raises(DataError, match="group 3, member 0: token 1"):
        pack_groups([(Group(Ticket(3, 0, 2), group.prompt, (bad,)), [0.0])], 10)


# -- columns that were written -----------------------------------------------------------------------------------------


def written(group: Group) -> dict[str, list[np.ndarray]]:
    """Values that name the token they belong to, as the log-probs of `make_trajectory` do."""
    names = [t.logprobs[t.mask] for t in group.trajectories]
    return {OLD: [name - np.float32(0.25) for name in names], REFERENCE: [name + np.float32(0.5) for name in names]}


def without(group: Group, masked: set[int]) -> Group:
    """As groups are trained whose truncated members are masked as a whole, after their columns were written."""
    members = tuple(replace(t, mask=np.zeros_like(t.mask)) if t.member in masked else t for t in group.trajectories)
    return replace(group, trajectories=members)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 60), st.data())
def test_written_columns_land_at_their_tokens(groups: list, budget: int, data: st.DataObject) -> None:
    chosen = st.sets(st.integers(0, 4))
    trained = [(without(group, data.draw(chosen)), advantages) for group, advantages in groups]
    columns = [written(group) for group, _ in groups]
    plain = pack_groups(trained, budget)
    packed = pack_groups(trained, budget, columns)
    assert len(plain) == len(packed)
    found = 0
    for batch, other in zip(packed, plain, strict=True):
        assert (batch.tokens == other.tokens).all() and (batch.target == other.target).all()
        assert other.old_logprobs is None and other.reference_logprobs is None
        if not batch.scored:
            assert batch.old_logprobs is None and batch.reference_logprobs is None
            continue
        assert batch.old_logprobs is not None and batch.reference_logprobs is not None
        assert batch.old_logprobs.dtype == batch.reference_logprobs.dtype == np.float32
        assert (batch.old_logprobs == batch.sampler_logprobs - np.float32(0.25)).all()
        assert (batch.reference_logprobs == batch.sampler_logprobs + np.float32(0.5)).all()
        found += batch.scored
    assert found == sum(int(t.mask.sum()) for group, _ in trained for t in group.trajectories)


def test_a_column_is_there_where_every_scored_row_of_the_microbatch_has_it() -> None:
    groups = [make_group(n, [1, 2], [([5 + 2 * n + i] * 4, [True] * 4) for i in range(2)]) for n in range(2)]
    silent = make_group(2, [1, 2], [([5] * 4, [False] * 4)])
    first, second = written(groups[0][0]), {REFERENCE: written(groups[1][0])[REFERENCE]}
    (batch,) = pack_groups([*groups, silent], 100, [first, second, {}])  # what is masked needs no column
    assert batch.old_logprobs is None and batch.reference_logprobs is not None
    assert batch.reference_logprobs.tolist() == (batch.sampler_logprobs + np.float32(0.5)).tolist()
    one, other = pack_groups(groups, 8, [first, second])
    assert one.old_logprobs is not None and other.old_logprobs is None
    with pytest.raises(ValueError, match="shorter"):
        pack_groups(groups, 100, [first])


# -- a token is copied once --------------------------------------------------------------------------------------------

ROWS, LENGTH, PROMPT = 16, 2_048, 32


def allocations(work: Callable[[], Any]) -> tuple[Any, int, int, int]:
    """What `work` returns; the most bytes that lay there at any time while the packing ran and were given up before it was
    done; the bytes that are left; the most at any time. Looked at with each line of the packing that runs."""
    seen = np.zeros((100_000, 2), np.int64)  # bytes now, most since the look before; itself not counted
    looks = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != packing.__file__:
            return None
        nonlocal looks
        seen[looks] = tracemalloc.get_traced_memory()
        looks += 1
        tracemalloc.reset_peak()
        return trace

    outer = sys.gettrace()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        sys.settrace(trace)
        try:
            result = work()
        finally:
            sys.settrace(outer)
        left = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    now, most = seen[:looks].T
    lowest = np.minimum.accumulate(now[::-1])[::-1]  # from each look on
    return result, int((most - lowest).max()), left, int(most.max()) - start


def test_a_token_is_copied_once_on_its_way_into_the_microbatch() -> None:
    """Beside what comes out lie the indices of the scored tokens, and at any time the temporaries of a row; never a column of
    all rows, not even of the narrowest kind and in parts."""
    size = LENGTH - PROMPT
    groups = [
        make_group(n, [n] * PROMPT, [([7 + i] * size, [True] * size) for i in range(ROWS // 2)]) for n in range(2)
    ]
    columns = [written(group) for group, _ in groups]
    pack_groups(groups, 1 << 20, columns)  # what numpy makes at its first use is made
    (batch,), given_up, left, most = allocations(lambda: pack_groups(groups, 1 << 20, columns))
    scored = ROWS * (LENGTH - PROMPT)
    assert batch.scored == scored and batch.tokens.size == scored + 2 * PROMPT - ROWS
    arrays = [getattr(batch, field.name) for field in fields(batch)]
    out = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    half_a_column, indices = 4 * scored // 2, 8 * scored
    assert 8 * LENGTH < given_up < half_a_column
    assert out <= left < out + half_a_column  # the arrays own what they hold, and nothing else stays
    assert out + indices <= most < out + indices + 2 * half_a_column
