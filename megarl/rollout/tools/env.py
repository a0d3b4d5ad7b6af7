"""Defines ToolingEnv, a set of tools that lives as long as one sample; and `opened`, which closes
it however the sample ends."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megarl.rollout.closing import closing


class ToolFailure(RuntimeError):
    """Says that a tool is broken: its process died, its server is gone, it could not be started. It
    says nothing about the answer, so the sample leaves the batch (docs/agents.md). What is the
    model's fault, such as wrong arguments, is told to the model as text."""


class ToolingEnv(ABC):
    """Lists tools and executes them. An instance belongs to one sample: it holds what the sample's
    calls change, such as a browser or a directory."""

    async def ainitialize(self) -> None:
        """Makes what the tools need. Raises ToolFailure where that fails."""
        return

    @abstractmethod
    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as chat templates take them, after `ainitialize`: {"type": "function",
        "function": {"name", "description", "parameters"}}, `parameters` being a JSON schema."""

    @abstractmethod
    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Returns the tool's result as text for the model, also what was wrong with the call.
        Raises ToolFailure where the tool is broken."""

    async def aclose(self) -> None:
        """Releases everything. It is called once, on success, failure, cancellation and time-out,
        also after an `ainitialize` that failed."""
        return


@asynccontextmanager
async def opened(env: ToolingEnv) -> AsyncIterator[ToolingEnv]:
    """Initializes `env`, and closes it at the end, however that comes about."""
    async with closing([env]):
        await env.ainitialize()
        yield env


def tool_name(tool: dict[str, Any]) -> str:
    """Returns the name of a tool that `list_tools` lists."""
    name: str = tool["function"]["name"]
    return name


def as_text(result: Any) -> str:
    """Returns a tool's result for the model: text as it is, everything else as JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)
