"""`asyncrl prompts CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [-n 3]`: prints the first prompts of a run.

The prompts are those that the run would train on, in the run's order. Each text is decoded from the prompt's token ids: after the
chat template, with all special tokens, and cut to `data.max_prompt_tokens` if the run would cut the prompt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.main import split_arguments
from asyncrl.telemetry.output import print_early

USAGE = "usage: asyncrl prompts CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [-n 3]"


def main(arguments: Sequence[str]) -> int:
    """Print the prompts. Returns 0; 2 if there are no arguments; or the exit code of an `AsyncrlError`."""
    remaining = list(arguments)
    if not remaining or "--help" in remaining or "-h" in remaining:
        print(USAGE)
        return 0 if remaining else 2
    try:
        count = _take_count(remaining)
        files, overrides = split_arguments(remaining)
        print_early("reading the settings and the rows")
        from asyncrl.config.load import load_config
        from asyncrl.runtime.inputs import check_prompts, first_prompts

        config = load_config(files, overrides)
        check_prompts(config)
        print_early("importing torch and transformers")
        prompts, notes = first_prompts(config, count)
        for prompt, text in prompts:
            columns = ", ".join(map(str, prompt.columns)) or "none"
            print(f"--- group {prompt.group_id}: {prompt.ids.size} tokens; other columns: {columns}")
            print(f"{text}[end of prompt]\n")
        for line in notes:
            print(f"note: {line}")
        return 0
    except AsyncrlError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _take_count(arguments: list[str]) -> int:
    """Remove `-n COUNT` from `arguments`. Returns the count, 3 by default. Errors: ConfigError."""
    if "-n" not in arguments:
        return 3
    index = arguments.index("-n")
    # Empty if `-n` is the last argument.
    text = "".join(arguments[index + 1 : index + 2])
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise ConfigError(f"-n is {text!r}; expected a number of prompts, 1 or more\n{USAGE}")
    del arguments[index : index + 2]
    return int(text)
