"""What the tests of whole runs bring along as a user would: a model of ten thousand parameters, rows, rewards, environments."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.environments.single_turn import SingleTurn

LETTERS = "abcdefgh"
VOCABULARY = ["<pad>", "<eos>", *LETTERS, *"123456789", "=", "[", "]", "?"]
TEMPLATE = (
    "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}={% endif %}"
    "{% if thinking is false %}<eos>{% endif %}"
)


def made(family: str, seed: int, kind: str = "ForCausalLM", **settings: Any) -> tuple[Any, Any]:
    """(model, tokenizer): transformers' class `family` + `kind`, its weights keyed by `seed`; characters as tokens, and no chat
    template."""
    import torch
    import transformers

    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "tie_word_embeddings": True}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes | special | settings)
    return getattr(transformers, family + kind)(config), make_tokenizer()


def build(seed: int) -> tuple[Any, Any]:
    """Qwen3-shaped, one layer."""
    return made("Qwen3", seed, head_dim=16)


def build_other(seed: int) -> tuple[Any, Any]:
    """`build` with other weights, as if the file on a machine were another one."""
    return build(seed + 1)


def judge(seed: int) -> tuple[Any, Any]:
    """A reward model, with other weights on each rank."""
    return made("Qwen2", int(os.environ["RANK"]), "ForSequenceClassification", num_labels=1)


def build_wide(seed: int) -> tuple[Any, Any]:
    """The same with heads of the smallest size that vLLM's attention on CPUs takes."""
    return made("Qwen3", seed, num_hidden_layers=2, head_dim=32)


def build_deep(seed: int) -> tuple[Any, Any]:
    """A hundred thousand parameters: what is done with all of them at once, torch shares among threads."""
    return made("Qwen3", seed, num_hidden_layers=12, head_dim=16)


def build_broken(seed: int) -> tuple[Any, Any]:
    """A weight of the last of four layers is not a number: a model's first layers alone do not show it."""
    model, tokenizer = made("Qwen3", seed, num_hidden_layers=4, head_dim=16)
    model.model.layers[-1].mlp.down_proj.weight.data[0, 0] = float("nan")
    return model, tokenizer


def build_never(seed: int) -> tuple[Any, Any]:
    raise AssertionError("the model was asked for")


def build_experts(seed: int, head_dim: int = 16) -> tuple[Any, Any]:
    """Four experts in each of two layers, two of them a token, balanced by an auxiliary loss."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    experts |= {"output_router_logits": True, "router_aux_loss_coef": 0.01, "initializer_range": 0.1}
    model, tokenizer = made("Qwen3Moe", seed, num_hidden_layers=2, head_dim=head_dim, **experts)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.normal_(std=0.5)
    return model, tokenizer


def build_wide_experts(seed: int) -> tuple[Any, Any]:
    """The same with heads that vLLM takes."""
    return build_experts(seed, head_dim=32)


def build_stateful(seed: int) -> tuple[Any, Any]:
    """A layer with a convolution, whose state a packed row would leak, and one that attends."""
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    return made("Lfm2", seed, **layers)


def build_stretched(seed: int) -> tuple[Any, Any]:
    """Its rotary frequencies are others for rows of more than eight tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
    return made("Llama", seed, rope_parameters=rope)


def build_own_scale(seed: int) -> tuple[Any, Any]:
    """Its rotary frequencies are scaled by a number that it chooses in every forward."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "short_mscale": 1.1}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "long_mscale": 1.3}
    return made("Phimoe", seed, num_local_experts=2, rope_parameters=rope)


def build_windowed(seed: int) -> tuple[Any, Any]:
    """Both layers see the last four tokens only."""
    return made("Mistral", seed, num_hidden_layers=2, head_dim=16, sliding_window=4)


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


def build_chat(seed: int) -> tuple[Any, Any]:
    model, tokenizer = build(seed)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def build_patient(seed: int) -> tuple[Any, Any]:
    """Its tokenizer is saved, the first time, when the run that saves it has written the line of step 6."""
    model, tokenizer = build(seed)
    save, metrics = tokenizer.save_pretrained, Path("runs/run/metrics.jsonl")

    def patient(*arguments: Any, **rest: Any) -> Any:
        if not metrics.exists():  # what a checkpoint needs is tried before the first step
            return save(*arguments, **rest)
        end = time.monotonic() + 60
        while not Path("waited").exists():
            if '"step":6,' in metrics.read_text():
                Path("waited").write_text("saw step 6")
            elif time.monotonic() > end:
                raise TimeoutError("no step came while this was written")
            time.sleep(0.01)
        return save(*arguments, **rest)

    tokenizer.save_pretrained = patient
    return model, tokenizer


def build_wedged(seed: int) -> tuple[Any, Any]:
    """Its ninth forward never comes back, like a collective whose partner is gone."""
    model, tokenizer = build(seed)
    calls = iter(range(10**9))

    def hook(*_: Any) -> None:
        if next(calls) >= 8:
            time.sleep(3600)

    model.model.rotary_emb.register_forward_pre_hook(hook)  # called once a forward, by every path through the decoder
    return model, tokenizer


def rows(count: int = 24) -> list[dict[str, str]]:
    return [{"prompt": f"{LETTERS[i % 8]}{1 + i % 9}=", "answer": LETTERS[i % 8]} for i in range(count)]


def rows_never() -> list[dict[str, str]]:
    time.sleep(3600)
    return rows()


def build_hanging(seed: int) -> tuple[Any, Any]:
    time.sleep(3600)
    return build(seed)


def held_out() -> list[dict[str, str]]:
    return rows(6)


class Hanging:
    """The first groups are played; a later one waits for what never comes."""

    def __init__(self, **offered: Any) -> None:
        self._inner = SingleTurn(**offered)

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        if prompt.group_id >= 4:
            await asyncio.Event().wait()
        return await self._inner.run(prompt, member, group_size, generate)


class Pondering(Hanging):
    """Samples, and then waits for what never comes: later than all who wait for it."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        trajectory = await self._inner.run(prompt, member, group_size, generate)
        if prompt.group_id >= 4 and prompt.group_id % 2 == 1:  # of two ranks: the other one
            await a_tool()
        return trajectory


async def a_tool() -> None:
    await asyncio.Event().wait()


class Endless(Hanging):
    """Samples, and never has enough."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        while prompt.group_id >= 4:
            await self._inner.run(prompt, member, group_size, generate)
        return await self._inner.run(prompt, member, group_size, generate)


class Wedging(Hanging):
    """Blocks the event loop, as user code must not."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        if prompt.group_id >= 4:
            block_the_loop()
        return await self._inner.run(prompt, member, group_size, generate)


def block_the_loop() -> None:
    time.sleep(3600)


class Forking(SingleTurn):
    """Forks once, as a library may, and leaves the child behind."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        fork_once()
        return await super().run(prompt, member, group_size, generate)


def fork_once() -> None:
    if not os.path.exists("forked"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        with open("forked", "w") as file:
            file.write(str(child))


class Wordy(SingleTurn):
    """100 kB of metadata a completion, which rollouts/step_N.jsonl holds and nothing else does."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        played = await super().run(prompt, member, group_size, generate)
        return replace(played, metadata={"thoughts": "x" * 100_000})


class Alien(SingleTurn):
    """No step can train it: the last token is no token of the model, or the routes are missing."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        played = await super().run(prompt, member, group_size, generate)
        if played.routed_experts is not None:
            return replace(played, routed_experts=None)
        tokens = played.tokens.copy()
        tokens[-1] = len(VOCABULARY)
        return replace(played, tokens=tokens)


class Chatty(SingleTurn):
    """Prints, and sees to it that it is seen."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        print("playing " + "x" * 4000, flush=True)
        return await super().run(prompt, member, group_size, generate)


class Thinking(Hanging):
    """A held-out prompt takes its time, so that a signal finds the run in its evaluation."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        if prompt.group_id < 0:
            print("evaluating", flush=True)
            await asyncio.sleep(float(os.environ.get("THINKING_S", "60")))
        return await self._inner.run(prompt, member, group_size, generate)


class Stubborn(Hanging):
    """Its episodes do not take a cancellation for an answer."""

    async def run(self, prompt: Any, member: int, group_size: int, generate: Any) -> Any:
        if prompt.group_id >= 4:
            print("stubborn", flush=True)
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        return await self._inner.run(prompt, member, group_size, generate)
