"""Scored trajectories to records and back, exactly: what goes in as a `Trajectory` comes out equal.

Texts travel as JSON. Non-finite rewards are refused (NaN means "not scored" in the bytes, as None does here).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RecordError
from ..types import FinishReason, Trajectory
from .layout import Section
from .read import Record
from .write import Draft

_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


def draft_of(
    trajectories: Sequence[Trajectory],
    *,
    epoch: int = 0,
    policy_version: int = -1,
    producer: bytes = bytes(16),
    group_metadata: Mapping[str, Any] | None = None,
    extra: Mapping[int, Any] | None = None,
) -> Draft:
    """The draft of some or all trajectories of one group. `extra` adds sections (advantages, routed experts, ...).

    Errors: RecordError where they are of several groups, or something in them has no place in a record.
    """
    groups = {(t.group_id, t.group_size) for t in trajectories}
    if len(groups) != 1:
        raise RecordError(f"one record holds one group of one size; found (group, size) {sorted(groups)}")
    ((group, size),) = groups
    sections: dict[int, Any] = {
        Section.TOKENS: [t.tokens for t in trajectories],
        Section.MASK: [t.mask for t in trajectories],
        Section.LOGPROBS: [t.logprobs for t in trajectories],
        Section.SAMPLED_LOGPROBS: [t.sampled_logprobs for t in trajectories],
        Section.VERSIONS: [t.versions for t in trajectories],
        Section.REWARDS: [reward_number(t.reward, "reward") for t in trajectories],
        Section.TEMPERATURES: [t.temperature for t in trajectories],
        Section.PROMPT_LENGTHS: [t.prompt_length for t in trajectories],
        Section.FINISH_REASONS: [_REASONS.index(t.finish_reason) + 1 for t in trajectories],
        Section.MESSAGES: [json_bytes(t.completion, "completion") for t in trajectories],
        Section.METADATA: [json_bytes(dict(t.metadata), "metadata") for t in trajectories],
    }
    sections.update(component_sections([t.components for t in trajectories]))
    if group_metadata is not None:
        sections[Section.GROUP_METADATA] = json_bytes(dict(group_metadata), "group metadata")
    sections.update(extra or {})
    return Draft(group, [t.member for t in trajectories], size, sections, epoch, policy_version, producer)


def trajectories_of(record: Record, *, copy: bool = True) -> list[Trajectory]:
    """The members as trajectories, in the record's order. `copy=False`: the columns are views under the
    record's lease (but for a mask of integers, which only a foreign writer makes), so what a call costs does not depend on
    their length.

    Columns that a foreign producer left out: mask all ones behind the prompt, log-probs 0, versions the record's policy
    version where the mask is 1, temperature 1.
    """
    names: dict[str, Any] = {}
    if Section.COMPONENT_NAMES in record.strings:
        names = json.loads(bytes(record.strings[Section.COMPONENT_NAMES]))
    return [_trajectory(record, position, names, copy) for position in range(record.size)]


def group_metadata(record: Record) -> dict[str, Any]:
    raw = record.strings.get(Section.GROUP_METADATA)
    return {} if raw is None else json.loads(bytes(raw))


def _trajectory(record: Record, position: int, names: dict[str, Any], copy: bool) -> Trajectory:
    def column(section: Section, default: Any) -> Any:
        found = record.column(section, position)
        if found is None:
            return default
        return found.copy() if copy else found

    length = int(record.lengths[position])
    prompt_length = int(_row(record, Section.PROMPT_LENGTHS, position, 0))
    raw_mask = record.column(Section.MASK, position)
    if raw_mask is None:
        mask = np.arange(length) >= prompt_length
    elif raw_mask.dtype == np.bool_:
        mask = raw_mask.copy() if copy else raw_mask
    else:
        mask = raw_mask != 0
    versions = column(Section.VERSIONS, None)
    if versions is None:
        versions = np.where(mask, record.policy_version, -1).astype(np.int32)
    logprobs = column(Section.LOGPROBS, np.zeros(length, np.float32))
    reward = float(_row(record, Section.REWARDS, position, math.nan))
    reason = int(_row(record, Section.FINISH_REASONS, position, 1))
    if not 1 <= reason <= len(_REASONS):
        raise RecordError(f"finish reason {reason} is unknown")
    return Trajectory(
        group_id=record.group,
        member=int(record.members[position]),
        group_size=record.group_size,
        prompt_length=prompt_length,
        tokens=column(Section.TOKENS, None),
        mask=mask,
        logprobs=logprobs,
        sampled_logprobs=column(Section.SAMPLED_LOGPROBS, logprobs),
        versions=versions,
        temperature=float(_row(record, Section.TEMPERATURES, position, 1.0)),
        finish_reason=_REASONS[reason - 1],
        completion=_text(record, Section.MESSAGES, position, ""),
        reward=None if math.isnan(reward) else reward,
        components=_components(record, position, names),
        metadata=_text(record, Section.METADATA, position, {}),
    )


def _row(record: Record, section: Section, position: int, default: Any) -> Any:
    array = record.arrays.get(section)
    return default if array is None else array[position]


def _text(record: Record, section: Section, position: int, default: Any) -> Any:
    raw = record.row_bytes(section, position)
    return default if raw is None else json.loads(raw)


def _components(record: Record, position: int, names: dict[str, Any]) -> dict[str, float | None]:
    values = record.arrays.get(Section.COMPONENTS)
    if values is None or not names:
        return {}
    row = dict(zip(names["names"], values[position].tolist(), strict=True))
    return {name: None if math.isnan(row[name]) else row[name] for name in names["held"][position]}


def component_sections(components: Sequence[Mapping[str, float | None]]) -> dict[int, Any]:
    """The sections for the members' reward components; none where nobody has any."""
    names = list(dict.fromkeys(name for one in components for name in one))
    if not names:
        return {}
    rows = [[reward_number(one.get(name), name) for name in names] for one in components]
    held = [list(one) for one in components]
    return {
        Section.COMPONENTS: np.array(rows, "<f8"),
        Section.COMPONENT_NAMES: json_bytes({"names": names, "held": held}, "components"),
    }


def reward_number(value: float | None, name: str) -> float:
    """None becomes NaN. Errors: RecordError where it is not finite."""
    if value is None:
        return math.nan
    if not math.isfinite(value):
        raise RecordError(f"{name} is {value}; rewards are finite numbers, or None where they do not apply")
    return float(value)


def json_bytes(value: Any, name: str) -> bytes:
    """Compact JSON. Errors: RecordError where it is none."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RecordError(f"the {name} of a trajectory must be JSON ({error})") from error
