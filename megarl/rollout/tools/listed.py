"""Reads the tools that a configuration lists, and makes one environment of all of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megarl.rollout.closing import closing
from megarl.rollout.tools.env import ToolingEnv, tool_name
from megarl.rollout.tools.local import TOOL_TIMEOUT, LocalToolingEnv
from megarl.rollout.tools.mcp import (
    MCPToolingEnv,
    MCPToolingEnvConfig,
    SharedMCPToolingEnv,
    SharedServer,
)
from megarl.utils.importing import load_object, option_problems

Make = Callable[[], ToolingEnv]
_FORMS = (
    "use 'pkg.module:function', 'pkg.module:Env' (a ToolingEnv), {type: pkg.module:Env, options: "
    "{...}}, {mcp: {command: [...]}} or {mcp: {url: ...}}"
)


class ToolList:
    """Holds the tools of a list such as a YAML file has, and makes environments of them, one for
    each sample. `timeout` is in seconds, for each call. Raises ValueError naming the entry that is
    wrong."""

    def __init__(self, entries: Sequence[Any], *, timeout: float = TOOL_TIMEOUT) -> None:
        self._functions: list[Callable[..., Any]] = []
        self._makers: list[Make] = []
        self._timeout = timeout
        if isinstance(entries, str) or not entries:
            raise ValueError(f"tools={entries!r}: a list with one tool at least; {_FORMS}")
        for entry in entries:
            self._add(entry)
        LocalToolingEnv(self._functions, timeout=timeout)  # refuses what cannot be a tool

    def make(self, row: dict[str, Any]) -> ToolingEnv:
        """Returns an environment with all tools, for a sample of this row of the data."""
        own = copy.deepcopy(row) if self._functions else None  # a tool may change it
        local = LocalToolingEnv(self._functions, timeout=self._timeout, row=own)
        return JoinedToolingEnv([local, *(make() for make in self._makers)])

    def _add(self, entry: Any) -> None:
        if isinstance(entry, str):
            entry = {"type": entry}
        if not isinstance(entry, dict):
            raise ValueError(f"tool {entry!r}: {_FORMS}")
        if set(entry) == {"mcp"}:
            config = MCPToolingEnvConfig.of(entry["mcp"], timeout=self._timeout)
            server = SharedServer(config)
            self._makers.append(
                lambda: SharedMCPToolingEnv(server) if config.shared else MCPToolingEnv(config)
            )
        elif "type" in entry and set(entry) <= {"type", "options"}:
            self._add_named(entry["type"], dict(entry.get("options") or {}))
        else:
            raise ValueError(f"tool {entry!r}: {_FORMS}")

    def _add_named(self, target: str, options: dict[str, Any]) -> None:
        found = load_object(target, what="tool")
        if inspect.isclass(found) and issubclass(found, ToolingEnv):
            if problems := "; ".join(option_problems(found, options, key="options")):
                raise ValueError(f"tool {target}: {problems}")
            self._makers.append(lambda: found(**options))
        elif options:
            raise ValueError(f"tool {target}: a function takes no options; write a ToolingEnv")
        elif callable(found):
            self._functions.append(found)
        else:
            raise ValueError(f"tool {target}: a {type(found).__name__}; {_FORMS}")


class JoinedToolingEnv(ToolingEnv):
    """Has the tools of several environments."""

    def __init__(self, parts: Sequence[ToolingEnv]) -> None:
        self._parts = list(parts)
        self._tools: list[dict[str, Any]] = []
        self._home: dict[str, ToolingEnv] = {}

    async def ainitialize(self) -> None:
        """Initializes every part. Raises ValueError for a name that two tools have."""
        for part in self._parts:
            await part.ainitialize()
            for tool in part.list_tools():
                name = tool_name(tool)
                if name in self._home:
                    raise ValueError(f"two tools are named {name!r}; rename one of them")
                self._home[name] = part
                self._tools.append(tool)

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools of all parts in turn."""
        return self._tools

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Has the part that has the tool execute it."""
        if tool_name not in self._home:
            known = ", ".join(self._home) or "none"
            return f"Error: there is no tool {tool_name!r}; the tools are: {known}"
        return await self._home[tool_name].aexecute(tool_name, tool_args)

    async def aclose(self) -> None:
        """Closes every part, whether or not it was initialized."""
        async with closing(self._parts):
            return


def tool_problems(entries: Sequence[Any]) -> Iterator[str]:
    """Yields what is wrong with the tools that a configuration lists."""
    try:
        ToolList(entries)
    except (TypeError, ValueError) as e:
        yield f"tools: {e}"
