"""LocalToolingEnv executes tools that are Python functions of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megarl.rollout.tools.env import ToolFailure, ToolingEnv, as_text
from megarl.rollout.tools.schema import Signature
from megarl.rollout.user_calls import CallTimeout, ThreadsExhausted, call

TOOL_TIMEOUT = 30.0  # seconds


class LocalToolingEnv(ToolingEnv):
    """Has functions as tools, plain or async; each may take `timeout` s. A plain function runs in a
    thread of its own, see user_calls.call: one that overruns goes on, unseen. A function that takes
    a parameter `row` gets the row of the data there, and the model does not see it."""

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]] = (),
        *,
        timeout: float = TOOL_TIMEOUT,
        row: dict[str, Any] | None = None,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: use a positive number of seconds")
        self._timeout, self._row = timeout, row or {}
        self._tools: dict[str, tuple[Callable[..., Any], Signature]] = {}
        for func in tools:
            self.register_tool(func)

    @staticmethod
    def generate_schema(func: Callable[..., Any]) -> dict[str, Any]:
        """Returns the tool that `func` is, as `list_tools` lists it: its name, its docstring, and
        its parameters as a JSON schema. Raises ValueError for one that JSON cannot call."""
        return Signature(func).schema()

    def register_tool(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Adds a tool under the function's name and returns the function, so that it is a decorator
        as well. Raises TypeError for what cannot be called, ValueError for a name that is taken.
        """
        if not callable(func) or not hasattr(func, "__name__"):
            raise TypeError(f"tool {func!r}: not a function; register a function with a name")
        if func.__name__ in self._tools:
            raise ValueError(f"tool {func.__name__!r} is registered already; rename one of them")
        self._tools[func.__name__] = (func, Signature(func))
        return func

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the schemas in the order of registration."""
        return [signature.schema() for _, signature in self._tools.values()]

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Returns the result as text; for an unknown tool, wrong arguments, an exception of the
        tool's or an overrun, a text that begins with "Error" and says so. Raises ToolFailure where
        the tool raises it, ThreadsExhausted."""
        if tool_name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"Error: there is no tool {tool_name!r}; the tools are: {known}"
        func, signature = self._tools[tool_name]
        try:
            arguments = signature.arguments(tool_args)
        except ValueError as e:
            return f"Error: {tool_name} was called with wrong arguments: {e}"
        arguments |= dict.fromkeys(signature.given, self._row)
        try:
            return as_text(await call(partial(func, **arguments), timeout=self._timeout))
        except (ToolFailure, ThreadsExhausted):
            raise
        except CallTimeout:
            return f"Error: {tool_name} took longer than {self._timeout:g} s"
        except Exception as e:
            return f"Error: {tool_name} raised {type(e).__name__}: {e}"
