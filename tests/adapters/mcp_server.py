"""An MCP server with tools that add, fail, hang and start a process: over standard input and output, or HTTP with a port."""

import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("adapters")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("broken tool")


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(1000)
    return ""


@server.tool()
def spawn(word: str) -> str:
    """Start a process that leaves its session."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1000) # {word}"], start_new_session=True)
    return "started"


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
