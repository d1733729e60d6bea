"""The text of a completion: of exactly the sampled ids, cut where the engine found the stop string, as its settings say."""

from __future__ import annotations

from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.load import load_config
from asyncrl.config.schema_rollouts import RolloutConfig
from asyncrl.data.texts import CompletionText, Turn, eos_token_ids, notes
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generation.embedded.stops import StopStrings
from asyncrl.generation.requests import check_request, sampling_params
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Generation, GenerationRequest, SamplingParams

SPECIALS = ["<pad>", "<end>", "<|turn|>", "<|stop|>", "<answer>"]
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:OPEN{% endif %}"
)
WORDS = ["▁it", "▁is", "▁4", "▁.", "▁DONE", "DO", "NE", "x", "▁<think>", "\n", ":"]


def characters() -> tuple[Any, Any]:
    letters = [*SPECIALS, *dict.fromkeys("abcdefghijklmnopqrstuvwxyzDONE0123456789 .<>/|:=\n")]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(letters)}, unk_token="<pad>"))
    return core, (pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse())


def byte_level() -> tuple[Any, Any]:
    alphabet = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    return core, (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def pieces() -> tuple[Any, Any]:
    words = [*SPECIALS, *WORDS, "▁", *"abcdefghijklmnopqrstuvwyz<>|Q789"]
    core = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    return core, (pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first"))


def make(kind: Any, opening: str = "", eos: str | None = "<end>") -> PreTrainedTokenizerFast:
    core, (core.pre_tokenizer, core.decoder) = kind()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    made.chat_template = TEMPLATE.replace("OPEN", opening)
    made.clean_up_tokenization_spaces = True
    return made


def generation(ids: list[int], stop: str | None = None, reason: FinishReason = FinishReason.STOP) -> Generation:
    zeros = np.zeros(len(ids), np.float32)
    return Generation(np.array(ids, np.int32), zeros, zeros, zeros.astype(np.int32), reason, stop=stop)


@pytest.mark.parametrize("kind", [characters, byte_level, pieces])
@pytest.mark.parametrize("said", ["it is 4 . DONE", "x<answer>it is 4<|turn|> .", "it is<answer>"])
def test_the_text_is_that_of_the_sampled_ids(kind: Any, said: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(said, add_special_tokens=False)
    exact = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert exact == said
    assert CompletionText(tokenizer)(generation(ids, reason=FinishReason.LENGTH)) == exact
    ended = generation([*ids, tokenizer.eos_token_id])
    assert CompletionText(tokenizer)(ended) == exact
    as_trl = tokenizer.decode(ended.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    recorder = Recorder()
    assert CompletionText(tokenizer, special_tokens=False, recorder=recorder)(ended) == as_trl
    special = sum(each in tokenizer.all_special_ids for each in ids)
    assert recorder.drain() == ({"text/special_tokens_left_out": special} if special else {})


@pytest.mark.parametrize("kind", [characters, byte_level, pieces])
@pytest.mark.parametrize(
    ("said", "stops", "before"),
    [
        ("it is 4 . DONE", (" . DONE",), ("it is 4", "it is 4")),
        ("it is<answer>DONE", ("DONE", "ONE"), ("it is<answer>", "it is")),
        ("it is<answer>", ("<answer>",), ("it is", "it is")),
        ("it is<answer>", ("wer>",), ("it is<ans", "it is")),
        ("it<answer>is 4", ("tis",), None),  # the text has a token in between
    ],
)
def test_a_stop_is_searched_in_the_text_that_is_cut(
    kind: Any, said: str, stops: tuple[str, ...], before: tuple[str, str] | None
) -> None:
    tokenizer = make(kind)
    ids, search = tokenizer.encode(said, add_special_tokens=False), StopStrings(tokenizer, stops)
    found = [search.hit(np.array(ids[:end], np.int64)) for end in range(1, len(ids) + 1)]
    assert found[:-1] == [None] * (len(ids) - 1)
    if before is None:
        assert found[-1] is None
        return
    recorder, ended = Recorder(), generation(ids, found[-1])
    assert CompletionText(tokenizer)(ended) == said  # as TRL, whose texts hold the stop string
    texts = [CompletionText(tokenizer, special_tokens=s, stop=False, recorder=recorder)(ended) for s in (True, False)]
    assert tuple(texts) == before
    assert recorder.drain()["text/stops_left_out"] == 2


def test_a_plain_stop_token_is_in_the_text_unless_stops_are_cut() -> None:
    tokenizer = make(characters)
    ended = generation(tokenizer.encode("it is.", add_special_tokens=False))
    assert CompletionText(tokenizer)(ended) == "it is."
    assert CompletionText(tokenizer, stop=False)(ended) == "it is"


@pytest.mark.parametrize("stop", [("DONE", ""), ("",), "DONE"])
def test_an_empty_stop_string_is_refused_by_name(stop: Any) -> None:
    request = GenerationRequest(np.array([1], np.int32), SamplingParams(stop=stop, max_tokens=2), 0)
    with pytest.raises(GenerationError, match=r"stop is .*strings of 1 to 512 characters"):
        check_request(request, 9)


@pytest.mark.parametrize("opening", ["", "<think>", "<think>\n\n</think>\n\n"])
def test_what_the_template_opened_stands_in_front_where_it_is_asked_for(opening: str) -> None:
    tokenizer = make(byte_level, opening)
    messages = [{"role": "user", "content": "assistant:?"}]
    bare, ready = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=each) for each in (False, True)
    )
    prompt = np.array(tokenizer.encode(ready, add_special_tokens=False), np.int32)
    ended = generation([*tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id])
    recorder = Recorder()
    text = CompletionText(tokenizer, recorder=recorder)
    assert text.turn == Turn("<|turn|>assistant:", opening, "<|stop|><|turn|>user:")
    assert text.generation_prompt(prompt) == ready.removeprefix(bare)
    assert text(ended, prompt) == "4" and recorder.drain().get("text/openings_left_out") == (1 if opening else None)
    assert CompletionText(tokenizer, opened=True)(ended, prompt) == opening + "4"


@pytest.mark.parametrize(
    ("name", "opening", "ends"),
    [
        ("qwen2_5", "", "<|im_end|>"),
        ("qwen3_6", "<think>\n", "<|im_end|>"),
        ("nemotron_3_nano", "<think>\n", "<|im_end|>"),
        ("deepseek_r1_distill", "<think>\n", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("gemma3", "", "<end_of_turn>"),
        ("llama3_1", "", "<|eot_id|>"),
        ("gptoss", "", "<|end|>"),
    ],
)
def test_the_turns_of_published_templates(name: str, opening: str, ends: str) -> None:
    """TRL brings the templates of the models."""
    pytest.importorskip("trl", reason="the oracle comes with the extra `oracle`")
    tokenizer = make(characters)
    tokenizer.bos_token = "<pad>"
    tokenizer.chat_template = files("trl").joinpath(f"chat_templates/{name}.jinja").read_text("utf-8")
    messages = [{"role": "user", "content": "hi"}]
    bare, ready = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=each) for each in (False, True)
    )
    turn = Turn.of(tokenizer, {})
    assert turn.opening == opening and turn.closing.startswith(ends)
    assert turn.head + turn.opening == ready.removeprefix(bare)


def said_at_start(tokenizer: Any, *overrides: str, ends: Any = None) -> tuple[list[str], list[str]]:
    config = load_config([], ["model.path=m", *overrides])
    module = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
    stops = sampling_params(config.rollout, tokenizer).stop_token_ids
    return notes(config, tokenizer, (*eos_token_ids(module, tokenizer), *stops))


@pytest.mark.parametrize(
    ("overrides", "ends", "eos", "words"),
    [
        ((), None, "<end>", "ends turns with '<|stop|>', which ends no completion (tokens that end a completion: '<end>')"),
        ((), None, None, "every completion runs to rollout.max_tokens = 256"),
        ((), [1, 3], "<end>", ""),
        ((), None, "<|stop|>", ""),
        (("rollout.stop_token_ids=['<|stop|>']",), None, "<end>", ""),
        (("rollout.stop_token_ids=[3]",), None, None, ""),
        (("rollout.stop=['<|turn|>']",), None, "<end>", ""),
        (("data.template=raw",), None, "<end>", ""),
        (("rollout.ignore_eos=true",), None, None, ""),
    ],
)  # fmt: skip
def test_a_template_whose_turns_end_otherwise_is_named(
    overrides: tuple[str, ...], ends: Any, eos: str | None, words: str
) -> None:
    endless, _ = said_at_start(make(characters, eos=eos), *overrides, ends=ends)
    assert words in "".join(endless) and len(endless) == bool(words)


def test_stop_tokens_by_id_and_by_text() -> None:
    tokenizer = make(characters)
    assert sampling_params(RolloutConfig(stop_token_ids=(7, "<|stop|>")), tokenizer).stop_token_ids == (7, 3)
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids has '<\|end\|>', which .* 7 tokens"):
        sampling_params(RolloutConfig(stop_token_ids=("<|end|>",)), tokenizer)
