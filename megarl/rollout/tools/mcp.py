"""MCPToolingEnv has the tools of an MCP server: a process of its own, spoken to over its stdin and
stdout, or a server at a URL (streamable HTTP). It needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.rollout.tools.tooling import TOOL_TIMEOUT, ToolFailure, ToolingEnv, as_text
from megarl.utils.extras import require
from megarl.utils.importing import option_problems

CONNECT_TIMEOUT = 30.0  # seconds until the server must have listed its tools
MOST_PAGES = 64  # of the list of a server's tools
MOST_TEXT = 1 << 18  # characters of their descriptions and schemas


@dataclass(frozen=True, kw_only=True)
class MCPToolingEnvConfig:
    """Says where a server is: the `command` that starts it, with further `env` variables, or its
    `url`. A server that is started gets PATH, HOME and the like, and none of the job's other
    variables. timeout: seconds for one call. shared: all samples use one connection, and so one
    server process, which must keep nothing of a sample between calls; otherwise each sample has its
    own. Raises ValueError unless one of command and url is given."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    timeout: float = TOOL_TIMEOUT
    shared: bool = False

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(
                f"mcp: command={self.command!r}, url={self.url!r}: give one of both, as "
                "{mcp: {command: [python, server.py]}} or {mcp: {url: http://host:port/mcp}}"
            )
        if isinstance(self.command, str):
            raise ValueError(f"mcp: command={self.command!r}: give a list, [program, argument]")

    @classmethod
    def of(cls, section: Any, *, timeout: float) -> MCPToolingEnvConfig:
        """Returns the configuration of a section of YAML. Raises ValueError for unknown keys, and
        where the package mcp is missing."""
        if not isinstance(section, dict):
            raise ValueError(f"mcp: {section!r}: give command, or url")
        if problems := "; ".join(option_problems(cls, section, key="mcp")):
            raise ValueError(problems)
        _package()
        values: dict[str, Any] = {"timeout": timeout} | section
        return cls(**values)


class MCPToolingEnv(ToolingEnv):
    """Is a client of one MCP server. A server process of its own ends with `aclose`."""

    def __init__(self, config: MCPToolingEnvConfig) -> None:
        self.config = config
        self._tools: list[dict[str, Any]] = []
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # of the connection, or that it has to

    async def ainitialize(self) -> None:
        """Connects and asks for the tools. Raises ToolFailure where that does not succeed within
        CONNECT_TIMEOUT."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        # a connection has to end in the task in which it began
        self._task = asyncio.create_task(self._connection(ready))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await ready
        except TimeoutError as e:
            raise ToolFailure(
                f"MCP server {self._shown} did not list its tools within {CONNECT_TIMEOUT:g} s"
            ) from e

    async def _connection(self, ready: asyncio.Future[None]) -> None:
        try:
            async with _client(self.config) as client:
                self._tools = [_as_function(tool) for tool in await _all_tools(client)]
                self._client = client
                if not ready.done():
                    ready.set_result(None)
                await self._ended.wait()
        except Exception as e:
            if not ready.done():
                ready.set_exception(
                    ToolFailure(f"MCP server {self._shown} cannot be used: {_words(e)}")
                )
        finally:
            if self._task is asyncio.current_task():  # else there is a later connection
                self._client = None

    @property
    def connected(self) -> bool:
        """Returns whether the server can be called."""
        return self._client is not None and not self._ended.is_set()

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the server's tools."""
        return self._tools

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Returns the result's text. What the server calls an error is a text that begins with
        "Error"; so is an overrun. Raises ToolFailure where the server is gone."""
        client, ended = self._client, self._ended  # there may be a later connection at the end
        if client is None:
            raise ToolFailure(f"MCP server {self._shown} is not connected")
        try:
            async with asyncio.timeout(self.config.timeout):
                result = await client.call_tool(tool_name, tool_args)
        except TimeoutError:
            return f"Error: {tool_name} took longer than {self.config.timeout:g} s"
        except _package().MCPError as e:
            if _lost(e):
                raise self._gone(e, ended) from e
            return f"Error: {tool_name}: {_words(e)}"
        except Exception as e:
            raise self._gone(e, ended) from e
        text = "\n".join(_content(part) for part in result.content)
        return f"Error: {tool_name}: {text}" if result.is_error else text

    async def aclose(self) -> None:
        """Ends the connection, and the server if it is a process of its own."""
        self._ended.set()
        if self._task is None:
            return
        if self._client is None:  # it may hang on its way to the server
            self._task.cancel()
        try:
            await asyncio.wait({self._task})  # an end of whoever waits is not this one's
        except asyncio.CancelledError:  # who waits no longer has no use for the connection
            self._task.cancel()
            raise

    def _gone(self, error: Exception, ended: asyncio.Event) -> ToolFailure:
        ended.set()  # it serves nobody any more
        return ToolFailure(f"MCP server {self._shown} is gone: {_words(error)}")

    @property
    def _shown(self) -> str:
        return self.config.url or " ".join(self.config.command)


class SharedMCPToolingEnv(MCPToolingEnv):
    """Has the tools of a server that all samples use over one connection, which ends with the event
    loop. One that is gone is made again by the next sample."""

    def __init__(self, config: MCPToolingEnvConfig) -> None:
        super().__init__(config)
        self._connecting = asyncio.Lock()

    async def ainitialize(self) -> None:
        """Connects, where there is no connection. Raises ToolFailure."""
        async with self._connecting:
            if not self.connected:
                try:
                    await super().ainitialize()
                except BaseException:
                    await super().aclose()
                    raise

    async def aclose(self) -> None:
        """Leaves the connection to other samples."""


def mcp_maker(section: Any, *, timeout: float) -> Callable[[], ToolingEnv]:
    """Returns what makes the environments of the samples, of a section of YAML; see
    MCPToolingEnvConfig.of."""
    config = MCPToolingEnvConfig.of(section, timeout=timeout)
    if config.shared:
        shared = SharedMCPToolingEnv(config)
        return lambda: shared
    return partial(MCPToolingEnv, config)


def _package() -> Any:
    return require("mcp", extra="mcp", user="a tool of an MCP server")


def _client(config: MCPToolingEnvConfig) -> Any:
    mcp = _package()
    if config.url:
        return mcp.Client(config.url)
    program, *arguments = config.command
    return mcp.Client(
        mcp.StdioServerParameters(command=program, args=arguments, env=config.env or None)
    )


async def _all_tools(client: Any) -> list[Any]:
    """Returns the tools of all pages. Raises ValueError for more of them, or of text, than a prompt
    has a use for."""
    tools, cursor, text = [], None, 0
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        text += sum(len(as_text(_as_function(tool))) for tool in page.tools)
        if text > MOST_TEXT:
            raise ValueError(f"its tools are described in more than {MOST_TEXT} characters")
        if not (cursor := page.next_cursor):
            return tools
    raise ValueError(f"the list of its tools has more than {MOST_PAGES} pages")


def _as_function(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "No description provided.",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _content(part: Any) -> str:
    """Returns a part of a result as text; what is no text is named."""
    text = getattr(part, "text", None)
    return text if text is not None else as_text(f"[{part.type}]")


def _lost(error: Exception) -> bool:
    """Returns whether a protocol error says that the connection is closed."""
    code = getattr(getattr(error, "error", None), "code", None)
    return code == -32000 or "closed" in str(error).lower()


def _words(error: BaseException) -> str:
    """Returns the first error of a group of them, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
