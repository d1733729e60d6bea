"""`asyncrl prompts CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [-n 3]`: the first prompts of a run, as the model reads them.

The text is made from the token ids that the run would use: rendered by the chat template, cut where they are too long,
with all special tokens. Order and rows are those of the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.main import split_arguments
from asyncrl.telemetry.output import say_early

USAGE = "usage: asyncrl prompts CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [-n 3]"


def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code: that of the error where there is one."""
    given = list(arguments)
    if not given or "--help" in given or "-h" in given:
        print(USAGE)
        return 0 if given else 2
    try:
        count = _take_count(given)
        files, overrides = split_arguments(given)
        say_early("reading the settings and the rows")
        from asyncrl.config.load import load_config
        from asyncrl.runtime.inputs import check_prompts, first_prompts

        config = load_config(files, overrides)
        check_prompts(config)
        say_early("importing torch and transformers")
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


def _take_count(given: list[str]) -> int:
    """The number after `-n`, taken out of the arguments; 3 without it."""
    if "-n" not in given:
        return 3
    place = given.index("-n")
    text = "".join(given[place + 1 : place + 2])
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"-n is {text!r}; expected a number of prompts, 1 or more\n{USAGE}")
    del given[place : place + 2]
    return int(text)
