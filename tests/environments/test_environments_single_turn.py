"""SingleTurn: the request it makes, and the alignment of the trajectory that comes of the answer."""

from dataclasses import fields

import numpy as np
import pytest
from support.pages import blocks

import asyncrl
from asyncrl.data.texts import CompletionText
from asyncrl.environments.single_turn import SingleTurn, episode_seed
from asyncrl.types import FinishReason, Generation, Prompt, SamplingParams

PINNED = (2008612470849253544, 1873947375212703798)
WORDS = {5: "The", 6: " answer", 7: " is 4", 8: ".\n\nNext", 9: "<eos>"}


class WordTokenizer:
    """Id 9 is the one special token."""

    all_special_ids = (9,)

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(WORDS[i] for i in token_ids if not (skip_special_tokens and i == 9))


def engine(*ids, finish=FinishReason.STOP, stop=None, seen=None):
    async def generate(request):
        if seen is not None:
            seen.append(request)
        count = len(ids)
        return Generation(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=-np.arange(1, count + 1, dtype=np.float32),
            sampled_logprobs=-np.arange(1, count + 1, dtype=np.float32) / 2,
            versions=np.arange(3, 3 + count, dtype=np.int32),
            finish_reason=finish,
            stop=stop,
        )

    return generate


def prompt(text="2+2?", group_id=11):
    return Prompt(group_id=group_id, ids=np.array([1, 2, 3], dtype=np.int32), prompt=text)


def single_turn(**sampling):
    return SingleTurn(WordTokenizer(), SamplingParams(**sampling), seed=0)


async def test_columns_are_aligned_to_prompt_and_completion():
    trajectory = await single_turn(temperature=0.7).run(prompt(), 2, 4, engine(5, 6, 9))
    assert (trajectory.group_id, trajectory.member, trajectory.group_size) == (11, 2, 4)
    assert trajectory.tokens.tolist() == [1, 2, 3, 5, 6, 9]
    assert trajectory.mask.tolist() == [False, False, False, True, True, True]
    assert trajectory.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert trajectory.sampled_logprobs.tolist() == [0, 0, 0, -0.5, -1, -1.5]
    assert trajectory.versions.tolist() == [-1, -1, -1, 3, 4, 5]
    assert trajectory.completion == "The answer"
    assert (trajectory.prompt_length, trajectory.completion_length, trajectory.oldest_version) == (3, 3, 3)
    assert trajectory.temperature == 0.7
    assert trajectory.finish_reason is FinishReason.STOP
    assert trajectory.reward is None
    columns = (trajectory.tokens, trajectory.mask, trajectory.logprobs, trajectory.sampled_logprobs)
    assert [column.dtype for column in (*columns, trajectory.versions)] == [
        np.int32, np.bool_, np.float32, np.float32, np.int32,
    ]  # fmt: skip


async def test_the_request_is_keyed_by_group_and_member():
    seen = []
    environment = single_turn(max_tokens=7)
    for group_id, member in ((11, 0), (11, 1), (12, 0)):
        await environment.run(prompt(group_id=group_id), member, 2, engine(5, seen=seen))
    assert [request.prefix_key for request in seen] == ["11", "11", "12"]
    assert [request.seed for request in seen] == [
        episode_seed(0, 11, 0),
        episode_seed(0, 11, 1),
        episode_seed(0, 12, 0),
    ]
    assert all(request.sampling.max_tokens == 7 and request.prompt_ids.tolist() == [1, 2, 3] for request in seen)


async def test_a_stop_string_stays_in_the_tokens_and_in_the_text_unless_it_is_to_be_cut():
    trajectory = await single_turn(stop=("ever", ".")).run(prompt(), 0, 1, engine(5, 6, 7, 8, stop="."))
    assert trajectory.tokens.tolist()[3:] == [5, 6, 7, 8]
    assert trajectory.mask.tolist()[3:] == [True] * 4
    assert trajectory.completion == "The answer is 4.\n\nNext"
    cut = SingleTurn(WordTokenizer(), SamplingParams(), 0, CompletionText(WordTokenizer(), stop=False))
    assert (await cut.run(prompt(), 0, 1, engine(5, 6, 7, 8, stop="."))).completion == "The answer is 4"


async def test_text_that_was_cut_by_length_stays_whole():
    trajectory = await single_turn(stop=("Next",)).run(prompt(), 0, 1, engine(5, 6, finish=FinishReason.LENGTH))
    assert trajectory.completion == "The answer"
    assert trajectory.finish_reason is FinishReason.LENGTH


async def test_a_conversation_is_answered_by_a_message():
    messages = [{"role": "user", "content": "2+2?"}]
    trajectory = await single_turn().run(prompt(messages), 0, 1, engine(5, 9))
    assert trajectory.completion == [{"role": "assistant", "content": "The"}]


async def test_an_aborted_generation_without_tokens_is_an_empty_trajectory():
    trajectory = await single_turn().run(prompt(), 0, 1, engine(finish=FinishReason.ABORT))
    assert trajectory.completion == ""
    assert (trajectory.completion_length, trajectory.oldest_version) == (0, -1)


def test_episode_seeds_are_stable_and_distinct():
    # Written down: a resumed run, or one on another machine, has to draw the same tokens.
    assert episode_seed(0, 0, 0) == PINNED[0]
    assert episode_seed(7, 123_456_789_012, 15) == PINNED[1]
    seeds = {episode_seed(s, g, m) for s in range(5) for g in range(50) for m in range(16)}
    assert len(seeds) == 5 * 50 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("arguments", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_order_of_the_keys_matters(arguments):
    assert [episode_seed(*arguments) == episode_seed(*other) for other in ((0, 1, 2), (1, 0, 2), (2, 1, 0))].count(
        True
    ) == 1


async def test_the_documented_environment_returns_the_same_trajectory_and_imports_no_more_than_asyncrl_exports():
    _, _, block = blocks("own methods")
    exec(block.text, made := {})
    sampling, text = SamplingParams(temperature=0.7), CompletionText(WordTokenizer())
    environment: asyncrl.Environment = made["Once"](sampling, 0, text)
    seen = []
    found = await environment.run(prompt(), 2, 4, engine(5, 6, 9, seen=seen))
    await environment.run(prompt(), 3, 4, engine(5, 6, 9, seen=seen))
    wanted = await SingleTurn(WordTokenizer(), sampling, 0, text).run(prompt(), 2, 4, engine(5, 6, 9))
    for each in fields(asyncrl.Trajectory):
        ours, own = getattr(wanted, each.name), getattr(found, each.name)
        assert np.array_equal(ours, own) and getattr(ours, "dtype", None) == getattr(own, "dtype", None), each.name
    assert seen[0].seed != seen[1].seed
