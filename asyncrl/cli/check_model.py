"""`asyncrl check-model PATH`: compares each path of this runtime (fused, packed, plain) with the model in eager transformers.

A run makes the same comparison at its start, but stops at the first path that agrees (runtime/gate.py). If the model's rotary
frequencies depend on the length of a row, rows within the original context and longer rows are compared separately.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.telemetry.output import print_early

if TYPE_CHECKING:
    from asyncrl.runtime.gate import Verdict

USAGE = "asyncrl check-model PATH: compare every path with the model's eager forward and backward (exit 2: refused)"


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0, or 2 for a refused model. A model refused only for rows past its original context can be trained: 0."""
    parser = argparse.ArgumentParser(prog="asyncrl check-model", description=USAGE)
    parser.add_argument("path", help="model.path: a directory, a hub id, or file.py:function")
    parser.add_argument("--gguf-file", help="model.gguf_file")
    parser.add_argument("--random-init", action="store_true", help="model.random_init: only the configuration is read")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="train.gradient_checkpointing")
    parser.add_argument("--lora-rank", type=int, default=0, help="model.lora.rank")
    parser.add_argument("--fsdp", action="store_true", help="distributed.sharding=fsdp")
    options = parser.parse_args(list(arguments))
    print_early(f"looking for {options.path}")
    from asyncrl.config.schema import LoraConfig, ModelConfig
    from asyncrl.errors import AsyncrlError, CheckpointError, ConfigError
    from asyncrl.runtime.inputs import check_model_source

    config = ModelConfig(path=options.path, gguf_file=options.gguf_file, random_init=options.random_init)
    try:
        check_model_source(config)
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
            lora=LoraConfig(rank=options.lora_rank),
            checkpointing=options.gradient_checkpointing,
            sharded=options.fsdp,
            every=True,
        )
        _ = verdict.path  # raises if no path agrees
        return verdict

    try:
        module, _ = load_module(config)
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
