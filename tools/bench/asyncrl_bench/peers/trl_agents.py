"""The agents of waiting_agent.py in TRL's `GRPOTrainer`. Runs inside TRL's own environment: `python trl_agents.py JOB.json`.

The random model never writes a call of a tool, so every reply but the last one counts as a call. Two forms, by `trl_form`:

`rollout_func`  TRL's experimental hook for a loop of the user: the trainer's own generation for one reply of all agents, then the
                tools of all agents at the same time, then the next reply
`tools`         `GRPOTrainer(tools=[...])` with a coroutine, and a parser that finds a call in every reply. TRL awaits the calls of
                one reply together, but the replies one after the other

It must not import asyncrl, and no file beside it may be named like a package.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side
import torch
import waiting_agent  # the folder of this script is the first on sys.path
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_step import Clock, answer, settings

ANSWER = "go on"
CALLS = waiting_agent.REPLIES - 1


def agent_settings(job: dict[str, Any], directory: str) -> GRPOConfig:
    """The limit of a reply is that of the generation. `max_completion_length` limits all replies and answers together."""
    config = settings(job, directory)
    config.generation_kwargs = {"min_new_tokens": job["max_tokens"], "max_new_tokens": job["max_tokens"]}
    config.max_completion_length = job["max_context"]
    config.max_tool_calling_iterations = CALLS
    return config


def seconds(job: dict[str, Any]) -> float:
    return waiting_agent.seconds() if job["agent"] == "waiting" else 0.0


def rollout(job: dict[str, Any], tokenizer: Any) -> Callable[..., dict[str, Any]]:
    """All agents of a step, reply by reply."""

    async def wait(agents: int) -> None:
        await asyncio.gather(*(asyncio.sleep(seconds(job)) for _ in range(agents)))

    def play(prompts: Any, trainer: Any) -> dict[str, Any]:
        first = render(tokenizer, prompts)
        rows, masks = list(first), [list[int]() for _ in first]
        for number in range(waiting_agent.REPLIES):
            replies, _ = trainer._generate_single_turn(rows, None, {}, job["group_size"])
            rows = [row + reply for row, reply in zip(rows, replies, strict=True)]
            masks = [mask + [1] * len(reply) for mask, reply in zip(masks, replies, strict=True)]
            if number < CALLS:
                asyncio.run(wait(len(rows)))
                more = answer_ids(tokenizer)
                rows = [row + more for row in rows]
                masks = [mask + [0] * len(more) for mask in masks]
        completions = [row[len(ids) :] for row, ids in zip(rows, first, strict=True)]
        return {"prompt_ids": first, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    return play


def render(tokenizer: Any, conversations: Any) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False).input_ids  # type: ignore[no-any-return]


def answer_ids(tokenizer: Any) -> list[int]:
    """What the template writes behind a reply: the tool's answer, and the beginning of the next reply."""
    before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    prefix = tokenizer.apply_chat_template(before, tokenize=False)
    whole = tokenizer.apply_chat_template(
        [*before, {"role": "user", "content": ANSWER}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(whole.removeprefix(prefix), add_special_tokens=False).input_ids  # type: ignore[no-any-return]


def with_calls(tokenizer: Any) -> None:
    """Every reply is a call of `tool`. TRL asks for a template that shows calls; this one shows them before the first message."""
    shown = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
    tokenizer.chat_template = shown + tokenizer.chat_template
    call = {"type": "function", "function": {"name": "tool", "arguments": {}}}

    def parse(ids: list[int], **given: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}

    tokenizer.response_template = {}  # TRL asks for the parser only if there is one
    tokenizer.parse_response = parse


def main() -> None:
    job = side.job()
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    sampled: list[int] = []  # tokens of the replies of each step
    prompt_tokens: list[int] = []  # tokens of its prompts, once per group

    async def tool() -> str:
        """The tool."""
        await asyncio.sleep(seconds(job))
        return ANSWER

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """The share of vowels in the last reply."""
        answer = answer_ids(tokenizer)
        if job["trl_form"] == "tools":
            # Its answers begin directly behind the stop token, ours behind the line break that the template writes there.
            answer = trainer._get_tool_suffix_ids([{"role": "tool", "name": "tool", "content": ANSWER}])
        sampled.append(sum(len(ids) - CALLS * len(answer) for ids in completion_ids))
        prompt_tokens.append(sum(map(len, render(tokenizer, prompts[:: job["group_size"]]))))
        texts = tokenizer.batch_decode([ids[-job["max_tokens"] :] for ids in completion_ids])
        return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]

    forms: dict[str, dict[str, Any]] = {
        "rollout_func": {"rollout_func": rollout(job, tokenizer)},
        "tools": {"tools": [tool]},
    }
    if job["trl_form"] == "tools":
        with_calls(tokenizer)
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=agent_settings(job, str(Path(sys.argv[1]).parent / "trl")),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        **forms[job["trl_form"]],
    )
    trainer.train()
    answer(job, clock, sampled, prompt_tokens)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
