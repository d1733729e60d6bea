"""What a trajectory must be so that it can be trained: one check for every source of groups.

    own rollouts (pumps/rollout.py)   Runtime.submit   shared memory (runtime/door.py)   HTTP (http/scored_data.py)

Whatever is refused here would otherwise end the run in the middle of a step, or train on numbers that mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, FinishReason, Trajectory
from .routes import MISSING, check_routes

# Nats; its negative is the last whole one whose exponential, a ratio, is finite in float32.
LOWEST_LOGPROB = -87.0
# Either way: without a normalisation it scales the gradient, the square of whose norm is float32.
MOST_REWARD = 1e9
# Of all groups from outside together: each becomes metrics that sinks keep for as long as they live.
MOST_COMPONENTS = 128
MOST_NAME = 128  # characters of one
# Nats above 0 that a sampler's rounding may leave in a log-prob.
SLACK = 1e-4
# Levels of the JSON of texts and metadata; what writes them out again gives up at a few hundred.
MOST_NESTED = 64
# In a trajectory's metadata: its reward counts in the comparison of its group, and its own advantage is 0 afterwards. Its tokens
# are trained and counted as those of any member whose advantage is 0; one without a trained token may say so, too.
SILENT = "set_advantage_to_zero"
_KINDS = {"tokens": "iu", "mask": "b", "logprobs": "f", "sampled_logprobs": "f", "versions": "iu"}
_WORDS = {"iu": "integers", "b": "booleans", "f": "floats"}
_LEAST = float(np.float32(LOWEST_TEMPERATURE))  # as a record holds it: a little less
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits into a run; None: there is no such limit."""

    longest: int | None = None  # tokens of one trajectory
    vocabulary: int | None = None  # token ids are below it
    # Layers, experts a token, experts, where routes are replayed.
    routes: tuple[int, int, int] | None = None


def check_trajectory(trajectory: Trajectory, limits: Limits) -> None:
    """Errors: DataError that names the member and the field."""
    t, who = trajectory, f"member {trajectory.member}"
    for name, kind in _KINDS.items():
        _column(getattr(t, name), kind, t.tokens, f"{who}: {name}")
    _tokens(t, limits, who)
    _mask(t, who)
    check_temperature(t.temperature, who)
    for name in ("logprobs", "sampled_logprobs"):
        _logprobs(getattr(t, name), t.mask, f"{who}: {name}")
    _versions(t, who)
    _routes(t, limits.routes, who)
    _rewards(t, who)
    if not isinstance(t.finish_reason, FinishReason):
        raise DataError(f"{who}: finish_reason is {t.finish_reason!r}; expected one of {', '.join(FinishReason)}")
    if not isinstance(t.metadata, Mapping):
        raise DataError(f"{who}: metadata is a {type(t.metadata).__name__}; expected a mapping")
    check_json({"completion": t.completion, "metadata": t.metadata, "components": t.components}, who, 1)


def check_temperature(temperature: float, who: str) -> None:
    """Raises DataError where log-probs could not be compared at that temperature."""
    if not _is_number(temperature) or not _LEAST <= temperature <= HIGHEST_TEMPERATURE:  # also NaN
        raise DataError(
            f"{who}: temperature is {temperature}; log-probs are compared at the temperature of sampling, which is a number "
            f"from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        )


def check_trains(trajectory: Trajectory) -> None:
    """For groups from outside. Errors: DataError where nothing is trained of a member that does not say so itself."""
    if not trajectory.mask.any() and not trajectory.metadata.get(SILENT):
        raise DataError(
            f"member {trajectory.member}: mask trains no token; mask the tokens that the policy sampled, or set "
            f"{SILENT} in its metadata if it counts only in the comparison of its group"
        )


def check_json(value: Any, where: str, extra: int = 0, *, written: bool = True) -> None:
    """What is parsed, passed on and, where `written`, put into files. Errors: DataError for text that is no Unicode, for more
    than `MOST_NESTED` levels (`extra` of which are ours), and for what no file of ours can hold."""
    level = [value]
    for _ in range(MOST_NESTED + extra + 1):
        # By identity: a list that holds itself twice would double at each level.
        below: dict[int, Any] = {}
        for item in level:
            if isinstance(item, str):
                _text(item, where)
            elif isinstance(item, Mapping):
                if written:
                    _keys(item, where)
                below |= {id(one): one for pair in item.items() for one in pair}
            elif isinstance(item, list | tuple):
                below |= {id(one): one for one in item}
            elif written and isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise DataError(f"{where}: an integer of texts or metadata has more than 64 bits; write it as text")
        if not below:
            return
        level = list(below.values())
    raise DataError(f"{where}: texts or metadata are nested more than {MOST_NESTED} levels deep; flatten them")


def _keys(mapping: Mapping[Any, Any], where: str) -> None:
    for key in mapping:
        if not isinstance(key, str | int | float | None):
            raise DataError(f"{where}: a key of texts or metadata is a {type(key).__name__}; keys are text")


def _text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a text holds the lone surrogate U+{ord(text[error.start]):04X} at {error.start}, which no file can "
            "hold; decode with errors='replace'"
        ) from None


def _column(column: Any, kind: str, tokens: Any, where: str) -> None:
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in kind:
        found = f"{column.dtype} of shape {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise DataError(f"{where} is {found}; expected a one-dimensional numpy array of {_WORDS[kind]}")
    if column.size != tokens.size:
        raise DataError(f"{where} has {column.size} entries for {tokens.size} tokens; one each")


def _tokens(t: Trajectory, limits: Limits, who: str) -> None:
    size = t.tokens.size
    if not 0 < size <= (size if limits.longest is None else limits.longest):
        most = "at least 1" if limits.longest is None else f"1 to {limits.longest}"
        raise DataError(
            f"{who}: tokens has {size} entries; this run takes {most} (data.max_prompt_tokens + rollout.max_tokens)"
        )
    low, high = int(t.tokens.min()), int(t.tokens.max())
    if low < 0 or high > _MOST_INT32 or (limits.vocabulary is not None and high >= limits.vocabulary):
        ids = "0 or more" if limits.vocabulary is None else f"0 to {limits.vocabulary - 1}"
        raise DataError(
            f"{who}: tokens holds {low if low < 0 else high}; the model's ids are {ids}: was it made with another tokenizer?"
        )


def _mask(t: Trajectory, who: str) -> None:
    if not isinstance(t.prompt_length, int | np.integer) or not 1 <= t.prompt_length <= t.tokens.size:
        raise DataError(
            f"{who}: prompt_length is {t.prompt_length} of {t.tokens.size} tokens; a prompt has 1 or more, from which the "
            "first trained token is predicted"
        )
    if t.mask[: t.prompt_length].any():
        at = int(t.mask.argmax())
        raise DataError(
            f"{who}: mask[{at}] trains a token of the prompt (prompt_length is {t.prompt_length}); only what follows the "
            "prompt can be trained, and nothing predicts the first token"
        )


def _logprobs(column: Any, mask: Any, where: str) -> None:
    """NaN for every trained token is how a source says that it does not know them: they count as ratio 1."""
    trained = column[mask]
    if trained.max(initial=-1) <= SLACK and trained.min(initial=-1) >= LOWEST_LOGPROB:  # a NaN is neither
        return
    if np.isnan(trained).all():
        return
    bad = ~((trained <= SLACK) & (trained >= LOWEST_LOGPROB))
    at = int(np.flatnonzero(mask)[bad.argmax()])
    raise DataError(
        f"{where}[{at}] is {column[at]:g} at a trained token; expected the natural logarithm of a probability that was "
        f"sampled, from {LOWEST_LOGPROB:g} to 0 (NaN for all trained tokens of a member: not known)"
    )


def _versions(t: Trajectory, who: str) -> None:
    trained = t.versions[t.mask]
    if trained.size and not (trained.min() >= -1 and trained.max() <= _MOST_INT32):
        raise DataError(
            f"{who}: versions holds {trained.min() if trained.min() < -1 else trained.max()} at a trained token; expected the "
            "policy version that sampled it, 0 or more (-1: not known)"
        )


def _routes(t: Trajectory, wanted: tuple[int, int, int] | None, who: str) -> None:
    routes = t.routed_experts
    if wanted is None:
        if routes is not None:
            raise DataError(
                f"{who}: routed_experts is given, but this run replays no routes; leave it out, or set algorithm.router_replay"
            )
        return
    layers, k, experts = wanted
    if routes is None:
        raise DataError(
            f"{who}: routed_experts is missing, which this run replays: [tokens, {layers}, {k}], as the sampler's `Generation` "
            "has it (-1: not known); or set algorithm.router_replay to false"
        )
    if not isinstance(routes, np.ndarray) or routes.dtype.kind != "i" or routes.shape != (t.tokens.size, layers, k):
        found = f"{routes.dtype} {list(routes.shape)}" if isinstance(routes, np.ndarray) else type(routes).__name__
        raise DataError(
            f"{who}: routed_experts is {found}; expected signed integers [{t.tokens.size}, {layers}, {k}]: tokens, layers with "
            "experts, experts a token"
        )
    try:
        check_routes(routes, experts)
    except DataError as error:
        raise DataError(f"{who}: routed_experts: {error}") from None
    runs = int(t.mask.size - t.mask[::-1].argmax()) - 1 if t.mask.any() else 0  # all before the last trained token
    if runs and (routes[:runs] == MISSING).all():
        raise DataError(
            f"{who}: routed_experts is -1 at every token that the model runs over, so that nothing would be replayed; record "
            "where the sampler sent them, or set algorithm.router_replay to false"
        )


def _rewards(t: Trajectory, who: str) -> None:
    if not isinstance(t.components, Mapping):
        raise DataError(f"{who}: components is a {type(t.components).__name__}; expected a mapping of names to numbers")
    for name in t.components:
        if not isinstance(name, str) or len(name) > MOST_NAME:
            raise DataError(
                f"{who}: components holds the name {name!r:.40}; the name of a component is text, {MOST_NAME} characters at most"
            )
    for name, value in (("reward", t.reward), *t.components.items()):
        if value is not None and not (_is_number(value) and abs(value) <= MOST_REWARD):  # also NaN
            raise DataError(
                f"{who}: {name} is {value}; rewards are finite numbers from -{MOST_REWARD:g} to {MOST_REWARD:g}, or None "
                "where they do not apply; scale them"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)
