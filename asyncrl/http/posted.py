"""The groups of one request: a function of its bytes, which a thread can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import DataError
from asyncrl.records.check import Limits

from .access import Refused
from .body import Body, read_json
from .scored_data import ReadGroup, read_group

MOST_GROUPS = 1024  # of one request
MOST_MEMBERS = 4096  # of one group
_SHOWN_TOKENS = 1 << 14  # of the example that people look at
_SHOWN = ("tokens", "masks", "scores", "inference_logprobs", "messages")


@dataclass(frozen=True, slots=True)
class Posted:
    """One group of a request, or why it cannot be trained."""

    group: ReadGroup | None
    refusal: str
    environment: int | None
    shown: dict[str, Any]  # its first members


def read_groups(body: Body, limits: Limits, version: int) -> list[Posted]:
    """In their order. `version`: the policy version now. Errors: Refused: no JSON, or too much of it."""
    payload = read_json(body, limits.longest)
    items: list[Any] = payload if isinstance(payload, list) else [payload]
    if len(items) > MOST_GROUPS:
        raise Refused(413, f"the request has {len(items):,} groups; send at most {MOST_GROUPS:,} at a time")
    found = []
    for index, item in enumerate(items):
        items[index] = None  # the numbers as Python objects take several times their bytes: one group at a time
        try:
            found.append(_read(item, limits, version))
        except DataError as error:
            found.append(Posted(None, str(error), None, {}))
    return found


def _read(item: Any, limits: Limits, version: int) -> Posted:
    tokens = item.get("tokens") if isinstance(item, Mapping) else None
    if isinstance(tokens, list) and len(tokens) > MOST_MEMBERS:
        raise DataError(f"the group has {len(tokens):,} members; at most {MOST_MEMBERS:,} are compared with each other")
    group = read_group(item, limits, version)
    environment = item.get("env_id")
    return Posted(group, "", environment if isinstance(environment, int) else None, _shown(item, group))


def _shown(item: Mapping[str, Any], group: ReadGroup) -> dict[str, Any]:
    members = size = 0
    while members < len(group.scored) and (not members or size < _SHOWN_TOKENS):
        size += len(group.scored[members].tokens)
        members += 1
    columns = {name: item.get(name) for name in _SHOWN}
    shown = {name: column[:members] if isinstance(column, list) else [] for name, column in columns.items()}
    return shown | {"env_id": item.get("env_id")}
