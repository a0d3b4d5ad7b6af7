"""Tools that are functions: their schemas, calls in each model's format, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from megarl.api.records import ModelResponse
from megarl.rollout.tools.calls import FORMATS, ToolCall, parse_calls
from megarl.rollout.tools.tooling import (
    LocalToolingEnv,
    ToolExecutor,
    ToolFailure,
    ToolingEnv,
)
from tests.unit.scripted import opened


def search(
    query: str,
    limit: int = 3,
    exact: bool = False,
    where: Literal["web", "news"] = "web",
    tags: list[str] | None = None,
    weights: dict[str, float] = {},  # noqa: B006
) -> dict[str, Any]:
    """Searches for pages.

    Takes one query.

    Args:
        query: what to look for,
            in words
        limit: how many pages
        exact: whether the words have to stand there
        where: where to look
        tags: of the pages
        weights: of words

    Returns:
        what was found
    """
    return {"query": query, "limit": limit, "exact": exact, "where": where, "tags": tags}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def execute(name: str, args: dict[str, Any], *tools: Any, **kw: Any) -> str:
    async def run() -> str:
        async with opened(LocalToolingEnv(tools, **kw)) as env:
            return await env.aexecute(name, args)

    return asyncio.run(run())


def test_a_schema_is_read_from_the_signature_and_the_docstring() -> None:
    schema = LocalToolingEnv.generate_schema(search)
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == (
        "search",
        "Searches for pages.\n\nTakes one query.",
    )
    parameters = function["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["query"])
    assert parameters["properties"]["query"] == {
        "type": "string",
        "description": "what to look for, in words",
    }
    types = {name: tool["type"] for name, tool in parameters["properties"].items()}
    assert types == {
        "query": "string",
        "limit": "integer",
        "exact": "boolean",
        "where": "string",
        "tags": "array",
        "weights": "object",
    }
    assert parameters["properties"]["where"]["enum"] == ["web", "news"]


def test_a_schema_is_the_one_that_transformers_reads() -> None:
    def both(a: int, b: list[str]) -> int:
        """Does both.

        Args:
            a: the first
            b: the second
        """
        return 0

    assert LocalToolingEnv.generate_schema(both)["function"] == {
        k: v for k, v in get_json_schema(both)["function"].items() if k != "return"
    }


def test_what_the_model_is_told_nothing_about_is_refused() -> None:
    def undocumented(query: str, limit: int = 3) -> str:
        """Searches.

        Args:
            query: what to look for
        """
        return query

    def untyped(query) -> str:
        """Searches.

        Args:
            query: what to look for
        """
        return str(query)

    def silent(query: str) -> str:
        return query

    for func, argument in ((undocumented, "limit"), (untyped, "query"), (silent, "docstring")):
        with pytest.raises(ValueError) as caught:
            LocalToolingEnv([func])
        words = str(caught.value)
        assert words.startswith(f"tool {func.__name__}: ") and argument in words
        assert "Args:" in words  # what to write


def test_a_tool_without_arguments_needs_no_docstring() -> None:
    def get_time():
        return "noon"

    function = LocalToolingEnv.generate_schema(get_time)["function"]
    assert function["name"] == "get_time" and function["parameters"]["properties"] == {}
    assert function["description"]
    assert asyncio.run(LocalToolingEnv([get_time]).aexecute("get_time", {})) == "noon"


def test_what_cannot_be_a_tool_is_refused() -> None:
    env = LocalToolingEnv()
    assert env.register_tool(add) is add  # as a decorator
    with pytest.raises(ValueError, match="'add' is registered already"):
        env.register_tool(add)
    with pytest.raises(TypeError, match="not a function"):
        env.register_tool(3)  # type: ignore[arg-type]

    def many(*values: int) -> int:
        return 0

    with pytest.raises(ValueError, match=r"tool many: parameter \*values"):
        env.register_tool(many)

    def odd(lock: threading.Event) -> int:
        """Waits.

        Args:
            lock: for what
        """
        return 0

    with pytest.raises(ValueError, match=r"tool odd: .*Event"):
        env.register_tool(odd)
    assert [t["function"]["name"] for t in env.list_tools()] == ["add"]
    assert LocalToolingEnv().list_tools() == []  # tools belong to an instance
    with pytest.raises(ValueError, match="timeout=0"):
        LocalToolingEnv(timeout=0)


def test_tools_answer_as_text() -> None:
    assert execute("add", {"a": 2, "b": "3"}, add) == "5"  # "3" is an int where one is asked for
    assert execute("search", {"query": "ä", "tags": ["x"]}, search).startswith('{"query": "ä"')

    async def later(text: str) -> str:
        """Shouts.

        Args:
            text: what
        """
        await asyncio.sleep(0)
        return text.upper()

    assert execute("later", {"text": "abc"}, later) == "ABC"

    def with_row(x: int, row: dict[str, Any]) -> int:
        """Adds the answer.

        Args:
            x: a number
        """
        return x + row["answer"]

    schema = LocalToolingEnv.generate_schema(with_row)
    assert list(schema["function"]["parameters"]["properties"]) == ["x"]
    assert execute("with_row", {"x": 1}, with_row, row={"answer": 41}) == "42"


def test_errors_are_told_to_the_model() -> None:
    def fails() -> None:
        """Does not return."""
        raise KeyError("page")

    assert execute("fails", {}, fails) == "Error: fails raised KeyError: 'page'"
    assert execute("sub", {}, add) == "Error: there is no tool 'sub'; the tools are: add"
    wrong = execute("add", {"a": "two", "c": 1}, add)
    assert wrong.startswith("Error: add was called with wrong arguments: a: ")
    assert "; b: " in wrong and "; c: " in wrong

    async def endless() -> None:
        """Does not return."""
        await asyncio.sleep(60)

    assert execute("endless", {}, endless, timeout=0.05) == "Error: endless took longer than 0.05 s"

    def own_timeout() -> None:
        """Does not return."""
        raise TimeoutError("the page did not come")

    said = execute("own_timeout", {}, own_timeout)
    assert said == "Error: own_timeout raised TimeoutError: the page did not come"

    def broken() -> None:
        """Does not return."""
        raise ToolFailure("the browser died")

    with pytest.raises(ToolFailure, match="the browser died"):
        execute("broken", {}, broken)


class Counted(ToolingEnv):
    def __init__(self, *, refuse: bool = False, slow: float = 0.0) -> None:
        self.closed, self.refuse, self.slow = 0, refuse, slow

    async def ainitialize(self) -> None:
        if self.refuse:
            raise ToolFailure("no browser")

    def list_tools(self) -> list[dict[str, Any]]:
        return []

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        await asyncio.sleep(60)
        return ""

    async def aclose(self) -> None:
        await asyncio.sleep(self.slow)
        self.closed += 1


@pytest.mark.parametrize("end", ["success", "error", "start", "cancelled", "timeout"])
def test_an_environment_is_closed_however_its_sample_ends(end: str) -> None:
    env = Counted(refuse=end == "start", slow=0.05)

    async def sample() -> None:
        async with opened(env):
            if end == "error":
                raise KeyError
            if end in ("cancelled", "timeout"):
                await env.aexecute("x", {})

    async def run() -> None:
        if end == "timeout":
            async with asyncio.timeout(0.01):
                await sample()
        task = asyncio.ensure_future(sample())
        await asyncio.sleep(0.01)
        if end == "cancelled":
            task.cancel()
        await task

    if end == "success":
        asyncio.run(run())
    else:
        expected = {"error": KeyError, "start": ToolFailure, "timeout": TimeoutError}
        with pytest.raises(expected.get(end, asyncio.CancelledError)):
            asyncio.run(run())
    assert env.closed == 1


CALL = ToolCall(name="add", arguments={"a": 1, "b": 2})
FIND = ToolCall(name="search", arguments={"query": "a } b", "limit": 2})
WRITTEN = {
    "hermes": 'I will.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "search", "arguments": {"query": "a } b", "limit": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\n"
    "a } b\n</parameter>\n<parameter=limit>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}};'
    '{"name": "search", "parameters": {"query": "a } b", "limit": 2}}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n'
    '```json\n{"query": "a } b", "limit": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><tool_call>search\n<arg_key>query</arg_key>\n"
    "<arg_value>a } b</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>",
}
WRITTEN["qwen"] = WRITTEN["hermes"]
TOOLS = LocalToolingEnv([add, search]).list_tools()


@pytest.mark.parametrize("format", FORMATS)
def test_calls_are_read_in_every_format(format: str) -> None:
    assert parse_calls(WRITTEN[format], format, TOOLS) == [CALL, FIND]
    assert parse_calls("no call { at all }", format, TOOLS) == []
    assert parse_calls(f"<think>{WRITTEN[format]}</think>\nDone.", format, TOOLS) == []


def test_other_ways_to_write_a_call() -> None:
    assert parse_calls('{"name": "add", "parameters": {"a": 1, "b": 2}}', "llama3") == [CALL]
    v31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    assert parse_calls(v31, "deepseek") == [CALL]
    as_text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>'
    assert parse_calls(as_text, "hermes") == [CALL]
    one_line = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse_calls(one_line, "glm")[0].arguments == {"a": 1}
    typed = "<tool_call>search<arg_key>query</arg_key><arg_value>12</arg_value></tool_call>"
    assert parse_calls(typed, "glm", TOOLS)[0].arguments == {"query": "12"}  # it is text
    with pytest.raises(ValueError, match="format 'xml': use one of"):
        parse_calls("", "xml")


@pytest.mark.parametrize(
    "format, text, error",
    [
        ("hermes", '<tool_call>{"name": "add", </tool_call>', "a tool call is no JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "must be an object with a name, not [1]"),
        ("hermes", '<tool_call>{"name": "a", "arguments": 3}</tool_call>', "no JSON object: 3"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "has no <function=...>: add(1)"),
        ("llama3", "<|python_tag|>add.call(a=1)", "a tool call is no JSON: add.call(a=1)"),
        ("deepseek", "<｜tool▁call▁begin｜>add", "a tool call has no"),
        ("glm", "<tool_call>{}</tool_call>", "a tool call has no name: {}"),
    ],
)
def test_what_is_no_call_is_an_error_to_tell(format: str, text: str, error: str) -> None:
    (call,) = parse_calls(text, format)
    assert error in call.error


def test_an_executor_answers_the_calls_in_a_text() -> None:
    executor = ToolExecutor(max_result=12)
    executor.register_tool(add)
    text = WRITTEN["hermes"] + "<tool_call>{</tool_call>"
    found = asyncio.run(executor.aexecute_tool(text))
    assert found[0]["content"] == "3"
    assert found[1]["content"] == "Error: there... (52 characters)"
    assert found[2] == {"role": "tool", "name": "", "content": found[2]["content"]}
    assert asyncio.run(executor.aexecute_tool("The sum is 3.")) == []
    assert executor.list_tools() == LocalToolingEnv([add]).list_tools()
    answer = ModelResponse(input_tokens=[1], output_tokens=[2, 3])
    with pytest.raises(ValueError, match="tokenizer"):
        asyncio.run(executor.aexecute_tool(answer))
    answer.completion, answer.raw_completion = "3", WRITTEN["hermes"]
    assert asyncio.run(executor.aexecute_tool(answer))[0]["content"] == "3"


@pytest.mark.parametrize("value, want", [("null", None), ("nullify", "nullify"), ("7", "7")])
def test_an_optional_text_may_be_absent(value: str, want: str | None) -> None:
    schema = {"name": "find", "parameters": {"properties": {}}}
    properties = {"where": {"type": "string", "nullable": True}}
    schema["parameters"] = {"type": "object", "properties": properties}
    text = f"<tool_call>\n<function=find>\n<parameter=where>\n{value}\n</parameter>\n"
    text += "</function>\n</tool_call>"
    (found,) = parse_calls(text, "qwen3_coder", [{"type": "function", "function": schema}])
    assert found.arguments == {"where": want}


def written(format: str, value: str) -> str:
    """A call of `f` with the argument a, whose value is this text."""
    body = f'{{"a": {value}}}'
    return {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>',
        "llama3": f'{{"name": "f", "parameters": {body}}}',
        "deepseek": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{body}<｜tool▁call▁end｜>",
        "glm": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "qwen3_coder": f"<tool_call><function=f><parameter=a>{value}</parameter></function>",
    }["hermes" if format == "qwen" else format]


NO_JSON = [
    "[" * 2000,
    '{"a":' * 2000,
    "[" * 300 + "]" * 300,
    "NaN",
    "-Infinity",
    "1e999",
    "[1, NaN]",
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", NO_JSON, ids=range(len(NO_JSON)))
def test_no_text_of_a_policy_ends_its_reader(format: str, value: str) -> None:
    (call,) = parse_calls(written(format, value), format)
    if format in ("glm", "qwen3_coder"):
        assert call == ToolCall(name="f", arguments={"a": value})
    else:
        assert call.error and not call.arguments
    (good,) = parse_calls(written(format, "[" * 50 + "]" * 50), format)
    assert good.name == "f" and not good.error


def recursive(fan_out: int) -> dict[str, Any]:
    refers = {"$ref": "#/any"}
    return {"properties": {"a": refers}, "any": {"anyOf": [refers] * fan_out}}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("glm", "<arg_key>" * 20_000),
        ("glm", "<arg_key></arg_key><arg_value>" * 20_000),
        ("glm", "<arg_key>a</arg_key>" * 20_000),
        ("glm", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("qwen3_coder", "<function=" * 20_000),
        ("qwen3_coder", "<function=add>" + "<parameter=" * 20_000),
        ("deepseek", "function<｜tool▁sep｜>add```json" + f"{' ' * 20_000}```" * 2 + "."),
    ],
)
def test_a_call_is_read_in_a_time_that_grows_with_its_length(format: str, text: str) -> None:
    begin = "<｜tool▁call▁begin｜>" if format == "deepseek" else "<tool_call>"
    tool = {"type": "function", "function": {"name": "add", "parameters": recursive(300)}}
    began = time.process_time()
    (call,) = parse_calls(f"{begin}{'add' * (format == 'glm')}{text}", format, [tool])
    assert time.process_time() - began < 5  # 0.1 in fact, and minutes if it grows with the square
    assert call.arguments == ({"a": 1} if text.endswith("</arg_value>") else {})


@pytest.mark.parametrize("format", FORMATS)
def test_half_a_character_of_a_policy_is_replaced(format: str) -> None:
    (call,) = parse_calls(written(format, '"x\\ud83d"'), format)
    assert call.arguments == {"a": "x\ufffd"}
    (call,) = parse_calls(written(format, '"x\\ud83d\\ude00"'), format)
    assert call.arguments == {"a": "x😀"}


TEXTS = [
    {"type": "string"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"enum": ["12345", None]},
    {"const": "12345"},
    {"$ref": "#/$defs/Zip"},
    {"oneOf": [{"type": "integer"}, {"allOf": [{"$ref": "#/$defs/Zip"}]}]},
]
OTHERS = [
    {"type": "integer"},
    {},
    True,
    None,
    {"$ref": "#/$defs/Loop"},
    {"anyOf": None},
    {"type": 3},
]


@pytest.mark.parametrize("format", ["glm", "qwen3_coder"])
def test_a_value_is_text_where_the_schema_admits_text(format: str) -> None:
    definitions = {"Zip": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}

    def read(schema: Any, value: str) -> Any:
        parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return parse_calls(written(format, value), format, [tool])[0].arguments["a"]

    assert [read(schema, "12345") for schema in TEXTS] == ["12345"] * len(TEXTS)
    assert [read(schema, "12345") for schema in OTHERS] == [12345] * len(OTHERS)
    assert [read(schema, "null") for schema in TEXTS[1:4]] == [None] * 3
    assert read(TEXTS[0], "null") == "null"
    for odd in (None, True, [], {"properties": None}, {"properties": [1]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
        assert parse_calls(written(format, "1"), format, [tool])[0].arguments == {"a": 1}
