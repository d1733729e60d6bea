"""A session records what an agent asks as a tree of tokens: nothing is tokenized twice, lost, or trained twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from environments_chat import TOOL, Script, oracle, session_of, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.stash import same_trajectory
from asyncrl.environments.chat import Chat
from asyncrl.errors import ConfigError, DataError, EpisodeLimit, GenerationError
from asyncrl.records.check import Limits, check_trajectory
from asyncrl.telemetry.recorder import Recorder
from asyncrl.types import FinishReason, SamplingParams, Trajectory

USER = {"role": "user", "content": "How is the weather in Bonn?"}
CALLS = {
    "qwen3": '<think>\nhm\n</think>\n\n<tool_call>\n{"name":  "look", "arguments": {"city" : "Bonn"}}\n</tool_call>',
    "qwen2_5": '<tool_call>\n{"arguments": {"city":"Bonn"}, "name": "look"}\n</tool_call>',
    "chatml": 'I look.\n\n<tool_call>{"name": "look", "arguments": {"city": "Bonn"}}</tool_call>',
    "llama3_1": '{"name":"look",  "parameters": {"city": "Bonn"}}',
    "gemma3": '<tool_call>\n{"name": "look", "arguments": {"city":  "Bonn"}}\n</tool_call>',
    "gptoss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"city":  "Bonn"}<|call|>'
    ),
    "deepseekv3": (
        "x</think>I look.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>look\n```json\n"
        '{"city":  "Bonn"}\n```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>'
    ).translate({ord("|"): "\uff5c", ord("_"): "\u2581"}),
}


def ids(family: str, text: str) -> list[int]:
    return list(tokenizer_of(family).encode(text, add_special_tokens=False))


def check_rows(trajectory: Trajectory, script: Script) -> None:
    """Each request and its reply is a path of the tree with the reply's own numbers, and nothing else was sampled."""
    starts = [int(np.flatnonzero(trajectory.mask)[0])] if trajectory.turns is None else trajectory.turns.tolist()
    sampled = 0
    for request, generation, start in zip(script.requests, script.generations, starts, strict=True):
        size = generation.token_ids.size
        path = trajectory.path(start + size - 1)
        assert trajectory.tokens[path].tolist() == [*request.prompt_ids.tolist(), *generation.token_ids.tolist()]
        reply = path[-size:]
        assert trajectory.mask[reply].all()
        assert trajectory.logprobs[reply].tolist() == generation.logprobs.tolist()
        assert trajectory.sampled_logprobs[reply].tolist() == generation.sampled_logprobs.tolist()
        assert trajectory.versions[reply].tolist() == generation.versions.tolist()
        sampled += size
    assert trajectory.sampled_length == sampled
    assert (trajectory.versions[~trajectory.mask] == -1).all()


@pytest.mark.parametrize("family", CALLS)
async def test_a_tool_loop_is_one_line_of_tokens(family: str) -> None:
    script = Script(family, CALLS[family], "Sunny in B~", "Bye")
    session = session_of(family, script)
    first = await session.chat([USER], [TOOL])
    assert first.message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"city": "Bonn"}'}
    result = {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "sun"}
    messages = [USER, first.message, result]
    second = await session.chat(messages, [TOOL])
    before = [*first.prompt_ids.tolist(), *first.generation.token_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(before)] == before
    trajectory = session.trajectory(1.0)
    assert trajectory.branches is None
    assert trajectory.turns.tolist() == [len(first.prompt_ids), len(second.prompt_ids)]
    assert trajectory.finish_reason is FinishReason.LENGTH
    check_rows(trajectory, script)


async def test_what_follows_a_reply_is_what_the_template_writes_there() -> None:
    script = Script("qwen2_5", CALLS["qwen2_5"], "Sunny in B~", "Bye")
    session = session_of("qwen2_5", script)
    first = await session.chat([USER], [TOOL])
    messages = [USER, first.message, {"role": "tool", "content": "sun"}]
    second = await session.chat(messages, [TOOL])
    extension = second.prompt_ids[first.prompt_ids.size + first.generation.token_ids.size :].tolist()
    response = "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert extension == ids("qwen2_5", response)
    # A reply that was cut off is closed by the template.
    third = await session.chat([*messages, second.message, USER], [TOOL])
    extension = third.prompt_ids[second.prompt_ids.size + second.generation.token_ids.size :].tolist()
    assert extension == ids(
        "qwen2_5", f"<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    check_rows(session.trajectory(), script)


@pytest.mark.parametrize("family", CALLS)
async def test_the_first_request_is_what_transformers_renders(family: str) -> None:
    script = Script(family, "ok")
    answer = await session_of(family, script).chat([{"role": "system", "content": "Be brief."}, USER])
    assert answer.prompt_ids.tolist() == oracle(
        tokenizer_of(family), [{"role": "system", "content": "Be brief."}, USER]
    )


async def test_thinking_that_the_template_strips_makes_a_branch(caplog: Any) -> None:
    recorder = Recorder()
    script = Script("qwen3", CALLS["qwen3"], "<think>\nso\n</think>\n\nSunny.", "<think>\nbye\n</think>\n\nBye.")
    session = session_of("qwen3", script, recorder=recorder)
    first = await session.chat([USER], [TOOL])
    assert first.message["reasoning_content"] == "hm"
    messages = [USER, first.message, {"role": "tool", "content": "sun"}]
    second = await session.chat(messages, [TOOL])
    assert session.trajectory().branches is None
    messages += [second.message, {"role": "user", "content": "Thanks"}]
    third = await session.chat(messages, [TOOL])
    text = tokenizer_of("qwen3").decode(third.prompt_ids)
    assert "hm" not in text and "so\n" not in text
    trajectory = session.trajectory()
    # The shared beginning ends with the first reply's header, and the first reply is trained where it was sampled.
    assert trajectory.branches.tolist() == [
        [trajectory.turns[1] + second.generation.token_ids.size, first.prompt_ids.size - 1]
    ]
    check_rows(trajectory, script)
    assert recorder.drain() == {"rollout/forks/template": 1}
    assert [record.message for record in caplog.records if "template writes earlier messages" in record.message]


async def test_a_client_that_drops_the_reasoning_continues_its_reply() -> None:
    script = Script("qwen3", CALLS["qwen3"], "Sunny.")
    session = session_of("qwen3", script)
    first = await session.chat([USER], [TOOL])
    message = {key: value for key, value in first.message.items() if key != "reasoning_content"}
    await session.chat([USER, message, {"role": "tool", "content": "sun"}], [TOOL])
    assert session.trajectory().branches is None


async def test_a_request_that_failed_or_was_cancelled_leaves_nothing() -> None:
    blocked, started = asyncio.Event(), asyncio.Event()
    script = Script("chatml", GenerationError("no"), "one", "two")

    async def generate(request: Any) -> Any:
        if not started.is_set():
            started.set()
            await blocked.wait()
        return await script(request)

    session = session_of("chatml", generate, max_turns=2)
    task = asyncio.create_task(session.chat([USER]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(GenerationError, match="no"):
        await session.chat([USER])
    with pytest.raises(GenerationError, match="got no reply"):
        session.trajectory()
    first = await session.chat([USER])
    await session.chat([USER, first.message, USER])
    # Neither the limit of turns nor the random numbers know of the requests that failed.
    assert script.requests[0].seed == script.requests[1].seed != script.requests[2].seed
    script.requests = script.requests[1:]
    check_rows(session.trajectory(), script)
    with pytest.raises(EpisodeLimit, match=r"rollout.max_turns allows 2"):
        await session.chat([USER])


async def test_a_repeated_request_is_another_sample() -> None:
    script = Script("chatml", "one", "two", "three")
    session = session_of("chatml", script)
    one, two = await session.chat([USER]), await session.chat([USER])
    assert script.requests[0].seed != script.requests[1].seed
    assert one.message["content"] != two.message["content"]
    await session.chat([USER, one.message, USER])
    trajectory = session.trajectory()
    check_rows(trajectory, script)
    assert trajectory.tokens.size == sum(g.token_ids.size for g in script.generations) + script.requests[
        2
    ].prompt_ids.size - (script.generations[0].token_ids.size)
    assert session.turns == 3


async def test_a_request_beyond_a_limit_waits_for_those_that_run() -> None:
    """Else the error could end the episode before its first reply, and the whole group would fail."""
    script = Script("chatml", "one", "two", "three")
    session = session_of("chatml", script, max_turns=2)
    tasks = [asyncio.create_task(session.chat([USER])) for _ in range(3)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    assert not pending and len(done) == 3 and session.turns == 2
    with pytest.raises(EpisodeLimit, match=r"rollout.max_turns allows 2"):
        await tasks[2]
    # A request that was cancelled leaves room for the one that waits.
    session = session_of("chatml", script, max_turns=1)
    first, second = (asyncio.create_task(session.chat([USER])) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).message["content"] == "three"
    # A reply that ends early leaves its tokens to the one that waits.
    session = session_of("chatml", Script("chatml", "a~", "b~"), whole=30)
    await asyncio.gather(*(session.sample([1, 2], SamplingParams(max_tokens=28)) for _ in range(2)))
    assert session.turns == 2


@pytest.mark.parametrize(
    ("family", "opening", "keeps"),
    [
        ("qwen3_6", "", {"preserve_thinking": True}),
        ("lfm2_2_5", "<think>", {"preserve_thinking": True}),
        ("nemotron_3_nano", "", {"truncate_history_thinking": False}),
    ],
)
async def test_an_argument_of_the_template_keeps_the_thinking_in_one_line(
    family: str, opening: str, keeps: dict[str, bool]
) -> None:
    for arguments, forks in (({}, 1), (keeps, 0)):
        recorder = Recorder()
        script = Script("qwen3", *(f"{opening}hm\n</think>\n\nSo{n}.<|im_end|>" for n in range(3)))
        script.tokenizer = tokenizer_of(family)
        session = session_of(family, script, recorder=recorder, chat_template_kwargs=arguments)
        messages = [USER]
        for _ in range(3):
            reply = await session.chat(messages)
            messages = [*messages, reply.message, {"role": "user", "content": "Go on"}]
        assert recorder.drain().get("rollout/forks/template", 0) >= forks
        assert (session.trajectory().branches is None) == (not forks), arguments


async def test_the_column_of_a_row_overrides_the_arguments_of_the_template() -> None:
    chat = Chat(tokenizer_of("qwen3"))
    empty = chat.of_row({"chat_template_kwargs": '{"enable_thinking": false}', "answer": "7"})
    assert empty is chat.of_row({"chat_template_kwargs": '{"enable_thinking": false}'}) is not chat.of_row({})
    text = tokenizer_of("qwen3").decode(empty.render([USER]))
    assert text.endswith("<think>\n\n</think>\n\n") and chat.of_row({}) is chat
    with pytest.raises(DataError, match="which the chat template never reads; did you mean 'enable_thinking'"):
        chat.of_row({"chat_template_kwargs": {"enable_thinkin": True}})


@pytest.mark.parametrize("written", [list, json.dumps], ids=["list", "text"])
async def test_the_tools_of_a_row_hold_for_requests_that_have_none(written: Any) -> None:
    """As if the request had brought them; a request with tools of its own has those alone."""
    own = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    call = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    asked, of_row = session_of("qwen3", Script("qwen3", call)), session_of("qwen3", Script("qwen3", call, "x", "x"))
    of_row.chat_format = of_row.chat_format.of_row({"tools": written([TOOL]), "answer": "7"})
    answers = [await asked.chat([USER], [TOOL]), await of_row.chat([USER])]
    assert answers[0].prompt_ids.tolist() == answers[1].prompt_ids.tolist()
    assert (
        answers[0].message == answers[1].message and answers[1].message["tool_calls"][0]["function"]["name"] == "look"
    )
    for tools in ([own], []):
        others = session_of("qwen3", Script("qwen3", "x"))
        answers = [await each.chat([{"role": "user", "content": f"else {tools}"}], tools) for each in (others, of_row)]
        assert answers[0].prompt_ids.tolist() == answers[1].prompt_ids.tolist()


def test_a_column_of_tools_that_the_template_cannot_use_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for family, tools in (("qwen3", ["search", "look"]), ("chatml", [TOOL])):
        chat = Chat(tokenizer_of(family))
        caplog.clear()
        for name in ("a", "b"):
            row = chat.of_row({"tools": tools, "chat_template_kwargs": {}, "name": name})
            assert row.render([USER]).tolist() == chat.render([USER]).tolist()
        chat.of_row({"tools": [*tools, *tools]})
        [named] = caplog.messages
        assert named.startswith(
            "a row has a column `tools` that is no list of tool schemas or that the chat template never reads"
        )


async def test_limits_of_tokens() -> None:
    script = Script("chatml", "one~", "two")
    session = session_of("chatml", script, max_context=80)
    answer = await session.chat([USER], sampling=SamplingParams(max_tokens=1000))
    assert script.requests[0].sampling.max_tokens == 80 - answer.prompt_ids.size
    with pytest.raises(EpisodeLimit, match=r"rollout.max_context allows 80"):
        await session.chat([USER, answer.message, {"role": "user", "content": "long " * 50}])
    check_rows(session.trajectory(), script)


async def test_an_episode_has_one_temperature() -> None:
    session = session_of("chatml", Script("chatml", "one", "two"))
    await session.sample([1, 2], SamplingParams(temperature=0.7))
    with pytest.raises(ConfigError, match=r"temperature 1, .* 0\.7"):
        await session.sample([1, 2])
    assert session.trajectory().temperature == 0.7


async def test_all_branches_together_fit_into_a_microbatch() -> None:
    script = Script("chatml", "one~", "two~", "three~")
    session = session_of("chatml", script, whole=30)
    first, second = await asyncio.gather(
        session.sample([1, 2, 3, 4], SamplingParams(max_tokens=10)),
        session.sample([1, 2], SamplingParams(max_tokens=30)),
    )
    # The second request has the room that the first one leaves: its own prompt may be new, because the first has not ended.
    assert [request.sampling.max_tokens for request in script.requests] == [10, 30 - 4 - 10 - 2]
    tokens = session.trajectory().tokens.size
    assert tokens == 4 + first.token_ids.size + second.token_ids.size
    await session.sample([1], SamplingParams(max_tokens=99))
    assert script.requests[2].sampling.max_tokens == 30 - tokens
    with pytest.raises(EpisodeLimit, match=r"train.tokens_per_microbatch allows 30"):
        await session.sample([9] * 30)


class NaiveTree:
    """The tree of an episode, token by token: prompts share the longest beginning, and each reply is new."""

    def __init__(self) -> None:
        self.children: list[list[tuple[int, int]]] = [[]]

    def add(self, prompt: list[int], reply: list[int]) -> None:
        at, known = self._longest(0, prompt)
        for token in [*prompt[known:], *reply]:
            self.children[at].append((token, len(self.children)))
            at = len(self.children)
            self.children.append([])

    def _longest(self, at: int, prompt: list[int]) -> tuple[int, int]:
        found = [
            self._longest(child, prompt[1:]) for token, child in self.children[at] if prompt and token == prompt[0]
        ]
        node, depth = max(found, key=lambda each: each[1], default=(at, -1))
        return node, depth + 1

    @property
    def size(self) -> int:
        return len(self.children) - 1


TEXTS = ("a", "Hi there", "", "<|im_end|>", "x\n\ny", " ")
STEPS = st.tuples(
    st.sampled_from(["user", "tool", "again", "edit", "drop", "tools", "go on", "fail", "raw"]),
    st.integers(0, 9),
    st.sampled_from(TEXTS),
    st.sampled_from(
        [
            "ok",
            "ok~",
            "<think>\nhm\n</think>\n\nA",
            "<think>\nhm~",
            " spaced ",
            '<tool_call>{"name": "look"}</tool_call>',
        ]
    ),
)


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3_1"])
@settings(deadline=None, max_examples=25)
@given(steps=st.lists(STEPS, max_size=12))
def test_any_sequence_of_requests_is_recorded_exactly(family: str, steps: list[tuple[str, int, str, str]]) -> None:
    """Each row of the tree decodes to a request and its reply, each distinct token is there once, and only replies are sampled."""

    async def play() -> None:
        script = Script(family, routes=True)
        session = session_of(family, script)
        talks: list[tuple[list[Any], list[Any]]] = [([USER], [TOOL])]
        for step, index, text, reply in steps:
            messages, tools = talks[index % len(talks)]
            messages = list(messages)
            if step in ("user", "tool"):
                messages.append({"role": step, "content": text})
            elif step == "edit":
                messages[0] = {"role": "user", "content": text}
            elif step == "drop" and len(messages) > 2:
                messages = messages[2:]
            elif step == "tools":
                tools = [] if tools else [TOOL]
            if messages[-1]["role"] == "assistant" and step != "go on":
                messages.append({"role": "user", "content": text})
            script.replies.append(GenerationError("no") if step == "fail" else reply)
            try:
                if step == "raw":
                    ids = script.requests[index % len(script.requests)].prompt_ids if script.requests else [1]
                    await session.sample(ids[: 1 + index * 9])
                    continue
                answer = await session.chat(messages, tools)
            except (GenerationError, DataError):
                del script.requests[len(script.generations) :]
            else:
                talks.append(([*messages, answer.message], tools))
            script.replies.clear()
        if not script.generations:
            return
        trajectory = session.trajectory(1.0)
        check_rows(trajectory, script)
        naive = NaiveTree()
        for request, generation in zip(script.requests, script.generations, strict=True):
            naive.add(request.prompt_ids.tolist(), generation.token_ids.tolist())
        assert trajectory.tokens.size == naive.size
        assert len({(request.seed) for request in script.requests}) == len(script.requests)
        check_trajectory(trajectory, Limits(max_path_tokens=5000, max_tokens=None, vocabulary=None, routes=(2, 1, 100)))

    asyncio.run(play())


async def test_a_token_keeps_the_experts_of_its_own_sampling() -> None:
    script = Script("chatml", "one", "two", "three", routes=True)
    session = session_of("chatml", script)
    first = await session.chat([USER])
    await session.chat([USER, first.message, USER])
    third = await session.chat([{"role": "user", "content": "Another"}])
    trajectory = session.trajectory()
    routes = trajectory.routed_experts[:, 0, 0]
    assert routes.shape == trajectory.tokens.shape
    rows = [
        trajectory.path(start + g.token_ids.size - 1)
        for start, g in zip(trajectory.turns, script.generations, strict=True)
    ]
    shared = np.intersect1d(rows[1], rows[2])
    assert (routes[rows[0][:-1]] == 1).all() and shared.size and third.prompt_ids.size > shared.size
    # The last token of the first reply went through no layer in its own request.
    assert (routes[rows[1][rows[0].size - 1 : -1]] == 2).all()
    assert (routes[np.setdiff1d(rows[2][:-1], shared)] == 3).all()
    assert routes[rows[1][-1]] == routes[rows[2][-1]] == -1
    script.routes = False
    script.replies = ["four"]
    await session.chat([USER])
    assert session.trajectory().routed_experts.shape[0] == session.trajectory().tokens.size


async def test_experts_of_other_tokens_are_refused() -> None:
    script = Script("chatml", "one", routes=True)

    async def generate(request: Any) -> Any:
        generation = await script(request)
        return replace(generation, routed_experts=generation.routed_experts[1:])

    session = session_of("chatml", generate)
    with pytest.raises(GenerationError, match="experts of"):
        await session.chat([USER])
    with pytest.raises(GenerationError, match="got no reply"):
        session.trajectory()
    assert session.turns == 0


async def test_the_first_conversation_of_a_branch_changes_no_history(caplog: Any) -> None:
    recorder = Recorder()
    script = Script("qwen2_5", "one", "two")
    session = session_of("qwen2_5", script, recorder=recorder)
    await session.chat([USER])
    await session.chat([{"role": "system", "content": "You play the other side."}, USER], branch="other")
    assert recorder.drain() == {} and not caplog.records
    check_rows(session.trajectory(), script)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda messages, tools: (messages, []), "tools"),
        (lambda messages, tools: (messages, [{**TOOL, "extra": 1}]), "tools"),
        (lambda messages, tools: ([{**messages[0], "content": "Edited"}, *messages[1:]], tools), "messages"),
        # A compaction: a summary in place of the history.
        (lambda messages, tools: ([{"role": "user", "content": "So far: sun."}, messages[-1]], tools), "messages"),
        (lambda messages, tools: (messages, [dict(reversed(TOOL.items()))]), None),
    ],
)
async def test_a_changed_history_makes_a_branch_and_says_why(change: Any, cause: str | None, caplog: Any) -> None:
    recorder = Recorder()
    script = Script("qwen2_5", "one", "two", "three")
    session = session_of("qwen2_5", script, recorder=recorder)
    first = await session.chat([USER], [TOOL])
    messages, tools = change([USER, first.message, USER], [TOOL])
    second = await session.chat(messages, tools)
    # What follows continues the branch.
    await session.chat([*messages, second.message, USER], tools)
    trajectory = session.trajectory()
    check_rows(trajectory, script)
    assert recorder.drain() == ({f"rollout/forks/{cause}": 1} if cause else {})
    assert len(trajectory.branches if cause else []) == bool(cause) and len(caplog.records) == bool(cause)


async def test_parallel_branches_do_not_depend_on_their_order() -> None:
    async def play(order: list[int]) -> dict[Any, int]:
        script = Script("chatml", *["x"] * 6)
        session = session_of("chatml", script)
        talks = [("", "one"), ("/1", "one"), ("/2", "one"), ("", "two"), ("/1", "two"), ("", "one")]
        await asyncio.gather(
            *(session.chat([{"role": "user", "content": talks[n][1]}], branch=talks[n][0]) for n in order)
        )
        assert session.turns == 6
        check_rows(session.trajectory(), script)
        seeds: dict[Any, list[int]] = {}
        for request in script.requests:
            seeds.setdefault(request.prompt_ids.tobytes(), []).append(request.seed)
        assert len({seed for each in seeds.values() for seed in each}) == 6
        return {key: sorted(each) for key, each in seeds.items()}

    assert await play([0, 1, 2, 3, 4, 5]) == await play([5, 3, 4, 1, 0, 2])
    other = Script("chatml", "x")
    await session_of("chatml", other, member=1).chat([{"role": "user", "content": "one"}])
    first = Script("chatml", "x")
    await session_of("chatml", first).chat([{"role": "user", "content": "one"}])
    assert other.requests[0].seed != first.requests[0].seed


@pytest.mark.parametrize("branch", [0, 1])
async def test_a_reply_to_the_same_words_goes_on_behind_its_own_tokens(branch: int) -> None:
    """Two branches got the same words for the same request: each goes on behind its own reply, and each reply is trained once."""
    script = Script("chatml", "same", "same", "end")
    session = session_of("chatml", script)
    first, second = [await session.chat([USER], branch=name) for name in ("/0", "/1")]
    assert first.generation.token_ids.tolist() == second.generation.token_ids.tolist()
    await session.chat([USER, second.message, USER], branch=f"/{branch}")
    trajectory = session.trajectory()
    check_rows(trajectory, script)
    assert [int(turn) in trajectory.path(-1) for turn in trajectory.turns[:2]] == [branch == 0, branch == 1]


async def test_sessions_end_at_the_engine() -> None:
    ended: list[str] = []
    script = Script("chatml", "a", "b", "c")
    session = session_of("chatml", script, end_session=ended.append)
    await session.chat([USER])
    await session.chat([USER], branch="/1")
    session.close()
    session.close()
    assert ended == ["3/0"]
    # After the end nobody would free what the engine keeps.
    await session.chat([USER], branch="/2")
    assert [each.session for each in script.requests] == ["3/0", "3/0", None]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_credit_does_not_depend_on_which_branch_is_faster(order: tuple[int, ...]) -> None:
    """Three branches behind a reply, whose prompts share tokens, end in any order. The trajectory is that of the order in which
    they were asked."""

    async def play(order: tuple[int, ...]) -> Trajectory:
        script = Script("chatml", "first", "some words", "b", "of the third", "end", routes=True)
        replied = [asyncio.Event() for _ in range(4)]
        after = {number: before for before, number in itertools.pairwise(order)}

        async def generate(request: Any) -> Any:
            number = len(script.requests) - 1
            generation = await script(request)
            if 0 <= number < 3 and number in after:
                await replied[after[number]].wait()
            return replace(generation, finish_reason=FinishReason.LENGTH) if number == 1 else generation

        session = session_of("chatml", generate)
        first = await session.sample([1, 9])
        begun = [1, 9, *first.token_ids]

        async def branch(number: int) -> Any:
            reply = await session.sample([*begun, 5, 6, 7, *[number] * 3], branch=f"/{number}")
            replied[number].set()
            return reply

        replies = await asyncio.gather(*map(branch, range(3)))
        assert session.trajectory().finish_reason is FinishReason.STOP
        await session.sample([*begun, 5, 6, 7, 1, 1, 1, *replies[1].token_ids, 8])
        trajectory = session.trajectory(15.0, [1.0, 2.0, 3.0, 4.0, 5.0])
        check_rows(trajectory, script)
        assert [int(trajectory.tokens[turn - 1]) for turn in trajectory.turns] == [9, 0, 1, 2, 8]
        assert trajectory.turn_rewards == (1.0, 2.0, 3.0, 4.0, 5.0)
        with pytest.raises(ConfigError, match="2 rewards of turns for 5 replies"):
            session.trajectory(3.0, [1.0, 2.0])
        return trajectory

    found, expected = await play(order), await play((0, 1, 2))
    assert same_trajectory(replace(found, routed_experts=None), replace(expected, routed_experts=None))
    assert found.completion == expected.completion
    assert ((found.routed_experts == -1) == (expected.routed_experts == -1)).all()


HOSTILE = [
    '{"city": 123456789012345678901234567890}',
    '{"city": ' + "[" * 300 + "]" * 300 + "}",
    '{"city": ' + "[" * 700 + "]" * 700 + "}",
    '{"city": ' + "[" * 3000 + "]" * 3000 + "}",
    '{"city": "\\ud800"}',
    '{"city": NaN}',
    '{"city": 1e999}',
]


@pytest.mark.parametrize("arguments", HOSTILE)
async def test_what_a_model_writes_into_a_call_cannot_make_its_episode_fail(arguments: str) -> None:
    script = Script("qwen2_5", f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>', "end")
    session = session_of("qwen2_5", script, max_context=50_000)
    sampling = SamplingParams(max_tokens=20_000)
    answer = await session.chat([USER], [TOOL], sampling)
    await session.chat([USER, answer.message, {"role": "tool", "content": "?"}], [TOOL], sampling)
    trajectory = session.trajectory(1.0)
    check_trajectory(trajectory, Limits())
    assert trajectory.branches is None
    [reply, _, _] = trajectory.completion
    # Arguments are JSON texts, as in OpenAI's form, and a call that is no JSON is a text.
    called = [call["function"]["arguments"] for call in reply.get("tool_calls", ())]
    assert all(isinstance(each, str) for each in called) and bool(called) == (
        answer.message.get("tool_calls") is not None
    )
    assert called or arguments in reply["content"]


async def test_the_completion_of_requests_without_messages_is_a_text() -> None:
    script = Script("chatml", "one", "two")
    session = session_of("chatml", script)
    first = await session.sample(ids("chatml", "Q"))
    await session.sample([*ids("chatml", "Q"), *first.token_ids, *ids("chatml", "more")])
    assert session.trajectory().completion == "one<|im_end|>moretwo"
