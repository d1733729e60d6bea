"""Makes trajectories from a record, and encodes texts and rewards for a record. A record has no section for `extras`.

Texts become JSON. Temperatures and log-probs become float32. None as a reward (not scored) becomes NaN, so NaN is refused.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RecordError, shown
from ..types import FinishReason, Trajectory
from .layout import Section
from .read import Record
from .write import Draft, conform

_REASONS = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.ABORT}
REASON_NUMBERS = {reason: number for number, reason in _REASONS.items()}
# Fields with a value per token.
_COLUMNS = {
    "mask": Section.MASK,
    "logprobs": Section.LOGPROBS,
    "sampled_logprobs": Section.SAMPLED_LOGPROBS,
    "versions": Section.VERSIONS,
    "routed_experts": Section.ROUTED_EXPERTS,
}
# Fields whose length is not the number of tokens -> section, dtype, inner dimensions.
_OWN_LENGTH: dict[str, tuple[Section, np.dtype[Any], tuple[int, ...]]] = {
    "branches": (Section.BRANCHES, np.dtype("<i4"), (2,)),
    "turns": (Section.TURNS, np.dtype("<i4"), ()),
    "turn_rewards": (Section.TURN_REWARDS, np.dtype("<f8"), ()),
}
_BOOL = np.dtype(np.bool_)
# Unsigned dtype of the routes of old writers -> signed dtype for the same numbers.
_SIGNED: dict[Any, Any] = {np.dtype(np.uint8): np.dtype(np.int16), np.dtype(np.uint16): np.dtype(np.int32)}


def trajectories_of(record: Record, *, group: int | None = None) -> list[Trajectory]:
    """The members of a record as trajectories, in the order of the record. `group`: replaces the record's group id.

    Arrays are views under the record's lease, so the cost does not depend on their length. (Branches, turns, unsigned routes and
    an integer mask are copied.) Defaults for missing columns: the mask is true after the prompt. At tokens with a true mask,
    log-probs are NaN (unknown, so the ratio is 1) and versions are the record's policy version. The temperature is 1.
    """
    arrays, strings = record.arrays, record.strings
    tokens, masks, logprobs, sampled, versions = _columns(record)
    n, group = record.size, record.group if group is None else group
    member_slices = [slice(*ends) for ends in itertools.pairwise(record.bounds)]

    def parts(column: Any) -> list[Any]:
        if isinstance(column, list):  # defaults of a missing column
            return column
        return [column[member] for member in member_slices]

    logprob_parts = parts(logprobs)
    columns: dict[str, list[Any]] = {
        "member": record.members.tolist(),
        "prompt_length": arrays[Section.PROMPT_LENGTHS].tolist() if Section.PROMPT_LENGTHS in arrays else [0] * n,
        "tokens": parts(tokens),
        "mask": parts(masks),
        "logprobs": logprob_parts,
        "sampled_logprobs": logprob_parts if sampled is logprobs else parts(sampled),
        "versions": parts(versions),
        "temperature": arrays[Section.TEMPERATURES].tolist() if Section.TEMPERATURES in arrays else [1.0] * n,
        "finish_reason": _reasons(arrays[Section.FINISH_REASONS])
        if Section.FINISH_REASONS in arrays
        else [FinishReason.STOP] * n,
        "completion": _texts(record, Section.MESSAGES, str, list) if Section.MESSAGES in strings else [""] * n,
        "reward": [None if math.isnan(reward) else reward for reward in arrays[Section.REWARDS].tolist()]
        if Section.REWARDS in arrays
        else [None] * n,
        "components": _components(record) if Section.COMPONENTS in arrays else [{} for _ in range(n)],
        "metadata": _texts(record, Section.METADATA, dict) if Section.METADATA in strings else [{} for _ in range(n)],
        "routed_experts": _routes(record) if Section.ROUTED_EXPERTS in arrays else [None] * n,
        **{name: _own_length_column(record, name) for name, (section, *_) in _OWN_LENGTH.items() if section in strings},
    }
    return [
        Trajectory(group_id=group, group_size=record.group_size, **dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def draft_of(group: int, members: Sequence[Trajectory], epoch: int, metadata: Mapping[str, Any]) -> Draft:
    """The draft of a record with these members. `metadata`: of the group. Errors: RecordError for values that JSON cannot hold."""
    sections: dict[int, Any] = {
        Section.TOKENS: [t.tokens for t in members],
        Section.REWARDS: [reward_number(t.reward, "reward") for t in members],
        Section.PROMPT_LENGTHS: [t.prompt_length for t in members],
        Section.TEMPERATURES: [t.temperature for t in members],
        Section.FINISH_REASONS: [REASON_NUMBERS[t.finish_reason] for t in members],
        Section.MESSAGES: [json_bytes(t.completion, "completion") for t in members],
        Section.METADATA: [json_bytes(dict(t.metadata), "metadata") for t in members],
        Section.GROUP_METADATA: json_bytes(dict(metadata), "group metadata"),
        **component_sections([t.components for t in members]),
        **own_length_sections(members),
        **column_sections(group, members),
    }
    return Draft(group, [t.member for t in members], members[0].group_size, sections, epoch)


def column_sections(group: int, members: Sequence[Any]) -> dict[int, Any]:
    """The sections of columns with a value per token, by section id. Errors: RecordError if only some members have a column."""
    sections: dict[int, Any] = {}
    for name, section in _COLUMNS.items():
        column = [getattr(member, name, None) for member in members]
        missing = [position for position, values in enumerate(column) if values is None]
        if missing and len(missing) < len(members):
            raise RecordError(
                f"group {group}: {name} is missing for trajectories {missing}; give it for all or for none"
            )
        if not missing:
            sections[section] = [np.asarray(values) for values in column]
    return sections


def is_whole_group(trajectories: Sequence[Trajectory]) -> bool:
    """Whether these trajectories of one group are all its members, in order."""
    size = len(trajectories)
    return size > 0 and all(t.member == i and t.group_size == size for i, t in enumerate(trajectories))


def group_metadata(record: Record) -> dict[str, Any]:
    """The metadata of the group; empty if the record has none. Errors: RecordError for bytes that are not a JSON object."""
    raw = record.strings.get(Section.GROUP_METADATA)
    return {} if raw is None else _json(bytes(raw), Section.GROUP_METADATA, dict)


def _columns(record: Record) -> tuple[Any, ...]:
    """Tokens, mask, log-probs, sampled log-probs, versions: each an array [T], or n default arrays for a missing column."""
    arrays, bounds = record.arrays, record.bounds
    masks: Any = arrays.get(Section.MASK)
    if masks is None:
        prompts = arrays[Section.PROMPT_LENGTHS].tolist() if Section.PROMPT_LENGTHS in arrays else [0] * record.size
        masks = [np.arange(length) >= prompt for length, prompt in zip(record.lengths.tolist(), prompts, strict=True)]
    elif masks.dtype != _BOOL:
        masks = masks != 0
    versions: Any = arrays.get(Section.VERSIONS)
    logprobs: Any = arrays.get(Section.LOGPROBS)
    if versions is None or logprobs is None:
        parts = masks if isinstance(masks, list) else np.split(masks, bounds[1:-1])
        if versions is None:
            versions = [np.where(mask, record.policy_version, -1).astype(np.int32) for mask in parts]
        if logprobs is None:
            logprobs = [np.where(mask, np.float32(np.nan), np.float32(0)) for mask in parts]
    return arrays[Section.TOKENS], masks, logprobs, arrays.get(Section.SAMPLED_LOGPROBS, logprobs), versions


def _routes(record: Record) -> list[Any]:
    """The routes of each member, as signed integers. Unsigned integers are copied to a wider signed dtype."""
    array = record.arrays[Section.ROUTED_EXPERTS]
    dtype: Any = _SIGNED.get(array.dtype, array.dtype)
    parts = [record.column(Section.ROUTED_EXPERTS, position) for position in range(record.size)]
    return [np.asarray(part, dtype) for part in parts]


def _own_length_column(record: Record, name: str) -> list[Any]:
    section, dtype, inner = _OWN_LENGTH[name]
    values: list[Any] = []
    for raw in [record.row_bytes(section, position) or b"" for position in range(record.size)]:
        if len(raw) % (dtype.itemsize * math.prod(inner)):
            raise RecordError(
                f"section {section.name}: {len(raw)} bytes are not a whole number of rows {list(inner)} {dtype}"
            )
        array = np.frombuffer(raw, dtype).reshape(-1, *inner)
        values.append(None if not raw else tuple(array.tolist()) if name == "turn_rewards" else array)
    return values


def own_length_sections(members: Sequence[Any]) -> dict[int, Any]:
    """The sections for `branches`, `turns` and `turn_rewards`, by section id. No section for a field that no member has."""
    sections: dict[int, Any] = {}
    for name, (section, dtype, inner) in _OWN_LENGTH.items():
        column = [getattr(member, name) for member in members]
        if any(values is not None and len(values) for values in column):
            arrays = [conform([] if values is None else values, dtype, section) for values in column]
            if any(array.size and array.shape[1:] != inner for array in arrays):
                shapes = [array.shape for array in arrays]
                raise RecordError(f"{name} must have the shape {['n', *inner]} in all trajectories; found {shapes}")
            sections[section] = [array.tobytes() for array in arrays]
    return sections


def _reasons(array: Any) -> list[FinishReason]:
    try:
        return list(map(_REASONS.__getitem__, array.tolist()))
    except KeyError as unknown:
        raise RecordError(f"finish reason {unknown} is unknown; expected one of {list(_REASONS)}") from None


def _texts(record: Record, section: int, *types: type) -> list[Any]:
    return [_json(record.row_bytes(section, position) or b"", section, *types) for position in range(record.size)]


def _json(raw: bytes, section: int, *types: type) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"section {Section(section).name} is not valid JSON: {error}") from None
    if not isinstance(value, types):
        names = " or ".join(expected.__name__ for expected in types)
        raise RecordError(f"section {Section(section).name}: expected JSON of type {names}, found {raw[:80]!r}")
    return value


def _components(record: Record) -> list[dict[str, float | None]]:
    values, raw = record.arrays[Section.COMPONENTS], record.strings.get(Section.COMPONENT_NAMES)
    if raw is None or not (names := _json(bytes(raw), Section.COMPONENT_NAMES, dict)):
        return [{} for _ in range(record.size)]
    try:
        rows = [dict(zip(names["names"], row, strict=True)) for row in values.tolist()]
        return [
            {name: None if math.isnan(row[name]) else row[name] for name in member_names}
            for row, member_names in zip(rows, names["held"], strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"section COMPONENT_NAMES does not name the {values.shape[1]} components of {record.size} members: {error!r}"
        ) from None


def component_sections(components: Sequence[Mapping[str, float | None]]) -> dict[int, Any]:
    """The sections for reward components (one mapping per member), by section id; empty if no member has components."""
    names = list(dict.fromkeys(name for member in components for name in member))
    if not names:
        return {}
    rows = [[reward_number(member.get(name), name) for name in names] for member in components]
    names_by_member = [list(member) for member in components]
    return {
        Section.COMPONENTS: np.array(rows, "<f8"),
        Section.COMPONENT_NAMES: json_bytes({"names": names, "held": names_by_member}, "components"),
    }


def reward_number(value: float | None, name: str) -> float:
    """The reward as a record has it: NaN for None. Errors: RecordError for a number that is not finite."""
    if value is None:
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RecordError(f"{name} is {shown(value)}; expected a finite number, or None if the reward does not apply")
    return number


def json_bytes(value: Any, name: str) -> bytes:
    """`value` as compact JSON. Errors: RecordError with `name`, if JSON cannot hold the value."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"the {name} must be JSON values: {error}") from error
