"""An MCP server for tests: `python -m tests.mcp_server stdio|http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def times(a: int, b: int = 2) -> int:
    """Multiplies."""
    return a * b


@server.tool()
def fails() -> str:
    """Raises."""
    raise ValueError("no page")


@server.tool()
async def slow() -> str:
    """Takes long."""
    await asyncio.sleep(60)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
def environment() -> str:
    """Returns the names of the server's variables, and its number."""
    return f"{os.getpid()} {' '.join(os.environ)}"


if __name__ == "__main__":
    if sys.argv[1] == "long":
        server.tool(name="long", description="x" * (1 << 20))(slow)
    if sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
