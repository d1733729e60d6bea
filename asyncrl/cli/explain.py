"""`asyncrl explain NAME`: what a loss, an advantage, a mode or a setting is, from the docstrings themselves.

A name may be several things (`grpo` is a loss and an advantage): all are printed.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from asyncrl.algorithms import advantages, entropy, entropy_control, importance, kl, masks, registry, surrogates
from asyncrl.config.check_losses import READERS
from asyncrl.config.describe import refusal
from asyncrl.config.fields import Knob, knobs
from asyncrl.types import Normaliser

USAGE = "asyncrl explain NAME: a loss, an advantage, an importance mode, a KL estimator, or a setting (`asyncrl run --help`)"

# The start of a setting's name within `algorithm` -> where its formula stands
_FORMULAS: tuple[tuple[str, ModuleType | Callable[..., Any]], ...] = (
    ("importance_", importance),
    ("off_policy_mask", masks.off_policy_keep),
    ("mask_", masks.without_overlong),
    ("kl_", kl),
    ("use_bias", kl),
    ("entropy_target", entropy_control.EntropyControl),
    ("entropy_coef_delta", entropy_control.EntropyControl),
    ("entropy_coef", entropy.entropy_bonus),
    ("second_gradient", entropy.entropy_bonus),
    ("top_entropy", masks.entropy_threshold),
    ("advantage", advantages),
    ("cispo_", surrogates.clipped_weight),
    ("sapo_", surrogates.soft_gate),
    ("vespo_", surrogates.gamma_weight),
    ("epsilon", surrogates.clipped),
    ("delta", surrogates.clipped),
    ("dual_clip", surrogates.clipped),
)


def explain(name: str) -> str:
    """Everything that goes by this name, as text. Empty: nothing does."""
    parts = [*_losses(name), *_advantages(name), *_modes(name), *_settings(name)]
    return "\n\n".join(parts)


def known() -> list[str]:
    settings = [knob for full in knobs() for knob in (full, full.rpartition(".")[2])]
    return sorted({*registry.LOSSES, *registry.ADVANTAGES, *importance.IMPORTANCE_MODES, *kl.KL_ESTIMATORS, *settings})


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0, or 2 for a name that nothing goes by."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    for name in arguments:
        text = explain(name)
        if not text:
            nearest = difflib.get_close_matches(name, known(), n=1, cutoff=0.0)[0]
            print(f"asyncrl explain: nothing is named {name!r}; did you mean {nearest!r}?", file=sys.stderr)
            return 2
        print(text, end="\n\n")
    return 0


def _losses(name: str) -> Iterator[str]:
    entry = registry.LOSSES.get(name)
    if entry is None:
        return
    own = [knob for knob, readers in READERS.items() if name in readers]
    streams = "no" if entry.normaliser is Normaliser.MICROBATCHES else "yes"
    separate = "no" if entry.normaliser is Normaliser.TOKENS else "second_gradient_buffer, or rollout.streaming=false"
    lines = [
        f"loss {name}  (algorithm.loss={name})",
        _doc(entry.fn),
        f"divided by: {entry.normaliser.value}    streams: {streams}    entropy_coef needs more than itself: {separate}",
    ]
    if own:
        lines.append(
            "settings of its own: " + ", ".join(f"{knob}={knobs()[f'algorithm.{knob}'].default}" for knob in own)
        )
    yield "\n".join(lines)


def _advantages(name: str) -> Iterator[str]:
    estimator = registry.ADVANTAGES.get(name)
    if estimator is not None:
        streams = "no, its statistics span the step" if estimator.needs_whole_step else "yes"
        function = estimator.batch if estimator.group is None else estimator.group
        yield f"advantage {name}  (algorithm.advantage={name})\n{_doc(function)}\nstreams: {streams}"


def _modes(name: str) -> Iterator[str]:
    mode = importance.IMPORTANCE_MODES.get(name)
    if mode is not None:
        raw = "; what is kept has its raw token weights" if mode.raw_token_weights else ""
        head = f"importance mode {name}  (algorithm.importance_mode={name}): ratio per {mode.level}, bounds {mode.action}{raw}"
        yield f"{head}\n{_doc(importance)}"
    if name in kl.KL_ESTIMATORS:
        yield f"KL estimator {name}  (algorithm.kl_estimator={name})\n{_doc(kl.KL_ESTIMATORS[name])}\n\n{_doc(kl)}"


def _settings(name: str) -> Iterator[str]:
    for full, knob in knobs().items():
        if name in (full, full.rpartition(".")[2]):
            yield "\n".join(_setting(knob))


def _setting(knob: Knob) -> Iterator[str]:
    section, _, own = knob.name.rpartition(".")
    yield f"setting {knob.name}  ({knob.expected}; default {knob.default})"
    yield knob.text
    if section == "algorithm":
        if own in READERS:
            yield f"read by: {', '.join(READERS[own])}; refused with another loss"
        for start, source in _FORMULAS:
            if own.startswith(start):
                yield f"\n{_doc(source)}"
                break
    reason = refusal(knob.name)
    yield "on resume: may change" if reason is None else f"on resume: may not change ({reason})"


def _doc(source: Any) -> str:
    return inspect.cleandoc(source.__doc__ or "")
