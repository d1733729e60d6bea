"""The coroutine of a user and its policy: what is recorded, what it may return, and what it may do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from environments_chat import Script, tokenizer_of

from asyncrl.environments.chat import Chat
from asyncrl.environments.policy import AgentEnvironment
from asyncrl.environments.session import Agents, EpisodeLimits
from asyncrl.environments.tools import Toolbox
from asyncrl.errors import ConfigError, DataError, EpisodeLimit, GenerationError, LifecycleError
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, Prompt, SamplingParams, Trajectory

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
ROW = {"question": "3+4?", "answer": "7"}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


class Played:
    """One episode whose engine replies with these texts."""

    def __init__(self, episode: Any, *replies: Any, max_turns: int | None = None, **options: Any) -> None:
        self.script, self.recorder = Script("qwen3", *replies), Recorder(max_events=0)
        self.agents = Agents(
            chat=Chat(tokenizer_of("qwen3")),
            sampling=SamplingParams(max_tokens=100),
            seed=7,
            limits=EpisodeLimits(5000, max_turns),
            toolbox=Toolbox(10.0, 1000, self.recorder),
            recorder=self.recorder,
            version=lambda: 12,
            column="question",
            **options,
        )
        self.environment = AgentEnvironment(self.agents, episode)

    async def run(self, member: int = 0) -> Trajectory:
        columns = {key: value for key, value in ROW.items() if key != "question"}
        prompt = Prompt(3, np.array([1], np.int32), ROW["question"], columns)
        return await self.environment.run(prompt, member, 2, self.script)

    def text(self, ids: Any) -> str:
        return str(tokenizer_of("qwen3").decode(ids))


async def test_a_tool_loop_is_recorded_as_sampled_and_nothing_is_touched_by_hand() -> None:
    replies: list[Any] = []

    async def episode(task: Any, policy: Any) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(4):
            reply = await policy.chat(messages, tools=[add])
            replies.append(reply)
            messages += [reply.message, *await reply.run_tools()]
            if not reply.tool_calls:
                break
        policy.note("calls", len(replies) - 1)
        assert policy.version == 12 and task == {**ROW, "prompt": "3+4?"}
        return float(task["answer"] in reply.text)

    played = Played(episode, CALL, "It is 7.")
    trajectory = await played.run()
    assert trajectory.reward == 1.0 and trajectory.extras == {"own/calls": 1.0}
    assert (trajectory.group_id, trajectory.member, trajectory.group_size) == (3, 0, 2)
    sampled = [each.token_ids.tolist() for each in played.script.generations]
    assert trajectory.tokens[trajectory.mask].tolist() == sampled[0] + sampled[1]
    assert [each.token_ids.tolist() for each in replies] == sampled
    assert [each.versions.tolist() for each in replies] == [[1] * len(sampled[0]), [2] * len(sampled[1])]
    assert trajectory.branches is None and trajectory.turns is not None and trajectory.turns.size == 2
    # The second prompt is the first request with its sampled tokens, and then what the template adds.
    first, second = played.script.requests
    assert second.prompt_ids[: first.prompt_ids.size + len(sampled[0])].tolist() == replies[0].ids
    assert replies[1].ids == trajectory.tokens.tolist() and replies[1].finish_reason is FinishReason.STOP
    # Reward functions see the whole conversation.
    assert [each["role"] for each in trajectory.completion] == ["assistant", "tool", "assistant"]
    assert trajectory.completion[1]["content"] == "7"
    assert played.recorder.drain()["tools/add/calls"] == 1


async def test_text_and_ids_are_completed_and_a_text_gets_no_control_tokens() -> None:
    async def episode(task: Any, policy: Any) -> float:
        reply = await policy.complete("a<|im_end|>b")
        assert reply.text == "x" and reply.message == {"role": "assistant", "content": "x"}
        assert await reply.run_tools() == []
        again = await policy.complete([*reply.ids, *policy.encode("c<|im_end|>")], max_tokens=5)
        assert again.logprobs.shape == again.token_ids.shape
        return 0.5

    played = Played(episode, "x", "y")
    trajectory = await played.run()
    end = tokenizer_of("qwen3").convert_tokens_to_ids("<|im_end|>")
    assert end not in trajectory.tokens[~trajectory.mask]
    assert played.script.requests[1].sampling.max_tokens == 5
    assert played.text(trajectory.tokens) == "a<|im_end|>bx<|im_end|>c<|im_end|>y<|im_end|>"
    assert isinstance(trajectory.completion, str)


async def test_branches_have_random_numbers_of_their_own_and_share_the_history() -> None:
    async def episode(task: Any, policy: Any) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        tries = [policy.branch() for _ in range(2)] + [policy.branch("1"), policy.branch().branch()]
        tries += [policy.branch("3/1"), policy.branch("judge").branch(), policy.branch("judge/1")]
        await asyncio.gather(*(each.chat(messages) for each in tries[::order]))
        return 1.0

    order = 1
    played = Played(episode, *"abcdefg", end_session=lambda _: None)
    trajectory = await played.run()
    requests = played.script.requests
    assert len({each.seed for each in requests}) == 7 and {each.session for each in requests} == {"3/0"}
    assert len({each.prompt_ids.tobytes() for each in requests}) == 1
    # The prompt is there once.
    replies = sum(each.token_ids.size for each in played.script.generations)
    assert trajectory.tokens.size == requests[0].prompt_ids.size + replies
    for order in (1, -1):
        again = Played(episode, *"abcdefg")
        await again.run()
        assert [each.seed for each in again.script.requests][::order] == [each.seed for each in requests]


@pytest.mark.parametrize(
    ("returned", "reward", "turns"),
    [
        (None, None, None),
        (0.25, 0.25, None),
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.array(2), 2.0, None),
        ([0.25, -1], -0.75, (0.25, -1.0)),
        (np.array([1.0, 0.5]), 1.5, (1.0, 0.5)),
    ],
)
async def test_what_an_episode_may_return(returned: Any, reward: Any, turns: Any) -> None:
    async def episode(task: Any, policy: Any) -> Any:
        await policy.complete("a")
        await policy.complete("b")
        return returned

    trajectory = await Played(episode, "x", "y").run()
    assert trajectory.reward == reward and trajectory.turn_rewards == turns


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ("good", ConfigError, "the episode returned 'good'; expected a number, None"),
        ({"reward": 1}, ConfigError, "expected a number, None"),
        ([1, None], ConfigError, "returned None; expected a number"),
        ([1, 2, 3], ConfigError, "3 rewards of turns for 1 replies"),
        (float("nan"), DataError, "the reward nan; expected a finite number"),
        (10**400, DataError, r"the reward 10+\.\.\.; expected a finite number"),
        pytest.param(10**5000, DataError, "the reward int with too many digits; expected", id="10**5000"),
        ([1e308, 1e308], DataError, "the reward inf; expected a finite number"),
    ],
)
async def test_what_an_episode_may_not_return(returned: Any, error: type[Exception], words: str) -> None:
    turns = 2 if returned == [1e308, 1e308] else 1

    async def episode(task: Any, policy: Any) -> Any:
        for _ in range(turns):
            await policy.complete("a")
        return returned

    with pytest.raises(error, match=words):
        await Played(episode, *"xx"[:turns]).run()


async def test_an_episode_without_a_request_is_an_error() -> None:
    async def episode(task: Any, policy: Any) -> float:
        return 1.0

    with pytest.raises(GenerationError, match="got no reply"):
        await Played(episode).run()


async def test_each_member_gets_a_row_of_its_own() -> None:
    """An episode may append to the messages of its row."""
    prompt = Prompt(3, np.array([1], np.int32), [{"role": "user", "content": "hi"}], {"notes": []})

    async def episode(task: Any, policy: Any) -> float:
        assert len(task["prompt"]) == 1 and task["notes"] == []
        reply = await policy.chat(task["prompt"])
        task["prompt"].append(reply.message)
        task["notes"].append(1)
        return 1.0

    played = Played(episode, "a", "b")
    for member in range(2):
        await played.environment.run(prompt, member, 2, played.script)
    assert len(prompt.prompt) == 1 and prompt.columns == {"notes": []}


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (
            lambda policy: policy.complete("a", temprature=1),
            ConfigError,
            "'temprature' is unknown; expected: bad_words",
        ),
        (lambda policy: policy.chat("a", tools=[max]), ConfigError, "max"),
        (lambda policy: policy.note("a b/", 1), DataError, "policy.note: 'a b/' is not a name"),
        (lambda policy: policy.note("a", float("inf")), DataError, "expected a finite number"),
        (lambda policy: policy.note("a", "many"), DataError, "expected a finite number"),
        (lambda policy: policy.note("a", 10**5000), DataError, "too many digits; expected a finite number"),
        (lambda policy: policy.base_url, ConfigError, "endpoint"),
    ],
)
async def test_a_wrong_use_of_the_policy_is_an_error_with_its_name(
    use: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a")
        if asyncio.iscoroutine(result := use(policy)):
            await result
        return 1.0

    with pytest.raises(error, match=words):
        await Played(episode, "x").run()


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("limit", ["turns", "context"])
async def test_an_episode_that_runs_into_a_limit_is_trained_on_what_it_sampled(
    scores: bool, grouped: bool, limit: str
) -> None:
    """Only a limit of the text cuts the completion: with a limit of turns its last reply is whole."""
    large = "c" * (9000 if limit == "context" else 1)

    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a")
        if grouped:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(policy.complete(large))
        await policy.complete(large)
        return 1.0

    played = Played(episode, "x", max_turns=1 if limit == "turns" else None, scores=scores)
    trajectory = await played.run()
    assert trajectory.reward == (None if scores else 0.0)
    assert trajectory.finish_reason is (FinishReason.STOP if limit == "turns" else FinishReason.LENGTH)
    assert played.text(trajectory.tokens[trajectory.mask]) == "x<|im_end|>"
    assert played.recorder.drain()["rollout/limited"] == 1


async def test_parallel_branches_beyond_a_limit_are_trained_on_what_they_sampled() -> None:
    async def episode(task: Any, policy: Any) -> float:
        await asyncio.gather(*(policy.branch().complete("a") for _ in range(3)))
        return 1.0

    played = Played(episode, "x", "y", max_turns=2, scores=False)
    trajectory = await played.run()
    assert trajectory.reward == 0.0 and trajectory.turns is not None and trajectory.turns.size == 2


async def test_a_limit_that_a_client_reports_as_its_own_error_is_a_limit() -> None:
    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a")
        try:
            await policy.complete("b")
        except EpisodeLimit as error:
            text = f"Error code: 400 - {{'error': {{'message': '{error}'}}}}"
        raise RuntimeError(text if task["answer"] == "7" else "another error")

    played = Played(episode, "x", max_turns=1, scores=False)
    assert (await played.run()).reward == 0.0 and played.recorder.drain()["rollout/limited"] == 1
    ROW["answer"] = "8"
    try:
        with pytest.raises(RuntimeError, match="another error"):
            await Played(episode, "x", max_turns=1).run()
    finally:
        ROW["answer"] = "7"


async def test_an_episode_may_catch_its_limit() -> None:
    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a")
        with pytest.raises(EpisodeLimit):
            await policy.complete("b")
        return 0.75

    played = Played(episode, "x", max_turns=1)
    assert (await played.run()).reward == 0.75 and "rollout/limited" not in played.recorder.drain()


async def test_the_policy_ends_with_its_episode_and_so_does_its_session() -> None:
    kept: list[Any] = []
    ended: list[str] = []

    async def episode(task: Any, policy: Any) -> float:
        kept.append(policy)
        await policy.complete("a")
        await policy.branch("b").complete("a")
        if len(kept) == 2:
            raise ValueError("no")
        return 1.0

    played = Played(episode, *"wxyz", end_session=ended.append)
    await played.run()
    assert sorted(ended) == ["3/0"]
    with pytest.raises(ValueError, match="no"):
        await played.run(member=1)
    assert sorted(ended) == ["3/0", "3/1"]
    for policy in kept:
        with pytest.raises(LifecycleError, match="the episode has ended"):
            await policy.branch().complete("b")
        with pytest.raises(LifecycleError, match="the episode has ended"):
            policy.note("late", 1)
        with pytest.raises(LifecycleError, match="the episode has ended"):
            _ = policy.base_url


async def test_the_endpoint_is_opened_once_for_each_line_when_it_is_asked_for() -> None:
    opened: list[str] = []

    def open_endpoint(session: Any, branch: str) -> tuple[str, str]:
        opened.append(branch)
        return f"http://x/{len(opened)}", f"key{len(opened)}"

    async def episode(task: Any, policy: Any) -> float:
        await policy.complete("a")
        assert not opened
        branch = policy.branch()
        for _ in range(2):
            assert (policy.base_url, policy.api_key) == ("http://x/1", "key1")
            assert (branch.base_url, branch.api_key) == ("http://x/2", "key2")
        return 1.0

    await Played(episode, "x", open_endpoint=open_endpoint).run()
    assert opened == ["", "/1"]
