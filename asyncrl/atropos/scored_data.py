"""Converts a `ScoredData` object of Atropos into the members of a group. n: number of members. L: number of tokens of a member.

    tokens              [n][L]  ids
    masks               [n][L]  the id of the token if the token is trained; -100 if it is not trained
    scores              [n]     rewards
    inference_logprobs  [n][L]  log-probs of the sampler, in nats; ignored for tokens that are not trained (Atropos sends 1.0). If
                                the field is missing, the importance ratio is 1
    messages            [n]     the conversation, stored with the member
    overrides           [n]     temperature, policy_version, set_advantage_to_zero
    group_overrides             temperature, policy_version
    generation_params           temperature

Precedence for the temperature: overrides, generation_params, group_overrides, 1. Precedence for the policy version: overrides,
group_overrides, the newest version. `set_advantage_to_zero` is stored in the member's metadata. The first token is never trained.
A group with a field of `UNUSABLE` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.client.scored import Scored
from asyncrl.errors import DataError
from asyncrl.records.check import SILENT, Limits, check_json, check_trains, check_trajectory
from asyncrl.types import FinishReason, Trajectory

NOT_TRAINED = -100
MAX_MEMBERS = 4096  # of one group
COLUMNS = ("tokens", "masks", "scores", "inference_logprobs")  # checked as arrays, not as JSON
UNUSABLE = {
    "advantages": "this run computes advantages from the scores",
    "ref_logprobs": "this run computes log-probs under its own reference",
    "images": "this run trains text",
    "distill_token_ids": "this run does not distil",
    "distill_logprobs": "this run does not distil",
}


def read_group(item: Any, limits: Limits, version: int) -> list[Scored]:
    """The members of one `ScoredData` object. `version`: the newest policy version. Errors: DataError for invalid data."""
    if not isinstance(item, Mapping):
        raise DataError(f"the group is {_describe(item)}; expected an object with tokens, masks and scores")
    for name, reason in UNUSABLE.items():
        if item.get(name) is not None:
            raise DataError(f"{name} cannot be used: {reason}; send the group without {name}")
    check_json({name: value for name, value in item.items() if name not in COLUMNS}, "the group", 1)
    n = len(_rows(item, "tokens", None))
    if n > MAX_MEMBERS:
        raise DataError(f"the group has {n:,} members; send at most {MAX_MEMBERS:,} in a group")
    masks, scores = _rows(item, "masks", n), _rows(item, "scores", n)
    logprobs, messages, overrides = (
        [None] * n if item.get(name) is None else _rows(item, name, n)
        for name in ("inference_logprobs", "messages", "overrides")
    )
    members = [_member(item["tokens"][i], masks[i], i) for i in range(n)]
    prompts = _prompt_lengths(members)
    scored = []
    metadata = {} if item.get("env_id") is None else {"env_id": item["env_id"]}
    for i, (ids, mask) in enumerate(members):
        temperature, policy_version, is_silent = _settings(item, overrides[i], i, version)
        # NaN stands for a missing log-prob.
        values: Any = math.nan
        if item.get("inference_logprobs") is not None:
            values = _array(logprobs[i], f"inference_logprobs[{i}]", "iuf", mask.size)
        # A value that float32 cannot hold becomes infinite. `_check` refuses infinite log-probs of trained tokens.
        with np.errstate(over="ignore"):
            trained_logprobs = np.where(mask, values, 0.0).astype(np.float32)
        scored.append(
            Scored(
                tokens=ids,
                reward=_number(scores[i], f"scores[{i}]"),
                mask=mask,
                logprobs=trained_logprobs,
                versions=np.where(mask, policy_version, -1).astype(np.int32),
                prompt_length=prompts[i],
                temperature=temperature,
                messages="" if item.get("messages") is None else _conversation(messages[i], i),
                metadata=metadata | ({SILENT: True} if is_silent else {}),
            )
        )
        _check(scored[i], i, n, limits)
    return scored


def _settings(item: Mapping[str, Any], override: Any, i: int, version: int) -> tuple[Any, int, bool]:
    """(temperature, policy version, whether the advantage is set to zero) of member `i`. `override`: `overrides[i]`."""
    member = _object(override, f"overrides[{i}]")
    group = _object(item.get("group_overrides"), "group_overrides")
    generation = _object(item.get("generation_params"), "generation_params")

    def first(name: str, *sources: Mapping[str, Any], default: Any) -> Any:
        return next((source[name] for source in sources if source.get(name) is not None), default)

    policy_version = first("policy_version", member, group, default=version)
    # Not `isinstance`, because a bool is an int.
    if type(policy_version) is not int or not 0 <= policy_version <= version:
        raise DataError(
            f"policy_version of member {i} is {policy_version!r}; expected a version from 0 to {version}, the newest version"
        )
    temperature = first("temperature", member, generation, group, default=1.0)
    if isinstance(temperature, bool):
        raise DataError(f"temperature of member {i} is {temperature}; expected a number")
    return temperature, policy_version, bool(member.get("set_advantage_to_zero"))


def _check(scored: Scored, i: int, n: int, limits: Limits) -> None:
    """Errors: DataError, which the sender gets. `runtime.door` repeats the check, because every process of this user can write into
    the run's ring in shared memory."""
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
    """(token ids [L], mask [L]: True where the token is trained) of member `i`."""
    ids = _array(tokens, f"tokens[{i}]", "iu")
    wrong = np.flatnonzero(ids != ids.astype(np.int32))
    if wrong.size:
        raise DataError(f"tokens[{i}] holds {ids[wrong[0]]}; expected 32-bit integers")
    labels = _array(mask, f"masks[{i}]", "iu", ids.size)
    trained = labels != NOT_TRAINED
    mismatches = np.flatnonzero(trained & (labels != ids))
    if mismatches.size:
        first = int(mismatches[0])
        raise DataError(
            f"masks[{i}][{first}] is {int(labels[first])}, and the token is {int(ids[first])}; send {NOT_TRAINED} for a token that "
            "is not trained, otherwise the id of the token"
        )
    trained[:1] = False  # no token predicts the first token
    return ids.astype(np.int32), trained


def _prompt_lengths(members: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]) -> list[int]:
    """The prompt length of each member: the number of tokens before its first trained token. But if all members begin with the
    shortest of these prompts, they all get its length, so that the model computes this prompt only once for the group."""
    lengths = [int(mask.argmax()) if mask.any() else int(mask.size) for _, mask in members]
    shortest = min(lengths)
    prompt = members[0][0][:shortest]
    if all(np.array_equal(ids[:shortest], prompt) for ids, _ in members):
        return [shortest] * len(lengths)
    return lengths


def _array(values: Any, name: str, kinds: str, size: int | None = None) -> npt.NDArray[Any]:
    """The list as an array [L]. `kinds`: the allowed values of numpy's `dtype.kind`. `size`: L; None: any length is allowed."""
    if not isinstance(values, list):
        raise DataError(f"{name} is {_describe(values)}; expected a list of numbers")
    try:
        array = np.array(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{name} is not a list of numbers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        expected = "numbers" if "f" in kinds else "integers"
        raise DataError(f"{name} holds {array.dtype} of shape {array.shape}; expected a list of {expected}")
    if size is not None and array.size != size:
        raise DataError(f"{name} has {array.size} entries for {size} tokens; send one entry per token")
    return array


def _rows(item: Mapping[str, Any], name: str, n: int | None) -> list[Any]:
    rows = item.get(name)
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{name} is {_describe(rows)}; expected a list with one entry per member")
    if n is not None and len(rows) != n:
        raise DataError(f"{name} has {len(rows)} entries for {n} members; send one entry per member")
    return rows


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{name} is {value!r}; expected a finite number")
    return float(value)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {_describe(value)}; expected an object")
    return value


def _conversation(messages: Any, i: int) -> Any:
    if not isinstance(messages, list) or any(
        not isinstance(m, Mapping) or not {"role", "content"} <= set(m) for m in messages
    ):
        raise DataError(f"messages[{i}] is not a list of objects with role and content")
    return messages


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    return "empty" if value == [] else f"a {type(value).__name__}"
