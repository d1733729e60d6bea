"""Tokenizers with published chat templates, and sessions whose engine replies with given texts."""

from __future__ import annotations

import asyncio
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

# As in a run. transformers imports it for the first schema of a tool, which would block the loop.
import torch  # noqa: F401

from asyncrl.config.schema import DataConfig
from asyncrl.environments.chat import Chat
from asyncrl.environments.session import Agents, EpisodeLimits, Session
from asyncrl.environments.tools import Toolbox
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, GenerationRequest, Prompt, SamplingParams

DEEPSEEK = (
    "begin_of_sentence", "User", "Assistant", "tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end",
    "tool_sep", "tool_outputs_begin", "tool_outputs_end", "tool_output_begin", "tool_output_end", "end_of_sentence",
)  # fmt: skip
# BOS, other special tokens, and the token that ends a reply.
SPECIAL = {
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen2_5": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3_1": (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ),
    "qwen3_5_think": (
        "<|endoftext|>",
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|im_end|>",
    ),
    "glm4moe": ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<|user|>"),
    "gemma3": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "gptoss": (
        "<|startoftext|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
    "deepseekv3": tuple("<\uff5c" + name.replace("_", "\u2581") + "\uff5c>" for name in DEEPSEEK),
}
SPECIAL["llama3_2"] = SPECIAL["llama3_1"]
# Of SmolLM2. It reads neither tools nor reasoning.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful "
    "AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Texts in a template that look like special tokens.
_MARKER = re.compile("<[|\uff5c][^<>'\"{}\\s]*?[|\uff5c]>|<(?:end|start)_of_turn>|<end_of_utterance>|<\\|?turn\\|?>")
ADDED = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def templates() -> dict[str, str]:
    """The chat templates that TRL ships, by family."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@functools.cache
def _core() -> str:
    """A small BPE whose merges cross words and line breaks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(list(templates().values())[:40], trainer)
    return str(core.to_str())


@functools.cache
def tokenizer_of(family: str) -> Any:
    """A tokenizer with the family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(_core())
    template = CHATML if family == "chatml" else templates()[family]
    special = SPECIAL.get(family) or ("<s>", *sorted(set(_MARKER.findall(template))), "</s>")
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=special[0], eos_token=special[-1])
    made.add_special_tokens({"additional_special_tokens": list(special)})
    made.add_tokens([AddedToken(each, special=False) for each in ADDED])
    made.chat_template = template
    return made


def oracle(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """The whole conversation, rendered and tokenized by transformers."""
    given = {"add_generation_prompt": True, "return_dict": False, **options}
    return list(tokenizer.apply_chat_template(messages, tokenize=True, **given))


class Script:
    """The engine of a session: replies with the next text, and keeps the requests. A text that ends with the special token of the
    family's replies has ended, `~` at its end cuts it off by length, and `(text, stop)` ends it with a stop string."""

    def __init__(self, family: str, *replies: Any, routes: bool = False) -> None:
        self.tokenizer, self.end = tokenizer_of(family), SPECIAL[family][-1]
        self.replies, self.requests, self.routes = list(replies), [], routes
        self.generations: list[Generation] = []

    async def __call__(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        text, stop = reply if isinstance(reply, tuple) else (reply, None)
        cut = text.endswith("~")
        if not cut and stop is None and not text.endswith(("<|call|>", "<|eom_id|>", self.end)):
            text += self.end
        ids = np.array(self.tokenizer.encode(text.removesuffix("~"), add_special_tokens=False), np.int32)
        number = len(self.generations) + 1
        logprobs = -np.arange(1, ids.size + 1, dtype=np.float32) / 1000 - number
        rows = request.prompt_ids.size + ids.size
        routes = np.full((rows, 2, 1), number, np.int8) if self.routes else None
        if routes is not None:
            routes[-1] = -1
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        versions = np.full(ids.size, number, np.int32)
        self.generations.append(Generation(ids, logprobs, logprobs - 0.5, versions, reason, routes, stop))
        return self.generations[-1]


def session_of(
    family: str, script: Any, *, member: int = 0, recorder: Any = None, max_turns: int | None = None,
    max_context: int = 5000, whole: int | None = None, end_session: Any = None, **data: Any,
) -> Session:  # fmt: skip
    """A session of a group of 2. `data`: settings of `data`."""
    counts = recorder or Recorder(max_events=0)
    agents = Agents(
        chat=Chat(tokenizer_of(family), DataConfig(**data), recorder=recorder),
        sampling=SamplingParams(),
        seed=7,
        limits=EpisodeLimits(max_context, max_turns, whole),
        toolbox=Toolbox(10.0, 1000, counts),
        recorder=counts,
        version=lambda: 0,
        end_session=end_session,
    )
    return Session(Prompt(3, np.array([1], np.int32), "q"), member, 2, script, agents)
