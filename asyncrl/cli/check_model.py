"""`asyncrl check-model PATH`: which of its ways this runtime can train a model in, without a run.

Every path is compared, not only the first that agrees; where rotary frequencies follow the length of a row, for rows within the
original context and past it. The same comparison opens each run (runtime/gate.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.telemetry.output import say_early

if TYPE_CHECKING:
    from asyncrl.runtime.gate import Verdict

USAGE = (
    "asyncrl check-model PATH: compare every path with the model's own eager forward and backward (2: it is refused)"
)


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0, or 2 for a model that is refused. One that is refused past its original context alone can be trained: 0."""
    parser = argparse.ArgumentParser(prog="asyncrl check-model", description=USAGE)
    parser.add_argument("path", help="what model.path takes: a directory, a hub id, or file.py:function")
    parser.add_argument("--gguf-file", help="model.gguf_file")
    parser.add_argument("--random-init", action="store_true", help="model.random_init: only the configuration is read")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="train.gradient_checkpointing")
    parser.add_argument("--lora-rank", type=int, default=0, help="model.lora.rank")
    parser.add_argument("--fsdp", action="store_true", help="distributed.sharding=fsdp")
    given = parser.parse_args(list(arguments))
    say_early(f"looking for {given.path}")
    from asyncrl.config.schema import LoraConfig, ModelConfig
    from asyncrl.errors import AsyncrlError, CheckpointError, ConfigError
    from asyncrl.runtime.inputs import check_model_source

    config = ModelConfig(path=given.path, gguf_file=given.gguf_file, random_init=given.random_init)
    try:
        check_model_source(config)
    except AsyncrlError as error:
        print(f"asyncrl check-model: {error}", file=sys.stderr)
        return 2
    say_early("importing torch and transformers")
    from asyncrl.models.head.output import head_transform
    from asyncrl.models.loading import load_module
    from asyncrl.models.rotary import original_context
    from asyncrl.runtime.gate import check_model

    def compare(longest: int | None) -> Verdict:
        verdict = check_model(
            module,
            longest=longest,
            lora=LoraConfig(rank=given.lora_rank),
            checkpointing=given.gradient_checkpointing,
            sharded=given.fsdp,
            every=True,
        )
        _ = verdict.path
        return verdict

    try:
        module, _ = load_module(config)
        # Refuses weights that are not finite in any layer: not every layer is compared.
        head_transform(module)
        context = original_context(module.config)
        if context is not None:
            print(f"rows of up to {context} tokens:")
        _show(compare(context))
    except (ConfigError, CheckpointError) as error:
        print(f"asyncrl check-model: {error}", file=sys.stderr)
        return 2
    # Each choice of rotary frequencies is compared: a run may stay with either.
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
