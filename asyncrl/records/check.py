"""What a trajectory must be so that it can be trained: one check for every source of groups.

    own rollouts (pumps/rollout.py)   Runtime.submit   shared memory (runtime/door.py)   HTTP (http/scored_data.py)

Whatever is refused here would otherwise end the run in the middle of a step, or train on numbers that mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..types import Trajectory

LOWEST_TEMPERATURE = 1e-6  # logits are divided by it
SLACK = 1e-4  # nats above 0 that a sampler's rounding may leave in a log-prob
MOST_NESTED = 64  # levels of the JSON of texts and metadata; what writes them out again gives up at a few hundred
SILENT = "set_advantage_to_zero"  # in a trajectory's metadata: it counts in the comparison of its group alone
_KINDS = {"tokens": "iu", "mask": "b", "logprobs": "f", "sampled_logprobs": "f", "versions": "iu"}
_WORDS = {"iu": "integers", "b": "booleans", "f": "floats"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits into a run; None: there is no such limit."""

    longest: int | None = None  # tokens of one trajectory
    vocabulary: int | None = None  # token ids are below it


def check_trajectory(trajectory: Trajectory, limits: Limits) -> None:
    """Errors: DataError that names the member and the field."""
    t, who = trajectory, f"member {trajectory.member}"
    for name, kind in _KINDS.items():
        _column(getattr(t, name), kind, t.tokens, f"{who}: {name}")
    _tokens(t, limits, who)
    _mask(t, who)
    if not LOWEST_TEMPERATURE <= t.temperature < math.inf:  # also NaN
        raise DataError(
            f"{who}: temperature is {t.temperature:g}; log-probs are compared at the temperature of sampling, which is a "
            f"finite number of {LOWEST_TEMPERATURE:g} or more"
        )
    for name in ("logprobs", "sampled_logprobs"):
        _logprobs(getattr(t, name), t.mask, f"{who}: {name}")
    for name, value in {"reward": t.reward, **t.components}.items():
        if value is not None and not math.isfinite(value):
            raise DataError(f"{who}: {name} is {value}; rewards are finite numbers, or None where they do not apply")
    check_json({"completion": t.completion, "metadata": t.metadata, "components": t.components}, who, 1)


def check_trains(trajectory: Trajectory) -> None:
    """For groups from outside. Errors: DataError where nothing is trained of a member that does not say so itself."""
    if not trajectory.mask.any() and not trajectory.metadata.get(SILENT):
        raise DataError(
            f"member {trajectory.member}: mask trains no token; mask the tokens that the policy sampled, or set "
            f"{SILENT} in its metadata if it counts only in the comparison of its group"
        )


def check_json(value: Any, where: str, extra: int = 0) -> None:
    """Errors: DataError for text that is no Unicode, and for more than `MOST_NESTED` levels (`extra` of which are ours)."""
    level = [value]
    for _ in range(MOST_NESTED + extra + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _text(item, where)
            elif isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                below += item
        if not below:
            return
        level = below
    raise DataError(f"{where}: texts or metadata are nested more than {MOST_NESTED} levels deep; flatten them")


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
    if low < 0 or (limits.vocabulary is not None and high >= limits.vocabulary):
        ids = "0 or more" if limits.vocabulary is None else f"0 to {limits.vocabulary - 1}"
        raise DataError(
            f"{who}: tokens holds {low if low < 0 else high}; the model's ids are {ids}: was it made with another tokenizer?"
        )


def _mask(t: Trajectory, who: str) -> None:
    if not 1 <= t.prompt_length <= t.tokens.size:
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
    if trained.max(initial=-1) <= SLACK and trained.min(initial=-1) > -math.inf:  # a NaN is neither
        return
    if np.isnan(trained).all():
        return
    bad = ~((trained <= SLACK) & (trained > -math.inf))
    at = int(np.flatnonzero(mask)[bad.argmax()])
    raise DataError(
        f"{where}[{at}] is {column[at]:g} at a trained token; expected the finite natural logarithm of a probability, at "
        "most 0 (NaN for all trained tokens of a member: not known)"
    )
