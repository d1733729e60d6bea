"""Rotary frequencies that depend on the length of a row (`longrope` and `dynamic` scaling), chosen once for a run.

transformers chooses the frequencies in every forward, by the longest row. When a row grows past the original context (the longest
row without scaling), all its tokens get other frequencies. Then its cached keys are wrong, its sampled tokens have other log-probs,
and a short row depends on the other rows of its batch. In asyncrl the longest row that a run can have decides for all rows:

| `rope_type` | rows of the run stay within the original context | rows may grow past it                                 |
|-------------|--------------------------------------------------|-------------------------------------------------------|
| `longrope`  | the short factors                                | the long factors (vLLM: by `max_model_len`)           |
| `dynamic`   | the base of the configuration                    | the base of transformers for the longest row          |

The model's configuration is not changed, so other programs load saved models as before.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.errors import ConfigError

# A made-up `rope_type`. transformers changes the frequencies of `longrope` and `dynamic` types, but not of this type.
HELD = "held"


def depends_on_length(kind: Any) -> bool:
    """Whether frequencies of this `rope_type` depend on the length of the row."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_parts(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration: one dictionary, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None)
    candidates = [rope, *(rope.values() if isinstance(rope, dict) else ())]
    return [part for part in candidates if isinstance(part, dict) and "rope_type" in part]


def original_context(config: PretrainedConfig) -> int | None:
    """The largest length, in tokens, up to which no frequencies change. None: frequencies never depend on the length."""
    return min((context for _, context in _contexts(config)), default=None)


def _contexts(config: PretrainedConfig) -> list[tuple[str, int]]:
    """(`rope_type`, original context) of each entry of `rope_parts` whose frequencies depend on the length of the row."""
    text = config.get_text_config()
    contexts = []
    for part in rope_parts(text):
        kind = part["rope_type"]
        if depends_on_length(kind):
            original = None if "dynamic" in kind else part.get("original_max_position_embeddings")
            contexts.append((kind, int(original or text.max_position_embeddings)))
    return contexts


def frequencies_differ(config: PretrainedConfig, first: int, second: int) -> bool:
    """Whether a run with rows of up to `first` tokens and a run with rows of up to `second` use different frequencies."""
    # `longrope` has two sets of factors. `dynamic` has another base for each length past the context.
    return any(
        (first > context) != (second > context) or ("dynamic" in kind and max(context, first) != max(context, second))
        for kind, context in _contexts(config)
    )


def is_past_context(config: PretrainedConfig, longest: int) -> bool:
    """Whether rows of `longest` tokens are past the original context."""
    context = original_context(config)
    return context is not None and longest > context


def describe(config: PretrainedConfig, longest: int | None) -> str:
    """A line on the frequencies for rows of up to `longest` tokens. Empty if none depend on the length, or if `longest` is None."""
    context = original_context(config)
    if context is None or longest is None:
        return ""
    kinds = {part["rope_type"] for part in rope_parts(config.get_text_config())}
    names = ", ".join(sorted(filter(depends_on_length, kinds)))
    if longest <= context:
        return f"rotary ({names}): rows of up to {longest} tokens stay within the original context of {context}"
    served_rows = f"of {longest} tokens" if "dynamic" in names else f"past {context} tokens"
    return (
        f"rotary ({names}): rows may grow to {longest} tokens, past the original context of {context}: all rows use the "
        f"frequencies of a row of {longest} tokens; serve the model with the frequencies of rows {served_rows}"
    )


def require_frequencies(config: PretrainedConfig, *, before: int, now: int) -> None:
    """Refuses to resume with other frequencies than those of the saved run. `before`, `now`: tokens of the longest row of the saved
    run and of this run. Errors: ConfigError."""
    if frequencies_differ(config, before, now):
        raise ConfigError(
            f"resume=true: the longest row had {before} tokens and has {now} (rollout.max_tokens, rollout.max_context), and this "
            "model's rotary frequencies follow the longest row of a run; restore both, or start a new run from the checkpoint"
        )


def length_dependent_message(config: PretrainedConfig, longest: int) -> str:
    """The reason to refuse rows of `longest` tokens, after `hold_frequencies` returned False."""
    return (
        "it chooses rotary frequencies by the length of each row, in a way that asyncrl does not know, and rows of "
        f"{longest} tokens are past its original context of {original_context(config)}; it can be trained if "
        "rollout.max_context, or data.max_prompt_tokens + rollout.max_tokens, is within that context"
    )


@torch.no_grad()
def hold_frequencies(module: PreTrainedModel, longest: int) -> bool:
    """Makes every row use the frequencies that the model's own code chooses for a row of `longest` tokens. Does nothing for a
    module on the meta device, or if no frequencies depend on the length. Call this once for each module.

    Returns False if the run must be refused: rows exceed the original context, and not all frequencies could be fixed.
    """
    if original_context(module.config) is None or module.device.type == "meta":
        return True
    fixed = []
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        if depends_on_length(kinds):
            fixed.append(_fix(part, longest, None, HELD))
        elif isinstance(kinds, dict):
            for layer in [layer for layer, kind in kinds.items() if depends_on_length(kind)]:
                fixed.append(_fix(part, longest, layer, {**kinds, layer: HELD}))
                kinds = part.rope_type
    return (bool(fixed) and all(fixed)) or not is_past_context(module.config, longest)


def reset_dynamic_frequencies(module: nn.Module) -> None:
    """Makes the next row get the `dynamic` frequencies of its own length. Without this call, transformers keeps the base of the
    longest earlier row, until a row fits into the original context."""
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        kind_of_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in kind_of_layer.items():
            if isinstance(kind, str) and "dynamic" in kind:
                with contextlib.suppress(Exception):  # the class may take other arguments
                    _cos_and_sin(part, 0, layer)


def _fix(part: nn.Module, longest: int, layer: str | None, kinds: Any) -> bool:
    """Fixes the frequencies of the rotary module `part`. If that fails, restores its `rope_type` and returns False. `layer`: the
    type of layers to fix, or None if `part` serves only one type. `kinds`: the new `rope_type`."""
    before: Any = part.rope_type
    try:
        # A short row resets the state that earlier rows left (see `reset_dynamic_frequencies`).
        _cos_and_sin(part, 0, layer)
        expected = _cos_and_sin(part, longest - 1, layer)
        part.rope_type = kinds
        fixed = [_cos_and_sin(part, last, layer) for last in (0, longest - 1, 4 * longest)]
        if all(all(map(torch.equal, tables, expected)) for tables in fixed):
            return True
    except Exception:  # the class may take other arguments
        pass
    part.rope_type = before
    return False


def _cos_and_sin(part: nn.Module, last: int, layer: str | None) -> list[Tensor]:
    """The rotary tables for the positions 0, 1 and 2 of a row whose last position is `last`."""
    device = next((buffer.device for buffer in part.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, last]], device=device)
    named = {} if layer is None else {"layer_type": layer}
    tables = part(torch.zeros(1, positions.shape[1], 1, device=device), positions, **named)
    return [table[..., :-1, :].clone() for table in tables]
