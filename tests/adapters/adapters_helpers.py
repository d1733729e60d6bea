"""A small chat model that says one of a few texts, and a run that plays episodes with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl import Runtime, Trajectory, load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
sys.path.append(str(EXAMPLES))

ROLES = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<system>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHARACTERS = [chr(code) for code in (10, *range(32, 127))]


def call_of(name: str, arguments: str) -> str:
    """The text of a call of a tool. `arguments`: JSON."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def chat_model(seed: int, replies: Sequence[str]) -> tuple[Any, Any]:
    """(model, tokenizer). Each of `replies` is one token. After a few supervised batches the model says one of them, at random."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = [*ROLES, *CHARACTERS, *(each for each in replies if each not in CHARACTERS)]
    tokens = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    # Ordinary tokens of several characters: they are found in text before it is split.
    tokens.add_tokens([AddedToken(each, normalized=False) for each in replies if each not in CHARACTERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", additional_special_tokens=ROLES[2:]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    if model.device.type == "meta":
        return model, tokenizer
    said = torch.tensor(tokenizer.convert_tokens_to_ids(list(replies)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(80):
        # Random characters and marks. Every <assistant> is followed by a reply, and every reply by <end>.
        ids = torch.randint(2, len(names), (8, 128))
        ids[:, 8::16], ids[:, 9::16], ids[:, 10::16] = 3, said[torch.randint(0, len(said), (8, 8))], 1
        labels = torch.full_like(ids, -100)
        labels[:, 9::16], labels[:, 10::16] = ids[:, 9::16], 1
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


@asynccontextmanager
async def open_run(build: str, *overrides: str) -> AsyncIterator[Runtime]:
    """A run of two groups a step, which trains the model of `build` (`file.py:function`)."""
    settings = {
        "model.path": build,
        "model.dtype": "float32",
        "threads": 1,
        "data.max_prompt_tokens": 2500,
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 4,
        "rollout.retries": 0,
        "rollout.max_failed_groups": 9,
        "checkpoint.save_final": "false",
    }
    given = [f"{name}={value}" for name, value in settings.items()]
    async with Runtime(load_config([], [*given, *overrides]), write=False) as runtime:
        yield runtime


async def cancel_play(runtime: Runtime, episode: Any, task: Any, is_there: Callable[[], object]) -> None:
    """Play one episode, and cancel it once `is_there`."""
    playing = asyncio.create_task(runtime.play(episode, task, n=1))
    while not is_there():
        assert not playing.done(), playing.exception()
        await asyncio.sleep(0.01)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled()


def turns_of(trajectory: Trajectory) -> int:
    return 1 if trajectory.turns is None else len(trajectory.turns)
