"""The prompts of a run, opened and tokenized before it starts. Everything here blocks: call it on a thread."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource
from asyncrl.data.prompts_files import Rows
from asyncrl.data.prompts_sources import load_rows
from asyncrl.data.texts import decode
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generation.requests import check_tokens, sampling_params
from asyncrl.generation.worker.wire import check_size
from asyncrl.types import GenerationRequest, Prompt

from .inputs import forget_rows, rows_of


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """What is known of the prompts before a run: tokens of the `longest` one, and how it is known."""

    longest: int
    how: str
    notes: tuple[str, ...] = ()  # what people should know of how they are rendered


def measure_prompts(config: Config, given: Rows | None = None, own_environment: bool = False) -> PromptLengths:
    """Of the run's prompts, with its tokenizer: rows of files, of functions and of the hub, which a run has read by then
    (inputs.py). The configured limit where nobody can list them. `given`: rows instead of `data.train`; `own_environment`: the
    program brings one.

    A prompt that turns out longer is served all the same: its sequence waits for room. Errors: DataError, ConfigError.
    """
    limit = config.data.max_prompt_tokens
    _check_sampling(config)
    if own_environment or config.rollout.environment != "single_turn":
        return PromptLengths(limit, "data.max_prompt_tokens: the environment writes prompts of its own")
    if given is None and config.data.train is None:
        return PromptLengths(limit, "data.max_prompt_tokens: the prompts come from outside, while the run goes on")
    from asyncrl.models.loading import load_tokenizer_of  # transformers takes seconds to import

    tokenizer = load_tokenizer_of(config.model)
    sources = [] if given is None else [given]
    for name in (config.data.train if given is None else None, config.data.eval if config.evaluate.every else None):
        if name is not None:
            sources.append(rows_of(name))
    cut = {} if config.data.overlong == "skip" else {"overlong": "cut"}  # what is refused is told by `load_prompts`
    found = [PromptSource(rows, tokenizer, config.data.model_copy(update=cut)) for rows in sources]
    longest, seen = zip(*(source.longest() for source in found), strict=True)
    rows = sum(len(source) for source in found)
    sampled = "" if sum(seen) == rows else ", a sample; a longer one waits for room"
    notes = tuple(line for source in found for line in source.notes())
    return PromptLengths(max(1, *longest), f"the longest of {sum(seen)} of {rows} prompts{sampled}", notes)


def _check_sampling(config: Config) -> None:
    """The tokens that are named in `rollout`, without the model's weights. Errors: ConfigError."""
    if not (config.rollout.logit_bias or config.rollout.bad_words or config.rollout.stop_token_ids):
        return
    from asyncrl.models.loading import describe_module, load_tokenizer_of

    sampling = sampling_params(config.rollout, load_tokenizer_of(config.model))
    vocabulary = int(describe_module(config.model).config.get_text_config().vocab_size)
    request = GenerationRequest(np.zeros(1, np.int32), sampling, 0)
    try:
        check_tokens(request, vocabulary, has_tokenizer=True)
        check_size(request)
    except GenerationError as error:
        raise ConfigError(f"rollout.logit_bias, bad_words, stop_token_ids: {error}") from error


def first_prompts(config: Config, count: int) -> tuple[list[tuple[Prompt, str]], list[str]]:
    """The first `count` prompts of a run, each with the text of its token ids: what the model reads, special tokens included; and
    what people should know of them.

    After `check_prompts`. Errors: ConfigError, DataError.
    """
    assert config.data.train is not None
    from asyncrl.models.loading import load_tokenizer_of

    tokenizer = load_tokenizer_of(config.model)
    source = PromptSource(rows_of(config.data.train), tokenizer, config.data, seed=config.seed, max_epochs=1)
    shown = [(prompt, decode(tokenizer, prompt.ids.tolist())) for prompt in islice(iter(source.next, None), count)]
    return shown, source.notes()


def load_prompts(
    config: Config, tokenizer: Any, world: World, given: Rows | None
) -> tuple[PromptSource | None, list[Prompt], list[str]]:
    """(the cursor over the training prompts, the held-out prompts, lines for people). None: groups come from outside (embedding,
    `door.ring`).

    `given`: rows instead of `data.train`. Errors: DataError, over-long prompts under `overlong: refuse` included.
    """
    rows = given
    if rows is None and config.data.train is not None:
        rows = rows_of(config.data.train)
    elif rows is None and config.train.kind == "dry_run" and config.door.ring is None:
        rows = load_rows([{"prompt": f"dry-run prompt number {number}"} for number in range(256)])
    prompts = None if rows is None else _source(rows, config, tokenizer, world)
    held_out: list[Prompt] = []
    notes = [] if prompts is None else prompts.notes()
    if config.data.eval is not None and config.evaluate.every is not None:
        data = config.data.model_copy(update={"shuffle": False})
        source = PromptSource(rows_of(config.data.eval), tokenizer, data, seed=config.seed, max_epochs=1)
        held_out = list(iter(source.next, None))
        notes += source.notes()
    forget_rows()
    return prompts, held_out, list(dict.fromkeys(notes))


def _source(rows: Rows, config: Config, tokenizer: Any, world: World) -> PromptSource:
    prompts = PromptSource(
        rows,
        tokenizer,
        config.data,
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        max_epochs=config.train.max_epochs,
    )
    if config.data.overlong == "refuse":
        prompts.check_all()
    else:
        prompts.longest()  # for what `notes` tells
    return prompts
