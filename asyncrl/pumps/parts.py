"""What ranks tell each other in the course of a step, as bytes: JSON, so that nothing which came from outside is ever executed.

    StepPart                        the metrics of a step
    [(group id, its rewards), ...]  for advantages that compare the whole step
    [group id, ...]                 for minibatches

Floats come back to the last bit, those that JSON does not know (NaN, infinities) included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson

from asyncrl.algorithms.advantages import GroupRewards

from .metrics import GroupRows, Row, StepPart

Part: TypeAlias = StepPart | list[int] | list[tuple[int, GroupRewards]]


def packed(part: Part) -> bytes:
    """As JSON: the same on the other side, to the last bit."""
    plain = _of_step(part) if isinstance(part, StepPart) else [_of_group(each) for each in part]
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def unpacked(data: bytes) -> Part:
    """The inverse of `packed`."""
    plain = orjson.loads(data)
    return _step(plain) if isinstance(plain, dict) else [_group(each) for each in plain]


def _of_step(part: StepPart) -> dict[str, Any]:
    return {
        "groups": [
            (group.group_id, group.oldest_version, [(_out(r.reward), _outs(r.components), *r[2:]) for r in group.rows])
            for group in part.groups
        ],
        "sums": _outs(part.sums),
        "replayed_ages": part.replayed_ages,
        "kl": _out(part.kl),
    }


def _step(plain: dict[str, Any]) -> StepPart:
    groups = (
        GroupRows(group_id, oldest, tuple(Row(_in(reward), _ins(parts), *rest) for reward, parts, *rest in rows))
        for group_id, oldest, rows in plain["groups"]
    )
    return StepPart(tuple(groups), _ins(plain["sums"]), tuple(plain["replayed_ages"]), _in(plain["kl"]))


def _of_group(entry: Any) -> Any:
    if not isinstance(entry, tuple):
        return entry
    group_id, told = entry
    components = {name: list(map(_out, column)) for name, column in told.components.items()}
    return group_id, list(map(_out, told.rewards)), components, _outs(told.weights), list(told.lengths)


def _group(plain: Any) -> Any:
    if isinstance(plain, int):
        return plain
    group_id, rewards, components, weights, lengths = plain
    columns = {name: list(map(_in, column)) for name, column in components.items()}
    return group_id, GroupRewards(list(map(_in, rewards)), columns, _ins(weights), lengths)


def _out(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _in(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _outs(values: Mapping[str, float | None]) -> dict[str, Any]:
    return {name: _out(value) for name, value in values.items()}


def _ins(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _in(value) for name, value in values.items()}
