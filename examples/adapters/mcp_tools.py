"""The tools of an MCP server as tools of `policy.chat` (mcp 2.3).

    async def episode(task, policy):
        async with mcp_tools(["python", "server.py"]) as tools:
            reply = await policy.chat(messages, tools=tools)

A list is the command of a server that talks over standard input and output. A string is the URL of a server (streamable HTTP).
Each block has its own connection, and its own process of a command. The process ends with the block, and when the run is killed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import jsonschema  # noqa: F401  mcp would import it in the first call, which blocks the event loop
from mcp import Client, StdioServerParameters

from asyncrl import Tool
from asyncrl.concurrency import guard


@asynccontextmanager
async def mcp_tools(
    server: Sequence[str] | str,
    *,
    env: Mapping[str, str] | None = None,
    start_s: float = 60.0,
    timeout_s: float = 60.0,
    prefix: str = "",
) -> AsyncIterator[list[Tool]]:
    """`env`: environment variables of the server, besides PATH, HOME and the like. `start_s`, `timeout_s`: deadlines of start and
    call. `prefix`: put in front of each tool's name, for two servers that have a tool of the same name."""
    target: Any = server if isinstance(server, str) else _guarded(list(server), dict(env or {}))
    client = Client(target)

    def as_tool(found: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            result = await client.call_tool(found.name, arguments, read_timeout_seconds=timeout_s)
            text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
            if result.is_error:
                raise RuntimeError(text)
            return text

        function = {
            "name": prefix + found.name,
            "description": found.description or "",
            "parameters": found.input_schema,
        }
        return Tool(prefix + found.name, {"type": "function", "function": function}, call)

    async with AsyncExitStack() as stack:
        # Not anyio's timeout: the connection's task groups outlive it.
        async with asyncio.timeout(start_s):
            await stack.enter_async_context(client)
            page = await client.list_tools()
            tools = [*page.tools]
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
        yield [as_tool(found) for found in tools]


def _guarded(command: list[str], env: dict[str, str]) -> StdioServerParameters:
    """The command under a guard, which ends the server and all its processes when the connection or the run ends."""
    # The guard closes its copy of the descriptor that its last argument names: standard input, which tells the server to end.
    shell = ["/bin/sh", "-c", f"exec {shlex.join(command)}", "0"]
    arguments = ["-I", "-S", guard.__file__, str(os.getpid()), *shell]
    return StdioServerParameters(command=sys.executable, args=arguments, env=env)
