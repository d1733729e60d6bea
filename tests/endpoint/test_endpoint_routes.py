"""Every route answers with the tokens, log-probs and versions that the session recorded, in the form of its protocol."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("aiohttp", reason="needs the extra [http]")

from endpoint_helpers import ASK, CALL, opened
from environments_chat import TOOL, Script, tokenizer_of
from generation_models import opened as open_engine
from generation_models import policy_and_plain

TOOLS: dict[str, Any] = {
    "/v1/chat/completions": TOOL,
    "/v1/responses": {"type": "function", **TOOL["function"]},
    "/v1/messages": {"name": "look", "description": "Looks.", "input_schema": TOOL["function"]["parameters"]},
}


def bodies(**more: Any) -> dict[str, dict[str, Any]]:
    return {
        "/v1/chat/completions": {**ASK, "logprobs": True, "top_logprobs": 0, **more},
        "/v1/responses": {"input": ASK["messages"], "include": ["message.output_text.logprobs"], **more},
        "/v1/messages": {"messages": ASK["messages"], "max_tokens": 50, **more},
    }


@pytest.mark.parametrize("path", TOOLS)
async def test_a_request_without_tools_has_those_of_the_row_unless_it_chooses_none(path: str) -> None:
    none: Any = {"type": "none"} if path == "/v1/messages" else "none"
    script = Script("qwen2_5", *[CALL] * 3)
    async with opened(script, chat_template_kwargs={"tools": [TOOL]}) as o:
        for more in ({"tools": [TOOLS[path]]}, {}, {"tool_choice": none}):
            status, reply = await o.post(path, bodies(**more)[path])
            assert status == 200 and ("tool_call>" in json.dumps(reply)) == ("tool_choice" in more), reply
            assert reply.get("tool_choice", "") in ("", "none" if more.get("tool_choice") else "auto")
    given, of_row, chosen = (script.tokenizer.decode(request.prompt_ids) for request in script.requests)
    assert given == of_row and "Looks." in of_row and "Looks." not in chosen


@pytest.mark.parametrize("path", TOOLS)
async def test_a_tool_loop_is_one_line_of_tokens_on_every_route(path: str) -> None:
    script = Script("qwen2_5", "I look. " + CALL, "Sunny")
    async with opened(script) as o:
        body = bodies(tools=[TOOLS[path]], return_token_ids=True)[path]
        status, first = await o.post(path, body)
        assert status == 200, first
        if path == "/v1/chat/completions":
            [choice] = first["choices"]
            assert choice["finish_reason"] == "tool_calls"
            [call] = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Bonn"}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
            body["messages"] = [*body["messages"], choice["message"], result]
            fields = first | choice
        elif path == "/v1/responses":
            message, call = first["output"]
            assert message["content"][0]["text"] == "I look." and json.loads(call["arguments"]) == {"city": "Bonn"}
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
            body["input"] = [*body["input"], message, call, result]
            fields = first
        else:
            assert first["stop_reason"] == "tool_use" and first["content"][1]["input"] == {"city": "Bonn"}
            result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "18 degrees"}
            reply = {"role": "assistant", "content": first["content"]}
            body["messages"] = [*body["messages"], reply, {"role": "user", "content": [result]}]
            fields = first
        assert fields["token_ids"] == script.generations[0].token_ids.tolist()
        assert fields["prompt_token_ids"] == script.requests[0].prompt_ids.tolist()
        assert fields["policy_versions"] == [[1, len(fields["token_ids"])]]
        status, second = await o.post(path, body)
        assert status == 200, second
        trajectory = o.session.trajectory(1.0)
        assert trajectory.branches is None and trajectory.turns is not None and trajectory.turns.size == 2
        assert trajectory.sampled_length == sum(each.token_ids.size for each in script.generations)


@pytest.mark.parametrize("path", TOOLS)
async def test_a_stream_has_what_the_answer_has(path: str) -> None:
    async with opened(Script("qwen2_5", "Sunny", "Sunny")) as o:
        body = bodies(return_token_ids=True)[path]
        _, whole = await o.post(path, body)
        status, text = await o.post(path, body | {"stream": True})
        assert status == 200 and isinstance(text, str)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if path == "/v1/chat/completions":
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Sunny"}
            assert (
                events[0]["choices"][0]["logprobs"]["content"][0]["token"]
                == (whole["choices"][0]["logprobs"]["content"][0]["token"])
            )
            assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            assert events[0]["choices"][0]["finish_reason"] == "stop" and text.endswith("data: [DONE]\n\n")
        elif path == "/v1/responses":
            last = events[-1]["response"]
            assert events[-1]["type"] == "response.completed" and last["token_ids"] == whole["token_ids"]
            assert [each["sequence_number"] for each in events] == list(range(len(events)))
            # A client adds the deltas to the part that was added.
            [part] = [each["part"] for each in events if each["type"] == "response.content_part.added"]
            [delta] = [each for each in events if each["type"] == "response.output_text.delta"]
            assert (part["text"], part["logprobs"], delta["delta"]) == ("", [], "Sunny")
            assert len(delta["logprobs"]) == len(whole["token_ids"])
        else:
            assert events[0]["message"]["token_ids"] == whole["token_ids"]
            assert events[2]["delta"] == {"type": "text_delta", "text": "Sunny"}


async def test_logprobs_are_those_of_the_tokens_byte_for_byte() -> None:
    script = Script("qwen2_5", "Sunny in Bonn", "One", "Two")
    async with opened(script) as o:
        _, reply = await o.post("/v1/chat/completions", bodies()["/v1/chat/completions"])
        content = reply["choices"][0]["logprobs"]["content"]
        generation = script.generations[0]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in generation.token_ids]
        assert [each["token_id"] for each in content] == generation.token_ids.tolist()
        assert np.array([each["logprob"] for each in content], np.float32).tolist() == generation.logprobs.tolist()
        assert "token_ids" not in reply["choices"][0]

        prompt = o.session.chat_format.encode("Is it").tolist()
        status, reply = await o.post(
            "/inference/v1/generate", {"token_ids": prompt, "sampling_params": {"logprobs": 1}}
        )
        assert status == 200 and reply["choices"][0]["token_ids"] == script.generations[1].token_ids.tolist()
        assert reply["choices"][0]["policy_versions"] == [[2, script.generations[1].token_ids.size]]

        status, reply = await o.post("/v1/completions", {"prompt": "Is it", "logprobs": 0, "return_token_ids": True})
        assert status == 200 and reply["choices"][0]["text"] == "Two" and reply["prompt_token_ids"] == prompt
        assert len(reply["choices"][0]["logprobs"]["token_logprobs"]) == len(reply["choices"][0]["token_ids"])
        assert o.session.turns == 3


async def test_top_logprobs_of_a_first_token_are_those_of_the_model() -> None:
    """As OpenEnv's `validate_llm` asks: twice the temperature means half the distance of two log-probs."""
    tokenizer = tokenizer_of("qwen2_5")
    policy, plain = policy_and_plain("qwen3", vocabulary=len(tokenizer))
    gaps = []
    async with open_engine(policy, max_context=256) as engine, opened(engine.engine.generate, max_turns=2) as o:
        for temperature in (1.0, 2.0):
            more = {"temperature": temperature, "max_tokens": 1, "logprobs": True, "top_logprobs": 5}
            _, key = o.endpoint.open(None)
            status, reply = await o.post("/v1/chat/completions", ASK | more | {"return_token_ids": True}, key)
            assert status == 200, reply
            with torch.no_grad():
                logits = plain(torch.tensor([reply["prompt_token_ids"]])).logits[0, -1].double()
            expected = (logits / temperature).log_softmax(-1).topk(5)
            [first] = reply["choices"][0]["logprobs"]["content"]
            assert [each["token_id"] for each in first["top_logprobs"]] == expected.indices.tolist()
            values = [each["logprob"] for each in first["top_logprobs"]]
            assert values == pytest.approx(expected.values.tolist(), abs=1e-4)
            gaps.append(values[0] - values[1])
        assert gaps[1] / gaps[0] == pytest.approx(0.5, abs=1e-3) and o.session.turns == 0


async def test_several_choices_and_prompts() -> None:
    async with opened(Script("qwen2_5", *"abcdefg")) as o:
        _, reply = await o.post("/v1/chat/completions", ASK | {"n": 3})
        assert [each["index"] for each in reply["choices"]] == [0, 1, 2]
        _, reply = await o.post("/v1/completions", {"prompt": ["x", "y"], "n": 2, "return_token_ids": True})
        assert [each["prompt_token_ids"] for each in reply["choices"]] == [
            o.session.chat_format.encode(t).tolist() for t in "xxyy"
        ]
        assert o.session.turns == 7 and reply["usage"]["prompt_tokens"] == 2


async def test_models_names_the_policy_and_its_room() -> None:
    async with opened(Script("qwen2_5")) as o, o.http.get(o.url + "/models", headers={"x-api-key": o.key}) as reply:
        [model] = (await reply.json())["data"]
        assert model["id"] == "policy" and model["max_model_len"] == 5000


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("/v1/chat/completions", {"seed": 4}, ("seed", "members of a group would be equal")),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, ("response_format", "no grammar")),
        ("/v1/chat/completions", {"tool_choice": "required"}, ("tool_choice", "cannot be forced")),
        ("/v1/chat/completions", {"top_logprobs": 3}, ("top_logprobs", "max_tokens 1")),
        ("/v1/responses", {"top_logprobs": 3}, ("top_logprobs", "sampled tokens")),
        ("/v1/chat/completions", {"guided_json": {}}, ("guided_json is not supported", "docs/endpoint.md")),
        ("/v1/chat/completions", {"messages": []}, ("messages", "at least 1")),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            ("messages.0", "'text'"),
        ),
        ("/v1/chat/completions", {"logit_bias": {"x": 1}}, ("logit_bias",)),
        ("/v1/responses", {"previous_response_id": "r"}, ("previous_response_id", "nothing is stored")),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, ("tools.0",)),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, ("thinking", "chat_template_kwargs")),
        ("/v1/messages", {"max_tokens": None}, ("max_tokens",)),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, ("tool_choice", "cannot be forced")),
        ("/inference/v1/generate", {"sampling_params": {"stream": True}}, ("sampling_params.stream", "only false")),
        ("/inference/v1/generate", {"sampling_params": {"seed": 1}}, ("sampling_params.seed", "would be equal")),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(
    path: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    async with opened(Script("qwen2_5")) as o:
        status, reply = await o.post(path, bodies().get(path, {"token_ids": [1]}) | change)
        assert status == 400 and all(word in reply["error"]["message"] for word in words), reply
        assert ("type" in reply) == (path == "/v1/messages") and reply["error"]["type"] == "invalid_request_error"
        assert o.session.turns == 0 and o.counts["endpoint/refused"] == 1


async def test_parameters_reach_the_engine() -> None:
    script = Script("qwen2_5", "a", "b")
    given = {"temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -1}
    given |= {"repetition_penalty": 1.5, "logit_bias": {"7": -3}, "stop": ["x", "y"], "stop_token_ids": [3]}
    given |= {"max_completion_tokens": 9, "user": "u", "store": True, "metadata": {"a": 1}, "model": "gpt"}
    async with opened(script) as o:
        assert (await o.post("/v1/chat/completions", ASK | given))[0] == 200
        sampling = script.requests[0].sampling
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.max_tokens) == (0.5, 4, 0.1, 9)
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -1, 1.5)
        assert sampling.logit_bias == {7: -3} and sampling.stop == ("x", "y") and sampling.stop_token_ids == (3,)
        assert (await o.post("/v1/chat/completions", ASK | {"max_tokens": 1 << 20, "stop": []}))[0] == 200
        assert script.requests[1].sampling.max_tokens == 256 and script.requests[1].sampling.stop == ()


async def test_limits_and_the_temperature_of_an_episode_are_errors_that_say_why() -> None:
    async with opened(Script("qwen2_5", "a", "b"), max_turns=1) as o:
        assert (await o.post("/v1/chat/completions", ASK))[0] == 200
        status, reply = await o.post("/v1/chat/completions", ASK)
        assert status == 400 and "rollout.max_turns" in reply["error"]["message"]
        assert reply["error"]["code"] == "context_length_exceeded"
    async with opened(Script("qwen2_5", "a", "b")) as o:
        assert (await o.post("/v1/chat/completions", ASK | {"temperature": 0.5}))[0] == 200
        status, reply = await o.post("/v1/chat/completions", ASK | {"temperature": 0.7})
        assert status == 400 and "an episode has one temperature" in reply["error"]["message"]
