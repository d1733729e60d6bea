"""The prompts of a run: an endless, deterministic stream of rows that can be saved and resumed.

    ordinal  = epoch x rows + position           row = order(seed, epoch)[position]; without data.shuffle: position
    group id = ordinal + attempt x REROLLS       attempt: how often the prompt was played before

Guarantees
- A group id always means the same row, on every rank, in every order of calls, and after a resume.
- Rank r of w ranks gets the ordinals r, r + w, r + 2 w, ... Together the ranks get each ordinal exactly once.
- A row that is skipped for its length keeps its ordinal. So skipping changes no other row's ordinal.
- `prompt_for()` tokenizes at most one row. `next()` tokenizes at most one row and the skipped rows before it.

The order of an epoch is a keyed permutation. Each position of the permutation is computed alone, without stored state. So an
epoch of millions of rows starts without a shuffle on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from asyncrl.config.resolve import prompts_of
from asyncrl.config.schema import DataConfig
from asyncrl.errors import DataError
from asyncrl.types import Int32Array, Prompt

from .prompts_files import ListRows, PromptRows, Row, digest
from .prompts_sources import IndexedRows
from .tokenizing import NOTES, PromptEncoder, check_prompt, check_unicode, read_prompt

# If a group id modulo REROLLS is at least this number, a program or a producer submitted the group; see `is_prompt`.
FIRST_OUTSIDE_GROUP = 1 << 40
# Added to a group id for each new attempt. Larger than the id of every first attempt.
REROLLS = 1 << 44
MAX_FAILED = 4096  # failed prompts in the queue; one more removes the oldest
_MASK = (1 << 64) - 1
# Limits of the sample for `PromptSource.longest`: about a second of tokenizing.
_SAMPLE_ROWS, _SAMPLE_TOKENS = 1000, 1_000_000
# `_SAMPLE_ROWS` for rows that user code generates at each access, which may take milliseconds a row.
_SAMPLE_GENERATED_ROWS = 200
# 16 MB of token ids. Rows beyond this limit are tokenized again in each epoch.
_CACHED_TOKENS = 4_000_000


def attempt_of(group_id: int) -> int:
    """How often the prompt of this group was played before: 0, 1, 2, ..."""
    return group_id // REROLLS


def is_prompt(group_id: int) -> bool:
    """Whether the group has a prompt of the stream. False: a program or a producer submitted the group."""
    return group_id % REROLLS < FIRST_OUTSIDE_GROUP


def state_after(state: Mapping[str, Any], group_ids: Iterable[int]) -> dict[str, Any]:
    """`state`, a `PromptSource.state_dict()`, as if `next()` had returned these groups' prompts, but with unchanged counts."""
    used = set(group_ids)
    first_attempts = [group_id for group_id in used if group_id < FIRST_OUTSIDE_GROUP]
    return {
        **state,
        "position": max([state["position"], *(group_id + state["world_size"] for group_id in first_attempts)]),
        "again": [group_id for group_id in state["again"] if group_id not in used],
        "failed": [group_id for group_id in state.get("failed", ()) if group_id not in used],
    }


class EpochOrder:
    """A permutation of `range(rows)` keyed by (seed, epoch): swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012).

    Round i pairs x with `(k_i - x) mod n`. A keyed bit of the larger number of a pair decides whether the pair is swapped.
    Each round is its own inverse, so all rounds together are a permutation for any n. 6 log2(n) rounds mix well.
    numpy's random streams are not used: they may change between versions, and a resumed run must find the same rows.
    """

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        self._rows = rows
        # The constant is arbitrary, but must not change: with another constant a resumed run would find other rows.
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
    """The cursor of one rank over the prompts. Not thread-safe: one task owns the source. No method awaits."""

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
        for_agents: bool = False,
    ) -> None:
        """`for_agents`: a row may lack the prompt column, and then has a prompt without tokens. Errors: `DataError` if there are no
        rows, or if `for_agents` is False and the first row lacks the prompt column."""
        self.config = config or DataConfig()
        self._rows: PromptRows = ListRows(rows) if isinstance(rows, (list, tuple)) else rows  # type: ignore[assignment]  # a PromptRows
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._encoder = PromptEncoder(tokenizer, self.config)
        self._for_agents = for_agents
        self._encoded_rows = 0
        if not len(self._rows):
            raise DataError(f"{self._rows.source} holds no rows; expected one or more")
        self._row(0)
        # The first ordinal after `max_epochs`; None: no end.
        self._end = None if max_epochs is None else prompts_of(max_epochs, len(self._rows))
        # Groups in flight belong to at most two epochs, so four cached orders are enough.
        self._order = lru_cache(maxsize=4)(partial(EpochOrder, len(self._rows), seed))
        self._position = rank  # the next ordinal
        self._requeued: list[int] = []  # group ids to hand out again, ascending
        self._failed: deque[int] = deque(maxlen=MAX_FAILED)  # ids of the next attempts, oldest first
        self._cache: dict[int, tuple[Int32Array, int]] = {}  # row -> (ids, length before cutting)
        self._cached_tokens = 0
        self._counts = {"delivered": 0, "redelivered": 0, "cut": 0, "skipped": 0}
        self.digest = digest(self._rows, self.config.prompt_column)

    def __len__(self) -> int:
        """Number of rows of one epoch, for all ranks together, including skipped rows."""
        return len(self._rows)

    def next(self) -> Prompt | None:
        """The next prompt: first the prompts of `requeue`, then new prompts. None after `max_epochs`.

        Errors: `DataError` for a malformed row, for a row that is too long if `data.overlong` is `refuse`, and if
        `2 * len(self)` rows in succession are skipped.
        """
        while self._requeued:
            prompt = self.prompt_for(self._requeued[0])
            del self._requeued[0]  # after `prompt_for`, whose error must not lose the prompt
            if prompt is not None:
                self._counts["redelivered"] += 1
                return prompt
        skipped = 0
        while self._end is None or self._position < self._end:
            prompt, length = self._prompt_and_length(self._position)
            self._position += self._world_size
            if prompt is not None:
                self._counts["delivered"] += 1
                self._counts["cut"] += length > self.config.max_prompt_tokens
                return prompt
            self._counts["skipped"] += 1
            skipped += 1
            if skipped >= 2 * len(self._rows):
                raise DataError(
                    f"rank {self._rank} took {skipped:,} prompts of {self._rows.source}, and every prompt is longer than "
                    f"data.max_prompt_tokens = {self.config.max_prompt_tokens}; raise the setting, or set data.overlong=cut"
                )
        return None

    def prompt_for(self, group_id: int) -> Prompt | None:
        """The prompt of a group id, or None if its row is skipped for its length. Errors: `DataError`, as `next()`."""
        return self._prompt_and_length(group_id)[0]

    def requeue(self, group_ids: Iterable[int]) -> None:
        """Let `next()` return these prompts again, before new prompts, in ascending order. Repeated ids count once.

        Errors: `DataError` for an id that `next()` has not reached, or an id of another rank.
        """
        again = sorted({*self._requeued, *group_ids})
        for group_id in again:
            ordinal = group_id % REROLLS
            if group_id < 0 or ordinal >= self._position or ordinal % self._world_size != self._rank:
                raise DataError(
                    f"group id {group_id} was never handed out by rank {self._rank} of {self._world_size}; the next new group id "
                    f"is {self._position}"
                )
        self._requeued = again

    def add_failed(self, group_id: int, attempts: int) -> bool:
        """Queue a failed prompt for `reroll`. False if the prompt is queued already or was played again `attempts` times."""
        next_id = group_id + REROLLS
        if attempt_of(next_id) > attempts or next_id in self._failed or next_id in self._requeued:
            return False
        self._failed.append(next_id)
        return True

    @property
    def failed_count(self) -> int:
        """Number of failed prompts in the queue for `reroll`, at most `MAX_FAILED`."""
        return len(self._failed)

    def reroll(self, count: int) -> list[int]:
        """Let `next()` return up to `count` failed prompts again, before new prompts. Returns their new group ids."""
        group_ids = [self._failed.popleft() for _ in range(min(count, len(self._failed)))]
        self.requeue(group_ids)
        return group_ids

    def check_all(self) -> None:
        """Tokenize every row. Errors: `DataError` for a row that `next()` refuses.

        Blocks until every row is tokenized. Call this method on another thread, before the first `next()`.
        """
        for index in range(len(self._rows)):
            self._encode(index)

    def check_first_rows(self, count: int) -> None:
        """Errors: `DataError` if one of the first `count` rows has no well-formed prompt. Tokenizes nothing."""
        for index in range(min(len(self._rows), count)):
            prompt = self._row(index).get(self.config.prompt_column)
            try:
                if prompt is not None or not self._for_agents:
                    check_prompt(read_prompt(prompt, self.config))
            except DataError as error:
                raise DataError(f"{self._label(index)}: {error}") from error

    def notes(self) -> list[str]:
        """Warnings for the user about the prompts that have been tokenized. Call `check_all` or `longest` first."""
        notes = [
            f"{count:,} of {self._encoded_rows:,} prompts of {self._rows.source} {NOTES[name]}"
            for name, count in self._encoder.notes.items()
            if count
        ]
        return [*self._encoder.warnings, *notes]

    def longest(self) -> tuple[int, int]:
        """(tokens of the longest prompt in a sample of rows, after the cut; rows in the sample). A small data set is sampled whole.

        The sample does not depend on the seed. Blocks like `check_all`. Errors: `DataError`, as `next()`."""
        order = EpochOrder(len(self._rows), 0, 0)
        longest, rows, tokens = 0, 0, 0
        generated = isinstance(self._rows, IndexedRows) and not self._rows.is_datasets_object
        for position in range(min(len(self._rows), _SAMPLE_GENERATED_ROWS if generated else _SAMPLE_ROWS)):
            ids, length = self._encode(order[position])
            if length <= self.config.max_prompt_tokens or self.config.overlong != "skip":
                longest = max(longest, int(ids.size))
            rows, tokens = rows + 1, tokens + length
            if tokens > _SAMPLE_TOKENS:
                break
        return longest, rows

    def statistics(self) -> dict[str, int]:
        """Counts. `position`: ordinal of the next new prompt. `epoch`: its epoch. `waiting`: prompts to return again."""
        return {
            "rows": len(self._rows),
            "epoch": self._position // len(self._rows),
            "position": self._position,
            "waiting": len(self._requeued),
            **self._counts,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the prompts in flight: after a resume the caller passes their ids to `requeue`."""
        return {
            "position": self._position,
            "again": list(self._requeued),
            "failed": list(self._failed),
            "counts": dict(self._counts),
            "rows": len(self._rows),
            "digest": self.digest,
            "seed": self._seed,
            "shuffle": self.config.shuffle,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`. Errors: `DataError` if rows, seed, shuffling or ranks differ from those of the state."""
        now = self.state_dict()
        for key, label in (
            ("rows", "number of rows"),
            ("digest", "fingerprint of the prompts"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
            ("rank", "rank"),
            ("world_size", "number of ranks"),
        ):
            if state[key] != now[key]:
                raise DataError(
                    f"cannot resume in {self._rows.source}: its {label} was {state[key]} and is {now[key]}, so prompts "
                    "would be repeated or left out; restore the old value, or start a new run"
                )
        self._position = int(state["position"])
        self._requeued = sorted(int(group_id) for group_id in state["again"])
        self._failed = deque((int(group_id) for group_id in state.get("failed", ())), maxlen=MAX_FAILED)
        self._counts = {key: int(state["counts"].get(key, 0)) for key in self._counts}

    def _row_of(self, ordinal: int) -> tuple[int, int]:
        """(row, epoch) of an ordinal."""
        epoch, position = divmod(ordinal, len(self._rows))
        return self._order(epoch)[position] if self.config.shuffle else position, epoch

    def _prompt_and_length(self, group_id: int) -> tuple[Prompt | None, int]:
        """(prompt, length before cutting) of a group id. The prompt is None if its row is skipped."""
        index, epoch = self._row_of(group_id % REROLLS)
        ids, length = self._encode(index)
        if length > self.config.max_prompt_tokens and self.config.overlong == "skip":
            return None, length
        row = self._rows[index]
        column = self.config.prompt_column
        columns = {key: value for key, value in row.items() if key != column}
        prompt = read_prompt(row[column], self.config) if row.get(column) is not None else ""
        return Prompt(group_id=group_id, ids=ids, prompt=prompt, columns=columns, epoch=epoch), length

    def _row(self, index: int) -> Row:
        """A row, checked. The access may be slow, because user code may generate the row. Errors: `DataError`."""
        row, column = self._rows[index], self.config.prompt_column
        if column not in row and not self._for_agents:
            raise DataError(
                f"{self._label(index)} has no column {column!r}; found {', '.join(map(str, row)) or 'none'}; "
                "set data.prompt_column to the column with the prompts, or rollout.environment to an agent, which needs none"
            )
        check_unicode(row, self._label(index))
        return row

    def _encode(self, index: int) -> tuple[Int32Array, int]:
        """(token ids, cut if necessary; length before cutting) of a row."""
        if index in self._cache:
            return self._cache[index]
        config, row = self.config, self._row(index)
        try:
            prompt = row.get(config.prompt_column)
            is_missing = prompt is None and self._for_agents
            ids = np.zeros(0, np.int32) if is_missing else self._encoder.encode(prompt, row)
        except DataError as error:
            raise DataError(f"{self._label(index)}: {error}") from error
        self._encoded_rows += 1
        length = int(ids.size)
        if length > config.max_prompt_tokens:
            if config.overlong == "refuse":
                raise DataError(
                    f"{self._label(index)}: the prompt has {length} tokens; data.max_prompt_tokens is "
                    f"{config.max_prompt_tokens}; raise the setting, or set data.overlong to cut or skip"
                )
            ids = ids[-config.max_prompt_tokens :].copy()
        ids.flags.writeable = False  # all epochs share the array
        if self._cached_tokens + ids.size <= _CACHED_TOKENS:
            self._cached_tokens += int(ids.size)
            self._cache[index] = (ids, length)
        return ids, length

    def _label(self, index: int) -> str:
        return f"{self._rows.source} row {index + 1}"


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 bits out."""
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
