"""A trajectory of a producer (the process of a client), and the draft of a group's record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DataError, RecordError
from ..records.check import check_json, check_temperature
from ..records.layout import Section
from ..records.trajectories import (
    REASON_NUMBERS,
    column_sections,
    component_sections,
    json_bytes,
    own_length_sections,
    reward_number,
)
from ..records.write import Draft
from ..types import FinishReason


@dataclass(slots=True, eq=False)
class Scored:
    """The L tokens of one episode and its reward, if the producer knows it. Arrays [L, ...] are aligned to `tokens`.

    An array may be any value that numpy converts. Each array [L, ...] must be there for all trajectories of a push, or for none.
    """

    tokens: Any  # [L] ids
    reward: float | None = None  # None: the run scores the episode
    # [L] 1 if the loss may train the token, else 0. None: 1 for all tokens after the prompt; `prompt_length` is then required.
    mask: Any = None
    # [L] nats, of the sampler over the whole vocabulary, 0 where mask is 0. None: the importance ratio counts as 1.
    logprobs: Any = None
    # [L] nats, of the distribution after top-p and top-k. None: `logprobs`.
    sampled_logprobs: Any = None
    # [L] policy version of each token, -1 where mask is 0. None: `policy_version` of the push.
    versions: Any = None
    # [L, layers, k] signed integers, -1: not known. A run with algorithm.router_replay needs this column.
    routed_experts: Any = None
    # At least 1. None: the number of tokens before the first token with mask 1; without such a token, all tokens.
    prompt_length: int | None = None
    temperature: float = 1.0  # of sampling, 1e-6 to 1e6
    finish_reason: str = "stop"  # stop, length, abort
    components: Mapping[str, float | None] = field(default_factory=dict)  # parts of the reward; None: does not apply
    messages: Any = ""  # JSON: the completion as text or messages
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON
    # [n, 2] rows (start, after): the segment of tokens from `start` on follows token `after`; -1: no token. None: no branches.
    branches: Any = None
    # [t] the index of the first sampled token of each reply. None: all sampled tokens are one reply.
    turns: Any = None
    # [t] the reward of each reply. `reward` minus the sum of `turn_rewards` is added to the last reply's reward.
    turn_rewards: Any = None


_FIELDS = frozenset(f.name for f in dataclasses.fields(Scored))


@dataclass(frozen=True, slots=True)
class Sender:
    """What a producer says about a group: epoch (see `Client.attach`), version that sampled the tokens, id of the producer."""

    epoch: int
    policy_version: int
    producer: bytes = bytes(16)


def group_draft(
    group: int,
    scored: Sequence[Scored | Mapping[str, Any]],
    sender: Sender,
    *,
    members: Sequence[int] | None = None,
    group_size: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Draft:
    """The draft of the record of one group. Parameters: see `Client.push`. Errors: RecordError."""
    rows = [_as_scored(position, value) for position, value in enumerate(scored)]
    numbers = list(range(len(rows))) if members is None else [int(member) for member in members]
    if len(numbers) != len(rows):
        raise RecordError(f"group {group}: {len(rows)} trajectories with {len(numbers)} member numbers")
    sections: dict[int, Any] = {
        Section.TOKENS: [np.asarray(row.tokens) for row in rows],
        Section.REWARDS: [reward_number(row.reward, f"trajectory {i}: reward") for i, row in enumerate(rows)],
        Section.PROMPT_LENGTHS: [_prompt_length(position, row) for position, row in enumerate(rows)],
        Section.TEMPERATURES: [row.temperature for row in rows],
        Section.FINISH_REASONS: [_reason_number(position, row) for position, row in enumerate(rows)],
        Section.MESSAGES: [json_bytes(row.messages, "messages") for row in rows],
        Section.METADATA: [json_bytes(dict(row.metadata), "metadata") for row in rows],
        **component_sections([row.components for row in rows]),
        **own_length_sections(rows),
    }
    for position, row in enumerate(rows):
        try:
            check_temperature(row.temperature, f"trajectory {position}")
            check_json([row.messages, row.metadata, row.components], f"trajectory {position}", 1)
        except DataError as error:
            raise RecordError(str(error)) from None
    sections |= column_sections(group, rows)
    if metadata is not None:
        sections[Section.GROUP_METADATA] = json_bytes(dict(metadata), "group metadata")
    size = len(rows) if group_size is None else group_size
    return Draft(group, numbers, size, sections, sender.epoch, sender.policy_version, sender.producer)


def _as_scored(position: int, value: Scored | Mapping[str, Any]) -> Scored:
    if isinstance(value, Scored):
        return value
    unknown = sorted(set(value) - _FIELDS)
    if unknown or "tokens" not in value:
        fault = f"unknown fields {unknown}" if unknown else "tokens are missing"
        raise RecordError(f"trajectory {position}: {fault}; the fields are {', '.join(sorted(_FIELDS))}")
    return Scored(**value)


def _prompt_length(position: int, row: Scored) -> int:
    if row.prompt_length is None and row.mask is None:
        raise RecordError(f"trajectory {position}: mask and prompt_length are both missing; give at least one of them")
    length = row.prompt_length
    if length is None:
        trained = np.flatnonzero(row.mask)
        length = int(trained[0]) if trained.size else len(row.tokens)
    if length < 1:
        raise RecordError(
            f"trajectory {position}: prompt_length is {length}; a prompt needs at least 1 token, because the first trained "
            "token is predicted from the prompt"
        )
    if row.mask is not None and np.any(np.asarray(row.mask)[:length]):
        raise RecordError(
            f"trajectory {position}: mask trains a token of the prompt (prompt_length is {length}); only tokens after the "
            "prompt can be trained"
        )
    return length


def _reason_number(position: int, row: Scored) -> int:
    if row.finish_reason not in REASON_NUMBERS:
        raise RecordError(
            f"trajectory {position}: finish_reason is {row.finish_reason!r}; expected one of {', '.join(REASON_NUMBERS)}"
        )
    return REASON_NUMBERS[FinishReason(row.finish_reason)]
