"""Reads the calls of tools out of an answer's text, for clients that want them apart from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.rollout.tools.calls import FORMATS, parse_calls
from megarl.utils.importing import is_import_path, load_object

# (an answer's text, the tools of the request) -> what is no call, and (name, arguments as JSON
# text) of each call
Tools = Sequence[Mapping[str, Any]]
CallParser = Callable[[str, Tools], tuple[str, list[tuple[str, str]]]]

# what a format's first call begins with
_BEGINS = {"llama3": "<|python_tag|>", "deepseek": "<｜tool▁calls▁begin｜>"}


@dataclass(kw_only=True)
class GatewayConfig:
    """Configures the gateway by `rollout.gateway`: where it listens, and when a chat goes on from
    recorded tokens.

    host, port: where it listens; port 0 takes a free one.
    advertise: host name in the URLs that agents get; empty is `host`, or this machine's name where
        the gateway listens on every address.
    reuse: a chat that goes on after an answer of the policy keeps the policy's own tokens.
    rewards: whether agents may send rewards to the gateway; auto: where their workflow has no
        reward function.
    call_format: how the policy writes calls of tools: a name of tools.calls, or the path of a
        function (docs/agents.md).
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    advertise: str = ""
    reuse: bool = True
    rewards: Literal["auto", "always", "never"] = "auto"
    call_format: str = "hermes"

    def __post_init__(self) -> None:
        call_parser(self.call_format)


def call_parser(name: str) -> CallParser:
    """Returns the parser of a format of tools.calls, or that of an import path. Raises ValueError
    for another name."""
    if is_import_path(name):
        found: CallParser = load_object(name, what="call_format")
        return found
    if name not in FORMATS:
        raise ValueError(
            f"call_format={name!r}: use pkg.module:function, or one of " + ", ".join(FORMATS)
        )
    return partial(_by_format, name)


def _by_format(format: str, text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text before the first call, and the calls; all of the text where one of them
    cannot be read, so that the agent sees it."""
    calls = parse_calls(text, format, [dict(t) for t in tools])
    if not calls or any(call.error for call in calls):
        return text, []
    before, begins, _ = text.partition(_BEGINS.get(format, "<tool_call>"))
    found = [(c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in calls]
    return before.strip() if begins else "", found
