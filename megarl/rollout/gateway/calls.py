"""Reads the calls of tools out of an answer's text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from megarl.utils.importing import load_object

# from an answer's text to what is no call, and (name, arguments as JSON text) of each call
CallParser = Callable[[str], tuple[str, list[tuple[str, str]]]]

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def call_parser(name: str) -> CallParser:
    """Returns the parser called `name`, or that of an import path. Raises ValueError."""
    if ":" in name:
        found: CallParser = load_object(name, what="rollout.gateway.tool_format")
        return found
    if name not in _PARSERS:
        raise ValueError(
            f"rollout.gateway.tool_format={name!r}: use pkg.module:function, or one of "
            + ", ".join(_PARSERS)
        )
    return _PARSERS[name]


def hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it.
    What is no such call stays text."""
    calls = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return match[0]
        calls.append((str(name), json.dumps(arguments, ensure_ascii=False)))
        return ""

    return _HERMES.sub(take, text).strip(), calls


_PARSERS: dict[str, CallParser] = {"hermes": hermes}
