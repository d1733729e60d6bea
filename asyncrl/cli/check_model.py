"""`asyncrl check-model PATH`: compares every way to compute a model (fused, packed, plain) with eager transformers, on the CPU.

At its start a run compares on its own device, and uses the first way that agrees (runtime/gate.py). If the model's rotary
frequencies depend on the length of a row, rows within the original context and longer rows are compared separately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.telemetry.output import print_early

if TYPE_CHECKING:
    from asyncrl.runtime.gate import Verdict

USAGE = """\
asyncrl check-model PATH [a.b=value ...]: compare every way to compute the model (fused, packed, plain) with the eager forward and
backward of transformers, on the CPU. Exit code 2: an error, or the model is refused. PATH: model.path, a directory, hub id or
file.py:function. Of the settings of a run only model.*, train.gradient_checkpointing and distributed.sharding matter."""


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0; 2 for an error or a refused model. Refused rows past the original context give 0: shorter rows can train."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    path, *overrides = arguments
    print_early(f"looking for {path}")
    from asyncrl.config.load import load_config
    from asyncrl.errors import AsyncrlError, CheckpointError, ConfigError
    from asyncrl.runtime.inputs import check_model_source

    try:
        config = load_config([], [f"model.path={path}", *overrides])
        check_model_source(config.model)
    except AsyncrlError as error:
        print(f"asyncrl check-model: {error}", file=sys.stderr)
        return 2
    print_early("importing torch and transformers")
    from asyncrl.models.head.output import head_transform
    from asyncrl.models.loading import load_module
    from asyncrl.models.rotary import original_context
    from asyncrl.runtime.gate import check_model

    def compare(longest: int | None) -> Verdict:
        verdict = check_model(
            module,
            longest=longest,
            lora=config.model.lora,
            checkpointing=config.train.gradient_checkpointing,
            sharded=config.distributed.sharding == "fsdp",
            all_paths=True,
        )
        _ = verdict.path  # raises ConfigError if no way agrees
        return verdict

    try:
        module, _ = load_module(config.model)
        # The comparison runs only some layers. `head_transform` refuses NaN and infinite weights in all layers.
        head_transform(module)
        context = original_context(module.config)
        if context is not None:
            print(f"rows of up to {context} tokens:")
        _show(compare(context))
    except (ConfigError, CheckpointError) as error:
        print(f"asyncrl check-model: {error}", file=sys.stderr)
        return 2
    # Longer rows have other rotary frequencies.
    if context is not None:
        try:
            past = compare(context + 1)
        except ConfigError as error:
            print(f"rows past {context} tokens: {str(error).removeprefix('model.path: ')}")
            return 0
        print(f"rows past {context} tokens:")
        _show(past)
    return 0


def _show(verdict: Verdict) -> None:
    print(*verdict.lines(), "compared:", *(f"  {result}" for result in verdict.results), sep="\n")
    print(f"in {verdict.seconds:.2f} s")
