"""Checks that a trajectory can be trained. The checks are the same for every source of groups:

    own rollouts (pumps/rollout.py)   Runtime.submit   shared memory (runtime/door.py)   HTTP (atropos/scored_data.py)

Without the checks an invalid trajectory could end the run in the middle of a step, or train the model on meaningless numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError, shown
from ..types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, FinishReason, Trajectory

# An unknown expert in routes [tokens, layers, k], which therefore have a signed dtype. The k numbers of a token and layer are
# either k different experts, or all MISSING.
MISSING = -1
# Nats. With this limit a ratio of probabilities is at most exp(-LOWEST_LOGPROB), which is finite in float32.
LOWEST_LOGPROB = -87.0
# Largest absolute value. A reward may scale the gradient, and the squared norm of the gradient must be finite in float32.
MAX_REWARD = 1e9
# Limit of the number of component names in a run, from all outside producers. Each name becomes metrics, which sinks never delete.
MAX_COMPONENTS = 128
MAX_NAME_LENGTH = 128  # characters of the name of a component
# Nats. Not 0, because a sampler's rounding may make a log-prob slightly positive.
HIGHEST_LOGPROB = 1e-4
# Limit of nested levels in texts and metadata. JSON writers fail at a few hundred levels.
MAX_NESTED = 64
# A key of a trajectory's metadata. If its value is true, the member's reward counts for the advantages of its group, and then the
# member's advantage is set to 0. The member needs no tokens with mask 1. If it has some, they are in the loss, with advantage 0.
SILENT = "set_advantage_to_zero"
_DTYPE_KINDS = {"tokens": "iu", "mask": "b", "logprobs": "f", "sampled_logprobs": "f", "versions": "iu"}
_KIND_NAMES = {"iu": "integers", "b": "booleans", "f": "floats"}
_MIN_TEMPERATURE = float(np.float32(LOWEST_TEMPERATURE))  # records hold float32, which rounds the bound down
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run for one trajectory. None means no limit, except for `routes`."""

    max_path_tokens: int | None = None  # limit of the tokens of one path
    max_tokens: int | None = None  # limit of the tokens of all branches together
    vocabulary: int | None = None  # token ids must be below this
    # (layers, experts per token, experts), if the run replays routes. None: the trajectory must have no routes.
    routes: tuple[int, int, int] | None = None


def check_trajectory(trajectory: Trajectory, limits: Limits) -> None:
    """Errors: DataError with the member and the field, if the trajectory cannot be trained in this run."""
    t, label = trajectory, f"member {trajectory.member}"
    for name, kind in _DTYPE_KINDS.items():
        _check_column(getattr(t, name), kind, t.tokens, f"{label}: {name}")
    _check_tokens(t, limits, label)
    _check_branches(t, label)
    _check_lengths(t, limits, label)
    _check_mask(t, label)
    _check_turns(t, label)
    check_temperature(t.temperature, label)
    for name in ("logprobs", "sampled_logprobs"):
        _check_logprobs(getattr(t, name), t.mask, f"{label}: {name}")
    _check_versions(t, label)
    _check_member_routes(t, limits.routes, label)
    _check_rewards(t, label)
    if not isinstance(t.finish_reason, FinishReason):
        raise DataError(f"{label}: finish_reason is {t.finish_reason!r}; expected one of {', '.join(FinishReason)}")
    if not isinstance(t.metadata, Mapping):
        raise DataError(f"{label}: metadata is a {type(t.metadata).__name__}; expected a mapping of names to values")
    check_json({"completion": t.completion, "metadata": t.metadata, "components": t.components}, label, 1)


def check_temperature(temperature: float, label: str) -> None:
    """Errors: DataError for a temperature that is no number, or is outside the allowed range."""
    if not _is_number(temperature) or not _MIN_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:  # also for NaN
        greedy = "; greedy samples cannot be trained" if temperature == 0 else ""
        raise DataError(
            f"{label}: temperature is {temperature}{greedy}; give the temperature of sampling, a number "
            f"from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        )


def check_trains(trajectory: Trajectory) -> None:
    """For groups of outside producers. Errors: DataError for a member without trained tokens and without `SILENT`."""
    if not trajectory.mask.any() and not trajectory.metadata.get(SILENT):
        raise DataError(
            f"member {trajectory.member}: mask trains no token; mark the tokens that the policy sampled as trained, or set "
            f"{SILENT} in the metadata if only the reward of this member is needed"
        )


def check_json(value: Any, where: str, extra: int = 0, *, written: bool = True) -> None:
    """Errors: DataError for text with a lone surrogate, or for more than `MAX_NESTED` + `extra` levels. If `written`, also for a
    key that is not text, a number or None, and for an integer of more than 64 bits: files cannot contain them."""
    level = [value]
    for _ in range(MAX_NESTED + extra + 1):
        # Items of the next level by id: without ids a list that contains itself twice would double at each level.
        next_level: dict[int, Any] = {}
        for item in level:
            if isinstance(item, str):
                _check_text(item, where)
            elif isinstance(item, Mapping):
                for key in item if written else ():
                    if not isinstance(key, str | int | float | None):
                        name = type(key).__name__
                        raise DataError(f"{where}: a key of texts or metadata is a {name}; use text as the key")
                next_level |= {id(child): child for child in (*item, *item.values())}
            elif isinstance(item, list | tuple):
                next_level |= {id(child): child for child in item}
            elif written and isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise DataError(f"{where}: an integer of texts or metadata has more than 64 bits; write it as text")
        if not next_level:
            return
        level = list(next_level.values())
    raise DataError(f"{where}: texts or metadata are nested more than {MAX_NESTED} levels deep; flatten them")


def _check_text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a text holds the lone surrogate U+{ord(text[error.start]):04X} at {error.start}, which UTF-8 cannot "
            "encode; decode the text with errors='replace'"
        ) from None


def _check_column(column: Any, kind: str, tokens: Any, where: str) -> None:
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in kind:
        found = f"{column.dtype} of shape {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise DataError(f"{where} is {found}; expected a one-dimensional numpy array of {_KIND_NAMES[kind]}")
    if column.size != tokens.size:
        raise DataError(f"{where} has {column.size} entries for {tokens.size} tokens; give one entry per token")


def _check_tokens(t: Trajectory, limits: Limits, label: str) -> None:
    if not t.tokens.size:
        raise DataError(f"{label}: tokens is empty; a trajectory has 1 token or more")
    low, high = int(t.tokens.min()), int(t.tokens.max())
    if low < 0 or high > _MAX_INT32 or (limits.vocabulary is not None and high >= limits.vocabulary):
        ids = f"0 to {_MAX_INT32 if limits.vocabulary is None else limits.vocabulary - 1}"
        bad = low if low < 0 else high
        raise DataError(f"{label}: tokens holds {bad}; the model's ids are {ids}; use the tokenizer of the model")


def _check_lengths(t: Trajectory, limits: Limits, label: str) -> None:
    if limits.max_path_tokens is not None and t.longest_path > limits.max_path_tokens:
        raise DataError(
            f"{label}: a path has {t.longest_path} tokens; this run takes 1 to {limits.max_path_tokens} (rollout.max_context, or "
            "data.max_prompt_tokens + rollout.max_tokens)"
        )
    if limits.max_tokens is not None and t.tokens.size > limits.max_tokens:
        raise DataError(
            f"{label}: all branches have {t.tokens.size} tokens; this run takes 1 to {limits.max_tokens} "
            "(train.tokens_per_microbatch)"
        )


def _check_branches(t: Trajectory, label: str) -> None:
    rows, size = t.branches, t.tokens.size
    if rows is None:
        return
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "iu" or rows.ndim != 2 or rows.shape[1] != 2:
        found = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise DataError(
            f"{label}: branches is {found}; expected integers [n, 2]: start of a segment, token that it follows"
        )
    starts, after = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    bad = (np.diff(starts, prepend=0) <= 0) | (starts >= size) | (after < -1) | (after >= starts)
    if bad.any():
        index = int(bad.argmax())
        raise DataError(
            f"{label}: branches[{index}] is (start {starts[index]}, after {after[index]}) for {size} tokens; expected ascending "
            f"starts from 1 to {size - 1}, each with a token before it (-1: the segment begins a text of its own)"
        )
    orphans = t.mask[starts] & (after < 0)
    if orphans.any():
        start = starts[orphans.argmax()]
        raise DataError(
            f"{label}: mask[{start}] trains the first token of a text, which no token predicts; set its mask to false"
        )


def _check_turns(t: Trajectory, label: str) -> None:
    turns, rewards, size = t.turns, t.turn_rewards, t.tokens.size
    if turns is not None:
        _check_column(turns, "iu", turns, f"{label}: turns")
        indices = turns.astype(np.int64)
        good = indices.size and indices[0] >= 0 and indices[-1] < size and (np.diff(indices) > 0).all()
        if not good or not t.mask[indices].all() or t.mask[: indices[0]].any():
            raise DataError(
                f"{label}: turns is {turns.tolist()} for {size} tokens; expected the first sampled token of each reply, ascending, "
                "from the first token with mask true on"
            )
    if rewards is None:
        return
    count = 1 if turns is None else turns.size
    if not isinstance(rewards, tuple) or len(rewards) != count:
        raise DataError(
            f"{label}: turn_rewards is {rewards!r:.80}; expected a tuple of {count} numbers, one for each reply"
        )
    for index, reward in enumerate(rewards):
        if not (_is_number(reward) and abs(reward) <= MAX_REWARD):  # also for NaN
            raise DataError(
                f"{label}: turn_rewards[{index}] is {shown(reward)}; expected a finite number from -{MAX_REWARD:g} to "
                f"{MAX_REWARD:g}"
            )


def _check_mask(t: Trajectory, label: str) -> None:
    if not isinstance(t.prompt_length, int | np.integer) or not 1 <= t.prompt_length <= t.tokens.size:
        raise DataError(
            f"{label}: prompt_length is {t.prompt_length} of {t.tokens.size} tokens; expected 1 to {t.tokens.size}, because the "
            "last prompt token predicts the first trained token"
        )
    if t.mask[: t.prompt_length].any():
        first = int(t.mask.argmax())
        raise DataError(
            f"{label}: mask[{first}] trains a token of the prompt (prompt_length is {t.prompt_length}); only tokens after the "
            "prompt can be trained: set the mask of the prompt to false"
        )
    if t.branches is not None and t.branches.size and t.branches[0, 0] < t.prompt_length:
        raise DataError(
            f"{label}: branches[0] begins at token {t.branches[0, 0]}, within the prompt (prompt_length is {t.prompt_length}); "
            "the first segment holds the whole prompt"
        )


def _check_logprobs(column: Any, mask: Any, where: str) -> None:
    """NaN at all trained tokens is allowed. NaN means that the source does not know its log-probs. Then the ratio counts as 1."""
    trained = column[mask]
    if trained.max(initial=-1) <= HIGHEST_LOGPROB and trained.min(initial=-1) >= LOWEST_LOGPROB:  # false with a NaN
        return
    if np.isnan(trained).all():
        return
    bad = ~((trained <= HIGHEST_LOGPROB) & (trained >= LOWEST_LOGPROB))
    index = int(np.flatnonzero(mask)[bad.argmax()])
    raise DataError(
        f"{where}[{index}] is {column[index]:g} at a trained token; expected the natural logarithm of the probability of the "
        f"sampled token, from {LOWEST_LOGPROB:g} to 0 (or NaN at all trained tokens of a member, if they are not known)"
    )


def _check_versions(t: Trajectory, label: str) -> None:
    trained = t.versions[t.mask]
    bad = trained[(trained < -1) | (trained > _MAX_INT32)]
    if bad.size:
        raise DataError(
            f"{label}: versions holds {bad[0]} at a trained token; expected its policy version, 0 or more (-1: not known)"
        )


def _check_member_routes(t: Trajectory, expected: tuple[int, int, int] | None, label: str) -> None:
    routes = t.routed_experts
    if expected is None:
        if routes is not None:
            raise DataError(
                f"{label}: routed_experts is given, but this run replays no routes; remove it, or set algorithm.router_replay"
            )
        return
    layers, k, experts = expected
    if routes is None:
        raise DataError(
            f"{label}: routed_experts is missing, but this run replays routes; give [tokens, {layers}, {k}] from the sampler's "
            "`Generation` (-1: not known), or set algorithm.router_replay to false"
        )
    if not isinstance(routes, np.ndarray) or routes.dtype.kind != "i" or routes.shape != (t.tokens.size, layers, k):
        found = f"{routes.dtype} {list(routes.shape)}" if isinstance(routes, np.ndarray) else type(routes).__name__
        raise DataError(
            f"{label}: routed_experts is {found}; expected signed integers [{t.tokens.size}, {layers}, {k}]: tokens, layers with "
            "experts, experts per token"
        )
    try:
        check_routes(routes, experts)
    except DataError as error:
        raise DataError(f"{label}: routed_experts: {error}") from None
    # The forward pass needs only the tokens before the last trained token.
    forward = int(t.mask.size - t.mask[::-1].argmax()) - 1 if t.mask.any() else 0
    if forward and (routes[:forward] == MISSING).all():
        raise DataError(
            f"{label}: routed_experts is -1 at every token of the forward pass, so no route would be replayed; record the routes "
            "of the sampler, or set algorithm.router_replay to false"
        )


def _check_rewards(t: Trajectory, label: str) -> None:
    if not isinstance(t.components, Mapping):
        raise DataError(f"{label}: components is a {type(t.components).__name__}; expected a mapping to numbers")
    for name in t.components:
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
            raise DataError(
                f"{label}: components holds the name {name!r:.40}; use text, {MAX_NAME_LENGTH} characters at most"
            )
    for name, value in (("reward", t.reward), *t.components.items()):
        if value is not None and not (_is_number(value) and abs(value) <= MAX_REWARD):  # also for NaN
            raise DataError(
                f"{label}: {name} is {shown(value)}; expected a finite number from -{MAX_REWARD:g} to {MAX_REWARD:g}, or None if "
                "it does not apply; scale the rewards"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def narrowest(experts: int) -> np.dtype[Any]:
    """The narrowest signed integer dtype for the numbers -1 to `experts - 1`."""
    return np.dtype(next(dtype for dtype in (np.int8, np.int16, np.int32) if experts - 1 <= np.iinfo(dtype).max))


def check_routes(routes: npt.NDArray[Any], experts: int) -> None:
    """Errors: DataError with token and layer, for an expert out of range, a route that is partly -1, or a repeated expert.

    Runs on the event loop for every trajectory, so it must be fast: only `_refuse` searches for the position of an error.
    """
    rows, layers, k = routes.shape
    columns = np.ascontiguousarray(routes.reshape(rows * layers, k).T)  # [k, rows x layers]
    if not columns.size:
        return
    known = columns[0] != MISSING  # [rows x layers], as the two masks below
    twice = np.zeros(known.size, np.bool_)
    mixed = np.zeros(known.size, np.bool_)
    for index, column in enumerate(columns[1:], 1):
        mixed |= (column != MISSING) != known
        for other in columns[:index]:
            twice |= column == other
    if columns.min() < MISSING or columns.max() >= experts or mixed.any() or (twice & known).any():
        _refuse(routes.reshape(rows * layers, k), layers, experts)


def _refuse(flat: npt.NDArray[Any], layers: int, experts: int) -> None:
    missing = flat == MISSING
    known = ~missing.all(1)
    ordered = np.sort(flat, 1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & known
    for bad, complaint in (
        ((missing.any(1) & known), "is partly missing: give all experts, or -1 for each if they are not known"),
        (((flat < MISSING) | (flat >= experts)).any(1), f"is out of range: experts are 0 to {experts - 1}"),
        (twice, "names an expert twice: give different experts"),
    ):
        if bad.any():
            token, layer = divmod(index := int(bad.argmax()), layers)
            raise DataError(f"token {token}, layer {layer}: the choice {flat[index].tolist()} {complaint}")
    raise AssertionError("check_routes found an error that _refuse does not find")
