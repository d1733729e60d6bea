"""Rotary frequencies that follow the length of a row, `longrope` and `dynamic` scaling, chosen once for a run.

transformers chooses them in every forward, by the longest row in it: all tokens of a row that grows past the original context
are turned otherwise than before, so what was sampled until then was sampled by another model, no cache survives, and a short
row depends on the rows beside it. Here the longest row that a run can have decides, for every row of it:

| `rope_type` | rows of the run stay within the original context | they may grow past it                                 |
|-------------|--------------------------------------------------|-------------------------------------------------------|
| `longrope`  | the short factors                                | the long factors (vLLM: by `max_model_len`)           |
| `dynamic`   | the base of the configuration                    | the base that transformers computes for a row so long |

The configuration stays as it is: what is written loads elsewhere as before.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.errors import ConfigError

# As `rope_type`: transformers changes the frequencies of `longrope` and dynamic ones alone.
HELD = "held"


def depends_on_length(kind: Any) -> bool:
    """Whether frequencies of this `rope_type` follow the length of the row."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_parts(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration: one, or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None)
    found = [rope, *(rope.values() if isinstance(rope, dict) else ())]
    return [part for part in found if isinstance(part, dict) and "rope_type" in part]


def original_context(config: PretrainedConfig) -> int | None:
    """Most tokens of a row for which the model's own frequencies do not depend on its length; None: any."""
    return min((context for _, context in _contexts(config)), default=None)


def _contexts(config: PretrainedConfig) -> list[tuple[str, int]]:
    """(`rope_type`, original context) of all frequencies that follow the length of the row."""
    text = config.get_text_config()
    found = []
    for part in rope_parts(text):
        kind = part["rope_type"]
        if depends_on_length(kind):
            original = None if "dynamic" in kind else part.get("original_max_position_embeddings")
            found.append((kind, int(original or text.max_position_embeddings)))
    return found


def chooses_otherwise(config: PretrainedConfig, one: int, other: int) -> bool:
    """Whether runs whose longest rows have `one` and `other` tokens take different frequencies."""
    return any(
        max(context, one) != max(context, other) if "dynamic" in kind else (one > context) != (other > context)
        for kind, context in _contexts(config)
    )


def outgrows(config: PretrainedConfig, longest: int) -> bool:
    """Whether rows of `longest` tokens are past the original context."""
    context = original_context(config)
    return context is not None and longest > context


def describe(config: PretrainedConfig, longest: int | None) -> str:
    """Which frequencies a run takes whose longest row has `longest` tokens; empty where there is nothing to choose."""
    context = original_context(config)
    if context is None or longest is None:
        return ""
    kinds = {part["rope_type"] for part in rope_parts(config.get_text_config())}
    names = ", ".join(sorted(filter(depends_on_length, kinds)))
    if longest <= context:
        return f"rotary ({names}): rows of up to {longest} tokens stay within the original context of {context}"
    where = f"of {longest} tokens" if "dynamic" in names else f"past {context} tokens"
    return (
        f"rotary ({names}): rows may grow to {longest} tokens, past the original context of {context}: each is turned by the "
        f"frequencies of a row so long; serve it with those of rows {where}"
    )


def require_frequencies(config: PretrainedConfig, prompt: int, *, before: int, now: int) -> None:
    """Weights are those of the frequencies that they were trained with. `before`, `now`: rollout.max_tokens of the run that wrote
    them and of the one that goes on, with prompts of up to `prompt` tokens. Errors: ConfigError where it would take others."""
    if chooses_otherwise(config, prompt + before, prompt + now):
        raise ConfigError(
            f"resume=true: rollout.max_tokens was {before} and is {now}, and this model's rotary frequencies follow the longest "
            "row of a run; put it back, or start a new run from the checkpoint"
        )


def not_held(config: PretrainedConfig, longest: int) -> str:
    """Why no run can have rows of `longest` tokens, where `hold_frequencies` gives False."""
    return (
        "it chooses rotary frequencies by the length of each row, in a way that is not known here, and rows of "
        f"{longest} tokens are past its original context of {original_context(config)}; it can be trained where "
        "data.max_prompt_tokens + rollout.max_tokens is within it"
    )


@torch.no_grad()
def hold_frequencies(module: PreTrainedModel, longest: int) -> bool:
    """From now on every row is turned by the frequencies that the model's own code takes for a row of `longest` tokens. To be
    called once: what is held stays.

    Nothing changes where they do not depend on the length, or nothing is allocated. False where rows of the run are past the
    original context, and the frequencies would go on to follow each row: no run may start so.
    """
    if original_context(module.config) is None or module.device.type == "meta":
        return True
    held = []
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        if depends_on_length(kinds):
            held.append(_hold(part, longest, None, HELD))
        elif isinstance(kinds, dict):
            for layer in [layer for layer, kind in kinds.items() if depends_on_length(kind)]:
                held.append(_hold(part, longest, layer, {**kinds, layer: HELD}))
                kinds = part.rope_type
    return (bool(held) and all(held)) or not outgrows(module.config, longest)


def forget_lengths(module: nn.Module) -> None:
    """The next row is turned by its own length: transformers' `dynamic` keeps the base of the longest row before it, until a row
    within the original context comes."""
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        named = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in named.items():
            if isinstance(kind, str) and "dynamic" in kind:
                with contextlib.suppress(Exception):  # of a class that is called in another way
                    _cos_and_sin(part, 0, layer)


def _hold(part: nn.Module, longest: int, layer: str | None, kinds: Any) -> bool:
    """Whether `part` is held now. `layer`: the type of the layers that these frequencies are for, where it has several;
    `kinds`: what its `rope_type` becomes."""
    before: Any = part.rope_type
    try:
        # Else what the module ran before would choose, see `forget_lengths`.
        _cos_and_sin(part, 0, layer)
        expected = _cos_and_sin(part, longest - 1, layer)
        part.rope_type = kinds
        found = [_cos_and_sin(part, last, layer) for last in (0, longest - 1, 4 * longest)]
        if all(torch.equal(own, other) for each in found for own, other in zip(each, expected, strict=True)):
            return True
    except Exception:  # of a class that is called in another way
        pass
    part.rope_type = before
    return False


def _cos_and_sin(part: nn.Module, last: int, layer: str | None) -> list[Tensor]:
    """Of the first positions of a row that ends at `last`."""
    device = next((buffer.device for buffer in part.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, last]], device=device)
    named = {} if layer is None else {"layer_type": layer}
    tables = part(torch.zeros(1, positions.shape[1], 1, device=device), positions, **named)
    return [table[..., :-1, :].clone() for table in tables]
