"""Atropos' `ScoredData` to the records of a run: one function, no network.

    tokens              [n][L]  ids
    masks               [n][L]  -100: not trained; else the token's id again
    scores              [n]     rewards
    inference_logprobs  [n][L]  nats, of the sampler; 1.0 where not trained. Left out: NaN in the record, that is ratio 1
    messages            [n]     the conversation, carried
    overrides           [n]     temperature, policy_version, set_advantage_to_zero
    group_overrides, generation_params    temperature; policy_version

Temperature: overrides before generation_params before group_overrides before 1. The policy version of the tokens:
overrides before group_overrides before the version at arrival (Atropos' protocol has none). `set_advantage_to_zero` travels in
the member's metadata and means what it means for every source (pumps/building.py). A trained first token is masked: nothing
predicts it. What a run would have to ignore is refused instead: `advantages` (it computes its own from the scores),
`ref_logprobs` (under its own reference), `images`, `distill_*`.

Shape legend: n members of the group, L tokens of a member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.client.scored import Scored
from asyncrl.errors import DataError
from asyncrl.records.check import SILENT, Limits, check_json, check_trains, check_trajectory
from asyncrl.types import FinishReason, Trajectory

NOT_TRAINED = -100
COLUMNS = ("tokens", "masks", "scores", "inference_logprobs")  # whose lists are read as arrays
UNUSABLE = {
    "advantages": "this run computes advantages from the scores",
    "ref_logprobs": "this run computes log-probs under its own reference",
    "images": "this run trains text",
    "distill_token_ids": "this run does not distil",
    "distill_logprobs": "this run does not distil",
}


def read_group(item: Any, limits: Limits, version: int) -> list[Scored]:
    """One `ScoredData` object as the members of one group. `version`: the policy version now.

    Errors: DataError that names the member and says what is wrong with it; a group is taken as a whole or not at all.
    """
    if not isinstance(item, Mapping):
        raise DataError(f"a group is an object with tokens, masks and scores; found {_kind(item)}")
    for name, reason in UNUSABLE.items():
        if item.get(name) is not None:
            raise DataError(f"{name} cannot be used: {reason}; leave it out")
    check_json({name: value for name, value in item.items() if name not in COLUMNS}, "the group", 1)
    tokens = _rows(item, "tokens", None)
    n = len(tokens)
    masks = _rows(item, "masks", n)
    scores = [_number(score, f"scores[{i}]") for i, score in enumerate(_rows(item, "scores", n))]
    logprobs = _optional(item, "inference_logprobs", n)
    messages = _optional(item, "messages", n)
    overrides = _optional(item, "overrides", n) or [None] * n
    settings = [_settings(item, one, i, version) for i, one in enumerate(overrides)]
    members = [_member(tokens[i], masks[i], i) for i in range(n)]
    prompts = _prompt_lengths(members)
    scored = []
    metadata = {} if item.get("env_id") is None else {"env_id": item["env_id"]}
    for i, (ids, mask) in enumerate(members):
        column = (
            np.where(mask, np.float32(math.nan), np.float32(0))
            if logprobs is None
            else np.where(mask, _floats(logprobs[i], mask.size, f"inference_logprobs[{i}]"), np.float32(0))
        )
        scored.append(
            Scored(
                tokens=ids,
                reward=scores[i],
                mask=mask,
                logprobs=column,
                versions=np.where(mask, settings[i].version, -1).astype(np.int32),
                prompt_length=prompts[i],
                temperature=settings[i].temperature,
                messages="" if messages is None else _conversation(messages[i], i),
                metadata=metadata | ({SILENT: True} if settings[i].silent else {}),
            )
        )
        _check(scored[i], i, n, limits)
    return scored


@dataclass(frozen=True, slots=True)
class _Settings:
    temperature: float
    version: int
    silent: bool


def _settings(item: Mapping[str, Any], override: Any, i: int, version: int) -> _Settings:
    own = _object(override, f"overrides[{i}]")
    group = _object(item.get("group_overrides"), "group_overrides")
    generation = _object(item.get("generation_params"), "generation_params")
    temperature = _number(_first("temperature", own, generation, group, default=1.0), f"temperature of member {i}")
    sampled = _first("policy_version", own, group, default=version)
    if type(sampled) is not int or not 0 <= sampled <= version:
        raise DataError(
            f"policy_version of member {i} is {sampled!r}; expected a version from 0 to {version}, the newest"
        )
    return _Settings(temperature, sampled, bool(own.get("set_advantage_to_zero")))


def _check(scored: Scored, i: int, n: int, limits: Limits) -> None:
    """What `runtime.door` checks again when it takes the group from the ring: only here can the sender still be told, and only
    there is it known what came, because any process of this user may write into the ring."""
    trajectory = Trajectory(
        group_id=0,
        member=i,
        group_size=n,
        prompt_length=scored.prompt_length or 0,
        tokens=scored.tokens,
        mask=scored.mask,
        logprobs=scored.logprobs,
        sampled_logprobs=scored.logprobs,
        versions=scored.versions,
        temperature=scored.temperature,
        finish_reason=FinishReason.STOP,
        reward=scored.reward,
        metadata=scored.metadata,
    )
    check_trajectory(trajectory, limits)
    check_trains(trajectory)


def _member(tokens: Any, mask: Any, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """(ids [L], loss mask [L])."""
    ids = _integers(tokens, f"tokens[{i}]")
    labels = _integers(mask, f"masks[{i}]")
    if labels.size != ids.size:
        raise DataError(f"masks[{i}] has {labels.size} entries for {ids.size} tokens; one each")
    trained = labels != NOT_TRAINED
    differs = np.flatnonzero(trained & (labels != ids))
    if differs.size:
        at = int(differs[0])
        raise DataError(
            f"masks[{i}][{at}] is {int(labels[at])}, the token is {int(ids[at])}; a mask is {NOT_TRAINED} where not trained, "
            "else the token's id"
        )
    trained[:1] = False  # nothing predicts it
    return ids.astype(np.int32), trained


def _prompt_lengths(members: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]) -> list[int]:
    """Tokens before the first trained one: the fewest of any member where these are the same for all (run once per group),
    else each member's own (pieces of several prompts)."""
    own = [int(mask.argmax()) if mask.any() else int(mask.size) for _, mask in members]
    fewest = min(own)
    head = members[0][0][:fewest]
    if all(np.array_equal(ids[:fewest], head) for ids, _ in members):
        return [fewest] * len(own)
    return own


def _floats(values: Any, size: int, where: str) -> npt.NDArray[np.float32]:
    array = _array(values, where)
    if array.size != size or array.dtype.kind not in "iuf":
        raise DataError(f"{where} has {array.size} entries of {array.dtype} for {size} tokens; one number each")
    with np.errstate(over="ignore"):  # becomes infinite, which is looked at where it matters
        return array.astype(np.float32)


def _integers(values: Any, where: str) -> npt.NDArray[np.int64]:
    array = _array(values, where)
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"{where} holds {array.dtype}; expected integers")
    most = np.iinfo(np.int32).max
    wide = array[(array > most) | (array < -most)]
    if wide.size:
        raise DataError(f"{where} holds {wide[0]}; ids are 32-bit integers")
    return array.astype(np.int64)


def _array(values: Any, where: str) -> npt.NDArray[Any]:
    if not isinstance(values, list):
        raise DataError(f"{where} is {_kind(values)}; expected a list of numbers")
    try:
        array = np.array(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where} is no list of numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise DataError(f"{where} is no list of numbers: shape {array.shape}, {array.dtype}")
    return array


def _rows(item: Mapping[str, Any], name: str, n: int | None) -> list[Any]:
    rows = item.get(name)
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{name} is {_kind(rows)}; expected a list with one entry for every member")
    if n is not None and len(rows) != n:
        raise DataError(f"{name} has {len(rows)} entries for {n} members; one each")
    return rows


def _optional(item: Mapping[str, Any], name: str, n: int) -> list[Any] | None:
    return None if item.get(name) is None else _rows(item, name, n)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} is {value!r}; expected a finite number")
    return float(value)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {_kind(value)}; expected an object")
    return value


def _conversation(messages: Any, i: int) -> Any:
    if not isinstance(messages, list) or any(
        not isinstance(m, Mapping) or not {"role", "content"} <= set(m) for m in messages
    ):
        raise DataError(f"messages[{i}] is no list of objects with role and content")
    return messages


def _first(name: str, *places: Mapping[str, Any], default: Any) -> Any:
    return next((place[name] for place in places if place.get(name) is not None), default)


def _kind(value: Any) -> str:
    return "missing" if value is None else "empty" if value == [] else f"a {type(value).__name__}"
