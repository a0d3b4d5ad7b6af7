"""Defines tools: a ToolingEnv lists and executes them, LocalToolingEnv those that are functions,
ToolList makes one of the tools that a configuration lists, and ToolExecutor answers a text."""

from __future__ import annotations

import copy
import inspect
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pydantic

from megarl.api.chat_template import utf8
from megarl.api.records import ModelResponse
from megarl.observability.logging import get_logger, warn_recurring
from megarl.rollout.loop_thread import CallTimeout, ThreadsExhausted, add_counts, call, closing
from megarl.rollout.tools.calls import ToolCall, parse_calls
from megarl.utils.importing import load_object, option_problems

log = get_logger(__name__)

TOOL_TIMEOUT = 30.0  # seconds
MAX_RESULT = 8192  # characters
GIVEN = ("row",)  # parameters that megarl gives, and the model does not see
_FORMS = (
    "use 'pkg.module:function', 'pkg.module:Env' (a ToolingEnv), {type: pkg.module:Env, options: "
    "{...}}, {mcp: {command: [...]}} or {mcp: {url: ...}}"
)
_DOCUMENT = (
    'write a docstring with a line "Args:" and below it "name: what it is" for each argument, and '
    "give each a type: str, int, float, bool, list, dict, Literal or Optional of these"
)


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


class LocalToolingEnv(ToolingEnv):
    """Has functions as tools, plain or async; each may take `timeout` s. A plain function runs in a
    thread of its own, see loop_thread.call: one that overruns goes on, unseen. A function that
    takes a parameter `row` gets the row of the data there, and the model does not see it. others:
    environments whose tools it has, too."""

    def __init__(
        self,
        tools: Iterable[Callable[..., Any] | _Function] = (),
        *,
        timeout: float = TOOL_TIMEOUT,
        row: dict[str, Any] | None = None,
        others: Sequence[ToolingEnv] = (),
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: use a positive number of seconds")
        self._timeout, self._row, self._others = timeout, row or {}, list(others)
        self._tools: dict[str, dict[str, Any]] = {}
        self._execute: dict[str, Callable[[dict[str, Any]], Awaitable[str]]] = {}
        for func in tools:
            function = func if isinstance(func, _Function) else _Function(func)
            self._add(function.tool, partial(self._call, function))

    @staticmethod
    def generate_schema(func: Callable[..., Any]) -> dict[str, Any]:
        """Returns the tool that `func` is, as `list_tools` lists it: its name, its docstring, and
        its parameters as a JSON schema. Raises ValueError for one that JSON cannot call, or whose
        arguments are not documented."""
        return _Function(func).tool

    def register_tool(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Adds a tool under the function's name and returns the function, so that it is a decorator
        as well. Raises TypeError for what cannot be called, ValueError for a name that is taken and
        as `generate_schema`."""
        function = _Function(func)
        self._add(function.tool, partial(self._call, function))
        return func

    def _add(
        self, tool: dict[str, Any], execute: Callable[[dict[str, Any]], Awaitable[str]]
    ) -> None:
        name = tool["function"]["name"]
        if name in self._tools:
            raise ValueError(f"tool {name!r} is registered already; rename one of them")
        self._tools[name], self._execute[name] = tool, execute

    async def ainitialize(self) -> None:
        """Initializes the other environments. Raises ToolFailure, and ValueError for a name that
        two tools have."""
        for env in self._others:
            await env.ainitialize()
            for tool in env.list_tools():
                self._add(tool, partial(env.aexecute, tool["function"]["name"]))

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the functions in the order of registration, and the other environments' tools."""
        return list(self._tools.values())

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Returns the result as text; for an unknown tool, wrong arguments, an exception of the
        tool's or an overrun, a text that begins with "Error" and says so. Raises ToolFailure where
        the tool raises it, ThreadsExhausted."""
        if tool_name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"Error: there is no tool {tool_name!r}; the tools are: {known}"
        return await self._execute[tool_name](tool_args)

    async def aclose(self) -> None:
        """Closes the other environments, whether or not they were initialized."""
        async with closing(self._others):
            return

    async def _call(self, function: _Function, values: dict[str, Any]) -> str:
        try:
            arguments = function.arguments(**values)
        except pydantic.ValidationError as e:
            wrong = [f"{'.'.join(map(str, x['loc'])) or 'call'}: {x['msg']}" for x in e.errors()]
            return f"Error: {function.name} was called with wrong arguments: {'; '.join(wrong)}"
        arguments |= dict.fromkeys(function.given, self._row)
        try:
            return as_text(await call(partial(function.func, **arguments), timeout=self._timeout))
        except (ToolFailure, ThreadsExhausted):
            raise
        except CallTimeout:
            return f"Error: {function.name} took longer than {self._timeout:g} s"
        except Exception as e:
            warn_recurring(log, f"tool {function.name}", e)
            return f"Error: {function.name} raised {type(e).__name__}: {e}"


class _Function:
    """Holds a function as a tool. tool: as `list_tools` lists it. arguments: returns the arguments
    of a call by name, of the annotated types ("3" is an int where one is asked for), or raises
    pydantic's ValidationError. given: the parameters that megarl gives."""

    def __init__(self, func: Callable[..., Any]) -> None:
        from transformers.utils import get_json_schema

        if not callable(func) or not hasattr(func, "__name__"):
            raise TypeError(f"tool {func!r}: not a function; register a function with a name")
        self.func, self.name = func, func.__name__
        signature = inspect.signature(func)
        self.given = [name for name in GIVEN if name in signature.parameters]
        seen = [p for name, p in signature.parameters.items() if name not in GIVEN]
        for p in seen:
            if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                raise ValueError(
                    f"tool {self.name}: parameter {p} cannot be given by name; use named parameters"
                )

        def named(**arguments: Any) -> dict[str, Any]:
            return arguments

        # nothing has to be described if there are no arguments
        undocumented = "No description provided." if not seen else None
        named.__name__, named.__doc__ = self.name, inspect.getdoc(func) or undocumented
        try:
            hints = typing.get_type_hints(func, include_extras=True)
            named.__annotations__ = {p.name: hints[p.name] for p in seen if p.name in hints}
            named.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
            self.tool: dict[str, Any] = get_json_schema(named)
            self.arguments = pydantic.validate_call(named)
        except Exception as e:  # pydantic's errors for types have no base of their own
            why = " ".join(str(e).split())
            raise ValueError(f"tool {self.name}: {why}; {_DOCUMENT}") from e

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return _Function, (self.func,)  # what pydantic makes of it does not travel


class ToolList:
    """Holds the tools of a list such as a YAML file has, and makes environments of them, one for
    each sample. `timeout` is in seconds, for each call. Raises ValueError naming the entry that is
    wrong."""

    def __init__(self, entries: Sequence[Any], *, timeout: float = TOOL_TIMEOUT) -> None:
        self._functions: list[_Function] = []
        self._makers: list[Callable[[], ToolingEnv]] = []
        self._timeout = timeout
        if isinstance(entries, str) or not entries:
            raise ValueError(f"tools={entries!r}: a list with one tool at least; {_FORMS}")
        for entry in entries:
            self._add(entry)
        LocalToolingEnv(self._functions, timeout=timeout)  # refuses what cannot be a tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Returns the tools that are functions, as `ToolingEnv.list_tools` lists them."""
        return [function.tool for function in self._functions]

    def make(self, row: dict[str, Any]) -> ToolingEnv:
        """Returns an environment with all tools, for a sample of this row of the data."""
        own = copy.deepcopy(row) if self._functions else None  # a tool may change it
        others = [make() for make in self._makers]
        return LocalToolingEnv(self._functions, timeout=self._timeout, row=own, others=others)

    def _add(self, entry: Any) -> None:
        if isinstance(entry, str):
            entry = {"type": entry}
        if not isinstance(entry, dict):
            raise ValueError(f"tool {entry!r}: {_FORMS}")
        if set(entry) == {"mcp"}:
            from megarl.rollout.tools.mcp import mcp_maker

            self._makers.append(mcp_maker(entry["mcp"], timeout=self._timeout))
        elif "type" in entry and set(entry) <= {"type", "options"}:
            self._add_named(entry["type"], dict(entry.get("options") or {}))
        else:
            raise ValueError(f"tool {entry!r}: {_FORMS}")

    def _add_named(self, target: str, options: dict[str, Any]) -> None:
        tool = load_object(target, what="tool")
        if inspect.isclass(tool) and issubclass(tool, ToolingEnv):
            if problems := "; ".join(option_problems(tool, options, key="options")):
                raise ValueError(f"tool {target}: {problems}")
            self._makers.append(lambda: tool(**options))
        elif options:
            raise ValueError(f"tool {target}: a function takes no options; write a ToolingEnv")
        elif callable(tool):
            self._functions.append(_Function(tool))
        else:
            raise ValueError(f"tool {target}: a {type(tool).__name__}; {_FORMS}")


class ToolExecutor:
    """Has functions as tools, and answers what a model writes.

    call_format: how the model writes calls, one of tools.calls.FORMATS. max_result: characters of
    one result that the model sees.
    """

    def __init__(self, *, call_format: str = "hermes", max_result: int = MAX_RESULT) -> None:
        self.env = LocalToolingEnv()
        self._format, self._max_result = call_format, max_result

    def register_tool(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Adds a function, see LocalToolingEnv.register_tool."""
        return self.env.register_tool(func)

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools for the chat template."""
        return self.env.list_tools()

    async def aexecute_tool(self, answer: ModelResponse | str) -> list[dict[str, Any]]:
        """Executes the calls in an answer of a client with a tokenizer, or in a text with its
        special tokens, and returns the messages that answer them; ChatWorkflow.tell_all has a
        sample read them. Raises ToolFailure, and ValueError for an answer without its text."""
        text = answer if isinstance(answer, str) else answer.raw_completion
        if not isinstance(answer, str) and answer.output_tokens and not text:
            raise ValueError(
                "the answer has tokens and no text: give the client a tokenizer "
                "(RemoteSGLangEngine(config, tokenizer=...)), or decode output_tokens"
            )
        calls = parse_calls(text, self._format, self.list_tools())
        return [await answer_call(self.env, call, self._max_result) for call in calls]


async def answer_call(env: ToolingEnv, call: ToolCall, max_result: int) -> dict[str, Any]:
    """Returns the message that answers a call, its text cut to `max_result` characters. Raises
    ToolFailure."""
    add_counts({"tools/calls": 1, "tools/errors": 0})
    text = f"Error: {call.error}"
    try:
        if not call.error:
            text = utf8(await env.aexecute(call.name, call.arguments))
    except ToolFailure:
        add_counts({"tools/errors": 1})
        raise
    add_counts({"tools/errors": int(text.startswith("Error"))})
    if len(text) > max_result:
        text = f"{text[:max_result]}... ({len(text)} characters)"
    return {"role": "tool", "name": call.name, "content": text}


def as_text(result: Any) -> str:
    """Returns a tool's result for the model: text as it is, everything else as JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)
