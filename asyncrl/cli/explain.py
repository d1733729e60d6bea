"""`asyncrl explain NAME`: prints what a loss, an advantage, an importance mode, a KL estimator, a setting or a metric means.

A name may have several meanings (`grpo` is a loss and an advantage): all are printed.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.algorithms import importance, kl, registry
from asyncrl.algorithms.losses import LossMethod
from asyncrl.algorithms.method import Conflict, Method
from asyncrl.config.describe import refusal
from asyncrl.config.fields import ConfigField, config_fields, nearest_name, other_name
from asyncrl.config.imports import load_object
from asyncrl.config.methods import SETTINGS, load_method
from asyncrl.config.text import one_line
from asyncrl.errors import ConfigError
from asyncrl.telemetry.explained import metric, metrics
from asyncrl.telemetry.report import is_share
from asyncrl.types import Normaliser

USAGE = (
    "asyncrl explain NAME: a loss or an advantage (built in, or your own as `file.py:name`), an importance mode, a KL estimator, "
    "a metric (`optim/grad_norm`), or a setting (listed by `asyncrl run --help`; also by its name in TRL or verl)"
)


def explain(name: str) -> str:
    """The text about everything with this name; empty for an unknown name. Errors: ConfigError if user code cannot be loaded."""
    if ":" in name and metric(name) is None:
        # `file.py:name`: a loss or an advantage in the user's code. Loading registers the loss or advantage for the lookups below.
        load_method("loss" if isinstance(load_object(name), type) else "advantage", name)
    parts = [*_losses(name), *_advantages(name), *_modes_and_estimators(name), *_settings(name)]
    if not parts and (setting := other_name(name)) is not None:
        parts.append(f"{name}, as other code bases call it, is {setting} here.\n\n{explain(setting)}")
    return "\n\n".join([*parts, *_metrics(name)])


def known() -> list[str]:
    """The names of this package that can be explained, sorted. Names in other code bases are left out."""
    settings = [name for full in config_fields() for name in (full, full.rpartition(".")[2])]
    methods = {*registry.LOSSES, *registry.ADVANTAGES, *importance.IMPORTANCE_MODES, *kl.KL_ESTIMATORS}
    return sorted({*methods, *settings, *metrics()})


def main(arguments: Sequence[str]) -> int:
    """Print the text of each name. Exit codes: 0, or 2 for a name that is unknown or cannot be loaded."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    for name in arguments:
        try:
            text = explain(name)
        except ConfigError as error:
            print(f"asyncrl explain: {error}", file=sys.stderr)
            return error.exit_code
        if not text:
            setting, candidates = (None, metrics()) if "/" in name else (nearest_name(name), known())
            nearest = setting or difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]
            problem = f"no loss, advantage, setting or metric is named {name!r}"
            print(f"asyncrl explain: {problem}; did you mean {nearest!r}?", file=sys.stderr)
            return 2
        print(text, end="\n\n")
    return 0


def _losses(name: str) -> Iterator[str]:
    loss = registry.OWN.get(("loss", name)) or registry.LOSSES.get(name)
    if loss is None:
        return
    streams = "no" if loss.normaliser is Normaliser.MICROBATCHES else "yes"
    by_tokens = loss.normaliser is Normaliser.TOKENS
    entropy = "yes" if by_tokens else "only with rollout.streaming=false"
    yield "\n".join(
        [
            f"loss {name}  (algorithm.loss={name})",
            _doc(loss),
            f"divided by: {loss.normaliser.value}    can be streamed: {streams}    takes algorithm.entropy.coef: {entropy}",
            f"needs: {', '.join(_needs(loss))}",
            *_own_settings(loss),
            *_conflict_lines(name, loss.conflicts),
        ]
    )


def _needs(loss: type[LossMethod]) -> Iterator[str]:
    yield "old log-probs, if a batch has several updates"
    if loss.needs_reference:
        yield "reference log-probs"
    if loss.needs_entropy:
        yield "entropies with gradient"


def _own_settings(method: type[Method]) -> Iterator[str]:
    if settings := method.settings():
        section = f"algorithm.{settings[0].section}"
        yield f"its own settings, {section}.*: " + ", ".join(f"{s.name}={s.default}" for s in settings)


def _conflict_lines(name: str, conflicts: Sequence[Conflict]) -> Iterator[str]:
    for conflict in conflicts:
        yield f"{conflict.name} may be refused, because this is {name}, {conflict.reason}"


def _advantages(name: str) -> Iterator[str]:
    estimator = registry.OWN.get(("advantage", name)) or registry.ADVANTAGES.get(name)
    if estimator is None:
        return
    streams = "no, its statistics span the step" if estimator.needs_whole_step else "yes"
    head = f"advantage {name}  (algorithm.advantage={name})"
    lines = [head, inspect.cleandoc(estimator.doc), f"can be streamed: {streams}"]
    own = _own_settings(estimator.settings) if estimator.settings is not None else ()
    yield "\n".join([*lines, *own, *_conflict_lines(name, estimator.conflicts)])


def _modes_and_estimators(name: str) -> Iterator[str]:
    mode = importance.IMPORTANCE_MODES.get(name)
    if mode is not None:
        raw = "; a token of a kept sequence has its own ratio" if mode.raw_token_weights else ""
        what = f"level of the ratios: {mode.level}; ratios outside the bounds: {mode.action}{raw}"
        yield f"importance mode {name}  (algorithm.importance.mode={name}): {what}\n{_doc(importance)}"
    if name in kl.KL_ESTIMATORS:
        yield f"KL estimator {name}  (algorithm.kl.estimator={name})\n{_doc(kl)}"


def _settings(name: str) -> Iterator[str]:
    for full, field in config_fields().items():
        if name in (full, full.rpartition(".")[2]):
            yield "\n".join(_setting(field))


def _metrics(name: str) -> Iterator[str]:
    exact = metric(name)
    for row in [exact] if exact else [row for row in metrics().values() if row.name.endswith(f"/{name}")]:
        # The documented name of a metric may be a pattern such as idle/<lane>/<cause>.
        pattern = f", one of {row.name}" if exact and row.name != name else ""
        yield f"metric {name if exact else row.name}{pattern}  (unit: {row.unit})\n{row.meaning}\na bad value: {row.bad}"
    section, _, lane_and_cause = name.partition("/")
    if is_share(name) and "/" in lane_and_cause:  # explain the share of all lanes, too
        yield from _metrics(f"{section}/{lane_and_cause.rpartition('/')[2]}")


def _setting(field: ConfigField) -> Iterator[str]:
    yield f"setting {field.name}  ({field.expected}; default {one_line(field.default)})"
    yield field.text
    if field.name in SETTINGS:
        setting = SETTINGS[field.name]
        losses = registry.readers().get(setting.flat, ())
        if losses:
            yield f"read by: {', '.join(losses)}; refused with another built-in loss"
        owner = next(method for method in registry.methods() if setting in method.settings())
        yield f"\n{_doc(owner.formula or owner)}"
    reason = refusal(field.name)
    yield "on resume: may change" if reason is None else f"on resume: may not change ({reason})"


def _doc(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")
