"""Packs groups into microbatches of token trees.

    microbatch: a forest of nodes      node: adjacent tokens, which follow the tokens of its ancestors
                                       [prompt][completion 0][completion 1]...     (a group without further common tokens)

Rows are trajectories. Rows of a microbatch share their equal first tokens: a prompt, the first sampled tokens of members that begin
alike, the history of branches. A shared token is forwarded once. Each inner node costs a call of attention, so short beginnings are
not shared:

* A node is not cut for less than `_MIN_CUT` tokens, except at the end of the prompt or of a row.
* Rows of different groups with at most `_MAX_UNSHARED` equal first tokens share these tokens only if, without this sharing, the
  trie would be larger than TRL's.

Even so, fewer tokens are forwarded than by TRL's `TreeRow` (trl/experimental/async_grpo/packing.py). That trie has one token more
for each fork, and has the last token of each row. Here a row ends before its last scored token, because that token is only a
target of the loss. A row without scored tokens has no packed tokens, but counts as a sequence for losses divided by sequences.

With recorded expert routes, rows share a token only if both have equal routes for the token: other experts make other keys and
values. Routes can differ if weights changed between two prefills, or if a member comes from an outside producer. The routes of the
last prompt token are compared only if the prompt has one token. Members forward the last prompt token in batches of different
sizes, and rounding alone may choose another expert. A shared token gets the routes of the first row that has the token.

Groups are packed in the given order, members with the most tokens first. A new microbatch is opened when the token budget is full.
A row is never split, because some losses need all tokens of a sequence at once. A row longer than the budget gets its own
microbatch, which further rows join only if they add no token. Except with `bnpo`, the gradient does not depend on the packing.

Shapes: T packed tokens, S scored tokens, s scored tokens of one trajectory, G members of a group, L tokens of a trajectory.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.credit import turn_of
from asyncrl.errors import DataError
from asyncrl.records.check import MISSING
from asyncrl.types import Group, Microbatch, Trajectory

from .store import OLD, REFERENCE, TURN_ADVANTAGES, Column

GroupColumns: TypeAlias = Mapping[str, Column]


# At a fork a row forwards at most 2 equal tokens again (`_MIN_CUT - 1`). TRL's trie has 2 tokens more for each such row.
_MIN_CUT = 3
_MAX_UNSHARED = 32


class _Segment(NamedTuple):
    """Tokens [start, end) of a trajectory that are forwarded, at the positions from `position` on. These tokens follow the token at
    `position - 1` on the path of segment `parent` (-1: none). `scored[first:last]` are the scored tokens of the segment."""

    start: int
    end: int
    parent: int
    position: int
    first: int
    last: int


class _PackedRow(NamedTuple):
    """One trajectory to be packed. `scored`: indices [s] of the scored tokens in the trajectory."""

    trajectory: Trajectory
    advantage: float
    scored: npt.NDArray[np.int64]
    scored_slice: slice | None  # set if `scored` has no gaps
    segments: list[_Segment]
    forward: int  # tokens to pack, before any are shared
    place: int  # index in the group
    columns: GroupColumns


class _Node:
    """Adjacent packed tokens: `length` tokens of a trajectory from `start` on. `depth`: number of tokens of all its ancestors."""

    __slots__ = ("children", "depth", "length", "number", "packed", "parent", "start", "trajectory")

    def __init__(self, trajectory: Trajectory, start: int, length: int, depth: int, parent: _Node | None) -> None:
        self.trajectory, self.start, self.length, self.depth, self.parent = trajectory, start, length, depth, parent
        self.children: dict[int, list[_Node]] = {}  # by their first token
        self.number = self.packed = -1  # see `number_nodes`

    def add(self, child: _Node) -> None:
        self.children.setdefault(int(child.trajectory.tokens[child.start]), []).append(child)

    def shared(self, trajectory: Trajectory, start: int, end: int) -> int:
        """How many of the tokens [start, end) of a trajectory equal the first tokens of the node, in id and routes."""
        of_node, count = self.trajectory, min(self.length, end - start)
        part, node_part = slice(start, start + count), slice(self.start, self.start + count)
        differ = trajectory.tokens[part] != of_node.tokens[node_part]
        if trajectory.routed_experts is not None and of_node.routed_experts is not None:
            differ_routes = (trajectory.routed_experts[part] != of_node.routed_experts[node_part]).any((1, 2))
            last = trajectory.prompt_length - 1
            if last == of_node.prompt_length - 1 > 0 and start <= last < start + count and start == self.start:
                differ_routes[last - start] = False
            differ |= differ_routes
        first = int(differ.argmax())
        return first if differ[first] else count


# (tokens, node, inside, equal). A row can share its first `tokens` tokens with a path of the trie. The last tokens of this path are
# the first `inside` tokens of `node`. `equal`: what `tokens` would be without `_MIN_CUT`.
_Match: TypeAlias = tuple[int, _Node, int, int]


class _Trie:
    """The rows of one microbatch, as a prefix tree of nodes."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.root = _Node(trajectory, 0, 0, 0, None)  # holds no token
        self._nodes, self.tokens = list[_Node](), 0
        self.rows: list[tuple[_PackedRow, list[_Node]]] = []  # each row, and the last node of each segment
        # TRL's trie of the same rows has at least this many tokens more.
        self._saved_tokens = 0

    def match(self, row: _PackedRow) -> _Match:
        """Which tokens of the row's first segment the trie has already."""
        trajectory, (start, end, *_) = row.trajectory, row.segments[0]
        found = tokens, node, _, equal = _longest(self.root, trajectory, start, end)
        limit = min(self._saved_tokens, _MAX_UNSHARED)
        if tokens and node.trajectory.group_id != trajectory.group_id and equal <= limit:
            return 0, self.root, 0, equal
        return found

    def add(self, row: _PackedRow, match: _Match) -> None:
        """Add a row. `match`: the result of `match` for this row."""
        trajectory, ends = row.trajectory, list[_Node]()
        for start, end, parent, position, first, last in row.segments:
            if first == last and start == end:
                ends.append(self.root)  # a placeholder
                continue
            if ends:
                before = self.root if parent < 0 else self._node_ending_at(ends[parent], position)
                match = _longest(before, trajectory, start, end)
            tokens, node, inside, equal = match
            is_cut = inside < node.length
            if is_cut:
                node = self._cut(node, inside)
            start += tokens
            if start < end:
                above, node = node, _Node(trajectory, start, end - start, position + tokens, node)
                above.add(node)
                self._nodes.append(node)
                self.tokens += end - start
                # TRL's trie has one token more for a row, and one more for a fork within a node.
                self._saved_tokens += tokens - equal + (1 + is_cut if len(row.segments) == 1 else 0)
            ends.append(node)
        self.rows.append((row, ends))

    def _node_ending_at(self, node: _Node, depth: int) -> _Node:
        """The node on the path of `node` whose last token is the path's `depth`-th token. Cuts a node if no node ends there."""
        while node.depth >= depth:
            node = _parent(node)
        return self._cut(node, depth - node.depth) if depth - node.depth < node.length else node

    def _cut(self, node: _Node, at: int) -> _Node:
        """A new node with the first `at` tokens. The other tokens stay in `node`, the child of the new node."""
        parent = _parent(node)
        upper = _Node(node.trajectory, node.start, at, node.depth, parent)
        siblings = parent.children[int(node.trajectory.tokens[node.start])]
        siblings[siblings.index(node)] = upper
        node.start, node.length, node.depth, node.parent = node.start + at, node.length - at, node.depth + at, upper
        upper.add(node)
        self._nodes.append(upper)
        return upper

    def release(self) -> None:
        """Drop the nodes' references to their parents: cycles would keep views of leased memory until a garbage collection."""
        for node in self._nodes:
            node.parent = None

    def number_nodes(self) -> list[_Node]:
        """The nodes in depth-first preorder. Sets `number`, the index in this list, and `packed`, the index of the first token."""
        nodes, cursor, waiting = list[_Node](), 0, [self.root]
        while waiting:
            node = waiting.pop()
            if node is not self.root:
                node.number, node.packed = len(nodes), cursor
                cursor += node.length
                nodes.append(node)
            if node.children:
                waiting += [child for same in node.children.values() for child in same][::-1]
        return nodes


def _parent(node: _Node) -> _Node:
    assert node.parent is not None
    return node.parent


def _longest(node: _Node, trajectory: Trajectory, start: int, end: int) -> _Match:
    """The longest path below `node` that equals the tokens of a trajectory from `start` on, to `end` at most."""
    tokens, best, inside, equal = 0, node, node.length, 0
    if start < end and node.children:
        for child in node.children.get(int(trajectory.tokens[start]), ()):
            shared = child.shared(trajectory, start, end)
            if shared == child.length:
                matched, last, in_last, matched_equal = _longest(child, trajectory, start + shared, end)
                matched += shared
                matched_equal += shared
            else:
                matched, last, in_last, matched_equal = shared, child, shared, shared
            equal = max(equal, matched_equal)
            # A match that ends at the end of the child, of the row or of the prompt may have fewer than `_MIN_CUT` tokens.
            always_shared = child.length, end - start, trajectory.prompt_length - child.depth
            if matched > tokens and (shared >= _MIN_CUT or shared in always_shared):
                tokens, best, inside = matched, last, in_last
    return tokens, best, inside, equal


def pack_groups(
    groups: Sequence[tuple[Group, npt.ArrayLike]],
    tokens_per_microbatch: int,
    columns: Sequence[GroupColumns] | None = None,
) -> list[Microbatch]:
    """Microbatches of these groups. Each trajectory is in exactly one microbatch.

    groups: pairs of a group and its advantages [G], in member order.
    columns: one mapping per group, with columns from `data/store.py`. `REFERENCE` and `OLD`, each G arrays [s], become
    `reference_logprobs` and `old_logprobs` of a microbatch if each of its rows with scored tokens has the column. `TURN_ADVANTAGES`
    replace the member's advantage.

    A microbatch holds at most `tokens_per_microbatch` packed tokens, prompts included, unless a single trajectory is longer.
    Errors: DataError for a number of advantages other than G, a scored prompt token, or columns or routes that do not fit.
    """
    tries: list[_Trie] = []
    try:
        for (group, advantages), group_columns in zip(groups, columns or [{}] * len(groups), strict=True):
            for row in _rows(group, advantages, group_columns):
                match = tries[-1].match(row) if tries else None
                # An upper bound: only the first segment's shared tokens are subtracted.
                added = row.forward - match[0] if match else 0
                if match is None or (added and tries[-1].tokens + added > tokens_per_microbatch):
                    tries.append(_Trie(row.trajectory))
                    match = tries[-1].match(row)
                tries[-1].add(row, match)
        return [_assemble(trie) for trie in tries]
    finally:
        for trie in tries:
            trie.release()


def _rows(group: Group, advantages: npt.ArrayLike, columns: GroupColumns) -> list[_PackedRow]:
    """The trajectories of the group, sorted by `forward`, most tokens first; ties in member order."""
    values = np.asarray(advantages, dtype=np.float64).reshape(-1)
    if values.size != len(group.trajectories):
        raise DataError(
            f"group {group.group_id}: {values.size} advantages for {len(group.trajectories)} trajectories; give one per trajectory"
        )
    rows = []
    for index, (trajectory, advantage) in enumerate(zip(group.trajectories, values.tolist(), strict=True)):
        # Faster than np.flatnonzero.
        scored = trajectory.mask.nonzero()[0]
        if scored.size and scored[0] < max(trajectory.prompt_length, 1):
            raise DataError(
                f"group {group.group_id}, member {trajectory.member}: token {int(scored[0])} has loss mask 1, but the "
                f"prompt has {trajectory.prompt_length} tokens; only tokens after a prompt can be trained: set its mask to 0"
            )
        has_gaps = not scored.size or scored[-1] - scored[0] >= scored.size
        scored_slice = None if has_gaps else slice(int(scored[0]), int(scored[-1]) + 1)
        segments = _segments(trajectory, scored)
        forward = segments[0].end if len(segments) == 1 else sum(end - start for start, end, *_ in segments)
        rows.append(_PackedRow(trajectory, advantage, scored, scored_slice, segments, forward, index, columns))
    return sorted(rows, key=lambda row: -row.forward)


def _segments(trajectory: Trajectory, scored: npt.NDArray[np.int64]) -> list[_Segment]:
    """The segments of a trajectory, without the tokens that no scored token follows."""
    if trajectory.branches is None:
        return [_Segment(0, int(scored[-1]) if scored.size else 0, -1, 0, 0, scored.size)]
    parts = trajectory.segments()
    starts = [start for start, _, _ in parts]
    bounds = np.searchsorted(scored, [*starts, trajectory.tokens.size]).tolist()
    parents = [bisect.bisect_right(starts, after) - 1 for _, _, after in parts]
    # A segment ends after its last token that predicts a scored token, or that is followed by a segment with packed tokens.
    ends = list(starts)
    for index in reversed(range(len(parts))):
        start, after, (first, last) = starts[index], parts[index][2], bounds[index : index + 2]
        if first < last:
            if after < 0 and scored[first] == start:
                raise DataError(
                    f"group {trajectory.group_id}, member {trajectory.member}: token {start} has loss mask 1, but no token "
                    "precedes it on its path; set its mask to 0"
                )
            ends[index] = max(ends[index], int(scored[last - 1]))
        if after >= 0 and (first < last or ends[index] > start):
            ends[parents[index]] = max(ends[parents[index]], after + 1)
    found: list[_Segment] = []
    for index, (start, _, after) in enumerate(parts):
        parent = parents[index]
        position = found[parent].position + after + 1 - starts[parent] if parent >= 0 else 0
        found.append(_Segment(start, ends[index], parent, position, *bounds[index : index + 2]))
    return found


def _assemble(trie: _Trie) -> Microbatch:
    nodes, rows = trie.number_nodes(), [row for row, _ in trie.rows]
    lengths = [row.scored.size for row in rows]
    tokens, positions = np.empty(trie.tokens, np.int64), np.empty(trie.tokens, np.int64)
    routes = _empty_routes(rows, trie.tokens)
    path_positions = np.arange(max((node.depth + node.length for node in nodes), default=0))
    for node in nodes:
        trajectory, packed, start, length = node.trajectory, node.packed, node.start, node.length
        tokens[packed : packed + length] = trajectory.tokens[start : start + length]
        positions[packed : packed + length] = path_positions[node.depth : node.depth + length]
        if routes is not None and trajectory.routed_experts is not None:
            routes[packed : packed + length] = trajectory.routed_experts[start : start + length]
    scored, cursor = sum(lengths), 0
    source, target = np.empty(scored, np.int64), np.empty(scored, np.int64)
    logprobs, versions = np.empty(scored, np.float32), np.empty(scored, np.int32)
    advantages = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)
    for row, ends in trie.rows:
        for segment, end in zip(row.segments, ends, strict=True):
            _set_source(source[cursor + segment.first : cursor + segment.last], row, segment, end)
        part, trajectory = slice(cursor, cursor + row.scored.size), row.trajectory
        if row.scored_slice is not None:
            # A copy of a short slice does not release the GIL. np.take releases the GIL, and then the training thread may keep
            # the GIL for 5 ms. The event loop on this thread would wait.
            target[part] = trajectory.tokens[row.scored_slice]
            logprobs[part] = trajectory.logprobs[row.scored_slice]
            versions[part] = trajectory.versions[row.scored_slice]
        else:
            _take(trajectory.tokens, row.scored, target[part])
            _take(trajectory.logprobs, row.scored, logprobs[part])
            _take(trajectory.versions, row.scored, versions[part])
        if TURN_ADVANTAGES in row.columns:
            advantages[part] = row.columns[TURN_ADVANTAGES][row.place][turn_of(trajectory, row.scored)]
        cursor = part.stop
    node_numbers = [_node_numbers(row, ends) for row, ends in trie.rows]
    return Microbatch(
        tokens=tokens,
        positions=positions,
        node_length=np.array([node.length for node in nodes], np.int64),
        node_parent=np.array([_parent(node).number for node in nodes], np.int64),
        member_sequence=np.repeat(np.arange(len(rows), dtype=np.int64), [len(numbers) for numbers in node_numbers]),
        member_node=np.array([number for numbers in node_numbers for number in numbers], np.int64),
        source=source,
        target=target,
        sequence=np.repeat(np.arange(len(rows), dtype=np.int64), lengths),
        sampler_logprobs=logprobs,
        temperature=np.repeat(np.array([row.trajectory.temperature for row in rows], np.float32), lengths),
        advantages=advantages,
        versions=versions,
        group_ids=np.array([row.trajectory.group_id for row in rows], np.int64),
        members=np.array([row.trajectory.member for row in rows], np.int64),
        old_logprobs=_stored_column(rows, OLD),
        reference_logprobs=_stored_column(rows, REFERENCE),
        routes=routes,
    )


def _set_source(part: npt.NDArray[np.int64], row: _PackedRow, segment: _Segment, end: _Node) -> None:
    """Set `part` to the packed indices of the tokens that predict the scored tokens of a segment, which ends with node `end`."""
    scored, node, remaining = row.scored[segment.first : segment.last], end, segment.last - segment.first
    while remaining:
        # `start`: the index that the node's first token would have in the trajectory if the segment reached back to that token.
        # `first`: the index in `scored` of the first token that a token of this node predicts.
        start = node.depth - segment.position + segment.start
        if row.scored_slice is not None:
            first = max(0, start + 1 - row.scored_slice.start - segment.first)
        else:
            first = int(scored[:remaining].searchsorted(start, "right"))
        if first == remaining - 1:
            part[first] = scored[first] + (node.packed - start - 1)
        elif first < remaining:
            np.add(scored[first:remaining], node.packed - start - 1, out=part[first:remaining])
        node, remaining = node.parent or node, min(first, remaining)


def _node_numbers(row: _PackedRow, ends: Sequence[_Node]) -> list[int]:
    """The numbers of the nodes with tokens of the row, ascending. A number is there twice if two segments have equal tokens."""
    found = []
    for segment, node in zip(row.segments, ends, strict=True):
        while node.parent is not None and node.depth >= segment.position:
            found.append(node.number)
            node = node.parent
    return sorted(found)


def _empty_routes(rows: Sequence[_PackedRow], packed: int) -> npt.NDArray[Any] | None:
    """[T, layers, k] filled with `MISSING`; None if no row has routes. Errors: DataError if rows differ in layers or k."""
    recorded = [row.trajectory.routed_experts for row in rows if row.trajectory.routed_experts is not None]
    if not recorded:
        return None
    shapes = sorted({routes.shape[1:] for routes in recorded})
    if len(shapes) > 1:
        raise DataError(f"routes must have one shape [tokens, layers, k] in all rows; found {shapes} for layers and k")
    return np.full((packed, *shapes[0]), MISSING, np.result_type(*recorded))


def _take(column: npt.NDArray[Any], scored: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    if column.dtype == out.dtype:
        # The default mode, "raise", would copy through a buffer.
        np.take(column, scored, out=out, mode="clip")
    else:
        out[:] = column[scored]


def _stored_column(rows: Sequence[_PackedRow], name: str) -> npt.NDArray[np.float32] | None:
    """[S]: a column of the store. None if a row with scored tokens lacks the column."""
    scored = [row for row in rows if row.scored.size]
    if not scored or any(name not in row.columns for row in scored):
        return None
    for row in scored:
        values = row.columns[name][row.place]
        if len(values) != row.scored.size:
            raise DataError(
                f"group {row.trajectory.group_id}, member {row.trajectory.member}: {len(values)} values of {name} "
                f"for {row.scored.size} scored tokens; write one value per scored token"
            )
    return np.concatenate([row.columns[name][row.place] for row in scored]).astype(np.float32, copy=False)
