"""Finds the tool calls in what a model wrote, by the format that the model was trained to write.

To add a format: write a parser of text below and name it in FORMATS.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.api.chat_template import utf8

MAX_DEPTH = 100  # of lists and objects in a call


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """Names a tool and its arguments. `error` is what is wrong with the text of a call that could
    not be read, to be told to the model; "" for one that could."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


Schemas = dict[str, Any]  # tool name -> JSON schema of its parameters, as the tool has it


def parse_calls(text: str, format: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall]:
    """Returns the calls in `text`, an answer with its special tokens, in their order; none where it
    calls no tool. What stands before </think> is a thought and calls nothing.

    tools: as ToolingEnv.list_tools returns them; formats whose values have no types (glm,
    qwen3_coder) are read by their schemas. Raises ValueError for an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"tool call format {format!r}: use one of {sorted(FORMATS)}")
    schemas = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
    return list(FORMATS[format](text.rpartition("</think>")[2], schemas))


def _call_of(found: Any, *keys: str) -> ToolCall:
    """Returns the call that a JSON object {"name": ..., key: {...}} is, with the first of `keys`
    that it has."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error=f"a tool call must be an object with a name, not {_cut(found)}")
    arguments: Any = next((found[k] for k in keys if k in found), {})
    if isinstance(arguments, str):  # some models write the arguments as text of JSON
        return _call_of_text(found["name"], arguments)
    if not isinstance(arguments, dict):
        return ToolCall(
            name=found["name"], error=f"its arguments are no JSON object: {_cut(arguments)}"
        )
    return ToolCall(name=found["name"], arguments=arguments)


def _call_of_text(name: str, text: str) -> ToolCall:
    """Returns the call of a tool with its arguments as the text of a JSON object."""
    try:
        arguments = _loads(text) if text.strip() else {}
    except ValueError as e:
        return ToolCall(name=name, error=f"its arguments are no JSON ({e}): {_cut(text)}")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error=f"its arguments are no JSON object: {_cut(text)}")
    return ToolCall(name=name, arguments=arguments)


def _finite(number: str) -> float:
    """Returns a number as json reads it. Raises ValueError for NaN and for what is infinite."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number of JSON")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)


def _loads(text: str) -> Any:
    """Returns the value of a policy's JSON text. Raises ValueError for text that is not JSON, and
    for a value that nests deeper than MAX_DEPTH."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as e:
        raise ValueError("it nests too deep") from e
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
        if (depth := depth + 1) > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    if "\\ud" in text.lower():  # half a character may be escaped
        value = json.loads(utf8(json.dumps(value, ensure_ascii=False)))
    return value


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _between(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yields what stands between each `begin` and its `end`, and whether the end is there."""
    for part in text.split(begin)[1:]:
        inside, closed, _ = part.partition(end)
        yield inside, bool(closed)


def _hermes(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one a pair of tags."""
    for inside, _ in _between(text, "<tool_call>", "</tool_call>"):
        try:
            found = _loads(inside)
        except ValueError as e:
            yield ToolCall(error=f"a tool call is no JSON ({e}): {_cut(inside.strip())}")
            continue
        yield _call_of(found, "arguments", "parameters")


def _llama3(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Reads {"name": ..., "parameters": {...}}, several with ; between them, after <|python_tag|>
    or where the answer begins with one."""
    _, tag, rest = text.partition("<|python_tag|>")
    rest = (rest if tag else text).strip()
    if not tag and not re.match(r'\{\s*"name"', rest):
        return
    while rest.startswith("{"):
        try:
            _, end = _DECODER.raw_decode(rest)
            found = _loads(rest[:end])
        except (ValueError, RecursionError) as e:
            yield ToolCall(error=f"a tool call is no JSON ({e}): {_cut(rest)}")
            return
        yield _call_of(found, "parameters", "arguments")
        rest = rest[end:].lstrip(" ;\n")
    if tag and rest and not rest.startswith("<|"):  # <|eom_id|> and the like may follow
        yield ToolCall(error=f"a tool call is no JSON: {_cut(rest)}")


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_FENCED = re.compile(r"^(\S+)\s*```json(.*)$", re.DOTALL)


def _deepseek(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Reads DeepSeek's calls: V3 and R1 write type<sep>name and a ```json block, V3.1 and later
    name<sep>{...}."""
    begin, sep, end = _DEEPSEEK
    for inside, _ in _between(text, begin, end):
        head, found, body = inside.partition(sep)
        fenced = _FENCED.match(body.strip())
        if not found:
            yield ToolCall(error=f"a tool call has no {sep}: {_cut(inside)}")
        elif fenced:
            yield _call_of_text(fenced[1], fenced[2].rstrip().removesuffix("```"))
        else:
            yield _call_of_text(head.strip(), body)


# A match consumes what it has read, also where a tag is missing: the next begins after it.
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(?>(.*?)(?:</arg_key>|\Z))(?:\s*<arg_value>(.*?)(</arg_value>|\Z))?", re.DOTALL
)


def _glm(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Reads <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ...</tool_call>."""
    for inside, _ in _between(text, "<tool_call>", "</tool_call>"):
        name = inside.partition("<arg_key>")[0].strip()
        if not name or any(c in name for c in "<{\n"):
            yield ToolCall(error=f"a tool call has no name: {_cut(inside.strip())}")
            continue
        pairs = [(key, value) for key, value, end in _GLM_ARGUMENT.findall(inside) if end]
        yield ToolCall(name=name, arguments=_typed(schemas.get(name), pairs))


_QWEN_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_QWEN_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)


def _qwen3_coder(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    """Reads <tool_call><function=name><parameter=k>v</parameter>...</function></tool_call>."""
    for inside, _ in _between(text, "<tool_call>", "</tool_call>"):
        found = _QWEN_FUNCTION.search(inside)
        if found is None:
            yield ToolCall(error=f"a tool call has no <function=...>: {_cut(inside.strip())}")
            continue
        name = found[1].strip()
        pairs = _QWEN_PARAMETER.findall(found[2])
        yield ToolCall(name=name, arguments=_typed(schemas.get(name), pairs))


def _typed(schema: Any, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns arguments whose values came as text: text where the schema admits text, else what the
    text is as JSON, else the text."""
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        key = key.strip()
        arguments[key] = value
        takes = _kinds(_at(schema, "properties", key), schema)
        absent = "null" in takes and value.strip() == "null"
        if "string" not in takes or absent:
            try:
                arguments[key] = _loads(value)
            except ValueError:
                continue  # it stays text
    return arguments


def _at(value: Any, *keys: str) -> Any:
    """Returns what stands in `value` at a path of keys; None if nothing does."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _kinds(schema: Any, root: Any) -> set[str]:
    """Returns the types that a JSON schema admits by `type`, its values, its alternatives, or a
    $ref into `root`. Tools send schemas of any form; what is not one admits nothing by name."""
    kinds, seen, parts = set[str](), set[int](), [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        listed = {k: v for k, v in part.items() if isinstance(v, list)}
        values = [*listed.get("enum", []), part.get("const", 0)]
        types = (part.get("type"), *listed.get("type", []))
        kinds |= {k for k in types if isinstance(k, str)}
        kinds |= {"string" for v in values if isinstance(v, str)}
        if part.get("nullable") or None in values:
            kinds.add("null")
        parts += [p for key in ("anyOf", "oneOf", "allOf") for p in listed.get(key, [])]
        if isinstance(ref := part.get("$ref"), str):
            parts.append(_at(root, *ref.removeprefix("#/").split("/")))
    return kinds


FORMATS: dict[str, Callable[[str, Schemas], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "qwen": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3": _llama3,
    "deepseek": _deepseek,
    "glm": _glm,
}
