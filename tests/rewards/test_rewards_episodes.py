"""Rewards of agents: what a function sees of an episode, rewards of replies, components of one function."""

import numpy as np
import pytest
from rewards_helpers import FILE, pool, pool_of, prompt, trajectories
from support.trajectories import trajectory

from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.calls import RewardSpec
from asyncrl.rewards.forms import UsageError, check_reserved
from asyncrl.rewards.pool import RewardPool


def episode(member, turns, completion, size=2, **rest):
    """`turns`: how many replies, of one token each, with a token of a tool behind each."""
    starts = np.arange(2, 2 + 2 * turns, 2, dtype=np.int32)
    mask = np.isin(np.arange(2 + 2 * turns), starts)
    return trajectory(0, member, size, 2 + 2 * turns, mask=mask, turns=starts, completion=completion, **rest)


def calls(*names):
    return [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]


async def test_a_function_sees_replies_tools_and_notes_and_rewards_each_reply():
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls("add", "sub")},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    given = [
        episode(0, 2, messages, extras={"own/tries": 3.0}),
        episode(1, 1, messages[2:], extras={"own/tries": 0.0, "other": 1}),
    ]
    specs = [RewardSpec(f"{FILE}:of_episodes", weight=0.5), RewardSpec(f"{FILE}:asynchronous")]
    async with pool_of(specs) as rewards:
        first, second = await rewards.score(prompt(other=1), given)
    # 0 + 2 calls + 3, and 1 + 2 calls + 3.
    assert (first.turn_rewards, second.turn_rewards) == ((2.5, 3.0), (0.0,))
    assert first.components["of_episodes"] == 11.0 and first.reward == 5.5 + 0.5
    assert second.reward == 0.5 and second.extras == {"own/tries": 0.0, "other": 1}


VALUES = [
    ("[1, 2]", 3.0, (1.0, 2.0)),
    ("(1, 0.5)", 1.5, (1.0, 0.5)),
    ("__import__('array').array('d', [1, 2])", 3.0, (1.0, 2.0)),
    ("3", 3.0, None),
    ("None", None, None),
]
WRONG = ["[1]", "[1, 2, 3]", "[1, None]", "[1, float('nan')]", "[1, 'x']", "[]", "'12'"]


@pytest.mark.parametrize(("text", "score", "turns"), VALUES)
async def test_rewards_of_replies_are_a_sequence_as_long_as_the_replies(text, score, turns):
    async with pool("per_turn") as rewards:
        [scored] = await rewards.score(prompt(), [episode(0, 2, text, 1)])
    assert (scored.components["per_turn"], scored.reward, scored.turn_rewards) == (score, score, turns)


@pytest.mark.parametrize("text", WRONG)
async def test_other_lists_are_errors_of_their_completion_alone(text):
    async with pool("per_turn", on_error="zero") as rewards:
        bad, good = await rewards.score(prompt(), [episode(0, 2, text), episode(1, 2, "[1, 2]")])
    assert (bad.reward, bad.turn_rewards) == (0.0, None)
    assert (good.reward, good.turn_rewards) == (3.0, (1.0, 2.0))


async def test_an_episode_of_one_reply_takes_a_list_of_one():
    async with pool("per_turn") as rewards:
        [scored] = await rewards.score(prompt(), trajectories("[1]"))
        assert (scored.reward, scored.turn_rewards) == (1.0, (1.0,))
        with pytest.raises(RewardError, match=r"returned \[1, 2\] \(list\) for member 0"):
            await rewards.score(prompt(), trajectories("[1, 2]"))


def test_a_column_with_the_name_of_such_an_argument_is_refused_where_a_function_names_it():
    check_reserved(["notes"], ["completions"], takes_kwargs=True)
    with pytest.raises(UsageError, match="the data has the columns notes"):
        check_reserved(["notes"], ["completions", "notes"], takes_kwargs=True)


# -- components of one function


def parts(**settings):
    section = {"function": f"{FILE}:parts", "name": "both", "weight": 2.0, "components": {"a": 1.0, "b": 0.1}}
    return RewardPool(RewardConfig(functions=[section], **settings))


async def test_the_named_values_of_a_mapping_are_components():
    async with parts() as rewards:
        assert rewards.weights == {"both/a": 2.0, "both/b": 0.2}
        first, second = await rewards.score(prompt(), trajectories("xy", "nothing"))
    assert first.components == {"both/a": 0.5, "both/b": 2.0} and first.reward == pytest.approx(1.4)
    assert first.extras == {"both/seen": 1}
    assert second.components == {"both/a": None, "both/b": None} and second.reward is None


@pytest.mark.parametrize(
    ("text", "components", "message"),
    [
        ("missing", {"both/a": 1.0, "both/b": 0.0}, r"'a': 1.0} \(dict\) for member 1"),
        ("number", {"both/a": 0.0, "both/b": 0.0}, r"0.5 \(float\) in place of a mapping with a, b for member 1"),
        (
            "error",
            {"both/a": 0.0, "both/b": 0.0},
            "it returned ValueError: no judge for member 1; expected finite numb",
        ),
        ("bad", {"both/a": 0.0, "both/b": 1.0}, r"'x' \(str\) for member 1; .* or mappings with 'a', 'b'"),
    ],
)
async def test_a_value_without_them_is_an_error_of_its_completion_alone(text, components, message):
    async with parts(on_error="zero") as rewards:
        good, bad = await rewards.score(prompt(), trajectories("xy", text))
    assert good.components == {"both/a": 0.5, "both/b": 2.0} and bad.components == components
    async with parts() as rewards:
        with pytest.raises(RewardError, match=message):
            await rewards.score(prompt(), trajectories("xy", text))


async def test_components_of_two_functions_need_two_names():
    section = {"function": f"{FILE}:parts", "components": {"a": 1.0}}
    async with RewardPool(RewardConfig(functions=[section, f"{FILE}:half"])) as rewards:
        assert tuple(rewards.weights) == ("parts/a", "half")
    with pytest.raises(ConfigError, match="2 reward functions are named 'parts'"):
        async with RewardPool(RewardConfig(functions=[section, section])):
            pass
