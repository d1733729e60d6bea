"""The prompts of a run: an endless, deterministic stream of rows that can be saved and resumed.

    ordinal (= group id) = epoch x rows + position      row = order(seed, epoch)[position]
    a prompt that is played again:   group id = ordinal + attempt x REROLLS, same row, random numbers of its own

Guarantees
- the same group id always means the same row: whoever asks, in which order, before or after a resume;
- rank r of w gets the ordinals r, r + w, r + 2 w, ...; together the ranks get each exactly once;
- a row that is skipped for its length keeps its ordinal: nothing after it moves;
- `next()` and `prompt_for()` touch one row and tokenize at most that one (more only to pass over skipped rows).

The order of an epoch is a keyed permutation that is evaluated point by point, so an epoch of millions of rows starts
without sorting anything on the event loop, and any group id of any epoch finds its row without stored state.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.config.schema import DataConfig
from asyncrl.errors import DataError
from asyncrl.types import Int32Array, Prompt

from .prompts_files import ListRows, PromptRows, Row, digest, open_rows
from .prompts_sources import IndexedRows
from .tokenizing import NOTES, PromptEncoder, check_prompt, check_unicode, read_prompt

# From here on: ids of groups that no prompt of the stream names.
EMBEDDED_GROUPS = 1 << 40
# Far above every ordinal, and above the ids that an embedding program gets.
REROLLS = 1 << 44
MAX_FAILED = 4096  # failed prompts that wait; the oldest gives way
_MASK = (1 << 64) - 1
# Of which the longest prompt is told: about a second of tokenizing.
_SAMPLE_ROWS, _SAMPLE_TOKENS = 1000, 1_000_000
# The same of rows that code makes anew at each access, which may take it milliseconds a row.
_SAMPLE_MADE = 200
# 16 MB of token ids; later rows are tokenized again each epoch.
_CACHED_TOKENS = 4_000_000


def attempt_of(group_id: int) -> int:
    """0 for the first time a prompt is played, then 1, 2, ..."""
    return group_id // REROLLS


def is_prompt(group_id: int) -> bool:
    """A group of the prompt stream; not one that came from outside, or that an embedding program made."""
    return group_id % REROLLS < EMBEDDED_GROUPS


def handed_out(state: Mapping[str, Any], group_ids: Iterable[int]) -> dict[str, Any]:
    """The `state_dict` of a cursor that has handed out these, too, since it was taken."""
    taken = set(group_ids)
    fresh = [group_id for group_id in taken if group_id < EMBEDDED_GROUPS]
    return {
        **state,
        "position": max([state["position"], *(group_id + state["world_size"] for group_id in fresh)]),
        "again": [group_id for group_id in state["again"] if group_id not in taken],
        "failed": [group_id for group_id in state.get("failed", ()) if group_id not in taken],
    }


class EpochOrder:
    """A permutation of `range(rows)` keyed by (seed, epoch): swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012).

    Round i pairs x with `k_i - x mod n` and swaps the pair if a keyed bit of its larger member says so; each round is
    its own inverse, so the whole is a permutation for any n. 6 log2(n) rounds mix well. No numpy random stream is used:
    those may change between versions, and a resumed run must find the same rows.
    """

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        self._rows = rows
        key = _mix(_mix((seed & _MASK) ^ 0x9D5C_0FF1_CE00_0001) ^ epoch)
        self._keys = [_mix(key + number) for number in range(6 * max(rows, 2).bit_length())]

    def __getitem__(self, position: int) -> int:
        rows, x = self._rows, position
        for key in self._keys:
            partner = (key - x) % rows
            if _mix(key ^ max(x, partner)) & 1:
                x = partner
        return x


class PromptSource:
    """The cursor over the prompts of one rank. Owned by one task; no method waits."""

    def __init__(
        self,
        rows: PromptRows | Sequence[Row],
        tokenizer: Any,
        config: DataConfig | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        max_epochs: float | None = None,
    ) -> None:
        """Errors: `DataError` where there are no rows, or the first one lacks the prompt column."""
        if not 0 <= rank < world_size:
            raise DataError(f"rank is {rank} of world_size {world_size}; expected 0 <= rank < world_size")
        self.config = config or DataConfig()
        self._rows: PromptRows = ListRows(rows) if isinstance(rows, (list, tuple)) else rows  # type: ignore[assignment]  # what is no list
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._encoder = PromptEncoder(tokenizer, self.config)
        self._encoded = 0  # rows
        if not len(self._rows):
            raise DataError(f"{self._rows.source} holds no rows")
        self._row(0)
        self._end = None if max_epochs is None else math.ceil(max_epochs * len(self._rows) - 1e-9)
        self._position = rank  # the next ordinal
        self._again: list[int] = []  # group ids to hand out once more, ascending
        self._failed: deque[int] = deque(maxlen=MAX_FAILED)  # group ids of the next attempts, oldest first
        self._orders: dict[int, EpochOrder] = {}
        self._cache: dict[int, tuple[Int32Array, int]] = {}  # row -> (ids, tokens before the cut)
        self._cached_tokens = 0
        self._counts = {"delivered": 0, "redelivered": 0, "cut": 0, "skipped": 0}
        self._digest = digest(self._rows, self.config.prompt_column)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], tokenizer: Any, config: DataConfig | None = None, **rest: Any
    ) -> PromptSource:
        """A source over a file or directory (`open_rows`); `rest` as for the constructor."""
        return cls(open_rows(path), tokenizer, config, **rest)

    def __len__(self) -> int:
        """Rows of one epoch, over all ranks, skipped ones included."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """The epoch of the next fresh prompt, counted from 0."""
        return self._position // len(self._rows)

    @property
    def exhausted(self) -> bool:
        """True where `next()` can only answer None (skipped rows at the very end apart)."""
        return not self._again and self._end is not None and self._position >= self._end

    def next(self) -> Prompt | None:
        """The next prompt, given-back ones first; None after `max_epochs`.

        Errors: `DataError` for an unusable row (with its number), an over-long one under `refuse`, and where every row
        of an epoch is skipped.
        """
        while self._again:
            prompt = self.prompt_for(self._again[0])
            del self._again[0]  # only now: a row that cannot be read stays ours
            if prompt is not None:
                self._counts["redelivered"] += 1
                return prompt
        passed = 0
        while self._end is None or self._position < self._end:
            fresh, length = self._make(self._position)
            self._position += self._world_size
            if fresh is not None:
                self._counts["delivered"] += 1
                self._counts["cut"] += length > self.config.max_prompt_tokens
                return fresh
            self._counts["skipped"] += 1
            passed += 1
            if passed >= len(self._rows):
                raise DataError(
                    f"every prompt of {self._rows.source} is longer than data.max_prompt_tokens = "
                    f"{self.config.max_prompt_tokens} and is skipped; raise it, or use data.overlong=cut"
                )
        return None

    def prompt_for(self, group_id: int) -> Prompt | None:
        """The prompt of any group id, delivered or not; None where its row is skipped for its length. Errors: `DataError`."""
        if group_id < 0:
            raise DataError(f"group id {group_id} is not one of the prompts; expected 0 or more")
        return self._make(group_id)[0]

    def requeue(self, group_ids: Iterable[int]) -> None:
        """Hand these out again before anything new, in the order of the stream. Giving one back twice changes nothing.

        Errors: `DataError` for an id of this rank that was never handed out.
        """
        wanted = sorted({*self._again, *group_ids})
        for group_id in wanted:
            ordinal = group_id % REROLLS
            if group_id < 0 or (ordinal % self._world_size == self._rank and ordinal >= self._position):
                raise DataError(f"group id {group_id} was never handed out; the next new one is {self._position}")
        self._again = wanted

    def failed(self, group_id: int, attempts: int) -> bool:
        """Every completion of this prompt failed: it waits for `reroll`. False: it had `attempts` more, or waits already."""
        again = group_id + REROLLS
        if attempt_of(again) > attempts or again in self._failed or again in self._again:
            return False
        self._failed.append(again)
        return True

    @property
    def failing(self) -> int:
        """Failed prompts that wait for `reroll`, at most `MAX_FAILED`."""
        return len(self._failed)

    def reroll(self, count: int) -> list[int]:
        """Hand out up to `count` of the failed prompts again, before anything new, under the group ids that come back."""
        group_ids = [self._failed.popleft() for _ in range(min(count, len(self._failed)))]
        self.requeue(group_ids)
        return group_ids

    def check_all(self) -> dict[str, int]:
        """Tokenize every row once and refuse now what `next()` would refuse in the middle of a run; `statistics()`.

        Blocks for the whole data set: call it from a worker thread before the first `next()`. Counts nothing.
        """
        overlong = 0
        for index in range(len(self._rows)):
            overlong += self._encode(index)[1] > self.config.max_prompt_tokens
        return {**self.statistics(), "overlong_rows": overlong}

    def check_forms(self, most: int) -> None:
        """Of the first `most` rows, without the tokenizer: that the prompt is there, a text or messages. Errors: `DataError`."""
        for index in range(min(len(self._rows), most)):
            prompt = self._row(index)[self.config.prompt_column]
            try:
                check_prompt(read_prompt(prompt, self.config))
            except DataError as error:
                raise DataError(f"{self._place(index)}: {error}") from error

    def notes(self) -> list[str]:
        """What people should know of the prompts that were tokenized until now: `check_all` or `longest` come before it."""
        found = [
            f"{count:,} of {self._encoded:,} prompts of {self._rows.source} {NOTES[name]}"
            for name, count in self._encoder.notes.items()
            if count
        ]
        return [*self._encoder.warnings, *found]

    def longest(self) -> tuple[int, int]:
        """(tokens of the longest prompt after the cut, rows that were looked at): all of them, or a sample where there are
        many. Depends on the data alone. Counts nothing; blocks as `check_all` does. Errors: `DataError`, as `next()`."""
        order = EpochOrder(len(self._rows), 0, 0)
        most, seen, total = 0, 0, 0
        made = isinstance(self._rows, IndexedRows) and not self._rows.is_stored
        for place in range(min(len(self._rows), _SAMPLE_MADE if made else _SAMPLE_ROWS)):
            ids, length = self._encode(order[place])
            if length <= self.config.max_prompt_tokens or self.config.overlong != "skip":
                most = max(most, int(ids.size))
            seen, total = seen + 1, total + length
            if total > _SAMPLE_TOKENS:
                break
        return most, seen

    def statistics(self) -> dict[str, int]:
        """`rows`, `epoch`, `position` (next ordinal), `delivered`, `redelivered`, `cut`, `skipped`, `waiting` (to be
        handed out again)."""
        return {
            "rows": len(self._rows),
            "epoch": self.epoch,
            "position": self._position,
            "waiting": len(self._again),
            **self._counts,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Prompts that are under way are not in it: the caller gives them to `requeue`."""
        return {
            "position": self._position,
            "again": list(self._again),
            "failed": list(self._failed),
            "counts": dict(self._counts),
            "rows": len(self._rows),
            "digest": self._digest,
            "seed": self._seed,
            "shuffle": self.config.shuffle,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Errors: `DataError` where group ids would name other rows than they did."""
        now = self.state_dict()
        for key, meaning in (
            ("rows", "number of rows"),
            ("digest", "fingerprint of the prompts"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
            ("rank", "rank"),
            ("world_size", "number of ranks"),
        ):
            if state[key] != now[key]:
                raise DataError(
                    f"cannot go on in {self._rows.source}: its {meaning} was {state[key]} and is {now[key]}, so "
                    "group ids would "
                    "name other rows; put back what it was, or start a new run"
                )
        self._position = int(state["position"])
        self._again = sorted(int(group_id) for group_id in state["again"])
        self._failed = deque((int(group_id) for group_id in state.get("failed", ())), maxlen=MAX_FAILED)
        self._counts = {key: int(state["counts"].get(key, 0)) for key in self._counts}

    def _row_of(self, ordinal: int) -> tuple[int, int]:
        """(row, epoch) of an ordinal."""
        epoch, position = divmod(ordinal, len(self._rows))
        if not self.config.shuffle:
            return position, epoch
        if epoch not in self._orders:
            if len(self._orders) >= 4:  # group ids in flight lie in one epoch or two
                del self._orders[min(self._orders)]
            self._orders[epoch] = EpochOrder(len(self._rows), self._seed, epoch)
        return self._orders[epoch][position], epoch

    def _make(self, group_id: int) -> tuple[Prompt | None, int]:
        """(prompt, tokens before the cut) of a group id; no prompt where its row is skipped."""
        index, epoch = self._row_of(group_id % REROLLS)
        ids, length = self._encode(index)
        if length > self.config.max_prompt_tokens and self.config.overlong == "skip":
            return None, length
        row = self._rows[index]
        column = self.config.prompt_column
        columns = {key: value for key, value in row.items() if key != column}
        prompt = read_prompt(row[column], self.config)
        return Prompt(group_id=group_id, ids=ids, prompt=prompt, columns=columns, epoch=epoch), length

    def _row(self, index: int) -> Row:
        """A row, which has a prompt. Ask once: code may make it anew at each access."""
        row, column = self._rows[index], self.config.prompt_column
        if column not in row:
            raise DataError(
                f"{self._place(index)} has no column {column!r}; found {', '.join(map(str, row)) or 'none'}; "
                "set data.prompt_column to the column with the prompts"
            )
        check_unicode(row, self._place(index))
        return row

    def _encode(self, index: int) -> tuple[Int32Array, int]:
        """(token ids after the cut, length before it) of a row."""
        if index in self._cache:
            return self._cache[index]
        config, row = self.config, self._row(index)
        try:
            ids = self._encoder.encode(row[config.prompt_column], row)
        except DataError as error:
            raise DataError(f"{self._place(index)}: {error}") from error
        self._encoded += 1
        length = int(ids.size)
        if length > config.max_prompt_tokens:
            if config.overlong == "refuse":
                raise DataError(
                    f"{self._place(index)}: the prompt has {length} tokens; data.max_prompt_tokens is "
                    f"{config.max_prompt_tokens}; raise it, or set data.overlong to cut or skip"
                )
            ids = ids[-config.max_prompt_tokens :].copy()
        ids.flags.writeable = False  # shared by every epoch
        if self._cached_tokens + ids.size <= _CACHED_TOKENS:
            self._cached_tokens += int(ids.size)
            self._cache[index] = (ids, length)
        return ids, length

    def _place(self, index: int) -> str:
        return f"{self._rows.source} row {index + 1}"


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
