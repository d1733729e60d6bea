"""Programs for the interpreters of other projects: `python endpoint_client.py NAME URL KEY` talks to an endpoint, and prints JSON.

The endpoint's replies alternate: a call of the tool `look`, then the text `Sunny`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": CITY}}
USER = {"role": "user", "content": "How is the weather in Bonn?"}


def openai(url: str, key: str) -> dict[str, Any]:
    from openai import AuthenticationError, BadRequestError, OpenAI

    client = OpenAI(base_url=url, api_key=key)
    found: dict[str, Any] = {"model": client.models.list().data[0].id}
    given: Any = {"model": "m", "tools": [TOOL], "logprobs": True, "top_logprobs": 0}
    extra = {"extra_body": {"return_token_ids": True}}
    first = client.chat.completions.create(messages=[USER], **given, **extra)
    [call] = first.choices[0].message.tool_calls
    found["call"] = [call.function.name, json.loads(call.function.arguments), first.choices[0].finish_reason]
    found["ids"] = first.choices[0].token_ids
    found["tokens"] = [each.token for each in first.choices[0].logprobs.content]
    found["versions"] = first.choices[0].policy_versions
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    second = client.chat.completions.create(messages=[USER, first.choices[0].message, result], **given)
    found["text"] = second.choices[0].message.content

    pieces, calls = "", ""
    for chunk in client.chat.completions.create(
        messages=[USER], stream=True, stream_options={"include_usage": True}, **given
    ):
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            calls += "".join(each.function.arguments for each in choice.delta.tool_calls or ())
        found["usage"] = chunk.usage and chunk.usage.total_tokens
    found["streamed"] = [pieces, json.loads(calls)]
    with client.chat.completions.stream(model="m", messages=[USER]) as stream:
        found["helper"] = stream.get_final_completion().choices[0].message.content

    tools: Any = [{"type": "function", **TOOL["function"], "strict": None}]
    response = client.responses.create(model="m", input=[USER], tools=tools)
    [item] = [each for each in response.output if each.type == "function_call"]
    found["response_call"] = [item.name, json.loads(item.arguments)]
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "18 degrees"}
    found["response"] = client.responses.create(
        model="m", input=[USER, *response.output, output], tools=tools
    ).output_text
    with client.responses.stream(model="m", input="x", tools=tools) as events:
        kinds = [each.type for each in events]
        found["response_stream"] = [kinds[0], kinds[-1], len(events.get_final_response().output)]
    found["completion"] = client.completions.create(model="m", prompt="Is it", max_tokens=20).choices[0].text
    for name, call_with in (("seed", {"seed": 3}), ("guided", {"extra_body": {"guided_json": {}}})):
        try:
            client.chat.completions.create(model="m", messages=[USER], **call_with)
        except BadRequestError as error:
            found[name] = [error.param, error.type, str(error)]
    try:
        OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
    except AuthenticationError as error:
        found["stranger"] = error.status_code
    return found


def anthropic(url: str, key: str) -> dict[str, Any]:
    import anthropic as library

    client = library.Anthropic(base_url=url, api_key=key)
    tools: Any = [{"name": "look", "description": "Looks.", "input_schema": CITY}]
    given: Any = {"model": "m", "max_tokens": 50, "tools": tools, "system": "Be brief."}
    first = client.messages.create(messages=[USER], **given)
    use = first.content[-1]
    found: dict[str, Any] = {"call": [use.name, use.input, first.stop_reason], "versions": first.policy_versions}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}]}
    history = [USER, {"role": "assistant", "content": first.content}, result]
    second = client.messages.create(messages=history, **given)
    found["text"] = second.content[0].text
    with client.messages.stream(messages=[USER], **given) as stream:
        final = stream.get_final_message()
        found["streamed"] = [final.content[-1].input, final.stop_reason, final.usage.output_tokens > 0]
    with client.messages.stream(messages=[USER], **given) as stream:
        found["pieces"] = list(stream.text_stream)
    try:
        client.messages.create(messages=[USER], **given, thinking={"type": "enabled", "budget_tokens": 1024})
    except library.BadRequestError as error:
        found["thinking"] = str(error)
    try:
        library.Anthropic(base_url=url, api_key="none", max_retries=0).messages.create(messages=[USER], **given)
    except library.AuthenticationError as error:
        found["stranger"] = error.status_code
    return found


def agents(url: str, key: str) -> dict[str, Any]:
    from agents import (
        Agent,
        Runner,
        function_tool,
        set_default_openai_api,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    seen: list[str] = []

    @function_tool
    def look(city: str) -> str:
        """Looks.

        Args:
            city: Where.
        """
        seen.append(city)
        return "18 degrees"

    async def run() -> dict[str, Any]:
        set_tracing_disabled(True)
        found: dict[str, Any] = {}
        set_default_openai_client(AsyncOpenAI(base_url=url, api_key=key), use_for_tracing=False)
        for api in ("responses", "chat_completions"):
            set_default_openai_api(api)
            agent = Agent(name="a", instructions="Be brief.", tools=[look], model="m")
            found[api] = (await Runner.run(agent, "How is the weather in Bonn?")).final_output
            streamed = Runner.run_streamed(agent, "How is the weather in Bonn?")
            async for _ in streamed.stream_events():
                pass
            found[f"{api}_streamed"] = streamed.final_output
        return found | {"seen": seen}

    return asyncio.run(run())


def openenv(url: str, key: str) -> dict[str, Any]:
    from openenv.core.harness.capture import validate_llm

    report = validate_llm(url, "policy", api_key=key)
    names = ("ok", "capture_level", "logprobs_mode", "tool_support", "findings", "param_fixes", "n_completion_ids")
    return {name: getattr(report, name) for name in names}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
